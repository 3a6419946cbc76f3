"""F64 over HTTP: of all requests under one idempotency key one makes a job; nobody gets 5xx for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from aqd import client
from tests.fixtures.api import ADMIN_KEY, Answer, Api
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until

CALLERS = 100
JOB = {"type": "mail", "payload": {"to": 1}}


def stored(url: str) -> int:
    with psycopg.connect(url) as conn:
        found = conn.execute("select count(*) from aqd.all_jobs").fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture
def apis(start_api: Callable[..., Api]) -> list[Api]:
    """Two, as on two machines."""
    return [start_api(AQD_API_WORKERS="2"), start_api()]


def at_once(apis: list[Api], meanwhile: Callable[[], None] = lambda: None, **headers: str) -> list[Answer]:
    """The same POST from many callers to all APIs."""
    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [
            pool.submit(apis[n % len(apis)].request, "POST", "/jobs", BODY, HEADERS | headers, 60.0)
            for n in range(CALLERS)
        ]
        meanwhile()
        return [call.result() for call in calls]


BODY = b'{"type":"mail","payload":{"to":1}}'
HEADERS: dict[str, str | bytes] = {"Content-Type": "application/json", "Idempotency-Key": "order-7"}


def test_a_hundred_at_once(apis: list[Api], database_url: str) -> None:
    answers = at_once(apis)
    assert sorted(answer.status for answer in answers) == [200] * (CALLERS - 1) + [201]
    assert len({answer.json["id"] for answer in answers}) == 1
    assert {answer.headers["location"] for answer in answers} == {f"/jobs/{answers[0].json['id']}"}
    assert stored(database_url) == 1


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_behind_a_held_transaction(commits: bool, apis: list[Api], database_url: str) -> None:
    """An application holds the key in its own transaction: all threads of both APIs wait for it."""
    with psycopg.connect(database_url) as winner, psycopg.connect(database_url, autocommit=True) as watcher:
        first = client.enqueue(winner, "mail", {"to": 1}, idempotency_key="order-7")

        def end() -> None:
            wait_until(
                lambda: (
                    watcher.execute(
                        "select count(*) >= 8 from pg_stat_activity where datname = current_database()"
                        " and wait_event_type = 'Lock'"
                    ).fetchone()
                    == (True,)
                ),
                30,
                "requests that wait for the key",
            )
            winner.commit() if commits else winner.rollback()

        answers = at_once(apis, end)
    ids = {answer.json["id"] for answer in answers}
    assert len(ids) == 1
    assert stored(database_url) == 1
    statuses = sorted(answer.status for answer in answers)
    if commits:
        assert ids == {str(first.id)}
        assert statuses == [200] * CALLERS
    else:
        assert ids != {str(first.id)}
        assert statuses == [200] * (CALLERS - 1) + [201]


def test_another_request_under_the_key(api: Api, database_url: str) -> None:
    made = api.post("/jobs", {**JOB, "idempotency_key": "k"})
    assert (made.status, made.json["outcome"]) == (201, "created")
    for other, differs in (
        ({"payload": {"to": 2}}, ["payload"]),
        ({"priority": 3, "tags": ["a"], "delay_s": 5}, ["delay_s", "priority", "tags"]),
        ({"type": "sms", "queue": "q", "meta": {"a": 1}}, ["meta", "queue", "type"]),
        ({"run_at": "2030-01-01T00:00:00Z", "timeout_s": 3, "max_attempts": 1}, None),
    ):
        problem = api.post("/jobs", {**JOB, "idempotency_key": "k", **other}).problem(409)
        assert problem["type"] == "urn:aqd:idempotency-conflict"
        assert problem["job_id"] == made.json["id"]
        assert problem["differs"] == (differs or ["max_attempts", "run_at", "timeout_s"])
        assert all(name in problem["detail"] for name in problem["differs"])
    assert stored(database_url) == 1


def test_header_and_field_are_the_same(api: Api) -> None:
    first = api.post("/jobs", JOB, Idempotency_Key="one")
    assert first.status == 201
    for again in (
        api.post("/jobs", {**JOB, "idempotency_key": "one"}),
        api.post("/jobs", JOB, Idempotency_Key='"one"'),
        api.post("/v1/jobs", {**JOB, "idempotency_key": "one"}, Idempotency_Key="one"),
    ):
        assert (again.status, again.json["id"], again.json["outcome"]) == (200, first.json["id"], "existing")
    assert again.headers["location"] == f"/v1/jobs/{first.json['id']}"
    problem = api.post("/jobs", {**JOB, "idempotency_key": "two"}, Idempotency_Key="one").problem(400)
    assert problem["field"] == "idempotency_key"
    quoted = api.post("/jobs", JOB, Idempotency_Key=r'"a\"b\\,"')
    assert api.post("/jobs", {**JOB, "idempotency_key": 'a"b\\,'}).json["id"] == quoted.json["id"]


def test_replace_and_reject(api: Api) -> None:
    first = api.post("/jobs", {**JOB, "idempotency_key": "k", "delay_s": 60})
    replaced = api.post(
        "/jobs", {"type": "sms", "idempotency_key": "k", "delay_s": 90, "on_conflict": "replace"}
    )
    assert (replaced.status, replaced.json["id"]) == (200, first.json["id"])
    assert (replaced.json["outcome"], replaced.json["type"]) == ("replaced", "sms")
    assert api.get(f"/jobs/{first.json['id']}").json["type"] == "sms"
    problem = api.post("/jobs", {"type": "sms", "idempotency_key": "k", "on_conflict": "reject"}).problem(409)
    assert (problem["type"], problem["job_id"]) == ("urn:aqd:idempotency-conflict", first.json["id"])
    assert problem["differs"] == []


def test_the_key_of_a_job_that_has_ended(api: Api, jobs: Jobs) -> None:
    """Completed, failed, cancelled, deleted: the first job, as it is now."""
    made = {
        end: api.post("/jobs", JOB, Idempotency_Key=end).json["id"]
        for end in ("COMPLETED", "FAILED", "CANCELLED", "gone")
    }
    jobs.conn.execute(
        "with done as (delete from aqd.jobs where id = %s returning *)"
        " insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,"
        " priority, state, type, queue, payload)"
        " select id, now(), run_at, created_at, 1, 0, 0, 0, priority, 'COMPLETED', type, queue, payload from done",
        [made["COMPLETED"]],
    )
    jobs.conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [made["FAILED"]])
    assert api.admin("POST", f"/jobs/{made['CANCELLED']}/cancel").status == 200
    jobs.conn.execute("delete from aqd.jobs where id = %s", [made["gone"]])
    for end, id in made.items():
        again = api.post("/jobs", JOB, Idempotency_Key=end)
        assert (again.status, again.json["id"]) == (200, id)
        assert again.json["status"] == (None if end == "gone" else end)
        api.post("/jobs", {"type": "other"}, Idempotency_Key=end).problem(409)


def test_keys_live_as_long_as_configured(start_api: Callable[..., Api], database_url: str) -> None:
    api = start_api(AQD_JOBS_IDEMPOTENCY_TTL_HOURS="0.5")
    first = api.post("/jobs", JOB, Idempotency_Key="k").json["id"]
    batch = {"jobs": [{**JOB, "idempotency_key": "l"}]}
    assert api.post("/jobs/batch", batch).status == 200
    with psycopg.connect(database_url) as conn:
        found = conn.execute(
            "select key, round(extract(epoch from expires_at - now()) / 60) from aqd.idempotency_keys order by key"
        ).fetchall()
        assert [(key, 28 <= minutes <= 30) for key, minutes in found] == [("k", True), ("l", True)]
        conn.execute("update aqd.idempotency_keys set expires_at = now()")
    again = api.post("/jobs", JOB, Idempotency_Key="k")
    assert again.status == 201
    assert again.json["id"] != first


def test_named_api_keys_have_scopes_of_their_own(start_api: Callable[..., Api], database_url: str) -> None:
    """Two applications that number their orders do not meet; one without a named key shares with SQL."""
    secret = {"shop": "shop-secret-0123456789", "crm": "crm-secret-01234567890"}
    api = start_api(AQD_API_KEYS=",".join(f"{name}:submit:{key}" for name, key in secret.items()))
    made = {
        name: [api.post("/jobs", JOB, Idempotency_Key="1", x_api_key=key) for _ in range(2)]
        for name, key in secret.items()
    }
    assert [[each.status for each in answers] for answers in made.values()] == [[201, 200]] * 2
    assert made["shop"][0].json["id"] != made["crm"][0].json["id"]
    batch = {"jobs": [{**JOB, "idempotency_key": "1"}]}
    found = api.post("/jobs/batch", batch, x_api_key=secret["crm"]).json["results"][0]["id"]
    assert found == made["crm"][0].json["id"]
    with psycopg.connect(database_url) as conn:
        assert client.enqueue(conn, "mail", {"to": 1}, idempotency_key="1").outcome == "created"
    open_api = start_api()
    assert open_api.post("/jobs", JOB, Idempotency_Key="1").status == 200
    assert stored(database_url) == 3


# --- bad keys -------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_stored(shared_api: Api) -> Iterator[None]:
    yield
    assert stored(shared_api.database_url) == 0


@pytest.mark.usefixtures("_nothing_stored")
@pytest.mark.parametrize(
    "key",
    [
        "",
        " ",
        " k",
        "k ",
        "\0",
        "a\nb",
        "\ud800",
        "é",
        "e\u0301",
        "\uffff",
        "x" * 256,
        "x" * 10_000,
        5,
        True,
        [],
        {},
    ],
    ids=lambda key: ascii(key)[:20],
)
def test_what_is_no_key_in_a_body(shared_api: Api, key: Any) -> None:
    problem = shared_api.post("/jobs", {**JOB, "idempotency_key": key}).problem(400)
    assert problem["field"] == "idempotency_key"
    assert problem["type"] == "urn:aqd:invalid-value"
    assert problem["bound"]
    problem = shared_api.post("/jobs/batch", {"jobs": [JOB, {**JOB, "idempotency_key": key}]}).problem(400)
    assert problem["field"] == "jobs[1].idempotency_key"


@pytest.mark.usefixtures("_nothing_stored")
@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"   ",
        b'""',
        b'"',
        b'"a',
        b'"a"b',
        b'"a","b"',
        b"a,b",
        "é".encode(),
        b"\xff",
        b"x" * 256,
        b'"' + b"x" * 256 + b'"',
    ],
    ids=lambda key: ascii(key)[:20],
)
def test_what_is_no_key_in_the_header(shared_api: Api, key: bytes) -> None:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    problem = shared_api.request("POST", "/jobs", BODY, headers).problem(400)
    assert problem["field"] == "Idempotency-Key"


@pytest.mark.usefixtures("_nothing_stored")
def test_a_key_given_twice(shared_api: Api) -> None:
    for twice in (
        b"Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
        b"Idempotency-Key: a\r\nidempotency-key: a\r\n",
    ):
        head = b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + twice
        answer = shared_api.raw(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert answer.problem(400)["field"] == "Idempotency-Key"


@pytest.mark.usefixtures("_nothing_stored")
@pytest.mark.parametrize("value", ["", "Return", "ignore", 1, ["return"], "\0"], ids=ascii)
def test_what_is_no_on_conflict(shared_api: Api, value: Any) -> None:
    problem = shared_api.post("/jobs", {**JOB, "idempotency_key": "k", "on_conflict": value}).problem(400)
    assert problem["field"] == "on_conflict"


@pytest.mark.usefixtures("_nothing_stored")
def test_on_conflict_needs_a_key(shared_api: Api) -> None:
    assert shared_api.post("/jobs", {**JOB, "on_conflict": "replace"}).problem(400)["field"] == "on_conflict"


def test_the_admin_key_is_a_scope_of_its_own(api: Api) -> None:
    """And what an open API does not know counts as no key."""
    sent = {"content-type": "application/json", "idempotency-key": "one"}
    keys = ({}, {"x-api-key": "unknown"}, {"x-api-key": ADMIN_KEY.encode()})
    answers = [api.request("POST", "/jobs", b'{"type":"mail"}', sent | key) for key in keys]
    assert [answer.status for answer in answers] == [201, 200, 201]
    with psycopg.connect(api.database_url) as conn:
        found = conn.execute("select scope, job_id from aqd.idempotency_keys order by scope").fetchall()
        assert found == [("", int(answers[1].json["id"])), ("admin", int(answers[2].json["id"]))]
        assert client.enqueue(conn, "mail", idempotency_key="one").id == int(answers[0].json["id"])
