"""Every statement is named, explained, well-formed; the hot ones take the index that they claim to take."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from aqd import database, statements
from aqd.errors import BugError
from tests.sql.support import Queue

ALL = sorted(statements.load_all().values())
PREPARABLE = [statement for statement in ALL if statement.kind != "ddl"]
# CREATE, DROP and LOCK cannot be prepared; the migration tests run them.
UTILITY = {"create_migrations", "create_migrations_schema", "drop_schema", "lock_nodes"}


@pytest.mark.parametrize("statement", ALL, ids=lambda statement: statement.name)
def test_explained(statement: statements.Statement) -> None:
    assert len(statement.comment) > 10
    if statement.kind != "ddl" and statement.name not in UTILITY and statement.file != "migrate.sql":
        assert "Index:" in statement.comment, "say which index the statement uses"


@pytest.mark.parametrize("statement", ALL, ids=lambda statement: statement.name)
def test_every_parameter_has_a_cast(statement: statements.Statement) -> None:
    """Integers and arrays are sent as text of unknown type: without a cast PostgreSQL would guess."""
    text = statement.text.decode()
    assert re.findall(r"\$\d+(?!\d)(?!::)", text) == []


def test_every_statement_prepares(conn: database.Connection) -> None:
    """One database for all of them; the server names the statement in its complaint."""
    for statement in PREPARABLE:
        if statement.name not in UTILITY:
            conn.execute(f"prepare {statement.name} as ".encode() + statement.text)


def test_parse() -> None:
    source = """-- file header
-- name: one :many
-- why; with a semicolon and :no_parameter
select :b::int, ':quoted', a::text, ":c", :a::text -- said :why
from t where x = :b::int

-- name: two :exec
-- why
select 1
"""
    one, two = statements.parse(source, Path("x.sql"))
    assert one.params == ("b", "a")
    assert one.text.decode() == (
        "/* aqd:one */ select $1::int, ':quoted', a::text, \":c\", $2::text\nfrom t where x = $1::int"
    )
    assert one.comment == "why; with a semicolon and :no_parameter\nsaid :why"
    assert (two.name, two.kind, two.params) == ("two", "exec", ())


@pytest.mark.parametrize(
    "source",
    [
        "select 1",
        "-- name: x :sometimes\nselect 1",
        "-- name: x :one\n-- only words\n",
        "-- name: x :one\nselect 1;\nselect 2",
    ],
)
def test_malformed_file_is_refused(source: str) -> None:
    with pytest.raises(BugError):
        statements.parse(source, Path("x.sql"))


def test_unknown_statement_and_wrong_parameters_are_bugs(conn: database.Connection) -> None:
    with pytest.raises(BugError, match="no_such"):
        database.run(conn, "no_such")
    with pytest.raises(BugError, match="elect"):
        database.run(conn, "elect")


def test_parameter_types_do_not_depend_on_values(conn: database.Connection) -> None:
    """One prepared statement, not one for each mixture of int2, int4 and int8."""
    for id in (1, 100_000, 5_000_000_000):
        database.run(conn, "get_attempts", job_id=id)
    for _ in range(5):
        database.run(conn, "get_attempts", job_id=1)
    names = conn.execute(
        "select count(*) from pg_prepared_statements where statement like '%aqd:get_attempts%'"
    ).fetchone()
    assert names == (1,)


@pytest.mark.parametrize(
    ("encode", "values", "type"),
    [
        (database.int_array, [1, None, -(2**63), 2**63 - 1], "bigint[]"),
        (database.float_array, [0.1, None, 1e300, 3], "float8[]"),
        (database.bool_array, [True, False], "boolean[]"),
        (database.text_array, ["", "NULL", 'a"b\\c,{}', " x ", None, "ü€😀\n\t"], "text[]"),
        (database.text_array, [], "text[]"),
        (database.packed_ints, [1, -(2**63), 2**63 - 1], "bigint[]"),
        (database.packed_ints, [1, None], "bigint[]"),
        (database.packed_ints, [], "bigint[]"),
        (database.packed_floats, [0.1, 1e300, 3], "float8[]"),
        (database.packed_floats, [None, 0.1], "float8[]"),
        (database.packed_texts, ["", "NULL", 'a"b\\c,{}', " x ", None, "ü€😀\n\t", ""], "text[]"),
        (database.packed_texts, [None, None], "text[]"),
        (database.packed_texts, [], "text[]"),
    ],
)
def test_arrays(conn: database.Connection, encode, values, type) -> None:
    found = conn.execute(f"select %s::{type}", [encode(values)]).fetchone()
    assert found is not None
    assert found[0] == values


@pytest.mark.parametrize("encode", [database.float_array, database.packed_floats])
def test_a_number_beyond_all_doubles_is_refused_there(conn: database.Connection, encode) -> None:
    """With an error that sets the row aside, not with one that stops its batch for ever."""
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        conn.execute("select %s::float8[]", [encode([0.5, 10**400])])


# --- plans ----------------------------------------------------------------------------------------

IDS = "{" + ",".join(str(n) for n in range(1, 501)) + "}"


def _array(value: str) -> str:
    return "{" + ",".join([value] * 500) + "}"


HOT = {
    "record_completed": {
        "results": _array("null"),
        "ages_s": _array("0"),
        "walls_s": _array("1"),
        "cpus_s": _array("1"),
        "peaks_kb": _array("1"),
        "outputs": _array("x"),
    },
    "record_failed": {
        "kinds": _array("failed"),
        "errors": _array("x"),
        "tracebacks": _array("x"),
        "retries_in_s": _array("1"),
        "ages_s": _array("0"),
        "walls_s": _array("1"),
        "cpus_s": _array("1"),
        "peaks_kb": _array("1"),
        "signals": _array("NULL"),
        "exit_codes": _array("NULL"),
        "reasons": _array("exception"),
        "outputs": _array("x"),
        "final_errors": _array("NULL"),
    },
    "release_jobs": {
        "interrupted": _array("f"),
        "reasons": _array("x"),
        "reason_codes": _array("drain"),
        "ages_s": _array("0"),
        "tracebacks": _array("x"),
        "outputs": _array("x"),
        "walls_s": _array("0.1"),
        "cpus_s": _array("0.1"),
        "peaks_kb": _array("1"),
        "signals": _array("9"),
        "max_interruptions": "3",
    },
    "renew_leases": {"lease_s": "30"},
    "store_progress": {"percents": _array("50"), "messages": _array("x")},
}


def modes(name: str) -> list[str]:
    """How the server may come to plan the statement."""
    if statements.get(name).fresh:
        return ["force_custom_plan"]
    return ["auto", "force_generic_plan", "force_custom_plan"]


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in sorted(HOT) for mode in modes(name)])
def test_outcomes_and_leases_touch_only_their_rows(
    name: str, mode: str, conn: database.Connection, queue: Queue
) -> None:
    """Prepared while the queue is empty and analysed so, which is when it is often analysed; then filled.

    A join from the wrong side, or without the dispatcher's planner settings, reads the whole table.
    """
    statement = statements.get(name)
    values = {"ids": IDS, "tokens": IDS, **HOT[name]}
    call = sql.SQL("execute hot ({})").format(
        sql.SQL(", ").join(sql.Literal(values[param]) for param in statement.params)
    )
    conn.execute("analyze aqd.jobs")
    conn.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
    conn.execute(b"prepare hot as " + statement.text)
    for _ in range(6):
        conn.execute(call)
    queue.fill(
        20_000,
        state="'PROCESSING'",
        lease_token="n",
        lease_expires_at="now() + interval '1 minute'",
        node_id="'x'",
    )
    plan = "\n".join(row[0] for row in conn.execute(sql.SQL("explain ") + call))
    assert "jobs_pkey" in plan
    assert "Seq Scan on jobs" not in plan
    assert "jobs_running" not in plan
    with conn.transaction(force_rollback=True):
        touched = conn.execute(call).fetchall()
        assert (touched[0][0] if name == "record_completed" else len(touched)) == 500
        read = conn.execute(
            "select pg_stat_get_xact_tuples_returned('aqd.jobs'::regclass),"
            " pg_stat_get_xact_tuples_returned('aqd.jobs_pkey'::regclass)"
        ).fetchone()
    assert read is not None
    assert read[0] == 0, "rows of aqd.jobs came from a sequential scan"
    assert read[1] <= 3 * 500, "entries of the primary key that were none of ours were read"


def test_claim_reads_one_index_range_per_lane(conn: database.Connection, queue: Queue) -> None:
    """F21: whatever lies beside the due jobs of the lanes is not read; the rows are locked once."""
    queue.fill(3000, state="'FAILED'")
    queue.fill(3000, run_at="now() + interval '1 year'")
    queue.fill(3000, queue="other")
    queue.fill(500, queue="urgent", priority=5)
    queue.fill(500)
    conn.execute("analyze aqd.jobs")
    values = {
        "queues": "{urgent,default}",
        "priorities": "{5,0}",
        "floors_us": "{0,0}",
        "floor_ids": "{0,0}",
        "slack_s": "0.1",
        "types": "{noop}",
        "limit": "20",
        "token": "1",
        "lease_s": "30",
        "node_id": "x",
        "limited": None,
    }
    statement = statements.get("claim_jobs")
    conn.execute(b"prepare claim as " + statement.text)
    call = sql.SQL("explain (analyze, buffers, timing off, summary off) execute claim ({})").format(
        sql.SQL(", ").join(sql.Literal(values[param]) for param in statement.params)
    )
    with conn.transaction(force_rollback=True):
        plan = "\n".join(row[0] for row in conn.execute(call))
    locks = re.search(r"LockRows.*rows=(\d+)(?:\.00)? loops=(\d+)", plan)
    assert locks is not None
    assert locks.groups() == ("20", "1"), plan  # the second lane was not even begun
    assert re.search(r"Index Scan using jobs_ready on jobs j(_\d)?\b.*rows=20(?:\.00)? loops=1", plan), plan
    assert "Rows Removed by Filter" not in plan
