"""Time and machines misbehave (F29, F30, F34, F35): processes and servers stand still for longer than a lease,
clocks are wrong, processors are busy, rows are locked. What was given to another owner stays his.
"""

import contextlib
import glob
import os
import signal
import subprocess
import sys

import pytest

from aqd import embedded
from tests.fixtures import processes
from tests.fixtures.daemon import ROOT
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until
from tests.process.support import is_gone, pids_of, send, stop_processes

LEASE_S = 2.4
SHORT = {
    "database": {"statement_timeout_s": 1.0},
    "daemon": {"lease_s": LEASE_S, "renew_s": 0.6, "kill_grace_s": 0.4, "slots": 1},
}


def live(jobs, job):
    """The job's own row; None once it is in history."""
    return jobs.conn.execute("select * from aqd.jobs where id = %s", [job]).fetchone()


def wait_expired(jobs, job, leases):
    """Until the lease has been over for so many times its length, by the database's clock."""
    statement = (
        "select now() > lease_expires_at + %s * interval '1 second' as yes from aqd.jobs where id = %s"
    )
    wait_until(
        lambda: jobs.conn.execute(statement, [leases * LEASE_S, job]).fetchone()["yes"],
        (leases + 1) * LEASE_S + 20,
        "the lease to be long over",
    )


def lost_lines(daemon, job):
    """What it says of a lease that it has lost."""
    return daemon.find(lambda line: line["event"].startswith("lease lost"), job_id=str(job))


def assert_works(daemon, jobs, master):
    """It goes on, and nobody had to start it anew."""
    daemon.wait_status(lambda s: s["state"] == "running" and s["database"]["up"])
    assert jobs.wait_all(jobs.add_many(10)) == {"COMPLETED": 10}
    assert daemon.pid == master


# --- the old owner comes back ------------------------------------------------------------------------


@pytest.fixture
def gates(tmp_path):
    return tmp_path / "first", tmp_path / "second"


MEANWHILE = ["running", "finished", "failed", "cancelled", "retried"]


@pytest.mark.parametrize("scope", ["worker and dispatcher", "node"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_old_owner_changes_nothing(start_daemon, jobs, side, gates, scope, meanwhile):
    """A stands still until its lease is over; B has the job; A goes on, with all that it wants to say: it
    renews, reports progress, gives an outcome or releases. (A node that stood still as a whole cannot have killed
    its worker in time; that the handlers overlap then is what the README says.)"""
    bad = meanwhile in ("failed", "retried")
    last = {"raise": "second"} if bad else {"return": "second"}
    steps = [
        [{"progress": 11}, {"wait_file": str(gates[0])}, {"return": "first"}],
        [{"progress": 22}, {"wait_file": str(gates[1])}, last],
    ]
    first = start_daemon(SHORT, name="a")
    master = first.pid
    job = jobs.add({"attempts": steps}, max_attempts=2)
    start = side.wait_start(job, attempt=1)
    worker, dispatcher = start["pid"], first.process_of("dispatcher")
    start_daemon(SHORT, name="b")
    stopped = [worker, dispatcher] if scope != "node" else pids_of(first)
    stop_processes(stopped)
    side.wait_start(job, attempt=2)
    if meanwhile in ("finished", "failed", "retried"):
        gates[1].touch()
        jobs.wait(job)
    if meanwhile == "retried":  # and B is in the middle of the first attempt of its new life
        assert first.aqd("jobs", "retry", str(job)).returncode == 0
        wait_until(lambda: len(side.events("start", job=str(job))) == 3)
    if meanwhile == "cancelled":
        jobs.conn.execute("select aqd.cancel(%s)", [job])
        assert jobs.wait(job)["state"] == "CANCELLED"
    token = (live(jobs, job) or {}).get("lease_token")
    for pid in reversed(stopped):
        with contextlib.suppress(ProcessLookupError):  # the master has killed what stood still
            os.kill(pid, signal.SIGCONT)
    first.wait_for("worker ended", child=worker)
    wait_until(lambda: is_gone(worker))
    first.wait_status(lambda s: s["database"]["up"] and s["counters"].get("lost", 0) >= 1)
    assert lost_lines(first, job)
    row = live(jobs, job)
    assert (row or {}).get("lease_token") == token
    if meanwhile == "running":
        wait_until(lambda: live(jobs, job)["progress_percent"] == 22)
    for gate in gates:
        gate.touch()
    row = jobs.wait(job)
    kinds = [(a["kind"], a["attempt"]) for a in jobs.attempts(job)]
    match meanwhile:
        case "running" | "finished":
            assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 2, "second")
            assert kinds == [("lost", 1)]
        case "failed":
            assert (row["state"], row["attempt"]) == ("FAILED", 2)
            assert kinds == [("lost", 1), ("failed", 2)]
            assert jobs.failed(job)["failures"] == 1
        case "cancelled":
            assert (row["state"], row["attempt"], row["result"]) == ("CANCELLED", 2, None)
            assert kinds == [("lost", 1), ("cancelled", 2)]
        case "retried":
            assert (row["state"], row["attempt"], row["result"]) == ("COMPLETED", 1, "first")
            assert kinds == [("lost", 1), ("failed", 2)]
            assert jobs.failed(job) is None
    assert side.runs(job)[0].outcome is None  # it never got to its end
    assert len(side.runs(job)) == (3 if meanwhile == "retried" else 2)
    assert_works(first, jobs, master)


# --- everything stands still ---------------------------------------------------------------------------


def test_a_node_that_slept_goes_on(start_daemon, jobs, side, gates):
    """A laptop's lid is closed for several leases, and nobody else is there."""
    daemon = start_daemon(SHORT, name="a")
    master = daemon.pid
    job = jobs.add([{"wait_file": str(gates[0])}, {"return": "done"}])
    side.wait_start(job)
    everything = pids_of(daemon)
    stop_processes(everything)
    wait_expired(jobs, job, 4)
    send(reversed(everything), signal.SIGCONT)
    gates[0].touch()
    assert jobs.wait(job)["state"] == "COMPLETED"
    assert [a["kind"] for a in jobs.attempts(job)] in ([], ["lost"])
    assert len(side.runs(job)) <= 2
    assert_works(daemon, jobs, master)


def test_a_server_that_slept_goes_on(private_pg, start_daemon, side, gates):
    """The other way round: the node is awake and ends its job, because it cannot know."""
    pg = private_pg()
    url = pg.url(pg.create_database(template=pg.template))
    jobs = Jobs(url)
    daemons = [start_daemon(SHORT, name=name, database=url) for name in ("a", "b")]
    masters = [daemon.pid for daemon in daemons]
    job = jobs.add([{"wait_file": str(gates[0])}, {"return": "done"}])
    pid = side.wait_start(job)["pid"]
    server = [pg.process.pid, *embedded.server_processes(pg.data)]
    stop_processes(server)
    try:
        wait_until(lambda: is_gone(pid), 4 * LEASE_S, "the worker to be fenced")
        for daemon in daemons:
            daemon.wait_state("waiting for database")
    finally:
        send(server, signal.SIGCONT)
    gates[0].touch()
    assert jobs.wait(job, timeout_s=30)["state"] == "COMPLETED"
    assert [a["kind"] for a in jobs.attempts(job)] == ["lost"]
    assert len(side.runs(job)) == 2
    for daemon, master in zip(daemons, masters, strict=True):
        assert_works(daemon, jobs, master)
    jobs.close()


# --- leases are kept whatever the job does ---------------------------------------------------------------


def assert_one_run(daemons, jobs, side, job):
    row = jobs.wait(job, timeout_s=40)
    assert (row["state"], row["attempt"]) == ("COMPLETED", 1)
    assert len(side.runs(job)) == 1
    assert not jobs.attempts(job)
    assert not [daemon for daemon in daemons if daemon.find("leases expired")]


@pytest.mark.parametrize("body", ["burn_gil", "hold_gil"])
def test_a_job_that_leaves_its_interpreter_no_time(start_daemon, jobs, side, body):
    daemons = [start_daemon(SHORT, name=name) for name in ("a", "b")]
    job = jobs.add([{body: 3 * LEASE_S}])
    assert_one_run(daemons, jobs, side, job)


def test_a_machine_that_is_busy(private_pg, start_daemon, side):
    """More to do than processors, all of it more important than we are. The nodes and their server have one processor
    for that: on the others tests run that know nothing of it."""
    processor = min(os.sched_getaffinity(0))
    server = private_pg()
    os.sched_setaffinity(server.process.pid, {processor})  # which its sessions inherit
    url = server.url(server.create_database(template=server.template))
    config = {**SHORT, "daemon": {**SHORT["daemon"], "lease_s": 5.0, "renew_s": 1.2}}
    there = ["taskset", "--cpu-list", str(processor)]
    daemons = [start_daemon(config, name=name, database=url, wrapper=there) for name in ("a", "b")]
    burners = [subprocess.Popen([*there, sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    with contextlib.closing(Jobs(url)) as jobs:
        try:
            if os.geteuid() == 0:
                for burner in burners:
                    os.setpriority(os.PRIO_PROCESS, burner.pid, -10)
            assert_one_run(daemons, jobs, side, jobs.add([{"sleep": 12}]))
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()


def test_a_row_that_somebody_has_locked(start_daemon, jobs, side, gates):
    """For most of its lease; the others that the node holds are renewed meanwhile."""
    config = {**SHORT, "daemon": {**SHORT["daemon"], "lease_s": 5.0, "slots": 2}}
    daemons = [start_daemon(config, name="a"), start_daemon(SHORT, name="b")]
    locked, other = (jobs.add([{"wait_file": str(gates[0])}]) for _ in range(2))
    for job in (locked, other):
        side.wait_start(job)
    left = "select extract(epoch from lease_expires_at - now())::float as s from aqd.jobs where id = %s"
    with Jobs(jobs.url).conn as holder, holder.transaction():
        holder.execute("select from aqd.jobs where id = %s for update", [locked])
        wait_until(
            lambda: jobs.conn.execute(left, [locked]).fetchone()["s"] < 1.5, 10, "most of the lease to go"
        )
        assert jobs.conn.execute(left, [other]).fetchone()["s"] > 2.0 or node(jobs, other) != "a"
    wait_until(lambda: jobs.conn.execute(left, [locked]).fetchone()["s"] > 2.0, 5, "the renewal")
    gates[0].touch()
    for job in (locked, other):
        assert_one_run(daemons, jobs, side, job)


def node(jobs, job):
    """Name of the node that holds the job."""
    statement = "select n.name from aqd.jobs j join aqd.nodes n on n.node_id = j.node_id where j.id = %s"
    return jobs.conn.execute(statement, [job]).fetchone()["name"]


# --- wrong clocks ------------------------------------------------------------------------------------


@pytest.fixture
def skewed(tmp_path):
    """``skewed(600)``: an environment in which it is ten minutes later. Monotonic clocks go right, as they do on a
    real machine."""
    libraries = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
    if not libraries:
        pytest.skip("needs libfaketime (Debian: apt install libfaketime)")
    # Debian 12's libfaketime (0.9.10) takes what Python's sleep() asks for, an absolute moment of the monotonic
    # clock, for one of the false clock: EINVAL.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    )

    def make(seconds):
        return {
            "LD_PRELOAD": libraries[0],
            "FAKETIME": f"{seconds:+d}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}",
        }

    return make


def test_nodes_whose_clocks_are_ten_minutes_wrong(start_daemon, jobs, side, gates, skewed):
    """One is ahead, one is behind: what is due and what has expired is the database's decision."""
    daemons = [
        start_daemon(SHORT, name=name, env=skewed(skew)) for name, skew in (("ahead", 600), ("behind", -600))
    ]
    for daemon, skew in zip(daemons, (600, -600), strict=True):
        script = "import time; print(time.time())"
        shown = subprocess.run(
            [sys.executable, "-c", script],
            env=daemon.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        now = jobs.conn.execute("select extract(epoch from now())::float as now").fetchone()["now"]
        assert abs(float(shown.stdout) - now - skew) < 60, "the clock is not wrong"
    at_once = jobs.add_many(20)
    delayed = [jobs.add(delay_s=delay_s) for delay_s in (1.0, 1.5, 2.0, 2.5)]
    long = jobs.add([{"wait_file": str(gates[0])}])
    broken = jobs.add({"attempts": [[{"raise": "once"}], [{"return": "second"}]]})
    side.wait_start(long)
    assert jobs.wait_all([*at_once, *delayed, broken]) == {"COMPLETED": 25}
    for job in delayed:
        row = jobs.get(job)
        assert 0 <= (row["claimed_at"] - row["run_at"]).total_seconds() < 1.5
        assert (row["finished_at"] - row["claimed_at"]).total_seconds() < 10
    seen = {live(jobs, long)["lease_expires_at"]}

    def renewed():
        seen.add(live(jobs, long)["lease_expires_at"])
        return (max(seen) - min(seen)).total_seconds() > 3 * LEASE_S

    wait_until(renewed, 5 * LEASE_S + 10, "the lease to be renewed")
    gates[0].touch()
    assert_one_run(daemons, jobs, side, long)
    assert jobs.get(broken)["attempt"] == 2
    assert len(side.runs()) == 20 + 4 + 1 + 2
    nodes = jobs.conn.execute(
        "select seen_at <= now() as past, now() - seen_at < '1 min' as fresh from aqd.nodes"
    )
    assert all(row["past"] and row["fresh"] for row in nodes)
    assert not processes.zombies_below(daemons[0].pid)
