"""All ways to submit a job agree: what is left out means the same everywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from aqd import client, http_client
from aqd.cli.command import run as command_line
from aqd.testing import Queue, load_plugins
from tests.fixtures.api import ROOT, Api

KEY = "order-42"


class Entries:
    """Each submits a job of the type ``noop`` under :data:`KEY`, without a payload unless it is given, and returns the
    job's id."""

    def __init__(self, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
        self.api = api
        self.capsys = capsys

    def all(self) -> dict[str, Callable[..., int]]:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("by_")}

    def by_http(self, **given: Any) -> int:
        body = {"type": "noop", "idempotency_key": KEY, **given}
        return int(self.api.post("/jobs", body).json["id"])

    def by_http_batch(self, **given: Any) -> int:
        body = {"jobs": [{"type": "noop", "idempotency_key": KEY, **given}]}
        return int(self.api.post("/jobs/batch", body).json["results"][0]["id"])

    def by_sql(self, **given: Any) -> int:
        more = "".join(f", {name} => '{json.dumps(value)}'" for name, value in given.items())
        with psycopg.connect(self.api.database_url) as conn:
            found = conn.execute(f"select aqd.enqueue('noop', idempotency_key => '{KEY}'{more})").fetchone()
        assert found is not None
        return int(found[0])

    def by_command_line(self, **given: Any) -> int:
        arguments = [json.dumps(value) for value in given.values()]
        assert command_line(["submit", "noop", *arguments, "--idempotency-key", KEY]) == 0
        return int(self.capsys.readouterr().out)

    def by_client(self, **given: Any) -> int:
        with psycopg.connect(self.api.database_url) as conn:
            return client.enqueue(conn, "noop", idempotency_key=KEY, **given).id

    def by_client_many(self, **given: Any) -> int:
        with psycopg.connect(self.api.database_url) as conn:
            return client.enqueue_many(conn, [{"type": "noop", "idempotency_key": KEY, **given}])[0].id

    def by_async_client(self, **given: Any) -> int:
        async def enqueue() -> int:
            async with await psycopg.AsyncConnection.connect(self.api.database_url) as conn:
                made = await client.enqueue_async(conn, "noop", idempotency_key=KEY, **given)
                again = await client.enqueue_many_async(
                    conn, [{"type": "noop", "idempotency_key": KEY, **given}]
                )
                assert again[0].id == made.id
                return made.id

        return asyncio.run(enqueue())

    def by_http_client(self, **given: Any) -> int:
        with http_client.Client(f"http://127.0.0.1:{self.api.port}") as http:
            return int(http.enqueue("noop", idempotency_key=KEY, **given).id)

    def by_http_client_many(self, **given: Any) -> int:
        with http_client.Client(f"http://127.0.0.1:{self.api.port}") as http:
            return int(http.enqueue_many([{"type": "noop", "idempotency_key": KEY, **given}])[0].id)

    def by_async_http_client(self, **given: Any) -> int:
        async def enqueue() -> int:
            async with http_client.AsyncClient(f"http://127.0.0.1:{self.api.port}") as http:
                return int((await http.enqueue("noop", idempotency_key=KEY, **given)).id)

        return asyncio.run(enqueue())

    def by_testing(self, **given: Any) -> int:
        with (
            load_plugins(ROOT / "plugins" / "noop.py") as plugins,
            psycopg.connect(self.api.database_url) as conn,
        ):
            return Queue(conn, plugins).enqueue("noop", idempotency_key=KEY, **given).id


@pytest.mark.parametrize(("given", "stored"), [({}, {}), ({"payload": None}, None), ({"payload": {}}, {})])
def test_one_key_at_all_entries(
    api: Api,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    stored: object,
) -> None:
    """Without a payload it is {}, so that a key means the same request wherever it comes; null stays null."""
    monkeypatch.setenv("DATABASE_URL", api.database_url)
    made = {name: enqueue(**given) for name, enqueue in Entries(api, capsys).all().items()}
    assert len(made) == 11
    assert len(set(made.values())) == 1, made
    with psycopg.connect(api.database_url) as conn:
        assert conn.execute("select payload from aqd.jobs").fetchall() == [(stored,)]
