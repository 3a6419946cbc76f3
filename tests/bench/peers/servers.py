"""The servers of a comparison: one PostgreSQL, one Redis, and in them a fresh, empty store for each run.

Both are children of ours, on loopback or a unix socket, and die with us. PostgreSQL has its default durability
(fsync and synchronous_commit on); Redis keeps nothing on disk, which is its fastest setting.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import psycopg

from aqd.binaries import find_binaries, spawn
from tests.fixtures.postgres import LocalPostgres, free_port, remove_leftovers
from tests.fixtures.processes import wait_until

# LocalPostgres is for tests and turns fsync off; jit and the rest stay as PostgreSQL has them.
POSTGRES_OPTIONS = {"fsync": "on", "shared_buffers": "512MB", "max_connections": "200"}
SHOWN = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "max_connections", "autovacuum")


class Store(Protocol):
    """Where the jobs of one run are."""

    url: str
    server: int  # pid of the server, for its processor time

    def filled(self) -> None:
        """To be called after filling, before workers start."""

    def count(self, question: Sequence[str]) -> int:
        """A number: the sum of the answers."""

    def wal_bytes(self) -> int | None:
        """Written since ``filled``."""


class PostgresStore:
    """A database of its own."""

    def __init__(self, url: str, server: int) -> None:
        self.url = url
        self.server = server
        self._conn = psycopg.connect(url, autocommit=True, application_name="the comparison")
        self._lsn = ""

    def filled(self) -> None:
        # What autovacuum does for a queue in use. The checkpoint: every page that is touched afterwards
        # is written to the WAL whole once, for everybody from the same start.
        self._conn.execute("analyze")
        self._conn.execute("checkpoint")
        self._lsn = self._one("select pg_current_wal_insert_lsn()::text")

    def count(self, question: Sequence[str]) -> int:
        return sum(int(self._one(each)) for each in question)

    def wal_bytes(self) -> int | None:
        return int(self._one(f"select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '{self._lsn}')"))

    def _one(self, statement: str) -> str:
        row = self._conn.execute(statement.encode()).fetchone()
        assert row is not None
        return str(row[0])

    def close(self) -> None:
        self._conn.close()


class RedisStore:
    """Database 0 of the server, emptied."""

    def __init__(self, port: int, server: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.server = server
        self._address = ("127.0.0.1", port)

    def filled(self) -> None:
        return

    def count(self, question: Sequence[str]) -> int:
        return sum(redis(self._address, each) for each in question)

    def wal_bytes(self) -> int | None:
        return None


def redis(address: tuple[str, int], line: str) -> int:
    """The integer that Redis answers to ``line``, an inline command; 0 for ``+OK`` and ``+PONG``."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(line.encode() + b"\r\n")
        answer = connection.makefile("rb").readline().decode().strip()
    if answer.startswith(":"):
        return int(answer[1:])
    if answer in ("+OK", "+PONG"):
        return 0
    raise RuntimeError(f"Redis answered {answer!r} to {line!r}")


class Servers:
    """Both servers, each started when it is first asked for. PostgreSQL's files are below ``base``."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._postgres: LocalPostgres | None = None
        self._closing = contextlib.ExitStack()
        self._redis: tuple[int, int] | None = None  # port, pid

    @property
    def postgres(self) -> LocalPostgres:
        if self._postgres is None:
            remove_leftovers(self._base)
            self._postgres = LocalPostgres(find_binaries(), POSTGRES_OPTIONS, self._base)
            self._closing.callback(self._postgres.close)
        return self._postgres

    def settings(self) -> dict[str, str]:
        """PostgreSQL's version and the settings that matter here."""
        with self.postgres.connect() as conn:
            rows = conn.execute("select name, current_setting(name) from pg_settings").fetchall()
        found: dict[str, str] = dict(rows)
        return {"version": self.postgres.source, **{name: found[name] for name in SHOWN}}

    @contextlib.contextmanager
    def database(self) -> Iterator[Store]:
        """A new database, dropped afterwards with everybody in it thrown out."""
        server = self.postgres
        assert server.process is not None
        name = server.create_database()
        try:
            store = PostgresStore(server.url(name), server.process.pid)
            try:
                yield store
            finally:
                store.close()
        finally:
            server.drop_database(name)

    @contextlib.contextmanager
    def redis(self, program: str) -> Iterator[Store]:
        """Redis without anything in it."""
        if self._redis is None:
            self._redis = self._start_redis(program)
        port, pid = self._redis
        redis(("127.0.0.1", port), "FLUSHALL")
        yield RedisStore(port, pid)

    def _start_redis(self, program: str) -> tuple[int, int]:
        directory = Path(tempfile.mkdtemp(prefix="aqd-peers-redis-"))
        self._closing.callback(shutil.rmtree, directory, ignore_errors=True)
        port = free_port()
        # The name decides what the program is: redis-check-rdb is the same file in Debian.
        link = directory / "redis-server"
        link.symlink_to(program)
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        process = spawn(
            [str(link), *options, "--dir", str(directory)],
            account=None,
            environment={"PATH": "/usr/bin:/bin"},
            death_signal=signal.SIGKILL,
            directory=str(directory),
        )

        def stop() -> None:
            process.kill()
            process.wait()

        self._closing.callback(stop)

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"redis-server ended with {process.returncode}")
            with contextlib.suppress(OSError):
                return redis(("127.0.0.1", port), "PING") == 0
            return False

        wait_until(answers, 10, "redis-server answers")
        return port, process.pid

    def close(self) -> None:
        self._closing.close()
