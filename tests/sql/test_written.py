"""How long JSON may be as PostgreSQL writes it out, which no claim gets around: refused by every way in, never stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from aqd import client, job, store
from aqd.errors import InputError
from aqd.job import JobRequest, validate
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book

MAX_META = job.MAX_META_BYTES
# 65,536 bytes and less as given; ", " and ": " make them longer than that. Numbers with an exponent do, too; those are
# refused by aqd.job already.
LONG_META = {
    "separators": json.dumps({"a": [1] * 32_000}, separators=(",", ":")),
    "numbers": '{"a": [' + ",".join(["1e308"] * 300) + "]}",
}
Submit = Callable[[Any, list[JobRequest]], object]
WAYS: dict[str, Submit] = {
    "one": lambda conn, requests: [store.enqueue(conn, each) for each in requests],
    "many": store.enqueue_many,
}


def refused(conn: Any, submit: Submit, *requests: JobRequest) -> InputError:
    with pytest.raises(InputError) as caught, conn.transaction():
        submit(conn, list(requests))
    assert conn.execute("select count(*) from aqd.jobs").fetchone() == (0,)
    assert conn.execute("select count(*) from aqd.idempotency_keys").fetchone() == (0,)
    return caught.value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("meta", LONG_META)
def test_meta_is_measured_as_written(queue: Queue, way: str, key: str | None, meta: str) -> None:
    request = replace(validate("noop", idempotency_key=key), meta=LONG_META[meta])
    error = refused(queue.conn, WAYS[way], validate("noop"), request)
    assert error.field == "meta"
    assert "65536" in str(error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [None, "k"])
def test_meta_at_the_bound(queue: Queue, way: str, key: str | None) -> None:
    """{"a": "…"} is written as it is given here."""
    text = json.dumps({"a": "x" * (MAX_META - 9)})
    assert len(text) == MAX_META
    WAYS[way](queue.conn, [validate("noop", meta_json=text, idempotency_key=key)])
    assert queue.value("select octet_length(meta::text) from aqd.jobs") == MAX_META


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("number", "size"), [("1e308", 309), ("0e-16000", 16_002)])
def test_payloads_that_are_written_longer_than_they_are(
    queue: Queue, way: str, key: str | None, number: str, size: int
) -> None:
    text = "[" + ",".join([number] * (69_000_000 // (size + 2))) + "]"
    request = replace(validate("noop", idempotency_key=key), payload=text)
    error = refused(queue.conn, WAYS[way], validate("noop"), request)
    assert error.field == "payload"


@pytest.mark.parametrize(
    "payload",
    [
        "('[' || repeat('1e130000,', 9000) || '1]')::jsonb",  # cannot be written at all
        "('[' || repeat('1e130000,', 600) || '1]')::jsonb",  # 78 MB
        "to_jsonb(repeat('x', 67108863))",
    ],
    ids=["endless", "long", "text"],
)
@pytest.mark.parametrize("key", ["", ", idempotency_key => 'k'"])
def test_the_function_measures_what_is_written(queue: Queue, payload: str, key: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        queue.conn.execute(f"select aqd.enqueue('noop', {payload}{key})".encode())
    assert caught.value.diag.column_name == "payload"
    assert queue.value("select count(*) from aqd.jobs") == 0


def test_the_longest_payload_is_claimed(connect: Connect, queue: Queue) -> None:
    queue.conn.execute("select aqd.enqueue('noop', to_jsonb(repeat('x', 67108862)))")
    (claimed,) = book().claim(connect(), 10)
    assert len(claimed.payload) == 64 << 20


def test_the_client_refuses(queue: Queue) -> None:
    jobs: list[Any] = [{"type": "noop", "meta": json.loads(LONG_META["separators"])}]
    with pytest.raises(InputError, match="meta"):
        client.enqueue_many(queue.conn, jobs)
    assert queue.value("select count(*) from aqd.jobs") == 0


def test_what_is_short_only_because_it_is_compressed(queue: Queue) -> None:
    """A value of a table of the application's: 10 kB of it, 100 bytes there, 78 MB written."""
    queue.conn.execute("create temp table own (data jsonb)")
    queue.conn.execute("insert into own select ('[' || repeat('1e130000,', 600) || '1]')::jsonb")
    assert queue.value("select pg_column_size(data) from own") < 1000
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        queue.conn.execute("select aqd.enqueue('noop', data) from own")
    queue.conn.execute("update own set data = ('[' || repeat('1e130000,', 420) || '1]')::jsonb")
    assert queue.value("select aqd.enqueue('noop', data) from own")
    assert queue.value("select octet_length(payload::text) from aqd.jobs") < 64 << 20
