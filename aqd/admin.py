"""Changing jobs and queues from Python: for operators' scripts.

Runs in scripts and applications, on the caller's connection, as :mod:`aqd.client`, which submits and looks::

    with psycopg.connect(…, autocommit=True) as conn:
        failed = admin.job_filter(type="send_mail", error="connection refused")
        print(admin.retry_many(conn, failed, dry_run=True).matched)
        admin.retry_many(conn, failed)

"Which jobs" is either ids (at most 1,000) or a filter from :func:`job_filter`; :data:`EVERYTHING` is all of them. Each
``…_many`` works on a set that is chosen once, the oldest 10,000 jobs, in batches of 500 (:mod:`aqd.store.change`):
on a connection in autocommit each batch is a transaction; inside a transaction of the caller's all of it is one.
``by`` is written down as who did it; by default the connection's database role. Each function has an asynchronous
twin on a :class:`psycopg.AsyncConnection`.

Fails with :class:`aqd.errors.InputError`, :class:`NotFoundError`, :class:`ConflictError` (the job's state does not allow
it), :class:`TooBroad` (a filter that takes longer than the server's ``statement_timeout``), and with psycopg's own
errors for everything else.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, TypeAlias

import psycopg

from aqd import job, store
from aqd.errors import ConflictError, InputError, NotFoundError, TooBroad
from aqd.store import Action, Changed, JobFilter, QueueSettings, Result, UpdatedJob, job_filter

__all__ = [
    "EVERYTHING",
    "Changed",
    "ConflictError",
    "InputError",
    "JobFilter",
    "NotFoundError",
    "QueueSettings",
    "Result",
    "TooBroad",
    "UpdatedJob",
    "cancel_many",
    "cancel_many_async",
    "delete",
    "delete_async",
    "delete_many",
    "delete_many_async",
    "discard",
    "discard_async",
    "discard_many",
    "discard_many_async",
    "job_filter",
    "pause",
    "pause_async",
    "resume",
    "resume_async",
    "retry_many",
    "retry_many_async",
    "set_limit",
    "set_limit_async",
    "update",
    "update_async",
]

Conn: TypeAlias = psycopg.Connection[Any]
AsyncConn: TypeAlias = psycopg.AsyncConnection[Any]
Which: TypeAlias = JobFilter | Iterable[int | str]

EVERYTHING: Final = "everything"


# --- one job ----------------------------------------------------------------------------------------


def update(
    conn: Conn,
    id: int | str,
    *,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
) -> UpdatedJob:
    """Change the priority or the moment of a QUEUED job; a moment in the past means now."""
    steps = store.update_steps(job.parse_id(str(id)), priority=priority, run_at=run_at, delay_s=delay_s)
    return store.drive(conn, steps)


async def update_async(
    conn: AsyncConn,
    id: int | str,
    *,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
) -> UpdatedJob:
    """As :func:`update`."""
    steps = store.update_steps(job.parse_id(str(id)), priority=priority, run_at=run_at, delay_s=delay_s)
    return await store.drive_async(conn, steps)


def delete(conn: Conn, id: int | str) -> str:
    """Remove a job that does not run, with all that is known of it; returns the state that it was in."""
    return store.drive(conn, store.delete_steps(job.parse_id(str(id))))


async def delete_async(conn: AsyncConn, id: int | str) -> str:
    """As :func:`delete`."""
    return await store.drive_async(conn, store.delete_steps(job.parse_id(str(id))))


def discard(conn: Conn, id: int | str, reason: str, *, by: str | None = None) -> str:
    """Give up a FAILED job: CANCELLED, its record resolved with the reason. Its state after that."""
    return store.drive(conn, store.discard_steps(job.parse_id(str(id)), reason, _by(conn, by)))


async def discard_async(conn: AsyncConn, id: int | str, reason: str, *, by: str | None = None) -> str:
    """As :func:`discard`."""
    return await store.drive_async(conn, store.discard_steps(job.parse_id(str(id)), reason, _by(conn, by)))


# --- many -------------------------------------------------------------------------------------------


def retry_many(conn: Conn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """FAILED jobs become QUEUED again, as if new. ``dry_run`` counts them only."""
    return store.drive(conn, _many(Action.RETRY, which, dry_run=dry_run))


async def retry_many_async(conn: AsyncConn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """As :func:`retry_many`."""
    return await store.drive_async(conn, _many(Action.RETRY, which, dry_run=dry_run))


def cancel_many(conn: Conn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """QUEUED jobs are CANCELLED, those that run are asked to end."""
    return store.drive(conn, _many(Action.CANCEL, which, dry_run=dry_run))


async def cancel_many_async(conn: AsyncConn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """As :func:`cancel_many`."""
    return await store.drive_async(conn, _many(Action.CANCEL, which, dry_run=dry_run))


def delete_many(conn: Conn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """Jobs that do not run are removed, with all that is known of them."""
    return store.drive(conn, _many(Action.DELETE, which, dry_run=dry_run))


async def delete_many_async(conn: AsyncConn, which: Which | str, *, dry_run: bool = False) -> Changed:
    """As :func:`delete_many`."""
    return await store.drive_async(conn, _many(Action.DELETE, which, dry_run=dry_run))


def discard_many(
    conn: Conn, which: Which | str, reason: str, *, by: str | None = None, dry_run: bool = False
) -> Changed:
    """FAILED jobs are given up: CANCELLED, their records resolved with the reason."""
    steps = _many(Action.DISCARD, which, reason=reason, by=_by(conn, by), dry_run=dry_run)
    return store.drive(conn, steps)


async def discard_many_async(
    conn: AsyncConn, which: Which | str, reason: str, *, by: str | None = None, dry_run: bool = False
) -> Changed:
    """As :func:`discard_many`."""
    steps = _many(Action.DISCARD, which, reason=reason, by=_by(conn, by), dry_run=dry_run)
    return await store.drive_async(conn, steps)


def _many(
    action: Action, which: Which | str, *, reason: str | None = None, by: str = "", dry_run: bool
) -> store.Steps[Changed]:
    return store.change_jobs_steps(action, _which(which), reason=reason, by=by, dry_run=dry_run)


def _which(which: object) -> JobFilter | tuple[int, ...]:
    if isinstance(which, JobFilter):
        if which.is_empty:
            raise InputError("which", "is an empty filter; say admin.EVERYTHING if all jobs are meant")
        return which
    if which == EVERYTHING:
        return JobFilter()
    return job.check_ids("which", which)


def _by(conn: Conn | AsyncConn, by: str | None) -> str:
    return conn.info.user if by is None else by


# --- queues -----------------------------------------------------------------------------------------


def pause(conn: Conn, queue: str, *, by: str | None = None) -> QueueSettings:
    """No job of the queue is begun until it is resumed; what runs goes on."""
    return store.drive(conn, store.queue_steps(queue, _by(conn, by), paused=True))


async def pause_async(conn: AsyncConn, queue: str, *, by: str | None = None) -> QueueSettings:
    """As :func:`pause`."""
    return await store.drive_async(conn, store.queue_steps(queue, _by(conn, by), paused=True))


def resume(conn: Conn, queue: str, *, by: str | None = None) -> QueueSettings:
    """The queue's jobs are begun again."""
    return store.drive(conn, store.queue_steps(queue, _by(conn, by), paused=False))


async def resume_async(conn: AsyncConn, queue: str, *, by: str | None = None) -> QueueSettings:
    """As :func:`resume`."""
    return await store.drive_async(conn, store.queue_steps(queue, _by(conn, by), paused=False))


def set_limit(conn: Conn, queue: str, max_running: int | None, *, by: str | None = None) -> QueueSettings:
    """At most so many jobs of the queue run at the same time on all nodes together; None: any number."""
    steps = store.queue_steps(queue, _by(conn, by), limited=True, max_running=max_running)
    return store.drive(conn, steps)


async def set_limit_async(
    conn: AsyncConn, queue: str, max_running: int | None, *, by: str | None = None
) -> QueueSettings:
    """As :func:`set_limit`."""
    steps = store.queue_steps(queue, _by(conn, by), limited=True, max_running=max_running)
    return await store.drive_async(conn, steps)
