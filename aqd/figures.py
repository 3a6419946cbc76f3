"""Figures: what a node counts of its jobs and statements, and how they are added up.

Run by the dispatcher, whose recorder fills a :class:`Figures` and whose main thread drains it every second: what
has come in goes to the master (for ``aqd metrics`` while the database is away) and, through the keeper's thread,
to the database. Only differences travel, and every receiver adds them up: a dispatcher that dies takes its last
seconds with it and nothing else, and sums never go down.

Promises: bounded, whatever jobs are submitted: of pairs (queue, type) the first :data:`PAIRS_MAX` are counted apart
and the others together as ``other``. Counting a job takes 1.8 µs here and 2.7 with what the recorder does for it
(processor time, CPython 3.11).
"""

import threading
from collections.abc import Iterable
from operator import add
from typing import Any, Final, NamedTuple

import msgspec

from aqd.histogram import JOBS, STATEMENTS, Scale

PAIRS_MAX: Final = 200
OTHER: Final = "other"
# What becomes of an attempt. The first three end the job.
ENDED: Final = ("completed", "failed", "cancelled")
OUTCOMES: Final = (*ENDED, "retried", "interrupted")
# How many kinds of attempts have their cells at hand.
FOUND_MAX: Final = 1000
# A message of so many cells has at most 60 kB.
CELLS_MAX: Final = 100

Key = tuple[str, ...]  # the metric, then its labels


class Metric(NamedTuple):
    """How a metric is shown. ``scale`` is that of a histogram; without one it is a counter, or a gauge."""

    name: str
    help: str
    labels: tuple[str, ...]
    scale: Scale | None = None
    gauge: bool = False


METRICS: Final = {
    "attempts": Metric(
        "aqd_attempts",
        "Attempts by outcome: completed, failed (the job too), cancelled, retried, interrupted; and why.",
        ("queue", "type", "outcome", "reason"),
    ),
    "duration": Metric(
        "aqd_attempt_duration_seconds", "How long attempts took.", ("queue", "type", "outcome"), JOBS
    ),
    "waiting": Metric(
        "aqd_job_waiting_seconds",
        "How long jobs were due before they were claimed, each attempt for itself.",
        ("queue", "type"),
        JOBS,
    ),
    "statement": Metric(
        "aqd_statement_duration_seconds",
        "How long the dispatcher's statements took: claim, record, renew.",
        ("operation",),
        STATEMENTS,
    ),
    "restarts": Metric("aqd_worker_restarts", "Workers that ended before their time.", ("cause",)),
    "queue_jobs": Metric(
        "aqd_queue_jobs",
        "Live jobs by state: due, scheduled, processing, failed.",
        ("queue", "state"),
        gauge=True,
    ),
    "queue_oldest": Metric(
        "aqd_queue_oldest_due_seconds",
        "For how long the oldest due job has been due.",
        ("queue",),
        gauge=True,
    ),
    "stats_age": Metric("aqd_stats_age_seconds", "How old the gauges of the queues are.", (), gauge=True),
    "dead_rows": Metric(
        "aqd_jobs_dead_rows", "Dead rows of aqd.jobs that vacuum has not removed.", (), gauge=True
    ),
    "oldest_transaction": Metric(
        "aqd_oldest_transaction_seconds",
        "Age of the oldest transaction that holds back vacuum in this database.",
        (),
        gauge=True,
    ),
    "warning": Metric(
        "aqd_database_warning",
        "1 where something wants a look: old_transaction, dead_rows.",
        ("kind",),
        gauge=True,
    ),
    "slots": Metric("aqd_slots", "Slots of live nodes.", ("node",), gauge=True),
    "busy": Metric("aqd_slots_busy", "Slots that are running a job.", ("node",), gauge=True),
    "database_up": Metric(
        "aqd_database_up", "Whether the daemon reaches the database.", ("node",), gauge=True
    ),
    "generation": Metric(
        "aqd_generation", "The generation of configuration and plugins that serves.", ("node",), gauge=True
    ),
    "listener_up": Metric(
        "aqd_listener_up", "Whether the node is woken by notifications.", ("node",), gauge=True
    ),
}

# Metrics that are counted by queue and type.
PAIRED: Final = frozenset(
    name for name, metric in METRICS.items() if not metric.gauge and metric.labels[:2] == ("queue", "type")
)


class Cell(msgspec.Struct, array_like=True):
    """A number with its labels: ``total`` is the sum of what a histogram counted in ``buckets``, or a gauge's value."""

    metric: str
    labels: tuple[str, ...]
    count: int = 0
    total: float = 0.0
    buckets: list[int] = []

    @property
    def key(self) -> Key:
        return (self.metric, *self.labels)


def gauge(metric: str, value: float, *labels: str) -> Cell:
    """The cell of a gauge."""
    return Cell(metric, labels, 1, float(value))


# Jobs, microseconds they took, microseconds they waited; buckets of both.
_Sums = list[Any]


class Attempt(NamedTuple):
    """An attempt that has been recorded. ``reason`` is "" for one that completed; times are in seconds."""

    queue: str
    type: str
    outcome: str
    reason: str
    wall_s: float | None
    waited_s: float | None


class Figures:
    """Cells by their labels. Any thread may use it."""

    def __init__(self, pairs_max: int = PAIRS_MAX) -> None:
        self._lock = threading.Lock()
        self._cells: dict[Key, Cell] = {}
        self._found: dict[tuple[str, str, str, str], tuple[Cell, Cell, Cell]] = {}
        self._pairs: set[tuple[str, str]] = set()
        self._pairs_max = pairs_max

    def attempts(self, attempts: Iterable[Attempt]) -> None:
        """Count attempts that were recorded."""
        with self._lock:
            for queue, type, outcome, reason, wall_s, waited_s in attempts:
                found = self._found.get((queue, type, outcome, reason))
                if found is None:
                    found = self._find(queue, type, outcome, reason)
                number, duration, waiting = found
                number.count += 1
                if wall_s is not None:
                    duration.count += 1
                    duration.total += wall_s
                    duration.buckets[JOBS.index(wall_s)] += 1
                if waited_s is not None:
                    waiting.count += 1
                    waiting.total += waited_s
                    waiting.buckets[JOBS.index(waited_s)] += 1

    def completed(self, jobs: Iterable[tuple[str, str, int, int]]) -> None:
        """Count jobs that completed: (queue, type, how long it took, how long it was due before), both in
        whole microseconds from 0 on. The same as :meth:`attempts` for thousands a second (0.3 µs each)."""
        last = JOBS.size - 1  # buckets of 1 ms, 2 ms, … (JOBS), found without a division by its unit
        with self._lock:
            sums: dict[tuple[str, str], _Sums] = {}
            for queue, type, wall_us, waited_us in jobs:
                sum = sums.get((queue, type))
                if sum is None:
                    sum = sums[queue, type] = [0, 0, 0, [0] * JOBS.size, [0] * JOBS.size]
                sum[0] += 1
                sum[1] += wall_us
                sum[2] += waited_us
                sum[3][min((wall_us // 1000).bit_length(), last)] += 1
                sum[4][min((waited_us // 1000).bit_length(), last)] += 1
            for (queue, type), (count, *times_us, walls, waits) in sums.items():
                found = self._found.get((queue, type, "completed", ""))
                number, *timed = found or self._find(queue, type, "completed", "")
                number.count += count
                for cell, time_us, buckets in zip(timed, times_us, (walls, waits), strict=True):
                    cell.count += count
                    cell.total += time_us / 1e6
                    cell.buckets[:] = map(add, cell.buckets, buckets)

    def _find(self, queue: str, type: str, outcome: str, reason: str) -> tuple[Cell, Cell, Cell]:
        """The three cells of such an attempt, found by one look from then on."""
        label = self._pair(queue, type)
        cells = (
            self._cell(("attempts", *label, outcome, reason)),
            self._cell(("duration", *label, outcome), JOBS),
            self._cell(("waiting", *label), JOBS),
        )
        if len(self._found) < FOUND_MAX:
            self._found[queue, type, outcome, reason] = cells
        return cells

    def _pair(self, queue: str, type: str) -> tuple[str, str]:
        """What a pair is counted as: itself, if it is one of the first."""
        if (queue, type) in self._pairs:
            return queue, type
        if len(self._pairs) >= self._pairs_max:
            return OTHER, OTHER
        if queue != OTHER or type != OTHER:
            self._pairs.add((queue, type))
        return queue, type

    def statement(self, operation: str, seconds: float) -> None:
        """Count a statement."""
        with self._lock:
            cell = self._cell(("statement", operation), STATEMENTS)
            cell.count += 1
            cell.total += seconds
            cell.buckets[STATEMENTS.index(seconds)] += 1

    def add(self, cells: Iterable[Cell]) -> None:
        """Add what others have counted, one after the other: each has its own first pairs."""
        with self._lock:
            for given in cells:
                key = given.key
                if given.metric in PAIRED:
                    key = (given.metric, *self._pair(*given.labels[:2]), *given.labels[2:])
                cell = self._cell(key)
                cell.count += given.count
                cell.total += given.total
                missing = len(given.buckets) - len(cell.buckets)
                cell.buckets += [0] * missing
                for place, count in enumerate(given.buckets):
                    cell.buckets[place] += count

    def drain(self) -> list[Cell]:
        """All cells, which begin again at nothing."""
        with self._lock:
            cells, self._cells, self._found = self._cells, {}, {}
        return [cell for cell in cells.values() if cell.count]

    def cells(self) -> list[Cell]:
        """All cells, which go on. Not to be changed."""
        with self._lock:
            return list(self._cells.values())

    def _cell(self, key: Key, scale: Scale | None = None) -> Cell:
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(key[0], key[1:], buckets=[0] * scale.size if scale else [])
        return cell
