"""The keeper's duties, one by one, several at once, and when something fails."""

from __future__ import annotations

import contextlib
import json
import os
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from aqd import channel, database, keeper, log, messages, store
from aqd.config import Config, Database, Jobs
from aqd.config import Keeper as Settings
from aqd.dispatcher import Dispatcher
from aqd.errors import Exit
from aqd.hookspecs import HandlerInfo
from aqd.store import figures
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads

Lines = Callable[[], list[dict[str, Any]]]


def made(**options: Any) -> keeper.Keeper:
    """A keeper; options of [jobs] or [keeper]."""
    jobs = {key: value for key, value in options.items() if key in Jobs.__struct_fields__}
    settings = {key: value for key, value in options.items() if key in Settings.__struct_fields__}
    assert len(jobs) + len(settings) == len(options)
    cfg = msgspec.structs.replace(Config(), jobs=Jobs(**jobs), keeper=Settings(**settings))
    return keeper.Keeper(cfg, "node-1")


class Rounds:
    """Steps of a keeper at times that the test sets."""

    def __init__(self, conn: database.Connection, one: keeper.Keeper) -> None:
        self.conn = conn
        self.keeper = one
        self.now = 1000.0

    def step(self, later_s: float = 0.0) -> float:
        self.now += later_s
        return self.keeper.step(self.conn, self.now)


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """What has been logged since the last call."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    log.configure("debug", "json", process="test", fd=fd, stdlib=False)
    seen = 0

    def read() -> list[dict[str, Any]]:
        nonlocal seen
        text = path.read_bytes()[seen:]
        seen += len(text)
        return [json.loads(line) for line in text.splitlines()]

    yield read
    log.configure("info", "human", process="aqd", stdlib=False)
    os.close(fd)


def node(conn: database.Connection, *types: str, id: str = "n1") -> None:
    store.node_seen(conn, store.NodeState(id, "host", 1, "0", 1, 4, types, "running"))


def test_rescues_and_says_when_to_come_back(
    conn: database.Connection, queue: Queue, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "COST_FACTOR", 0.0)  # a busy machine would put the next turn off
    rounds = Rounds(conn, made(rescue_s=2.0))
    assert 0 < rounds.step() <= 2.0
    queue.add(2)
    job, asked = book().claim(conn, 2)
    for each in (job, asked):
        queue.expire(each.id)
    store.cancel_job(conn, asked.id)
    lines()
    assert rounds.step(0.1) > 0
    assert queue.state(job.id) == "PROCESSING", "not due yet"
    rounds.step(2.0)
    assert (queue.state(job.id), queue.state(asked.id)) == ("QUEUED", "CANCELLED")
    (line,) = [line for line in lines() if line["event"] == "leases expired"]
    assert (line["requeued"], line["cancelled"], line["jobs"]) == (1, 1, f"{job.id}, {asked.id}")


def test_more_work_than_one_batch(
    conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "BATCH", 10)
    queue.fill(25)
    book().claim(conn, 25)
    queue.conn.execute("update aqd.jobs set lease_expires_at = now() - interval '1 s'")
    rounds = Rounds(conn, made(rescue_s=60.0))
    for _ in range(3):
        wait = rounds.step(0.1)
    assert queue.value("select count(*) from aqd.jobs where state = 'PROCESSING'") == 0
    assert wait < 60


# --- unknown types --------------------------------------------------------------------------------


def test_unknown_type_fails_after_the_grace(conn: database.Connection, queue: Queue, lines: Lines) -> None:
    """F26: FAILED without an attempt once no live node has known the type for the grace."""
    node(conn, "noop")
    ids = queue.add(3, type="nobody")
    known = queue.add()
    rounds = Rounds(conn, made(unknown_type_grace_s=0.4))
    rounds.step()
    assert all(queue.state(id) == "QUEUED" for id in ids)
    wait_until(lambda: rounds.step(5.0) and queue.state(ids[0]) == "FAILED")
    assert queue.value("select now() - since > '0.4 s' from aqd.unknown_types")
    row = queue.row(ids[0])
    assert (row["attempt"], row["last_error"]) == (0, 'no node knows the type "nobody"')
    assert {record.kind for record in store.list_failed(conn).records} == {"unknown_type"}
    assert len(store.list_failed(conn).records) == 3
    assert store.get_attempts(conn, ids[0]) == []
    assert queue.state(known[0]) == "QUEUED"
    assert [line["type"] for line in lines() if "no node knows" in line["event"]] == ["nobody"]


def test_type_known_elsewhere_is_left_alone(conn: database.Connection, queue: Queue) -> None:
    node(conn, "noop")
    node(conn, "rare", id="n2")
    queue.add(type="rare")
    queue.fill(50, type="rare", queue="other")
    for _ in range(3):
        assert store.fail_unknown(conn, 0.0, 30.0, 100) == []
    assert queue.value("select count(*) from aqd.unknown_types") == 0


def test_future_jobs_of_unknown_types_wait(conn: database.Connection, queue: Queue) -> None:
    """A plugin may be installed before its first job is due."""
    node(conn, "noop")
    queue.add(type="nobody", delay_s=3600)
    assert store.fail_unknown(conn, 0.0, 30.0, 100) == []


def test_type_that_comes_back_resets_the_clock(conn: database.Connection, queue: Queue) -> None:
    node(conn, "noop")
    queue.add(type="late")
    assert store.fail_unknown(conn, 60.0, 30.0, 100) == []
    queue.conn.execute("update aqd.unknown_types set since = now() - interval '59 s'")
    node(conn, "late", id="n2")
    store.fail_unknown(conn, 60.0, 30.0, 100)
    assert queue.value("select count(*) from aqd.unknown_types") == 0
    store.node_gone(conn, "n2")
    assert store.fail_unknown(conn, 60.0, 30.0, 100) == []
    assert queue.value("select since = now() or since > now() - interval '10 s' from aqd.unknown_types")


def test_clock_runs_only_while_a_keeper_watches(conn: database.Connection, queue: Queue) -> None:
    """After a night without nodes the first one to start must not condemn what the second one knows."""
    node(conn, "noop")
    queue.add(type="late")
    store.fail_unknown(conn, 60.0, 30.0, 100)
    queue.conn.execute(
        "update aqd.unknown_types set since = now() - interval '9 h', checked_at = now() - interval '8 h'"
    )
    assert store.fail_unknown(conn, 60.0, 30.0, 100) == []
    assert queue.value("select now() - since < '1 min' from aqd.unknown_types")


def test_nothing_is_condemned_without_a_live_node(conn: database.Connection, queue: Queue) -> None:
    queue.add(type="late")
    assert store.fail_unknown(conn, 0.0, 30.0, 100) == []
    node(conn, "noop")
    queue.conn.execute("update aqd.nodes set seen_at = now() - interval '31 s'")
    assert store.fail_unknown(conn, 0.0, 30.0, 100) == []
    node(conn, "noop")
    assert len(store.fail_unknown(conn, 0.0, 30.0, 100)) == 1


def test_unknown_rows_of_many_lanes_and_batches(conn: database.Connection, queue: Queue) -> None:
    node(conn, "noop")
    for name in ("a", "b"):
        for priority in (0, 5):
            queue.fill(60, type="nobody", queue=name, priority=priority)
    queue.fill(60, queue="a")
    failed: list[int] = []
    while batch := store.fail_unknown(conn, 0.0, 30.0, 100):
        assert len(batch) <= 100
        failed += [id for id, _ in batch]
    assert len(set(failed)) == len(failed) == 240
    assert queue.value("select count(*) from aqd.jobs where state = 'QUEUED'") == 60


# --- history --------------------------------------------------------------------------------------


def partitions(queue: Queue) -> list[str]:
    rows = queue.conn.execute(
        "select relname from pg_class where relname ~ '^job_history_[0-9]+$' and relkind = 'r' order by 1"
    )
    return [row[0] for row in rows]


def test_partitions_are_made_ahead(conn: database.Connection, queue: Queue, lines: Lines) -> None:
    names = partitions(queue)
    assert len(names) == 9
    for name in names[3:]:
        queue.conn.execute(f"drop table aqd.{name}")
    rounds = Rounds(conn, made())
    rounds.step()
    assert partitions(queue) == names
    assert [line for line in lines() if line["event"] == "history partitions created"]


def test_keepers_of_all_nodes_at_once(connect: Connect, queue: Queue) -> None:
    for name in partitions(queue):
        queue.conn.execute(f"drop table aqd.{name}")
    queue.conn.execute("select aqd.create_history_partition(current_date - 40)")

    def one() -> float:
        return made().step(connect(), time.monotonic())

    in_threads(*[one] * 6)
    assert len(partitions(queue)) == 9


def old_history(conn: database.Connection, queue: Queue, days: int) -> None:
    """A completed job ``days`` ago, in a partition of its day."""
    queue.add()
    (job,) = book().claim(conn, 1)
    store.record_completed(conn, [completion(job)])
    queue.conn.execute(f"select aqd.create_history_partition((now() at time zone 'UTC')::date - {days})")
    queue.conn.execute(
        f"update aqd.job_history set finished_at = now() - interval '{days} days' where id = {job.id}"
    )


def test_history_is_dropped_by_day(conn: database.Connection, queue: Queue, lines: Lines) -> None:
    for days in (20, 14, 15):
        old_history(conn, queue, days)
    Rounds(conn, made(history_days=14)).step()
    assert len(partitions(queue)) == 10
    assert queue.value("select count(*) from aqd.job_history") == 1, "14 days are kept"
    assert sum(line["event"] == "history partition dropped" for line in lines()) == 2
    assert conn.execute("show lock_timeout").fetchone() == ("0",)


def test_detach_does_not_wait_for_ever_and_is_finished_later(
    connect: Connect, queue: Queue, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old reader keeps the partition; records go on meanwhile; the next round finishes the work."""
    monkeypatch.setattr(keeper, "DETACH_WAIT", "200ms")
    conn, reader = connect(), connect(dispatcher=False)
    old_history(conn, queue, 30)
    reader.execute("begin")
    reader.execute("select count(*) from aqd.job_history")
    rounds = Rounds(conn, made())
    rounds.step()
    assert len(partitions(queue)) == 10
    assert "partition is in use, dropped later" in [line["event"] for line in lines()]
    queue.add()
    other = connect()
    other.execute("set statement_timeout = '2s'")
    store.record_completed(other, [completion(job) for job in book().claim(other, 1)])
    reader.execute("commit")
    rounds.step(keeper.RETENTION_S + 1)
    assert len(partitions(queue)) == 9


def test_detached_leftover_is_dropped(conn: database.Connection, queue: Queue) -> None:
    """A keeper killed between DETACH and DROP."""
    old_history(conn, queue, 30)
    name = partitions(queue)[0]
    queue.conn.execute(f"alter table aqd.job_history detach partition aqd.{name}")
    Rounds(conn, made()).step()
    assert name not in partitions(queue)


def test_a_partition_that_cannot_be_dropped_does_not_keep_the_others(
    conn: database.Connection, queue: Queue, lines: Lines
) -> None:
    """Somebody's view is on the oldest."""
    for days in (30, 20):
        old_history(conn, queue, days)
    oldest, younger = partitions(queue)[:2]
    queue.conn.execute(f"create view public.kept as select id from aqd.{oldest}")
    Rounds(conn, made()).step()
    assert oldest in partitions(queue)
    assert younger not in partitions(queue)
    (complaint,) = [line for line in lines() if line["event"] == "duty failed"]
    assert complaint["duty"] == "history"
    assert oldest in complaint["error"]
    assert conn.execute("show lock_timeout").fetchone() == ("0",)


# --- old failures, attempts, nodes ----------------------------------------------------------------


def test_failed_jobs_are_deleted_after_retention(conn: database.Connection, queue: Queue) -> None:
    queue.add(4)
    old, young, retried, resolved = book().claim(conn, 4)
    store.record_failed(conn, [failure(job) for job in (old, young, retried, resolved)])
    store.retry_job(conn, resolved.id)
    mine = book()
    store.record_completed(conn, [completion(job) for job in mine.claim(conn, 1)])
    store.retry_job(conn, retried.id)
    queue.conn.execute(
        "update aqd.failed_jobs set failed_at = now() - interval '91 days' where job_id <> %s", [young.id]
    )
    Rounds(conn, made(failed_days=90)).step()
    assert {row[0] for row in queue.conn.execute("select id from aqd.jobs")} == {young.id, retried.id}
    records = {record.job_id for record in store.list_failed(conn, resolved=True).records}
    assert records == {young.id, retried.id}, "a job that runs again keeps its record"
    assert store.get_attempts(conn, old.id) == []
    assert len(store.get_attempts(conn, young.id)) == 1


def test_attempts_of_departed_jobs_are_deleted(conn: database.Connection, queue: Queue) -> None:
    queue.add(2)
    gone, alive = book().claim(conn, 2)
    store.record_failed(conn, [failure(gone, 0.0), failure(alive, 0.0)])
    store.record_completed(conn, [completion(job) for job in book().claim(conn, 1)])
    queue.conn.execute("update aqd.job_attempts set finished_at = now() - interval '91 days'")
    Rounds(conn, made()).step()
    left = queue.conn.execute("select job_id from aqd.job_attempts").fetchall()
    assert len(left) == 1
    assert queue.value("select count(*) from aqd.jobs where id = %s", left[0][0]) == 1


def test_silent_nodes_are_forgotten(conn: database.Connection, queue: Queue, lines: Lines) -> None:
    node(conn, "noop", id="alive")
    node(conn, "noop", id="silent")
    queue.conn.execute("update aqd.nodes set seen_at = now() - interval '301 s' where node_id = 'silent'")
    Rounds(conn, made(node_ttl_s=30.0)).step()
    assert [row.node_id for row in figures.list_nodes(conn, 30.0)] == ["alive"]
    assert [line["node_id"] for line in lines() if "forgotten" in line["event"]] == ["silent"]


# --- vacuum ---------------------------------------------------------------------------------------


def churn(connect: Connect, queue: Queue) -> None:
    """3,000 jobs through the queue: about 6,000 dead rows. A session tells its counts when it ends."""
    queue.fill(3000)
    with connect() as conn:
        mine = book()
        while jobs := mine.claim(conn, 1000):
            store.record_completed(conn, [completion(job) for job in jobs])
            mine.lower("default", 0)
    wait_until(lambda: dead(queue) > 2000)


def dead(queue: Queue) -> int:
    return int(queue.value("select n_dead_tup from pg_stat_user_tables where relid = 'aqd.jobs'::regclass"))


def test_vacuum_keeps_the_table_small(
    connect: Connect, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "VACUUM_DEAD_ROWS", 2000)
    conn = connect()
    conn.execute("alter table aqd.jobs set (autovacuum_enabled = off)")
    sizes = []
    rounds = Rounds(conn, made())
    for _ in range(3):
        churn(connect, queue)
        rounds.step(10.0)
        wait_until(lambda: dead(queue) < 500)
        sizes.append(queue.value("select pg_relation_size('aqd.jobs')"))
    assert sizes[2] <= sizes[0] * 1.2


def test_vacuum_backs_off_under_an_old_snapshot_and_names_it(
    connect: Connect, queue: Queue, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "VACUUM_DEAD_ROWS", 2000)
    conn, pinning = connect(), connect(dispatcher=False)
    conn.execute("alter table aqd.jobs set (autovacuum_enabled = off)")
    pinning.execute("set application_name = 'analytics'")
    pinning.execute("begin isolation level repeatable read")
    pinning.execute("select count(*) from aqd.jobs")
    churn(connect, queue)
    rounds = Rounds(conn, made())
    for _ in range(4):
        rounds.step(10.0)
    found = lines()
    assert sum(line["event"] == "vacuumed" for line in found) == 1
    (line,) = [line for line in found if "cannot be removed" in line["event"]]
    assert "(analytics)" in line["held_by"]
    pinning.execute("commit")
    rounds.step(10.0)
    wait_until(lambda: dead(queue) < 500)


def test_vacuum_is_left_to_the_owner(connect: Connect, queue: Queue, lines: Lines, pg) -> None:
    role = f"aqd_app_{queue.value('select pg_backend_pid()')}"
    conn = connect()
    conn.execute(f"create role {role}")
    try:
        conn.execute(f"grant usage on schema aqd to {role}")
        conn.execute(f"grant all on all tables in schema aqd to {role}")
        if conn.info.server_version >= 170000:  # from there on that is a right of its own, and among all
            conn.execute(f"revoke maintain on all tables in schema aqd from {role}")
        conn.execute(f"set role {role}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeper, "VACUUM_DEAD_ROWS", 0)
            Rounds(conn, made()).step()
        assert any("does not own it" in line["event"] for line in lines())
        assert not any(line["event"] == "vacuumed" for line in lines())
    finally:
        conn.execute("reset role")
        conn.execute(f"drop owned by {role}")
        conn.execute(f"drop role {role}")


def test_who_may_vacuum_does(connect: Connect, queue: Queue, lines: Lines) -> None:
    """From PostgreSQL 17 on that may be granted."""
    conn = connect()
    if conn.info.server_version < 170000:
        pytest.skip("PostgreSQL before 17 knows no right to vacuum but the owner's")
    role = f"aqd_app_{queue.value('select pg_backend_pid()')}"
    conn.execute(f"create role {role}")
    try:
        conn.execute(f"grant usage on schema aqd to {role}")
        conn.execute(f"grant all on all tables in schema aqd to {role}")
        conn.execute(f"set role {role}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeper, "VACUUM_DEAD_ROWS", 0)
            Rounds(conn, made()).step()
        assert any(line["event"] == "vacuumed" for line in lines())
        assert not any("does not own it" in line["event"] for line in lines())
    finally:
        conn.execute("reset role")
        conn.execute(f"drop owned by {role}")
        conn.execute(f"drop role {role}")


# --- failures -------------------------------------------------------------------------------------


def test_a_failing_duty_does_not_stop_the_others(
    conn: database.Connection, queue: Queue, lines: Lines
) -> None:
    queue.conn.execute("drop table aqd.unknown_types")
    queue.add()
    (job,) = book().claim(conn, 1)
    queue.expire(job.id)
    rounds = Rounds(conn, made())
    for _ in range(20):
        rounds.step(10.0)
    assert queue.state(job.id) == "QUEUED"
    complaints = [line for line in lines() if line["event"] == "duty failed"]
    assert len(complaints) == 1, "said once, not at every try"
    assert complaints[0]["duty"] == "unknown types"
    assert "unknown_types" in complaints[0]["error"]


def test_a_lost_connection_leaves_the_step(connect: Connect, queue: Queue) -> None:
    conn = connect()
    rounds = Rounds(conn, made())
    rounds.step()
    queue.conn.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        rounds.step(1000.0)
    queue.add()
    rounds.conn = connect()
    (job,) = book().claim(rounds.conn, 1)
    queue.expire(job.id)
    rounds.step()
    assert queue.state(job.id) == "QUEUED", "the duty is due at once on the next connection"


def test_another_node_at_work_is_not_waited_for(connect: Connect, queue: Queue) -> None:
    conn, other = connect(), connect()
    node(conn, "noop")
    queue.add(type="nobody")
    with other.transaction():
        for duty in range(1, 10):
            database.run(
                other, "elect", **{"class": database.ADVISORY_CLASS, "duty": database.ADVISORY_DUTY + duty}
            )
        done = threading.Event()

        def step() -> None:
            made(unknown_type_grace_s=0.0).step(conn, 1000.0)
            done.set()

        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        assert done.wait(10)
        thread.join()
    assert queue.value("select count(*) from aqd.unknown_types") == 0


def test_a_sign_of_life_at_the_end_does_not_bring_the_node_back(
    database_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on its way when nothing is left to do: the row that is left would keep a breaking migration waiting."""
    master, end = channel.pair()
    peer = channel.Peer(master, messages.encode)
    config = Config(database=Database(url=database_url))
    one = Dispatcher(end, messages.Start(config, "node", "node", 1, "0"))
    seen, held_up = store.node_seen, threading.Event()

    def nodes() -> int:
        return int(queue.value("select count(*) from aqd.nodes"))

    def slow(conn: database.Connection, state: store.NodeState) -> bool:
        if state.generation == 2:
            held_up.set()
            with contextlib.suppress(TimeoutError):  # the row goes first only if nobody waits for us
                wait_until(lambda: not nodes(), 0.5)
        return seen(conn, state)

    monkeypatch.setattr(store, "node_seen", slow)
    ended: queues.SimpleQueue[int] = queues.SimpleQueue()
    threading.Thread(target=lambda: ended.put(one.run()), daemon=True).start()
    handlers = [HandlerInfo(type="noop", plugin="test")]
    for message in (messages.Serve(1, handlers), messages.AttachedAll()):
        peer.send(message)
    wait_until(nodes)
    peer.send(messages.Serve(2, handlers))
    assert held_up.wait(10)
    peer.send(messages.Drain())
    wait_until(lambda: one.drained)
    peer.send(messages.HandOver())
    assert ended.get(timeout=10) == Exit.OK
    one.keeper.join(10)
    assert nodes() == 0
    peer.close()
