"""The one hard kill: what was looked at is what is killed, or nothing is; and who is a fork of whom."""

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from aqd.process import own_memory, while_stopped
from tests.fixtures import processes
from tests.fixtures.processes import wait_until


class Child:
    """A process that goes from job to job, each of them short; the number of the present one is in a shared page."""

    def __init__(self) -> None:
        self.page = memoryview(mmap.mmap(-1, 4096)).cast("Q")
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            while True:
                for _ in range(2000):  # some 50 µs: about what lies between a decision and a signal
                    pass
                self.page[0] += 1

    @property
    def job(self) -> int:
        return self.page[0]

    def wait_job(self) -> int:
        """The number of a job that it has just been seen on."""
        before = self.job
        return wait_until(lambda: self.job if self.job != before else None)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def is_on(child: Child, job: int) -> bool:
    return child.job == job


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    made.wait_job()
    yield made
    made.end()


def test_nothing_moves_while_it_is_looked_at(child: Child) -> None:
    def look() -> bool:
        seen = child.job
        assert processes.look(child.pid).state == "T"
        assert child.job == seen
        return False

    for _ in range(50):
        assert not while_stopped(child.pid, look)
        child.wait_job()  # and then it goes on


def test_only_the_job_that_was_meant_is_killed() -> None:
    spared = rounds = 0
    while rounds < 30 or (
        not spared and rounds < 3000
    ):  # by chance the child may never have been on another one
        rounds += 1
        child = Child()
        try:
            killed = False
            while not killed:
                meant = child.wait_job()
                killed = while_stopped(child.pid, partial(is_on, child, meant))
                spared += not killed
            _, status = os.waitpid(child.pid, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert child.job == meant
        finally:
            child.end()
    assert spared, "the child was never on another job by then, so nothing was tested"


def test_the_whole_group_goes_and_a_process_that_is_gone_is_not_killed(child: Child) -> None:
    assert while_stopped(child.pid, lambda: True)
    wait_until(lambda: processes.look(child.pid).state == "Z")
    assert not while_stopped(child.pid, lambda: True), "a zombie"
    os.waitpid(child.pid, 0)
    assert not while_stopped(child.pid, lambda: True)


def test_a_look_that_fails_lets_it_go_on(child: Child) -> None:
    with pytest.raises(ZeroDivisionError):
        while_stopped(child.pid, lambda: 1 // 0 > 0)
    child.wait_job()


def test_own_memory_says_who_was_forked_by_c_code() -> None:
    memory = own_memory()
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        os._exit(memory[0])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert memory[0] == 1


TWICE = """
import os
from aqd.process import bare_fork
ran = []
os.register_at_fork(
    before=lambda: ran.append("before"),
    after_in_parent=lambda: ran.append("parent"),
    after_in_child=lambda: ran.append("child"),
)
if not (between := bare_fork()):
    if not (worker := os.fork()):
        print(*ran, flush=True)
        os._exit(0)
    os.waitpid(worker, 0)
    print(*ran, flush=True)
    os._exit(0)
os.waitpid(between, 0)
print(*ran)
"""


def test_between_loader_and_worker_nobody_is_told_of_the_fork() -> None:
    """What plugins registered runs in the worker, once, and never in the loader."""
    done = subprocess.run([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["before child", "before parent", ""]
