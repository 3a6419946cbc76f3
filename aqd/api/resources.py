"""The routes: one class each, one method an HTTP method.

Runs in the API's workers. A responder checks the request, runs one statement and renders the rows;
whatever it raises becomes a problem document (:mod:`aqd.api.problems`). HEAD is GET without the body
(Falcon leaves it out), OPTIONS is Falcon's.
"""

from typing import Any

import falcon

from aqd import job, store
from aqd.api import body, problems, query, render
from aqd.api.auth import AdminKey
from aqd.api.pool import Pool
from aqd.errors import DatabaseUnavailable, InputError, NotFoundError, SchemaMismatch

HEALTH_TIMEOUT_S = 3.0
_BOOLEANS = ("false", "true")


def answer(resp: falcon.Response, document: object, status: int = 200) -> None:
    """A JSON document."""
    resp.status = status
    resp.content_type = falcon.MEDIA_JSON
    resp.data = problems.encode(document)


class Jobs:
    """``POST /jobs`` submits, ``GET /jobs`` lists."""

    def __init__(self, pool: Pool, max_body: int, max_payload: int) -> None:
        self._pool = pool
        self._max_body = max_body
        self._max_payload = max_payload

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        query.parameters(req)
        request = job.parse_request(body.read_json(req, self._max_body), max_payload_bytes=self._max_payload)
        made = self._pool.write(lambda conn: store.enqueue(conn, request))
        document = render.enqueued(made) | {
            "type": request.type,
            "queue": made.queue,
            "priority": request.priority,
        }
        resp.location = f"/jobs/{made.id}"
        answer(resp, document, 201)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        given = query.parameters(req, "state", "type", "queue", "limit", "cursor")
        filters = store.JobFilter(
            state=query.choice(given, "state", tuple(job.State)),
            type=job.check_name("type", given["type"]) if "type" in given else None,
            queue=job.check_name("queue", given["queue"]) if "queue" in given else None,
        )
        before = render.read_cursor("j", given["cursor"]) if "cursor" in given else None
        limit = query.limit(given)
        rows = self._pool.read(lambda conn: store.list_jobs(conn, filters, before, limit + 1))
        answer(resp, render.page("jobs", rows, limit, "j", lambda row: row.id, render.job))

    on_head = on_get


class Job:
    """``GET /jobs/{id}``: everything about one job."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def on_get(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        query.parameters(req)
        number = path_id(id)
        answer(resp, self._pool.read(lambda conn: _job_in_full(conn, number)))

    on_head = on_get


class Retry:
    """``POST /jobs/{id}/retry``: a FAILED job becomes QUEUED again, as if new. Needs the admin key."""

    def __init__(self, pool: Pool, key: AdminKey) -> None:
        self._pool = pool
        self._key = key

    def on_post(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        self._key.require(req)
        query.parameters(req)
        number = path_id(id)
        made = self._pool.write(lambda conn: store.retry_job(conn, number))
        answer(resp, render.enqueued(made))


class Cancel:
    """``POST /jobs/{id}/cancel``: the job does not run, or ends and is not run again. Needs the admin key.

    The answer's status is the state after it: 200 when that is final, 202 while the job still runs and was
    asked to end. A job that has ended stays as it is; cancelling it again, or too late, is no error.
    """

    def __init__(self, pool: Pool, key: AdminKey) -> None:
        self._pool = pool
        self._key = key

    def on_post(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        self._key.require(req)
        query.parameters(req)
        number = path_id(id)
        found = self._pool.write(lambda conn: store.cancel_job(conn, number))
        running = found.state == job.State.PROCESSING
        if running:
            resp.location = f"/jobs/{number}"  # where to look until it has ended
        answer(resp, render.cancelled(found), 202 if running else 200)


class FailedJobs:
    """``GET /admin/failed-jobs``: the dead-letter records, newest first. Needs the admin key."""

    def __init__(self, pool: Pool, key: AdminKey) -> None:
        self._pool = pool
        self._key = key

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._key.require(req)
        given = query.parameters(req, "resolved", "limit", "cursor")
        resolved = query.choice(given, "resolved", _BOOLEANS) == "true"
        before = render.read_cursor("f", given["cursor"]) if "cursor" in given else None
        limit = query.limit(given)
        rows = self._pool.read(lambda conn: store.list_failed(conn, before, limit + 1, resolved=resolved))
        answer(resp, render.page("failed_jobs", rows, limit, "f", lambda row: row.id, render.failed_job))

    on_head = on_get


class Health:
    """``GET /health``: 200 when a job could be accepted now, else 503. Open to everybody on purpose, so it
    tells counts and versions but no names."""

    def __init__(self, pool: Pool, node_ttl_s: float) -> None:
        self._pool = pool
        self._node_ttl_s = node_ttl_s

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        query.parameters(req)
        document: dict[str, Any] = {"status": "ok", "database": "ok"}
        try:
            found = self._pool.read(
                lambda conn: store.health(conn, self._node_ttl_s), timeout_s=HEALTH_TIMEOUT_S, tries=1
            )
        except DatabaseUnavailable:
            document = {"status": "unavailable", "database": "unavailable"}
        except SchemaMismatch as error:
            document = {
                "status": "unavailable",
                "database": "ok",
                "schema": {"ok": False, "reason": str(error)},
            }
        else:
            document |= render.health(found)
        if document["status"] != "ok":
            resp.set_header("Retry-After", str(problems.RETRY_AFTER_S))
        answer(resp, document, 200 if document["status"] == "ok" else 503)

    on_head = on_get


def _job_in_full(conn: store.Connection, number: int) -> dict[str, Any]:
    row = store.get_job(conn, number)
    if row is None:
        raise NotFoundError(f"there is no job {number}")
    present = row.state in (job.State.PROCESSING, job.State.COMPLETED)
    # Most jobs have none, and this is the route that clients poll.
    other = row.attempt - present or row.crashes or row.interruptions or row.retries
    return render.job_in_full(row, store.get_attempts(conn, number) if other else ())


def path_id(text: str) -> int:
    """The job id in a path. What cannot be one names a job that does not exist: 404."""
    try:
        return job.parse_id(text)
    except InputError as error:
        raise problems.Problem(404, error.reason, field="id", bound=error.bound) from None
