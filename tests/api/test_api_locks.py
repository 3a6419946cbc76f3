"""Somebody holds a lock, and does not let go: whoever needs it is told so, and nobody else waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from aqd import client
from aqd.errors import KeyInProgress, Locked
from aqd.http_client import Client
from tests.fixtures.api import ADMIN_KEY, Answer, Api
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until

THREADS = 2
CALLERS = 3 * THREADS
JOB: dict[str, Any] = {"type": "mail", "payload": {"to": 1}}


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CALLERS) as pool:
        yield pool


@pytest.fixture
def api(start_api: Callable[..., Api]) -> Api:
    """Of little patience: 1.2 s for a lock."""
    return start_api(AQD_API_THREADS=str(THREADS), AQD_DATABASE_STATEMENT_TIMEOUT_S="2")


@pytest.fixture
def holder(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """An application, in a transaction that it does not end."""
    with psycopg.connect(database_url) as conn:
        yield conn
        conn.rollback()


def all_wait(jobs: Jobs, count: int = THREADS) -> None:
    """Returns when so many threads of the API wait for a lock: all of them."""
    statement = (
        "select count(*) as n from pg_stat_activity where datname = current_database()"
        " and application_name = 'aqd api' and wait_event_type = 'Lock'"
    )
    wait_until(lambda: jobs.conn.execute(statement).fetchone()["n"] >= count, 30)


def health_answers(api: Api, others: list[Future[Answer]]) -> None:
    """/health in all its spellings, on one connection after the other, while others wait."""
    for method, path in (("GET", "/health"), ("HEAD", "/v1/health"), ("GET", "/v1/health/?x")):
        seen = api.request(method, path)
        assert seen.status == (400 if "?" in path else 200), seen
        assert seen.body if method == "GET" else not seen.body
    assert not all(each.done() for each in others), "it waited behind them"


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_held_key(
    commits: bool, api: Api, holder: psycopg.Connection[Any], callers: ThreadPoolExecutor, jobs: Jobs
) -> None:
    first = client.enqueue(holder, "mail", {"to": 1}, idempotency_key="order-7")
    answers = [callers.submit(api.post, "/jobs", JOB, Idempotency_Key="order-7") for _ in range(CALLERS)]
    all_wait(jobs)
    health_answers(api, answers)
    wait_until(lambda: any(each.done() for each in answers), 30, "one that has given up")
    holder.commit() if commits else holder.rollback()

    seen = [each.result() for each in answers]
    refused = [each for each in seen if each.status == 409]
    made = [each for each in seen if each.status != 409]
    assert refused
    for each in refused:
        assert each.problem(409, "order-7")["type"] == "urn:aqd:key-in-progress"
        assert int(each.headers["retry-after"]) > 0
    assert sorted(each.status for each in made)[: len(made) - 1] == [200] * (len(made) - 1)
    assert {each.status for each in made} <= ({200} if commits else {200, 201})
    last = api.post("/jobs", JOB, Idempotency_Key="order-7")
    assert {each.json["id"] for each in [*made, last]} == {last.json["id"]}
    assert (last.json["id"] == str(first.id)) is commits
    assert jobs.conn.execute("select count(*) as n from aqd.all_jobs").fetchone()["n"] == 1


def test_a_locked_row(
    api: Api, holder: psycopg.Connection[Any], callers: ThreadPoolExecutor, jobs: Jobs
) -> None:
    id = jobs.add()
    holder.execute("select from aqd.jobs where id = %s for update", [id])
    answers = [callers.submit(api.admin, "POST", f"/jobs/{id}/cancel") for _ in range(CALLERS)]
    all_wait(jobs)
    health_answers(api, answers)
    for each in answers:
        assert each.result().problem(503, "lock")["type"] == "urn:aqd:locked"
        assert int(each.result().headers["retry-after"]) > 0
    assert api.get(f"/jobs/{id}").json["status"] == "QUEUED"
    holder.rollback()
    assert api.admin("POST", f"/jobs/{id}/cancel").status == 200


def test_a_key_whose_job_is_locked_is_not_in_progress(
    api: Api, holder: psycopg.Connection[Any], jobs: Jobs
) -> None:
    """It is the job that replace cannot have."""
    asked = {**JOB, "delay_s": 60, "idempotency_key": "k"}
    made = api.post("/jobs", asked)
    holder.execute("select from aqd.jobs where id = %s for update", [made.json["id"]])
    seen = api.post("/jobs", {**asked, "priority": 5, "on_conflict": "replace"})
    assert seen.problem(503, "lock")["type"] == "urn:aqd:locked"
    assert api.post("/jobs", asked).json["outcome"] == "existing"


def test_a_held_key_in_a_batch(api: Api, holder: psycopg.Connection[Any], jobs: Jobs) -> None:
    client.enqueue(holder, "mail", {"to": 1}, idempotency_key="b")
    before = api.post("/jobs", {**JOB, "idempotency_key": "c"}).json["id"]
    batch = [
        JOB,
        {**JOB, "idempotency_key": "c"},
        {**JOB, "idempotency_key": "b"},
        {**JOB, "idempotency_key": "a"},
        {**JOB, "idempotency_key": "c", "priority": 7},
        {**JOB, "idempotency_key": "a"},
        {"type": ""},
    ]
    whole = api.post("/jobs/batch", {"jobs": batch[:-1]})
    assert whole.problem(409, "nothing was stored")["type"] == "urn:aqd:key-in-progress"
    assert int(whole.headers["retry-after"]) > 0
    assert jobs.conn.execute("select count(*) as n from aqd.jobs").fetchone()["n"] == 1

    apart = api.post("/jobs/batch", {"jobs": batch, "atomic": False})
    results = apart.json["results"]
    assert [each["status"] for each in results] == [201, 200, 409, 201, 409, 200, 400]
    assert results[2]["problem"]["type"] == "urn:aqd:key-in-progress"
    assert results[4]["problem"]["type"] == "urn:aqd:idempotency-conflict"
    assert (results[1]["id"], results[5]["id"]) == (before, results[3]["id"])
    assert {name: apart.json[name] for name in ("created", "existing", "refused")} == {
        "created": 2,
        "existing": 2,
        "refused": 3,
    }
    assert jobs.conn.execute("select count(*) as n from aqd.jobs").fetchone()["n"] == 3
    # That connection waits as long as before for the next one's lock.
    seen = api.post("/jobs", {**JOB, "idempotency_key": "b"})
    assert seen.problem(409)["type"] == "urn:aqd:key-in-progress"


def test_many_held_keys_in_a_batch_end_in_time(api: Api, holder: psycopg.Connection[Any], jobs: Jobs) -> None:
    """A thousand of them: our own patience with a statement is not over before."""
    keys = [f"k{n}" for n in range(1000)]
    client.enqueue_many(holder, [{"type": "mail", "idempotency_key": key} for key in keys])
    batch = [{"type": "mail", "idempotency_key": key} for key in [*keys[1:], "free"]]
    seen = api.post("/jobs/batch", {"jobs": batch, "atomic": False})
    assert seen.status == 200, seen
    assert (seen.json["created"], seen.json["refused"]) == (1, 999)


def test_the_client_comes_again(
    api: Api, holder: psycopg.Connection[Any], callers: ThreadPoolExecutor, jobs: Jobs
) -> None:
    first = client.enqueue(holder, "mail", idempotency_key="k")
    url = f"http://127.0.0.1:{api.port}"
    with Client(url, retries=0) as once, pytest.raises(KeyInProgress, match="another transaction"):
        once.enqueue("mail", idempotency_key="k")
    with Client(url, retries=30) as aqd:
        again = callers.submit(aqd.enqueue, "mail", idempotency_key="k")
        all_wait(jobs, 1)
        holder.commit()
        assert (again.result().id, again.result().outcome) == (str(first.id), "existing")
    holder.execute("select from aqd.jobs where id = %s for update", [first.id])
    key = ADMIN_KEY
    with Client(url, key=key, retries=0) as once, pytest.raises(Locked, match="lock"):
        once.delete(first.id)
    with Client(url, key=key, retries=30) as aqd:
        done = callers.submit(aqd.delete, first.id)
        all_wait(jobs, 1)
        holder.rollback()
        assert done.result()
    assert jobs.conn.execute("select count(*) as n from aqd.all_jobs").fetchone()["n"] == 0
