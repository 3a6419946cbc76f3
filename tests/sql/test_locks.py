"""F24: everything that changes many rows, at once, on the same rows: no deadlock, no state lost."""

from __future__ import annotations

import contextlib
import random
import time

import psycopg
import pytest

from aqd import claims, database, store
from aqd.errors import ConflictError, NotFoundError
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads, released

MIX_S = 4.0
ROWS = 600


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
    assert queue.deadlocks(sessions=2) == 0
    assert queue.value("select count(*) from aqd.jobs") == ROWS, "each completed job was replaced by one"


Jobs = list[claims.ClaimedJob]


def renew(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    store.renew(conn, [(job.id, job.token) for job in jobs], rng.choice([0.01, 5.0]))


def progress(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    store.store_progress(conn, [store.Progress(job.id, job.token, 50.0, "half") for job in jobs])


def complete(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    Queue(conn).fill(len(store.record_completed(conn, [completion(job) for job in jobs[:5]])) or 1)


def fail(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    store.record_failed(conn, [failure(job, rng.choice([0.0, None])) for job in jobs])


def release(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    store.release(conn, [released(job, interrupted=rng.random() < 0.5) for job in jobs], 3)


def rescue(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    store.rescue(conn, 200, 0.0, 0.0, 10**6)


def cancel(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    """Several in one transaction, in the order of ids as everybody: the caller's own duty."""
    with conn.transaction():
        for id in sorted({job.id for job in jobs[:5]}):
            store.cancel_job(conn, id)


def retry(conn: database.Connection, jobs: Jobs, rng: random.Random) -> None:
    for (id,) in conn.execute("select id from aqd.jobs where state = 'FAILED' limit 10").fetchall():
        with contextlib.suppress(ConflictError, NotFoundError):
            store.retry_job(conn, id)


ACTS = (renew, progress, complete, fail, release, rescue, cancel, retry)


def test_everybody_wants_the_same_rows(connect: Connect, queue: Queue) -> None:
    """Four sessions act for the same owner and against it, on the same tokens in orders of their own: renew,
    progress, complete, fail, release, rescue, cancel, retry. No deadlock, and every job in exactly one place."""
    added = 60
    queue.fill(added)
    stop = time.monotonic() + MIX_S
    owned: list[list[claims.ClaimedJob]] = [[]]

    def node(number: int) -> dict[str, int]:
        rng = random.Random(number)
        done: dict[str, int] = {}
        with connect() as conn:
            mine = book(node_id="node", sweep_s=0.0, lease_s=0.03)
            while time.monotonic() < stop:
                mine.lower("default", 0)
                if fresh := mine.claim(conn, 20):
                    owned[0] = (owned[0] + fresh)[-80:]
                jobs = rng.sample(owned[0], len(owned[0]))[:40]
                act = rng.choice(ACTS)
                act(conn, jobs, rng)
                done[act.__name__] = done.get(act.__name__, 0) + 1
        return done

    counts = in_threads(*[lambda n=n: node(n) for n in range(4)])
    assert queue.deadlocks(sessions=2) == 0
    for act in ACTS:
        assert sum(each.get(act.__name__, 0) for each in counts) > 0
    made = queue.value("select last_value from aqd.jobs_id_seq")
    assert queue.value("select count(*) from aqd.all_jobs") == made
    assert queue.value("select count(distinct id) from aqd.all_jobs") == made
    assert (
        queue.value(
            "select count(*) from aqd.jobs where cancel_requested_at is not null and state <> 'PROCESSING'"
        )
        == 0
    )
    left_open = """select count(*) from aqd.failed_jobs f where f.resolved_at is null
                   and not exists (select from aqd.jobs j where j.id = f.job_id)"""
    assert queue.value(left_open) == 0


@pytest.mark.parametrize("sqlstate", ["40P01", "40001"])
def test_injected_conflict_is_retried(conn: database.Connection, queue: Queue, sqlstate: str) -> None:
    """The victim's statement is repeated, and no change of state is lost."""
    queue.add(2)
    one, two = book().claim(conn, 2)
    inject(queue, sqlstate, times=3)
    assert store.record_completed(conn, [completion(one)]) == {one.id}
    assert store.record_failed(conn, [failure(two)]) == {two.id: "FAILED"}
    assert queue.value("select last_value from tries") == 5
    assert queue.state(one.id) == "COMPLETED"


def test_conflict_that_does_not_end_is_reported(conn: database.Connection, queue: Queue) -> None:
    queue.add()
    (job,) = book().claim(conn, 1)
    inject(queue, "40P01", times=1000)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        store.record_completed(conn, [completion(job)])
    assert queue.row(job.id)["state"] == "PROCESSING"


def test_conflict_in_a_transaction_is_the_callers(conn: database.Connection, queue: Queue) -> None:
    """Repeating one statement of several would lose the others."""
    queue.add()
    (job,) = book().claim(conn, 1)
    inject(queue, "40001", times=1)
    with pytest.raises(psycopg.errors.SerializationFailure), conn.transaction():
        store.record_completed(conn, [completion(job)])
    assert store.record_completed(conn, [completion(job)]) == {job.id}


def inject(queue: Queue, sqlstate: str, times: int) -> None:
    """Let the first ``times`` changes of aqd.jobs end as PostgreSQL ends the victim of a conflict."""
    queue.conn.execute("create sequence tries")
    queue.conn.execute(
        f"""create function conflict() returns trigger language plpgsql as $$
            begin
                if nextval('tries') <= {times} then
                    raise exception 'injected' using errcode = '{sqlstate}';
                end if;
                return null;
            end $$"""
    )
    queue.conn.execute(
        "create trigger conflict after update or delete on aqd.jobs for each statement execute function conflict()"
    )
