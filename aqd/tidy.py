"""What a job may have turned round in its worker, put right before the next one begins.

Run by workers. What stood before the first job (the daemon's settings, and what hooks made of them) is the measure.
Put back are what would hit the next job, or what its helpers would inherit: the signal mask, alarm clocks, ignored
signals, the working directory, the umask, lowered soft limits. Not put back is Python's own state (modules,
``os.environ``): that a worker is warm is the point of it.

Some things the kernel does not take back: then :meth:`Tidy.restore` says what they are, and the worker leaves.

Costs 20 µs a job. Sources: getitimer(2), signal(7), getrlimit(2), getpriority(2), umask(2).
"""

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, Final

from aqd import process

# Without the module's detour by an enumeration (0.05 µs instead of 1.4; it compares equal).
_getsignal: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS: Final = tuple(map(int, sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))[:29]
# A worker without its own handlers for these would end by what is meant for all.
_OURS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, process.STOP_SIGNAL)
# Those that code sets to protect itself; to look at all would take as long as everything else here.
_LIMITS: Final = tuple(
    (name, int(getattr(resource, f"RLIMIT_{name}")))
    for name in ("AS", "DATA", "STACK", "NOFILE", "NPROC", "FSIZE", "CPU", "CORE")
)


class Tidy:
    """The surroundings of jobs, as they are now."""

    def __init__(self) -> None:
        if _getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # then nobody could wait for a child
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._handlers = {number: _getsignal(number) for number in _SIGNALS}
        self._timers = [timer for timer in _TIMERS if not signal.getitimer(timer)[0]]
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._directory = _directory()
        self._account = _account()
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._limits = [(name, number, resource.getrlimit(number)) for name, number in _LIMITS]

    def restore(self) -> list[str]:
        """Everything as it was; what could not be put back, in words."""
        process.unblock_signals()
        for timer in self._timers:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, before in self._handlers.items():
            now = _getsignal(number)
            # What is ignored is inherited by programs. Other handlers may be those of a library that stays.
            if now != before and (now == signal.SIG_IGN or number in _OURS) and before is not None:
                signal.signal(number, before)
        os.umask(self._umask)
        if self._directory is not None and _directory() != self._directory:
            with contextlib.suppress(OSError):
                os.chdir(self._directory)
        return self._lasting()

    def _lasting(self) -> list[str]:
        found = []
        for name, number, before in self._limits:
            now = resource.getrlimit(number)
            if now != before and (_lower(now[0], before[0]) or _lower(now[1], before[1])):
                try:
                    resource.setrlimit(number, before)
                except (OSError, ValueError):  # only root may raise a hard limit again
                    found.append(name)
        if (nice := os.getpriority(os.PRIO_PROCESS, 0)) != self._nice:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self._nice)
            except OSError:
                found.append(f"nice {nice}")
        if (account := _account()) != self._account:
            found.append(f"account {account}")
        return found


def _lower(limit: int, than: int) -> bool:
    if limit == resource.RLIM_INFINITY:
        return False
    return than == resource.RLIM_INFINITY or limit < than


def _account() -> tuple[int, ...]:
    return *os.getresuid(), *os.getresgid()


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None
