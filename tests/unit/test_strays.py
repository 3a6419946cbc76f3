"""What dead workers leave behind: real processes, forked for the purpose."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aqd import strays
from aqd.process import become_subreaper, boottime
from aqd.strays import QUIET_S, Hunt
from tests.fixtures import processes
from tests.fixtures.processes import wait_until

NODE = f"node/{os.getpid()}/abc"  # all processes of the machine are looked at, and some ended
NOBODY = 2**22 + 1  # no process has that number


@pytest.fixture
def started():
    """Pids of what a test starts; all are killed and reaped in the end."""
    become_subreaper()
    pids = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def helper(started, *, env=None, own_session=False, group=None):
    """A sleeping program."""
    child = subprocess.Popen(
        ["sleep", "300"],
        env={**os.environ, **(env or {})},
        start_new_session=own_session,
        process_group=group,
    )
    started.append(child.pid)
    child.returncode = 0  # not Popen's to wait for
    return child.pid


def dead_worker(started, *, helpers):
    """A process that led a session of its own, started ``helpers`` (shell commands) and died; with their pids."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for command in helpers:
            child = subprocess.Popen(command, shell=True, executable="/bin/sh")
            child.returncode = 0
            os.write(writer, b"%d\n" % child.pid)
        os._exit(0)
    os.close(writer)
    with open(reader) as lines:
        left = [int(line) for line in lines]
    os.waitpid(pid, 0)
    started += left
    return pid, left


def gone(pid):
    process = processes.look(pid)
    return process is None or process.state == "Z"


def hunt(*, known=(), sessions=(), adopted=False):
    return Hunt(NODE, lambda: {*known}, lambda: {*sessions}, adopted=adopted)


def run(hunt, now=0.0, until=QUIET_S + 1):
    """All of its turns."""
    while (moment := hunt.turn(now)) is not None and now < until:
        now = max(moment, now + 0.001)
    return now


def test_what_shares_the_dead_worker_s_session_is_killed_in_whatever_group(started):
    it = hunt()
    other = helper(started)
    pid, left = dead_worker(started, helpers=["exec sleep 300", "set -m; sleep 300 & wait"])
    assert len(left) == 2
    it.worker_died(pid, 7, 0.0)
    # The shell's own child is in a group of its own, but still in the session.
    members = [p.pid for p in strays.table() if p.session == pid]
    started += members
    assert len(members) >= 2
    run(it)
    wait_until(lambda: all(gone(member) for member in members))
    assert not gone(other)


def test_the_marker_finds_who_has_a_session_of_its_own(started):
    it = hunt()
    ours = helper(started, env={strays.MARKER: f"{NODE}.7"}, own_session=True)
    sibling = helper(started, env={strays.MARKER: f"{NODE}.70"}, own_session=True)
    it.worker_died(NOBODY, 7, 0.0)
    run(it)
    wait_until(lambda: gone(ours))
    assert not gone(sibling)


def test_who_may_stay_is_spared_by_every_rule(started):
    it = hunt(adopted=True, known=[])
    env = {strays.MARKER: f"{NODE}.7", strays.DETACH: "1"}
    pid, left = dead_worker(started, helpers=[f"{strays.DETACH}=1 exec sleep 300"])
    spared = [*left, helper(started, env=env, own_session=True)]
    wait_until(lambda: all(strays.detached(strays.environment(each)) for each in spared))
    it.worker_died(pid, 7, 0.0)
    run(it)
    assert not any(gone(each) for each in spared)
    assert it.killed == 0
    assert strays.marked(NODE) == []


def test_adopted_children_are_killed_but_for_the_known_the_newborn_and_the_older(started):
    older = helper(started, own_session=True)
    it = hunt(adopted=True)
    known = helper(started, own_session=True)
    newborn = helper(started)
    stray = helper(started, own_session=True)
    it._known = lambda: {known}
    it._sessions = lambda: {os.getsid(newborn)}
    run(it)
    wait_until(lambda: gone(stray))
    assert not any(gone(each) for each in (older, known, newborn))


def test_as_pid_1_foreign_orphans_are_left_alone(started):
    it = hunt(adopted=False)
    foreign = helper(started, own_session=True)
    ours = helper(started, env={strays.MARKER: f"{NODE}.7"}, own_session=True)
    it.worker_died(NOBODY, 7, 0.0)
    run(it)
    wait_until(lambda: gone(ours))
    assert not gone(foreign)


def test_the_children_of_killed_strays_follow(started):
    """A chain in sessions of their own, without the marker: each becomes ours when its parent dies."""
    reader, writer = os.pipe()
    code = (
        "import os, signal\n"
        "for _ in range(3):\n"
        "    if os.fork(): break\n"
        "    os.setsid()\n"
        f"os.write({writer}, b'%d ' % os.getpid())\n"
        "signal.pause()"
    )
    it = hunt(adopted=True)
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, pass_fds=[writer])
    child.returncode = 0
    os.close(writer)
    chain = b""
    while chain.count(b" ") < 4:
        chain += os.read(reader, 100)
    os.close(reader)
    pids = [int(word) for word in chain.split()]
    started += pids
    now = 0.0
    it.worker_died(NOBODY, 7, now)

    def turn():
        nonlocal now
        now += 0.05
        it.turn(now)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return all(gone(pid) for pid in pids)

    wait_until(turn)
    assert it.killed == 4


def test_a_session_number_that_was_given_away_again_is_another_s(started):
    it = hunt()
    leader = helper(started, own_session=True)
    it.worker_died(leader, 7, 0.0)  # as if that had been the number of a worker that is long gone
    run(it)
    assert not gone(leader)


def test_the_hunt_ends(started):
    it = hunt()
    it.worker_died(NOBODY, 7, 0.0)
    assert QUIET_S <= run(it, until=100.0) < QUIET_S + 2
    assert it.turn(200.0) is None


def test_after_an_orderly_end_one_look_is_enough_unless_it_finds_something(started):
    it = hunt()
    it.worker_died(NOBODY, 7, 0.0, orderly=True)
    assert it.turn(0.0) is None
    ours = helper(started, env={strays.MARKER: f"{NODE}.8"}, own_session=True)
    it.worker_died(NOBODY, 8, 10.0, orderly=True)
    assert run(it, 10.0, until=100.0) >= 10.0 + QUIET_S
    wait_until(lambda: gone(ours))


def test_many_deaths_do_not_take_all_the_time(started):
    it = hunt()
    now = boottime()
    for incarnation in range(50):
        it.worker_died(NOBODY, incarnation, now)
        if incarnation == 0:
            it.turn(now)
    assert it.turn(now) > now  # due, and yet not now


def test_a_group_is_killed_whole(started):
    leader = helper(started, group=0)
    member = helper(started, group=leader)
    strays.kill_group(leader)
    wait_until(lambda: gone(leader) and gone(member))


def test_in_a_group_who_may_stay_is_spared(started):
    leader = helper(started, group=0)
    member = helper(started, group=leader)
    spared = helper(started, group=leader, env={strays.DETACH: "1"})
    strays.kill_group(leader)
    wait_until(lambda: gone(leader) and gone(member))
    assert not gone(spared)


def test_marked_names_all_of_a_node_and_nobody_else_s(started):
    ours = {helper(started, env={strays.MARKER: f"{NODE}.{number}"}) for number in (1, 22)}
    helper(started, env={strays.MARKER: f"{NODE}2.1"})
    assert wait_until(lambda: set(strays.marked(NODE)) == ours)


def test_look_reads_names_with_blanks_and_brackets(started):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, b"a) b (c", 0, 0, 0)  # PR_SET_NAME
        os.kill(os.getppid(), 0)
        signal.pause()
        os._exit(0)
    started.append(pid)
    wait_until(lambda: b"a) b" in Path(f"/proc/{pid}/stat").read_bytes())
    assert strays.look(pid) == strays.Process(pid, os.getpid(), os.getpgrp(), os.getsid(0))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid))
    assert strays.look(pid) is None
