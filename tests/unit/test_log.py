"""aqd.log on real pipes, terminals, sockets and files, in real processes."""

import contextlib
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqd import log

pytestmark = pytest.mark.usefixtures("restored_log")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def records(data: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in data.splitlines()]


def one(pipe: tuple[int, int]) -> dict[str, object]:
    data = os.read(pipe[0], 1 << 16)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    return json.loads(data)


# --- the line -------------------------------------------------------------------------------------


def test_json_elsewhere_than_on_a_terminal(pipe) -> None:
    log.configure("info", "auto", process="master", fd=pipe[1], stdlib=False)
    log.get_logger("aqd.master").warning("worker exited", slot=0, signal="SIGKILL", ok=None, wall_s=0.5)
    record = one(pipe)
    at = record.pop("at")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", str(at))
    assert record == {
        "level": "warning",
        "process": "master",
        "pid": os.getpid(),
        "event": "worker exited",
        "slot": 0,
        "signal": "SIGKILL",
        "ok": None,
        "wall_s": 0.5,
    }


def test_human_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    master, slave = pty.openpty()
    try:
        log.configure("info", "auto", process="master", fd=slave, stdlib=False)
        log.get_logger("master").info(
            "worker exited", slot=0, pid=12, signal="SIGKILL", why="it was told to", job_id=None
        )
        log.get_logger("keeper").error("x")
        text = os.read(master, 4096).decode()
        while text.count("\n") < 2:
            text += os.read(master, 4096).decode()
    finally:
        os.close(slave)
        os.close(master)
    first, second = text.splitlines()
    wanted = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO  master  worker exited  slot=0 pid=12 signal=SIGKILL why="it was told to"'
    assert re.fullmatch(wanted, first)
    assert second.endswith("ERROR master/keeper  x")


def test_colour_only_where_wanted(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    try:
        log.configure("info", "auto", process="master", fd=slave, stdlib=False)
        log.get_logger("master").error("x")
        assert b"\033[31mERROR\033[0m master" in os.read(master, 4096)
    finally:
        os.close(slave)
        os.close(master)


def test_levels(pipe) -> None:
    log.configure("warning", "json", process="p", fd=pipe[1], stdlib=False)
    logger = log.get_logger("p")
    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    logger.error("d")
    assert [r["event"] for r in records(os.read(pipe[0], 1 << 16))] == ["c", "d"]
    log.configure("debug", "json", process="p", fd=pipe[1], stdlib=False)
    logger.debug("e")
    assert one(pipe)["level"] == "debug"


def test_bound_fields_and_context(pipe) -> None:
    log.configure("info", "json", process="worker", fd=pipe[1], stdlib=False)
    log.context(slot=3)
    log.get_logger("worker").bind(job="17").info("begins", attempt=2)
    record = one(pipe)
    assert (record["slot"], record["job"], record["attempt"]) == (3, "17", 2)
    log.context()
    log.get_logger("worker").info("x")
    assert "slot" not in one(pipe)


def test_fields_cannot_replace_the_logs_own(pipe) -> None:
    log.configure("info", "json", process="worker", fd=pipe[1], stdlib=False)
    log.get_logger("worker").info("x", at="y", level="z", process="q", pid=1, event="e")
    record = one(pipe)
    assert (record["level"], record["process"], record["pid"], record["event"]) == (
        "info",
        "worker",
        os.getpid(),
        "x",
    )
    assert record["pid_"] == 1


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("format", ["human", "json"])
@pytest.mark.parametrize(
    "value",
    [
        "two\nlines",
        "\033[2J\033]0;title\007",
        "a\u2028b\u202ec\x9b31m",
        "\ud800",
        "\0",
        b"\xff\x00",
        1 << 200,
        float("nan"),
        float("inf"),
        {"k": {1, 2}},
        {1: object()},
        ValueError("several\nlines"),
        Unprintable(),
        Path("/x"),
        "é" * 5000,
        ["x" * 3000] * 100,
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_it_is_given_it_writes_one_printable_line(pipe, format: str, value: object) -> None:
    log.configure("info", format, process="worker", fd=pipe[1], stdlib=False)
    log.get_logger("worker").info("x", value=value, after=7)
    data = os.read(pipe[0], 1 << 16)
    text = data.decode()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert len(data) <= log.MAX_LINE
    if format == "human":
        assert text[:-1].isprintable(), "the terminal could be controlled, or a line forged"
    else:
        assert json.loads(text)["event"] == "x"
    assert log.dropped() == 0


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(
    event=st.text(st.characters(), max_size=6000),
    fields=st.dictionaries(st.text(max_size=300), _values, max_size=60),
    format=st.sampled_from(["human", "json"]),
)
def test_any_event_is_one_line_that_fits(event: str, fields: dict[str, object], format: str) -> None:
    reader, writer = os.pipe()
    try:
        log.configure("info", format, process="p", fd=writer, stdlib=False)
        log.get_logger("p").bind(**fields).info(event)
        data = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
        os.close(writer)
    assert 0 < len(data) <= log.MAX_LINE
    assert data.endswith(b"\n")
    text = data.decode()
    if format == "json":
        assert isinstance(json.loads(text), dict)
        assert data.count(b"\n") == 1
    else:
        assert text[:-1].isprintable()


def test_a_long_traceback_keeps_its_end(pipe) -> None:
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    log.get_logger("p").error(
        "failed", job="17", traceback="first\n" + "middle\n" * 3000 + "ValueError: last", after=1
    )
    record = one(pipe)
    trace = str(record["traceback"])
    assert trace.startswith("first")
    assert trace.endswith("ValueError: last")
    assert (record["job"], record["after"]) == ("17", 1)


@pytest.mark.parametrize("format", ["human", "json"])
def test_passwords_in_urls_are_masked_everywhere(pipe, format: str) -> None:
    log.configure("info", format, process="p", fd=pipe[1], stdlib=True)
    url = "postgresql://u:hunter2@h/d"
    log.get_logger("p").info(
        f"connect to {url}", url=url, nested={"a": [url]}, error=OSError(url), raw=url.encode()
    )
    logging.getLogger("lib").warning("connect to %s failed", url)
    data = os.read(pipe[0], 1 << 16)
    assert b"hunter2" not in data
    assert data.count(b"***") == 6


def test_an_exception_in_flight(pipe) -> None:
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.get_logger("p").exception("failed", job="1")
    record = one(pipe)
    assert record["error"] == "ValueError: bad value"
    assert "test_log.py" in str(record["traceback"])


# --- never in the way -----------------------------------------------------------------------------


def fill(fd: int) -> int:
    """Fill a pipe through a second, non-blocking opening; returns the number of bytes."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    filled = 0
    try:
        while True:
            filled += os.write(other, b"x" * 4096)
    except BlockingIOError:
        return filled
    finally:
        os.close(other)


@pytest.mark.timeout(20)
def test_a_full_pipe_does_not_block_and_drops_are_counted(pipe) -> None:
    reader, writer = pipe
    log.configure("info", "json", process="p", fd=writer, stdlib=False)
    logger = log.get_logger("p")
    filled = fill(writer)
    begin = time.monotonic()
    for number in range(500):
        logger.info("lost", number=number)
    assert time.monotonic() - begin < 5
    assert log.dropped() == 500
    while filled:
        filled -= len(os.read(reader, filled))
    logger.info("back")
    record = one(pipe)
    assert (record["event"], record["dropped"]) == ("back", 500)
    logger.info("again")
    assert "dropped" not in one(pipe)


def test_the_shared_descriptor_stays_blocking(pipe) -> None:
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    log.get_logger("p").info("x")
    assert os.get_blocking(pipe[1])
    assert os.get_inheritable(log.descriptor() or -1) is False


@pytest.mark.timeout(20)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a pipe that another user cannot open")
def test_a_pipe_that_cannot_be_opened_again_does_not_block_either() -> None:
    """A process that has changed its user may not open its own standard error by name."""
    program = """
        import os, time
        from aqd import log
        os.setuid(64_999)
        log.configure("info", "json", process="p", stdlib=False)
        try:
            os.open("/proc/self/fd/2", os.O_WRONLY)
        except PermissionError:
            print("shared", flush=True)
        for number in range(2000):
            log.get_logger("p").info("x", filler="y" * 200)
        print("went on", log.dropped() > 0, flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read().splitlines() == ["shared", "went on True"], (
            "nobody reads its standard error"
        )
    finally:
        child.kill()
        child.communicate()


@pytest.mark.timeout(20)
def test_a_stopped_terminal_does_not_block() -> None:
    """As after Ctrl-S: nobody reads the other side."""
    master, slave = pty.openpty()
    try:
        log.configure("info", "human", process="p", fd=slave, stdlib=False)
        for _ in range(5000):
            log.get_logger("p").info("x" * 200)
        assert log.dropped() > 0
    finally:
        os.close(slave)
        os.close(master)


def test_a_reader_that_has_gone_does_not_kill(pipe) -> None:
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    os.close(pipe[0])
    log.get_logger("p").info("x")
    assert log.dropped() == 1


def test_a_process_without_standard_error_goes_on() -> None:
    program = "import os; os.close(2); from aqd import log; log.configure('info', 'auto', process='p'); " + (
        "log.get_logger('p').info('x'); print('alive')"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"alive\n"
    )


def test_a_full_disk_does_not_raise(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the write fails or is short in the same way."""
    path = tmp_path / "log"
    program = f"""
        import resource, signal
        from aqd import log
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        file = open({str(path)!r}, "wb")
        log.configure("info", "json", process="p", fd=file.fileno(), stdlib=False)
        for _ in range(50):
            log.get_logger("p").info("x")
        print(log.dropped())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True)
    assert int(done.stdout) > 30
    assert path.stat().st_size <= 1000


def test_a_regular_file_is_shared_with_others(tmp_path: Path) -> None:
    """`aqd run 2> file` opens without O_APPEND: the offset must stay one for all."""
    with open(tmp_path / "log", "wb") as file:
        log.configure("info", "json", process="p", fd=file.fileno(), stdlib=False)
        log.get_logger("p").info("first")
        os.write(file.fileno(), b"between\n")
        log.get_logger("p").info("second")
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert [b"first" in lines[0], lines[1], b"second" in lines[2]] == [True, b"between", True]


def test_it_follows_its_own_descriptor(tmp_path: Path, pipe) -> None:
    """A worker's standard error is redirected after the log was set up."""
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    with open(tmp_path / "other", "wb") as other:
        os.dup2(other.fileno(), pipe[1])
    log.get_logger("p").info("x")
    assert one(pipe)["event"] == "x"
    assert (tmp_path / "other").read_bytes() == b""


def test_configuring_again_leaks_no_descriptor(pipe) -> None:
    log.configure("info", "json", process="p", fd=pipe[1], stdlib=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        log.configure("debug", "json", process="p", fd=pipe[1], stdlib=False)
    assert len(os.listdir("/proc/self/fd")) <= before  # what earlier tests have left may go meanwhile


# --- several processes and threads ----------------------------------------------------------------


@pytest.mark.timeout(60)
def test_lines_of_several_processes_and_threads_do_not_mix(pipe, tmp_path: Path) -> None:
    reader, writer = pipe
    log.configure("info", "json", process="p", fd=writer, stdlib=False)
    lines, workers = 300, 4
    # A process of its own: a thread of this one would read too slowly on a busy machine.
    with (tmp_path / "received").open("wb") as file:
        collector = subprocess.Popen(["cat"], stdin=reader, stdout=file)
    pids = []
    for _ in range(workers):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(lines):
                    log.get_logger("p").info("x", number=number, filler="y" * 3000)
                log.get_logger("p").info("end", lost=log.dropped())
            finally:
                os._exit(0)
        pids.append(pid)
    threads = [
        threading.Thread(target=lambda: [log.get_logger("p").info("x", number=n) for n in range(lines)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    log.configure("info", "json", process="p", fd=2, stdlib=False)
    os.close(writer)
    assert collector.wait(30) == 0
    found = records((tmp_path / "received").read_bytes())  # each line is whole, or json would refuse it
    written = len([r for r in found if r["event"] == "x"])
    lost = sum(int(str(r.get("dropped", 0))) for r in found)
    assert written + lost <= (workers + 2) * lines + workers
    assert written > lines
    assert len({r["pid"] for r in found}) == workers + 1


def test_a_forked_child_does_not_report_its_parents_losses(pipe) -> None:
    reader, writer = pipe
    log.configure("info", "json", process="p", fd=writer, stdlib=False)
    filled = fill(writer)
    log.get_logger("p").info("lost")
    while filled:
        filled -= len(os.read(reader, filled))
    pid = os.fork()
    if pid == 0:
        log.get_logger("p").info("child")
        os._exit(0)
    os.waitpid(pid, 0)
    child = one(pipe)
    assert child["pid"] == pid
    assert "dropped" not in child
    log.get_logger("p").info("parent")
    assert one(pipe)["dropped"] == 1


def test_a_forked_child_goes_on_under_its_own_name(pipe) -> None:
    log.configure("info", "json", process="loader", fd=pipe[1])
    before = logging.getLogger().handlers[:]
    logging.getLogger().handlers[:] = []  # a plugin's own idea of logging
    pid = os.fork()
    if pid == 0:
        log.rename("worker 3")
        logging.getLogger("lib").warning("child")
        os._exit(0)
    logging.getLogger().handlers[:] = before
    os.waitpid(pid, 0)
    assert (one(pipe) | {"at": ""}) == {
        "at": "",
        "level": "warning",
        "process": "worker 3",
        "pid": pid,
        "logger": "lib",
        "event": "child",
    }
    log.get_logger("loader").info("parent")
    assert one(pipe)["process"] == "loader"


@pytest.mark.timeout(60)
def test_forking_while_other_threads_log_never_deadlocks(pipe) -> None:
    """With a lock, a child forked at the wrong moment would wait for ever."""
    writer = pipe[1]
    log.configure("info", "json", process="p", fd=writer, stdlib=True)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            logging.getLogger("lib").warning("x")

    threads = [threading.Thread(target=chatter) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads, on purpose
                pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                logging.getLogger("lib").warning("child")
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- the standard library's logging ---------------------------------------------------------------


def test_libraries_and_handlers_are_routed_here(pipe) -> None:
    log.configure("info", "json", process="worker", fd=pipe[1])
    log.configure("info", "json", process="worker", fd=pipe[1])
    log.context(slot=2)
    adapter = logging.LoggerAdapter(logging.getLogger("aqd.job"), {"job": "17", "type": "mail", "attempt": 1})
    adapter.info("sent to %s", "nobody")
    record = one(pipe)
    assert (record["event"], record["logger"], record["level"]) == ("sent to nobody", "job", "info")
    assert (record["job"], record["type"], record["attempt"], record["slot"]) == ("17", "mail", 1, 2)
    logging.getLogger("lib").debug("not at this level")
    logging.getLogger("lib").critical("bad %d", "format")
    record = one(pipe)
    assert record["level"] == "error"
    assert "cannot be formatted" in str(record["event"])
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("lib").exception("failed")
    record = one(pipe)
    assert record["error"] == "KeyError: 'k'"
    assert "Traceback" in str(record["traceback"])


def test_warnings_are_routed_here(pipe) -> None:
    log.configure("info", "json", process="worker", fd=pipe[1])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "DeprecationWarning: old" in str(one(pipe)["event"])


def test_an_uncaught_exception_is_one_line() -> None:
    program = (
        "from aqd import log; log.configure('info', 'json', process='loader'); log.install_excepthook(); "
        "raise RuntimeError('boom')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    (record,) = records(done.stderr)
    assert done.returncode == 1
    assert (record["event"], record["error"]) == ("uncaught exception", "RuntimeError: boom")
