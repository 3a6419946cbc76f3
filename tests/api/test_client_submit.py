"""The Python client: keys, tags, meta, many jobs at once; the asynchronous twins say the same."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from aqd import client, job
from aqd.errors import ConflictError, IdempotencyConflict, InputError, NotFoundError
from aqd.store import submit

Enqueue = Callable[..., client.EnqueuedJob]


class Both:
    """The client's functions on one of the two kinds of connections, called alike."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        self.asynchronous = kind == "async"
        self._runner = asyncio.Runner()
        if self.asynchronous:
            self.conn: Any = self._runner.run(psycopg.AsyncConnection.connect(url, **options))
        else:
            self.conn = psycopg.connect(url, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if hasattr(psycopg.Connection, name):
            return lambda *args, **kwargs: self._end(getattr(self.conn, name)(*args, **kwargs))
        function = getattr(client, f"{name}_async" if self.asynchronous else name)
        return lambda *args, **kwargs: self._end(function(self.conn, *args, **kwargs))

    def _end(self, value: Any) -> Any:
        async def ended() -> Any:
            return await value

        return self._runner.run(ended()) if inspect.isawaitable(value) else value

    def rows(self, query: str) -> list[Any]:
        return list(self._end(self.execute(query).fetchall()))


@pytest.fixture(params=["sync", "async"])
def both(request: pytest.FixtureRequest, database_url: str) -> Iterator[Both]:
    made = Both(database_url, request.param)
    yield made
    made.close()
    made._runner.close()


def test_the_twins_have_the_same_arguments() -> None:
    for name in ("enqueue", "enqueue_many", "get", "retry", "cancel"):
        one, other = (inspect.signature(getattr(client, each)) for each in (name, f"{name}_async"))
        assert list(one.parameters.values())[1:] == list(other.parameters.values())[1:]
        assert one.return_annotation == other.return_annotation


def test_all_ways_to_submit_have_the_same_options() -> None:
    """HTTP's fields, the client's keywords, a batch's dictionaries."""
    fields = set(job.JobBody.__struct_fields__)
    keywords = set(inspect.signature(client.enqueue).parameters) - {"conn", "idempotency_ttl_hours"}
    assert keywords == fields
    assert client.NewJob.__required_keys__ | client.NewJob.__optional_keys__ == fields


def test_tags_and_meta(both: Both) -> None:
    made = both.enqueue("a", 1, tags=("b", "a:1"), meta={"k": [None, "ü"]})
    seen = both.get(str(made.id))
    assert (seen.tags, json.loads(seen.meta)) == (["b", "a:1"], {"k": [None, "ü"]})
    for nothing in ({}, {"tags": [], "meta": {}}, {"tags": (), "meta": None}):
        seen = both.get(both.enqueue("a", **nothing).id)
        assert (seen.tags, seen.meta) == (None, None)
    seen = both.get(both.enqueue("a", tags={"x": 1}.keys()).id)
    assert seen.tags == ["x"]


def test_keys(both: Both) -> None:
    first = both.enqueue("a", {"n": 1}, idempotency_key="k", idempotency_ttl_hours=1)
    again = both.enqueue("a", {"n": 1}, idempotency_key="k")
    assert again == first._replace(outcome="existing")
    with pytest.raises(IdempotencyConflict, match="payload") as caught:
        both.enqueue("a", {"n": 2}, idempotency_key="k")
    assert (caught.value.id, caught.value.differs) == (first.id, ("payload",))
    assert isinstance(caught.value, ConflictError)
    with pytest.raises(IdempotencyConflict):
        both.enqueue("a", {"n": 1}, idempotency_key="k", on_conflict="reject")
    replaced = both.enqueue("b", idempotency_key="k", on_conflict="replace", delay_s=9)
    assert (replaced.id, replaced.outcome) == (first.id, "replaced")
    assert both.get(first.id).type == "b"
    # No error has broken the transaction.
    both.commit()
    both.execute("delete from aqd.jobs")
    assert both.enqueue("b", idempotency_key="k", delay_s=9) == (first.id, None, None, None, None, "existing")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": ""}, "type"),
    ({"type": None}, "type"),
    ({"type": "\0"}, "type"),
    ({"type": "\ud800"}, "type"),
    ({"type": "a", "payload": {"x": "\0"}}, "payload.x"),
    ({"type": "a", "payload": ["\ud800"]}, "payload[0]"),
    ({"type": "a", "payload": float("inf")}, "payload"),
    ({"type": "a", "payload": {1: 2}}, "payload"),
    ({"type": "a", "payload": object()}, "payload"),
    ({"type": "a", "queue": "a b"}, "queue"),
    ({"type": "a", "priority": 101}, "priority"),
    ({"type": "a", "priority": True}, "priority"),
    ({"type": "a", "priority": 1.0}, "priority"),
    ({"type": "a", "run_at": datetime(2030, 1, 1)}, "run_at"),
    ({"type": "a", "run_at": 5}, "run_at"),
    ({"type": "a", "delay_s": float("nan")}, "delay_s"),
    ({"type": "a", "delay_s": 1, "run_at": datetime.now(UTC)}, "delay_s"),
    ({"type": "a", "max_attempts": 0}, "max_attempts"),
    ({"type": "a", "timeout_s": 0}, "timeout_s"),
    ({"type": "a", "tags": "abc"}, "tags"),
    ({"type": "a", "tags": 5}, "tags"),
    ({"type": "a", "tags": {"a": 1}}, "tags"),
    ({"type": "a", "tags": ["a", 1]}, "tags[1]"),
    ({"type": "a", "tags": ["a", "a"]}, "tags[1]"),
    ({"type": "a", "tags": ["\0"]}, "tags[0]"),
    ({"type": "a", "tags": [f"t{n}" for n in range(33)]}, "tags"),
    ({"type": "a", "meta": []}, "meta"),
    ({"type": "a", "meta": "{}"}, "meta"),
    ({"type": "a", "meta": {"x": ["\0"]}}, "meta.x[0]"),
    ({"type": "a", "meta": {"x": "y" * 65_536}}, "meta"),
    ({"type": "a", "idempotency_key": ""}, "idempotency_key"),
    ({"type": "a", "idempotency_key": "é"}, "idempotency_key"),
    ({"type": "a", "idempotency_key": 5}, "idempotency_key"),
    ({"type": "a", "idempotency_key": "k", "on_conflict": "ignore"}, "on_conflict"),
    ({"type": "a", "on_conflict": "replace"}, "on_conflict"),
]


def test_bad_values_are_named_and_send_nothing(both: Both) -> None:
    """The same from one job as from many, where the place is named too."""
    for arguments, field in REFUSED:
        with pytest.raises(InputError) as caught:
            both.enqueue(**arguments)
        assert caught.value.field == field, arguments
        with pytest.raises(InputError) as among:
            both.enqueue_many([{"type": "a"}, arguments])
        assert among.value.field == f"jobs[1].{field}", arguments
        assert (among.value.reason, among.value.bound) == (caught.value.reason, caught.value.bound)
    for hours in (0, -1, float("nan"), 87_601, "1", True, None):
        for call in (
            lambda hours=hours: both.enqueue("a", idempotency_ttl_hours=hours),
            lambda hours=hours: both.enqueue_many([{"type": "a"}], idempotency_ttl_hours=hours),
        ):
            with pytest.raises(InputError) as caught:
                call()
            assert caught.value.field == "idempotency_ttl_hours"
    assert both.rows("select count(*) from aqd.jobs") == [(0,)]


# --- many -----------------------------------------------------------------------------------------


def test_many(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "CHUNK_JOBS", 100)
    jobs = ({"type": "a", "payload": n, "tags": [f"t{n}"], "priority": n % 3} for n in range(1_050))
    made = both.enqueue_many(jobs)
    assert [each.id for each in made] == sorted({each.id for each in made})
    assert {each.outcome for each in made} == {"created"}
    assert both.rows("select id, payload, tags, priority from aqd.jobs order by id") == [
        (each.id, n, [f"t{n}"], n % 3) for n, each in enumerate(made)
    ]
    assert both.enqueue_many([]) == []
    both.rollback()
    assert both.rows("select count(*) from aqd.jobs") == [(0,)]


def test_many_with_keys(both: Both) -> None:
    first = both.enqueue("a", 1, idempotency_key="old")
    jobs: list[client.NewJob] = [
        {"type": "a", "payload": 1, "idempotency_key": "z"},
        {"type": "a"},
        {"type": "a", "payload": 1, "idempotency_key": "old"},
        {"type": "b", "payload": 2, "idempotency_key": "z", "on_conflict": "replace"},
    ]
    made = both.enqueue_many(jobs, idempotency_ttl_hours=0.5)
    assert [each.outcome for each in made] == ["created", "created", "existing", "replaced"]
    assert made[2].id == first.id
    assert made[3].id == made[0].id
    with pytest.raises(IdempotencyConflict) as caught:
        both.enqueue_many([{"type": "c"}, {"type": "c", "idempotency_key": "old"}])
    assert caught.value.id == first.id
    assert both.rows("select count(*) from aqd.jobs where type = 'c'") == [(0,)]
    assert both.rows("select count(*) from aqd.jobs") == [(3,)]


def test_many_are_all_or_none(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a chunk has been stored, also when it is the caller's own iterator that breaks."""
    monkeypatch.setattr(submit, "CHUNK_JOBS", 10)
    both.execute("create table orders (id int)")

    def breaks() -> Iterator[dict[str, Any]]:
        yield from ({"type": "a"} for _ in range(25))
        raise ZeroDivisionError

    for jobs, error in (
        (breaks(), ZeroDivisionError),
        ([{"type": "a"}] * 25 + [{"type": ""}], InputError),
        ([{"type": "a"}] * 25 + [None], InputError),
        ([{"type": "a"}] * 25 + ["a"], InputError),
        ([{"type": "a"}] * 25 + [{"type": "a", "typo": 1}], InputError),
        ([{"type": "a"}] * 25 + [{}], InputError),
    ):
        with pytest.raises(error):
            both.enqueue_many(jobs)
    both.execute("insert into orders values (1)")
    both.commit()
    assert both.rows("select (select count(*) from orders), (select count(*) from aqd.jobs)") == [(1, 0)]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_many_on_an_autocommit_connection(kind: str, database_url: str) -> None:
    both = Both(database_url, kind, autocommit=True, row_factory=dict_row, prepare_threshold=None)
    with pytest.raises(InputError):
        both.enqueue_many([{"type": "a"}] * 1500 + [{"type": ""}])
    assert len(both.enqueue_many([{"type": "a"}] * 1500)) == 1500
    assert both.rows("select count(*) as n from aqd.jobs") == [{"n": 1500}]
    both.close()
    both._runner.close()


# --- looking and retrying, asynchronously ---------------------------------------------------------


def test_get_and_retry(both: Both) -> None:
    made = both.enqueue("a", [1])
    assert json.loads(both.get(made.id).payload) == [1]
    with pytest.raises(ConflictError, match="QUEUED"):
        both.retry(made.id)
    both.execute("update aqd.jobs set state = 'FAILED'")
    assert both.retry(str(made.id)).state == "QUEUED"
    for call in (both.get, both.retry):
        with pytest.raises(NotFoundError):
            call(made.id + 1)
        for id in ("x", "0", "-1", "9223372036854775808", 0):
            with pytest.raises(InputError):
                call(id)


@asynccontextmanager
async def connections(url: str, count: int) -> AsyncIterator[list[psycopg.AsyncConnection[Any]]]:
    made = [await psycopg.AsyncConnection.connect(url) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def test_many_tasks_under_one_key(database_url: str) -> None:
    """Of twenty tasks one makes the job; the others wait for its transaction and get the same one."""

    async def run() -> list[client.EnqueuedJob]:
        async with connections(database_url, 20) as conns:

            async def one(conn: psycopg.AsyncConnection[Any]) -> client.EnqueuedJob:
                made = await client.enqueue_async(conn, "a", idempotency_key="k")
                await conn.commit()
                return made

            return await asyncio.gather(*map(one, conns))

    made = asyncio.run(run())
    assert len({each.id for each in made}) == 1
    assert sorted(each.outcome for each in made) == ["created"] + ["existing"] * 19
