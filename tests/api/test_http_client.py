"""The HTTP client against a real API, through a proxy that cuts, and a server that talks nonsense.

Both clients run each test; ``Sync`` makes the asynchronous one look like the other.
"""

import asyncio
import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psycopg
import pytest

from aqd import http_calls, http_client, store
from aqd.api import documents
from aqd.claims import ClaimBook
from aqd.config import Database
from aqd.errors import (
    ConflictError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InputError,
    KeyInProgress,
    Locked,
    NotAllowedError,
    NotEnded,
    NotFoundError,
    OutcomeUnknown,
    SchemaMismatch,
    ServiceUnavailable,
)
from tests.fixtures.api import ADMIN_KEY, Api
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import Postgres
from tests.fixtures.processes import wait_until
from tests.fixtures.proxy import Proxy


class Sync:
    """An :class:`AsyncClient` whose coroutines are run by a loop in a thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = http_client.AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found = getattr(self._client, name)(*arguments, **options)
            if inspect.isasyncgen(found):
                return self._all(found)
            return asyncio.run_coroutine_threadsafe(found, self._loop).result()

        return call

    def _all(self, found: Any) -> Iterator[Any]:
        while True:
            try:
                yield asyncio.run_coroutine_threadsafe(anext(found), self._loop).result()
            except StopAsyncIteration:
                return

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Connect = Callable[..., Any]


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """``connect(port)``: a client of either kind."""
    monkeypatch.setattr(http_calls, "PAUSE_FIRST_S", 0.01)  # nothing here gets better by waiting
    made = []

    def make(port: int, **options: Any) -> Any:
        kind = http_client.Client if request.param == "Client" else Sync
        made.append(kind(f"http://127.0.0.1:{port}", **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def node(database_url: str) -> Iterator[store.Connection]:
    with store.connect(Database(url=database_url), "tests") as conn:
        yield conn


def complete(node: store.Connection) -> list[int]:
    """Claims what is due and records it as completed."""
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    claimed = book.claim(node, 1000)
    store.record_completed(node, [store.Completion(job.id, job.token, '{"n": [1]}', 0.0) for job in claimed])
    return [job.id for job in claimed]


def count(jobs: Jobs) -> int:
    return int(jobs.conn.execute("select count(*)::int as n from aqd.all_jobs").fetchone()["n"])


# --- what it does ---------------------------------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end(
    api: Api, connect: Connect, jobs: Jobs, node: store.Connection
) -> None:
    client = connect(api.port)
    run_at = datetime.now(UTC) - timedelta(seconds=1)
    made = client.enqueue(
        "fate",
        {"a": [1, "é", None]},
        queue="q",
        priority=3,
        run_at=run_at,
        max_attempts=2,
        timeout_s=1.5,
        tags=["t"],
        meta={"m": 1},
    )
    assert (made.status, made.queue, made.priority, made.outcome) == ("QUEUED", "q", 3, "created")
    assert made.created_at is not None
    assert made.created_at.tzinfo is not None
    seen = client.get(made.id)
    assert (seen.type, seen.payload, seen.tags, seen.meta) == ("fate", {"a": [1, "é", None]}, ["t"], {"m": 1})
    assert (seen.max_attempts, seen.timeout_s, seen.result, seen.ended) == (2, 1.5, None, False)
    with pytest.raises(NotEnded) as caught:
        client.wait(made.id, 0.01)
    assert caught.value.ids == (int(made.id),)
    complete(node)
    ended = client.wait(int(made.id))
    assert (ended.status, ended.result, ended.ended) == ("COMPLETED", {"n": [1]}, True)
    assert client.enqueue("fate").status == "QUEUED"
    assert jobs.conn.execute("select payload from aqd.jobs").fetchone()["payload"] == {}


def test_it_waits_until_the_job_has_ended(
    api: Api, connect: Connect, jobs: Jobs, node: store.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than one request may last, and also where there is no room to wait."""
    monkeypatch.setattr(http_calls, "WAIT_S", 0.05)
    client = connect(api.port)
    id = client.enqueue("fate").id

    def finish() -> None:
        statement = "select last_value > 1 as waited from aqd.waits"
        wait_until(lambda: jobs.conn.execute(statement).fetchone()["waited"], 30)
        complete(node)

    thread = threading.Thread(target=finish)
    thread.start()
    assert client.wait(id, 60).status == "COMPLETED"
    thread.join()


def test_it_comes_again_where_there_is_no_room(
    start_api: Callable[..., Api], connect: Connect, jobs: Jobs
) -> None:
    api = start_api(AQD_API_THREADS="1")
    client = connect(api.port)
    id = client.enqueue("fate").id
    asked = threading.Event()
    found: list[Any] = []

    def wait() -> None:
        asked.set()
        found.append(client.wait(id, 60).status)

    thread = threading.Thread(target=wait)
    thread.start()
    asked.wait()
    jobs.conn.execute("select aqd.cancel(%s)", [int(id)])
    thread.join()
    assert found == ["CANCELLED"]


def test_many(api: Api, connect: Connect, monkeypatch: pytest.MonkeyPatch, jobs: Jobs) -> None:
    client = connect(api.port)
    made = client.enqueue_many({"type": "fate", "payload": n, "priority": n % 3} for n in range(1203))
    assert len({each.id for each in made}) == 1203 == count(jobs)
    assert [each.priority for each in made[:4]] == [0, 1, 2, 0]
    listed = list(client.jobs(type="fate", state=["QUEUED", "FAILED"], order="oldest", fields=["payload"]))
    assert [job.payload for job in listed] == list(range(1203))
    assert [job.id for job in client.jobs(created_before=datetime(2000, 1, 1, tzinfo=UTC))] == []
    assert client.enqueue_many([]) == []
    # In requests of a bounded size; a fault has the job's place among all.
    monkeypatch.setattr(http_calls, "BATCH_BYTES", 2000)
    big = [{"type": "fate", "payload": "x" * 700} for _ in range(5)]
    assert len(client.enqueue_many(big)) == 5
    with pytest.raises(InputError) as caught:
        client.enqueue_many([*big, {"type": "fate", "priority": 1000}])
    assert (caught.value.field, caught.value.bound) == ("jobs[5].priority", "-100..100")
    for wrong, field in [
        ("x", "jobs[0]"),
        ({}, "jobs[0].type"),
        ({"type": "a", "_checked": True}, "jobs[0]"),
    ]:
        with pytest.raises(InputError) as caught:
            client.enqueue_many([wrong])
        assert caught.value.field == field


def test_changes(api: Api, connect: Connect, jobs: Jobs) -> None:
    client = connect(api.port, key=ADMIN_KEY)
    id = client.enqueue("fate", delay_s=3600).id
    assert client.update(id, priority=7)["priority"] == 7
    with pytest.raises(ConflictError):
        client.retry(id)
    assert client.cancel(id)["status"] == "CANCELLED"
    ids = [client.enqueue("fate").id for _ in range(3)]
    jobs.conn.execute("update aqd.jobs set state = 'FAILED'")
    assert client.failed_jobs()["failed_jobs"] == []
    assert client.retry(ids[0])["status"] == "QUEUED"
    assert client.change_jobs("retry", filter={"type": "fate"}, dry_run=True)["matched"] == 2
    assert client.change_jobs("discard", ids=ids[1:2], reason="no use")["changed"] == 1
    assert client.discard(ids[2], "no use")["status"] == "CANCELLED"
    assert client.delete(ids[0])["status"] == "QUEUED"
    with pytest.raises(NotFoundError):
        client.get(ids[0])
    with pytest.raises(InputError):
        client.change_jobs("retry")
    with pytest.raises(InputError):
        client.change_jobs("everything", all=True)
    assert client.pause("mail:slow")["paused"] is True
    assert client.resume("mail:slow")["paused"] is False
    assert client.set_limit("mail:slow", 3)["max_running"] == 3
    assert client.set_limit("mail:slow", None)["max_running"] is None
    for answer in (client.queues(), client.types(), client.nodes()):
        assert isinstance(answer, dict)


def test_keys(api: Api, connect: Connect) -> None:
    with pytest.raises(NotAllowedError, match="missing"):
        connect(api.port).failed_jobs()
    with pytest.raises(NotAllowedError, match="wrong"):
        connect(api.port, key="other").failed_jobs()
    assert "failed_jobs" in connect(api.port, key=ADMIN_KEY + "\t".strip()).failed_jobs()


# --- keys of jobs, and lost answers ---------------------------------------------------------------


def test_a_key_of_ones_own(api: Api, connect: Connect, jobs: Jobs) -> None:
    client = connect(api.port)
    first = client.enqueue("fate", 1, idempotency_key='a, "b"')
    again = client.enqueue("fate", 1, idempotency_key='a, "b"')
    assert (first.outcome, again.outcome, first.id) == ("created", "existing", again.id)
    with pytest.raises(IdempotencyConflict) as caught:
        client.enqueue("fate", 2, idempotency_key='a, "b"')
    assert (caught.value.id, caught.value.differs) == (int(first.id), ("payload",))
    with pytest.raises(IdempotencyConflict):
        client.enqueue_many([{"type": "fate", "payload": 3, "idempotency_key": 'a, "b"'}])
    with pytest.raises(InputError) as refused:
        client.enqueue("fate", idempotency_key="")
    assert refused.value.field == "idempotency_key"
    with pytest.raises(InputError):
        client.enqueue("fate", on_conflict="replace")  # of what?
    assert count(jobs) == 1


@pytest.mark.parametrize("after", [0, 1, 20, 200])
def test_an_answer_that_is_lost_doubles_no_job(
    api: Api, connect: Connect, jobs: Jobs, proxy_to: Callable[..., Proxy], after: int
) -> None:
    """The request arrives and the job is stored; of the answer come so many bytes."""
    proxy = proxy_to("127.0.0.1", api.port)
    client = connect(proxy.port, retries=1000)
    lost = 0
    for n in range(5):
        proxy.cut_answers_after(after)
        done: list[Any] = []
        thread = threading.Thread(target=lambda n=n, done=done: done.append(client.enqueue("fate", n)))
        thread.start()
        wait_until(lambda n=n: count(jobs) > n, 30)  # stored, and nobody knows
        proxy.forward()
        thread.join(60)
        lost += done[0].outcome == "existing"
    proxy.cut_answers_after(after)
    thread = threading.Thread(
        target=lambda: done.append(client.enqueue_many([{"type": "fate", "payload": n} for n in (5, 6, 7)]))
    )
    thread.start()
    wait_until(lambda: count(jobs) == 8, 30)
    proxy.forward()
    thread.join(60)
    rows = jobs.conn.execute("select payload::text as n from aqd.jobs order by id").fetchall()
    assert [row["n"] for row in rows] == [str(n) for n in range(8)]
    assert lost > 0 or after > 20, "nothing was lost: the test tests nothing"
    assert len({each.id for each in done[1]}) == 3


@pytest.mark.parametrize("on_conflict", ["replace", "reject"])
def test_what_is_not_the_same_when_done_twice_is_not_repeated(
    api: Api, connect: Connect, jobs: Jobs, proxy_to: Callable[..., Proxy], on_conflict: str
) -> None:
    proxy = proxy_to("127.0.0.1", api.port)
    client = connect(proxy.port, retries=1000, key=ADMIN_KEY)
    client.get(client.enqueue("fate", 1).id)
    jobs.conn.execute("update aqd.jobs set state = 'FAILED'")
    (id,) = [job.id for job in client.jobs()]
    proxy.cut_answers_after(0)
    with pytest.raises(OutcomeUnknown) as caught:
        client.enqueue("fate", 2, idempotency_key="k", on_conflict=on_conflict)
    assert caught.value.idempotency_key == "k"
    with pytest.raises(OutcomeUnknown):
        client.retry(id)
    proxy.forward()
    assert client.get(id).status == "QUEUED"
    assert count(jobs) == 2


def test_where_nobody_listens(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        connect(port, retries=2).enqueue("fate")


def test_a_service_that_comes_back(api: Api, connect: Connect, proxy_to: Callable[..., Proxy]) -> None:
    """Nothing was sent, so anything is sent again."""
    proxy = proxy_to("127.0.0.1", api.port)
    client = connect(proxy.port, retries=1000, key=ADMIN_KEY)
    proxy.refuse()
    timer = threading.Timer(0.3, proxy.accept)
    timer.start()
    assert client.enqueue("fate").outcome in ("created", "existing")
    timer.join()


def test_the_database_is_away(start_api: Callable[..., Api], connect: Connect, pg: Postgres) -> None:
    api = start_api(database="postgresql://postgres@127.0.0.1:9/nothing?connect_timeout=2")
    with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
        connect(api.port, retries=0).enqueue("fate")
    name = pg.create_database()
    try:
        other = start_api(database=pg.url(name))
        with pytest.raises(SchemaMismatch):
            connect(other.port, retries=3).enqueue("fate")
        assert other.stop() == 0
    finally:
        pg.drop_database(name)


# --- servers that are none of ours ----------------------------------------------------------------


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers, one a connection, the last one for ever; and what it was asked."""
    asked: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, _ = listener.accept()
                with conn:
                    conn.settimeout(10)
                    asked.append(conn.recv(65536))
                    conn.sendall(answers[min(len(asked), len(answers)) - 1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], asked
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def answer(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def problem(status: int, kind: str, **members: Any) -> bytes:
    import json

    document = {"type": f"urn:aqd:{kind}", "title": "t", "status": status, "detail": "d", **members}
    return answer(status, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (answer(200, b"<html>"), ServiceUnavailable),
        (answer(200, b"[]"), ServiceUnavailable),
        (answer(200, b'{"id": 5}'), ServiceUnavailable),
        (answer(204, b""), ServiceUnavailable),
        (answer(301, b"", "Location: http://127.0.0.1:1/"), ServiceUnavailable),
        (answer(404, b"<html>not here"), ServiceUnavailable),
        (answer(401, b"<html>who are you"), NotAllowedError),
        (answer(500, b"\xff\0"), ServiceUnavailable),
        (answer(200, b"\x1f\x8b", "Content-Encoding: gzip"), ServiceUnavailable),
        (b"HTTP/1.1 999999 what\r\n\r\n", ServiceUnavailable),
        (b"\0" * 100, ServiceUnavailable),
        (b"", ServiceUnavailable),
        (problem(503, "outcome-unknown"), OutcomeUnknown),
        (problem(503, "database-unavailable"), DatabaseUnavailable),
        (problem(503, "locked"), Locked),
        (problem(409, "key-in-progress"), KeyInProgress),
        (problem(409, "wrong-state"), ConflictError),
        (problem(409, "idempotency-conflict", job_id="7", differs=["queue"]), IdempotencyConflict),
        (problem(404, "not-found"), NotFoundError),
        (problem(413, "too-large", bound=5), InputError),
        (problem(403, "read-only"), NotAllowedError),
        (problem(429, "x"), ServiceUnavailable),
    ],
)
def test_strange_answers(connect: Connect, given: bytes, error: type[Exception]) -> None:
    with answering(given) as (port, _), pytest.raises(error) as caught:
        connect(port, retries=1).get(1)
    assert type(caught.value) is error
    assert str(caught.value)


def test_what_is_repeated(connect: Connect) -> None:
    good = answer(200, b'{"id": "1", "status": "QUEUED"}')
    for first in (b"", problem(503, "outcome-unknown"), answer(502), answer(504, b"proxy"), answer(429)):
        with answering(first, first, good) as (port, asked):
            assert connect(port, retries=2).get(1).status == "QUEUED"
            assert len(asked) == 3
            assert len(set(asked)) == 1, "the same request, key and all"
    for first in (problem(503, "locked"), problem(409, "key-in-progress")):
        with answering(first, first, answer(200, b"{}")) as (port, asked):
            assert connect(port, retries=2).retry(1) == {}, "nothing has happened before"
            assert len(asked) == 3
    for first in (
        answer(500),
        problem(404, "not-found"),
        problem(409, "wrong-state"),
        problem(503, "schema-mismatch"),
        answer(400),
    ):
        with answering(first, good) as (port, asked):
            with pytest.raises(Exception, match=r"."):
                connect(port, retries=2).get(1)
            assert len(asked) == 1
    for first in (b"", answer(502), problem(503, "database-unavailable")):
        with answering(first, good) as (port, asked):
            with pytest.raises((ServiceUnavailable, DatabaseUnavailable)):
                connect(port, retries=2).retry(1)
            assert len(asked) == 1


def test_retry_after_is_kept() -> None:
    """Decided without waiting for it."""
    call = http_calls.Call("GET", "/", lambda _: None)
    tries = http_calls.Tries(call, 3)
    request = httpx.Request("GET", "http://x/")

    def refusal(value: str) -> httpx.Response:
        return httpx.Response(503, headers={"Retry-After": value}, request=request)

    assert tries.refused(refusal("7")) == 7.0
    assert tries.refused(refusal("Fri, 31 Dec 1999 23:59:59 GMT")) <= 0.2
    assert tries.refused(refusal("999999999")) == http_calls.RETRY_AFTER_MAX_S
    with pytest.raises(ServiceUnavailable):
        tries.refused(refusal("7"))
    tries = http_calls.Tries(call, 1000)
    error = httpx.ReadError("x")
    pauses = [tries.broken(error) for _ in range(20)]
    assert 0.05 <= pauses[0] <= 0.1
    assert min(pauses[10:]) >= http_calls.PAUSE_MAX_S / 2
    assert max(pauses) <= http_calls.PAUSE_MAX_S


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"base_url": "127.0.0.1:4000"}, "base_url"),
        ({"base_url": "ftp://x"}, "base_url"),
        ({"base_url": ""}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"base_url": "http://x\n"}, "base_url"),
        ({"base_url": "http://x/\ud800"}, "base_url"),
        ({"base_url": "http://x:port"}, "base_url"),
        ({"base_url": None}, "base_url"),
        ({"key": "a\nb"}, "key"),
        ({"key": " "}, "key"),
        ({"key": 5}, "key"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"retries": -1}, "retries"),
        ({"retries": 1.5}, "retries"),
    ],
)
def test_wrong_options(options: dict[str, Any], field: str) -> None:
    for kind in (http_client.Client, http_client.AsyncClient):
        with pytest.raises(InputError) as caught:
            kind(**{"base_url": "http://127.0.0.1:1", **options})
        assert caught.value.field == field


def test_wrong_arguments_are_refused_here(connect: Connect) -> None:
    """Before anything is sent: nobody listens."""
    client = connect(1, retries=0)
    for arguments, field in [
        ({"type": ""}, "type"),
        ({"type": "a", "payload": {"x": "\0"}}, "payload.x"),
        ({"type": "a", "payload": "\ud800"}, "payload"),
        ({"type": "a", "payload": float("nan")}, "payload"),
        ({"type": "a", "run_at": datetime(2030, 1, 1)}, "run_at"),
        ({"type": "a", "meta": {"x": "\0"}}, "meta.x"),
        ({"type": "a", "tags": ["x y"]}, "tags[0]"),
        ({"type": "a", "qeue": "x"}, ""),
    ]:
        with pytest.raises(InputError) as caught:
            client.enqueue(**arguments)
        assert caught.value.field == field
    for id in ("x", "0", -1, "1/retry", 1.5):
        with pytest.raises(InputError):
            client.get(id)
    for ids, field in [
        ("123", "ids"),  # three jobs that nobody has named
        (b"123", "ids"),
        (5, "ids"),
        ([], "ids"),
        (range(1, 1002), "ids"),
        ([1, "x"], "ids[1]"),
        ([1, 2, True], "ids[2]"),
    ]:
        with pytest.raises(InputError) as caught:
            client.change_jobs("delete", ids=ids)
        assert caught.value.field == field
    for timeout_s in (-1, float("nan"), "1", True):
        with pytest.raises(InputError):
            client.wait(1, timeout_s)
    with pytest.raises(InputError):
        client.pause("../x y")


# --- the two clients, and the API -----------------------------------------------------------------


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(each).parameters)
            for name, each in vars(kind).items()
            if inspect.isfunction(each) and not name.startswith("_")
        }

    assert methods(http_client.Client) == methods(http_client.AsyncClient)


def test_a_job_has_all_that_the_api_tells() -> None:
    told = set(documents.JobInFull.__struct_fields__) - {"jobId"}
    assert told == set(http_client.Job.__struct_fields__)
    assert set(documents.Submitted.__struct_fields__) - {"jobId"} == set(
        http_client.Submitted.__struct_fields__
    )


def test_neither_database_nor_server_is_needed() -> None:
    import subprocess
    import sys

    program = (
        "import sys, aqd.http_client;"
        "sys.exit(sum(name.split('.')[0] in ('psycopg', 'falcon', 'gunicorn') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_example_of_the_readme(api: Api, database_url: str) -> None:
    with http_client.Client(f"http://127.0.0.1:{api.port}/", key=ADMIN_KEY) as aqd:
        made = aqd.enqueue("send_mail", {"order": 42}, delay_s=5)
    with psycopg.connect(database_url) as conn:
        assert conn.execute("select id::text from aqd.jobs").fetchall() == [(made.id,)]
