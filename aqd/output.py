"""What jobs print: where it goes, and how its end is read.

Each worker has an anonymous file (:func:`aqd.process.output_file`) as its descriptors 1 and 2, so that whatever a
job, its C libraries or its helpers write is in one place, in order, never in anybody's way, and can be read after
the worker's death by whoever holds a descriptor. Descriptor 0 is /dev/null.

Used by the loader (:func:`unbuffer`, before any plugin is imported), by workers (:class:`Streams`) and by the
dispatcher (:func:`tail`, :func:`text`).

Promises: nothing that was printed sits in a buffer when the process is killed; a job that closes, replaces or
truncates its output does not hurt the next one; reading takes at most :data:`LIMIT` bytes whatever was written.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import io
import os
import sys
from typing import Any, Final

from aqd import process

# Bytes that are read of one attempt's output, and characters that are kept of it: the end says what happened.
LIMIT: Final = 64 * 1024
# A hole punched into the file reads as NULs. So many at the beginning are no job's own.
_HOLE: Final = 64
_IONBF: Final = 2  # setvbuf(3)
_NAMES: Final = ("stdin", "stdout", "stderr")
# The module's own raises an audit event: 0.6 µs instead of 0.35.
_fcntl: Final = ctypes.PyDLL(None).fcntl


def tail(fd: int, start: int, end: int | None = None, limit: int = LIMIT) -> bytes:
    """The last ``limit`` bytes of what was written to ``fd`` from ``start`` up to ``end`` (None: up to now).

    A file that was truncated below ``start`` is read from its beginning. NULs of a punched hole and the rest of a
    character that was cut in two are left out.
    """
    size = os.fstat(fd).st_size
    end = size if end is None else min(end, size)
    if end < start:
        start = 0
    begin = max(start, end - limit)
    data = os.pread(fd, end - begin, begin) if end > begin else b""
    if begin == start and not data.startswith(b"\0" * _HOLE):
        return data
    data = data.lstrip(b"\0")
    cut = next((n for n, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
    return data[cut:]


def text(data: bytes, limit: int = LIMIT) -> str:
    r"""Output as it is stored and shown: invalid UTF-8 as ``\xff``, NUL (which PostgreSQL does not take) as ``\0``;
    the last ``limit`` characters."""
    shown = data[-4 * limit :].decode("utf-8", "backslashreplace").replace("\0", "\\0")
    return shown[-limit:]


def unbuffer() -> None:
    """Let print() and C's printf() write at once.

    For the loader, before plugins are imported: what they keep (a logging handler's stream) is then good in the
    workers, too.
    """
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        with contextlib.suppress(ValueError):  # a C library that names them otherwise
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _IONBF, ctypes.c_size_t(0))


def _stream(fd: int) -> io.TextIOWrapper:
    """As ``python -u`` makes them, but for text that cannot be encoded: printing never fails for that."""
    raw = io.FileIO(fd, "r" if fd == 0 else "w", closefd=False)
    stream = io.TextIOWrapper(
        io.BufferedReader(raw) if fd == 0 else raw,  # as CPython does
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
    stream.mode = "r" if fd == 0 else "w"  # type: ignore[misc]
    return stream


class Streams:
    """A worker's descriptors 0 to 2 and ``sys``'s objects for them; leads them to ``output_fd``."""

    def __init__(self, output_fd: int) -> None:
        self.output_fd = output_fd
        self._null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd, target in ((0, self._null_fd), (1, output_fd), (2, output_fd)):
            os.dup2(target, fd)
        found: list[Any] = [getattr(sys, name) for name in _NAMES]
        self._objects: list[Any] = [
            stream if _is_good(stream, fd) else self._remake(fd) for fd, stream in enumerate(found)
        ]
        self._arm()

    def restore(self) -> None:
        """After a job: everything as it was before it (1.4 µs). Our own descriptor is good: see :meth:`spoiled`."""
        stdin, stdout, stderr = self._objects
        try:
            same = stdout is sys.stdout and stderr is sys.stderr and stdin is sys.stdin
            good = (
                same
                and stdout.write_through
                and stderr.write_through
                and stdout.errors == stderr.errors == "backslashreplace"
                and not (stdout.closed or stderr.closed or stdin.closed)
            )
        except (AttributeError, ValueError):  # none, or detached from its descriptor
            good = False
        if not good:
            self._restore_objects()
        # To look where they lead (fstat) takes more than twice as long.
        os.dup2(self._null_fd, 0)
        os.dup2(self.output_fd, 1)
        os.dup2(self.output_fd, 2)
        if not faulthandler.is_enabled():
            self._arm()

    def _restore_objects(self) -> None:
        for fd, name in enumerate(_NAMES):
            found = getattr(sys, name, None)
            if found is not self._objects[fd] and found is not None:
                with contextlib.suppress(BaseException):
                    found.flush()  # what a job put in the place of ours may hold back what it printed
            if not _is_good(self._objects[fd], fd):
                self._objects[fd] = self._remake(fd)
            setattr(sys, name, self._objects[fd])

    def _remake(self, fd: int) -> io.TextIOWrapper:
        stream = _stream(fd)
        setattr(sys, _NAMES[fd], stream)
        return stream

    def _arm(self) -> None:
        """A fatal signal, or the master before its hard kill, leaves all threads' stacks in the output.

        By a descriptor of our own: the job may have closed 2.
        """
        faulthandler.enable(self.output_fd, all_threads=True)
        faulthandler.register(process.DUMP_SIGNAL, self.output_fd, all_threads=True)

    def size(self) -> int:
        """Length of the output so far (0.4 µs; the descriptor appends, so where it stands matters to nobody)."""
        return os.lseek(self.output_fd, 0, os.SEEK_END)

    def spoiled(self) -> bool | None:
        """Whether a job has sealed it: nothing more can be written, or given back. None: our descriptor is closed."""
        seals: int = _fcntl(self.output_fd, fcntl.F_GET_SEALS)
        return None if seals < 0 else seals != 0

    def clear(self) -> None:
        """Forget the output so far: for a job whose files may not grow beyond a size, this one included."""
        os.ftruncate(self.output_fd, 0)
        os.lseek(self.output_fd, 0, os.SEEK_SET)  # at the largest offset even appending is refused


def _is_good(stream: Any, fd: int) -> Any:
    """Whether it still is one of ours, and writes at once whatever the text."""
    try:
        if fd == 0:
            return not stream.closed
        return stream.write_through and stream.errors == "backslashreplace" and not stream.closed
    except (AttributeError, ValueError):  # none, or detached from its descriptor
        return False
