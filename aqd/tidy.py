"""What a job may have turned round in its worker, put right before the next one begins.

Run by workers. What stood before the first job (the daemon's settings, and what hooks made of them) is the measure.
Put back are what would hit the next job, or what its helpers would inherit: the signal mask, alarm clocks, ignored
signals, the working directory, the umask, lowered soft limits. Not put back is Python's own state (modules,
``os.environ``): that a worker is warm is the point of it.

Some things the kernel does not take back: then :meth:`Tidy.restore` says what they are, and the worker leaves.

A system call takes 0.2 µs and a no-op job 2, so what is looked at after *every* job is what Python code can change
unseen (4 µs). Of the rest, which is as dear (a getrlimit alone 0.5), the interpreter tells: its audit events
(PEP 578) say that a job has called chdir or setrlimit, begun a process or looked up a C function
(:meth:`Tidy.told`). Only C code that a plugin had bound before does it without a word; so all of it is looked at, told
or not, after each job that took longer than :data:`BRIEF_NS`, and of brief ones every few milliseconds
(:data:`aqd.worker.SETTLE_MS`).

Sources: getitimer(2), signal(7), getrlimit(2), getpriority(2), umask(2), the table of audit events in Python's manual.
"""

import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from aqd import process

# A job that took no longer has begun and waited for no process (0.3 ms at least), and given no memory back that counts
# (90 ms for 1 GiB). After any other one everything is looked at, which then costs it 5 % at most.
BRIEF_NS: Final = 100_000
# One that took no longer has not even begun a process (fork 170 µs, posix_spawn 104 at least) nor waited for anything
# worth counting: nobody asks for its children, and its processor time is what the clock says.
LIGHT_NS: Final = 30_000

# Without the module's detour by enumerations (getsignal 0.03 µs instead of 1.4; they compare equal).
_raw: Any = getattr(signal, "_signal", signal)
_getsignal: Callable[[int], Any] = _raw.getsignal
_set_mask: Callable[[int, tuple[int, ...]], Any] = _raw.pthread_sigmask
_SETMASK: Final = int(signal.SIG_SETMASK)
# Bound once: a job pays for each name that is looked up in a module.
_getitimer, _cancel_dump, _set_umask = signal.getitimer, faulthandler.cancel_dump_traceback_later, os.umask
_getpriority, _getresuid, _getresgid = os.getpriority, os.getresuid, os.getresgid
_TIMERS: Final = tuple(map(int, (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)))
_UNSET: Final = (0.0, 0.0)
_ACCOUNT_CAPABILITIES: Final = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID
_SIGNALS: Final = tuple(map(int, sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))[:29]
# A worker without its own handlers for these would end by what is meant for all.
_OURS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, process.STOP_SIGNAL)
# Those that code sets to protect itself; to look at all would take twice as long.
_LIMITS: Final = tuple(
    (name, int(getattr(resource, f"RLIMIT_{name}")))
    for name in ("AS", "DATA", "STACK", "NOFILE", "NPROC", "FSIZE", "CPU", "CORE")
)


# --- what the interpreter tells

_EVENTS: Final = dict.fromkeys(
    (
        "os.chdir",
        "resource.setrlimit",
        "resource.prlimit",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "subprocess.Popen",
        "ctypes.dlopen",
        "ctypes.dlsym",
        "ctypes.dlsym/handle",
    )
)
_PROBE: Final = "aqd.tidy"
# The events that were not heard of since the last look. A hook cannot be taken away again, and is called for every
# event of the process: one that is a dictionary's own method costs 0.05 µs each.
_unheard: Final = dict.fromkeys([_PROBE])


def _listen() -> bool:
    """Whether the interpreter tells us: somebody else's hook may have forbidden it."""
    sys.audit(_PROBE)
    if _PROBE in _unheard:
        sys.addaudithook(_unheard.pop)
        sys.audit(_PROBE)
    heard = _PROBE not in _unheard
    _unheard[_PROBE] = None
    return heard


# --- what is looked at


class Tidy:
    """The surroundings of jobs, as they are now."""

    def __init__(self) -> None:
        if _getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # then nobody could wait for a child
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._handlers = _handlers()
        self._handlers_now = self._handlers  # with those of libraries that stay
        self._timers = [timer for timer in _TIMERS if not signal.getitimer(timer)[0]]
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._users, self._groups = os.getresuid(), os.getresgid()
        self._fixed = len({*self._users}) == len({*self._groups}) == 1 and not _may_change_account()
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._directory = _directory()
        self._limits = [(name, number, resource.getrlimit(number)) for name, number in _LIMITS]
        self._listening = _listen()
        self.listen()

    def told(self) -> bool:
        """Whether the interpreter has said since the last :meth:`listen` that something may be different."""
        return len(_unheard) <= len(_EVENTS) or not self._listening

    def listen(self) -> None:
        """From now on: what aqd itself does to put things right is over."""
        _unheard.update(_EVENTS)
        _unheard[_PROBE] = None

    def restore(self, thorough: bool = True) -> list[str]:
        """Everything as it was; what could not be put back, in words.

        ``thorough``: also what the interpreter would have told of.
        """
        _set_mask(_SETMASK, ())
        for timer in self._timers:
            if _getitimer(timer) != _UNSET:
                signal.setitimer(timer, 0)
        _cancel_dump()
        if list(map(_getsignal, _SIGNALS)) != self._handlers_now:
            self._restore_handlers()
        _set_umask(self._umask)
        found = self._restore_thoroughly() if thorough else []
        if _getpriority(0, 0) != self._nice:
            found += self._restore_nice()
        if (thorough or not self._fixed) and (_getresuid() != self._users or _getresgid() != self._groups):
            found.append(f"account {(*_getresuid(), *_getresgid())}")
        return found

    def _restore_handlers(self) -> None:
        for number, before, now in zip(_SIGNALS, self._handlers, _handlers(), strict=True):
            # What is ignored is inherited by programs. Other handlers may be those of a library that stays.
            if now != before and (now == signal.SIG_IGN or number in _OURS) and before is not None:
                signal.signal(number, before)
        self._handlers_now = _handlers()

    def _restore_nice(self) -> list[str]:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, self._nice)
        except OSError:
            return [f"nice {nice}"]
        return []

    def _restore_thoroughly(self) -> list[str]:
        if self._directory is not None and _directory() != self._directory:
            with contextlib.suppress(OSError):
                os.chdir(self._directory)
        found = []
        for name, number, before in self._limits:
            now = resource.getrlimit(number)
            if now != before and (_lower(now[0], before[0]) or _lower(now[1], before[1])):
                try:
                    resource.setrlimit(number, before)
                except (OSError, ValueError):  # only root may raise a hard limit again
                    found.append(name)
        return found


def _may_change_account() -> bool:
    """Whether this process has, or may give itself, the right to become another user or group (capabilities(7))."""
    with open("/proc/self/status", "rb") as file:
        _, _, rest = file.read().partition(b"\nCapPrm:")
    return bool(int(rest.split()[0], 16) & _ACCOUNT_CAPABILITIES)


def _handlers() -> list[Any]:
    return list(map(_getsignal, _SIGNALS))


def _lower(limit: int, than: int) -> bool:
    if limit == resource.RLIM_INFINITY:
        return False
    return than == resource.RLIM_INFINITY or limit < than


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None
