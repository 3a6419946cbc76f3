"""A worker's title, as ``ps`` shows it: ``aqd: worker 0 g3 [generate_pdf 4711]``. The part in brackets is a job's.

The library sets a title in 0.6 µs with a system call, for every job. What it writes is this process's own memory,
though, where its arguments once stood (``arg_start`` in proc_pid_stat(5)): once it has shown where, a title is written
there directly (0.25 µs). Where that memory is not what we think, the library does it as ever.
"""

import ctypes
import os
from typing import Final

from setproctitle import setproctitle

# Bytes; what the arguments and the environment of the process left room for may be less.
_ROOM: Final = 160
_ARG_START: Final = 48  # its number among the fields of proc_pid_stat(5)


class Title:
    """``fixed``: what is in front of the brackets."""

    def __init__(self, fixed: str) -> None:
        self._fixed = fixed
        start, room = _place or locate()
        self._room = room if room > len(fixed) else 0
        self._memory: memoryview
        if self._room:
            self._memory = memoryview((ctypes.c_char * room).from_address(start)).cast("B")

    def show(self, what: str) -> None:
        """By the library, which also gives the thread its name: a job may have changed that."""
        title = f"{self._fixed} [{what}]"
        setproctitle(title)
        if self._room:  # it clears no more than it has written
            rest = len(title.encode())
            self._memory[rest:] = bytes(max(0, self._room - rest))

    def show_job(self, type: str, id: int) -> None:
        if not self._room:
            self.show(f"{type} {id}")
            return
        title = f"{self._fixed} [{type} {id}]".encode()
        self._memory[:] = title[: self._room - 1].ljust(self._room, b"\0")


def locate() -> tuple[int, int]:
    """(address, length) of the title in memory; length 0 where it cannot be known. Whoever is forked from here has it
    in the same place, and need not look."""
    global _place
    setproctitle("." * _ROOM)
    try:
        with open("/proc/self/stat", "rb") as file:
            start = int(file.read().rpartition(b")")[2].split()[_ARG_START - 3])
        # By the kernel: were nothing mapped there, we should die of looking.
        with open("/proc/self/mem", "rb", buffering=0) as file:
            found = os.pread(file.fileno(), _ROOM, start)
        _place = start, len(found) - len(found.lstrip(b"."))
    except (OSError, ValueError, IndexError):
        _place = 0, 0
    return _place


_place: tuple[int, int] | None = None
