"""Waiting on a connection of one's own: ``aqd.client.wait``, its asynchronous twin, ``aqd jobs wait``."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from aqd import client, statements, store, waiting
from aqd.claims import ClaimBook
from aqd.config import Api, Config, Database
from aqd.database import int_array
from aqd.errors import InputError, NotEnded, NotFoundError
from aqd.store import JobRow
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
Wait = Callable[..., JobRow]


@pytest.fixture
def node(database_url: str) -> Iterator[store.Connection]:
    """The connection of one that claims and records."""
    with store.connect(Database(url=database_url), "tests") as conn:
        yield conn


@pytest.fixture(params=["sync", "sync dictionaries", "async", "async dictionaries"])
def connect(request: pytest.FixtureRequest, database_url: str) -> Callable[..., Any]:
    """``connect(use)`` is what ``use(conn, wait)`` gives; ``wait`` and everything else look synchronous."""
    options: dict[str, Any] = {"row_factory": dict_row} if "dictionaries" in request.param else {}

    def sync(use: Callable[[Any, Wait], Any], autocommit: bool = True) -> Any:
        with psycopg.connect(database_url, autocommit=autocommit, **options) as conn:
            return use(conn, client.wait)

    def asynchronous(use: Callable[[Any, Wait], Any], autocommit: bool = True) -> Any:
        with asyncio.Runner() as runner:
            conn = runner.run(psycopg.AsyncConnection.connect(database_url, autocommit=autocommit, **options))
            try:
                return use(
                    _Run(conn, runner), lambda _, *a, **k: runner.run(client.wait_async(conn, *a, **k))
                )
            finally:
                runner.run(conn.close())

    return asynchronous if "async" in request.param else sync


class _Run:
    """An asynchronous connection's ``execute``, synchronously."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], runner: asyncio.Runner) -> None:
        self._conn, self._runner = conn, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def execute(self, statement: str) -> None:
        self._runner.run(self._conn.execute(statement))


def complete(node: store.Connection, count: int = 1) -> None:
    """Claims what is due and records it as completed."""
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    claimed = book.claim(node, 1000)
    assert len(claimed) == count
    store.record_completed(node, [store.Completion(job.id, job.token, "7", 0.0) for job in claimed])


def announced(jobs: Jobs) -> bool:
    statement = "select last_value > extract(epoch from clock_timestamp()) as waited from aqd.waits"
    return bool(jobs.conn.execute(statement).fetchone()["waited"])


def listening(conn: Any) -> list[str]:
    """The channels of a connection, asked on itself."""
    raw = psycopg.RawCursor(conn) if isinstance(conn, psycopg.Connection) else None
    if raw is not None:
        return [
            next(iter(row.values() if isinstance(row, dict) else row))
            for row in raw.execute("select * from pg_listening_channels()")
        ]

    async def ask() -> list[str]:
        cursor = await conn._conn.execute("select * from pg_listening_channels()")
        return [next(iter(row.values() if isinstance(row, dict) else row)) for row in await cursor.fetchall()]

    return list(conn._runner.run(ask()))


@contextlib.contextmanager
def soon(jobs: Jobs, act: Callable[[], None]) -> Iterator[None]:
    """``act`` in a thread, as soon as somebody waits."""

    def run() -> None:
        wait_until(lambda: announced(jobs), 30)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)


@pytest.mark.parametrize("how", ["told", "seen"])
def test_it_returns_the_job_when_it_has_ended(
    connect: Callable[..., Any],
    jobs: Jobs,
    node: store.Connection,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """By a notification where no look would find it in time, and by a look where none is sent."""
    if how == "told":
        for name in ("LOOK_S", "FIRST_LOOK_S"):
            monkeypatch.setattr(waiting, name, 3600.0)
    else:
        node.execute("set aqd.notify = off")
    id = jobs.add()

    def use(conn: Any, wait: Wait) -> JobRow:
        with soon(jobs, lambda: complete(node)):
            found = wait(conn, str(id), LONG_S)
        assert listening(conn) == []
        return found

    found = connect(use)
    assert (found.id, found.state, found.result) == (id, "COMPLETED", "7")


def test_a_role_that_only_reads(connect: Callable[..., Any], jobs: Jobs, node: store.Connection) -> None:
    """It may not announce that it waits, so nobody tells it; it looks."""
    jobs.conn.execute("grant usage on schema aqd to pg_read_all_data")
    id = jobs.add()

    def use(conn: Any, wait: Wait) -> JobRow:
        conn.execute("set role pg_read_all_data")
        with pytest.raises(NotEnded):
            wait(conn, id, 0.05)
        complete(node)
        return wait(conn, id, LONG_S)

    assert connect(use).state == "COMPLETED"
    assert not announced(jobs)


def test_what_has_ended_before(connect: Callable[..., Any], jobs: Jobs, node: store.Connection) -> None:
    done = jobs.add()
    complete(node)
    cancelled, failed = jobs.add(), jobs.add()
    store.cancel_job(node, cancelled)
    jobs.conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [failed])

    def use(conn: Any, wait: Wait) -> None:
        assert wait(conn, done, 0).state == "COMPLETED"
        assert wait(conn, cancelled).state == "CANCELLED"
        assert wait(conn, failed, timeout_s=None).state == "FAILED"
        with pytest.raises(NotFoundError, match=f"there is no job {failed + 1}"):
            wait(conn, failed + 1, LONG_S)

    connect(use)


def test_the_time_is_over(connect: Callable[..., Any], jobs: Jobs) -> None:
    id = jobs.add()

    def use(conn: Any, wait: Wait) -> None:
        for timeout_s in (0, 0.05):
            with pytest.raises(NotEnded, match=rf"^job {id} has not ended after {timeout_s} s$") as caught:
                wait(conn, id, timeout_s)
            assert caught.value.ids == (id,)
            assert isinstance(caught.value, TimeoutError)
            assert listening(conn) == []

    connect(use)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True, [1]])
def test_a_wrong_time_is_refused(connect: Callable[..., Any], timeout_s: Any) -> None:
    def use(conn: Any, wait: Wait) -> None:
        with pytest.raises(InputError) as caught:
            wait(conn, 1, timeout_s)
        assert caught.value.field == "timeout_s"
        with pytest.raises(InputError):
            wait(conn, "x")

    connect(use)


def test_in_a_transaction_it_is_refused(connect: Callable[..., Any], jobs: Jobs) -> None:
    id = jobs.add()

    def transactional(conn: Any, wait: Wait) -> None:
        with pytest.raises(InputError, match="autocommit") as caught:
            wait(conn, id, LONG_S)
        assert caught.value.field == "conn"

    connect(transactional, autocommit=False)

    def inside(conn: Any, wait: Wait) -> None:
        conn.execute("begin")
        with pytest.raises(InputError, match="inside a transaction"):
            wait(conn, id, LONG_S)
        conn.execute("rollback")
        with pytest.raises(NotEnded):
            wait(conn, id, 0)

    connect(inside)


def test_the_callers_own_notifications_are_not_lost(
    connect: Callable[..., Any], jobs: Jobs, node: store.Connection
) -> None:
    """Neither those that its handlers wait for, nor those that it would ask for later; ours do not appear."""
    id, other = jobs.add(), jobs.add(delay_s=3600)

    def act() -> None:
        node.execute("notify mine, 'early'")
        store.cancel_job(node, other)
        complete(node)

    def with_handler(conn: Any, wait: Wait) -> None:
        got: list[tuple[str, str]] = []
        conn.add_notify_handler(lambda each: got.append((each.channel, each.payload)))
        conn.execute("listen mine")
        with soon(jobs, act):
            wait(conn, id, LONG_S)
        conn.execute("notify mine, 'late'")
        conn.execute("select 1")
        assert got == [("mine", "early"), ("mine", "late")]

    connect(with_handler)


@pytest.mark.parametrize("own", [False, True])
def test_the_callers_later_notifies(database_url: str, jobs: Jobs, node: store.Connection, own: bool) -> None:
    id = jobs.add()
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("listen mine")
        if own:  # it listens to what we listen to, and goes on doing so
            conn.execute("listen aqd_ended")
        with soon(jobs, lambda: (node.execute("notify mine, '1'"), complete(node))):
            client.wait(conn, id, LONG_S)
        assert sorted(listening(conn)) == (["aqd_ended", "mine"] if own else ["mine"])
        got = [(each.channel, each.payload) for each in conn.notifies(timeout=30, stop_after=1 + own)]
        assert got == [("mine", "1"), ("aqd_ended", str(id))][: 1 + own]


def test_a_job_that_is_retried_goes_on_being_waited_for(
    database_url: str, jobs: Jobs, node: store.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had ended when somebody looked, and not any more when it was read."""
    id = jobs.add()
    looked: list[int] = []
    real = store.find_ended

    def hasty(conn: store.Connection, ids: Any) -> list[int]:
        looked.append(1)
        return [id] if len(looked) == 1 else real(conn, ids)

    monkeypatch.setattr(store, "find_ended", hasty)
    with psycopg.connect(database_url, autocommit=True) as conn, soon(jobs, lambda: complete(node)):
        assert client.wait(conn, id, LONG_S).state == "COMPLETED"
    assert len(looked) > 1


def test_a_lost_connection_is_an_error_of_psycopg(connect: Callable[..., Any], jobs: Jobs) -> None:
    id = jobs.add()

    def use(conn: Any, wait: Wait) -> None:
        pid = conn.info.backend_pid
        with (
            soon(jobs, lambda: jobs.conn.execute("select pg_terminate_backend(%s)", [pid])),
            pytest.raises(psycopg.OperationalError),
        ):
            wait(conn, id, LONG_S)

    connect(use)


def test_nobody_is_told_while_nobody_waits(database_url: str, jobs: Jobs, node: store.Connection) -> None:
    """The statement that tells is not even sent."""
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("listen aqd_ended")
        jobs.add()
        complete(node)
        prepared = "select count(*) from pg_prepared_statements where statement like '%%aqd:tell_ended%%'"
        ids = [jobs.add(), jobs.add()]
        store.announce_wait(node)
        complete(node, 2)
        (told,) = listener.notifies(timeout=30, stop_after=1)
        assert told.payload.split(",") == [str(id) for id in ids]
        assert node.execute(prepared).fetchone() == (0,)


def test_a_batch_is_told_in_few_notifications(database_url: str, jobs: Jobs, node: store.Connection) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("listen aqd_ended")
        store.announce_wait(node)
        ids = jobs.add_many(500)
        complete(node, 500)
        told = list(listener.notifies(timeout=30, stop_after=2))
        assert len(told) == 2
        assert sorted(int(id) for each in told for id in each.payload.split(",")) == ids


def test_foreign_notifications_mean_nothing(database_url: str, jobs: Jobs) -> None:
    """Anybody who may connect may notify."""
    id = jobs.add()
    with psycopg.connect(database_url, autocommit=True) as conn:

        def act() -> None:
            for payload in ("", "x", "1,2,", "-1", "9" * 7000, "\u0663", str(id), "99999999999999999999"):
                jobs.conn.execute("select pg_notify('aqd_ended', %s)", [payload])
            store.cancel_job(jobs.conn, id)

        with soon(jobs, act):
            assert client.wait(conn, id, LONG_S).state == "CANCELLED"


def test_waiting_goes_on_beside_other_use_of_the_connection(database_url: str, jobs: Jobs) -> None:
    """Two tasks of a program, one connection."""

    async def run() -> JobRow:
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as conn:
            id = jobs.add()
            waits = asyncio.create_task(client.wait_async(conn, id, LONG_S))
            while not announced(jobs):
                await conn.execute("select pg_sleep(0.001)")
            await asyncio.to_thread(lambda: jobs.conn.execute("select aqd.cancel(%s)", [id]))
            return await waits

    assert asyncio.run(run()).state == "CANCELLED"


def test_a_task_that_is_cancelled_listens_no_more(database_url: str, jobs: Jobs) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as conn:
            waits = asyncio.create_task(client.wait_async(conn, jobs.add(), LONG_S))
            await asyncio.to_thread(lambda: wait_until(lambda: announced(jobs), 30))
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            cursor = await conn.execute("select * from pg_listening_channels()")
            assert await cursor.fetchall() == []

    asyncio.run(run())


# --- the rhythm -----------------------------------------------------------------------------------


def test_rhythm() -> None:
    """Announced at once and in good time again; looks close together at first, then rare."""
    rhythm, looks, now = waiting.Rhythm(), [], 100.0
    announcements = []
    while now < 120:
        now = max(now, rhythm.next_at)
        if now >= rhythm.announce_at:
            announcements.append(now - 100)
            rhythm.announced(now)
        if now >= rhythm.look_at:
            looks.append(now - 100)
            rhythm.looked(now)
    assert announcements == [0, 5, 10, 15, 20]
    assert looks[:5] == pytest.approx([0, 0.05, 0.15, 0.35, 0.75])
    assert max(b - a for a, b in itertools.pairwise(looks)) == waiting.LOOK_S
    assert waiting.ANNOUNCE_S * 2 < waiting.ANNOUNCED_S

    rhythm.announced(now + 100)  # nobody has waited meanwhile
    assert rhythm.look_at == now + 100
    rhythm.refused()
    rhythm.looked(now)
    assert rhythm.next_at == now + waiting.LOOK_DEAF_S
    deaf = waiting.Rhythm(deaf=True)
    deaf.looked(0.0)
    assert deaf.next_at == waiting.LOOK_DEAF_S


# --- the API's waiters, in this process so that looks can be put off --------------------------------


def test_the_api_is_told(
    database_url: str, jobs: Jobs, node: store.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aqd.api.waiters import Waiters

    for name in ("LOOK_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(waiting, name, 3600.0)
    waiters = Waiters(Config(database=Database(url=database_url), api=Api(threads=4)))
    try:
        ids = [jobs.add(), jobs.add()]
        with waiters.place(ids[0]) as first, waiters.place(ids[1]) as second:
            assert first is not None
            assert second is not None
            with waiters.place(ids[0]) as third:
                assert third is None
            wait_until(lambda: first.seen and second.seen, 30)
            jobs.conn.execute("select aqd.cancel(%s)", [ids[1]])
            assert second.wait(_later())
            assert not first.woken
            # It ends, is retried before it was read, and ends again.
            jobs.conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [ids[0]])
            store.tell_ended(node, [ids[0]])
            assert first.wait(_later())
            store.retry_job(node, ids[0])
            waiters.again(first)
            wait_until(lambda: first.seen, 30)
            assert not first.woken
            complete(node)
            assert first.wait(_later())
            waiters.again(first)  # it has ended: so it is woken at once
            assert first.wait(_later())
        with waiters.place(ids[0]) as again:
            assert again is not None, "the places were given back"
            waiters.drain()
            assert again.wait(_later())
            with waiters.place(ids[0]) as late:
                assert late is None
    finally:
        waiters.close()
    assert not any(thread.name == "aqd-api-waiters" for thread in threading.enumerate())


def _later() -> float:
    import time

    return time.monotonic() + LONG_S


# --- the command line -----------------------------------------------------------------------------


def aqd(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "DATABASE_URL": database_url,
        "LANG": "C.UTF-8",
    }
    command = [sys.executable, "-m", "aqd", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_command(database_url: str, jobs: Jobs, node: store.Connection) -> None:
    done, other, failed = jobs.add(), jobs.add(), jobs.add(delay_s=3600)
    with soon(jobs, lambda: complete(node, 2)):
        ended = aqd(database_url, "jobs", "wait", str(done), str(other), str(done))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == [f"job {done} is COMPLETED", f"job {other} is COMPLETED"]

    late = aqd(database_url, "jobs", "wait", str(done), str(failed), "--timeout", "0")
    assert (late.returncode, late.stdout) == (1, f"job {done} is COMPLETED\n")
    assert late.stderr == f"aqd: job {failed} has not ended after 0 s\n"

    jobs.conn.execute("update aqd.jobs set state = 'FAILED' where id = %s", [failed])
    ended = aqd(database_url, "jobs", "wait", str(failed))
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, f"job {failed} is FAILED\n", "")
    ended = aqd(database_url, "jobs", "wait", str(failed + 1), str(done))
    assert (ended.returncode, ended.stdout) == (2, f"job {done} is COMPLETED\n")
    assert ended.stderr == f"aqd: there is no job {failed + 1}\n"


@pytest.mark.parametrize("arguments", [["x"], [], ["1", "--timeout", "-1"], ["1", "--timeout", "nan"]])
def test_wrong_command(database_url: str, arguments: list[str]) -> None:
    ended = aqd(database_url, "jobs", "wait", *arguments)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert json.dumps(ended.stdout) == '""'


def test_a_look_reads_only_what_is_waited_for(node: store.Connection) -> None:
    """On a table that was small when it was analysed, with the settings of an application's connection."""
    node.execute("reset enable_seqscan")
    node.execute("analyze aqd.jobs")
    node.execute("insert into aqd.jobs (type, run_at) select 'fate', now() from generate_series(1, 20000)")
    text = statements.get("find_ended").text
    for number in (1, 100):
        ids = int_array(range(1, number * 7, 7))
        plan = psycopg.RawCursor(node).execute(b"explain (analyze, costs off) " + text, [ids]).fetchall()
        lines = "\n".join(row[0] for row in plan)
        assert "jobs_pkey" in lines
        assert "Seq Scan on jobs" not in lines
    assert store.find_ended(node, [1, 20001, 5]) == [20001]
