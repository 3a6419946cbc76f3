"""Which worker gets how many jobs, and how many to claim: pure decisions of the dispatcher.

A worker runs one job at a time. Several *short* jobs may travel in one frame, as many as fit into
``frame_ms`` of expected work, and no more than the backlog divided by the slots once that is worth dividing. What a type costs is
learnt from its outcomes; a type never seen, and one that takes longer than a frame, travels alone and only
to an idle worker. A worker is topped up while it still has work, so that it does not wait for the
dispatcher between two frames.

With ``frame_ms = 0`` every job travels alone, and to an idle worker only, unless all that the worker has will take less
than :data:`ALONE_NS`: otherwise two context switches would be the greater part of what a short job costs.

Short jobs are claimed ahead in any case: a claim for each would cost more than the job.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Final

FRAME_JOBS_MAX: Final = 200
# Work that is not divided further: a frame costs its worker some 90 µs of processor time, whatever is in it.
SMALLEST_NS: Final = 400_000
# Of frames of one job, so much work may be under way to one worker, and so many. (No-op jobs, 4 slots, medians of 3
# runs: 1.5 times the rate; dispatcher 121 -> 59 µs a job, workers 132 -> 73, server 62 -> 38: less sleep, larger records.)
ALONE_NS: Final = 200_000
ALONE_MAX: Final = 8
FRAME_BYTES_MAX: Final = 96 * 1024  # a message's limit is 128 KiB
AHEAD_MAX: Final = 2000  # jobs that wait in the dispatcher
# Jobs that take less than half of it are claimed ahead, so many that each worker has four times as much to do.
AHEAD_NS: Final = 5_000_000
# A slot counts as idle so long before its job will probably be done: a claim takes a few milliseconds, and with a job of
# 50 ms every millisecond in which a slot waits for it is 2 % of what it can do.
LEAD_NS: Final = 10_000_000
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

    def learn(self, type: str, *walls_ns: int) -> None:
        """How long jobs of the type took, in the order of their ends."""
        self._types[type] = _moved(self._types.get(type) or walls_ns[0], walls_ns)
        self.mean_ns = _moved(self.mean_ns or walls_ns[0], walls_ns)

    def known(self, type: str) -> bool:
        return type in self._types

    def keep(self, types: Iterable[str]) -> None:
        """Forget the types that are no longer served."""
        wanted = set(types)
        self._types = {t: ns for t, ns in self._types.items() if t in wanted}


def _moved(known: float, newest: Iterable[int]) -> float:
    for wall_ns in newest:
        known += (_UP if wall_ns > known else _DOWN) * (wall_ns - known)
    return known


@dataclass(frozen=True, slots=True)
class Budget:
    """The size of frames; ``frame_ns`` 0 means one job each."""

    frame_ns: int

    def frame(self, expected: Iterable[tuple[int, int]], *, backlog: int, workers: int, room: int) -> int:
        """How many of the waiting jobs go into the next frame; ``expected``: (duration in ns, payload
        bytes) of each in turn. At least one if there is one and room for it."""
        share = ceil(backlog / max(workers, 1))
        if room < 1:
            return 0
        count = total = size = 0
        for duration, length in expected:
            total += duration
            size += length
            if count and (
                count >= FRAME_JOBS_MAX
                or count >= room
                or (count >= share and total > SMALLEST_NS)
                or total > self.frame_ns
                or size > FRAME_BYTES_MAX
            ):
                break
            count += 1
        return count

    def wants_more(self, load_ns: int, unfinished: int) -> bool:
        """Whether a worker may be given a frame now: it is idle, or about to be. (Of the shortest jobs it has half a
        frame in hand, so that frames stay large: what is done once a frame costs the worker alone some 90 µs.)"""
        if not unfinished:
            return True
        if not self.frame_ns:
            return load_ns < ALONE_NS and unfinished < ALONE_MAX
        return load_ns < self.frame_ns / 2 and unfinished < FRAME_JOBS_MAX

    def stacks(self, mean_ns: float) -> bool:
        """Whether jobs that take so long are claimed ahead, and travel together if they may; of none is known how long."""
        return bool(mean_ns) and int(self.ahead_ns / mean_ns) > 1

    @property
    def ahead_ns(self) -> int:
        return self.frame_ns or AHEAD_NS

    def demand(self, *, idle: int, workers: int, ready: int, mean_ns: float) -> int:
        """How many jobs to claim now, by however many claims; ``idle``: workers that are, or will be in a moment. Long jobs
        are not claimed further ahead: another node may be idle."""
        if not workers:
            return 0
        if not self.stacks(mean_ns):
            return max(0, idle - ready)
        per_worker = int(self.ahead_ns / mean_ns)
        target = min(AHEAD_MAX, 4 * workers * min(per_worker, FRAME_JOBS_MAX))
        # From half a target on: many small claims cost more than a few large ones.
        return target - ready if ready < target / 2 else 0


__all__ = ["AHEAD_MAX", "FRAME_JOBS_MAX", "Budget", "Estimates"]
