"""Silence, refusals and switch-overs of the database (F48, F49, F54): for one thread of the dispatcher or for all,
the daemon goes on by itself afterwards, loses no outcome, sleeps through no job, and can be stopped at any time.
"""

import contextlib
import random
import signal
import socket
import time
from pathlib import Path

import psycopg
import pytest

from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until
from tests.process.support import backends, is_gone, standby_of

QUICK = {
    "database": {"statement_timeout_s": 0.5},
    # A claim that arrives after its sender gave up is found and returned before its lease ends.
    "daemon": {"lease_s": 60.0, "renew_s": 1.0, "kill_grace_s": 0.4, "drain_s": 1.0},
}
DUTIES = ["claimer", "recorder", "keeper", ""]
ASLEEP = {"daemon": {"poll_ms": 60_000}}


def back_to_work(daemon, jobs, dispatcher):
    """Everything goes on, in the same process."""
    daemon.wait_status(
        lambda s: s["state"] == "running" and s["database"]["up"] and s["database"]["listener_up"]
    )
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}
    assert daemon.process_of("dispatcher") == dispatcher


# --- silence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("duty", DUTIES)
def test_silence_for_one_or_all(proxied, start_daemon, jobs, side, duty):
    daemon = start_daemon(QUICK, database=proxied.url)
    dispatcher = daemon.process_of("dispatcher")
    jobs.wait(jobs.add())
    known = proxied.proxy.accepted
    proxied.proxy.swallow(only=f"aqd {duty}")
    waiting = jobs.add()
    # It gives up what does not answer and tries anew, which is silent as well.
    wait_until(lambda: proxied.proxy.accepted >= known + 2, 30, "new connections")
    if duty == "keeper":
        assert jobs.wait(waiting)["state"] == "COMPLETED"  # nobody else is held up
    proxied.proxy.forward()
    # A claim that was on its way arrives only now, with nobody to hear the answer: found and returned after 10 to 15 s.
    assert jobs.wait(waiting, timeout_s=40)["state"] == "COMPLETED"
    back_to_work(daemon, jobs, dispatcher)
    assert all(run.attempt == 1 for run in side.runs())


@pytest.mark.parametrize("duty", DUTIES)
def test_term_during_silence(proxied, start_daemon, jobs, side, duty):
    """The drain, the grace, and a moment: no waiting for what does not answer."""
    daemon = start_daemon(QUICK, database=proxied.url)
    job = jobs.add([{"sleep": 60}], max_attempts=5)
    pid = side.wait_start(job)["pid"]
    proxied.proxy.swallow(only=f"aqd {duty}")
    if duty in ("recorder", ""):
        daemon.expected_exit = None  # it could not tidy up
    began = time.monotonic()
    daemon.signal(signal.SIGTERM)
    daemon.wait_exit(30)
    assert time.monotonic() - began < 1.0 + 0.4 + 3.0
    assert is_gone(pid)
    proxied.proxy.reset_all()
    proxied.proxy.forward()
    if duty in ("claimer", "keeper"):
        row = jobs.get(job)
        assert (row["state"], row["attempt"], row["interruptions"]) == ("QUEUED", 0, 1)


@pytest.mark.parametrize("address", ["unknown host", "silent server"])
def test_a_database_that_cannot_be_reached(start_daemon, address):
    """A name that nobody knows; a server that takes connections and never says a word."""
    with silent_server() as port:
        host = "nowhere.invalid" if address == "unknown host" else f"127.0.0.1:{port}"
        daemon = start_daemon(database=f"postgresql://nobody@{host}/nothing", wait=False)
        daemon.wait_for("database away", process="dispatcher", timeout_s=30)
        daemon.wait_state("waiting for database")
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 10.0


@contextlib.contextmanager
def silent_server():
    """A port that accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


# --- notifications ---------------------------------------------------------------------------------


def waits_for_lock(jobs, duty):
    statement = """select from pg_stat_activity where datname = current_database()
                   and application_name like %s and wait_event_type = 'Lock'"""
    return bool(jobs.conn.execute(statement, [f"aqd {duty}%"]).fetchall())


def test_a_job_that_comes_between_reconnect_and_listen(start_daemon, jobs):
    """Its notification is heard by nobody: LISTEN comes first, then the look."""
    daemon = start_daemon(ASLEEP)
    jobs.wait(jobs.add())
    with Jobs(jobs.url).conn as holder, holder.transaction():
        holder.execute("lock table aqd.migrations in access exclusive mode")  # asked before LISTEN
        for pid in backends(jobs, "claimer"):
            jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
        wait_until(lambda: waits_for_lock(jobs, "claimer"), 20, "the claimer on its way to LISTEN")
        job = jobs.add()
    began = time.monotonic()
    assert jobs.wait(job, timeout_s=20)["state"] == "COMPLETED"
    assert time.monotonic() - began < 5.0
    daemon.wait_status(lambda s: s["database"]["listener_up"])


def test_a_job_that_comes_while_the_claimer_asks(start_daemon, jobs):
    """The notification arrives in the middle of another statement's answer."""
    start_daemon(ASLEEP)
    jobs.wait(jobs.add())
    for _ in range(3):
        with Jobs(jobs.url).conn as holder, holder.transaction():
            holder.execute("lock table aqd.queues in access exclusive mode")
            first = jobs.add(queue="new")
            wait_until(lambda: waits_for_lock(jobs, "claimer"), 10, "the claimer to ask")
            second = jobs.add(queue="other")
        began = time.monotonic()
        assert jobs.wait_all([first, second], 20) == {"COMPLETED": 2}
        assert time.monotonic() - began < 5.0


def test_a_job_that_comes_while_the_claimer_falls_asleep(start_daemon, jobs):
    """Between and during the statements with which it goes to sleep, one after the other."""
    start_daemon(ASLEEP)
    for _ in range(40):
        time.sleep(random.uniform(0, 0.015))  # the moment that is tried
        began = time.monotonic()
        assert jobs.wait(jobs.add(type="echo"), timeout_s=30)["state"] == "COMPLETED"
        assert time.monotonic() - began < 5.0


def rss_kb(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def test_a_flood_of_notifications_does_not_pile_up(proxied, start_daemon, jobs):
    daemon = start_daemon(ASLEEP, database=proxied.url)
    jobs.wait(jobs.add())
    dispatcher = daemon.process_of("dispatcher")
    before = rss_kb(dispatcher)
    proxied.proxy.swallow(only="aqd claimer", answers=True)
    flood = (
        """do $$ begin for n in 1..100000 loop perform pg_notify('aqd_jobs', ''); commit; end loop; end $$"""
    )
    jobs.conn.execute("set synchronous_commit = off")
    jobs.conn.execute(flood, prepare=False)
    job = jobs.add()
    proxied.proxy.forward()
    began = time.monotonic()
    assert jobs.wait(job, timeout_s=30)["state"] == "COMPLETED"
    assert time.monotonic() - began < 15.0
    assert rss_kb(dispatcher) - before < 20_000
    back_to_work(daemon, jobs, dispatcher)


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        *(("completed", state) for state in ("25006", "40001", "42501", "53100", "57014", "XX000")),
        *(("failed", state) for state in ("25006", "53100")),
    ],
)
def test_an_outcome_that_is_refused_for_a_while_is_kept(start_daemon, jobs, side, outcome, state):
    """A full disk, a right taken away, a server's own fault: written once that is over, and once."""
    daemon = start_daemon({"daemon": {"lease_s": 60.0, "renew_s": 5.0, "slots": 1}})
    dispatcher = daemon.process_of("dispatcher")
    table = "job_history" if outcome == "completed" else "job_attempts"
    jobs.conn.execute(
        f"""create function refuse() returns trigger language plpgsql as
            $$ begin raise exception 'refused by the test' using errcode = '{state}'; end $$"""
    )
    jobs.conn.execute(
        f"create trigger refuse before insert on aqd.{table} for each row execute function refuse()"
    )
    last = {"return": "kept"} if outcome == "completed" else {"raise": "kept"}
    job = jobs.add([last], max_attempts=1)
    side.wait("end", job=str(job))
    daemon.wait_for(
        lambda line: (
            line["event"] in ("database refuses", "database away") and "refused by the test" in line["error"]
        )
    )
    assert jobs.state(job) == "PROCESSING"
    jobs.conn.execute(f"drop trigger refuse on aqd.{table}")
    row = jobs.wait(job, timeout_s=20)
    assert row["state"] == ("COMPLETED" if outcome == "completed" else "FAILED")
    assert row["attempt"] == 1
    assert len(jobs.attempts(job)) == (outcome == "failed")
    assert len(side.runs(job)) == 1
    back_to_work(daemon, jobs, dispatcher)


@pytest.fixture
def server(private_pg):
    """A cluster of its own, reached by TCP with a password, and a migrated database in it."""
    pg = private_pg(max_connections="12", superuser_reserved_connections="0", max_wal_senders="4")
    return pg, pg.create_database(template=pg.template)


def test_no_room_for_a_connection(server, start_daemon, side):
    pg, name = server
    daemon = start_daemon(QUICK, database=pg.url(name))
    dispatcher = daemon.process_of("dispatcher")
    jobs = Jobs(pg.url(name))
    jobs.wait(jobs.add())
    taken = []

    def take_all():
        try:
            while True:
                taken.append(pg.connect())
        except psycopg.OperationalError:
            return True

    for pid in backends(jobs):
        jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
        take_all()
    wait_until(lambda: take_all() and not backends(jobs), 10, "no room")
    daemon.wait_state("waiting for database")
    job = jobs.add()
    for conn in taken:
        conn.close()
    assert jobs.wait(job)["state"] == "COMPLETED"
    back_to_work(daemon, jobs, dispatcher)
    jobs.close()


def test_a_password_that_is_changed_for_a_while(server, start_daemon):
    pg, name = server
    daemon = start_daemon(QUICK, database=pg.tcp_url(name))
    dispatcher = daemon.process_of("dispatcher")
    jobs = Jobs(pg.url(name))
    jobs.wait(jobs.add())
    jobs.conn.execute("alter role postgres password 'another'")
    for pid in backends(jobs):
        jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    status = daemon.wait_status(lambda s: "password authentication failed" in str(s["database"]))
    assert "another" not in str(daemon.lines) + str(status)
    assert pg.password not in str(daemon.lines) + str(status)
    jobs.conn.execute(f"alter role postgres password '{pg.password}'")
    back_to_work(daemon, jobs, dispatcher)
    jobs.close()


def test_idle_connections_that_are_ended_again_and_again(server, start_daemon, side):
    """idle_session_timeout below everybody's pauses: neither a flood of lines nor a job that waits for long."""
    pg, name = server
    daemon = start_daemon({**QUICK, "daemon": {**QUICK["daemon"], "poll_ms": 5_000}}, database=pg.url(name))
    dispatcher = daemon.process_of("dispatcher")
    jobs = Jobs(pg.url(name))
    jobs.wait(jobs.add())
    jobs.conn.execute(f'alter database "{name}" set idle_session_timeout = 300')
    mark = daemon.mark()
    for pid in backends(jobs):
        jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    for _ in range(5):
        assert jobs.wait(jobs.add(), timeout_s=20)["state"] == "COMPLETED"
    lines = [line for line in daemon.lines[mark:] if line["event"] in ("database away", "database is back")]
    assert len(lines) < 30
    jobs.conn.execute(f'alter database "{name}" reset idle_session_timeout')
    for pid in backends(jobs):
        jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    back_to_work(daemon, jobs, dispatcher)
    jobs.close()


def test_a_switch_over_to_the_standby(server, private_pg, start_daemon, side):
    """Several hosts in the URL: the daemon finds the one that writes, then the other, without a restart."""
    primary, name = server
    standby = standby_of(primary, private_pg)
    hosts = f"127.0.0.1:{standby.port},127.0.0.1:{primary.port}"
    url = f"postgresql://postgres:{primary.password}@{hosts}/{name}?target_session_attrs=read-write"
    daemon = start_daemon(QUICK, database=url)
    dispatcher = daemon.process_of("dispatcher")
    before = Jobs(primary.url(name))
    done = before.add_many(20)
    assert before.wait_all(done) == {"COMPLETED": 20}
    gate = side.path.parent / "go"
    running = before.add([{"wait_file": str(gate)}, {"return": "kept"}])
    side.wait_start(running)
    caught_up = "select pg_current_wal_lsn() <= replay_lsn as yes from pg_stat_replication"
    wait_until(lambda: (row := before.conn.execute(caught_up).fetchone()) and row["yes"], 20, "the standby")
    before.close()
    primary.stop("fast")
    gate.touch()
    side.wait("end", job=str(running))
    daemon.wait_state("waiting for database")
    with standby.connect() as conn:
        conn.execute("select pg_promote()")
    after = Jobs(standby.url(name))
    row = after.wait(running)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "kept")
    back_to_work(daemon, after, dispatcher)
    after.close()
