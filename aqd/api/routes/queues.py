"""Looking at queues: ``GET /queues``, ``GET /queues/{name}``. They read snapshots and settings, and count nothing."""

from msgspec import Struct

from aqd import job
from aqd.api import figures as documents
from aqd.api import problems, query
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.errors import InputError, NotFoundError
from aqd.store import figures


class PageParams(Struct):
    """Which page."""

    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def name_in_path(call: Call) -> str:
    """What cannot be a name is the name of nothing: 404."""
    try:
        return job.check_name("name", call.path["name"])
    except InputError as error:
        raise problems.Problem(404, error.reason, field="name", bound=error.bound) from None


def list_queues(call: Call) -> Answer:
    given: PageParams = call.params
    after = documents.read_cursor("q", given.cursor)
    rows = call.pool.read(lambda conn: figures.list_queues(conn, after, given.limit + 1))
    shown, following = documents.split(rows, given.limit, "q", lambda row: row.queue)
    return Answer(documents.QueuePage(queues=[documents.queue(row) for row in shown], next_cursor=following))


def get_queue(call: Call) -> Answer:
    name = name_in_path(call)
    row = call.pool.read(lambda conn: figures.get_queue(conn, name))
    if row is None:
        raise NotFoundError(f"there is no queue {name}: it has neither jobs nor settings")
    return Answer(documents.queue(row))


ENDPOINTS = [
    Endpoint(
        "GET",
        "/queues",
        list_queues,
        Scope.READ,
        "Queues, by name: settings, counts, ages, rates, durations",
        {200: documents.QueuePage},
        params=PageParams,
    ),
    Endpoint(
        "GET",
        "/queues/{name}",
        get_queue,
        Scope.READ,
        "One queue",
        {200: documents.Queue},
        problems=(404,),
    ),
]
