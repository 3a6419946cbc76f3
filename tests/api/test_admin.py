"""``aqd.admin``: changing jobs and queues from Python, synchronously and not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from aqd import admin, client
from aqd.errors import ConflictError, InputError, NotFoundError
from tests.fixtures.jobs import Jobs

SYNC, ASYNC = "sync", "async"


@pytest.fixture(params=[SYNC, ASYNC])
def call(request: pytest.FixtureRequest, database_url: str) -> Callable[..., Any]:
    """``call("update", id, priority=1)``: the function of that name, or its twin, on a connection of an application,
    with rows as it likes them."""

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == SYNC:
            with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as conn:
                return getattr(admin, name)(conn, *args, **kwargs)

        async def twin() -> Any:
            async with await psycopg.AsyncConnection.connect(
                database_url, autocommit=True, row_factory=dict_row
            ) as conn:
                function: Callable[..., Awaitable[Any]] = getattr(admin, f"{name}_async")
                return await function(conn, *args, **kwargs)

        return asyncio.run(twin())

    return run


def failed(jobs: Jobs, count: int = 1, error: str = "boom") -> list[int]:
    """Jobs that have failed, as their rows say it."""
    ids = jobs.add_many(count)
    jobs.conn.execute(
        "update aqd.jobs set state = 'FAILED', last_error = %s where id = any(%s)", [error, ids]
    )
    jobs.conn.execute(
        """insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error)
           select id, now(), 1, type, queue, 'failed', last_error from aqd.jobs where id = any(%s)""",
        [ids],
    )
    return ids


def test_one_job(call: Callable[..., Any], jobs: Jobs) -> None:
    id = jobs.add(delay_s=3600)
    made = call("update", str(id), priority=9, delay_s=5)
    assert (made.id, made.priority, made.state) == (id, 9, "QUEUED")
    assert call("delete", id) == "QUEUED"
    with pytest.raises(NotFoundError):
        call("delete", id)
    (id,) = failed(jobs)
    with pytest.raises(ConflictError, match="only a QUEUED job"):
        call("update", id, priority=1)
    assert call("discard", id, "known", by="anna") == "CANCELLED"
    row = jobs.conn.execute("select resolution, note, discarded_by from aqd.failed_jobs").fetchone()
    assert row == {"resolution": "discarded", "note": "known", "discarded_by": "anna"}


def test_many(call: Callable[..., Any], jobs: Jobs) -> None:
    ids = failed(jobs, 3) + failed(jobs, 2, "out of cheese")
    which = admin.job_filter(error="CHEESE")
    assert call("retry_many", which, dry_run=True).matched == 2
    assert call("retry_many", which).changed == 2
    done = call("retry_many", [str(ids[0]), ids[4]])
    assert [(r.id, r.state, r.refusal is None) for r in done.results] == [
        (ids[0], "QUEUED", True),
        (ids[4], "QUEUED", False),
    ]
    assert call("discard_many", admin.EVERYTHING, "known").changed == 2
    assert jobs.conn.execute("select distinct discarded_by from aqd.failed_jobs order by 1").fetchall() == [
        {"discarded_by": jobs.conn.info.user},
        {"discarded_by": None},
    ]
    assert call("cancel_many", ids).changed == 3
    assert call("delete_many", admin.job_filter(state=["CANCELLED"])).changed == 5
    assert jobs.conn.execute("select count(*)::int as n from aqd.all_jobs").fetchone() == {"n": 0}


def test_queues(call: Callable[..., Any], jobs: Jobs) -> None:
    assert call("pause", "mail", by="anna").paused
    assert call("set_limit", "mail", 3).max_running == 3
    found = call("resume", "mail")
    assert (found.paused, found.max_running, found.changed_by) == (False, 3, jobs.conn.info.user)
    assert call("set_limit", "mail", None).max_running is None


REFUSED: list[tuple[str, list[Any], str]] = [
    ("retry_many", [admin.JobFilter()], "which"),
    ("retry_many", [[]], "which"),
    ("retry_many", ["all"], "which"),
    ("retry_many", [["1\0"]], "which[0]"),
    ("retry_many", [range(1, 1002)], "which"),
    ("retry_many", [None], "which"),
    ("retry_many", [True], "which"),
    ("cancel_many", [admin.job_filter(state="COMPLETED")], "state"),
    ("discard_many", [admin.EVERYTHING, "\ud800"], "reason"),
    ("discard", [1, ""], "reason"),
    ("update", [1], ""),
    ("update", ["1e3"], "id"),
    ("delete", [0], "id"),
    ("pause", ["a\0"], "queue"),
    ("set_limit", ["q", 0], "max_running"),
    ("set_limit", ["q", float("nan")], "max_running"),
]


def test_what_is_refused(call: Callable[..., Any], jobs: Jobs) -> None:
    jobs.add()
    for name, args, field in REFUSED:
        with pytest.raises(InputError) as caught:
            call(name, *args)
        assert caught.value.field == field, (name, args)
    for by in ("a\0", "\ud800", 7):
        with pytest.raises(InputError, match="by"):
            call("pause", "mail", by=by)
    assert jobs.conn.execute("select count(*)::int as n from aqd.jobs").fetchone() == {"n": 1}
    assert jobs.conn.execute("select count(*)::int as n from aqd.queues").fetchone() == {"n": 0}


def test_a_transaction_of_the_callers_is_one(database_url: str, jobs: Jobs) -> None:
    """Nothing is committed or rolled back for him."""
    ids = failed(jobs, 2)
    with psycopg.connect(database_url) as conn:
        assert admin.retry_many(conn, ids).changed == 2
        assert admin.pause(conn, "mail").paused
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert jobs.state(ids[0]) == "FAILED"
        conn.rollback()
    assert [jobs.state(id) for id in ids] == ["FAILED"] * 2
    assert jobs.conn.execute("select count(*)::int as n from aqd.queues").fetchone() == {"n": 0}


def test_each_function_has_a_twin() -> None:
    names = {name for name in admin.__all__ if name[0].islower() and not name.endswith("_async")}
    assert {name for name in admin.__all__ if name.endswith("_async")} == {
        f"{name}_async" for name in names - {"job_filter"}
    }
    assert client.retry  # one job is retried and cancelled there
