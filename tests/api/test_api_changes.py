"""Changing by HTTP: one job, many at a time, queues. What the statements do: tests/sql/test_change.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aqd import store
from aqd.claims import ClaimBook, ClaimedJob
from aqd.config import Database
from tests.fixtures.api import ADMIN_KEY, Answer, Api
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until

ACTIONS = ("retry", "cancel", "delete", "discard")


@pytest.fixture
def node(database_url: str) -> Iterator[store.Connection]:
    """The connection of one that claims and records."""
    with store.connect(Database(url=database_url), "tests") as conn:
        yield conn


def claim(node: store.Connection, count: int = 1) -> list[ClaimedJob]:
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    return book.claim(node, count)


def fail(node: store.Connection, count: int = 1, error: str = "boom") -> list[int]:
    """Let the jobs that are due fail for good; their ids."""
    failures = [
        store.Failure(job.id, job.token, "failed", error, "Traceback …", None, 0.0)
        for job in claim(node, count)
    ]
    return sorted(store.record_failed(node, failures))


def complete(node: store.Connection) -> int:
    (job,) = claim(node)
    store.record_completed(node, [store.Completion(job.id, job.token, "1", 0.0)])
    return job.id


def send(api: Api, method: str, path: str, document: Any = None, **headers: str) -> Answer:
    """With the admin key; a document of None sends no body."""
    given: dict[str, str | bytes] = {"x-admin-key": ADMIN_KEY.encode(), **headers}
    body = None
    if document is not None:
        body = document if isinstance(document, str | bytes) else json.dumps(document)
        given.setdefault("Content-Type", "application/json")
    elif method == "POST":
        body = b""
    return api.request(method, path, body, given)


def count(jobs: Jobs) -> list[tuple[str, int]]:
    rows = jobs.conn.execute("select state, count(*)::int as n from aqd.all_jobs group by 1 order by 1")
    return [(row["state"], row["n"]) for row in rows]


# --- one job ----------------------------------------------------------------------------------------


def test_patch_changes_a_waiting_job(api: Api, jobs: Jobs) -> None:
    id = jobs.add(delay_s=3600)
    answer = send(api, "PATCH", f"/jobs/{id}", {"priority": 50, "run_at": "2031-02-03T04:05:06+01:00"})
    assert answer.status == 200
    assert answer.json == {
        "id": str(id),
        "jobId": str(id),
        "status": "QUEUED",
        "type": "fate",
        "queue": "default",
        "priority": 50,
        "run_at": "2031-02-03T03:05:06Z",
        "created_at": api.get(f"/jobs/{id}").json["created_at"],
    }
    seen = api.get(f"/jobs/{id}").json
    assert (seen["priority"], seen["run_at"]) == (50, "2031-02-03T03:05:06Z")
    assert send(api, "PATCH", f"/v1/jobs/{id}", {"delay_s": 0}).json["priority"] == 50


def test_patch_of_what_does_not_wait(api: Api, jobs: Jobs, node: store.Connection) -> None:
    id = jobs.add()
    (job,) = claim(node)
    problem = send(api, "PATCH", f"/jobs/{id}", {"priority": 1}).problem(409, "only a QUEUED job")
    assert problem["type"] == "urn:aqd:wrong-state"
    store.record_completed(node, [store.Completion(job.id, job.token, None, 0.0)])
    send(api, "PATCH", f"/jobs/{id}", {"priority": 1}).problem(409, "COMPLETED")
    send(api, "PATCH", "/jobs/999", {"priority": 1}).problem(404, "no job 999")
    send(api, "PATCH", "/jobs/x", {"priority": 1}).problem(404)


@pytest.mark.parametrize(
    ("document", "field", "bound"),
    [
        ("{}", None, None),
        ('{"priority": 101}', "priority", "-100..100"),
        ('{"priority": -101}', "priority", "-100..100"),
        ('{"priority": "5"}', "priority", "-100..100"),
        ('{"priority": true}', "priority", "-100..100"),
        ('{"priority": null}', "priority", "-100..100"),
        ('{"priority": 1.5}', "priority", "-100..100"),
        ('{"priority": 1e400}', "priority", None),
        ('{"priority": NaN}', "priority", None),
        ('{"priority": 99999999999999999999}', "priority", None),
        ('{"priority": 1, "priority": 2}', None, None),
        ('{"delay_s": -1}', "delay_s", "0..316224000"),
        ('{"delay_s": 316224001}', "delay_s", "0..316224000"),
        ('{"delay_s": null}', "delay_s", None),
        ('{"run_at": null}', "run_at", None),
        ('{"delay_s": 1, "run_at": "2031-01-01T00:00:00Z"}', "delay_s", None),
        ('{"run_at": "2031-01-01T00:00:00"}', "run_at", "RFC 3339"),
        ('{"run_at": "\\u0000"}', "run_at", None),
        ('{"run_at": "\\ud800"}', "run_at", None),
        ('{"run_at": 5}', "run_at", None),
        ('{"run_at": "1969-01-01T00:00:00Z"}', "run_at", "1970-01-01..9998-12-31"),
        ('{"queue": "other"}', "queue", None),
        ('{"pri\\u0000ority": 1}', None, None),
        ("[]", None, None),
        ("null", None, None),
        ("5", None, None),
        ("", None, None),
        ("{", None, None),
        ("[" * 200_000, None, None),
    ],
)
def test_patch_is_checked(shared_api: Api, document: str, field: str | None, bound: str | None) -> None:
    made = shared_api.post("/jobs", {"type": "fate", "delay_s": 3600}).json["id"]
    before = shared_api.get(f"/jobs/{made}").json
    problem = send(shared_api, "PATCH", f"/jobs/{made}", document).problem(400)
    assert problem.get("field") == field
    if bound is not None:
        assert problem["bound"] == bound
    assert shared_api.get(f"/jobs/{made}").json == before


def test_delete_removes_what_does_not_run(api: Api, jobs: Jobs, node: store.Connection) -> None:
    jobs.add()
    finished = complete(node)
    jobs.add()
    (failed,) = fail(node)
    waits = jobs.add(delay_s=3600)
    for id, state in ((finished, "COMPLETED"), (failed, "FAILED"), (waits, "QUEUED")):
        answer = send(api, "DELETE", f"/jobs/{id}")
        assert answer.status == 200
        assert answer.json == {"id": str(id), "jobId": str(id), "status": state}
        send(api, "DELETE", f"/jobs/{id}").problem(404)
        api.get(f"/jobs/{id}").problem(404)
    running = jobs.add()
    claim(node)
    send(api, "DELETE", f"/jobs/{running}").problem(409, "cancel it first")
    assert count(jobs) == [("PROCESSING", 1)]
    assert api.admin("GET", "/admin/failed-jobs?resolved=true").json["failed_jobs"] == []


def test_discard_says_why(api: Api, jobs: Jobs, node: store.Connection) -> None:
    jobs.add()
    (id,) = fail(node)
    answer = send(api, "POST", f"/jobs/{id}/discard", {"reason": "customer left"})
    assert answer.status == 200
    assert answer.json == {"id": str(id), "jobId": str(id), "status": "CANCELLED"}
    row = jobs.conn.execute("select resolution, note, discarded_by from aqd.failed_jobs").fetchone()
    assert row == {"resolution": "discarded", "note": "customer left", "discarded_by": "admin"}
    (record,) = api.admin("GET", "/admin/failed-jobs?resolved=true").json["failed_jobs"]
    assert (record["resolution"], record["note"], record["discarded_by"]) == tuple(row.values())
    send(api, "POST", f"/jobs/{id}/discard", {"reason": "again"}).problem(409, "CANCELLED")
    assert api.admin("POST", f"/jobs/{id}/retry").status == 409


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({}, "reason"),
        ({"reason": ""}, "reason"),
        ({"reason": "  "}, "reason"),
        ({"reason": None}, "reason"),
        ({"reason": "x" * 1001}, "reason"),
        ({"reason": "a\0b"}, "reason"),
        ({"reason": ["x"]}, "reason"),
        ({"reason": "x", "note": "y"}, "note"),
    ],
)
def test_a_reason_is_checked(shared_api: Api, document: Any, field: str) -> None:
    assert send(shared_api, "POST", "/jobs/1/discard", document).problem(400)["field"] == field
    many = {"ids": ["1"], **document}
    assert send(shared_api, "POST", "/jobs/discard", many).problem(400)["field"] == field


# --- many -------------------------------------------------------------------------------------------


def test_a_group_of_failures_is_retried(api: Api, jobs: Jobs, node: store.Connection) -> None:
    """F38, from the list of groups to the end: what one looks at is what one retries."""
    jobs.add_many(5)
    broken = fail(node, 3, "cannot reach 10.0.0.1")
    other = fail(node, 2, "out of cheese")
    groups = api.admin("GET", "/admin/failed-jobs?group_by=type,error").json["groups"]
    (group,) = [each for each in groups if "reach" in each["error"]]
    trial = send(api, "POST", "/jobs/retry?dry_run=true", {"filter": group["filter"]})
    assert trial.json == {
        "dry_run": True,
        "matched": 3,
        "changed": 0,
        "skipped": 0,
        "more": False,
        "results": None,
        "window": None,
    }
    assert count(jobs) == [("FAILED", 5)]
    done = send(api, "POST", "/jobs/retry", {"filter": group["filter"]})
    assert done.json == trial.json | {"dry_run": False, "changed": 3}
    assert [jobs.state(id) for id in broken + other] == ["QUEUED"] * 3 + ["FAILED"] * 2
    assert send(api, "POST", "/jobs/retry", {"filter": group["filter"]}).json["matched"] == 0
    gone = send(api, "POST", "/jobs/discard", {"all": True, "reason": "known"})
    assert (gone.json["changed"], gone.json["matched"]) == (2, 2)
    assert count(jobs) == [("CANCELLED", 2), ("QUEUED", 3)]


def test_ids_are_told_one_by_one(api: Api, jobs: Jobs, node: store.Connection) -> None:
    jobs.add_many(2)
    one, two = fail(node, 2)
    waits = jobs.add(delay_s=60)
    given = {"ids": [str(two), str(waits), "999", str(one), str(one)]}
    trial = send(api, "POST", "/v1/jobs/retry?dry_run=true", given).json
    assert [(r["id"], r["changed"], r["detail"]) for r in trial["results"]] == [
        (str(two), False, None),
        (str(waits), False, "QUEUED; only a job that is FAILED can be retried"),
        ("999", False, "there is no such job"),
        (str(one), False, None),
    ]
    assert (trial["matched"], trial["changed"], trial["skipped"]) == (2, 0, 2)
    done = send(api, "POST", "/jobs/retry", given).json
    assert [(r["id"], r["changed"], r["status"]) for r in done["results"]] == [
        (str(two), True, "QUEUED"),
        (str(waits), False, "QUEUED"),
        ("999", False, None),
        (str(one), True, "QUEUED"),
    ]
    assert (done["matched"], done["changed"], done["skipped"], done["more"]) == (2, 2, 2, False)


def test_cancel_and_delete_by_filter(api: Api, jobs: Jobs, node: store.Connection) -> None:
    for tag in ("a", "b"):
        for _ in range(3):
            jobs.conn.execute("select aqd.enqueue('fate', tags => array[%s])", [tag])
    (running,) = claim(node)
    done = send(api, "POST", "/jobs/cancel", {"filter": {"tag": "a"}}).json
    assert (done["matched"], done["changed"]) == (3, 3)
    assert count(jobs) == [("CANCELLED", 2), ("PROCESSING", 1), ("QUEUED", 3)]
    assert jobs.get(running.id)["cancel_requested_at"] is not None
    done = send(api, "POST", "/jobs/delete", {"filter": {"state": ["CANCELLED", "QUEUED"], "type": "fate"}})
    assert (done.json["matched"], done.json["changed"]) == (5, 5)
    assert count(jobs) == [("PROCESSING", 1)]


def test_deleting_finds_what_the_list_shows(api: Api, jobs: Jobs, node: store.Connection) -> None:
    """Also how far back: a filter without an index over history is bounded, and says so, in both."""
    jobs.conn.execute(
        "select aqd.create_history_partition((now() at time zone 'UTC')::date - n) from generate_series(2, 30) n"
    )
    for _ in range(2):
        jobs.add(queue="q")
        complete(node)
    jobs.conn.execute("update aqd.job_history set finished_at = now() - interval '20 days' where id = 1")
    listed = api.get("/jobs?queue=q&order=oldest").json
    trial = send(api, "POST", "/jobs/delete?dry_run=true", {"filter": {"queue": "q"}}).json
    assert trial["matched"] == len(listed["jobs"]) == 1
    assert trial["window"]["reason"] == listed["window"]["reason"]
    wide = {"queue": "q", "finished_after": "2020-01-01T00:00:00Z"}
    done = send(api, "POST", "/jobs/delete", {"filter": wide}).json
    assert (done["changed"], done["window"]) == (2, None)


def test_a_filter_that_takes_too_long_is_refused(start_api: Any, jobs: Jobs) -> None:
    """400 with advice, not 503: waiting does not help, asking for less does. And nothing is changed."""
    api = start_api(AQD_DATABASE_STATEMENT_TIMEOUT_S="1")
    jobs.add_many(20)
    jobs.conn.execute("update aqd.jobs set state = 'FAILED', last_error = 'boom'")
    jobs.conn.execute(
        """create or replace function aqd.error_line(error text) returns text language sql as $$
           select pg_sleep(0.5)::text || error $$"""
    )
    given = {"filter": {"error_hash": "0" * 16}}
    for path in ("/jobs/retry", "/jobs/retry?dry_run=true"):
        problem = send(api, "POST", path, given).problem(400, "too many jobs")
        assert problem["type"] == "urn:aqd:too-broad"
    assert count(jobs) == [("FAILED", 20)]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("{}", None),
        ('{"ids": []}', "ids"),
        ('{"ids": null}', "ids"),
        ('{"ids": "1"}', "ids"),
        ('{"ids": [1]}', "ids[0]"),
        ('{"ids": {"1": true}}', "ids"),
        (json.dumps({"ids": ["1"] * 1001}), "ids"),
        ('{"ids": ["0"]}', "ids[0]"),
        ('{"ids": ["1", "x"]}', "ids[1]"),
        ('{"ids": ["9223372036854775808"]}', "ids[0]"),
        ('{"ids": ["1\\u0000"]}', "ids[0]"),
        (json.dumps({"ids": [str(n) for n in range(1, 1002)]}), "ids"),
        ('{"ids": ["1"], "all": true}', None),
        ('{"ids": ["1"], "filter": {"type": "x"}}', None),
        ('{"filter": {"type": "x"}, "all": true}', None),
        ('{"all": false}', "all"),
        ('{"all": 1}', "all"),
        ('{"filter": {}}', "filter"),
        ('{"filter": {"type": null}}', "filter"),
        ('{"filter": null}', "filter"),
        ('{"filter": "QUEUED"}', "filter"),
        ('{"filter": [["state", "QUEUED"]]}', "filter"),
        ('{"filter": {"type": ""}}', "filter.type"),
        ('{"filter": {"type": 99999999999999999999}}', "filter.type"),
        ('{"filter": {"state": []}}', "filter.state"),
        ('{"filter": {"state": {"QUEUED": 1}}}', "filter.state"),
        ('{"filter": {"typ": "x"}}', "filter.typ"),
        ('{"filter": {"state": "PAUSED"}}', "filter.state"),
        ('{"filter": {"error": ""}}', "filter.error"),
        ('{"filter": {"error": "a\\u0000"}}', "filter.error"),
        ('{"filter": {"error_hash": "xyz"}}', "filter.error_hash"),
        ('{"filter": {"created_after": "2031-01-01T00:00:00"}}', "filter.created_after"),
        (
            '{"filter": {"created_after": "2031-01-01T00:00:00Z", "created_before": "2030-01-01T00:00:00Z"}}',
            "filter.created_before",
        ),
        ('{"filter": {"tag": "a", "tag": "b"}}', "filter"),
        ('{"every": true}', "every"),
        ("[]", None),
        ("null", None),
        ("", None),
        ('{"filter": ' * 50_000, None),
    ],
)
def test_what_does_not_say_which_jobs(shared_api: Api, action: str, document: str, field: str | None) -> None:
    if action == "discard" and document.startswith('{"') and document.endswith("}"):
        document = document[:-1] + ', "reason": "x"}'
    elif action == "discard" and document == "{}":
        document = '{"reason": "x"}'
    problem = send(shared_api, "POST", f"/jobs/{action}", document).problem(400)
    assert problem.get("field") == field


@pytest.mark.parametrize(
    ("action", "states"),
    [
        ("retry", ["QUEUED", "PROCESSING", "COMPLETED", "CANCELLED"]),
        ("discard", ["QUEUED", "PROCESSING", "COMPLETED", "CANCELLED"]),
        ("cancel", ["FAILED", "COMPLETED", "CANCELLED"]),
        ("delete", ["PROCESSING"]),
    ],
)
def test_a_state_that_the_action_is_not_for(shared_api: Api, action: str, states: list[str]) -> None:
    for state in states:
        document = {"filter": {"state": state}} | ({"reason": "x"} if action == "discard" else {})
        problem = send(shared_api, "POST", f"/jobs/{action}", document).problem(400, state)
        assert problem["field"] == "filter.state"


@pytest.mark.parametrize("value", ["", "yes", "1", "TRUE", "true&dry_run=false"])
def test_a_trial_is_never_mistaken(api: Api, jobs: Jobs, value: str) -> None:
    """Whatever is not understood must not be taken for "do it"."""
    jobs.add()
    send(api, "POST", f"/jobs/cancel?dry_run={value}", {"all": True}).problem(400)
    send(api, "POST", "/jobs/cancel?dryrun=true", {"all": True}).problem(400)
    assert count(jobs) == [("QUEUED", 1)]


def test_parallel_retries_of_all(api: Api, jobs: Jobs, node: store.Connection) -> None:
    """F38: one transition for each failure, and every answer is one of order."""
    jobs.add_many(200)
    assert len(fail(node, 200)) == 200
    bodies = itertools.cycle([{"all": True}, {"filter": {"type": "fate"}}])
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(
                lambda body: send(api, "POST", "/jobs/retry", body), [next(bodies) for _ in range(16)]
            )
        )
    assert {answer.status for answer in answers} == {200}
    assert sum(answer.json["changed"] for answer in answers) == 200
    found = jobs.conn.execute(
        "select count(*)::int as n from aqd.jobs where retries = 1 and state = 'QUEUED'"
    )
    assert found.fetchone() == {"n": 200}


def test_a_database_that_goes_away_between_batches(api: Api, jobs: Jobs) -> None:
    """What was changed before stays changed, and the answer does not claim that nothing was."""
    jobs.add_many(1200)
    jobs.conn.execute(
        """create function cut() returns trigger language plpgsql as $$
           begin
               perform pg_terminate_backend(pg_backend_pid());
               return null;
           end $$"""
    )
    jobs.conn.execute(
        "create trigger cut after update on aqd.jobs for each row when (new.id = 1100) execute function cut()"
    )
    problem = send(api, "POST", "/jobs/cancel", {"all": True}).problem(503, "1000 had been changed")
    assert problem["type"] == "urn:aqd:outcome-unknown"
    assert count(jobs) == [("CANCELLED", 1000), ("QUEUED", 200)]
    jobs.conn.execute("drop trigger cut on aqd.jobs")
    answer = wait_until(lambda: (a := send(api, "POST", "/jobs/cancel", {"all": True})).status == 200 and a)
    assert answer.json["changed"] == 200


def test_everything_needs_the_key(shared_api: Api) -> None:
    body = json.dumps({"all": True})
    for method, path in [
        *(("POST", f"/jobs/{action}") for action in ACTIONS),
        ("PATCH", "/jobs/1"),
        ("DELETE", "/jobs/1"),
        ("POST", "/jobs/1/discard"),
        ("PATCH", "/queues/q"),
        ("POST", "/queues/q/pause"),
        ("POST", "/queues/q/resume"),
    ]:
        answer = shared_api.request(method, path, body, {"Content-Type": "application/json"})
        answer.problem(401)


# --- queues -----------------------------------------------------------------------------------------


def test_queues_are_paused_resumed_and_limited(api: Api, jobs: Jobs) -> None:
    paused = send(api, "POST", "/queues/mail/pause")
    assert paused.status == 200
    assert paused.json == {
        "queue": "mail",
        "paused": True,
        "max_running": None,
        "changed_at": paused.json["changed_at"],
        "changed_by": "admin",
    }
    assert paused.json["changed_at"].endswith("Z")
    assert send(api, "POST", "/queues/mail/pause").json == paused.json
    limited = send(api, "PATCH", "/v1/queues/mail", {"max_running": 3}).json
    assert (limited["paused"], limited["max_running"]) == (True, 3)
    resumed = send(api, "POST", "/queues/mail/resume").json
    assert (resumed["paused"], resumed["max_running"]) == (False, 3)
    both = send(api, "PATCH", "/queues/mail", {"max_running": None, "paused": True}).json
    assert (both["paused"], both["max_running"]) == (True, None)
    untouched = send(api, "POST", "/queues/never.heard-of:it/resume").json
    assert untouched == {
        "queue": "never.heard-of:it",
        "paused": False,
        "max_running": None,
        "changed_at": None,
        "changed_by": None,
    }


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("{}", None),
        ('{"max_running": 0}', "max_running"),
        ('{"max_running": -1}', "max_running"),
        ('{"max_running": 1000001}', "max_running"),
        ('{"max_running": 1e9999}', "max_running"),
        ('{"max_running": "5"}', "max_running"),
        ('{"max_running": true}', "max_running"),
        ('{"paused": null}', "paused"),
        ('{"paused": "yes"}', "paused"),
        ('{"pause": true}', "pause"),
        ("[]", None),
    ],
)
def test_queue_settings_are_checked(shared_api: Api, document: str, field: str | None) -> None:
    assert send(shared_api, "PATCH", "/queues/q", document).problem(400).get("field") == field


@pytest.mark.parametrize("name", ["%00", "a%20b", "%C3%BC", "%FF", "x" * 129, "%ED%A0%80"])
def test_a_queue_has_a_name(shared_api: Api, name: str) -> None:
    for action in ("pause", "resume"):
        answer = send(shared_api, "POST", f"/queues/{name}/{action}")
        assert answer.status in (400, 404)
        answer.problem(answer.status)
    assert send(shared_api, "PATCH", f"/queues/{name}", {"paused": True}).status in (400, 404)
