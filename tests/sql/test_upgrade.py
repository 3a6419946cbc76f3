"""Migrations of a database that is in use: what was there is still right afterwards, for both versions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqd import database, migrate, store
from aqd.config import Database
from aqd.errors import SchemaMismatch
from aqd.paths import data_dir
from tests.sql.support import Queue, book, completion, failure

SHIPPED = data_dir("sql") / "migrations"
TABLES = ("jobs", "job_history", "job_attempts", "failed_jobs", "all_jobs", "handlers", "queues")

# A job in every state, written as the first version writes it.
FIRST = """
    insert into aqd.handlers (type, queue, max_attempts) values ('noop', 'default', 4);
    insert into aqd.queues (queue, paused) values ('held', true);
    select aqd.enqueue('noop', '{"n": 1}');
    select aqd.enqueue('noop', '{"n": 2}', delay_s => 3600);
    insert into aqd.jobs (type, run_at, state, attempt, claimed_at, lease_token, lease_expires_at, node_id)
    values ('noop', now(), 'PROCESSING', 1, now(), 77, now() + interval '1 hour', 'older'),
           ('noop', now(), 'PROCESSING', 1, now(), 78, now() + interval '1 hour', 'older');
    insert into aqd.jobs (type, run_at, state, attempt, last_error) values ('noop', now(), 'FAILED', 1, 'boom');
    insert into aqd.jobs (type, run_at, retries, queue) values ('noop', now(), 1, 'held');
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error)
    select id, now(), 1, type, queue, 'failed', 'boom' from aqd.jobs where state = 'FAILED' or retries > 0;
    insert into aqd.job_attempts (job_id, finished_at, attempt, kind, error, output)
    select job_id, now(), 1, 'failed', 'boom', 'said' from aqd.failed_jobs;
    insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,
                                 priority, state, type, queue, payload, result)
    select 100 + day, now() - day * interval '1 day', now(), now(), 1, 0, 0, 0, 5, 'COMPLETED', 'noop',
           'default', '{}', '{"day": 1}' from generate_series(0, 1) as day;
"""


@pytest.fixture
def conn(empty_database_url: str, tmp_path: Path) -> Iterator[database.Connection]:
    """At the first version, with a job in every state."""
    first = sorted(SHIPPED.glob("*.sql"))[0]
    (tmp_path / first.name).write_text(first.read_text())
    with store.connect(Database(url=empty_database_url), "test", dispatcher=True) as made:
        assert len(migrate.migrate(made, tmp_path)) == 1
        made.execute(FIRST.encode())
        yield made


def rows(conn: database.Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        table: [
            json.loads(row[0])
            for row in conn.execute(
                f"select to_jsonb(t)::text from aqd.{table} t order by to_jsonb(t) ->> 'id', 1".encode()
            )
        ]
        for table in TABLES
    }


def test_what_was_there_is_still_there(conn: database.Connection) -> None:
    before = rows(conn)
    migrate.migrate(conn)
    migrate.check(conn)
    after = rows(conn)
    for table in TABLES:
        assert len(after[table]) == len(before[table]) > 0
        for old, new in zip(before[table], after[table], strict=True):
            assert {key: new.pop(key) for key in old} == old
            assert set(new.values()) <= {None}
            assert new or table in ("handlers", "queues")


def test_every_partition_has_the_new_columns(conn: database.Connection) -> None:
    migrate.migrate(conn)
    conn.execute("select aqd.create_history_partition(current_date + 30)")
    columns = conn.execute(
        """select c.relname, count(a.attname) from pg_class c
           left join pg_attribute a on a.attrelid = c.oid and a.attname in ('output', 'cancel_requested_at')
           where c.relname like 'job_history%' and c.relkind in ('r', 'p') group by c.relname"""
    ).fetchall()
    assert len(columns) == 11
    assert {count for _, count in columns} == {2}


def test_jobs_go_on(conn: database.Connection) -> None:
    migrate.migrate(conn)
    queue = Queue(conn)
    by_state: dict[str, list[int]] = {}
    for id, state in conn.execute("select id, state from aqd.jobs order by id").fetchall():
        by_state.setdefault(state, []).append(id)
    done, cancelled = by_state["PROCESSING"]
    assert store.record_completed(conn, [store.Completion(done, 77, "1", 0.0)]) == {done}
    assert store.cancel_job(conn, cancelled).state == "PROCESSING"
    assert store.record_failed(conn, [store.Failure(cancelled, 78, "failed", "late", None, 1.0, 0.0)]) == {
        cancelled: "CANCELLED"
    }
    (failed,) = by_state["FAILED"]
    assert store.get_attempts(conn, failed)[0].output == "said"
    assert store.retry_job(conn, failed).state == "QUEUED"
    due, later, retried = by_state["QUEUED"]
    assert store.cancel_job(conn, retried).state == "CANCELLED"
    assert store.cancel_job(conn, later).state == "CANCELLED"
    jobs = book().claim(conn, 10)
    assert {job.id for job in jobs} == {due, failed}
    assert store.record_failed(conn, [failure(jobs[0])]) == {jobs[0].id: "FAILED"}
    assert store.record_completed(conn, [completion(jobs[1])]) == {jobs[1].id}
    assert store.cancel_job(conn, 100).state == "COMPLETED", "finished before"
    assert queue.value("select count(*) from aqd.all_jobs") == 8
    resolutions = {record.resolution for record in store.list_failed(conn, resolved=True).records}
    assert "cancelled" in resolutions


def test_the_version_before_goes_on_beside_it(conn: database.Connection, empty_database_url: str) -> None:
    """Statements that it prepared before the migration; their shape is that of the first version."""
    conn.execute(
        b"""prepare complete as
            with locked as materialized (
                select held.*, now() as finished_at
                from (values (3::bigint, 77::bigint)) as i(id, token)
                cross join lateral (
                    select j.* from aqd.jobs j where j.id = i.id and j.lease_token = i.token for update
                ) as held
            ), kept as (
                insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions,
                                             retries, priority, state, type, queue, payload)
                select l.id, l.finished_at, l.run_at, l.created_at, l.attempt, l.crashes, l.interruptions,
                       l.retries, l.priority, 'COMPLETED', l.type, l.queue, l.payload from locked l
            )
            delete from aqd.jobs j where j.id = any(array(select l.id from locked l)) returning j.id"""
    )
    with conn.transaction(force_rollback=True):
        assert conn.execute("execute complete").fetchall() == [(3,)]
    with store.connect(Database(url=empty_database_url), "newer") as newer:
        migrate.migrate(newer)
    assert conn.execute("execute complete").fetchall() == [(3,)]
    assert conn.execute("select state from aqd.all_jobs where id = 3").fetchone() == ("COMPLETED",)


FUNCTION = "aqd.enqueue(text,jsonb,text,integer,timestamptz,double precision,integer,double precision)"


def test_who_may_submit_is_kept(conn: database.Connection) -> None:
    """Revoked from everybody and given to some, as on a server with several applications."""
    roles = [f"r{os.urandom(4).hex()}_{name}" for name in ("app", "chief", "other")]
    app, chief, _ = roles
    may = "select has_function_privilege(%s, p.oid, 'execute') from pg_proc p where p.oid = 'aqd.enqueue'::regproc"
    try:
        for role in roles:
            conn.execute(f"create role {role}".encode())
        conn.execute(f"revoke all on function {FUNCTION} from public".encode())
        conn.execute(f"grant execute on function {FUNCTION} to {app}".encode())
        conn.execute(f"grant execute on function {FUNCTION} to {chief} with grant option".encode())
        migrate.migrate(conn)
        found = [conn.execute(may.encode(), [role]).fetchone() for role in roles]
        assert found == [(True,), (True,), (False,)]
        granting = may.replace("'execute'", "'execute with grant option'").encode()
        assert [conn.execute(granting, [role]).fetchone() for role in roles] == [(False,), (True,), (False,)]
    finally:
        for role in roles:
            conn.execute(f"drop owned by {role}; drop role {role}".encode())


def test_who_may_insert_may_submit(conn: database.Connection) -> None:
    """Where nobody has said who may: it needed the right to INSERT before, and the function had its caller's."""
    migrate.migrate(conn)
    may = "select r.rolname from pg_roles r where has_function_privilege(r.oid, 'aqd.enqueue'::regproc, 'execute')"
    assert {row[0] for row in conn.execute(f"{may} and not r.rolsuper".encode())} == {"pg_write_all_data"}


def test_what_depends_on_the_function_is_named(conn: database.Connection) -> None:
    conn.execute("create view public.submitted as select aqd.enqueue('noop') as id")
    before = rows(conn)
    with pytest.raises(
        SchemaMismatch, match=r"view submitted depends on function aqd\.enqueue.*make them again"
    ):
        migrate.migrate(conn)
    assert rows(conn) == before
    conn.execute("drop view public.submitted")
    migrate.migrate(conn)
    conn.execute("create view public.submitted as select aqd.enqueue('noop') as id")


def test_readers_are_held_up_last(conn: database.Connection, empty_database_url: str) -> None:
    """All that needs no exclusive lock on a table in use is done when the first one is asked for."""
    (pending,) = [each.text for each in migrate.load_files() if each.version == 3]
    first = pending.index("alter table aqd.jobs")
    for name in ("failed_jobs_open_id", "failed_jobs_job_id", "jobs_failed"):
        assert pending.index(f"create index {name} ") < first
    with store.connect(Database(url=empty_database_url), "reader") as reader, reader.transaction():
        for table in TABLES:
            reader.execute(f"select from aqd.{table} limit 1".encode())
        conn.execute("set lock_timeout = '1ms'")
        conn.execute(pending[:first].encode())


def test_room_in_the_key_waits_for_nobody(conn: database.Connection, empty_database_url: str) -> None:
    """While others read and write jobs, which must not wait behind it either."""
    files = {each.version: each.text for each in migrate.load_files()}
    migrate.migrate(conn)
    with store.connect(Database(url=empty_database_url), "writer") as writer, writer.transaction():
        writer.execute("select aqd.enqueue('noop')")
        writer.execute("update aqd.jobs set run_at = now()")
        conn.execute("set lock_timeout = '1ms'")
        with conn.transaction():
            conn.execute(files[5].encode())
            writer.execute("select aqd.enqueue('noop')")
            writer.execute("select from aqd.jobs where id = 1")
