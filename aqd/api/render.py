"""Rows as JSON documents, and pages of them.

Pure. Runs in the API's workers. Ids are strings, moments RFC 3339 in UTC, payload and result the JSON
text that PostgreSQL holds, passed through without being parsed.
"""

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from aqd.api import documents
from aqd.errors import InputError
from aqd.job import MAX_ID, JobRequest, State
from aqd.store import AttemptRow, Cancelled, EnqueuedJob, FailedJobRow, Health, JobRow
from aqd.strict_json import show

Row = TypeVar("Row")


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


def split(
    rows: Sequence[Row], limit: int, kind: str, id_of: Callable[[Row], int]
) -> tuple[Sequence[Row], str | None]:
    """The rows of one page from up to ``limit + 1`` of them, and the cursor of the next; None on the last one."""
    more = len(rows) > limit
    shown = rows[:limit]
    return shown, cursor(kind, id_of(shown[-1])) if more else None


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


def job(row: JobRow) -> documents.Job:
    """A job in a list."""
    return documents.Job(**_job(row))


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
