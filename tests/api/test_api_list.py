"""Lists over HTTP: filters, order, fields, pages, windows, and what is refused."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest

from aqd import client, store
from aqd.errors import InputError
from tests.fixtures.api import Api, running_api
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import Postgres

# Jobs 1 to 24 in every state; the records of the failed ones, of two kinds.
WORLD = """
    insert into aqd.jobs (id, run_at, created_at, type, queue, state, attempt, last_error, tags, meta, payload)
    select n, now(), now() - (30 - n) * interval '1 hour', case when n % 2 = 0 then 'mail' else 'pdf' end,
           'q' || n % 3, case when n % 4 = 0 then 'FAILED' else 'QUEUED' end, 1,
           case when n % 4 = 0 then 'Row ' || n || ' is BAD' || chr(10) || 'more' end,
           case when n % 5 = 0 then array['five', 'n:' || n] end, jsonb_build_object('n', n),
           jsonb_build_object('text', repeat('x', 2000), 'n', n)
    from generate_series(1, 16) as n;
    insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,
                                 priority, state, type, queue, payload, result, output, tags)
    select n, now() - (24 - n) * interval '1 second', now(), now() - (30 - n) * interval '1 hour', 1, 0, 0, 0, 0,
           case when n % 2 = 0 then 'COMPLETED' else 'CANCELLED' end, 'pdf', 'q' || n % 3, '{"n": 1}', '[1]', 'said',
           case when n % 5 = 0 then array['five'] end
    from generate_series(17, 24) as n;
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, reason, error, traceback)
    select id, now() - id * interval '1 minute', 1, type, queue, 'failed', 'exception', last_error, 'Traceback …'
    from aqd.jobs where state = 'FAILED' order by id;
    update aqd.failed_jobs set kind = 'crashed', reason = 'signal', resolved_at = now(), resolution = 'completed'
    where job_id = 4;
    insert into aqd.job_attempts (job_id, finished_at, attempt, kind, error)
    select 8, now(), n, 'failed', 'e' || n from generate_series(1, 7) as n;
"""


@pytest.fixture(scope="module")
def world(pg: Postgres) -> Any:
    """An API over jobs in every state, which the tests only look at."""
    with running_api(pg) as api:
        with psycopg.connect(api.database_url) as conn:
            conn.execute(WORLD.encode())
        yield api


def listed(api: Api, **query: Any) -> dict[str, Any]:
    answer = api.get(f"/jobs?{urlencode(query)}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def ids(found: dict[str, Any]) -> list[int]:
    return [int(job["id"]) for job in found["jobs"]]


def created(api: Api, id: int) -> str:
    moment: str = api.get(f"/jobs/{id}").json["created_at"]
    return moment


def test_filters(world: Api) -> None:
    assert ids(listed(world)) == list(range(24, 0, -1))
    assert ids(listed(world, state="FAILED")) == [16, 12, 8, 4]
    assert ids(listed(world, state="FAILED,CANCELLED")) == [23, 21, 19, 17, 16, 12, 8, 4]
    assert ids(listed(world, tag="five")) == [20, 15, 10, 5]
    assert ids(listed(world, tag="n:10")) == [10]
    assert ids(listed(world, error="row 1")) == [16, 12]
    assert ids(listed(world, error="%")) == []
    assert ids(listed(world, type="mail", queue="q1", state="QUEUED")) == [10]
    assert ids(listed(world, created_after=created(world, 22))) == [24, 23, 22]
    assert ids(listed(world, created_before=created(world, 3))) == [2, 1]
    finished = world.get("/jobs/20").json["finished_at"]
    assert ids(listed(world, finished_after=finished)) == [24, 23, 22, 21, 20]
    assert ids(listed(world, finished_before=finished)) == [19, 18, 17]
    assert ids(listed(world, order="oldest", limit=3)) == [1, 2, 3]


def test_a_plus_in_a_moment_may_have_become_a_space(world: Api) -> None:
    moment = created(world, 22).replace("Z", "+00:00")
    assert ids(listed(world, created_after=moment)) == [24, 23, 22]
    assert [job["id"] for job in world.get(f"/jobs?created_after={moment}").json["jobs"]] == [
        "24",
        "23",
        "22",
    ]


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_pages_in_both_orders(world: Api, order: str) -> None:
    seen: list[int] = []
    page = listed(world, order=order, limit=5)
    while True:
        seen += ids(page)
        if page["next_cursor"] is None:
            break
        page = listed(world, order=order, limit=5, cursor=page["next_cursor"])
    assert seen == sorted(range(1, 25), reverse=order == "newest")


def test_a_cursor_is_bound_to_its_order(world: Api) -> None:
    for order, other in (("newest", "oldest"), ("oldest", "newest")):
        cursor = listed(world, order=order, limit=5)["next_cursor"]
        problem = world.get(f"/jobs?order={other}&cursor={cursor}").problem(400, "cursor")
        assert problem["field"] == "cursor"
        assert listed(world, order=order, limit=5, cursor=cursor)["jobs"]


def test_fields(world: Api) -> None:
    (job, *_) = listed(world, state="COMPLETED")["jobs"]
    assert not {"payload", "result", "output"} & set(job)
    assert {"id", "status", "type", "tags", "meta", "progress", "error", "finished_at"} <= set(job)
    (job, *_) = listed(world, state="COMPLETED", fields="payload,output,result,status")["jobs"]
    assert job == {"id": "24", "status": "COMPLETED", "payload": {"n": 1}, "result": [1], "output": "said"}
    (job, *_) = listed(world, type="mail", fields="id")["jobs"]
    assert job == {"id": "16"}
    (job, *_) = listed(world, type="mail", fields="meta,tags,id,id")["jobs"]
    assert job == {"id": "16", "meta": {"n": 16}, "tags": []}


def test_the_window_is_stated(world: Api) -> None:
    assert listed(world)["window"] is None
    assert listed(world, queue="q1", type="pdf")["window"] is None
    assert listed(world, queue="q1", state="FAILED")["window"] is None
    found = listed(world, queue="q1")
    assert ids(found) == [22, 19, 16, 13, 10, 7, 4, 1]
    assert found["window"]["finished_after"].endswith("T00:00:00Z")
    assert found["window"]["finished_before"] is None
    assert "queue" in found["window"]["reason"]
    assert listed(world, queue="q1", finished_after="2020-01-01T00:00:00Z")["window"] is None


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=FAILED,failed", "state"),
        ("state=FAILED,", "state"),
        ("state=" + ",".join(["FAILED"] * 6), "state"),
        ("tag=a%20b", "tag"),
        ("tag=" + "a" * 129, "tag"),
        ("created_after=2026-11-30", "created_after"),
        ("created_after=2026-11-30T00:00:00", "created_after"),
        ("created_before=now", "created_before"),
        ("finished_after=1969-12-31T00:00:00Z", "finished_after"),
        ("finished_before=9999-01-01T00:00:00Z", "finished_before"),
        ("finished_before=2026-02-30T00:00:00Z", "finished_before"),
        ("created_after=2026-11-30T00:00:00Z&created_before=2026-11-30T00:00:00Z", "created_before"),
        ("error=" + "x" * 201, "error"),
        ("error=%00", "error"),
        ("error=", "error"),
        ("error=%ED%A0%80", ""),
        ("error=x&state=COMPLETED", "error"),
        ("error_hash=1", "error_hash"),
        ("error_hash=0123456789abcdef&finished_after=2026-11-30T00:00:00Z", "error_hash"),
        ("state=QUEUED&finished_after=2026-11-30T00:00:00Z", "finished_after"),
        ("order=random", "order"),
        ("order=NEWEST", "order"),
        ("fields=id,secret", "fields"),
        ("fields=id,", "fields"),
        ("fields=" + ",".join(["id"] * 30), "fields"),
        ("cursor=" + "j" * 3000, "cursor"),
        ("ids=1,2", "ids"),
        ("group_by=type", "group_by"),
    ],
)
def test_refused(world: Api, query: str, field: str) -> None:
    assert world.get(f"/jobs?{query}").problem(400).get("field", "") == field


def test_too_many_parameters(world: Api) -> None:
    query = "&".join(f"tag{n}=x" for n in range(51))
    problem = world.get(f"/jobs?{query}").problem(400, "the query string has 51 parameters, at most 50")
    assert problem["bound"] == 50
    world.get(f"/jobs?{query[: query.rindex('&')]}").problem(400, "unknown query parameter")


def test_large_pages_end_early_and_go_on(api: Api, jobs: Jobs) -> None:
    """8 MiB of texts: 20 payloads of 900 kB are three pages of payloads, and one without."""
    jobs.conn.execute(
        "insert into aqd.jobs (type, run_at, payload) select 'big', now(), jsonb_build_object('text', (select"
        " string_agg(md5(n::text || m), '') from generate_series(1, 28000) m)) from generate_series(1, 20) n"
    )
    assert len(api.get("/jobs").json["jobs"]) == 20
    seen: list[str] = []
    path = "/jobs?fields=payload"
    pages = 0
    while True:
        answer = api.get(path)
        assert len(answer.body) < 9 << 20
        page = answer.json
        seen += [job["id"] for job in page["jobs"]]
        pages += 1
        if page["next_cursor"] is None:
            break
        path = f"/jobs?fields=payload&cursor={page['next_cursor']}"
    assert (len(seen), len(set(seen)), pages) == (20, 20, 3)


def test_a_list_that_takes_too_long_is_too_broad(start_api: Callable[..., Api], jobs: Jobs) -> None:
    """Not the database's fault, so no 503 that a client would repeat."""
    text = "repeat('Some Long Error ', 1000)"  # 16 kB, to be put into lower case by the server
    jobs.conn.execute(
        f"insert into aqd.jobs (type, run_at, state, last_error) "
        f"select 'noop', now(), 'FAILED', {text} from generate_series(1, 8000)"
    )
    jobs.conn.execute(
        f"insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error) "
        f"select n, now(), 1, 'noop', 'q', 'failed', {text} from generate_series(1, 8000) as n"
    )
    api = start_api(AQD_DATABASE_STATEMENT_TIMEOUT_S="0.1")
    problem = api.get("/jobs?error=nowhere").problem(400, "finished_after")
    assert problem["type"] == "urn:aqd:too-broad"
    problem = api.admin("GET", "/admin/failed-jobs?error=nowhere").problem(400, "failed_after")
    assert problem["type"] == "urn:aqd:too-broad"
    assert api.get("/jobs?limit=1").status == 200


def test_a_list_of_a_locked_table_is_not_too_broad(start_api: Callable[..., Api], jobs: Jobs) -> None:
    api = start_api(AQD_DATABASE_STATEMENT_TIMEOUT_S="0.5")
    api.get("/jobs")
    with jobs.conn.transaction():
        jobs.conn.execute("lock aqd.jobs in access exclusive mode")
        assert api.get("/jobs?error=x").problem(503)["type"] == "urn:aqd:locked"
        assert api.get("/jobs").problem(503)["type"] == "urn:aqd:locked"
    assert api.get("/jobs?error=x").status == 200


# --- attempts


def test_attempts(world: Api) -> None:
    page = world.get("/jobs/8/attempts?limit=4").json
    assert [attempt["error"] for attempt in page["attempts"]] == ["e1", "e2", "e3", "e4"]
    page = world.get(f"/jobs/8/attempts?cursor={page['next_cursor']}").json
    assert [attempt["error"] for attempt in page["attempts"]] == ["e5", "e6", "e7"]
    assert page["next_cursor"] is None
    assert world.get("/v1/jobs/20/attempts").json == {"attempts": [], "next_cursor": None}
    world.get("/jobs/999/attempts").problem(404, "999")
    world.get("/jobs/x/attempts").problem(404)
    assert world.get("/jobs/8/attempts?limit=0").problem(400)["field"] == "limit"
    assert world.get("/jobs/8/attempts?cursor=ajE").problem(400)["field"] == "cursor"


# --- failed jobs


def failed(api: Api, query: str = "") -> dict[str, Any]:
    answer = api.admin("GET", f"/admin/failed-jobs?{query}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def test_failed_jobs(world: Api) -> None:
    def jobs_of(query: str) -> list[str]:
        return [record["job_id"] for record in failed(world, query)["failed_jobs"]]

    assert jobs_of("") == ["16", "12", "8"]
    assert jobs_of("resolved=true") == ["16", "12", "8", "4"]
    assert jobs_of("resolved=true&kind=crashed&reason=signal") == ["4"]
    assert jobs_of("queue=q2") == ["8"]
    assert jobs_of("type=pdf") == []
    assert jobs_of("error=row%208") == ["8"]
    moment = failed(world)["failed_jobs"][1]["failed_at"]
    assert jobs_of(f"failed_after={moment}") == ["12", "8"]
    assert jobs_of(f"failed_before={moment}") == ["16"]
    first = failed(world, "limit=2")
    assert set(first) == {"failed_jobs", "next_cursor"}
    assert [r["job_id"] for r in failed(world, f"cursor={first['next_cursor']}")["failed_jobs"]] == ["8"]


def test_groups_of_failed_jobs(world: Api) -> None:
    found = failed(world, "group_by=type,error")
    assert set(found) == {"groups", "grouped", "more"}
    (group,) = found["groups"]
    assert (found["grouped"], found["more"]) == (3, False)
    assert (group["type"], group["error"], group["count"]) == ("mail", "Row # is BAD", 3)
    assert (group["failed_now"], group["sample_job_id"]) == (3, "16")
    assert group["first_failed_at"] < group["last_failed_at"]
    # As it is, it finds the jobs; 4 is FAILED too, though its record is settled.
    query = {name.replace("status", "state"): value for name, value in group["filter"].items()}
    assert set(query) == {"state", "type", "error_hash"}
    assert ids(listed(world, **query)) == [16, 12, 8, 4]
    (by_type,) = failed(world, "group_by=type&queue=q2")["groups"]
    assert by_type["error"] is None
    assert by_type["filter"] == {"state": "FAILED", "type": "mail", "queue": "q2"}
    (by_error,) = failed(world, "group_by=error&error=bad")["groups"]
    assert by_error["type"] is None
    assert by_error["filter"] == {"state": "FAILED", "error": "bad", "error_hash": query["error_hash"]}
    assert failed(world, "group_by=type&type=none") == {"groups": [], "grouped": 0, "more": False}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("kind=No", "kind"),
        ("reason=a%20b", "reason"),
        ("failed_after=x", "failed_after"),
        ("failed_after=2026-11-30T00:00:00Z&failed_before=2026-11-29T00:00:00Z", "failed_before"),
        ("group_by=queue", "group_by"),
        ("group_by=type,error,type", "group_by"),
        ("group_by=type&cursor=ZjE", "cursor"),
        ("error=%00", "error"),
        ("state=FAILED", "state"),
    ],
)
def test_failed_jobs_refused(world: Api, query: str, field: str) -> None:
    assert world.admin("GET", f"/admin/failed-jobs?{query}").problem(400)["field"] == field


# --- the client


def test_the_asynchronous_client_lists_the_same(world: Api) -> None:
    async def look() -> None:
        async with await psycopg.AsyncConnection.connect(world.database_url, autocommit=True) as conn:
            # More often than psycopg waits before it prepares: a generic plan would read everything.
            for _ in range(8):
                page = await client.list_jobs_async(conn, state="FAILED", fields=("payload",), limit=3)
                assert [job.id for job in page.jobs] == [16, 12, 8]
            assert json.loads(page.jobs[0].payload or "")["n"] == 16
            prepared = await conn.execute(
                "select count(*) from pg_prepared_statements where statement like '%list_jobs%'"
            )
            assert await prepared.fetchone() == (0,)
            assert [job.id async for job in client.jobs_async(conn, tag="five", oldest=True)] == [
                5,
                10,
                15,
                20,
            ]
            with pytest.raises(InputError, match="tag"):
                await client.list_jobs_async(conn, tag="a b")

    asyncio.run(look())


def test_the_client_goes_over_all_pages(world: Api) -> None:
    with psycopg.connect(world.database_url) as conn:
        assert [job.id for job in client.jobs(conn)] == list(range(24, 0, -1))
        page = client.list_jobs(conn, limit=20)
        assert isinstance(page, store.Listing)
        assert page.next == 5
        assert len(client.list_jobs(conn, after=page.next).jobs) == 4
        assert [job.id for job in client.jobs(conn, ids=["3", 20, 999])] == [20, 3]


def test_a_query_string_may_be_long_but_not_without_end(world: Api) -> None:
    assert listed(world, error="é" * 200)["jobs"] == []
    assert world.get("/jobs?error=" + quote("é" * 201)).problem(400)["bound"] in (200, "1..200")
