"""Submitting, looking, listing, retrying: what the routes answer."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.fixtures.api import Api
from tests.fixtures.jobs import Jobs

README = '{"type":"generate_pdf","payload":{"text":"Hello World"}}'


def rows(url: str) -> int:
    with psycopg.connect(url) as conn:
        found = conn.execute("select count(*) from aqd.all_jobs").fetchone()
    assert found is not None
    return int(found[0])


def fail(url: str, job: str) -> None:
    """What the dispatcher writes when attempts are used up."""
    with psycopg.connect(url) as conn:
        conn.execute(
            "update aqd.jobs set state = 'FAILED', attempt = 2, last_error = 'boom' where id = %s", [job]
        )
        conn.execute(
            "insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error, traceback)"
            " select id, now(), attempt, type, queue, 'failed', 'boom', 'Traceback …' from aqd.jobs where id = %s",
            [job],
        )
        conn.execute(
            "insert into aqd.job_attempts (job_id, started_at, finished_at, attempt, kind, error, wall_s)"
            " values (%s, now(), now(), 1, 'failed', 'boom', 0.5)",
            [job],
        )


def test_the_example_of_the_readme(api: Api) -> None:
    answer = api.post("/jobs", README)
    assert answer.status == 201
    assert answer.headers["content-type"] == "application/json"
    made = answer.json
    assert made["id"] == made["jobId"]
    assert made["id"].isdigit()
    assert made["status"] == "QUEUED"
    assert (made["type"], made["queue"], made["priority"]) == ("generate_pdf", "default", 0)
    assert answer.headers["location"] == f"/jobs/{made['id']}"

    job = api.get(answer.headers["location"]).json
    assert job["id"] == made["id"]
    assert job["status"] == "QUEUED"
    assert job["payload"] == {"text": "Hello World"}
    assert job["result"] is None
    assert job["attempts"] == []
    assert job["created_at"] == made["created_at"]
    assert datetime.fromisoformat(job["run_at"]).tzinfo is not None


def test_all_fields_are_stored(api: Api) -> None:
    run_at = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=123456)
    made = api.post(
        "/jobs",
        {
            "type": "a.b/c",
            "payload": [1, None],
            "queue": "mail",
            "priority": -7,
            "run_at": run_at.isoformat(),
            "max_attempts": 9,
            "timeout_s": 1.5,
        },
    ).json
    job = api.get(f"/jobs/{made['id']}").json
    assert datetime.fromisoformat(job["run_at"]) == run_at
    assert {k: job[k] for k in ("type", "payload", "queue", "priority", "max_attempts", "timeout_s")} == {
        "type": "a.b/c",
        "payload": [1, None],
        "queue": "mail",
        "priority": -7,
        "max_attempts": 9,
        "timeout_s": 1.5,
    }
    delayed = api.post("/jobs", {"type": "x", "delay_s": 3600}).json
    wait = datetime.fromisoformat(delayed["run_at"]) - datetime.fromisoformat(delayed["created_at"])
    assert wait == timedelta(hours=1)


def test_json_comes_back_as_it_was_sent(api: Api) -> None:
    sent = '{"n":[0.10000000000000000001,123456789012345678901234567890,-0.0,1.50],"t":"\\uffff😀\\u0001é"}'
    made = api.post("/jobs", f'{{"type":"x","payload":{sent}}}').json
    body = api.get(f"/jobs/{made['id']}").body.decode()
    for digits in ("0.10000000000000000001", "123456789012345678901234567890", "1.50"):
        assert digits in body
    assert json.loads(body)["payload"]["t"] == "\uffff😀\u0001é"


@pytest.mark.parametrize(
    "id",
    ["0", "-1", "x", "1.0", "9223372036854775808", "1" * 400, "%00", "%FF", "%F0%9F%98%80", "1%2F2", "01"],
)
def test_what_is_no_id_is_not_found(shared_api: Api, id: str) -> None:
    assert shared_api.get(f"/jobs/{id}").problem(404)
    assert shared_api.admin("POST", f"/jobs/{id}/retry").problem(404)
    assert shared_api.admin("POST", f"/jobs/{id}/cancel").problem(404)


@pytest.mark.parametrize("id", ["1", "9223372036854775807"])
def test_a_job_that_does_not_exist(shared_api: Api, id: str) -> None:
    shared_api.get(f"/jobs/{id}").problem(404, id)
    shared_api.admin("POST", f"/jobs/{id}/retry").problem(404, id)
    shared_api.admin("POST", f"/jobs/{id}/cancel").problem(404, id)


def test_pages_are_stable_while_jobs_arrive(api: Api, jobs: Jobs) -> None:
    ids = [str(jobs.add(n)) for n in range(25)]
    seen: list[str] = []
    path = "/jobs?limit=10"
    while True:
        page = api.get(path).json
        assert len(page["jobs"]) <= 10
        assert all("payload" not in job for job in page["jobs"])
        seen += [job["id"] for job in page["jobs"]]
        jobs.add("late")
        if page["next_cursor"] is None:
            break
        path = f"/jobs?limit=10&cursor={page['next_cursor']}"
    assert seen == ids[::-1]


def test_an_exact_page_is_the_last_one(api: Api, jobs: Jobs) -> None:
    jobs.add_many(3)
    assert api.get("/jobs?limit=3").json["next_cursor"] is None
    assert api.get("/jobs?limit=2").json["next_cursor"]
    assert len(api.get("/jobs").json["jobs"]) == 3


def test_filters(api: Api, jobs: Jobs, database_url: str) -> None:
    a = str(jobs.add(type="a", queue="q1"))
    b = str(jobs.add(type="b", queue="q1"))
    c = str(jobs.add(type="b", queue="q2"))
    fail(database_url, c)

    def listed(query: str) -> list[str]:
        return [job["id"] for job in api.get(f"/jobs?{query}").json["jobs"]]

    assert listed("") == [c, b, a]
    assert listed("type=b") == [c, b]
    assert listed("queue=q1") == [b, a]
    assert listed("state=FAILED") == [c]
    assert listed("state=QUEUED&type=b&queue=q1") == [b]
    assert listed("state=COMPLETED") == []
    assert listed("type=unheard-of") == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=%D9%A3", "limit"),
        ("limit=" + "9" * 100, "limit"),
        ("limit=1&limit=2", "limit"),
        ("state=queued", "state"),
        ("state=", "state"),
        ("type=a%20b", "type"),
        ("queue=%00", "queue"),
        ("cursor=x", "cursor"),
        ("cursor=%FF", ""),
        ("cursor=ZjE", "cursor"),  # of the other list
        ("sate=FAILED", "sate"),
        ("STATE=FAILED", "STATE"),
        ("offset=5", "offset"),
        ("%00=1", "\\x00"),
    ],
)
def test_query_parameters_that_are_not_understood(shared_api: Api, query: str, field: str) -> None:
    problem = shared_api.get(f"/jobs?{query}").problem(400)
    if field != "\\x00":
        assert problem.get("field", "") == field


@pytest.mark.parametrize("path", ["/jobs/1?x=1", "/health?x=1"])
def test_no_route_ignores_a_parameter(shared_api: Api, path: str) -> None:
    assert shared_api.get(path).problem(400)["field"] == "x"


def test_nor_does_posting(api: Api, database_url: str) -> None:
    assert api.post("/jobs?queue=q", README).problem(400)["field"] == "queue"
    assert rows(database_url) == 0


def test_a_failed_job_is_seen_retried_and_seen_again(api: Api, jobs: Jobs, database_url: str) -> None:
    job = str(jobs.add({"a": 1}))
    fail(database_url, job)

    record = api.admin("GET", "/admin/failed-jobs").json["failed_jobs"][0]
    assert record["job_id"] == job
    assert (record["error"], record["attempts"], record["status"]) == ("boom", 2, "FAILED")
    seen = api.get(f"/jobs/{job}").json
    assert seen["status"] == "FAILED"
    assert seen["error"] == "boom"
    assert [attempt["error"] for attempt in seen["attempts"]] == ["boom"]
    assert seen["attempts"][0]["wall_s"] == 0.5

    retried = api.admin("POST", f"/jobs/{job}/retry")
    assert retried.status == 200
    assert retried.json["status"] == "QUEUED"
    assert retried.json["id"] == job
    seen = api.get(f"/jobs/{job}").json
    assert (seen["status"], seen["attempt"], seen["retries"], len(seen["attempts"])) == ("QUEUED", 0, 1, 1)
    assert api.admin("POST", f"/jobs/{job}/retry").problem(409, "QUEUED")["type"] == "urn:aqd:wrong-state"
    assert api.admin("GET", "/admin/failed-jobs").json["failed_jobs"][0]["status"] == "QUEUED"


def test_failed_jobs_come_in_pages(api: Api, jobs: Jobs, database_url: str) -> None:
    ids = [str(jobs.add()) for _ in range(5)]
    for job in ids:
        fail(database_url, job)
    first = api.admin("GET", "/admin/failed-jobs?limit=3").json
    rest = api.admin("GET", f"/admin/failed-jobs?limit=3&cursor={first['next_cursor']}").json
    assert [record["job_id"] for record in first["failed_jobs"] + rest["failed_jobs"]] == ids[::-1]
    assert rest["next_cursor"] is None
    assert len(api.admin("GET", "/admin/failed-jobs?resolved=true").json["failed_jobs"]) == 5
    api.admin("GET", "/admin/failed-jobs?resolved=maybe").problem(400, "resolved")


def test_health(api: Api, database_url: str) -> None:
    answer = api.get("/health")
    assert answer.status == 200
    health = answer.json
    assert health["status"] == health["database"] == "ok"
    assert health["schema"]["ok"] is True
    assert health["schema"]["current"] == health["schema"]["wanted"] >= 1
    assert health["nodes"] == {"live": 0}
    with psycopg.connect(database_url) as conn:
        conn.execute(
            "insert into aqd.nodes (node_id, name, pid, generation, slots, version, state, types)"
            " values ('n', 'secret-host', 1, 1, 1, '1', 'running', '{}')"
        )
    answer = api.get("/health")
    assert answer.json["nodes"] == {"live": 1}
    assert b"secret-host" not in answer.body


def test_without_a_schema(start_api: Any, empty_database_url: str) -> None:
    api = start_api(database=empty_database_url)
    health = api.get("/health")
    assert health.status == 503
    assert health.json["schema"]["ok"] is False
    assert "migrate" in health.json["schema"]["reason"]
    for answer in (api.post("/jobs", README), api.get("/jobs"), api.get("/jobs/1")):
        assert answer.problem(503, "aqd db migrate")["type"] == "urn:aqd:schema-mismatch"
        assert answer.headers["retry-after"]


def test_a_fault_of_ours_is_logged_and_not_told(api: Api, database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        conn.execute("alter function aqd.enqueue rename to real_enqueue")
        conn.execute(
            "create function aqd.enqueue(type text, payload jsonb, queue text, priority integer,"
            " run_at timestamptz, delay_s double precision, max_attempts integer, timeout_s double precision,"
            " tags text[], meta jsonb)"
            " returns bigint language sql as 'select 1 / (random() * 0)::bigint /* s3cret */'"
        )
    api.fault_expected = True
    problem = api.post("/jobs", README).problem(500)
    assert problem["type"] == "urn:aqd:internal-error"
    assert "division" not in str(problem)
    line = next(json.loads(line) for line in api.log if "unexpected error" in line)
    assert line["number"] == problem["number"]
    assert "DivisionByZero" in line["error"]
    assert "Traceback" in line["traceback"]
    assert api.get("/health").status == 200
