"""Changing jobs by hand, one and many: every action against every state, sets, batches, races (F38)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aqd import claims, database, statements, store
from aqd.errors import ConflictError, InputError, NotFoundError
from aqd.store import Action, JobFilter, change
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, everything, failure, in_threads

Job = claims.ClaimedJob
REASON = "known bug, see 4711"


# --- a job in each state ----------------------------------------------------------------------------


def queued(conn: database.Connection, queue: Queue) -> int:
    return queue.add()[0]


def scheduled(conn: database.Connection, queue: Queue) -> int:
    return queue.add(delay_s=3600)[0]


def running(conn: database.Connection, queue: Queue) -> int:
    queue.add()
    return book().claim(conn, 1)[0].id


def failed(conn: database.Connection, queue: Queue) -> int:
    (id,) = queue.add()
    (job,) = book().claim(conn, 1)
    assert store.record_failed(conn, [failure(job)]) == {id: "FAILED"}
    return id


def completed(conn: database.Connection, queue: Queue) -> int:
    queue.add()
    (job,) = book().claim(conn, 1)
    store.record_completed(conn, [completion(job)])
    return job.id


def completed_after_a_retry(conn: database.Connection, queue: Queue) -> int:
    id = failed(conn, queue)
    store.retry_job(conn, id)
    mine = book()
    (job,) = mine.claim(conn, 1)
    store.record_completed(conn, [completion(job)])
    return id


def cancelled(conn: database.Connection, queue: Queue) -> int:
    (id,) = queue.add()
    store.cancel_job(conn, id)
    return id


def pruned(conn: database.Connection, queue: Queue) -> int:
    id = completed(conn, queue)
    queue.conn.execute("delete from aqd.job_history")
    return id


Case = Callable[[database.Connection, Queue], int]
CASES: list[Case] = [
    queued,
    scheduled,
    running,
    failed,
    completed,
    completed_after_a_retry,
    cancelled,
    pruned,
]
# What each action makes of each; all others are refused. None: the job is gone.
AFTER: dict[Action, dict[Case, str | None]] = {
    Action.RETRY: {failed: "QUEUED"},
    Action.DISCARD: {failed: "CANCELLED"},
    Action.CANCEL: {queued: "CANCELLED", scheduled: "CANCELLED", running: "PROCESSING"},
    Action.DELETE: {
        queued: None,
        scheduled: None,
        failed: None,
        completed: None,
        completed_after_a_retry: None,
        cancelled: None,
    },
}


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("case", CASES)
def test_every_action_in_every_state(
    conn: database.Connection, queue: Queue, action: Action, case: Case
) -> None:
    """What is refused changes nothing; a dry run never does; both say why."""
    id = case(conn, queue)
    before = everything(queue)
    state = None if case is pruned else queue.state(id)
    allowed = case in AFTER[action]

    tried = store.change_jobs(conn, action, [id], reason=REASON, dry_run=True)
    assert everything(queue) == before
    assert tried.matched == allowed
    assert tried.changed == 0
    assert tried.results is not None
    assert [(r.id, r.state, r.refusal is None) for r in tried.results] == [(id, state, allowed)]

    done = store.change_jobs(conn, action, [id], reason=REASON, by="anna")
    assert done == store.Changed(allowed, allowed, not allowed, False, done.results)
    assert done.results is not None
    if not allowed:
        assert everything(queue) == before
        (result,) = done.results
        assert result.refusal is not None
        assert (state or "no such job") in result.refusal
        return
    after = AFTER[action][case]
    assert done.results == [store.Result(id, after, None)]
    if after is None:
        assert everything(queue) == [[], [], [], []]
    else:
        assert queue.state(id) == after


def test_many_ids_are_told_one_by_one(conn: database.Connection, queue: Queue) -> None:
    """In the order given, each once; what cannot be changed does not keep the others from it."""
    one, two = failed(conn, queue), failed(conn, queue)
    waits = queued(conn, queue)
    done = store.change_jobs(conn, Action.RETRY, [two, waits, 999_999, one, two])
    assert (done.matched, done.changed, done.skipped) == (2, 2, 2)
    assert done.results is not None
    assert [(r.id, r.state, r.refusal) for r in done.results] == [
        (two, "QUEUED", None),
        (waits, "QUEUED", "QUEUED; only a job that is FAILED can be retried"),
        (999_999, None, "there is no such job"),
        (one, "QUEUED", None),
    ]


# --- retry ------------------------------------------------------------------------------------------


def test_a_retry_starts_as_if_new(conn: database.Connection, queue: Queue) -> None:
    """F38: attempt, error, counters, start and lease begin again; attempts and the record stay."""
    id = failed(conn, queue)
    queue.conn.execute(
        "update aqd.jobs set crashes = 2, interruptions = 3, progress_percent = 50, progress_message = 'x',"
        " run_at = now() - interval '1 day', claimed_at = now() - interval '1 hour'"
    )
    (before,) = store.get_attempts(conn, id)
    assert store.change_jobs(conn, Action.RETRY, JobFilter(type="noop")).changed == 1
    row = queue.row(id)
    assert {name: row[name] for name in ("attempt", "crashes", "interruptions", "retries")} == {
        "attempt": 0,
        "crashes": 0,
        "interruptions": 0,
        "retries": 1,
    }
    empty = ("last_error", "claimed_at", "lease_token", "node_id", "progress_percent", "progress_message")
    assert [row[name] for name in empty] == [None] * len(empty)
    assert queue.value("select run_at > now() - interval '1 minute' from aqd.jobs")
    assert store.get_attempts(conn, id) == [before]
    (record,) = store.list_failed(conn).records
    assert (record.failures, record.resolved_at) == (1, None)
    assert record.retried_at is not None
    # And it ends as the others do.
    (job,) = book().claim(conn, 1)
    assert (job.id, job.attempt) == (id, 1)
    store.record_completed(conn, [completion(job)])
    assert queue.value("select resolution from aqd.failed_jobs") == "completed"


def test_twenty_retries_of_a_set_are_one_each(connect: Connect, queue: Queue) -> None:
    """F38: exactly one transition for each failure, whoever asks, in whatever order and grouping."""
    conn = connect()
    ids = [failed(conn, queue) for _ in range(30)]
    conns = [connect(dispatcher=False) for _ in range(20)]

    def retry(number: int) -> int:
        mine = conns[number]
        if number % 2:
            return store.change_jobs(mine, Action.RETRY, JobFilter(states=("FAILED",))).changed
        return store.change_jobs(mine, Action.RETRY, ids[:: -1 if number % 4 else 1]).changed

    counts = in_threads(*[lambda n=n: retry(n) for n in range(20)])
    assert sum(counts) == 30
    assert queue.value("select count(*) from aqd.jobs where state = 'QUEUED' and retries = 1") == 30


def test_retry_all_works_on_a_fixed_set(
    connect: Connect, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F38: jobs that fail again at once are not picked up again by the same request."""
    monkeypatch.setattr(change, "BATCH", 10)
    other = connect()
    queue.fill(
        100,
        state="'FAILED'",
        last_error="'boom'",
    )
    conn = connect(dispatcher=False)
    mine = book()
    steps = store.change_jobs_steps(Action.RETRY, JobFilter(type="noop"))
    batches = 0

    def run_step(step: Any) -> list[Any]:
        nonlocal batches
        rows = database.run(conn, step.name, **step.params)
        if step.name == "retry_jobs":
            batches += 1
            mine.lower("default", 0)
            jobs = mine.claim(other, 100)
            store.record_failed(other, [failure(job) for job in jobs])
        return rows

    done = store.drive_by(steps, run_step)
    assert (batches, done.matched, done.changed, done.skipped, done.more) == (10, 100, 100, 0, False)
    assert queue.value("select count(*) from aqd.jobs where state = 'FAILED' and retries = 1") == 100


def test_retry_of_a_job_whose_key_stands_for_a_newer_one(conn: database.Connection, queue: Queue) -> None:
    """F38: a key is about requests and not about rows, so both run, and the key goes on standing for the newer."""
    (old,) = queue.add(idempotency_key="k")
    (job,) = book().claim(conn, 1)
    store.record_failed(conn, [failure(job)])
    (new,) = queue.add(idempotency_key="k", on_conflict="replace")
    assert new != old
    done = store.change_jobs(conn, Action.RETRY, [old])
    assert done.changed == 1
    assert queue.state(old) == queue.state(new) == "QUEUED"
    assert queue.add(idempotency_key="k", on_conflict="replace") == [new]
    # Deleting frees no key: whoever repeats the request is told that its job is gone, and gets no second one.
    store.delete_job(conn, new)
    assert queue.value("select job_id from aqd.idempotency_keys") == new


def test_retry_by_plain_sql(conn: database.Connection, queue: Queue) -> None:
    """By one statement of any client, in its transaction."""
    (one, two), waits = [failed(conn, queue) for _ in range(2)], queued(conn, queue)
    plain = queue.conn
    with plain.transaction(force_rollback=True):
        assert plain.execute("select aqd.retry_jobs(array[%s, %s, 999])", [waits, one]).fetchall() == [(one,)]
    assert queue.state(one) == "FAILED"
    by_filter = (
        "select aqd.retry_jobs(array(select id from aqd.find_jobs(states => '{FAILED}', type => 'noop')))"
    )
    assert sorted(plain.execute(by_filter).fetchall()) == [(one,), (two,)]
    assert plain.execute("select aqd.retry_jobs('{}')").fetchall() == []
    assert plain.execute("select aqd.retry_jobs(null)").fetchall() == []
    assert queue.state(one) == queue.state(two) == "QUEUED"


# --- cancel -----------------------------------------------------------------------------------------


def test_cancelling_many_tells_each_node_once(connect: Connect, queue: Queue) -> None:
    conn = connect()
    ids = queue.add(6)
    for node in ("node-1", "node-2"):
        book(node_id=node).claim(conn, 2)
    listener = connect(dispatcher=False)
    listener.execute("listen aqd_cancel")
    for _ in range(2):  # again, in case the first was lost
        done = store.change_jobs(conn, Action.CANCEL, ids)
        assert done.results is not None
        told = [n.payload for n in listener.notifies(timeout=5, stop_after=2)]
        assert sorted(told) == ["node-1", "node-2"]
        assert [n.payload for n in listener.notifies(timeout=0)] == []
    assert [r.state for r in done.results] == ["PROCESSING"] * 4 + ["CANCELLED"] * 2
    assert queue.value("select count(*) from aqd.jobs where cancel_requested_at is not null") == 4


def test_cancelling_many_without_notify(connect: Connect, queue: Queue) -> None:
    """``database.notify = false`` means none at all; the nodes look for themselves."""
    conn = connect(notify=False)
    queue.add()
    book().claim(conn, 1)
    listener = connect(dispatcher=False)
    listener.execute("listen aqd_cancel")
    assert store.change_jobs(conn, Action.CANCEL, JobFilter(type="noop")).changed == 1
    listener.execute("select 1")
    assert [n.payload for n in listener.notifies(timeout=0)] == []


# --- discard ----------------------------------------------------------------------------------------


def test_a_discarded_job_says_why_and_by_whom(conn: database.Connection, queue: Queue) -> None:
    id = failed(conn, queue)
    assert store.discard_job(conn, id, REASON, "anna") == "CANCELLED"
    row = store.get_job(conn, id)
    assert row is not None
    assert (row.state, row.attempt, row.last_error) == ("CANCELLED", 1, None)
    assert row.finished_at is not None
    record = queue.conn.execute("select to_jsonb(f)::text from aqd.failed_jobs f").fetchall()
    assert len(record) == 1
    found = queue.conn.execute(
        "select resolution, note, discarded_by, error, resolved_at is not null from aqd.failed_jobs"
    ).fetchone()
    assert found == ("discarded", REASON, "anna", "boom", True)
    assert len(store.get_attempts(conn, id)) == 1
    with pytest.raises(ConflictError, match="only a job that is FAILED can be discarded"):
        store.discard_job(conn, id, REASON, "anna")


def test_discarding_makes_the_days_partition(conn: database.Connection, queue: Queue) -> None:
    """Where no daemon has run for a week there is none."""
    id = failed(conn, queue)
    today = f"job_history_{datetime.now(UTC):%Y%m%d}"
    queue.conn.execute(f"drop table aqd.{today}")
    assert store.discard_job(conn, id, REASON, "anna") == "CANCELLED"
    assert queue.state(id) == "CANCELLED"


def test_a_reason_must_be_one(conn: database.Connection, queue: Queue) -> None:
    id = failed(conn, queue)
    before = everything(queue)
    wrong: list[Any] = [None, "", " \n", "x" * 1001, "a\0b", "\ud800", 7]
    for reason in wrong:
        with pytest.raises(InputError) as caught:
            store.discard_job(conn, id, reason, "anna")
        assert caught.value.field == "reason"
        with pytest.raises(InputError, match="reason"):
            store.change_jobs(conn, Action.DISCARD, [id], reason=reason)
    assert everything(queue) == before


# --- delete -----------------------------------------------------------------------------------------


def test_deleting_takes_all_that_is_known(conn: database.Connection, queue: Queue) -> None:
    """And nothing of the others."""
    keep = failed(conn, queue)
    gone = [
        completed_after_a_retry(conn, queue),
        cancelled(conn, queue),
        scheduled(conn, queue),
        failed(conn, queue),
    ]
    assert queue.value("select count(*) from aqd.failed_jobs") == 3
    done = store.change_jobs(conn, Action.DELETE, gone)
    assert done.changed == 4
    assert queue.value("select array_agg(id) from aqd.all_jobs") == [keep]
    assert queue.value("select array_agg(job_id) from aqd.failed_jobs") == [keep]
    assert queue.value("select array_agg(job_id) from aqd.job_attempts") == [keep]


def test_deleting_history_opens_only_its_days(conn: database.Connection, queue: Queue) -> None:
    """The partitions of other days are neither read nor locked, so that one of them can be detached meanwhile."""
    queue.conn.execute(
        "select aqd.create_history_partition((now() at time zone 'UTC')::date - n) from generate_series(2, 10) n"
    )
    ids = queue.add(3)
    jobs = book().claim(conn, 3)
    for days, job in zip((0, 3, 4), jobs, strict=True):
        store.record_completed(conn, [completion(job)])
        queue.conn.execute(
            "update aqd.job_history set finished_at = finished_at - make_interval(days => %s) where id = %s",
            [days, job.id],
        )
    with queue.conn.transaction(), conn.transaction():
        locks = """select array_agg(distinct relation::regclass::text order by relation::regclass::text)
                   from pg_locks where pid = %s and relation::regclass::text ~ '^aqd.job_history_\\d+$'"""
        oldest = sorted(queue.conn.execute("select id, finished_at from aqd.job_history").fetchall())[1:]
        rows = database.run(
            conn,
            "delete_finished",
            ids=database.int_array(row[0] for row in oldest),
            first_at=min(row[1] for row in oldest),
            last_at=max(row[1] for row in oldest),
        )
        assert sorted(rows) == [(ids[1], None), (ids[2], None)]
        days = [f"aqd.job_history_{datetime.now(UTC) - timedelta(days=n):%Y%m%d}" for n in (4, 3)]
        assert queue.value(locks, conn.info.backend_pid) == days


def test_whoever_waits_for_a_deleted_job_is_told(connect: Connect, queue: Queue) -> None:
    conn = connect()
    (id,) = queue.add()
    listener = connect(dispatcher=False)
    listener.execute("listen aqd_ended")
    queue.conn.execute("select setval('aqd.waits', (date_part('epoch', now()) + 60)::bigint)")
    store.delete_job(conn, id)
    assert [n.payload for n in listener.notifies(timeout=10, stop_after=1)] == [str(id)]


def test_a_deleted_job_does_not_come_back(connect: Connect, queue: Queue) -> None:
    """Against a claim that holds the row: the delete waits, and leaves a running job alone."""
    conn, other = connect(), connect()
    (id,) = queue.add()
    answers: list[str] = []

    def delete() -> None:
        try:
            answers.append(store.delete_job(other, id))
        except ConflictError as error:
            answers.append(str(error))

    with conn.transaction():
        (job,) = book().claim(conn, 1)
        thread = threading.Thread(target=delete, daemon=True)
        thread.start()
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(lambda: queue.value(waits, other.info.backend_pid))
    thread.join(30)
    assert answers == [f"job {id} is PROCESSING; a job that runs cannot be deleted, cancel it first"]
    assert store.record_completed(conn, [completion(job)]) == {id}
    assert store.delete_job(other, id) == "COMPLETED"
    with pytest.raises(NotFoundError):
        store.delete_job(other, id)


# --- sets -------------------------------------------------------------------------------------------


def test_a_filter_is_for_what_can_be_changed(conn: database.Connection, queue: Queue) -> None:
    ids = {case.__name__: case(conn, queue) for case in (failed, completed, cancelled, running)}
    ids["queued"] = queued(conn, queue)
    found = {
        action: store.change_jobs(conn, action, JobFilter(type="noop"), reason=REASON, dry_run=True).matched
        for action in Action
    }
    assert found == {Action.RETRY: 1, Action.DISCARD: 1, Action.CANCEL: 2, Action.DELETE: 4}
    soon = datetime.now(UTC) + timedelta(minutes=1)
    for filters, matched in (
        (JobFilter(states=("COMPLETED",)), 1),
        (JobFilter(finished_before=soon), 2),
        (JobFilter(finished_after=soon), 0),
        (JobFilter(error="BOO"), 1),
        (JobFilter(queue="other"), 0),
        (JobFilter(ids=(ids["queued"], ids["running"])), 1),
        (JobFilter(), 4),
    ):
        assert store.change_jobs(conn, Action.DELETE, filters, dry_run=True).matched == matched, filters
    done = store.change_jobs(conn, Action.DELETE, JobFilter(states=("COMPLETED", "QUEUED")))
    assert (done.matched, done.changed, done.skipped, done.more, done.results) == (2, 2, 0, False, None)
    assert sorted(row[0] for row in queue.conn.execute("select state from aqd.all_jobs")) == [
        "CANCELLED",
        "FAILED",
        "PROCESSING",
    ]


def test_a_filter_for_other_states_is_refused(conn: database.Connection) -> None:
    for action, filters, field in (
        (Action.RETRY, JobFilter(states=("QUEUED",)), "state"),
        (Action.RETRY, JobFilter(states=("FAILED", "PROCESSING")), "state"),
        (Action.CANCEL, JobFilter(states=("COMPLETED",)), "state"),
        (Action.DELETE, JobFilter(states=("PROCESSING",)), "state"),
        (Action.DISCARD, JobFilter(finished_after=datetime.now(UTC)), "finished_after"),
    ):
        with pytest.raises(InputError) as caught:
            store.change_jobs(conn, action, filters, reason=REASON)
        assert caught.value.field == field, (action, filters)


def test_a_set_is_bounded_and_worked_through_in_batches(
    conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "MAX_JOBS", 25)
    monkeypatch.setattr(change, "BATCH", 10)
    queue.fill(30)
    assert store.change_jobs(conn, Action.CANCEL, JobFilter(), dry_run=True) == store.Changed(
        30, 0, 0, True, None
    )
    assert store.change_jobs(conn, Action.CANCEL, JobFilter()) == store.Changed(25, 25, 0, True, None)
    assert queue.value("select min(id) from aqd.jobs") == 26  # the oldest first
    batches = "select count(distinct finished_at) from aqd.job_history"  # now() is the transaction's
    assert queue.value(batches) == 3
    assert store.change_jobs(conn, Action.CANCEL, JobFilter()) == store.Changed(5, 5, 0, False, None)
    assert store.change_jobs(conn, Action.CANCEL, JobFilter()) == store.Changed(0, 0, 0, False, None)


def test_what_moves_on_meanwhile_is_skipped(
    conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "BATCH", 2)
    ids = queue.add(4)
    steps = store.change_jobs_steps(Action.CANCEL, JobFilter(type="noop"))
    named = store.change_jobs_steps(Action.CANCEL, ids)

    def run_step(step: Any) -> list[Any]:
        if step.params.get("ids") == database.int_array(ids[2:]) and step.changes:
            for job in book().claim(conn, 10):
                if job.id == ids[2]:
                    store.record_completed(conn, [completion(job)])
                else:
                    store.record_failed(conn, [failure(job)])
        return database.run(conn, step.name, **step.params)

    assert store.drive_by(steps, run_step) == store.Changed(4, 2, 2, False, None)
    again = store.drive_by(named, run_step)
    assert again.results is not None
    assert [r.state for r in again.results] == ["CANCELLED"] * 2 + ["COMPLETED", "FAILED"]
    assert queue.state(ids[3]) == "FAILED"
    assert again.results[2].refusal == "COMPLETED; only a job that is QUEUED or PROCESSING can be cancelled"


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retry_jobs", "cancel_jobs", "discard_jobs", "delete_jobs"])
def test_a_batch_reads_only_its_rows(conn: database.Connection, queue: Queue, name: str) -> None:
    """On a connection that was at work while the queue was empty, as that of a service, without planner settings."""
    plain = queue.conn
    given: dict[str, Any] = {"ids": database.int_array(range(1, 501)), "reason": REASON, "by": "anna"}
    params = {param: given[param] for param in statements.get(name).params}
    plain.execute("analyze aqd.jobs")
    for _ in range(7):
        database.run(plain, name, **params)
    queue.fill(20_000, state="case when n %% 2 = 0 then 'QUEUED' else 'FAILED' end")
    with plain.transaction(force_rollback=True):
        assert len(database.run(plain, name, **params)) >= 250
        read = queue.value("select pg_stat_get_xact_tuples_returned('aqd.jobs'::regclass)")
    assert read == 0, "rows of aqd.jobs came from a sequential scan"
