"""Limits of queues over all claimers, and aging: never more than allowed, never less than could be, nobody starves."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from aqd import claims, database, store
from aqd.claims import Wish
from aqd.lanes import AGED_SHARE
from aqd.shares import Shares
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, in_threads, released


def limit(queue: Queue, name: str, most: int | None) -> None:
    queue.conn.execute(
        "insert into aqd.queues (queue, max_running) values (%s, %s) "
        "on conflict (queue) do update set max_running = excluded.max_running",
        [name, most],
    )


def running(queue: Queue, name: str) -> int:
    return int(queue.value(f"select count(*) from aqd.jobs where state = 'PROCESSING' and queue = '{name}'"))


def finish(conn: database.Connection, jobs: list[claims.ClaimedJob]) -> None:
    store.record_completed(conn, [completion(job) for job in jobs])


def test_a_limited_queue_gives_no_more_than_its_limit(conn: database.Connection, queue: Queue) -> None:
    queue.fill(20, queue="narrow")
    queue.fill(20, queue="narrow", priority=5)
    queue.fill(20, queue="wide")
    limit(queue, "narrow", 3)
    mine = book()
    first = mine.claim(conn, 10)
    assert [job.queue for job in first].count("narrow") == 3
    assert {job.priority for job in first if job.queue == "narrow"} == {5}
    assert len(first) == 10  # the rest from the other queue
    assert mine.held_back
    assert [job.queue for job in mine.claim(conn, 10)] == ["wide"] * 10
    finish(conn, [job for job in first if job.queue == "narrow"][:2])
    mine.made_room()
    assert [job.queue for job in mine.claim(conn, 10)].count("narrow") == 2


def test_a_full_queue_hides_nothing(conn: database.Connection, queue: Queue) -> None:
    """What was not looked at because the queue was full is found by the next claim, not by the next sweep."""
    queue.fill(3, queue="narrow")
    limit(queue, "narrow", 1)
    mine = book(sweep_s=1e6)
    seen = []
    for _ in range(3):
        jobs = mine.claim(conn, 5)
        assert len(jobs) == 1
        assert mine.claim(conn, 5) == []
        finish(conn, jobs)
        mine.made_room()
        seen += [job.id for job in jobs]
    assert seen == sorted(seen)


def test_many_claimers_never_exceed_the_limit_and_reach_it(connect: Connect, queue: Queue) -> None:
    """Six nodes; each counts all that run, as it goes, by its own connection."""
    queue.fill(400, queue="narrow")
    limit(queue, "narrow", 7)
    most = []
    left = threading.Barrier(6)

    def node(number: int) -> int:
        conn, mine, done = connect(), book(node_id=f"node-{number}"), 0
        left.wait(30)
        while True:
            jobs = mine.claim(conn, 3)
            count = conn.execute("select count(*) from aqd.jobs where state = 'PROCESSING'").fetchone()
            assert count is not None
            most.append(count[0])
            finish(conn, jobs)
            done += len(jobs)
            if not jobs and not conn.execute("select 1 from aqd.jobs limit 1").fetchone():
                return done

    assert sum(in_threads(*[lambda number=number: node(number) for number in range(6)])) == 400
    assert max(most) == 7


def test_a_limit_that_changes_is_seen_by_the_next_sweep(conn: database.Connection, queue: Queue) -> None:
    queue.fill(30, queue="q")
    limit(queue, "q", 2)
    mine = book(sweep_s=0)
    assert len(mine.claim(conn, 10)) == 2
    limit(queue, "q", 5)
    assert len(mine.claim(conn, 10)) == 3
    limit(queue, "q", None)
    assert len(mine.claim(conn, 10)) == 10
    limit(queue, "q", 1)
    assert mine.claim(conn, 10) == []  # the 15 that run are not touched
    assert running(queue, "q") == 15


def test_a_claim_waits_for_another_ones_count(connect: Connect, queue: Queue) -> None:
    """Counted before the wait for the queue's row, the second claim would not see what the first one took."""
    queue.fill(10, queue="q")
    limit(queue, "q", 4)
    first, second = connect(), connect()
    mine, other = book(node_id="a"), book(node_id="b")
    with first.transaction():
        assert len(mine.claim(first, 3)) == 3
        waiting: list[claims.ClaimedJob] = []
        thread = threading.Thread(target=lambda: waiting.extend(other.claim(second, 3)))
        thread.start()
        blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and pid = %s"
        while not queue.conn.execute(blocked, [second.info.backend_pid]).fetchone()[0]:
            assert thread.is_alive()
    thread.join(30)
    # On a slow machine it may have waited for longer than it does: then it takes nothing, and asks again.
    assert len(waiting) <= 1
    assert len(waiting + book(node_id="c").claim(second, 3)) == 1


def test_a_queue_whose_row_is_held_has_no_room(connect: Connect, queue: Queue) -> None:
    """Somebody's open transaction does not hold up what is claimed of other queues, and leaves no setting behind."""
    queue.fill(10, queue="q")
    queue.fill(5, queue="other")
    limit(queue, "q", 4)
    holder, conn = connect(), connect()
    conn.execute("set lock_timeout = '59s'")
    with holder.transaction():
        holder.execute("update aqd.queues set max_running = 5 where queue = 'q'")
        assert [job.queue for job in book().claim(conn, 10)] == ["other"] * 5
        with conn.transaction():
            assert conn.execute("select aqd.queue_room('q', 3)").fetchone() == (0,)
            assert conn.execute("show lock_timeout").fetchone() == ("59s",)
    assert [job.queue for job in book(node_id="b").claim(conn, 10)] == ["q"] * 5


@pytest.mark.parametrize("per_claim", [1, 4, 25])
def test_a_stream_of_urgent_jobs_does_not_starve_the_rest(
    conn: database.Connection, queue: Queue, per_claim: int
) -> None:
    """There is always an urgent job, yet of eleven jobs one is of the lane that waits."""
    queue.fill(2, queue="old", run_at="now() - interval '2 hours' + n * interval '1 second'")
    queue.fill(2, queue="older", priority=-5, run_at="now() - interval '3 hours' + n * interval '1 second'")
    mine = book(aging_s=60.0, sweep_s=0)
    seen: list[tuple[str, int]] = []
    while len(seen) < 110:
        queue.fill(per_claim, queue="urgent", priority=50, run_at="now()")
        seen += [(job.queue, job.priority) for job in mine.claim(conn, per_claim)]
    waited = [place for place, (name, _) in enumerate(seen) if name != "urgent"]
    assert len(waited) == 4
    assert seen[waited[0]][0] == "older"
    for number, place in enumerate(waited, 1):
        urgent = place - (number - 1)  # before it
        assert AGED_SHARE * number <= urgent <= AGED_SHARE * number + 2 * per_claim, waited


def test_what_has_not_waited_long_waits(conn: database.Connection, queue: Queue) -> None:
    queue.fill(5, queue="young", run_at="now() - interval '50 seconds'")
    queue.fill(60, queue="urgent", priority=50)
    mine = book(aging_s=60.0, sweep_s=0)
    assert {job.queue for _ in range(5) for job in mine.claim(conn, 10)} == {"urgent"}


def test_aging_can_be_switched_off(conn: database.Connection, queue: Queue) -> None:
    queue.fill(5, queue="old", run_at="now() - interval '2 hours'")
    queue.fill(60, queue="urgent", priority=50)
    mine = book(aging_s=0.0, sweep_s=0)
    assert {job.queue for _ in range(5) for job in mine.claim(conn, 10)} == {"urgent"}


def test_a_lane_that_cannot_be_served_does_not_use_up_the_turns(
    conn: database.Connection, queue: Queue
) -> None:
    """Its first job is of a type that nobody knows here; the next one's turn comes all the same."""
    queue.fill(1, type="unknown", queue="oldest", run_at="now() - interval '3 hours'")
    queue.fill(1, queue="old", run_at="now() - interval '2 hours'")
    queue.fill(60, queue="urgent", priority=50)
    mine = book(aging_s=60.0, sweep_s=0)
    assert "old" in {job.queue for _ in range(5) for job in mine.claim(conn, 10)}


def test_an_aged_lane_of_a_limited_queue_keeps_the_limit(conn: database.Connection, queue: Queue) -> None:
    queue.fill(9, queue="old", run_at="now() - interval '2 hours'")
    queue.fill(100, queue="urgent", priority=50)
    limit(queue, "old", 1)
    mine = book(aging_s=60.0, sweep_s=0)
    for _ in range(9):
        mine.claim(conn, 10)
    assert running(queue, "old") == 1


def test_pools_are_claimed_within_their_shares(conn: database.Connection, queue: Queue) -> None:
    queue.fill(20, queue="slow", priority=100)
    queue.fill(20, queue="mail")
    pools = ("mail", "reports", "")

    def wish(idle: int, taken: dict[str, int]) -> Wish:
        return Wish(dict.fromkeys(pools, idle), frozenset(pools), idle, taken)

    mine = book(shares=Shares({"mail": 2, "reports": 1}))
    names = [job.queue for job in mine.claim(conn, wish(8, {}))]
    assert (names.count("mail"), names.count("slow")) == (
        7,
        0,
    )  # it may have all but what is kept for reports
    names = [job.queue for job in mine.claim(conn, wish(3, {"mail": 2, "": 3}))]
    assert names == ["mail", "mail"]
    queue.conn.execute("delete from aqd.jobs where queue = 'mail'")
    names = [job.queue for job in mine.claim(conn, wish(6, {}))]
    assert names == ["slow"] * 3


def test_short_jobs_are_claimed_ahead_of_slots(conn: database.Connection, queue: Queue) -> None:
    queue.fill(50, queue="mail")
    queue.fill(50, queue="slow")
    mine = book(shares=Shares({"mail": 1}))
    jobs = mine.claim(conn, Wish({"mail": 40, "": 2}, frozenset({""}), 3, {"mail": 1}))
    names = [job.queue for job in jobs]
    assert (names.count("mail"), names.count("slow")) == (40, 2)


def test_what_is_owed_to_age_is_bounded_for_a_pool_without_a_slot(
    conn: database.Connection, queue: Queue
) -> None:
    queue.fill(300, queue="old", run_at="now() - interval '2 hours'")
    queue.fill(300, queue="urgent", priority=50)
    queue.fill(4000, queue="mail")
    mine = book(shares=Shares({"mail": 1}), aging_s=60.0)
    for _ in range(4):
        mine.claim(conn, Wish({"mail": 1000}))
    names = [job.queue for job in mine.claim(conn, Wish({"": 110}))]
    assert names.count("old") <= 10


def test_an_error_after_jobs_were_claimed_loses_none_of_them(connect: Connect, queue: Queue) -> None:
    """The second statement of the claim fails: what the first one took is handed over, its attempt is not wasted."""
    queue.fill(3, queue="first", priority=10)
    queue.fill(3, queue="narrow")
    limit(queue, "narrow", 2)
    conn, mine = connect(), book()
    original = queue.value("select pg_get_functiondef('aqd.queue_room(text, bigint)'::regprocedure)")
    queue.conn.execute(
        "create or replace function aqd.queue_room(queue text, wanted bigint) returns bigint language plpgsql "
        "as $$ begin raise exception 'refused'; end $$"
    )
    assert [job.queue for job in mine.claim(conn, 5)] == ["first"] * 3
    with pytest.raises(psycopg.errors.RaiseException):
        mine.claim(conn, 5)
    queue.conn.execute(original)
    assert len(mine.claim(conn, 5)) == 2


def test_a_full_queue_with_many_priorities_is_asked_once(
    conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    run = claims.run

    def counting(conn: database.Connection, name: str, /, **params: Any) -> list[database.Row]:
        if params.get("limited"):
            asked.append(params["limited"])
        return run(conn, name, **params)

    for priority in range(20):
        queue.fill(2, queue="narrow", priority=priority)
        queue.fill(2, queue="between", priority=priority, type="unknown")  # so that they are no neighbours
    limit(queue, "narrow", 1)
    mine = book(sweep_s=1e6, clock=lambda: 100.0)
    assert len(mine.claim(conn, 1)) == 1
    monkeypatch.setattr(claims, "run", counting)
    assert mine.claim(conn, 5) == []
    assert asked == ["narrow"]
    assert mine.claim(conn, 5) == []
    assert asked == ["narrow"]
    assert mine.held_back
    mine.made_room()
    assert mine.claim(conn, 5) == []
    assert asked == ["narrow"] * 2


def test_a_job_that_comes_back_does_not_open_a_paused_queue(conn: database.Connection, queue: Queue) -> None:
    queue.fill(3, queue="q")
    mine = book(sweep_s=0)
    (job,) = mine.claim(conn, 1)
    queue.conn.execute("insert into aqd.queues (queue, paused) values ('q', true)")
    assert mine.claim(conn, 1) == []
    store.release(conn, [released(job)], 20)
    mine.lower("q", 0)
    assert mine.claim(conn, 3) == []


def test_settings_are_seen_although_sweeps_are_far_between(conn: database.Connection, queue: Queue) -> None:
    queue.fill(3, queue="q")
    clock = [100.0]
    mine = book(clock=lambda: clock[0])
    assert len(mine.claim(conn, 1)) == 1
    mine._lanes.swept(10.0)  # so dear that the next one comes in half a minute
    queue.conn.execute("insert into aqd.queues (queue, paused) values ('q', true)")
    clock[0] += 2.0
    assert not mine.sweep_due(clock[0])
    assert mine.claim(conn, 1) == []


def test_a_lane_has_the_age_of_what_this_node_can_run(conn: database.Connection, queue: Queue) -> None:
    queue.fill(3, type="unknown", queue="mixed", run_at="now() - interval '2 hours'")
    queue.fill(5, queue="mixed", run_at="now()")
    queue.fill(60, queue="urgent", priority=50)
    mine = book(aging_s=60.0, sweep_s=0)
    assert {job.queue for _ in range(5) for job in mine.claim(conn, 10)} == {"urgent"}
