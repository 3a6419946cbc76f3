"""Cancelling through a running daemon: what waits never runs, what runs ends in bounded time, and nobody
else is hit (F41).

Whether a job ran, and how its handler ended, is judged by the handlers' own account (``side``).
"""

import contextlib
import os
import random
import threading
from collections import Counter

import pytest

from aqd import client
from aqd.process import STOP_SIGNAL
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until
from tests.process.support import is_gone

# With "notify" the node is told at once; without, the next renewal's answer tells it.
NOTIFY = {"daemon": {"renew_s": 3.0, "kill_grace_s": 0.5}}
POLL = {"database": {"notify": False}, "daemon": {"lease_s": 3.0, "renew_s": 0.5, "kill_grace_s": 0.5}}


def cancel(jobs, job):
    """What ``aqd.cancel`` says, on a connection that may send notifications."""
    return jobs.conn.execute("select aqd.cancel(%s) as state", [job]).fetchone()["state"]


def cancelled(jobs, job, timeout_s=15.0):
    """The row of a job that must end as CANCELLED."""
    row = jobs.wait(job, timeout_s=timeout_s)
    assert (row["state"], row["result"]) == ("CANCELLED", None)
    assert row["cancel_requested_at"] <= row["finished_at"]
    assert jobs.failed(job) is None
    return row


def only_attempt(jobs, job):
    """(kind, reason) of the one attempt that is written down."""
    (attempt,) = jobs.attempts(job)
    return attempt["kind"], attempt["reason"]


@pytest.fixture(params=["notify", "poll"])
def daemon(request, start_daemon):
    """With notifications, and without: then the cancelling side sends none either."""
    return start_daemon(NOTIFY if request.param == "notify" else POLL)


@pytest.fixture
def quiet(request, jobs):
    """Where the daemon does not listen, nobody notifies."""
    if "poll" in request.node.name:
        jobs.conn.execute("set aqd.notify = off")
    return jobs


# --- before it runs --------------------------------------------------------------------------------


def test_what_waits_is_cancelled_at_once_and_never_runs(daemon, quiet, side, tmp_path):
    jobs, gate = quiet, tmp_path / "go"
    holders = [jobs.add([{"wait_file": str(gate)}]) for _ in range(2)]
    for holder in holders:
        side.wait_start(holder)
    later = jobs.add(delay_s=0.5)
    for job in (later, jobs.add(type="nobody_knows_it")):
        assert cancel(jobs, job) == "CANCELLED"
        assert cancelled(jobs, job)["attempt"] == 0
        assert cancel(jobs, job) == "CANCELLED"
        assert jobs.attempts(job) == []
    gate.touch()
    assert jobs.wait_all([*holders, jobs.add(delay_s=0.8)]) == {"COMPLETED": 3}
    assert side.runs(later) == []


def test_a_job_that_waits_for_its_retry_is_not_tried_again(daemon, quiet, side):
    jobs = quiet
    job = jobs.add({"attempts": [[{"retry": 1.0}], [{"return": "again"}]]})
    wait_until(lambda: jobs.state(job) == "QUEUED" and jobs.attempts(job))
    assert cancel(jobs, job) == "CANCELLED"
    assert cancelled(jobs, job)["attempt"] == 1
    assert only_attempt(jobs, job) == ("failed", "retry")
    jobs.wait(jobs.add(delay_s=1.5))
    assert len(side.runs(job)) == 1


def test_a_job_that_waits_behind_another_in_a_worker_never_starts(start_daemon, jobs, side, tmp_path):
    gate = tmp_path / "go"
    daemon = start_daemon({"daemon": {**NOTIFY["daemon"], "slots": 1, "frame_ms": 200.0}})
    jobs.wait_all(jobs.add_many(50))
    ids = jobs.add_many(20, [{"wait_file": str(gate)}])
    side.wait_start(ids[0])
    held = wait_until(lambda: [job for job in ids[1:] if jobs.state(job) == "PROCESSING"])
    for job in held:
        assert cancel(jobs, job) in ("PROCESSING", "CANCELLED")  # the node may have given it back meanwhile
    for job in held:
        assert cancelled(jobs, job)["attempt"] == 0
        assert jobs.attempts(job) == []
    for line in daemon.find("job cancelled"):
        assert (line["type"], line["attempt"]) == ("fate", 1), line
    gate.touch()
    others = [job for job in ids if job not in held]
    assert jobs.wait_all(others) == {"COMPLETED": len(others)}
    assert {run.job for run in side.runs()}.isdisjoint(held)


# --- while it runs ---------------------------------------------------------------------------------

RUNNING = {
    "sleeping": ("fate", [{"sleep": 120}]),
    "swallowing": ("fate", [{"swallow": 120}]),
    "holding the GIL": ("fate", [{"hold_gil": 120}]),
    "pbkdf2": ("fate", [{"pbkdf2": 120}]),
    "regex": ("fate", [{"regex": 40}]),
    "coroutine": ("fate_async", [{"sleep": 120}]),
    "blocked coroutine": ("fate_async", [{"block": 120}]),
    "with helpers": ("fate", [{"spawn": {"setsid": True, "ignore_term": True}}, {"sleep": 120}]),
}


@pytest.mark.parametrize("what", RUNNING)
def test_what_runs_is_ended(daemon, quiet, side, what):
    jobs = quiet
    type_, steps = RUNNING[what]
    job = jobs.add({"attempts": [steps, [{"return": "again"}]]}, type=type_)
    start = side.wait_start(job)
    sibling = jobs.add([{"sleep": 1.0}, {"return": "untouched"}])
    assert cancel(jobs, job) == "PROCESSING"
    assert cancel(jobs, job) in ("PROCESSING", "CANCELLED")
    row = cancelled(jobs, job)
    assert row["attempt"] == 1
    assert only_attempt(jobs, job) == ("cancelled", "cancel")
    run = side.runs(job)[0]
    # What a coroutine sees is asyncio's own exception.
    assert run.outcome in ("JobCancelled", "CancelledError") or is_gone(start["pid"])
    wait_until(lambda: all(is_gone(pid) for pid in side.children()))
    assert jobs.wait(sibling)["result"] == "untouched"
    assert cancel(jobs, job) == "CANCELLED"
    assert len(side.runs(job)) == 1


@pytest.mark.parametrize(
    "steps",
    [
        [{"raise": "instead"}],
        [{"retry": 0.0}],
        [{"discard": "instead"}],
        [{"sys_exit": 0}],
        [{"os_exit": 3}],
        [{"segv": None}],
        [{"return_object": None}],
    ],
    ids=lambda steps: next(iter(steps[0])),
)
def test_however_a_handler_fails_after_it_was_told_the_job_is_cancelled(daemon, quiet, side, steps):
    jobs = quiet
    job = jobs.add({"attempts": [[{"until_stopped": 120}, *steps], [{"return": "again"}]]})
    side.wait_start(job)
    assert cancel(jobs, job) == "PROCESSING"
    cancelled(jobs, job)
    assert only_attempt(jobs, job)[0] == "cancelled"
    assert side.events("told", job=str(job))[0]["error"] == "JobCancelled"
    assert len(side.runs(job)) == 1


def test_work_that_was_done_all_the_same_is_kept(daemon, quiet, side):
    jobs = quiet
    job = jobs.add([{"until_stopped": 120}, {"return": "done"}])
    side.wait_start(job)
    assert cancel(jobs, job) == "PROCESSING"
    row = jobs.wait(job)
    assert (row["state"], row["result"]) == ("COMPLETED", "done")
    assert row["cancel_requested_at"] is not None
    assert cancel(jobs, job) == "COMPLETED"
    assert jobs.attempts(job) == []


def test_what_has_ended_stays_as_it_is(daemon, quiet):
    jobs = quiet
    done, failed = jobs.add([{"return": 1}]), jobs.add([{"raise": "no"}], type="fate_once")
    before = [jobs.wait(job) for job in (done, failed)]
    assert [cancel(jobs, job) for job in (done, failed)] == ["COMPLETED", "FAILED"]
    assert [jobs.get(job) for job in (done, failed)] == before
    assert jobs.failed(failed) is not None
    assert cancel(jobs, failed + 1000) is None


def test_a_job_retried_by_hand_and_cancelled_settles_its_record(daemon, quiet, side):
    jobs = quiet
    job = jobs.add({"attempts": [[{"raise": "no"}]]}, type="fate_once")
    assert jobs.wait(job)["state"] == "FAILED"
    jobs.conn.execute("update aqd.jobs set payload = %s where id = %s", ['[{"sleep": 120}]', job])
    client.retry(jobs.conn, job)
    wait_until(lambda: len(side.runs(job)) == 2)
    cancel(jobs, job)
    cancelled(jobs, job)
    record = jobs.conn.execute("select * from aqd.failed_jobs where job_id = %s", [job]).fetchone()
    assert record["resolution"] == "cancelled"


def test_the_worker_lives_when_the_handler_obeys(start_daemon, jobs, side):
    daemon = start_daemon(NOTIFY)
    workers = daemon.workers()
    job = jobs.add([{"sleep": 120}])
    side.wait_start(job)
    cancel(jobs, job)
    cancelled(jobs, job)
    assert [run.outcome for run in side.runs(job)] == ["JobCancelled"]
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    assert daemon.workers() == workers


def test_a_cancel_outlives_the_node(start_daemon, jobs, side):
    """Asked for while nobody could hear it: the job's lease runs out, and it is not run again."""
    config = {"daemon": {"lease_s": 2.0, "renew_s": 0.6, "kill_grace_s": 0.4}}
    first = start_daemon(config, name="first")
    job = jobs.add([{"sleep": 120}])
    side.wait_start(job)
    first.kill_everything()
    assert cancel(jobs, job) == "PROCESSING"
    start_daemon(config, name="second")
    cancelled(jobs, job)
    assert only_attempt(jobs, job)[0] == "cancelled"
    assert len(side.runs(job)) == 1


def test_a_cancel_during_the_drain_is_no_interruption(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {**NOTIFY["daemon"], "drain_s": 60.0}})
    job = jobs.add([{"swallow": 120}])
    side.wait_start(job)
    daemon.signal(15)
    daemon.wait_for("drain begins")
    assert cancel(jobs, job) == "PROCESSING"
    cancelled(jobs, job)
    assert daemon.wait_exit(15) == 0


# --- which one -------------------------------------------------------------------------------------


def test_the_node_that_runs_it_is_told(start_daemon, jobs, side):
    daemons = [start_daemon(NOTIFY, name=name) for name in ("a", "b")]
    ids = [jobs.add([{"sleep": 120}]) for _ in range(4)]  # two slots each
    for job in ids:
        side.wait_start(job)
    nodes = {row["node_id"] for row in jobs.conn.execute("select distinct node_id from aqd.jobs")}
    assert len(nodes) == 2
    for job in ids[::-1]:
        cancel(jobs, job)
        cancelled(jobs, job)
        assert only_attempt(jobs, job) == ("cancelled", "cancel")
    assert all(run.outcome == "JobCancelled" for run in side.runs())
    assert all(daemon.status()["state"] == "running" for daemon in daemons)


def test_a_signal_that_comes_too_late_means_nothing_to_the_next_job(start_daemon, jobs, side, tmp_path):
    """Sent for a job that has ended meanwhile: the master's own, delayed by the scheduler, played here."""
    gate = tmp_path / "go"
    start_daemon({"daemon": {**NOTIFY["daemon"], "slots": 1, "frame_ms": 0.0}})
    for type_ in ("fate", "fate_async"):
        victim = jobs.add([{"sleep": 120}], type=type_)
        pid = side.wait_start(victim)["pid"]
        cancel(jobs, victim)
        cancelled(jobs, victim)
        following = jobs.add([{"wait_file": str(gate)}, {"sleep": 0.05}, {"return": "untouched"}], type=type_)
        assert side.wait_start(following)["pid"] == pid
        for _ in range(20):
            os.kill(pid, STOP_SIGNAL)
        gate.touch()
        row = jobs.wait(following)
        assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "untouched")
        gate.unlink()


@pytest.mark.parametrize(
    ("victim", "grace_s", "rounds"),
    [([{"sleep": 0.02}], 0.5, 400), ([{"swallow": 0.12}], 0.1, 80)],
    ids=["as the job ends", "as the grace ends"],
)
def test_the_next_job_in_the_slot_is_never_hit(start_daemon, jobs, side, victim, grace_s, rounds):
    """Victims are cancelled about when they end anyway; jobs between them must not notice."""
    start_daemon({"daemon": {"slots": 2, "kill_grace_s": grace_s, "frame_ms": 2.0}})
    victims, others = set(), []
    seed = random.randrange(1 << 32)
    all_ended = threading.Event()

    def follow():
        """Cancel each victim at some moment after its start."""
        moments, other = random.Random(seed), Jobs(jobs.url)
        with contextlib.closing(other):
            for start in side.follow("start", all_ended.is_set):
                if (job := int(start["job"])) in victims:
                    all_ended.wait(moments.uniform(0, 0.02))
                    cancel(other, job)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for _ in range(rounds):
            # Held back until its id is among the victims.
            with jobs.conn.transaction():
                victims.add(jobs.add(victim))
            others += [jobs.add([{"burn_gil": 0.003}]), jobs.add([{"sleep": 0.003}])]
        jobs.wait_all([*victims, *others], 120)
    finally:
        all_ended.set()
        thread.join()
    assert jobs.wait_all(others) == {"COMPLETED": len(others)}, f"seed {seed}"
    runs = [run for run in side.runs() if run.job not in victims]
    assert [run for run in runs if run.outcome != "returned"] == [], f"seed {seed}"
    assert Counter(run.job for run in runs) == dict.fromkeys(others, 1), f"seed {seed}"
    ends = Counter(jobs.state(job) for job in victims)
    assert set(ends) == {"COMPLETED", "CANCELLED"}, f"seed {seed}: {ends}; not about the end of the jobs"


# --- the ways to say it ----------------------------------------------------------------------------


def test_the_command_and_the_service_on_a_running_job(start_daemon, jobs, side):
    daemon = start_daemon(NOTIFY, env={"ADMIN_API_KEY": "key"})
    first, second = (jobs.add([{"swallow": 120}]) for _ in range(2))
    side.wait_start(first)
    side.wait_start(second)
    waiting = jobs.add(delay_s=60)
    asked = daemon.aqd("jobs", "cancel", str(first), str(waiting))
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.splitlines() == [
        f"job {first} is PROCESSING, asked to end",
        f"job {waiting} is CANCELLED",
    ]
    waited = daemon.aqd("jobs", "cancel", "--wait", "20", str(second), str(first))
    assert (waited.returncode, waited.stderr) == (0, "")
    assert sorted(waited.stdout.splitlines()) == [f"job {first} is CANCELLED", f"job {second} is CANCELLED"]
    shown = daemon.aqd("jobs", "show", str(second)).stdout
    assert "CANCELLED" in shown
    assert " cancel " in shown
