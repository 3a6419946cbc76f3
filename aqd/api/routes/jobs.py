"""Looking at jobs: ``GET /jobs``, ``GET /jobs/{id}``, ``GET /jobs/{id}/attempts``."""

import time
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from aqd import job, store
from aqd.api import documents, filters, query, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.api.waiters import client_of
from aqd.errors import NotFoundError
from aqd.job import Name, State
from aqd.waiting import ENDED

# A cursor is good for the order that it was made in.
_CURSORS: Final = {"newest": "j", "oldest": "o"}


class ListParams(Struct, kw_only=True):
    """Which jobs, and which page of them."""

    state: Annotated[
        Annotated[list[State], Meta(min_length=1, max_length=len(State))] | None,
        Meta(description="One, or several separated by commas."),
    ] = None
    type: Name | None = None
    queue: Name | None = None
    tag: Annotated[Name | None, Meta(description="One of the job's tags.")] = None
    created_after: filters.CreatedAfter = None
    created_before: filters.CreatedBefore = None
    finished_after: filters.FinishedAfter = None
    finished_before: filters.FinishedBefore = None
    error: filters.ErrorText = None
    error_hash: filters.ErrorHash = None
    order: Annotated[
        Literal["newest", "oldest"],
        Meta(description="By id, which is the order of submitting. Default `newest`."),
    ] = "newest"
    fields: Annotated[
        Annotated[list[filters.ListedField], Meta(min_length=1, max_length=len(filters.FIELDS))] | None,
        Meta(
            description="Which fields, separated by commas; `id` always. Default: all but `payload`, `result` and"
            " `output`."
        ),
    ] = None
    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def list_jobs(call: Call) -> Answer:
    given: ListParams = call.params
    asked = store.job_filter(
        state=given.state,
        type=given.type,
        queue=given.queue,
        tag=given.tag,
        created_after=given.created_after,
        created_before=given.created_before,
        finished_after=given.finished_after,
        finished_before=given.finished_before,
        error=given.error,
        error_hash=given.error_hash,
    )
    fields = given.fields or render.LISTED
    kind = _CURSORS[given.order]
    after = render.read_cursor(kind, given.cursor) if given.cursor is not None else None
    page = call.pool.read(
        lambda conn: store.list_jobs(
            conn, asked, after, given.limit, oldest=given.order == "oldest", fields=fields
        )
    )
    return Answer(
        documents.JobPage(
            jobs=[render.listed_job(row, fields) for row in page.jobs],
            next_cursor=render.next_cursor(kind, page.next),
            window=render.window(page.window),
        )
    )


class WaitParams(Struct):
    """Whether to answer at once."""

    wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="Answer when the job has ended (COMPLETED, FAILED or CANCELLED), at the latest after so many"
            " seconds, with its state then. Default 0. Where the server has no room for another request that waits,"
            " the answer comes at once, with `Retry-After`.",
        ),
    ] = 0.0


def get_job(call: Call) -> Answer:
    number = call.job_id
    until = time.monotonic() + call.params.wait_s
    found = call.pool.read(lambda conn: in_full(conn, number))
    if not call.params.wait_s or found.status in ENDED:
        return Answer(found)
    waiters = call.services.waiters
    with waiters.place(number, client_of(call.req)) as place:
        if place is None:
            return Answer(found, headers={"Retry-After": "1"})
        while True:
            over = not place.wait(until)
            if place.gone:
                break  # nobody reads this
            found = waiters.patiently(lambda: call.pool.read(lambda conn: in_full(conn, number)), until)
            if found.status in ENDED or over or waiters.stopping:
                break
            waiters.again(place)  # somebody has retried it meanwhile
    return Answer(found)


def in_full(conn: store.Connection, number: int) -> documents.JobInFull:
    """All that is known of a job; raises :class:`NotFoundError`."""
    row = store.get_job(conn, number)
    if row is None:
        raise NotFoundError(f"there is no job {number}")
    present = row.state in (job.State.PROCESSING, job.State.COMPLETED)
    # Most jobs have none, and this is the route that clients poll.
    other = row.attempt - present or row.crashes or row.interruptions or row.retries
    return render.job_in_full(row, store.get_attempts(conn, number) if other else ())


class AttemptParams(Struct):
    """Which page."""

    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def list_attempts(call: Call) -> Answer:
    number, given = call.job_id, call.params
    after = render.read_cursor("a", given.cursor) if given.cursor is not None else None

    def look(conn: store.Connection) -> store.AttemptListing:
        found = store.list_attempts(conn, number, after, given.limit)
        if not found.attempts and store.get_job(conn, number) is None:
            raise NotFoundError(f"there is no job {number}")
        return found

    page = call.pool.read(look)
    return Answer(
        documents.AttemptPage(
            attempts=[render.attempt(row) for row in page.attempts],
            next_cursor=render.next_cursor("a", page.next),
        )
    )


ENDPOINTS = [
    Endpoint(
        "GET",
        "/jobs",
        list_jobs,
        Scope.READ,
        "List jobs, live and finished",
        {200: documents.JobPage},
        description=(
            "All that is given must hold. `…_after` is inclusive, `…_before` exclusive. By `queue`, by CANCELLED alone and"
            " by `created_before` finished jobs are searched in a window of time, which the answer states in `window`,"
            " unless `finished_after`, `created_after`, `type` or `tag` is given. A query that would take too long is"
            " refused with `urn:aqd:too-broad`. Live jobs: QUEUED, PROCESSING, FAILED."
        ),
        params=ListParams,
    ),
    Endpoint(
        "GET",
        "/jobs/{id}/attempts",
        list_attempts,
        Scope.READ,
        "The attempts of a job that did not complete, oldest first",
        {200: documents.AttemptPage},
        params=AttemptParams,
        problems=(404,),
    ),
    Endpoint(
        "GET",
        "/jobs/{id}",
        get_job,
        Scope.READ,
        "Everything about one job",
        {200: documents.JobInFull},
        params=WaitParams,
        problems=(404,),
    ),
]
