"""A dump made while jobs run, put into another database: what was waiting, running, finished, keyed is there and goes
on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import client, migrate, roles, store
from aqd.config import Database
from aqd.database import Connection
from aqd.errors import AqdError
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import Postgres, local_binaries
from tests.fixtures.processes import wait_until


def program(name: str, *arguments: str) -> None:
    """A program of PostgreSQL's."""
    try:
        found = local_binaries()
    except AqdError as error:
        pytest.skip(f"needs {name}: {error}")
    path = found.directory / name
    if not path.exists():
        pytest.skip(f"needs {name}, which {found.source} does not have")
    done = subprocess.run(
        [str(path), *arguments],
        env={**found.environment, "PGCONNECT_TIMEOUT": "10"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def local_major() -> int:
    try:
        return local_binaries().major
    except AqdError as error:
        pytest.skip(f"needs pg_dump: {error}")


def dump_and_restore(pg: Postgres, url: str, folder: Path, *options: str) -> str:
    """Into a new database; its name."""
    if local_major() < pg.major:
        pytest.skip(f"the pg_dump of this machine is older than the server ({pg.major})")
    program("pg_dump", "--format=custom", f"--file={folder / 'dump'}", *options, url)
    name = pg.create_database()
    program("pg_restore", "--exit-on-error", f"--dbname={pg.url(name)}", *options, str(folder / "dump"))
    return name


def test_a_dump_during_load(
    pg: Postgres, database_url: str, start_daemon: Callable[..., Any], jobs: Jobs, tmp_path: Path
) -> None:
    old = start_daemon({"daemon": {"slots": 2, "lease_s": 3.0, "renew_s": 0.5}}, name="old")
    done = jobs.add()
    jobs.wait(done, "COMPLETED")
    failed = jobs.add({"raise": "boom"})
    jobs.wait(failed, "FAILED")
    running = jobs.add({"attempts": [{"sleep": 30}, {"return": 2}]})
    jobs.wait(running, "PROCESSING")
    stream = jobs.add_many(300)
    later = jobs.add(delay_s=3600)
    keyed = client.enqueue(psycopg.connect(database_url, autocommit=True), "fate", idempotency_key="before")
    name = dump_and_restore(pg, database_url, tmp_path)
    restored = Jobs(pg.url(name))
    try:
        afterwards = jobs.add()
        # The dump is one moment of it.
        seen = restored.conn.execute(
            "select count(*) as all, count(distinct id) as ids from aqd.all_jobs"
        ).fetchone()
        assert seen == {"all": 305, "ids": 305}
        assert (restored.state(done), restored.state(failed), restored.state(running)) == (
            "COMPLETED",
            "FAILED",
            "PROCESSING",
        )
        old.kill_everything()  # nobody may work on both
        with psycopg.connect(pg.url(name), autocommit=True) as conn:
            again = client.enqueue(conn, "fate", idempotency_key="before")
            assert (again.id, again.outcome) == (keyed.id, "existing")
            # Ids that were given after the dump would be given again.
            conn.execute("select setval('aqd.jobs_id_seq', nextval('aqd.jobs_id_seq') + 1000000)")
            assert client.enqueue(conn, "fate").id > afterwards + 900000
        new = start_daemon(name="new", database=pg.url(name))
        for id in (*stream, keyed.id):
            restored.wait(id, "COMPLETED", 60)
        # It was running at the moment of the dump: its lease runs out, and it runs again as the next attempt.
        assert restored.wait(running, "COMPLETED", 60)["attempt"] == 2
        kinds = restored.conn.execute(
            "select kind from aqd.job_attempts where job_id = %s", [running]
        ).fetchall()
        assert [row["kind"] for row in kinds] == ["lost"]
        assert restored.state(later) == "QUEUED"
        assert new.aqd("jobs", "retry", str(failed)).returncode == 0
        new.stop()
    finally:
        restored.close()
        pg.drop_database(name)


def everybodys(conn: Connection) -> set[str]:
    """The functions with their owner's rights that everybody may call."""
    return {
        row[0]
        for row in conn.execute(
            """select p.proname::text
               from pg_proc p cross join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as e
               where p.pronamespace = 'aqd'::regnamespace and p.prosecdef and e.grantee = 0"""
        )
    }


def test_roles_after_a_restore(pg: Postgres, database_url: str, tmp_path: Path) -> None:
    """A dump without owners and rights fits any server; the command gives them anew."""
    import os

    prefix = f"r{os.urandom(4).hex()}"
    names: list[str] = []
    with store.connect(Database(url=database_url), "test") as conn:
        try:
            roles.set_up(conn, prefix)
            names.append(dump_and_restore(pg, database_url, tmp_path, "--no-owner", "--no-acl"))
            with store.connect(Database(url=pg.url(names[0])), "test") as restored:
                assert migrate.check(restored).problem is None
                may = f"select has_table_privilege('{prefix}_api', 'aqd.jobs', 'select')"
                assert restored.execute(may.encode()).fetchone() == (False,)
                assert "end_cancelled" in everybodys(restored)
                with restored.transaction(force_rollback=True):  # who has no roles
                    restored.execute("select aqd.revoke_public()")
                    assert everybodys(restored) == set()
                assert roles.set_up(restored, prefix).created == []
                assert everybodys(restored) == set()
                assert restored.execute(may.encode()).fetchone() == (True,)
            # With them it fits the same server, or one where the roles have been made.
            names.append(dump_and_restore(pg, database_url, tmp_path))
            with store.connect(Database(url=pg.url(names[1])), "test") as restored:
                assert restored.execute(may.encode()).fetchone() == (True,)
        finally:
            for name in names:
                pg.drop_database(name)
            conn.execute("drop schema aqd cascade")
            for duty in roles.DUTIES:
                conn.execute(f"drop owned by {prefix}_{duty}; drop role {prefix}_{duty}".encode())


def test_a_dump_in_progress_holds_up_nobody(pg: Postgres, database_url: str) -> None:
    """What a dump holds (a snapshot, a shared lock of each table): partitions are made, others are dropped later."""
    with psycopg.connect(database_url) as dump, psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("select aqd.create_history_partition(current_date - 40)")
        dump.execute("set transaction isolation level repeatable read")
        dump.execute("lock table aqd.job_history, aqd.jobs in access share mode")
        conn.execute("set statement_timeout = '5s'")
        assert conn.execute("select aqd.create_history_partition(current_date + 40)").fetchone() == (True,)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("select aqd.drop_history_partition(current_date - 40, 14)")
        conn.execute("select aqd.enqueue('noop')")
        dump.rollback()
        dropped = "select aqd.drop_history_partition(current_date - 40, 14)"
        wait_until(lambda: conn.execute(dropped.encode()).fetchone() == (True,))
        assert conn.execute(dropped.encode()).fetchone() == (False,)
