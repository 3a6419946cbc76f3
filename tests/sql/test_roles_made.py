"""Making roles, by whoever may and may not; what belongs to whom afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from aqd import client, database, migrate, roles, store
from aqd.config import Database
from aqd.errors import InputError, SchemaMismatch
from tests.fixtures.postgres import Postgres
from tests.sql.test_migrate import further
from tests.sql.test_roles import ROOT, WORK, Server, cli, rights, server, urls

__all__ = ["server", "urls"]


# --- whoever migrates


def owners(server: Server) -> set[str]:
    return {
        row[0]
        for row in server.admin.execute(
            "select pg_get_userbyid(relowner) from pg_class where relnamespace = 'aqd'::regnamespace"
            " union select pg_get_userbyid(proowner) from pg_proc where pronamespace = 'aqd'::regnamespace"
            " union select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'aqd'"
        )
    }


def test_what_members_of_the_owner_make_is_the_owners(
    server: Server, urls: dict[str, str], tmp_path: Path
) -> None:
    folder = further(
        tmp_path,
        """-- aqd: online
create table aqd.more (x bigint);
insert into aqd.rights (duty, object, rights) values ('api', 'table aqd.more', 'select');""",
    )
    with store.connect(Database(url=urls["daemon"]), "test") as conn:
        with pytest.raises(
            SchemaMismatch, match=f"belongs to the role {server.role('owner')}, and only its members"
        ):
            migrate.migrate(conn, folder)
        assert migrate.migrate(conn) == []
    with (
        store.connect(Database(url=urls["submit"]), "test") as conn,
        pytest.raises(SchemaMismatch, match="db roles"),
    ):
        migrate.migrate(conn)
    with store.connect(Database(url=urls["owner"]), "test") as conn:
        assert len(migrate.migrate(conn, folder)) == 1
        assert conn.execute("select current_user = session_user").fetchone() == (True,)
    assert owners(server) == {server.role("owner")}
    with psycopg.connect(urls["api"]) as conn:
        conn.execute("select * from aqd.more")
    with store.connect(Database(url=server.url), "test") as conn:  # a superuser
        migrate.migrate(
            conn,
            further(
                tmp_path,
                (folder / sorted(os.listdir(folder))[-1]).read_text(),
                "-- aqd: online\ncreate table aqd.last (x bigint);",
            ),
        )
    assert owners(server) == {server.role("owner")}


def test_reset_keeps_the_roles(server: Server, urls: dict[str, str]) -> None:
    before = {duty: rights(server, f"{server.prefix}_u_{duty}") for duty in WORK}
    done = cli(urls["owner"], "db", "reset", "--yes")
    assert done.returncode == 0, done.stderr
    assert owners(server) == {server.role("owner")}
    assert {duty: rights(server, f"{server.prefix}_u_{duty}") for duty in WORK} == before


# --- making them


def test_an_owner_who_may_not_make_roles(server: Server, pg: Postgres) -> None:
    """As on a managed server: he migrates and works as before; a superuser runs what is printed; then he can."""
    url = server.user("plain")
    name = pg.create_database()
    try:
        server.admin.execute(
            sql.SQL("alter database {} owner to {}").format(
                sql.Identifier(name), sql.Identifier(server.users[-1])
            )
        )
        mine = server.url_of(server.users[-1], pg.url(name))
        assert cli(mine, "db", "migrate").returncode == 0
        with store.connect(Database(url=mine), "test") as conn:
            conn.execute("select aqd.enqueue('noop')")
            told = cli(mine, "db", "roles", "--prefix", server.prefix)
            assert told.returncode == 4
            assert "may not make roles" in told.stderr
            assert "Traceback" not in told.stderr
            assert migrate.check(conn).problem is None
            script = cli(mine, "db", "roles", "--prefix", server.prefix, "--sql").stdout
            assert set(script.splitlines()) <= {
                line.removeprefix("aqd: ") for line in told.stderr.splitlines()
            }
            with psycopg.connect(pg.url(name), autocommit=True) as superuser:
                superuser.execute(script.encode())
            for state in ("was there", "was there"):
                done = cli(mine, "db", "roles", "--prefix", server.prefix)
                assert done.returncode == 0, done.stderr
                assert done.stdout.count(state) == 4
            conn.execute("select aqd.enqueue('noop')")
            conn.execute("update aqd.jobs set priority = 5")  # a member of the owner, so as before
            assert conn.execute("select aqd.create_history_partition(current_date + 30)").fetchone() == (
                True,
            )
            assert conn.execute("vacuum aqd.jobs").statusmessage == "VACUUM"
            conn.execute("drop schema aqd cascade")
    finally:
        pg.drop_database(name)
    assert url


def test_an_owner_who_may_make_roles_but_is_no_superuser(server: Server, pg: Postgres) -> None:
    server.user("maker", options="createrole")
    name = pg.create_database()
    try:
        server.admin.execute(
            sql.SQL("alter database {} owner to {}").format(
                sql.Identifier(name), sql.Identifier(server.users[-1])
            )
        )
        mine = server.url_of(server.users[-1], pg.url(name))
        with store.connect(Database(url=mine), "test") as conn:
            migrate.migrate(conn)
            assert roles.set_up(conn, server.prefix).created == [server.role(duty) for duty in roles.DUTIES]
            assert roles.set_up(conn, server.prefix).created == []
            conn.execute("select aqd.enqueue('noop')")
            conn.execute("drop schema aqd cascade")
    finally:
        pg.drop_database(name)


def test_two_databases_of_a_server(server: Server, urls: dict[str, str], pg: Postgres) -> None:
    """With the same roles, and with others: whoever works in one has no business in the other."""
    name = pg.create_database(template=pg.template)
    other = f"{server.prefix}x"
    try:
        with store.connect(Database(url=pg.url(name)), "test") as conn:
            assert roles.set_up(conn, server.prefix).created == []
            with psycopg.connect(server.url_of(f"{server.prefix}_u_submit", pg.url(name))) as submitter:
                submitter.execute("select aqd.enqueue('noop')")
            assert len(roles.set_up(conn, other).created) == 4
            with (
                psycopg.connect(server.url_of(f"{server.prefix}_u_submit", pg.url(name))) as submitter,
                pytest.raises(psycopg.errors.InsufficientPrivilege),
            ):
                submitter.execute("select aqd.enqueue('noop')")
            conn.execute("drop schema aqd cascade")
    finally:
        pg.drop_database(name)
    with psycopg.connect(urls["submit"]) as conn:
        conn.execute("select aqd.enqueue('noop')")


def test_who_is_given_a_duty_twice_or_a_name_that_is_none(server: Server) -> None:
    with store.connect(Database(url=server.url), "test") as conn:
        for prefix in ("", "Aqd", "a-b", "1a", "x" * 60, 'a"; drop schema aqd'):
            with pytest.raises(InputError, match="prefix"):
                roles.set_up(conn, prefix)
        with database.connect(Database(url=server.url), "test") as other:
            other.execute("create schema if not exists aqd")
        roles.set_up(conn, server.prefix)
        with store.connect(Database(url=server.url), "test") as again:
            roles.set_up(again, server.prefix)


def test_old_transactions_of_others_are_seen_with_pg_read_all_stats(
    server: Server, urls: dict[str, str]
) -> None:
    with (
        psycopg.connect(urls["api"]) as other,
        store.connect(Database(url=urls["daemon"]), "test") as conn,
    ):
        other.execute("set transaction isolation level repeatable read")
        other.execute("select count(*) from aqd.jobs")
        assert database.run(conn, "table_health")[0][1:] == (None, None)
        # Who it is can be seen, but not since when or for which application.
        hidden = f"session {other.info.backend_pid} of {server.prefix}_u_api (),  for  s"
        assert database.run(conn, "oldest_snapshot")[0][2] == hidden
        server.admin.execute(f"grant pg_read_all_stats to {server.role('daemon')}".encode())
        age_s, holder = database.run(conn, "table_health")[0][1:]
        assert age_s > 0
        assert f"session {other.info.backend_pid} of " in holder
        assert "idle in transaction for " in database.run(conn, "oldest_snapshot")[0][2]


@pytest.fixture
def before(server: Server, pg: Postgres, tmp_path: Path) -> Iterator[str]:
    """The URL of a database of the version before roles."""
    files = tmp_path / "before"
    files.mkdir()
    for file in sorted((ROOT / "sql/migrations").glob("*.sql"))[:5]:
        (files / file.name).write_text(file.read_text())
    name = pg.create_database()
    with store.connect(Database(url=pg.url(name)), "test") as conn:
        migrate.migrate(conn, files)
    yield pg.url(name)
    pg.drop_database(name)


def callable_by(url: str, role: str) -> set[str]:
    """Which functions with their owner's rights ``role`` may call."""
    with psycopg.connect(url) as conn:
        return {
            row[0]
            for row in conn.execute(
                "select proname::text from pg_proc where pronamespace = 'aqd'::regnamespace and prosecdef"
                " and has_function_privilege(%s, oid, 'execute')",
                [role],
            )
        }


SUBMITTING = {"enqueue", "submit_many", "submit_keyed", "hold_keys"}


def test_who_could_submit_before_can_submit_after(server: Server, before: str) -> None:
    """Roles of one's own, as the README of the version before had them; and who could not, cannot now."""
    server.user("inserts")
    server.user("reads")
    inserts, reads = server.users
    with store.connect(Database(url=before), "test") as conn:
        conn.execute(
            f"grant usage on schema aqd to {inserts}, {reads};"
            f"grant select, insert on aqd.jobs, aqd.idempotency_keys to {inserts};"
            f"grant select on aqd.sleeps, aqd.wakes, aqd.handlers to {inserts};"
            f"grant update (cancel_requested_at) on aqd.jobs to {inserts};"
            f"grant select on aqd.jobs, aqd.sleeps, aqd.wakes, aqd.handlers to {reads}".encode()
        )
        migrate.migrate(conn)
    assert callable_by(before, inserts) == SUBMITTING, "and he claims nothing"
    assert callable_by(before, reads) == set()
    with psycopg.connect(server.url_of(inserts, before), autocommit=True) as conn:
        client.enqueue(conn, "noop")
        client.enqueue(conn, "noop", idempotency_key="a")
        client.enqueue_many(conn, [{"type": "noop"}])
    with psycopg.connect(server.url_of(reads, before), autocommit=True) as conn:
        for statement in ("select aqd.enqueue('noop')", "select aqd.hold_keys('', '{a}')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement.encode())


def test_who_was_named_beside_everybody(server: Server, before: str) -> None:
    """A grant makes PostgreSQL write out that everybody may; he who was named keeps his."""
    server.user("named")
    server.user("inserts")
    server.user("nobody")
    named, inserts, nobody = server.users
    with store.connect(Database(url=before), "test") as conn:
        conn.execute(f"grant execute on function aqd.enqueue to {named}".encode())
        conn.execute(f"grant insert on aqd.jobs to {inserts}".encode())
        migrate.migrate(conn)
    assert callable_by(before, named) == {"enqueue"}
    assert callable_by(before, inserts) == {"enqueue", "submit_many"}
    assert callable_by(before, nobody) == set()


def test_where_everybody_could_everybody_can(server: Server, before: str) -> None:
    """Until somebody asks for roles."""
    server.user("nobody")
    with store.connect(Database(url=before), "test") as conn:
        conn.execute("grant insert on aqd.jobs to public")
        migrate.migrate(conn)
        assert callable_by(before, server.users[0]) == {"enqueue", "submit_many"}
        roles.set_up(conn, server.prefix)
        assert callable_by(before, server.users[0]) == set()
        conn.execute("drop schema aqd cascade")


def test_a_daemon_by_grants_of_its_own_goes_on(server: Server, before: str) -> None:
    """It held a queue's row by its own right to UPDATE; old days only where it might DELETE them."""
    server.user("daemon")
    server.user("columns")
    daemon, columns = server.users
    with store.connect(Database(url=before), "test") as conn:
        conn.execute(
            f"grant usage on schema aqd to {daemon}, {columns};"
            f"grant select, update on aqd.jobs, aqd.queues to {daemon}; grant delete on aqd.job_history to {daemon};"
            f"grant update (state, lease_token) on aqd.jobs to {columns};"
            "insert into aqd.queues (queue, max_running) values ('narrow', 3)".encode()
        )
        migrate.migrate(conn)
    assert callable_by(before, daemon) == {
        "queue_room",
        "create_history_partition",
        "drop_history_partition",
    }
    assert callable_by(before, columns) == {"queue_room", "create_history_partition"}
    with psycopg.connect(server.url_of(daemon, before)) as conn:
        assert conn.execute("select aqd.queue_room('narrow', 9)").fetchone() == (3,)


def test_a_schema_that_is_not_its_tables_owners(server: Server, before: str) -> None:
    """A superuser made it for him: he is told what to do, and loses nothing when the superuser migrates."""
    server.user("tables")
    owner = server.users[0]
    with store.connect(Database(url=before), "test") as conn:
        chief = conn.execute("select current_user").fetchone()
        assert chief is not None
        conn.execute(f"grant create, usage on schema aqd to {owner}".encode())
        for kind, thing in conn.execute(
            """select 'table', c.oid::regclass::text from pg_class c
               where c.relnamespace = 'aqd'::regnamespace and c.relkind in ('r', 'p', 'v')
               union all
               select 'routine', p.oid::regprocedure::text from pg_proc p
               where p.pronamespace = 'aqd'::regnamespace"""
        ).fetchall():
            conn.execute(f"alter {kind} {thing} owner to {owner}".encode())
        with store.connect(Database(url=server.url_of(owner, before)), "test") as mine:
            told = f"belongs to the role {chief[0]}, .*: alter schema aqd owner to {owner}$"
            with pytest.raises(SchemaMismatch, match=told):
                migrate.migrate(mine)
            migrate.migrate(conn)
            client.enqueue(mine, "noop", idempotency_key="a")
            client.enqueue_many(mine, [{"type": "noop"}])
    assert callable_by(before, owner) >= SUBMITTING | {"queue_room", "drop_history_partition"}
