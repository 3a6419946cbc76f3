"""``POST /jobs/batch``: many jobs in one transaction, each answered; refused whole or in parts; F60 and F61 in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from aqd import client
from tests.fixtures.api import Api
from tests.fixtures.processes import wait_until

JOB: dict[str, Any] = {"type": "x"}


def rows(url: str) -> list[Any]:
    with psycopg.connect(url) as conn:
        return conn.execute("select id, type, payload, queue, tags from aqd.jobs order by id").fetchall()


def batch(*jobs: Any, **more: Any) -> dict[str, Any]:
    return {"jobs": list(jobs), **more}


def test_all_are_stored_in_order(api: Api, database_url: str) -> None:
    sent = [
        {"type": f"t{n}", "payload": [n], "tags": [f"n:{n}"], "queue": "q", "priority": n % 7}
        for n in range(1000)
    ]
    answer = api.post("/jobs/batch", batch(*sent))
    assert answer.status == 200
    document = answer.json
    assert {key: document[key] for key in ("created", "existing", "replaced", "refused")} == {
        "created": 1000,
        "existing": 0,
        "replaced": 0,
        "refused": 0,
    }
    results = document["results"]
    assert [each["index"] for each in results] == list(range(1000))
    assert {each["status"] for each in results} == {201}
    assert all(each["problem"] is None for each in results)
    assert [(row[0], row[1], row[2], row[4]) for row in rows(database_url)] == [
        (int(each["id"]), f"t{n}", [n], [f"n:{n}"]) for n, each in enumerate(results)
    ]
    # Each job is told of as if it had been submitted alone.
    alone = api.post("/jobs", {**sent[3]}).json
    assert results[3]["job"].keys() == alone.keys()
    seen = api.get(f"/jobs/{results[3]['id']}").json
    assert {
        name: results[3]["job"][name]
        for name in ("status", "type", "queue", "priority", "run_at", "created_at")
    } == {name: seen[name] for name in ("status", "type", "queue", "priority", "run_at", "created_at")}


def test_json_is_kept_as_it_was_sent(api: Api) -> None:
    sent = '{"n":[0.10000000000000000001,1.50],"t":"\\uffff😀"}'
    answer = api.post("/jobs/batch", f'{{"jobs": [ {{"type":"x","payload":{sent}}} ] }}').json
    body = api.get(f"/jobs/{answer['results'][0]['id']}").body.decode()
    assert "0.10000000000000000001" in body
    assert "1.50" in body
    assert json.loads(body)["payload"]["t"] == "\uffff😀"


BAD: list[tuple[Any, str | None, str]] = [
    ({}, "type", "missing"),
    ({"type": ""}, "type", "name"),
    ({"type": "x", "priority": 101}, "priority", "100"),
    ({"type": "x", "queue": "\0"}, "queue", "NUL"),
    ({"type": "x", "payload": ["\0"]}, "payload[0]", "NUL"),
    ({"type": "x", "payload": "\ud800"}, "payload", "surrogate"),
    ({"type": "x", "tags": ["a", "a"]}, "tags[1]", "twice"),
    ({"type": "x", "tags": ["\0"]}, "tags[0]", "NUL"),
    ({"type": "x", "tags": "a"}, "tags", "array"),
    ({"type": "x", "tags": ["x"] * 33}, "tags", "32"),
    ({"type": "x", "meta": []}, "meta", "object"),
    ({"type": "x", "meta": {"a": "\0"}}, "meta.a", "NUL"),
    ({"type": "x", "meta": {"\ud800": 1}}, "meta", "surrogate"),
    ({"type": "x", "meta": {"a": "x" * 65_536}}, "meta", "65536"),
    ({"type": "x", "idempotency_key": ""}, "idempotency_key", "key"),
    ({"type": "x", "on_conflict": "replace"}, "on_conflict", "idempotency_key"),
    ({"type": "x", "max_atempts": 1}, "max_atempts", "unknown"),
    ({"type": "x", "run_at": "2030-01-01T00:00:00"}, "run_at", "zone"),
    ({"type": "x", "run_at": "2030-01-01T00:00:00Z", "delay_s": 1}, "delay_s", "both"),
    (None, None, "object"),
    (1, None, "object"),
    ([], None, "object"),
    ("x", None, "object"),
]


def test_atomic_tells_all_faults_and_stores_nothing(api: Api, database_url: str) -> None:
    bad = [each for each, _, _ in BAD]
    problem = api.post("/jobs/batch", batch(JOB, *bad[:10], JOB)).problem(400, "10 jobs")
    assert problem["type"] == "urn:aqd:invalid-value"
    assert problem["field"] == "jobs[1].type"
    assert [each["index"] for each in problem["errors"]] == list(range(1, 11))
    for told, (_, field, word) in zip(problem["errors"], BAD, strict=False):
        assert told.get("field") == field
        assert word in told["detail"]
    assert len(api.post("/jobs/batch", batch(*[{}] * 100)).problem(400, "100 jobs")["errors"]) == 20
    assert rows(database_url) == []


@pytest.mark.parametrize(("bad", "field", "word"), BAD, ids=lambda value: str(value)[:30])
def test_otherwise_each_is_answered(shared_api: Api, bad: Any, field: str | None, word: str) -> None:
    """What would be refused alone is refused in the same words, and its neighbours are stored."""
    document = shared_api.post("/jobs/batch", batch(JOB, bad, JOB, atomic=False)).json
    assert [each["status"] for each in document["results"]] == [201, 400, 201]
    assert (document["created"], document["refused"]) == (2, 1)
    result = document["results"][1]
    assert (result["id"], result["job"]) == (None, None)
    assert result["problem"].get("field") == field
    assert word in result["problem"]["detail"]
    if isinstance(bad, dict):
        assert result["problem"] == shared_api.post("/jobs", bad).problem(400)


def test_all_refused(api: Api, database_url: str) -> None:
    document = api.post("/jobs/batch", batch({}, {}, atomic=False)).json
    assert [each["status"] for each in document["results"]] == [400, 400]
    assert rows(database_url) == []


# --- keys -----------------------------------------------------------------------------------------


def test_keys(api: Api, database_url: str) -> None:
    first = api.post("/jobs", {"type": "x", "idempotency_key": "old"}).json["id"]
    keyed = [
        {"type": "x", "idempotency_key": "new"},
        {"type": "x", "idempotency_key": "old"},
        {"type": "x", "idempotency_key": "new"},
        JOB,
    ]
    document = api.post("/jobs/batch", batch(*keyed)).json
    assert [each["status"] for each in document["results"]] == [201, 200, 200, 201]
    ids = [each["id"] for each in document["results"]]
    assert ids[0] == ids[2]
    assert ids[1] == first
    assert (document["created"], document["existing"]) == (2, 2)
    # A lost answer is asked for again.
    again = api.post("/jobs/batch", batch(*keyed[:3])).json
    assert [each["id"] for each in again["results"]] == ids[:3]
    assert again["existing"] == 3
    assert len(rows(database_url)) == 3


def test_a_key_that_stands_for_another_request(api: Api, database_url: str) -> None:
    first = api.post("/jobs", {"type": "x", "idempotency_key": "old"}).json["id"]
    clash = {"type": "x", "idempotency_key": "old", "priority": 5, "payload": 1}
    problem = api.post("/jobs/batch", batch(JOB, {"type": "x", "idempotency_key": "n"}, clash)).problem(409)
    assert problem["type"] == "urn:aqd:idempotency-conflict"
    assert problem["errors"] == [
        {
            "index": 2,
            "detail": problem["errors"][0]["detail"],
            "job_id": first,
            "differs": ["payload", "priority"],
        }
    ]
    assert (problem["job_id"], problem["differs"]) == (first, ["payload", "priority"])
    assert len(rows(database_url)) == 1, "nothing of the batch"
    document = api.post("/jobs/batch", batch(JOB, clash, atomic=False)).json
    assert [each["status"] for each in document["results"]] == [201, 409]
    assert document["results"][1]["problem"]["job_id"] == first
    # The key that went with the refused batch is free.
    assert api.post("/jobs", {"type": "y", "idempotency_key": "n"}).status == 201


def test_the_header_is_for_one_job(shared_api: Api) -> None:
    problem = shared_api.post("/jobs/batch", batch(JOB), Idempotency_Key="k").problem(400)
    assert problem["field"] == "Idempotency-Key"


def test_the_same_keys_in_opposite_orders_at_once(start_api: Callable[..., Api], database_url: str) -> None:
    apis = [start_api(), start_api()]
    keyed = [{"type": "x", "payload": n, "idempotency_key": f"k{n}"} for n in range(50)]
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(apis[n % 2].post, "/jobs/batch", batch(*(keyed if n % 4 < 2 else keyed[::-1])))
            for n in range(24)
        ]
        answers = [call.result() for call in calls]
    assert {answer.status for answer in answers} == {200}
    assert len(rows(database_url)) == 50
    assert sum(answer.json["created"] for answer in answers) == 50


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_behind_a_held_transaction(commits: bool, api: Api, database_url: str) -> None:
    """One key of a batch is held by an application: the batch waits, and is then whole."""
    with (
        psycopg.connect(database_url) as winner,
        psycopg.connect(database_url, autocommit=True) as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        held = client.enqueue(winner, "x", {}, idempotency_key="k3")
        call = pool.submit(
            api.post, "/jobs/batch", batch(*[{"type": "x", "idempotency_key": f"k{n}"} for n in range(6)])
        )
        wait_until(
            lambda: (
                watcher.execute(
                    "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
                ).fetchone()
                == (1,)
            ),
            30,
        )
        winner.commit() if commits else winner.rollback()
        results = call.result().json["results"]
    assert [each["status"] for each in results] == [201, 201, 201, 200 if commits else 201, 201, 201]
    assert (results[3]["id"] == str(held.id)) == commits
    assert len(rows(database_url)) == 6


# --- the body -------------------------------------------------------------------------------------


def nested(depth: int, *, closed: bool = True) -> str:
    return '{"jobs":[{"type":"x","payload":' + "[" * depth + ("]" * depth + "}]}" if closed else "")


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        ("", None, "empty"),
        ("null", None, "object"),
        ("[]", None, "object"),
        ('[{"type":"x"}]', None, "object"),
        ('"x"', None, "object"),
        ("42", None, "object"),
        ("{", None, "line 1"),
        ("{}", "jobs", "missing"),
        ('{"jobs":null}', "jobs", "null"),
        ('{"jobs":{}}', "jobs", "object"),
        ('{"jobs":"x"}', "jobs", "string"),
        ('{"jobs":[]}', "jobs", "1 to 1000"),
        ('{"jobs":[{"type":"x"},]}', None, "valid JSON"),
        ('{"jobs":[{"type":"x"}]}{}', None, "valid JSON"),
        ('{"jobs":[{"type":"x"}],"jobs":[]}', None, "twice"),
        ('{"jobs":[{"type":"x"}],"jobs":[{"type":"x"}]}', None, "twice"),
        ('{"jobs":[{"type":"x"}],"atomic":true,"atomic":false}', None, "twice"),
        ('{"jobs":[{"type":"x"}],"atomic":1}', "atomic", "true or false"),
        ('{"jobs":[{"type":"x"}],"atomic":null}', "atomic", "true or false"),
        ('{"jobs":[{"type":"x"}],"atomic":"false"}', "atomic", "true or false"),
        ('{"jobs":[{"type":"x"}],"Atomic":false}', "Atomic", "unknown"),
        ('{"jobs":[{"type":"x"}],"\\u0000":1}', None, "NUL"),
        ('{"jobs":[{"type":"x"}],"idempotency_key":"k"}', "idempotency_key", "unknown"),
        ('{"jobs":[{"type":"x","type":"y"}]}', "jobs[0]", "twice"),
        ('{"jobs":[{"type":"x","payload":NaN}]}', "jobs[0].payload", "NaN"),
        ('{"jobs":[{"type":"x","payload":1e400}]}', "jobs[0].payload", "too large"),
        ('{"jobs":[{"type":"x","payload":1' + "0" * 400 + "}]}", "jobs[0].payload", "too large"),
        ('{"jobs":[{"type":"x","payload":"\0"}]}', None, "control character"),
        ('{"jobs":[{"type":"x","payload":"\ud800"}]}', None, "UTF-8"),
        (nested(65), "jobs[0]", "64"),
        (nested(1_000), None, "64"),
        (nested(200_000), None, "64"),
        (nested(200_000, closed=False), None, "64"),
        ('{"jobs":' + "[" * 100_000, None, "64"),
        ('{"a":' * 100_000, None, "64"),
        (json.dumps(batch(*[JOB] * 1001)), "jobs", "1001"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_a_bad_body_is_400_and_named(shared_api: Api, body: str, field: str | None, word: str) -> None:
    before, workers = rows(shared_api.database_url), shared_api.wait_workers()
    problem = shared_api.post("/jobs/batch", body).problem(400, word)
    assert problem.get("field") == field
    assert problem["type"] == "urn:aqd:invalid-value"
    assert rows(shared_api.database_url) == before
    assert shared_api.workers == workers


def test_other_forms(shared_api: Api) -> None:
    body = json.dumps(batch(JOB)).encode()
    shared_api.request("POST", "/jobs/batch", body, {"Content-Type": "text/plain"}).problem(415)
    shared_api.request("POST", "/jobs/batch", body, {}).problem(415)
    shared_api.post("/jobs/batch", json.dumps(batch(JOB)).encode("utf-16")).problem(400)
    shared_api.post("/jobs/batch", b" " * (1 << 20) + body).problem(413)
    assert shared_api.post("/jobs/batch?atomic=false", body).problem(400)["field"] == "atomic"
    assert shared_api.post("/v1/jobs/batch", body).status == 200
