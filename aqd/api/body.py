"""Reading a JSON body: its declared form first, then at most so many bytes of it.

Runs in the API's workers. Promises: no more than that + one read is ever held, whether the length
was declared or the body is chunked; what is refused for its form (415) or size (413) is not read at all
or no further. What the bytes mean is a type's business, or :mod:`aqd.job`'s.
"""

import re
from typing import Any

import falcon
import msgspec

from aqd.api.problems import Problem
from aqd.config import Config
from aqd.errors import InputError
from aqd.strict_json import MAX_JSON_BYTES, check_json

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


def decode(data: bytes, type: Any) -> Any:
    """The body as a value of a msgspec type. :class:`InputError` names the field, what is wrong and the bound."""
    text = check_json(data, field="")
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.ValidationError as error:
        raise _input_error(str(error)) from None


# As msgspec says it: "Expected `int` <= 100 - at `$.jobs[3].priority`", "Object contains unknown field `x`".
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+` (?:of length )?(?P<bound>(?:[<>]=?|matching regex) .*)", re.DOTALL)


def _input_error(message: str) -> InputError:
    found = _AT.fullmatch(message)
    assert found is not None  # it matches everything
    what, path = found["what"], found["path"] or ""
    if (name := _UNKNOWN.fullmatch(what)) is not None:
        field = name[1][:80].encode("ascii", "backslashreplace").decode()
        return InputError(f"{path}.{field}" if path else field, "unknown field")
    if (name := _MISSING.fullmatch(what)) is not None:
        return InputError(f"{path}.{name[1]}" if path else name[1], "is missing")
    bound = _BOUND.fullmatch(what)
    return InputError(path, what[:1].lower() + what[1:], bound["bound"] if bound else None)


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
