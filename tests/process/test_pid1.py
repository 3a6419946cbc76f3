"""The daemon as PID 1, as in a container without an init (F09): it reaps what nobody else can, is not led astray
by strangers, and hears SIGTERM, which the kernel drops for a PID 1 without a handler.

In a PID namespace made by unshare(1), which needs the right to make one.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from aqd.errors import Exit
from tests.fixtures import processes
from tests.fixtures.processes import wait_until

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        pytest.skip(f"needs unshare(1): {error}")
    if tried.returncode != 0:
        pytest.skip(f"needs the right to make a PID namespace: {tried.stderr.strip()}")


def init_of(daemon):
    """The master, which is PID 1 inside: the child of unshare. None: not yet."""
    children = [each for each in processes.descendants(daemon.pid) if each.parent == daemon.pid]
    return children[0].pid if children else None


def listens_to_term(pid):
    """Whether a handler is installed (proc(5), SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(mask & (1 << (signal.SIGTERM - 1)))


@pytest.fixture
def inside(start_daemon):
    """``inside(wait=True)``: (a daemon in a namespace of its own, the master's pid as seen from here)."""

    made = []

    def make(**options):
        daemon = start_daemon(wrapper=UNSHARE, **options)
        made.append((daemon, wait_until(lambda: init_of(daemon), 10, "the master")))
        return made[-1]

    yield make
    for daemon, master in made:
        if daemon.process.poll() is None:  # unshare itself takes no signals
            os.kill(master, signal.SIGTERM)


def stop(daemon, master):
    """As ``docker stop`` does it; the exit status."""
    os.kill(master, signal.SIGTERM)
    return daemon.wait_exit(20)


def test_what_jobs_leave_behind_is_reaped(inside, jobs):
    daemon, master = inside(config={"daemon": {"slots": 4}})
    assert processes.look(master).title.startswith("aqd: master")
    workers = daemon.workers()
    ids = jobs.add_many(200, [{"spawn": {"daemonize": True, "seconds": 0.2}}])
    assert jobs.wait_all(ids, 90) == {"COMPLETED": 200}
    wait_until(lambda: not processes.zombies_below(master), 10, "no zombie")
    assert daemon.workers() == workers
    wait_until(lambda: "sleep" not in str(processes.descendants(master)), 10, "no sleeper")
    assert stop(daemon, master) == 0


@pytest.mark.parametrize("code", [Exit.LOADER, Exit.WORKERS, Exit.CONFIG, Exit.OK])
def test_a_stranger_is_no_child_of_ours(inside, jobs, tmp_path, code):
    """Whatever it exits with: the codes of our own processes mean nothing from others."""
    daemon, master = inside()
    before = daemon.status()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"(read word < {gate}; exit {int(code)}) > /dev/null 2>&1 & echo $!"
    enter = ["nsenter", "--target", str(master), "--pid", "--mount", "sh", "-c", script]
    subprocess.run(enter, capture_output=True, timeout=20, check=True)

    def orphan():
        """Its parent has ended, so it is a child of the namespace's PID 1."""
        return [
            each
            for each in processes.descendants(master)
            if each.parent == master and each.title.startswith("sh ")
        ]

    wait_until(orphan)
    gate.write_text("go\n")
    wait_until(lambda: not orphan())
    assert jobs.wait_all(jobs.add_many(20)) == {"COMPLETED": 20}
    wait_until(lambda: not processes.zombies_below(master), 10, "no zombie")
    after = daemon.status()
    assert after["state"] == "running"
    assert [slot["pid"] for slot in after["slots"]] == [slot["pid"] for slot in before["slots"]]
    assert after["processes"] == before["processes"]
    assert not [line for line in daemon.lines if line["level"] in ("warning", "error")]
    assert stop(daemon, master) == 0


@pytest.mark.parametrize("later_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_term_at_any_moment_of_the_start(inside, later_s):
    """From the first moment at which it is heard: a lost one would be waited for until the SIGKILL."""
    daemon, master = inside(wait=False)
    wait_until(lambda: listens_to_term(master), 10, "a handler")
    time.sleep(later_s)  # the moment that is tried
    assert stop(daemon, master) == 0


def test_term_while_a_job_runs(inside, jobs, side):
    daemon, master = inside(config={"daemon": {"drain_s": 0.3, "kill_grace_s": 0.5}})
    job = jobs.add([{"spawn": {"daemonize": True}}, {"sleep": 60}])
    side.wait_start(job)
    wait_until(side.children)
    assert stop(daemon, master) == 0
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 1)
