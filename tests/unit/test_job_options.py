"""Tags, meta and idempotency keys: the same rules for a body's text and for Python values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd import job
from aqd.errors import InputError

names = st.from_regex(job.NAME_PATTERN, fullmatch=True)
tag_lists = st.lists(names, max_size=job.MAX_TAGS, unique=True)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
metas = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers(-5, 5) | texts | st.lists(texts), max_size=5
)
keys = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255).filter(
    lambda key: key == key.strip()
)


def request(**fields: Any) -> bytes:
    return json.dumps({"type": "x", **fields}).encode()


@given(tag_lists, metas, keys)
def test_a_body_and_values_give_the_same_request(tags: list[str], meta: dict[str, Any], key: str) -> None:
    parsed = job.parse_request(request(payload=1, tags=tags, meta=meta, idempotency_key=key))
    made = job.validate("x", 1, tags=tags, meta=meta, idempotency_key=key)
    assert parsed.tags == made.tags == tuple(tags)
    assert parsed.idempotency_key == made.idempotency_key == key
    if meta:
        assert json.loads(parsed.meta or "") == json.loads(made.meta or "") == meta
    else:
        assert (parsed.meta, made.meta) == (None, None)


def test_null_counts_as_absent() -> None:
    fields = [name for name in job.JobBody.__struct_fields__ if name not in ("type", "payload")]
    assert job.parse_request(request(**dict.fromkeys(fields))) == job.JobRequest(type="x")


@pytest.mark.parametrize(
    ("field", "value", "named", "word"),
    [
        ("tags", "a", "tags", "array"),
        ("tags", 5, "tags", "array"),
        ("tags", {}, "tags", "array"),
        ("tags", [""], "tags[0]", "name"),
        ("tags", ["a", "b c"], "tags[1]", "name"),
        ("tags", ["a", None], "tags[1]", "null"),
        ("tags", [["a"]], "tags[0]", "array"),
        ("tags", ["x" * 129], "tags[0]", "128"),
        ("tags", ["a", "b", "a"], "tags[2]", "twice"),
        ("tags", [f"t{n}" for n in range(33)], "tags", "32"),
        ("meta", [], "meta", "object"),
        ("meta", "{}", "meta", "object"),
        ("meta", 0, "meta", "object"),
        ("meta", False, "meta", "object"),
        ("meta", {"a": "x" * 65_536}, "meta", "65536"),
        ("idempotency_key", "", "idempotency_key", "255"),
        ("idempotency_key", " a", "idempotency_key", "spaces"),
        ("idempotency_key", "a" * 256, "idempotency_key", "255"),
        ("idempotency_key", "ä", "idempotency_key", "ASCII"),
        ("idempotency_key", 5, "idempotency_key", "number"),
        ("on_conflict", "ignore", "on_conflict", "return, replace, reject"),
        ("on_conflict", True, "on_conflict", "none of"),
        ("on_conflict", "reject", "on_conflict", "without an idempotency_key"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_refused(field: str, value: Any, named: str, word: str) -> None:
    with pytest.raises(InputError) as caught:
        job.parse_request(request(**{field: value}))
    assert caught.value.field == named
    assert word in str(caught.value)
    with pytest.raises(InputError) as by_value:
        job.validate("x", **{field: value})
    assert (by_value.value.field, by_value.value.bound) == (named, caught.value.bound)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (r'{"type":"x","meta":{"a":"\u0000"}}', "meta.a"),
        (r'{"type":"x","meta":{"a\u0000":1}}', "meta"),
        (r'{"type":"x","meta":{"a":["\ud800"]}}', "meta.a[0]"),
        (r'{"type":"x","meta":{"a":1,"a":2}}', "meta"),
        ('{"type":"x","meta":{"a":1e999}}', "meta.a"),
        ('{"type":"x","meta":{"a":NaN}}', "meta.a"),
        (r'{"type":"x","tags":["\u0000"]}', "tags[0]"),
        (r'{"type":"x","tags":["\ud800"]}', "tags[0]"),
        (r'{"type":"x","idempotency_key":"\u0000"}', "idempotency_key"),
        (r'{"type":"x","on_conflict":"\udfff"}', "on_conflict"),
    ],
)
def test_what_json_text_may_not_hold(body: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        job.parse_request(body.encode())
    assert caught.value.field == named


def test_meta_may_be_as_deep_as_a_payload() -> None:
    deep: Any = {}
    for _ in range(63):
        deep = {"a": deep}
    text = json.dumps(deep)
    assert json.loads(job.parse_request(request(meta=deep)).meta or "") == deep
    assert job.validate("x", meta=deep).meta == job.validate("x", meta_json=text.replace(" ", "")).meta
    for make in (
        lambda: job.parse_request(request(meta={"a": deep})),
        lambda: job.validate("x", meta={"a": deep}),
        lambda: job.validate("x", meta_json=json.dumps({"a": deep})),
    ):
        with pytest.raises(InputError, match="64"):
            make()


def test_the_header_and_the_field_must_agree() -> None:
    assert job.parse_request(request(), idempotency_key="h").idempotency_key == "h"
    assert job.parse_request(request(idempotency_key="h"), idempotency_key="h").idempotency_key == "h"
    with pytest.raises(InputError, match="header"):
        job.parse_request(request(idempotency_key="other"), idempotency_key="h")
