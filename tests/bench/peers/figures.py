"""What is made of measurements: percentiles, medians, ratios. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all are not above (nearest rank); ValueError for none."""
    if not values:
        raise ValueError("no values")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is not a percentage")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


@dataclass
class Drain:
    """One drained queue."""

    jobs: int
    seconds: float  # from the first start of a handler until all was recorded
    cpu_s: float  # of workers and server together, over the same time
    wal_bytes: int | None  # None: not PostgreSQL

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds


@dataclass
class Latency:
    """One round of jobs one at a time; milliseconds."""

    values: list[float]

    def at(self, percent: float) -> float:
        return percentile(self.values, percent)


@dataclass
class Result:
    """All rounds of one system. ``reason``: why there are none, or why no more."""

    drains: list[Drain] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    reason: str = ""

    @property
    def rate(self) -> float | None:
        """Jobs a second: the median of the rounds."""
        return statistics.median(each.rate for each in self.drains) if self.drains else None

    @property
    def wal_per_job(self) -> float | None:
        """Bytes."""
        found = [each.wal_bytes / each.jobs for each in self.drains if each.wal_bytes is not None]
        return statistics.median(found) if found else None

    @property
    def cpu_per_1000(self) -> float | None:
        """Seconds of processor time for a thousand jobs."""
        found = [each.cpu_s / each.jobs * 1000 for each in self.drains]
        return statistics.median(found) if found else None

    def latency(self, percent: float) -> float | None:
        """Milliseconds: the median of the rounds' percentiles."""
        found = [each.at(percent) for each in self.latencies]
        return statistics.median(found) if found else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """``ours / theirs``, None where either is missing or nothing."""
    if ours is None or not theirs:
        return None
    return ours / theirs
