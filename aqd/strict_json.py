"""Strict JSON: what PostgreSQL's jsonb takes and gives back without loss, and nothing else.

Pure. Used for payloads, results, ``meta`` and the bodies of requests, by the API, the client, the command line and
the worker. Promises: nothing here depends on Python's recursion limit; JSON is kept as the *text* that was
sent, because a number such as ``0.10000000000000000001`` would not survive a trip through ``float``.

Fails with :class:`aqd.errors.InputError`, which names the value's path, the reason and the bound.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from aqd.errors import InputError

MAX_JSON_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
# The longest exact decimal form of a double has 1,076 characters; more digits carry no meaning and
# PostgreSQL's numeric stops at 16,383 fractional digits.
MAX_NUMBER_CHARS: Final = 1100

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# Possessive, and an unterminated string runs to the end: otherwise a megabyte of \" takes hours.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DOUBLE_RANGE = "±1.7976931348623157e308"


def check_json(text: str | bytes, *, field: str = "payload", max_bytes: int = MAX_JSON_BYTES) -> str:
    """The JSON text itself if it obeys the rules of a payload: size, depth, no NUL, no lone surrogate,
    no NaN or Infinity, no key twice, numbers in the range of a double."""
    if isinstance(text, bytes):
        text = decode(text, field)
    parse(text, field, max_bytes)
    return text


def encode_json(value: Any, *, field: str = "payload", max_bytes: int = MAX_JSON_BYTES) -> str:
    """The JSON text of a Python value (a handler's result, a client's payload) under the same rules.

    Accepts None, bool, int, float, str, list, tuple and dict with string keys, and their subclasses.
    Anything else is refused rather than guessed at.
    """
    if value is None:
        return "null"
    _walk(value, field, max_bytes)
    try:
        text = msgspec.json.encode(value).decode()  # 0.2 µs where the standard library takes 5
    except (TypeError, OverflowError, ValueError, NotImplementedError):
        text = _ENCODER.encode(value)  # integers beyond 64 bits, subclasses of float, …
    if len(text) * 4 > max_bytes:  # a character has at most four bytes
        check_size(field, len(text.encode()), max_bytes)
    return text


# The walk bounds depth and so excludes cycles.
_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


def depth_exceeds(text: str, limit: int = MAX_DEPTH) -> bool:
    """Whether arrays and objects in the JSON text nest deeper than ``limit``.

    One pass without recursion, to be asked *before* a parser: where Python's own parsers give up
    (RecursionError) differs from version to version. In text that is not JSON the answer may be
    wrong only behind the first syntax error, where a parser never gets.
    """
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        if bracket[0] in "[{":
            depth += 1
            if depth > limit:
                return True
        else:
            depth -= 1
            if depth < 0:  # a syntax error: no parser reads on
                return False
    return False


def decode(body: bytes, field: str) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(field, f"is not UTF-8: {error.reason} at byte {error.start}", "UTF-8") from None


class _Fault:
    """Stands in the parsed tree where a number, a constant or an object was refused."""

    def __init__(self, reason: str, bound: str | int | None = None) -> None:
        self.reason = reason
        self.bound = bound


class _Hooks:
    """Callbacks of one run of the JSON parser. The parser does not know where it is, so a fault is put
    into the tree and its path is found afterwards, only if there is one."""

    def __init__(self) -> None:
        self.faulty = False
        # PostgreSQL writes 1e300 as 301 digits: six bytes in could be three hundred out.
        self.expansion = 0

    def fault(self, reason: str, bound: str | int | None = None) -> _Fault:
        self.faulty = True
        return _Fault(reason, bound)

    def object(self, pairs: list[tuple[str, Any]]) -> Any:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return self.fault(f"the key {show(twice)} stands twice in one object")

    def integer(self, digits: str) -> Any:
        if len(digits) <= 300:
            return int(digits)
        if len(digits) > MAX_NUMBER_CHARS or math.isinf(float(digits)):
            return self.fault("the number is too large", _DOUBLE_RANGE)
        return int(digits)

    def real(self, digits: str) -> Any:
        if len(digits) > MAX_NUMBER_CHARS:
            return self.fault(
                f"the number has more than {MAX_NUMBER_CHARS} characters", f"{MAX_NUMBER_CHARS} characters"
            )
        number = float(digits)
        if math.isinf(number):
            return self.fault(f"the number {digits[:40]} is too large", _DOUBLE_RANGE)
        mantissa, mark, exponent = digits.lower().partition("e")
        if number == 0 and mantissa.strip("-0.") != "":
            return self.fault(f"the number {digits[:40]} is too small to be told from zero", "5e-324")
        # Zeros such as 0e99999999 are numbers too, but PostgreSQL's numeric refuses the exponent.
        if mark and len(exponent.lstrip("+-0")) > 4:
            return self.fault(f"the exponent of {digits[:40]} is out of range", _DOUBLE_RANGE)
        if mark:
            self.expansion += abs(int(exponent))
        return number

    def constant(self, name: str) -> Any:
        return self.fault(f"{name} is not JSON", "finite numbers")


def parse(text: str, field: str, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Parse strictly; raise :class:`InputError` for whatever a payload may not hold."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise InputError(field, "contains a lone surrogate", "Unicode text") from None
    check_size(field, size, max_bytes)
    if not text.strip(" \t\r\n"):
        raise InputError(field, "is empty; expected JSON")
    if depth_exceeds(text, max_depth):
        raise InputError(field, f"is nested deeper than {MAX_DEPTH} levels", MAX_DEPTH)
    hooks = _Hooks()
    try:
        value = json.loads(
            text,
            object_pairs_hook=hooks.object,
            parse_int=hooks.integer,
            parse_float=hooks.real,
            parse_constant=hooks.constant,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(field, f"is not valid JSON: {error.msg} ({where})") from None
    # NUL and lone surrogates can only come from \u escapes: the raw ones were refused above.
    if hooks.faulty or "\\u" in text:
        _walk(value, field, max_bytes, max_depth)
    check_size(field, size + hooks.expansion, max_bytes, "with its numbers written out ")
    return value


def check_size(field: str, size: int, max_bytes: int, how: str = "") -> None:
    if size > max_bytes:
        raise InputError(field, f"is too large: {how}{size} bytes, at most {max_bytes}", max_bytes)


_Path = tuple[Any, str | int] | None


def _walk(root: Any, field: str, max_bytes: int, max_depth: int = MAX_DEPTH) -> None:
    """Look at every value below ``root`` without recursion and refuse the first bad one by its path.

    Bounded: each value takes at least two bytes of JSON with its comma, so a value that refers to
    itself a million times over ends at ``max_bytes``.
    """
    _leaf(root, None, field)
    if not isinstance(root, dict | list | tuple):
        return
    stack: list[tuple[Any, _Path, int]] = [(root, None, 1)]
    room = max_bytes // 2 + 1
    expansion = 0
    while stack:
        container, path, depth = stack.pop()
        if depth > max_depth:
            raise InputError(field, f"is nested deeper than {MAX_DEPTH} levels", MAX_DEPTH)
        room -= len(container)
        if room < 0:
            raise InputError(field, f"is too large: at most {max_bytes} bytes", max_bytes)
        for key, value in _items(container, path, field):
            if value is None or value is True or value is False:
                continue
            _leaf(value, (path, key), field)
            if isinstance(value, dict | list | tuple):
                stack.append((value, (path, key), depth + 1))
            elif isinstance(value, float) and value and not 1e-5 < abs(value) < 1e17:
                expansion += int(abs(math.log10(abs(value))))
    check_size(field, expansion, max_bytes, "with its numbers written out ")


def _items(container: Any, path: _Path, field: str) -> Iterator[tuple[str | int, Any]]:
    if not isinstance(container, dict):
        yield from enumerate(container)
        return
    for key, value in container.items():
        if not isinstance(key, str):
            raise InputError(path_of(path, field), f"the key {show(key)} is {kind_of(key)}; keys are strings")
        reason = _text_fault(key)
        if reason:
            raise InputError(
                path_of(path, field), f"the key {show(key)} {reason}", "Unicode text without NUL"
            )
        yield key, value


def _leaf(value: Any, path: _Path, field: str) -> None:
    if isinstance(value, str):
        reason = _text_fault(value)
        if reason:
            raise InputError(path_of(path, field), reason, "Unicode text without NUL")
    elif isinstance(value, _Fault):
        raise InputError(path_of(path, field), value.reason, value.bound)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(path_of(path, field), f"{value} is not JSON", "finite numbers")
    elif isinstance(value, int):
        if value.bit_length() > 1000 and _is_infinite(value):
            raise InputError(path_of(path, field), "the number is too large", _DOUBLE_RANGE)
    elif value is not None and not isinstance(value, dict | list | tuple):
        raise InputError(path_of(path, field), f"{kind_of(value)} is not JSON")


def _is_infinite(number: int) -> bool:
    try:
        return math.isinf(float(number))
    except OverflowError:
        return True


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "contains the character NUL (\\u0000), which PostgreSQL cannot store"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains a lone surrogate (half of a \\ud800–\\udfff pair)"
    return None


# --- words for messages ---------------------------------------------------------------------------

_KINDS: Final = (
    (bool, "a boolean"),
    (int, "a number"),
    (float, "a number"),
    (str, "a string"),
    (dict, "an object"),
    (list, "an array"),
    (tuple, "an array"),
)


def kind_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, word in _KINDS:
        if isinstance(value, kind):
            return word
    return f"a {type(value).__name__}"


def show(value: object) -> str:
    """The value in a message: short, printable, ASCII."""
    if isinstance(value, int) and value.bit_length() > 256:  # int → str has a limit of its own
        return "a number of more than 77 digits"
    text = (
        json.dumps(value)
        if isinstance(value, str)
        else ascii(value)
        if not isinstance(value, datetime)
        else str(value)
    )
    return text if len(text) <= 80 else text[:76] + "…" + text[-1]


def path_of(path: _Path, field: str) -> str:
    """``payload.items[3].name``; keys that are no plain words are quoted."""
    steps: list[str | int] = []
    while path is not None:
        path, step = path
        steps.append(step)
    text = field
    for step in reversed(steps):
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{show(step)}]"
    return text
