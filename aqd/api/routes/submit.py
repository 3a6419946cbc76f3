"""Submitting: ``POST /jobs``."""

import falcon

from aqd import job, store
from aqd.api import documents, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope, Services
from aqd.job import JobBody, JobRequest

KEY_HEADER = "Idempotency-Key"


def read_job(data: bytes, req: falcon.Request, services: Services) -> JobRequest:
    """The job in a body, with the key in the header."""
    return job.parse_request(
        data,
        max_payload_bytes=services.cfg.jobs.max_payload_bytes,
        idempotency_key=key_of(req),
    )


def key_of(req: falcon.Request) -> str | None:
    """The header ``Idempotency-Key``, with or without the quotes of its draft standard."""
    value = req.get_header(KEY_HEADER)
    if value is None:
        return None
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = value[1:-1]
    return job.check_key(value, KEY_HEADER)


def submit(call: Call) -> Answer:
    request: JobRequest = call.body
    made = call.pool.write(lambda conn: store.enqueue(conn, request, scope=call.key))
    location = {"Location": call.url(f"/jobs/{made.id}")}
    return Answer(render.submitted(made, request), 201 if made.outcome == "created" else 200, location)


ENDPOINTS = [
    Endpoint(
        "POST",
        "/jobs",
        submit,
        Scope.SUBMIT,
        "Submit a job",
        {201: documents.Submitted, 200: documents.Submitted},
        body=JobBody,
        read=read_job,
        headers={KEY_HEADER: "The same as the field idempotency_key."},
        problems=(409,),
        changes=True,
    ),
]
