"""Which indexes the pages take, with a million jobs in history and 200,000 live ones. ``pytest -s`` prints the plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import sql

from aqd import database, statements, store
from aqd.config import Database
from aqd.store import listing
from aqd.store.filters import job_filter
from tests.fixtures.postgres import Postgres

# The database is filled within the first test: 10 s, and 50 s were seen on a busy machine.
pytestmark = pytest.mark.timeout(600)

DAYS = 12
# One in 500 is of a rare type and one in 1,000 was cancelled; one in 50 has tags. History begins with a day that is whole.
FILL = f"""
    select aqd.create_history_partition((now() at time zone 'UTC')::date - day) from generate_series(0, {DAYS}) as day;
    insert into aqd.job_history (id, finished_at, run_at, created_at, claimed_at, attempt, crashes, interruptions,
                                 retries, priority, state, type, queue, payload, tags)
    select n, t, t, t - interval '1 second', t, 1, 0, 0, 0, 0,
           case when n % 1000 = 0 then 'CANCELLED' else 'COMPLETED' end,
           case when n % 500 = 0 then 'rare' else 'type-' || n % 20 end, 'queue-' || n % 10, '{{}}',
           case when n % 50 = 0 then array['customer:' || n % 5000, 'all'] end
    from (select n, now() - (1000000 - n) * interval '{DAYS * 86_400 / 1_000_000} seconds' as t
          from generate_series(1, 1000000) n) as made;
    insert into aqd.jobs (id, run_at, type, queue, state, last_error, tags, lease_token, lease_expires_at, node_id)
    select 1000000 + n, now() + interval '1 hour',
           case when n % 500 = 0 then 'rare' else 'type-' || n % 20 end, 'queue-' || n % 10, state,
           case when state = 'FAILED' then 'ValueError: bad row ' || n end,
           case when n % 50 = 0 then array['customer:' || n % 5000, 'all'] end,
           case when state = 'PROCESSING' then n end,
           case when state = 'PROCESSING' then now() + interval '1 hour' end,
           case when state = 'PROCESSING' then 'node' end
    from (select n, case when n % 20 = 0 then 'FAILED' when n % 5000 = 1 then 'PROCESSING' else 'QUEUED' end as state
          from generate_series(1, 200000) n) as made;
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error, resolved_at, resolution)
    select 1000000 + n, now(), 1, 'type-' || n % 20, 'default', 'failed', 'ValueError: bad row ' || n,
           case when n % 10 > 0 then now() end, case when n % 10 > 0 then 'completed' end
    from generate_series(1, 50000) n;
    insert into aqd.job_attempts (job_id, finished_at, attempt, kind, error)
    select 1000000 + n / 10, now(), n % 10, 'failed', 'boom' from generate_series(1, 50000) n;
"""


@pytest.fixture(scope="module")
def conn(pg: Postgres) -> Iterator[database.Connection]:
    """A connection as the API makes it, to a database that is filled once for this file (10 s)."""
    name = pg.create_database(template=pg.template)
    try:
        with store.connect(Database(url=pg.url(name), statement_timeout_s=500.0), "test") as made:
            made.execute(FILL.encode())
            made.execute(b"analyze aqd.jobs, aqd.job_history, aqd.failed_jobs, aqd.job_attempts")
            yield made
    finally:
        pg.drop_database(name)


def plan(conn: database.Connection, title: str, name: str, params: dict[str, Any]) -> str:
    """How the statement is run with these values, and what it reads."""
    statement = statements.get(name)
    values = [sql.Literal(params[each]) for each in statement.params]
    conn.execute(b"prepare looked_at as " + statement.text)
    try:
        conn.execute("set plan_cache_mode = " + ("force_custom_plan" if statement.fresh else "auto"))
        call = sql.SQL("explain (analyze, buffers, costs off, timing off) execute looked_at ({})")
        found = conn.execute(call.format(sql.SQL(", ").join(values))).fetchall()
    finally:
        conn.execute("deallocate looked_at")
    text = "\n".join(row[0] for row in found)
    print(f"\n--- {title}\n{text}")
    return text


def days(text: str) -> set[int]:
    """Which days of history the plan opens, as so many days ago."""
    today = datetime.now(UTC).date()
    found = {datetime.strptime(day, "%Y%m%d").date() for day in re.findall(r"job_history_(\d{8})", text)}
    return {(today - day).days for day in found if day <= today}


def read_whole(text: str) -> list[str]:
    """The tables that are read from end to end, but for the days to come, which are empty."""
    today = f"job_history_{datetime.now(UTC):%Y%m%d}"
    tables = re.findall(r"Seq Scan on (\S+)", text)
    return [table for table in tables if not (table.startswith("job_history_") and table > today)]


NOW = datetime.now(UTC)


def _name(given: dict[str, Any]) -> str:
    """Of a case, the same in every process: neither moments nor sets are."""
    return (
        ",".join(f"{key}={value}" if isinstance(value, str) else key for key, value in given.items()) or "all"
    )


@pytest.mark.parametrize("oldest", [False, True], ids=["newest", "oldest"])
@pytest.mark.parametrize(
    ("given", "indexes", "opened", "buffers"),
    [
        ({}, {"jobs_pkey", "_pkey on job_history"}, range(DAYS + 1), 300),
        ({"state": "FAILED"}, {"jobs_failed"}, (), 300),
        ({"state": "PROCESSING"}, {"jobs_running"}, (), 300),
        ({"state": "QUEUED"}, {"jobs_pkey"}, (), 300),
        ({"state": "COMPLETED"}, {"_pkey on job_history"}, range(DAYS + 1), 300),
        ({"state": ["FAILED", "COMPLETED"]}, {"_pkey on job_history"}, range(DAYS + 1), 1000),
        ({"type": "type-3"}, {"jobs_pkey"}, range(DAYS + 1), 500),
        ({"type": "rare"}, {"jobs_pkey", "_type_id_idx on job_history"}, range(DAYS + 1), 2000),
        ({"type": "rare", "state": "COMPLETED"}, {"_type_id_idx on job_history"}, range(DAYS + 1), 500),
        ({"type": "none", "state": "COMPLETED"}, {"_type_id_idx on job_history"}, range(DAYS + 1), 100),
        ({"tag": "customer:50"}, {"jobs_tags", "_tags_idx"}, range(DAYS + 1), 1500),
        ({"tag": "all"}, {"jobs_pkey", "_pkey on job_history"}, range(DAYS + 1), 1000),
        ({"tag": "none"}, {"jobs_tags", "_tags_idx"}, range(DAYS + 1), 500),
        ({"queue": "queue-3"}, {"jobs_pkey", "_pkey on job_history"}, range(8), 500),
        ({"state": "CANCELLED"}, {"_pkey on job_history"}, range(8), None),
        ({"ids": [5, 500_000, 1_100_000]}, {"jobs_pkey", "_pkey on job_history"}, range(DAYS + 1), 300),
        ({"created_after": NOW - timedelta(days=2)}, {"jobs_pkey", "_pkey on job_history"}, range(3), None),
        (
            {"finished_after": NOW - timedelta(days=5), "finished_before": NOW - timedelta(days=4)},
            {"_pkey on job_history"},
            (4, 5),
            None,
        ),
    ],
    ids=lambda value: _name(value) if isinstance(value, dict) else "",
)
def test_a_page_of_jobs(
    conn: database.Connection,
    given: dict[str, Any],
    indexes: set[str],
    opened: range | tuple[int, ...],
    buffers: int | None,
    oldest: bool,
) -> None:
    query = listing.job_query(job_filter(**given), None, 50, oldest=oldest, fields=listing.DEFAULT_FIELDS)
    text = plan(conn, f"{given} {'oldest' if oldest else 'newest'} first", query.statement, query.params)
    assert read_whole(text) == []
    for index in indexes:
        assert index in text
    assert days(text) == set(opened)
    if buffers is not None:
        read = re.search(r"Buffers:(?: shared)?(?: hit=(\d+))?(?: read=(\d+))?", text)
        assert read is not None
        assert sum(int(each or 0) for each in read.groups()) < buffers


def test_the_page_after_begins_where_the_last_one_ended(conn: database.Connection) -> None:
    """However deep: nothing before it is read."""
    for oldest in (False, True):
        query = listing.job_query(job_filter(), 500_000, 50, oldest=oldest, fields=())
        text = plan(conn, "a page in the middle", query.statement, query.params)
        assert "Rows Removed" not in text
        assert read_whole(text) == []


def test_failed_jobs_and_attempts(conn: database.Connection) -> None:
    nothing = store.FailedFilter()._asdict() | {"cursor": None, "limit": 51, "max_bytes": 1 << 20}
    text = plan(conn, "failed jobs", "list_failed", nothing | {"resolved": False})
    assert "failed_jobs_open_id" in text
    assert read_whole(text) == []
    text = plan(conn, "failed jobs, settled ones too", "list_failed", nothing | {"resolved": True})
    assert "failed_jobs_pkey" in text
    params = {"job_id": "1004000", "cursor": None, "limit": "51", "max_bytes": "1048576"}
    text = plan(conn, "attempts", "list_attempts", params)
    assert "job_attempts_pkey" in text


def test_groups_of_failed_jobs(conn: database.Connection) -> None:
    params = store.FailedFilter()._asdict() | {"resolved": False, "by_type": True, "by_error": True}
    text = plan(conn, "groups", "group_failed", params | {"most": 50_000, "limit": 50})
    assert "failed_jobs_open_id" in text
    found = store.group_failed(conn)
    assert found.grouped == 5_000
    assert {group.error for group in found.groups} == {"ValueError: bad row #"}
