"""Stopping: running jobs finish within the drain, the rest is given back, and systemd is told."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aqd.errors import Exit
from aqd.master import FINAL_S
from tests.fixtures import processes
from tests.fixtures.processes import wait_until
from tests.process.support import boottime_ns, is_gone

SHORT = {"daemon": {"drain_s": 0.4, "kill_grace_s": 0.5}}


def terminate(daemon):
    """TERM, and wait until the drain has begun."""
    daemon.signal(signal.SIGTERM)
    daemon.wait_for("drain begins")


# --- jobs


def test_running_jobs_finish_and_nothing_new_is_begun(daemon, jobs, side):
    gate = side.path.parent / "go"
    running = [jobs.add([{"wait_file": str(gate)}, {"return": "done"}]) for _ in range(2)]
    for job in running:
        side.wait_start(job)
    terminate(daemon)
    later = jobs.add()
    assert daemon.status()["state"] == "draining"
    assert daemon.aqd("reload").returncode == Exit.REFUSED
    gate.touch()
    assert daemon.wait_exit() == 0
    assert [(jobs.get(job)["state"], jobs.get(job)["attempt"]) for job in running] == [("COMPLETED", 1)] * 2
    row = jobs.get(later)
    assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 0)
    assert not side.runs(later)
    assert not [line for line in daemon.lines if line["level"] in ("warning", "error")]
    assert len(side.events("worker_stop")) == 2


@pytest.mark.parametrize(
    ("steps", "ended"),
    [
        ([{"sleep": 60}], "JobInterrupted"),
        ([{"swallow": 60}], None),
        ([{"ignore_term": None}, {"sleep": 60}], None),
    ],
)
def test_after_the_drain_the_attempt_is_given_back(start_daemon, jobs, side, steps, ended):
    """Asked first, killed after the grace: an interruption either way, with its own record."""
    daemon = start_daemon(SHORT)
    job = jobs.add(steps, max_attempts=1)
    pid = side.wait_start(job)["pid"]
    began = time.monotonic()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert time.monotonic() - began < 6
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 1)
    (attempt,) = jobs.attempts(job)
    assert attempt["kind"] == "interrupted"
    assert jobs.failed(job) is None
    assert [run.outcome for run in side.runs(job)] == [ended]
    assert bool(daemon.find("worker killed", child=pid, reason="drain")) == (ended is None)


def test_every_outcome_of_the_hard_end_is_recorded(start_daemon, jobs, side):
    """The claimer has closed its connection by then, which is no outage: four deaths are waited for."""
    daemon = start_daemon({"daemon": {**SHORT["daemon"], "slots": 4}})
    running = [jobs.add([{"print": f"job {n} is deaf"}, {"swallow": 60}]) for n in range(4)]
    for job in running:
        side.wait_start(job)
    terminate(daemon)
    assert daemon.wait_exit() == 0
    for n, job in enumerate(running):
        row = jobs.get(job)
        assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 1)
        attempt = jobs.attempts(job)[0]
        assert (attempt["kind"], attempt["reason"], attempt["signal"]) == ("interrupted", "drain", 9)
        assert f"job {n} is deaf" in attempt["output"]
        assert min(attempt["wall_s"], attempt["cpu_s"], attempt["peak_kb"]) > 0


def test_a_coroutine_is_interrupted_too(start_daemon, jobs, side):
    daemon = start_daemon(SHORT)
    job = jobs.add([{"sleep": 60}], type="fate_async")
    side.wait_start(job)
    assert daemon.stop() == 0
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 1)


def test_interruptions_have_a_bound_of_their_own(start_daemon, jobs, side):
    """F37: deploys do not eat the attempts, and yet nothing goes on for ever."""
    config = {**SHORT, "jobs": {"max_interruptions": 2}}
    daemon = start_daemon(config, name="same")
    job = jobs.add([{"sleep": 60}], max_attempts=2)
    for interruptions in (1, 2):
        side.wait_start(job)
        assert daemon.stop() == 0
        row = jobs.get(job)
        assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, interruptions)
        side.path.unlink()
        daemon.start()
    side.wait_start(job)
    assert daemon.stop() == 0
    row = jobs.get(job)
    assert row["state"] == "FAILED"
    assert [a["kind"] for a in jobs.attempts(job)] == ["interrupted"] * 3
    assert "interrupt" in jobs.failed(job)["error"]


def test_what_was_not_begun_is_released_untouched(start_daemon, jobs, side):
    """Jobs that wait in a worker's frame behind the running one."""
    daemon = start_daemon({"daemon": {"slots": 1, "frame_ms": 200.0}})
    jobs.wait_all(jobs.add_many(60))  # now it is known to be a short type
    gate = side.path.parent / "go"
    first = jobs.add([{"wait_file": str(gate)}])
    rest = jobs.add_many(40)
    side.wait_start(first)
    terminate(daemon)
    statement = "select count(*)::int as n from aqd.jobs where id = any(%s) and state = 'QUEUED'"
    wait_until(lambda: jobs.conn.execute(statement, [rest]).fetchone()["n"] == 40)  # while the first runs
    gate.touch()
    assert daemon.wait_exit() == 0
    assert jobs.get(first)["state"] == "COMPLETED"
    rows = [jobs.get(job) for job in rest]
    assert {(row["state"], row["attempt"], row["interruptions"]) for row in rows} == {("QUEUED", 0, 0)}
    assert not [job for job in rest if side.runs(job)]


def test_a_second_signal_shortens_the_wait(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"drain_s": 60.0, "kill_grace_s": 0.5}})
    job = jobs.add([{"sleep": 60}])
    side.wait_start(job)
    terminate(daemon)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit(8) == 0
    assert daemon.find("drain cut short", cause="SIGTERM")
    assert jobs.get(job)["interruptions"] == 1


def test_the_dispatcher_dies_during_the_drain(daemon, jobs, side):
    gate = side.path.parent / "go"
    job = jobs.add([{"wait_file": str(gate)}, {"return": "kept"}])
    side.wait_start(job)
    terminate(daemon)
    old = daemon.process_of("dispatcher")
    os.kill(old, signal.SIGKILL)
    daemon.wait_for("dispatcher ended", child=old)
    gate.touch()
    assert daemon.wait_exit() == 0
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "kept")


def test_loader_and_dispatcher_die_during_the_drain(daemon, jobs, side):
    gate = side.path.parent / "go"
    job = jobs.add([{"wait_file": str(gate)}, {"return": "kept"}])
    side.wait_start(job)
    terminate(daemon)
    loader, dispatcher = daemon.process_of("loader"), daemon.process_of("dispatcher")
    os.kill(loader, signal.SIGKILL)
    daemon.wait_for("loader ended", child=loader)
    os.kill(dispatcher, signal.SIGKILL)
    daemon.wait_for("dispatcher ended", child=dispatcher)
    gate.touch()
    assert daemon.wait_exit() == 0
    assert (jobs.get(job)["state"], jobs.get(job)["attempt"]) == ("COMPLETED", 1)


def test_a_worker_that_crashes_during_the_drain_costs_its_attempt(daemon, jobs, side):
    """And is not replaced: the job waits for the next start."""
    gate = side.path.parent / "go"
    job = jobs.add([{"wait_file": str(gate)}, {"kill": 9}])
    side.wait_start(job)
    terminate(daemon)
    gate.touch()
    assert daemon.wait_exit() == 0
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 1, 0)
    assert [a["kind"] for a in jobs.attempts(job)] == ["crashed"]
    assert len(side.runs(job)) == 1


# --- signals for everybody


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_for_every_process_lets_running_jobs_finish(daemon, jobs, side, number):
    """F65: systemctl kill, or a container runtime, means all of them."""
    gate = side.path.parent / "go"
    job = jobs.add([{"wait_file": str(gate)}, {"return": "done"}])
    side.wait_start(job)
    everybody = [daemon.pid, *(p.pid for p in daemon.tree())]
    for pid in everybody:
        with contextlib.suppress(ProcessLookupError):  # one that was just being made may be gone
            os.kill(pid, number)
    daemon.wait_for("drain begins")
    for pid in everybody[1:]:  # and again, to those that are left
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    gate.touch()
    assert daemon.wait_exit() == 0
    row = jobs.get(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "done")
    assert not [line for line in daemon.lines if line["level"] in ("warning", "error")]


def test_children_alone_are_not_ended_by_term_int_or_hup(daemon, jobs, side):
    gate = side.path.parent / "go"
    job = jobs.add([{"wait_file": str(gate)}])
    side.wait_start(job)
    children = {p.pid for p in daemon.tree()}
    for pid in children:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    gate.touch()
    assert jobs.wait(job)["attempt"] == 1
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    assert {p.pid for p in daemon.tree()} == children


def test_ctrl_c_in_a_terminal_reaches_the_master_alone(start_daemon, jobs, side):
    """The foreground group is the master's; what its jobs started goes on, too."""
    daemon = start_daemon()
    gate = side.path.parent / "go"
    job = jobs.add([{"spawn": {"seconds": 600}}, {"wait_file": str(gate)}])
    side.wait_start(job)
    (helper,) = wait_until(side.children)
    os.killpg(daemon.pid, signal.SIGINT)
    daemon.wait_for("drain begins", cause="SIGINT")
    assert processes.look(helper)
    gate.touch()
    assert daemon.wait_exit() == 0
    assert jobs.get(job)["state"] == "COMPLETED"
    wait_until(lambda: processes.look(helper) is None, 5)


# --- systemd


class Manager:
    """What systemd does with NOTIFY_SOCKET: a datagram socket, by path or abstract."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.address = address
        self.heard = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        # Like systemd, at once: such a socket holds no more than ten messages on some systems.
        while (message := self.socket.recv(8192)) != b"end":
            self.heard.append(message.decode().splitlines())

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", self.socket.getsockname())
        self._reader.join(5)
        self.socket.close()

    def wait_for(self, wanted, after=0, timeout_s=15):
        """The place of the first message with a line ``wanted…``, from the place ``after`` on."""

        def look():
            for place, message in enumerate(self.heard[after:], after):
                if any(line.startswith(wanted) for line in message):
                    return place + 1
            return None

        try:
            return wait_until(look, timeout_s) - 1
        except TimeoutError:
            pytest.fail(f"systemd did not hear {wanted}: {self.heard[after:]}")

    def lines(self, start):
        return [line for message in self.heard for line in message if line.startswith(start)]


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    path = str(tmp_path / "notify")
    manager = Manager(path if request.param == "path" else f"@aqd-test-{os.getpid()}-{time.monotonic_ns()}")
    yield manager
    manager.close()


def test_systemd_hears_of_start_reload_and_stop(start_daemon, manager, jobs, side):
    daemon = start_daemon(
        env={
            "NOTIFY_SOCKET": manager.address,
            "WATCHDOG_USEC": "600000",
            "LISTEN_FDS": "0",
            "LISTEN_PID": "1",
        }
    )
    ready = manager.wait_for("READY=1")
    assert manager.heard[ready] == ["READY=1"]
    status = manager.wait_for("STATUS=running")
    assert "generation 1, 2 slots" in manager.heard[status][0]
    # A reload ends with READY, done or refused.
    for text, said in ((None, ""), ("def (:\n", "SyntaxError")):
        if text:
            (daemon.plugins_dir / "fate.py").write_text(text)
        mark = len(manager.heard)
        daemon.signal(signal.SIGHUP)
        begun = manager.wait_for("RELOADING=1", mark)
        assert any(line.startswith("MONOTONIC_USEC=") for line in manager.heard[begun])
        manager.wait_for("READY=1", begun)
        if said:
            manager.wait_for("STATUS=", begun)
            wait_until(lambda said=said: said in manager.lines("STATUS=")[-1])
    # The watchdog is fed by the loop that works: nothing while the master stands still.
    wait_until(lambda: len(manager.lines("WATCHDOG=1")) >= 2)
    daemon.signal(signal.SIGSTOP)
    wait_until(lambda: processes.look(daemon.pid).state == "T")
    quiet, moment = len(manager.heard), time.monotonic()
    wait_until(lambda: time.monotonic() > moment + 0.7)
    assert len(manager.heard) <= quiet + 1
    daemon.signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1", quiet + 1)
    # Nothing of it reaches a child.
    names = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"]
    job = jobs.add([{"note_environment": names}])
    jobs.wait(job)
    assert side.wait("note", job=str(job))["value"] == dict.fromkeys(names)
    for process in daemon.tree():
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert not [name for name in names if f"{name}=".encode() in environment], process
    mark = len(manager.heard)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    stopping = manager.wait_for("STOPPING=1", mark)
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in manager.heard[stopping])
    assert not [m for m in manager.heard[mark:] if "READY=1" in m or "RELOADING=1" in m]


def test_systemd_is_asked_for_time_while_the_database_is_away(start_daemon, tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    daemon = start_daemon(
        {"database": {"url": "postgresql://nobody@127.0.0.1:1/none"}},
        env={"NOTIFY_SOCKET": manager.address},
        wait=False,
    )
    manager.wait_for("EXTEND_TIMEOUT_USEC=")
    manager.wait_for("STATUS=waiting for database")
    assert not manager.lines("READY=1")
    daemon.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert daemon.wait_exit(8) == 0
    manager.close()


def test_a_watchdog_meant_for_another_process_is_not_fed(start_daemon, tmp_path):
    """The variables of a service that started us by the way; and a socket that nobody reads blocks nothing."""
    manager = Manager(str(tmp_path / "notify"))
    daemon = start_daemon(
        env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "10000", "WATCHDOG_PID": "1"}
    )
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 10
    assert not manager.lines("WATCHDOG=1")
    manager.close()


@pytest.mark.parametrize("address", ["/nonexistent/notify", "@nobody-listens", "vsock:2:1", ""])
def test_a_notify_socket_that_leads_nowhere_is_no_fault(tmp_path, address):
    """Without a daemon: the sender itself, in a process of its own."""
    code = "import aqd.systemd as s; print(s.notify('READY=1'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NOTIFY_SOCKET": address},
        capture_output=True,
        text=True,
        timeout=10,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_database_that_answers_nothing_is_not_waited_for(proxied, start_daemon, jobs, side):
    """The drain and the grace are the jobs' time; what cannot be recorded then is left to the leases."""
    daemon = start_daemon(SHORT, database=proxied.url)
    job = jobs.add([{"sleep": 60}])
    pid = side.wait_start(job)["pid"]
    proxied.proxy.swallow()
    daemon.expected_exit = None  # it could not tidy up
    terminate(daemon)
    daemon.wait_exit(30)
    began, ended = daemon.find("drain begins")[0], daemon.find("daemon ended")[0]
    assert is_gone(pid)
    assert boottime_ns(ended) - boottime_ns(began) < (0.4 + 0.5 + FINAL_S * 0.6) * 1e9
    assert daemon.find("drain did not end, leaving the rest to the leases")
    print(f"left after {(boottime_ns(ended) - boottime_ns(began)) / 1e9:.2f} s")
    proxied.proxy.reset_all()
