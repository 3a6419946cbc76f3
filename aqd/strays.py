"""Processes that a dead worker left behind: found by what they cannot all shed, killed until none is left.

Run by the master when a worker has died, and by the dispatcher as its last act when the master has. A helper
is attributed to its worker by

* its process group, which the worker leads (:func:`kill_group`, while the dead leader still keeps the number);
* its session id, which is the worker's pid whatever group a shell has put it into;
* the marker in its environment (:data:`MARKER`), which every program has that a job started;
* being the master's child: it was adopted, and is none of those the master knows. Not as PID 1, to which the
  whole container's orphans come.

Spared is who has :data:`DETACH` in its environment: the handler's option allows it to stay. A process's
environment here is what it was exec'ed with, so this is true for its children, too.

Promises: nothing here waits. The children of one that is killed become the master's, and one that was just
forking may have been missed, so the hunt goes on, more and more slowly, until nothing was found for
:data:`QUIET_S`.

Sources: setsid(2), proc_pid_stat(5), proc_pid_environ(5), PR_SET_CHILD_SUBREAPER(2const).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from aqd.log import get_logger
from aqd.process import boottime

log = get_logger("master")

# ``<node id>.<incarnation>``: set by the worker in its environment, and thereby in that of all it starts.
MARKER = "AQD_INTERNAL_WORKER"
# Set while a job runs whose handler may leave processes behind.
DETACH = "AQD_INTERNAL_DETACH"
# The node id, for the loader and its workers.
NODE = "AQD_INTERNAL_NODE"
LAST_HUNTS = 10

# The hunt ends when nothing was found for so long; what cannot be killed (uninterruptible) is given up then.
QUIET_S, GIVE_UP_S = 3.0, 30.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.5
# Without a death the adopted children are looked at so often: one may have been let go later.
_LOOK_S = 1.0
# Of the master's time when worker after worker dies.
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Process:
    """A living process: one line of the process table."""

    pid: int
    parent: int
    group: int
    session: int


def look(pid: int) -> Process | None:
    """None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split(None, 4)
    except OSError:
        return None
    if len(fields) < 5 or fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]))


def table() -> Iterator[Process]:
    """All living processes; none if the machine is out of descriptors."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit() and (process := look(int(name))) is not None:
            yield process


def environment(pid: int) -> list[bytes]:
    """What the process was exec'ed with; nothing if it is gone or not ours to look at."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def detached(variables: list[bytes]) -> bool:
    return any(variable.startswith(f"{DETACH}=".encode()) for variable in variables)


def marked(node_mark: str) -> list[int]:
    """All living processes that jobs of this node (its id) have started, but those that may stay."""
    needle = f"{MARKER}={node_mark}.".encode()
    found = []
    for process in table():
        variables = environment(process.pid)
        if any(v.startswith(needle) for v in variables) and not detached(variables):
            found.append(process.pid)
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(leader: int, *, sparing: bool = True) -> None:
    """The worker, and then its group: as a whole, which no fork escapes, or one by one if some may stay.

    Without ``sparing`` nobody may, and the process table (5 ms for 300 processes) need not be read.
    """
    kill(leader)
    if not sparing:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        return
    members = [process.pid for process in table() if process.group == leader and process.pid != leader]
    spared = {pid for pid in members if detached(environment(pid))}
    if not spared:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        return
    for pid in members:
        if pid not in spared:
            kill(pid)


@dataclass(slots=True)
class _Prey:
    """What one dead worker may have left."""

    pid: int
    mark: bytes
    since: float
    found_at: float
    next_at: float
    pause_s: float = _FIRST_PAUSE_S
    killed: set[int] = field(default_factory=set)


class Hunt:
    """The master's hunt for strays. ``known()``: the pids of its children that are no strays; ``sessions()``: of
    which newborn workers may be, that have no session of their own yet (those of the loaders)."""

    def __init__(
        self,
        node_id: str,
        known: Callable[[], set[int]],
        sessions: Callable[[], set[int]],
        *,
        adopted: bool | None = None,
    ) -> None:
        self._node_id = node_id
        self._known, self._sessions = known, sessions
        self._master = os.getpid()
        self._adopted = self._master != 1 if adopted is None else adopted
        # Whoever started us by exec may have had children before: a shell script's are not ours to kill.
        self._before = frozenset(_children(self._master))
        self._prey: list[_Prey] = []
        self._next_look = self._not_before = 0.0
        self.killed = 0

    def worker_died(self, pid: int, incarnation: int, now: float, *, orderly: bool = False) -> None:
        """``orderly``: it has ended what its jobs had left itself; one look is enough if it finds nothing."""
        mark = f"{MARKER}={self._node_id}.{incarnation}".encode()
        self._prey.append(_Prey(pid, mark, now, now - QUIET_S if orderly else now, now))

    def turn(self, now: float) -> float | None:
        """Kill what is found if it is time to look; when to look again, None if the tick is soon enough."""
        if now >= self._not_before:
            due = [prey for prey in self._prey if now >= prey.next_at]
            if due or (self._adopted and now >= self._next_look):
                self._next_look = now + _LOOK_S
                began = boottime()
                self._search(due, now)
                self._not_before = now + (boottime() - began) * (1 / _SHARE - 1)
        soonest = min((prey.next_at for prey in self._prey), default=None)
        return None if soonest is None else max(soonest, self._not_before)

    def _search(self, due: list[_Prey], now: float) -> None:
        if due:
            found = list(table())
        else:  # only who is not known to belong here: to look at 64 workers each second showed
            known = self._known()
            found = [
                p for pid in _children(self._master) if pid not in known and (p := look(pid)) is not None
            ]
            if not found:
                return
        # Only now: a worker writes its page before it leaves its loader's session, so one that was seen outside
        # of that is known by now. (Asked for before, newborn workers were killed under load.)
        known, sessions = self._known(), self._sessions()
        leaders = {process.pid for process in found if process.pid == process.session}
        by_pid, by_mark = {prey.pid: prey for prey in due}, {prey.mark: prey for prey in due}
        for process in found:
            if process.pid == self._master or process.pid in known or process.pid in self._before:
                continue
            variables = environment(process.pid)
            if detached(variables):
                continue
            # A session whose leader lives is another's: the dead worker's number has been given away again.
            prey = by_pid.get(process.session) if process.session not in leaders else None
            if prey is None:
                prey = next((by_mark[v] for v in variables if v in by_mark), None)
            adopted = self._adopted and process.parent == self._master and process.session not in sessions
            if prey is not None or adopted:
                self._kill(process, prey, now)
        over = set()
        for prey in due:
            prey.next_at = now + prey.pause_s
            prey.pause_s = min(prey.pause_s * 2, _LAST_PAUSE_S)
            if now >= prey.found_at + QUIET_S:
                over.add(prey.mark)
            elif now >= prey.since + GIVE_UP_S:
                log.warning("stray processes cannot be killed", worker=prey.pid, children=sorted(prey.killed))
                over.add(prey.mark)
        if over:
            self._prey = [prey for prey in self._prey if prey.mark not in over]

    def _kill(self, process: Process, prey: _Prey | None, now: float) -> None:
        kill(process.pid)
        if prey is not None:
            prey.found_at = now
            if process.pid in prey.killed:
                return  # not dead yet
            prey.killed.add(process.pid)
            prey.pause_s = _FIRST_PAUSE_S  # its children are on their way to us
        self.killed += 1
        log.debug("stray process killed", child=process.pid, worker=prey.pid if prey else None)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def kill_all(node_id: str) -> None:
    """What a dead master's jobs have left: what has gone out of their groups carries a mark."""
    for _ in range(LAST_HUNTS):  # one may just have been forking
        for pid in (left := marked(node_id)):
            kill(pid)
        if not left:
            return
