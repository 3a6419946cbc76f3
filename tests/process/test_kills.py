"""Processes die at bad moments: nothing is lost, nothing runs twice that need not, nothing stays behind."""

import os
import signal

import pytest

from tests.fixtures.processes import wait_until


def test_the_killed_worker_is_replaced_and_its_sibling_untouched(daemon, jobs, side):
    first = jobs.add([{"sleep": 60}], max_attempts=1)
    second = jobs.add([{"wait_file": str(side.path.parent / "go")}])
    pid = side.wait_start(first)["pid"]
    side.wait_start(second)
    os.kill(pid, signal.SIGKILL)
    assert jobs.wait(first)["state"] == "FAILED"
    attempt = jobs.attempts(first)[0]
    assert (attempt["kind"], attempt["signal"]) == ("crashed", 9)
    line = daemon.wait_for("worker ended", child=pid)
    assert line["job_id"] == str(first)
    daemon.wait_status(lambda s: all(slot["pid"] not in (None, pid) for slot in s["slots"]))
    (side.path.parent / "go").touch()
    assert jobs.wait(second)["attempt"] == 1


def test_the_dispatcher_dies_and_the_workers_do_not_notice(daemon, jobs, side):
    gate = side.path.parent / "go"
    running = jobs.add([{"wait_file": str(gate)}, {"return": "kept"}])
    side.wait_start(running)
    workers = daemon.workers()
    old = daemon.process_of("dispatcher")
    os.kill(old, signal.SIGKILL)
    daemon.wait_status(lambda s: any(p["role"] == "dispatcher" and p["pid"] != old for p in s["processes"]))
    gate.touch()
    row = jobs.wait(running)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "kept")
    assert daemon.workers() == workers
    assert len(side.runs(running)) == 1


def test_an_outcome_written_while_no_dispatcher_lives_is_recorded(daemon, jobs, side):
    gate = side.path.parent / "go"
    running = jobs.add([{"wait_file": str(gate)}, {"return": "kept"}])
    side.wait_start(running)
    old = daemon.process_of("dispatcher")
    os.kill(old, signal.SIGSTOP)  # it neither reads nor dies: the outcome must wait in the channel
    gate.touch()
    side.wait("end", job=str(running))
    os.kill(old, signal.SIGKILL)
    row = jobs.wait(running)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "kept")
    assert len(side.runs(running)) == 1


def test_worker_and_dispatcher_die_together_and_the_attempt_counts(daemon, jobs, side):
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"return": "second"}]]})
    pid = side.wait_start(job)["pid"]
    os.kill(daemon.process_of("dispatcher"), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    row = jobs.wait(job)
    assert (row["state"], row["attempt"]) == ("COMPLETED", 2)
    assert [a["kind"] for a in jobs.attempts(job)] == ["crashed"]


def test_the_dispatcher_is_killed_again_and_again_under_load(daemon, jobs, side):
    ids = jobs.add_many(1500, [{"sleep": 0.002}])
    for _ in range(6):
        old = daemon.process_of("dispatcher")
        done = len(side.events("end"))
        wait_until(lambda done=done: len(side.events("end")) > done + 20 or len(side.events("end")) == 1500)
        os.kill(old, signal.SIGKILL)
        daemon.wait_status(
            lambda s, old=old: any(p["role"] == "dispatcher" and p["pid"] != old for p in s["processes"])
        )
    assert jobs.wait_all(ids, 90) == {"COMPLETED": 1500}
    assert len(side.runs()) == 1500


def test_the_loader_dies_and_a_new_generation_takes_over(daemon, jobs, side):
    old = daemon.process_of("loader")
    os.kill(old, signal.SIGKILL)
    daemon.wait_status(lambda s: s["generation"] == 2 and s["state"] == "running")
    assert daemon.process_of("loader") != old
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_the_master_is_killed_and_everything_goes_with_it(start_daemon, jobs, side):
    config = {"daemon": {"lease_s": 3.0, "renew_s": 1.0, "kill_grace_s": 0.5}}
    first = start_daemon(config, name="first")
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"return": "again"}]]})
    side.wait_start(job)
    tree = [process.pid for process in first.tree()]
    first.kill()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") and _alive(pid) for pid in tree), 5)
    start_daemon(config, name="second")
    row = jobs.wait(job, timeout_s=20)
    assert (row["state"], row["attempt"]) == ("COMPLETED", 2)
    assert [a["kind"] for a in jobs.attempts(job)] == ["lost"]
    assert not side.overlaps()


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_idle_worker_that_is_stopped_is_replaced(start_daemon, jobs):
    daemon = start_daemon()
    workers = daemon.workers()
    os.kill(workers[0], signal.SIGSTOP)
    daemon.wait_for("idle worker does not move, killing it", 40, child=workers[0])
    daemon.wait_status(lambda s: s["slots"][0]["pid"] not in (None, workers[0]))
    assert jobs.wait_all(jobs.add_many(20)) == {"COMPLETED": 20}


def test_a_stopped_dispatcher_is_replaced(daemon, jobs):
    old = daemon.process_of("dispatcher")
    os.kill(old, signal.SIGSTOP)
    daemon.wait_for("dispatcher is silent, killing it", 30)
    assert jobs.wait(jobs.add(), timeout_s=20)["state"] == "COMPLETED"


@pytest.mark.parametrize("rounds", [300])
def test_workers_killed_in_a_tight_loop(daemon, jobs, rounds):
    before = daemon.fds()
    for _ in range(rounds):
        pids = [p.pid for p in daemon.tree() if "aqd: worker" in p.title]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    assert jobs.wait_all(jobs.add_many(20), 60) == {"COMPLETED": 20}
    daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    assert len([p for p in daemon.tree() if "aqd: worker" in p.title]) == 2
    wait_until(lambda: daemon.fds() <= before + 2, 10)
    assert not [line for line in daemon.lines if "traceback" in line]
