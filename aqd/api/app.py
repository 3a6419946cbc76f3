"""The WSGI application: routes, error handling and what every answer carries.

``create(cfg)`` is called once in each gunicorn worker, after the fork.
"""

from typing import Any

import falcon

from aqd.api import problems, resources
from aqd.api.auth import AdminKey
from aqd.api.pool import Pool
from aqd.config import Config
from aqd.strict_json import MAX_JSON_BYTES


class Application(falcon.App[falcon.Request, falcon.Response]):
    """The WSGI callable, with what must be closed at the end."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(middleware=[_Headers()])
        self.pool = Pool(cfg)
        key = AdminKey(cfg.api.admin_api_key)
        # Both, because Falcon has a handler of its own for its own errors, which is closer to them.
        self.add_error_handler(Exception, problems.handle)
        self.add_error_handler(falcon.HTTPError, problems.handle)
        self.req_options.strip_url_path_trailing_slash = True
        self.add_route("/jobs", resources.Jobs(self.pool, body_limit(cfg), cfg.jobs.max_payload_bytes))
        self.add_route("/jobs/{id}", resources.Job(self.pool))
        self.add_route("/jobs/{id}/retry", resources.Retry(self.pool, key))
        self.add_route("/jobs/{id}/cancel", resources.Cancel(self.pool, key))
        self.add_route("/admin/failed-jobs", resources.FailedJobs(self.pool, key))
        self.add_route("/health", resources.Health(self.pool, cfg.keeper.node_ttl_s))

    def close(self) -> None:
        """Close the database connections."""
        self.pool.close()


def create(cfg: Config) -> Application:
    """The application; it connects to the database with the first request that needs it."""
    return Application(cfg)


def body_limit(cfg: Config) -> int:
    """Bytes of the largest body: 1 MiB, or more if the configuration allows larger payloads."""
    return max(MAX_JSON_BYTES, cfg.jobs.max_payload_bytes)


class _Headers:
    """On every answer: nothing may be kept by a cache or be taken for another type."""

    def process_response(self, _req: Any, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        resp.set_header("Cache-Control", "no-store")
        resp.set_header("X-Content-Type-Options", "nosniff")
