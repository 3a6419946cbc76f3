"""Rows as JSON documents, and pages of them.

Pure. Runs in the API's workers. Ids are strings, moments RFC 3339 in UTC, payload and result the JSON
text that PostgreSQL holds, passed through without being parsed.
"""

import base64
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET

from aqd.api import documents
from aqd.errors import InputError
from aqd.job import MAX_ID, JobRequest, State
from aqd.store import (
    AttemptRow,
    Cancelled,
    Changed,
    EnqueuedJob,
    FailedFilter,
    FailedGroup,
    FailedJobRow,
    Health,
    JobRow,
    QueueSettings,
    UpdatedJob,
    Window,
)
from aqd.strict_json import show


def moment(value: datetime | None) -> str | None:
    """``2026-11-29T17:40:01.123456Z``."""
    return None if value is None else _moment(value)


def _moment(value: datetime) -> str:
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def raw(text: str | None) -> msgspec.Raw | None:
    """JSON text, to stand in a document as it is."""
    return None if text is None else msgspec.Raw(text.encode())


def cursor(kind: str, last_id: int) -> str:
    """Where the next page begins; opaque to clients, so that it may change. ``kind`` is the list's."""
    return base64.urlsafe_b64encode(f"{kind}{last_id}".encode()).rstrip(b"=").decode()


def read_cursor(kind: str, text: str) -> int:
    """The inverse; :class:`InputError` for anything that :func:`cursor` did not make."""
    try:
        plain = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)).decode("ascii")
    except ValueError:
        plain = ""
    number = plain.removeprefix(kind)
    if (
        plain.startswith(kind)
        and number.isdigit()
        and 0 < int(number[:20]) <= MAX_ID
        and cursor(kind, int(number)) == text
    ):
        return int(number)
    raise InputError("cursor", f"{show(text)} is no cursor of this list; use next_cursor of the page before")


def next_cursor(kind: str, last_id: int | None) -> str | None:
    """The cursor of the page after the one that ends with ``last_id``; None for None."""
    return None if last_id is None else cursor(kind, last_id)


def enqueued(row: EnqueuedJob) -> documents.Enqueued:
    """What submitting or retrying answers."""
    return documents.Enqueued(**_enqueued(row))


def _enqueued(row: EnqueuedJob) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "jobId": str(row.id),
        "status": row.state,
        "run_at": moment(row.run_at),
        "created_at": moment(row.created_at),
    }


def submitted(row: EnqueuedJob, request: JobRequest) -> documents.Submitted:
    """What ``POST /jobs`` answers."""
    return documents.Submitted(
        **_enqueued(row), type=request.type, queue=row.queue, priority=request.priority, outcome=row.outcome
    )


def cancelled(row: Cancelled) -> documents.Cancelled:
    """What cancelling answers."""
    return documents.Cancelled(
        id=str(row.id),
        jobId=str(row.id),
        status=State(row.state),
        cancel_requested_at=moment(row.cancel_requested_at),
        finished_at=moment(row.finished_at),
    )


# What a job has in a list unless something else is asked for.
LISTED: Final = documents.Job.__struct_fields__


def listed_job(row: JobRow, fields: Collection[str] = LISTED) -> documents.ListedJob:
    """A job in a list, with ``id`` and those of its fields."""
    known = _job(row) | {"payload": raw(row.payload), "result": raw(row.result), "output": row.output}
    return documents.ListedJob(**{name: known[name] for name in {"id", *fields}})


def window(found: Window | None) -> documents.Window | None:
    """Which finished jobs were searched, if not all."""
    if found is None:
        return None
    return documents.Window(
        finished_after=_moment(found.finished_after),
        finished_before=moment(found.finished_before),
        reason=found.reason,
    )


def _job(row: JobRow) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "status": row.state,
        "type": row.type,
        "queue": row.queue,
        "priority": row.priority,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "timeout_s": row.timeout_s,
        "retries": row.retries,
        "run_at": moment(row.run_at),
        "created_at": moment(row.created_at),
        "started_at": moment(row.claimed_at),
        "finished_at": moment(row.finished_at),
        "cancel_requested_at": moment(row.cancel_requested_at),
        "progress": progress(row),
        "node": row.node_id,
        "error": row.last_error,
        "tags": row.tags or [],
        "meta": raw(row.meta),
    }


def progress(row: JobRow) -> documents.Progress | None:
    """What the handler last said about how far it is, None when it has said nothing."""
    if row.progress_percent is None and row.progress_message is None:
        return None
    return documents.Progress(percent=row.progress_percent, message=row.progress_message)


def job_in_full(row: JobRow, attempts: Sequence[AttemptRow]) -> documents.JobInFull:
    """One job with all that is known of it."""
    return documents.JobInFull(
        **_job(row),
        jobId=str(row.id),
        payload=raw(row.payload),
        result=raw(row.result),
        output=row.output,
        timings=documents.Timings(
            waited_s=_seconds_between(row.created_at, row.claimed_at),
            wall_s=row.wall_s,
            cpu_s=row.cpu_s,
            peak_kb=row.peak_kb,
        ),
        crashes=row.crashes,
        interruptions=row.interruptions,
        attempts=[attempt(each) for each in attempts],
    )


def attempt(row: AttemptRow) -> documents.Attempt:
    """An attempt that did not complete."""
    return documents.Attempt(
        attempt=row.attempt,
        kind=row.kind,
        reason=row.reason,
        error=row.error,
        traceback=row.traceback,
        signal=row.signal,
        exit_code=row.exit_code,
        started_at=moment(row.started_at),
        finished_at=_moment(row.finished_at),
        wall_s=row.wall_s,
        cpu_s=row.cpu_s,
        peak_kb=row.peak_kb,
        node=row.node_id,
        output=row.output,
    )


def failed_job(row: FailedJobRow) -> documents.FailedJob:
    """A dead-letter record."""
    return documents.FailedJob(
        id=str(row.id),
        job_id=str(row.job_id),
        status=State(row.state) if row.state else None,
        type=row.type,
        queue=row.queue,
        kind=row.kind,
        reason=row.reason,
        error=row.error,
        traceback=row.traceback,
        attempts=row.attempts,
        failures=row.failures,
        failed_at=_moment(row.failed_at),
        retried_at=moment(row.retried_at),
        resolved_at=moment(row.resolved_at),
        resolution=row.resolution,
        note=row.note,
        discarded_by=row.discarded_by,
    )


def failed_group(group: FailedGroup, filters: FailedFilter) -> documents.FailedGroup:
    """Records that have something in common, of those that ``filters`` let pass."""
    return documents.FailedGroup(
        type=group.type,
        error=group.error,
        count=group.size,
        failed_now=group.failed_now,
        first_failed_at=_moment(group.first_failed_at),
        last_failed_at=_moment(group.last_failed_at),
        sample_job_id=str(group.sample_job_id),
        filter=documents.GroupFilter(
            state=State.FAILED,
            type=group.type or filters.type or UNSET,
            queue=filters.queue or UNSET,
            error=filters.error or UNSET,
            error_hash=group.error_hash or UNSET,
        ),
    )


def updated(row: UpdatedJob) -> documents.Updated:
    """A waiting job after its change."""
    return documents.Updated(
        id=str(row.id),
        jobId=str(row.id),
        status=State(row.state),
        type=row.type,
        queue=row.queue,
        priority=row.priority,
        run_at=_moment(row.run_at),
        created_at=_moment(row.created_at),
    )


def changed(found: Changed, *, dry_run: bool) -> documents.ChangedJobs:
    """What became of many jobs."""
    results = None
    if found.results is not None:
        results = [
            documents.ChangedJob(
                id=str(each.id),
                changed=each.refusal is None and not dry_run,
                status=State(each.state) if each.state else None,
                detail=each.refusal,
            )
            for each in found.results
        ]
    return documents.ChangedJobs(
        dry_run=dry_run,
        matched=found.matched,
        changed=found.changed,
        skipped=found.skipped,
        more=found.more,
        results=results,
        window=window(found.window),
    )


def queue_settings(row: QueueSettings) -> documents.QueueSettings:
    """What is set for a queue."""
    return documents.QueueSettings(
        queue=row.queue,
        paused=row.paused,
        max_running=row.max_running,
        changed_at=moment(row.changed_at),
        changed_by=row.changed_by,
    )


def health(found: Health) -> documents.Health:
    """Status, schema and nodes."""
    return documents.Health(
        status="ok" if found.problem is None else "unavailable",
        database="ok",
        schema=documents.Schema(
            ok=found.problem is None,
            current=found.schema_current,
            wanted=found.schema_wanted,
            reason=found.problem,
        ),
        nodes=documents.LiveNodes(live=found.live_nodes),
    )


def _seconds_between(begin: datetime, end: datetime | None) -> float | None:
    return None if end is None else round((end - begin).total_seconds(), 6)
