"""``GET /metrics``: all nodes' figures from the database, and this service's own requests, as Prometheus reads them.

Right under any number of processes and hosts: what nodes have counted is summed up in the database, requests in memory
that the processes of one service share (:mod:`aqd.api.tally`). Without a database, 503: a service that told half of
it would look as if the counters had begun anew.
"""

from aqd import metrics
from aqd.api import tally
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.figures import Cell
from aqd.store import Connection, figures


def get_metrics(call: Call) -> Answer:
    ttl_s = call.cfg.keeper.node_ttl_s

    def look(conn: Connection) -> list[Cell]:
        nodes = figures.node_gauges(figures.list_nodes_in_full(conn, ttl_s))
        return [*figures.sum_figures(conn), *figures.gauges(conn), *nodes]

    cells = call.pool.read(look)
    return Answer(metrics.text(cells, tally.shared().families()), media=metrics.MEDIA_TYPE)


ENDPOINTS = [
    Endpoint(
        "GET",
        "/metrics",
        get_metrics,
        Scope.READ,
        "Everything that is counted, in the text format of Prometheus",
        {200: str},
        media=metrics.MEDIA_TYPE,
    ),
]
