"""Roles: each does its work, with the real programs, and nothing else; whoever may not make roles goes on without."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import conninfo

from aqd import client, database, roles, store
from aqd.cli import command
from aqd.config import Config, Database
from aqd.config import Keeper as KeeperSettings
from aqd.keeper import Keeper
from tests.fixtures.api import start_api
from tests.fixtures.pgbouncer import bouncer
from tests.fixtures.postgres import Postgres
from tests.fixtures.processes import wait_until

__all__ = ["bouncer", "start_api"]

ROOT = Path(__file__).parents[2]
PASSWORD = "pässword"
WORK = ("daemon", "api", "submit")


class Server:
    """The test's database with users ``u_DUTY``, each a member of the role of its duty and of nothing else."""

    def __init__(self, pg: Postgres, url: str) -> None:
        self.pg, self.url = pg, url
        self.prefix = f"r{os.urandom(4).hex()}"
        self.admin = psycopg.connect(url, autocommit=True)
        self.users: list[str] = []

    def user(self, name: str, *members: str, options: str = "") -> str:
        """Makes a user; the URL with which he connects."""
        user = f"{self.prefix}_u_{name}"
        self.users.append(user)
        self.admin.execute(f"create role {user} login password '{PASSWORD}' {options}".encode())
        for role in members:
            self.admin.execute(f"grant {role} to {user}".encode())
        return self.url_of(user)

    def url_of(self, user: str, url: str = "") -> str:
        return conninfo.make_conninfo(url or self.url, user=user, password=PASSWORD)

    def role(self, duty: str) -> str:
        return f"{self.prefix}_{duty}"

    def close(self) -> None:
        known = "select rolname from pg_roles where rolname like %s"
        names = [row[0] for row in self.admin.execute(known, [f"{self.prefix}%"])]
        for name in names:
            self.admin.execute(f"reassign owned by {name} to current_user; drop owned by {name}".encode())
        for name in names:
            self.admin.execute(f"drop role {name}".encode())
        self.admin.close()


@pytest.fixture
def server(pg: Postgres, database_url: str) -> Iterator[Server]:
    made = Server(pg, database_url)
    yield made
    made.close()


@pytest.fixture
def urls(server: Server) -> dict[str, str]:
    """With roles set up: a user's URL by duty."""
    with store.connect(Database(url=server.url), "test") as conn:
        roles.set_up(conn, server.prefix)
    return {duty: server.user(duty, server.role(duty)) for duty in roles.DUTIES}


# --- nothing else

# Letters: r read, a insert, w update, d delete; w(…) only those columns.
EXPECTED: dict[str, dict[str, str]] = {
    "daemon": {
        "jobs": "rd w(attempt,cancel_requested_at,claimed_at,crashes,interruptions,last_error,lease_expires_at,"
        "lease_token,node_id,progress_at,progress_message,progress_percent,run_at,state)",
        "job_history": "ra",
        "all_jobs": "r",
        "job_attempts": "rad w(finished_at)",
        "failed_jobs": "rad w(attempts,error,failed_at,failures,kind,reason,resolution,resolved_at,traceback)",
        "idempotency_keys": "rd w(expires_at)",
        "handlers": "ra w(max_attempts,queue)",
        "queues": "r",
        "nodes": "rawd",
        "unknown_types": "rawd",
        "node_figures": "rawd",
        "minutes": "rawd",
        "stats": "rawd",
        "migrations": "r",
        "sleeps": "SELECT USAGE",
        "wakes": "SELECT UPDATE",
        "waits": "SELECT",
        "functions": "create_history_partition drop_history_partition queue_room",
    },
    "api": {
        "jobs": "rd w(attempt,cancel_requested_at,claimed_at,crashes,interruptions,last_error,priority,progress_at,"
        "progress_message,progress_percent,retries,run_at,state)",
        "job_history": "rd w(output)",
        "all_jobs": "r",
        "job_attempts": "rd",
        "failed_jobs": "rd w(discarded_by,note,resolution,resolved_at,retried_at)",
        "handlers": "r",
        "queues": "raw",
        "nodes": "r",
        "node_figures": "r",
        "minutes": "r",
        "stats": "r",
        "migrations": "r",
        "sleeps": "SELECT",
        "wakes": "SELECT",
        "waits": "SELECT UPDATE",
        "functions": "enqueue hold_keys submit_keyed submit_many",
    },
    "submit": {
        "handlers": "r(queue,type)",
        "functions": "enqueue hold_keys submit_keyed submit_many",
    },
}


def rights(server: Server, user: str) -> dict[str, str]:
    """What PostgreSQL says that ``user`` may do with each relation of the schema, and which functions with their owner's
    rights he may call."""
    found = {}
    relations = server.admin.execute(
        "select oid, relname, relkind from pg_class where relnamespace = 'aqd'::regnamespace and relkind in ('r','p','v','S')"
    ).fetchall()
    for oid, name, kind in relations:
        if kind == "S":
            words = [
                right
                for right in ("SELECT", "UPDATE", "USAGE")
                if ask(server, "has_sequence_privilege(%s, %s::oid, %s)", user, oid, right)
            ]
            text = " ".join(words)
        else:
            text = table_rights(server, user, oid)
        if text:
            found[name] = text
    may_call = server.admin.execute(
        "select proname from pg_proc where pronamespace = 'aqd'::regnamespace and prosecdef"
        " and has_function_privilege(%s, oid, 'execute') order by 1",
        [user],
    ).fetchall()
    return {**found, "functions": " ".join(row[0] for row in may_call)}


def table_rights(server: Server, user: str, oid: int) -> str:
    whole, parts = "", ""
    for letter, right in (("r", "SELECT"), ("a", "INSERT"), ("w", "UPDATE"), ("d", "DELETE")):
        if ask(server, "has_table_privilege(%s, %s::oid, %s)", user, oid, right):
            whole += letter
        elif letter != "d" and ask(server, "has_any_column_privilege(%s, %s::oid, %s)", user, oid, right):
            columns = server.admin.execute(
                "select attname from pg_attribute where attrelid = %s and attnum > 0 and not attisdropped"
                " and has_column_privilege(%s, %s::oid, attnum, %s) order by attname",
                [oid, user, oid, right],
            ).fetchall()
            parts += f" {letter}({','.join(row[0] for row in columns)})"
    for right in ("TRUNCATE", "REFERENCES", "TRIGGER"):
        if ask(server, "has_table_privilege(%s, %s::oid, %s)", user, oid, right):
            whole += right
    return (whole + parts).strip()


def ask(server: Server, question: str, *values: Any) -> bool:
    row = server.admin.execute(f"select {question}".encode(), values).fetchone()
    assert row is not None
    return bool(row[0])


def test_rights_are_these_and_no_others(server: Server, urls: dict[str, str]) -> None:
    for duty in WORK:
        assert rights(server, f"{server.prefix}_u_{duty}") == EXPECTED[duty]


def test_what_is_not_given_is_refused(server: Server, urls: dict[str, str]) -> None:
    """Each table, partitions too, with each kind of statement, and what only an owner may."""
    for duty in WORK:
        refused(server, urls[duty], duty)


def refused(server: Server, url: str, duty: str) -> None:
    tables = [
        row[0]
        for row in server.admin.execute(
            "select relname from pg_class where relnamespace = 'aqd'::regnamespace and relkind in ('r', 'p')"
        )
    ]
    assert len(tables) > 20, "with the partitions"
    attempts = {
        "r": "select * from aqd.{0} limit 0",
        "a": "insert into aqd.{0} overriding system value select * from aqd.{0} limit 0",
        "w": "update aqd.{0} set {1} = {1} where false",
        "d": "delete from aqd.{0} where false",
        "truncate": "truncate aqd.{0}",
        "lock": "lock table aqd.{0} in access exclusive mode",
        "alter": "alter table aqd.{0} add column more text",
        "drop": "drop table aqd.{0} cascade",
        "trigger": "create trigger t before insert on aqd.{0} for each row execute function aqd.end_cancelled()",
        "index": "create index on aqd.{0} ({1})",
    }
    with psycopg.connect(url) as conn:
        for table in tables:
            given = EXPECTED[duty].get(table, "").split(" ")[0]
            columns = EXPECTED[duty].get(table, "").partition(" w(")[2].strip(")").split(",")
            column = server.admin.execute(
                "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and attidentity <> 'a' and attname <> all(%s)"
                " order by attnum limit 1",
                [f"aqd.{table}", columns],
            ).fetchone()
            assert column is not None
            for letter, statement in attempts.items():
                allowed = letter in given if len(letter) == 1 and "(" not in given else False
                allowed = allowed and (letter != "a" or "r" in given)
                # A lock of the table needs a right to write to it. It may wait, as everybody who writes may.
                allowed = allowed or (letter == "lock" and any(each in given for each in "wd"))
                try:
                    conn.execute(statement.format(table, column[0]).encode())
                    outcome = True
                except psycopg.errors.InsufficientPrivilege:
                    outcome = False
                conn.rollback()
                assert outcome == allowed, (duty, table, letter)
        for statement in (
            "create table aqd.mine (x int)",
            "create schema mine",
            "create role mine",
            "drop schema aqd cascade",
            "alter function aqd.wake() owner to current_user",
            "select aqd.hand_over(current_user)",
            "insert into aqd.migrations values (99, 'x', 'online', 'x')",
            "select aqd.create_history_partition(current_date + 30)"
            if duty != "daemon"
            else "create role mine",
            "select aqd.drop_history_partition(current_date - 30, 14)"
            if duty != "daemon"
            else "create role mine",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement.encode())
            conn.rollback()


def test_functions_with_the_owners_rights_are_bounded(server: Server, urls: dict[str, str]) -> None:
    """They take no names, look nothing up in the caller's path, and refuse what is not of their duty."""
    definers = server.admin.execute(
        "select proname, proconfig from pg_proc where pronamespace = 'aqd'::regnamespace and prosecdef"
    ).fetchall()
    assert definers
    for name, config in definers:
        assert "search_path=pg_catalog, pg_temp" in config, name
    with psycopg.connect(urls["daemon"], autocommit=True) as conn:
        for statement in (
            "select aqd.create_history_partition('1999-01-01')",
            "select aqd.create_history_partition(current_date + 500)",
            "select aqd.create_history_partition(null)",
            "select aqd.drop_history_partition(current_date, 0)",
            "select aqd.drop_history_partition(current_date - 1, 1)",
            "select aqd.drop_history_partition(current_date - 5, null)",
        ):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                conn.execute(statement.encode())
    with psycopg.connect(urls["submit"], autocommit=True) as conn:
        conn.execute("create temp table jobs (x int); create temp table handlers (type text, queue text)")
        conn.execute("set search_path = pg_temp, aqd")
        conn.execute("select aqd.enqueue('noop')")
    assert server.admin.execute("select count(*) from aqd.jobs").fetchone() == (1,)


def test_keys_that_could_not_be_submitted_are_not_held(server: Server, urls: dict[str, str]) -> None:
    with psycopg.connect(urls["submit"], autocommit=True) as conn:
        for scope, key in (("", "k" * 256), ("", ""), ("", None), ("s" * 129, "k")):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                conn.execute("select aqd.hold_keys(%s, %s::text[])", [scope, ["good", key]])
        assert server.admin.execute("select count(*) from aqd.idempotency_keys").fetchone() == (0,)
        conn.execute("select aqd.hold_keys(%s, %s)", ["s" * 128, ["k" * 255]])
    assert server.admin.execute("select count(*) from aqd.idempotency_keys").fetchone() == (1,)


def test_the_daemon_vacuums_where_it_can(server: Server, urls: dict[str, str], pg: Postgres) -> None:
    """And asks before: dead_tuples says whether it may."""
    with psycopg.connect(urls["daemon"], autocommit=True) as conn:
        assert database.run(conn, "dead_tuples")[0][1] == (pg.major >= 17)
        if pg.major >= 17:
            conn.execute("vacuum aqd.jobs")


@pytest.mark.parametrize("through_a_pooler", [False, True])
def test_the_daemon_drops_history_that_is_not_its_own(
    server: Server, urls: dict[str, str], request: pytest.FixtureRequest, through_a_pooler: bool
) -> None:
    """With the owner's rights. One that the owner cannot drop either does not keep the others."""
    names = []
    for days in (42, 41, 40):
        day = f"(now() at time zone 'UTC')::date - {days}"
        sql = f"select aqd.create_history_partition({day}), 'job_history_' || to_char({day}, 'YYYYMMDD')"
        names.append(server.admin.execute(sql.encode()).fetchone()[1])
    server.admin.execute(f"create view public.kept as select id from aqd.{names[0]}".encode())
    url = urls["daemon"]
    if through_a_pooler:
        database_name = server.admin.info.dbname
        pooler = request.getfixturevalue("bouncer")()
        url = pooler.url(database_name)
        # All behind it are one user of the server.
        server.admin.execute(
            f'alter role {pooler.user} in database "{database_name}" set role = {server.role("daemon")}'.encode()
        )
    keeper = Keeper(Config(keeper=KeeperSettings(history_days=30)), "n")
    with database.connect(Database(url=url), "test", dispatcher=True) as conn:
        assert database.is_pooled(conn) == through_a_pooler
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            keeper._drop_history(conn)
    left = "select relname from pg_class where relname = any(%s) order by 1"
    assert server.admin.execute(left, [names]).fetchall() == [(names[0],)]


# What aqd.enqueue refuses, each of its like refuses in the same words.
BAD = [
    {"type": "no op"},
    {"type": "x" * 129},
    {"type": None},
    {"queue": ""},
    {"queue": "q?"},
    {"priority": 101},
    {"priority": None},
    {"payload": None},
    {"delay_s": 1, "run_at": "2030-01-01Z"},
    {"run_at": "1969-12-31Z"},
    {"delay_s": -1},
    {"max_attempts": 0},
    {"timeout_s": 0.05},
    {"tags": "{a,a}"},
    {"tags": "{a b}"},
    {"tags": "{{a},{b}}"},
    {"tags": "{" + ",".join(f"t{n}" for n in range(33)) + "}"},
    {"meta": "[1]"},
]
CASTS = {
    "type": "text",
    "payload": "text::jsonb",
    "queue": "text",
    "priority": "integer",
    "run_at": "timestamptz",
    "delay_s": "double precision",
    "max_attempts": "integer",
    "timeout_s": "double precision",
    "tags": "text[]",
    "meta": "text::jsonb",
}
TEXTS = {"payload", "tags", "meta"}


def test_what_may_be_submitted_is_the_same_everywhere(server: Server, urls: dict[str, str]) -> None:
    one = ", ".join(f"%({name})s::{cast}" for name, cast in CASTS.items())
    many = ", ".join(
        f"array[%({name})s::{'text' if name in TEXTS else cast}]" for name, cast in CASTS.items()
    )
    named = ", ".join(f"{name} => %({name})s::{cast}" for name, cast in CASTS.items())
    calls = (
        f"select aqd.enqueue({named})",
        f"select aqd.submit_many({many})",
        f"select aqd.submit_keyed({one}, 'key', 'return', 24, '')",
    )
    with psycopg.connect(urls["submit"], autocommit=True) as conn:
        for bad in BAD:
            given = {**dict.fromkeys(CASTS), "type": "noop", "payload": "{}", "priority": 0, **bad}
            refusals = []
            for call in calls:
                with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
                    conn.execute(call.encode(), given)
                diag = caught.value.diag
                refusals.append((diag.message_primary, diag.message_detail, diag.column_name))
            assert refusals[1:] == refusals[:1] * 2, bad
        given = {**dict.fromkeys(CASTS), "type": "noop", "payload": "{}", "priority": 0}
        assert server.admin.execute("select count(*) from aqd.jobs").fetchone() == (0,)
        for call in calls:
            conn.execute(call.encode(), given)
    assert server.admin.execute("select count(*) from aqd.jobs").fetchone() == (3,)


# --- its work


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def cli(url: str, *arguments: str) -> Done:
    """An ``aqd`` command."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("DATABASE_URL", url)
        code = command.run(list(arguments))
    return Done(code, out.getvalue(), err.getvalue())


def test_submit_submits(server: Server, urls: dict[str, str]) -> None:
    with psycopg.connect(urls["submit"]) as conn:
        first = client.enqueue(conn, "noop", {"n": 1}, idempotency_key="a", tags=["t"], meta={"m": 1})
        assert (
            client.enqueue(conn, "noop", {"n": 1}, idempotency_key="a", tags=["t"], meta={"m": 1}).id
            == first.id
        )
        replaced = client.enqueue(
            conn, "noop", {"n": 2}, idempotency_key="a", on_conflict="replace", delay_s=60
        )
        assert (replaced.id, replaced.outcome) == (first.id, "replaced")
        client.enqueue(conn, "noop", delay_s=5)
        many = client.enqueue_many(conn, [{"type": "noop", "payload": n} for n in range(3)])
        assert len(many) == 3
        mixed = [{"type": "noop", "idempotency_key": f"k{n}", "on_conflict": "replace"} for n in range(3)]
        assert len(client.enqueue_many(conn, mixed)) == 3
        conn.commit()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            client.get(conn, first.id)
    done = cli(urls["submit"], "submit", "noop", "{}", "--priority", "5")
    assert done.returncode == 0, done.stderr
    refused = cli(urls["submit"], "jobs", "list")
    assert refused.returncode == 4
    assert "permission denied" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert server.admin.execute("select count(*) from aqd.jobs").fetchone() == (9,)


def test_the_daemon_does_its_work(server: Server, urls: dict[str, str], start_daemon, jobs) -> None:
    """Claims, records, retries, kills, cancels, limits, partitions, retention, figures; nothing is refused."""
    server.admin.execute("select aqd.create_history_partition(current_date - 40)")
    server.admin.execute(f"drop table if exists aqd.job_history_{tomorrow(server)}".encode())
    server.admin.execute("insert into aqd.queues (queue, max_running) values ('narrow', 1)")
    server.admin.execute(
        "insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind)"
        " values (1, now() - interval '200 days', 1, 'noop', 'default', 'failed')"
    )
    server.admin.execute(
        "insert into aqd.job_attempts (job_id, finished_at, attempt, kind) values (1, now() - interval '200 days', 1, 'failed')"
    )
    server.admin.execute(
        "insert into aqd.idempotency_keys (scope, key, job_id, expires_at, request) values ('', 'k', 1, now() - interval '1 day', '{}')"
    )
    daemon = start_daemon(
        {
            "daemon": {"poll_ms": 60000},  # so that NOTIFY does it
            "keeper": {"figures_s": 0.2},
            "jobs": {"unknown_type_grace_s": 0.5, "max_attempts": 2},
        },
        database=urls["daemon"],
    )
    ids = [jobs.add({}) for _ in range(5)] + [jobs.add({}, queue="narrow") for _ in range(3)]
    failing = jobs.add({"raise": "boom"})
    crashing = jobs.add({"exit": 3})
    unknown = jobs.add({}, type="nobody")
    for id in ids:
        jobs.wait(id, "COMPLETED")
    for id in (failing, unknown):
        jobs.wait(id, "FAILED")
    jobs.wait(crashing)
    running = jobs.add({"sleep": 60})
    jobs.wait(running, "PROCESSING")
    server.admin.execute("select aqd.cancel(%s)", [running])
    jobs.wait(running, "CANCELLED")
    gone = "to_regclass('aqd.job_history_' || to_char(current_date - 40, 'YYYYMMDD')) is null"
    made = f"to_regclass('aqd.job_history_{tomorrow(server)}') is not null"
    wait_until(lambda: ask(server, gone) and ask(server, made), 15)
    empty = "select (select count(*) from aqd.idempotency_keys where key = 'k') + (select count(*) from aqd.job_attempts where job_id = 1)"
    wait_until(lambda: server.admin.execute(empty).fetchone() == (0,), 15)
    wait_until(
        lambda: ask(server, "exists (select from aqd.stats) and exists (select from aqd.node_figures)"), 15
    )
    assert ask(server, "count(*) = 1 from aqd.nodes")
    for bad in ("duty failed", "database refuses", "database away", "keeper fails"):
        assert not daemon.find(bad), daemon.find(bad)


def tomorrow(server: Server) -> str:
    row = server.admin.execute("select to_char((now() at time zone 'UTC')::date + 1, 'YYYYMMDD')").fetchone()
    assert row is not None
    return str(row[0])


def test_the_api_and_the_commands_do_their_work(server: Server, urls: dict[str, str], start_api) -> None:
    api = start_api(urls["api"])
    admin = {"x-admin-key": "s3cret-kéy".encode()}

    def call(method: str, path: str, body: Any = None, status: int = 200) -> Any:
        headers = {"content-type": "application/json", **admin}
        answer = api.request(method, path, None if body is None else json.dumps(body), headers)
        assert answer.status == status, (path, answer.status, answer.body)
        return answer.json if answer.body else None

    job = call("POST", "/jobs", {"type": "noop", "idempotency_key": "a", "tags": ["t"]}, 201)["id"]
    call("POST", "/jobs", {"type": "noop", "idempotency_key": "a", "tags": ["t"]})
    call("POST", "/jobs/batch", {"jobs": [{"type": "noop"}, {"type": "noop", "idempotency_key": "b"}]})
    call("GET", f"/jobs/{job}?wait_s=0.1")
    call("GET", "/jobs?tag=t")
    call("PATCH", f"/jobs/{job}", {"priority": 3})
    call("POST", f"/jobs/{job}/cancel")
    server.admin.execute("update aqd.jobs set state = 'FAILED', attempt = 1")
    server.admin.execute(
        "insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind)"
        " select id, now(), 1, type, queue, 'failed' from aqd.jobs"
    )
    failed = [each["job_id"] for each in call("GET", "/admin/failed-jobs")["failed_jobs"]]
    call("POST", f"/jobs/{failed[0]}/retry")
    call("POST", f"/jobs/{failed[1]}/discard", {"reason": "no"})
    for path in ("/health", "/queues", "/types", "/nodes", "/metrics"):
        assert api.request("GET", path, None, admin).status in (200, 503), path
    for arguments in (
        ("jobs", "list"),
        ("jobs", "show", failed[0]),
        ("queues", "pause", "mail"),
        ("queues", "limit", "mail", "3"),
        ("queues", "resume", "mail"),
        ("queues", "list"),
        ("types", "list"),
        ("nodes", "list"),
        ("submit", "noop"),
        ("db", "status"),
        ("db", "migrate"),  # nothing is pending, and nothing is needed to say so
        ("jobs", "cancel", failed[0]),
        ("jobs", "delete", failed[1]),
    ):
        done = cli(urls["api"], *arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
