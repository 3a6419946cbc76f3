"""aqd.log where standard error is the journal: the native protocol (aqd.journald) and its stream, on real sockets."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from aqd import channel, dispatcher, journald, loader, log, process
from aqd.worker import Worker

pytestmark = pytest.mark.usefixtures("restored_log")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(what journald reads, what systemd makes standard error), and no other way to journald."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(journald, "SOCKET", str(tmp_path / "socket"))
    with reader, writer:
        status = os.fstat(writer.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        yield reader, writer


@pytest.fixture
def native(stream, tmp_path: Path) -> Iterator[socket.socket]:
    """The socket on which journald takes entries."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(journald.SOCKET)
        sock.settimeout(5)
        yield sock


def entry(data: bytes) -> dict[str, str]:
    """An entry of the native protocol, read as its description says."""
    fields = {}
    while data:
        name, _, rest = data.partition(b"\n")
        if b"=" in name:
            key, _, value = name.partition(b"=")
            data = rest
        else:
            key, length = name, int.from_bytes(rest[:8], "little")
            value, data = rest[8 : 8 + length], rest[9 + length :]
            assert rest[8 + length : 9 + length] == b"\n"
        fields[key.decode()] = value.decode()
    return fields


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("format", "begins"), [("auto", "p  a"), ("json", "{")])
def test_a_stream_as_journald_gives_one(stream, format: str, begins: str) -> None:
    reader, writer = stream
    log.configure("debug", format, process="p", fd=writer.fileno(), stdlib=False)
    logger = log.get_logger("p")
    logger.error("a", x=1)
    logger.info("b")
    lines = reader.recv(1 << 16).decode().splitlines()
    assert [line[:3] for line in lines] == ["<3>", "<6>"]
    assert lines[0][3:].startswith(begins)
    for _ in range(20_000):
        logger.info("x", filler="y" * 100)
    assert log.dropped() > 0
    reader.close()
    logger.info("nobody there")
    assert writer.getblocking()


def test_an_entry_with_fields(stream, native) -> None:
    log.configure("debug", "auto", process="worker 0", fd=stream[1].fileno(), stdlib=False)
    log.context(slot=0, job_id="4711", type="mail", attempt=2)
    log.get_logger("job").warning("no \x1b paper", pages=[1, 2], event="mine", _x="no", größe=1, none=None)
    assert entry(native.recv(1 << 16)) == {
        "MESSAGE": "worker 0/job  no \\x1b paper  slot=0 job_id=4711 type=mail attempt=2 pages=[1,2] event=mine"
        " _x=no größe=1",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "aqd",
        "AQD_PROCESS": "worker 0",
        "AQD_LOGGER": "job",
        "AQD_EVENT": "no \x1b paper",
        "AQD_EVENT_": "mine",
        "AQD_SLOT": "0",
        "AQD_JOB_ID": "4711",
        "AQD_TYPE": "mail",
        "AQD_ATTEMPT": "2",
        "AQD_PAGES": "[1,2]",
    }


@pytest.mark.parametrize(("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3)])
def test_priorities(stream, native, level: str, priority: int) -> None:
    log.configure("debug", "json", process="p", fd=stream[1].fileno(), stdlib=False)
    getattr(log.get_logger("p"), level)("x")
    fields = entry(native.recv(1 << 16))
    assert fields["PRIORITY"] == str(priority)
    assert json.loads(fields["MESSAGE"])["event"] == "x"


def test_a_traceback_stands_below_the_message(stream, native) -> None:
    log.configure("info", "auto", process="p", fd=stream[1].fileno(), stdlib=False)
    try:
        raise ValueError("one\n\x1b[2Jtwo")
    except ValueError:
        log.get_logger("p").exception("it fails")
    fields = entry(native.recv(1 << 16))
    first, *below = fields["MESSAGE"].split("\n")
    assert first == 'p  it fails  error="ValueError: one \\u001b[2Jtwo"'
    assert below[0] == "Traceback (most recent call last):"
    assert below[-2:] == ["ValueError: one", "\\x1b[2Jtwo"]
    assert fields["AQD_TRACEBACK"].endswith("\x1b[2Jtwo\n")


# What a handler may raise: long, and of characters that take more room as they are shown.
TEXTS = ["y" * 200_000, "y\n" * 100_000, "\x1b" * 200_000, "\U000e0001" * 50_000, "ü" * 100_000]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("format", ["auto", "json"])
def test_a_long_traceback_is_shortened_and_its_end_is_kept(stream, native, format: str, text: str) -> None:
    log.configure("info", format, process="p", fd=stream[1].fileno(), stdlib=False)
    stack = f"Stack:\n{text}\nits end"
    try:
        raise ValueError(f"{text}\nthis matters")
    except ValueError:
        log.get_logger("p").exception("it fails", stack=stack)
    fields = entry(native.recv(1 << 20))
    assert fields["AQD_TRACEBACK"].startswith("Traceback (most recent call last):\n")
    assert fields["AQD_TRACEBACK"].endswith("this matters\n")
    assert fields["AQD_STACK"].endswith("its end")
    if format == "json":
        assert json.loads(fields["MESSAGE"])["event"] == "it fails"
        return
    first, *below = fields["MESSAGE"].split("\n")
    assert first.startswith("p  it fails  error=")
    assert len(first) <= log.MAX_LINE
    assert below[0] == "Traceback (most recent call last):"
    assert [line for line in below if line == "this matters" or line == "Stack:"] == [
        "this matters",
        "Stack:",
    ]
    assert below[-1] == "its end"


def test_the_message_is_never_left_out() -> None:
    fields = entry(journald.encode([("MESSAGE", "ü" * 100_000), ("PRIORITY", "3"), ("AQD_X", "x")]))
    assert fields["MESSAGE"] == "ü" * len(fields["MESSAGE"])
    assert len(fields["MESSAGE"].encode()) > journald.MAX_ENTRY - 100
    assert len(journald.encode([("MESSAGE", "y" * 100_000)])) <= journald.MAX_ENTRY


@pytest.mark.parametrize("format", ["auto", "json"])
def test_the_other_way_has_the_traceback_too(stream, format: str) -> None:
    log.configure("info", format, process="p", fd=stream[1].fileno(), stdlib=False)
    logger = log.get_logger("p")
    try:
        raise ValueError("x" * 100_000 + "this matters")
    except ValueError:
        logger.exception("it fails", error="short")
    (line,) = stream[0].recv(1 << 16).decode().splitlines()
    assert len(line) <= log.MAX_LINE + len("<3>")
    assert "it fails" in line
    assert "Traceback (most recent call last):" in line
    assert "this matters" in line


def test_an_entry_has_its_bounds(stream, native) -> None:
    log.configure("info", "auto", process="p", fd=stream[1].fileno(), stdlib=False)
    log.get_logger("p").info("x", small=1, large="y\n" * 100_000, **{f"k{n}": "z" * 1000 for n in range(200)})
    data = native.recv(1 << 20)
    fields = entry(data)
    assert len(data) <= journald.MAX_ENTRY
    assert len(fields["MESSAGE"].encode()) <= log.MAX_LINE
    assert fields["AQD_SMALL"] == "1"
    assert "AQD_LARGE" not in fields


@pytest.mark.timeout(20)
def test_when_the_queue_is_full_what_matters_takes_the_other_way(stream, native) -> None:
    log.configure("info", "auto", process="p", fd=stream[1].fileno(), stdlib=False)
    logger = log.get_logger("p")
    while log.dropped() == 0:
        logger.info("flood")
    logger.error("this matters", job_id="1")
    assert stream[0].recv(1 << 16).decode().startswith("<3>p  this matters  job_id=1 dropped=1")
    stream[0].setblocking(False)
    logger.info("flood")
    with pytest.raises(BlockingIOError):
        stream[0].recv(1)


def test_a_fork_under_a_name_of_its_own_has_a_way_of_its_own(stream, native) -> None:
    log.configure("info", "auto", process="loader", fd=stream[1].fileno(), stdlib=False)
    before = len(os.listdir("/proc/self/fd"))
    parents = log._state.journal
    log.rename("worker 3")
    log.get_logger("job").info("x")
    assert entry(native.recv(1 << 16))["AQD_PROCESS"] == "worker 3"
    assert log._state.journal is not parents
    assert len(os.listdir("/proc/self/fd")) <= before  # what earlier tests have left may go meanwhile


@pytest.mark.timeout(60)
def test_a_process_can_wait_until_its_last_words_are_read(
    stream, native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SETTLE_S", 50.0)
    log.configure("info", "auto", process="p", fd=stream[1].fileno(), stdlib=False)
    log.settle()  # nothing is unread
    log.get_logger("p").error("one")
    log.get_logger("p").error("two")
    waiting = threading.Thread(target=log.settle, daemon=True)
    waiting.start()
    native.recv(1 << 16)
    waiting.join(0.1)
    assert waiting.is_alive()
    native.recv(1 << 16)
    waiting.join(20)
    assert not waiting.is_alive()
    log.get_logger("p").error("three")
    monkeypatch.setattr(log, "SETTLE_S", 0.01)
    log.settle()  # and no longer than that
    assert entry(native.recv(1 << 16))["AQD_EVENT"] == "three"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["worker", "loader", "dispatcher"])
def test_last_words_are_waited_for(stream, native, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Each of them failing at its very beginning."""
    monkeypatch.setattr(log, "SETTLE_S", 50.0)
    pid = os.fork()
    if pid == 0:
        try:
            log.configure("info", "auto", process=role, fd=stream[1].fileno(), stdlib=False)
            monkeypatch.setattr(sys, "argv", ["x", str(os.getppid())])
            ours, theirs = channel.pair()
            channel.send(ours, b"no message")
            monkeypatch.setattr(process, "FIRST_PASSED_FD", theirs.fileno())
            if role == "worker":
                worker = Worker.__new__(Worker)
                worker.pid, worker.master_pid, worker.page = os.getpid(), os.getppid(), SimpleNamespace()
                worker.run()
            (loader if role == "loader" else dispatcher).main()
        finally:
            os._exit(99)
    ended = os.pidfd_open(pid)
    try:
        assert select.select([native], [], [], 20)[0]
        assert not select.select([ended], [], [], 0.3)[0]
        assert entry(native.recv(1 << 16))["AQD_EVENT"] == f"{role} fails"
        assert select.select([ended], [], [], 20)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(ended)
    assert os.waitstatus_to_exitcode(status) not in (99, -signal.SIGKILL)


def test_errors_of_the_command_line_are_errors_in_the_journal(stream, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aqd", "-c", str(tmp_path / "missing.toml"), "config", "show"]
    done = subprocess.run(command, stderr=stream[1], env=dict(os.environ), check=False, timeout=30)
    assert done.returncode
    said = stream[0].recv(1 << 16).decode()
    assert said.startswith("<3>aqd: ")
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=30)
    assert done.stderr == said.removeprefix("<3>")
