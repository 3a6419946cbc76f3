"""The line in the log about each change: who, what, which, how it ended (F69)."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from aqd import store
from aqd.claims import ClaimBook
from aqd.config import Database
from tests.fixtures.api import ADMIN_KEY, Answer, Api
from tests.fixtures.processes import wait_until

SUBMIT, READ, BOTH, ADMIN = (f"{word}-0123456789abcdef" for word in ("submit", "read", "both", "admin"))
NAMED = f"app:submit:{SUBMIT}, grafana:read:{READ},both:submit+read:{BOTH},ops:admin:{ADMIN}"
JOB = {"type": "mail", "payload": {}}


def submit(api: Api, **headers: str) -> Answer:
    return api.post("/jobs", JOB, **headers)


def audit(api: Api, count: int) -> list[dict[str, Any]]:
    """The lines about changes, which must be so many in the end."""

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in api.log if line.startswith("{")]
        return [line for line in found if line["event"].startswith("change")]

    wait_until(lambda: len(lines()) >= count)
    assert len(lines()) == count, lines()
    return lines()


def test_every_change_is_written_down_with_the_keys_name(start_api: Callable[..., Api]) -> None:
    api = start_api(AQD_API_KEYS=NAMED)
    job = submit(api, x_api_key=SUBMIT).json["id"]
    api.post(f"/v1/jobs/{job}/cancel", x_api_key=ADMIN)
    api.admin("POST", f"/jobs/{job}/retry")
    api.post("/jobs", {"type": "mail", "prio": 1}, x_api_key=SUBMIT)
    api.get("/jobs", x_api_key=READ)
    api.post("/jobs/cancel?dry_run=true", {"filter": {"type": "mail"}}, x_api_key=ADMIN)
    api.post("/jobs/cancel", {"filter": {"type": "mail"}}, x_api_key=ADMIN)
    lines = audit(api, 5)
    seen = [(line["event"], line["key"], line["action"], line["status"]) for line in lines]
    assert seen == [
        ("change", "app", "post_jobs", 201),
        ("change", "ops", "post_jobs_id_cancel", 200),
        ("change failed", "admin", "post_jobs_id_retry", 409),
        ("change failed", "app", "post_jobs", 400),
        ("change", "ops", "post_jobs_cancel", 200),
    ]
    assert lines[0]["made"] == job
    assert [line.get("id") for line in lines[1:]] == [job, job, None, None]
    assert (lines[4]["request"], lines[4]["changed"]) == ('{"filter":{"type":"mail"}}', 0)
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    assert lines[2]["reason"] == "urn:aqd:wrong-state"


def test_refused_changes_are_written_down_but_not_without_end(start_api: Callable[..., Api]) -> None:
    api = start_api(AQD_API_KEYS=NAMED)
    api.post("/jobs/1/cancel", x_api_key=SUBMIT).problem(403)
    for _ in range(40):
        api.post("/jobs", JOB, x_api_key="wr0ng-wr0ng-wr0ng-wr0ng").problem(401)
    api.stop()
    found = [json.loads(line) for line in api.log if "change refused" in line]
    assert (found[0]["key"], found[0]["status"], found[0]["level"]) == ("app", 403, "warning")
    assert {line["status"] for line in found[1:]} == {401}
    assert len(found) <= 40
    everything = "\n".join(api.log)
    for key in (SUBMIT, READ, BOTH, ADMIN, ADMIN_KEY, "wr0ng"):
        assert key not in everything
        assert hashlib.sha256(key.encode()).hexdigest() not in everything


def test_submitting_without_a_key_gives_no_line(start_api: Callable[..., Api]) -> None:
    api = start_api(ADMIN_API_KEY=ADMIN)
    for _ in range(3):
        assert submit(api).status == 201
    submit(api, x_admin_key=ADMIN)
    assert audit(api, 1)[0]["key"] == "admin"


def test_a_line_says_what_was_done_and_only_that(start_api: Callable[..., Api]) -> None:
    api = start_api(AQD_API_KEYS=NAMED)
    headers = {"x_api_key": SUBMIT, "idempotency_key": "one"}
    first = submit(api, **headers)
    assert (first.status, submit(api, **headers).status) == (201, 200)  # the second one: no line
    replacing = JOB | {"priority": 7, "on_conflict": "replace"}
    assert api.post("/jobs", replacing, **headers).json["outcome"] == "replaced"
    keyed = JOB | {"priority": 7, "idempotency_key": "one"}
    assert api.post("/jobs/batch", {"jobs": [keyed]}, x_api_key=SUBMIT).json["existing"] == 1  # no line
    some = {"jobs": [keyed, {"type": "no op"}], "atomic": False}
    assert api.post("/jobs/batch", some, x_api_key=SUBMIT).json["refused"] == 1
    assert api.post("/jobs/batch", {"jobs": [JOB, keyed]}, x_api_key=SUBMIT).json["created"] == 1
    with store.connect(Database(url=api.database_url), "tests") as node:
        node.execute("select aqd.enqueue('runs')")
        book = ClaimBook("node", 30.0)
        book.set_types(frozenset({"runs"}))
        (running,) = book.claim(node, 10)
    assert api.post(f"/jobs/{running.id}/cancel", x_api_key=ADMIN).status == 202
    for trial in ({"filter": {}}, {"ids": []}, {"ids": ["x"]}, {"filter": {"type": "mail"}}):  # no lines
        api.post("/jobs/cancel?dry_run=true", trial, x_api_key=ADMIN)
    api.post("/jobs/cancel", {"filter": {}}, x_api_key=ADMIN).problem(400)
    told = ("event", "action", "status", "made", "id", "created", "replaced", "refused")
    seen = [{name: line[name] for name in told if name in line} for line in audit(api, 6)]
    job = first.json["id"]
    assert seen == [
        {"event": "change", "action": "post_jobs", "status": 201, "made": job},
        {"event": "change", "action": "post_jobs", "status": 200, "id": job, "replaced": 1},
        {"event": "change failed", "action": "post_jobs_batch", "status": 200} | counts(0, 0, 1),
        {"event": "change", "action": "post_jobs_batch", "status": 200} | counts(1, 0, 0),
        {"event": "change", "action": "post_jobs_id_cancel", "status": 202, "id": str(running.id)},
        {"event": "change failed", "action": "post_jobs_cancel", "status": 400},
    ]


def counts(created: int, replaced: int, refused: int) -> dict[str, int]:
    return {"created": created, "replaced": replaced, "refused": refused}
