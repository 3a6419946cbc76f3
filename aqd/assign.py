"""Which worker gets how many jobs, and how many to claim: pure decisions of the dispatcher.

A worker runs one job at a time. Several *short* jobs may travel in one frame, as many as fit into
``frame_ms`` of expected work and never more than the backlog divided by the slots. What a type costs is
learnt from its outcomes; a type never seen, and one that takes longer than a frame, travels alone and only
to an idle worker. A worker is topped up while it still has work, so that it does not wait for the
dispatcher between two frames.

With ``frame_ms = 0`` every job travels alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Final

FRAME_JOBS_MAX: Final = 100
FRAME_BYTES_MAX: Final = 96 * 1024  # a message's limit is 128 KiB
CLAIM_MAX: Final = 1000
# Weight of the newest job in a type's estimate. Upwards quickly (a type that got slow must not be stacked),
# downwards slowly.
_UP: Final = 0.5
_DOWN: Final = 0.2


@dataclass(slots=True)
class Estimates:
    """How long a job of each type will probably take, in nanoseconds."""

    unknown_ns: int
    _types: dict[str, float] = field(default_factory=dict)
    mean_ns: float = 0.0

    def expected_ns(self, type: str) -> int:
        return int(self._types.get(type, self.unknown_ns))

    def learn(self, type: str, wall_ns: int) -> None:
        known = self._types.get(type)
        self._types[type] = wall_ns if known is None else _moved(known, wall_ns)
        self.mean_ns = wall_ns if not self.mean_ns else _moved(self.mean_ns, wall_ns)

    def keep(self, types: Iterable[str]) -> None:
        """Forget the types that are no longer served."""
        wanted = set(types)
        self._types = {t: ns for t, ns in self._types.items() if t in wanted}


def _moved(known: float, newest: float) -> float:
    return known + (_UP if newest > known else _DOWN) * (newest - known)


@dataclass(frozen=True, slots=True)
class Budget:
    """The size of frames; ``frame_ns`` 0 means one job each."""

    frame_ns: int

    def frame(self, expected: Iterable[tuple[int, int]], *, backlog: int, workers: int, room: int) -> int:
        """How many of the waiting jobs go into the next frame; ``expected``: (duration in ns, payload
        bytes) of each in turn. At least one if there is one and room for it."""
        most = min(FRAME_JOBS_MAX, room, ceil(backlog / max(workers, 1)))
        count = total = size = 0
        for duration, length in expected:
            if count and (
                count >= most or total + duration > self.frame_ns or size + length > FRAME_BYTES_MAX
            ):
                break
            if not count and room < 1:
                break
            count += 1
            total += duration
            size += length
        return count

    def wants_more(self, load_ns: int, unfinished: int) -> bool:
        """Whether a worker may be given a frame now: it is idle, or about to be."""
        if not unfinished:
            return True
        return bool(self.frame_ns) and load_ns < self.frame_ns / 2

    def stacks(self, mean_ns: float) -> bool:
        """Whether jobs that take so long travel together, and are claimed ahead; of none is known how long."""
        return bool(mean_ns) and int(self.frame_ns / mean_ns) > 1

    def demand(self, *, idle: int, workers: int, ready: int, mean_ns: float) -> int:
        """How many jobs to claim now. Long jobs are not claimed ahead: another node may be idle."""
        if not workers:
            return 0
        if not self.stacks(mean_ns):
            return max(0, idle - ready)
        per_worker = int(self.frame_ns / mean_ns)
        target = min(CLAIM_MAX, 2 * workers * min(per_worker, FRAME_JOBS_MAX))
        # Half a target at a time: many small claims cost more than a few large ones.
        return target - ready if ready < target / 2 else 0


__all__ = ["CLAIM_MAX", "FRAME_JOBS_MAX", "Budget", "Estimates"]
