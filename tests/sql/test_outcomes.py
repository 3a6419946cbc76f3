"""Writing outcomes down: complete, fail, release, renew; late owners, lost answers, bad rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from aqd import claims, database, store
from aqd.store import outcome
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import HELD, Queue, book, completion, everything, failure, released


def claim(conn: database.Connection, table: Queue, count: int = 1, **options: Any) -> list[claims.ClaimedJob]:
    table.add(count, **options)
    jobs = book().claim(conn, count)
    assert len(jobs) == count
    return jobs


def test_completed(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue, queue="q", priority=2)
    done = store.Completion(job.id, job.token, '{"file": "ü\\"\\\\.pdf"}', 1.5, 0.25, 0.125, 2048)
    assert store.record_completed(conn, [done]) == {job.id}
    row = store.get_job(conn, job.id)
    assert row is not None
    assert (row.state, row.queue, row.priority, row.attempt) == ("COMPLETED", "q", 2, 1)
    assert json.loads(row.result or "") == {"file": 'ü"\\.pdf'}
    assert (row.wall_s, row.cpu_s, row.peak_kb, row.node_id) == (0.25, 0.125, 2048, "node-1")
    age = queue.value("select extract(epoch from now() - finished_at)::float from aqd.job_history")
    assert 1.5 <= age < 10
    assert queue.value("select count(*) from aqd.jobs") == 0
    assert store.get_attempts(conn, job.id) == []


def test_no_result_is_not_the_json_null(conn: database.Connection, queue: Queue) -> None:
    without, null = claim(conn, queue, 2)
    store.record_completed(conn, [completion(without, None), completion(null, "null")])
    assert store.get_job(conn, without.id).result is None  # type: ignore[union-attr]
    assert store.get_job(conn, null.id).result == "null"  # type: ignore[union-attr]


def test_failed_with_a_retry(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue)
    fate = store.Failure(
        job.id, job.token, "crashed", "killed by SIGSEGV", "Tb", 60.0, 0.5, 2.0, 1.0, 999, 11, None
    )
    assert store.record_failed(conn, [fate]) == {job.id: "QUEUED"}
    row = queue.row(job.id)
    assert (row["state"], row["attempt"], row["crashes"]) == ("QUEUED", 1, 1)
    assert row["last_error"] == "killed by SIGSEGV"
    assert row["lease_token"] is row["lease_expires_at"] is row["node_id"] is row["claimed_at"] is None
    assert queue.value("select run_at - now() between '50 s' and '60 s' from aqd.jobs")
    (attempt,) = store.get_attempts(conn, job.id)
    assert (attempt.attempt, attempt.kind, attempt.signal, attempt.traceback) == (1, "crashed", 11, "Tb")
    assert (attempt.finished_at - attempt.started_at).total_seconds() == 2.0  # type: ignore[operator]
    assert store.list_failed(conn).records == []


def test_failed_for_good(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue)
    assert store.record_failed(conn, [failure(job, None, "timed_out")]) == {job.id: "FAILED"}
    assert queue.row(job.id)["state"] == "FAILED"
    (record,) = store.list_failed(conn).records
    assert (record.job_id, record.kind, record.error, record.attempts) == (job.id, "timed_out", "boom", 1)
    assert (record.state, record.resolved_at, record.traceback) == ("FAILED", None, "Traceback …")


def test_released(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue)
    before = queue.row(job.id)["run_at"]
    assert store.release(conn, [released(job)], 20) == {job.id: "QUEUED"}
    row = queue.row(job.id)
    assert (row["state"], row["attempt"], row["interruptions"], row["run_at"]) == ("QUEUED", 0, 0, before)
    assert store.get_attempts(conn, job.id) == []


def test_interruptions_are_counted_apart_and_bounded(conn: database.Connection, queue: Queue) -> None:
    """F37: the attempt comes back each time, but not for ever; the history shows which was which."""
    (id,) = queue.add(max_attempts=3)
    mine = book()
    for round in range(1, 4):
        mine.lower("default", 0)
        (job,) = mine.claim(conn, 1)
        assert job.attempt == 1
        after = store.release(conn, [released(job, interrupted=True)], 2)
        assert after == {id: "QUEUED" if round < 3 else "FAILED"}
        assert queue.row(id)["interruptions"] == round
    row = queue.row(id)
    assert row["state"] == "FAILED"
    assert [attempt.kind for attempt in store.get_attempts(conn, id)] == ["interrupted"] * 3
    (record,) = store.list_failed(conn).records
    assert record.kind == "interrupted"
    assert "more than 2 times" in (record.error or "")


def test_renewed(conn: database.Connection, queue: Queue) -> None:
    jobs = claim(conn, queue, 3)
    pairs = [(job.id, job.token) for job in jobs]
    assert store.renew(conn, [*pairs[:2], (jobs[2].id, 1), (999, 1)], 3600.0) == dict.fromkeys(
        pairs[:2], HELD
    )
    later = queue.conn.execute(
        "select id from aqd.jobs where lease_expires_at > now() + interval '50 min' order by id"
    )
    assert [row[0] for row in later] == [jobs[0].id, jobs[1].id]
    assert store.renew(conn, [], 30.0) == {}


def test_renewal_is_hot(conn: database.Connection, queue: Queue) -> None:
    """No index may hold what a renewal changes (DATA: 99 % HOT)."""
    jobs = claim(conn, queue, 20)
    pairs = [(job.id, job.token) for job in jobs]
    with conn.transaction():
        store.renew(conn, pairs, 30.0)
        hot = conn.execute("select pg_stat_get_xact_tuples_hot_updated('aqd.jobs'::regclass)").fetchone()
    assert hot == (20,)


# --- reasons, output, progress --------------------------------------------------------------------


def test_output_of_a_completed_attempt(conn: database.Connection, queue: Queue) -> None:
    quiet, loud = claim(conn, queue, 2)
    text = "start" + "x" * 100_000 + "\0\udcff end"
    store.record_completed(conn, [completion(quiet), completion(loud)._replace(output=text)])
    assert store.get_job(conn, quiet.id).output is None  # type: ignore[union-attr]
    kept = store.get_job(conn, loud.id).output  # type: ignore[union-attr]
    assert kept is not None
    assert len(kept) == store.MAX_OUTPUT
    assert kept.endswith("xx\\0\\udcff end")
    (row, _) = store.list_jobs(conn).jobs
    assert row.output is None, "not in lists"


def test_reason_output_and_final_error_of_a_failure(conn: database.Connection, queue: Queue) -> None:
    again, poison, plain = claim(conn, queue, 3)
    words = {"reason": "signal", "output": "Fatal Python error", "final_error": "poison: boom"}
    batch = [
        failure(again, 60.0, "crashed")._replace(**words),
        failure(poison, None, "crashed")._replace(**words),
        failure(plain, None),
    ]
    assert store.record_failed(conn, batch) == {again.id: "QUEUED", poison.id: "FAILED", plain.id: "FAILED"}
    for job in (again, poison):
        (attempt,) = store.get_attempts(conn, job.id)
        assert (attempt.reason, attempt.output, attempt.error) == ("signal", "Fatal Python error", "boom")
    assert store.get_attempts(conn, plain.id)[0].reason is None
    records = {record.job_id: record for record in store.list_failed(conn).records}
    assert set(records) == {poison.id, plain.id}
    assert (records[poison.id].error, records[poison.id].reason) == ("poison: boom", "signal")
    assert (records[plain.id].error, records[plain.id].reason) == ("boom", None)
    last_errors = [queue.row(job.id)["last_error"] for job in (again, poison, plain)]
    assert last_errors == ["boom", "poison: boom", "boom"]


def test_a_second_failure_overwrites_the_reason(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue, max_attempts=1)
    store.record_failed(conn, [failure(job)._replace(reason="exception")])
    store.retry_job(conn, job.id)
    book().claim(conn, 1)
    queue.expire(job.id)
    store.rescue(conn, 10, 0.0, 0.0, 5)
    (record,) = store.list_failed(conn).records
    assert (record.kind, record.reason, record.failures) == ("lost", "lease", 2)


def test_reason_of_an_interruption(conn: database.Connection, queue: Queue) -> None:
    one, two = claim(conn, queue, 2)
    given = [
        released(one, interrupted=True),
        released(two, interrupted=True)._replace(reason_code="lease", reason="the lease was not certain"),
    ]
    store.release(conn, given, 0)
    found = [store.get_attempts(conn, job.id)[0] for job in (one, two)]
    assert [(attempt.kind, attempt.reason) for attempt in found] == [
        ("interrupted", "drain"),
        ("interrupted", "lease"),
    ]
    assert {record.reason for record in store.list_failed(conn).records} == {"drain", "lease"}


def test_progress(connect: Connect, queue: Queue) -> None:
    conn, other = connect(), connect()
    jobs = claim(conn, queue, 4)

    def progress(job: claims.ClaimedJob) -> tuple[float | None, str | None]:
        row = store.get_job(conn, job.id)
        assert row is not None
        return row.progress_percent, row.progress_message

    said = [
        store.Progress(jobs[0].id, jobs[0].token, 10.0, "begun"),
        store.Progress(jobs[0].id, jobs[0].token, 62.5, "pages \0 and \ud800"),
        store.Progress(jobs[1].id, jobs[1].token, None, "x" * 5000),
        store.Progress(jobs[2].id, jobs[2].token + 1, 50.0, "somebody else's"),
        store.Progress(jobs[3].id, jobs[3].token, float("inf"), ""),
    ]
    assert store.store_progress(conn, said) == {jobs[0].id, jobs[1].id, jobs[3].id}
    assert progress(jobs[0]) == (62.5, "pages \\0 and \\ud800")
    percent, message = progress(jobs[1])
    assert percent is None
    assert len(message or "") < store.MAX_PROGRESS + 100
    assert progress(jobs[2]) == (None, None)
    assert progress(jobs[3]) == (100.0, "")
    assert queue.row(jobs[0].id)["progress_at"] is not None
    with other.transaction():
        other.execute("select from aqd.jobs where id = %s for update", [jobs[0].id])
        again = [entry._replace(percent=float("nan"), message="on") for entry in said[1:3]]
        assert store.store_progress(conn, again) == {jobs[1].id}, "a row in other hands is not waited for"
    assert store.store_progress(conn, []) == set()


def test_progress_is_hot(conn: database.Connection, queue: Queue) -> None:
    """As a renewal. Few jobs, so that a page holds all versions of them."""
    jobs = claim(conn, queue, 8)
    with conn.transaction():
        store.store_progress(conn, [store.Progress(job.id, job.token, 5.0, "five") for job in jobs])
        hot = conn.execute("select pg_stat_get_xact_tuples_hot_updated('aqd.jobs'::regclass)").fetchone()
    assert hot == (8,)


def test_progress_is_the_attempts_own(conn: database.Connection, queue: Queue) -> None:
    """Kept while the job waits, gone when it begins anew."""
    (job,) = claim(conn, queue)
    fields = ("progress_percent", "progress_message", "progress_at")

    def say(job: claims.ClaimedJob) -> None:
        assert store.store_progress(conn, [store.Progress(job.id, job.token, 5.0, "five")]) == {job.id}

    say(job)
    store.record_failed(conn, [failure(job, 0.0)])
    assert queue.row(job.id)["progress_message"] == "five"
    (again,) = book().claim(conn, 1)
    assert [queue.row(job.id)[field] for field in fields] == [None] * 3
    say(again)
    store.record_failed(conn, [failure(again)])
    store.retry_job(conn, job.id)
    assert [queue.row(job.id)[field] for field in fields] == [None] * 3


# --- late owners ----------------------------------------------------------------------------------


def completed_by_b(conn: database.Connection, queue: Queue, id: int) -> None:
    store.record_completed(conn, [completion(reclaim(conn, queue, id), '"from b"')])


def failed_by_b(conn: database.Connection, queue: Queue, id: int) -> None:
    store.record_failed(conn, [failure(reclaim(conn, queue, id))])


def running_on_b(conn: database.Connection, queue: Queue, id: int) -> None:
    reclaim(conn, queue, id)


def waiting_for_b(conn: database.Connection, queue: Queue, id: int) -> None:
    queue.expire(id)
    store.rescue(conn, 10, 0.0, 0.0, 5)


def retried_by_hand(conn: database.Connection, queue: Queue, id: int) -> None:
    failed_by_b(conn, queue, id)
    store.retry_job(conn, id)


def deleted(conn: database.Connection, queue: Queue, id: int) -> None:
    queue.conn.execute("delete from aqd.jobs where id = %s", [id])


def cancelled_on_b(conn: database.Connection, queue: Queue, id: int) -> None:
    job = reclaim(conn, queue, id)
    store.cancel_job(conn, id)
    store.record_failed(conn, [failure(job, 0.0)])


def cancelled_and_rescued(conn: database.Connection, queue: Queue, id: int) -> None:
    """The row left under A's own token: only who wrote it down tells that A is late."""
    store.cancel_job(conn, id)
    waiting_for_b(conn, queue, id)
    assert queue.state(id) == "CANCELLED"


def reclaim(conn: database.Connection, queue: Queue, id: int) -> claims.ClaimedJob:
    waiting_for_b(conn, queue, id)
    (job,) = book(node_id="b").claim(conn, 1)
    assert job.id == id
    return job


@pytest.mark.parametrize(
    "meanwhile",
    [
        completed_by_b,
        failed_by_b,
        running_on_b,
        waiting_for_b,
        retried_by_hand,
        cancelled_on_b,
        cancelled_and_rescued,
        deleted,
    ],
    ids=lambda meanwhile: meanwhile.__name__,
)
def test_late_owner_changes_nothing(
    conn: database.Connection, queue: Queue, meanwhile: Callable[..., None]
) -> None:
    """F30: every kind of late word of A matches no row."""
    (job,) = claim(conn, queue)
    meanwhile(conn, queue, job.id)
    before = everything(queue)
    assert store.renew(conn, [(job.id, job.token)], 30.0) == {}
    assert store.store_progress(conn, [store.Progress(job.id, job.token, 50.0, "late")]) == set()
    assert store.record_completed(conn, [completion(job)]) == set()
    assert store.release(conn, [released(job, interrupted=True)], 20) == {}
    assert store.record_failed(conn, [failure(job)]) == {}
    assert everything(queue) == before


# --- answers that were lost -----------------------------------------------------------------------


def test_recording_again_after_a_lost_answer(conn: database.Connection, queue: Queue) -> None:
    """F40: the COMMIT went through, its answer did not come; the same batch is sent again."""
    done, failed = claim(conn, queue, 2)
    for state in ("FAILED", "", ""):
        assert store.record_completed(conn, [completion(done)]) == {done.id}
        assert store.record_failed(conn, [failure(failed)]) == {failed.id: state}
    assert queue.value("select count(*) from aqd.job_history") == 1
    assert queue.value("select count(*) from aqd.job_attempts") == 1
    assert queue.value("select failures from aqd.failed_jobs") == 1


def test_lost_answer_in_a_batch_with_new_outcomes(conn: database.Connection, queue: Queue) -> None:
    jobs = claim(conn, queue, 4)
    store.record_completed(conn, [completion(job) for job in jobs[:2]])
    stranger = completion(jobs[3])._replace(token=1)
    assert store.record_completed(conn, [*map(completion, jobs[:3]), stranger]) == {
        job.id for job in jobs[:3]
    }


def test_the_same_outcome_twice_in_one_batch(conn: database.Connection, queue: Queue) -> None:
    one, two, three = claim(conn, queue, 3)
    assert store.record_completed(conn, [completion(one)] * 2) == {one.id}
    assert store.record_failed(conn, [failure(two)] * 2) == {two.id: "FAILED"}
    assert store.release(conn, [released(three, interrupted=True)] * 2, 20) == {three.id: "QUEUED"}
    assert queue.value("select count(*) from aqd.job_history") == 1
    assert queue.value("select count(*) from aqd.job_attempts") == 2
    assert queue.row(three.id)["interruptions"] == 1


# --- bad rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_changed_while_it_is_recorded(
    connect: Connect, conn: database.Connection, queue: Queue, lost: bool
) -> None:
    """Somebody else holds the row: he is waited for, and what he leaves is what counts."""
    queue.add(3)
    jobs = book().claim(conn, 3)
    with connect(dispatcher=False) as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            change = "lease_token = 4711" if lost else "cancel_requested_at = now()"
            other.execute(f"update aqd.jobs set {change} where id = %s".encode(), [jobs[1].id])
            done = pool.submit(store.record_completed, conn, [completion(job) for job in jobs])
            wait_until(lambda: queue.value("select pg_blocking_pids(%s)", conn.info.backend_pid))
        recorded = done.result(10)
    assert recorded == {job.id for job in jobs if not (lost and job is jobs[1])}
    assert queue.value("select count(*) from aqd.job_history") == len(recorded)
    if lost:
        assert queue.row(jobs[1].id)["lease_token"] == 4711
    else:
        assert queue.value(
            "select cancel_requested_at is not null from aqd.job_history where id = %s", jobs[1].id
        )


def test_by_columns(conn: database.Connection, queue: Queue) -> None:
    """As by objects: what cannot be stored is set aside, a late owner changes nothing, nulls are nulls."""
    queue.add(4)
    jobs = book().claim(conn, 4)
    batch = store.Completions(
        ids=[job.id for job in jobs],
        tokens=[job.token + (job is jobs[3]) for job in jobs],
        results=["1", None, '"\\u0000"', "null"],
        ages_s=[0.0] * 4,
        walls_s=[0.5, None, 0.5, 0.5],
        cpus_s=[0.25] * 4,
        peaks_kb=[1000, None, 1000, 1000],
    )
    assert store.record_columns(conn, batch) == {job.id for job in jobs[:3]}
    assert [queue.state(job.id) for job in jobs] == ["COMPLETED", "COMPLETED", "FAILED", "PROCESSING"]
    rows = conn.execute(
        "select result::text, wall_s, peak_kb, output from aqd.job_history order by id"
    ).fetchall()
    assert rows == [("1", 0.5, 1000, None), (None, None, None, None)]
    assert store.record_columns(conn, store.Completions([], [], [], [], [], [], [])) == set()


@pytest.mark.parametrize("late_first", [True, False])
def test_both_owners_in_one_batch(conn: database.Connection, queue: Queue, late_first: bool) -> None:
    """The answer names jobs: this one is recorded, with what its owner said."""
    (late, other) = claim(conn, queue, 2)
    owner = reclaim(conn, queue, late.id)
    both = [completion(late, '"late"'), completion(owner, '"owner"')]
    batch = [*(both if late_first else reversed(both)), completion(other)]
    for _ in range(2):
        assert store.record_completed(conn, batch) == {late.id, other.id}
        rows = conn.execute("select lease_token, result::text from aqd.job_history where id = %s", [late.id])
        assert rows.fetchall() == [(owner.token, '"owner"')]


def test_a_refused_statement_is_not_repeated(
    conn: database.Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = claim(conn, queue, 4)
    sizes = []

    def write(conn: database.Connection, batch: store.Completions) -> set[int]:
        sizes.append(len(batch.ids))
        return real(conn, batch)

    real = outcome._write_columns
    monkeypatch.setattr(outcome, "_write_columns", write)
    batch = [completion(job) for job in jobs]
    batch[0] = completion(jobs[0], "not json")
    assert store.record_completed(conn, batch) == {job.id for job in jobs}
    assert sizes == [4, 2, 1, 1, 2]


def test_bad_result_does_not_stop_the_batch(conn: database.Connection, queue: Queue) -> None:
    jobs = claim(conn, queue, 9)
    batch = [completion(job, "1") for job in jobs]
    batch[3] = completion(jobs[3], '"\\u0000"')
    batch[7] = completion(jobs[7], "not json")
    assert store.record_completed(conn, batch) == {job.id for job in jobs}
    states = [queue.state(job.id) for job in jobs]
    assert states.count("COMPLETED") == 7
    assert states[3] == states[7] == "FAILED"
    errors = {record.job_id: record.error or "" for record in store.list_failed(conn).records}
    assert "cannot store its result" in errors[jobs[3].id]
    assert "\\u0000" in errors[jobs[3].id]


def test_every_failure_can_be_written(conn: database.Connection, queue: Queue) -> None:
    jobs = claim(conn, queue, 5)
    batch = [
        failure(jobs[0], error="nul \0 and surrogate \ud800"),
        failure(jobs[1], error="x" * 50_000_000),
        failure(jobs[2], kind="no such kind"),
        failure(jobs[3])._replace(exit_code=2**40),
        failure(jobs[4], error='{"quotes\\": "}'),
    ]
    assert store.record_failed(conn, batch) == {job.id: "FAILED" for job in jobs}
    assert all(queue.state(job.id) == "FAILED" for job in jobs)
    errors = [store.get_attempts(conn, job.id)[0].error or "" for job in jobs]
    assert errors[0] == "nul \\0 and surrogate \\ud800"
    assert len(errors[1]) < store.MAX_ERROR + 100
    assert "characters left out" in errors[1]
    assert "could not be stored" in errors[2]
    assert errors[4] == '{"quotes\\": "}'


def test_texts_are_bounded_as_they_are_stored(conn: database.Connection, queue: Queue) -> None:
    """Not only as they come: each of these takes six characters when it is escaped."""
    (job,) = claim(conn, queue, 1)
    text = "\udc80" * store.MAX_TRACEBACK
    store.record_failed(conn, [failure(job, error=text)._replace(traceback=text, output=text)])
    (attempt,) = store.get_attempts(conn, job.id)
    assert len(attempt.error or "") < store.MAX_ERROR + 100
    assert len(attempt.traceback or "") < store.MAX_TRACEBACK + 100
    assert len(attempt.output or "") == store.MAX_OUTPUT


def test_missing_partition_is_made(conn: database.Connection, queue: Queue) -> None:
    jobs = claim(conn, queue, 3)
    names = queue.conn.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'aqd.job_history'::regclass"
    ).fetchall()
    for (name,) in names:
        queue.conn.execute(f"drop table {name}")
    assert store.record_completed(conn, [completion(job) for job in jobs]) == {job.id for job in jobs}
    assert queue.value("select count(*) from aqd.job_history") == 3


def test_nothing_is_changed_when_the_statement_fails(connect: Connect, queue: Queue) -> None:
    """Atomic: the job is in exactly one of the two tables."""
    conn = connect()
    jobs = claim(conn, queue, 2)
    queue.conn.execute("alter table aqd.job_history add constraint refuse check (id < 0)")
    bad = [completion(job) for job in jobs]
    with pytest.raises(psycopg.errors.CheckViolation), conn.transaction():
        store.record_completed(conn, bad)
    assert [queue.row(job.id)["state"] for job in jobs] == ["PROCESSING"] * 2


def test_old_outcome_is_recorded_in_a_partition_that_exists(conn: database.Connection, queue: Queue) -> None:
    (job,) = claim(conn, queue)
    assert store.record_completed(conn, [completion(job, age_s=1e7)]) == {job.id}
    assert queue.value(
        "select now() - finished_at <= interval '1 day' + interval '1 minute' from aqd.job_history"
    )


def test_empty_batches(conn: database.Connection) -> None:
    assert store.record_completed(conn, []) == set()
    assert store.record_failed(conn, []) == {}
    assert store.release(conn, [], 20) == {}


def test_big_batch_in_any_order(conn: database.Connection, queue: Queue) -> None:
    queue.fill(2000)
    jobs = book().claim(conn, 2000)
    batch = [completion(job, f"[{job.id}]") for job in reversed(jobs)]
    assert store.record_completed(conn, batch) == {job.id for job in jobs}
    wrong = queue.value("select count(*) from aqd.job_history where result <> jsonb_build_array(id)")
    assert wrong == 0


def test_job_facts(conn: database.Connection, queue: Queue) -> None:
    (one,) = queue.add(max_attempts=7)
    (two,) = queue.add(type="other")
    queue.conn.execute("update aqd.jobs set crashes = 2 where id = %s", [two])
    assert store.job_facts(conn, [one, two, 999]) == {one: ("noop", 7, 0), two: ("other", None, 2)}
