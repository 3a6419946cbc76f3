"""Pages: of jobs by a filter, of the records of failed jobs, of a job's attempts.

Used through ``aqd.store`` by the API, the client and the command line. Each function is one statement (``sql/list.sql``)
on the caller's connection. Promises: pages go on from an id, so they neither skip nor repeat anything while jobs come
and go; a page has a bound in rows and in bytes, and is never empty but at the end. Where a filter has no index over
history, the answer says how far back it has looked.

How it fails: :class:`TooBroad` where the server's ``statement_timeout`` came first.
"""

import contextlib
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg

from aqd import job
from aqd.database import Connection, run
from aqd.errors import TooBroad
from aqd.job import State
from aqd.store.filters import ANY, JobFilter, check_error, check_range, check_word
from aqd.store.look import AttemptRow, FailedJobRow, JobRow

# How far back finished jobs are searched by what history has no index for. In whole days (UTC), as its partitions.
WINDOW: Final = timedelta(days=7)
# Of the texts of a page: the API has up to three copies of it at a time, in each thread.
MAX_PAGE_BYTES: Final = 8 << 20
# Records that are grouped, the newest: 50,000 took 2 s on a busy machine, half of it for the lines of their errors.
MAX_GROUPED: Final = 20_000
# What is large, and left out unless it is asked for. "meta" is small enough to be in by default.
LARGE_FIELDS: Final = frozenset({"payload", "result", "output"})
DEFAULT_FIELDS: Final = frozenset({"meta"})

# "infinity" has no datetime in Python; history_after takes text as well.
_NEVER: Final = "infinity"


class Window(NamedTuple):
    """The finished jobs that were searched, where it was not all of them; live jobs always were."""

    finished_after: datetime
    finished_before: datetime | None
    reason: str


class Listing(NamedTuple):
    """A page of jobs. ``next``: the id after which the next one begins, None on the last."""

    jobs: list[JobRow]
    next: int | None
    window: Window | None


class FailedFilter(NamedTuple):
    """Which records of failed jobs; None means any. ``error`` is contained in the record's error, upper or lower case
    alike."""

    type: str | None = None
    queue: str | None = None
    kind: str | None = None
    reason: str | None = None
    error: str | None = None
    failed_after: datetime | None = None
    failed_before: datetime | None = None


class FailedListing(NamedTuple):
    """A page of records. ``next``: the record's id after which the next one begins, None on the last."""

    records: list[FailedJobRow]
    next: int | None


class FailedGroup(NamedTuple):
    """Records with the same ``type``, or the same line of ``error`` (numbers as ``#``), or both; what they were not
    grouped by is None. ``failed_now``: how many of their jobs are FAILED at the moment."""

    type: str | None
    error: str | None
    error_hash: str | None
    size: int
    failed_now: int
    first_failed_at: datetime
    last_failed_at: datetime
    sample_job_id: int


class FailedGroups(NamedTuple):
    """The largest groups of ``grouped`` records. ``more``: there are older records, which were not looked at."""

    groups: list[FailedGroup]
    grouped: int
    more: bool


class AttemptListing(NamedTuple):
    """A page of attempts. ``next``: the record after which the next one begins, None on the last."""

    attempts: list[AttemptRow]
    next: int | None


ANY_FAILED: Final = FailedFilter()


def failed_filter(
    *,
    type: str | None = None,
    queue: str | None = None,
    kind: str | None = None,
    reason: str | None = None,
    error: str | None = None,
    failed_after: datetime | str | None = None,
    failed_before: datetime | str | None = None,
) -> FailedFilter:
    """The filter made of single values, checked; moments are aware datetimes or RFC 3339 text."""
    made = FailedFilter(
        type=None if type is None else job.check_name("type", type),
        queue=None if queue is None else job.check_name("queue", queue),
        kind=None if kind is None else check_word("kind", kind),
        reason=None if reason is None else check_word("reason", reason),
        error=None if error is None else check_error("error", error),
        failed_after=None if failed_after is None else job.parse_moment("failed_after", failed_after),
        failed_before=None if failed_before is None else job.parse_moment("failed_before", failed_before),
    )
    check_range("failed", made.failed_after, made.failed_before)
    return made


def list_jobs(
    conn: Connection,
    filters: JobFilter = ANY,
    cursor: int | None = None,
    limit: int = 100,
    *,
    oldest: bool = False,
    fields: Collection[str] = DEFAULT_FIELDS,
    max_bytes: int = MAX_PAGE_BYTES,
) -> Listing:
    """The jobs with ids below ``cursor`` (the ``next`` of the page before), newest first; with ``oldest`` those with
    ids above it, oldest first.

    Of ``payload``, ``result``, ``output`` and ``meta`` only those in ``fields`` are read, the others are None.
    """
    query = job_query(filters, cursor, limit, oldest=oldest, fields=fields, max_bytes=max_bytes)
    with query.refuse_too_broad():
        return query.listing(run(conn, query.statement, **query.params))


class JobQuery(NamedTuple):
    """A page of jobs to be asked for, on whatever connection: the statement, and what its rows mean."""

    statement: str
    params: dict[str, Any]
    limit: int
    window: Window | None
    asked: list[str]

    def listing(self, rows: list[tuple[Any, ...]]) -> Listing:
        """The page."""
        jobs = [JobRow._make(row[:-1]) for row in rows[: self.limit]]
        return Listing(jobs, jobs[-1].id if _more(rows, self.limit) else None, self.window)

    def refuse_too_broad(self) -> contextlib.AbstractContextManager[None]:
        """Goes round running it."""
        return refuse_too_broad(self.asked, "give finished_after, or a type")


def job_query(
    filters: JobFilter,
    cursor: int | None,
    limit: int,
    *,
    oldest: bool,
    fields: Collection[str],
    max_bytes: int = MAX_PAGE_BYTES,
) -> JobQuery:
    """What :func:`list_jobs` runs."""
    window = history_window(filters, oldest=oldest)
    params = filters.params() | history_params(filters, window)
    params |= {f"with_{name}": name in fields for name in ("payload", "result", "output", "meta")}
    params |= {"cursor": cursor, "limit": limit + 1, "max_bytes": max_bytes}
    statement = "list_jobs_oldest" if oldest else "list_jobs_newest"
    return JobQuery(statement, params, limit, window, given(filters))


def history_window(filters: JobFilter, *, oldest: bool = False, now: datetime | None = None) -> Window | None:
    """Which finished jobs a filter is bounded to; None: it says so itself, or history has an index for it.

    Without one are ``queue``, CANCELLED alone, and ``created_before`` if the newest come first; they do no harm beside
    ``type``, ``tag`` or ``ids``.
    """
    if not filters.may_be_finished or filters.finished_after is not None or filters.created_after is not None:
        return None
    if filters.type is not None or filters.tag is not None or filters.ids:
        return None
    finished = set(filters.states) & {State.COMPLETED, State.CANCELLED}
    without = [
        name
        for name, is_asked in (
            ("queue", filters.queue is not None),
            ("state CANCELLED", finished == {State.CANCELLED}),
            ("created_before", filters.created_before is not None and not oldest),
        )
        if is_asked
    ]
    if not without:
        return None
    now = now or datetime.now(UTC)
    latest = min(moment for moment in (now, filters.finished_before, filters.created_before) if moment)
    begin = (latest - WINDOW).astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    end = None
    if filters.created_before is not None and not oldest and filters.finished_before is None:
        end = filters.created_before + WINDOW
        end = end if end < now else None
    reason = (
        f"history has no index for {' and '.join(without)}; give finished_after or created_after to say how far back, "
        "or a type"
    )
    return Window(begin, end, reason)


def history_params(filters: JobFilter, window: Window | None) -> dict[str, Any]:
    """The parameters of ``aqd.find_jobs`` that bound history. ``created_after`` bounds it too: nothing finishes before
    it is created."""
    if not filters.may_be_finished:
        return {"history_after": _NEVER, "history_before": None}
    if window is not None:
        return {"history_after": window.finished_after, "history_before": window.finished_before}
    return {"history_after": filters.created_after, "history_before": None}


def list_failed(
    conn: Connection,
    filters: FailedFilter = ANY_FAILED,
    cursor: int | None = None,
    limit: int = 100,
    *,
    resolved: bool = False,
    max_bytes: int = MAX_PAGE_BYTES,
) -> FailedListing:
    """The records of failed jobs with record ids below ``cursor`` (the ``next`` of the page before), newest first; with
    ``resolved`` the settled ones too."""
    with refuse_too_broad(given(filters), "give failed_after"):
        rows = run(
            conn,
            "list_failed",
            **filters._asdict(),
            resolved=resolved,
            cursor=cursor,
            limit=limit + 1,
            max_bytes=max_bytes,
        )
    records = [FailedJobRow._make(row[:-1]) for row in rows[:limit]]
    return FailedListing(records, records[-1].id if _more(rows, limit) else None)


def group_failed(
    conn: Connection,
    filters: FailedFilter = ANY_FAILED,
    limit: int = 100,
    *,
    by_type: bool = True,
    by_error: bool = True,
    resolved: bool = False,
    most: int = MAX_GROUPED,
) -> FailedGroups:
    """The ``limit`` largest groups of the newest ``most`` records that match."""
    with refuse_too_broad(given(filters), "give failed_after"):
        rows = run(
            conn,
            "group_failed",
            **filters._asdict(),
            resolved=resolved,
            by_type=by_type,
            by_error=by_error,
            most=most,
            limit=limit,
        )
    grouped = rows[0][-1] if rows else 0
    return FailedGroups(
        [FailedGroup._make(row[:-1]) for row in rows], min(grouped, most), more=grouped > most
    )


def list_attempts(
    conn: Connection,
    id: int,
    cursor: int | None = None,
    limit: int = 100,
    *,
    max_bytes: int = MAX_PAGE_BYTES,
) -> AttemptListing:
    """The attempts of a job that did not complete, oldest first, from above the record ``cursor`` (the ``next`` of the
    page before)."""
    rows = run(conn, "list_attempts", job_id=id, cursor=cursor, limit=limit + 1, max_bytes=max_bytes)
    shown = rows[:limit]
    following = shown[-1][0] if _more(rows, limit) else None
    return AttemptListing([AttemptRow._make(row[1:-1]) for row in shown], following)


def given(filters: JobFilter | FailedFilter) -> list[str]:
    """The names of what a filter asks for."""
    return [name.replace("states", "state") for name, value in filters._asdict().items() if value]


@contextlib.contextmanager
def refuse_too_broad(names: list[str], advice: str) -> Iterator[None]:
    """Turns a ``statement_timeout`` into :class:`TooBroad`, if something was asked for (``names``): what goes by the
    key alone and takes too long is the database's trouble, not the caller's."""
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        if not names:
            raise
        raise TooBroad(
            f"too many jobs must be looked at to find those with this {', '.join(names)}: "
            f"the database gave up after its statement_timeout; {advice}, or a narrower range"
        ) from error


def _more(rows: list[tuple[Any, ...]], limit: int) -> bool:
    """Whether there is more after this page: it was cut to ``limit``, or to its bound in bytes (the last column says
    how many there were before)."""
    return bool(rows) and rows[0][-1] > min(len(rows), limit)
