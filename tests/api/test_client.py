"""The Python client: in the caller's transaction, on the caller's connection, whatever its settings."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from aqd import client
from aqd.errors import ConflictError, InputError, NotFoundError


@pytest.fixture(params=["plain", "autocommit", "dictionaries", "no prepare", "New York"])
def conn(request: pytest.FixtureRequest, database_url: str) -> Iterator[psycopg.Connection[Any]]:
    options: dict[str, Any] = {
        "autocommit": {"autocommit": True},
        "dictionaries": {"row_factory": dict_row},
        "no prepare": {"prepare_threshold": None},
        "New York": {"options": "-c timezone=America/New_York"},
    }.get(request.param, {})
    with psycopg.connect(database_url, **options) as made:
        yield made


def test_a_job_is_stored(conn: psycopg.Connection[Any]) -> None:
    run_at = datetime.now(UTC).replace(microsecond=1) + timedelta(days=1)
    for _ in range(7):  # past the prepared statement's threshold
        made = client.enqueue(
            conn,
            "a",
            {"n": [1, "é", None]},
            queue="q",
            priority=3,
            run_at=run_at,
            max_attempts=2,
            timeout_s=1,
        )
        assert made.state == "QUEUED"
        assert made.run_at == run_at
    seen = client.get(conn, str(made.id))
    assert json.loads(seen.payload) == {"n": [1, "é", None]}
    assert (seen.type, seen.queue, seen.priority, seen.max_attempts, seen.timeout_s) == ("a", "q", 3, 2, 1.0)
    assert conn.execute("select 1 as one").fetchone() in ((1,), {"one": 1})


def test_it_commits_and_rolls_back_with_the_caller(database_url: str) -> None:
    with psycopg.connect(database_url) as conn, psycopg.connect(database_url, autocommit=True) as other:
        conn.execute("create table orders (id int)")
        conn.commit()
        conn.execute("insert into orders values (1)")
        kept = client.enqueue(conn, "a")
        with pytest.raises(NotFoundError):
            client.get(other, kept.id)
        conn.commit()
        assert client.get(other, kept.id).state == "QUEUED"
        lost = client.enqueue(conn, "a")
        conn.rollback()
        with pytest.raises(NotFoundError):
            client.get(other, lost.id)


def test_a_refused_job_leaves_the_transaction_alone(conn: psycopg.Connection[Any]) -> None:
    client.enqueue(conn, "a")
    for arguments, field in [
        ({"type": ""}, "type"),
        ({"type": "a", "payload": {"x": "\0"}}, "payload.x"),
        ({"type": "a", "payload": float("nan")}, "payload"),
        ({"type": "a", "priority": 1000}, "priority"),
        ({"type": "a", "run_at": datetime(2030, 1, 1)}, "run_at"),
        ({"type": "a", "delay_s": 1, "run_at": datetime.now(UTC)}, "delay_s"),
    ]:
        with pytest.raises(InputError) as caught:
            client.enqueue(conn, **arguments)
        assert caught.value.field == field
    client.enqueue(conn, "a")


def test_retry(conn: psycopg.Connection[Any]) -> None:
    made = client.enqueue(conn, "a")
    with pytest.raises(ConflictError):
        client.retry(conn, made.id)
    conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [made.id])
    assert client.retry(conn, made.id).state == "QUEUED"
    with pytest.raises(NotFoundError):
        client.retry(conn, made.id + 1)
    with pytest.raises(InputError):
        client.get(conn, "x")


def test_cancel(conn: psycopg.Connection[Any]) -> None:
    made = client.enqueue(conn, "a")
    for _ in range(3):
        answer = client.cancel(conn, str(made.id))
        assert answer[:2] == (made.id, "CANCELLED")
        assert answer.finished_at is not None
    assert client.get(conn, made.id).cancel_requested_at == answer.cancel_requested_at
    running = client.enqueue(conn, "a")
    conn.execute(
        "update aqd.jobs set state = 'PROCESSING', attempt = 1, lease_token = 1, node_id = 'n',"
        " claimed_at = now(), lease_expires_at = now() + interval '1 minute' where id = %s",
        [running.id],
    )
    asked = client.cancel(conn, running.id)
    assert (asked.state, asked.finished_at) == ("PROCESSING", None)
    assert client.cancel(conn, running.id) == asked
    failed = client.enqueue(conn, "a")
    conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [failed.id])
    assert client.cancel(conn, failed.id) == (failed.id, "FAILED", None, None)
    with pytest.raises(NotFoundError):
        client.cancel(conn, failed.id + 1)
    with pytest.raises(InputError):
        client.cancel(conn, "x")
    assert conn.execute("select 1 as one").fetchone() in ((1,), {"one": 1})


def test_a_cancel_commits_and_rolls_back_with_the_caller(database_url: str) -> None:
    with (
        psycopg.connect(database_url) as conn,
        psycopg.connect(database_url, autocommit=True) as other,
        psycopg.connect(database_url, autocommit=True) as listener,
    ):
        running, waiting = client.enqueue(other, "a").id, client.enqueue(other, "a").id
        other.execute(
            "update aqd.jobs set state = 'PROCESSING', attempt = 1, lease_token = 1, node_id = 'n',"
            " claimed_at = now(), lease_expires_at = now() + interval '1 minute' where id = %s",
            [running],
        )
        listener.execute("listen aqd_cancel")
        for id in (running, waiting):
            client.cancel(conn, id)
        conn.rollback()
        assert client.get(other, running).cancel_requested_at is None
        assert client.get(other, waiting).state == "QUEUED"
        for id in (running, waiting):
            client.cancel(conn, id)
        assert client.get(other, waiting).state == "QUEUED"
        conn.commit()
        assert client.get(other, waiting).state == "CANCELLED"
        told = [notice.payload for notice in listener.notifies(timeout=5, stop_after=1)]
        assert told == ["n"], "once, for the commit"
        assert list(listener.notifies(timeout=0)) == []


def test_cancel_asynchronously(database_url: str) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database_url, row_factory=dict_row) as conn:
            made = await client.enqueue_async(conn, "a")
            answer = await client.cancel_async(conn, made.id)
            assert answer[:2] == (made.id, "CANCELLED")
            assert await client.cancel_async(conn, str(made.id)) == answer
            with pytest.raises(NotFoundError):
                await client.cancel_async(conn, made.id + 1)
            with pytest.raises(InputError):
                await client.cancel_async(conn, "x")
            await conn.rollback()
            kept = await client.enqueue_async(conn, "a")
            await conn.commit()
            await client.cancel_async(conn, kept.id)
            await conn.rollback()

    asyncio.run(run())
    with psycopg.connect(database_url) as conn:
        assert conn.execute("select state from aqd.all_jobs").fetchall() == [("QUEUED",)]


def test_asynchronously(database_url: str) -> None:
    async def run() -> list[client.EnqueuedJob]:
        async with await psycopg.AsyncConnection.connect(database_url, row_factory=dict_row) as conn:
            made = [await client.enqueue_async(conn, "a", {"n": n}, priority=n, delay_s=5) for n in range(7)]
            with pytest.raises(InputError):
                await client.enqueue_async(conn, "a", "\ud800")
            await conn.commit()
            await client.enqueue_async(conn, "rolled-back")
            await conn.rollback()
            return made

    made = asyncio.run(run())
    assert made[0].run_at - made[0].created_at == timedelta(seconds=5)
    with psycopg.connect(database_url) as conn:
        found = conn.execute("select id, payload, priority from aqd.jobs order by id").fetchall()
    assert found == [(each.id, {"n": n}, n) for n, each in enumerate(made)]
