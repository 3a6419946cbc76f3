"""Query strings, strictly: a parameter that is not known, or not understood, is refused by name.

Pure. Runs in the API's workers. A filter that is silently ignored shows other people's jobs, or all. What a route
takes is the fields of a msgspec struct, optional with a default each: a string with a pattern, a number with bounds,
a bool, an aware ``datetime``, an enumeration, or a list of one of these, separated by commas.
"""

import enum
import re
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import falcon
import msgspec
from msgspec import Meta, inspect

from aqd import job
from aqd.api.problems import Problem
from aqd.errors import InputError
from aqd.strict_json import show

LIMIT_DEFAULT = 50
LIMIT_MAX = 1000
MAX_PARAMETERS = 50

Limit = Annotated[int, Meta(ge=1, le=LIMIT_MAX, description=f"How many at most. Default {LIMIT_DEFAULT}.")]
Cursor = Annotated[
    str | None, Meta(description="`next_cursor` of the page before.", extra_json_schema={"minLength": 1})
]

S = TypeVar("S", bound=msgspec.Struct)


def parse(req: falcon.Request, type: type[S]) -> S:
    """The request's parameters as ``type``: each known, given once, not empty and within its bounds."""
    given = _pairs(req.query_string, _fields(type)) if req.query_string else {}
    return type(**{name: _value(name, text, _fields(type)[name]) for name, text in given.items()})


@lru_cache
def _fields(type: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    info = inspect.type_info(type)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _plain(field.type) for field in info.fields}


def _plain(info: inspect.Type) -> inspect.Type:
    """Without description and without "or null", which a query string cannot say."""
    while True:
        if isinstance(info, inspect.Metadata):
            info = info.type
        elif isinstance(info, inspect.UnionType):
            info = next(each for each in info.types if not isinstance(each, inspect.NoneType))
        else:
            return info


def _pairs(query: str, known: dict[str, Any]) -> dict[str, str]:
    if (count := query.count("&") + 1) > MAX_PARAMETERS:
        reason = f"the query string has {count} parameters, at most {MAX_PARAMETERS}"
        raise Problem(400, reason, bound=MAX_PARAMETERS)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
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


def _value(name: str, text: str, info: inspect.Type) -> Any:
    match info:
        case inspect.StrType():
            return _string(name, text, info)
        case inspect.IntType() | inspect.FloatType():
            return _number(name, text, info)
        case inspect.BoolType():
            return _choice(name, text, {"false": False, "true": True})
        case inspect.EnumType():
            return _choice(name, text, _members(info.cls))
        case inspect.LiteralType():
            return _choice(name, text, {str(value): value for value in info.values})
        case inspect.DateTimeType():
            return moment(name, text)
        case inspect.ListType():
            items = text.split(",")
            if info.max_length is not None and len(items) > info.max_length:
                raise InputError(name, f"are {len(items)}, at most {info.max_length}", info.max_length)
            return [_value(name, item, _plain(info.item_type)) for item in items]
    raise AssertionError(f"{name}: no way to read a {info}")  # pragma: no cover


def _members(cls: type[enum.Enum]) -> dict[str, Any]:
    return {str(member.value): member for member in cls}


def _choice(name: str, text: str, choices: dict[str, Any]) -> Any:
    if text in choices:
        return choices[text]
    words = ", ".join(choices)
    raise InputError(name, f"{show(text)} is none of {words}", words)


def _string(name: str, text: str, info: inspect.StrType) -> str:
    if "\0" in text:
        raise InputError(name, "contains the character NUL")
    if info.pattern == f"^{job.NAME_PATTERN}$":
        return job.check_name(name, text)
    if info.pattern is not None and not re.search(info.pattern, text):
        raise InputError(name, f"{show(text)} does not match {info.pattern}", info.pattern)
    if info.max_length is not None and len(text) > info.max_length:
        raise InputError(name, f"has {len(text)} characters, at most {info.max_length}", info.max_length)
    return text


# As JSON writes numbers; 0.1 + 0.2 has seventeen digits behind the point.
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,20})?(?:[eE][+-]?\d{1,2})?", re.ASCII)


def _number(name: str, text: str, info: inspect.IntType | inspect.FloatType) -> int | float:
    whole = isinstance(info, inspect.IntType)
    low, high = info.ge, info.le
    bound = f"{low:g}..{high:g}" if low is not None and high is not None else None
    number: int | float | None = None
    if _NUMBER.fullmatch(text) and not (whole and not text.lstrip("-").isdigit()):
        number = int(text) if whole else float(text)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        between = f" between {low:g} and {high:g}" if bound else ""
        raise InputError(name, f"{show(text)} is not a number{between}", bound)
    return number


def moment(name: str, text: str) -> datetime:
    """An RFC 3339 time. A "+" that was not percent-encoded has become a space: it is taken for what it was."""
    return job.parse_moment(name, text.replace(" ", "+"))
