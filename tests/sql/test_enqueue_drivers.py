"""Submitting inside the application's own transaction, with the drivers that applications have: commit makes the
job visible, rollback leaves nothing. psycopg through ``aqd.client``, everybody else by ``select aqd.enqueue(…)``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from django.db import DatabaseError, connections, transaction

from aqd import client
from aqd.binaries import find_binaries

ENQUEUE = "select aqd.enqueue('mail', '{\"n\": 1}', queue => 'q', delay_s => 60, tags => '{a,b}', idempotency_key => 'k')"
REFUSED = "select aqd.enqueue('mail', priority => 1000)"


class Books:
    """The application's table beside the queue, as somebody else sees them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.conn = psycopg.connect(url, autocommit=True)
        self.conn.execute("create table orders (id int)")

    def seen(self) -> tuple[int, list[int]]:
        """How many orders, and the ids of the jobs."""
        row = self.conn.execute(
            "select (select count(*) from orders), array(select id from aqd.jobs order by id)"
        ).fetchone()
        assert row is not None
        return row

    def job(self) -> dict[str, Any]:
        """The only one."""
        row = self.conn.execute(
            "select to_jsonb(j) - 'id' from aqd.jobs j where state = 'QUEUED' order by id"
        ).fetchone()
        assert row is not None
        return dict(row[0])


@pytest.fixture
def books(database_url: str) -> Iterator[Books]:
    made = Books(database_url)
    yield made
    made.conn.close()


def check(books: Books, rolled_back: Callable[[], None], committed: Callable[[], Any]) -> None:
    """Both halves; ``committed`` gives the id, or None where the driver cannot see it."""
    rolled_back()
    assert books.seen() == (0, [])
    id = committed()
    orders, jobs = books.seen()
    assert (orders, len(jobs)) == (1, 1)
    assert id in (None, jobs[0])
    job = books.job()
    assert (job["type"], job["payload"], job["queue"], job["tags"]) == ("mail", {"n": 1}, "q", ["a", "b"])


OPTIONS: dict[str, Any] = {"queue": "q", "delay_s": 60, "tags": ["a", "b"], "idempotency_key": "k"}


def test_psycopg(books: Books) -> None:
    def rolled_back() -> None:
        with psycopg.connect(books.url) as conn:
            conn.execute("insert into orders values (1)")
            client.enqueue(conn, "mail", {"n": 1}, **OPTIONS)
            client.enqueue_many(conn, [{"type": "mail"}] * 3)
            assert books.seen() == (0, [])
            conn.rollback()

    def committed() -> int:
        with psycopg.connect(books.url) as conn:
            conn.execute("insert into orders values (1)")
            made = client.enqueue(conn, "mail", {"n": 1}, **OPTIONS)
            assert client.enqueue(conn, "mail", {"n": 1}, **OPTIONS).id == made.id
            assert books.seen() == (0, [])
        return made.id

    check(books, rolled_back, committed)


def test_psycopg_asynchronously(books: Books) -> None:
    async def rolled_back() -> None:
        async with await psycopg.AsyncConnection.connect(books.url) as conn:
            await conn.execute("insert into orders values (1)")
            await client.enqueue_async(conn, "mail", {"n": 1}, **OPTIONS)
            await client.enqueue_many_async(conn, [{"type": "mail"}] * 3)
            await conn.rollback()

    async def committed() -> int:
        async with await psycopg.AsyncConnection.connect(books.url) as conn:
            await conn.execute("insert into orders values (1)")
            made = await client.enqueue_async(conn, "mail", {"n": 1}, **OPTIONS)
            assert books.seen() == (0, [])
        return made.id

    check(books, lambda: asyncio.run(rolled_back()), lambda: asyncio.run(committed()))


def test_asyncpg(books: Books) -> None:
    call = (
        "select aqd.enqueue($1, $2::jsonb, queue => $3, delay_s => $4, tags => $5::text[],"
        " idempotency_key => $6)"
    )
    arguments = ("mail", json.dumps({"n": 1}), "q", 60.0, ["a", "b"], "k")

    async def rolled_back() -> None:
        conn = await asyncpg.connect(books.url)
        before = conn.transaction()
        await before.start()
        await conn.execute("insert into orders values (1)")
        await conn.fetchval(call, *arguments)
        await before.rollback()
        with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
            await conn.fetchval(REFUSED)
        assert caught.value.column_name == "priority"
        await conn.close()

    async def committed() -> int:
        conn = await asyncpg.connect(books.url)
        async with conn.transaction():
            await conn.execute("insert into orders values (1)")
            id: int = await conn.fetchval(call, *arguments)
            assert await conn.fetchval(call, *arguments) == id
            assert books.seen() == (0, [])
        await conn.close()
        return id

    check(books, lambda: asyncio.run(rolled_back()), lambda: asyncio.run(committed()))


def test_sqlalchemy(books: Books) -> None:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(books.url), poolclass=sqlalchemy.NullPool
    )
    call = sqlalchemy.text(
        "select aqd.enqueue(:type, cast(:payload as jsonb), queue => :queue, delay_s => :delay_s,"
        " tags => cast(:tags as text[]), idempotency_key => :key)"
    )
    arguments = {
        "type": "mail",
        "payload": '{"n": 1}',
        "queue": "q",
        "delay_s": 60,
        "tags": ["a", "b"],
        "key": "k",
    }

    def rolled_back() -> None:
        with engine.connect() as conn:
            conn.execute(sqlalchemy.text("insert into orders values (1)"))
            conn.execute(call, arguments)
            # Its driver's connection is one for the client too.
            client.enqueue(conn.connection.driver_connection, "mail")  # type: ignore[arg-type]
            conn.rollback()

    def committed() -> int:
        with engine.begin() as conn:
            conn.execute(sqlalchemy.text("insert into orders values (1)"))
            id = conn.execute(call, arguments).scalar_one()
            assert books.seen() == (0, [])
        return int(id)

    check(books, rolled_back, committed)
    with engine.begin() as conn, pytest.raises(sqlalchemy.exc.DBAPIError, match="priority must"):
        conn.execute(sqlalchemy.text(REFUSED))


def _django(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": query.get("host") or parts.hostname or "",
        "PORT": query.get("port") or str(parts.port or ""),
    }


def test_django(books: Books) -> None:
    if not settings.configured:
        settings.configure(DATABASES={"default": {}}, USE_TZ=True, LOGGING_CONFIG=None)
        django.setup(set_prefix=False)
    connections.settings = connections.configure_settings({"default": _django(books.url)})
    conn = connections["default"]
    arguments = ["mail", '{"n": 1}', "q", 60, ["a", "b"], "k"]
    call = "select aqd.enqueue(%s, %s::jsonb, queue => %s, delay_s => %s, tags => %s::text[], idempotency_key => %s)"

    def rolled_back() -> None:
        with transaction.atomic(), conn.cursor() as cursor:
            cursor.execute("insert into orders values (1)")
            cursor.execute(call, arguments)
            client.enqueue(conn.connection, "mail")  # psycopg's own connection below it
            transaction.set_rollback(True)

    def committed() -> int:
        with transaction.atomic(), conn.cursor() as cursor:
            cursor.execute("insert into orders values (1)")
            cursor.execute(call, arguments)
            (id,) = cursor.fetchone()
            assert books.seen() == (0, [])
        return int(id)

    try:
        check(books, rolled_back, committed)
        with pytest.raises(DatabaseError, match="priority must"), conn.cursor() as cursor:
            cursor.execute(REFUSED)
    finally:
        connections.close_all()
        del connections["default"]


def psql(url: str, text: str) -> subprocess.CompletedProcess[str]:
    """psql as it comes, without anybody's settings."""
    beside = Path(find_binaries(os.environ.get("AQD_TEST_POSTGRES_BIN")).directory) / "psql"
    program = str(beside) if beside.exists() else shutil.which("psql")
    assert program is not None, "needs psql, beside the server's programs or in PATH"
    return subprocess.run(
        [program, "-XqAt", "-v", "ON_ERROR_STOP=1", url],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_psql(books: Books) -> None:
    def rolled_back() -> None:
        done = psql(books.url, f"begin; insert into orders values (1); {ENQUEUE}; rollback;")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip().isdigit()

    def committed() -> int:
        done = psql(books.url, f"begin; insert into orders values (1); {ENQUEUE}; {ENQUEUE}; commit;")
        assert (done.returncode, done.stderr) == (0, "")
        first, second = done.stdout.split()
        assert first == second
        return int(first)

    check(books, rolled_back, committed)
    done = psql(books.url, f"begin; insert into orders values (2); {REFUSED}; commit;")
    assert done.returncode != 0
    assert "aqd.enqueue: priority must be between -100 and 100" in done.stderr
    assert books.seen()[0] == 1
