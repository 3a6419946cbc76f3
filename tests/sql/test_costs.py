"""What a job costs PostgreSQL, by counts that do not depend on the machine. Times are measured by ``aqd bench``.

The bounds are what was measured (PostgreSQL 15) and about a fifth more. Who lets one grow says here why.
"""

from __future__ import annotations

import itertools
import os
import statistics
from typing import Any

import psycopg
import pytest

from aqd import database, keeper, statements, store
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion
from tests.sql.test_keeper import Rounds, dead, made

BATCH = 500
ROUNDS = 8
# As long as a node's id is: it stands in both rows.
NODE = "host.example.org/12345/0123456789ab"

# A round of the heap is so many jobs, with as many waiting beside them. AQD_TEST_HEAP_JOBS=2000000 is the whole bar.
HEAP_ROUND = 10_000
HEAP_JOBS = int(os.environ.get("AQD_TEST_HEAP_JOBS", "60000"))


def fill(queue: Queue, count: int) -> None:
    queue.fill(count, payload="'{\"n\": 1}'", created_at="now() - interval '1 hour'")


def wal(queue: Queue) -> int:
    return int(queue.value("select pg_current_wal_insert_lsn() - '0/0'"))


def test_wal_and_statements(
    connect: Connect, conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of WAL without page images (934 a job, 484 of them the claim's), and statements, each of which is a
    transaction. The median of the rounds: something else may write now and then."""
    fill(queue, BATCH * (ROUNDS + 3))
    queue.conn.execute("vacuum analyze aqd.jobs")
    mine = book(node_id=NODE)
    recorder = connect()
    run: list[bytes] = []
    execute = psycopg.RawCursor.execute

    def counted(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
        run.append(query)
        return execute(cursor, query, *args, **options)

    claimed, recorded = [], []
    for round in range(ROUNDS + 3):
        before = wal(queue)
        if round == 3:  # prepared, planned, lanes found, both tables' indexes have their roots
            monkeypatch.setattr(psycopg.RawCursor, "execute", counted)
        jobs = mine.claim(conn, BATCH)
        between = wal(queue)
        done = store.record_completed(recorder, [completion(job) for job in jobs])
        after = wal(queue)
        assert len(done) == BATCH
        claimed.append((between - before) / BATCH)
        recorded.append((after - between) / BATCH)
    names = [query.decode().split()[1] for query in run]
    assert set(names) - {"aqd:list_lanes", "aqd:queue_settings", "aqd:lane_heads"} == {
        "aqd:claim_jobs",
        "aqd:record_completed",
    }
    assert len(run) <= 0.01 * ROUNDS * BATCH
    assert statistics.median(claimed[3:]) <= 540
    assert statistics.median(recorded[3:]) <= 510
    assert statistics.median(map(sum, zip(claimed[3:], recorded[3:], strict=True))) <= 1000


def test_planned_once(conn: database.Connection, queue: Queue) -> None:
    """After five plans for values the server keeps one for any: planning takes 0.35 ms of a claim, or nothing."""
    fill(queue, 12 * BATCH)
    mine = book(sweep_s=3600.0)
    for _ in range(12):
        store.record_completed(conn, [completion(job) for job in mine.claim(conn, BATCH)])
    plans = conn.execute(
        "select substring(statement from 'aqd:(\\w+)'), custom_plans, generic_plans from pg_prepared_statements"
        " where statement ~ 'aqd:(claim_jobs|record_completed)' order by 1"
    ).fetchall()
    assert [(name, custom) for name, custom, _ in plans] == [("claim_jobs", 5), ("record_completed", 5)]
    assert all(generic >= 4 for *_, generic in plans), plans


def test_rows_written(conn: database.Connection, queue: Queue) -> None:
    """Two dead rows in aqd.jobs in a job's whole life, one row of history, nothing else."""
    fill(queue, BATCH)
    mine = book()
    with conn.transaction():
        jobs = mine.claim(conn, BATCH)
        assert len(store.record_completed(conn, [completion(job) for job in jobs])) == BATCH
        written = conn.execute(
            "select regexp_replace(relname, '_[0-9]+$', ''), n_tup_ins, n_tup_upd, n_tup_del"
            " from pg_stat_xact_user_tables where schemaname = 'aqd' and n_tup_ins + n_tup_upd + n_tup_del > 0"
            " order by 1"
        ).fetchall()
    assert written == [("job_history", BATCH, 0, 0), ("jobs", 0, BATCH, BATCH)]


def nodes_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for part in plan.get("Plans", ()) for node in nodes_of(part))]


def buffers(conn: database.Connection, name: str, values: dict[str, str | None]) -> float:
    """Run the statement; buffers visited per job. What a WITH branch does that nobody reads from is done after the
    plan has ended, and stands at the branch only."""
    cursor = psycopg.RawCursor(conn)
    statement = statements.get(name)
    cursor.execute(
        b"explain (analyze, buffers, timing off, format json) " + statement.text,
        [values[param] for param in statement.params],
    )
    row = cursor.fetchone()
    assert row is not None
    (top, *others) = nodes_of(row[0][0]["Plan"])
    parts = [top] + [node for node in others if node.get("Subplan Name") in ("CTE kept", "CTE resolved")]
    return sum(part["Shared Hit Blocks"] + part["Shared Read Blocks"] for part in parts) / BATCH


def test_buffers(conn: database.Connection, queue: Queue) -> None:
    """Claim 12 a job: a row to pick and to lock, the row and its new version, two index entries. Record 14 to 15: an index
    entry and its rows, one to delete, a row of history, two index entries."""
    fill(queue, 20 * BATCH)
    queue.conn.execute("vacuum analyze aqd.jobs")
    claims, records = [], []
    for token in range(1, 5):
        claims.append(
            buffers(
                conn,
                "claim_jobs",
                {
                    "queues": "{default}",
                    "priorities": "{0}",
                    "floors_us": "{0}",
                    "floor_ids": "{0}",
                    "slack_s": "0.1",
                    "types": "{noop}",
                    "limit": str(BATCH),
                    "token": str(token),
                    "lease_s": "30",
                    "node_id": NODE,
                    "limited": None,
                },
            )
        )
        ids = queue.value("select array_agg(id)::text from aqd.jobs where lease_token = %s", token)
        count = ids.count(",") + 1
        assert count == BATCH
        each = {"tokens": str(token), "results": "null", "ages_s": "0", "walls_s": "0.1", "cpus_s": "0.1"}
        values = {name: "{" + ",".join([value] * count) + "}" for name, value in each.items()}
        records.append(
            buffers(
                conn,
                "record_completed",
                {"ids": ids, **values, "peaks_kb": values["tokens"], "outputs": "{}"},
            )
        )
    # The first walks over nothing; later ones from the bottom, as here, over what the ones before have left.
    assert claims[0] <= 15, claims
    assert statistics.median(records) <= 17, records


@pytest.mark.parametrize("pinned", [False, True])
def test_nothing_walks_over_dead_entries(connect: Connect, queue: Queue, pinned: bool) -> None:
    """A claim reads as many entries of jobs_ready, and a record as many of the primary key, after 20 batches as
    after one, whether or not vacuum may remove what they leave."""
    fill(queue, 22 * BATCH)
    holder = connect(dispatcher=False)
    if pinned:
        holder.execute("begin isolation level repeatable read")
        holder.execute("select 1")
    conn = connect()
    mine = book(sweep_s=3600.0)
    read = []
    for _ in range(22):
        with conn.transaction():
            jobs = mine.claim(conn, BATCH)
            assert len(store.record_completed(conn, [completion(job) for job in jobs])) == BATCH
            (found,) = conn.execute(
                "select pg_stat_get_xact_tuples_returned('aqd.jobs_ready'::regclass),"
                " pg_stat_get_xact_tuples_returned('aqd.jobs_pkey'::regclass)"
            ).fetchall()
            read.append(found)
    # The session's sums, which it tells now and then, and then counts anew.
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(read) if b > a]
    assert len(steps) > 10
    assert max(entries for entries, _ in steps[1:]) <= BATCH + 10, steps
    assert max(entries for _, entries in steps[1:]) <= 2 * BATCH + 10, steps


def test_heap_stays_small(connect: Connect, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keeper's vacuum, 10,000 jobs always waiting, the heap does not grow: 4.5 MB after 60,000 as after
    2 million jobs (bar: 64 MB)."""
    monkeypatch.setattr(keeper, "VACUUM_DEAD_ROWS", HEAP_ROUND)
    conn = connect()
    conn.execute("alter table aqd.jobs set (autovacuum_enabled = off)")
    rounds = Rounds(conn, made())
    fill(queue, HEAP_ROUND)
    sizes = []

    def vacuumed() -> bool:
        rounds.step(1000.0)  # later than any pause that a dear duty makes
        return dead(queue) < HEAP_ROUND // 2

    for _ in range(HEAP_JOBS // HEAP_ROUND):
        fill(queue, HEAP_ROUND)
        with connect() as session:  # a session tells its counts when it ends
            mine = book(sweep_s=3600.0)
            done = 0
            while done < HEAP_ROUND:
                jobs = mine.claim(session, 1000)
                done += len(store.record_completed(session, [completion(job) for job in jobs]))
        wait_until(lambda: dead(queue) > HEAP_ROUND)
        wait_until(vacuumed, 60.0)
        sizes.append(queue.value("select pg_relation_size('aqd.jobs')"))
    assert queue.value("select count(*) from aqd.jobs") == HEAP_ROUND
    assert sizes[-1] <= 16 * 2**20, sizes
    assert sizes[-1] <= sizes[2] * 1.2, sizes
