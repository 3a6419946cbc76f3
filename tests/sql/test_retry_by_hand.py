"""F38: retries by hand, many at a time, and of what has not failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aqd import database, store
from aqd.errors import ConflictError, NotFoundError
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, everything, failure, in_threads


def a_failed_job(conn: database.Connection, queue: Queue) -> int:
    (id,) = queue.add()
    (job,) = book().claim(conn, 1)
    assert store.record_failed(conn, [failure(job)]) == {id: "FAILED"}
    return id


def queued(conn: database.Connection, queue: Queue) -> int:
    return queue.add()[0]


def scheduled(conn: database.Connection, queue: Queue) -> int:
    return queue.add(delay_s=60)[0]


def running(conn: database.Connection, queue: Queue) -> int:
    queue.add()
    return book().claim(conn, 1)[0].id


def completed(conn: database.Connection, queue: Queue) -> int:
    queue.add()
    (job,) = book().claim(conn, 1)
    store.record_completed(conn, [completion(job)])
    return job.id


def cancelled(conn: database.Connection, queue: Queue) -> int:
    (id,) = queue.add()
    store.cancel_job(conn, id)
    return id


def test_twenty_retries_are_one(connect: Connect, queue: Queue) -> None:
    """F38: one transition, the others are told of a conflict."""
    id = a_failed_job(connect(), queue)

    def retry(conn: database.Connection) -> str:
        try:
            return store.retry_job(conn, id).state
        except ConflictError as error:
            return str(error)

    conns = [connect(dispatcher=False) for _ in range(20)]
    answers = in_threads(*[lambda c=c: retry(c) for c in conns])
    assert sorted(answers).count("QUEUED") == 1
    assert answers.count(f"job {id} is QUEUED; only a FAILED job can be retried") == 19
    row = queue.row(id)
    assert (row["retries"], row["attempt"], row["last_error"]) == (1, 0, None)
    assert queue.value("select count(*) from aqd.jobs") == 1


@pytest.mark.parametrize("case", [queued, scheduled, running, completed, cancelled])
def test_retry_of_what_has_not_failed(
    conn: database.Connection, queue: Queue, case: Callable[[database.Connection, Queue], int]
) -> None:
    id = case(conn, queue)
    before = everything(queue)
    with pytest.raises(ConflictError, match="only a FAILED job"):
        store.retry_job(conn, id)
    assert everything(queue) == before


def test_retry_of_what_is_being_pruned(connect: Connect, queue: Queue) -> None:
    """The pruning transaction holds the row: the retry waits, and finds nothing."""
    keeper, caller = connect(), connect()
    id = a_failed_job(caller, queue)
    queue.conn.execute("update aqd.failed_jobs set failed_at = now() - interval '90 days'")
    answers: list[object] = []

    def retry() -> None:
        try:
            answers.append(store.retry_job(caller, id))
        except NotFoundError as error:
            answers.append(str(error))

    with keeper.transaction():
        database.run(keeper, "prune_failed", failed_days=30, limit=10)
        thread = threading.Thread(target=retry, daemon=True)
        thread.start()
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(lambda: queue.value(waits, caller.info.backend_pid))
    thread.join(10)
    assert answers == [f"there is no job {id}"]


def test_a_retry_forgets_an_old_request_to_end(conn: database.Connection, queue: Queue) -> None:
    """No statement leaves one on a FAILED row; a restored dump or a switched-off trigger might."""
    id = a_failed_job(conn, queue)
    queue.conn.execute("alter table aqd.jobs disable trigger jobs_cancelled")
    queue.conn.execute("update aqd.jobs set cancel_requested_at = now()")
    queue.conn.execute("alter table aqd.jobs enable trigger jobs_cancelled")
    store.retry_job(conn, id)
    assert queue.row(id)["cancel_requested_at"] is None
