"""Reading, for the API and the command line, and what is done by hand: retry and cancel.

Used through ``aqd.store``. Each function is one statement (``get_job`` up to three), on the caller's
connection, bounded by its ``statement_timeout``. Moments are aware datetimes in UTC, JSON is text.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

from aqd import migrate
from aqd.database import Connection, int_array, run
from aqd.errors import ConflictError, NotFoundError

_RECENT_S: Final = 2 * 86_400.0


class JobRow(NamedTuple):
    """A job, live or finished. ``payload`` and ``result`` are JSON text; they and ``output`` are None in lists."""

    id: int
    state: str
    type: str
    queue: str
    priority: int
    payload: str | None
    result: str | None
    attempt: int
    max_attempts: int | None
    timeout_s: float | None
    run_at: datetime
    created_at: datetime
    claimed_at: datetime | None
    finished_at: datetime | None
    last_error: str | None
    node_id: str | None
    crashes: int
    interruptions: int
    retries: int
    wall_s: float | None
    cpu_s: float | None
    peak_kb: int | None
    cancel_requested_at: datetime | None
    progress_percent: float | None
    progress_message: str | None
    output: str | None
    tags: list[str] | None
    meta: str | None


class EnqueuedJob(NamedTuple):
    """What submitting (or retrying) answers.

    ``outcome``: ``created``; under an idempotency key also ``existing`` (the first job, as it is now) and
    ``replaced`` (the waiting job has this request now). All but ``id`` and ``outcome`` are None where the first
    job is gone, deleted by hand.
    """

    id: int
    state: str | None
    run_at: datetime | None
    created_at: datetime | None
    queue: str | None
    outcome: str = "created"


class FailedJobRow(NamedTuple):
    """A dead-letter record. ``state`` is the job's present one, None if it is no longer live."""

    id: int
    job_id: int
    type: str
    queue: str
    kind: str
    error: str | None
    traceback: str | None
    attempts: int
    failures: int
    failed_at: datetime
    retried_at: datetime | None
    resolved_at: datetime | None
    resolution: str | None
    state: str | None
    reason: str | None
    note: str | None  # why it was discarded, and by whom
    discarded_by: str | None


class AttemptRow(NamedTuple):
    """An attempt that did not complete."""

    attempt: int
    kind: str
    error: str | None
    traceback: str | None
    signal: int | None
    exit_code: int | None
    started_at: datetime | None
    finished_at: datetime
    wall_s: float | None
    cpu_s: float | None
    peak_kb: int | None
    node_id: str | None
    output: str | None
    reason: str | None


class Cancelled(NamedTuple):
    """What cancelling answers. ``state`` PROCESSING: asked to end, its node was told."""

    id: int
    state: str
    cancel_requested_at: datetime | None
    finished_at: datetime | None


class JobFacts(NamedTuple):
    """What the recorder must know of a job that it has not claimed itself."""

    type: str
    max_attempts: int | None
    crashes: int


class Health(NamedTuple):
    """``problem`` is None if the schema fits."""

    schema_current: int
    schema_wanted: int
    problem: str | None
    live_nodes: int


def get_job(conn: Connection, id: int) -> JobRow | None:
    """The job, or None. Looks at live jobs, then at recent history, then at all of it.

    A job that finishes between two of these looks is found by the later one.
    """
    rows = (
        run(conn, "get_job_live", id=id)
        or run(conn, "get_job_finished", id=id, within_s=_RECENT_S)
        or run(conn, "get_job_finished", id=id, within_s=None)
    )
    return JobRow._make(rows[0]) if rows else None


def retry_job(conn: Connection, id: int) -> EnqueuedJob:
    """Put a FAILED job back into the queue as if new.

    Raises :class:`NotFoundError`, or :class:`ConflictError` for a job in another state: of several
    simultaneous callers one succeeds.
    """
    rows = run(conn, "retry_job", id=id)
    if rows:
        return EnqueuedJob._make(rows[0])
    raise not_retried(id, get_job(conn, id))


def not_retried(id: int, seen: JobRow | None) -> NotFoundError | ConflictError:
    """The error for a job that a retry has not changed, from a look afterwards."""
    if seen is None:
        return NotFoundError(f"there is no job {id}")
    return ConflictError(f"job {id} is {seen.state}; only a FAILED job can be retried")


def cancel_job(conn: Connection, id: int) -> Cancelled:
    """End a job: at once if it waits, by its node if it runs; one that has ended stays as it is.

    Raises :class:`NotFoundError`. Repeating it is harmless.
    """
    state: str | None = run(conn, "cancel_job", id=id)[0][0]
    if state is None:
        raise NotFoundError(f"there is no job {id}")
    return cancelled(id, state, get_job(conn, id))


def cancelled(id: int, state: str, seen: JobRow | None) -> Cancelled:
    """What cancelling answers, from the state that it gave and a look afterwards (None: pruned in between).

    A running job that ended in between is told as ended. A FAILED one that somebody retried in between is
    told as FAILED: that is what was cancelled in vain, and the retry was not asked to end.
    """
    if seen is None:
        return Cancelled(id, state, None, None)
    state = seen.state if state == "PROCESSING" else state
    return Cancelled(id, state, seen.cancel_requested_at, seen.finished_at)


def get_attempts(conn: Connection, id: int) -> list[AttemptRow]:
    """The attempts of a job that did not complete, oldest first; the last hundred (``list_attempts`` has all)."""
    return [AttemptRow._make(row) for row in run(conn, "get_attempts", job_id=id)]


def job_facts(conn: Connection, ids: Iterable[int]) -> dict[int, JobFacts]:
    """Type, own bound on attempts, and crashes so far of live jobs, by id."""
    return {row[0]: JobFacts._make(row[1:]) for row in run(conn, "job_facts", ids=int_array(ids))}


def health(conn: Connection, node_ttl_s: float = 30.0) -> Health:
    """Whether the schema fits and how many nodes are alive; raises if the database is away."""
    schema = migrate.status(conn)
    live = 0
    if schema.problem is None:
        live = run(conn, "count_live_nodes", node_ttl_s=node_ttl_s)[0][0]
    return Health(schema.current, schema.wanted, schema.problem, live)
