"""Figures in the database: added up, snapshots of them, what becomes of those of nodes that are gone, plans."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from aqd import database, keeper, store
from aqd.figures import Attempt, Cell, Figures
from aqd.store import figures
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, in_threads
from tests.sql.test_keeper import Lines, Rounds, lines, made, node

__all__ = ["lines"]


def counted(*attempts: Attempt) -> list[Cell]:
    one = Figures()
    one.attempts(attempts)
    one.statement("claim", 0.002)
    return one.drain()


DONE = Attempt("default", "noop", "completed", "", 0.5, 0.01)
FAILED = Attempt("default", "noop", "failed", "exception", 2.0, 0.01)
OTHERS = Attempt("slow", "noop", "retried", "timeout", 100.0, 3.0)


def refresh(conn: database.Connection) -> figures.TableHealth:
    with conn.transaction():
        return figures.refresh_stats(conn)


def sums(conn: database.Connection) -> dict[tuple[str, ...], int]:
    return {cell.key: cell.count for cell in figures.sum_figures(conn)}


def test_differences_are_added_up(conn: database.Connection) -> None:
    node(conn, "noop")
    node(conn, "noop", id="n2")
    for id in ("n1", "n2", "n1"):
        figures.add_figures(conn, id, counted(DONE, DONE, OTHERS))
    figures.add_figures(conn, "n1", [])
    assert sums(conn)["attempts", "default", "noop", "completed", ""] == 6
    duration = {cell.key: cell for cell in figures.sum_figures(conn)}["duration", "slow", "noop", "retried"]
    assert (duration.count, duration.total, sum(duration.buckets)) == (3, 300.0, 3)


def test_nodes_that_are_gone_keep_their_part(conn: database.Connection, queue: Queue) -> None:
    """Sums never go down: not when a node ends, not when it turns out to live."""
    node(conn, "noop")
    node(conn, "noop", id="n2")
    for id in ("n1", "n2"):
        figures.add_figures(conn, id, counted(DONE))
    key = ("attempts", "default", "noop", "completed", "")
    assert figures.fold_figures(conn) == 0
    store.node_gone(conn, "n2")
    assert figures.fold_figures(conn) > 0
    assert figures.fold_figures(conn) == 0
    assert sums(conn)[key] == 2
    figures.add_figures(conn, "n2", counted(DONE))  # taken for gone, it lives
    assert sums(conn)[key] == 3
    figures.fold_figures(conn)
    assert sums(conn)[key] == 3
    assert queue.value("select count(distinct node_id) from aqd.node_figures") == 2


def test_pairs_of_the_past_are_bounded(conn: database.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues that come and go do not fill the tables: beyond a number they are kept together."""
    monkeypatch.setattr(figures, "NAMES_MAX", 5)
    for number in range(10):
        figures.add_figures(conn, f"n{number}", counted(DONE, DONE._replace(queue=f"tenant{number}")))
        figures.fold_figures(conn)
    found = {key[1]: count for key, count in sums(conn).items() if key[0] == "attempts"}
    assert found == {"default": 10, **{f"tenant{n}": 1 for n in range(4)}, "other": 6}


def test_fold_beside_writers(connect: Connect, queue: Queue) -> None:
    """No deadlock, nothing lost or counted twice."""
    rounds = 40

    def write(id: str) -> None:
        conn = connect()
        for _ in range(rounds):
            figures.add_figures(conn, id, counted(DONE, FAILED, OTHERS))

    def fold() -> None:
        conn = connect()
        for _ in range(rounds):
            figures.fold_figures(conn)

    in_threads(*[lambda id=id: write(id) for id in ("n1", "n2")], fold, fold)
    assert sums(queue.conn)["attempts", "slow", "noop", "retried", "timeout"] == 2 * rounds


def test_snapshot_of_everything(conn: database.Connection, queue: Queue) -> None:
    node(conn, "noop", "mail")
    queue.fill(5, run_at="now() - interval '90 seconds'")
    queue.fill(3, run_at="now() + interval '1 hour'")
    queue.fill(2, state="'FAILED'")
    queue.fill(4, type="mail", queue="mail", run_at="now() - interval '10 seconds'")
    book().claim(conn, 2)
    figures.add_figures(conn, "n1", counted(*[DONE] * 30, FAILED, OTHERS))
    health = refresh(conn)
    assert (health.old_transaction, health.many_dead_rows) == (False, False)
    rows = {row.queue: row for row in figures.list_queues(conn)}
    assert sorted(rows) == ["default", "mail", "slow"]
    stats = rows["default"].stats
    assert stats is not None
    counts = stats.counts
    assert (counts.due, counts.scheduled, counts.processing, counts.failed, counts.live) == (3, 3, 2, 2, 10)
    assert 90 <= (stats.oldest_due_s or 0) < 1000
    assert stats.last_hour == {"completed": 30, "failed": 1}
    assert stats.completed_per_min > 0
    assert stats.failed_per_min == pytest.approx(stats.completed_per_min / 30, rel=0.1)
    assert stats.duration_s is not None
    assert 0.25 <= stats.duration_s.p50 <= 1.0
    assert 1.0 <= stats.duration_s.p99 <= 4.0
    mail = rows["mail"].stats
    assert mail is not None
    assert (mail.counts.due, mail.duration_s, mail.last_hour) == (4, None, {})
    types = {row.type: row for row in figures.list_types(conn, 30.0)}
    assert sorted(types) == ["mail", "noop"]
    assert types["noop"].nodes == 1
    assert types["noop"].stats is not None
    assert types["noop"].stats.counts.live == 10
    assert figures.get_queue(conn, "mail") == rows["mail"]
    assert figures.get_queue(conn, "nowhere") is None
    assert figures.get_type(conn, "nowhere", 30.0) is None


def test_snapshot_forgets_what_is_gone(conn: database.Connection, queue: Queue) -> None:
    queue.fill(3, queue="old")
    refresh(conn)
    assert [row.queue for row in figures.list_queues(conn)] == ["old"]
    queue.conn.execute("delete from aqd.jobs")
    refresh(conn)
    assert figures.list_queues(conn) == []


def test_settings_without_jobs_and_pages(conn: database.Connection, queue: Queue) -> None:
    queue.conn.execute("insert into aqd.queues (queue, paused, max_running) values ('b', true, 3)")
    for name in ("a", "c", "Z"):
        queue.fill(1, queue=name)
    refresh(conn)
    assert [row.queue for row in figures.list_queues(conn)] == ["Z", "a", "b", "c"], (
        "by bytes, as cursors are"
    )
    assert [row.queue for row in figures.list_queues(conn, after="a", limit=1)] == ["b"]
    row = figures.get_queue(conn, "b")
    assert row is not None
    assert (row.paused, row.max_running, row.at, row.stats) == (True, 3, None, None)


def test_names_are_bounded(conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues with most jobs are named; the others are not lost to the sums that follow."""
    monkeypatch.setattr(figures, "NAMES_MAX", 10)
    monkeypatch.setattr(figures, "GAUGES_MAX", 3)
    for number in range(30):
        queue.fill(number + 1, queue=f"q{number:02}")
    refresh(conn)
    assert [row.queue for row in figures.list_queues(conn)] == [f"q{n}" for n in range(20, 30)]
    named = {cell.labels[0] for cell in figures.gauges(conn) if cell.metric == "queue_jobs"}
    assert named == {"q29", "q28", "q27"}


def test_one_keeper_of_many_makes_the_snapshots(connect: Connect, queue: Queue) -> None:
    queue.fill(3)
    rounds = [Rounds(connect(), made(figures_s=100.0)) for _ in range(3)]
    for each in rounds:
        each.step()
    first = queue.value("select at from aqd.stats where kind = 'table'")
    assert first is not None
    for each in rounds:
        each.step(101.0)
    assert queue.value("select at from aqd.stats where kind = 'table'") == first
    queue.conn.execute("update aqd.stats set at = at - interval '101 s'")
    for each in rounds:
        each.step(101.0)
    assert queue.value("select at from aqd.stats where kind = 'table'") > first


def test_snapshots_that_cost_much_are_rare(conn: database.Connection, queue: Queue) -> None:
    """Whoever has made them says what they cost, and nobody makes them again before fifty times of that."""
    refresh(conn)
    factor, longest = keeper.COST_FACTOR, keeper.MAX_PAUSE_S
    queue.conn.execute(
        "update aqd.stats set at = now() - interval '60 s', data = data || '{\"cost_s\": 3.0}'"
        " where kind = 'table'"
    )
    assert figures.stats_are_fresh(conn, 10.0, factor, longest)
    queue.conn.execute("update aqd.stats set at = now() - interval '151 s' where kind = 'table'")
    assert not figures.stats_are_fresh(conn, 10.0, factor, longest)


def test_old_transaction_is_told(
    conn: database.Connection,
    connect: Connect,
    queue: Queue,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "OLD_TRANSACTION_S", 0.0)
    pin = connect(dispatcher=False)
    with pin.transaction():
        pin.execute("set transaction isolation level repeatable read")
        pin.execute("select count(*) from aqd.jobs")
        rounds = Rounds(conn, made(figures_s=0.1))
        rounds.step()
        (line,) = [each for each in lines() if each["event"] == "an old transaction holds back vacuum"]
        assert str(pin.info.backend_pid) in line["held_by"]
        warned = {cell.labels: cell.total for cell in figures.gauges(conn) if cell.metric == "warning"}
        assert warned == {("old_transaction",): 1.0, ("dead_rows",): 0.0}
        (age,) = [cell for cell in figures.gauges(conn) if cell.metric == "oldest_transaction"]
        assert age.total > 0


def test_minutes_are_kept_for_an_hour(conn: database.Connection, queue: Queue) -> None:
    node(conn, "noop")
    figures.add_figures(conn, "n1", counted(DONE))
    queue.conn.execute("update aqd.minutes set minute = minute - interval '71 minutes'")
    figures.add_figures(conn, "n1", counted(DONE, DONE))
    rounds = Rounds(conn, made())
    rounds.step()
    assert queue.value("select sum(count) from aqd.minutes where metric = 'attempts'") == 2
    assert sums(conn)["attempts", "default", "noop", "completed", ""] == 3


def test_node_of_the_version_before(conn: database.Connection, queue: Queue) -> None:
    """It says nothing of itself but what it knows."""
    queue.conn.execute(
        "insert into aqd.nodes (node_id, name, pid, generation, slots, version, state, types)"
        " values ('old', 'old', 1, 1, 4, '0.0', 'running', '{noop}')"
    )
    (row,) = figures.list_nodes(conn, 30.0)
    assert figures.node_info(row) == figures.NodeInfo()
    assert {cell.metric: cell.total for cell in figures.node_gauges([row])} == {
        "slots": 4.0,
        "busy": 0.0,
        "listener_up": 0.0,
    }


READERS = ("list_queues", "list_types", "list_nodes", "sum_figures", "busiest_queues", "get_stats")


@pytest.mark.parametrize("name", READERS)
def test_readers_look_at_no_job(name: str, conn: database.Connection, queue: Queue) -> None:
    """Cheap whatever the number of jobs: not one of their rows, live or finished, is read."""
    from aqd import statements

    queue.fill(2000, queue="'default'")
    statement = statements.get(name)
    values = {"after": "", "name": None, "limit": 100, "node_ttl_s": 30.0, "kind": "queue"}
    text = statement.text.decode()
    for number, param in enumerate(statement.params, 1):
        value = values[param]
        text = text.replace(f"${number}::", f"{'null' if value is None else repr(value)}::")
    plan = json.dumps(conn.execute("explain (format json) " + text).fetchall()[0][0])
    assert '"Relation Name": "jobs"' not in plan
    assert "job_history" not in plan


def test_snapshot_does_not_hold_up_the_queue(
    conn: database.Connection, connect: Connect, queue: Queue
) -> None:
    """Claiming, recording and submitting go on while one is being made."""
    queue.add(2)
    other = connect()
    done = threading.Event()

    def work() -> None:
        for job in book().claim(other, 2):
            store.record_completed(other, [completion(job)])
        figures.add_figures(other, "n1", counted(DONE))
        done.set()

    with conn.transaction():
        figures.refresh_stats(conn)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert done.wait(60.0)
        thread.join()
    assert queue.value("select count(*) from aqd.job_history") == 2


def test_aggregate(queue: Queue) -> None:
    def added(values: str) -> Any:
        return queue.value(f"select aqd.sum_buckets(b) from (values {values}) as v(b)")

    assert added("('{1,2}'::bigint[]), ('{10,20,30}'), ('{}')") == [11, 22, 30]
    assert added("('{}'::bigint[])") == []


def test_pairs_of_a_node_that_lives_are_bounded(
    conn: database.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its dispatchers has its own first pairs."""
    monkeypatch.setattr(figures, "PAIRS_MAX", 3)
    for number in range(6):
        figures.add_figures(
            conn,
            "n1",
            counted(*(Attempt(f"q{number}", f"t{n}", "completed", "", 1.0, 1.0) for n in range(4))),
        )
    figures.add_figures(conn, "n1", counted(Attempt("q0", "t1", "completed", "", 1.0, 1.0)))
    counts = {key[1:3]: count for key, count in sums(conn).items() if key[0] == "attempts"}
    assert counts == {**{("q0", f"t{n}"): 1 for n in range(4)}, ("q0", "t1"): 2, ("other", "other"): 20}
    minutes = "select count(distinct labels[1:2]), sum(count) from aqd.minutes where metric = 'attempts'"
    assert conn.execute(minutes.encode()).fetchone() == (5, 25)
