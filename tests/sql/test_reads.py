"""What the API and the command line read, and the retry by hand."""

from __future__ import annotations

import pytest

from aqd import database, migrate, store
from aqd.config import Database
from aqd.errors import ConflictError, NotFoundError
from aqd.store import look
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


def test_list_jobs(connect: Connect, queue: Queue) -> None:
    api = connect(dispatcher=False)
    ids = in_every_state(connect(), queue)
    newest_first = sorted(ids.values(), reverse=True)
    assert [job.id for job in store.list_jobs(api)] == newest_first
    assert [job.id for job in store.list_jobs(api, limit=2)] == newest_first[:2]
    assert [job.id for job in store.list_jobs(api, cursor=newest_first[1])] == newest_first[2:]
    for state, id in ids.items():
        assert [job.id for job in store.list_jobs(api, store.JobFilter(state=state))] == [id]
        assert store.list_jobs(api, store.JobFilter(state=state, type="other")) == []
        assert [job.id for job in store.list_jobs(api, store.JobFilter(state, "noop", "default"))] == [id]
    assert store.list_jobs(api, store.JobFilter(state="CANCELLED")) == []
    assert store.list_jobs(api, store.JobFilter(queue="other")) == []
    assert len(store.list_jobs(api, store.JobFilter(type="noop"))) == 4


def test_list_by_queue_is_bounded_in_time(connect: Connect, queue: Queue) -> None:
    conn, api = connect(), connect(dispatcher=False)
    queue.add(2, queue="q")
    for job in book().claim(conn, 2):
        store.record_completed(conn, [completion(job)])
    days = round(look.QUEUE_WINDOW_S / 86_400) + 1
    queue.conn.execute(f"select aqd.create_history_partition((now() at time zone 'UTC')::date - {days})")
    queue.conn.execute(
        f"update aqd.job_history set finished_at = finished_at - interval '{days} days' "
        "where id = (select min(id) from aqd.job_history)"
    )
    assert len(store.list_jobs(api, store.JobFilter(queue="q"))) == 1
    assert len(store.list_jobs(api, store.JobFilter(queue="q", type="noop"))) == 2
    assert len(store.list_jobs(api)) == 2


def test_paging_is_stable_while_jobs_come_and_go(connect: Connect, queue: Queue) -> None:
    conn, api = connect(), connect(dispatcher=False)
    ids = queue.add(30)
    seen: list[int] = []
    cursor = None
    while page := store.list_jobs(api, cursor=cursor, limit=7):
        seen += [job.id for job in page]
        cursor = page[-1].id
        queue.add(2)
        store.record_completed(conn, [completion(job) for job in book().claim(conn, 3)])
    assert seen == sorted(ids, reverse=True)


@pytest.mark.parametrize("given", [{}, {"type": "noop"}, {"state": "COMPLETED"}, {"state": "FAILED"}])
def test_listing_reads_a_page_and_no_more(connect: Connect, queue: Queue, given: dict[str, str]) -> None:
    """Newest first by index, over live jobs and history alike."""
    conn, api = connect(), connect(dispatcher=False)
    queue.fill(3000, state="'FAILED'")
    queue.fill(3000)
    while jobs := book().claim(conn, 1000):
        store.record_completed(conn, [completion(job) for job in jobs])
    conn.execute("analyze aqd.jobs")
    conn.execute("analyze aqd.job_history")
    count = """select sum(pg_stat_get_xact_tuples_returned(oid) + pg_stat_get_xact_tuples_fetched(oid))::bigint
               from pg_class where relnamespace = 'aqd'::regnamespace and relkind = 'r'"""
    with api.transaction():
        assert len(store.list_jobs(api, store.JobFilter(**given), limit=20)) == 20
        read = api.execute(count).fetchone()
    assert read is not None
    assert read[0] < 200


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
    (record,) = store.list_failed(conn)
    assert (record.state, record.resolved_at) == ("QUEUED", None)
    assert record.retried_at is not None

    (again,) = book().claim(conn, 1)
    assert (again.id, again.attempt) == (job.id, 1)
    store.record_completed(conn, [completion(again)])
    assert store.list_failed(conn) == []
    (settled,) = store.list_failed(conn, resolved=True)
    assert (settled.resolution, settled.state) == ("completed", None)
    assert settled.resolved_at is not None
    assert len(store.get_attempts(conn, job.id)) == 1


def test_failing_again_continues_the_open_record(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    for round in (1, 2, 3):
        (job,) = book().claim(conn, 1)
        store.record_failed(conn, [failure(job, error=f"round {round}")])
        (record,) = store.list_failed(conn, resolved=True)
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


def test_list_failed_pages(conn: database.Connection, queue: Queue) -> None:
    queue.add(5)
    store.record_failed(conn, [failure(job) for job in book().claim(conn, 5)])
    first = store.list_failed(conn, limit=3)
    second = store.list_failed(conn, cursor=first[-1].id, limit=3)
    assert [record.id for record in first + second] == sorted((r.id for r in first + second), reverse=True)
    assert len(first + second) == 5


def test_health_and_nodes(conn: database.Connection, queue: Queue) -> None:
    node = store.NodeState("n1", "host", 42, "0.1.0", 3, 4, ["b", "a"], "running")
    store.node_seen(conn, node)
    store.node_seen(conn, node._replace(generation=4, types=["c"]))
    (row,) = store.list_nodes(conn)
    assert (row.node_id, row.name, row.pid, row.generation, row.types) == ("n1", "host", 42, 4, ["c"])
    found = store.health(conn)
    assert (found.problem, found.live_nodes, found.schema_current) == (None, 1, found.schema_wanted)
    queue.conn.execute("update aqd.nodes set seen_at = now() - interval '31 s'")
    assert store.health(conn, 30.0).live_nodes == 0
    store.node_gone(conn, "n1")
    assert store.list_nodes(conn) == []


def test_health_without_a_schema(empty_database_url: str) -> None:
    with store.connect(Database(url=empty_database_url), "test") as conn:
        found = store.health(conn)
        assert (found.schema_current, found.live_nodes) == (0, 0)
        assert "aqd db migrate" in (found.problem or "")
        migrate.migrate(conn)
        assert store.health(conn).problem is None
