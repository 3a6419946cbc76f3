"""Changing one job: ``POST /jobs/{id}/retry | cancel | discard``, ``PATCH`` and ``DELETE /jobs/{id}``."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import falcon
from msgspec import UNSET, Meta, Struct, UnsetType

from aqd import job, store
from aqd.api import body, documents, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope, Services
from aqd.api.operate import operate
from aqd.job import MAX_DELAY_S, Moment, Priority, State
from aqd.store.change import MAX_REASON_CHARS, check_reason

Reason = Annotated[
    str, Meta(min_length=1, max_length=MAX_REASON_CHARS, description="Why; kept in the failed job's record.")
]


class UpdateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is absent stays as it is."""

    priority: Annotated[Priority, Meta(description="Higher goes first.")] | UnsetType = UNSET
    run_at: (
        Annotated[Moment, Meta(description="Not before this moment (RFC 3339 with zone). In the past: now.")]
        | UnsetType
    ) = UNSET
    delay_s: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=MAX_DELAY_S,
                description="Not before so many seconds from now; not together with `run_at`.",
            ),
        ]
        | UnsetType
    ) = UNSET


class DiscardBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Why a job is given up."""

    reason: Reason


_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "priority": job.check_priority,
    "run_at": lambda value: job.parse_moment("run_at", value),
    "delay_s": job.check_delay,
}


def read_update(data: bytes, _req: falcon.Request, _services: Services) -> UpdateBody:
    """What to change. null is no value of anything here."""
    given = body.decode(data, UpdateBody)
    for name, check in _CHECKS.items():
        if (value := getattr(given, name)) is not UNSET:
            check(value)
    return given


def read_discard(data: bytes, _req: falcon.Request, _services: Services) -> DiscardBody:
    """Why."""
    given = body.decode(data, DiscardBody)
    check_reason(given.reason)
    return given


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


def discard(call: Call) -> Answer:
    number, given = call.job_id, call.body
    state = operate(call.pool, store.discard_steps(number, given.reason, call.key))
    return Answer(documents.Settled(id=str(number), jobId=str(number), status=State(state)))


def delete(call: Call) -> Answer:
    number = call.job_id
    state = operate(call.pool, store.delete_steps(number))
    return Answer(documents.Deleted(id=str(number), jobId=str(number), status=State(state)))


def update(call: Call) -> Answer:
    number, given = call.job_id, call.body
    asked = {name: getattr(given, name) for name in given.__struct_fields__}
    steps = store.update_steps(number, **{name: value for name, value in asked.items() if value is not UNSET})
    return Answer(render.updated(operate(call.pool, steps)))


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
    Endpoint(
        "POST",
        "/jobs/{id}/discard",
        discard,
        Scope.ADMIN,
        "A FAILED job is given up",
        {200: documents.Settled},
        description="It becomes CANCELLED; its failed-job record is resolved as `discarded`, with the reason and the "
        "name of the key.",
        body=DiscardBody,
        read=read_discard,
        problems=(404, 409),
        changes=True,
    ),
    Endpoint(
        "PATCH",
        "/jobs/{id}",
        update,
        Scope.ADMIN,
        "Change priority or moment of a QUEUED job",
        {200: documents.Updated},
        description="409 once it runs or has ended. A changed priority may take a second or two to be noticed.",
        body=UpdateBody,
        read=read_update,
        problems=(404, 409),
        changes=True,
    ),
    Endpoint(
        "DELETE",
        "/jobs/{id}",
        delete,
        Scope.ADMIN,
        "Remove a job that does not run, with all that is known of it",
        {200: documents.Deleted},
        description="409 while it runs: cancel it first. An idempotency key goes on standing for the job, so that a "
        "repeated request does not bring it back.",
        problems=(404, 409),
        changes=True,
    ),
]
