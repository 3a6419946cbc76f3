"""What the kernel is told about a job's process: :class:`aqd.hookspecs.Confinement`, checked and applied.

In three places:

* :func:`refusals`, in the loader when a handler is registered: may this daemon do that at all? A handler whose
  options cannot be had is refused with its plugin, not job by job.
* :func:`around`, in a worker around each job: what can be taken back, and is.
* :func:`irrevocably`, in a worker that runs this one job and no other.

Fails: :class:`ConfinementRefused` when the kernel refuses at run time what was thought to be allowed.

Sources: capabilities(7), setrlimit(2), setpriority(2), proc_pid_oom_score_adj(5), PR_SET_NO_NEW_PRIVS(2const),
PR_SET_DUMPABLE(2const), capset(2).
"""

import contextlib
import ctypes
import grp
import math
import os
import pwd
import resource
import time
from collections.abc import Callable, Iterator
from typing import Final

from aqd import process
from aqd.failures import Explained
from aqd.hookspecs import UNLIMITED, Confinement

# How much more a worker is the kernel's choice than the master when memory runs out.
WORKER_OOM_SCORE: Final = 300
_OOM_FILE: Final = "/proc/self/oom_score_adj"
_CAPABILITIES: Final = {
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SYS_NICE": 23,
    "CAP_SYS_RESOURCE": 24,
}
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3: Final = 0x20080522

assert UNLIMITED == resource.RLIM_INFINITY


class ConfinementRefused(Explained):
    """The kernel refused an option of the handler; the message says which, and why."""


# --- may it?


def refusals(confinement: Confinement) -> list[str]:
    """Why this process (and so a worker forked from it) may not do what is asked; empty if it may."""
    return [
        *_refused_account(confinement),
        *_refused_nice(confinement.nice),
        *_refused_oom_score(confinement.oom_score_adj),
        *_refused_limits(confinement),
    ]


def _refused_account(confinement: Confinement) -> Iterator[str]:
    asked = {"user": confinement.user, "group": confinement.group}
    options = " and ".join(f"{name} = {value!r}" for name, value in asked.items() if value is not None)
    if not options:
        return
    needed = ["CAP_SETGID"] if confinement.user is None else ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
    if missing := [name for name in needed if not _has(name)]:
        why = "" if missing != ["CAP_KILL"] else " (it could not end the job)"
        yield f"{options}: needs a daemon that runs as root, this one lacks {', '.join(missing)}{why}"
    try:
        _account(confinement)
    except LookupError as error:
        yield str(error.args[0])


def _refused_nice(nice: int | None) -> Iterator[str]:
    now = os.getpriority(os.PRIO_PROCESS, 0)
    if nice is not None and nice < now and not _has("CAP_SYS_NICE"):
        allowed = resource.getrlimit(resource.RLIMIT_NICE)[0]
        lowest = -20 if allowed == UNLIMITED else 20 - allowed
        if nice < lowest:
            yield f"nice = {nice}: is below the daemon's own {now}, and it lacks CAP_SYS_NICE"


def _refused_oom_score(value: int | None) -> Iterator[str]:
    if value is None or _has("CAP_SYS_RESOURCE"):
        return
    # The floor is the value that was last set with that capability, and cannot be read: try.
    try:
        before = _read_oom_score()
        try:
            _write_oom_score(value)
        finally:
            _write_oom_score(before)
    except OSError as error:
        yield f"oom_score_adj = {value}: refused by the kernel ({error.strerror}); the daemon lacks CAP_SYS_RESOURCE"


def _refused_limits(confinement: Confinement) -> Iterator[str]:
    for name, value in confinement.hard_rlimits.items():
        hard = resource.getrlimit(_limit(name))[1]
        if name != "CPU" and _above(value, hard) and not _has("CAP_SYS_RESOURCE"):
            yield f"hard_rlimits: {name} = {_shown(value)} is above the daemon's hard limit of {_shown(hard)}"
    for name, value in confinement.rlimits.items():
        hard = confinement.hard_rlimits.get(name, resource.getrlimit(_limit(name))[1])
        if name != "CPU" and _above(value, hard):
            yield f"rlimits: {name} = {_shown(value)} is above the hard limit of {_shown(hard)}"


def _has(capability: str) -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            _, _, rest = file.read().partition(b"\nCapEff:")
        return bool(int(rest[:32].split()[0], 16) >> _CAPABILITIES[capability] & 1)
    except (OSError, ValueError, IndexError):
        return os.geteuid() == 0


def _above(value: int, limit: int) -> bool:
    return limit != UNLIMITED and (value == UNLIMITED or value > limit)


def _shown(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


# --- what can be taken back


def raise_oom_score(by: int = WORKER_OOM_SCORE) -> None:
    """For every worker: when memory runs out, it goes before the master does."""
    with contextlib.suppress(OSError, ValueError):
        _write_oom_score(min(1000, _read_oom_score() + by))


@contextlib.contextmanager
def around(confinement: Confinement) -> Iterator[None]:
    """The reversible part, for the time of a job; afterwards everything is as it was."""
    undo = contextlib.ExitStack()
    with undo:
        _apply_reversible(confinement, undo)
        yield


def _apply_reversible(confinement: Confinement, undo: contextlib.ExitStack | None) -> None:
    if confinement.oom_score_adj is not None:
        with _told(f"oom_score_adj = {confinement.oom_score_adj}"):
            before = _read_oom_score()
            _write_oom_score(confinement.oom_score_adj)
        if undo is not None:
            undo.callback(_put_back, _write_oom_score, before)
    for name, value in confinement.rlimits.items():
        number = _limit(name)
        with _told(f"rlimits: {name} = {_shown(value)}"):
            limits = resource.getrlimit(number)
            soft = _counted(name, value)
            if name == "CPU" and _above(soft, limits[1]):
                soft = limits[1]
            resource.setrlimit(number, (soft, limits[1]))
        if undo is not None:
            undo.callback(_put_back_limit, number, limits)


def _put_back_limit(number: int, limits: tuple[int, int]) -> None:
    hard = resource.getrlimit(number)[1]
    if hard != limits[1] and _above(limits[0], hard):
        limits = hard, hard  # the job has lowered it for itself, for good
    _put_back(resource.setrlimit, number, (limits[0], hard))


def _put_back(function: Callable[..., object], *arguments: object) -> None:
    # Where even that is refused, the job has completed all the same.
    with contextlib.suppress(OSError, ValueError):
        function(*arguments)


# --- what cannot


def irrevocably(confinement: Confinement, master_pid: int) -> None:
    """All of it, for a process that runs one job and ends; nothing is put back.

    The order: limits while there is a right to raise them, the account after nice for the same reason,
    ``no_new_privs`` last.
    """
    for name, value in confinement.hard_rlimits.items():
        number = _limit(name)
        with _told(f"hard_rlimits: {name} = {_shown(value)}"):
            hard = _counted(name, value)
            soft = resource.getrlimit(number)[0]
            resource.setrlimit(number, (hard if _above(soft, hard) else soft, hard))
    _apply_reversible(confinement, None)
    if confinement.nice is not None:
        with _told(f"nice = {confinement.nice}"):
            os.setpriority(os.PRIO_PROCESS, 0, confinement.nice)
    if confinement.user is not None or confinement.group is not None:
        _become(confinement, master_pid)
    if confinement.no_new_privs:
        with _told("no_new_privs"):
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _become(confinement: Confinement, master_pid: int) -> None:
    with _told(f"user = {confinement.user!r}, group = {confinement.group!r}"):
        entry, gid = _account(confinement)
        groups = os.getgrouplist(entry.pw_name, gid) if entry is not None else [gid]
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        if entry is not None:
            os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
            # Root's go with its number; a daemon that is not root but has some would hand them on.
            _drop_capabilities()
            os.environ.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)
        # Changing the account has cleared both.
        _prctl(_PR_SET_DUMPABLE, 1)
    process.die_with_parent(master_pid)


def _account(confinement: Confinement) -> tuple[pwd.struct_passwd | None, int]:
    """The user's entry and the group's number; :class:`LookupError` with the reason."""
    entry = None
    if (user := confinement.user) is not None:
        try:
            entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        except (KeyError, OverflowError):
            raise LookupError(f"user = {user!r}: there is no such user") from None
    if (group := confinement.group) is None:
        assert entry is not None
        return entry, entry.pw_gid
    try:
        return entry, (grp.getgrgid(int(group)) if group.isdigit() else grp.getgrnam(group)).gr_gid
    except (KeyError, OverflowError):
        raise LookupError(f"group = {group!r}: there is no such group") from None


def _drop_capabilities() -> None:
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"capset: {os.strerror(errno)}")


# --- the kernel's words

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


@contextlib.contextmanager
def _told(option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError) as error:  # setrlimit(2)'s EINVAL and EPERM come as ValueError
        raise ConfinementRefused(f"{option}: {error}") from error


def _limit(name: str) -> int:
    number: int = getattr(resource, f"RLIMIT_{name}")
    return number


def _counted(name: str, value: int) -> int:
    """The kernel counts CPU seconds from the process's birth, an option means the job's."""
    if name == "CPU" and value != UNLIMITED:
        return value + math.ceil(time.process_time())
    return value


def _read_oom_score() -> int:
    with open(_OOM_FILE, "rb", buffering=0) as file:
        return int(file.read())


def _write_oom_score(value: int) -> None:
    with open(_OOM_FILE, "wb", buffering=0) as file:
        file.write(str(value).encode())
