"""``GET /jobs/{id}?wait_s=``: the answer comes when the job has ended, and nobody else pays for that.

The node's part is played by the statements that a node runs; the last test has a real one.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from aqd import store
from aqd.claims import ClaimBook
from aqd.config import Database
from tests.fixtures.api import ADMIN_KEY, Answer, Api, read_answer, running_api
from tests.fixtures.daemon import Daemon
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import LocalPostgres
from tests.fixtures.processes import wait_until

LONG_S = 60  # longer than any test may take


@pytest.fixture
def node(database_url: str) -> Iterator[store.Connection]:
    """The connection of one that claims and records."""
    with store.connect(Database(url=database_url), "tests") as conn:
        yield conn


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def claim(node: store.Connection) -> store.Completion:
    """Claims the one job that is due: how it will be recorded as completed."""
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    (claimed,) = book.claim(node, 10)
    return store.Completion(claimed.id, claimed.token, '{"done": true}', 0.0)


def complete(node: store.Connection) -> None:
    """Claims the one job that is due and records it as completed."""
    assert store.record_completed(node, [claim(node)])


def backends(jobs: Jobs, name: str = "aqd api waiters%") -> list[int]:
    # In the test's own database: there is the API that the file's tests share, too.
    rows = jobs.conn.execute(
        "select pid from pg_stat_activity where datname = current_database() and application_name like %s",
        [name],
    )
    return [row["pid"] for row in rows]


def announced(jobs: Jobs) -> bool:
    """Whether somebody waits."""
    statement = "select last_value > extract(epoch from clock_timestamp()) as waited from aqd.waits"
    return bool(jobs.conn.execute(statement).fetchone()["waited"])


Waiting = Callable[..., Future[Answer]]


@pytest.fixture
def waiting(jobs: Jobs, threads: ThreadPoolExecutor) -> Waiting:
    """Sends a request that waits; returns when it is certainly waiting."""

    def begin(api: Api, id: int, wait_s: float = LONG_S) -> Future[Answer]:
        path = f"/jobs/{id}?wait_s={wait_s}"
        answer = threads.submit(api.request, "GET", path, timeout_s=LONG_S)
        wait_until(lambda: answer.done() or (backends(jobs) and announced(jobs)), 30)
        return answer

    return begin


def wait_everywhere(api: Api, waiting: Waiting, *ids: int) -> list[Future[Answer]]:
    """Requests that wait in all the places there are.

    Whether they do is asked by one more, which may have a place for a moment: the request that comes then is answered.
    """
    answers = [waiting(api, id) for id in ids]

    def refused() -> bool:
        for place, id in enumerate(ids):
            if answers[place].done():
                answers[place] = waiting(api, id)
        return "retry-after" in api.get(f"/jobs/{ids[0]}?wait_s=0.01").headers

    wait_until(refused, 30)
    return answers


def test_it_answers_when_the_job_is_completed(
    api: Api, jobs: Jobs, node: store.Connection, waiting: Waiting
) -> None:
    id = jobs.add({"a": 1})
    answer = waiting(api, id)
    done = claim(node)
    assert not answer.done(), "PROCESSING is not the end"
    store.record_completed(node, [done])
    seen = answer.result()
    assert (seen.status, seen.json["status"], seen.json["result"]) == (200, "COMPLETED", {"done": True})
    assert "retry-after" not in seen.headers


def test_it_answers_when_the_job_has_failed_for_good(
    api: Api, jobs: Jobs, node: store.Connection, waiting: Waiting
) -> None:
    id = jobs.add()
    answer = waiting(api, id)
    for retry_in_s in (0.0, None):
        assert not answer.done(), "a retry is not the end"
        done = claim(node)
        failure = store.Failure(done.id, done.token, "failed", "boom", None, retry_in_s, 0.0)
        store.record_failed(node, [failure])
    assert answer.result().json["status"] == "FAILED"


def test_it_answers_when_the_job_is_cancelled(
    api: Api, jobs: Jobs, node: store.Connection, waiting: Waiting
) -> None:
    queued = jobs.add(delay_s=3600)
    answer = waiting(api, queued)
    store.cancel_job(node, queued)
    assert answer.result().json["status"] == "CANCELLED"
    running = jobs.add()
    answer = waiting(api, running)
    done = claim(node)
    store.cancel_job(node, running)
    store.record_failed(node, [store.Failure(done.id, done.token, "cancelled", "asked", None, None, 0.0)])
    assert answer.result().json["status"] == "CANCELLED"


def test_a_job_that_vanishes_is_not_found(api: Api, jobs: Jobs, waiting: Waiting) -> None:
    id = jobs.add()
    answer = waiting(api, id)
    jobs.conn.execute("delete from aqd.jobs")
    answer.result().problem(404, f"there is no job {id}")


def test_what_has_ended_or_does_not_exist_is_not_waited_for(
    api: Api, jobs: Jobs, node: store.Connection
) -> None:
    id = jobs.add()
    complete(node)
    assert api.get(f"/jobs/{id}?wait_s=60").json["status"] == "COMPLETED"
    api.get(f"/jobs/{id + 1}?wait_s=60").problem(404)
    api.get("/jobs/x?wait_s=60").problem(404)
    assert api.get(f"/jobs/{jobs.add()}?wait_s=0").json["status"] == "QUEUED"
    assert backends(jobs) == []
    assert not announced(jobs)


def test_when_the_time_is_over_the_present_state_is_told(api: Api, jobs: Jobs) -> None:
    seen = api.get(f"/v1/jobs/{jobs.add()}?wait_s=0.05")
    assert (seen.status, seen.json["status"]) == (200, "QUEUED")
    assert "retry-after" not in seen.headers
    head = api.request("HEAD", f"/jobs/{jobs.add()}?wait_s=0.05")
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(
    "value", ["-1", "60.1", "61", "nan", "inf", "1e9", "x", "1,5", "", "%00", "1&wait_s=2"]
)
def test_a_wrong_time_is_refused(shared_api: Api, value: str) -> None:
    problem = shared_api.get(f"/jobs/1?wait_s={value}").problem(400)
    assert problem["field"] == "wait_s"


def test_one_connection_for_all_that_wait(
    start_api: Callable[..., Api], jobs: Jobs, node: store.Connection, waiting: Waiting
) -> None:
    api = start_api(AQD_API_THREADS="16")
    ids = [jobs.add() for _ in range(6)]
    answers = [waiting(api, id) for id in (*ids, ids[0], ids[0])]
    assert len(backends(jobs)) == 1
    # None of them holds another one: those may all go.
    jobs.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'aqd api'"
    )
    book = ClaimBook("node", 30.0)
    book.set_types(frozenset({"fate"}))
    claimed = book.claim(node, 10)
    store.record_completed(node, [store.Completion(job.id, job.token, "1", 0.0) for job in claimed])
    assert {answer.result().json["status"] for answer in answers} == {"COMPLETED"}
    assert all(answer.result().json["result"] == 1 for answer in answers)


def test_half_of_the_threads_wait_and_the_others_serve(
    api: Api, jobs: Jobs, node: store.Connection, waiting: Waiting
) -> None:
    """Four threads: two wait. Whoever comes then is told at once, and when to come again."""
    id = jobs.add()
    answers = wait_everywhere(api, waiting, id, id)
    seen = api.get(f"/jobs/{id}?wait_s=60")
    assert (seen.status, seen.json["status"], seen.headers["retry-after"]) == (200, "QUEUED", "1")
    assert api.get("/health").status == 200
    assert not any(answer.done() for answer in answers)
    complete(node)
    assert [answer.result().json["status"] for answer in answers] == ["COMPLETED"] * 2
    assert (
        "retry-after"
        not in wait_until(
            lambda: (seen := api.get(f"/jobs/{jobs.add()}?wait_s=0.01")).status == 200 and seen, 30
        ).headers
    )


def test_a_single_thread_never_waits(start_api: Callable[..., Api], jobs: Jobs) -> None:
    api = start_api(AQD_API_THREADS="1")
    seen = api.get(f"/jobs/{jobs.add()}?wait_s=60")
    assert (seen.status, seen.json["status"], seen.headers["retry-after"]) == (200, "QUEUED", "1")


def test_a_client_that_hangs_up_gives_its_place_back(start_api: Callable[..., Api], jobs: Jobs) -> None:
    api = start_api(AQD_API_THREADS="2")
    id = jobs.add()
    request = f"GET /jobs/{id}?wait_s=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    def refused() -> bool:
        return "retry-after" in api.get(f"/jobs/{id}?wait_s=0.01").headers

    for half in (False, True):
        with api.connect() as sock:
            sock.sendall(request)

            def waits(sock: socket.socket = sock) -> bool:
                if select.select([sock], [], [], 0)[0]:  # the place was another one's at that moment
                    read_answer(sock)
                    sock.sendall(request)
                return refused()

            wait_until(waits, 30)
            if half:
                # One that only says that it will send nothing more is answered.
                sock.shutdown(socket.SHUT_WR)
                assert read_answer(sock).json["status"] == "QUEUED"
        wait_until(lambda: not refused(), 30)


@pytest.mark.parametrize("way", ["stop", "reload"])
def test_whoever_waits_is_answered_when_the_process_ends(
    api: Api, jobs: Jobs, waiting: Waiting, way: str
) -> None:
    """Not when their time is over, for which the service does not wait: it would cut them off."""
    answers = wait_everywhere(api, waiting, jobs.add(), jobs.add())
    if way == "stop":
        assert api.stop() == 0
    else:
        (before,) = api.workers
        api.process.send_signal(1)
        wait_until(lambda: before not in api.workers, 30)
    for answer in answers:
        assert (answer.result().status, answer.result().json["status"]) == (200, "QUEUED")


@pytest.mark.parametrize("notify", ["on", "off"])
def test_what_nobody_tells_is_seen(
    start_api: Callable[..., Api], jobs: Jobs, database_url: str, notify: str
) -> None:
    """Notifications that are switched off on one of the two sides."""
    api = start_api(AQD_DATABASE_NOTIFY=notify)
    id = jobs.add()
    answer = api_waits(api, id)
    wait_until(lambda: backends(jobs), 30)
    with store.connect(Database(url=database_url, notify=notify == "off"), "tests") as node:
        complete(node)
    assert answer.result(LONG_S).json["status"] == "COMPLETED"


@pytest.mark.parametrize("option", ["role=pg_read_all_data", "default_transaction_read_only=on"])
def test_who_may_not_announce_looks(
    option: str, start_api: Callable[..., Api], jobs: Jobs, node: store.Connection, database_url: str
) -> None:
    """A role that only reads, a session that does not write."""
    jobs.conn.execute("grant usage on schema aqd to pg_read_all_data")  # PostgreSQL 14 gives it usage of all
    url = conninfo.make_conninfo(database_url, options=f"-c {option}", target_session_attrs="any")
    api = start_api(url)
    for _ in range(2):
        answer = api_waits(api, jobs.add())
        wait_until(lambda: backends(jobs), 30)
        complete(node)
        assert answer.result(LONG_S / 2).json["status"] == "COMPLETED"
        assert not announced(jobs)
    assert len([line for line in api.log if "waiting by looks only" in line]) == 1, api.tail()
    assert not [line for line in api.log if "database refuses" in line or "database away" in line], api.tail()


def test_on_a_standby_it_looks(
    private_pg: Callable[..., LocalPostgres], start_api: Callable[..., Api]
) -> None:
    """Where neither announcing nor listening is allowed: a cluster that waits for a primary's log."""
    pg = private_pg()
    name = pg.create_database(template=pg.template)
    with psycopg.connect(pg.url(name), autocommit=True) as conn:
        (id,) = conn.execute("select aqd.enqueue('fate')").fetchone() or ()
    pg.stop()
    (pg.data / "standby.signal").touch()
    pg.start()
    api = start_api(conninfo.make_conninfo(pg.url(name), target_session_attrs="any"), AQD_API_READ_ONLY="1")
    seen = api.get(f"/jobs/{id}?wait_s=1.5")
    assert (seen.status, seen.json["status"]) == (200, "QUEUED")
    assert len([line for line in api.log if "waiting by looks only" in line]) == 1, api.tail()
    assert not [line for line in api.log if "database refuses" in line or "database away" in line], api.tail()


def api_waits(api: Api, id: int) -> Future[Answer]:
    """A request that waits, or soon does."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(api.request("GET", f"/jobs/{id}?wait_s={LONG_S}", timeout_s=LONG_S))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer


def test_several_processes(
    start_api: Callable[..., Api], jobs: Jobs, node: store.Connection, threads: ThreadPoolExecutor
) -> None:
    api = start_api(AQD_API_WORKERS="2", AQD_API_THREADS="8")
    api.wait_workers(2)
    id = jobs.add()
    answers = []
    while len(backends(jobs)) < 2:  # gunicorn's workers take connections as they please
        assert len(answers) < 60
        answers.append(threads.submit(api.request, "GET", f"/jobs/{id}?wait_s=60", timeout_s=LONG_S))
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: len(backends(jobs)) == 2, 0.3)
    complete(node)
    # Those for which there was no room have been told before.
    states = [
        (answer.result().json["status"], "retry-after" in answer.result().headers) for answer in answers
    ]
    assert set(states) <= {("COMPLETED", False), ("QUEUED", True)}
    assert states.count(("COMPLETED", False)) >= 2


def test_a_lost_listener_comes_back(api: Api, jobs: Jobs, node: store.Connection, waiting: Waiting) -> None:
    answer = waiting(api, jobs.add())
    (pid,) = backends(jobs)
    jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    wait_until(lambda: backends(jobs) not in ([], [pid]), 30)
    complete(node)
    assert answer.result().json["status"] == "COMPLETED"


def test_the_database_goes_away_meanwhile(private_pg: Callable[..., LocalPostgres]) -> None:
    server = private_pg()
    with running_api(server) as api, contextlib.closing(Jobs(api.database_url)) as jobs:
        id = jobs.add()
        long = api_waits(api, id)
        wait_until(lambda: backends(jobs) and announced(jobs), 30)
        server.stop("immediate")
        api.get(f"/jobs/{id}?wait_s=60").problem(503)
        assert not long.done(), "it may come back"
        server.start()
        with store.connect(Database(url=api.database_url), "tests") as node:
            complete(node)
        assert long.result(LONG_S).json["status"] == "COMPLETED"
        with contextlib.suppress(psycopg.OperationalError):
            jobs.conn.execute("select 1")  # notices that its connection is gone
        short = api_waits(api, jobs.add())
        wait_until(lambda: backends(jobs), 30)
        server.stop("immediate")
        assert api.stop() == 0
        with contextlib.suppress(ConnectionError):
            short.result(LONG_S).problem(503)
        server.start()


def test_a_real_node_tells(daemon: Daemon, start_api: Callable[..., Api], jobs: Jobs) -> None:
    api = start_api()
    begun = time.monotonic()
    for n in range(20):
        made = api.post("/jobs", {"type": "fate", "payload": {"return": n}}).json
        seen = api.get(f"/jobs/{made['id']}?wait_s=60").json
        assert (seen["status"], seen["result"]) == ("COMPLETED", n)
    print(f"{(time.monotonic() - begun) / 20 * 1000:.1f} ms a job that is submitted and waited for")
    made = api.post("/jobs", {"type": "fate_once", "payload": {"raise": "no"}}).json
    assert api.get(f"/jobs/{made['id']}?wait_s=60").json["status"] == "FAILED"


def test_keys_do_not_change(api: Api, jobs: Jobs) -> None:
    """An admin's key is as good as none for looking."""
    headers: dict[str, Any] = {"x-admin-key": ADMIN_KEY.encode()}
    seen = api.request("GET", f"/jobs/{jobs.add()}?wait_s=0.01", headers=headers)
    assert seen.json["status"] == "QUEUED"


def test_psycopg_is_not_needed_by_hand(database_url: str) -> None:
    """What the README tells people to do in SQL."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("listen aqd_ended")
        conn.execute("select setval('aqd.waits', extract(epoch from now())::bigint + 15)")
        id = conn.execute("select aqd.enqueue('fate')").fetchone()[0]
        conn.execute("select aqd.cancel(%s)", [id])
        assert [each.payload for each in conn.notifies(timeout=30, stop_after=1)] == [str(id)]
