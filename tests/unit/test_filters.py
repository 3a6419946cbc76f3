"""Filters over jobs: what is refused, with which field and bound."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from aqd.api.filters import FIELDS, FilterBody
from aqd.api.render import LISTED
from aqd.errors import InputError
from aqd.store.filters import ANY, JobFilter, job_filter

NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "field", "bound"),
    [
        ({"state": "queued"}, "state", "QUEUED, PROCESSING, COMPLETED, FAILED, CANCELLED"),
        ({"state": []}, "state", "QUEUED, PROCESSING, COMPLETED, FAILED, CANCELLED"),
        ({"state": ["FAILED", 5]}, "state", "QUEUED, PROCESSING, COMPLETED, FAILED, CANCELLED"),
        ({"state": 5}, "state", "QUEUED, PROCESSING, COMPLETED, FAILED, CANCELLED"),
        ({"type": ""}, "type", "1..128 characters of A-Z a-z 0-9 _ . : / -"),
        ({"queue": "a b"}, "queue", "1..128 characters of A-Z a-z 0-9 _ . : / -"),
        ({"queue": "\0"}, "queue", "1..128 characters of A-Z a-z 0-9 _ . : / -"),
        ({"tag": "ü"}, "tag", "1..128 characters of A-Z a-z 0-9 _ . : / -"),
        ({"created_after": "2026-11-30"}, "created_after", "RFC 3339"),
        ({"created_before": datetime(2026, 11, 30)}, "created_before", None),
        ({"finished_after": 5}, "finished_after", "RFC 3339"),
        ({"finished_before": "9999-01-01T00:00:00Z"}, "finished_before", "1970-01-01..9998-12-31"),
        ({"created_after": NOW, "created_before": NOW}, "created_before", None),
        ({"finished_after": NOW, "finished_before": NOW.replace(year=2025)}, "finished_before", None),
        ({"error": ""}, "error", "1..200"),
        ({"error": "x" * 201}, "error", "1..200"),
        ({"error": "a\0"}, "error", None),
        ({"error": "\ud800"}, "error", None),
        ({"error": 5}, "error", None),
        ({"error_hash": "xyz"}, "error_hash", "16 hexadecimal digits"),
        ({"error_hash": "0123456789ABCDEF"}, "error_hash", "16 hexadecimal digits"),
        ({"ids": []}, "ids", "1..1000"),
        ({"ids": range(1, 1002)}, "ids", "1..1000"),
        ({"ids": ["1", "x"]}, "ids[1]", "1..9223372036854775807"),
        ({"ids": [0]}, "ids[0]", "1..9223372036854775807"),
        ({"ids": [1.0]}, "ids[0]", "1..9223372036854775807"),
        ({"ids": [True]}, "ids[0]", "1..9223372036854775807"),
        ({"ids": "123"}, "ids", None),
        ({"ids": 5}, "ids", None),
        # What nothing can match.
        ({"state": "COMPLETED", "error": "x"}, "error", None),
        ({"state": ["COMPLETED", "CANCELLED"], "error_hash": "0" * 16}, "error_hash", None),
        ({"state": "FAILED", "finished_after": NOW}, "finished_after", None),
        ({"error": "x", "finished_before": NOW}, "error", None),
    ],
    ids=str,
)
def test_refused(given: dict[str, Any], field: str, bound: Any) -> None:
    with pytest.raises(InputError) as caught:
        job_filter(**given)
    assert (caught.value.field, caught.value.bound) == (field, bound)


def test_taken() -> None:
    made = job_filter(
        state="FAILED", ids=["5", 3, 5], created_after="2026-11-30T01:00:00+01:00", error="Ünïcode 100%"
    )
    assert made == JobFilter(states=("FAILED",), ids=(5, 3), created_after=NOW, error="Ünïcode 100%")
    assert job_filter(state={"FAILED"}) == job_filter(state=("FAILED", "FAILED"))
    assert job_filter() == ANY
    assert ANY.is_empty
    assert not made.is_empty


def test_a_body_says_the_same() -> None:
    text = (
        b'{"state": ["FAILED", "QUEUED"], "tag": "t", "created_before": "2026-11-30T00:00:00Z", "type": null}'
    )
    body = msgspec.json.decode(text, type=FilterBody)
    assert body.checked() == job_filter(state=["FAILED", "QUEUED"], tag="t", created_before=NOW)


def test_fields_of_a_list() -> None:
    assert set(FIELDS) - set(LISTED) == {"payload", "result", "output"}
    assert set(LISTED) <= set(FIELDS)
