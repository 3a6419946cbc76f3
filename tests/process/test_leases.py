"""Leases: renewed for as long as the job runs, handed back on purpose, and lost without a second run at
the same time.

Two daemons are two nodes on one database. That runs do not overlap is judged by the handlers' own account
(``side``) and by when the first run's process was dead.
"""

import os
import signal

import pytest

from tests.fixtures.processes import wait_until
from tests.process.support import boottime_ns, is_gone, pids_of, send, stop_processes

LEASE_S = 2.4
SHORT = {
    "database": {"statement_timeout_s": 1.0},
    "daemon": {"lease_s": LEASE_S, "renew_s": 0.6, "kill_grace_s": 0.4, "slots": 1},
}


def config(**daemon):
    return {**SHORT, "daemon": {**SHORT["daemon"], **daemon}}


@pytest.fixture
def gate(tmp_path):
    """A file that jobs wait for."""
    return tmp_path / "go"


def live(jobs, job):
    """The job's own row, with its lease."""
    return jobs.conn.execute("select * from aqd.jobs where id = %s", [job]).fetchone()


def node(jobs, job):
    """Name of the node that holds the job."""
    statement = "select n.name from aqd.jobs j join aqd.nodes n on n.node_id = j.node_id where j.id = %s"
    row = jobs.conn.execute(statement, [job]).fetchone()
    return row and row["name"]


def other(daemons, name):
    """(the daemon of that name, the other one)"""
    first, second = daemons
    return (first, second) if first.directory.name == name else (second, first)


def watch_lease(jobs, job, seconds):
    """Waits until the lease has been moved on by ``seconds``; how often it was moved."""
    seen = {live(jobs, job)["lease_expires_at"]}

    def moved():
        seen.add(live(jobs, job)["lease_expires_at"])
        return (max(seen) - min(seen)).total_seconds() >= seconds

    wait_until(moved, seconds * 3 + 10, "the lease to be renewed")
    return len(seen) - 1


def assert_dead_before(daemon, first, second):
    """The process of run ``first`` was dead before run ``second`` began on the other node."""
    line = daemon.wait_for("worker ended", child=first["pid"])
    assert boottime_ns(line) < second["at_ns"]
    assert is_gone(first["pid"])


# --- kept ------------------------------------------------------------------------------------------


def test_a_long_job_under_a_short_lease_runs_once(start_daemon, jobs, side, gate):
    daemons = [start_daemon(config(), name=name) for name in ("a", "b")]
    waiting = jobs.add(delay_s=2 * LEASE_S, type="echo")
    job = jobs.add([{"wait_file": str(gate)}])
    side.wait_start(job)
    assert watch_lease(jobs, job, 3 * LEASE_S) >= 7
    gate.touch()
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], len(side.runs(job))) == ("COMPLETED", 1, 1)
    assert jobs.wait(waiting)["attempt"] == 1
    assert not [d.find("leases expired") for d in daemons if d.find("leases expired")]


def test_jobs_that_wait_in_a_frame_keep_their_lease(start_daemon, jobs, side, gate):
    """Claimed together with a job that turns out to be long, and nobody else is free to take them."""
    start_daemon(config(frame_ms=200.0))
    jobs.wait_all(jobs.add_many(50))
    hold = [{"wait_file": str(gate)}]
    ids = jobs.add_many(30, hold)
    side.wait("start", job=str(ids[0]))
    watch_lease(jobs, ids[0], 2 * LEASE_S)
    gate.touch()
    assert jobs.wait_all(ids) == {"COMPLETED": 30}
    assert len(side.runs()) == 80
    assert all(run.attempt == 1 for run in side.runs())


def test_the_lease_is_renewed_during_the_drain(start_daemon, jobs, side, gate):
    daemons = [start_daemon(config(drain_s=60.0), name=name) for name in ("a", "b")]
    job = jobs.add([{"wait_file": str(gate)}])
    side.wait_start(job)
    owner, _ = other(daemons, node(jobs, job))
    owner.signal(signal.SIGTERM)
    owner.wait_for("drain begins")
    watch_lease(jobs, job, 2 * LEASE_S)
    gate.touch()
    assert owner.wait_exit(10) == 0
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], len(side.runs(job))) == ("COMPLETED", 1, 1)
    assert jobs.attempts(job) == []


def test_at_the_end_of_the_drain_the_job_is_handed_back_at_once(start_daemon, jobs, side):
    long = config(lease_s=120.0, renew_s=30.0, drain_s=0.3, poll_ms=60_000)
    first = start_daemon(long, name="a")
    job = jobs.add({"attempts": [[{"sleep": 60}]]})
    before = side.wait_start(job)
    token = live(jobs, job)["lease_token"]
    start_daemon(long, name="b")
    first.signal(signal.SIGTERM)
    after = wait_until(lambda: [e for e in side.events("start", job=str(job)) if e != before])[0]
    # The drain, the time to raise in the handler, one sweep of the other node: not the lease.
    assert (after["at_ns"] - before["at_ns"]) / 1e9 < 15
    assert first.wait_exit() == 0
    row = live(jobs, job)
    assert (row["attempt"], row["interruptions"]) == (1, 1)
    assert row["lease_token"] not in (None, token)
    assert [(a["kind"], a["attempt"]) for a in jobs.attempts(job)] == [("interrupted", 1)]
    assert side.runs(job)[0].outcome not in (None, "returned")
    assert not side.overlaps()


# --- the retry budget ------------------------------------------------------------------------------


def test_restarts_do_not_eat_the_retry_budget(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"drain_s": 0.0, "slots": 1}})
    job = jobs.add([{"sleep": 60}], max_attempts=1)
    for round in (1, 2):
        wait_until(lambda round=round: len(side.events("start", job=str(job))) == round)
        assert daemon.stop() == 0
        row = jobs.get(job)
        assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, round)
        daemon.start()
    assert [a["kind"] for a in jobs.attempts(job)] == ["interrupted"] * 2
    assert [run.attempt for run in side.runs(job)] == [1] * len(side.runs(job))


def test_interruptions_have_a_bound_of_their_own(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"drain_s": 0.0, "slots": 1}, "jobs": {"max_interruptions": 1}})
    job = jobs.add([{"sleep": 60}], max_attempts=2)
    for round in (1, 2):
        wait_until(lambda round=round: len(side.events("start", job=str(job))) == round)
        daemon.stop()
        if round == 1:
            daemon.start()
    assert jobs.get(job)["state"] == "FAILED"
    record = jobs.failed(job)
    assert record["kind"] == "interrupted"
    assert "interrupted more than 1 times" in record["error"]


def test_kill_9_of_the_node_counts_as_an_attempt(start_daemon, jobs, side):
    daemon = start_daemon(config())
    job = jobs.add([{"sleep": 60}], max_attempts=2)
    for attempt in (1, 2):
        pid = side.wait_start(job, attempt=attempt)["pid"]
        daemon.kill()
        wait_until(lambda pid=pid: is_gone(pid), 5, "the worker to die with its master")
        daemon.start()
    row = jobs.wait(job)
    assert (row["state"], row["attempt"]) == ("FAILED", 2)
    assert [a["kind"] for a in jobs.attempts(job)] == ["lost", "lost"]
    record = jobs.failed(job)
    assert (record["kind"], record["attempts"]) == ("lost", 2)


# --- lost ------------------------------------------------------------------------------------------


@pytest.fixture
def pair(start_daemon, jobs, side, gate):
    """(the daemon that runs a job, the other one, the job, the start of its first run).

    The first attempt sleeps, the second waits for ``gate`` and returns "second"."""
    daemons = [start_daemon(config(), name=name) for name in ("a", "b")]
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"wait_file": str(gate)}, {"return": "second"}]]})
    start = side.wait_start(job)
    owner, free = other(daemons, node(jobs, job))
    return owner, free, job, start


def assert_second_run_counts(jobs, side, job):
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 2, "second")
    assert [(a["kind"], a["attempt"]) for a in jobs.attempts(job)] == [("lost", 1)]
    assert len(side.runs(job)) == 2
    assert not side.overlaps()


def test_a_stopped_dispatcher_does_not_keep_the_worker_beyond_the_lease(pair, jobs, side, gate):
    owner, _, job, start = pair
    dispatcher = owner.process_of("dispatcher")
    os.kill(dispatcher, signal.SIGSTOP)
    second = side.wait_start(job, attempt=2)
    assert_dead_before(owner, start, second)
    owner.wait_for("worker killed", child=start["pid"], reason="fence")
    os.kill(dispatcher, signal.SIGCONT)
    owner.wait_status(lambda s: s["counters"].get("lost", 0) == 1)
    gate.touch()
    assert_second_run_counts(jobs, side, job)
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_a_stopped_worker_is_fenced_with_its_dispatcher_stopped(pair, jobs, side, gate):
    owner, _, job, start = pair
    send([start["pid"], owner.process_of("dispatcher")], signal.SIGSTOP)
    second = side.wait_start(job, attempt=2)
    assert_dead_before(owner, start, second)
    send([owner.process_of("dispatcher")], signal.SIGCONT)
    gate.touch()
    assert_second_run_counts(jobs, side, job)


@pytest.mark.parametrize("meanwhile", ["running", "finished", "deleted"])
def test_a_node_that_comes_back_after_its_lease_changes_nothing(pair, jobs, side, gate, meanwhile):
    owner, _, job, start = pair
    everything = pids_of(owner)
    stop_processes(everything)
    side.wait_start(job, attempt=2)
    if meanwhile == "finished":
        gate.touch()
        jobs.wait(job)
    elif meanwhile == "deleted":
        gate.touch()
        jobs.wait(job)
        jobs.conn.execute("delete from aqd.job_history where id = %s", [job])
    send(reversed(everything), signal.SIGCONT)
    owner.wait_for("worker ended", child=start["pid"])
    gate.touch()
    if meanwhile != "deleted":
        assert_second_run_counts(jobs, side, job)
    assert [run.outcome for run in side.runs(job)] == [None, "returned"]
    owner.wait_status(lambda s: s["counters"].get("lost", 0) == 1)
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}


def test_a_late_outcome_of_the_old_owner_is_dropped(start_daemon, jobs, side, tmp_path):
    """The handler had returned; the node was stopped before it could say so."""
    gates = [tmp_path / "first", tmp_path / "second"]
    steps = [[{"wait_file": str(gate)}, {"return": number}] for number, gate in enumerate(gates, 1)]
    daemons = [start_daemon(config(), name=name) for name in ("a", "b")]
    job = jobs.add({"attempts": steps})
    pid = side.wait_start(job)["pid"]
    owner, _ = other(daemons, node(jobs, job))
    everything = [each for each in pids_of(owner) if each != pid]
    stop_processes(everything)
    gates[0].touch()
    side.wait("end", job=str(job), attempt=1)
    side.wait_start(job, attempt=2)
    send(reversed(everything), signal.SIGCONT)
    named = {"type": "fate", "attempt": 1, "slot": 0}
    owner.wait_for("lease lost, outcome dropped", job_id=str(job), **named)
    assert jobs.get(job)["state"] == "PROCESSING"
    gates[1].touch()
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 2, 2)
    owner.wait_status(lambda s: s["counters"] == {"lost": 1})
    assert not side.overlaps()


def test_a_token_taken_away_ends_the_run(pair, jobs, side, gate):
    """Somebody released the job behind the node's back: the next renewal finds out."""
    owner, _, job, start = pair
    jobs.conn.execute(
        """update aqd.jobs set state = 'QUEUED', lease_token = null, lease_expires_at = null, node_id = null,
           claimed_at = null, run_at = now() + interval '1 hour' where id = %s""",
        [job],
    )
    named = {"type": "fate", "attempt": 1, "slot": 0}
    owner.wait_for("lease lost", job_id=str(job), **named)
    owner.wait_for("lease lost, worker was killed", job_id=str(job), **named)
    del named["type"]  # the master does not know it
    owner.wait_for("worker killed", child=start["pid"], job_id=str(job), **named)
    owner.wait_for("worker ended", child=start["pid"], job_id=str(job), **named)
    jobs.conn.execute("update aqd.jobs set run_at = now() where id = %s", [job])
    gate.touch()
    row = jobs.wait(job)
    assert (row["attempt"], row["result"]) == (2, "second")
    assert [run.outcome for run in side.runs(job)] == [None, "returned"]


def test_away_from_the_database_a_node_fences_itself_before_others_start(
    proxied, start_daemon, jobs, side, gate
):
    cut = start_daemon(config(), name="a", database=proxied.url)
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"wait_file": str(gate)}, {"return": "second"}]]})
    start = side.wait_start(job)
    start_daemon(config(), name="b")
    proxied.proxy.swallow()
    second = side.wait_start(job, attempt=2)
    assert_dead_before(cut, start, second)
    cut.wait_for("worker killed", child=start["pid"], reason="fence")
    gate.touch()
    assert_second_run_counts(jobs, side, job)
    proxied.proxy.forward()
    cut.wait_state("running")
    cut.wait_status(lambda s: s["counters"].get("lost", 0) == 1)
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}


def test_an_attempt_that_was_fenced_counts_although_nobody_else_took_it(
    proxied, start_daemon, jobs, side, gate
):
    only = start_daemon(config() | {"keeper": {"rescue_s": 3600.0}}, database=proxied.url)
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"return": "second"}]]})
    start = side.wait_start(job)
    proxied.proxy.swallow()
    only.wait_for("worker killed", child=start["pid"], reason="fence")
    proxied.proxy.forward()
    row = jobs.wait(job)
    assert (row["attempt"], row["result"]) == (2, "second")
    assert [(each["kind"], each["reason"]) for each in jobs.attempts(job)] == [("lost", "lease")]
