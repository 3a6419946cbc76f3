"""What the API says of queues, types and nodes: the documents, and how rows become them.

Pure. As in :mod:`aqd.api.documents`: ids are strings, moments RFC 3339 in UTC, ``_s`` are seconds. ``as_of`` is the
moment of the snapshot that the figures are of (every ``keeper.figures_s``); null, and no figures, where none names it.
"""

import base64
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from aqd.api import render
from aqd.errors import InputError
from aqd.job import NAME_PATTERN, Moment
from aqd.store import figures
from aqd.strict_json import show

Row = TypeVar("Row")
Count = Annotated[int, Meta(ge=0)]


class Counts(Struct, kw_only=True):
    """Live jobs by state; QUEUED ones are ``due`` or ``scheduled`` for later."""

    due: Count
    scheduled: Count
    processing: Count
    failed: Count


class Quantiles(Struct, kw_only=True):
    """Seconds; each is at most twice too long or half too short."""

    p50: float
    p95: float
    p99: float


class Ended(Struct, kw_only=True):
    """Attempts of the last hour by outcome; the first three ended their jobs."""

    completed: Count
    failed: Count
    cancelled: Count
    retried: Count
    interrupted: Count


class Figures(Struct, kw_only=True):
    """What is known of a queue's or a type's jobs. ``_per_min`` are averages of the last five minutes, quantiles are of
    the same time (null: nothing ended)."""

    counts: Counts
    oldest_due_s: Annotated[
        float | None, Meta(description="For how long the oldest due job has been due; null: none is.")
    ]
    completed_per_min: float
    failed_per_min: float
    last_hour: Ended
    duration_s: Annotated[Quantiles | None, Meta(description="How long attempts took.")]
    waiting_s: Annotated[
        Quantiles | None, Meta(description="How long jobs were due before they were claimed.")
    ]


class Queue(Struct, kw_only=True):
    """A queue: its settings and its figures."""

    queue: str
    paused: bool
    max_running: Annotated[int | None, Meta(description="Jobs that may run at a time on all nodes.")]
    changed_at: Moment | None
    changed_by: str | None
    as_of: Moment | None
    figures: Figures | None


class QueuePage(Struct, kw_only=True):
    """By name. ``next_cursor`` is null on the last page."""

    queues: list[Queue]
    next_cursor: str | None


class Type(Struct, kw_only=True):
    """A type of jobs: what its handler says, how many live nodes serve it, and its figures."""

    type: str
    queue: Annotated[str | None, Meta(description="Where its jobs go that name no queue; null: default.")]
    max_attempts: int | None
    nodes: Count
    as_of: Moment | None
    figures: Figures | None


class TypePage(Struct, kw_only=True):
    """By name. ``next_cursor`` is null on the last page."""

    types: list[Type]
    next_cursor: str | None


class Plugin(Struct, kw_only=True):
    """A plugin of a node; ``digest`` is the start of its code's SHA-256."""

    name: str
    version: str
    digest: str
    state: str
    handlers: list[str]
    error: str | None


class Node(Struct, kw_only=True):
    """A daemon as it reported itself last. ``busy`` is null, and ``plugins`` empty, for one of the version before."""

    node_id: str
    name: str
    pid: int
    version: str
    generation: int
    state: str
    live: Annotated[bool, Meta(description="Seen within keeper.node_ttl_s.")]
    slots: int
    busy: int | None
    listener_up: bool | None
    types: list[str]
    plugins: list[Plugin]
    started_at: Moment
    seen_at: Moment


class NodeList(Struct, kw_only=True):
    """All daemons that have been seen lately, by name."""

    nodes: list[Node]


def queue(row: figures.QueueRow) -> Queue:
    return Queue(
        queue=row.queue,
        paused=row.paused,
        max_running=row.max_running,
        changed_at=render.moment(row.changed_at),
        changed_by=row.changed_by,
        as_of=render.moment(row.at),
        figures=_figures(row.stats),
    )


def type_(row: figures.TypeRow) -> Type:
    return Type(
        type=row.type,
        queue=row.queue,
        max_attempts=row.max_attempts,
        nodes=row.nodes,
        as_of=render.moment(row.at),
        figures=_figures(row.stats),
    )


def node(row: figures.NodeRow) -> Node:
    info = figures.node_info(row)
    return Node(
        node_id=row.node_id,
        name=row.name,
        pid=row.pid,
        version=row.version,
        generation=row.generation,
        state=row.state,
        live=row.live,
        slots=row.slots,
        busy=info.busy,
        listener_up=info.listener_up,
        types=row.types,
        plugins=[
            Plugin(
                name=each.name,
                version=each.version,
                digest=each.digest,
                state=each.state,
                handlers=each.handlers,
                error=each.error,
            )
            for each in info.plugins
        ],
        started_at=_moment(row.started_at),
        seen_at=_moment(row.seen_at),
    )


def _moment(value: datetime) -> str:
    text = render.moment(value)
    assert text is not None
    return text


def _figures(stats: figures.Stats | None) -> Figures | None:
    if stats is None:
        return None
    hour = stats.last_hour
    return Figures(
        counts=Counts(
            due=stats.counts.due,
            scheduled=stats.counts.scheduled,
            processing=stats.counts.processing,
            failed=stats.counts.failed,
        ),
        oldest_due_s=stats.oldest_due_s,
        completed_per_min=stats.completed_per_min,
        failed_per_min=stats.failed_per_min,
        last_hour=Ended(
            **{name: hour.get(name, 0) for name in Ended.__struct_fields__},
        ),
        duration_s=_quantiles(stats.duration_s),
        waiting_s=_quantiles(stats.waiting_s),
    )


def _quantiles(found: figures.Quantiles | None) -> Quantiles | None:
    return None if found is None else Quantiles(p50=found.p50, p95=found.p95, p99=found.p99)


# --- pages of names


def read_cursor(kind: str, text: str | None) -> str:
    """The name behind which the page begins, from what :func:`split` made."""
    if text is None:
        return ""
    try:
        plain = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)).decode("ascii")
    except ValueError:
        plain = ""
    name = plain.removeprefix(kind)
    if plain.startswith(kind) and name and _cursor(kind, name) == text and _is_name(name):
        return name
    raise InputError("cursor", f"{show(text)} is no cursor of this list; use next_cursor of the page before")


def split(
    rows: Sequence[Row], limit: int, kind: str, name_of: Callable[[Row], str]
) -> tuple[Sequence[Row], str | None]:
    """The rows of one page from up to ``limit + 1`` of them, and the cursor of the next; None on the last one."""
    shown = rows[:limit]
    return shown, _cursor(kind, name_of(shown[-1])) if len(rows) > limit else None


def _cursor(kind: str, name: str) -> str:
    return base64.urlsafe_b64encode(f"{kind}{name}".encode()).rstrip(b"=").decode()


def _is_name(name: str) -> Any:
    import re

    return re.fullmatch(NAME_PATTERN, name)
