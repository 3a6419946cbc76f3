"""Migrations: many starters at once, killed in the middle, wrong versions; the schema they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aqd import database, migrate, store
from aqd.config import Database
from aqd.errors import BugError, DatabaseUnavailable, SchemaMismatch, SchemaUnfit
from aqd.paths import data_dir
from tests.fixtures.processes import wait_until
from tests.sql.support import in_threads

STARTERS = 6
SHIPPED = data_dir("sql") / "migrations"
NEWEST = len(migrate.load_files())


@pytest.fixture
def conn(empty_database_url: str) -> Iterator[database.Connection]:
    with store.connect(Database(url=empty_database_url), "test") as made:
        yield made


def further(directory: Path, *texts: str) -> Path:
    """The shipped migrations and more, in a folder of their own."""
    files = sorted(SHIPPED.glob("*.sql"))
    for path in files:
        (directory / path.name).write_text(path.read_text())
    for number, text in enumerate(texts, len(files) + 1):
        (directory / f"{number:04}_more_{number}.sql").write_text(text)
    return directory


def start(url: str) -> subprocess.Popen[str]:
    """A process that migrates, as a daemon or ``aqd db migrate`` does."""
    code = """
        import sys
        from aqd import migrate, store
        from aqd.config import Database
        with store.connect(Database(url=sys.argv[1]), "starter") as conn:
            print("ready", flush=True)
            sys.stdin.readline()
            print(len(migrate.migrate(conn)), flush=True)
            migrate.check(conn)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_six_starters_on_an_empty_database(empty_database_url: str) -> None:
    """F56: exactly one applies each migration, the others wait, all of them start."""
    with store.connect(Database(url=empty_database_url), "test") as conn:
        starters = [start(empty_database_url) for _ in range(STARTERS)]
        for starter in starters:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
        for starter in starters:
            assert starter.stdin is not None
            starter.stdin.write("go\n")
            starter.stdin.flush()
        applied = [int(starter.communicate(timeout=60)[0]) for starter in starters]
        assert [starter.returncode for starter in starters] == [0] * STARTERS
        assert sorted(applied) == [0] * (STARTERS - 1) + [len(migrate.load_files())]
        migrate.check(conn)


def test_rounds_of_racing_connections(pg) -> None:
    """The same by threads, more often: "if not exists" outside of the lock fails about once in three."""
    for _ in range(5):
        name = pg.create_database()
        try:

            def apply(url: str = pg.url(name)) -> int:
                with store.connect(Database(url=url), "test") as conn:
                    return len(migrate.migrate(conn))

            assert sum(in_threads(*[apply] * STARTERS)) == len(migrate.load_files())
        finally:
            pg.drop_database(name)


def test_killed_in_the_middle(empty_database_url: str, conn: database.Connection) -> None:
    """kill -9 while the migration's transaction is open: nothing is left of it, and the next one succeeds."""
    conn.execute("begin")
    conn.execute(f"select pg_advisory_xact_lock({database.ADVISORY_CLASS}, {database.ADVISORY_PARTITION})")
    starter = start(empty_database_url)
    assert starter.stdin is not None
    starter.stdin.write("go\n")
    starter.stdin.flush()
    # It now waits in the middle of migration 1, for the lock that making a partition takes.
    with psycopg.connect(empty_database_url, autocommit=True) as looker:
        query = """select count(*) from pg_stat_activity
                   where datname = current_database() and application_name = 'starter'
                   and wait_event = 'advisory'"""
        wait_until(lambda: looker.execute(query).fetchone() == (1,))
        starter.send_signal(signal.SIGKILL)
        starter.communicate()
        conn.execute("rollback")
        wait_until(
            lambda: (
                looker.execute(
                    "select count(*) from pg_stat_activity"
                    " where datname = current_database() and application_name = 'starter'"
                ).fetchone()
                == (0,)
            )
        )
        assert looker.execute("select to_regnamespace('aqd')").fetchone() == (None,)
    assert len(migrate.migrate(conn)) == len(migrate.load_files())
    migrate.check(conn)


def test_failing_migration_leaves_the_old_version(conn: database.Connection, tmp_path: Path) -> None:
    migrate.migrate(conn)
    folder = further(
        tmp_path,
        "-- aqd: online\ncreate table aqd.extra (x int);",
        "-- aqd: online\nselect 1 / 0;",
    )
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.migrate(conn, folder)
    assert migrate.status(conn).problem is None
    assert conn.execute("select to_regclass('aqd.extra')").fetchone() == (None,)


def test_second_time_does_nothing(conn: database.Connection) -> None:
    assert migrate.migrate(conn)
    assert migrate.migrate(conn) == []


def test_empty_database_is_refused(conn: database.Connection) -> None:
    with pytest.raises(SchemaMismatch, match="aqd db migrate"):
        migrate.check(conn)
    found = migrate.status(conn)
    assert (found.current, len(found.pending)) == (0, found.wanted)


def test_older_schema_is_refused_until_migrated(conn: database.Connection, tmp_path: Path) -> None:
    migrate.migrate(conn)
    folder = further(tmp_path, "-- aqd: online\nalter table aqd.jobs add column colours text[];")
    with pytest.raises(
        SchemaMismatch, match=rf"is at version {NEWEST}, this aqd needs {NEWEST + 1}.*aqd db migrate"
    ):
        migrate.check(conn, folder)
    assert [done.name for done in migrate.migrate(conn, folder)] == [f"more_{NEWEST + 1}"]
    migrate.check(conn, folder)


def test_newer_schema(conn: database.Connection, tmp_path: Path) -> None:
    """Online migrations are what the older aqd can live with; a breaking one is refused, and left alone."""
    folder = further(tmp_path, "-- aqd: online\nselect 1;")
    migrate.migrate(conn, folder)
    migrate.check(conn)
    assert migrate.migrate(conn) == []
    folder = further(tmp_path, "-- aqd: online\nselect 1;", "-- aqd: breaking\nselect 2;")
    migrate.migrate(conn, folder)
    for act in (migrate.check, migrate.migrate):
        told = f"is at version {NEWEST + 2}, this aqd knows up to {NEWEST}: upgrade aqd"
        with pytest.raises(SchemaUnfit, match=told):
            act(conn)
    assert migrate.status(conn, folder).problem is None
    role = f"looker_{conn.info.dbname}"
    conn.execute(f"create role {role}".encode())
    try:
        conn.execute(
            f"grant usage on schema aqd to {role}; grant select on aqd.migrations to {role}".encode()
        )
        conn.execute(f"set role {role}".encode())
        with pytest.raises(SchemaUnfit, match=told):  # and not that another role might help
            migrate.migrate(conn)
    finally:
        conn.execute("reset role")
        conn.execute(f"drop owned by {role}; drop role {role}".encode())


def test_a_process_knows_what_it_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is upgraded on disk under it: it has learnt nothing."""
    assert migrate.newest() == NEWEST
    (tmp_path / "migrations").mkdir()
    further(tmp_path / "migrations", "-- aqd: breaking\nselect 1;")
    monkeypatch.setattr(migrate, "data_dir", lambda _: tmp_path)
    assert len(migrate.load_files()) == NEWEST


def test_changed_file_is_refused(conn: database.Connection, tmp_path: Path) -> None:
    folder = further(tmp_path, "-- aqd: online\nselect 1;")
    migrate.migrate(conn, folder)
    further(tmp_path, "-- aqd: online\nselect 2;")
    with pytest.raises(SchemaUnfit, match=f"migration {NEWEST + 1} was applied from another text"):
        migrate.check(conn, folder)
    with pytest.raises(SchemaMismatch):
        migrate.migrate(conn, folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{NEWEST + 2:04}_gap.sql", "-- aqd: online\nselect 1;"),
        (f"{NEWEST + 1:04}_no_kind.sql", "select 1;"),
        ("2_name.sql", "-- aqd: online\nselect 1;"),
    ],
)
def test_malformed_files_are_bugs(tmp_path: Path, name: str, text: str) -> None:
    folder = further(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(BugError):
        migrate.load_files(folder)


def test_waits_for_another_migrator_with_a_bound(
    empty_database_url: str, conn: database.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_WAIT_S", 0.2)
    with psycopg.connect(empty_database_url) as other:
        other.execute(
            f"select pg_advisory_xact_lock({database.ADVISORY_CLASS}, {database.ADVISORY_MIGRATION})"
        )
        with pytest.raises(DatabaseUnavailable, match="another 'aqd db migrate' is at work"):
            migrate.migrate(conn)
    assert migrate.migrate(conn)


def test_a_long_reader_in_the_way_does_not_hold_up_the_nodes(
    empty_database_url: str, conn: database.Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who waits for an exclusive lock has all the others wait behind it: a dump of a minute would cost leases."""
    monkeypatch.setattr(migrate, "TABLE_WAIT_S", 0.3)
    migrate.migrate(conn)
    online = """
        alter table aqd.failed_jobs add column more text;
        alter table aqd.jobs add column more text;
    """
    folder = further(tmp_path, f"-- aqd: online\n{online}")
    with psycopg.connect(empty_database_url) as reader, psycopg.connect(empty_database_url) as node:
        reader.execute("select from aqd.jobs")
        thread = threading.Thread(target=migrate.migrate, args=(conn, folder), daemon=True)
        thread.start()
        waiting = "select from pg_locks where relation = 'aqd.jobs'::regclass and not granted"
        for _ in range(2):  # and it tries again
            wait_until(lambda: reader.execute(waiting).fetchone() is not None)
            node.execute("set lock_timeout = '5s'; select from aqd.jobs; select from aqd.failed_jobs")
            node.rollback()
            assert thread.is_alive()
        reader.rollback()
        thread.join(15)
        assert not thread.is_alive()
    assert migrate.migrate(conn, folder) == []


def test_reset(conn: database.Connection) -> None:
    migrate.migrate(conn)
    conn.execute("select aqd.enqueue('noop')")
    migrate.reset(conn)
    migrate.check(conn)
    assert conn.execute("select count(*) from aqd.jobs").fetchone() == (0,)


def test_no_newer_syntax() -> None:
    """PostgreSQL 14 is supported; the suite may run on a later one."""
    for path in [*SHIPPED.glob("*.sql"), *data_dir("sql").glob("*.sql")]:
        code = "\n".join(line.split("--")[0] for line in path.read_text().lower().splitlines())
        for word in ("merge into", "uuidv7", "security_invoker", "nulls not distinct", "any_value("):
            assert word not in code, f"{path.name} uses {word!r}"


def test_history_has_no_default_partition_and_days_ahead(conn: database.Connection) -> None:
    migrate.migrate(conn)
    bounds = conn.execute(
        """select pg_get_expr(c.relpartbound, c.oid) from pg_class c
           join pg_inherits i on i.inhrelid = c.oid where i.inhparent = 'aqd.job_history'::regclass"""
    ).fetchall()
    assert len(bounds) == 9
    assert not any("DEFAULT" in bound for (bound,) in bounds)


def test_partition_is_made_beside_an_open_reader(conn: database.Connection, empty_database_url: str) -> None:
    """DATA 11: CREATE … PARTITION OF would wait for the reader, and every record behind it."""
    migrate.migrate(conn)
    with psycopg.connect(empty_database_url) as reader:
        reader.execute("select count(*) from aqd.job_history")
        done = threading.Event()

        def make() -> None:
            conn.execute("set lock_timeout = '2s'")
            assert conn.execute("select aqd.create_history_partition(current_date + 30)").fetchone() == (
                True,
            )
            done.set()

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        assert done.wait(5)
        thread.join()
        indexes = reader.execute(
            "select count(*) from pg_indexes where tablename = (select 'job_history_' || "
            "to_char(current_date + 30, 'YYYYMMDD'))"
        ).fetchone()
    assert indexes == (4,)


def test_starters_environment_is_clean() -> None:
    """The race above runs the code of this checkout."""
    assert os.path.samefile(Path(migrate.__file__).parents[1], Path(__file__).parents[2])
