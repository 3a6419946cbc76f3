"""`aqd status`, `reload` and `stop` against a process that serves the real control socket."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aqd.cli import command
from aqd.errors import Exit
from tests.fixtures.processes import wait_until

STATUS: dict[str, Any] = {
    "version": "9.9",
    "node": "host/abc",
    "state": "running",
    "started_at": "2026-11-29T17:40:01+00:00",
    "uptime_s": 400.0,
    "config_path": None,
    "generation": 3,
    "problems": ["plugin \033[2Jmail: broken"],
    "database": {"up": True, "since_s": 12.0, "error": None, "listener_up": False},
    "processes": [{"role": "loader", "pid": 11, "generation": 3}, {"role": "dispatcher", "pid": 12}],
    "slots": [
        {
            "slot": 0,
            "pid": 21,
            "generation": 3,
            "state": "busy",
            "job": "4711",
            "type": "generate_pdf",
            "since_s": 1.5,
            "jobs_done": 8,
            "held": 2,
            "restarts": 1,
        },
        {"slot": 1, "pid": None, "generation": None, "state": "backing off", "job": None, "type": None},
    ],
    "plugins": [
        {
            "name": "mail",
            "source": "/p/mail.py",
            "version": "",
            "handlers": [],
            "state": "broken",
            "error": "NameError: x",
        }
    ],
    "types": ["generate_pdf"],
    "counters": {"completed": 5, "failed": 1},
    "restarts": {"timeout": 2, "signal 11 (SIGSEGV)": 1},
    "recycled": 3,
}

# What the master does with the commands, without the rest of it.
DAEMON = """
    import json, os, selectors, sys, time
    from pathlib import Path
    from aqd.control import Server
    plan = json.loads(sys.argv[2])
    selector = selectors.DefaultSelector()
    end = None
    def handle(client, command, args):
        global end
        if command == "status":
            client.answer({**plan["status"], "pid": os.getpid()})
        elif command == "reload":
            client.answer(plan["reload"])
        elif command == "stop":
            client.answer({"ok": True, "pid": os.getpid()})
            end = time.monotonic() + plan["stop_s"]
    Server(Path(sys.argv[1]), selector, handle)
    print("up", flush=True)
    while end is None or time.monotonic() < end:
        for key, _ in selector.select(0.05):
            key.data()
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a stand-in for the master; its answers are the arguments."""
    monkeypatch.setenv("AQD_DAEMON_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AQD_CONFIG", str(tmp_path / "aqd.toml"))
    (tmp_path / "aqd.toml").touch()
    children = []

    def start(**plan: Any) -> subprocess.Popen[str]:
        plan = {"status": STATUS, "reload": {"ok": True, "generation": 4}, "stop_s": 0.0, **plan}
        arguments = [
            sys.executable,
            "-c",
            textwrap.dedent(DAEMON),
            str(tmp_path / "control.sock"),
            json.dumps(plan),
        ]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_status_for_people(daemon, capsys) -> None:
    child = daemon()
    assert command.run(["status"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"aqd 9.9 · running · node host/abc · pid {child.pid} · generation 3 · up 6.7 min"
    assert "database: up for 12 s, without notifications" in lines
    ends = "3 workers recycled, 3 workers restarted (2 timeout, 1 signal 11 (SIGSEGV))"
    assert f"since the start: 5 completed, 1 failed, {ends}" in lines
    assert "problem: plugin \\x1b[2Jmail: broken" in lines
    rows = [line.split() for line in lines]
    assert ["0", "busy", "4711", "generate_pdf", "1.5", "s", "21", "3", "8", "2", "1"] in rows
    assert ["loader", "11", "3"] in rows
    assert any(row[:2] == ["mail", "broken"] and row[-1] == "x" for row in rows)
    assert "\033" not in out


def test_status_for_programs(daemon, capsys) -> None:
    child = daemon()
    assert command.run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**STATUS, "pid": child.pid}


def test_status_while_the_database_is_away(daemon, capsys) -> None:
    daemon(status={**STATUS, "database": {"up": False, "error": "connection refused", "listener_up": False}})
    assert command.run(["status"]) == 0
    assert "database: away: connection refused" in capsys.readouterr().out


def test_status_of_a_daemon_that_has_just_started(daemon, capsys) -> None:
    daemon(status={"state": "starting", "version": "9.9"})
    assert command.run(["status"]) == 0
    assert "starting" in capsys.readouterr().out


def test_a_broken_configuration_file_does_not_hide_the_daemon(daemon, capsys, tmp_path: Path) -> None:
    daemon()
    for text in ("[daemon\n", "[daemon]\nslots = 0\n", "[nonsense]\nx = 1\n"):
        (tmp_path / "aqd.toml").write_text(text)
        assert command.run(["status"]) == 0
    assert capsys.readouterr().err == ""


def test_health_of_the_node(daemon, capsys) -> None:
    """What a container's health check asks: not whether it answers, but whether it takes jobs."""
    daemon()
    assert command.run(["health", "--node"]) == 0
    assert capsys.readouterr().out == "ok, state: running\n"


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"state": "reloading"}, 0, "ok, state: reloading"),
        ({"state": "draining"}, 1, "unavailable: the daemon is draining"),
        ({"state": "starting"}, 1, "unavailable: the daemon is starting"),
        (
            {
                "state": "waiting for database",
                "database": {"up": False, "error": "no route to postgresql://a:pw@h/d"},
            },
            1,
            "unavailable: the daemon is waiting for database: no route to postgresql://a:***@h/d",
        ),
        ({"database": {"up": False, "error": None}}, 1, "unavailable: the daemon is running"),
    ],
)
def test_health_of_a_node_that_does_not_serve(daemon, capsys, change, code, text) -> None:
    daemon(status={**STATUS, **change})
    assert command.run(["health", "--node"]) == code
    assert capsys.readouterr().out == f"{text}\n"


def test_health_without_a_node(daemon, capsys) -> None:
    assert command.run(["health", "--node", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["state"]) == ("unavailable", None)
    assert "no daemon answers" in found["reason"]
    assert command.run(["health", "--node", "--api"]) == Exit.USAGE


def test_reload_says_which_generation_serves(daemon, capsys) -> None:
    daemon()
    assert command.run(["reload"]) == 0
    assert capsys.readouterr().out == "generation 4 serves\n"


def test_a_refused_reload_says_why(daemon, capsys) -> None:
    daemon(reload={"ok": False, "error": "aqd.toml: daemon.slots = 0: must be between 1 and 512"})
    assert command.run(["reload"]) == Exit.REFUSED
    assert capsys.readouterr().err == "aqd: aqd.toml: daemon.slots = 0: must be between 1 and 512\n"


def test_stop_waits_until_the_daemon_is_gone(daemon, capsys) -> None:
    child = daemon(stop_s=0.7)
    begin = time.monotonic()
    assert command.run(["stop"]) == 0
    assert time.monotonic() - begin >= 0.7
    # The process is a zombie of ours now, so it can only have ended.
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    assert capsys.readouterr().out == "the daemon has ended\n"


def test_stop_gives_up_waiting(daemon, capsys) -> None:
    child = daemon(stop_s=60.0)
    assert command.run(["stop", "--timeout", "0.3"]) == Exit.ERROR
    assert f"the daemon (pid {child.pid}) has not ended after 0.3 s" in capsys.readouterr().err
    assert command.run(["stop", "--timeout", "0"]) == 0
    assert "is stopping" in capsys.readouterr().out
    assert child.poll() is None


def test_stop_notices_a_daemon_that_is_killed_meanwhile(daemon) -> None:
    child = daemon(stop_s=60.0)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "aqd", "stop", "--timeout", "30"], stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: "anon_inode:[pidfd]" in descriptors(waiting.pid) or waiting.poll() is not None, 20)
    assert waiting.poll() is None
    child.kill()
    out, _ = waiting.communicate(timeout=20)
    # Killed before or after it had the command: either way the caller learns that there is none any more.
    assert (waiting.returncode, out) in ((0, "the daemon has ended\n"), (Exit.NOT_RUNNING, ""))


def descriptors(pid: int) -> list[str]:
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(entry.path))
        except OSError:
            continue
    return found


def test_ctrl_c_while_waiting_for_the_end(daemon) -> None:
    child = daemon(stop_s=60.0)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "aqd", "stop"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: "anon_inode:[pidfd]" in descriptors(waiting.pid), 20)
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=20) == ("", "")
    assert waiting.returncode == 130
    assert child.poll() is None


def test_a_daemon_that_does_not_answer(daemon, capsys, monkeypatch) -> None:
    from aqd.cli import daemon as module

    child = daemon()
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.3)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert command.run(["status"]) == Exit.NOT_RUNNING
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert "did not answer 'status' within 0.3 s" in capsys.readouterr().err
