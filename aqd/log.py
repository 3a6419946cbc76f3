"""The log: one line an event, on the process's standard error, never in anybody's way.

Used by every process. ``configure`` once, then ``get_logger(name).info("worker exited", slot=0, pid=12)``.
Human on a terminal::

    2026-11-29 17:40:01 INFO  master  worker exited  slot=0 pid=12 signal=SIGKILL

one JSON object a line otherwise (keys ``at level process pid event``, then the fields), and where standard
error is systemd's journal an entry whose fields can be asked for: ``AQD_JOB_ID`` and so on (:mod:`aqd.journald`).

Promises: never blocks, never raises, takes no lock, starts no thread, survives fork (STYLE 2: the master
forks and must not wait for whoever reads its log). A line is one write of at most 4096 bytes, which a
pipe takes whole or not at all (PIPE_BUF, pipe(7)), so lines of several processes do not mix. A line that
cannot be written is dropped and counted, and the next one that can says ``dropped=n``. What is too long
is shortened value by value, so that a line stays a whole JSON object. When the journal's queue of entries is
full, warnings and errors take the other way, the stream, which a flood of lesser lines leaves free. Passwords in URLs and conninfo
strings are masked; other secrets are the caller's duty.

Blocking is avoided where the descriptor leads: a pipe or terminal is opened anew, so that O_NONBLOCK
stays ours and does not change the descriptor that children and the shell share; a socket (journald) is
sent to with MSG_DONTWAIT; where a second opening is forbidden, poll(2) is asked first.
"""

import contextlib
import copy
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aqd import journald
from aqd.options import mask

if TYPE_CHECKING:
    import logging
    from types import TracebackType

MAX_LINE = 4096
SETTLE_S = 0.5  # at most
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_WORDS = {"debug": "DEBUG", "info": "INFO ", "warning": "WARN ", "error": "ERROR"}
_COLOURS = {"debug": "\033[2m", "warning": "\033[33m", "error": "\033[31m"}
# What the journal shows as lines of their own, below the event, and how many bytes of each: an entry has them twice,
# as shown and as a field.
_LONG = ("traceback", "stack")
_MAX_LONG = 12 << 10
_OWN_KEYS = frozenset(("at", "level", "process", "pid", "logger", "event", "dropped", "cut"))


# --- where lines go -------------------------------------------------------------------------------


class _Sink(Protocol):
    @property
    def fd(self) -> int: ...

    def write(self, line: bytes) -> bool:
        """Write the whole line without waiting; False when it could not be."""

    def close(self) -> None: ...


class _Descriptor:
    """A descriptor of our own that is non-blocking, or a regular file, which never waits for a reader."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    def write(self, line: bytes) -> bool:
        try:
            written = os.write(self.fd, line)
            if written < len(line):  # a terminal or a full disk took a part: try to end the line
                os.write(self.fd, b"\n")
        except OSError:
            return False
        return written == len(line)

    def close(self) -> None:
        os.close(self.fd)


class _Polled(_Descriptor):
    """A descriptor that others share and that may block: written to only when poll says there is room."""

    def write(self, line: bytes) -> bool:
        try:
            poll = select.poll()
            poll.register(self.fd, select.POLLOUT)
            if not any(events & select.POLLOUT for _, events in poll.poll(0)):
                return False
        except OSError:
            return False
        return super().write(line)


class _Socket:
    """A socket such as journald's."""

    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=fd)

    def write(self, line: bytes) -> bool:
        try:
            return self.sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(line)
        except OSError:
            return False

    def close(self) -> None:
        self.sock.close()

    @property
    def fd(self) -> int:
        return self.sock.fileno()


class _Nowhere:
    """Standard error was closed when we started. Its number may lead anywhere later (to the database, for
    one), so it is never written to."""

    fd = -1

    def write(self, line: bytes) -> bool:  # noqa: ARG002
        return False

    def close(self) -> None:
        pass


def _open_sink(fd: int) -> _Sink:
    """A sink that leads where ``fd`` leads; ``fd`` itself may be closed or redirected afterwards."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return _Socket(os.dup(fd))
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_APPEND | os.O_CLOEXEC
        try:
            return _Descriptor(os.open(f"/proc/self/fd/{fd}", flags))
        except OSError:  # no /proc, or the pipe belongs to the user that we were before
            return _Polled(os.dup(fd))
    return _Descriptor(os.dup(fd))  # not opened anew: the offset must stay shared


# --- state of this process ------------------------------------------------------------------------


class _State:
    """What ``configure`` set. Replaced as a whole, so that a signal handler sees one or the other."""

    def __init__(self, level: str, human: bool, process: str, sink: _Sink | None) -> None:
        self.threshold = LEVELS[level]
        self.human = human
        self.process = process
        self.sink = sink
        self.colour = False
        self.stream = False  # the sink is the journal's stream
        self.journal: journald.Journal | None = None


_UNCONFIGURED = _Polled(2)
_state = _State("info", True, "aqd", None)
_context: dict[str, Any] = {}
_dropped = 0
_dropped_pid = 0


def configure(level: str, format: str, *, process: str, fd: int = 2, stdlib: bool = True) -> None:
    """Set this process's log. May be called again (after a reload, in a forked worker).

    ``format`` ``"auto"`` means human on a terminal and in the journal, and JSON elsewhere. ``process`` is the role
    (``"master"``, ``"worker"``, …). ``fd`` is where the lines go: the descriptor is duplicated, so a
    worker may redirect its standard error afterwards. With ``stdlib`` the standard library's logging
    (libraries, handlers' loggers) is routed here too.
    """
    global _state
    try:
        sink = _open_sink(fd)
        tty = os.isatty(fd)
        stream = journald.is_stream(fd)
    except OSError:
        sink, tty, stream = _Nowhere(), False, False
    new = _State(level, format == "human" or (format == "auto" and (tty or stream)), process, sink)
    new.colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    new.stream = stream
    if stream:
        new.journal = journald.Journal()
    old, _state = _state, new
    for way in (old.sink, old.journal):
        if way is not None:
            way.close()
    if stdlib:
        route_stdlib()


def rename(process: str) -> None:
    """For a process that was forked from one with a log, and goes on with it under a name of its own."""
    global _state
    new = copy.copy(_state)
    new.process = process
    if new.journal is not None:  # of its own, so that a flood fills its writer's queue only
        new.journal.close()
        new.journal = journald.Journal()
    _state = new
    route_stdlib()


def context(**fields: Any) -> None:
    """Fields put on every line of this process from now on, also on libraries' lines (a worker sets slot
    and generation, then job, type and attempt while it is on one). Replaces the former context."""
    global _context
    _context = fields


def settle() -> None:
    """Before os._exit: the journal knows the unit of a line whose writer is still there when the line is read."""
    if _state.journal is not None:
        with contextlib.suppress(BaseException):  # of a job's signal handlers too: nothing keeps the end
            _state.journal.wait_read(SETTLE_S)


def descriptor() -> int | None:
    """The log's own descriptor, for whoever closes all others after a fork; None without a log."""
    return _state.sink.fd if _state.sink is not None and _state.sink.fd >= 0 else None


def dropped() -> int:
    """How many lines this process could not write since the last one that it could."""
    return _dropped if _dropped_pid == os.getpid() else 0


# --- loggers --------------------------------------------------------------------------------------


class Logger:
    """Writes events of one part of a process. ``bind`` gives a logger with fields of its own."""

    __slots__ = ("_fields", "name")

    def __init__(self, name: str, fields: dict[str, Any] | None = None) -> None:
        self.name = name
        self._fields = fields or {}

    def bind(self, **fields: Any) -> "Logger":
        return Logger(self.name, {**self._fields, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        _emit("debug", self.name, event, {**self._fields, **fields})

    def info(self, event: str, /, **fields: Any) -> None:
        _emit("info", self.name, event, {**self._fields, **fields})

    def warning(self, event: str, /, **fields: Any) -> None:
        _emit("warning", self.name, event, {**self._fields, **fields})

    def error(self, event: str, /, **fields: Any) -> None:
        _emit("error", self.name, event, {**self._fields, **fields})

    def exception(self, event: str, /, **fields: Any) -> None:
        """As :meth:`error`, with ``error`` and ``traceback`` of the exception that is being handled."""
        error = sys.exc_info()[1]
        if error is not None:
            fields = {"error": describe(error), "traceback": _traceback(error), **fields}
        _emit("error", self.name, event, {**self._fields, **fields})


def get_logger(name: str) -> Logger:
    """A logger; ``name`` is a role or a module (``"keeper"``, ``__name__``)."""
    return Logger(name.removeprefix("aqd."))


def describe(error: BaseException) -> str:
    """An exception on one line: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Suppressor:
    """Flood control: at most one line in ``interval_s`` for each key, with the number left out.

    ``allow("connect")`` -> ``(True, 41)``: write the line, and say that 41 like it were suppressed. A
    database that is away must not fill the journal with its loops' complaints.
    """

    MAX_KEYS = 256

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._seen: dict[str, tuple[float, int]] = {}  # key -> last line, suppressed since

    def allow(self, key: str, now: float | None = None) -> tuple[bool, int]:
        """Whether to write now, and how many were suppressed since the last line of this key."""
        now = time.monotonic() if now is None else now
        last = self._seen.get(key)
        if last is not None and now - last[0] < self.interval_s:
            self._seen[key] = (last[0], last[1] + 1)
            return False, last[1] + 1
        if last is None and len(self._seen) >= self.MAX_KEYS:
            del self._seen[min(self._seen, key=lambda k: self._seen[k][0])]
        self._seen[key] = (now, 0)
        return True, last[1] if last else 0

    def reset(self, key: str) -> int:
        """Forget a key, because its trouble is over; returns how many lines were suppressed."""
        return self._seen.pop(key, (0.0, 0))[1]


# --- making a line --------------------------------------------------------------------------------


def _emit(level: str, name: str, event: str, fields: dict[str, Any]) -> None:
    global _dropped, _dropped_pid
    state = _state
    if LEVELS[level] < state.threshold:
        return
    pid = os.getpid()
    if _dropped_pid != pid:  # a forked child does not report what its parent lost
        _dropped, _dropped_pid = 0, pid
    # Taken before it is told: of two threads that write at once, one reports what was lost.
    lost, _dropped = _dropped, 0
    try:
        merged = {**_context, **fields} if _context else fields
        values = {key: _plain(value) for key, value in merged.items()}
        if lost:
            values["dropped"] = lost
        done = _write(state, level, name, _text(event), values)
    except Exception:  # a log must not be the reason why something fails
        done = False
    if not done:
        _dropped += lost + 1


def _write(state: _State, level: str, name: str, event: str, values: dict[str, Any]) -> bool:
    if state.journal is not None:
        try:
            state.journal.send(_entry(state, level, name, event, values))
            return True
        except BlockingIOError:
            if LEVELS[level] < LEVELS["warning"]:
                return False
        except OSError:  # no journald, or out of its reach
            pass
    render = (_plainly if state.stream else _human) if state.human else _json
    line = _fit(render, state, level, name, event, values)
    prefix = f"<{journald.PRIORITIES[level]}>".encode() if state.stream else b""
    return (state.sink or _UNCONFIGURED).write(prefix + line)


def _entry(
    state: _State, level: str, name: str, event: str, values: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """The fields of an entry of the journal, the most important first."""
    long = {key: _fit_long(values[key]) for key in _LONG if values.get(key)}
    if state.human:
        short = {key: value for key, value in values.items() if key not in _LONG}
        message = _fit(_plainly, state, level, name, event, short).decode().rstrip("\n")
        message = "\n".join([message, *map(_lines, long.values())])
    else:
        message = _fit(_json, state, level, name, event, values).decode().rstrip("\n")
    yield "MESSAGE", message
    yield "PRIORITY", str(journald.PRIORITIES[level])
    yield "SYSLOG_IDENTIFIER", "aqd"
    for key, value in _record(state, name, event, values | long).items():
        field = journald.field_name(key)
        if field is not None and value is not None and key not in ("at", "level", "pid"):
            yield field, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _lines(text: Any) -> str:
    return "\n".join(printable(line) for line in str(text).rstrip().split("\n"))


def _fit_long(value: Any) -> Any:
    """Shortened until it is shown in ``_MAX_LONG`` bytes: a control character of one byte takes four."""
    short = _shorten(value, limit := _MAX_LONG)
    while len(_lines(short).encode()) > _MAX_LONG:
        short = _shorten(value, limit := limit * 3 // 4)
    return short


def _fit(render: Any, state: _State, level: str, name: str, event: str, values: dict[str, Any]) -> bytes:
    """The line, shortened until it fits: first its longest values, then whole fields from the end."""
    line: bytes = render(state, level, name, event, values)
    limit = MAX_LINE // 2
    while len(line) > MAX_LINE and limit >= 64:
        values = {key: _shorten(value, limit) for key, value in values.items()}
        line = render(state, level, name, _shorten(event, limit), values)
        limit //= 2
    kept = list(values.items())
    while len(line) > MAX_LINE and kept:
        kept = kept[: len(kept) // 2]
        line = render(state, level, name, _shorten(event, 128), {**dict(kept), "cut": True})
    return line


def _shorten(value: Any, limit: int) -> Any:
    """Keep the beginning and the (longer) end of a text: in a traceback the end says what happened."""
    if not isinstance(value, str):
        size = len(msgspec.json.encode(value))
        if size <= limit:
            return value
        value = msgspec.json.encode(value).decode()
    if len(value) <= limit:
        return value
    head = limit // 3
    return f"{value[:head]}…{value[head + 1 - limit :]}"


def _record(state: _State, name: str, event: str, values: dict[str, Any]) -> dict[str, Any]:
    """What is said beside moment and level, under names that the log's own do not have."""
    record: dict[str, Any] = {"process": state.process, "pid": os.getpid()}
    if name != state.process:
        record["logger"] = name
    record["event"] = event
    for key, value in values.items():
        record[f"{key}_" if key in _OWN_KEYS and key not in ("dropped", "cut") else key] = value
    return record


def _json(state: _State, level: str, name: str, event: str, values: dict[str, Any]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"at": now, "level": level, **_record(state, name, event, values)}) + b"\n"


def _human(state: _State, level: str, name: str, event: str, values: dict[str, Any]) -> bytes:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    word = _WORDS[level]
    if state.colour and level in _COLOURS:
        word = f"{_COLOURS[level]}{word}\033[0m"
    return f"{now} {word} {_said(state, name, event, values)}\n".encode()


def _plainly(state: _State, _level: str, name: str, event: str, values: dict[str, Any]) -> bytes:
    """For the journal, which knows moment and level."""
    return f"{_said(state, name, event, values)}\n".encode()


def _said(state: _State, name: str, event: str, values: dict[str, Any]) -> str:
    who = name if name == state.process else f"{state.process}/{name}"
    line = f"{who}  {printable(event)}"
    if values:
        line += "  " + " ".join(
            f"{printable(key)}={_human_value(value)}" for key, value in values.items() if value is not None
        )
    return line


def _human_value(value: Any) -> str:
    if isinstance(value, str):
        if value and value.isprintable() and not any(char in value for char in " \"'="):
            return value
        return printable(msgspec.json.encode(value).decode())
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, bool | int):
        return str(value)
    return printable(msgspec.json.encode(value).decode())


def printable(text: str) -> str:
    """No line breaks and no terminal control sequences: both would let a payload forge lines."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _plain(value: Any) -> Any:
    """A value that JSON can carry, passwords masked."""
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, dict):
        return {_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return _text(value.decode(errors="backslashreplace"))
    try:
        return _text(describe(value) if isinstance(value, BaseException) else str(value))
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _text(text: str) -> str:
    """Masked, and without lone surrogates, which UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode(errors="backslashreplace").decode()
    return mask(text)


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


# --- the standard library's logging ---------------------------------------------------------------


def route_stdlib() -> None:
    """Make this log the only handler of the root logger (again: idempotent)."""
    global _router
    import logging

    if _router is None:  # kept over a fork: a worker pays 3 µs for each page that it touches first
        _router = _new_router()
    root = logging.getLogger()
    root.handlers[:] = [_router]
    root.setLevel(_state.threshold)
    logging.captureWarnings(True)


def _new_router() -> "logging.Handler":
    import logging

    class Router(logging.Handler):
        """Turns a record into an event. Without a lock of its own: a line is one write."""

        def createLock(self) -> None:
            self.lock = None

        def handle(self, record: logging.LogRecord) -> bool:
            # Since Python 3.13 the inherited one enters the lock without asking whether there is one.
            if passed := self.filter(record):
                self.emit(passed if isinstance(passed, logging.LogRecord) else record)  # a record since 3.12
            return bool(passed)

        def emit(self, record: logging.LogRecord) -> None:
            _from_record(record)

    return Router()


_router: "logging.Handler | None" = None


# Attributes of every LogRecord (library reference, "LogRecord attributes"); others came by ``extra``.
_RECORD_KEYS = frozenset(
    (
        *(
            "args",
            "asctime",
            "created",
            "exc_info",
            "exc_text",
            "filename",
            "funcName",
            "levelname",
            "levelno",
        ),
        *("lineno", "message", "module", "msecs", "msg", "name", "pathname", "process", "processName"),
        *("relativeCreated", "stack_info", "taskName", "thread", "threadName"),
    )
)


def _from_record(record: "logging.LogRecord") -> None:
    level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "info"
    if record.levelno < 20:
        level = "debug"
    try:
        event = record.getMessage()
    except Exception as error:
        event = f"{record.msg!r} (cannot be formatted: {describe(error)})"
    fields = {key: value for key, value in record.__dict__.items() if key not in _RECORD_KEYS}
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = describe(record.exc_info[1])
        fields["traceback"] = _traceback(record.exc_info[1])
    if record.stack_info:
        fields["stack"] = record.stack_info
    _emit(level, record.name.removeprefix("aqd."), event, fields)


def install_excepthook() -> None:
    """Write an uncaught exception as one event instead of a traceback over many lines."""

    def hook(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        text = _traceback(error.with_traceback(trace))
        _emit("error", _state.process, "uncaught exception", {"error": describe(error), "traceback": text})

    sys.excepthook = hook
