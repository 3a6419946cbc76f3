"""The database goes away, hangs, comes back: outcomes are kept, nothing spins, everything works afterwards.

Through a proxy where only this daemon is to be hit, on a server of its own where the server is.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.fixtures import processes
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import LocalPostgres, free_port
from tests.fixtures.processes import wait_until
from tests.process.support import backends, cpu_s, pids_of

LEASE_S = 2.4
QUICK = {
    "database": {"statement_timeout_s": 0.5},
    "daemon": {"lease_s": LEASE_S, "renew_s": 0.6, "kill_grace_s": 0.4, "drain_s": 1.0},
}
# Client-side deadline of a statement, and what may come on top of it before the next try.
DEADLINE_S = 2.5
FINAL_S = 10.0


def config(**daemon):
    return {**QUICK, "daemon": {**QUICK["daemon"], **daemon}}


@pytest.fixture
def gate(tmp_path):
    """A file that jobs wait for."""
    return tmp_path / "go"


@pytest.fixture
def server(private_pg):
    """(a server that may be stopped, URL of a migrated database in it)."""
    pg = private_pg()
    return pg, pg.url(pg.create_database(template=pg.template))


@pytest.fixture
def its_jobs(server):
    """Jobs in the database of ``server``."""
    helper = Jobs(server[1])
    yield helper
    helper.close()


def back_to_work(daemon, jobs):
    """Everything that a daemon does goes on."""
    daemon.wait_status(
        lambda s: s["state"] == "running" and s["database"]["up"] and s["database"]["listener_up"]
    )
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}


# --- an outcome, and no database ---------------------------------------------------------------------


def cut(proxy, how):
    if how == "reset":
        proxy.refuse()
        proxy.reset_all()
    else:
        proxy.swallow()


def mend(proxy, how):
    if how == "reset":
        proxy.accept()
    else:
        proxy.forward()


@pytest.mark.parametrize("how", ["reset", "silence"])
@pytest.mark.parametrize("leases", [0.3, 0.8])
def test_an_outage_when_the_handler_returns(proxied, start_daemon, jobs, side, gate, how, leases):
    """Shorter than the lease: the outcome is written late, and nothing runs twice."""
    daemon = start_daemon(config(lease_s=6.0, renew_s=1.0), database=proxied.url)
    good = jobs.add([{"wait_file": str(gate)}, {"return": "kept"}])
    bad = jobs.add({"attempts": [[{"wait_file": str(gate)}, {"raise": "kept"}], [{"return": "second"}]]})
    side.wait_start(good)
    side.wait_start(bad)
    cut(proxied.proxy, how)
    began = time.monotonic()
    gate.touch()
    side.wait("end", job=str(good))
    side.wait("end", job=str(bad))
    time.sleep(max(0.0, began + leases * 6.0 - 1.0 - time.monotonic()))  # the outage itself
    mend(proxied.proxy, how)
    row = jobs.wait(good)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "kept")
    assert (jobs.wait(bad)["state"], jobs.wait(bad)["attempt"]) == ("COMPLETED", 2)
    assert [a["kind"] for a in jobs.attempts(bad)] == ["failed"]
    assert (len(side.runs(good)), len(side.runs(bad))) == (1, 2)
    assert not daemon.find("lease lost, outcome dropped")


def test_an_outage_longer_than_the_lease_gives_the_job_to_another_node(
    proxied, start_daemon, jobs, side, gate
):
    daemon = start_daemon(config(slots=1), name="cut", database=proxied.url)
    job = jobs.add({"attempts": [[{"wait_file": str(gate)}, {"return": "first"}], [{"return": "second"}]]})
    side.wait_start(job)
    start_daemon(config(slots=1), name="other")
    cut(proxied.proxy, "reset")
    gate.touch()
    row = jobs.wait(job)
    assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 2, "second")
    mend(proxied.proxy, "reset")
    daemon.wait_for("lease lost, outcome dropped", job_id=str(job))
    assert jobs.get(job) == row
    assert not side.overlaps()
    back_to_work(daemon, jobs)


@pytest.mark.parametrize("outcome", ["completed", "failed"])
def test_a_commit_whose_answer_is_lost_is_found_again(proxied, start_daemon, jobs, side, gate, outcome):
    daemon = start_daemon(config(lease_s=30.0, renew_s=9.0, slots=1), database=proxied.url)
    last = {"return": "kept"} if outcome == "completed" else {"raise": "kept"}
    # The recorder is connected: the lost answer is that of the record, not of the greeting.
    jobs.wait(jobs.add())
    before = daemon.status()["counters"].get(outcome, 0)
    job = jobs.add([{"wait_file": str(gate)}, last], max_attempts=1)
    side.wait_start(job)
    proxied.proxy.swallow(answers=True)
    gate.touch()
    row = jobs.wait(job)  # the statement has arrived and is committed
    proxied.proxy.reset_all()
    proxied.proxy.forward()
    daemon.wait_status(lambda s: s["counters"].get(outcome) == before + 1)
    assert jobs.get(job) == row
    assert len(jobs.attempts(job)) == (0 if outcome == "completed" else 1)
    assert len(side.runs(job)) == 1
    assert not daemon.find("lease lost, outcome dropped")
    back_to_work(daemon, jobs)


def test_a_claim_whose_answer_is_lost_is_returned_with_its_attempt(proxied, start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"lease_s": 60.0, "renew_s": 9.0}}, database=proxied.url)
    jobs.wait(jobs.add())
    jobs.add(delay_s=3600)  # a node that knows of no job at all looks without a claim
    blocked = """select from pg_stat_activity
        where datname = current_database() and application_name like 'aqd claimer%'
              and wait_event_type = 'Lock'"""
    with Jobs(jobs.url).conn as holder, holder.transaction():
        holder.execute("lock table aqd.jobs in exclusive mode")
        job = holder.execute("select aqd.enqueue('fate', '{}'::jsonb) as id").fetchone()["id"]
        wait_until(lambda: jobs.conn.execute(blocked).fetchall(), 5, "the claim to wait")
        proxied.proxy.swallow(answers=True)
    jobs.wait(job, "PROCESSING")
    proxied.proxy.reset_all()
    proxied.proxy.forward()
    row = jobs.wait(job, timeout_s=40)
    assert (row["state"], row["attempt"], len(side.runs(job))) == ("COMPLETED", 1, 1)
    assert daemon.find("jobs that nobody held were released")


# --- a connection is lost, or silent ---------------------------------------------------------------


def test_a_listener_that_was_ended_listens_again(start_daemon, jobs):
    daemon = start_daemon({"daemon": {"poll_ms": 60_000}})
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    mark = daemon.mark()
    for _ in range(2):
        (old,) = backends(jobs, "claimer")
        jobs.conn.execute("select pg_terminate_backend(%s)", [old])
        wait_until(lambda old=old: backends(jobs, "claimer") not in ([], [old]))
        daemon.wait_status(lambda s: s["database"]["listener_up"])
        for _ in range(3):
            row = jobs.wait(jobs.add(), timeout_s=30)
            assert (row["claimed_at"] - row["run_at"]).total_seconds() < 1.5
    warnings = [line for line in daemon.lines[mark:] if line["level"] in ("warning", "error")]
    assert 1 <= len(warnings) <= 4


@pytest.mark.parametrize("duty", ["claimer", "recorder", "keeper"])
def test_a_backend_that_hangs_is_left(pg, start_daemon, jobs, duty):
    """Stopped, so that neither keep-alives nor the server's own time limit help."""
    if not isinstance(pg, LocalPostgres):
        pytest.skip("needs a server on this machine")
    daemon = start_daemon(config(lease_s=10.0, renew_s=1.0))
    jobs.wait(jobs.add())
    (old,) = backends(jobs, duty)
    os.kill(old, signal.SIGSTOP)
    try:
        wait_until(lambda: set(backends(jobs, duty)) - {old}, 15, "a new connection")
        assert jobs.wait_all(jobs.add_many(20)) == {"COMPLETED": 20}
        daemon.wait_state("running")
    finally:
        os.kill(old, signal.SIGCONT)


@pytest.mark.parametrize("duty", ["claimer", "recorder"])
def test_term_while_a_backend_hangs(pg, start_daemon, jobs, duty):
    if not isinstance(pg, LocalPostgres):
        pytest.skip("needs a server on this machine")
    daemon = start_daemon(config(lease_s=10.0, renew_s=1.0))
    jobs.wait(jobs.add())
    (old,) = backends(jobs, duty)
    os.kill(old, signal.SIGSTOP)
    try:
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(15) == 0
        assert time.monotonic() - began < 1.0 + 0.4 + DEADLINE_S + 3.0
    finally:
        os.kill(old, signal.SIGCONT)


def test_silence_in_the_middle_of_connecting(proxied, start_daemon, jobs):
    """The server answers the first bytes of each new connection and then nothing: no step of it may wait
    for ever."""
    daemon = start_daemon(config(), database=proxied.url)
    proxied.proxy.swallow()
    proxied.proxy.reset_all()
    daemon.wait_state("waiting for database")
    tries = proxied.proxy.accepted
    wait_until(lambda: proxied.proxy.accepted >= tries + 6, 30, "each thread to try again")
    proxied.proxy.forward()
    back_to_work(daemon, jobs)


def test_term_while_the_database_is_silent(proxied, start_daemon, jobs, side):
    """A job runs; nothing can be written: the daemon ends in time, and another node has the job soon."""
    daemon = start_daemon(config(slots=1), name="cut", database=proxied.url)
    job = jobs.add({"attempts": [[{"sleep": 60}], [{"return": "second"}]]})
    pid = side.wait_start(job)["pid"]
    proxied.proxy.swallow()
    daemon.expected_exit = None  # it could not tidy up
    began = time.monotonic()
    daemon.signal(signal.SIGTERM)
    daemon.wait_exit(30)
    assert time.monotonic() - began < 1.0 + 0.4 + FINAL_S + 4.0
    assert processes.look(pid) is None or processes.look(pid).state in "ZX"
    proxied.proxy.reset_all()
    proxied.proxy.forward()
    start_daemon(config(), name="other")
    row = jobs.wait(job)
    assert (row["state"], row["result"]) == ("COMPLETED", "second")
    assert not side.overlaps()


def test_a_database_that_became_read_only(start_daemon, jobs):
    """After a switch-over the old primary answers, and refuses."""
    daemon = start_daemon(config(lease_s=20.0, renew_s=1.0))
    (name,) = jobs.conn.execute("select current_database() as name").fetchone().values()
    jobs.conn.execute(f'alter database "{name}" set default_transaction_read_only = on')
    for pid in backends(jobs):
        jobs.conn.execute("select pg_terminate_backend(%s)", [pid])
    daemon.wait_state("waiting for database")
    job = jobs.add()
    jobs.conn.execute(f'alter database "{name}" reset default_transaction_read_only')
    assert jobs.wait(job, timeout_s=20)["state"] == "COMPLETED"
    back_to_work(daemon, jobs)


# --- no server ---------------------------------------------------------------------------------------


def quiet_for(daemon, seconds):
    """(share of one processor that the whole tree used, its log lines) during ``seconds``."""
    pids = pids_of(daemon)
    before, mark = cpu_s(pids), daemon.mark()
    time.sleep(seconds)  # the measured time itself
    assert pids_of(daemon) == pids
    lines = [line for line in daemon.lines[mark:] if line["level"] != "debug"]
    return (cpu_s(pids) - before) / seconds, lines


def test_without_a_database_from_the_start_it_waits_quietly(private_pg, start_daemon):
    pg = private_pg()
    url = pg.url(pg.create_database(template=pg.template))
    pg.stop()
    daemon = start_daemon({"daemon": {"slots": 4}}, database=url, wait=False)
    daemon.wait_state("waiting for database")
    daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    share, lines = quiet_for(daemon, 5.0)
    assert share < 0.05
    assert len(lines) < 5
    mark = daemon.mark()
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("generation replaced", after=mark)
    pg.start()
    jobs = Jobs(url)
    back_to_work(daemon, jobs)
    jobs.close()


def test_without_a_database_it_can_be_stopped(start_daemon):
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    daemon = start_daemon(database=url, wait=False)
    daemon.wait_state("waiting for database")
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 5.0


def test_a_server_that_stops_and_comes_back(server, start_daemon, its_jobs, side):
    pg, url = server
    daemon = start_daemon(config(lease_s=60.0, renew_s=1.0), database=url)
    assert its_jobs.wait(its_jobs.add())["state"] == "COMPLETED"
    mark = daemon.mark()
    pg.stop()
    daemon.wait_state("waiting for database")
    share, _ = quiet_for(daemon, 5.0)
    assert share < 0.05
    lines = [line for line in daemon.lines[mark:] if line["level"] != "debug"]
    assert len(lines) < 10
    mark = daemon.mark()
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("generation replaced", after=mark)
    pg.start()
    its_jobs.close()  # its connection is gone, too
    back_to_work(daemon, its_jobs)
    assert len(side.runs()) == 11


def test_restarts_of_the_server_under_load_lose_nothing(server, start_daemon, its_jobs, side):
    pg, url = server
    daemon = start_daemon(
        {"database": {"statement_timeout_s": 1.0}, "daemon": {"lease_s": 60.0, "renew_s": 1.0}}, database=url
    )
    ids = its_jobs.add_many(1500, [{"sleep": 0.002}])
    for mode in ("fast", "immediate", "fast"):
        done = len(side.events("end"))
        wait_until(lambda done=done: len(side.events("end")) >= min(done + 100, 1400), 30, "some jobs")
        pg.restart(mode)
    its_jobs.close()
    assert its_jobs.wait_all(ids, 60) == {"COMPLETED": 1500}
    assert Counter(run.job for run in side.runs()) == Counter(ids)
    back_to_work(daemon, its_jobs)


# --- connections, schema -------------------------------------------------------------------------------


def tcp_inodes(port):
    """Inodes of sockets that are connected to ``port`` on this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {field[9] for field in fields if int(field[2].split(":")[1], 16) == port and field[9] != "0"}


def test_no_connection_is_shared_between_processes(proxied, start_daemon, jobs):
    """Also not after workers, loader and dispatcher were replaced."""
    daemon = start_daemon(database=proxied.url)

    def holders():
        inodes = tcp_inodes(proxied.proxy.port)
        return {
            (target[8:-1], pid)
            for pid in pids_of(daemon)
            for target in processes.descriptors(pid).values()
            if target.startswith("socket:[") and target[8:-1] in inodes
        }

    def check():
        found = holders()
        assert len(found) == 3
        assert len({inode for inode, _ in found}) == 3
        assert {pid for _, pid in found} == {daemon.process_of("dispatcher")}

    assert jobs.wait_all(jobs.add_many(50)) == {"COMPLETED": 50}
    check()
    for role in ("dispatcher", "loader"):
        old = daemon.process_of(role)
        os.kill(old, signal.SIGKILL)
        daemon.wait_status(
            lambda s, old=old, role=role: (
                s["state"] == "running"
                and all(slot["state"] == "idle" for slot in s["slots"])
                and any(p["role"] == role and p["pid"] != old for p in s["processes"])
            )
        )
    for pid in daemon.workers().values():
        os.kill(pid, signal.SIGKILL)
    assert jobs.wait_all(jobs.add_many(50)) == {"COMPLETED": 50}
    check()
    names = [
        row["application_name"]
        for row in jobs.conn.execute(
            """select application_name from pg_stat_activity
               where datname = current_database() and application_name like 'aqd %'"""
        )
    ]
    assert len(names) == len(set(names)) == 3


def test_six_nodes_meet_an_empty_database(empty_database_url, start_daemon):
    daemons = [
        start_daemon({"daemon": {"slots": 1}}, database=empty_database_url, name=f"n{n}", start=False)
        for n in range(6)
    ]
    for daemon in daemons:
        daemon.start(wait=False)
    migrated = daemons[0].aqd("db", "migrate", timeout_s=60)
    assert migrated.returncode == 0, migrated.stderr
    for daemon in daemons:
        daemon.wait_state("running", 60)
    jobs = Jobs(empty_database_url)
    assert jobs.wait_all(jobs.add_many(30)) == {"COMPLETED": 30}
    jobs.close()
    for daemon in daemons:
        assert not daemon.find(lambda line: line["level"] == "error")
