"""The processes that jobs start, seen from their worker: ended with the job, whatever they did to get away.

A worker is a child subreaper, so a helper that has daemonized itself becomes the worker's own child when its parent
ends, and "no children" proves that nothing is left. Processes that stood before the first job (a hook
``aqd_worker_start`` began them) are no job's and stay, as does what a handler with ``detach`` leaves running, then
and later. What happens when the worker itself dies is the master's affair (:mod:`aqd.strays`).

Runs in workers. Promises: bounded by :data:`LIMIT_S`; zombies are reaped, but for those that a hook's code may
still want to wait for itself.

Sources: waitid(2), proc_pid_task_tid_children(5), PR_SET_CHILD_SUBREAPER(2const).
"""

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from aqd.process import boottime
from aqd.strays import DETACH, MARKER, NODE, detached, environment

# A fork bomb may outrun one that kills by list; its worker then leaves, and the master ends the whole group.
LIMIT_S: Final = 1.0
_WALL: Final = 0x40000000  # __WALL: also of children that send no SIGCHLD
_ANY: Final = os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL
# "No children" is what every job ends with, and an exception for it would cost 1.1 µs instead of 0.6. It never waits,
# so it may keep the interpreter's lock. (The module's own get_errno raises an audit event: 0.2 µs.) An error number
# that something else has overwritten only means a closer look.
_libc: Final = ctypes.PyDLL(None)
_waitid: Final = _libc.waitid
_errno_place: Final = _libc["__errno_location"]
_errno_place.restype = ctypes.c_void_p


class Helpers:
    """The account of this process's children."""

    def __init__(self, incarnation: int) -> None:
        # In the environment of every program that is started from here, by which the master attributes it.
        os.environ[MARKER] = f"{os.environ.pop(NODE, '-')}.{incarnation}"
        self._before: set[int] = set()  # a hook's: it may wait for them itself
        self._detached: set[int] = set()
        self.standing: set[int] = set()  # both: those that are not the next job's
        self._errno = ctypes.c_int.from_address(_errno_place())  # this thread's

    def spare_present(self) -> None:
        """What runs now is no job's."""
        self._before = set() if self.alone() else set(_children())
        self.standing = self._before | self._detached

    @contextlib.contextmanager
    def marked_detached(self) -> Iterator[None]:
        """Around a job whose helpers may stay: whoever finds them later knows by their environment."""
        os.environ[DETACH] = "1"
        try:
            yield
        finally:
            os.environ.pop(DETACH, None)

    def end_job(self, detach: bool = False) -> list[int]:
        """End and reap what the job left; the pids of what could not be ended.

        With ``detach`` what runs now may stay.
        """
        if self.alone():
            return []
        deadline, pause = boottime() + LIMIT_S, 0.0001
        # A list that is read while children come and go may leave some out: that there are none is proved otherwise.
        while (left := self._strangers(detach)) or not (self.standing or self.alone()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if boottime() >= deadline:
                return left
            # Their own children become ours when they are gone.
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        return []

    def alone(self) -> bool:
        """Whether this process certainly has no children, dead ones included (0.6 µs: the usual case)."""
        if self.standing:
            return False
        return _waitid(os.P_ALL, 0, None, _ANY) < 0 and self._errno.value == errno.ECHILD

    def _strangers(self, detach: bool) -> list[int]:
        """The living children that may not stay; the dead ones are reaped."""
        present = set(_children())
        self._before &= present
        living = {pid for pid in present - self._before if not _reaped(pid)}
        self._detached &= living
        unknown = living - self._detached
        stay = {pid for pid in unknown if detach or detached(environment(pid))}
        self._detached |= stay
        self.standing = self._before | self._detached
        return sorted(unknown - stay)


def _reaped(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | _WALL) is not None
    except ChildProcessError:
        return True  # by a thread of the job's


def _children() -> list[int]:
    """Those of all threads: a child belongs to the thread that forked it."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", "rb", buffering=0) as file,
        ):
            found += map(int, file.read().split())
    return found
