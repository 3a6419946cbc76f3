"""Pages of jobs, of the records of failed jobs, and of attempts: what is found, in which order, up to which bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import client, database, migrate, store
from aqd.config import Database
from aqd.errors import InputError, TooBroad
from aqd.paths import data_dir
from aqd.store import listing
from aqd.store.filters import JobFilter, job_filter
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure

# 400 jobs of every state, spread over three days, so that no window cuts anything off.
WORLD = """
    select aqd.create_history_partition((now() at time zone 'UTC')::date - day) from generate_series(0, 4) as day;
    insert into aqd.jobs (id, run_at, created_at, type, queue, state, last_error, tags)
    select n, now(), now() - (500 - n) * interval '10 minutes', 'type-' || n % 3, 'queue-' || n % 5,
           case when n % 5 = 0 then 'FAILED' else 'QUEUED' end,
           case when n % 5 = 0 then 'Bad ' || case when n % 3 = 0 then 'ROW ' else 'line ' end || n end,
           case when n % 7 = 0 then array['seven', 'n:' || n % 14] end
    from generate_series(1, 400, 2) as n;
    insert into aqd.jobs (id, run_at, type, state, attempt, lease_token, lease_expires_at, node_id)
    values (401, now(), 'type-1', 'PROCESSING', 1, 1, now() + interval '1 hour', 'n');
    insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,
                                 priority, state, type, queue, payload, tags)
    select n, now() - (400 - n) * interval '10 minutes', now(), now() - (500 - n) * interval '10 minutes', 1, 0, 0, 0,
           0, case when n % 6 = 0 then 'CANCELLED' else 'COMPLETED' end, 'type-' || n % 3, 'queue-' || n % 5, '{}',
           case when n % 7 = 0 then array['seven', 'n:' || n % 14] end
    from generate_series(2, 400, 2) as n;
"""


@pytest.fixture
def api(connect: Connect) -> database.Connection:
    """A connection as the API makes it."""
    return connect(dispatcher=False)


def ids(found: store.Listing) -> list[int]:
    return [job.id for job in found.jobs]


def everything(conn: database.Connection, filters: JobFilter, *, oldest: bool, limit: int) -> list[int]:
    seen: list[int] = []
    cursor = None
    while True:
        page = store.list_jobs(conn, filters, cursor, limit, oldest=oldest)
        assert len(page.jobs) <= limit
        assert page.next is None or page.next == page.jobs[-1].id
        seen += ids(page)
        if page.next is None:
            return seen
        cursor = page.next


def matches(job: store.JobRow, given: dict[str, Any]) -> bool:
    """What a filter means, in Python."""

    def between(value: datetime | None, name: str) -> bool:
        after, before = given.get(f"{name}_after"), given.get(f"{name}_before")
        if after is None and before is None:
            return True
        return value is not None and (after is None or value >= after) and (before is None or value < before)

    return (
        ("state" not in given or job.state in given["state"])
        and ("type" not in given or job.type == given["type"])
        and ("queue" not in given or job.queue == given["queue"])
        and ("tag" not in given or given["tag"] in (job.tags or []))
        and ("error" not in given or given["error"].lower() in (job.last_error or "").lower())
        and ("ids" not in given or job.id in given["ids"])
        and between(job.created_at, "created")
        and between(job.finished_at, "finished")
    )


def a_filter(dice: random.Random, now: datetime) -> dict[str, Any]:
    def moment() -> datetime:
        return now - timedelta(minutes=dice.randrange(4000))

    kinds = {
        "state": lambda: dice.sample(
            ["QUEUED", "PROCESSING", "COMPLETED", "FAILED", "CANCELLED"], dice.randint(1, 3)
        ),
        "type": lambda: f"type-{dice.randrange(4)}",
        "queue": lambda: f"queue-{dice.randrange(6)}",
        "tag": lambda: dice.choice(["seven", "n:7", "n:0", "none"]),
        "error": lambda: dice.choice(["row", "BAD", "e 1", "%", "none"]),
        "ids": lambda: dice.sample(range(1, 500), 40),
        "created_after": moment,
        "created_before": moment,
        "finished_after": moment,
        "finished_before": moment,
    }
    return {name: kinds[name]() for name in dice.sample(sorted(kinds), dice.randint(0, 3))}


def test_a_filter_finds_what_it_says(api: database.Connection, queue: Queue) -> None:
    """150 filters against the same in Python, both ways round, in pages."""
    queue.conn.execute(WORLD.encode())
    jobs = store.list_jobs(api, limit=1000).jobs
    assert [job.id for job in jobs] == list(range(401, 0, -1))
    dice, now = random.Random(random.getrandbits(32)), datetime.now(UTC)  # of the run's seed
    alone = [{"error": "row"}, {"error": "BAD"}, {"error": "%"}, {"tag": "seven"}, {"queue": "queue-3"}]
    found = 0
    for given in alone + [a_filter(dice, now) for _ in range(150)]:
        try:
            filters = job_filter(**given)
        except InputError:  # nothing can match
            assert not any(matches(job, given) for job in jobs), given
            continue
        expected = [job.id for job in jobs if matches(job, given)]
        limit = dice.choice([7, 50, 500])
        assert everything(api, filters, oldest=False, limit=limit) == expected, given
        assert everything(api, filters, oldest=True, limit=limit) == expected[::-1], given
        found += len(expected)
    assert found > 1000


def test_the_client_finds_the_same(queue: Queue, database_url: str) -> None:
    """In its own transaction, with whatever row factory; the asynchronous twin is tested beside the API."""
    queue.conn.execute(WORLD.encode())
    with psycopg.connect(database_url, row_factory=psycopg.rows.dict_row) as conn:
        assert [job.id for job in client.jobs(conn, state="FAILED")] == list(range(395, 0, -10))
        assert len(list(client.jobs(conn, oldest=True))) == 401
        page = client.list_jobs(conn, type="type-1", limit=3)
        assert ids(client.list_jobs(conn, type="type-1", limit=3, after=page.next)) < ids(page)
        with pytest.raises(InputError, match="limit"):
            client.list_jobs(conn, limit=0)
        with pytest.raises(InputError, match="fields"):
            client.list_jobs(conn, fields=("error",))
        with pytest.raises(InputError, match="state"):
            client.list_jobs(conn, state="queued")
        assert len(client.list_jobs(conn).jobs) == 100


@pytest.mark.parametrize("oldest", [False, True])
def test_paging_is_stable_while_jobs_come_and_go(connect: Connect, queue: Queue, oldest: bool) -> None:
    conn, api = connect(), connect(dispatcher=False)
    made = queue.add(30)
    seen: list[int] = []
    cursor = None
    while len(seen) < 30:
        page = store.list_jobs(api, cursor=cursor, limit=7, oldest=oldest)
        seen += ids(page)
        cursor = page.next
        queue.add(2)
        store.record_completed(conn, [completion(job) for job in book().claim(conn, 3)])
    assert seen[:30] == sorted(made, reverse=not oldest)


def test_texts_are_read_only_where_they_are_asked_for(conn: database.Connection, queue: Queue) -> None:
    queue.add(meta={"a": 1}, tags=["t"])
    (job,) = book().claim(conn, 1)
    done = completion(job, '{"r": 1}')._replace(output="said")
    store.record_completed(conn, [done])
    names = ("payload", "result", "output", "meta")
    for fields in ((), ("payload",), ("result", "output"), names):
        (row,) = store.list_jobs(conn, fields=fields).jobs
        assert [getattr(row, name) is not None for name in names] == [name in fields for name in names]
    assert (row.payload, row.result, row.output, row.meta) == ("{}", '{"r": 1}', "said", '{"a": 1}')
    assert row.tags == ["t"]


@pytest.mark.parametrize("oldest", [False, True])
def test_a_page_is_bounded_in_bytes(conn: database.Connection, queue: Queue, oldest: bool) -> None:
    """It ends early, goes on where it ended, and is never empty, though one job be larger than the bound."""
    for size in (10, 4000, 4000, 4000, 100_000, 10, 4000):
        queue.conn.execute(
            "insert into aqd.jobs (type, run_at, payload) values ('noop', now(), jsonb_build_object('a',"
            " (select string_agg(md5(random()::text), '') from generate_series(1, %s))))",
            [max(1, size // 32)],
        )
    seen: list[list[int]] = []
    cursor = None
    while True:
        page = store.list_jobs(
            conn, cursor=cursor, limit=100, oldest=oldest, fields=("payload",), max_bytes=9000
        )
        sizes = [len(job.payload or "") for job in page.jobs]
        assert len(sizes) == 1 or sum(sizes) <= 9000
        seen.append(ids(page))
        if page.next is None:
            break
        cursor = page.next
    assert [len(page) for page in seen] == ([3, 1, 1, 2] if oldest else [2, 1, 2, 2])
    assert len(store.list_jobs(conn, limit=100, max_bytes=9000).jobs) == 7


def test_compressed_texts_count_as_they_are_read(conn: database.Connection, queue: Queue) -> None:
    queue.conn.execute(
        "insert into aqd.jobs (type, run_at, payload)"
        " select 'noop', now(), jsonb_build_object('a', repeat('x', 100000)) from generate_series(1, 5)"
    )
    page = store.list_jobs(conn, fields=("payload",), max_bytes=250_000)
    assert len(page.jobs) == 2
    assert page.next is not None


# --- windows


def test_history_is_searched_in_a_window_where_it_has_no_index(connect: Connect, queue: Queue) -> None:
    conn, api = connect(), connect(dispatcher=False)
    queue.add(2, queue="q")
    for job in book().claim(conn, 2):
        store.record_completed(conn, [completion(job)])
    old = listing.WINDOW.days + 2
    queue.conn.execute(f"select aqd.create_history_partition((now() at time zone 'UTC')::date - {old})")
    queue.conn.execute(
        f"update aqd.job_history set finished_at = finished_at - interval '{old} days', "
        f"created_at = created_at - interval '{old} days' where id = (select min(id) from aqd.job_history)"
    )
    both = store.list_jobs(api)
    assert (len(both.jobs), both.window) == (2, None)
    found = store.list_jobs(api, JobFilter(queue="q"))
    assert len(found.jobs) == 1
    assert found.window is not None
    assert found.window.finished_after.time() == datetime.min.time()
    assert found.window.finished_before is None
    assert "queue" in found.window.reason
    now = datetime.now(UTC)
    month = now - timedelta(days=30)
    for given in (
        {"queue": "q", "type": "noop"},
        {"queue": "q", "finished_after": month},
        {"queue": "q", "created_after": month},
        {"queue": "q", "ids": ids(both)},
        {"type": "noop"},
        {"finished_before": now + timedelta(hours=1)},
    ):
        found = store.list_jobs(api, job_filter(**given))
        assert (len(found.jobs), found.window) == (2, None), given
    # What nobody can see is not searched for: no window either.
    for given in ({"queue": "q", "state": "FAILED"}, {"queue": "q", "error": "x"}):
        assert store.list_jobs(api, job_filter(**given)).window is None
    cancelled = store.list_jobs(api, job_filter(state=["CANCELLED", "FAILED"])).window
    assert cancelled is not None
    assert "CANCELLED" in cancelled.reason


def test_a_window_reaches_back_from_what_was_asked_for() -> None:
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    asked = datetime(2026, 6, 15, 18, 30, tzinfo=UTC)
    day = datetime(2026, 6, 8, tzinfo=UTC)
    window = listing.history_window(job_filter(queue="q", finished_before=asked), now=now)
    assert window is not None
    assert (window.finished_after, window.finished_before) == (day, None)
    window = listing.history_window(job_filter(created_before=asked), now=now)
    assert window is not None
    assert (window.finished_after, window.finished_before) == (day, asked + listing.WINDOW)
    assert listing.history_window(job_filter(created_before=asked), oldest=True, now=now) is None
    window = listing.history_window(job_filter(queue="q"), now=now)
    assert window is not None
    assert window.finished_after == datetime(2026, 11, 23, tzinfo=UTC)
    earliest = job_filter(created_before="1970-01-02T00:00:00+12:00")
    assert listing.history_window(earliest, now=now) is not None
    assert (
        listing.history_window(job_filter(queue="q", finished_before="9998-12-30T00:00:00Z"), now=now)
        == window
    )


def test_a_statement_timeout_is_the_filters_fault_if_there_is_one(connect: Connect, queue: Queue) -> None:
    api = connect(dispatcher=False)
    api.execute("set statement_timeout = '100ms'")
    with queue.conn.transaction():
        queue.conn.execute("lock aqd.jobs, aqd.failed_jobs in access exclusive mode")
        with pytest.raises(TooBroad, match=r"state, error.*finished_after"):
            store.list_jobs(api, job_filter(state="FAILED", error="x"))
        with pytest.raises(TooBroad, match=r"kind.*failed_after"):
            store.list_failed(api, store.FailedFilter(kind="failed"))
        with pytest.raises(TooBroad):
            client.list_jobs(api, queue="q")
        with pytest.raises(psycopg.errors.QueryCanceled):
            store.list_jobs(api)
    assert store.list_jobs(api).jobs == []


# --- failed jobs


def fail_with(conn: database.Connection, jobs: Queue, error: str, **options: Any) -> int:
    type = options.get("type", "noop")
    (id,) = jobs.add(**options)
    (job,) = [each for each in book(type).claim(conn, 10) if each.id == id]
    store.record_failed(conn, [failure(job, error=error)])
    return id


def test_failed_jobs_are_grouped_by_type_and_error(conn: database.Connection, queue: Queue) -> None:
    rows = [fail_with(conn, queue, f"ValueError: bad row {n}\nat line {n}") for n in range(5)]
    other = [fail_with(conn, queue, f"ValueError: bad row {n}", type="mail", queue="q") for n in (8, 99)]
    address = fail_with(conn, queue, "<Thing at 0x7f3aBC00> is gone 123e4567-e89b-12d3-a456-426614174000")
    store.retry_job(conn, rows[0])

    found = store.group_failed(conn)
    assert (found.grouped, found.more) == (8, False)
    first, second, third = found.groups
    assert (first.type, first.error, first.size, first.failed_now) == ("noop", "ValueError: bad row #", 5, 4)
    assert (second.type, second.error, second.size) == ("mail", "ValueError: bad row #", 2)
    assert (third.error, third.sample_job_id) == ("<Thing at #> is gone #", address)
    assert first.error_hash == second.error_hash != third.error_hash
    assert first.sample_job_id == rows[-1]
    assert first.first_failed_at < first.last_failed_at

    (by_error, _) = store.group_failed(conn, by_type=False).groups
    assert (by_error.type, by_error.size, by_error.failed_now) == (None, 7, 6)
    assert [group[:4] for group in store.group_failed(conn, by_error=False).groups] == [
        ("noop", None, None, 6),
        ("mail", None, None, 2),
    ]
    newest = store.group_failed(conn, most=3)
    assert (newest.grouped, newest.more, sum(group.size for group in newest.groups)) == (3, True, 3)
    assert len(store.group_failed(conn, limit=1).groups) == 1
    assert store.group_failed(conn, store.FailedFilter(queue="q")).groups == [second]
    assert store.group_failed(conn, store.FailedFilter(type="none")) == ([], 0, False)

    # What a group names is what its hash finds among the jobs.
    live = store.list_jobs(conn, job_filter(state="FAILED", type="noop", error_hash=first.error_hash))
    assert ids(live) == rows[:0:-1]
    assert ids(store.list_jobs(conn, job_filter(error_hash=first.error_hash))) == [*other[::-1], *rows[:0:-1]]


@pytest.mark.parametrize(
    "error",
    [
        "",
        "   \n\n  first\r\nsecond",
        "1" * 3000,
        "x" * 199 + " 5 tail",
        "é" * 5000,
        "a\n" * 3000,
        "0x1f 0x 0xg 12ab",
    ],
)
def test_a_record_and_its_job_have_one_hash(error: str, conn: database.Connection, queue: Queue) -> None:
    """The job keeps less of an error than its record does."""
    id = fail_with(conn, queue, error)
    (group,) = store.group_failed(conn).groups
    assert ids(store.list_jobs(conn, job_filter(state="FAILED", error_hash=group.error_hash))) == [id]
    assert len(group.error or "") <= 200
    assert not set(group.error or "") & set("\n\r123456789")


def test_failures_that_nobody_has_reported_have_one_hash_too(conn: database.Connection, queue: Queue) -> None:
    """Rescued from a dead node; of a type that no node knows."""
    queue.add(max_attempts=1)
    (job,) = book().claim(conn, 1)
    queue.expire(job.id)
    store.rescue(conn, 10, 1.0, 1.0, 1)
    queue.add(type="unheard-of")
    store.node_seen(conn, store.NodeState("n1", "host", 42, "0.1.0", 1, 1, ["noop"], "running"))
    store.fail_unknown(conn, 0.0, 30.0, 10)
    store.fail_unknown(conn, 0.0, 30.0, 10)
    groups = store.group_failed(conn).groups
    assert len(groups) == 2
    for group in groups:
        assert ids(store.list_jobs(conn, job_filter(state="FAILED", error_hash=group.error_hash))) == [
            group.sample_job_id
        ]


def test_filters_over_failed_jobs(conn: database.Connection, queue: Queue) -> None:
    a = fail_with(conn, queue, "Broken PIPE", queue="q")
    b = fail_with(conn, queue, "100% wrong", type="mail")
    queue.conn.execute(
        "update aqd.failed_jobs set kind = 'crashed', reason = 'memory_limit', failed_at = now() - interval '2 days'"
        " where job_id = %s",
        [a],
    )
    now = datetime.now(UTC)
    for given, expected in (
        ({}, [b, a]),
        ({"type": "mail"}, [b]),
        ({"queue": "q"}, [a]),
        ({"kind": "crashed"}, [a]),
        ({"reason": "memory_limit"}, [a]),
        ({"error": "pipe"}, [a]),
        ({"error": "%"}, [b]),
        ({"failed_after": now - timedelta(days=1)}, [b]),
        ({"failed_before": now - timedelta(days=1)}, [a]),
        ({"type": "mail", "queue": "q"}, []),
    ):
        filters = store.failed_filter(**given)
        assert [record.job_id for record in store.list_failed(conn, filters).records] == expected
        assert store.group_failed(conn, filters).grouped == len(expected)
    for wrong in ({"kind": "No"}, {"reason": ""}, {"error": ""}, {"type": " "}, {"failed_after": "today"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            store.failed_filter(**wrong)
    with pytest.raises(InputError, match="failed_before"):
        store.failed_filter(failed_after=now, failed_before=now)


def test_list_failed_pages(conn: database.Connection, queue: Queue) -> None:
    queue.add(5)
    store.record_failed(conn, [failure(job) for job in book().claim(conn, 5)])
    first = store.list_failed(conn, limit=3)
    second = store.list_failed(conn, cursor=first.next, limit=3)
    records = first.records + second.records
    assert [record.id for record in records] == sorted((r.id for r in records), reverse=True)
    assert (len(records), second.next) == (5, None)
    small = store.list_failed(conn, max_bytes=1)
    assert (len(small.records), small.next) == (1, small.records[0].id)


def test_attempts_come_in_pages(conn: database.Connection, queue: Queue) -> None:
    (id,) = queue.add()
    queue.conn.execute(
        "insert into aqd.job_attempts (job_id, finished_at, attempt, kind, error, output)"
        " select %s, now(), n, 'failed', 'e' || n, repeat('o', 1000) from generate_series(1, 130) as n",
        [id],
    )
    seen: list[int] = []
    cursor = None
    while True:
        page = store.list_attempts(conn, id, cursor, 50)
        seen += [attempt.attempt for attempt in page.attempts]
        if page.next is None:
            break
        cursor = page.next
    assert seen == list(range(1, 131))
    assert len(store.list_attempts(conn, id, max_bytes=5_100).attempts) == 5
    assert store.list_attempts(conn, id, max_bytes=5_100).next is not None
    assert [attempt.attempt for attempt in store.get_attempts(conn, id)] == list(range(31, 131))
    assert store.list_attempts(conn, 2**62) == ([], None)


# --- the migration


@pytest.fixture
def second_version(empty_database_url: str, tmp_path: Path) -> Iterator[database.Connection]:
    for file in sorted((data_dir("sql") / "migrations").glob("*.sql"))[:2]:
        (tmp_path / file.name).write_text(file.read_text())
    with store.connect(Database(url=empty_database_url), "test") as made:
        migrate.migrate(made, tmp_path)
        yield made


def test_tags_are_indexed_on_days_without_rows_and_days_to_come(second_version: database.Connection) -> None:
    """A day that holds rows is not made to wait, and jobs of all days are found by their tags."""
    conn = second_version
    conn.execute(b"select aqd.create_history_partition((now() at time zone 'UTC')::date + day)"
                 b" from generate_series(-1, 2) as day")  # fmt: skip
    conn.execute(
        b"insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,"
        b" priority, state, type, queue, payload)"
        b" values (1, now(), now(), now(), 1, 0, 0, 0, 0, 'COMPLETED', 'noop', 'default', '{}')"
    )
    migrate.migrate(conn)
    conn.execute(b"select aqd.create_history_partition((now() at time zone 'UTC')::date + 20)")
    found = conn.execute(
        b"""select right(c.relname, 8)::date - (now() at time zone 'UTC')::date as day,
                   bool_or(x.indexdef like '%(tags)%')
            from pg_inherits i join pg_class c on c.oid = i.inhrelid
            join pg_indexes x on x.tablename = c.relname
            where i.inhparent = 'aqd.job_history'::regclass group by 1 order by 1"""
    ).fetchall()
    days = dict(found)
    assert {-1, 0, 1, 2, 20} <= set(days)
    assert [day for day, is_indexed in days.items() if not is_indexed] == [0]
    conn.execute(b"update aqd.job_history set tags = '{t}'")
    assert ids(store.list_jobs(conn, JobFilter(tag="t"))) == [1]
