"""Changing jobs by hand beside others who want the same rows: no deadlock, no state lost (F24, F38)."""

from __future__ import annotations

import random
import threading

import pytest

from aqd import store
from aqd.job import JobRequest, validate
from aqd.store import Action, JobFilter, change
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads

REASON = "known bug, see 4711"


def test_many_beside_a_running_node_do_not_deadlock(connect: Connect, queue: Queue) -> None:
    """Claim, fail, complete and rescue beside retry, cancel, delete and discard of all, in several sessions."""
    queue.fill(300)
    made = 300
    done = threading.Event()
    rounds = {"node": 0, "by hand": 0}

    def node(number: int) -> int:
        added = 0
        with connect() as conn:
            mine = book(node_id=f"node-{number}", sweep_s=0.0, lease_s=0.05)
            while not done.is_set():
                mine.lower("default", 0)
                jobs = mine.claim(conn, 60)
                store.record_failed(conn, [failure(job) for job in jobs[:30]])
                store.record_completed(conn, [completion(job) for job in reversed(jobs[30:50])])
                store.rescue(conn, 100, 0.0, 0.0, 10**6)
                Queue(conn).fill(20)
                added += 20
                rounds["node"] += 1
        return added

    def by_hand(number: int) -> int:
        actions = list(Action)
        with connect(dispatcher=False) as conn:
            for turn in range(24):
                action = actions[(turn + number) % len(actions)]
                everyone = [row[0] for row in conn.execute("select id from aqd.all_jobs").fetchall()]
                which = JobFilter(type="noop") if turn % 2 else everyone[:: -1 if turn % 4 else 1][:150]
                store.change_jobs(conn, action, which, reason=REASON)
                rounds["by hand"] += 1
        return 0

    def all_by_hand() -> int:
        try:
            return sum(in_threads(*[lambda n=n: by_hand(n) for n in range(3)], timeout_s=120))
        finally:
            done.set()

    made += sum(in_threads(lambda: node(1), lambda: node(2), all_by_hand, timeout_s=150))
    assert min(rounds.values()) > 2
    assert queue.deadlocks(sessions=2) == 0
    assert queue.value("select count(*) from aqd.all_jobs") <= made
    twice = "select count(*) - count(distinct id) from aqd.all_jobs"
    assert queue.value(twice) == 0
    left_open = """select count(*) from aqd.failed_jobs f where f.resolved_at is null
                   and not exists (select from aqd.jobs j where j.id = f.job_id)"""
    assert queue.value(left_open) == 0
    left_over = """select count(*) from aqd.job_attempts a
                   where not exists (select from aqd.all_jobs j where j.id = a.job_id)"""
    assert queue.value(left_over) == 0


@pytest.mark.parametrize("action", list(Action))
def test_those_who_want_the_same_do_not_deadlock(
    connect: Connect, queue: Queue, action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In id order, whatever the order in which they name them. A deadlock would be repeated and not be seen, but it is
    counted."""
    columns = {"state": "'FAILED'"} if action in (Action.RETRY, Action.DISCARD) else {}
    conns = [connect(dispatcher=False) for _ in range(4)]
    monkeypatch.setattr(change, "BATCH", 1000)
    for _ in range(6):
        queue.conn.execute("delete from aqd.jobs")
        queue.fill(1000, **columns)
        ids = [row[0] for row in queue.conn.execute("select id from aqd.jobs order by random()")]
        counts = in_threads(
            *[
                lambda c=c, ids=ids[::way]: store.change_jobs(c, action, ids, reason=REASON).changed
                for c, way in zip(conns, (1, -1, 1, -1), strict=True)
            ]
        )
        assert sum(counts) == 1000, "each job is changed once"
    for conn in conns:
        conn.close()
    assert queue.deadlocks(sessions=1) == 0


def test_batches_that_replace_do_not_deadlock_with_changes_of_many(connect: Connect, queue: Queue) -> None:
    """The keys' order is not that of the ids. Several statements in the application's transaction, too."""
    keys = [f"k{n:03}" for n in range(120)]
    shuffled = random.Random(1).sample(keys, len(keys))

    def requests(order: list[str]) -> list[JobRequest]:
        return [
            validate("noop", {"n": random.random()}, delay_s=3600, idempotency_key=key, on_conflict="replace")
            for key in order
        ]

    store.enqueue_many(queue.conn, requests(keys))
    for key in shuffled:  # anew, so that the ids have another order
        queue.conn.execute(
            "delete from aqd.jobs j using aqd.idempotency_keys k where j.id = k.job_id and k.key = %s", [key]
        )
        store.enqueue(queue.conn, requests([key])[0])

    def application(order: list[str]) -> None:
        with connect(dispatcher=False) as conn:
            for turn in range(20):
                with conn.transaction():
                    store.enqueue_many(conn, requests(order))
                store.enqueue_many(conn, requests(order[turn:]))

    def by_hand() -> None:
        with connect(dispatcher=False) as conn:
            for _ in range(40):
                ids = [row[0] for row in conn.execute("select id from aqd.jobs").fetchall()]
                store.change_jobs(conn, Action.DELETE, ids[::7])

    def locked() -> None:
        with connect(dispatcher=False) as conn:
            for _ in range(60):
                conn.execute("select id from aqd.jobs order by id for no key update")

    in_threads(lambda: application(keys), lambda: application(keys[::-1]), by_hand, locked, timeout_s=120)
    assert queue.value("select count(*) from aqd.idempotency_keys where expires_at < now()") == 0
    assert queue.deadlocks(sessions=1) == 0
