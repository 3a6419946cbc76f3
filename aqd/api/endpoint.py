"""What a route is: a declaration with a function, from which Falcon's routing, the guard and the contract are made.

Runs in the API's workers. One :class:`Endpoint` a method and path, listed in :mod:`aqd.api.routes`. Its function
gets a checked :class:`Call` and returns an :class:`Answer`; whatever it raises becomes a problem document
(:mod:`aqd.api.problems`). ``/openapi.json`` is made from the same declarations and the same types that check
requests here, so it cannot say something else.

HEAD is GET without the body (Falcon leaves it out), OPTIONS is Falcon's. Every path also exists below ``/v1``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import falcon
import msgspec

from aqd import job
from aqd.api import body as bodies
from aqd.api import problems, query
from aqd.api.auth import Guard
from aqd.api.pool import Pool
from aqd.api.waiters import Waiters
from aqd.config import Config
from aqd.errors import InputError
from aqd.keys import Scope as Scope  # for the routes

PREFIX = "/v1"
# A "/" inside a value of the path. Half a surrogate pair, which no decoded path can hold (falcon.uri.decode).
SLASH = "\udc2f"


@dataclass(slots=True)
class Services:
    """What the endpoints of one worker process share."""

    cfg: Config
    pool: Pool
    guard: Guard
    waiters: Waiters

    @property
    def max_body(self) -> int:
        """Bytes of the largest body."""
        return bodies.limit(self.cfg)


@dataclass(slots=True)
class Call:
    """One request. ``params`` and ``body`` are of the endpoint's types, ``key`` is the API key's name ("" without)."""

    services: Services
    req: falcon.Request
    path: dict[str, str]
    key: str
    params: Any
    body: Any

    @property
    def pool(self) -> Pool:
        return self.services.pool

    @property
    def cfg(self) -> Config:
        return self.services.cfg

    @property
    def job_id(self) -> int:
        """The job id in the path. What cannot be one names a job that does not exist: 404."""
        try:
            return job.parse_id(self.path["id"])
        except InputError as error:
            raise problems.Problem(404, error.reason, field="id", bound=error.bound) from None

    def url(self, path: str) -> str:
        """A path of this API as the caller reaches it: with the prefix that he used."""
        return PREFIX + path if self.req.path.startswith(PREFIX + "/") else path


class Answer(NamedTuple):
    """What a function returns. ``document`` is encoded as JSON; bytes are sent as they are, as ``media``."""

    document: object
    status: int = 200
    headers: Mapping[str, str] = {}
    media: str = falcon.MEDIA_JSON


class NoParams(msgspec.Struct):
    """The query string of a route that takes none."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``answers``: the types of the documents of success by status. ``problems``: statuses that this route may give
    beside those that every route may. ``scope`` None: open to everybody, on purpose."""

    method: str
    path: str
    run: Callable[[Call], Answer]
    scope: Scope | None
    summary: str
    answers: Mapping[int, Any]
    description: str = ""
    params: type[msgspec.Struct] = NoParams
    body: Any = None
    # Reads the body, and refuses what may not be in it. With ``body``, which alone says only what the contract says.
    read: Callable[[bytes, falcon.Request, Services], Any] | None = None
    problems: tuple[int, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # request headers of its own: name -> what it is
    media: str = falcon.MEDIA_JSON
    # Whether it changes something: refused in read-only mode, and written to the audit log.
    changes: bool = False

    @property
    def name(self) -> str:
        """``post_jobs_id_retry``: for the contract and the log."""
        words = [word.strip("{}").replace("-", "_") for word in self.path.strip("/").split("/")]
        return "_".join([self.method.lower(), *words]).replace(".", "_")

    def responder(self, services: Services) -> Callable[..., None]:
        """The function that Falcon calls."""

        def respond(req: falcon.Request, resp: falcon.Response, **values: str) -> None:
            path = {name: value.replace(SLASH, "/") for name, value in values.items()}
            guard = services.guard
            # Where a problem ends the request, its handler finds the trail there.
            trail = req.context.trail = (
                guard.trail(req, self.name, self.scope, path) if self.changes else None
            )
            key = guard.admit(req, self.scope, changes=self.changes)
            if trail is not None:
                trail.key = key
            params = query.parse(req, self.params)
            if trail is not None:
                trail.trial = getattr(params, "dry_run", False)
            given = self._read(req, services)
            if trail is not None:
                trail.body = given
            answer = self.run(Call(services, req, path, key, params, given))
            if trail is not None:
                trail.ended(answer.status, answer.document, answer.headers.get("Location"))
            resp.status = answer.status
            resp.content_type = answer.media
            for name, value in answer.headers.items():
                resp.set_header(name, value)
            document = answer.document
            resp.data = document if isinstance(document, bytes) else problems.encode(document)

        return respond

    def _read(self, req: falcon.Request, services: Services) -> Any:
        assert (self.read is None) == (self.body is None)
        if self.read is None:
            return None
        return self.read(bodies.read_json(req, services.max_body), req, services)


class Resource:
    """The endpoints of one path, as Falcon wants them."""

    def __init__(self, endpoints: list[Endpoint], services: Services) -> None:
        for endpoint in endpoints:
            responder = endpoint.responder(services)
            setattr(self, f"on_{endpoint.method.lower()}", responder)
            if endpoint.method == "GET":
                self.on_head = responder
