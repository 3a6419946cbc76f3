"""Cancelling, and what a job shows of how it goes and went: progress, reasons, output.

The node's part is played by the statements that a node runs; through a real one: tests/process/test_cancel.py.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import psycopg
import pytest

from aqd import store
from aqd.claims import ClaimBook, ClaimedJob
from aqd.config import Database
from tests.fixtures.api import ADMIN_KEY, Answer, Api
from tests.fixtures.jobs import Jobs

FIELDS = {"id", "jobId", "status", "cancel_requested_at", "finished_at"}


@pytest.fixture
def node(database_url: str) -> Iterator[store.Connection]:
    """The connection of one that claims and records."""
    with store.connect(Database(url=database_url), "tests") as conn:
        yield conn


def claim(node: store.Connection) -> ClaimedJob:
    """The one job that is due."""
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    (claimed,) = book.claim(node, 10)
    return claimed


def fail(node: store.Connection, job: ClaimedJob, retry_in_s: float | None, **more: Any) -> None:
    failure = store.Failure(job.id, job.token, "failed", "boom", "Traceback …", retry_in_s, 0.0, **more)
    assert set(store.record_failed(node, [failure])) == {job.id}


def cancel(api: Api, id: int) -> Answer:
    return api.admin("POST", f"/jobs/{id}/cancel")


def final(answer: Answer, status: str) -> dict[str, Any]:
    """The document of an answer that says how the job has ended."""
    assert answer.status == 200, answer
    assert "location" not in answer.headers
    document: dict[str, Any] = answer.json
    assert set(document) == FIELDS
    assert document["id"] == document["jobId"]
    assert document["status"] == status
    return document


def asked(answer: Answer) -> dict[str, Any]:
    """The document of an answer that says: it still runs, look again."""
    assert answer.status == 202, answer
    document: dict[str, Any] = answer.json
    assert set(document) == FIELDS
    assert (document["status"], document["finished_at"]) == ("PROCESSING", None)
    assert datetime.fromisoformat(document["cancel_requested_at"]).tzinfo is not None
    assert answer.headers["location"] == f"/jobs/{document['id']}"
    return document


@pytest.mark.parametrize("delay_s", [0, 3600])
def test_what_waits_is_cancelled_at_once(api: Api, jobs: Jobs, delay_s: int) -> None:
    id = jobs.add({"a": 1}, delay_s=delay_s)
    first = final(cancel(api, id), "CANCELLED")
    assert first["cancel_requested_at"] <= first["finished_at"]
    assert final(cancel(api, id), "CANCELLED") == first
    seen = api.get(f"/jobs/{id}").json
    assert {name: seen[name] for name in FIELDS} == first
    assert (seen["payload"], seen["result"], seen["attempts"], seen["attempt"]) == ({"a": 1}, None, [], 0)
    listed = api.get("/jobs?state=CANCELLED").json["jobs"]
    assert [job["id"] for job in listed] == [str(id)]
    assert listed[0]["cancel_requested_at"] == first["cancel_requested_at"]


def test_what_waits_for_a_retry_is_not_retried(api: Api, jobs: Jobs, node: store.Connection) -> None:
    id = jobs.add()
    fail(node, claim(node), 3600.0)
    final(cancel(api, id), "CANCELLED")
    assert [attempt["kind"] for attempt in api.get(f"/jobs/{id}").json["attempts"]] == ["failed"]


ENDS: dict[str, tuple[Callable[[store.Connection, ClaimedJob], Any], str]] = {
    "completed": (
        lambda node, job: store.record_completed(node, [store.Completion(job.id, job.token, "1", 0.0)]),
        "COMPLETED",
    ),
    "failed with a retry": (lambda node, job: fail(node, job, 0.0), "CANCELLED"),
    "failed for good": (lambda node, job: fail(node, job, None), "CANCELLED"),
    "given back": (
        lambda node, job: store.release(node, [store.Release(job.id, job.token, True, "drain", 0.0)], 20),
        "CANCELLED",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_runs_is_asked_to_end(api: Api, jobs: Jobs, node: store.Connection, end: str) -> None:
    id = jobs.add()
    claimed = claim(node)
    document = asked(cancel(api, id))
    assert asked(cancel(api, id)) == document, "asking again changes nothing"
    assert api.get(f"/jobs/{id}").json["cancel_requested_at"] == document["cancel_requested_at"]
    assert api.get("/jobs").json["jobs"][0]["cancel_requested_at"] == document["cancel_requested_at"]
    act, status = ENDS[end]
    act(node, claimed)
    assert api.get(f"/jobs/{id}").json["status"] == status
    last = final(cancel(api, id), status)
    assert last["finished_at"] >= last["cancel_requested_at"] == document["cancel_requested_at"]


def test_what_has_ended_stays_as_it_is(api: Api, jobs: Jobs, node: store.Connection) -> None:
    done = jobs.add()
    ENDS["completed"][0](node, claim(node))
    failed = jobs.add()
    fail(node, claim(node), None)
    for id, status in ((done, "COMPLETED"), (failed, "FAILED")):
        before = api.get(f"/jobs/{id}").json
        for _ in range(2):
            assert final(cancel(api, id), status)["cancel_requested_at"] is None
        assert api.get(f"/jobs/{id}").json == before
    assert api.admin("GET", "/admin/failed-jobs").json["failed_jobs"][0]["resolved_at"] is None


@pytest.mark.parametrize("running", [False, True])
def test_many_at_once(api: Api, jobs: Jobs, node: store.Connection, running: bool) -> None:
    id = jobs.add()
    if running:
        claimed = claim(node)
    with ThreadPoolExecutor(10) as executor:
        answers = list(executor.map(lambda _: cancel(api, id), range(10)))
    check = asked if running else lambda answer: final(answer, "CANCELLED")
    documents = [check(answer) for answer in answers]
    assert all(document == documents[0] for document in documents)
    if running:
        fail(node, claimed, 0.0)
    assert jobs.state(id) == "CANCELLED"
    assert jobs.conn.execute("select count(*) as n from aqd.all_jobs").fetchone() == {"n": 1}


def test_cancels_race_with_claims_and_ends(api: Api, jobs: Jobs, node: store.Connection) -> None:
    """Whatever comes first: the last answer is the final state, and nothing is claimed after it."""
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    with ThreadPoolExecutor(4) as executor:
        for round in range(25):
            id = jobs.add()
            answers = [executor.submit(cancel, api, id) for _ in range(4)]
            for claimed in book.claim(node, 10):
                if round % 2:
                    fail(node, claimed, 0.0)
                else:
                    store.record_completed(node, [store.Completion(claimed.id, claimed.token, "1", 0.0)])
            assert {answer.result().status for answer in answers} <= {200, 202}
            status = cancel(api, id).json["status"]
            assert status in ("CANCELLED", "COMPLETED")
            assert jobs.state(id) == status
    assert book.claim(node, 100) == []


def test_a_body_is_of_no_interest(api: Api, jobs: Jobs) -> None:
    """As for a retry: neither read nor refused; but a parameter is."""
    for body in (b"", b"{}", b"\0\xff", b'{"reason": "x"}'):
        id = jobs.add()
        headers = {"x-admin-key": ADMIN_KEY.encode()}
        final(api.request("POST", f"/jobs/{id}/cancel", body, headers), "CANCELLED")
    id = jobs.add()
    assert api.admin("POST", f"/jobs/{id}/cancel?force=1").problem(400)["field"] == "force"
    assert jobs.state(id) == "QUEUED"


def test_a_locked_job_is_not_waited_for_without_end(start_api: Any, jobs: Jobs, database_url: str) -> None:
    api = start_api(AQD_DATABASE_STATEMENT_TIMEOUT_S="0.5")
    id = jobs.add()
    with psycopg.connect(database_url) as other:
        other.execute("select from aqd.jobs where id = %s for update", [id])
        answer = cancel(api, id)
        answer.problem(503)
        assert answer.headers["retry-after"]
    final(cancel(api, id), "CANCELLED")


# --- how it goes and went --------------------------------------------------------------------------


def test_progress_is_shown_while_there_is_some(api: Api, jobs: Jobs) -> None:
    id = jobs.add()
    assert api.get(f"/jobs/{id}").json["progress"] is None
    for percent, message, wanted in (
        (40.5, "page 2", {"percent": 40.5, "message": "page 2"}),
        (7, None, {"percent": 7.0, "message": None}),
        (None, "\x1b[2J", {"percent": None, "message": "\x1b[2J"}),
    ):
        statement = "update aqd.jobs set progress_percent = %s, progress_message = %s where id = %s"
        jobs.conn.execute(statement, [percent, message, id])
        assert api.get(f"/jobs/{id}").json["progress"] == wanted
        assert api.get("/jobs").json["jobs"][0]["progress"] == wanted


def test_an_attempt_says_why_and_what_was_printed(api: Api, jobs: Jobs, node: store.Connection) -> None:
    id = jobs.add()
    fail(node, claim(node), None, reason="exception", output="line\n\\xff\t")
    (attempt,) = api.get(f"/jobs/{id}").json["attempts"]
    assert (attempt["reason"], attempt["output"]) == ("exception", "line\n\\xff\t")
    (record,) = api.admin("GET", "/admin/failed-jobs").json["failed_jobs"]
    assert (record["kind"], record["reason"]) == ("failed", "exception")


def test_kept_output_of_a_completed_job(api: Api, jobs: Jobs, node: store.Connection) -> None:
    id = jobs.add()
    job = claim(node)
    assert api.get(f"/jobs/{id}").json["output"] is None
    store.record_completed(node, [store.Completion(job.id, job.token, "1", 0.0, output="done\n")])
    assert api.get(f"/jobs/{id}").json["output"] == "done\n"
    assert "output" not in api.get("/jobs").json["jobs"][0]
