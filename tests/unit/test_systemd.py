"""aqd.systemd against real sockets, and the unit files against systemd's own tools."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aqd import config, systemd

UNITS = Path(__file__).parents[2] / "systemd"
SERVICES = ("aqd.service", "aqd-api.service", "aqd@.service")


# --- sd_notify ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_notify_reaches_the_manager(tmp_path: Path, kind: str) -> None:
    name = str(tmp_path / "notify") if kind == "path" else f"@aqd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(5)
        assert systemd.notify("READY=1\nSTATUS=läuft", {"NOTIFY_SOCKET": name})
        assert manager.recv(4096).decode() == "READY=1\nSTATUS=läuft"


@pytest.mark.parametrize("address", ["", "/", "@", "relative", "vsock:2:1234", "/nonexistent/notify"])
def test_notify_without_a_manager_says_so(address: str) -> None:
    assert systemd.notify("READY=1", {"NOTIFY_SOCKET": address}) is False
    assert systemd.notify("READY=1", {}) is False


def test_notify_does_not_wait_for_a_manager_that_does_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        begin = time.monotonic()
        while systemd.notify("WATCHDOG=1", {"NOTIFY_SOCKET": path}):
            assert time.monotonic() - begin < 30
        begin = time.monotonic()
        assert not systemd.notify("WATCHDOG=1", {"NOTIFY_SOCKET": path})
        assert time.monotonic() - begin < 3


def test_notify_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    systemd.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "missing")})
    assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests have left may go meanwhile


def test_reloading_carries_a_monotonic_stamp() -> None:
    before = time.monotonic_ns() // 1000
    lines = dict(line.split("=") for line in systemd.reloading().splitlines())
    assert lines["RELOADING"] == "1"
    assert before <= int(lines["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "x"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval(environ: dict[str, str], wanted: float | None) -> None:
    environ = {**environ}
    if environ.get("WATCHDOG_PID", "1") not in ("1", "x"):
        environ["WATCHDOG_PID"] = str(os.getpid())  # xdist collects in another process than it runs
    assert systemd.watchdog_interval_s(environ) == wanted


def test_children_get_nothing_of_it() -> None:
    environ = {
        "NOTIFY_SOCKET": "/x",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "a",
        "PATH": "/bin",
        "JOURNAL_STREAM": "1:2",
    }
    systemd.strip_environment(environ)
    assert environ == {"PATH": "/bin", "JOURNAL_STREAM": "1:2"}


@pytest.mark.parametrize(
    ("fds", "pid", "wanted"),
    [
        ("1", "", 1),
        ("3", "", 3),
        ("0", "", 0),
        ("-1", "", 0),
        ("abc", "", 0),
        ("1.5", "", 0),
        (None, "", 0),
        ("1", "1", 0),
        ("1", "abc", 0),
        ("abc", "1", 0),
        ("1", None, 0),
    ],
)
def test_sockets_of_the_manager(fds: str | None, pid: str | None, wanted: int) -> None:
    """sd_listen_fds(3); "" stands for our own number."""
    given = {"LISTEN_FDS": fds, "LISTEN_PID": str(os.getpid()) if pid == "" else pid}
    assert systemd.listen_fds({name: text for name, text in given.items() if text is not None}) == wanted


def test_what_was_meant_for_another_process_is_forgotten() -> None:
    environ = {"LISTEN_FDS": "abc", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a", "NOTIFY_SOCKET": "/x"}
    systemd.forget_sockets(environ)
    assert environ == {"NOTIFY_SOCKET": "/x"}


# --- the units ------------------------------------------------------------------------------------


def settings(name: str) -> dict[str, list[str]]:
    """The settings of a unit: each may stand several times."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z]+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine (package systemd)")
    return path


def runnable(name: str, tmp_path: Path) -> Path:
    """A copy of the unit that verify can judge where aqd is not installed in /usr/bin."""
    text = (UNITS / name).read_text()
    if not os.access("/usr/bin/aqd", os.X_OK):
        text = text.replace("=/usr/bin/aqd ", f"={sys.executable} ")
    copy = tmp_path / name
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("name", SERVICES)
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    analyze = tool("systemd-analyze")
    command = [analyze, "verify", "--man=no", "--recursive-errors=no"]
    good = runnable(name, tmp_path)
    result = subprocess.run([*command, good], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")

    bad = tmp_path / "bad.service"
    bad.write_text(good.read_text().replace("KillMode=mixed", "KillMood=mixed"))
    result = subprocess.run([*command, bad], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0, "verify would not notice a misspelt setting"


@pytest.mark.parametrize("name", SERVICES)
def test_the_unit_is_hardened(tmp_path: Path, name: str) -> None:
    command = [tool("systemd-analyze"), "security", "--offline=true", "--threshold=20"]
    result = subprocess.run(
        [*command, runnable(name, tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr


@pytest.mark.parametrize("name", ["aqd.service", "aqd-api.service"])
def test_each_hardening_line_is_explained(name: str) -> None:
    hardening = (UNITS / name).read_text().split("# --- Hardening")[1].split("[Install]")[0]
    lines, comment = [], False
    for line in hardening.splitlines()[1:]:
        if line.startswith("#"):
            comment = True
        elif not line:
            comment = False
        else:
            assert comment, f"{line}: no comment above it"
            lines.append(line)
    assert len(lines) > 15


def test_the_daemons_unit_fits_the_daemon() -> None:
    unit = settings("aqd.service")
    defaults = config.Config().daemon
    assert unit["Type"] == ["notify"]
    assert unit["NotifyAccess"] == ["main"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["OOMPolicy"] == ["continue"]
    assert unit["ExecReload"] == ["/usr/bin/aqd reload"]
    assert unit["User"] == unit["Group"] == ["aqd"]
    assert int(unit["TimeoutStopSec"][0]) > defaults.drain_s + defaults.kill_grace_s + 10
    assert int(unit["WatchdogSec"][0]) >= 10
    for directory in ("RuntimeDirectory", "StateDirectory", "LogsDirectory", "ConfigurationDirectory"):
        assert unit[directory] == ["aqd"]
    # ctypes and just-in-time compilers in handlers would die of these.
    assert "MemoryDenyWriteExecute" not in unit
    assert "ProcSubset" not in unit, "the boot id is read below /proc/sys"


def test_an_instance_is_the_daemon_under_other_names() -> None:
    one, several = settings("aqd.service"), settings("aqd@.service")
    differ = {name for name in one.keys() | several.keys() if one.get(name) != several.get(name)}
    assert differ == {
        "Description",
        "Environment",
        "EnvironmentFile",
        "WorkingDirectory",
        "RuntimeDirectory",
    } | {
        "StateDirectory",
        "LogsDirectory",
    }
    for name in ("RuntimeDirectory", "StateDirectory", "LogsDirectory"):
        assert several[name][0].split()[0] == "aqd-%i", "what is below /run/aqd goes when aqd.service stops"


def test_the_services_unit_is_its_own() -> None:
    unit = settings("aqd-api.service")
    assert unit["RuntimeDirectory"] == ["aqd-api"], "a shared one would be removed when either stops"
    assert unit["KillMode"] == ["mixed"]
    assert int(unit["TimeoutStopSec"][0]) > config.Config().api.request_timeout_s


@pytest.mark.parametrize("name", SERVICES)
def test_a_refused_configuration_is_not_tried_again(name: str) -> None:
    from aqd.errors import Exit

    codes = settings(name)["RestartPreventExitStatus"][0].split()
    assert str(int(Exit.CONFIG)) in codes
    assert name == "aqd-api.service" or {str(int(Exit.RUNNING)), str(int(Exit.DATABASE))} < set(codes)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make users")
def test_user_and_directories_can_be_made(tmp_path: Path) -> None:
    for name in ("etc", "var/lib"):
        (tmp_path / name).mkdir(parents=True)
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    for command in (
        [sysusers, f"--root={tmp_path}", UNITS / "aqd.sysusers"],
        [tmpfiles, f"--root={tmp_path}", "--create", UNITS / "aqd.tmpfiles"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
    entry = next(
        line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("aqd:")
    )
    uid, home = int(entry.split(":")[2]), entry.split(":")[5]
    assert home == "/var/lib/aqd"
    made = (tmp_path / "var/lib/aqd/pdf").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (uid, 0o750)
