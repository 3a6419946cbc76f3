"""Reading a JSON body: its declared form first, then at most so many bytes of it.

Runs in the API's workers. Promises: no more than that + one read is ever held, whether the length
was declared or the body is chunked; what is refused for its form (415) or size (413) is not read at all
or no further. A declared type says which names a body may have, and to the contract what their values are; refusing a
value is the business of whoever knows its bounds, so that all ways in refuse it in the same words.
"""

from typing import TypeVar

import falcon
import msgspec

from aqd import strict_json
from aqd.api.problems import Problem
from aqd.config import Config
from aqd.errors import InputError
from aqd.strict_json import MAX_JSON_BYTES

T = TypeVar("T", bound=msgspec.Struct)

_STEP = 1 << 16
# msgspec and PostgreSQL speak UTF-8; RFC 8259 allows nothing else between systems.
_UTF8 = frozenset(("utf-8", "utf8", "us-ascii"))
_WANTED = "application/json"


def limit(cfg: Config) -> int:
    """Bytes of the largest body: 1 MiB, or more if the configuration allows larger payloads."""
    return max(MAX_JSON_BYTES, cfg.jobs.max_payload_bytes)


def read_json(req: falcon.Request, most: int) -> bytes:
    """The body's bytes; raises :class:`Problem` 400, 413 or 415."""
    _check_form(req)
    declared = _declared(req)
    if declared is not None and declared > most:
        raise _too_large(most)
    return _read(req, most, declared)


def decode(data: bytes, type: type[T]) -> T:
    """The body as a struct of this type, of which only the names are checked: what its values may be is judged by
    those who judge it everywhere (:mod:`aqd.job`, :mod:`aqd.store`), in their words. :class:`InputError`."""
    parsed = strict_json.parse(strict_json.decode(data, ""), "", MAX_JSON_BYTES)
    if not isinstance(parsed, dict):
        raise InputError("", f"the body must be a JSON object, not {strict_json.kind_of(parsed)}")
    return named(parsed, type, "")


def named(values: object, type: type[T], field: str) -> T:
    """The values of a JSON object, under their names; ``field`` is its path."""
    if not isinstance(values, dict):
        raise InputError(field, f"must be an object, not {strict_json.kind_of(values)}")
    known = msgspec.structs.fields(type)
    for name in values:
        if not any(name == each.name for each in known):
            words = ", ".join(each.name for each in known)
            raise InputError(strict_json.path_of((None, name), field), f"unknown field; known are {words}")
    for each in known:
        if each.required and each.name not in values:
            raise InputError(f"{field}.{each.name}" if field else each.name, "is missing")
    return type(**values)


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
