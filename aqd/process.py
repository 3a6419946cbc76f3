"""Linux process mechanics: parent-death signals, subreaping, spawning, reaping, the hard kill.

Used by the master, the loader, the dispatcher and the workers. Nothing here knows about jobs.
All moments are CLOCK_BOOTTIME: CLOCK_MONOTONIC stands still while the machine sleeps, a lease does not.

Sources: prctl(2), waitid(2), posix_spawn(3), signal(7), PR_SET_CHILD_SUBREAPER(2const).
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aqd.errors import Exit

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_fork = ctypes.PyDLL(None, use_errno=True).fork

ALL_SIGNALS = frozenset(signal.valid_signals())
# The spawned program finds what it was given at these numbers, whatever they were in the parent.
FIRST_PASSED_FD = 3
# Asks a worker to end the job that its page names. Handlers may use all other signals but the next.
STOP_SIGNAL = signal.SIGUSR1
# Asks a worker for its Python stacks, just before a hard kill: faulthandler answers it, in C code too.
DUMP_SIGNAL = signal.SIGRTMIN + 10
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_BLOCK = 512  # what st_blocks counts in, whatever the file system's blocks are
_PAGE = 4096
_MADV_WIPEONFORK = 18


def bare_fork() -> int:
    """fork(2) without the interpreter's hooks round it, for a child that does nothing but fork once more, by
    :func:`os.fork`, and leave: they are run then, and each once. (2.6 -> 2.0 ms for that child.)"""
    pid: int = _fork()
    if pid < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"fork: {os.strerror(errno)}")
    return pid


def own_memory() -> mmap.mmap:
    """Memory that begins with 1 in this process, and with 0 in whatever is forked from it, by C code too.

    To ask for one's pid and compare is a system call, 0.2 µs instead of 0.04. (MADV_WIPEONFORK, madvise(2).)
    """
    memory = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_MADV_WIPEONFORK)
    memory[0] = 1
    return memory


def boottime_ns() -> int:
    """Now, in nanoseconds since boot, suspended time included (0.12 µs a call)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boottime() -> float:
    """Now, in seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def become_subreaper() -> None:
    """Orphans below this process become its children instead of PID 1's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, sig: int = signal.SIGKILL, *, wait_s: float = 0.0) -> None:
    """Arm the parent-death signal; exit with :data:`Exit.ORPHANED` unless ``parent`` is the parent.

    ``wait_s`` bounds how long to wait for a re-parenting that is under way (a worker's intermediate
    process is about to exit). The check is repeated after arming: a parent that died in between
    would never send the signal.
    """
    deadline = boottime() + wait_s
    while os.getppid() != parent:
        if boottime() >= deadline:
            os._exit(Exit.ORPHANED)
        time.sleep(0.0005)
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os._exit(Exit.ORPHANED)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """All signals blocked, so that a child forked inside cannot lose one before it has its own handlers."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def open_standard_descriptors() -> None:
    """Started with 0, 1 or 2 closed, the next file opened would become standard output of a job."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open("/dev/null", os.O_RDWR), True)  # the lowest free number: this one


def allow_descriptors(number: int) -> None:
    """Raise the soft limit on open files to ``number``, as far as the hard one lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def unblock_signals() -> None:
    """What a spawned program does once its handlers stand."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def output_file(name: str) -> int:
    """An anonymous file for what a worker and its helpers print: writing never blocks, whoever holds a
    descriptor reads it after their death, and a hole punched into its beginning gives the memory back."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def allocated(fd: int) -> tuple[int, int]:
    """(bytes in memory, length) of an output file."""
    stat = os.fstat(fd)
    return stat.st_blocks * _BLOCK, stat.st_size


def punch_hole(fd: int, keep: int) -> None:
    """Give back the memory of an output file but for its last ``keep`` bytes; its length stays.

    Cutting it with ftruncate lost 420,000 of 1.75 million lines between the reading and the cutting, a hole
    one. Writers go on meanwhile: offsets only grow.
    """
    end = (os.fstat(fd).st_size - keep) // _PAGE * _PAGE
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if end > 0 and _libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(end)) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"fallocate: {os.strerror(errno)}")


def end_output(fd: int) -> None:
    """Nobody looks after an output file any more: a detached helper that still writes to it must not fill the
    memory. It may overwrite what is there, and gets EPERM beyond it."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        punch_hole(fd, 0)


def spawn(argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int], *, blocked: bool = True) -> int:
    """Start ``argv`` in a session of its own with ``fds`` at 3, 4, …; returns the pid.

    With ``blocked`` the child starts with **all signals blocked** and must unblock them once its handlers
    stand; dispositions are the default ones. Nothing else is inherited but 0, 1 and 2.
    A session of its own: Ctrl-C in a terminal is for the master alone.
    """
    # First out of the way of the target numbers, or one dup2 would overwrite another's source.
    high = [_dup_high(fd) for fd in fds]
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, FIRST_PASSED_FD + n) for n, fd in enumerate(high)]
        return os.posix_spawn(
            argv[0],
            list(argv),
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=ALL_SIGNALS if blocked else (),
            # All of them: whoever started us in the background had SIGINT and SIGQUIT ignored, which is inherited.
            setsigdef=ALL_SIGNALS - {signal.SIGKILL, signal.SIGSTOP},
        )
    finally:
        for fd in high:
            os.close(fd)


def _dup_high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def python_argv(module: str, *args: str) -> list[str]:
    """The command line that runs ``module`` with this interpreter.

    With ``-P``, so that a file in the working directory shadows no module; unless this process was itself
    started by ``python -m`` and may have found its package there.
    """
    by_module = "-m" in sys.orig_argv and not sys.flags.safe_path
    return [sys.executable, *([] if by_module else ["-P"]), "-m", module, *args]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of ``signal`` (number) and ``code`` is set."""

    signal: int | None
    code: int | None

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal} ({signal_name(self.signal)})"
        return f"exit code {self.code}"


def signal_name(number: int) -> str:
    """``9`` → ``SIGKILL``; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def exit_status(status: int) -> ExitStatus:
    """Decode a wait(2) status."""
    if os.WIFSIGNALED(status):
        return ExitStatus(os.WTERMSIG(status), None)
    return ExitStatus(None, os.waitstatus_to_exitcode(status))


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used in its life: processor time with that of all descendants that were waited for, and
    the largest resident size that it, or one of those, ever had (an image shared with others included)."""

    cpu_us: int = 0
    peak_kb: int = 0


def reap(before: Callable[[int], None]) -> Iterator[tuple[int, ExitStatus, Usage]]:
    """All children that have ended so far (several deaths can hide behind one SIGCHLD).

    ``before(pid)`` is called while the child is still a zombie, so its group's number cannot have been
    given to anybody else yet.
    """
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return
            before(info.si_pid)
            pid, status, usage = os.wait4(info.si_pid, 0)
        except ChildProcessError:
            return
        yield (
            pid,
            exit_status(status),
            Usage(int((usage.ru_utime + usage.ru_stime) * 1e6), usage.ru_maxrss),
        )


def children() -> list[int]:
    """The pids of this process's children, adopted ones included (single-threaded callers only)."""
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def signal_group(leader: int, sig: int) -> bool:
    """Signal the group that ``leader`` leads, and ``leader`` itself should it not lead one yet."""
    reached = False
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(leader, sig)
            reached = True
    return reached


def may_signal(pid: int) -> bool:
    """Not if it has become somebody else: by exec of a program that changes its user (sudo), or by setuid(2)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def catches(pid: int, sig: int) -> bool:
    """Whether that process has a handler for ``sig``: without one, a real-time signal would be its death."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            _, _, rest = file.read().partition(b"\nSigCgt:")
        return bool(int(rest[:32].split()[0], 16) >> (sig - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def while_stopped(
    pid: int,
    look: Callable[[], bool],
    *,
    wait_s: float = 0.1,
    kill: Callable[[int], object] = lambda pid: signal_group(pid, signal.SIGKILL),
) -> bool:
    """Stop child ``pid``, look, and kill its whole group if ``look()`` is true, else let it go on.

    The one hard kill. Deciding first and killing then hits the *next* job of a fast worker (67 of 150
    tries in a sketch); a stopped process cannot change what was looked at (0 of 150, 37 µs), and the
    stop orders its writes to the shared page on every architecture.

    Returns whether it was killed; a process that is already gone counts as not killed. A process that
    does not stop within ``wait_s`` (uninterruptible sleep) is judged as it is: it executes nothing.
    ``kill(pid)`` does the killing. One that may not be signalled (:func:`may_signal`) is not looked at.
    """
    try:
        os.kill(pid, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError):
        return False
    deadline = boottime() + wait_s
    while True:
        try:
            info = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if info is not None:
            if info.si_code != os.CLD_STOPPED:
                return False  # it has ended by itself; the reaper will find it
            break
        if boottime() >= deadline:
            break
        time.sleep(0.00005)
    killing = False
    try:
        killing = look()
    finally:
        if killing:
            kill(pid)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)
    return killing


class Signals:
    """Signals as bytes in a pipe: the handlers do nothing else, so they can interrupt anything."""

    # USR1 and USR2 mean nothing here, but recipes for other daemons send them, and their default is death.
    HANDLED = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in self.HANDLED:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def fileno(self) -> int:
        return self._reader

    def read(self) -> set[int]:
        """The signals that came since the last call."""
        try:
            return set(os.read(self._reader, 4096))
        except BlockingIOError:
            return set()
