"""Submitting: ``POST /jobs``, ``POST /jobs/batch``.

The same options as everywhere (:class:`aqd.job.JobRequest`). An idempotency key's scope is the name of the API key
that the request carries ("admin" for ADMIN_API_KEY), so two applications do not meet in one; without an API key it is
the scope of SQL, of the client and of the command line.
"""

import random
import re
import time
from typing import Any, Final, NamedTuple, TypeAlias

import falcon
import msgspec
import psycopg
from msgspec import Raw, Struct

from aqd import job, store, strict_json
from aqd.api import documents, problems, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope, Services
from aqd.database import Connection
from aqd.errors import IdempotencyConflict, InputError, KeyInProgress
from aqd.job import BatchBody, JobBody, JobRequest
from aqd.store import EnqueuedJob

KEY_HEADER: Final = "Idempotency-Key"
# Of a refused batch, so many faults are told: enough to see the pattern.
MAX_TOLD: Final = 20
# Deeper than any job may be, so that a job which is too deep is one fault of a batch and not all of it.
_BATCH_DEPTH: Final = 3 * strict_json.MAX_DEPTH
_CONFLICT_TRIES: Final = 8
# Of statement_timeout: the time for the keys of a batch, each alone, once waiting for one of them was in vain.
_APART_SHARE: Final = 0.3
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')


# --- one ------------------------------------------------------------------------------------------


def read_job(data: bytes, req: falcon.Request, services: Services) -> JobRequest:
    """The job in a body, with the key in the header."""
    return job.parse_request(
        data,
        max_payload_bytes=services.cfg.jobs.max_payload_bytes,
        idempotency_key=key_of(req),
    )


def key_of(req: falcon.Request) -> str | None:
    """The header ``Idempotency-Key``: the string of its draft standard (RFC 8941), or the bare key.

    WSGI joins headers that come twice by a comma, so a bare key has none.
    """
    value = req.get_header(KEY_HEADER)
    if value is None:
        return None
    if value.startswith('"'):
        found = _QUOTED.fullmatch(value)
        if found is None:
            raise InputError(KEY_HEADER, "is no quoted string, or is given twice", "once")
        value = re.sub(r"\\(.)", r"\1", found[1])
    elif "," in value:
        raise InputError(KEY_HEADER, "is given twice, or holds a comma without quotes around the key", "once")
    return job.check_key(value, KEY_HEADER)


def submit(call: Call) -> Answer:
    request: JobRequest = call.body
    ttl_hours = call.cfg.jobs.idempotency_ttl_hours

    def work(conn: Connection) -> EnqueuedJob:
        with store.held_keys(request):
            return store.enqueue(conn, request, scope=call.key, ttl_hours=ttl_hours)

    made = call.pool.write(work)
    location = {"Location": call.url(f"/jobs/{made.id}")}
    return Answer(render.submitted(made, request), 201 if made.outcome == "created" else 200, location)


# --- many -----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A batch as it was read: each job, or what is wrong with it."""

    jobs: list[JobRequest | InputError]
    atomic: bool


_Stored: TypeAlias = EnqueuedJob | IdempotencyConflict | KeyInProgress


class _Outer(Struct):
    jobs: Raw = Raw(b"null")


_OUTER: Final = msgspec.json.Decoder(_Outer)
_JOBS: Final = msgspec.json.Decoder(list[Raw])


def read_batch(data: bytes, req: falcon.Request, services: Services) -> Batch:
    """The jobs of a body, each checked on its own by :func:`aqd.job.parse_request`, faults kept beside the others."""
    if req.get_header(KEY_HEADER) is not None:
        raise InputError(KEY_HEADER, "is for one job; in a batch each job has its own idempotency_key")
    text = strict_json.decode(data, "")
    if strict_json.depth_exceeds(text, _BATCH_DEPTH):
        raise InputError("", f"is nested deeper than {strict_json.MAX_DEPTH} levels", strict_json.MAX_DEPTH)
    rest, pieces = _split(data, text, services.max_body)
    for name in rest:
        if name not in BatchBody.__struct_fields__:
            known = ", ".join(BatchBody.__struct_fields__)
            raise InputError(strict_json.path_of((None, name), ""), f"unknown field; known are {known}")
    if not isinstance(pieces, list):
        kind = strict_json.kind_of(pieces)
        raise InputError("jobs", "is missing" if "jobs" not in rest else f"must be an array, not {kind}")
    if not 1 <= len(pieces) <= job.MAX_BATCH:
        raise InputError("jobs", f"are {len(pieces)}, not 1 to {job.MAX_BATCH}", f"1..{job.MAX_BATCH}")
    atomic = rest.get("atomic", True)
    if not isinstance(atomic, bool):
        raise InputError("atomic", f"must be true or false, not {strict_json.kind_of(atomic)}")
    most = services.cfg.jobs.max_payload_bytes
    batch = Batch([_one(piece, most) for piece in pieces], atomic)
    faults = [(n, each) for n, each in enumerate(batch.jobs) if isinstance(each, InputError)]
    if atomic and faults:
        raise _refused(faults)
    return batch


def _split(data: bytes, text: str, most: int) -> tuple[dict[str, Any], Any]:
    """The body without its jobs, and the jobs' own texts; something else than a list if they are no array.

    msgspec finds where each begins and ends without reading them, but stops at half a surrogate pair, which is one
    job's fault: it gets a copy of the same length without any.
    """
    copy = _SURROGATES.sub(rb"\\u0041", data)
    try:
        raw = bytes(_OUTER.decode(copy).jobs)
        parts = _JOBS.decode(raw) if raw.startswith(b"[") else None
    except msgspec.MsgspecError:
        # No JSON at all, or no object: this says where, and why.
        given = strict_json.parse(text, "", most, _BATCH_DEPTH)
        raise InputError("", f"the body must be a JSON object, not {strict_json.kind_of(given)}") from None
    at = copy.find(raw)  # -1 if there are no jobs
    without = data if at < 0 else data[:at] + b"null" + data[at + len(raw) :]
    # The rest, strictly: a name that stands twice, or is unknown, is seen here.
    rest: dict[str, Any] = strict_json.parse(without.decode(), "", most, _BATCH_DEPTH)
    if parts is None:
        return rest, strict_json.parse(raw.decode(), "jobs", most, _BATCH_DEPTH)
    pieces = []
    for part in parts:
        at = copy.index(bytes(part), at)  # behind the one before there are a comma and white space only
        pieces.append(data[at : at + len(part)])
        at += len(part)
    return rest, pieces


def _one(piece: bytes, most: int) -> JobRequest | InputError:
    try:
        if not piece.startswith(b"{"):
            kind = strict_json.kind_of(strict_json.parse(piece.decode(), "", len(piece), _BATCH_DEPTH))
            return InputError("", f"a job must be a JSON object, not {kind}")
        return job.parse_request(piece, max_payload_bytes=most)
    except InputError as error:
        return error


def submit_batch(call: Call) -> Answer:
    batch: Batch = call.body
    wanted = [each for each in batch.jobs if isinstance(each, JobRequest)]
    made = iter(
        call.pool.write(lambda conn: _store(conn, call, wanted, atomic=batch.atomic)) if wanted else []
    )
    results = []
    for place, asked in enumerate(batch.jobs):
        if isinstance(asked, InputError):
            results.append(_result(place, asked, None))
        else:
            results.append(_result(place, next(made), asked))
    tally = [each.job.outcome if each.job else "refused" for each in results]
    return Answer(
        documents.BatchAnswer(
            results=results,
            created=tally.count("created"),
            existing=tally.count("existing"),
            replaced=tally.count("replaced"),
            refused=tally.count("refused"),
        )
    )


def _store(conn: Connection, call: Call, wanted: list[JobRequest], *, atomic: bool) -> list[_Stored]:
    """One transaction, so of an interrupted batch nothing is stored; again after a deadlock, with nothing done."""
    terms: dict[str, Any] = {"scope": call.key, "ttl_hours": call.cfg.jobs.idempotency_ttl_hours}
    tries = 0
    while True:
        try:
            with conn.transaction():
                if not atomic and any(each.idempotency_key is not None for each in wanted):
                    return _store_apart(conn, call, wanted, terms)
                with store.held_keys(*wanted):
                    made = store.enqueue_many(conn, wanted, **terms)
                clashes = [(n, each) for n, each in enumerate(made) if isinstance(each, IdempotencyConflict)]
                if atomic and clashes:
                    raise _refused(clashes)
                return list(made)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
            tries += 1
            if tries >= _CONFLICT_TRIES or conn.closed:
                raise
            time.sleep(random.uniform(0.002, 0.01) * tries)


def _store_apart(
    conn: Connection, call: Call, wanted: list[JobRequest], terms: dict[str, Any]
) -> list[_Stored]:
    """Inside a transaction. All at once, which is fifty times as fast; if somebody holds one of the keys, each alone."""
    try:
        with conn.transaction(), store.held_keys(*wanted):
            return list(store.enqueue_many(conn, wanted, **terms))
    except KeyInProgress:
        within_s = call.cfg.database.statement_timeout_s * _APART_SHARE
        return store.enqueue_apart(conn, wanted, within_s=within_s, **terms)


def _refused(faults: list[tuple[int, Any]]) -> problems.Problem:
    """The problem of a whole batch: that of its first fault, and the others listed."""
    first, error = faults[0]
    head = problems.from_exception(error).document
    more = f" ({len(faults)} jobs of the batch are refused, so none is stored)" if len(faults) > 1 else ""
    field = f"jobs[{first}]" + (f".{head['field']}" if "field" in head else "")
    listed = [_fault(place, each) for place, each in faults[:MAX_TOLD]]
    return problems.Problem(
        head["status"],
        f"jobs[{first}]{'.' if isinstance(error, InputError) and error.field else ': '}{error}{more}",
        kind=head["type"].removeprefix("urn:aqd:"),
        title=head["title"],
        field=field,
        errors=listed,
        **{name: head[name] for name in ("bound", "job_id", "differs") if name in head},
    )


def _fault(place: int, error: Exception) -> documents.BatchFault:
    told = problems.from_exception(error).document
    members = ("field", "bound", "job_id", "differs")
    return documents.BatchFault(
        index=place, detail=told["detail"], **{name: told[name] for name in members if name in told}
    )


def _result(place: int, found: _Stored | InputError, asked: JobRequest | None) -> documents.BatchResult:
    if isinstance(found, Exception):
        told = problems.from_exception(found).document
        return documents.BatchResult(
            index=place, status=told["status"], id=None, job=None, problem=documents.Problem(**told)
        )
    assert asked is not None
    return documents.BatchResult(
        index=place,
        status=201 if found.outcome == "created" else 200,
        id=str(found.id),
        job=render.submitted(found, asked),
        problem=None,
    )


ENDPOINTS = [
    Endpoint(
        "POST",
        "/jobs",
        submit,
        Scope.SUBMIT,
        "Submit a job",
        {201: documents.Submitted, 200: documents.Submitted},
        description="201: stored. 200: under an idempotency key, the job that the key stands for. 409: the key stands "
        "for another request (`job_id`, `differs`), or for any with on_conflict `reject`; or another transaction is "
        "submitting under it and does not end (`urn:aqd:key-in-progress`, `Retry-After`).",
        body=JobBody,
        read=read_job,
        headers={KEY_HEADER: "The same as the field idempotency_key."},
        problems=(409,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/jobs/batch",
        submit_batch,
        Scope.SUBMIT,
        "Submit up to 1,000 jobs in one transaction",
        {200: documents.BatchAnswer},
        description="Atomic (the default): all are stored or none; `errors` lists what was wrong, at most "
        f"{MAX_TOLD} of it. Otherwise those that can be are stored, and `results` has each one's status.",
        body=BatchBody,
        read=read_batch,
        problems=(409,),
        changes=True,
    ),
]
