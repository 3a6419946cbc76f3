"""Submitting jobs from Python, inside the application's own transaction.

Runs in applications. Nothing is connected to but what the caller hands in::

    with psycopg.connect(…) as conn:
        conn.execute("insert into orders …")
        client.enqueue(conn, "send_mail", {"order": 42})    # commits, or rolls back, with the order

Promises: the same validation as the API, before anything is sent; one statement; no commit, no rollback,
no retry: the transaction stays the caller's. The connection may be of any kind that psycopg 3 has
(autocommit or not, any row factory, with a pooler in between).

Fails with :class:`aqd.errors.InputError` for a job that is refused (its ``field``, ``reason`` and
``bound`` say why), :class:`NotFoundError` and :class:`ConflictError` for jobs that do not exist or are in
another state, and with psycopg's own errors for everything else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from aqd import job, statements, store
from aqd.errors import InputError, NotFoundError
from aqd.store import Cancelled, EnqueuedJob, JobRow

__all__ = [
    "Cancelled",
    "EnqueuedJob",
    "InputError",
    "JobRow",
    "cancel",
    "cancel_async",
    "enqueue",
    "enqueue_async",
    "get",
    "retry",
]


def enqueue(
    conn: psycopg.Connection[Any],
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
) -> EnqueuedJob:
    """Store a job. ``payload`` is any JSON value (dict, list, str, number, bool, None).

    ``run_at`` is an aware datetime (or RFC 3339), ``delay_s`` seconds from the start of the transaction;
    not both. ``max_attempts`` and ``timeout_s`` override the handler's. Higher ``priority`` (-100 to 100)
    goes first.
    """
    request = job.validate(
        type,
        payload,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_s=delay_s,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
    )
    with _tuple_rows(conn):
        return store.enqueue(conn, request)


async def enqueue_async(
    conn: psycopg.AsyncConnection[Any],
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
) -> EnqueuedJob:
    """As :func:`enqueue`, on an asynchronous connection."""
    request = job.validate(
        type,
        payload,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_s=delay_s,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
    )
    names = statements.get("enqueue").params
    try:
        rows = await _run_async(conn, "enqueue", **{name: getattr(request, name) for name in names})
    except psycopg.errors.InvalidParameterValue as error:
        if error.diag.column_name is None:
            raise
        raise InputError(error.diag.column_name, error.diag.message_detail or str(error)) from error
    return EnqueuedJob._make(rows[0])


def get(conn: psycopg.Connection[Any], id: int | str) -> JobRow:
    """Everything about a job; ``payload`` and ``result`` as JSON text. :class:`NotFoundError` without it."""
    number = job.parse_id(str(id))
    with _tuple_rows(conn):
        row = store.get_job(conn, number)
    if row is None:
        raise NotFoundError(f"there is no job {number}")
    return row


def retry(conn: psycopg.Connection[Any], id: int | str) -> EnqueuedJob:
    """Make a FAILED job QUEUED again, as if new."""
    number = job.parse_id(str(id))
    with _tuple_rows(conn):
        return store.retry_job(conn, number)


def cancel(conn: psycopg.Connection[Any], id: int | str) -> Cancelled:
    """Cancel a job; its ``state`` is the one after it.

    CANCELLED: it will not run, now or again. PROCESSING: it runs, and is asked to end when the transaction
    commits; it will be CANCELLED, or COMPLETED if it gets done before. COMPLETED, FAILED: it had ended, and
    stays as it is. Doing it again is harmless. :class:`NotFoundError` if there is no such job.
    """
    number = job.parse_id(str(id))
    with _tuple_rows(conn):
        return store.cancel_job(conn, number)


async def cancel_async(conn: psycopg.AsyncConnection[Any], id: int | str) -> Cancelled:
    """As :func:`cancel`, on an asynchronous connection."""
    number = job.parse_id(str(id))
    state = (await _run_async(conn, "cancel_job", id=number))[0][0]
    if state is None:
        raise NotFoundError(f"there is no job {number}")
    found = await _run_async(conn, "get_job_live", id=number) or await _run_async(
        conn, "get_job_finished", id=number, within_s=None
    )
    return store.cancelled(number, state, JobRow._make(found[0]) if found else None)


@contextmanager
def _tuple_rows(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """The application's row factory set aside: our statements expect tuples."""
    factory = conn.row_factory
    conn.row_factory = tuple_row
    try:
        yield
    finally:
        conn.row_factory = factory


async def _run_async(
    conn: psycopg.AsyncConnection[Any], name: str, /, **params: Any
) -> list[tuple[Any, ...]]:
    """As :func:`aqd.database.run`; a conflict is the caller's to repeat, with its transaction."""
    statement = statements.get(name)
    arguments = tuple(_plain(params[each]) for each in statement.params)
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.text, arguments or None, binary=True)
        return await cursor.fetchall()


def _plain(value: Any) -> Any:
    """Integers as text, typed by the statement's cast (see :mod:`aqd.database`)."""
    return str(value) if isinstance(value, int) else value
