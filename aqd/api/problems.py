"""Errors as ``application/problem+json`` (RFC 9457): what, where, and the bound that was broken.

Runs in the API's workers. Promises: whatever is raised below a responder becomes one of these
documents; an unexpected error becomes a 500 that tells the caller nothing but the number under which
the log has the rest. Also used by the gate for what fails before a request reaches Falcon.

Members: ``type`` (``urn:aqd:…``, stable, to be switched on), ``title``, ``status``, ``detail``, and
where they apply ``field`` (path of the value) and ``bound`` (the limit); of an idempotency key that stands for
another request ``job_id`` and ``differs``; of a batch ``errors``. After a POST, 503 means that
nothing was changed, unless its type is ``urn:aqd:outcome-unknown``.
"""

import secrets
from typing import Any

import falcon
import msgspec

from aqd.errors import (
    ConflictError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InputError,
    KeyInProgress,
    Locked,
    NotFoundError,
    OutcomeUnknown,
    SchemaMismatch,
    TooBroad,
    UserError,
)
from aqd.log import get_logger
from aqd.strict_json import show

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2

log = get_logger("api")

_TITLES = {
    400: ("invalid-request", "The request is not valid"),
    401: ("unauthorized", "The key is missing or wrong"),
    403: ("forbidden", "The request is not allowed"),
    404: ("not-found", "There is no such thing"),
    405: ("method-not-allowed", "The method is not allowed here"),
    408: ("request-timeout", "The request took too long to arrive"),
    409: ("wrong-state", "The state of the job does not allow this"),
    411: ("length-required", "The length of the body is missing"),
    413: ("too-large", "The body is too large"),
    414: ("uri-too-long", "The request line is too long"),
    415: ("unsupported-media-type", "The body is not in a form that is understood"),
    417: ("expectation-failed", "The expectation cannot be met"),
    431: ("header-too-large", "The header is too large"),
    500: ("internal-error", "Something went wrong in aqd"),
    501: ("not-implemented", "The request asks for what this server does not do"),
    503: ("database-unavailable", "The database is not available"),
    505: ("http-version", "This version of HTTP is not spoken here"),
}


# All types, for the contract and its readers: type -> status, what it means. Those of _TITLES go with a status, the
# others stand beside them.
KINDS = {kind: (status, title) for status, (kind, title) in _TITLES.items()} | {
    "no-such-route": (404, "The API has no such path"),
    "invalid-value": (400, "A value is not valid; `field` names it"),
    "too-broad": (400, "The filter finds more than can be looked through in time"),
    "admin-key-not-configured": (403, "No admin key is configured"),
    "scope-missing": (403, "The key does not allow this"),
    "read-only": (403, "The API is in read-only mode"),
    "idempotency-conflict": (409, "The idempotency key stands for another request"),
    "key-in-progress": (
        409,
        "Another transaction is submitting under the idempotency key; nothing was stored",
    ),
    "locked": (503, "Somebody else holds a lock on it; nothing was changed"),
    "outcome-unknown": (503, "The connection broke during the change: it may or may not have happened"),
    "schema-mismatch": (503, "The database's schema does not fit this version"),
}


class Problem(Exception):
    """An answer that is an error. ``kind`` overrides the type that goes with the status."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        kind: str | None = None,
        title: str | None = None,
        headers: dict[str, str] | None = None,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        default_kind, default_title = _TITLES.get(status, ("error", "The request failed"))
        self.status = status
        self.headers = headers or {}
        self.document: dict[str, Any] = {
            "type": f"urn:aqd:{kind or default_kind}",
            "title": title or default_title,
            "status": status,
            "detail": detail,
        } | {name: value for name, value in members.items() if value is not None}

    def body(self) -> bytes:
        """The document, newline at the end for people with curl."""
        return encode(self.document)


def encode(document: object) -> bytes:
    """JSON, with a newline at the end."""
    return msgspec.json.encode(document) + b"\n"


def from_exception(error: Exception) -> Problem:
    """The problem that tells of any exception; logs the unexpected ones."""
    match error:
        case Problem():
            return error
        case InputError():
            return Problem(
                400, str(error), kind="invalid-value", field=error.field or None, bound=error.bound
            )
        case NotFoundError():
            return Problem(404, str(error))
        case IdempotencyConflict():
            return Problem(
                409,
                str(error),
                kind="idempotency-conflict",
                title="The idempotency key stands for another job",
                job_id=str(error.id),
                differs=list(error.differs),
            )
        case ConflictError():
            return Problem(409, str(error))
        case KeyInProgress():
            return Problem(
                409,
                str(error),
                kind="key-in-progress",
                title="Another transaction is submitting under this key",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        case Locked():
            return unavailable(str(error), kind="locked", title="Somebody else holds a lock on it")
        case TooBroad():
            return Problem(400, str(error), kind="too-broad")
        case UserError():
            return Problem(400, str(error))
        case SchemaMismatch():
            return unavailable(str(error), kind="schema-mismatch", title="The database's schema does not fit")
        case OutcomeUnknown():
            return unavailable(str(error), kind="outcome-unknown", title="It is not known what happened")
        case DatabaseUnavailable():
            return unavailable(str(error))
        case falcon.HTTPError():
            return _from_falcon(error)
    number = secrets.token_hex(6)
    log.exception("unexpected error", number=number)
    return Problem(500, f"an unexpected error; the log of the API has it as number {number}", number=number)


def unavailable(detail: str, **members: Any) -> Problem:
    """503 that says when to come back."""
    return Problem(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)}, **members)


def _from_falcon(error: falcon.HTTPError) -> Problem:
    headers = dict(error.headers or {})
    allow = headers.get("Allow") or headers.get("allow")
    if error.status_code == 404:
        title = "The API has no such path"
        return Problem(404, "there is no such route", kind="no-such-route", title=title, headers=headers)
    details = {405: f"allowed here: {allow}" if allow else "not allowed here"}
    detail = details.get(error.status_code) or error.description or error.title or "the request failed"
    return Problem(error.status_code, detail, headers=headers, allowed=allow.split(", ") if allow else None)


def handle(req: falcon.Request, resp: falcon.Response, error: Exception, _params: dict[str, Any]) -> None:
    """Falcon's error handler for every exception."""
    problem = from_exception(error)
    if (trail := getattr(req.context, "trail", None)) is not None:
        trail.ended(problem.status, problem.document)
    resp.status = problem.status
    resp.content_type = MEDIA_TYPE
    resp.data = problem.body()
    for name, value in problem.headers.items():
        resp.set_header(name, value)
    if problem.status >= 500 and problem.status != 503:
        log.error("request failed", method=req.method, path=show(req.path), status=problem.status)
