"""F41: cancelling, in every state and against everybody else who wants the row."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from aqd import claims, database, store
from aqd.errors import NotFoundError
from aqd.job import validate
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, everything, failure, in_threads, released

Job = claims.ClaimedJob


def claim(conn: database.Connection, node_id: str = "node-1") -> Job:
    (job,) = book(node_id=node_id).claim(conn, 1)
    return job


def kinds(conn: database.Connection, id: int) -> list[tuple[str, str | None]]:
    return [(attempt.kind, attempt.reason) for attempt in store.get_attempts(conn, id)]


# --- the matrix -----------------------------------------------------------------------------------
# Each way of getting into a state returns the job's id, what cancelling answers, and what its owner does
# afterwards; then the state and the attempts that must be left.

After = Callable[[], object]
Case = Callable[[database.Connection, Queue], "tuple[int, str, After | None]"]


def queued(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    return queue.add()[0], "CANCELLED", None


def scheduled(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    return queue.add(delay_s=3600)[0], "CANCELLED", None


def waiting_for_a_retry(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    (id,) = queue.add()
    store.record_failed(conn, [failure(claim(conn), retry_in_s=60.0)])
    return id, "CANCELLED", None


def retried_by_hand(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    failed(conn, queue)
    (record,) = store.list_failed(conn).records
    store.retry_job(conn, record.job_id)
    return record.job_id, "CANCELLED", None


def claimed_not_started(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    return job.id, "PROCESSING", lambda: store.release(conn, [released(job)], 20)


def running(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    fate = failure(job, retry_in_s=1.0, kind="cancelled", error="ended as asked")._replace(reason="cancel")
    return job.id, "PROCESSING", lambda: store.record_failed(conn, [fate])


def running_then_interrupted(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    return job.id, "PROCESSING", lambda: store.release(conn, [released(job, interrupted=True)], 0)


def running_then_fails(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    fate = failure(job, retry_in_s=0.0)._replace(reason="exception")
    return job.id, "PROCESSING", lambda: store.record_failed(conn, [fate])


def running_then_crashes_for_good(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    retried_by_hand(conn, queue)
    job = claim(conn)
    fate = failure(job, retry_in_s=None, kind="crashed")._replace(reason="signal")
    return job.id, "PROCESSING", lambda: store.record_failed(conn, [fate])


def running_then_completes(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    return job.id, "PROCESSING", lambda: store.record_completed(conn, [completion(job)])


def running_then_lost(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    (id,) = queue.add(max_attempts=1)
    claim(conn)
    queue.expire(id)
    return id, "PROCESSING", lambda: store.rescue(conn, 10, 0.0, 0.0, 5)


def running_then_forgotten(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    queue.add()
    job = claim(conn)
    return job.id, "PROCESSING", lambda: store.reconcile(conn, "node-1", [], 0.0)


def failed(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    (id,) = queue.add()
    store.record_failed(conn, [failure(claim(conn))])
    return id, "FAILED", None


def completed(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    (id,) = queue.add()
    store.record_completed(conn, [completion(claim(conn))])
    return id, "COMPLETED", None


def cancelled(conn: database.Connection, queue: Queue) -> tuple[int, str, After | None]:
    (id,) = queue.add()
    store.cancel_job(conn, id)
    return id, "CANCELLED", None


MATRIX: list[tuple[Case, str, list[tuple[str, str | None]], int]] = [
    # state before, state in the end, (kind, reason) of the attempts, attempt
    (queued, "CANCELLED", [], 0),
    (scheduled, "CANCELLED", [], 0),
    (waiting_for_a_retry, "CANCELLED", [("failed", None)], 1),
    (retried_by_hand, "CANCELLED", [("failed", None)], 0),
    (claimed_not_started, "CANCELLED", [], 0),
    (running, "CANCELLED", [("cancelled", "cancel")], 1),
    (running_then_interrupted, "CANCELLED", [("cancelled", "drain")], 1),
    (running_then_fails, "CANCELLED", [("cancelled", "exception")], 1),
    (running_then_crashes_for_good, "CANCELLED", [("failed", None), ("cancelled", "signal")], 1),
    (running_then_completes, "COMPLETED", [], 1),
    (running_then_lost, "CANCELLED", [("cancelled", "lease")], 1),
    (running_then_forgotten, "CANCELLED", [], 0),
    (failed, "FAILED", [("failed", None)], 1),
    (completed, "COMPLETED", [], 1),
    (cancelled, "CANCELLED", [], 0),
]


@pytest.mark.parametrize("calls", [1, 2, 10])
@pytest.mark.parametrize(
    ("case", "final", "attempts", "attempt"), MATRIX, ids=[case[0].__name__ for case in MATRIX]
)
def test_matrix(
    connect: Connect,
    queue: Queue,
    case: Case,
    final: str,
    attempts: list[tuple[str, str | None]],
    attempt: int,
    calls: int,
) -> None:
    conn = connect()
    id, answer, after = case(conn, queue)
    before = everything(queue)
    callers = [connect(dispatcher=False) for _ in range(calls if calls > 2 else 1)]
    if calls > 2:
        answers = in_threads(*[lambda c=c: store.cancel_job(c, id) for c in callers])
    else:
        answers = [store.cancel_job(callers[0], id) for _ in range(calls)]
    assert {told.state for told in answers} == {answer}
    assert len(set(answers)) == 1, "the same moments, too"
    if answer in ("FAILED", "COMPLETED") or case is cancelled:
        assert everything(queue) == before, "a state that is final does not change"
    else:
        assert answers[0].cancel_requested_at is not None
    if after is not None:
        after()

    row = store.get_job(conn, id)
    assert row is not None
    assert queue.state(id) == row.state == final
    assert (row.attempt, row.crashes, row.interruptions) == (attempt, 0, 0)
    assert kinds(conn, id) == attempts
    if final == "CANCELLED":
        assert row.cancel_requested_at is not None
        assert row.finished_at is not None
        assert queue.value("select count(*) from aqd.jobs") == 0
        assert store.list_failed(conn).records == []
        assert {record.resolution for record in store.list_failed(conn, resolved=True).records} <= {
            "cancelled"
        }

    settled = everything(queue)
    assert store.cancel_job(conn, id).state == final, "and once more"
    assert book().claim(conn, 10) == []
    assert everything(queue) == settled


def test_no_such_job(conn: database.Connection, queue: Queue) -> None:
    with pytest.raises(NotFoundError, match="there is no job 999"):
        store.cancel_job(conn, 999)
    assert queue.value("select aqd.cancel(999)") is None
    assert queue.value("select aqd.cancel(null)") is None


def test_the_record_of_a_retried_job_is_resolved(conn: database.Connection, queue: Queue) -> None:
    for case in (retried_by_hand, running_then_crashes_for_good):
        id, _, after = case(conn, queue)
        store.cancel_job(conn, id)
        if after is not None:
            after()
        record = store.list_failed(conn, resolved=True).records[0]
        assert (record.job_id, record.resolution, record.failures) == (id, "cancelled", 1)
        assert record.resolved_at is not None


def test_figures_of_a_cancelled_attempt(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add(queue="q", priority=3, max_attempts=7, timeout_s=9)
    job = claim(conn, "node-7")
    store.cancel_job(conn, id)
    fate = store.Failure(
        id,
        job.token,
        "failed",
        "boom",
        "Tb",
        0.0,
        1.5,
        2.5,
        0.25,
        4096,
        9,
        None,
        "cancel",
        "said",
        "never asked for",
    )
    assert store.record_failed(conn, [fate]) == {id: "CANCELLED"}
    row = store.get_job(conn, id)
    assert row is not None
    assert (row.wall_s, row.cpu_s, row.peak_kb, row.node_id) == (2.5, 0.25, 4096, "node-7")
    assert (row.queue, row.priority, row.max_attempts, row.timeout_s) == ("q", 3, 7, 9.0)
    assert row.claimed_at is not None
    assert row.output is row.result is None
    (attempt,) = store.get_attempts(conn, id)
    assert (attempt.kind, attempt.reason, attempt.error, attempt.output) == (
        "cancelled",
        "cancel",
        "boom",
        "said",
    )
    assert (attempt.signal, attempt.traceback, attempt.wall_s, attempt.node_id) == (9, "Tb", 2.5, "node-7")


def test_an_attempt_of_the_kind_cancelled_needs_no_request(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    fate = failure(claim(conn), retry_in_s=5.0, kind="cancelled")
    assert store.record_failed(conn, [fate]) == {id: "CANCELLED"}
    assert store.record_failed(conn, [fate]) == {id: ""}, "an earlier try"
    assert store.get_job(conn, id).cancel_requested_at is not None  # type: ignore[union-attr]


def test_what_cannot_be_stored_of_a_cancelled_attempt(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    fate = failure(claim(conn), retry_in_s=5.0, kind="cancelled")._replace(exit_code=2**40)
    assert store.record_failed(conn, [fate]) == {id: "CANCELLED"}


def test_a_batch_with_and_without(conn: database.Connection, queue: Queue) -> None:
    """One statement, each row by its own flag."""
    ids = queue.add(6)
    jobs = book().claim(conn, 6)
    for job in jobs[::2]:
        store.cancel_job(conn, job.id)
    fates = [failure(job, 0.0) for job in jobs[:3]]
    assert store.record_failed(conn, fates) == {ids[0]: "CANCELLED", ids[1]: "QUEUED", ids[2]: "CANCELLED"}
    given = [released(job, interrupted=True) for job in jobs[3:5]]
    assert store.release(conn, given, 20) == {ids[3]: "QUEUED", ids[4]: "CANCELLED"}
    queue.expire(ids[5])
    assert store.rescue(conn, 10, 0.0, 0.0, 5) == ([ids[5]], [], [])


# --- who is told ----------------------------------------------------------------------------------


def payloads(conn: psycopg.Connection[Any]) -> list[str]:
    conn.execute("select 1")
    return [note.payload for note in conn.notifies(timeout=0)]


def test_the_node_is_told(connect: Connect, queue: Queue) -> None:
    listener, conn = connect(), connect()
    listener.execute(f"listen {claims.CANCEL_CHANNEL}")
    queue.add(2)
    job = claim(conn, "node-7")
    waiting = store.list_jobs(conn, store.JobFilter(states=("QUEUED",))).jobs[0]
    store.cancel_job(conn, waiting.id)
    assert payloads(listener) == [], "nobody runs it"
    store.cancel_job(conn, job.id)
    assert payloads(listener) == ["node-7"]
    store.cancel_job(conn, job.id)
    assert payloads(listener) == ["node-7"], "once more, should the first one have been lost"
    store.cancel_job(connect(notify=False), job.id)
    assert payloads(listener) == []
    store.record_completed(conn, [completion(job)])
    store.cancel_job(conn, job.id)
    assert payloads(listener) == []


def test_the_renewal_tells(connect: Connect, queue: Queue) -> None:
    """That is how a node without notifications learns of it; also where the row is locked just now."""
    conn, other = connect(), connect()
    queue.add(3)
    jobs = book().claim(conn, 3)
    pairs = [(job.id, job.token) for job in jobs]
    store.cancel_job(conn, jobs[0].id)
    store.cancel_job(conn, jobs[1].id)
    with other.transaction():
        other.execute("select from aqd.jobs where id = any(%s) for update", [[jobs[1].id, jobs[2].id]])
        assert store.renew(conn, pairs, 30.0) == {
            pairs[0]: (True, True),
            pairs[1]: (False, True),
            pairs[2]: (False, False),
        }


# --- races ----------------------------------------------------------------------------------------
# The first one holds the row in an open transaction; the second one waits for it, or passes it over and is
# asked again afterwards.


def _complete(conn: database.Connection, job: Job) -> None:
    store.record_completed(conn, [completion(job)])


def _fail(conn: database.Connection, job: Job) -> None:
    store.record_failed(conn, [failure(job)])


def _fail_with_a_retry(conn: database.Connection, job: Job) -> None:
    store.record_failed(conn, [failure(job, 0.0)])


def _release(conn: database.Connection, job: Job) -> None:
    store.release(conn, [released(job)], 20)


def _interrupt(conn: database.Connection, job: Job) -> None:
    store.release(conn, [released(job, interrupted=True)], 20)


def _reconcile(conn: database.Connection, job: Job) -> None:
    store.reconcile(conn, "node-1", [], 0.0)


def _rescue(conn: database.Connection, job: Job) -> None:
    store.rescue(conn, 10, 0.0, 0.0, 5)


def _claim(conn: database.Connection, job: Job) -> None:
    book().claim(conn, 1)


def _retry(conn: database.Connection, job: Job) -> None:
    store.retry_job(conn, job.id)


def _cancel(conn: database.Connection, job: Job) -> None:
    store.cancel_job(conn, job.id)


RACES = [
    # act, state before; cancel comes second: its answer, the state in the end; cancel comes first: the same
    (_complete, "PROCESSING", ("COMPLETED", "COMPLETED"), ("PROCESSING", "COMPLETED")),
    (_fail, "PROCESSING", ("FAILED", "FAILED"), ("PROCESSING", "CANCELLED")),
    (_fail_with_a_retry, "PROCESSING", ("CANCELLED", "CANCELLED"), ("PROCESSING", "CANCELLED")),
    (_release, "PROCESSING", ("CANCELLED", "CANCELLED"), ("PROCESSING", "CANCELLED")),
    (_interrupt, "PROCESSING", ("CANCELLED", "CANCELLED"), ("PROCESSING", "CANCELLED")),
    (_reconcile, "PROCESSING", ("CANCELLED", "CANCELLED"), ("PROCESSING", "CANCELLED")),
    (_rescue, "PROCESSING", ("CANCELLED", "CANCELLED"), ("PROCESSING", "CANCELLED")),
    (_cancel, "PROCESSING", ("PROCESSING", "PROCESSING"), ("PROCESSING", "PROCESSING")),
    (_claim, "QUEUED", ("PROCESSING", "PROCESSING"), ("CANCELLED", "CANCELLED")),
    (_cancel, "QUEUED", ("CANCELLED", "CANCELLED"), ("CANCELLED", "CANCELLED")),
    (_retry, "FAILED", ("CANCELLED", "CANCELLED"), ("FAILED", "QUEUED")),
    (_cancel, "FAILED", ("FAILED", "FAILED"), ("FAILED", "FAILED")),
]
PASSES_OVER = (_reconcile, _rescue, _claim)


def _job_in(state: str, conn: database.Connection, queue: Queue) -> Job:
    """A job in that state; its lease, if any, has expired."""
    (id,) = queue.add()
    job = claim(conn)
    if state == "PROCESSING":
        queue.expire(id)
    elif state == "QUEUED":
        store.release(conn, [released(job)], 20)
    else:
        store.record_failed(conn, [failure(job)])
    return job


@pytest.mark.parametrize("first", ["act", "cancel"])
@pytest.mark.parametrize(
    ("act", "state", "cancel_second", "cancel_first"),
    RACES,
    ids=[f"{race[0].__name__[1:]}-{race[1]}" for race in RACES],
)
def test_races(
    connect: Connect,
    queue: Queue,
    act: Callable[[database.Connection, Job], None],
    state: str,
    cancel_second: tuple[str, str],
    cancel_first: tuple[str, str],
    first: str,
) -> None:
    one, two = connect(), connect()
    job = _job_in(state, one, queue)
    answers: list[str] = []

    def cancel(conn: database.Connection) -> None:
        answers.append(queue_state_after(conn, job.id))

    doers = [lambda: act(one, job), lambda: cancel(two)]
    conns = [one, two]
    if first == "cancel":
        doers.reverse()
        conns.reverse()
    errors: list[BaseException] = []

    def late() -> None:
        try:
            doers[1]()
        except BaseException as error:
            errors.append(error)

    with conns[0].transaction():
        doers[0]()
        thread = threading.Thread(target=late, daemon=True)
        thread.start()
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        pid = conns[1].info.backend_pid
        passes = first == "cancel" and act in PASSES_OVER
        wait_until(lambda: queue.value(waits, pid) or (passes and not thread.is_alive()))
    thread.join(10)
    assert not thread.is_alive()
    assert errors == []
    if passes:
        assert queue.state(job.id) == cancel_first[0], "the row was passed over"
        act(one, job)
    answer, final = cancel_second if first == "act" else cancel_first
    assert answers == [answer]
    assert queue.state(job.id) == final
    assert queue.value("select count(*) from aqd.all_jobs") == 1


def queue_state_after(conn: database.Connection, id: int) -> str:
    """The function's own answer, without the look afterwards."""
    return str(database.run(conn, "cancel_job", id=id)[0][0])


@pytest.mark.parametrize("act", [_claim, _complete, _fail_with_a_retry], ids=lambda act: act.__name__[1:])
def test_repeatable_read_is_a_conflict(
    connect: Connect, queue: Queue, act: Callable[[database.Connection, Job], None]
) -> None:
    """With a snapshot from before, the state is unknown: an error that the caller can repeat, no guess."""
    owner, caller = connect(), connect()
    job = _job_in("QUEUED" if act is _claim else "PROCESSING", owner, queue)
    caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def cancel() -> None:
        with caller.transaction():
            caller.execute("select count(*) from aqd.jobs")
            act(owner, job)
            store.cancel_job(caller, job.id)

    with pytest.raises(psycopg.errors.SerializationFailure):
        cancel()
    assert store.cancel_job(caller, job.id).state in ("PROCESSING", "COMPLETED", "CANCELLED")


def test_in_the_callers_transaction(connect: Connect, queue: Queue) -> None:
    conn = connect(dispatcher=False)
    (id,) = queue.add()
    with conn.transaction(force_rollback=True):
        assert store.cancel_job(conn, id).state == "CANCELLED"
    assert queue.state(id) == "QUEUED"
    with conn.transaction():
        made = store.enqueue(conn, validate("noop")).id
        assert store.cancel_job(conn, made).state == "CANCELLED"
    assert queue.state(made) == "CANCELLED"


# --- the net under everybody ----------------------------------------------------------------------

AS_BEFORE = """
    with locked as materialized (
        select j.id, j.attempt, j.type, j.queue, j.lease_token from aqd.jobs j where j.id = %(id)s for no key update
    ), changed as (
        update aqd.jobs j
        set state = %(state)s, claimed_at = null, lease_token = null, lease_expires_at = null, node_id = null
        from locked l where j.id = l.id
    ), noted as (
        insert into aqd.job_attempts (job_id, attempt, kind, finished_at, wall_s, lease_token)
        select l.id, l.attempt, 'failed', now(), 3, l.lease_token from locked l
    )
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind)
    select l.id, now(), l.attempt, l.type, l.queue, 'failed' from locked l where %(state)s = 'FAILED'
"""


@pytest.mark.parametrize("state", ["QUEUED", "FAILED"])
def test_statements_that_do_not_know_of_it(conn: database.Connection, queue: Queue, state: str) -> None:
    """A node of the version before runs beside us: what it would run again, or call FAILED, is CANCELLED."""
    (id,) = queue.add()
    claim(conn, "older")
    store.cancel_job(conn, id)
    queue.conn.execute(AS_BEFORE, {"id": id, "state": state})
    row = store.get_job(conn, id)
    assert row is not None
    assert (row.state, row.wall_s, row.node_id) == ("CANCELLED", 3, "older")
    assert store.list_failed(conn).records == []
    assert book().claim(conn, 10) == []


def test_missing_partition_is_made(conn: database.Connection, queue: Queue) -> None:
    ids = queue.add(2)
    for (name,) in queue.conn.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'aqd.job_history'::regclass"
    ).fetchall():
        queue.conn.execute(f"drop table {name}")
    job = claim(conn)
    store.cancel_job(conn, job.id)
    assert store.record_failed(conn, [failure(job, 1.0)]) == {job.id: "CANCELLED"}
    assert store.cancel_job(conn, ids[1]).state == "CANCELLED"


def test_few_grants_are_enough(queue: Queue, connect: Connect) -> None:
    """A role that may ask for the end of a job, and do nothing else to it."""
    role = f"aqd_test_{os.getpid()}_app"
    admin, app = queue.conn, connect(dispatcher=False)
    waiting, runs = queue.add(2)
    admin.execute(f"create role {role}")
    try:
        admin.execute(f"grant usage on schema aqd to {role}")
        admin.execute(f"grant select, update (cancel_requested_at) on aqd.jobs to {role}")
        admin.execute(f"grant select on aqd.job_history to {role}")
        app.execute(f"set role {role}")
        assert store.cancel_job(app, waiting).state == "CANCELLED"
        assert store.cancel_job(app, waiting).state == "CANCELLED"
        claim(admin)
        assert store.cancel_job(app, runs).state == "PROCESSING"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            app.execute("delete from aqd.jobs")
        app.execute("reset role")
    finally:
        admin.execute(f"drop owned by {role}")
        admin.execute(f"drop role {role}")


def test_what_runs_with_its_owners_rights_is_nobody_elses(queue: Queue) -> None:
    """As the trigger of a stranger's table it would remove our jobs and write history."""
    found = queue.conn.execute(
        """select p.proname, has_function_privilege('public', p.oid, 'execute')
           from pg_proc p where p.pronamespace = 'aqd'::regnamespace and p.prosecdef"""
    ).fetchall()
    assert ("end_cancelled", False) in found
    assert [name for name, by_all in found if by_all] == []
