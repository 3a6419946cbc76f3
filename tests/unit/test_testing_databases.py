"""``aqd.testing``: where the databases for tests come from, and what is left of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from aqd import migrate
from aqd.errors import WorldError
from aqd.testing import Server, open_server
from tests.fixtures.postgres import Postgres


@pytest.mark.parametrize(
    ("admin", "expected"),
    [
        ("postgresql://u:p%40@h:5433/postgres", "postgresql://u:p%40@h:5433/name"),
        ("postgresql://u@/postgres?host=/run/x&port=1", "postgresql://u@/name?host=/run/x&port=1"),
        ("postgresql:///?dbname=postgres&port=1", "postgresql:///name?port=1"),
        ("host=/run/x dbname=postgres user=u", "user=u host=/run/x dbname=name"),
    ],
)
def test_urls_of_databases_beside_the_named_one(admin: str, expected: str) -> None:
    url = Server(admin, "").url("name")
    assert conninfo_to_dict(url) == conninfo_to_dict(expected)
    assert ("://" in url) == ("://" in admin)  # other drivers read URLs only


def test_each_database_is_new_and_dropped_with_whoever_is_in_it(pg: Postgres) -> None:
    with open_server({"AQD_TEST_DATABASE_URL": pg.admin_url}) as server:
        one, other = server.create(), server.create()
        with (
            contextlib.closing(server.connect(one)) as conn,
            psycopg.connect(other, autocommit=True) as neighbour,
        ):
            migrate.check(conn)
            neighbour.execute("create table own ()")
            assert conn.execute("select to_regclass('own')").fetchone() == (None,)
            server.drop(one)
            with pytest.raises(psycopg.OperationalError):
                conn.execute("select 1")
            server.drop(other)
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(one)


def test_without_a_server_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # DATABASE_URL is the application's own, never a test's.
    environ = {"AQD_TEST_POSTGRES_BIN": str(tmp_path), "DATABASE_URL": "postgresql://u@127.0.0.1:1/x"}
    with pytest.raises(WorldError, match="set AQD_TEST_DATABASE_URL, or:"), open_server(environ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_killed_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locks = {}
    for name in ("dead", "young", "alive"):
        folder = tmp_path / f"aqd-testing-{name}" / "postgres"
        folder.mkdir(parents=True)
        locks[name] = folder / "lock"
        locks[name].touch()
        if name != "young":
            os.utime(locks[name], (1, 1))
    with locks["alive"].open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(WorldError), open_server({"AQD_TEST_POSTGRES_BIN": str(tmp_path)}):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aqd-testing-alive", "aqd-testing-young"]
