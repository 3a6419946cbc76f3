"""The WSGI application: routes, error handling and what every answer carries.

``create(cfg)`` is called once in each gunicorn worker, after the fork.
"""

from typing import Any

import falcon

from aqd.api import problems
from aqd.api.auth import Guard
from aqd.api.endpoint import PREFIX, Endpoint, Resource, Services
from aqd.api.pool import Pool
from aqd.api.routes import ENDPOINTS
from aqd.config import Config


class Application(falcon.App[falcon.Request, falcon.Response]):
    """The WSGI callable, with what must be closed at the end."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(middleware=[_Headers()])
        self.services = Services(cfg, Pool(cfg), Guard(cfg))
        # Both, because Falcon has a handler of its own for its own errors, which is closer to them.
        self.add_error_handler(Exception, problems.handle)
        self.add_error_handler(falcon.HTTPError, problems.handle)
        self.req_options.strip_url_path_trailing_slash = True
        paths: dict[str, list[Endpoint]] = {}
        for endpoint in ENDPOINTS:
            paths.setdefault(endpoint.path, []).append(endpoint)
        for path, endpoints in paths.items():
            resource = Resource(endpoints, self.services)
            self.add_route(path, resource)
            self.add_route(PREFIX + path, resource)

    def close(self) -> None:
        """Close the database connections."""
        self.services.pool.close()


def create(cfg: Config) -> Application:
    """The application; it connects to the database with the first request that needs it."""
    return Application(cfg)


class _Headers:
    """On every answer: nothing may be kept by a cache or be taken for another type."""

    def process_response(self, _req: Any, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        resp.set_header("Cache-Control", "no-store")
        resp.set_header("X-Content-Type-Options", "nosniff")
