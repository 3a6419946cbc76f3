"""Outcomes: what became of an attempt.

Used by the dispatcher. Promises: nothing is changed for a late owner; an outcome whose COMMIT got no answer may
simply be recorded again; one bad row does not stop its batch; a job that was asked to end is COMPLETED or
CANCELLED after its attempt, never QUEUED or FAILED.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import psycopg

from aqd.database import (
    Connection,
    float_array,
    in_transaction,
    int_array,
    packed_floats,
    packed_ints,
    packed_texts,
    run,
    text_array,
)
from aqd.store.text import MAX_ERROR, MAX_TRACEBACK, clean, clean_output, once
from aqd.store.wait import tell_ended

_DAYS_AHEAD: Final = 7


class Completion(NamedTuple):
    """A job that completed ``age_s`` seconds ago. ``result`` is JSON text or None, ``output`` what it printed
    (the end is kept)."""

    id: int
    token: int
    result: str | None
    age_s: float
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_kb: int | None = None
    output: str | None = None


class Completions(NamedTuple):
    """The fields of many :class:`Completion`, one sequence each, all of the same length."""

    ids: Sequence[int]
    tokens: Sequence[int]
    results: Sequence[str | None]
    ages_s: Sequence[float]
    walls_s: Sequence[float | None]
    cpus_s: Sequence[float | None]
    peaks_kb: Sequence[int | None]
    outputs: Sequence[str | None] = ()  # empty: none of them printed anything


class Failure(NamedTuple):
    """An attempt that ended badly ``age_s`` seconds ago. ``kind`` is failed, crashed, timed_out, lost or
    cancelled (the job is CANCELLED, as it is with any other kind once it was asked to end);
    ``retry_in_s`` None means: no further attempt, FAILED, with ``final_error`` (None: ``error``) in its
    record. ``reason`` is machine-readable, "" for none."""

    id: int
    token: int
    kind: str
    error: str
    traceback: str | None
    retry_in_s: float | None
    age_s: float
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_kb: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    reason: str = ""
    output: str | None = None
    final_error: str | None = None


_Entry = TypeVar("_Entry", Completion, Failure)
# One row of a batch cannot be stored.
_REFUSED: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
# What a statement has changed: ids, each with its job's state afterwards.
_Changed = dict[int, str]


def record_completed(conn: Connection, completions: Iterable[Completion]) -> set[int]:
    """Move completed jobs to history; returns the ids that are recorded, now or by an earlier try.

    A result that PostgreSQL cannot store makes that one job FAILED, with the reason.
    """
    batch = list(completions)
    return record_columns(conn, Completions._make(zip(*batch, strict=True))) if batch else set()


def record_columns(conn: Connection, batch: Completions) -> set[int]:
    """The same for a batch by columns: 0.5 µs a job less than with an object for each."""
    if not batch.ids:
        return set()
    try:
        done = _write_columns(conn, batch)
    except _REFUSED as error:
        if in_transaction(conn):
            raise
        outputs = batch.outputs or [None] * len(batch.ids)
        entries = once(map(Completion, *batch[:-1], outputs))
        return set(_split(conn, entries, _write_completed, "find_completed", _unstorable_result, error))
    if len(done) < len(batch.ids):
        pairs = zip(batch.ids, batch.tokens, strict=True)
        done |= _find(conn, "find_completed", [(id, token) for id, token in pairs if id not in done])
    return done


def record_failed(conn: Connection, failures: Iterable[Failure]) -> dict[int, str]:
    """Write failed attempts down; returns the ids that are recorded, each with its job's state after that:
    QUEUED, FAILED, CANCELLED, or "" where an earlier try has recorded it."""
    return _record(conn, once(failures), _write_failed, "find_attempts", _unstorable_failure)


def _record(
    conn: Connection,
    batch: list[_Entry],
    write: Callable[[Connection, list[_Entry]], _Changed],
    find: str,
    set_aside: Callable[[Connection, _Entry, psycopg.Error], _Changed],
) -> _Changed:
    """Write a batch; split it where a row is refused; look up what was not found."""
    if not batch:
        return {}
    try:
        done = write(conn, batch)
    except _REFUSED as error:
        if in_transaction(conn):
            raise
        return _split(conn, batch, write, find, set_aside, error)
    missing = [(entry.id, entry.token) for entry in batch if entry.id not in done]
    return done | dict.fromkeys(_find(conn, find, missing), "")


def _split(
    conn: Connection,
    batch: list[_Entry],
    write: Callable[[Connection, list[_Entry]], _Changed],
    find: str,
    set_aside: Callable[[Connection, _Entry, psycopg.Error], _Changed],
    error: psycopg.Error,
) -> _Changed:
    """Write a batch that was refused as a whole, in halves; what is refused alone is set aside."""
    if len(batch) == 1:
        return set_aside(conn, batch[0], error)
    middle = len(batch) // 2
    return _record(conn, batch[:middle], write, find, set_aside) | _record(
        conn, batch[middle:], write, find, set_aside
    )


def _find(conn: Connection, find: str, pairs: list[tuple[int, int]]) -> set[int]:
    """Of these (id, token) the ids that an earlier try has recorded."""
    if not pairs:
        return set()
    ids, tokens = zip(*pairs, strict=True)
    return {row[0] for row in run(conn, find, ids=int_array(ids), tokens=int_array(tokens))}


def _write_completed(conn: Connection, batch: list[Completion]) -> _Changed:
    return dict.fromkeys(_write_columns(conn, Completions._make(zip(*batch, strict=True))), "COMPLETED")


def _write_columns(conn: Connection, batch: Completions) -> set[int]:
    def write() -> set[int]:
        ((_, recorded, waited),) = run(
            conn,
            "record_completed",
            ids=packed_ints(batch.ids),
            tokens=packed_ints(batch.tokens),
            results=packed_texts(batch.results),
            ages_s=packed_floats(batch.ages_s),
            walls_s=packed_floats(batch.walls_s),
            cpus_s=packed_floats(batch.cpus_s),
            peaks_kb=packed_ints(batch.peaks_kb),
            outputs=packed_texts(
                [clean_output(output) for output in batch.outputs] if any(batch.outputs) else []
            ),
        )
        done = set(batch.ids if recorded is None else recorded)
        if waited and done:
            tell_ended(conn, done)
        return done

    try:
        return write()
    except psycopg.errors.CheckViolation as error:
        # No partition for the day has the same SQLSTATE as a bad row, but names no constraint.
        if error.diag.constraint_name or in_transaction(conn):
            raise
        create_partitions(conn)
        return write()


def create_partitions(conn: Connection) -> list[str]:
    """Make history partitions from yesterday to a week ahead; returns the days that were made."""
    return [row[0] for row in run(conn, "create_history_partitions", days_ahead=_DAYS_AHEAD)]


def _unstorable_result(conn: Connection, entry: Completion, error: psycopg.Error) -> _Changed:
    reason = " ".join(filter(None, (error.diag.message_primary, error.diag.message_detail))) or str(error)
    failure = Failure(
        id=entry.id,
        token=entry.token,
        kind="failed",
        error=f"the handler succeeded, but PostgreSQL cannot store its result: {reason}",
        traceback=None,
        retry_in_s=None,
        age_s=entry.age_s,
        wall_s=entry.wall_s,
        cpu_s=entry.cpu_s,
        peak_kb=entry.peak_kb,
        reason="result",
        output=entry.output,
    )
    return record_failed(conn, [failure])


def _write_failed(conn: Connection, batch: list[Failure]) -> _Changed:
    rows = run(
        conn,
        "record_failed",
        ids=int_array([entry.id for entry in batch]),
        tokens=int_array([entry.token for entry in batch]),
        kinds=text_array([entry.kind for entry in batch]),
        errors=text_array([clean(entry.error, MAX_ERROR) for entry in batch]),
        tracebacks=text_array([clean(entry.traceback, MAX_TRACEBACK) for entry in batch]),
        retries_in_s=float_array([entry.retry_in_s for entry in batch]),
        ages_s=float_array([entry.age_s for entry in batch]),
        walls_s=float_array([entry.wall_s for entry in batch]),
        cpus_s=float_array([entry.cpu_s for entry in batch]),
        peaks_kb=int_array([entry.peak_kb for entry in batch]),
        signals=int_array([entry.signal for entry in batch]),
        exit_codes=int_array([entry.exit_code for entry in batch]),
        reasons=text_array([clean(entry.reason, MAX_ERROR) or None for entry in batch]),
        outputs=text_array([clean_output(entry.output) for entry in batch]),
        final_errors=text_array([clean(entry.final_error, MAX_ERROR) for entry in batch]),
    )
    # Of a CANCELLED one the trigger that made it so has told.
    if rows and rows[0][2] and (ended := [row[0] for row in rows if row[1] == "FAILED"]):
        tell_ended(conn, ended)
    return {row[0]: row[1] for row in rows}


def _unstorable_failure(conn: Connection, entry: Failure, error: psycopg.Error) -> _Changed:
    """Nothing in a failure may keep it from being written: what is left is id, token and decision."""
    bare = entry._replace(
        error=f"the failure could not be stored as reported: {error.diag.message_primary}",
        traceback=None,
        kind="cancelled" if entry.kind == "cancelled" else "failed",
        output=None,
        wall_s=None,
        cpu_s=None,
        peak_kb=None,
        signal=None,
        exit_code=None,
    )
    return _write_failed(conn, [bare])
