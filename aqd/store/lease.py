"""Leases: renewing, giving back, taking back.

Used by the dispatcher. Every change of a claimed job names id and token and therefore changes nothing for a
late owner; a job that was asked to end is CANCELLED by it, never QUEUED again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aqd.database import Connection, bool_array, float_array, int_array, run, text_array
from aqd.store.text import MAX_ERROR, MAX_PROGRESS, MAX_TRACEBACK, clean, clean_output, once

Pair = tuple[int, int]  # (job id, lease token)


class Release(NamedTuple):
    """A job given back with its attempt. ``interrupted``: it had been started; ``reason`` is for people,
    ``reason_code`` machine-readable. The rest is kept of a started one."""

    id: int
    token: int
    interrupted: bool
    reason: str
    age_s: float
    reason_code: str = "drain"
    traceback: str | None = None
    output: str | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_kb: int | None = None
    signal: int | None = None


class Lease(NamedTuple):
    """A lease that is still ours. ``extended`` False: somebody else has locked the row.
    ``cancelled``: the job was asked to end."""

    extended: bool
    cancelled: bool


class Progress(NamedTuple):
    """What a handler says about how far it is."""

    id: int
    token: int
    percent: float | None
    message: str


class RescueResult(NamedTuple):
    """Ids of jobs whose lease had expired, by what became of them."""

    requeued: list[int]
    failed: list[int]
    cancelled: list[int]


def renew(conn: Connection, pairs: Sequence[Pair], lease_s: float) -> dict[Pair, Lease]:
    """Extend the leases of these (id, token); returns those that are still ours.

    A row that somebody else has locked is not waited for.
    """
    if not pairs:
        return {}
    kept = _leases(conn, "renew_leases", pairs, extended=True, lease_s=lease_s)
    if missing := [pair for pair in pairs if pair not in kept]:
        kept |= _leases(conn, "still_held", missing, extended=False)
    return kept


def _leases(
    conn: Connection, statement: str, pairs: Sequence[Pair], *, extended: bool, **params: float
) -> dict[Pair, Lease]:
    ids, tokens = int_array(id for id, _ in pairs), int_array(token for _, token in pairs)
    rows = run(conn, statement, ids=ids, tokens=tokens, **params)
    return {(id, token): Lease(extended, cancelled) for id, token, cancelled in rows}


def store_progress(conn: Connection, entries: Iterable[Progress]) -> set[int]:
    """Store the latest word of each job; returns the ids that were changed. The others are lost, or locked
    by somebody else, which is not waited for."""
    batch = once(entries)
    if not batch:
        return set()
    rows = run(
        conn,
        "store_progress",
        ids=int_array(entry.id for entry in batch),
        tokens=int_array(entry.token for entry in batch),
        percents=float_array(_percent(entry.percent) for entry in batch),
        messages=text_array(clean(entry.message, MAX_PROGRESS) for entry in batch),
    )
    return {row[0] for row in rows}


def _percent(value: float | None) -> float | None:
    """Between 0 and 100, or None; NaN, too, is no progress. (Tiny numbers are none that a real holds.)"""
    if value is None or value != value:
        return None
    return round(min(max(value, 0.0), 100.0), 3)


def release(conn: Connection, releases: Iterable[Release], max_interruptions: int) -> dict[int, str]:
    """Give jobs back with their attempt; returns the ids that were ours, each with its state afterwards.

    A job interrupted more than ``max_interruptions`` times becomes FAILED, one that was asked to end CANCELLED.
    """
    batch = once(releases)
    if not batch:
        return {}
    rows = run(
        conn,
        "release_jobs",
        ids=int_array(entry.id for entry in batch),
        tokens=int_array(entry.token for entry in batch),
        interrupted=bool_array(entry.interrupted for entry in batch),
        reasons=text_array(clean(entry.reason, MAX_ERROR) for entry in batch),
        reason_codes=text_array(entry.reason_code or None for entry in batch),
        ages_s=float_array(entry.age_s for entry in batch),
        tracebacks=text_array(clean(entry.traceback, MAX_TRACEBACK) for entry in batch),
        outputs=text_array(clean_output(entry.output) for entry in batch),
        walls_s=float_array(entry.wall_s for entry in batch),
        cpus_s=float_array(entry.cpu_s for entry in batch),
        peaks_kb=int_array(entry.peak_kb for entry in batch),
        signals=int_array(entry.signal for entry in batch),
        max_interruptions=max_interruptions,
    )
    return dict(rows)


def reconcile(conn: Connection, node_id: str, held: Sequence[tuple[int, int]], older_than_s: float) -> int:
    """Return this node's PROCESSING jobs that are not among ``held`` and were claimed more than
    ``older_than_s`` ago (those that were asked to end are CANCELLED); gives their number."""
    rows = run(
        conn,
        "reconcile_node",
        node_id=node_id,
        ids=int_array(id for id, _ in held),
        tokens=int_array(token for _, token in held),
        older_than_s=older_than_s,
    )
    return len(rows)


def rescue(
    conn: Connection, limit: int, backoff_base_s: float, backoff_max_s: float, default_max_attempts: int
) -> RescueResult:
    """Take back expired leases; their attempt stays counted."""
    rows = run(
        conn,
        "rescue_jobs",
        limit=limit,
        backoff_base_s=float(backoff_base_s),
        backoff_max_s=float(backoff_max_s),
        default_max_attempts=default_max_attempts,
    )
    after = {
        state: [id for id, became in rows if became == state] for state in ("QUEUED", "FAILED", "CANCELLED")
    }
    return RescueResult(after["QUEUED"], after["FAILED"], after["CANCELLED"])
