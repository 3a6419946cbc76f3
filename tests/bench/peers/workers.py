"""Processes of a run: started so that they cannot outlive us, ended with everything below them.

Each is in a session of its own (Ctrl-C in the terminal is for us alone) and gets SIGTERM when we die. We are a
subreaper, so that what a dying worker leaves behind becomes ours and is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peers.families import Command
from tests.fixtures import processes
from tests.fixtures.processes import wait_until

READY_S = 60.0
STOP_S = 15.0
GO = "go"  # the file for which workers wait; see drivers/gate.py
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """A system did not do what it should; the text says what."""


class Workers:
    """The processes of a system, ended with all their descendants when the block is left."""

    def __init__(self, commands: Sequence[Command], place: Path) -> None:
        self._commands = commands
        self._place = place
        self._log = place / "workers.log"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        try:
            self._running += [start(each, self._place, self._log) for each in self._commands]
            gates = sum(each.gates for each in self._commands)

            def ready() -> bool:
                self.check()
                return self._log.read_bytes().count(b"ready\n") >= gates

            wait_until(ready, READY_S, "the workers are ready")
        except TimeoutError as error:
            self.stop()
            raise Failed(str(error)) from None
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._running]

    def last_line(self) -> str:
        """What they said last."""
        return last_line(self._log)

    def go(self) -> None:
        """Lets those begin that wait for it, all at once."""
        (self._place / GO).touch()

    def check(self) -> None:
        """:class:`Failed` when one has ended."""
        for process in self._running:
            if process.poll() is not None:
                raise Failed(f"a worker ended with {process.returncode}: {self.last_line()}")

    def stop(self) -> None:
        """SIGTERM, time to end in good order, then SIGKILL to whatever is left of the trees."""
        below = self._below()
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                below |= self._below()
                process.kill()
                process.wait()
        kill_orphans(below)

    def _below(self) -> set[int]:
        table = processes.table()
        return {each.pid for pid in self.pids for each in processes.descendants(pid, table)}


def start(command: Command, place: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts one process with its output in ``log``."""
    parent = os.getpid()

    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            command.arguments,
            cwd=place,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )


def run_driver(command: Command, place: Path, timeout_s: float) -> str:
    """Runs a driver to its end; what it printed on standard output."""
    role = command.arguments[2]
    log = place / f"{role}.log"
    process = start(command, place, log)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{role} did not end within {timeout_s:g} s: {last_line(log)}") from None
    finally:
        below = {each.pid for each in processes.descendants(process.pid)}
        if process.poll() is None:
            process.kill()
            process.wait()
        kill_orphans(below)
    if process.returncode != 0:
        raise Failed(f"{role} ended with {process.returncode}: {last_line(log)}")
    return log.read_text(errors="replace")


def kill_orphans(pids: set[int]) -> None:
    """SIGKILL to those of ``pids`` that are still below us, and takes them off the process table."""
    left = [each for each in processes.descendants(os.getpid()) if each.pid in pids]
    processes.kill_all(left)
    for each in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(each.pid, 0)


def last_line(log: Path) -> str:
    """What a log ends with, shortened: the line that usually names the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else "(nothing said)")[:300]
