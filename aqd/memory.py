"""How much memory a worker and what it started use, by ``/proc``; and whether the kernel killed for memory.

Run by the master, which asks often enough that a job allocating 1 GiB/s is found before it has taken twice its
limit (:func:`pause_s`). A look at a worker without helpers costs about 60 µs.

Counted are the anonymous, shared-memory and swapped pages of the worker and all its descendants. Not counted
is what the worker had before its first job: the loader's image, which all workers of a generation share, and
what its start hooks loaded (:meth:`Meter.rebase`). Nor is it the present job's use what earlier ones have left, or
what helpers hold that hooks have started or that may stay: all that was held when the job began stands in the page. Three things would be counted that take no memory:

* a descendant that is a plain fork of the worker has the worker's pages, too: as long as the cheap sum is above
  the limit, the kernel's proportional figures are asked as well (``smaps_rollup``, 13 ms for 1 GiB), in which a
  page shared by two counts half for each; the smaller of the two sums holds;
* a helper that is being started (vfork) runs on the worker's own memory until it is exec'ed: a fork counts
  from the second look on that finds it;
* what a copy of the image costs once it was written to: it is subtracted whole from each copy.

Fails: never; a process that vanishes while it is looked at uses nothing.

Sources: proc_pid_status(5), proc_pid_stat(5), proc_pid_smaps(5), Documentation/admin-guide/cgroup-v2.rst
(``memory.events``) and cgroup-v1/memory.rst (``memory.oom_control``).
"""

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable

# The fastest growth that a limit is promised for, in KiB per second.
RATE_KB_S = 1 << 20
# The pauses between two looks at a worker with a limit; below the first the looking itself would show.
SOONEST_S, LATEST_S = 0.010, 0.2
# A death by SIGKILL is put down to the kernel if its counter rose so short a time before: freeing the memory of
# the victim takes a while (1 GiB: 90 ms), more on a machine without any.
OOM_RECENT_S = 5.0

_FIGURES = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+)", re.MULTILINE)
_SHARES = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s*(\d+)", re.MULTILINE)
_START_STACK = 28  # its number among the fields of proc_pid_stat(5)


def pause_s(left_kb: int) -> float:
    """How long nothing can happen while so much is left to the limit."""
    return min(max(left_kb / RATE_KB_S, SOONEST_S), LATEST_S)


# --- parsing


def figures_kb(status: bytes) -> int:
    """What ``/proc/PID/status`` says that a process holds of its own; 0 for a zombie."""
    return sum(map(int, _FIGURES.findall(status)))


def shares_kb(rollup: bytes) -> int | None:
    """The same from ``/proc/PID/smaps_rollup``, shared pages by the number of their sharers; None from a kernel
    that does not tell them apart."""
    found = _SHARES.findall(rollup)
    return sum(map(int, found)) if found else None


def start_stack(stat: bytes) -> int:
    """Where the stack began when the program was exec'ed: equal in plain forks, random in others; 0 unknown."""
    fields = stat.rpartition(b")")[
        2
    ].split()  # the name before may hold anything; the next field is the third
    try:
        return int(fields[_START_STACK - 3])
    except (IndexError, ValueError):
        return 0


# --- reading


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:  # ended meanwhile, or not ours to look at
        return b""


def _children(pid: int) -> list[int]:
    """Of all threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    todo = [pid]
    seen = {pid}
    while todo:
        for child in _children(todo.pop()):
            if child not in seen:  # one that moves while we look may turn up twice
                seen.add(child)
                found.append(child)
                todo.append(child)
    return found


def held_kb(helpers: Iterable[int] = ()) -> int:
    """What this process and these children of it with all of theirs hold."""
    own_kb = total = figures_kb(_read("/proc/self/status"))
    stack = start_stack(_read("/proc/self/stat")) if helpers else 0
    for helper in helpers:
        for pid in (helper, *descendants(helper)):
            kb = figures_kb(_read(f"/proc/{pid}/status"))
            # A fork has our pages, too; what it has beyond them is its own.
            total += max(0, kb - own_kb) if start_stack(_read(f"/proc/{pid}/stat")) == stack else kb
    return total


class Meter:
    """Measures one worker. ``baseline_kb`` is what it had at the last :meth:`rebase`, ``hooks_kb`` what its helpers had:
    that is in :meth:`used_kb`, but recycling would not help against it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.baseline_kb = 0
        self.unsure = False  # a fork was left out of the last figure: look again soon
        self._stack = 0
        self._forks: frozenset[int] = frozenset()
        self.hooks_kb = 0
        self.rebase()

    def rebase(self) -> None:
        """What the worker has now is nobody's. For one that has not begun a job."""
        self._stack = start_stack(_read(f"/proc/{self.pid}/stat"))
        self.baseline_kb = figures_kb(_read(f"/proc/{self.pid}/status"))
        self.hooks_kb = sum(figures_kb(_read(f"/proc/{pid}/status")) for pid in descendants(self.pid))

    def used_kb(self, limit_kb: int, sharers: int = 1) -> int:
        """KiB in use. ``sharers``: how many other processes have the worker's image. The exact figure is worked
        out only if the quick one is above ``limit_kb``."""
        family = [self.pid, *descendants(self.pid)]
        quick, largest, forks, counted = 0, 0, [], []
        for pid in family:
            kb = figures_kb(_read(f"/proc/{pid}/status"))
            if pid == self.pid:
                kb -= self.baseline_kb
            elif self._is_fork(pid):
                forks.append(pid)
                if pid not in self._forks:
                    continue
                kb -= self.baseline_kb
            quick += max(kb, 0)
            largest = max(largest, kb)
            counted.append(pid)
        self.unsure = not self._forks.issuperset(forks)
        self._forks = frozenset(forks)
        if quick <= limit_kb or len(counted) == 1:
            return quick
        exact = self._exact_kb(counted, sharers)
        if exact is None or exact <= limit_kb:
            return quick if exact is None else min(quick, exact)
        if not all(figures_kb(_read(f"/proc/{pid}/status")) for pid in counted):
            # With each that ends the shares of the others grow: of 6 that end while they are looked at, one
            # after the other, what they share would be counted up to 2.4 times. Sure is only what one alone has.
            self.unsure = True
            return max(largest, limit_kb)
        return min(quick, exact)

    def _is_fork(self, pid: int) -> bool:
        stack = start_stack(_read(f"/proc/{pid}/stat"))
        return stack != 0 and stack == self._stack

    def _exact_kb(self, family: list[int], sharers: int) -> int | None:
        total = 0
        for pid in family:
            share = shares_kb(_read(f"/proc/{pid}/smaps_rollup"))
            if share is None:
                if figures_kb(_read(f"/proc/{pid}/status")):
                    return None
                continue  # it has ended, reaped or not
            total += share
        copies = 1 + sum(pid in self._forks for pid in family)
        return max(0, total - self.baseline_kb * copies // (copies + sharers))


# --- the kernel's own killing


def oom_kills(cgroups: str, root: str = "/sys/fs/cgroup", vmstat: str = "/proc/vmstat") -> int | None:
    """How many processes the kernel has killed for lack of memory: in this process's memory cgroup if that can
    be read, else on this machine. ``cgroups``: the text of ``/proc/self/cgroup``."""
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            files = [f"{root}/memory{path}/memory.oom_control", f"{root}/memory/memory.oom_control"]
        elif number == "0":
            files = [f"{root}{path}/memory.events", f"{root}/memory.events"]
        else:
            continue
        for file in files:  # the second in a container that sees the machine's path but only its own tree
            if (count := _counter(_read(file))) is not None:
                return count
    return _counter(_read(vmstat))


def _counter(text: bytes) -> int | None:
    found = re.search(rb"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


class OomWatch:
    """Whether a death by SIGKILL was probably the kernel's doing: its counter has risen shortly before.

    Each rise explains one death. :meth:`look` is called about once a second while something runs, so that an
    old rise explains nothing.
    """

    def __init__(self) -> None:
        self._cgroups = _read("/proc/self/cgroup").decode(errors="replace")
        self._seen = oom_kills(self._cgroups)
        self._rises: deque[float] = deque(maxlen=1024)

    def look(self, now: float) -> None:
        count = oom_kills(self._cgroups)
        if count is not None and self._seen is not None:
            self._rises.extend([now] * min(count - self._seen, 1024))
        self._seen = count
        while self._rises and self._rises[0] < now - OOM_RECENT_S:
            self._rises.popleft()

    def explains_death(self, now: float) -> bool:
        self.look(now)
        if self._rises:
            self._rises.popleft()
            return True
        return False
