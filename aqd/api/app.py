"""The WSGI application: routes, error handling and what every answer carries.

``create(cfg, ring)`` is called once in each gunicorn worker, after the fork.
"""

import re
from typing import Any, Final

import falcon

from aqd.api import problems, tally
from aqd.api.auth import Guard
from aqd.api.endpoint import PREFIX, SLASH, Endpoint, Resource, Services
from aqd.api.pool import Pool
from aqd.api.routes import ENDPOINTS
from aqd.api.waiters import Waiters
from aqd.config import Config
from aqd.keys import Ring


class Application(falcon.App[falcon.Request, falcon.Response]):
    """The WSGI callable, with what must be closed at the end."""

    def __init__(self, cfg: Config, ring: Ring) -> None:
        counts = tally.shared()
        middleware: list[Any] = [tally.Middleware(counts, PREFIX), _Slashes(), _Headers()]
        if cfg.api.cors_origins:
            middleware.append(_Cors(frozenset(cfg.api.cors_origins)))
        super().__init__(middleware=middleware)
        self.services = Services(cfg, Pool(cfg), Guard(cfg, ring), Waiters(cfg))
        # Both, because Falcon has a handler of its own for its own errors, which is closer to them.
        self.add_error_handler(Exception, problems.handle)
        self.add_error_handler(falcon.HTTPError, problems.handle)
        self.req_options.strip_url_path_trailing_slash = True
        paths: dict[str, list[Endpoint]] = {}
        for endpoint in ENDPOINTS:
            paths.setdefault(endpoint.path, []).append(endpoint)
            counts.add_route(endpoint.method, endpoint.path)
        for path, endpoints in paths.items():
            resource = Resource(endpoints, self.services)
            self.add_route(path, resource)
            self.add_route(PREFIX + path, resource)

    def drain(self) -> None:
        """The process is to stop: whoever waits for a job is answered."""
        self.services.waiters.drain()

    def close(self) -> None:
        """Close the database connections."""
        self.services.waiters.close()
        self.services.pool.close()


def create(cfg: Config, ring: Ring) -> Application:
    """The application; it connects to the database with the first request that needs it."""
    return Application(cfg, ring)


_AUTHORITY: Final = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/]*")


class _Slashes:
    """Names of queues and types may hold "/", written %2F in a path. WSGI decodes the path before anybody parts it, so it
    is parted as it was sent, with what is meant as a part of a name left for :data:`aqd.api.endpoint.SLASH`."""

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        # A target may have the absolute form (RFC 9112, 3.2.2), and then the path is the same.
        sent = _AUTHORITY.sub("", re.split("[?#]", str(req.env.get("RAW_URI", "")), maxsplit=1)[0])
        if "%2f" in sent.lower() and sent.startswith("/"):
            parts = re.split("%2f", sent, flags=re.IGNORECASE)
            path = SLASH.join(falcon.uri.decode(part, unquote_plus=False) for part in parts)
            req.path = path.removesuffix("/") or "/"


class _Headers:
    """On every answer: nothing may be kept by a cache or be taken for another type."""

    def process_response(self, _req: Any, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        resp.set_header("Cache-Control", "no-store")
        resp.set_header("X-Content-Type-Options", "nosniff")


class _Cors:
    """For web pages of the configured origins (Fetch standard, 3.2). Without any, no answer carries such a header, and a
    browser lets no page of another origin send JSON here or read an answer.

    That is no protection of an open service on a machine where a browser runs: a page whose name is made to resolve to
    127.0.0.1 (DNS rebinding) is of the same origin to the browser, and ``Host`` is not looked at here, because a proxy
    and each client may have a name of their own for the service. A key is one: the page does not have it."""

    REQUEST_HEADERS: Final = "authorization, content-type, idempotency-key, x-admin-key, x-api-key"
    ANSWER_HEADERS: Final = "location, retry-after"
    MAX_AGE_S: Final = 600

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        resp.append_header("Vary", "Origin")
        origin = req.get_header("Origin")
        if origin not in self._origins:
            return
        resp.set_header("Access-Control-Allow-Origin", origin)
        resp.set_header("Access-Control-Expose-Headers", self.ANSWER_HEADERS)
        if req.method == "OPTIONS" and req.get_header("Access-Control-Request-Method"):
            resp.set_header("Access-Control-Allow-Methods", resp.get_header("Allow") or "")
            resp.set_header("Access-Control-Allow-Headers", self.REQUEST_HEADERS)
            resp.set_header("Access-Control-Max-Age", str(self.MAX_AGE_S))
