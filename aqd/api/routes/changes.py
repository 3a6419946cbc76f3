"""Changing jobs: ``POST /jobs/{id}/retry``, ``POST /jobs/{id}/cancel``."""

from aqd import store
from aqd.api import documents, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.job import State


def retry(call: Call) -> Answer:
    number = call.job_id
    return Answer(render.enqueued(call.pool.write(lambda conn: store.retry_job(conn, number))))


def cancel(call: Call) -> Answer:
    """200 when the state is final, 202 while the job still runs and was asked to end. A job that has ended stays as
    it is; cancelling it again, or too late, is no error."""
    number = call.job_id
    found = call.pool.write(lambda conn: store.cancel_job(conn, number))
    if found.state != State.PROCESSING:
        return Answer(render.cancelled(found))
    return Answer(render.cancelled(found), 202, {"Location": call.url(f"/jobs/{number}")})


ENDPOINTS = [
    Endpoint(
        "POST",
        "/jobs/{id}/retry",
        retry,
        Scope.ADMIN,
        "A FAILED job becomes QUEUED again, as if new",
        {200: documents.Enqueued},
        problems=(404, 409),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/jobs/{id}/cancel",
        cancel,
        Scope.ADMIN,
        "The job does not run, or ends and is not run again",
        {200: documents.Cancelled, 202: documents.Cancelled},
        problems=(404,),
        changes=True,
    ),
]
