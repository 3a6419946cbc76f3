"""What a worker leaves behind when it dies, and a daemon that is the first process of its container."""

import os
import shutil
import signal
import subprocess

import pytest

from tests.fixtures import processes
from tests.fixtures.processes import wait_until
from tests.process.support import is_gone

KINDS = [{}, {"setsid": True}, {"daemonize": True}, {"ignore_term": True}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "".join(kind) or "plain")
def test_a_killed_worker_s_helpers_go_with_it(daemon, jobs, side, kind):
    job = jobs.add([{"spawn": {"count": 2, **kind}}, {"sleep": 60}], max_attempts=1)
    pid = side.wait_start(job)["pid"]
    wait_until(lambda: len(side.children()) == 2)
    os.kill(pid, signal.SIGKILL)
    assert jobs.wait(job)["state"] == "FAILED"
    wait_until(lambda: all(is_gone(child) for child in side.children()))
    wait_until(lambda: not any(p.pid in side.children() for p in daemon.tree()))  # reaped, too


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "".join(kind) or "plain")
def test_a_job_killed_for_its_time_takes_its_helpers_along(start_daemon, jobs, side, kind):
    daemon = start_daemon({"jobs": {"timeout_s": 1.0}, "daemon": {"kill_grace_s": 0.3}})
    job = jobs.add([{"spawn": {"count": 2, **kind}}, {"swallow": 60}], max_attempts=1)
    assert jobs.wait(job)["state"] == "FAILED"
    assert len(side.children()) == 2
    wait_until(lambda: all(is_gone(child) for child in side.children()))
    daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))


def test_two_workers_that_die_together_leave_nothing_and_their_siblings_keep_theirs(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"slots": 3}})
    steps = [{"spawn": {"daemonize": True}}, {"spawn": {"setsid": True}}, {"sleep": 60}]
    dying = [jobs.add(steps, max_attempts=1) for _ in range(2)]
    staying = jobs.add(steps, max_attempts=1)
    pids = [side.wait_start(job)["pid"] for job in dying]
    wait_until(lambda: len(side.children()) == 6)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for job in dying:
        jobs.wait(job)
    for job in dying:
        children = [int(line["child"]) for line in side.events("spawned", job=str(job))]
        wait_until(lambda children=children: all(map(is_gone, children)))
    assert not any(is_gone(int(line["child"])) for line in side.events("spawned", job=str(staying)))
    assert jobs.state(staying) == "PROCESSING"
    daemon.wait_status(lambda s: all(slot["pid"] for slot in s["slots"]))


DETACHING = """
import os, subprocess
from aqd import hookimpl

def start(payload):
    env = {k: v for k, v in os.environ.items() if k != "AQD_TEST_MARK"}
    with open(payload["pids"], "a") as file:
        for session in (False, True):
            helper = subprocess.Popen(["sleep", "300"], env=env, start_new_session=session)
            print(helper.pid, file=file)
            helper.returncode = 0
    if payload.get("die"):
        os.kill(os.getpid(), 9)

@hookimpl
def aqd_register(handlers):
    handlers.add("detaching", start, detach=True, max_attempts=1)
"""


@pytest.mark.parametrize("die", [False, True])
def test_what_a_handler_may_detach_stays_whatever_happens(start_daemon, jobs, side, tmp_path, die):
    daemon = start_daemon({"daemon": {"slots": 1}}, plugins={"detaching.py": DETACHING})
    file = tmp_path / "pids"
    jobs.wait(jobs.add({"pids": str(file), "die": die}, "detaching"))
    helpers = [int(line) for line in file.read_text().split()]
    assert len(helpers) == 2
    try:
        # A later job of the same worker, that is killed: its own helpers go.
        job = jobs.add([{"spawn": {}}, {"sleep": 60}], max_attempts=1)
        pid = side.wait_start(job)["pid"]
        (child,) = wait_until(side.children)
        os.kill(pid, signal.SIGKILL)
        jobs.wait(job)
        wait_until(lambda: is_gone(child))
        assert daemon.stop() == 0
        assert not any(is_gone(helper) for helper in helpers)
    finally:
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)


# --- as the first process


@pytest.fixture
def container():
    """The command that runs another as PID 1, with a /proc of its own."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("no unshare and nsenter here")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no PID namespace can be made here")
    return command


def test_as_pid_1_strangers_are_reaped_or_left_alone(start_daemon, jobs, side, tmp_path, container):
    daemon = start_daemon(wrapper=container)
    daemon.expected_exit = None
    (first,) = [p.pid for p in daemon.tree() if p.parent == daemon.pid]
    assert daemon.status()["pid"] == 1
    workers = daemon.workers()
    # Orphans of another program in the container: some end at once, with codes that mean something to us.
    script = """
        for code in 1 2 3 4 5 6 7 8 70 78; do (sleep 0.2; exit $code) & done
        setsid sleep 300 >/dev/null 2>&1 & echo done
    """
    enter = ["nsenter", "--target", str(first), "--pid", "--mount", "sh", "-c", script]
    assert subprocess.run(enter, stdout=subprocess.PIPE, check=True).stdout == b"done\n"
    strangers = wait_until(lambda: [p for p in daemon.tree() if p.title == "sleep 300" and p.parent == first])
    # Meanwhile a worker dies and leaves helpers in sessions of their own.
    job = jobs.add([{"spawn": {"daemonize": True, "seconds": 301}}, {"sleep": 60}], max_attempts=1)
    pid = side.wait_start(job)["pid"]
    wait_until(lambda: any(p.title == "sleep 301" for p in daemon.tree()))
    enter = ["nsenter", "--target", str(first), "--pid", "--mount", "kill", "-9", str(pid)]
    subprocess.run(enter, check=True)
    assert jobs.wait(job)["state"] == "FAILED"
    wait_until(lambda: not any(p.title == "sleep 301" for p in daemon.tree()))
    wait_until(lambda: not processes.zombies_below(first))
    assert not any(is_gone(stranger.pid) for stranger in strangers)
    assert len(set(daemon.workers().values()) & set(workers.values())) == 1
    assert daemon.status()["restarts"] == {"signal 9 (SIGKILL)": 1}
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}
    os.kill(first, signal.SIGTERM)
    assert daemon.wait_exit() == 0
    wait_until(lambda: all(is_gone(stranger.pid) for stranger in strangers))
