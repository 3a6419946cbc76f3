"""What the API and the command line read, and the retry by hand."""

from __future__ import annotations

import pytest

from aqd import database, migrate, store
from aqd.config import Database
from aqd.errors import ConflictError, NotFoundError
from aqd.store import figures
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads


def in_every_state(conn: database.Connection, queue: Queue) -> dict[str, int]:
    """One job in each state; the ids are in the order of the dictionary."""
    queue.add(3)
    done, failed, _running = book().claim(conn, 3)
    store.record_completed(conn, [completion(done, "{}")])
    store.record_failed(conn, [failure(failed)])
    (waiting,) = queue.add()
    return {"COMPLETED": done.id, "FAILED": failed.id, "PROCESSING": _running.id, "QUEUED": waiting}


def test_get_job_in_every_state(conn: database.Connection, queue: Queue) -> None:
    for state, id in in_every_state(conn, queue).items():
        job = store.get_job(conn, id)
        assert job is not None
        assert (job.id, job.state, job.type, job.payload) == (id, state, "noop", "{}")
        assert (job.finished_at is not None) == (state == "COMPLETED")
    assert store.get_job(conn, 2**62) is None


def test_get_job_finds_old_history(conn: database.Connection, queue: Queue) -> None:
    queue.add()
    (job,) = book().claim(conn, 1)
    store.record_completed(conn, [completion(job)])
    queue.conn.execute("select aqd.create_history_partition(current_date - 10)")
    queue.conn.execute("update aqd.job_history set finished_at = finished_at - interval '10 days'")
    assert store.get_job(conn, job.id) is not None


def test_retry(conn: database.Connection, queue: Queue) -> None:
    """As if new, but the history of attempts stays; a success resolves the record."""
    queue.add(max_attempts=1)
    (job,) = book().claim(conn, 1)
    store.record_failed(conn, [failure(job, kind="crashed")])
    made = store.retry_job(conn, job.id)
    assert (made.id, made.state) == (job.id, "QUEUED")
    row = queue.row(job.id)
    assert (row["attempt"], row["crashes"], row["interruptions"], row["retries"]) == (0, 0, 0, 1)
    assert row["last_error"] is row["lease_token"] is row["claimed_at"] is None
    assert row["max_attempts"] == 1
    assert len(store.get_attempts(conn, job.id)) == 1
    (record,) = store.list_failed(conn).records
    assert (record.state, record.resolved_at) == ("QUEUED", None)
    assert record.retried_at is not None

    (again,) = book().claim(conn, 1)
    assert (again.id, again.attempt) == (job.id, 1)
    store.record_completed(conn, [completion(again)])
    assert store.list_failed(conn).records == []
    (settled,) = store.list_failed(conn, resolved=True).records
    assert (settled.resolution, settled.state) == ("completed", None)
    assert settled.resolved_at is not None
    assert len(store.get_attempts(conn, job.id)) == 1


def test_failing_again_continues_the_open_record(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    for round in (1, 2, 3):
        (job,) = book().claim(conn, 1)
        store.record_failed(conn, [failure(job, error=f"round {round}")])
        (record,) = store.list_failed(conn, resolved=True).records
        assert (record.job_id, record.failures, record.error) == (id, round, f"round {round}")
        store.retry_job(conn, id)
    assert len(store.get_attempts(conn, id)) == 3


def test_retry_is_refused_in_other_states(conn: database.Connection, queue: Queue) -> None:
    for state, id in in_every_state(conn, queue).items():
        if state != "FAILED":
            with pytest.raises(ConflictError, match=f"job {id} is {state}"):
                store.retry_job(conn, id)
    with pytest.raises(NotFoundError, match="no job 4611686018427387904"):
        store.retry_job(conn, 2**62)


def test_twenty_retries_at_once(connect: Connect, queue: Queue) -> None:
    """F38: exactly one transition; the others are told that it is no longer FAILED."""
    conn = connect()
    queue.add()
    (job,) = book().claim(conn, 1)
    store.record_failed(conn, [failure(job)])

    def retry() -> str:
        mine = connect(dispatcher=False)
        try:
            store.retry_job(mine, job.id)
        except ConflictError as error:
            return str(error)
        return "done"

    answers = in_threads(*[retry] * 20)
    assert answers.count("done") == 1
    assert set(answers) - {"done"} == {f"job {job.id} is QUEUED; only a FAILED job can be retried"}
    assert queue.row(job.id)["retries"] == 1


def test_health_and_nodes(conn: database.Connection, queue: Queue) -> None:
    node = store.NodeState("n1", "host", 42, "0.1.0", 3, 4, ["b", "a"], "running")
    store.node_seen(conn, node)
    store.node_seen(conn, node._replace(generation=4, types=["c"]))
    (row,) = figures.list_nodes(conn, 30.0)
    assert (row.node_id, row.name, row.pid, row.generation, row.types) == ("n1", "host", 42, 4, ["c"])
    found = store.health(conn)
    assert (found.problem, found.live_nodes, found.schema_current) == (None, 1, found.schema_wanted)
    queue.conn.execute("update aqd.nodes set seen_at = now() - interval '31 s'")
    assert store.health(conn, 30.0).live_nodes == 0
    store.node_gone(conn, "n1")
    assert figures.list_nodes(conn, 30.0) == []


def test_health_without_a_schema(empty_database_url: str) -> None:
    with store.connect(Database(url=empty_database_url), "test") as conn:
        found = store.health(conn)
        assert (found.schema_current, found.live_nodes) == (0, 0)
        assert "aqd db migrate" in (found.problem or "")
        migrate.migrate(conn)
        assert store.health(conn).problem is None
