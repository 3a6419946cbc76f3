"""``aqd.enqueue``: defaults, bounds, transactions, notification; and ``store.enqueue`` in front of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from aqd import claims, job, store
from aqd.errors import InputError
from aqd.hookspecs import HandlerInfo
from aqd.job import JobRequest, validate
from tests.sql.conftest import Connect
from tests.sql.support import Queue


def test_defaults(queue: Queue) -> None:
    id = queue.value("select aqd.enqueue('send_mail')")
    row = queue.row(id)
    assert isinstance(id, int)
    assert row["state"] == "QUEUED"
    assert (row["type"], row["queue"], row["priority"]) == ("send_mail", "default", 0)
    assert row["payload"] == {}
    assert row["run_at"] == row["created_at"]
    assert (row["attempt"], row["max_attempts"], row["timeout_s"]) == (0, None, None)


def declare(queue: Queue, **queues: str | None) -> None:
    store.declare_handlers(queue.conn, [HandlerInfo(type=t, plugin="p", queue=q) for t, q in queues.items()])


def test_a_job_without_a_queue_goes_to_its_handlers(queue: Queue) -> None:
    declare(queue, mail="slow", pdf=None)
    assert queue.row(queue.value("select aqd.enqueue('mail')"))["queue"] == "slow"
    assert queue.row(queue.value("select aqd.enqueue('mail', queue => 'own')"))["queue"] == "own"
    assert queue.row(queue.value("select aqd.enqueue('pdf', queue => null)"))["queue"] == "default"
    assert store.enqueue(queue.conn, JobRequest(type="mail")).queue == "slow"
    declare(queue, mail=None, pdf="q2")
    assert queue.row(queue.value("select aqd.enqueue('mail')"))["queue"] == "default"
    assert queue.row(queue.value("select aqd.enqueue('pdf')"))["queue"] == "q2"


def test_named_arguments(queue: Queue) -> None:
    id = queue.value(
        """select aqd.enqueue(type => 'a.b:c/d-e_F9', payload => '[1]', queue => 'q', priority => -7,
                              delay_s => 2.5, max_attempts => 3, timeout_s => 0.5)"""
    )
    row = queue.row(id)
    assert (row["type"], row["queue"], row["priority"]) == ("a.b:c/d-e_F9", "q", -7)
    assert (row["payload"], row["max_attempts"], row["timeout_s"]) == ([1], 3, 0.5)
    run_at, created_at = (datetime.fromisoformat(row[key]) for key in ("run_at", "created_at"))
    assert run_at - created_at == timedelta(seconds=2.5)


def test_past_run_at_means_now(queue: Queue) -> None:
    """A job behind the claim floors would wait for a sweep, and a skewed clock would put it there."""
    id = queue.value("select aqd.enqueue('noop', run_at => now() - interval '1 hour')")
    row = queue.row(id)
    assert row["run_at"] == row["created_at"]


REFUSED = [
    ("type", "null"),
    ("type", "''"),
    ("type", "'with space'"),
    ("type", "E'line\\n'"),
    ("type", "repeat('x', 129)"),
    ("payload", "'t', payload => null"),
    ("queue", "'t', queue => 'ä'"),
    ("queue", "'t', queue => repeat('x', 129)"),
    ("priority", "'t', priority => 101"),
    ("priority", "'t', priority => -101"),
    ("priority", "'t', priority => null"),
    ("run_at", "'t', run_at => 'infinity'"),
    ("run_at", "'t', run_at => '-infinity'"),
    ("run_at", "'t', run_at => '9999-06-01'"),
    ("delay_s", "'t', delay_s => -0.001"),
    ("delay_s", "'t', delay_s => 'NaN'"),
    ("delay_s", "'t', delay_s => 'Infinity'"),
    ("delay_s", "'t', delay_s => 316224001"),
    ("delay_s", "'t', run_at => now(), delay_s => 1"),
    ("max_attempts", "'t', max_attempts => 0"),
    ("max_attempts", "'t', max_attempts => 1001"),
    ("timeout_s", "'t', timeout_s => 0"),
    ("timeout_s", "'t', timeout_s => 'NaN'"),
    ("timeout_s", "'t', timeout_s => 2592001"),
    ("tags", "'t', tags => '{a,b,a}'"),
    ("tags", "'t', tags => '{\"with space\"}'"),
    ("tags", "'t', tags => '{\"\"}'"),
    ("tags", "'t', tags => '{NULL}'"),
    ("tags", "'t', tags => '{{a,b}}'"),
    ("tags", "'t', tags => array[repeat('x', 129)]"),
    ("tags", "'t', tags => (select array_agg('t' || n) from generate_series(1, 33) n)"),
    ("meta", "'t', meta => 'null'"),
    ("meta", "'t', meta => '[]'"),
    ("meta", "'t', meta => '1'"),
    ("meta", "'t', meta => jsonb_build_object('a', repeat('x', 65536))"),
    ("idempotency_key", "'t', idempotency_key => ''"),
    ("idempotency_key", "'t', idempotency_key => repeat('x', 256)"),
    ("on_conflict", "'t', idempotency_key => 'k', on_conflict => 'ignore'"),
    ("on_conflict", "'t', idempotency_key => 'k', on_conflict => null"),
    ("on_conflict", "'t', on_conflict => 'replace'"),
    ("key_scope", "'t', key_scope => null"),
    ("key_scope", "'t', key_scope => repeat('x', 129)"),
]


def test_refused_with_field_and_bound(queue: Queue) -> None:
    for field, call in REFUSED:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
            queue.conn.execute(f"select aqd.enqueue({call})")
        assert caught.value.diag.column_name == field, call
        assert str(caught.value).startswith(f"aqd.enqueue: {field} must "), call
    assert queue.value("select count(*) from aqd.jobs") == 0


def test_bounds_are_those_of_the_api(queue: Queue) -> None:
    """The extreme values that ``aqd.job`` accepts are accepted here too."""
    for options in (
        {"priority": job.MIN_PRIORITY, "max_attempts": 1, "timeout_s": 0.1, "delay_s": 0},
        {"priority": job.MAX_PRIORITY, "max_attempts": job.MAX_ATTEMPTS, "timeout_s": job.MAX_TIMEOUT_S},
        {"delay_s": job.MAX_DELAY_S},
        {"run_at": job.MIN_RUN_AT},
        {"run_at": job.MAX_RUN_AT},
        {"queue": "q" * job.MAX_NAME_CHARS},
        {"tags": [f"{n:0128}" for n in range(job.MAX_TAGS)]},
        {"meta": {"a": "x" * (job.MAX_META_BYTES - 10)}},
        {"idempotency_key": "k" * job.MAX_KEY_CHARS},
    ):
        store.enqueue(queue.conn, validate("t" * job.MAX_NAME_CHARS, {}, **options))


def test_answer_is_what_was_stored(queue: Queue) -> None:
    for request in (validate("noop", {"a": [1, None, "ü"]}), validate("noop", delay_s=1.5)):
        made = store.enqueue(queue.conn, request)
        row = store.get_job(queue.conn, made.id)
        assert row is not None
        assert (made.state, made.run_at, made.created_at) == (row.state, row.run_at, row.created_at)
        assert made.created_at.tzinfo is UTC
    moment = datetime.now(UTC) + timedelta(days=1)
    assert store.enqueue(queue.conn, validate("noop", run_at=moment)).run_at == moment


def test_tags_and_meta(queue: Queue) -> None:
    id = queue.value("select aqd.enqueue('t', tags => '{b,a:1}', meta => '{\"k\": [1, \"ü\"]}')")
    row = store.get_job(queue.conn, id)
    assert row is not None
    assert (row.tags, json.loads(row.meta or "")) == (["b", "a:1"], {"k": [1, "ü"]})
    for nothing in ("tags => '{}', meta => '{}'", "tags => null, meta => null"):
        row = store.get_job(queue.conn, queue.value(f"select aqd.enqueue('t', {nothing})"))
        assert row is not None
        assert (row.tags, row.meta) == (None, None)
    made = store.enqueue(queue.conn, validate("t", tags=("x", "y.z"), meta={"a": {"b": None}}))
    row = store.get_job(queue.conn, made.id)
    assert row is not None
    assert (row.tags, json.loads(row.meta or "")) == (["x", "y.z"], {"a": {"b": None}})


def test_payload_survives(queue: Queue) -> None:
    for payload in (None, True, 0, -0.1, 2**70, "", "ü€😀", [], {"a": {"b": [1, {"c": None}]}}):
        id = store.enqueue(queue.conn, validate("noop", payload)).id
        row = store.get_job(queue.conn, id)
        assert row is not None
        assert json.loads(row.payload) == payload


def test_database_refusals_name_the_field(queue: Queue) -> None:
    """What slips past ``aqd.job`` (a client of another version) is still the user's mistake."""
    with pytest.raises(InputError) as caught:
        store.enqueue(queue.conn, JobRequest(type="noop", priority=101))
    assert caught.value.field == "priority"
    for payload in ("{", '"\\u0000"', '"\\ud800"', "[" * 100_000):
        with pytest.raises(InputError) as caught:
            store.enqueue(queue.conn, JobRequest(type="noop", payload=payload))
        assert caught.value.field == "payload"
    assert queue.value("select count(*) from aqd.jobs") == 0


def test_inside_the_callers_transaction(connect: Connect, queue: Queue) -> None:
    conn = connect(dispatcher=False)
    with conn.transaction(force_rollback=True):
        lost = store.enqueue(conn, validate("noop")).id
    with conn.transaction():
        kept = store.enqueue(conn, validate("noop")).id
        assert queue.value("select count(*) from aqd.jobs") == 0
    assert [row[0] for row in queue.conn.execute("select id from aqd.jobs")] == [kept]
    assert kept != lost


def notifications(conn: psycopg.Connection[Any]) -> int:
    """How many notifications have arrived; the round trip flushes what is on the way."""
    conn.execute("select 1")
    return len(list(conn.notifies(timeout=0)))


def test_notifies_only_while_somebody_sleeps(connect: Connect, queue: Queue) -> None:
    listener = connect()
    listener.execute(f"listen {claims.CHANNEL}")
    sleeper = claims.Sleeper()

    queue.add()
    assert notifications(listener) == 0
    sleeper.announce(listener)
    queue.add()
    assert notifications(listener) == 1
    with queue.conn.transaction():
        queue.add(10)
    assert notifications(listener) == 1, "the payload is constant, so one transaction notifies once"
    queue.add(delay_s=60)
    assert notifications(listener) == 0, "a job for later wakes nobody"
    sleeper.woken(listener, "me")
    assert [n.payload for n in listener.notifies(timeout=1, stop_after=1)] == ["me"], "told to who sleeps on"
    queue.add()
    assert notifications(listener) == 0


def test_notify_can_be_switched_off(connect: Connect, queue: Queue) -> None:
    listener = connect()
    listener.execute(f"listen {claims.CHANNEL}")
    claims.Sleeper().announce(listener)
    silent = connect(notify=False)
    store.enqueue(silent, validate("noop"))
    assert notifications(listener) == 0
    queue.conn.execute("set aqd.notify = off")
    queue.add()
    assert notifications(listener) == 0
    queue.conn.execute("reset aqd.notify")
    queue.add()
    assert notifications(listener) == 1


def test_wakes_for_whatever_becomes_due(connect: Connect, queue: Queue) -> None:
    """Retry by hand, release and reconciliation make jobs due as enqueue does."""
    from tests.sql.support import book, failure, released

    queue.add(3)
    worker = connect()
    one, two, _three = book().claim(worker, 3)
    store.record_failed(worker, [failure(one)])
    listener = connect()
    listener.execute(f"listen {claims.CHANNEL}")
    claims.Sleeper().announce(listener)
    for act in (
        lambda: store.retry_job(queue.conn, one.id),
        lambda: store.release(worker, [released(two)], 20),
        lambda: store.reconcile(worker, "node-1", [], 0.0),
    ):
        act()
        assert notifications(listener) == 1
