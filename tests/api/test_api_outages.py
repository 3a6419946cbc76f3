"""The database goes away in every way that we could think of: 503 in bounded time, never 500, and back
within five seconds without a restart (F54)."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.fixtures.api import Answer, Api, running_api
from tests.fixtures.postgres import LocalPostgres, local_binaries
from tests.fixtures.processes import wait_until
from tests.fixtures.proxy import Proxy

GOOD = {"type": "x"}
BACK_S = 5.0


class Setting:
    """An API on a cluster that may be stopped."""

    def __init__(self, server: LocalPostgres, api: Api) -> None:
        self.server = server
        self.api = api

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.api.database_url, autocommit=True, application_name="tests")

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        with self.connect() as conn:
            cursor = conn.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def jobs(self) -> set[str]:
        return {str(id) for (id,) in self.sql("select id from aqd.all_jobs")}

    def terminate_all(self) -> int:
        found = self.sql(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'aqd api'"
        )
        return len(found)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    """A cluster that these tests may stop; it runs again afterwards."""
    options = {"max_connections": "24", "max_wal_senders": "0", "superuser_reserved_connections": "0"}
    with contextlib.closing(LocalPostgres(local_binaries(), options)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(server: LocalPostgres) -> Iterator[Setting]:
    with running_api(server, AQD_DATABASE_STATEMENT_TIMEOUT_S="2") as api:
        yield Setting(server, api)


@pytest.fixture
def setting(served: Setting) -> Iterator[Setting]:
    workers = served.api.wait_workers()
    back(served.api)
    yield served
    assert served.api.workers == workers  # recovery without a restart


def unavailable(answer: Answer, word: str = "") -> None:
    answer.problem(503, word)
    assert int(answer.headers["retry-after"]) > 0


def back(api: Api) -> None:
    """It serves again, soon."""
    began = time.monotonic()
    wait_until(lambda: api.post("/jobs", GOOD).status == 201, BACK_S)
    assert api.get("/health").status == 200
    assert api.get("/jobs").status == 200
    assert time.monotonic() - began < BACK_S


def fill_pool(api: Api) -> None:
    """Every thread gets its connection."""
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(lambda _: api.post("/jobs", GOOD), range(24)))
    assert {answer.status for answer in answers} == {201}


def test_stopped_and_started(setting: Setting) -> None:
    api = setting.api
    fill_pool(api)
    mark = len(api.log)
    for mode in ("fast", "immediate"):
        setting.server.stop(mode)
        for _ in range(5):
            for ask in (
                lambda: api.get("/jobs"),
                lambda: api.get("/jobs/1"),
                lambda: api.post("/jobs", GOOD),
            ):
                began = time.monotonic()
                unavailable(ask())
                assert time.monotonic() - began < 2
            assert api.get("/health").status == 503
        setting.server.start()
        back(api)
    complaints = [line for line in api.log[mark:] if "database away" in line]
    assert 1 <= len(complaints) <= 6, complaints


def test_started_before_the_database(setting: Setting, start_api: Callable[..., Api]) -> None:
    setting.server.stop()
    api = start_api(database=setting.api.database_url)
    unavailable(api.post("/jobs", GOOD))
    assert api.get("/health").status == 503
    setting.server.start()
    back(api)
    back(setting.api)


def test_connections_that_died_idle_are_not_handed_out(setting: Setting) -> None:
    fill_pool(setting.api)
    for _ in range(3):
        assert setting.terminate_all() >= 1
        wait_until(
            lambda: not setting.sql("select 1 from pg_stat_activity where application_name = 'aqd api'")
        )
        for _ in range(4):
            assert setting.api.post("/jobs", GOOD).status == 201


def test_nothing_but_201_and_503_over_restarts(setting: Setting) -> None:
    stop = threading.Event()

    def hammer() -> list[Answer]:
        answers = []
        while not stop.wait(0.01):
            answers.append(setting.api.post("/jobs", GOOD))
        return answers

    with ThreadPoolExecutor(4) as executor:
        running = [executor.submit(hammer) for _ in range(4)]
        try:
            for mode in ("fast", "immediate"):
                setting.server.restart(mode)
                back(setting.api)
        finally:
            stop.set()
        answers = [answer for each in running for answer in each.result()]
    assert set(Counter(answer.status for answer in answers)) <= {201, 503}
    assert {answer.json["id"] for answer in answers if answer.status == 201} <= setting.jobs()


def locked_post(setting: Setting, meanwhile: Callable[[], object]) -> Answer:
    """A POST whose statement waits for a lock while ``meanwhile`` happens."""
    with setting.connect() as conn, ThreadPoolExecutor(1) as executor:
        conn.execute("begin")
        conn.execute("lock table aqd.jobs in access exclusive mode")
        answer = executor.submit(setting.api.post, "/jobs", GOOD)
        waits = (
            "select 1 from pg_stat_activity where application_name = 'aqd api' and wait_event_type = 'Lock'"
        )
        wait_until(lambda: setting.sql(waits))
        meanwhile()
        found = answer.result()
        conn.execute("rollback")
    return found


def test_a_statement_that_waits_too_long_is_ended(setting: Setting) -> None:
    fill_pool(setting.api)
    before = setting.jobs()
    began = time.monotonic()
    answer = locked_post(setting, lambda: None)
    unavailable(answer, "lock")
    assert answer.json["type"] == "urn:aqd:locked"
    assert time.monotonic() - began < 4
    assert setting.jobs() == before
    back(setting.api)


def test_a_post_whose_connection_breaks_is_not_sent_twice(setting: Setting) -> None:
    fill_pool(setting.api)
    before = setting.jobs()
    answer = locked_post(setting, setting.terminate_all)
    unavailable(answer, "not known")
    assert answer.json["type"] == "urn:aqd:outcome-unknown"
    assert setting.jobs() == before
    back(setting.api)


def test_a_get_whose_connection_breaks_is_repeated(setting: Setting) -> None:
    fill_pool(setting.api)
    with setting.connect() as conn, ThreadPoolExecutor(1) as executor:
        conn.execute("begin")
        conn.execute("lock table aqd.jobs in access exclusive mode")
        answer = executor.submit(setting.api.get, "/jobs")
        waits = (
            "select pid from pg_stat_activity where application_name = 'aqd api' and wait_event_type = 'Lock'"
        )
        ((first,),) = wait_until(lambda: setting.sql(waits))
        # The idle ones first, until they are gone: a backend that is just about to end still takes a statement.
        others = f"from pg_stat_activity where application_name = 'aqd api' and pid <> {first}"
        setting.sql(f"select pg_terminate_backend(pid) {others}")
        wait_until(lambda: not setting.sql(f"select pid {others}"))
        setting.sql(f"select pg_terminate_backend({first})")
        wait_until(lambda: setting.sql(waits) not in ([], [(first,)]))
        conn.execute("rollback")
        assert answer.result().status == 200


def test_read_only_and_back(setting: Setting) -> None:
    fill_pool(setting.api)
    setting.sql("alter system set default_transaction_read_only = on")
    setting.sql("select pg_reload_conf()")
    wait_until(lambda: setting.api.post("/jobs", GOOD).status == 503)
    for _ in range(3):
        unavailable(setting.api.post("/jobs", GOOD))
    with setting.connect() as conn:
        conn.execute("set default_transaction_read_only = off")
        conn.execute("alter system reset default_transaction_read_only")
        conn.execute("select pg_reload_conf()")
    back(setting.api)


def test_too_many_connections(setting: Setting) -> None:
    api = setting.api
    setting.terminate_all()
    with contextlib.ExitStack() as held:
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                last = held.enter_context(contextlib.closing(psycopg.connect(api.database_url)))
        for _ in range(3):
            unavailable(api.post("/jobs", GOOD))
        last.close()
        wait_until(lambda: api.post("/jobs", GOOD).status == 201, BACK_S)
        # One connection must do for all threads: the others wait for it instead of failing.
        with ThreadPoolExecutor(4) as executor:
            answers = list(executor.map(lambda _: api.post("/jobs", GOOD), range(20)))
        assert Counter(answer.status for answer in answers)[201] >= 10
        assert {answer.status for answer in answers} <= {201, 503}
    back(api)


# --- behind a proxy -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(server: LocalPostgres) -> Iterator[Proxy]:
    with contextlib.closing(Proxy("127.0.0.1", server.port)) as made:
        yield made


@pytest.fixture(scope="module")
def served_by_proxy(server: LocalPostgres, proxy: Proxy) -> Iterator[Setting]:
    # Without prepared statements: a request to the database is one message, its answer one.
    limits = {"AQD_DATABASE_STATEMENT_TIMEOUT_S": "1", "AQD_DATABASE_PREPARE": "false"}
    with running_api(server, through=proxy.port, **limits) as api:
        yield Setting(server, api)


@pytest.fixture
def proxied(served_by_proxy: Setting, proxy: Proxy) -> Iterator[Setting]:
    proxy.accept()
    proxy.forward()
    workers = served_by_proxy.api.wait_workers()
    back(served_by_proxy.api)
    yield served_by_proxy
    assert served_by_proxy.api.workers == workers


def test_a_database_that_falls_silent(proxied: Setting, proxy: Proxy) -> None:
    api = proxied.api
    fill_pool(api)
    proxy.swallow()
    began = time.monotonic()
    with ThreadPoolExecutor(12) as executor:
        asked = [executor.submit(api.post, "/jobs", GOOD) for _ in range(4)]
        asked += [executor.submit(api.get, "/jobs") for _ in range(4)]
        for answer in asked:
            unavailable(answer.result())
    assert api.get("/health").status == 503
    # Statement, connect and check have their limits, one after the other.
    assert time.monotonic() - began < 20
    proxy.forward()
    back(api)


def test_a_silence_longer_than_all_patience(proxied: Setting, proxy: Proxy) -> None:
    """New connections are swallowed as well: attempts to connect must end too, and not pile up."""
    api = proxied.api
    fill_pool(api)
    proxy.swallow()
    end = time.monotonic() + 12
    while time.monotonic() < end:
        assert api.get("/health").status == 503
    proxy.reset_all()
    proxy.forward()
    back(api)


@pytest.mark.parametrize("how", ["silence", "reset"])
def test_a_job_whose_commit_got_no_answer_is_stored_once(proxied: Setting, proxy: Proxy, how: str) -> None:
    api = proxied.api
    assert api.post("/jobs", GOOD).status == 201
    before = proxied.jobs()
    if how == "silence":
        proxy.swallow(answers=True)
    else:
        proxy.cut_answers_after(0)
    answer = api.post("/jobs", GOOD)
    unavailable(answer, "not known")
    assert answer.json["type"] == "urn:aqd:outcome-unknown"
    assert len(proxied.jobs() - before) == 1
    proxy.forward()
    proxy.reset_all()
    back(api)


def test_resets_while_idle(proxied: Setting, proxy: Proxy) -> None:
    fill_pool(proxied.api)
    for _ in range(3):
        proxy.reset_all()
        assert proxied.api.post("/jobs", GOOD).status == 201
        assert proxied.api.get("/jobs").status == 200


def test_connections_refused_by_reset(proxied: Setting, proxy: Proxy) -> None:
    proxy.refuse()
    proxy.reset_all()
    unavailable(proxied.api.post("/jobs", GOOD))
    unavailable(proxied.api.get("/jobs"))
    proxy.accept()
    back(proxied.api)
