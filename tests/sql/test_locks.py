"""F24: everything that changes many rows, at once, on the same rows: no deadlock, no state lost."""

from __future__ import annotations

import random
import threading
import time

import psycopg
import pytest

from aqd import database, store
from aqd.errors import ConflictError
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads, released

MIX_S = 4.0
ROWS = 600


def deadlocks(queue: Queue) -> int:
    """Deadlocks in this database, once the sessions that may have had them have ended and told."""
    wait_until(
        lambda: queue.value("select count(*) from pg_stat_activity where application_name = 'test'") <= 2
    )
    return int(queue.value("select deadlocks from pg_stat_database where datname = current_database()"))


def test_mixed_changes_do_not_deadlock(connect: Connect, queue: Queue) -> None:
    """Claim, renew, complete, fail, release, reconcile, rescue and retry, in shuffled orders, on few rows."""
    queue.fill(ROWS)
    stop = time.monotonic() + MIX_S
    conflicts: list[str] = []

    def node(number: int) -> int:
        rng = random.Random(number)
        with connect() as conn:
            return node_rounds(number, rng, conn)

    def node_rounds(number: int, rng: random.Random, conn: database.Connection) -> int:
        mine = book(node_id=f"node-{number}", sweep_s=0.0, lease_s=0.05)
        rounds = 0
        while time.monotonic() < stop:
            mine.lower("default", 0)
            jobs = mine.claim(conn, 150)
            rng.shuffle(jobs)
            pairs = [(job.id, job.token) for job in jobs]
            store.renew(conn, pairs, rng.choice([0.01, 5.0]))
            rng.shuffle(jobs)
            third = len(jobs) // 3
            store.record_failed(conn, [failure(job, rng.choice([0.0, None])) for job in jobs[:third]])
            store.release(conn, [released(job, interrupted=True) for job in jobs[third : 2 * third]], 10**6)
            # The rest is left for rescue and reconciliation; a few are completed and come back as new.
            done = store.record_completed(conn, [completion(job) for job in jobs[2 * third :][:20]])
            if done:
                store.reconcile(conn, f"node-{number}", [], rng.choice([0.0, 60.0]))
                Queue(conn).fill(len(done))
            rounds += 1
        return rounds

    def rescuer() -> int:
        with connect() as conn:
            return rescuer_rounds(conn)

    def rescuer_rounds(conn: database.Connection) -> int:
        rounds = 0
        while time.monotonic() < stop:
            store.rescue(conn, 200, 0.0, 0.0, 10**6)
            for (id,) in conn.execute("select id from aqd.jobs where state = 'FAILED' limit 20").fetchall():
                with_conflict(conn, id)
            rounds += 1
        return rounds

    def with_conflict(conn: database.Connection, id: int) -> None:
        try:
            store.retry_job(conn, id)
        except ConflictError:
            conflicts.append("retried by the other one")

    rounds = in_threads(*[lambda n=n: node(n) for n in range(3)], *[rescuer] * 2)
    assert min(rounds) > 2
    assert deadlocks(queue) == 0
    assert queue.value("select count(*) from aqd.jobs") == ROWS, "each completed job was replaced by one"


def test_injected_conflict_is_retried(connect: Connect, queue: Queue) -> None:
    """A real deadlock, made on purpose: the victim's statement is repeated and its change is not lost."""
    conn, other = connect(), connect(dispatcher=False)
    queue.add(2)
    one, two = book().claim(conn, 2)
    conn.execute("set deadlock_timeout = '10ms'")
    other.execute("set deadlock_timeout = '1h'")  # so that it is never the victim
    other.execute("begin")
    other.execute("select from aqd.jobs where id = %s for update", [two.id])
    done = threading.Event()

    def writer() -> None:
        # Waits for the second row while holding the first one.
        assert store.record_completed(conn, [completion(one), completion(two)]) == {one.id, two.id}
        done.set()

    thread = threading.Thread(target=writer, daemon=True)
    thread.start()
    pid = conn.info.backend_pid
    while not queue.value("select wait_event_type = 'Lock' from pg_stat_activity where pid = %s", pid):
        assert not done.is_set()
    other.execute("select from aqd.jobs where id = %s for update", [one.id])  # closes the circle
    other.execute("commit")
    assert done.wait(10)
    conn.close()
    wait_until(lambda: deadlocks(queue) >= 1)
    assert queue.value("select count(*) from aqd.job_history") == 2


def test_serialisation_conflict_in_a_transaction_is_the_callers(connect: Connect, queue: Queue) -> None:
    """Repeating one statement of several would lose the others."""
    conn = connect()
    queue.add()
    (job,) = book().claim(conn, 1)
    with pytest.raises(psycopg.errors.SerializationFailure), conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        conn.execute("select 1 from aqd.jobs")
        queue.conn.execute("update aqd.jobs set priority = 1")
        store.renew(conn, [(job.id, job.token)], 30.0)
    assert store.renew(conn, [(job.id, job.token)], 30.0) == {job.id}
