"""Changing what waits, and queues: priority and moment of a job, pause and limit of a queue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from aqd import claims, database, store
from aqd.errors import ConflictError, InputError, NotFoundError
from tests.sql.support import Queue, book, everything
from tests.sql.test_change import Case, cancelled, completed, failed, running

# --- a waiting job ----------------------------------------------------------------------------------


def test_update_changes_what_is_given(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add(delay_s=3600, priority=3)
    before = queue.row(id)
    made = store.update_job(conn, id, priority=-7)
    assert (made.id, made.state, made.priority) == (id, "QUEUED", -7)
    assert queue.row(id) == before | {"priority": -7}
    made = store.update_job(conn, id, delay_s=60)
    assert made.priority == -7
    assert 50 < (made.run_at - datetime.now(UTC)).total_seconds() <= 60
    at = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    assert store.update_job(conn, id, run_at=at, priority=100).run_at == at
    assert store.update_job(conn, id, run_at="2031-05-06T09:08:09+02:00").run_at.hour == 7


def test_a_moment_in_the_past_means_now(conn: database.Connection, queue: Queue) -> None:
    """Else it lay behind the floors of the nodes. And who sleeps is woken."""
    mine = book()
    (id,) = queue.add(delay_s=3600)
    assert mine.claim(conn, 1) == []
    sleeper = claims.Sleeper()
    conn.execute("listen aqd_jobs")
    sleeper.announce(conn)
    made = store.update_job(conn, id, run_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert abs((made.run_at - datetime.now(UTC)).total_seconds()) < 60
    assert len(list(conn.notifies(timeout=10, stop_after=1))) == 1
    assert [job.id for job in mine.claim(conn, 1)] == [id]


def test_a_later_moment_wakes_too(conn: database.Connection, queue: Queue) -> None:
    """Whoever sleeps has asked for the next due moment when this job was due in an hour."""
    (id,) = queue.add(delay_s=3600)
    conn.execute("listen aqd_jobs")
    claims.Sleeper().announce(conn)
    store.update_job(conn, id, delay_s=5)
    assert len(list(conn.notifies(timeout=10, stop_after=1))) == 1


@pytest.mark.parametrize("case", [running, failed, completed, cancelled])
def test_only_what_waits_is_updated(conn: database.Connection, queue: Queue, case: Case) -> None:
    id = case(conn, queue)
    before = everything(queue)
    with pytest.raises(ConflictError, match=r"is [A-Z]+; only a QUEUED job"):
        store.update_job(conn, id, priority=1)
    assert everything(queue) == before
    with pytest.raises(NotFoundError):
        store.update_job(conn, 999_999, priority=1)


WRONG_UPDATES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"priority": 101}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": 1.0}, "priority"),
    ({"delay_s": -1}, "delay_s"),
    ({"delay_s": float("nan")}, "delay_s"),
    ({"delay_s": 1, "run_at": "2031-01-01T00:00:00Z"}, "delay_s"),
    ({"run_at": datetime(2031, 1, 1)}, "run_at"),
    ({"run_at": "tomorrow"}, "run_at"),
    ({"run_at": "9999-01-01T00:00:00Z"}, "run_at"),
]


def test_an_update_is_checked(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    before = everything(queue)
    for given, field in WRONG_UPDATES:
        with pytest.raises(InputError) as caught:
            store.update_job(conn, id, **given)
        assert caught.value.field == field, given
    assert everything(queue) == before


# --- queues -----------------------------------------------------------------------------------------


def test_pausing_and_resuming(conn: database.Connection, queue: Queue) -> None:
    first = store.pause_queue(conn, "mail/out", "anna")
    assert (first.queue, first.paused, first.max_running, first.changed_by) == (
        "mail/out",
        True,
        None,
        "anna",
    )
    assert store.pause_queue(conn, "mail/out", "bert") == first, "nothing changed, nothing is written"
    limited = store.limit_queue(conn, "mail/out", 5, "bert")
    assert (limited.paused, limited.max_running, limited.changed_by) == (True, 5, "bert")
    resumed = store.resume_queue(conn, "mail/out", "carl")
    assert (resumed.paused, resumed.max_running) == (False, 5)
    free = store.limit_queue(conn, "mail/out", None, "dora")
    assert (free.paused, free.max_running, free.changed_by) == (False, None, "dora")


def test_a_queue_at_its_defaults_needs_no_row(conn: database.Connection, queue: Queue) -> None:
    plain = store.QueueSettings("q", False, None, None, None)
    assert store.resume_queue(conn, "q", "anna") == plain
    assert store.limit_queue(conn, "q", None, "anna") == plain
    assert queue.value("select count(*) from aqd.queues") == 0
    assert store.limit_queue(conn, "q", 1, "anna").max_running == 1


def test_resuming_wakes(conn: database.Connection, queue: Queue) -> None:
    store.pause_queue(conn, "default", "anna")
    conn.execute("listen aqd_jobs")
    claims.Sleeper().announce(conn)
    store.resume_queue(conn, "default", "anna")
    assert len(list(conn.notifies(timeout=10, stop_after=1))) == 1


def test_a_limit_is_a_number_from_one(conn: database.Connection, queue: Queue) -> None:
    wrong: list[Any] = [0, -1, True, 1.5, "5", 1_000_001]
    for value in wrong:
        with pytest.raises(InputError) as caught:
            store.limit_queue(conn, "default", value, "anna")
        assert caught.value.field == "max_running"
    assert queue.value("select count(*) from aqd.queues") == 0


def test_a_queue_has_a_name(conn: database.Connection) -> None:
    for name in ("", "a b", "ü", "x" * 129, "a\0"):
        with pytest.raises(InputError) as caught:
            store.pause_queue(conn, name, "anna")
        assert caught.value.field == "queue"
