"""A value is refused everywhere for the same reason, with the same bound."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from aqd.errors import InputError
from aqd.store import job_filter
from tests.fixtures.api import ADMIN_KEY, Answer, Api


def send(api: Api, method: str, path: str, document: object) -> Answer:
    headers = {"x-admin-key": ADMIN_KEY.encode(), "Content-Type": "application/json"}
    return api.request(method, path, json.dumps(document), headers)


def refusal(api: Api, method: str, path: str, document: object) -> tuple[str, Any]:
    """What is said about the field that the problem names, and the bound."""
    problem = send(api, method, path, document).problem(400)
    assert problem["type"] == "urn:aqd:invalid-value"
    return problem["detail"], problem.get("bound")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 101),
        ("priority", 1.0),
        ("priority", "5"),
        ("priority", True),
        ("priority", 10**30),
        ("delay_s", -1),
        ("delay_s", "1"),
        ("run_at", 5),
        ("run_at", "tomorrow"),
        ("run_at", "2026-01-01 00:00:00Z"),
        ("run_at", "1969-12-31T00:00:00Z"),
    ],
)
def test_a_job_submitted_or_changed(shared_api: Api, field: str, value: Any) -> None:
    words = refusal(shared_api, "POST", "/jobs", {"type": "fate", field: value})
    assert refusal(shared_api, "PATCH", "/jobs/1", {field: value}) == words
    assert words[0].startswith(f"{field}: ")


MOMENTS = (
    "2026-01-01 00:00:00Z",
    "2026-01-01T00:00:00+0100",
    "2026-01-01T00:00:00+01",
    "2026-01-01T00:00:00.1234567890Z",
    "2026-01-01T00:00:00",
    "20260101T000000Z",
    "1969-12-31T00:00:00Z",
    5,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("created_after", value) for value in MOMENTS),
        ("created_before", MOMENTS[1]),
        ("finished_after", MOMENTS[2]),
        ("finished_before", MOMENTS[3]),
        ("state", "PAUSED"),
        ("state", ["QUEUED", "PAUSED"]),
        ("state", []),
        ("state", 5),
        ("type", "a b"),
        ("queue", ""),
        ("tag", ["a"]),
        ("error", ""),
        ("error", "x" * 201),
        ("error", 5),
        ("error_hash", "xyz"),
    ],
)
def test_a_filter_in_a_body(shared_api: Api, field: str, value: Any) -> None:
    """As in Python, and what is refused here is refused in the query string, too."""
    with pytest.raises(InputError) as caught:
        job_filter(**{field: value})
    words = (f"filter.{caught.value}", caught.value.bound)
    assert refusal(shared_api, "POST", "/jobs/cancel?dry_run=true", {"filter": {field: value}}) == words
    if isinstance(value, str):
        shared_api.get(f"/jobs?{field}={quote(value)}").problem(400)


@pytest.mark.parametrize("value", ["2026-01-01t00:00:00z", "2026-01-01T00:00:00.123456789+14:00"])
def test_moments_that_are_taken_everywhere(shared_api: Api, value: str) -> None:
    path = "/jobs/cancel?dry_run=true"
    assert send(shared_api, "POST", path, {"filter": {"created_after": value}}).status == 200
    assert shared_api.get(f"/jobs?created_after={quote(value)}").status == 200


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "max_running: 0 is not between 1 and 1000000"),
        (1.0, "max_running: must be a whole number, not 1.0"),
        ("5", "max_running: must be a whole number, not a string"),
    ],
)
def test_the_limit_of_a_queue(shared_api: Api, value: Any, words: str) -> None:
    found = refusal(shared_api, "PATCH", "/queues/q", {"max_running": value})
    assert found == (words, "1..1000000")


def test_bodies_of_all_routes(shared_api: Api) -> None:
    for method, path in [
        ("POST", "/jobs"),
        ("PATCH", "/jobs/1"),
        ("POST", "/jobs/1/discard"),
        ("POST", "/jobs/retry"),
        ("PATCH", "/queues/q"),
    ]:
        assert refusal(shared_api, method, path, []) == ("the body must be a JSON object, not an array", None)
        assert refusal(shared_api, method, path, {"x y": 1})[0].startswith(
            '["x y"]: unknown field; known are '
        )
    blank = ("reason: is blank: say why", "1..1000")
    assert refusal(shared_api, "POST", "/jobs/1/discard", {"reason": " "}) == blank
    assert refusal(shared_api, "POST", "/jobs/discard", {"ids": ["1"], "reason": " "}) == blank
