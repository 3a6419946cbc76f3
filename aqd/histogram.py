"""Histograms with buckets that double, as plain lists of counts.

Pure; used by the dispatcher (filling), the keeper (percentiles) and whoever shows them. Bucket 0 holds what is shorter
than the scale's unit, bucket n what is shorter than 2**n units, the last one the rest: a quantile that is read off
is at most twice too high or half too low, whatever the durations are, and histograms of all nodes are added place by
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LONGEST_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Scale:
    """``unit_s``: the upper bound of the first bucket in seconds; ``size``: how many buckets, the last one included."""

    unit_s: float
    size: int

    def index(self, seconds: float) -> int:
        """The bucket that ``seconds`` belong to; what is negative counts as nothing (0.2 µs a call)."""
        units = int(min(max(seconds, 0.0), _LONGEST_S) / self.unit_s)
        return min(units.bit_length(), self.size - 1)

    @property
    def bounds_s(self) -> list[float]:
        """The upper bounds of all buckets but the last, which has none."""
        return [self.unit_s * (1 << place) for place in range(self.size - 1)]

    def quantile_s(self, buckets: Sequence[int], share: float) -> float | None:
        """The time that ``share`` (0..1) of what was counted did not exceed, drawn straight through its bucket; the
        lower bound of the last bucket for what lies in it. None: nothing was counted."""
        wanted = share * sum(buckets)
        if not wanted:
            return None
        below = 0
        for place, count in enumerate(buckets):
            if count and below + count >= wanted:
                low = self.unit_s * (1 << (place - 1)) if place else 0.0
                if place >= self.size - 1:
                    return low
                return low + (self.unit_s * (1 << place) - low) * (wanted - below) / count
            below += count
        return self.unit_s * (1 << (self.size - 2))  # pragma: no cover - rounding


# Jobs: below 1 ms, … below 2**22 ms (70 minutes), longer. Statements: below 0.1 ms, … below 26 s, longer.
JOBS: Final = Scale(0.001, 24)
STATEMENTS: Final = Scale(0.0001, 20)
