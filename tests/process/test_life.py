"""A job's life through a running daemon: completed, retried, failed, crashed, timed out."""

import signal

import pytest

from tests.fixtures.processes import wait_until


def test_a_job_completes_with_its_result(daemon, jobs, side):
    job = jobs.add([{"return": {"answer": 42, "text": "Grüße 😀"}}])
    row = jobs.wait(job)
    assert row["state"] == "COMPLETED"
    assert row["result"] == {"answer": 42, "text": "Grüße 😀"}
    assert row["attempt"] == 1
    assert [run.outcome for run in side.runs(job)] == ["returned"]


def test_processes_carry_their_names(daemon, jobs):
    jobs.wait(jobs.add())
    names = ["aqd: dispatcher", "aqd: loader g1", "aqd: worker 0 g1 [idle]", "aqd: worker 1 g1 [idle]"]
    # A worker names its last job for some milliseconds more.
    wait_until(lambda: sorted(process.title for process in daemon.tree()) == names, 30)


def test_many_jobs_run_once_each(daemon, jobs, side):
    ids = jobs.add_many(2000)
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 2000}
    runs = side.runs()
    assert len(runs) == 2000
    assert {run.job for run in runs} == set(ids)


def test_large_payload_and_result_travel(daemon, jobs):
    text = "ä" * 400_000
    row = jobs.wait(jobs.add({"blob": text}, type="echo"), timeout_s=30)
    assert row["result"] == {"blob": text}


def test_failure_is_retried_with_its_history(daemon, jobs):
    job = jobs.add({"attempts": [[{"raise": "first"}], [{"raise": "second"}], [{"return": "third"}]]})
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 3, "third")
    attempts = jobs.attempts(job)
    assert [(a["attempt"], a["kind"]) for a in attempts] == [(1, "failed"), (2, "failed")]
    assert "RuntimeError: first" in attempts[0]["error"]
    assert "do_raise" in attempts[0]["traceback"]
    assert "aqd/worker.py" not in attempts[0]["traceback"]


def test_attempts_used_up_gives_a_failed_job(daemon, jobs):
    job = jobs.add([{"raise": "always"}])
    row = jobs.wait(job)
    assert (row["state"], row["attempt"]) == ("FAILED", 3)
    record = jobs.failed(job)
    assert record is not None
    assert record["attempts"] == 3
    assert "always" in record["error"]
    assert len(jobs.attempts(job)) == 3


def test_discard_fails_at_once_and_retry_waits_as_told(daemon, jobs):
    discarded = jobs.add([{"discard": "no use"}])
    retried = jobs.add({"attempts": [[{"retry": 0.3}], [{"return": "ok"}]]})
    assert jobs.wait(discarded)["state"] == "FAILED"
    assert [a["kind"] for a in jobs.attempts(discarded)] == ["failed"]
    assert "no use" in jobs.attempts(discarded)[0]["error"]
    assert jobs.wait(retried)["state"] == "COMPLETED"
    first, second = jobs.attempts(retried)[0], jobs.get(retried)
    assert (second["claimed_at"] - first["finished_at"]).total_seconds() >= 0.29


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ({"segv": None}, "SIGSEGV"),
        ({"abort": None}, "SIGABRT"),
        ({"kill": int(signal.SIGKILL)}, "SIGKILL"),
        ({"os_exit": 0}, "exit code 0"),
        ({"os_exit": 7}, "exit code 7"),
    ],
)
def test_a_crash_costs_one_attempt_of_one_job(daemon, jobs, side, step, how):
    gate = side.path.parent / "go"
    sibling = jobs.add([{"wait_file": str(gate)}, {"return": "untouched"}])
    side.wait_start(sibling)
    victim = jobs.add({"attempts": [[step], [{"return": "second"}]]})
    row = jobs.wait(victim)
    assert (row["state"], row["attempt"]) == ("COMPLETED", 2)
    (attempt,) = jobs.attempts(victim)
    assert attempt["kind"] == "crashed"
    assert how in attempt["error"]
    gate.touch()
    assert jobs.wait(sibling)["attempt"] == 1


def test_a_job_that_always_crashes_ends_as_failed(daemon, jobs):
    job = jobs.add([{"segv": None}])
    others = jobs.add_many(50)
    assert jobs.wait(job)["state"] == "FAILED"
    assert [a["kind"] for a in jobs.attempts(job)] == ["crashed"] * 3
    assert jobs.wait_all(others) == {"COMPLETED": 50}


@pytest.mark.parametrize("step", ["sys_exit", "KeyboardInterrupt", "GeneratorExit", "SystemExit"])
def test_exits_raised_by_a_handler_are_failures_and_the_worker_lives(daemon, jobs, step):
    before = daemon.workers()
    job = jobs.add([{"sys_exit": 0} if step == "sys_exit" else {"raise_type": step}], type="fate_once")
    assert jobs.wait(job)["state"] == "FAILED"
    (attempt,) = jobs.attempts(job)
    assert attempt["kind"] == "failed"
    assert daemon.workers() == before


@pytest.mark.parametrize("body", [{"sleep": 60}, {"hold_gil": 60}, {"swallow": 60}])
def test_the_time_limit_holds(start_daemon, jobs, body):
    start_daemon({"daemon": {"kill_grace_s": 0.5}})
    job = jobs.add([body], max_attempts=1, timeout_s=0.5)
    row = jobs.wait(job, timeout_s=10)
    assert row["state"] == "FAILED"
    (attempt,) = jobs.attempts(job)
    assert attempt["kind"] == "timed_out"


def test_async_handler_times_out_and_completes(daemon, jobs):
    good = jobs.add([{"sleep": 0.01}, {"return": "async"}], type="fate_async")
    slow = jobs.add([{"sleep": 60}], type="fate_async", max_attempts=1, timeout_s=0.4)
    assert jobs.wait(good)["result"] == "async"
    assert jobs.wait(slow)["state"] == "FAILED"
    assert jobs.attempts(slow)[0]["kind"] == "timed_out"


@pytest.mark.parametrize("step", ["return_object", "return_nan", "return_nul", "return_surrogate"])
def test_results_that_cannot_be_stored_are_clear_failures(daemon, jobs, step):
    job = jobs.add([{step: None}], type="fate_once")
    assert jobs.wait(job)["state"] == "FAILED"
    assert "result" in jobs.attempts(job)[0]["error"]


def test_a_result_beyond_the_bound_is_a_clear_failure(daemon, jobs):
    job = jobs.add([{"return_big": 2_000_000}], type="fate_once")
    assert jobs.wait(job)["state"] == "FAILED"
    assert "1048576" in jobs.attempts(job)[0]["error"]


def test_failures_of_any_shape_can_be_written(daemon, jobs):
    for step in ({"raise_unprintable": None}, {"raise_big": 5_000_000}, {"raise_odd_text": None}):
        job = jobs.add([step], type="fate_once")
        assert jobs.wait(job)["state"] == "FAILED"
        (attempt,) = jobs.attempts(job)
        assert len(attempt["error"]) < 10_000


def test_a_delayed_job_waits_and_priority_goes_first(start_daemon, jobs, side):
    start_daemon({"daemon": {"slots": 1, "frame_ms": 0.0}})
    gate = side.path.parent / "go"
    blocker = jobs.add([{"wait_file": str(gate)}])
    side.wait_start(blocker)
    low = jobs.add(priority=-5)
    high = jobs.add(priority=50)
    later = jobs.add(delay_s=1.0)
    gate.touch()
    assert jobs.wait_all([blocker, low, high, later]) == {"COMPLETED": 4}
    order = [run.job for run in side.runs()]
    assert order == [blocker, high, low, later]
    row = jobs.get(later)
    assert (row["claimed_at"] - row["created_at"]).total_seconds() >= 1.0


def test_a_handler_names_the_queue_of_its_jobs(start_daemon, jobs):
    plugin = """
import aqd

@aqd.hookimpl
def aqd_register(handlers):
    handlers.add("slow_mail", lambda payload: "sent", queue="slow")
"""
    daemon = start_daemon(plugins={"mail.py": plugin})
    assert jobs.wait(jobs.add(type="slow_mail"))["queue"] == "slow"
    (daemon.plugins_dir / "mail.py").write_text(plugin.replace(', queue="slow"', ""))
    assert daemon.aqd("reload").returncode == 0
    daemon.wait_for("reload done")
    wait_until(lambda: jobs.wait(jobs.add(type="slow_mail"))["queue"] == "default", 10)
