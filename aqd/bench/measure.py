"""Measuring from outside: percentiles, processor time by /proc, what PostgreSQL has counted.

Run by ``aqd bench`` itself. Sources: proc(5) (stat, fields 4 and 14 to 17; smaps_rollup), getconf CLK_TCK: processor time
is exact to 10 ms on most kernels. The time of children that have ended and were waited for counts with their parent, so
that of a tree of processes nothing is lost as long as its root lives.
"""

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from aqd.bench.results import Latency
from aqd.database import Connection, run

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


# --- numbers --------------------------------------------------------------------------------------


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` (0..1] of ``ordered`` (ascending, not empty) do not exceed: nearest rank, so always one
    that occurred, and the highest one where there are too few to say."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency(seconds: Iterable[float]) -> Latency | None:
    """Percentiles of times in seconds; None if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return Latency(
        count=len(ordered),
        mean_ms=sum(ordered) / len(ordered) * 1000,
        p50_ms=percentile(ordered, 0.50) * 1000,
        p95_ms=percentile(ordered, 0.95) * 1000,
        p99_ms=percentile(ordered, 0.99) * 1000,
        max_ms=ordered[-1] * 1000,
    )


def middle(items: Sequence[T], key: Callable[[T], float]) -> T:
    """The median one; of an even number the lower of the two, because a mean of two runs is none that was."""
    return sorted(items, key=key)[(len(items) - 1) // 2]


# --- processes ------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """Processor time in seconds: of a process itself, and of its children that have ended and were waited for."""

    own_s: float
    reaped_s: float


def usage(pid: int) -> Usage | None:
    """None: it is gone."""
    fields = _stat(pid)
    if fields is None:
        return None
    own, reaped = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return Usage(own * _TICK_S, reaped * _TICK_S)


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the third on: the second may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def parent(pid: int) -> int | None:
    """None: it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else None


def runs(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def tree(root: int) -> list[int]:
    """``root`` and everything below it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (above := parent(int(entry))) is not None:
            children[above].append(int(entry))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children[pid]
    return found


class Memory(NamedTuple):
    """In bytes. USS: private pages, what would be free without the process; PSS: shared pages count in parts."""

    uss: int
    pss: int


def memory(pid: int) -> Memory | None:
    """None: it is gone, or belongs to somebody else."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    if "Pss" not in fields:
        return None
    return Memory(fields["Private_Clean"] + fields["Private_Dirty"], fields["Pss"])


# --- the server -----------------------------------------------------------------------------------


class Counters(NamedTuple):
    """What ``bench_counters`` gives (``sql/bench.sql`` says how exact it is)."""

    transactions: int
    next_xid: int
    wal_bytes: int
    dead_tuples: int
    page_images: int
    jobs_heap_bytes: int


def counters(conn: Connection) -> Counters:
    """What the server of ``conn`` has counted so far."""
    return Counters._make(map(int, run(conn, "bench_counters")[0]))
