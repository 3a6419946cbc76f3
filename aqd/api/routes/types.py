"""Looking at types of jobs: ``GET /types``, ``GET /types/{name}``. They read snapshots, and count nothing."""

from aqd.api import figures as documents
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.api.routes.queues import PageParams, name_in_path
from aqd.errors import NotFoundError
from aqd.store import figures


def list_types(call: Call) -> Answer:
    given: PageParams = call.params
    after, ttl_s = documents.read_cursor("t", given.cursor), call.cfg.keeper.node_ttl_s
    rows = call.pool.read(lambda conn: figures.list_types(conn, ttl_s, after, given.limit + 1))
    shown, following = documents.split(rows, given.limit, "t", lambda row: row.type)
    return Answer(documents.TypePage(types=[documents.type_(row) for row in shown], next_cursor=following))


def get_type(call: Call) -> Answer:
    name, ttl_s = name_in_path(call), call.cfg.keeper.node_ttl_s
    row = call.pool.read(lambda conn: figures.get_type(conn, name, ttl_s))
    if row is None:
        raise NotFoundError(f"there is no type {name}: it has no jobs, and no node has ever declared it")
    return Answer(documents.type_(row))


ENDPOINTS = [
    Endpoint(
        "GET",
        "/types",
        list_types,
        Scope.READ,
        "Types of jobs, by name: who serves them, counts, ages, rates, durations",
        {200: documents.TypePage},
        params=PageParams,
    ),
    Endpoint(
        "GET",
        "/types/{name}",
        get_type,
        Scope.READ,
        "One type",
        {200: documents.Type},
        problems=(404,),
    ),
]
