"""The rule by which nodes of two versions share a database: migrations that say online, and those that say breaking."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import migrate, store
from aqd.config import Database
from aqd.database import Connection
from aqd.errors import Exit, SchemaMismatch
from aqd.paths import data_dir
from aqd.schema import Schema
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.test_migrate import NEWEST, further

SHIPPED = sorted((data_dir("sql") / "migrations").glob("*.sql"))

# What squawk finds and we know better, everywhere:
EXCLUDED = {
    "require-lock-timeout": "aqd/migrate.py sets one, and tries again",
    "require-statement-timeout": "a migration may take its time; what waits for locks is bounded",
    "prefer-robust-stmts": "all are one transaction, so none runs twice",
    "prefer-bigint-over-int": "attempts, counters and seconds, not keys",
    "prefer-bigint-over-smallint": "priorities are between -100 and 100",
}
# And in files that were applied somewhere, so that they cannot change any more; with how often.
KNOWN = {
    # Measured there: everybody who writes jobs waits for 1.2 s with a million of them.
    ("0003_applications.sql", "require-concurrent-index-creation"): 5,
    # On aqd.queues, a handful of rows.
    ("0003_applications.sql", "constraint-missing-not-valid"): 1,
}


SQUAWK = shutil.which("squawk", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))


@pytest.mark.skipif(SQUAWK is None, reason="squawk is not there: pip install squawk-cli")
def test_squawk_finds_nothing_new() -> None:
    done = subprocess.run(
        [
            *(str(SQUAWK), "--pg-version", "14.0", "--assume-in-transaction", "--reporter", "gcc"),
            *("--exclude", ",".join(EXCLUDED)),
            *map(str, SHIPPED),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found: dict[tuple[str, str], int] = {}
    for line in done.stdout.splitlines():
        place, _, rest = line.partition(" ")
        name = Path(place.split(":")[0]).name
        rule = rest.split()[1]
        found[name, rule] = found.get((name, rule), 0) + 1
    assert found == KNOWN, done.stdout + done.stderr


def test_a_node_goes_on_under_a_newer_schema(
    start_daemon: Callable[..., Any], jobs: Any, database_url: str, tmp_path: Path
) -> None:
    """Online: while it runs, after a restart, and it does not try to migrate back."""
    daemon = start_daemon()
    with store.connect(Database(url=database_url), "test") as conn:
        newer = further(tmp_path, "-- aqd: online\nalter table aqd.jobs add column colour text;")
        assert len(migrate.migrate(conn, newer)) == 1
    jobs.wait(jobs.add(), "COMPLETED")
    daemon.stop()
    daemon.start()
    jobs.wait(jobs.add(), "COMPLETED")
    assert daemon.aqd("db", "migrate").returncode == 0
    assert daemon.aqd("db", "status").returncode == 0


def test_a_breaking_one_waits_for_the_nodes_and_then_keeps_them_out(
    start_daemon: Callable[..., Any], jobs: Any, database_url: str, tmp_path: Path
) -> None:
    daemon = start_daemon()
    url = Database(url=database_url)
    newer = further(tmp_path, "-- aqd: breaking\nalter table aqd.jobs rename column attempt to tries;")
    wait_until(lambda: jobs.conn.execute("select count(*) as n from aqd.nodes").fetchone()["n"] == 1)
    with store.connect(url, "test") as conn:
        told = rf"migration {NEWEST + 1} \(more_{NEWEST + 1}\) is breaking.*stop them first \(node0, aqd "
        with pytest.raises(SchemaMismatch, match=told):
            migrate.migrate(conn, newer)
        jobs.wait(jobs.add(), "COMPLETED")
        daemon.stop()
        assert len(migrate.migrate(conn, newer)) == 1
        daemon.expected_exit = None
        told = f"is at version {NEWEST + 1}, this aqd knows up to {NEWEST}: upgrade aqd"
        for command in (("db", "migrate"), ("db", "status"), ("check",)):
            done = daemon.aqd(*command)
            assert done.returncode == 4, done
            assert told in done.stdout + done.stderr
            assert "Traceback" not in done.stderr
        before = daemon.mark()
        daemon.start(wait=False)
        assert daemon.wait_exit(60) == Exit.DATABASE, "no waiting would help"
        wrong = ("warning", "error")
        (line,) = daemon.find(lambda line: line["level"] in wrong, after=before)
        assert (line["event"], told in line["reason"]) == ("schema does not fit", True)
        conn.execute("alter table aqd.jobs rename column tries to attempt")
        conn.execute("delete from aqd.migrations where version = %s", [NEWEST + 1])
        daemon.start()


def test_a_schema_that_somebody_else_makes_is_waited_for(
    start_daemon: Callable[..., Any], empty_database_url: str
) -> None:
    """It is no outage, and the three connections need not all say so."""
    daemon = start_daemon({"database": {"migrate": False}}, database=empty_database_url, wait=False)
    line = daemon.wait_for("waiting for the schema", timeout_s=60)
    assert "aqd db migrate" in line["reason"]
    daemon.wait_status(lambda status: "aqd db migrate" in (status["database"]["error"] or ""), 60)
    done = daemon.aqd("db", "migrate")
    assert done.returncode == 0, done
    daemon.wait_status(lambda status: status["state"] == "running", 60)
    assert len(daemon.find("waiting for the schema")) == 1
    assert daemon.find("database away") == []


NEWER = "insert into aqd.migrations values (%s, 'much_later', 'breaking', 'x')"


SLOW = "import time\ntime.sleep(3)\n"


@pytest.mark.parametrize(
    "plugins", [{}, {"slow.py": SLOW}], ids=["", "connected before its plugins are loaded"]
)
def test_a_node_that_starts_during_a_breaking_one_is_not_let_in(
    start_daemon: Callable[..., Any], jobs: Any, database_url: str, plugins: dict[str, str]
) -> None:
    """It has looked at the schema before, and would have claimed jobs of the next one."""
    job = jobs.add()
    with psycopg.connect(database_url) as migration:
        migration.execute("lock table aqd.nodes in share row exclusive mode")
        daemon = start_daemon(plugins=plugins, wait=False)
        waits = "select from pg_locks where relation = 'aqd.nodes'::regclass and not granted"
        wait_until(lambda: migration.execute(waits.encode()).fetchone() is not None, 60)
        daemon.wait_status(lambda status: all(slot["state"] == "idle" for slot in status["slots"]), 60)
        migration.execute(NEWER, [NEWEST + 1])
        assert daemon.status()["state"] in ("starting", "waiting for database")
        assert jobs.state(job) == "QUEUED", "claimed by a node of which the migration cannot know"
    daemon.expected_exit = Exit.DATABASE
    assert daemon.wait_exit(60) == Exit.DATABASE
    assert len(daemon.find("schema does not fit")) == 1
    assert jobs.state(job) == "QUEUED"
    assert jobs.conn.execute("select count(*) as n from aqd.nodes").fetchone()["n"] == 0


def test_a_node_that_was_taken_for_gone_goes_no_further(
    start_daemon: Callable[..., Any], jobs: Any, side: Any, tmp_path: Path
) -> None:
    """It was cut off, or the machine slept, while somebody migrated. Its connections may live: its next sign of life
    tells. It says so once, waits and does nothing."""
    daemon = start_daemon({"keeper": {"node_ttl_s": 3.0}, "daemon": {"slots": 1}})
    gate = tmp_path / "gate"
    side.wait_start(jobs.add([{"wait_file": str(gate)}]))  # it wants nothing, and hears of nothing
    with jobs.conn.transaction():
        jobs.conn.execute("delete from aqd.nodes")
        jobs.conn.execute(NEWER, [NEWEST + 1])
    told = f"is at version {NEWEST + 1}, this aqd knows up to {NEWEST}: upgrade aqd"
    daemon.wait_for(lambda line: told in line.get("reason", ""), 60)
    daemon.wait_status(lambda status: told in (status["database"]["error"] or ""), 60)
    connected = "select count(*) as n from pg_stat_activity where datname = current_database() and application_name ~ '^aqd (claimer|recorder|keeper)'"
    wait_until(lambda: jobs.conn.execute(connected.encode()).fetchone()["n"] == 0, 60)
    job = jobs.add()
    assert daemon.status()["state"] == "waiting for database"
    assert jobs.state(job) == "QUEUED"
    assert len(daemon.find("schema does not fit")) == 1
    jobs.conn.execute("delete from aqd.migrations where version = %s", [NEWEST + 1])
    gate.touch()
    jobs.wait(job, "COMPLETED", timeout_s=60)


@pytest.mark.parametrize("signs", [0, 10])  # after some a statement is prepared
def test_a_sign_of_life_that_has_waited_for_a_migration_sees_it(database_url: str, signs: int) -> None:
    node = store.NodeState("n", "n", 1, "0", 1, 1, ["noop"], "running")
    with (
        psycopg.connect(database_url) as migration,
        store.connect(Database(url=database_url), "test") as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(signs):
            assert store.node_seen(conn, node)
        migration.execute("lock table aqd.nodes in share row exclusive mode")
        sign = pool.submit(store.node_seen, conn, node)
        waits = "select from pg_locks where relation = 'aqd.nodes'::regclass and not granted"
        wait_until(lambda: migration.execute(waits.encode()).fetchone() is not None, 60)
        migration.execute("delete from aqd.nodes")
        migration.execute(NEWER, [NEWEST + 1])
        migration.commit()
        assert sign.result(60) is False
        assert migration.execute("select count(*) from aqd.nodes").fetchone() == (0,)


def test_a_killed_node_counts_as_gone_after_a_while(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = further(tmp_path, "-- aqd: breaking\nselect 1;")
    with store.connect(Database(url=database_url), "test") as conn:
        seen = "insert into aqd.nodes values ('n', 'old', now(), now() - %s * interval '1 second', 1, 1, 1, '0', 'running', '{}')"
        conn.execute(seen.encode(), [migrate.NODE_TTL_S - 5])
        with pytest.raises(SchemaMismatch, match="stop them first"):
            migrate.migrate(conn, newer)
        monkeypatch.setattr(migrate, "NODE_TTL_S", migrate.NODE_TTL_S - 10)
        assert len(migrate.migrate(conn, newer)) == 1


def test_a_node_that_registers_at_that_moment_is_seen(database_url: str, tmp_path: Path) -> None:
    """And whoever comes later waits until the migration is over."""
    held = "relation = 'aqd.nodes'::regclass and mode = 'ShareRowExclusiveLock'"
    newer = further(
        tmp_path,
        f"""-- aqd: breaking
do $$ begin
    if not exists (select from pg_locks where {held} and granted and pid = pg_backend_pid()) then
        raise exception 'anybody may come';
    end if;
end $$;""",
    )
    with (
        psycopg.connect(database_url) as node,
        store.connect(Database(url=database_url), "test") as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        node.execute("insert into aqd.nodes values ('n', 'new', now(), now(), 1, 1, 1, '0', 'running', '{}')")
        migration = pool.submit(migrate.migrate, conn, newer)
        try:
            wait_until(
                lambda: (
                    node.execute(f"select from pg_locks where {held} and not granted".encode()).fetchone()
                    is not None
                )
            )
        finally:
            node.commit()
        with pytest.raises(SchemaMismatch, match="stop them first"):
            migration.result(30)
        node.execute("delete from aqd.nodes")
        node.commit()
        assert len(migrate.migrate(conn, newer)) == 1


def test_a_node_with_a_long_ttl_gives_signs_often_enough(start_daemon: Callable[..., Any], jobs: Any) -> None:
    """The migration knows no node's configuration."""
    start_daemon({"keeper": {"node_ttl_s": 86400}})
    jobs.wait(jobs.add(), "COMPLETED")

    def seen() -> Any:
        return jobs.conn.execute("select max(seen_at) as at from aqd.nodes").fetchone()["at"]

    for _ in range(2):
        last = seen()
        wait_until(lambda last=last: seen() > last, migrate.NODE_TTL_S)


def test_nobody_is_waited_for_where_nothing_is_pending(database_url: str) -> None:
    """Every start of a daemon asks; it needs no lock then."""
    with psycopg.connect(database_url) as other, store.connect(Database(url=database_url), "test") as conn:
        other.execute(
            "select pg_advisory_xact_lock(%s, %s)",
            [migrate.ADVISORY_CLASS, migrate.ADVISORY_MIGRATION],
        )
        conn.execute("set statement_timeout = '2s'")
        assert migrate.migrate(conn) == []


def test_a_connection_that_is_silent_keeps_no_other_one_waiting(
    connect: Connect, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fail-over all threads of a dispatcher ask at the same time, and one gets no answer."""
    schema, first, silent = Schema(Database(url=database_url)), connect(), connect()
    schema(first)
    check, asked, answered = migrate.check, threading.Event(), threading.Event()

    def held_up(conn: Connection) -> migrate.SchemaStatus:
        if conn is silent:
            asked.set()
            assert answered.wait(30)
        return check(conn)

    monkeypatch.setattr(migrate, "check", held_up)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(schema, silent)
        try:
            assert asked.wait(10)
            pool.submit(schema, first).result(timeout=5)
            assert not waits.done()
        finally:
            answered.set()
        waits.result(timeout=10)
