"""Query strings, strictly: a parameter that is not known, or not understood, is refused by name.

Pure. Runs in the API's workers. A filter that is silently ignored shows other people's jobs, or all.
"""

from urllib.parse import parse_qsl

import falcon

from aqd.api.problems import Problem
from aqd.errors import InputError
from aqd.strict_json import show

LIMIT_DEFAULT = 50
LIMIT_MAX = 1000


def parameters(req: falcon.Request, *known: str) -> dict[str, str]:
    """The request's parameters, each known, given once and not empty."""
    if not req.query_string:
        return {}
    try:
        pairs = parse_qsl(req.query_string, keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError:  # UnicodeDecodeError too
        raise Problem(400, "the query string is not valid percent-encoded UTF-8") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            allowed = f"known are {', '.join(known)}" if known else "this route takes none"
            field = name[:80].encode("ascii", "backslashreplace").decode()
            raise InputError(field, f"unknown query parameter; {allowed}")
        if name in found:
            raise InputError(name, "is given twice")
        if not value:
            raise InputError(name, "is empty; leave it out instead")
        found[name] = value
    return found


def limit(given: dict[str, str]) -> int:
    """``limit``: how many items a page may have."""
    text = given.get("limit")
    if text is None:
        return LIMIT_DEFAULT
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= LIMIT_MAX:
        return int(text)
    raise InputError("limit", f"{show(text)} is not a number between 1 and {LIMIT_MAX}", f"1..{LIMIT_MAX}")


def choice(given: dict[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    """A parameter with a fixed set of values."""
    text = given.get(name)
    if text is None or text in choices:
        return text
    raise InputError(name, f"{show(text)} is none of {', '.join(choices)}", ", ".join(choices))
