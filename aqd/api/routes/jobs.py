"""Looking at jobs: ``GET /jobs``, ``GET /jobs/{id}``."""

import time
from typing import Annotated

from msgspec import Meta, Struct

from aqd import job, store
from aqd.api import documents, query, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.api.waiters import client_of
from aqd.errors import NotFoundError
from aqd.job import Name, State
from aqd.waiting import ENDED


class ListParams(Struct):
    """Which jobs, and which page of them."""

    state: State | None = None
    type: Name | None = None
    queue: Name | None = None
    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def list_jobs(call: Call) -> Answer:
    given: ListParams = call.params
    filters = store.JobFilter((given.state,) if given.state else (), given.type, given.queue)
    before = render.read_cursor("j", given.cursor) if given.cursor is not None else None
    rows = call.pool.read(lambda conn: store.list_jobs(conn, filters, before, given.limit + 1))
    shown, following = render.split(rows, given.limit, "j", lambda row: row.id)
    return Answer(documents.JobPage(jobs=[render.job(row) for row in shown], next_cursor=following))


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
            found = call.pool.read(lambda conn: in_full(conn, number))
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


ENDPOINTS = [
    Endpoint(
        "GET",
        "/jobs",
        list_jobs,
        Scope.READ,
        "List jobs, newest first",
        {200: documents.JobPage},
        params=ListParams,
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
