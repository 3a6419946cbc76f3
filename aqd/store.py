"""Everything that is written about jobs, and the names that other modules use.

Used by the dispatcher (outcomes, leases, rescue), the API and the client (enqueue). Each function is
one statement in autocommit, so it has happened or not; a deadlock or serialisation conflict is repeated
inside (``database.run``).

Promises: every change of a claimed job names id and token and therefore changes nothing for a late
owner; functions return the ids that were changed, so that the caller sees what it has lost; a job that was
asked to end is COMPLETED or CANCELLED after its attempt, never QUEUED or FAILED; an outcome whose COMMIT got no answer may simply be recorded again. One bad row does not stop its batch.

How it fails: :class:`InputError` for a refused job; errors of psycopg otherwise, with nothing changed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import psycopg

from aqd.database import (
    Connection,
    bool_array,
    connect,
    float_array,
    in_transaction,
    int_array,
    is_disconnect,
    run,
    text_array,
)
from aqd.errors import InputError
from aqd.hookspecs import HandlerInfo
from aqd.job import JobRequest
from aqd.store_read import (
    AttemptRow,
    Cancelled,
    EnqueuedJob,
    FailedJobRow,
    Health,
    JobFacts,
    JobFilter,
    JobRow,
    NodeRow,
    cancel_job,
    cancelled,
    get_attempts,
    get_job,
    health,
    job_facts,
    list_failed,
    list_jobs,
    list_nodes,
    retry_job,
)

__all__ = [
    "AttemptRow",
    "Cancelled",
    "Completion",
    "Connection",
    "EnqueuedJob",
    "FailedJobRow",
    "Failure",
    "Health",
    "JobFacts",
    "JobFilter",
    "JobRow",
    "Lease",
    "NodeRow",
    "NodeState",
    "Progress",
    "Release",
    "RescueResult",
    "cancel_job",
    "cancelled",
    "connect",
    "declare_handlers",
    "enqueue",
    "fail_unknown",
    "get_attempts",
    "get_job",
    "health",
    "is_disconnect",
    "job_facts",
    "list_failed",
    "list_jobs",
    "list_nodes",
    "node_gone",
    "node_seen",
    "reconcile",
    "record_completed",
    "record_failed",
    "release",
    "renew",
    "rescue",
    "retry_job",
    "store_progress",
]

# Bounds on what a failure may store, in characters.
MAX_ERROR: Final = 8_192
MAX_TRACEBACK: Final = 65_536
MAX_OUTPUT: Final = 65_536
MAX_PROGRESS: Final = 1_000
_DAYS_AHEAD: Final = 7


Pair = tuple[int, int]  # (job id, lease token)


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


class NodeState(NamedTuple):
    """What a node says about itself."""

    node_id: str
    name: str
    pid: int
    version: str
    generation: int
    slots: int
    types: Collection[str]
    state: str


# --- submitting -----------------------------------------------------------------------------------


def enqueue(conn: Connection, request: JobRequest) -> EnqueuedJob:
    """Store a job; in the caller's transaction if ``conn`` is in one.

    Raises :class:`InputError` for what the database refuses, with the argument's name.
    """
    try:
        rows = run(
            conn,
            "enqueue",
            type=request.type,
            payload=request.payload,
            queue=request.queue,
            priority=request.priority,
            run_at=request.run_at,
            delay_s=request.delay_s,
            max_attempts=request.max_attempts,
            timeout_s=request.timeout_s,
        )
    except psycopg.errors.InvalidParameterValue as error:
        if error.diag.column_name:
            reason = error.diag.message_detail or error.diag.message_primary or str(error)
            raise InputError(error.diag.column_name, reason) from error
        raise
    except (
        psycopg.errors.InvalidTextRepresentation,
        psycopg.errors.UntranslatableCharacter,
        psycopg.errors.ProgramLimitExceeded,
        psycopg.errors.StatementTooComplex,
    ) as error:
        reason = " ".join(filter(None, (error.diag.message_primary, error.diag.message_detail)))
        raise InputError("payload", f"PostgreSQL cannot store it: {reason}") from error
    return EnqueuedJob._make(rows[0])


# --- leases ---------------------------------------------------------------------------------------


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
    batch = _once(entries)
    if not batch:
        return set()
    rows = run(
        conn,
        "store_progress",
        ids=int_array(entry.id for entry in batch),
        tokens=int_array(entry.token for entry in batch),
        percents=float_array(_percent(entry.percent) for entry in batch),
        messages=text_array(_clean(entry.message, MAX_PROGRESS) for entry in batch),
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
    batch = _once(releases)
    if not batch:
        return {}
    rows = run(
        conn,
        "release_jobs",
        ids=int_array(entry.id for entry in batch),
        tokens=int_array(entry.token for entry in batch),
        interrupted=bool_array(entry.interrupted for entry in batch),
        reasons=text_array(_clean(entry.reason, MAX_ERROR) for entry in batch),
        reason_codes=text_array(entry.reason_code or None for entry in batch),
        ages_s=float_array(entry.age_s for entry in batch),
        tracebacks=text_array(_clean(entry.traceback, MAX_TRACEBACK) for entry in batch),
        outputs=text_array(_clean_output(entry.output) for entry in batch),
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


# --- outcomes -------------------------------------------------------------------------------------

_Entry = TypeVar("_Entry", Completion, Failure, Release, Progress)
# What a statement has changed: ids, each with its job's state afterwards.
_Changed = dict[int, str]


def record_completed(conn: Connection, completions: Iterable[Completion]) -> set[int]:
    """Move completed jobs to history; returns the ids that are recorded, now or by an earlier try.

    A result that PostgreSQL cannot store makes that one job FAILED, with the reason.
    """
    return set(_record(conn, _once(completions), _write_completed, "find_completed", _unstorable_result))


def record_failed(conn: Connection, failures: Iterable[Failure]) -> dict[int, str]:
    """Write failed attempts down; returns the ids that are recorded, each with its job's state after that:
    QUEUED, FAILED, CANCELLED, or "" where an earlier try has recorded it."""
    return _record(conn, _once(failures), _write_failed, "find_attempts", _unstorable_failure)


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
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded) as error:
        if in_transaction(conn):
            raise
        if len(batch) == 1:
            return set_aside(conn, batch[0], error)
        middle = len(batch) // 2
        return _record(conn, batch[:middle], write, find, set_aside) | _record(
            conn, batch[middle:], write, find, set_aside
        )
    missing = [entry for entry in batch if entry.id not in done]
    if missing:
        rows = run(
            conn,
            find,
            ids=int_array(entry.id for entry in missing),
            tokens=int_array(entry.token for entry in missing),
        )
        done |= {row[0]: "" for row in rows}
    return done


def _write_completed(conn: Connection, batch: list[Completion]) -> _Changed:
    def write() -> _Changed:
        rows = run(
            conn,
            "record_completed",
            ids=int_array([entry.id for entry in batch]),
            tokens=int_array([entry.token for entry in batch]),
            results=text_array([entry.result for entry in batch]),
            ages_s=float_array([entry.age_s for entry in batch]),
            walls_s=float_array([entry.wall_s for entry in batch]),
            cpus_s=float_array([entry.cpu_s for entry in batch]),
            peaks_kb=int_array([entry.peak_kb for entry in batch]),
            outputs=text_array([_clean_output(entry.output) for entry in batch]),
        )
        return {row[0]: "COMPLETED" for row in rows}

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
        errors=text_array([_clean(entry.error, MAX_ERROR) for entry in batch]),
        tracebacks=text_array([_clean(entry.traceback, MAX_TRACEBACK) for entry in batch]),
        retries_in_s=float_array([entry.retry_in_s for entry in batch]),
        ages_s=float_array([entry.age_s for entry in batch]),
        walls_s=float_array([entry.wall_s for entry in batch]),
        cpus_s=float_array([entry.cpu_s for entry in batch]),
        peaks_kb=int_array([entry.peak_kb for entry in batch]),
        signals=int_array([entry.signal for entry in batch]),
        exit_codes=int_array([entry.exit_code for entry in batch]),
        reasons=text_array([_clean(entry.reason, MAX_ERROR) or None for entry in batch]),
        outputs=text_array([_clean_output(entry.output) for entry in batch]),
        final_errors=text_array([_clean(entry.final_error, MAX_ERROR) for entry in batch]),
    )
    return dict(rows)


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


def _clean(text: str | None, limit: int) -> str | None:
    """Text that PostgreSQL takes: no NUL, no lone surrogate, bounded; the end of a long one is kept,
    because that is where a traceback says what happened."""
    if text is None:
        return None
    return _without_middle(_escape(_without_middle(text, limit)), limit)  # escaping lengthens it


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _clean_output(text: str | None) -> str | None:
    """What a job has printed, as PostgreSQL takes it: only the end of a long one, where it says how it ended."""
    return text and _escape(text[-MAX_OUTPUT:])[-MAX_OUTPUT:]


def _escape(text: str) -> str:
    if "\0" in text:
        text = text.replace("\0", "\\0")
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def _once(entries: Iterable[_Entry]) -> list[_Entry]:
    """Without repetitions of an (id, token), which would be written down twice."""
    return list({(entry.id, entry.token): entry for entry in entries}.values())


# --- nodes ----------------------------------------------------------------------------------------


def node_seen(conn: Connection, node: NodeState) -> None:
    """Say that the node lives, and what it can do."""
    run(
        conn,
        "node_seen",
        **node._replace(types=())._asdict() | {"types": text_array(sorted(node.types))},
    )


def limit_lock_waits(conn: Connection, seconds: float) -> None:
    """From now on a statement on this connection that waits longer for a lock fails with 55P03."""
    run(conn, "set_lock_timeout", value=f"{round(seconds * 1000)}ms")


def declare_handlers(conn: Connection, handlers: Iterable[HandlerInfo]) -> None:
    """Say what handlers want for jobs that do not say it themselves: their queue and number of attempts."""
    known = sorted(handlers, key=lambda handler: handler.type)
    run(
        conn,
        "declare_handlers",
        types=text_array(handler.type for handler in known),
        queues=text_array(handler.queue for handler in known),
        max_attempts=int_array(handler.max_attempts for handler in known),
    )


def node_gone(conn: Connection, node_id: str) -> None:
    """Say that the node has ended."""
    run(conn, "node_gone", node_id=node_id)


def fail_unknown(
    conn: Connection, grace_s: float, node_ttl_s: float, limit: int, stale_s: float = 60.0
) -> list[tuple[int, str]]:
    """Fail due jobs whose type no live node has declared for ``grace_s``; returns their (id, type).

    To be called every few seconds: the grace counts only while calls are less than ``stale_s`` apart.
    """
    if not run(conn, "note_unknown_types", node_ttl_s=node_ttl_s, stale_s=stale_s):
        return []
    rows = run(
        conn, "fail_unknown_types", grace_s=grace_s, node_ttl_s=node_ttl_s, stale_s=stale_s, limit=limit
    )
    return [(row[0], row[1]) for row in rows]
