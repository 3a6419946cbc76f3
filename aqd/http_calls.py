"""What :mod:`aqd.http_client` sends and how it reads answers: requests as data, no connection.

Pure. Used by both of its clients. A :class:`Call` says whether it may be sent twice; :class:`Tries` decides whether and
when; :func:`error_of` gives the exception that an answer stands for.
"""

import math
import random
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final, Generic, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from aqd import job as jobs_
from aqd.errors import (
    AqdError,
    ConflictError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InputError,
    KeyInProgress,
    Locked,
    NotAllowedError,
    NotEnded,
    NotFoundError,
    OutcomeUnknown,
    SchemaMismatch,
    ServiceUnavailable,
)
from aqd.job import State
from aqd.strict_json import encode_json, kind_of, show

ENDED: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
TIMEOUT_S: Final = 10.0
RETRIES: Final = 5
PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
RETRY_AFTER_MAX_S: Final = 60.0
# Shorter than the minute after which proxies give up on an answer, and the server's own bound.
WAIT_S: Final = 25.0
# Of a batch: the bound of an API with its defaults is 1 MiB. A larger job goes alone.
BATCH_BYTES: Final = 1 << 19
# The server closes idle connections after five.
_IDLE_S: Final = 3.0
PAGE: Final = 200
# A proxy's answers as well as the service's.
_PASSING: Final = frozenset({408, 429, 502, 503, 504})
# Where a proxy says them: it has passed the request on, and does not know what has become of it.
_DOUBTFUL: Final = frozenset({500, 502, 504})
# Nothing has been sent.
_UNSENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.LocalProtocolError,
    httpx.UnsupportedProtocol,
)

T = TypeVar("T")


class JobOptions(TypedDict, total=False):
    """What else may be said about a job; the same as everywhere."""

    queue: str | None
    priority: int | None
    run_at: datetime | str | None
    delay_s: float | None
    max_attempts: int | None
    timeout_s: float | None
    tags: list[str] | None
    meta: dict[str, Any] | None
    idempotency_key: str | None
    on_conflict: str | None


_OPTIONS: Final = frozenset(JobOptions.__annotations__)


class _Typed(TypedDict):
    type: str


class NewJob(_Typed, JobOptions, total=False):
    """A job of :meth:`Client.enqueue_many`."""

    payload: Any


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was submitted. ``outcome`` is ``created``, ``existing`` or ``replaced``; under a key that was drawn
    here ``existing`` means that the first answer was lost. Of an existing job ``status``,
    ``queue`` and the moments are as they are now, None if it is gone; ``type`` and ``priority`` are as asked for."""

    id: str
    status: State | None
    type: str
    queue: str | None
    priority: int
    run_at: datetime | None
    created_at: datetime | None
    outcome: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job. In lists ``payload``, ``result``, ``output``, ``timings`` and ``attempts`` are None unless asked for."""

    id: str
    status: State | None = None
    type: str = ""
    queue: str = ""
    priority: int = 0
    attempt: int = 0
    max_attempts: int | None = None
    timeout_s: float | None = None
    retries: int = 0
    crashes: int = 0
    interruptions: int = 0
    run_at: datetime | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    progress: dict[str, Any] | None = None
    node: str | None = None
    error: str | None = None
    tags: list[str] = msgspec.field(default_factory=list)
    meta: dict[str, Any] | None = None
    payload: Any = None
    result: Any = None
    output: str | None = None
    timings: dict[str, Any] | None = None
    attempts: list[dict[str, Any]] | None = None

    @property
    def ended(self) -> bool:
        """COMPLETED, FAILED or CANCELLED."""
        return self.status in ENDED


class Page(msgspec.Struct):
    jobs: list[Job]
    next_cursor: str | None = None


class _Results(msgspec.Struct):
    class One(msgspec.Struct):
        job: Submitted | None = None
        problem: dict[str, Any] | None = None

    results: list[One]


# --- requests, as data ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``again``: it may be sent twice. ``wait_s``: for so long the server may keep the answer back.
    ``changes``: it changes something, for a submission under ``keys``."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, str] | None = None
    body: object = None
    again: bool = True
    wait_s: float = 0.0
    changes: bool = False
    keys: tuple[str, ...] = ()

    def of(self, http: httpx.Client | httpx.AsyncClient, timeout_s: float) -> httpx.Request:
        data = None if self.body is None else msgspec.json.encode(self.body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(timeout_s, read=timeout_s + self.wait_s)
        return http.build_request(
            self.method, self.path, params=self.params, content=data, headers=headers, timeout=timeout
        )


def decoded(type: type[T]) -> Callable[[httpx.Response], T]:
    decoder = msgspec.json.Decoder(type)

    def read(answer: httpx.Response) -> T:
        try:
            return decoder.decode(answer.content)
        except msgspec.MsgspecError as error:
            raise ServiceUnavailable(f"{_shown(answer.url)} gives no answer of aqd's: {error}") from None

    return read


def _shown(url: httpx.URL) -> str:
    """An URL in a message: without the password of a proxy, and without what was looked for."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


_ANY: Final = decoded(dict[str, Any])
JOB: Final = decoded(Job)
_SUBMITTED: Final = decoded(Submitted)


def one_job(id: int | str) -> str:
    return f"/v1/jobs/{jobs_.parse_id(str(id))}"


def one_queue(name: str) -> str:
    return f"/v1/queues/{quote(jobs_.check_name('name', name), safe='')}"


def get(path: str, **params: Any) -> Call[dict[str, Any]]:
    return Call("GET", path, _ANY, query(params))


def change(
    method: str, path: str, body: Mapping[str, Any] | None = None, *, again: bool = True
) -> Call[dict[str, Any]]:
    return Call(method, path, _ANY, body=None if body is None else _checked(body), again=again, changes=True)


def _checked(body: Mapping[str, Any]) -> msgspec.Raw:
    """The JSON of a body; :class:`InputError` names what no JSON can hold."""
    return msgspec.Raw(encode_json(body, field="").encode())


def query(values: Mapping[str, Any]) -> dict[str, str]:
    given = {name: value for name, value in values.items() if value is not None}
    encode_json(dict.fromkeys(given), field="")  # refuses names that no URL can say
    return {name: _text(name, value) for name, value in given.items()}


def _text(name: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case datetime():
            return jobs_.parse_moment(name, value).isoformat()
        case Enum():
            return _text(name, value.value)
        case list() | tuple() | set() | frozenset():
            return ",".join(_text(name, each) for each in value)
        case int() | float():
            return str(value)
        case str():
            encode_json(value, field=name)  # refuses half a surrogate pair, which no URL can say
            return value
    raise InputError(name, f"must be a string, a number, a moment or a list of these, not {kind_of(value)}")


_UPDATES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "priority": jobs_.check_priority,
    "run_at": lambda value: jobs_.parse_moment("run_at", value).isoformat(),
    "delay_s": jobs_.check_delay,
}


def update(id: int | str, changes: Mapping[str, Any]) -> Call[dict[str, Any]]:
    body = {}
    for name, value in changes.items():
        if name not in _UPDATES:
            raise InputError(name, f"cannot be changed; known are {', '.join(_UPDATES)}")
        if value is not None:
            body[name] = _UPDATES[name](value)
    return change("PATCH", one_job(id), body)


def _body(type: str, payload: Any, options: Mapping[str, Any], key: str) -> tuple[dict[str, Any], bool]:
    """A job as the API takes it, under ``key`` if it has none, and whether it may be sent twice. Checked here, as it
    will be there."""
    for name in options:
        if name not in _OPTIONS:
            raise InputError("", f"{show(name)} is no option of a job")
    request = jobs_.validate(type, payload, **options)
    body = msgspec.structs.asdict(request) | {
        "idempotency_key": request.idempotency_key or key,
        "payload": msgspec.Raw(request.payload.encode()),
        "meta": None if request.meta is None else msgspec.Raw(request.meta.encode()),
    }
    # Under "replace" a job that has begun meanwhile gets a second one, under "reject" the first answer is a refusal.
    return body, request.on_conflict is jobs_.OnConflict.RETURN


def enqueue(type: str, payload: Any, options: Mapping[str, Any]) -> Call[Submitted]:
    body, again = _body(type, payload, options, secrets.token_urlsafe(16))
    keys = (body["idempotency_key"],)
    return Call("POST", "/v1/jobs", _SUBMITTED, body=body, again=again, changes=True, keys=keys)


def batches(jobs: Iterable[NewJob | Mapping[str, Any]]) -> Iterator[tuple[int, Call[list[Submitted]]]]:
    """The requests of many jobs, each with the number of its first job."""
    first, size, again = 0, 0, True
    bodies: list[dict[str, Any]] = []
    # The server stores a batch in the order of its keys: these keep the order in which the jobs were given.
    prefix = secrets.token_urlsafe(16)
    for place, given in enumerate(jobs):
        try:
            if not isinstance(given, Mapping):
                raise InputError("", f"must be a dictionary of enqueue's arguments, not {kind_of(given)}")
            if "type" not in given:
                raise InputError("type", "is missing: every job names its type")
            options = {name: value for name, value in given.items() if name not in ("type", "payload")}
            body, repeatable = _body(
                given["type"], given.get("payload", msgspec.UNSET), options, f"{prefix}-{place:09}"
            )
        except InputError as error:
            field = f"jobs[{place}].{error.field}" if error.field else f"jobs[{place}]"
            raise InputError(field, error.reason, error.bound) from None
        length = len(msgspec.json.encode(body))
        if bodies and (len(bodies) == jobs_.MAX_BATCH or size + length > BATCH_BYTES):
            yield first, _batch(bodies, again)
            first, size, again, bodies = place, 0, True, []
        bodies.append(body)
        size += length
        again = again and repeatable
    if bodies:
        yield first, _batch(bodies, again)


def _batch(bodies: list[dict[str, Any]], again: bool) -> Call[list[Submitted]]:
    keys = tuple(each["idempotency_key"] for each in bodies)
    body = {"jobs": bodies}
    return Call("POST", "/v1/jobs/batch", _read_batch, body=body, again=again, changes=True, keys=keys)


def _read_batch(answer: httpx.Response) -> list[Submitted]:
    return [one.job for one in decoded(_Results)(answer).results if one.job is not None]


def renumbered(error: AqdError, first: int) -> AqdError:
    """The error of a batch, with the place that its job has among all."""
    if isinstance(error, InputError) and (found := re.match(r"jobs\[(\d+)\]", error.field)):
        field = f"jobs[{first + int(found[1])}]{error.field[found.end() :]}"
        return InputError(field, error.reason, error.bound)
    return error


def waiting(id: int | str, seconds: float) -> Call[tuple[Job, float]]:
    """The job, and the seconds after which to ask again where the server had no room to let us wait."""
    wait_s = max(0.0, min(seconds, WAIT_S))

    def read(answer: httpx.Response) -> tuple[Job, float]:
        return JOB(answer), _retry_after(answer)

    return Call("GET", one_job(id), read, {"wait_s": f"{wait_s:.3f}"}, wait_s=wait_s)


def check_timeout(timeout_s: float | None) -> float:
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise InputError("timeout_s", "must be a number of seconds, 0 or more, or None for ever", "0..")
    return float(timeout_s)


def not_ended(found: Job, timeout_s: float | None) -> NotEnded:
    return NotEnded(f"job {found.id} is {found.status} after {timeout_s:g} s", (int(found.id),))


def change_jobs(action: str, given: dict[str, Any], dry_run: bool) -> Call[dict[str, Any]]:
    if action not in ("retry", "cancel", "delete", "discard"):
        raise InputError("action", "must be retry, cancel, delete or discard")
    body = {name: value for name, value in given.items() if value is not None and value is not False}
    if "ids" in body:
        body["ids"] = [str(each) for each in jobs_.check_ids("ids", body["ids"])]
    if "filter" in body:
        if not isinstance(body["filter"], Mapping):
            raise InputError("filter", f"must be an object, not {kind_of(body['filter'])}")
        body["filter"] = {name: _plain(f"filter.{name}", each) for name, each in body["filter"].items()}
    params = {"dry_run": "true"} if dry_run else None
    path = f"/v1/jobs/{action}"
    return Call("POST", path, _ANY, params, _checked(body), again=dry_run, changes=not dry_run)


def _plain(field: str, value: Any) -> Any:
    """A value of a filter as JSON has it."""
    match value:
        case datetime():
            return jobs_.parse_moment(field, value).isoformat()
        case Enum():
            return value.value
        case list() | tuple() | set() | frozenset():
            return [_plain(field, each) for each in value]
    return value


# --- answers --------------------------------------------------------------------------------------


class Tries(Generic[T]):
    """How often one call may be sent again, and when; and what may be said about it in the end."""

    def __init__(self, call: Call[T], retries: int) -> None:
        self._call = call
        self._left = retries
        self._pause_s = PAUSE_FIRST_S
        # A change may have been made by a try whose answer nobody has seen.
        self._doubt = False

    def broken(self, error: httpx.HTTPError | httpx.InvalidURL) -> float:
        """Nothing was heard: the seconds until the next try, or the end. What was not even sent may be sent again."""
        unsent = isinstance(error, (*_UNSENT, httpx.InvalidURL))
        self._doubt |= self._call.changes and not unsent
        passing = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
        if self._left and passing and (unsent or self._call.again):
            return self._next(0.0)
        words = str(error) or type(error).__name__
        if self._doubt:
            raise self._unknown(f"the answer was lost: {words}") from error
        if not isinstance(error, httpx.TransportError):
            raise ServiceUnavailable(f"the answer cannot be read: {words}") from error
        raise ServiceUnavailable(f"aqd's HTTP service cannot be reached: {words}") from error

    def refused(self, answer: httpx.Response) -> float:
        """An answer that is no success: the seconds until the next try, or the end."""
        error = error_of(answer)
        if answer.status_code in _DOUBTFUL and not _problem(answer)[0]:
            self._doubt |= self._call.changes
        again = answer.status_code in _PASSING and self._call.again and not isinstance(error, SchemaMismatch)
        # Of Locked nothing has come, so whatever it was may be asked again.
        if self._left and (again or isinstance(error, Locked)):
            return self._next(_retry_after(answer))
        if isinstance(error, OutcomeUnknown):
            error.idempotency_keys = self._call.keys
        # What an answer says about the job is so, whatever has become of the tries before.
        elif self._doubt and not isinstance(error, ConflictError | NotFoundError):
            raise self._unknown(str(error)) from error
        raise error

    def read(self, answer: httpx.Response) -> T:
        """What a success says."""
        try:
            return self._call.read(answer)
        except ServiceUnavailable as error:
            if self._call.changes:
                raise self._unknown(str(error)) from error
            raise

    def _unknown(self, words: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"{words}. The change may or may not have been made", self._call.keys)

    def _next(self, least_s: float) -> float:
        self._left -= 1
        pause_s = random.uniform(self._pause_s / 2, self._pause_s)
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        return max(pause_s, least_s)


def _retry_after(answer: httpx.Response) -> float:
    value = answer.headers.get("Retry-After", "")
    return min(float(value), RETRY_AFTER_MAX_S) if re.fullmatch(r"\d{1,9}", value, re.ASCII) else 0.0


def error_of(answer: httpx.Response) -> AqdError:
    """The exception that an answer stands for."""
    status = answer.status_code
    kind, problem = _problem(answer)
    where = _shown(answer.url)
    detail = str(problem.get("detail") or f"{where} answers {status} {answer.reason_phrase}")
    if not kind and 200 <= status < 500 and status not in (401, 403, 408, 429):
        return ServiceUnavailable(f"{detail}, which is no answer of aqd's: is the URL right?")
    match status, kind:
        case 409, "idempotency-conflict":
            differs = tuple(str(each) for each in problem.get("differs") or ())
            return IdempotencyConflict(detail, int(problem.get("job_id") or 0), differs)
        case 409, "key-in-progress":
            return KeyInProgress(detail)
        case 409, _:
            return ConflictError(detail)
        case 404, "no-such-route":
            return ServiceUnavailable(f"{where}: {detail}: is the URL right?")
        case 404, _:
            return NotFoundError(detail)
        case ((401 | 403), _):
            return NotAllowedError(detail)
        case 503, "outcome-unknown":
            return OutcomeUnknown(detail)
        case 503, "locked":
            return Locked(detail)
        case 503, "schema-mismatch":
            return SchemaMismatch(detail)
        case 503, "database-unavailable":
            return DatabaseUnavailable(detail)
    if status >= 500 or status in (408, 429):
        return ServiceUnavailable(detail)
    field = str(problem.get("field") or "")
    bound = problem.get("bound")
    return InputError(
        field, detail.removeprefix(f"{field}: "), bound if isinstance(bound, str | int) else None
    )


def _problem(answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    """The kind and the members of a problem document of aqd's; "" if it is none."""
    try:
        problem = msgspec.json.decode(answer.content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return "", {}
    kind = str(problem.get("type", ""))
    return (kind.removeprefix("urn:aqd:"), problem) if kind.startswith("urn:aqd:") else ("", problem)


class Options:
    """What both clients are made with."""

    def __init__(
        self, base_url: str, key: str | None, timeout_s: float, retries: int, transport: Mapping[str, Any]
    ) -> None:
        try:
            url = httpx.URL(base_url)
        except (httpx.InvalidURL, TypeError, UnicodeError):
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host:
            raise InputError("base_url", "must be an URL such as http://127.0.0.1:4000")
        # The paths here begin with it.
        if url.path.rstrip("/").endswith("/v1"):
            url = url.copy_with(path=url.path.rstrip("/").removesuffix("v1"))
        self.timeout_s = jobs_.check_number("timeout_s", timeout_s, 0.001, 3600.0)
        self.retries = jobs_.check_integer("retries", retries, 0, 1000)
        headers: dict[str, str | bytes] = {"Accept": "application/json, application/problem+json"}
        if key is not None:
            if not isinstance(key, str) or not key.isprintable() or not key.strip():
                raise InputError("key", "must be a text of visible characters")
            headers["X-API-Key"] = key.strip().encode()
        self.http: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            **transport,
        }
