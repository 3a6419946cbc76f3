"""The master as a supervisor: signals, start and stop, the pid file, back-off, and surroundings that misbehave."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from aqd.errors import Exit
from tests.fixtures import processes
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until

# A plugin whose workers never reach their loop.
DIES_AT_START = """
import os
from aqd import hookimpl

@hookimpl
def aqd_worker_start(slot):
    os._exit(3)
"""

SLOW_IMPORT = "import time\ntime.sleep(60)\n"


def gone(daemon):
    """What should be left of a daemon: nothing that answers, nothing that runs."""
    assert not daemon.socket.exists()
    assert (daemon.runtime_dir / "aqd.pid").read_text() == ""


# --- start and stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_in_order(daemon, jobs, number):
    jobs.wait(jobs.add())
    assert (daemon.runtime_dir / "aqd.pid").read_text() == f"{daemon.pid}\n"
    tree = daemon.tree()
    daemon.signal(number)
    assert daemon.wait_exit() == 0
    gone(daemon)
    assert not [p for p in tree if processes.look(p.pid)]
    assert daemon.find("daemon ended", exit_code=0)
    assert not [line for line in daemon.lines if line["level"] in ("warning", "error")]


def test_a_second_daemon_is_refused_and_the_first_untouched(daemon):
    second = daemon.aqd("run")
    assert second.returncode == Exit.RUNNING
    assert f"already running (pid {daemon.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert daemon.status()["pid"] == daemon.pid


def test_what_a_killed_daemon_left_does_not_keep_the_next_from_starting(start_daemon, jobs):
    first = start_daemon(name="same")
    first.kill()
    assert first.socket.exists()
    assert (first.runtime_dir / "aqd.pid").read_text()
    first.start()  # at once, on the same pid file and socket
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_commands_without_a_daemon_say_so(start_daemon):
    daemon = start_daemon(start=False)
    for command in ("status", "reload", "stop"):
        done = daemon.aqd(command)
        assert done.returncode == Exit.NOT_RUNNING, command
        assert "Traceback" not in done.stderr
    daemon.process = None


def test_aqd_stop_returns_when_the_daemon_has_ended(daemon):
    done = daemon.aqd("stop")
    assert done.returncode == 0, done.stderr
    assert daemon.wait_exit(0.5) == 0


def test_a_stop_wins_over_a_start_that_takes_its_time(start_daemon):
    daemon = start_daemon(
        {"plugins": {"import_timeout_s": 50.0}}, plugins={"slow.py": SLOW_IMPORT}, wait=False
    )
    daemon.wait_for("daemon starts")
    wait_until(lambda: any("loader g1" in p.title for p in daemon.tree()))
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit(4) == 0
    gone(daemon)


def test_a_stop_at_any_moment_of_the_start_leaves_nothing(start_daemon):
    """F03: a signal between a fork and the child's own handlers must not be lost."""
    daemon = start_daemon(start=False)
    chance = random.Random(4)
    for attempt in range(16):
        daemon.start(wait=False)
        time.sleep(chance.uniform(0.0, 0.06) * attempt)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(8) in (0, -signal.SIGTERM)
        assert not processes.belonging(daemon.environment()[processes.MARKER], [daemon.pid])
    assert not daemon.find("worker did not end, killing it")
    assert not daemon.find("drain did not end, leaving the rest to the leases")
    assert not [line for line in daemon.lines if "traceback" in line]
    assert not [line for line in daemon.output if "Traceback" in line]


def test_signals_of_other_daemons_habits_are_harmless(daemon, jobs):
    """logrotate recipes and process managers send USR1 and USR2; their default is death."""
    before = daemon.workers()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGCHLD, signal.SIGWINCH):
        daemon.signal(number)
        assert daemon.status()["pid"] == daemon.pid
    assert daemon.workers() == before
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


# --- giving up


def test_workers_that_cannot_start_are_tried_slower_and_then_given_up(start_daemon):
    daemon = start_daemon(
        {"daemon": {"slots": 2, "spawn_failures_max": 6}}, plugins={"dies.py": DIES_AT_START}, wait=False
    )
    daemon.expected_exit = Exit.WORKERS
    assert daemon.wait_exit() == Exit.WORKERS
    assert daemon.find("workers cannot start, giving up", failures=6)
    ends = [line for line in daemon.find("worker ended") if line["slot"] == 0]
    assert len(ends) == 3
    moments = [line["at"] for line in ends]
    assert moments == sorted(moments)
    assert all("exit code 3" in line["status"] for line in ends)
    assert len(daemon.lines) < 60
    # Slot 0 waited a quarter of a second, then half of one.
    spawned = [line for line in daemon.find("worker started") if line["slot"] == 0]
    assert len(spawned) == 3
    gone(daemon)


def test_one_failed_start_does_not_end_the_daemon(start_daemon, jobs, tmp_path):
    """And a slot that had to wait is filled as soon as starting works."""
    flag = tmp_path / "broken"
    flag.touch()
    plugin = DIES_AT_START.replace("    os._exit(3)", f"    if os.path.exists({str(flag)!r}): os._exit(3)")
    daemon = start_daemon({"daemon": {"slots": 2}}, plugins={"dies.py": plugin}, wait=False)
    daemon.wait_for("worker ended", count=4)
    state = daemon.wait_state("starting")  # once the database is reached, which may be a moment later
    assert {slot["state"] for slot in state["slots"]} <= {"backing off", "starting", "idle"}
    flag.unlink()
    daemon.wait_state("running")
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_a_missing_plugin_folder_is_a_clear_refusal(start_daemon):
    daemon = start_daemon(start=False)
    shutil.rmtree(daemon.plugins_dir)
    daemon.expected_exit = None
    daemon.start(wait=False)
    assert daemon.wait_exit() in (Exit.LOADER, Exit.CONFIG)
    said = "\n".join([*daemon.output, *(json.dumps(line) for line in daemon.lines)])
    assert str(daemon.plugins_dir) in said
    assert "traceback" not in said.lower()


def test_a_runtime_directory_that_cannot_be_made_is_a_clear_refusal(start_daemon, tmp_path):
    (tmp_path / "file").write_text("in the way")
    daemon = start_daemon({"daemon": {"runtime_dir": str(tmp_path / "file" / "run")}}, start=False)
    done = daemon.aqd("run")
    assert done.returncode == Exit.CONFIG
    assert str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr


# --- the database is away


def test_without_a_database_it_waits_and_says_so_and_stops_at_once(start_daemon):
    daemon = start_daemon(
        {"database": {"url": "postgresql://nobody@127.0.0.1:1/none"}}, wait=False, name="alone"
    )
    state = daemon.wait_state("waiting for database")
    assert state["database"]["up"] is False
    assert state["database"]["error"]
    known, moment = daemon.mark(), time.monotonic()
    wait_until(lambda: time.monotonic() > moment + 2)
    warned = [line for line in daemon.lines[known:] if line["level"] in ("warning", "error")]
    assert len(warned) < 10, "a flood of lines"
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit(6) == 0


# --- standard descriptors


def test_closed_standard_descriptors_are_replaced(start_daemon, jobs):
    wrapper = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    daemon = start_daemon(wrapper=wrapper)
    assert jobs.wait(jobs.add([{"print": "hello"}, {"stderr": "hello"}]))["state"] == "COMPLETED"
    everybody = [daemon.pid, *(p.pid for p in daemon.tree())]
    for pid in everybody:
        opened = processes.descriptors(pid)
        process = processes.look(pid)
        assert process is not None
        printed = {opened[1], opened[2]}
        if "worker" in process.title:  # there jobs print into a file of aqd's
            assert len(printed) == 1
            assert printed.pop().startswith("/memfd:aqd-output")
        assert {opened[0], *printed} == {"/dev/null"}, process


def test_a_log_that_nobody_reads_blocks_nothing(start_daemon, jobs, tmp_path):
    """F04: the pipe is full, children die in numbers, reloads and status go on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        daemon = start_daemon(wrapper=["sh", "-c", f'exec "$@" >{pipe} 2>&1', "sh"])
        for _ in range(40):
            for pid in daemon.workers().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemon.signal(signal.SIGHUP)
        filled = select_full(pipe)
        workers = daemon.wait_status(
            lambda s: s["state"] == "running" and all(slot["state"] == "idle" for slot in s["slots"])
        )
        assert len(workers["slots"]) == 2
        assert jobs.wait(jobs.add())["state"] == "COMPLETED"
        assert filled, "the pipe was not full: the test proved nothing"
        text = drain(reader)
        assert "Traceback" not in text
        # Once there is room the log says how much was lost.
        os.kill(next(iter(daemon.workers().values())), signal.SIGKILL)
        wait_until(lambda: '"dropped"' in drain(reader), 5)
        assert daemon.stop() == 0
    finally:
        os.close(reader)


def select_full(pipe):
    """Fills what is left of the pipe; whether it was more than half full already or is now."""
    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, b"x" * 511 + b"\n")
        return True
    finally:
        os.close(fd)


def drain(fd):
    chunks = []
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace")


# --- the control socket


def connect(daemon):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(str(daemon.socket))  # blocking: while the queue of the socket is full it waits
    client.settimeout(5)
    return client


def test_nonsense_on_the_control_socket_gets_an_answer(daemon):
    for line in (
        b"\n",
        b"status\n",
        b"[]\n",
        b'{"command": 1}\n',
        b"\xff\xfe\n",
        b"[" * 30_000 + b"\n",
        b'{"command": "fly"}\n',
    ):
        with connect(daemon) as client:
            client.sendall(line)
            answer = json.loads(client.makefile("rb").readline())
        assert answer["ok"] is False, line
    with connect(daemon) as client, contextlib.suppress(OSError):
        client.sendall(b"x" * 100_000)  # without an end
        assert client.recv(10) == b""
    assert daemon.status()["pid"] == daemon.pid
    assert daemon.socket.stat().st_mode & 0o007 == 0, "it is for everybody"


def test_clients_that_hang_or_hang_up_do_not_stop_others(daemon):
    before = daemon.fds()
    clients = [connect(daemon) for _ in range(20)]
    for client in clients:
        client.sendall(b'{"command": "sta')
    assert daemon.status()["pid"] == daemon.pid
    for client in clients:
        client.close()
    with connect(daemon) as client:
        client.sendall(b'{"command": "reload"}\n')  # and does not wait for the answer
    assert daemon.wait_for("reload done")
    daemon.wait_status(lambda s: s["state"] == "running" and s["generation"] == 2)
    wait_until(lambda: daemon.fds() <= before, 5)


def test_a_flood_of_silent_clients_does_not_lock_out_aqd_status(daemon):
    clients = [connect(daemon) for _ in range(48)]
    assert daemon.status()["pid"] == daemon.pid
    for client in clients:
        client.close()


# --- adopted processes


def test_what_jobs_leave_behind_is_reaped_and_ends_with_the_daemon(daemon, jobs, side):
    short = jobs.add([{"spawn": {"seconds": 0.1, "count": 5, "daemonize": True}}])
    long = jobs.add([{"spawn": {"seconds": 600, "daemonize": True}}])
    jobs.wait(short)
    jobs.wait(long)
    helpers = side.children()
    assert len(helpers) == 6
    wait_until(lambda: sum(processes.look(pid) is not None for pid in helpers) <= 1, 5)
    assert not processes.zombies_below(daemon.pid)
    assert daemon.stop() == 0
    assert not [pid for pid in helpers if processes.look(pid)]


def has_pid_namespaces():
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not has_pid_namespaces(), reason="needs the right to make a PID namespace")
def test_as_pid_1_it_reaps_and_stops(start_daemon, jobs, side):
    """As in a container without an init: signals without a handler are ignored, orphans are ours."""
    daemon = start_daemon(wrapper=["unshare", "--pid", "--fork", "--mount-proc"])
    assert daemon.status()["pid"] == 1
    jobs.wait(jobs.add([{"spawn": {"seconds": 0.1, "count": 3, "daemonize": True}}]))
    jobs.wait(jobs.add([{"os_exit": 1}], type="fate_once"))
    (master,) = [p for p in daemon.tree() if p.parent == daemon.pid]
    wait_until(lambda: not processes.zombies_below(master.pid), 5)
    os.kill(master.pid, signal.SIGTERM)
    assert daemon.wait_exit() == 0


@pytest.mark.skipif(not has_pid_namespaces(), reason="needs the right to make a PID namespace")
def test_as_pid_1_a_stop_as_soon_as_a_handler_stands_is_not_lost(start_daemon):
    daemon = start_daemon(start=False, wrapper=["unshare", "--pid", "--fork", "--mount-proc"])
    for pause in (0.0, 0.05, 0.15, 0.3):
        daemon.start(wait=False)
        pid = wait_until(lambda: next((p.pid for p in daemon.tree() if catches_term(p.pid)), None))
        time.sleep(pause)
        os.kill(pid, signal.SIGTERM)
        assert daemon.wait_exit(8) == 0


def catches_term(pid):
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if "\nName:\tpython" in "\n" + status or "\nName:\taqd" in "\n" + status:
            caught = int(status.partition("SigCgt:\t")[2].partition("\n")[0], 16)
            return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def test_a_port_that_is_still_taken_is_waited_for(start_daemon):
    """By an API whose master was killed just after it had started it: a restart must not fail for that."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        daemon = start_daemon({"api": {"port": port, "workers": 1}}, with_api=True, wait=False)
        daemon.wait_for("api port is taken, waiting for it", port=port)
    daemon.wait_state("running")


def test_a_port_that_stays_taken_is_refused(start_daemon):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = start_daemon({"api": {"port": taken.getsockname()[1]}}, with_api=True, wait=False)
        daemon.expected_exit = Exit.CONFIG
        assert daemon.wait_exit() == Exit.CONFIG
    assert "Address already in use" in "\n".join(daemon.output)
