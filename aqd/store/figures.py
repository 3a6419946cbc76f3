"""Figures: writing down what a node has counted, making snapshots of it, and reading those.

Nodes write differences (:func:`add_figures`). The keeper of one node makes the snapshots (:func:`refresh_stats`), which
cost a scan of the live jobs. Whoever reads gets what stands there already: a few rows, whatever the number of jobs.
Snapshots name at most :data:`NAMES_MAX` queues and types, those with most live jobs first.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from aqd.database import Connection, execute, int_array, run
from aqd.figures import ENDED, PAIRS_MAX, Cell, gauge
from aqd.histogram import JOBS

NAMES_MAX: Final = 1000
# Of how many queues there are gauges.
GAUGES_MAX: Final = 200
# From these on the metrics warn: vacuum is held back, and claims walk over what it cannot remove.
OLD_TRANSACTION_S: Final = 600.0
MANY_DEAD_ROWS: Final = 200_000
# Interrupted attempts say nothing of how long a job takes.
_TIMED: Final = (*ENDED, "retried")


class Quantiles(msgspec.Struct, kw_only=True):
    """Seconds, read off a histogram whose buckets double."""

    p50: float
    p95: float
    p99: float


class Counts(msgspec.Struct, kw_only=True):
    """Live jobs. QUEUED ones are due or scheduled for later."""

    due: int = 0
    scheduled: int = 0
    processing: int = 0
    failed: int = 0
    live: int = 0


class Stats(msgspec.Struct, kw_only=True):
    """What is known of a queue, or of a type. ``_per_min`` are averages of the last five minutes, quantiles of the same
    time; ``last_hour`` counts attempts by outcome."""

    counts: Counts = msgspec.field(default_factory=Counts)
    oldest_due_s: float | None = None
    completed_per_min: float = 0.0
    failed_per_min: float = 0.0
    duration_s: Quantiles | None = None
    waiting_s: Quantiles | None = None
    last_hour: dict[str, int] = msgspec.field(default_factory=dict)


class TableHealth(msgspec.Struct, kw_only=True):
    """What vacuum has to do with ``aqd.jobs`` and what holds it back."""

    dead_rows: int = 0
    cost_s: float = 0.0  # of the snapshot
    oldest_transaction_s: float | None = None
    holder: str | None = None

    @property
    def old_transaction(self) -> bool:
        return (self.oldest_transaction_s or 0.0) > OLD_TRANSACTION_S

    @property
    def many_dead_rows(self) -> bool:
        return self.dead_rows > MANY_DEAD_ROWS


class QueueRow(NamedTuple):
    """A queue. ``at`` and ``stats`` are None where no snapshot names it."""

    queue: str
    paused: bool
    max_running: int | None
    changed_at: datetime | None
    changed_by: str | None
    at: datetime | None
    stats: Stats | None


class TypeRow(NamedTuple):
    """A type. ``queue`` and ``max_attempts`` are its handler's, ``nodes`` how many live nodes serve it."""

    type: str
    queue: str | None
    max_attempts: int | None
    nodes: int
    at: datetime | None
    stats: Stats | None


class NodeRow(NamedTuple):
    """A node as it reported itself last. ``info`` is JSON text: ``busy``, ``listener_up``, ``plugins``."""

    node_id: str
    name: str
    pid: int
    version: str
    generation: int
    slots: int
    types: list[str]
    state: str
    started_at: datetime
    seen_at: datetime
    live: bool
    info: str | None


# --- writing


def add_figures(conn: Connection, node_id: str, cells: Iterable[Cell]) -> None:
    """Add what ``node_id`` has counted since the last time."""
    rows = [
        {
            "metric": cell.metric,
            "labels": cell.labels,
            "count": cell.count,
            "total": cell.total,
            "buckets": cell.buckets,
        }
        for cell in cells
    ]
    if rows:
        run(conn, "add_figures", node_id=node_id, cells=_json(rows), pairs_max=PAIRS_MAX)


def job_labels(conn: Connection, ids: Iterable[int]) -> list[tuple[int, str, str, float]]:
    """(id, queue, type, seconds between due and claimed) of live jobs."""
    return [(row[0], row[1], row[2], row[3]) for row in run(conn, "job_labels", ids=int_array(ids))]


def fold_figures(conn: Connection) -> int:
    """Add the figures of nodes that are gone to those of nobody; returns how many there were."""
    return execute(conn, "fold_figures", pairs_max=NAMES_MAX)[1]


def prune_minutes(conn: Connection) -> int:
    """Delete what is older than an hour; returns how many rows."""
    return execute(conn, "prune_minutes")[1]


def stats_are_fresh(conn: Connection, interval_s: float, cost_factor: float, pause_max_s: float) -> bool:
    """Whether somebody has made snapshots within ``interval_s``, or so lately that the next ones would cost more than
    one part in ``cost_factor`` of the time."""
    for _, data, age_s in run(conn, "get_stats", kind="table"):
        cost_s = msgspec.json.decode(data, type=TableHealth).cost_s
        return bool(age_s < max(interval_s * 0.9, min(cost_s * cost_factor, pause_max_s)))
    return False


def refresh_stats(conn: Connection) -> TableHealth:
    """Count, and write the snapshots down. To be called inside a transaction, whose planner settings it changes."""
    began = time.monotonic()
    run(conn, "allow_scans")
    health = TableHealth()
    health.dead_rows, health.oldest_transaction_s, health.holder = run(conn, "table_health")[0]
    queues: defaultdict[str, _Sum] = defaultdict(_Sum)
    types: defaultdict[str, _Sum] = defaultdict(_Sum)
    for queue, type, state, count, due, oldest_s in run(conn, "count_jobs"):
        queues[queue].add_jobs(state, count, due, oldest_s)
        types[type].add_jobs(state, count, due, oldest_s)
    window_s = 0.0
    for metric, labels, count, _, buckets, window_s in run(conn, "recent_minutes"):  # noqa: B007
        queues[labels[0]].add_recent(metric, labels, count, buckets)
        types[labels[1]].add_recent(metric, labels, count, buckets)
    for queue, type, outcome, count in run(conn, "last_hour"):
        for found in (queues[queue], types[type]):
            found.hour[outcome] = found.hour.get(outcome, 0) + count
    health.cost_s = time.monotonic() - began
    rows: list[dict[str, Any]] = [{"kind": "table", "name": "jobs", "data": health}]
    for kind, sums in (("queue", queues), ("type", types)):
        kept = sorted(sums.items(), key=lambda item: (-item[1].counts.live, item[0]))[:NAMES_MAX]
        rows += [{"kind": kind, "name": name, "data": found.stats(window_s)} for name, found in kept]
    run(conn, "store_stats", rows=_json(rows))
    return health


class _Sum:
    """What comes together for one queue or type."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.oldest_s: float | None = None
        self.outcomes: dict[str, int] = {}
        self.hour: dict[str, int] = {}
        self.duration = [0] * JOBS.size
        self.waiting = [0] * JOBS.size

    def add_jobs(self, state: str, count: int, due: int, oldest_s: float | None) -> None:
        counts = self.counts
        counts.live += count
        if state == "QUEUED":
            counts.due += due
            counts.scheduled += count - due
        elif state == "PROCESSING":
            counts.processing += count
        else:
            counts.failed += count
        if oldest_s is not None:
            self.oldest_s = max(self.oldest_s or 0.0, oldest_s)

    def add_recent(self, metric: str, labels: Sequence[str], count: int, buckets: Sequence[int]) -> None:
        if metric == "attempts":
            self.outcomes[labels[2]] = self.outcomes.get(labels[2], 0) + count
            return
        if metric == "duration" and labels[2] not in _TIMED:
            return
        sums = self.duration if metric == "duration" else self.waiting
        for place, number in enumerate(buckets[: JOBS.size]):
            sums[place] += number

    def stats(self, window_s: float) -> Stats:
        minutes = max(window_s, 60.0) / 60
        return Stats(
            counts=self.counts,
            oldest_due_s=self.oldest_s,
            completed_per_min=round(self.outcomes.get("completed", 0) / minutes, 3),
            failed_per_min=round(self.outcomes.get("failed", 0) / minutes, 3),
            duration_s=_quantiles(self.duration),
            waiting_s=_quantiles(self.waiting),
            last_hour=self.hour,
        )


def _quantiles(buckets: Sequence[int]) -> Quantiles | None:
    p50, p95, p99 = (JOBS.quantile_s(buckets, share) for share in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return Quantiles(p50=round(p50, 6), p95=round(p95, 6), p99=round(p99, 6))


def _json(rows: Sequence[Any]) -> str:
    return msgspec.json.encode(rows).decode()


# --- reading


def list_queues(conn: Connection, after: str = "", limit: int = 1000) -> list[QueueRow]:
    """Queues with names behind ``after``."""
    return [_queue(row) for row in run(conn, "list_queues", after=after, name=None, limit=limit)]


def get_queue(conn: Connection, name: str) -> QueueRow | None:
    """One queue; None if it has neither jobs nor settings."""
    rows = run(conn, "list_queues", after="", name=name, limit=1)
    return _queue(rows[0]) if rows else None


def _queue(row: Sequence[Any]) -> QueueRow:
    return QueueRow._make([*row[:6], _stats(row[6])])


def list_types(conn: Connection, node_ttl_s: float, after: str = "", limit: int = 1000) -> list[TypeRow]:
    """Types with names behind ``after``."""
    rows = run(conn, "list_types", after=after, name=None, limit=limit, node_ttl_s=node_ttl_s)
    return [_type(row) for row in rows]


def get_type(conn: Connection, name: str, node_ttl_s: float) -> TypeRow | None:
    """One type; None if it has no jobs and no node has ever declared it."""
    rows = run(conn, "list_types", after="", name=name, limit=1, node_ttl_s=node_ttl_s)
    return _type(rows[0]) if rows else None


def _type(row: Sequence[Any]) -> TypeRow:
    return TypeRow._make([*row[:5], _stats(row[5])])


def _stats(text: str | None) -> Stats | None:
    return None if text is None else msgspec.json.decode(text, type=Stats)


def list_nodes(conn: Connection, node_ttl_s: float) -> list[NodeRow]:
    """All nodes that have not expired, the silent ones included."""
    return [NodeRow._make(row) for row in run(conn, "list_nodes", node_ttl_s=node_ttl_s)]


def sum_figures(conn: Connection) -> list[Cell]:
    """What all nodes, past and present, have counted."""
    return [Cell(row[0], tuple(row[1]), *row[2:]) for row in run(conn, "sum_figures")]


def gauges(conn: Connection) -> list[Cell]:
    """The snapshots of the busiest queues and of the table, as gauges."""
    cells = []
    age_s: float | None = None
    for name, data, age_s in run(conn, "busiest_queues", limit=GAUGES_MAX):  # noqa: B007
        found = msgspec.json.decode(data, type=Stats)
        counts = found.counts
        cells += [
            gauge("queue_jobs", counts.due, name, "due"),
            gauge("queue_jobs", counts.scheduled, name, "scheduled"),
            gauge("queue_jobs", counts.processing, name, "processing"),
            gauge("queue_jobs", counts.failed, name, "failed"),
            gauge("queue_oldest", found.oldest_due_s or 0.0, name),
        ]
    for _, data, age_s in run(conn, "get_stats", kind="table"):  # noqa: B007
        health = msgspec.json.decode(data, type=TableHealth)
        cells += [
            gauge("dead_rows", health.dead_rows),
            gauge("oldest_transaction", health.oldest_transaction_s or 0.0),
            gauge("warning", health.old_transaction, "old_transaction"),
            gauge("warning", health.many_dead_rows, "dead_rows"),
        ]
    if age_s is not None:
        cells.append(gauge("stats_age", age_s))
    return cells


def node_gauges(nodes: Iterable[NodeRow]) -> list[Cell]:
    """Slots of the live nodes, by name (several on one machine together)."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for node in nodes:
        if node.live:
            info = node_info(node)
            sums["slots", node.name] += node.slots
            sums["busy", node.name] += info.busy or 0
            up = sums["listener_up", node.name] or 0.0
            sums["listener_up", node.name] = max(up, float(bool(info.listener_up)))
    return [gauge(metric, value, name) for (metric, name), value in sorted(sums.items())]


class NodePlugin(msgspec.Struct, kw_only=True):
    """A plugin of a node; ``digest`` is the start of its code's SHA-256."""

    name: str
    version: str = ""
    digest: str = ""
    state: str = "loaded"
    handlers: list[str] = msgspec.field(default_factory=list)
    error: str | None = None


class NodeInfo(msgspec.Struct, kw_only=True):
    """What a node says beside what claims depend on. None, and no plugins: it is of the version before."""

    busy: int | None = None
    listener_up: bool | None = None
    plugins: list[NodePlugin] = msgspec.field(default_factory=list)


def node_info(node: NodeRow) -> NodeInfo:
    return NodeInfo() if node.info is None else msgspec.json.decode(node.info, type=NodeInfo)
