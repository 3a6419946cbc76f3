"""What a job may look like: the same rules for text (API, command line) and for values (client, worker)."""

import json
import math
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd import job, strict_json
from aqd.errors import InputError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def request(**fields: Any) -> bytes:
    return json.dumps({"type": "x", **fields}).encode()


def refusal(body: bytes | str) -> InputError:
    with pytest.raises(InputError) as caught:
        job.parse_request(body.encode() if isinstance(body, str) else body)
    return caught.value


# --- round trips ----------------------------------------------------------------------------------


@given(values)
def test_what_passes_as_a_value_passes_as_text_and_is_the_same(value: Any) -> None:
    text = strict_json.encode_json(value)
    assert strict_json.check_json(text) == text
    assert json.loads(text) == value


@given(values)
def test_the_payload_is_kept_as_the_text_that_was_sent(value: Any) -> None:
    text = json.dumps(value, indent=1)
    made = job.parse_request(f'{{"payload": {text} , "type": "x"}}'.encode())
    assert made.payload == text


@given(st.binary(max_size=200))
def test_any_bytes_give_a_request_or_an_input_error(body: bytes) -> None:
    reason = ""
    try:
        job.parse_request(body)
    except InputError as error:
        reason = str(error)
    assert reason.isprintable()


@given(st.text(st.sampled_from('[]{}",:\\u0d8e1-. \n')), st.text(st.sampled_from('[]{}"\\:,1')))
def test_any_json_like_text_gives_a_request_or_an_input_error(first: str, second: str) -> None:
    for text in (first, second, f'{{"type":"x","payload":{first}{second}}}'):
        try:
            job.parse_request(text.encode())
        except InputError:
            pass


def test_numbers_keep_all_their_digits() -> None:
    made = job.parse_request(
        b'{"type":"x","payload":[0.10000000000000000001,1.50,-0,123456789012345678901234567890]}'
    )
    assert made.payload == "[0.10000000000000000001,1.50,-0,123456789012345678901234567890]"


# --- depth ----------------------------------------------------------------------------------------


def nesting(text: str) -> int:
    """How deep a parser that is fed this text gets: counted one character after the other."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
            if depth < 0:
                break
    return deepest


@given(st.text(st.sampled_from('[]{}"\\a'), max_size=60), st.integers(0, 6))
def test_the_scan_agrees_with_a_character_by_character_count(text: str, limit: int) -> None:
    assert strict_json.depth_exceeds(text, limit) == (nesting(text) > limit)


@pytest.mark.parametrize("depth", [65, 1_000, 20_000, 200_000])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused_before_parsing(depth: int, closed: bool) -> None:
    body = '{"type":"x","payload":' + "[" * depth + ("]" * depth + "}" if closed else "")
    error = refusal(body)
    assert error.bound == strict_json.MAX_DEPTH
    assert "64" in error.reason


def test_64_levels_are_allowed_everywhere() -> None:
    text = "[" * 64 + "]" * 64
    assert job.parse_request(f'{{"type":"x","payload":{text}}}'.encode()).payload == text
    assert strict_json.check_json(text) == text
    value: Any = []
    for _ in range(63):
        value = [value]
    assert strict_json.encode_json(value) == text
    with pytest.raises(InputError, match="64"):
        strict_json.encode_json([value])
    with pytest.raises(InputError, match="64"):
        strict_json.check_json(f"[{text}]")


def test_brackets_in_strings_do_not_count() -> None:
    text = '"' + "[{" * 500 + '\\""'
    assert strict_json.check_json(text) == text


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 500_000,
        '"' * 1_000_001,
        "[" + '"\\' * 400_000,
        '{"a":' * 150_000,
        "9" * 1_000_000,
        "[1," * 300_000,
    ],
    ids=["escaped quotes", "quotes", "half escapes", "objects", "digits", "arrays"],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InputError):
        strict_json.check_json(text)
    assert time.monotonic() - begin < 5


# --- single faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "field", "word"),
    [
        ('{"a":{"b":["\\u0000"]}}', "payload.a.b[0]", "NUL"),
        ('{"a":{"b\\u0000":1}}', "payload.a", "NUL"),
        ('[1,{"a b":"\\ud800"}]', 'payload[1]["a b"]', "surrogate"),
        ('"\\udc00\\ud800"', "payload", "surrogate"),
        ('{"x":[1e400]}', "payload.x[0]", "too large"),
        ('{"x":-1e400}', "payload.x", "too large"),
        ("1e-400", "payload", "too small"),
        ("0e99999999999", "payload", "exponent"),
        ("1" + "0" * 400, "payload", "too large"),
        ("0." + "1" * 2000, "payload", "1100"),
        ("[NaN]", "payload[0]", "NaN"),
        ('{"a":Infinity}', "payload.a", "Infinity"),
        ("-Infinity", "payload", "Infinity"),
        ('{"a":{"b":1,"c":2,"b":3}}', "payload.a", "twice"),
        ('{"a":1e5,"a":[NaN]}', "payload", "twice"),
    ],
)
def test_a_bad_payload_is_named_by_path(payload: str, field: str, word: str) -> None:
    error = refusal(f'{{"type":"x","payload":{payload}}}')
    assert error.field == field
    assert word in error.reason
    with pytest.raises(InputError) as caught:
        strict_json.check_json(payload)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud83d\\ude00"',
        '"\\uffff"',
        '"\uffff"',
        '"\\u0001"',
        '"\\\\u0000"',
        "5e-324",
        "0.0e-5",
        "1.7976931348623157e308",
    ],
)
def test_unusual_but_valid_json_passes(text: str) -> None:
    assert strict_json.check_json(text) == text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("null", "null"),
        ("42", "number"),
        ('"x"', "string"),
        ("[]", "array"),
        ("{", "line 1, column 2"),
        ('{"type":"x"} x', "Extra data"),
        ("\ufeff{}", "BOM"),
        ('{"type":"x","payload":"\t"}', "control character"),
        ('{"type":"x","payload":"\0"}', "control character"),
        ("{'type':'x'}", "not valid JSON"),
    ],
)
def test_bodies_that_are_no_object(body: str, word: str) -> None:
    assert word in refusal(body).reason


@pytest.mark.parametrize(
    "body",
    [
        b"\xff{}",
        b'{"type":"\xed\xa0\x80"}',
        '{"type":"x"}'.encode("utf-16"),
        '{"type":"ü"}'.encode("latin-1"),
    ],
)
def test_bytes_that_are_not_utf8(body: bytes) -> None:
    assert "UTF-8" in refusal(body).reason


def test_unknown_fields_are_named() -> None:
    error = refusal(request(max_atempts=3))
    assert error.field == "max_atempts"
    assert "max_attempts" in error.reason


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"type": None}, "type"),
        ({"type": ""}, "type"),
        ({"type": 5}, "type"),
        ({"type": "a b"}, "type"),
        ({"type": "x" * 129}, "type"),
        ({"type": "x\n"}, "type"),
        ({"type": "ü"}, "type"),
        ({"queue": ""}, "queue"),
        ({"queue": "a\0b"}, "queue"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": "5"}, "priority"),
        ({"priority": 10**200}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "1"}, "timeout_s"),
        ({"timeout_s": 1e300}, "timeout_s"),
        ({"delay_s": -1}, "delay_s"),
        ({"delay_s": False}, "delay_s"),
        ({"delay_s": 1, "run_at": "2030-01-01T00:00:00Z"}, "delay_s"),
        ({"run_at": "tomorrow"}, "run_at"),
        ({"run_at": "2030-01-01"}, "run_at"),
        ({"run_at": "2030-01-01T00:00:00"}, "run_at"),
        ({"run_at": "2030-13-01T00:00:00Z"}, "run_at"),
        ({"run_at": "2030-01-01T00:00:61Z"}, "run_at"),
        ({"run_at": "0001-01-01T00:00:00+12:00"}, "run_at"),
        ({"run_at": "9999-12-31T23:59:59-12:00"}, "run_at"),
        ({"run_at": 1700000000}, "run_at"),
    ],
)
def test_fields_out_of_their_bounds(fields: dict[str, Any], field: str) -> None:
    assert refusal(request(**fields)).field == field


def test_a_full_request() -> None:
    made = job.parse_request(
        request(
            type="mail/send:v1.2_x-y",
            payload=None,
            queue="mail",
            priority=-100,
            run_at="2030-01-02t03:04:05.678901234+02:00",
            max_attempts=1000,
            timeout_s=0.5,
        )
    )
    assert made == job.JobRequest(
        type="mail/send:v1.2_x-y",
        payload="null",
        queue="mail",
        priority=-100,
        run_at=datetime(2030, 1, 2, 1, 4, 5, 678901, tzinfo=UTC),
        max_attempts=1000,
        timeout_s=0.5,
    )


def test_defaults_and_nulls() -> None:
    bare = job.parse_request(b'{"type":"x"}')
    assert bare == job.JobRequest(type="x")
    assert bare == job.parse_request(
        b'{"type":"x","queue":null,"priority":null,"run_at":null,"delay_s":null}'
    )
    assert (bare.queue, bare.payload, bare.priority) == (None, "{}", 0)


def test_size_is_bounded_in_bytes_and_in_what_numbers_become() -> None:
    with pytest.raises(InputError, match="too large") as caught:
        job.parse_request('{"type":"x","payload":"ääää"}'.encode(), max_payload_bytes=9)
    assert caught.value.bound == 9
    assert job.parse_request('{"type":"x","payload":"äää"}'.encode(), max_payload_bytes=8).payload == '"äää"'
    with pytest.raises(InputError, match="written out"):
        strict_json.check_json("[" + "1e308," * 10_000 + "1]")
    with pytest.raises(InputError, match="written out"):
        strict_json.encode_json([1e308] * 10_000)


# --- values ---------------------------------------------------------------------------------------


def test_values_that_are_not_json() -> None:
    loop: list[Any] = []
    loop.append(loop)
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb] * 10
    for value, field in [
        (math.nan, "payload"),
        ({"a": [math.inf]}, "payload.a[0]"),
        ({1: 2}, "payload"),
        (object(), "payload"),
        ({"when": datetime.now(UTC)}, "payload.when"),
        (b"x", "payload"),
        ({1, 2}, "payload"),
        (10**400, "payload"),
        ({"a": "\ud800"}, "payload.a"),
        (loop, "payload"),
        (bomb, "payload"),
    ]:
        with pytest.raises(InputError) as caught:
            strict_json.encode_json(value)
        assert caught.value.field == field


def test_a_value_that_is_too_large() -> None:
    with pytest.raises(InputError, match="at most 100") as caught:
        strict_json.encode_json("x" * 99, field="result", max_bytes=100)
    assert caught.value.field == "result"
    assert strict_json.encode_json("x" * 98, max_bytes=100)


def test_validate_takes_python_values() -> None:
    zone = timezone(timedelta(hours=2))
    made = job.validate("x", {"n": (1, 2)}, run_at=datetime(2030, 1, 1, 2, tzinfo=zone))
    assert made.payload == '{"n":[1,2]}'
    assert made.run_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert job.validate("x", payload_json=" [1] ").payload == " [1] "
    with pytest.raises(InputError, match="time zone"):
        job.validate("x", run_at=datetime(2030, 1, 1))
    with pytest.raises(InputError, match="not valid JSON"):
        job.validate("x", payload_json="{")


@pytest.mark.parametrize("text", ["1", "42", "9223372036854775807"])
def test_ids(text: str) -> None:
    assert job.parse_id(text) == int(text)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "+1", "01", "1.0", "9223372036854775808", "1" * 5000, "x", "٣", "1 ", "1\n", "\0"]
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(InputError, match="no job id"):
        job.parse_id(text)
