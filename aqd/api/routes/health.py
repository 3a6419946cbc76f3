"""``GET /health``: 200 when a job could be accepted now, else 503. Open to everybody on purpose, so it tells counts and
versions but no names.

The gate has threads for it (:data:`aqd.api.gate.HEALTH_THREADS`), so it answers whatever the others wait for."""

from aqd import store
from aqd.api import documents, problems, render
from aqd.api.endpoint import Answer, Call, Endpoint
from aqd.errors import DatabaseUnavailable, Locked, SchemaMismatch

HEALTH_TIMEOUT_S = 3.0


def health(call: Call) -> Answer:
    ttl_s = call.cfg.keeper.node_ttl_s
    try:
        document = render.health(
            call.pool.read(lambda conn: store.health(conn, ttl_s), timeout_s=HEALTH_TIMEOUT_S, tries=1)
        )
    except (DatabaseUnavailable, Locked):
        document = documents.Health(status="unavailable", database="unavailable")
    except SchemaMismatch as error:
        schema = documents.Schema(ok=False, reason=str(error))
        document = documents.Health(status="unavailable", database="ok", schema=schema)
    if document.status == "ok":
        return Answer(document)
    return Answer(document, 503, {"Retry-After": str(problems.RETRY_AFTER_S)})


ENDPOINTS = [
    Endpoint(
        "GET",
        "/health",
        health,
        None,
        "Whether a job could be accepted now",
        {200: documents.Health, 503: documents.Health},
    ),
]
