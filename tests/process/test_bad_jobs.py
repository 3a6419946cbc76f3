"""What a job may do to its own process: it hurts no other job, and the daemon finds the right words for it."""

from __future__ import annotations

import os
import sys

import pytest

from tests.fixtures.processes import wait_until
from tests.process import probe

ONE = {"daemon": {"slots": 1}}
SHORT = {"short": {"timeout_s": 0.5}}

# (what a job does, an expression that is true in the next one if nothing of it is left there)
LEFT = {
    "a clock of processor time": (
        "signal.setitimer(signal.ITIMER_PROF, 0.05); signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)",
        "signal.getitimer(signal.ITIMER_PROF)[0] == signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0",
    ),
    "a watchdog": (
        "import faulthandler; faulthandler.dump_traceback_later(0.3, exit=True)",
        "time.sleep(0.6) is None",
    ),
    "ignored signals": (
        "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM)]",
        "subprocess.run(['grep', '-c', 'SigIgn:.*0000000$', '/proc/self/status']).returncode == 0",
    ),
    "no handlers of ours": (
        "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]",
        "[os.kill(os.getpid(), n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)] != []",
    ),
    "a directory": (
        "import tempfile; path = tempfile.mkdtemp(); os.chdir(path); os.rmdir(path)",
        "os.path.exists('aqd.toml')",
    ),
    "a umask": ("os.umask(0o777)", "os.umask(0o022) == 0o022"),
    "a limit": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "open('/dev/null') and open('/dev/null')",
    ),
    "an endless output": ("os.ftruncate(1, 2**63 - 1)", "os.write(1, b'x') == 1"),
}


@pytest.mark.parametrize("what", LEFT)
def test_the_next_job_has_what_it_expects(start_daemon, jobs, what):
    daemon = start_daemon(ONE, plugins=probe.source())
    worker = daemon.workers()[0]
    leave, check = LEFT[what]
    probe.result(jobs, leave)
    assert probe.result(jobs, f"assert {check}; result = os.getpid()") == worker


FOR_GOOD = {
    "a seal": "import fcntl; os.write(1, b'x' * (3 << 20)); fcntl.fcntl(1, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE); time.sleep(1)",
    "an account": "os.setgid(65534); os.setuid(65534)",
    "a hard limit and an account": (
        "import resource; os.setuid(65534); resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))"
    ),
}


@pytest.mark.parametrize("what", FOR_GOOD)
def test_what_cannot_be_put_right_is_not_the_next_ones(start_daemon, jobs, what):
    if "account" in what and os.getuid() != 0:
        pytest.skip("needs root")
    daemon = start_daemon(ONE, plugins=probe.source())
    worker = probe.result(jobs, FOR_GOOD[what] + "; result = os.getpid()")
    daemon.wait_for("a job has changed its worker for good, leaving")
    code = "print('x', flush=True); result = [os.getpid(), os.getuid()]; files = [open('/dev/null') for _ in range(20)]"
    assert probe.result(jobs, code) == [daemon.workers()[0], os.getuid()]
    assert daemon.workers()[0] != worker


def test_closed_descriptors_whose_numbers_are_in_use_again(start_daemon, jobs):
    """The worker would send the outcome into a socket of the job's and serve that from then on."""
    daemon = start_daemon(ONE, plugins=probe.source())
    attempt = probe.failure(
        jobs,
        """
import socket
os.closerange(3, 4096)
sys.kept = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
""",
    )
    assert (attempt["kind"], attempt["reason"]) == ("crashed", "exit")
    assert "closed descriptors of its worker" in attempt["output"]
    assert probe.result(jobs, "result = 5") == 5
    assert len(daemon.workers()) == 1


# A program that knows nothing of us dies of being asked.
REPLACED = "print('on it', flush=True); open(%r, 'w'); os.execvp('sleep', ['sleep', '60'])"


def test_a_worker_that_was_replaced_by_another_program(start_daemon, jobs, tmp_path):
    daemon = start_daemon(ONE, plugins=probe.source(SHORT))
    timed_out = probe.failure(jobs, REPLACED % str(tmp_path / "timed out"), type="short")
    assert (timed_out["kind"], timed_out["reason"]) == ("timed_out", "timeout")
    assert "on it" in timed_out["output"]

    begun = tmp_path / "cancelled"
    job = jobs.add({"code": REPLACED % str(begun)}, type="probe")
    wait_until(begun.exists)
    jobs.conn.execute("select aqd.cancel(%s)", [job])
    assert jobs.wait(job)["state"] == "CANCELLED"

    begun = tmp_path / "drained"
    job = jobs.add({"code": REPLACED % str(begun)}, type="probe")
    wait_until(begun.exists)
    daemon.configure({"daemon": {"drain_s": 0.1}})
    assert daemon.aqd("reload").returncode == 0
    daemon.stop()
    row = jobs.get(job)
    assert (row["state"], row["crashes"], row["interruptions"]) == ("QUEUED", 0, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_job_that_became_somebody_else(start_daemon, jobs):
    """As one that has replaced its worker by sudo, in a daemon that is not root: out of the master's reach."""
    wrapper = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"]
    daemon = start_daemon(
        {"daemon": {"slots": 2, "kill_grace_s": 0.3}}, plugins=probe.source(SHORT), wrapper=wrapper
    )
    job = jobs.add({"code": "os.setuid(65534); time.sleep(3)"}, type="short")
    daemon.wait_for("worker cannot be killed", reason="timeout")
    assert probe.result(jobs, "result = 5") == 5
    # Its own end is waited for.
    assert jobs.wait(job)["state"] in ("COMPLETED", "FAILED")
    wait_until(lambda: len(daemon.workers()) == 2)


HOG = [
    sys.executable,
    "-S",
    "-c",
    "import os, time; x = bytearray(os.urandom(1 << 20)) * 300; print(1, flush=True); time.sleep(600)",
]
START = f"helper = subprocess.Popen({HOG!r}, stdout=subprocess.PIPE); helper.stdout.readline()"


def test_helpers_of_a_hook_are_not_the_jobs_use(start_daemon, jobs):
    hooks = f"@aqd.hookimpl\ndef aqd_worker_start():\n    global helper\n    {START}"
    daemon = start_daemon(ONE, plugins=probe.source({"limited": {"memory_limit_mb": 200}}, hooks=hooks))
    pids = {probe.result(jobs, "time.sleep(0.3); result = os.getpid()", type="limited") for _ in range(3)}
    assert pids == {daemon.workers()[0]}, "recycling would not help"
    assert probe.failure(jobs, START + "; time.sleep(10)", type="limited")["reason"] == "memory_limit"


def test_what_an_earlier_job_has_left_running_is_not_the_next_ones_use(start_daemon, jobs):
    handlers = {"limited": {"memory_limit_mb": 200}, "detached": {"detach": True}}
    daemon = start_daemon(ONE, plugins=probe.source(handlers))
    left = probe.result(jobs, START + "; result = helper.pid", type="detached")
    try:
        probe.result(jobs, "time.sleep(0.5)", type="limited")
        assert probe.failure(jobs, START + "; time.sleep(10)", type="limited")["reason"] == "memory_limit"
    finally:
        os.kill(left, 9)
    assert not daemon.find("master fails")
