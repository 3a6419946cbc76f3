"""The dead-letter records: ``GET /admin/failed-jobs``."""

from msgspec import Struct

from aqd import store
from aqd.api import documents, query, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope


class FailedParams(Struct):
    """Which records, and which page of them."""

    resolved: bool = False
    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def list_failed(call: Call) -> Answer:
    given: FailedParams = call.params
    before = render.read_cursor("f", given.cursor) if given.cursor is not None else None
    rows = call.pool.read(
        lambda conn: store.list_failed(conn, before, given.limit + 1, resolved=given.resolved)
    )
    shown, following = render.split(rows, given.limit, "f", lambda row: row.id)
    return Answer(
        documents.FailedPage(failed_jobs=[render.failed_job(row) for row in shown], next_cursor=following)
    )


ENDPOINTS = [
    Endpoint(
        "GET",
        "/admin/failed-jobs",
        list_failed,
        Scope.ADMIN,
        "The failed-job records, newest first",
        {200: documents.FailedPage},
        params=FailedParams,
    ),
]
