"""What a job may look like: validation shared by the API, the client, the command line and SQL's arguments.

Pure and without a process of its own: text or values in, a :class:`JobRequest` out. One place decides, so that
all ways to submit a job refuse the same things with the same words. What JSON may hold is
:mod:`aqd.strict_json`'s.

Fails with :class:`aqd.errors.InputError`, which names the value's path, the reason and the bound.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aqd.errors import InputError
from aqd.strict_json import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    check_json,
    check_size,
    decode,
    encode_json,
    kind_of,
    parse,
    path_of,
    show,
)

MAX_NAME_CHARS: Final = 128
MIN_PRIORITY: Final = -100
MAX_PRIORITY: Final = 100
MAX_ATTEMPTS: Final = 1000
MAX_TIMEOUT_S: Final = 30 * 86_400
MAX_DELAY_S: Final = 10 * 366 * 86_400
MAX_ID: Final = (1 << 63) - 1
MAX_TAGS: Final = 32
MAX_META_BYTES: Final = 1 << 16
MAX_KEY_CHARS: Final = 255
MAX_BATCH: Final = 1000
MAX_IDS: Final = 1000
DEFAULT_QUEUE: Final = "default"
DEFAULT_KEY_TTL_HOURS: Final = 24.0
MIN_KEY_TTL_HOURS: Final = 0.01
MAX_KEY_TTL_HOURS: Final = 87_600.0
# A year on either side of datetime's range, so that every time zone can show the moment.
MIN_RUN_AT: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_RUN_AT: Final = datetime(9998, 12, 31, tzinfo=UTC)

NAME_PATTERN: Final = r"[A-Za-z0-9_.:/-]{1,128}"
NAME_WORDS: Final = f"1..{MAX_NAME_CHARS} characters of A-Z a-z 0-9 _ . : / -"
# Visible ASCII: two forms of one accented letter would be two keys that look alike.
KEY_PATTERN: Final = r"[!-~]([ -~]{0,253}[!-~])?"
_NAME = re.compile(NAME_PATTERN)
_KEY = re.compile(KEY_PATTERN)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)


class State(StrEnum):
    """The states of a job, spelled alike in SQL, Python and JSON."""

    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class OnConflict(StrEnum):
    """What to do about an idempotency key that stands for a job already.

    ``return``: give that job, if the request is the same one. ``replace``: give it this request if it is still
    QUEUED, make a new job if it has begun. ``reject``: refuse.
    """

    RETURN = "return"
    REPLACE = "replace"
    REJECT = "reject"


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job that may be stored. ``None`` means "the default of the handler or of the daemon".

    ``payload`` and ``meta`` are JSON *text*. At most one of ``run_at`` (aware) and ``delay_s`` is given.
    """

    type: str
    payload: str = "{}"
    queue: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    delay_s: float | None = None
    max_attempts: int | None = None
    timeout_s: float | None = None
    tags: tuple[str, ...] = ()
    meta: str | None = None
    idempotency_key: str | None = None
    on_conflict: OnConflict = OnConflict.RETURN


# --- requests -------------------------------------------------------------------------------------

Name = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$", max_length=MAX_NAME_CHARS)]
Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Key = Annotated[str, Meta(pattern=f"^{KEY_PATTERN}$", max_length=MAX_KEY_CHARS)]


class JobBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A job as a request's body says it. The bounds are those of :func:`validate`, which reads them from the same
    constants and says more when one is broken; null counts as absent, except for ``payload``."""

    type: Annotated[Name, Meta(description="Which handler runs it.")]
    payload: Annotated[
        msgspec.Raw,
        Meta(description="Any JSON value; what the handler gets.", extra_json_schema={"default": {}}),
    ] = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))  # a Raw default has no JSON Schema
    queue: Annotated[Name | None, Meta(description="Default: the handler's queue, else `default`.")] = None
    priority: Annotated[Priority | None, Meta(description="Higher goes first. Default 0.")] = None
    run_at: Annotated[
        Moment | None, Meta(description="Not before this moment (RFC 3339 with zone). In the past: now.")
    ] = None
    delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_DELAY_S)] | None,
        Meta(description="Not before so many seconds from now; not together with `run_at`."),
    ] = None
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | None,
        Meta(description="Default: the handler's, else the daemon's."),
    ] = None
    timeout_s: Annotated[
        Annotated[float, Meta(ge=0.1, le=MAX_TIMEOUT_S)] | None,
        Meta(description="Default: the handler's, else the daemon's."),
    ] = None
    tags: Annotated[
        Annotated[list[Name], Meta(max_length=MAX_TAGS, extra_json_schema={"uniqueItems": True})] | None,
        Meta(description="To find jobs by."),
    ] = None
    meta: Annotated[
        dict[str, Any] | None,
        Meta(
            description=f"Kept with the job and given to its handler; at most {MAX_META_BYTES} bytes of JSON."
        ),
    ] = None
    idempotency_key: Annotated[
        Key | None,
        Meta(description="The same as the header Idempotency-Key: of all requests under it one makes a job."),
    ] = None
    on_conflict: Annotated[
        OnConflict | None,
        Meta(description="What to do if the key stands for a job already. Default `return`."),
    ] = None


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Many jobs as a request's body says them."""

    jobs: Annotated[list[JobBody], Meta(min_length=1, max_length=MAX_BATCH)]
    atomic: Annotated[
        bool, Meta(description="Store all or none; else those that are not refused. Default true.")
    ] = True


_FIELDS: Final = JobBody.__struct_fields__


class _RawPayload(msgspec.Struct):
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    meta: msgspec.Raw | UnsetType = UNSET


_RAW_PAYLOAD: Final = msgspec.json.Decoder(_RawPayload)


def parse_request(
    body: bytes, *, max_payload_bytes: int = MAX_JSON_BYTES, idempotency_key: str | None = None
) -> JobRequest:
    """The job that a request body (UTF-8 JSON, an object) asks for; ``idempotency_key`` is the header's.

    A field that is ``null`` counts as absent, except ``payload``, where null is a value. Unknown
    fields are refused: a misspelt ``max_atempts`` must not be dropped in silence.
    """
    text = decode(body, "")
    parsed = parse(
        text, "", max(MAX_JSON_BYTES, max_payload_bytes), MAX_DEPTH + 1
    )  # 64 levels are the payload's own
    return from_parsed(
        parsed, text, field="", max_payload_bytes=max_payload_bytes, idempotency_key=idempotency_key
    )


def from_parsed(
    parsed: Any,
    text: str | bytes,
    *,
    field: str,
    max_payload_bytes: int = MAX_JSON_BYTES,
    idempotency_key: str | None = None,
) -> JobRequest:
    """The job that a JSON value asks for: ``parsed``, strictly, from ``text``, which is kept. ``field``: its path."""
    if not isinstance(parsed, dict):
        what = "the body" if not field else "it"
        raise InputError(field, f"{what} must be a JSON object, not {kind_of(parsed)}")
    for name in parsed:
        if name not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise InputError(path_of((None, name), field), f"unknown field; known are {known}")
    given = {
        name: value for name, value in parsed.items() if value is not None and name not in ("payload", "meta")
    }
    if (
        idempotency_key is not None
        and given.setdefault("idempotency_key", idempotency_key) != idempotency_key
    ):
        raise InputError("idempotency_key", "is another one than the header Idempotency-Key")
    if "type" not in given:
        raise InputError(f"{field}.type" if field else "type", "is missing: every job names its type")
    raw = _RAW_PAYLOAD.decode(text)
    meta = parsed.get("meta")
    if meta is not None and not isinstance(meta, dict):
        raise InputError("meta", f"must be an object, not {kind_of(meta)}")
    return validate(
        payload_json=bytes(raw.payload).decode(),
        meta_json=bytes(raw.meta).decode() if meta is not None and raw.meta is not UNSET else None,
        _checked=True,
        max_payload_bytes=max_payload_bytes,
        **given,
    )


def validate(
    type: str,
    payload: Any = UNSET,
    *,
    payload_json: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
    tags: Sequence[str] | None = None,
    meta: dict[str, Any] | None = None,
    meta_json: str | None = None,
    idempotency_key: str | None = None,
    on_conflict: str | None = None,
    max_payload_bytes: int = MAX_JSON_BYTES,
    _checked: bool = False,
) -> JobRequest:
    """The request made of single values, for callers that hold Python objects.

    The payload is a Python value (None is null, without it: an empty object), or JSON text as ``payload_json``;
    ``meta`` likewise. ``run_at`` is an aware
    datetime or an RFC 3339 string. Types are not coerced: ``True`` and ``"5"`` are no priorities.
    """
    type = check_name("type", type)
    if payload_json is None:
        payload_json = "{}" if payload is UNSET else encode_json(payload, max_bytes=max_payload_bytes)
    elif _checked:
        check_size("payload", len(payload_json.encode()), max_payload_bytes)
    else:
        payload_json = check_json(payload_json, max_bytes=max_payload_bytes)
    if run_at is not None and delay_s is not None:
        raise InputError("delay_s", "give either run_at or delay_s, not both")
    conflict = OnConflict.RETURN if on_conflict is None else _on_conflict(on_conflict)
    if conflict is not OnConflict.RETURN and idempotency_key is None:
        raise InputError("on_conflict", "must not be given without an idempotency_key")
    return JobRequest(
        type=type,
        payload=payload_json,
        queue=None if queue is None else check_name("queue", queue),
        priority=0 if priority is None else check_priority(priority),
        run_at=None if run_at is None else parse_moment("run_at", run_at),
        delay_s=None if delay_s is None else check_delay(delay_s),
        max_attempts=None
        if max_attempts is None
        else check_integer("max_attempts", max_attempts, 1, MAX_ATTEMPTS),
        timeout_s=None if timeout_s is None else check_number("timeout_s", timeout_s, 0.1, MAX_TIMEOUT_S),
        tags=() if tags is None else check_tags(tags),
        meta=_meta(meta, meta_json, checked=_checked),
        idempotency_key=None if idempotency_key is None else check_key(idempotency_key),
        on_conflict=conflict,
    )


def check_priority(value: object) -> int:
    """A priority."""
    return check_integer("priority", value, MIN_PRIORITY, MAX_PRIORITY)


def check_delay(value: object) -> float:
    """Seconds from now."""
    return check_number("delay_s", value, 0, MAX_DELAY_S)


def check_tags(value: object) -> tuple[str, ...]:
    """Tags, each once, as they are."""
    if not isinstance(value, list | tuple):
        raise InputError("tags", f"must be an array of strings, not {kind_of(value)}")
    if len(value) > MAX_TAGS:
        raise InputError("tags", f"are {len(value)}, at most {MAX_TAGS}", MAX_TAGS)
    for place, tag in enumerate(value):
        check_name(f"tags[{place}]", tag)
        if tag in value[:place]:
            raise InputError(f"tags[{place}]", f"{show(tag)} stands twice")
    return tuple(value)


def check_key(value: object, field: str = "idempotency_key") -> str:
    """An idempotency key, as it is."""
    bound = f"1..{MAX_KEY_CHARS} visible ASCII characters"
    if not isinstance(value, str):
        raise InputError(field, f"must be a string, not {kind_of(value)}", bound)
    if not _KEY.fullmatch(value):
        raise InputError(
            field, f"{show(value)} is no key; a key has {bound}, spaces only between them", bound
        )
    return value


def check_key_ttl(value: object) -> float:
    """Hours for which an idempotency key stands for its job."""
    return check_number("idempotency_ttl_hours", value, MIN_KEY_TTL_HOURS, MAX_KEY_TTL_HOURS, "hours")


def _on_conflict(value: object) -> OnConflict:
    choices = ", ".join(OnConflict)
    if not isinstance(value, str) or value not in tuple(OnConflict):
        raise InputError("on_conflict", f"{show(value)} is none of {choices}", choices)
    return OnConflict(value)


def _meta(value: object, text: str | None, *, checked: bool) -> str | None:
    if text is None and value is None:
        return None
    if text is None:
        if not isinstance(value, dict):
            raise InputError("meta", f"must be an object, not {kind_of(value)}")
        text = encode_json(value, field="meta", max_bytes=MAX_META_BYTES)
    elif checked:
        check_size("meta", len(text.encode()), MAX_META_BYTES)
    else:
        check_json(text, field="meta", max_bytes=MAX_META_BYTES)
        if not text.lstrip(" \t\r\n").startswith("{"):
            raise InputError("meta", "must be a JSON object")
    return None if text.strip("{} \t\r\n") == "" else text


def parse_id(text: str, field: str = "id") -> int:
    """The number of a job id as it stands in paths and bodies: ``"1"`` to ``"9223372036854775807"``."""
    if text.isascii() and text.isdigit() and len(text) <= 19 and text[0] != "0" and int(text) <= MAX_ID:
        return int(text)
    raise InputError(field, f"{show(text)} is no job id: ids are whole numbers from 1", f"1..{MAX_ID}")


def check_ids(field: str, values: object) -> tuple[int, ...]:
    """Ids of jobs, as numbers or as text; each once, in the order given."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(field, f"must be an array of job ids, not {kind_of(values)}")
    found = tuple(
        dict.fromkeys(parse_id(str(value), f"{field}[{place}]") for place, value in enumerate(values))
    )
    if not 1 <= len(found) <= MAX_IDS:
        raise InputError(field, f"are {len(found)}, not 1..{MAX_IDS}", f"1..{MAX_IDS}")
    return found


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
        raise InputError(field, f"must be an RFC 3339 time, not {kind_of(value)}", "RFC 3339")
    # Compared before the conversion: 0001-01-01T00:00:00+12:00 has no UTC form in Python.
    if not MIN_RUN_AT <= moment <= MAX_RUN_AT:
        raise InputError(
            field, f"{show(value)} is out of range", f"{MIN_RUN_AT:%Y-%m-%d}..{MAX_RUN_AT:%Y-%m-%d}"
        )
    return moment.astimezone(UTC)


def check_name(field: str, value: object) -> str:
    """The name of a type, a queue or a tag, as it is."""
    if not isinstance(value, str):
        raise InputError(field, f"must be a string, not {kind_of(value)}")
    if not _NAME.fullmatch(value):
        raise InputError(field, f"{show(value)} is no valid name; a name has {NAME_WORDS}", NAME_WORDS)
    return value


def check_integer(field: str, value: object, low: int, high: int) -> int:
    """A whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        what = show(value) if isinstance(value, float) else kind_of(value)
        raise InputError(field, f"must be a whole number, not {what}", f"{low}..{high}")
    if not low <= value <= high:
        raise InputError(field, f"{show(value)} is not between {low} and {high}", f"{low}..{high}")
    return int(value)


def check_number(field: str, value: object, low: float, high: float, unit: str = "seconds") -> float:
    """A number within bounds."""
    bound = f"{low:g}..{high:.12g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(field, f"must be a number of {unit}, not {kind_of(value)}", bound)
    if not low <= value <= high:  # also false for NaN
        raise InputError(field, f"{show(value)} is not between {low:g} and {high:.12g} {unit}", bound)
    return float(value)
