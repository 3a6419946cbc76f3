"""``aqd.testing.Queue``: jobs are claimed, run and recorded as by a daemon, when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

import aqd
from aqd import client
from aqd.errors import NotFoundError
from aqd.testing import Queue, Report, load_plugins

ran: list[Any] = []
# What a handler enqueues on.
on: list[psycopg.Connection[Any]] = []


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    handlers.add("note", note)
    handlers.add("mail", note, queue="mail", max_attempts=2, keep_output=True)
    handlers.add("fail", fail, max_attempts=3, backoff=aqd.Backoff(60, 60, 1))
    handlers.add("discard", discard)
    handlers.add("later", later)
    handlers.add("fan", fan)
    handlers.add("endless", endless)


def note(payload: Any, job: Any) -> Any:
    ran.append(payload)
    print("noted")
    return {"payload": payload, "tags": job.tags, "meta": job.meta}


def fail(payload: Any, job: Any) -> Any:
    if job.attempt < (payload or 100):
        raise ValueError(f"attempt {job.attempt}")
    return job.attempt


def discard(payload: Any) -> None:
    raise aqd.Discard("never")


def later(payload: Any) -> None:
    raise aqd.Retry(after_s=3600)


def fan(payload: Any) -> None:
    client.enqueue(on[0], "note", "low", priority=-5)
    client.enqueue(on[0], "note", "high", priority=5)


def endless(payload: Any) -> None:
    client.enqueue(on[0], "endless", payload + 1)


@pytest.fixture
def queue(database_url: str) -> Iterator[Queue]:
    plugin = ModuleType("orders")
    plugin.aqd_register = aqd_register  # type: ignore[attr-defined]
    ran.clear()
    with (
        psycopg.connect(database_url, autocommit=True) as conn,
        load_plugins(plugin) as plugins,
    ):
        on[:] = [conn]
        yield Queue(conn, plugins, database_url)


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(each.outcome.kind, each.job.state) for each in report]


def test_a_drain_runs_what_is_due_in_the_order_of_a_slot(queue: Queue) -> None:
    for payload, priority in (("a", 0), ("b", 10), ("c", -10), ("d", 10)):
        queue.enqueue("note", payload, priority=priority)
    queue.enqueue("note", "tomorrow", delay_s=86_400)
    report = queue.drain().assert_completed()
    assert ran == ["b", "d", "a", "c"]
    assert (len(report), len(report.completed), report.failed, report.retried) == (4, 4, [], [])
    assert len(queue.drain()) == 0
    assert queue.travel(86_400) == 1
    queue.drain()
    assert ran[-1] == "tomorrow"


def test_jobs_look_as_after_a_daemon(queue: Queue) -> None:
    job = queue.enqueue("mail", {"to": ["a"]}, tags=["x"], meta={"trace": 1})
    assert job.queue == "mail"  # as the handler declares it
    queue.drain()
    stored = queue.job(job.id)
    assert (stored.state, stored.attempt, stored.queue) == ("COMPLETED", 1, "mail")
    assert stored.result == {"payload": {"to": ["a"]}, "tags": ["x"], "meta": {"trace": 1}}
    assert (stored.tags, stored.meta) == (("x",), {"trace": 1})
    assert stored.row.output == "noted\n"
    assert stored.row.node_id == "aqd.testing"
    assert stored.row.wall_s is not None
    assert queue.assert_completed(job.id) == stored.result


def test_a_retry_waits_unless_it_is_asked_for(queue: Queue) -> None:
    job = queue.enqueue("fail", 3)
    assert kinds(queue.drain()) == [("failed", "QUEUED")]
    assert queue.drain().ran == []
    queue.travel(59)
    assert queue.drain().ran == []
    queue.travel(1)
    assert kinds(queue.drain(retries=True)) == [("failed", "QUEUED"), ("completed", "COMPLETED")]
    assert queue.assert_completed(job.id) == 3
    assert [(each.attempt, each.kind, each.reason) for each in queue.attempts(job.id)] == [
        (1, "failed", "exception"),
        (2, "failed", "exception"),
    ]


def test_attempts_are_used_up(queue: Queue) -> None:
    job = queue.enqueue("fail")
    report = queue.drain(retries=True)
    assert kinds(report) == [("failed", "QUEUED"), ("failed", "QUEUED"), ("failed", "FAILED")]
    assert (len(report.retried), len(report.failed)) == (2, 1)
    assert "attempt 3" in queue.assert_failed(job.id)
    with pytest.raises(AssertionError, match=r"(?s)1 of 1 jobs.*fail.*attempt 3.*Traceback"):
        report.assert_completed()
    with pytest.raises(AssertionError, match="FAILED: ValueError: attempt 3"):
        queue.assert_completed(job.id)
    client.retry(queue.conn, job.id)
    assert kinds(queue.drain()) == [("failed", "QUEUED")]


def test_discard_and_a_wish_for_a_retry(queue: Queue) -> None:
    discarded = queue.enqueue("discard")
    wish = queue.enqueue("later")
    report = queue.drain()
    assert kinds(report) == [("discarded", "FAILED"), ("failed", "QUEUED")]
    assert queue.attempts(discarded.id)[0].reason == "discard"
    assert queue.travel(3590) == 1
    assert queue.drain().ran == []
    queue.travel(10)
    assert [each.job.id for each in queue.drain()] == [wish.id]


def test_what_handlers_enqueue_is_run_too(queue: Queue) -> None:
    queue.enqueue("fan")
    queue.enqueue("note", "middle")
    assert len(queue.drain()) == 4
    assert ran == ["high", "middle", "low"]


def test_a_queue_that_never_ends_is_told(queue: Queue) -> None:
    queue.enqueue("endless", 0)
    with pytest.raises(AssertionError, match=r"has run 5 attempts.*endless"):
        queue.drain(limit=5)
    (left,) = queue.jobs(state="QUEUED")
    assert (left.payload, left.attempt) == (5, 0)


def test_types_that_nobody_serves_are_told(queue: Queue) -> None:
    queue.enqueue("note", 1)
    queue.enqueue("nothing")
    with pytest.raises(AssertionError, match=r"nothing \(1\).*note"):
        queue.drain()
    assert queue.drain(unserved=True).ran == []
    assert ran == [1]


def test_paused_and_other_queues_are_left_alone(queue: Queue) -> None:
    queue.enqueue("note", "mine", queue="mine")
    queue.enqueue("note", "other", queue="other")
    assert len(queue.drain(queues=["mine"])) == 1
    queue.conn.execute("insert into aqd.queues (queue, paused) values ('other', true)")
    assert queue.drain().ran == []
    queue.conn.execute("update aqd.queues set paused = false")
    assert len(queue.drain()) == 1


def test_a_cancelled_job_does_not_run(queue: Queue) -> None:
    job = queue.enqueue("note")
    client.cancel(queue.conn, job.id)
    assert queue.drain().ran == []
    assert queue.job(job.id).state == "CANCELLED"


@pytest.mark.parametrize("options", [{}, {"row_factory": dict_row}])
def test_in_the_applications_own_transaction(queue: Queue, options: dict[str, Any]) -> None:
    with psycopg.connect(queue.url, **options) as conn:
        on[:] = [conn]
        client.enqueue(conn, "fan")
        client.enqueue(conn, "fail", 2)
        assert queue.drain().ran == []  # another connection sees nothing of it
        mine = queue.on(conn)
        report = mine.drain(retries=True).assert_completed()
        assert len(report) == 5
        assert ran == ["high", "low"]
        mine.assert_enqueued("note", "high", count=1)
        assert mine.jobs(state="COMPLETED") == mine.jobs()
        conn.rollback()
    assert queue.jobs() == []


def test_in_a_session_of_sqlalchemy(queue: Queue) -> None:
    engine = sqlalchemy.create_engine(queue.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as session:
        conn = session.connection.driver_connection
        client.enqueue(conn, "note", 1)
        queue.on(conn).drain().assert_completed()
        session.rollback()
    engine.dispose()
    assert ran == [1]
    assert queue.jobs() == []


def test_looking(queue: Queue) -> None:
    queue.enqueue("note", {"n": (1, 2)}, tags=["a"], queue="q")
    queue.enqueue("note", {"n": 3})
    queue.enqueue("fail")
    assert [job.type for job in queue.jobs()] == ["note", "note", "fail"]
    assert [job.payload for job in queue.jobs(tag="a", queue="q", state="QUEUED")] == [{"n": [1, 2]}]
    assert len(queue.jobs(type="note", where=lambda job: job.payload["n"] == 3)) == 1
    assert len(queue.assert_enqueued("note")) == 2
    assert queue.assert_enqueued("note", {"n": (1, 2)}, queue="q", tag="a", count=1)[0].queue == "q"
    queue.assert_not_enqueued("mail")
    queue.assert_not_enqueued("note", {"n": 4})
    with pytest.raises(AssertionError, match=r"(?s)payload None, found 0.*1 note QUEUED.*2 note"):
        queue.assert_enqueued("note", None)
    with pytest.raises(AssertionError, match="3 jobs of type 'note', found 2"):
        queue.assert_enqueued("note", count=3)
    with pytest.raises(AssertionError, match="found 3"):
        queue.assert_not_enqueued()
    with pytest.raises(AssertionError, match="is QUEUED"):
        queue.assert_failed(queue.jobs()[0].id)
    with pytest.raises(NotFoundError):
        queue.job(99)


def test_without_jobs_there_is_nothing(queue: Queue) -> None:
    queue.assert_not_enqueued()
    assert queue.drain().assert_completed().ran == []
    with pytest.raises(AssertionError, match="no jobs at all"):
        queue.assert_enqueued("note")
