"""The admin key: who may look at failed jobs, retry and cancel jobs.

Runs in the API's workers. Promises: without a configured key nobody may (403, never "open"); a key is
compared in constant time as bytes; it is taken from one header only, never from the query string,
where proxies and logs would keep it.
"""

import hmac

import falcon

from aqd.api.problems import Problem
from aqd.config import Config

HEADER = "x-admin-key"


class Guard:
    """Who may do what, and the line in the log about it."""

    def __init__(self, cfg: Config) -> None:
        self._admin = AdminKey(cfg.api.admin_api_key)

    def admit(self, req: falcon.Request, scope: str | None, *, changes: bool) -> str:
        """The name of the request's key, "" without one; a :class:`Problem` if it may not do this."""
        del changes
        if scope != "admin":
            return ""
        self._admin.require(req)
        return "admin"

    def audit(self, req: falcon.Request, action: str, path: dict[str, str], key: str, status: int) -> None:
        """Write down who has changed something."""


class AdminKey:
    """The configured key, ``""`` when there is none (unset, blank, a file with only a newline)."""

    def __init__(self, key: str) -> None:
        self._key = key.strip().encode()

    def require(self, req: falcon.Request) -> None:
        """Return when the request carries the key; else raise a :class:`Problem` of 403, 400 or 401."""
        if not self._key:
            raise Problem(
                403,
                "no admin key is configured, so this route is closed: set ADMIN_API_KEY, or "
                "admin_api_key or admin_api_key_file in [api]",
                kind="admin-key-not-configured",
                title="No admin key is configured",
            )
        given = [value for value in (req.get_header(HEADER), _bearer(req)) if value is not None]
        if len(given) > 1:
            raise Problem(400, f"give the admin key once: {HEADER} or Authorization, not both", field=HEADER)
        # WSGI hands over header bytes as latin-1, whatever they were: this gets the bytes back.
        if given and hmac.compare_digest(given[0].encode("latin-1", "replace"), self._key):
            return
        what = "is missing" if not given or not given[0] else "is wrong"
        raise Problem(
            401,
            f"the admin key {what}: send it as {HEADER} or as Authorization: Bearer",
            headers={"WWW-Authenticate": 'Bearer realm="aqd"'},
        )


def _bearer(req: falcon.Request) -> str | None:
    """The token of ``Authorization: Bearer``; ``""`` for another scheme, which is no key either."""
    value = req.get_header("Authorization")
    if value is None:
        return None
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
