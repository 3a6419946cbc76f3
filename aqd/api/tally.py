"""The API's own requests: how many by route and status, and how long they took.

All processes of one service count in the same memory: an anonymous shared mapping that the arbiter makes before it
forks its workers. So whichever worker is asked for ``/metrics`` knows all requests, a worker that dies takes nothing
with it, and nothing is left behind. (prometheus-client's own way keeps a file a process, and those of dead ones for
ever.) A lock over the processes keeps additions whole; a worker that was killed while holding it costs the others
:data:`LOCK_S` a request until the service is restarted, and nothing else. 3 µs a request.

Counted are requests that reached a route; what the gate refuses (408, 413, malformed) has none.
"""

import functools
import mmap
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import falcon
from prometheus_client.core import CounterMetricFamily, Metric

from aqd import metrics
from aqd.figures import Cell
from aqd.histogram import Scale

ROUTES_MAX: Final = 128
# Others count as the class that they are in: the last place of each hundred.
STATUSES: Final = (200, 201, 202, 204, 304, 400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 429, 500, 503)
CLASSES: Final = (299, 399, 499, 599)
NO_ROUTE: Final = "none"
LOCK_S: Final = 0.001
REQUESTS: Final = Scale(0.0005, 20)  # below 0.5 ms … below 2 minutes, longer

_PLACES: Final = {status: place for place, status in enumerate((*STATUSES, *CLASSES))}
_ROW: Final = len(_PLACES) + REQUESTS.size + 1  # statuses, buckets, microseconds


class Tally:
    """Rows of numbers by route. Routes are numbered by each process alike: in the order in which they are declared."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROUTES_MAX * _ROW * 8)
        self._cells = memoryview(self._memory).cast("q")
        self._lock: Any
        try:
            self._lock = multiprocessing.get_context("fork").Lock()
        except OSError:  # no /dev/shm: two processes may then lose a count to each other
            self._lock = threading.Lock()
        self._routes: dict[tuple[str, str], int] = {(NO_ROUTE, NO_ROUTE): 0}

    def add_route(self, method: str, path: str) -> None:
        """To be called in the same order in each process."""
        if len(self._routes) < ROUTES_MAX:
            self._routes.setdefault((method, path), len(self._routes))

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        first = self._routes.get((method, path), 0) * _ROW
        place = _PLACES.get(status)
        if place is None:
            place = _PLACES[min(max(status // 100, 2), 5) * 100 + 99]
        bucket = len(_PLACES) + REQUESTS.index(seconds)
        locked = self._lock.acquire(timeout=LOCK_S)
        try:
            self._cells[first + place] += 1
            self._cells[first + bucket] += 1
            self._cells[first + _ROW - 1] += int(seconds * 1e6)
        finally:
            if locked:
                self._lock.release()

    def families(self) -> Iterator[Metric]:
        """What has been counted so far."""
        requests = CounterMetricFamily(
            "aqd_api_requests",
            "Requests by route and status; x99 are all other statuses of the class.",
            labels=("method", "route", "status"),
        )
        cells = []
        for (method, path), number in self._routes.items():
            row = self._cells[number * _ROW : (number + 1) * _ROW].tolist()
            for status, place in _PLACES.items():
                if row[place]:
                    requests.add_metric((method, path, str(status)), row[place])
            buckets = row[len(_PLACES) : -1]
            if any(buckets):
                cells.append(
                    Cell("requests", (method, path), sum(buckets), row[-1] / 1e6, buckets),
                )
        yield requests
        yield metrics.histogram(
            "aqd_api_request_duration_seconds",
            "How long requests took from the whole request to the whole answer; waiting (wait_s) included.",
            ("method", "route"),
            cells,
            REQUESTS.bounds_s,
        )


@functools.cache
def shared() -> Tally:
    """The one of this service. To be called before the fork."""
    return Tally()


class Middleware:
    """Falcon's hooks. ``prefix`` is left out of the route: /v1/jobs is /jobs."""

    def __init__(self, tally: Tally, prefix: str) -> None:
        self._tally = tally
        self._prefix = prefix

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        req.context.aqd_began = time.perf_counter()

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        method = "GET" if req.method == "HEAD" else req.method
        path = (req.uri_template or "").removeprefix(self._prefix)
        seconds = time.perf_counter() - req.context.aqd_began
        self._tally.count(method, path, resp.status_code, seconds)
