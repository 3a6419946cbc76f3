"""The pid file, held by a lock: one daemon for each runtime directory.

Run by the master. The lock counts, not the file: it goes with the process however that ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aqd.errors import AqdError, Exit


class AlreadyRunning(AqdError):
    """Another daemon holds the pid file."""

    exit_code = Exit.RUNNING


@contextmanager
def pid_file(path: Path) -> Iterator[None]:
    """Hold the pid file's lock; :class:`AlreadyRunning` if another daemon does."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(f"a daemon is already running (pid {holder}, pid file {path})") from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
