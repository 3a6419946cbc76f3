"""Many jobs in one statement: the same jobs as one by one, in their order, all or none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from aqd import claims, store
from aqd.errors import IdempotencyConflict, InputError
from aqd.hookspecs import HandlerInfo
from aqd.job import JobRequest, validate
from aqd.store import submit
from tests.sql.conftest import Connect
from tests.sql.support import Queue
from tests.sql.test_enqueue import notifications

MOMENT = datetime(2040, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)

# Every kind of value once: what an array literal could spoil is all here.
SHAPES = [
    validate("noop"),
    validate("a.b:c/d-e_F9", {"a": [1, None, 'ü"\\{},NULL\n\t', "😀"]}, queue="q", priority=-100),
    validate("noop", payload_json='{"n":0.10000000000000000001, "text":"NULL"}', priority=100),
    validate("noop", "NULL", run_at=MOMENT, max_attempts=1000, timeout_s=0.1),
    validate("noop", delay_s=90.5, timeout_s=2_592_000, max_attempts=1),
    validate("noop", run_at=datetime(1970, 1, 1, tzinfo=UTC)),
    validate("noop", tags=["b", "a", "NULL", "x:1/2"], meta={"k": {"deep": ['"', "\\"]}}),
    validate("mail", tags=[], meta={}),
    validate("slow"),
]
COLUMNS = (
    "type, payload::text, queue, priority, max_attempts, timeout_s, tags, meta::text, state, attempt,"
    " run_at - created_at, case when run_at <> created_at then run_at end"
)


def stored(queue: Queue, made: list[Any]) -> list[Any]:
    rows = queue.conn.execute(
        f"select {COLUMNS} from aqd.jobs where id = any(%s) order by id".encode(),
        [[each.id for each in made]],
    ).fetchall()
    # A moment itself is the same in both; a delay counts from its own transaction.
    return [row[:10] + ((row[10],) if row[5] == 2_592_000 else (row[11],)) for row in rows]


def test_the_same_jobs_as_one_by_one(queue: Queue) -> None:
    store.declare_handlers(queue.conn, [HandlerInfo(type="slow", plugin="p", queue="behind")])
    singly = [store.enqueue(queue.conn, request) for request in SHAPES]
    together = store.enqueue_many(queue.conn, SHAPES)
    assert stored(queue, together) == stored(queue, singly)
    for made in together:
        assert isinstance(made, store.EnqueuedJob)
        row = store.get_job(queue.conn, made.id)
        assert row is not None
        assert made == (row.id, row.state, row.run_at, row.created_at, row.queue, "created")
    assert together[-1].queue == "behind"  # type: ignore[union-attr]
    assert together[4].run_at - together[4].created_at == timedelta(seconds=90.5)  # type: ignore[union-attr,operator]


def test_in_order_and_in_chunks(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "CHUNK_JOBS", 30)
    monkeypatch.setattr(submit, "CHUNK_BYTES", 100)
    store.declare_handlers(
        queue.conn, [HandlerInfo(type=f"t{n}", plugin="p", queue=f"q{n}") for n in range(10)]
    )
    requests = [validate(f"t{n % 10}", "x" * (n % 50)) for n in range(200)]
    requests[77:77] = [validate("large", "y" * 1000)]
    made = store.enqueue_many(queue.conn, requests)
    assert [each.id for each in made] == sorted(each.id for each in made)
    rows = queue.conn.execute("select type, payload from aqd.jobs order by id").fetchall()
    assert rows == [(request.type, request.payload.strip('"')) for request in requests]
    assert [each.queue for each in made[:3]] == ["q0", "q1", "q2"]  # type: ignore[union-attr]
    assert store.enqueue_many(queue.conn, []) == []


def test_keys_among_them(queue: Queue) -> None:
    """Each answer stands where its request stood; a key that stands twice makes one job."""
    first = store.enqueue(queue.conn, validate("noop", 1, idempotency_key="old"))
    requests = [
        validate("noop", 0),
        validate("noop", 1, idempotency_key="z"),
        validate("noop", 1, idempotency_key="old"),
        validate("noop", 1, idempotency_key="a"),
        validate("noop", 2, idempotency_key="old"),
        validate("noop", 1, idempotency_key="z"),
        validate("noop", 9, idempotency_key="a", on_conflict="replace"),
        validate("noop", 9, idempotency_key="a", on_conflict="reject"),
        validate("noop", 3),
    ]
    made = store.enqueue_many(queue.conn, requests, ttl_hours=2)
    assert [each.outcome if isinstance(each, store.EnqueuedJob) else each.differs for each in made] == [
        *("created", "created", "existing", "created", ("payload",), "existing", "replaced", (), "created")
    ]
    assert made[2].id == made[4].id == first.id
    assert made[1].id == made[5].id
    assert made[3].id == made[6].id == made[7].id
    assert isinstance(made[4], IdempotencyConflict)
    assert queue.row(made[3].id)["payload"] == 9
    assert queue.value("select count(*) from aqd.jobs") == 5
    assert queue.value("select count(*) from aqd.idempotency_keys where expires_at < now() + '3 hours'") == 2


def test_a_broken_one_leaves_nothing(queue: Queue) -> None:
    for broken in (JobRequest(type="noop", payload='"\\u0000"'), JobRequest(type="noop", payload="{")):
        with pytest.raises(InputError, match="payload"):
            store.enqueue_many(queue.conn, [validate("noop"), broken])
    assert queue.value("select count(*) from aqd.jobs") == 0


def test_wakes_once_if_one_of_them_is_due(connect: Connect, queue: Queue) -> None:
    listener = connect()
    listener.execute(f"listen {claims.CHANNEL}")
    claims.Sleeper().announce(listener)
    store.enqueue_many(queue.conn, [validate("noop", delay_s=60)] * 3)
    assert notifications(listener) == 0
    store.enqueue_many(queue.conn, [validate("noop", delay_s=60), validate("noop")])
    assert notifications(listener) == 1
    store.enqueue_many(queue.conn, [validate("noop", idempotency_key=f"k{n}") for n in range(3)])
    assert notifications(listener) == 1
    with connect(dispatcher=False).transaction(force_rollback=True) as transaction:
        store.enqueue_many(transaction.connection, [validate("noop")] * 3)
    assert notifications(listener) == 0


def test_in_the_callers_transaction(connect: Connect, queue: Queue) -> None:
    conn: psycopg.Connection[Any] = connect(dispatcher=False)
    with conn.transaction(force_rollback=True):
        store.enqueue_many(conn, SHAPES)
    with conn.transaction():
        store.enqueue_many(conn, SHAPES[:2])
        assert queue.value("select count(*) from aqd.jobs") == 0
    assert queue.value("select count(*) from aqd.jobs") == 2
