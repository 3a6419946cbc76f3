"""The claim: never too many, never twice, in order, only what is due and known; floors hide nothing for long."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from aqd import claims, database, statements, store
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, in_threads, released

PLANNERS: list[dict[str, str]] = [
    {},
    {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_material": "off"},
    {"enable_bitmapscan": "off", "enable_indexscan": "off", "enable_indexonlyscan": "off"},
    {"enable_seqscan": "off", "enable_nestloop": "off"},
    {"plan_cache_mode": "force_generic_plan"},
]


@pytest.mark.parametrize("settings", PLANNERS, ids=lambda settings: ",".join(settings) or "defaults")
@pytest.mark.parametrize("limit", [1, 7])
def test_never_more_than_asked_for(
    connect: Connect, queue: Queue, settings: dict[str, str], limit: int
) -> None:
    """F20: a fresh table without statistics, 8 claimers at once, whatever the planner is told."""
    queue.fill(50 * limit)

    def claimer(number: int) -> list[int]:
        conn = connect(dispatcher=False)
        for name, value in settings.items():
            conn.execute(f"set {name} = {value}")
        mine = book(node_id=f"node-{number}")
        got: list[int] = []
        while True:
            jobs = mine.claim(conn, limit)
            assert len(jobs) <= limit
            assert len({job.token for job in jobs}) <= 1
            got += [job.id for job in jobs]
            if not jobs and queue_is_empty(conn):
                return got

    taken = in_threads(*[lambda number=number: claimer(number) for number in range(8)])
    ids = [id for some in taken for id in some]
    assert len(ids) == len(set(ids)) == 50 * limit
    assert (
        queue.value("select count(*) from aqd.jobs where state = 'PROCESSING' and attempt = 1") == 50 * limit
    )


def queue_is_empty(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("select 1 from aqd.jobs where state = 'QUEUED' limit 1").fetchone() is None


def test_claimed_row(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add(queue="q", priority=3, max_attempts=4, timeout_s=9)
    (job,) = book(node_id="node-7", lease_s=12.0).claim(conn, 10)
    assert (job.id, job.type, job.queue, job.priority, job.payload) == (id, "noop", "q", 3, "{}")
    assert (job.attempt, job.max_attempts, job.timeout_s) == (1, 4, 9.0)
    assert 0 < job.token < 2**63
    row = queue.row(id)
    assert (row["state"], row["node_id"], row["lease_token"], row["attempt"]) == (
        "PROCESSING",
        "node-7",
        job.token,
        1,
    )
    assert queue.value("select lease_expires_at - claimed_at = interval '12 s' from aqd.jobs")
    microseconds = queue.value("select (extract(epoch from created_at) * 1000000)::bigint from aqd.jobs")
    assert job.created_at_us == job.run_at_us == microseconds


def test_token_is_new_for_every_claim(conn: database.Connection, queue: Queue) -> None:
    queue.add()
    mine = book()
    tokens = set()
    for _ in range(5):
        (job,) = mine.claim(conn, 1)
        tokens.add(job.token)
        store.release(conn, [released(job)], 20)
        mine.lower(job.queue, job.priority)
    assert len(tokens) == 5


def test_nothing_without_types_or_room(conn: database.Connection, queue: Queue) -> None:
    queue.add()
    unknowing = claims.ClaimBook("node-1", 30.0)
    assert unknowing.claim(conn, 10) == []
    assert book().claim(conn, 0) == []
    assert queue.value("select attempt from aqd.jobs") == 0


def test_order(conn: database.Connection, queue: Queue) -> None:
    """Priority first, then the moment, then the id; lanes of one priority take turns."""
    late = queue.add(2, priority=0)
    queue.conn.execute("update aqd.jobs set run_at = run_at - interval '1 minute' where id = %s", [late[1]])
    low = queue.add(priority=-5)
    high = queue.add(priority=5, queue="z")
    assert [job.id for job in book().claim(conn, 10)] == [*high, late[1], late[0], *low]

    queue.fill(10, queue="a")
    queue.fill(10, queue="b")
    mine = book()
    first = {mine.claim(conn, 3)[0].queue for _ in range(2)}
    assert first == {"a", "b"}


@pytest.mark.parametrize("changed", [[0, 1, 2], [1]], ids=["all", "one"])
def test_changed_while_they_are_claimed(connect: Connect, queue: Queue, changed: list[int]) -> None:
    """Between the claim's snapshot and its locks. The version that is locked is not one that the snapshot sees: it is
    looked for again, at once if there was nothing else, and no floor hides it until the next sweep."""
    ids = queue.add(3, queue="held")
    queue.conn.execute("insert into aqd.queues (queue, max_running) values ('held', 10)")
    queue.conn.execute(
        "create or replace function aqd.queue_room(queue text, wanted bigint) returns bigint language plpgsql as "
        "$$begin perform pg_advisory_xact_lock(77); return wanted; end$$"
    )
    with connect(dispatcher=False) as holder, connect() as conn, ThreadPoolExecutor(1) as pool:
        mine = book(sweep_s=60.0)
        holder.execute("select pg_advisory_lock(77)")
        claim = pool.submit(mine.claim, conn, 10)
        wait_until(lambda: queue.value("select pg_blocking_pids(%s)", conn.info.backend_pid))
        queue.conn.execute(
            "update aqd.jobs set max_attempts = 7 where id = any(%s)", [[ids[n] for n in changed]]
        )
        holder.execute("select pg_advisory_unlock(77)")
        got = [claim.result(10), mine.claim(conn, 10)]
    if changed == [1]:
        assert [[job.id for job in jobs] for jobs in got] == [[ids[0], ids[2]], [ids[1]]]
        assert got[1][0].max_attempts == 7
    else:
        assert [[job.id for job in jobs] for jobs in got] == [ids, []]
        assert [job.max_attempts for job in got[0]] == [7, 7, 7]


def test_not_yet_due(conn: database.Connection, queue: Queue) -> None:
    """And what falls due after the claim looked is not overlooked by asking only for the future."""
    queue.add(delay_s=3600)
    mine = book()
    assert mine.claim(conn, 1) == []
    wait = mine.next_due_s(conn)
    assert wait is not None
    assert 3500 < wait <= 3600
    queue.conn.execute("update aqd.jobs set run_at = now()")
    assert mine.next_due_s(conn) == 0.0
    assert len(mine.claim(conn, 1)) == 1
    assert mine.next_due_s(conn) is None


def test_unknown_types_are_left_alone(conn: database.Connection, queue: Queue) -> None:
    """F26: no attempt is spent by a node that does not know the type."""
    known = queue.add(type="known")
    foreign = queue.add(5, type="foreign")
    mine = book("known")
    assert [job.id for job in mine.claim(conn, 10)] == known
    assert all(queue.row(id)["attempt"] == 0 for id in foreign)
    mine.set_types(frozenset({"known", "foreign"}))
    assert [job.id for job in mine.claim(conn, 10)] == foreign, "floors are forgotten with the types"


def test_only_the_queues_of_this_node(conn: database.Connection, queue: Queue) -> None:
    queue.add(queue="a")
    wanted = queue.add(queue="b")
    assert [job.id for job in book(queues=["b"]).claim(conn, 10)] == wanted


class Clock:
    """A monotonic clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_paused_queue(conn: database.Connection, queue: Queue) -> None:
    """Pausing and resuming work with the next sweep."""
    clock = Clock()
    mine = book(clock=clock)
    queue.add()
    queue.conn.execute("insert into aqd.queues values ('default', true)")
    assert mine.claim(conn, 10) == []
    queue.conn.execute("update aqd.queues set paused = false")
    clock.now += 1.5
    assert len(mine.claim(conn, 10)) == 1
    queue.conn.execute("update aqd.queues set paused = true")
    queue.add()
    clock.now += 1.5
    assert mine.claim(conn, 10) == []


def test_new_lane_is_found_when_nothing_else_is_there(conn: database.Connection, queue: Queue) -> None:
    clock = Clock()
    mine = book(clock=clock)
    assert mine.claim(conn, 10) == []
    queue.add(queue="brand-new", priority=-3)
    assert not mine.sweep_due(clock())
    assert len(mine.claim(conn, 10)) == 1


def test_late_commit_within_the_slack(connect: Connect, queue: Queue) -> None:
    """run_at is the start of the enqueueing transaction: rows appear behind where a claim has been."""
    conn, writer = connect(), connect(dispatcher=False)
    clock = Clock()
    mine = book(clock=clock, slack_s=5.0)
    with writer.transaction():
        early = Queue(writer).add()
        queue.add()
        assert len(mine.claim(conn, 10)) == 1
        assert mine.claim(conn, 10) == []
    assert [job.id for job in mine.claim(conn, 10)] == early
    assert not mine.sweep_due(clock())


def test_later_commit_is_found_by_the_sweep(connect: Connect, queue: Queue) -> None:
    conn, writer = connect(), connect(dispatcher=False)
    clock = Clock()
    mine = book(clock=clock, slack_s=0.0)
    with writer.transaction():
        early = Queue(writer).add()
        queue.add()
        assert len(mine.claim(conn, 10)) == 1
    assert mine.claim(conn, 10) == [], "behind the floor"
    clock.now += 1.5
    assert mine.sweep_due(clock())
    assert [job.id for job in mine.claim(conn, 10)] == early


def test_other_nodes_rolled_back_claim_is_found_by_the_sweep(connect: Connect, queue: Queue) -> None:
    conn, other = connect(), connect()
    clock = Clock()
    mine = book(clock=clock, slack_s=0.0)
    ids = queue.add(3)
    with other.transaction(force_rollback=True):
        assert len(book(node_id="other").claim(other, 2)) == 2
        assert [job.id for job in mine.claim(conn, 10)] == ids[2:]
    assert mine.claim(conn, 10) == []
    clock.now += 1.5
    assert [job.id for job in mine.claim(conn, 10)] == ids[:2]


def test_released_job_is_found_at_once_by_the_releasing_node(conn: database.Connection, queue: Queue) -> None:
    clock = Clock()
    mine = book(clock=clock, slack_s=0.0)
    queue.add(2)
    first = mine.claim(conn, 2)[0]
    assert mine.claim(conn, 2) == []
    store.release(conn, [released(first)], 20)
    mine.lower(first.queue, first.priority)
    (again,) = mine.claim(conn, 2)
    assert (again.id, again.attempt) == (first.id, 1)


def buffers(conn: psycopg.Connection[Any], act: Any) -> int:
    """Buffers of aqd.jobs and its indexes that the statements of ``act`` touched."""
    with conn.transaction(force_rollback=True):
        before = conn.execute(_BLOCKS).fetchone()
        act()
        after = conn.execute(_BLOCKS).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])


_BLOCKS = """select sum(pg_stat_get_xact_blocks_fetched(c.oid))::bigint from pg_class c
             where c.oid in ('aqd.jobs'::regclass, 'aqd.jobs_ready'::regclass, 'aqd.jobs_pkey'::regclass,
                             'aqd.jobs_running'::regclass)"""


def test_claim_cost_is_bounded_by_floors_under_an_old_snapshot(connect: Connect, queue: Queue) -> None:
    """F22: dead entries that vacuum may not remove are walked over by a sweep, not by every claim."""
    conn, pinning = connect(), connect(dispatcher=False)
    queue.fill(6000)
    conn.execute("analyze aqd.jobs")
    clock = Clock()
    mine = book(clock=clock)
    pinning.execute("begin isolation level repeatable read")
    pinning.execute("select count(*) from aqd.jobs")
    while jobs := mine.claim(conn, 500):
        store.record_completed(conn, [completion(job) for job in jobs])
    queue.conn.execute("vacuum aqd.jobs")
    dead = "select n_dead_tup > 5000 from pg_stat_user_tables where relid = 'aqd.jobs'::regclass"
    wait_until(lambda: queue.value(dead))  # before PostgreSQL 15 figures arrive a moment later
    queue.add(10)
    idle = buffers(conn, lambda: mine.claim(conn, 10))
    clock.now += 2
    sweeping = buffers(conn, lambda: mine.claim(conn, 10))
    pinning.execute("rollback")
    assert idle < 200, f"a claim of 10 read {idle} buffers"
    assert sweeping > 2 * idle, "the test would not notice missing floors"


def test_rows_that_can_never_be_taken_do_not_slow_the_claim(connect: Connect, queue: Queue) -> None:
    """F21: failed, future, foreign and running rows around ten ready ones."""
    conn = connect()
    queue.fill(5000, state="'FAILED'")
    queue.fill(5000, run_at="now() + interval '1 year'")
    queue.fill(5000, type="foreign")
    queue.fill(
        1000, state="'PROCESSING'", lease_token="n", lease_expires_at="now() + interval '1 h'", node_id="'x'"
    )
    conn.execute("analyze aqd.jobs")
    clock = Clock()
    mine = book(clock=clock)
    assert mine.claim(conn, 10) == []
    ready = queue.add(10)
    got: list[int] = []
    cost = buffers(conn, lambda: got.extend(job.id for job in mine.claim(conn, 20)))
    assert got == ready
    assert cost < 150, f"a claim of 10 read {cost} buffers"


def test_list_lanes(conn: database.Connection, queue: Queue) -> None:
    expected = {(name, priority) for name in ("a", "b", "c:1") for priority in (-100, 0, 7, 100)}
    for name, priority in expected:
        queue.fill(3, queue=name, priority=priority)
    queue.fill(3, queue="done", state="'FAILED'")
    queue.conn.execute(
        "insert into aqd.queues (queue, paused, max_running) "
        "values ('b', true, null), ('c:1', false, null), ('a', false, 3), ('empty', true, 4)"
    )
    settings = {("b", None, True, False), ("a", None, False, True), ("empty", None, True, True)}
    for statement, more in (("list_lanes", {"max_lanes": 100}), ("list_lanes_distinct", {})):
        *rows, last = database.run(conn, statement, queues="{}", **more)
        assert {row[:2] for row in rows if row[1] is not None} == expected
        assert {row[:4] for row in rows if row[1] is None} == settings
        assert len(rows) == len(expected) + len(settings)
        assert 0 < last[4] < 5, "what it cost the server, in seconds"
        *rows, _ = database.run(conn, statement, queues="{a,nothing}", **more)
        assert {row[0] for row in rows if row[1] is not None} == {"a"}
        *rows, last = database.run(conn, statement, queues="{nothing}", **more)
        assert {row[:4] for row in rows} == settings
        assert last[0] is None
    limited = database.run(conn, "list_lanes", queues="{}", max_lanes=5)
    assert len([row for row in limited if row[1] is not None]) == 5


def test_an_empty_queue_that_is_paused_is_left_alone(conn: database.Connection, queue: Queue) -> None:
    """Its lane is known from before; the job comes after the pause was seen."""
    queue.add(queue="q")
    mine = book(sweep_s=0)
    assert len(mine.claim(conn, 1)) == 1
    queue.conn.execute("insert into aqd.queues (queue, paused) values ('q', true)")
    assert mine.claim(conn, 1) == []
    queue.add(queue="q")
    assert mine.claim(conn, 1) == []
    queue.conn.execute("update aqd.queues set paused = false")
    wait_until(lambda: mine.claim(conn, 1))


def test_thousands_of_lanes(conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """More lanes than one statement takes, and more than the loose scan is good for."""
    monkeypatch.setattr(claims, "_MANY_LANES", 300)
    queue.conn.execute(
        """insert into aqd.jobs (type, queue, priority, run_at)
           select 'noop', 'q' || n % 40, n / 40, now() from generate_series(0, 599) as n"""
    )
    mine = book()
    got: list[claims.ClaimedJob] = []
    while jobs := mine.claim(conn, 100):
        got += jobs
    assert len({job.id for job in got}) == 600
    assert [job.priority for job in got] == sorted((job.priority for job in got), reverse=True)


def test_locking_happens_once(conn: database.Connection, queue: Queue) -> None:
    """F20: the plan locks rows in one place, inside a step that is evaluated once."""
    queue.fill(50)
    text = statements.get("claim_jobs").text.decode()
    names = {
        "queues": "'{default}'",
        "priorities": "'{0}'",
        "floors_us": "'{0}'",
        "floor_ids": "'{0}'",
        "slack_s": "0.1",
        "types": "'{noop}'",
        "limit": "3",
        "token": "1",
        "lease_s": "30",
        "node_id": "'x'",
        "limited": "null",
    }
    ordered = [names[param] for param in statements.get("claim_jobs").params]
    filled = re.sub(r"\$(\d+)", lambda match: ordered[int(match[1]) - 1], text)
    plan = "\n".join(row[0] for row in conn.execute(f"explain (analyze, timing off) {filled}".encode()))
    assert re.findall(r"LockRows .*\(actual rows=(\d+)(?:\.00)? loops=(\d+)\)", plan) == [("3", "1")], plan
