"""Submitting jobs from Python, inside the application's own transaction.

Runs in applications. Nothing is connected to but what the caller hands in::

    with psycopg.connect(…) as conn:
        conn.execute("insert into orders …")
        client.enqueue(conn, "send_mail", {"order": 42})    # commits, or rolls back, with the order

Promises: the same validation as the API, before anything is sent; one statement; no commit, no rollback,
no retry: the transaction stays the caller's. The connection may be of any kind that psycopg 3 has
(autocommit or not, any row factory, with a pooler in between). Each function that changes something has an
asynchronous twin, which does the same on a :class:`psycopg.AsyncConnection`.

Fails with :class:`aqd.errors.InputError` for a job that is refused (its ``field``, ``reason`` and
``bound`` say why), :class:`NotFoundError` and :class:`ConflictError` for jobs that do not exist or are in
another state, :class:`IdempotencyConflict` for a key that stands for another request, and with psycopg's own
errors for everything else. At REPEATABLE READ or SERIALIZABLE, a second caller under one key may get
``psycopg.errors.SerializationFailure``: repeat the transaction.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, NotRequired, TypedDict, Unpack

import psycopg
from msgspec import UNSET
from psycopg.rows import tuple_row

from aqd import database, job, statements, store
from aqd.errors import ConflictError, IdempotencyConflict, InputError, NotEnded, NotFoundError, TooBroad
from aqd.job import DEFAULT_KEY_TTL_HOURS
from aqd.store import Cancelled, EnqueuedJob, JobRow, Listing, listing, submit
from aqd.strict_json import kind_of, show
from aqd.waiting import wait, wait_async

__all__ = [
    "Cancelled",
    "ConflictError",
    "EnqueuedJob",
    "IdempotencyConflict",
    "InputError",
    "JobRow",
    "Listing",
    "LookFor",
    "NewJob",
    "NotEnded",
    "NotFoundError",
    "TooBroad",
    "cancel",
    "cancel_async",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "get",
    "get_async",
    "jobs",
    "jobs_async",
    "list_jobs",
    "list_jobs_async",
    "retry",
    "retry_async",
    "wait",
    "wait_async",
]


class NewJob(TypedDict):
    """A job for :func:`enqueue_many`: the arguments of :func:`enqueue` as a dictionary."""

    type: str
    payload: NotRequired[Any]
    queue: NotRequired[str | None]
    priority: NotRequired[int | None]
    run_at: NotRequired[datetime | str | None]
    delay_s: NotRequired[float | None]
    max_attempts: NotRequired[int | None]
    timeout_s: NotRequired[float | None]
    idempotency_key: NotRequired[str | None]
    on_conflict: NotRequired[str]
    tags: NotRequired[Iterable[str]]
    meta: NotRequired[dict[str, Any] | None]


def enqueue(
    conn: psycopg.Connection[Any],
    type: str,
    payload: Any = UNSET,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
    idempotency_key: str | None = None,
    on_conflict: str = "return",
    tags: Iterable[str] = (),
    meta: dict[str, Any] | None = None,
    idempotency_ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> EnqueuedJob:
    """Store a job. ``payload`` is any JSON value (dict, list, str, number, bool, None); without one it is ``{}``.

    ``run_at`` is an aware datetime (or RFC 3339), ``delay_s`` seconds from the start of the transaction;
    not both. ``max_attempts`` and ``timeout_s`` override the handler's. Higher ``priority`` (-100 to 100)
    goes first. ``tags`` are to find jobs by, ``meta`` (a dict) is given to the handler beside the payload.

    Of all calls with one ``idempotency_key``, in any process, one makes a job and the others get that job; the
    answer's ``outcome`` tells which. A call waits while another transaction holds the same key, until that
    commits (then this one gets its job) or rolls back (then this one makes it). Another request under the key
    is an :class:`IdempotencyConflict`. With ``on_conflict="replace"`` a job that is still QUEUED becomes what
    this call asks for, and one that has begun stays while a new one is made; with ``"reject"`` a key that
    stands for a job is an :class:`IdempotencyConflict`. A key is free again after ``idempotency_ttl_hours``
    (0.01 to 87,600). Keys given here, by SQL, by ``aqd submit`` and through the API without an API key are the same keys;
    each API key, ADMIN_API_KEY too (as "admin"), has its own.
    """
    request, hours = _request(
        type,
        payload,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_s=delay_s,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
        idempotency_key=idempotency_key,
        on_conflict=on_conflict,
        tags=tags,
        meta=meta,
        idempotency_ttl_hours=idempotency_ttl_hours,
    )
    with _tuple_rows(conn):
        return store.enqueue(conn, request, ttl_hours=hours)


async def enqueue_async(
    conn: psycopg.AsyncConnection[Any],
    type: str,
    payload: Any = UNSET,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
    idempotency_key: str | None = None,
    on_conflict: str = "return",
    tags: Iterable[str] = (),
    meta: dict[str, Any] | None = None,
    idempotency_ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> EnqueuedJob:
    """As :func:`enqueue`, on an asynchronous connection."""
    request, hours = _request(
        type,
        payload,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_s=delay_s,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
        idempotency_key=idempotency_key,
        on_conflict=on_conflict,
        tags=tags,
        meta=meta,
        idempotency_ttl_hours=idempotency_ttl_hours,
    )
    name, params = submit.statement(request, "", hours)
    with submit.refusals():
        rows = await _run_async(conn, name, **params)
    return submit.or_raise(submit.answer(rows[0], request))


def enqueue_many(
    conn: psycopg.Connection[Any],
    jobs: Iterable[NewJob | Mapping[str, Any]],
    *,
    idempotency_ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> list[EnqueuedJob]:
    """Store any number of jobs, all or none: fifty times as fast as :func:`enqueue` in a loop.

    Each job is a dictionary of :func:`enqueue`'s arguments (:class:`NewJob`)::

        client.enqueue_many(conn, ({"type": "send_mail", "payload": {"to": a}} for a in addresses))

    The answers are in the order of the jobs, and so are the ids of those without a key. Jobs are read, checked and
    sent 1,000 at a time. Whatever is refused or breaks off, also in ``jobs`` itself, leaves nothing stored
    (a savepoint inside a transaction of the caller's): an :class:`InputError` names it as ``jobs[3].priority``.
    A key that stands twice makes one job.
    """
    hours = job.check_key_ttl(idempotency_ttl_hours)
    answers: list[EnqueuedJob] = []
    if not conn.autocommit:
        conn.execute("")  # begins: transaction() as the first of a transaction would also commit it
    with _tuple_rows(conn), conn.transaction():
        for requests in _in_chunks(jobs):
            found = store.enqueue_many(conn, requests, ttl_hours=hours)
            answers += [submit.or_raise(each) for each in found]
    return answers


async def enqueue_many_async(
    conn: psycopg.AsyncConnection[Any],
    jobs: Iterable[NewJob | Mapping[str, Any]],
    *,
    idempotency_ttl_hours: float = DEFAULT_KEY_TTL_HOURS,
) -> list[EnqueuedJob]:
    """As :func:`enqueue_many`, on an asynchronous connection."""
    hours = job.check_key_ttl(idempotency_ttl_hours)
    answers: list[EnqueuedJob] = []
    if not conn.autocommit:
        await conn.execute("")
    async with conn.transaction():
        for requests in _in_chunks(jobs):
            found: dict[int, EnqueuedJob] = {}
            for name, places, params in submit.many_statements(requests, "", hours):
                with submit.refusals():
                    rows = await _run_async(conn, name, **params)
                for place, row in zip(places, rows, strict=True):
                    found[place] = submit.or_raise(submit.answer(row, requests[place]))
            answers += [found[place] for place in range(len(requests))]
    return answers


def get(conn: psycopg.Connection[Any], id: int | str) -> JobRow:
    """Everything about a job; ``payload`` and ``result`` as JSON text. :class:`NotFoundError` without it."""
    number = job.parse_id(str(id))
    with _tuple_rows(conn):
        row = store.get_job(conn, number)
    if row is None:
        raise NotFoundError(f"there is no job {number}")
    return row


async def get_async(conn: psycopg.AsyncConnection[Any], id: int | str) -> JobRow:
    """As :func:`get`, on an asynchronous connection."""
    number = job.parse_id(str(id))
    row = await _look_async(conn, number)
    if row is None:
        raise NotFoundError(f"there is no job {number}")
    return row


class LookFor(TypedDict, total=False):
    """Which jobs; all that is given must hold. ``…_after`` is inclusive, ``…_before`` exclusive; moments are aware
    datetimes or RFC 3339. ``error`` (contained in the last error) and ``error_hash`` find live jobs only: finished
    ones have no error."""

    state: str | Sequence[str] | None
    type: str | None
    queue: str | None
    tag: str | None
    created_after: datetime | str | None
    created_before: datetime | str | None
    finished_after: datetime | str | None
    finished_before: datetime | str | None
    error: str | None
    error_hash: str | None
    ids: Iterable[int | str] | None


def list_jobs(
    conn: psycopg.Connection[Any],
    *,
    oldest: bool = False,
    after: int | str | None = None,
    limit: int = 100,
    fields: Collection[str] = ("meta",),
    **look_for: Unpack[LookFor],
) -> Listing:
    """A page of jobs, live and finished, newest (by id) first; ``after`` is the ``next`` of the page before.

    Of ``payload``, ``result``, ``output`` and ``meta`` only those in ``fields`` are read. A page has at most ``limit``
    jobs (1 to 1,000) and 8 MiB of texts. By queue, by CANCELLED alone and by ``created_before`` history has no index:
    then ``window`` says which finished jobs were searched, unless ``finished_after``, ``created_after``, ``type`` or
    ``tag`` is given. :class:`TooBroad` after the connection's ``statement_timeout``.
    """
    query = _query(oldest, after, limit, fields, look_for)
    with _tuple_rows(conn), query.refuse_too_broad():
        return query.listing(database.run(conn, query.statement, **query.params))


async def list_jobs_async(
    conn: psycopg.AsyncConnection[Any],
    *,
    oldest: bool = False,
    after: int | str | None = None,
    limit: int = 100,
    fields: Collection[str] = ("meta",),
    **look_for: Unpack[LookFor],
) -> Listing:
    """As :func:`list_jobs`, on an asynchronous connection."""
    query = _query(oldest, after, limit, fields, look_for)
    with query.refuse_too_broad():
        return query.listing(await _run_async(conn, query.statement, **query.params))


def jobs(
    conn: psycopg.Connection[Any],
    *,
    oldest: bool = False,
    fields: Collection[str] = ("meta",),
    **look_for: Unpack[LookFor],
) -> Iterator[JobRow]:
    """All jobs that :func:`list_jobs` finds, page after page, each once; what is submitted meanwhile comes last
    with ``oldest``, and not at all without."""
    after = None
    while True:
        page = list_jobs(conn, oldest=oldest, after=after, limit=500, fields=fields, **look_for)
        yield from page.jobs
        if (after := page.next) is None:
            return


async def jobs_async(
    conn: psycopg.AsyncConnection[Any],
    *,
    oldest: bool = False,
    fields: Collection[str] = ("meta",),
    **look_for: Unpack[LookFor],
) -> AsyncIterator[JobRow]:
    """As :func:`jobs`, on an asynchronous connection."""
    after = None
    while True:
        page = await list_jobs_async(conn, oldest=oldest, after=after, limit=500, fields=fields, **look_for)
        for row in page.jobs:
            yield row
        if (after := page.next) is None:
            return


def _query(
    oldest: bool, after: int | str | None, limit: int, fields: Collection[str], look_for: LookFor
) -> listing.JobQuery:
    filters = store.job_filter(**look_for)
    cursor = None if after is None else job.parse_id(str(after), "after")
    job.check_integer("limit", limit, 1, 1000)
    known = listing.LARGE_FIELDS | listing.DEFAULT_FIELDS
    if unknown := set(fields) - known:
        words = ", ".join(sorted(known))
        raise InputError("fields", f"{show(min(map(str, unknown)))} is none of {words}", words)
    return listing.job_query(filters, cursor, limit, oldest=oldest, fields=fields)


def retry(conn: psycopg.Connection[Any], id: int | str) -> EnqueuedJob:
    """Make a FAILED job QUEUED again, as if new."""
    number = job.parse_id(str(id))
    with _tuple_rows(conn):
        return store.retry_job(conn, number)


async def retry_async(conn: psycopg.AsyncConnection[Any], id: int | str) -> EnqueuedJob:
    """As :func:`retry`, on an asynchronous connection."""
    number = job.parse_id(str(id))
    rows = await _run_async(conn, "retry_job", id=number)
    if rows:
        return EnqueuedJob._make(rows[0])
    raise store.not_retried(number, await _look_async(conn, number))


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
    return store.cancelled(number, state, await _look_async(conn, number))


async def _look_async(conn: psycopg.AsyncConnection[Any], id: int) -> JobRow | None:
    found = await _run_async(conn, "get_job_live", id=id) or await _run_async(
        conn, "get_job_finished", id=id, within_s=None
    )
    return JobRow._make(found[0]) if found else None


_ARGUMENTS = NewJob.__required_keys__ | NewJob.__optional_keys__


def _request(
    type: str, payload: Any, *, tags: Iterable[str], idempotency_ttl_hours: float, **options: Any
) -> tuple[job.JobRequest, float]:
    request = job.validate(type, payload, tags=_listed(tags), **options)
    return request, job.check_key_ttl(idempotency_ttl_hours)


def _listed(tags: Any) -> Any:
    """Any collection of tags but a string, which would be taken for its letters."""
    return list(tags) if isinstance(tags, Iterable) and not isinstance(tags, str | bytes | Mapping) else tags


def _in_chunks(jobs: Iterable[NewJob | Mapping[str, Any]]) -> Iterator[list[job.JobRequest]]:
    numbered = enumerate(jobs)
    while given := [_numbered(place, each) for place, each in islice(numbered, submit.CHUNK_JOBS)]:
        yield given


def _numbered(place: int, given: NewJob | Mapping[str, Any]) -> job.JobRequest:
    """The request; what is wrong with it is named by its place in the input."""
    try:
        if not isinstance(given, Mapping):
            raise InputError("", f"must be a dictionary of enqueue's arguments, not {kind_of(given)}")
        for name in given:
            if name not in _ARGUMENTS:
                raise InputError("", f"{show(name)} is no argument of enqueue")
        if "type" not in given:
            raise InputError("type", "is missing: every job names its type")
        return job.validate(**{**given, "tags": _listed(given.get("tags") or ())})
    except InputError as error:
        field = f"jobs[{place}].{error.field}" if error.field else f"jobs[{place}]"
        raise InputError(field, error.reason, error.bound) from None


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
        prepare = False if statement.fresh else None
        await cursor.execute(statement.text, arguments or None, binary=True, prepare=prepare)
        return await cursor.fetchall()


def _plain(value: Any) -> Any:
    """Integers as text, typed by the statement's cast (see :mod:`aqd.database`)."""
    return str(value) if isinstance(value, int) else value
