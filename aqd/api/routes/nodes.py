"""Looking at daemons: ``GET /nodes``."""

from aqd.api import figures as documents
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.store import figures


def list_nodes(call: Call) -> Answer:
    ttl_s = call.cfg.keeper.node_ttl_s
    rows = call.pool.read(lambda conn: figures.list_nodes(conn, ttl_s))
    return Answer(documents.NodeList(nodes=[documents.node(row) for row in rows]))


ENDPOINTS = [
    Endpoint(
        "GET",
        "/nodes",
        list_nodes,
        Scope.READ,
        "Daemons on this database: slots, generation, plugins, last sign of life",
        {200: documents.NodeList},
    ),
]
