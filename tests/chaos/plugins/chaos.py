"""The handlers of the chaos suite: each job does what its payload says and keeps its own account of it.

The payload is ``{"n": number in the plan, "attempts": [[step, …] of the first, of the second, …]}``; the last
list serves all later attempts, a step is a mapping of one name to one argument (:class:`Steps`).

Accounts go to the side file in the format of ``tests/fixtures/plugins/fate.py``, with the node's name. And each
run holds a lock of the kernel's on its job for as long as its process lives: a run that finds the lock taken
overlaps with another one, whatever anybody's clock or lease says (``held_by`` in its first line).
"""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aqd
from aqd import hookimpl
from aqd.hookspecs import Backoff, Handlers, JobContext

QUICK = Backoff(base_s=0.02, max_s=0.5, factor=2.0)
MIB = 1 << 20

_settings: dict[str, Any] = {}
_kept: list[object] = []  # what jobs leave behind in their worker


@hookimpl
def aqd_register(handlers: Handlers) -> None:
    _settings.update(handlers.settings("chaos"))
    handlers.add("chaos", chaos, backoff=QUICK)
    handlers.add("chaos_async", chaos_async, backoff=QUICK)
    handlers.add("chaos_poison", chaos, backoff=QUICK, max_crashes=3)
    handlers.add("chaos_memory", chaos, backoff=QUICK, memory_limit_mb=100)
    handlers.add("chaos_output", chaos, backoff=QUICK, keep_output=True)
    handlers.add("chaos_detach", chaos, backoff=QUICK, detach=True)
    handlers.add("chaos_one_shot", chaos, backoff=QUICK, one_shot=True)
    handlers.add("chaos_confined", chaos, backoff=QUICK, nice=5, hard_rlimits={"NOFILE": 200})


def write(event: str, **fields: Any) -> None:
    """One line, one write: whole or absent, whoever else writes at the moment."""
    line = {
        "event": event,
        "pid": os.getpid(),
        "at_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "node": _settings["node"],
        **fields,
    }
    fd = os.open(_settings["side"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def take_lock(job: str) -> tuple[int, int]:
    """(descriptor, pid that holds the job's lock already or 0).

    A POSIX lock (fcntl(2)): it belongs to this process alone, helpers that it forks do not hold it, and the
    kernel lets go of it when the process dies, not before and not later.
    """
    directory = Path(_settings["locks"])
    fd = os.open(directory / job, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd, 0
    # struct flock on 64-bit Linux: type, whence, start, length, pid.
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    return fd, int(struct.unpack("hhqqi4x", answer)[4]) or -1


class Run:
    """One run in the side file, from its first line to its last."""

    def __init__(self, job: JobContext) -> None:
        self.fields = {"job": job.id, "attempt": job.attempt, "type": job.type}
        self.pid = os.getpid()

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        fd, held_by = take_lock(str(self.fields["job"]))
        outcome = "returned"
        try:
            write("start", held_by=held_by, **self.fields)
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            if os.getpid() == self.pid:  # a child that a step forked must not close its parent's run
                write("end", outcome=outcome, **self.fields)
                os.close(fd)


def steps_of(payload: Any, attempt: int) -> Iterator[tuple[str, Any]]:
    choices = payload["attempts"]
    for step in choices[min(attempt, len(choices)) - 1]:
        yield from step.items()


def chaos(payload: Any, job: JobContext) -> Any:
    steps = Steps(job)
    with Run(job).written():
        for name, argument in steps_of(payload, job.attempt):
            getattr(steps, f"do_{name}")(argument)
    return steps.result


async def chaos_async(payload: Any, job: JobContext) -> Any:
    steps = Steps(job)
    with Run(job).written():
        for name, argument in steps_of(payload, job.attempt):
            if name == "sleep":
                await asyncio.sleep(argument)
            else:
                getattr(steps, f"do_{name}")(argument)
    return steps.result


class Steps:
    """``do_NAME(argument)`` for each step that a payload may name."""

    def __init__(self, job: JobContext) -> None:
        self.job = job
        self.result: Any = {"attempt": job.attempt}

    def _spawned(self, pid: int, how: str) -> None:
        job = self.job
        write("spawned", job=job.id, attempt=job.attempt, type=job.type, child=pid, how=how)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_raise(self, text: str) -> None:
        raise RuntimeError(text)

    def do_discard(self, text: str) -> None:
        raise aqd.Discard(text)

    def do_sys_exit(self, code: int) -> None:
        sys.exit(code)

    def do_os_exit(self, code: int) -> None:
        os._exit(code)

    def do_segv(self, _argument: Any) -> None:
        ctypes.string_at(0)

    def do_abort(self, _argument: Any) -> None:
        os.abort()

    def do_hold_gil(self, seconds: float) -> None:
        """In C code that neither releases the GIL nor lets Python's signal handlers run."""
        libc = ctypes.PyDLL(None)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            libc.usleep(int(min(left, 100) * 1_000_000))

    def do_swallow(self, seconds: float) -> None:
        """Goes on whatever is raised inside."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(BaseException):
                time.sleep(left)

    def do_burn(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass

    def do_eat(self, megabytes: int) -> None:
        """Memory that is really used, as fast as it comes, and then nothing more: somebody has to end this."""
        block = os.urandom(MIB)
        eaten = [bytearray(block) * 16 for _ in range(megabytes // 16)]
        time.sleep(60)
        del eaten

    def do_progress(self, percent: float) -> None:
        self.job.progress(percent, f"{percent:g} of a hundred")

    def do_wait_should_stop(self, seconds: float) -> None:
        """Ends early when asked to."""
        deadline = time.monotonic() + seconds
        while not self.job.should_stop and time.monotonic() < deadline:
            time.sleep(0.01)

    def do_be_confined(self, _argument: Any) -> None:
        """What the handler's options ask for holds."""
        found = os.getpriority(os.PRIO_PROCESS, 0), resource.getrlimit(resource.RLIMIT_NOFILE)
        if found != (5, (200, 200)):
            raise RuntimeError(f"not confined: {found}")

    def do_return_big(self, size: int) -> None:
        self.result = "x" * size

    def do_return_object(self, _argument: Any) -> None:
        self.result = object()

    def do_print(self, megabytes: int) -> None:
        """No newline anywhere."""
        for _ in range(megabytes):
            sys.stdout.write("x" * MIB)
        sys.stdout.flush()

    def do_print_bytes(self, count: int) -> None:
        """Anything but text."""
        os.write(2, bytes(range(256)) * count)

    def do_helper(self, how: str) -> None:
        """A process that would go on for an hour: in the worker's group, in a session of its own, or orphaned."""
        command = ["sleep", "3600"]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        if how == "orphan":
            script = f"setsid {' '.join(command)} >/dev/null 2>&1 & echo $!"
            pid = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)
        else:
            child = subprocess.Popen(command, start_new_session=how == "session", **quiet)
            _kept.append(child)
            pid = child.pid
        self._spawned(pid, how)

    def do_fork(self, _argument: Any) -> None:
        """A fork without exec that outlives the handler."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                time.sleep(3600)
            os._exit(0)
        self._spawned(pid, "fork")

    def do_escape(self, _argument: Any) -> None:
        """A fork whose child returns from the handler like its parent."""
        pid = os.fork()
        if pid == 0:
            time.sleep(0.05)
        else:
            self._spawned(pid, "escape")
