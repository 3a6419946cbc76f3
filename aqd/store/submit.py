"""Submitting jobs.

Used by the API, the client and the command line, on the caller's connection and in its transaction.

Promises: one job is one statement. Many are as many statements as ``many_statements`` cuts them into, and it is the
caller who puts a transaction round them; keys are taken in their order within a chunk, so that two batches never
wait for each other.

Fails with :class:`InputError` for what the database refuses, with the argument's name.

What many jobs cost, of 150 bytes each, one connection, 20,000 in a transaction (PostgreSQL 15, 2 cores; in
microseconds a job): one statement each 650; psycopg's executemany (a pipeline) 211; arrays through the function
``aqd.enqueue`` 152; **arrays into INSERT 13** (16 with 100 a statement, 15 with 5,000); the same arrays dumped by psycopg
32; COPY 16 with 1,000 and 10 with 20,000 a statement. So arrays: COPY cannot say which queue a handler has, what
time it is, or which ids it made, and its ids had to be fetched before.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg

from aqd.database import Connection, Row, float_array, int_array, lock_denied, run, text_array
from aqd.errors import IdempotencyConflict, InputError, KeyInProgress
from aqd.job import DEFAULT_KEY_TTL_HOURS, JobRequest, OnConflict
from aqd.store.look import EnqueuedJob
from aqd.strict_json import show

# Of one statement. Jobs of 64 MiB each, whatever their number, must not become one message of the protocol (1 GiB).
CHUNK_JOBS: Final = 1000
CHUNK_BYTES: Final = 8 << 20


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
    name, params = statement(request, scope, ttl_hours)
    with refusals():
        rows = run(conn, name, **params)
    return or_raise(answer(rows[0], request))


def statement(request: JobRequest, scope: str, ttl_hours: float) -> tuple[str, dict[str, Any]]:
    """What to run for one request: the statement's name and its parameters."""
    params = {
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
    if request.idempotency_key is None:
        return "enqueue", params
    return "enqueue_keyed", params | {
        "idempotency_key": request.idempotency_key,
        "on_conflict": str(request.on_conflict),
        "ttl_hours": ttl_hours,
        "scope": scope,
    }


def enqueue_many(
    conn: Connection,
    requests: Sequence[JobRequest],
    *,
    scope: str = "",
    ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> list[EnqueuedJob | IdempotencyConflict]:
    """Store many jobs; the answers in the order of the requests, where a key stands for another one its error.

    Without a transaction of the caller's what was stored before an error stays. A deadlock is repeated only for
    a statement that is a transaction of its own.
    """
    answers: dict[int, EnqueuedJob | IdempotencyConflict] = {}
    for name, places, params in many_statements(requests, scope, ttl_hours):
        with refusals():
            rows = run(conn, name, **params)
        for place, row in zip(places, rows, strict=True):
            answers[place] = answer(row, requests[place])
    return [answers[place] for place in range(len(requests))]


def enqueue_apart(
    conn: Connection,
    requests: Sequence[JobRequest],
    *,
    scope: str = "",
    ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
    within_s: float,
) -> list[EnqueuedJob | IdempotencyConflict | KeyInProgress]:
    """As :func:`enqueue_many`, in the caller's transaction, where others may hold some of the keys: those jobs get
    :class:`KeyInProgress`, and the others are stored. So do those that are not reached ``within_s``. From here on
    the transaction waits for no lock any more."""
    keyed = [place for place, each in enumerate(requests) if each.idempotency_key is not None]
    plain = [place for place, each in enumerate(requests) if each.idempotency_key is None]
    keyed.sort(key=lambda place: str(requests[place].idempotency_key))
    found = [requests[place] for place in plain]
    answers: dict[int, EnqueuedJob | IdempotencyConflict | KeyInProgress] = dict(
        zip(plain, enqueue_many(conn, found, scope=scope, ttl_hours=ttl_hours), strict=True)
    )
    until = time.monotonic() + within_s
    # Others' transactions may be short ones: half of the time is for waiting.
    run(conn, "limit_lock_wait", value=f"{max(1, round(within_s * 500 / max(1, len(keyed))))}ms")
    for place in keyed:
        if time.monotonic() >= until:
            answers[place] = KeyInProgress(
                "other keys of the batch are held, and no time was left: nothing was stored"
            )
            continue
        try:
            with conn.transaction(), held_keys(requests[place]):
                (answers[place],) = enqueue_many(conn, [requests[place]], scope=scope, ttl_hours=ttl_hours)
        except KeyInProgress as error:
            answers[place] = error
    return [answers[place] for place in range(len(requests))]


@contextlib.contextmanager
def held_keys(*requests: JobRequest) -> Iterator[None]:
    """A lock on a key of these that could not be had, as :class:`KeyInProgress`."""
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
        keys = sorted({each.idempotency_key for each in requests if each.idempotency_key is not None})
        if not keys or not lock_denied(error, "idempotency_keys"):
            raise
        which = f"this key, {show(keys[0])}" if len(keys) == 1 else "one of these keys"
        raise KeyInProgress(
            f"another transaction is submitting under {which}, and has not ended: nothing was stored"
        ) from error


def many_statements(
    requests: Sequence[JobRequest], scope: str, ttl_hours: float
) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """What to run for many requests: each statement's name, the places of the requests that it answers, in the order
    of its rows, and its parameters."""
    # With the first statement all that may be replaced is locked, in the order of everybody who changes many jobs.
    replace = any(request.on_conflict == OnConflict.REPLACE for request in requests)
    hold = sorted({r.idempotency_key for r in requests if r.idempotency_key is not None})
    for chunk in _chunks(requests):
        keyed = [place for place in chunk if requests[place].idempotency_key is not None]
        plain = [place for place in chunk if requests[place].idempotency_key is None]
        if keyed:
            # Keys are ASCII, so this order is everybody's, whatever the collation.
            keyed.sort(key=lambda place: str(requests[place].idempotency_key))
            yield (
                "enqueue_many_keyed",
                keyed,
                _many_params([requests[place] for place in keyed])
                | _many_keys([requests[place] for place in keyed])
                | {"ttl_hours": ttl_hours, "scope": scope, "hold": text_array(hold if replace else ())},
            )
            hold = []  # each statement a transaction of its own: a deadlock there is repeated
        if plain:
            yield "enqueue_many", plain, _many_params([requests[place] for place in plain])


def _chunks(requests: Sequence[JobRequest]) -> Iterator[list[int]]:
    """The places of the requests, as many together as one statement takes."""
    places: list[int] = []
    size = 0
    for place, request in enumerate(requests):
        length = len(request.payload) + len(request.meta or "")
        if places and (len(places) >= CHUNK_JOBS or size + length > CHUNK_BYTES):
            yield places
            places, size = [], 0
        places.append(place)
        size += length
    if places:
        yield places


def _many_params(requests: Sequence[JobRequest]) -> dict[str, Any]:
    return {
        "types": text_array(r.type for r in requests),
        "payloads": text_array(r.payload for r in requests),
        "queues": text_array(r.queue for r in requests),
        "priorities": int_array(r.priority for r in requests),
        "run_ats": text_array(None if r.run_at is None else r.run_at.isoformat() for r in requests),
        "delays_s": float_array(r.delay_s for r in requests),
        "max_attempts": int_array(r.max_attempts for r in requests),
        "timeouts_s": float_array(r.timeout_s for r in requests),
        "tags": text_array(text_array(r.tags) if r.tags else None for r in requests),
        "metas": text_array(r.meta for r in requests),
    }


def _many_keys(requests: Sequence[JobRequest]) -> dict[str, Any]:
    return {
        "keys": text_array(r.idempotency_key for r in requests),
        "on_conflicts": text_array(str(r.on_conflict) for r in requests),
    }


def answer(row: Row, request: JobRequest) -> EnqueuedJob | IdempotencyConflict:
    """What a row of the statements says: a job, or the error for a key that stands for another request."""
    outcome = row[5]
    if outcome in ("conflict", "rejected"):
        return conflict(request.idempotency_key, row[0], row[6])
    return EnqueuedJob._make(row[:6])


def or_raise(found: EnqueuedJob | IdempotencyConflict) -> EnqueuedJob:
    """The job; raises the error."""
    if isinstance(found, IdempotencyConflict):
        raise found
    return found


def conflict(key: str | None, id: int, differs: list[str] | None) -> IdempotencyConflict:
    """The error for a key that stands for job ``id``; ``differs``: the fields in which the requests do."""
    text = f"the idempotency key {show(key)} stands for job {id}"
    if differs:
        text += f", which was asked for with another {', '.join(differs)}"
    return IdempotencyConflict(text, id, tuple(differs or ()))


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
