"""The WSGI application: routes, error handling and what every answer carries.

``create(cfg)`` is called once in each gunicorn worker, after the fork.
"""

from typing import Any

import falcon

from aqd.api import problems, resources
from aqd.api.auth import AdminKey
from aqd.api.pool import Pool
from aqd.config import Config
from aqd.job import MAX_JSON_BYTES


def create(cfg: Config) -> falcon.App[falcon.Request, falcon.Response]:
    """The application; it connects to the database with the first request that needs it."""
    pool = Pool(cfg)
    key = AdminKey(cfg.api.admin_api_key)
    app = falcon.App(middleware=[_Headers()])
    # Both, because Falcon has a handler of its own for its own errors, which is closer to them.
    app.add_error_handler(Exception, problems.handle)
    app.add_error_handler(falcon.HTTPError, problems.handle)
    app.req_options.strip_url_path_trailing_slash = True
    app.add_route("/jobs", resources.Jobs(pool, body_limit(cfg), cfg.jobs.max_payload_bytes))
    app.add_route("/jobs/{id}", resources.Job(pool))
    app.add_route("/jobs/{id}/retry", resources.Retry(pool, key))
    app.add_route("/admin/failed-jobs", resources.FailedJobs(pool, key))
    app.add_route("/health", resources.Health(pool, cfg.keeper.node_ttl_s))
    return app


def body_limit(cfg: Config) -> int:
    """Bytes of the largest body: 1 MiB, or more if the configuration allows larger payloads."""
    return max(MAX_JSON_BYTES, cfg.jobs.max_payload_bytes)


class _Headers:
    """On every answer: nothing may be kept by a cache or be taken for another type."""

    def process_response(self, _req: Any, resp: falcon.Response, _resource: Any, _ok: bool) -> None:
        resp.set_header("Cache-Control", "no-store")
        resp.set_header("X-Content-Type-Options", "nosniff")
