"""What the tests of the SQL share: a queue to look at, jobs in every shape, threads that start together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from aqd import claims, store
from aqd.job import validate
from tests.fixtures.processes import wait_until

HELD = store.Lease(extended=True, cancelled=False)


class Queue:
    """The tables as a test sees them: filled and looked at by plain SQL."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def add(self, count: int = 1, type: str = "noop", **options: Any) -> list[int]:
        """Submit equal jobs; options as of ``aqd.job.validate``."""
        return [store.enqueue(self.conn, validate(type, {}, **options)).id for _ in range(count)]

    def fill(
        self, count: int, type: str = "noop", queue: str = "default", priority: int = 0, **sql: str
    ) -> None:
        """Many jobs by one INSERT; ``sql`` gives expressions for further columns, with ``n`` from 1 on."""
        columns = {"run_at": "now() - interval '1 hour' + n * interval '1 microsecond'", **sql}
        self.conn.execute(
            f"insert into aqd.jobs (type, queue, priority, {', '.join(columns)}) "
            f"select %s, %s, %s, {', '.join(columns.values())} from generate_series(1, {count}) as n",
            [type, queue, priority],
        )

    def deadlocks(self, *, sessions: int) -> int:
        """Deadlocks in this database, once those who may have had them have ended and told: so many sessions stay."""
        left = "select count(*) from pg_stat_activity where application_name = 'test' and datname = current_database()"
        wait_until(lambda: self.value(left) <= sessions)
        return int(self.value("select deadlocks from pg_stat_database where datname = current_database()"))

    def row(self, id: int) -> dict[str, Any]:
        """The live row."""
        cursor = self.conn.execute("select to_jsonb(j)::text from aqd.jobs j where id = %s", [id])
        found = cursor.fetchone()
        assert found is not None, f"job {id} is not in aqd.jobs"
        return dict(json.loads(found[0]))

    def state(self, id: int) -> str:
        """The state, live or finished."""
        found = self.conn.execute("select state from aqd.all_jobs where id = %s", [id]).fetchall()
        assert len(found) == 1, f"job {id} is in {len(found)} places"
        return str(found[0][0])

    def value(self, query: str, *params: Any) -> Any:
        """The first column of the first row."""
        found = self.conn.execute(query, params).fetchone()
        return None if found is None else found[0]

    def expire(self, id: int) -> None:
        """Let the lease have ended a second ago."""
        self.conn.execute(
            "update aqd.jobs set lease_expires_at = now() - interval '1 second' where id = %s", [id]
        )


def book(*types: str, node_id: str = "node-1", lease_s: float = 30.0, **options: Any) -> claims.ClaimBook:
    """A claim book that knows ``types`` (``noop`` if none are given)."""
    made = claims.ClaimBook(node_id, lease_s, **options)
    made.set_types(frozenset(types or ("noop",)))
    return made


def completion(job: claims.ClaimedJob, result: str | None = "null", age_s: float = 0.0) -> store.Completion:
    return store.Completion(job.id, job.token, result, age_s, 0.01, 0.01, 1000)


def failure(
    job: claims.ClaimedJob, retry_in_s: float | None = None, kind: str = "failed", error: str = "boom"
) -> store.Failure:
    return store.Failure(job.id, job.token, kind, error, "Traceback …", retry_in_s, 0.0, 0.01, 0.01, 1000)


def released(job: claims.ClaimedJob, *, interrupted: bool = False) -> store.Release:
    return store.Release(job.id, job.token, interrupted, "drain", 0.0)


def everything(queue: Queue) -> list[Any]:
    """All rows of all tables that say something about jobs."""
    tables = ("jobs", "job_history", "job_attempts", "failed_jobs")
    look = [f"select to_jsonb(t)::text from aqd.{table} t order by 1" for table in tables]
    return [queue.conn.execute(query).fetchall() for query in look]


def in_threads(*tasks: Callable[[], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run the tasks at the same time, started together; their results, or the first error."""
    barrier = threading.Barrier(len(tasks))
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []

    def body(place: int, task: Callable[[], Any]) -> None:
        try:
            barrier.wait(timeout_s)
            results[place] = task()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=body, args=(place, task), daemon=True) for place, task in enumerate(tasks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"a task is still running after {timeout_s:g} s"
    if errors:
        raise errors[0]
    return results
