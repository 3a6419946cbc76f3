"""Reading a JSON body: its declared form first, then at most ``limit`` bytes of it.

Runs in the API's workers. Promises: no more than ``limit`` + one read is ever held, whether the length
was declared or the body is chunked; what is refused for its form (415) or size (413) is not read at all
or no further. What the bytes mean is :mod:`aqd.job`'s business.
"""

import falcon

from aqd.api.problems import Problem

_STEP = 1 << 16
# msgspec and PostgreSQL speak UTF-8; RFC 8259 allows nothing else between systems.
_UTF8 = frozenset(("utf-8", "utf8", "us-ascii"))
_WANTED = "application/json"


def read_json(req: falcon.Request, limit: int) -> bytes:
    """The body's bytes; raises :class:`Problem` 400, 413 or 415."""
    _check_form(req)
    declared = _declared(req)
    if declared is not None and declared > limit:
        raise _too_large(limit)
    return _read(req, limit, declared)


def _check_form(req: falcon.Request) -> None:
    coding = (req.get_header("Content-Encoding") or "identity").strip().lower()
    if coding != "identity":
        raise Problem(
            415,
            "bodies are taken as they are, without a Content-Encoding",
            field="Content-Encoding",
            bound="identity",
            headers={"Accept-Encoding": "identity"},
        )
    given = req.content_type
    if not given:
        raise Problem(
            415, f"say what the body is: Content-Type: {_WANTED}", field="Content-Type", bound=_WANTED
        )
    media, _, rest = given.partition(";")
    if media.strip().lower() != _WANTED:
        raise Problem(415, f"the body must be {_WANTED}", field="Content-Type", bound=_WANTED)
    for parameter in rest.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _UTF8:
            raise Problem(415, "the body must be UTF-8", field="Content-Type", bound="charset=utf-8")


def _declared(req: falcon.Request) -> int | None:
    if "chunked" in (req.get_header("Transfer-Encoding") or "").lower():
        return None
    try:
        return req.content_length or 0
    except falcon.HTTPError:
        raise Problem(400, "Content-Length is no number", field="Content-Length") from None


def _read(req: falcon.Request, limit: int, declared: int | None) -> bytes:
    stream = req.env["wsgi.input"]
    pieces = []
    room = limit + 1 if declared is None else declared
    while room > 0:
        try:
            piece = stream.read(min(room, _STEP))
        except Exception as error:
            # Broken chunk sizes, a client that went away: the server's parser has no common base class.
            raise Problem(400, f"the body could not be read: {type(error).__name__}") from None
        if not piece:
            break
        pieces.append(piece)
        room -= len(piece)
    body = b"".join(pieces)
    if len(body) > limit:
        raise _too_large(limit)
    if declared is not None and len(body) < declared:
        raise Problem(400, f"the body ended after {len(body)} of {declared} bytes", field="Content-Length")
    return body


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body may have at most {limit} bytes", bound=limit)
