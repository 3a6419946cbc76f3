"""``GET /metrics``: all nodes' figures from the database, and this service's own requests, as Prometheus reads them.

Right under any number of processes and hosts: what nodes have counted is summed up in the database, requests in memory
that the processes of one service share (:mod:`aqd.api.tally`). Without a database, 503: a service that told half of
it would look as if the counters had begun anew.

With 200 pairs (queue, type) the text has 11,000 lines and takes 0.4 s to make; so it is made at most once in
:data:`KEPT_S` by each process, however many ask at the same time.
"""

import threading
import time
from typing import Final

from aqd import metrics
from aqd.api import tally
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.figures import Cell
from aqd.store import Connection, figures

KEPT_S: Final = 1.0
STALE_S: Final = 5.0  # how old it may be while another thread makes the next one


class _Kept:
    """The last text, and since when it stands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.text = b""
        self.at = float("-inf")


_kept = _Kept()


def get_metrics(call: Call) -> Answer:
    age_s = time.monotonic() - _kept.at
    if age_s < KEPT_S:
        return _answer(_kept.text)
    # Nobody waits for another thread, which may be waiting for the database.
    if not _kept.lock.acquire(blocking=False):
        return _answer(_kept.text if age_s < STALE_S else _made(call))
    try:
        text, now = _made(call), time.monotonic()
        _kept.text, _kept.at = text, now
    finally:
        _kept.lock.release()
    return _answer(text)


def _answer(text: bytes) -> Answer:
    return Answer(text, media=metrics.MEDIA_TYPE)


def _made(call: Call) -> bytes:
    ttl_s = call.cfg.keeper.node_ttl_s

    def look(conn: Connection) -> list[Cell]:
        nodes = figures.node_gauges(figures.list_nodes(conn, ttl_s))
        return [*figures.sum_figures(conn), *figures.gauges(conn), *nodes]

    cells = call.pool.read(look)
    return metrics.text(cells, tally.shared().families())


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
