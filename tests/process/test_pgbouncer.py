"""Behind PgBouncer in transaction mode (F52): each transaction may be in another session, and nothing of ours stays there.

A real PgBouncer with two server connections, whatever the number of nodes.
"""

import json
import threading
from collections import Counter
from urllib.request import urlopen

import psycopg
import pytest

from aqd import client, database, migrate, store
from aqd.config import Database
from tests.fixtures.jobs import Jobs
from tests.fixtures.pgbouncer import bouncer
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until
from tests.process.support import backends

__all__ = ["bouncer"]

DEAF = "jobs are found by polling only"
# What a session of ours has set, and those of others must not.
SETTINGS = (
    "enable_seqscan",
    "jit",
    "lock_timeout",
    "statement_timeout",
    "idle_in_transaction_session_timeout",
)


@pytest.fixture
def name(database_url):
    with psycopg.connect(database_url) as conn:
        return conn.info.dbname


@pytest.fixture
def pooled(bouncer, name):
    """URL of the test's database through a pooler with two connections to the server."""
    return bouncer().url(name)


def connect(url, **options):
    return database.connect(Database(url=url, **options), "tests", dispatcher=True)


def left_behind(url, direct):
    """What differs in the pool's sessions from a session of nobody's."""
    fresh = psycopg.connect(direct, autocommit=True)
    question = (
        "select array(select setting from pg_settings where name = any(%s) order by name), "
        "coalesce(current_setting('aqd.notify', true), ''), array(select pg_listening_channels()), "
        "(select count(*) from pg_prepared_statements), "
        "(select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())"
    )
    with fresh:
        expected = fresh.execute(question, [list(SETTINGS)]).fetchone()
    found = []
    # Two transactions at a time are in two sessions: all that there are.
    with (
        psycopg.connect(url, prepare_threshold=None) as first,
        psycopg.connect(url, prepare_threshold=None) as second,
    ):
        for conn in (first, second):
            found.append(conn.execute(question, [list(SETTINGS)]).fetchone())
        pids = {conn.execute("select pg_backend_pid()").fetchone() for conn in (first, second)}
    assert len(pids) == 2
    return [each for each in found if each != expected]


# --- one connection ------------------------------------------------------------------------------


def test_settings_are_there_and_are_not_left(pooled, database_url):
    conn = connect(pooled)
    assert database.is_pooled(conn)
    with conn.transaction():
        assert conn.execute("show enable_seqscan").fetchone() == ("off",)
    store.health(conn)
    assert left_behind(pooled, database_url) == []
    # The other way round: the planner obeys. (A table that was never analysed would be read as a whole.)
    plans = "select count(*) from pg_stat_user_tables where relname = 'jobs' and seq_scan > 0"
    with psycopg.connect(database_url, autocommit=True) as direct:
        direct.execute("select pg_stat_reset()")
        store.get_job(conn, 1)
        direct.execute("select pg_sleep(1.1)")  # statistics are written once a second
        assert direct.execute(plans).fetchone() == (0,)
    conn.close()


def test_statements_end_in_time(pooled, database_url):
    """statement_timeout and lock_timeout of the one statement, in whichever session it is."""
    job = client.enqueue(connect(pooled), "echo", {}).id
    with psycopg.connect(database_url) as holder:
        holder.execute("select from aqd.jobs where id = %s for update", [job])
        with pytest.raises(psycopg.errors.QueryCanceled):
            store.cancel_job(connect(pooled, statement_timeout_s=0.3), job)
        conn = database.connect(Database(url=pooled), "tests", lock_timeout_s=0.2)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            store.cancel_job(conn, job)
        assert store.health(conn).problem is None  # the connection is as good as before
    assert left_behind(pooled, database_url) == []


def test_options_in_the_url(pooled):
    """PgBouncer refuses them as they are."""
    url = pooled + "?options=-c%20work_mem%3D5MB%20--search-path%3Da%2C%5C%20b"
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
        psycopg.connect(url)
    with connect(url) as conn, conn.transaction():
        assert conn.execute("show work_mem").fetchone() == ("5MB",)
        assert conn.execute("show search_path").fetchone() == ("a, b",)


def test_a_pooler_that_keeps_sessions_apart(bouncer, name):
    """It looks the same from outside, so the configuration says it."""
    url = bouncer(pool_mode="session").url(name)
    assert database.is_pooled(connect(url))
    conn = connect(url, pooler="session")
    assert not database.is_pooled(conn)
    assert conn.execute("show enable_seqscan").fetchone() == ("off",)
    conn.close()


def test_waiting_on_a_connection_of_the_application(pooled, database_url):
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
        job = client.enqueue(conn, "echo", {}).id
        threading.Timer(
            0.3, lambda: client.cancel(psycopg.connect(database_url, autocommit=True), job)
        ).start()
        assert client.wait(conn, job, timeout_s=10).state == "CANCELLED"
    assert left_behind(pooled, database_url) == []


def test_history_is_dropped(pooled, database_url):
    from aqd.config import Config, Keeper
    from aqd.keeper import Keeper as Duties

    with psycopg.connect(database_url, autocommit=True) as direct:
        for days in (40, 41):
            direct.execute(
                "select aqd.create_history_partition((now() at time zone 'UTC')::date - %s::int)", [days]
            )
        parts = "select count(*) from pg_inherits where inhparent = 'aqd.job_history'::regclass"
        before = direct.execute(parts).fetchone()[0]
        cfg = Config(database=Database(url=pooled), keeper=Keeper(history_days=30))
        with connect(pooled) as conn:
            reader = psycopg.connect(database_url)
            reader.execute("select count(*) from aqd.job_history")
            Duties(cfg, "n")._drop_history(conn)  # in use: left for the next time, nobody is held up for long
            assert direct.execute(parts).fetchone()[0] == before
            reader.close()
            Duties(cfg, "n")._drop_history(conn)
        assert direct.execute(parts).fetchone()[0] == before - 2
    assert left_behind(pooled, database_url) == []


# --- migrations ----------------------------------------------------------------------------------


def test_migrations_race_through_it(bouncer, empty_database_url):
    with psycopg.connect(empty_database_url) as conn:
        url = bouncer().url(conn.info.dbname)
    results = []

    def start():
        with connect(url) as conn:
            results.append(len(migrate.migrate(conn)))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    files = len(migrate.load_files())
    assert sorted(results) == [0] * 5 + [files]
    with psycopg.connect(empty_database_url) as conn:
        assert conn.execute("select count(*) from aqd.migrations").fetchone() == (files,)


# --- nodes ---------------------------------------------------------------------------------------


def test_ten_thousand_jobs(pooled, database_url, start_daemon, jobs, side):
    """Three nodes with eight slots: none is lost, none runs twice, nothing is left in anybody's session."""
    daemons = [
        start_daemon({"daemon": {"slots": slots, "poll_ms": 100}}, database=pooled) for slots in (3, 3, 2)
    ]
    ids = []
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
        for _ in range(10):
            ids += [each.id for each in client.enqueue_many(conn, ({"type": "fate"} for _ in range(1000)))]
    assert len(set(ids)) == 10_000
    assert jobs.wait_all(ids, 120) == {"COMPLETED": 10_000}
    runs = Counter(run.job for run in side.runs())
    assert (len(runs), set(runs.values())) == (10_000, {1})
    once = "select count(*) as n from aqd.job_history where attempt = 1 and state = 'COMPLETED'"
    assert jobs.conn.execute(once).fetchone()["n"] == 10_000
    assert left_behind(pooled, database_url) == []
    for daemon in daemons:
        (line,) = daemon.find(DEAF)
        assert "listen_url" in line["advice"]
        assert not daemon.status()["database"]["listener_up"]
        assert daemon.find("database away") == []


def test_listening_at_the_server_itself(pooled, database_url, start_daemon, jobs):
    """database.listen_url: the claimer alone goes there, and is woken."""
    daemon = start_daemon(
        {"database": {"listen_url": database_url}, "daemon": {"poll_ms": 60_000}}, database=pooled
    )
    daemon.wait_status(lambda s: s["database"]["listener_up"])
    for _ in range(3):
        assert jobs.wait(jobs.add(), timeout_s=20)["state"] == "COMPLETED"
    assert daemon.find(DEAF) == []
    with psycopg.connect(database_url, autocommit=True) as conn:
        channels = """select count(*) from pg_stat_activity
                      where datname = current_database() and application_name like 'aqd claimer%'"""
        assert conn.execute(channels).fetchone() == (1,)


def test_listening_at_another_server(pooled, pg, start_daemon, jobs):
    """It would claim jobs there and look for them here: it says so, and claims nothing."""
    other = pg.create_database(template=pg.template)
    theirs = Jobs(pg.url(other))
    job = theirs.add()
    daemon = start_daemon({"database": {"listen_url": pg.url(other)}}, database=pooled, wait=False)
    line = daemon.wait_for("database away", process="dispatcher")
    assert "different databases" in line["error"]
    check = daemon.aqd("check")
    assert check.returncode != 0
    assert "different databases" in check.stdout + check.stderr
    assert theirs.state(job) == "QUEUED"
    daemon.stop()
    theirs.close()
    pg.drop_database(other)


def test_its_connections_break(bouncer, name, database_url, start_daemon, jobs, side):
    """Server connections that are ended in the middle, a pooler that is told to make new ones: all jobs end, once."""
    pooler = bouncer()
    daemon = start_daemon({"daemon": {"poll_ms": 50}}, database=pooler.url(name))
    dispatcher = daemon.process_of("dispatcher")
    ids = jobs.add_many(1500)
    for round in range(6):
        wait_until(lambda round=round: len(side.events("end")) >= 200 * (round + 1), 60, "progress")
        if round % 2:
            pooler.admin("RECONNECT")
        else:
            for pid in backends(jobs):
                jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 1500}
    assert set(Counter(run.job for run in side.runs()).values()) == {1}
    assert daemon.process_of("dispatcher") == dispatcher


def test_the_api_and_the_commands(pooled, database_url, start_daemon, jobs):
    port = free_port()
    api = {"port": port, "workers": 1}
    daemon = start_daemon({"api": api, "daemon": {"poll_ms": 50}}, database=pooled, with_api=True)

    def command(*arguments):
        done = daemon.aqd(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    job = command("submit", "echo", '{"n": 1}').split()[-1]
    assert json.loads(command("jobs", "show", job, "--json"))["id"] == job
    assert "COMPLETED" in command("jobs", "wait", job)
    for words in (
        ["jobs", "list"],
        ["failed", "list"],
        ["queues", "list"],
        ["nodes", "list"],
        ["check"],
        ["health"],
    ):
        command(*words)
    later = command("submit", "echo", "{}", "--delay", "600").split()[-1]
    command("jobs", "cancel", later)

    def get(path):
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return json.load(answer)

    fresh = jobs.add([{"sleep": 0.5}])
    assert get(f"/jobs/{fresh}?wait_s=15")["status"] == "COMPLETED"
    assert get(f"/jobs/{later}")["status"] == "CANCELLED"
    assert get("/health")["status"] == "ok"
    assert left_behind(pooled, database_url) == []
