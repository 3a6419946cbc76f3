"""What a job may look like: validation shared by the API, the client, the command line and the worker.

Pure and without a process of its own: text or values in, a :class:`JobRequest` or checked JSON text
out. One place decides, so that the three ways to submit a job refuse the same things with the same
words, and so that a handler's result obeys the rules of a payload.

Promises: whatever passes can be stored in ``jsonb`` and read back without loss, and can be parsed by
the worker; nothing here depends on Python's recursion limit. JSON is kept as the *text* that was
sent, because a number such as ``0.10000000000000000001`` would not survive a trip through ``float``.

Fails with :class:`aqd.errors.InputError`, which names the value's path, the reason and the bound.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from aqd.errors import InputError

MAX_JSON_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
# The longest exact decimal form of a double has 1,076 characters; more digits carry no meaning and
# PostgreSQL's numeric stops at 16,383 fractional digits.
MAX_NUMBER_CHARS: Final = 1100
MAX_NAME_CHARS: Final = 128
MIN_PRIORITY: Final = -100
MAX_PRIORITY: Final = 100
MAX_ATTEMPTS: Final = 1000
MAX_TIMEOUT_S: Final = 30 * 86_400
MAX_DELAY_S: Final = 10 * 366 * 86_400
MAX_ID: Final = (1 << 63) - 1
DEFAULT_QUEUE: Final = "default"
# A year on either side of datetime's range, so that every time zone can show the moment.
MIN_RUN_AT: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_RUN_AT: Final = datetime(9998, 12, 31, tzinfo=UTC)

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# Possessive, and an unterminated string runs to the end: otherwise a megabyte of \" takes hours.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DOUBLE_RANGE = "±1.7976931348623157e308"


class State(StrEnum):
    """The states of a job, spelled alike in SQL, Python and JSON."""

    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job that may be stored. ``None`` means "the default of the handler or of the daemon".

    ``payload`` is JSON *text*. At most one of ``run_at`` (aware) and ``delay_s`` is given.
    """

    type: str
    payload: str = "{}"
    queue: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    delay_s: float | None = None
    max_attempts: int | None = None
    timeout_s: float | None = None


# --- requests -------------------------------------------------------------------------------------

_FIELDS: Final = frozenset(JobRequest.__struct_fields__)


class _RawPayload(msgspec.Struct):
    payload: msgspec.Raw = msgspec.Raw(b"{}")


_RAW_PAYLOAD: Final = msgspec.json.Decoder(_RawPayload)


def parse_request(body: bytes, *, max_payload_bytes: int = MAX_JSON_BYTES) -> JobRequest:
    """The job that a request body (UTF-8 JSON, an object) asks for.

    A field that is ``null`` counts as absent, except ``payload``, where null is a value. Unknown
    fields are refused: a misspelt ``max_atempts`` must not be dropped in silence.
    """
    text = _decode(body, "")
    parsed = _parse(
        text, "", max(MAX_JSON_BYTES, max_payload_bytes), MAX_DEPTH + 1
    )  # 64 levels are the payload's own
    if not isinstance(parsed, dict):
        raise InputError("", f"the body must be a JSON object, not {_kind(parsed)}")
    for name in parsed:
        if name not in _FIELDS:
            known = ", ".join(JobRequest.__struct_fields__)
            raise InputError(_path((None, name), ""), f"unknown field; known are {known}")
    given = {name: value for name, value in parsed.items() if value is not None and name != "payload"}
    if "type" not in given:
        raise InputError("type", "is missing: every job names its type")
    payload = bytes(_RAW_PAYLOAD.decode(text).payload).decode()
    return validate(payload_json=payload, _checked=True, max_payload_bytes=max_payload_bytes, **given)


def validate(
    type: str,
    payload: Any = None,
    *,
    payload_json: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
    max_payload_bytes: int = MAX_JSON_BYTES,
    _checked: bool = False,
) -> JobRequest:
    """The request made of single values, for callers that hold Python objects.

    The payload is a Python value, or JSON text as ``payload_json``. ``run_at`` is an aware datetime
    or an RFC 3339 string. Types are not coerced: ``True`` and ``"5"`` are no priorities.
    """
    type = check_name("type", type)
    if payload_json is None:
        payload_json = encode_json(payload, max_bytes=max_payload_bytes)
    elif _checked:
        _check_size("payload", len(payload_json.encode()), max_payload_bytes)
    else:
        payload_json = check_json(payload_json, max_bytes=max_payload_bytes)
    if run_at is not None and delay_s is not None:
        raise InputError("delay_s", "give either run_at or delay_s, not both")
    return JobRequest(
        type=type,
        payload=payload_json,
        queue=None if queue is None else check_name("queue", queue),
        priority=0 if priority is None else _integer("priority", priority, MIN_PRIORITY, MAX_PRIORITY),
        run_at=None if run_at is None else parse_moment("run_at", run_at),
        delay_s=None if delay_s is None else _number("delay_s", delay_s, 0, MAX_DELAY_S),
        max_attempts=None
        if max_attempts is None
        else _integer("max_attempts", max_attempts, 1, MAX_ATTEMPTS),
        timeout_s=None if timeout_s is None else _number("timeout_s", timeout_s, 0.1, MAX_TIMEOUT_S),
    )


def parse_id(text: str, field: str = "id") -> int:
    """The number of a job id as it stands in paths and bodies: ``"1"`` to ``"9223372036854775807"``."""
    if text.isascii() and text.isdigit() and len(text) <= 19 and text[0] != "0" and int(text) <= MAX_ID:
        return int(text)
    raise InputError(field, f"{show(text)} is no job id: ids are whole numbers from 1", f"1..{MAX_ID}")


def parse_moment(field: str, value: datetime | str) -> datetime:
    """An aware datetime in UTC from one, or from RFC 3339 text such as ``2026-11-29T17:40:01Z``.

    Digits beyond microseconds are cut off: PostgreSQL keeps no more.
    """
    if isinstance(value, str):
        text = value.upper()
        try:
            moment = datetime.fromisoformat(text) if _MOMENT.fullmatch(text) else None
        except ValueError:
            moment = None
        if moment is None:
            raise InputError(
                field,
                f"{show(value)} is no RFC 3339 time with zone, such as 2026-11-29T17:40:01Z",
                "RFC 3339",
            )
    elif isinstance(value, datetime):
        moment = value
        if moment.utcoffset() is None:
            raise InputError(field, "has no time zone; give an aware datetime")
    else:
        raise InputError(field, f"must be an RFC 3339 time, not {_kind(value)}", "RFC 3339")
    # Compared before the conversion: 0001-01-01T00:00:00+12:00 has no UTC form in Python.
    if not MIN_RUN_AT <= moment <= MAX_RUN_AT:
        raise InputError(
            field, f"{show(value)} is out of range", f"{MIN_RUN_AT:%Y-%m-%d}..{MAX_RUN_AT:%Y-%m-%d}"
        )
    return moment.astimezone(UTC)


def check_name(field: str, value: object) -> str:
    """The name of a type or a queue, as it is."""
    if not isinstance(value, str):
        raise InputError(field, f"must be a string, not {_kind(value)}")
    if not _NAME.fullmatch(value):
        bound = f"1..{MAX_NAME_CHARS} characters of A-Z a-z 0-9 _ . : / -"
        raise InputError(field, f"{show(value)} is no valid name; a name has {bound}", bound)
    return value


def _integer(field: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(field, f"must be a whole number, not {_kind(value)}", f"{low}..{high}")
    if not low <= value <= high:
        raise InputError(field, f"{show(value)} is not between {low} and {high}", f"{low}..{high}")
    return int(value)


def _number(field: str, value: object, low: float, high: float) -> float:
    bound = f"{low:g}..{high:.12g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(field, f"must be a number of seconds, not {_kind(value)}", bound)
    if not low <= value <= high:  # also false for NaN
        raise InputError(field, f"{show(value)} is not between {low:g} and {high:.12g} seconds", bound)
    return float(value)


# --- JSON -----------------------------------------------------------------------------------------


def check_json(text: str | bytes, *, field: str = "payload", max_bytes: int = MAX_JSON_BYTES) -> str:
    """The JSON text itself if it obeys the rules of a payload: size, depth, no NUL, no lone surrogate,
    no NaN or Infinity, no key twice, numbers in the range of a double."""
    if isinstance(text, bytes):
        text = _decode(text, field)
    _parse(text, field, max_bytes)
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
        _check_size(field, len(text.encode()), max_bytes)
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


def _decode(body: bytes, field: str) -> str:
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


def _parse(text: str, field: str, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Parse strictly; raise :class:`InputError` for whatever a payload may not hold."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise InputError(field, "contains a lone surrogate", "Unicode text") from None
    _check_size(field, size, max_bytes)
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
    _check_size(field, size + hooks.expansion, max_bytes, "with its numbers written out ")
    return value


def _check_size(field: str, size: int, max_bytes: int, how: str = "") -> None:
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
    _check_size(field, expansion, max_bytes, "with its numbers written out ")


def _items(container: Any, path: _Path, field: str) -> Iterator[tuple[str | int, Any]]:
    if not isinstance(container, dict):
        yield from enumerate(container)
        return
    for key, value in container.items():
        if not isinstance(key, str):
            raise InputError(_path(path, field), f"the key {show(key)} is {_kind(key)}; keys are strings")
        reason = _text_fault(key)
        if reason:
            raise InputError(_path(path, field), f"the key {show(key)} {reason}", "Unicode text without NUL")
        yield key, value


def _leaf(value: Any, path: _Path, field: str) -> None:
    if isinstance(value, str):
        reason = _text_fault(value)
        if reason:
            raise InputError(_path(path, field), reason, "Unicode text without NUL")
    elif isinstance(value, _Fault):
        raise InputError(_path(path, field), value.reason, value.bound)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(_path(path, field), f"{value} is not JSON", "finite numbers")
    elif isinstance(value, int):
        if value.bit_length() > 1000 and _is_infinite(value):
            raise InputError(_path(path, field), "the number is too large", _DOUBLE_RANGE)
    elif value is not None and not isinstance(value, dict | list | tuple):
        raise InputError(_path(path, field), f"{_kind(value)} is not JSON")


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


def _kind(value: object) -> str:
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


def _path(path: _Path, field: str) -> str:
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
