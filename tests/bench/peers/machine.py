"""This machine: what it is, and how much processor time trees of processes have used."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from aqd.bench.machine import filesystem
from tests.fixtures import processes

TICKS = os.sysconf("SC_CLK_TCK")


def describe(base: Path) -> dict[str, str]:
    """For the head of a report; PostgreSQL's files are below ``base``, whose file system decides what a commit costs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processors": f"{len(os.sched_getaffinity(0))} × {_processor()}",
        "memory": f"{memory:.1f} GiB",
        "kernel": platform.release(),
        "files": f"on {filesystem(base)} ({base})",
        "load": f"{os.getloadavg()[0]:.2f} before",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def cpu_s(roots: Iterable[int]) -> float:
    """Seconds used so far by the processes ``roots``, everything below them, and their dead, reaped children.

    What a process of the tree has reaped counts with it, so that the sum does not fall when processes end.
    """
    table = processes.table()
    pids = {
        pid for root in roots for pid in (root, *(each.pid for each in processes.descendants(root, table)))
    }
    return sum(_ticks(pid) for pid in pids) / TICKS


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # proc(5): utime, stime, cutime and cstime are fields 14 to 17; the name in parentheses may contain anything.
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
