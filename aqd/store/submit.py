"""Submitting jobs.

Used by the API, the client and the command line, on the caller's connection and in its transaction.

Fails with :class:`InputError` for what the database refuses, with the argument's name.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg

from aqd.database import Connection, run, text_array
from aqd.errors import IdempotencyConflict, InputError
from aqd.job import DEFAULT_KEY_TTL_HOURS, JobRequest
from aqd.store.look import EnqueuedJob, JobRow, get_job
from aqd.strict_json import show


def enqueue(
    conn: Connection,
    request: JobRequest,
    *,
    scope: str = "",
    ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> EnqueuedJob:
    """Store a job; in the caller's transaction if ``conn`` is in one.

    With an idempotency key, of ``scope``, the job may be an earlier one: see ``outcome``. Raises
    :class:`InputError` for what the database refuses, with the argument's name, and
    :class:`IdempotencyConflict` if the key stands for another request.
    """
    with refusals():
        if request.idempotency_key is None:
            return EnqueuedJob._make(run(conn, "enqueue", **plain_params(request))[0])
        rows = run(conn, "enqueue_keyed", **keyed_params(request, scope, ttl_hours))
    id, outcome, differs = rows[0]
    if outcome in ("conflict", "rejected"):
        raise conflict(request.idempotency_key, id, differs)
    return found_again(id, outcome, get_job(conn, id))


def plain_params(request: JobRequest) -> dict[str, Any]:
    """The parameters of the statement ``enqueue``."""
    return {
        "type": request.type,
        "payload": request.payload,
        "queue": request.queue,
        "priority": request.priority,
        "run_at": request.run_at,
        "delay_s": request.delay_s,
        "max_attempts": request.max_attempts,
        "timeout_s": request.timeout_s,
        "tags": text_array(request.tags) if request.tags else None,
        "meta": request.meta,
    }


def keyed_params(request: JobRequest, scope: str, ttl_hours: float) -> dict[str, Any]:
    """The parameters of the statement ``enqueue_keyed``."""
    return plain_params(request) | {
        "idempotency_key": request.idempotency_key,
        "on_conflict": str(request.on_conflict),
        "ttl_hours": ttl_hours,
        "scope": scope,
    }


def conflict(key: str | None, id: int, differs: list[str] | None) -> IdempotencyConflict:
    """The error for a key that stands for job ``id``; ``differs``: the fields in which the requests do."""
    text = f"the idempotency key {show(key)} stands for job {id}"
    if differs:
        text += f", which was asked for with another {', '.join(differs)}"
    return IdempotencyConflict(text, id, tuple(differs or ()))


def found_again(id: int, outcome: str, row: JobRow | None) -> EnqueuedJob:
    """What submitting under a key answers; ``row`` None: the first job has been deleted meanwhile."""
    if row is None:
        return EnqueuedJob(id, None, None, None, None, outcome)
    return EnqueuedJob(id, row.state, row.run_at, row.created_at, row.queue, outcome)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What the database refuses about a job, as :class:`InputError`."""
    try:
        yield
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
