"""Looking at jobs: ``GET /jobs``, ``GET /jobs/{id}``."""

from msgspec import Struct

from aqd import job, store
from aqd.api import documents, query, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.errors import NotFoundError
from aqd.job import Name, State


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


def get_job(call: Call) -> Answer:
    number = call.job_id
    return Answer(call.pool.read(lambda conn: in_full(conn, number)))


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
        problems=(404,),
    ),
]
