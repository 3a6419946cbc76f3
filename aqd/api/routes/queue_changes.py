"""Changing queues: ``POST /queues/{name}/pause | resume``, ``PATCH /queues/{name}``.

A queue need not have jobs, nor have been heard of: it can be paused before the first one comes.
"""

from typing import Annotated

import falcon
from msgspec import UNSET, Meta, Struct, UnsetType

from aqd import job, store
from aqd.api import body, documents, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope, Services
from aqd.api.operate import operate
from aqd.errors import InputError
from aqd.store.change import MAX_RUNNING, check_max_running, check_paused


class QueueBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is absent stays as it is."""

    max_running: (
        Annotated[
            Annotated[int, Meta(ge=1, le=MAX_RUNNING)] | None,
            Meta(
                description="How many of its jobs may run at the same time on all nodes together; null: any number."
            ),
        ]
        | UnsetType
    ) = UNSET
    paused: Annotated[bool, Meta(description="Whether no job of it is begun.")] | UnsetType = UNSET


def read_settings(data: bytes, _req: falcon.Request, _services: Services) -> QueueBody:
    """What to change."""
    given = body.decode(data, QueueBody)
    if given.max_running is not UNSET and given.max_running is not None:
        check_max_running(given.max_running)
    if given.paused is not UNSET:
        check_paused(given.paused)
    return given


def queue_name(call: Call) -> str:
    """The name in the path."""
    return job.check_name("name", call.path["name"])


def pause(call: Call) -> Answer:
    steps = store.queue_steps(queue_name(call), call.key, paused=True)
    return Answer(render.queue_settings(operate(call.pool, steps)))


def resume(call: Call) -> Answer:
    steps = store.queue_steps(queue_name(call), call.key, paused=False)
    return Answer(render.queue_settings(operate(call.pool, steps)))


def change(call: Call) -> Answer:
    given: QueueBody = call.body
    if given.max_running is UNSET and given.paused is UNSET:
        raise InputError("", "nothing to change: give max_running or paused")
    steps = store.queue_steps(
        queue_name(call),
        call.key,
        paused=None if given.paused is UNSET else given.paused,
        limited=given.max_running is not UNSET,
        max_running=None if given.max_running is UNSET else given.max_running,
    )
    return Answer(render.queue_settings(operate(call.pool, steps)))


ENDPOINTS = [
    Endpoint(
        "POST",
        "/queues/{name}/pause",
        pause,
        Scope.ADMIN,
        "No job of the queue is begun until it is resumed",
        {200: documents.QueueSettings},
        description="What runs goes on. Nodes notice within two seconds. Pausing a paused queue changes nothing.",
        changes=True,
    ),
    Endpoint(
        "POST",
        "/queues/{name}/resume",
        resume,
        Scope.ADMIN,
        "The queue's jobs are begun again",
        {200: documents.QueueSettings},
        changes=True,
    ),
    Endpoint(
        "PATCH",
        "/queues/{name}",
        change,
        Scope.ADMIN,
        "Limit how many jobs of the queue run at the same time, on all nodes together",
        {200: documents.QueueSettings},
        description="A lower limit ends nothing that runs.",
        body=QueueBody,
        read=read_settings,
        changes=True,
    ),
]
