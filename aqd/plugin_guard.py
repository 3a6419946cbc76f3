"""Runs code of plugins so that whatever it does, its caller goes on.

Two degrees: :func:`limited` runs it in this process, under a time limit, and turns everything that
can be raised into a reason; :func:`ask_child` runs it in a forked child, which also survives
``os._exit``, crashes in C code, and loops that no exception can end.

Used by :mod:`aqd.plugins` in the loader, in workers and behind ``aqd plugins``. Both are for the main
thread (signals are delivered nowhere else); called from another one, :func:`limited` has no time limit.
"""

import contextlib
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from aqd.errors import UserError
from aqd.process import ExitStatus, die_with_parent, signal_group

# The exception is raised again at this interval: a loop of tries that catches everything swallows it. One
# that does so for ever is ended from outside (ask_child; the master, for a loader).
_REPEAT_S = 0.25
_LONGEST_REASON = 600
_HEADER = struct.Struct("=cI")
_PROGRESS, _RESULT, _ERROR = b"p", b"r", b"e"


class _ImportTimeLimit(BaseException):
    """Raised inside a plugin that takes too long; not an Exception, so that few handlers catch it."""


def limited(limit_s: float, function: Callable[[], None], near: str = "") -> str | None:
    """Call ``function``; None if it returned in time, otherwise the reason in one line.

    Nothing it raises gets through, SystemExit, KeyboardInterrupt and GeneratorExit included. Where the
    trouble is gets named by file and line, preferably one below the folder ``near``. Signal handlers
    that it changed are put back. A child process that it forked and let escape ends here.
    """
    pid = os.getpid()
    main_thread = threading.current_thread() is threading.main_thread()
    alarm = _Alarm(limit_s)
    reason = None
    try:
        if main_thread:
            with _signals_kept(), alarm:
                function()
        else:
            function()
    except BaseException as error:
        reason = explain(error, near)
        if alarm.rang:
            reason = f"took longer than {limit_s:g} s to import{_place(error, near)}"
    finally:
        alarm.close()  # should it have rung while the block was being left; the next ring is far away
        if os.getpid() != pid:
            os._exit(0)
    if alarm.rang and reason is None:
        reason = f"took longer than {limit_s:g} s to import"
    return reason


def explain(error: BaseException, near: str = "") -> str:
    """``error`` as one line: what was raised, and where."""
    if isinstance(error, UserError):
        return str(error)  # ours: the message is the whole explanation
    place = _place(error, near)
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.100}){place}"
    try:
        text = " ".join(str(error).split())
    except BaseException:  # a __str__ that raises is the plugin's, too
        text = "(its message cannot be shown)"
    text = text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
    return f"{kind}: {text}{place}" if text else f"{kind}{place}"


@dataclass(frozen=True)
class Answer:
    """What became of :func:`ask_child`: ``data`` on success, else ``failure``; ``last`` is the last
    progress that was reported, so the caller knows whom to blame."""

    data: bytes | None
    last: str
    failure: str


def ask_child(work: Callable[[Callable[[str], None]], bytes], quiet_s: float) -> Answer:
    """Run ``work(report)`` in a forked child and return its bytes.

    The child is killed, with all it started, when ``quiet_s`` pass without an answer or a call of
    ``report``. What it prints goes to standard error: standard output belongs to the command that
    asked. The caller must have one thread, as before any fork.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # or the child's first flush would print the parent's buffer again
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(work, parent, writer, reader)
    os.close(writer)
    last = ""
    failure = f"did nothing for {quiet_s:g} s and could not be interrupted"
    data: bytes | None = None
    try:
        for kind, body in _frames(pid, reader, quiet_s):
            if kind == _PROGRESS:
                last = body.decode()
            elif kind == _RESULT:
                data = body
                break
            elif kind == _ERROR:
                failure = body.decode()
                break
            else:
                failure = f"ended the process that imported it ({_status(pid)})"
    finally:
        os.close(reader)
        # The group first: while its leader is not reaped, its number belongs to nobody else.
        signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return Answer(data, last, failure)


# --- in this process ------------------------------------------------------------------------------


class _Alarm:
    """Inside the block: :class:`_ImportTimeLimit` in the main thread after ``limit_s``, again and again."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.rang = False
        self._armed = False

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self.rang = True
            raise _ImportTimeLimit

    def __enter__(self) -> None:
        self._old_handler = signal.signal(signal.SIGALRM, self._ring)
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self.limit_s, _REPEAT_S)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._armed:
            return
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        signal.signal(signal.SIGALRM, self._old_handler if self._old_handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the signal handlers that the body replaced: they are the process's, not the plugin's."""
    numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _place(error: BaseException, near: str) -> str:
    """`` (FILE:LINE)`` of the innermost frame below ``near``, or of the innermost one outside of aqd's own."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except Exception:
        return ""
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    for frame in reversed(frames):
        if near and frame.filename.startswith(near + os.sep):
            return f" ({frame.filename}:{frame.lineno})"
    for frame in reversed(frames):
        outside = not frame.filename.startswith(here) and not frame.filename.startswith("<frozen")
        if outside and not frame.filename.endswith(("/contextlib.py", "/importlib/__init__.py")):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


# --- in a child -----------------------------------------------------------------------------------


def _child(work: Callable[[Callable[[str], None]], bytes], parent: int, writer: int, reader: int) -> NoReturn:
    """Never returns, never raises: a child that did would run its parent's program a second time."""
    try:
        pid = os.getpid()
        die_with_parent(parent)
        os.setsid()  # a group of its own, to be killed as one
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(reader)
        os.dup2(2, 1)
        try:
            frame = _RESULT, work(lambda name: _send(writer, _PROGRESS, name.encode()))
        except BaseException as error:
            frame = _ERROR, explain(error).encode()
        if os.getpid() == pid:
            _send(writer, *frame)
    finally:
        os._exit(0)


def _send(writer: int, kind: bytes, body: bytes) -> None:
    rest = memoryview(_HEADER.pack(kind, len(body)) + body)
    while rest:
        rest = rest[os.write(writer, rest) :]


def _frames(pid: int, reader: int, quiet_s: float) -> Iterator[tuple[bytes, bytes]]:
    """The child's frames, then ``(b"", b"")`` when it has ended; stops when it was quiet for too long.

    The end is seen on a pidfd: the end of the pipe may come earlier (a plugin that closes descriptors)
    or never (a plugin that left a process behind).
    """
    buffer = bytearray()
    pidfd = os.pidfd_open(pid)
    os.set_blocking(reader, False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    try:
        deadline = time.monotonic() + quiet_s
        while left := max(0.0, deadline - time.monotonic()):
            ended = any(fd == pidfd for fd, _ in poll.poll(left * 1000))
            if _drain(reader, buffer):
                with contextlib.suppress(KeyError):
                    poll.unregister(reader)
            for frame in _cut(buffer):
                yield frame
                deadline = time.monotonic() + quiet_s
            if ended:
                yield b"", b""
                return
    finally:
        os.close(pidfd)


def _drain(reader: int, buffer: bytearray) -> bool:
    """Read what is there; True at the end of the pipe."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(reader, 65536):
            buffer += chunk
        return True
    return False


def _cut(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take the whole frames off the front of ``buffer``."""
    while len(buffer) >= _HEADER.size:
        kind, length = _HEADER.unpack_from(buffer)
        end = _HEADER.size + length
        if len(buffer) < end:
            return
        body = bytes(buffer[_HEADER.size : end])
        del buffer[:end]
        yield kind, body


def _status(pid: int) -> str:
    """How the child ended, without reaping it."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    killed = info.si_code != os.CLD_EXITED
    return str(ExitStatus(info.si_status if killed else None, None if killed else info.si_status))
