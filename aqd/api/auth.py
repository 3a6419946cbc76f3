"""Who may do what: keys and their scopes, read-only mode, and the line in the log about every change.

Runs in the API's workers. Promises: without a configured key nobody may do what needs one (403, never "open"); a key
is compared in constant time as bytes; it is taken from one header only, never from the query string, where
proxies and logs would keep it; it is never logged nor shown.

Where SUBMIT and READ are open (:func:`aqd.keys.load` says where), a key that is not known counts as none: a proxy that asks
for passwords itself hands on its own ``Authorization``.
"""

import time
from collections.abc import Mapping
from typing import Any

import falcon
import msgspec

from aqd.api.documents import BatchAnswer, Submitted
from aqd.api.problems import Problem
from aqd.config import Config
from aqd.keys import Key, Ring, Scope
from aqd.log import get_logger

# Each may carry any key: the first is what most clients expect, the second the older name.
HEADERS = ("x-api-key", "x-admin-key")

# Refused for want of a key: anybody can cause these lines, so only so many are written in a stretch of time.
MAX_REFUSALS = 20
REFUSALS_S = 10.0
_MAX_SHOWN = 300

log = get_logger("api")


class Guard:
    """Who may do what."""

    def __init__(self, cfg: Config, ring: Ring) -> None:
        self._ring = ring
        self._read_only = cfg.api.read_only
        self._refusals = _Quota()

    def admit(self, req: falcon.Request, scope: Scope | None, *, changes: bool) -> str:
        """The name of the request's key, "" without one; a :class:`Problem` of 400, 401 or 403 if it may not do this."""
        name = self._name(req, scope) if scope is not None else ""
        if changes and self._read_only:
            raise Problem(
                403,
                "the API is in read-only mode: nothing can be submitted or changed here now",
                kind="read-only",
                title="The API is in read-only mode",
            )
        return name

    def trail(
        self, req: falcon.Request, action: str, scope: Scope | None, path: Mapping[str, str]
    ) -> "Trail":
        """For a request that is to change something: how it ended will be written down."""
        return Trail(self._refusals, req, action, scope, path)

    def _name(self, req: falcon.Request, scope: Scope) -> str:
        given = _given(req)
        key = self._ring.find(given[0]) if len(given) == 1 and given[0] else None
        if key is not None:
            req.context.key = key.name  # for the trail, also if the key may not do this
        if self._ring.open and scope is not Scope.ADMIN:
            return key.name if key is not None else ""
        if key is None:
            self._refuse(scope, given)
        elif scope not in key.scopes:
            raise Problem(
                403,
                f"the key {key.name} has not the scope {scope}, which this needs",
                kind="scope-missing",
                title="The key does not allow this",
                scope=str(scope),
            )
        assert isinstance(key, Key)
        return key.name

    def _refuse(self, scope: Scope, given: list[bytes]) -> None:
        if not self._ring.gives(scope):
            raise Problem(
                403,
                "no admin key is configured, so this route is closed: set ADMIN_API_KEY, or admin_api_key or "
                "admin_api_key_file in [api], or give a named key the scope admin"
                if scope is Scope.ADMIN
                else f"no configured key has the scope {scope}, so this route is closed",
                kind="admin-key-not-configured" if scope is Scope.ADMIN else "scope-missing",
                title="No admin key is configured" if scope is Scope.ADMIN else "No key allows this",
            )
        if len(given) > 1:
            raise Problem(400, f"give the key once: {', '.join(HEADERS)} or Authorization", field=HEADERS[0])
        what = "is missing" if not given or not given[0] else "is wrong"
        noun = "the admin key" if scope is Scope.ADMIN else "the API key"
        raise Problem(
            401,
            f"{noun} {what}: send it as {' or '.join(HEADERS)} or as Authorization: Bearer",
            headers={"WWW-Authenticate": 'Bearer realm="aqd"'},
        )


def _given(req: falcon.Request) -> list[bytes]:
    """The keys that the request carries. WSGI hands over header bytes as latin-1, whatever they were: this gets the
    bytes back."""
    values = [req.get_header(name) for name in HEADERS]
    return [value.encode("latin-1", "replace") for value in (*values, _bearer(req)) if value is not None]


def _bearer(req: falcon.Request) -> str | None:
    """The token of ``Authorization: Bearer``; ``""`` for another scheme, which is no key either."""
    value = req.get_header("Authorization")
    if value is None:
        return None
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


# --- the audit ------------------------------------------------------------------------------------


class _Quota:
    """So many in a stretch of time; threads may lose a count, which does no harm."""

    def __init__(self) -> None:
        self._until = 0.0
        self._used = 0

    def take(self) -> bool:
        now = time.monotonic()
        if now >= self._until:
            self._until, self._used = now + REFUSALS_S, 0
        self._used += 1
        return self._used <= MAX_REFUSALS


class Trail:
    """One line for one change: who, what, which, how it ended, from where.

    ``change`` when it was done, ``change failed`` when the request or the state of things did not allow it, ``change
    refused`` (a warning) when the caller may not. Submitting without a key, where it is open, gives no line: there is
    nobody to name, and the job itself says when. So do a trial (``dry_run``), however it ends, and submitting where all
    keys stand for their jobs already, because nothing is changed.
    """

    __slots__ = ("_action", "_path", "_refusals", "_req", "_scope", "body", "key", "trial")

    def __init__(
        self, refusals: _Quota, req: falcon.Request, action: str, scope: Scope | None, path: Mapping[str, str]
    ) -> None:
        self._refusals = refusals
        self._req = req
        self._action = action
        self._scope = scope
        self._path = path
        self.key = ""
        self.body: Any = None
        self.trial = False

    def ended(self, status: int, document: Any = None, location: str | None = None) -> None:
        """Write the line. ``document`` is the answer, or a problem's members."""
        problem = document if isinstance(document, dict) else {}
        key = self.key or getattr(self._req.context, "key", None)
        fields: dict[str, Any] = {"key": key, "action": self._action}
        fields |= {name: text[:_MAX_SHOWN] for name, text in self._path.items()}
        if status == 201 and location is not None:
            fields["made"] = location.rsplit("/", 1)[-1]
        if status in (401, 403):
            if self._refusals.take():
                reason = problem.get("type")
                log.warning(
                    "change refused", **fields, status=status, reason=reason, client=self._req.remote_addr
                )
            return
        if self._scope is Scope.SUBMIT and not self.key:
            return
        if self.trial:
            return
        event = "change" if status < 400 else "change failed"
        match document:
            case Submitted(outcome="existing") | BatchAnswer(created=0, replaced=0, refused=0):
                return
            case Submitted(outcome="replaced"):
                fields |= {"id": document.id, "replaced": 1}
            case BatchAnswer(created=0, replaced=0):
                event = "change failed"
        if self._scope is Scope.ADMIN and self.body is not None:
            fields["request"] = _shown(self.body)
        for name in ("matched", "changed", "created", "replaced", "refused"):
            if (number := getattr(document, name, None)) is not None:
                fields[name] = number
        log.info(event, **fields, status=status, reason=problem.get("type"), client=self._req.remote_addr)


def _shown(body: Any) -> str:
    """A body as JSON, cut; of a filter only what was asked for."""
    plain = msgspec.to_builtins(body)
    if isinstance(plain, dict) and isinstance(plain.get("filter"), dict):
        plain["filter"] = {name: value for name, value in plain["filter"].items() if value is not None}
    text = msgspec.json.encode(plain).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
