"""Claiming: which node takes which job, when, and what becomes of what it took and did not begin."""

import random
import signal
import time

import msgspec

from aqd import control
from aqd.figures import Cell
from tests.fixtures.processes import wait_until

OTHER_PLUGIN = """
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    handlers.add("rare", lambda payload: "done by the one who can")
"""


def nodes_of(jobs, ids):
    """Names of the nodes that finished the jobs, and how many each."""
    rows = jobs.conn.execute(
        """select n.name, count(*)::int as n from aqd.all_jobs j join aqd.nodes n on n.node_id = j.node_id
           where j.id = any(%s) group by n.name""",
        [ids],
    )
    return {row["name"]: row["n"] for row in rows}


def delay_s(row):
    """From due to claimed."""
    return (row["claimed_at"] - row["run_at"]).total_seconds()


def wait_asleep(jobs, known=1):
    """Waits until a claimer has announced its sleep anew; the number of announcements."""
    statement = "select last_value as n from aqd.sleeps"
    return wait_until(lambda: (n := jobs.conn.execute(statement).fetchone()["n"]) > known and n)


def claims_when_attempts(daemon, attempts):
    """How many claims the node has made, as soon as its master has heard of so many attempts."""

    def heard():
        cells = control.request(daemon.socket, "metrics", 5.0)["cells"]
        counts = {(cell.metric, *cell.labels): cell.count for cell in msgspec.convert(cells, list[Cell])}
        if sum(count for (metric, *_), count in counts.items() if metric == "attempts") >= attempts:
            return counts["statement", "claim"]
        return None

    return wait_until(heard)


# --- shutting down ---------------------------------------------------------------------------------


def test_a_stop_at_any_moment_leaves_nothing_claimed_and_nothing_runs_twice(start_daemon, jobs, side):
    daemon = start_daemon(start=False)
    ids = jobs.add_many(1000)
    for _ in range(4):
        ran = len(side.events("start"))
        daemon.start()
        moment = min(ran + random.randrange(1, 200), 1000)  # a quick machine is done before the last stop
        wait_until(lambda moment=moment: len(side.events("start")) >= moment, 30, "jobs to run")
        assert daemon.stop() == 0
        rows = jobs.conn.execute(
            "select state, min(attempt) as least, max(attempt) as most from aqd.jobs group by state"
        ).fetchall()
        # Claimed and not begun: back, with its attempt.
        assert rows in ([], [{"state": "QUEUED", "least": 0, "most": 0}])
    daemon.start()
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 1000}
    assert len(side.runs()) == 1000
    assert {run.attempt for run in side.runs()} == {1}


def test_a_stop_while_workers_start_claims_nothing(start_daemon, jobs, side):
    ids = jobs.add_many(50)
    for moment_s in (0.0, 0.3, 0.7, 1.2):
        daemon = start_daemon(wait=False)
        time.sleep(moment_s)  # a different moment of the start each time, whichever that is
        daemon.signal(signal.SIGTERM)
        daemon.expected_exit = None  # before Python has come to the handler it is killed by the signal
        daemon.wait_exit()
        assert not jobs.conn.execute("select from aqd.jobs where state = 'PROCESSING'").fetchall()
    start_daemon()
    assert jobs.wait_all(ids) == {"COMPLETED": 50}
    assert len(side.runs()) == 50


# --- types -----------------------------------------------------------------------------------------


def test_a_node_without_the_plugin_never_touches_its_jobs(start_daemon, jobs):
    config = {"jobs": {"unknown_type_grace_s": 2.0}, "keeper": {"node_ttl_s": 30.0}}
    able = start_daemon(config, name="able", plugins={"rare.py": OTHER_PLUGIN})
    able.stop()
    start_daemon(config, name="unable")
    ids = jobs.add_many(20, type="rare")
    for _ in range(3):  # it looks, and finds others
        assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    untouched = "select from aqd.jobs where type = 'rare' and state = 'QUEUED' and attempt = 0"
    assert len(jobs.conn.execute(untouched).fetchall()) == 20
    able.start()
    assert jobs.wait_all(ids) == {"COMPLETED": 20}
    assert nodes_of(jobs, ids) == {"able": 20}
    assert {jobs.get(job)["attempt"] for job in ids} == {1}


def test_a_type_that_no_live_node_knows_fails_after_the_grace(start_daemon, jobs):
    daemon = start_daemon({"jobs": {"unknown_type_grace_s": 1.0}})
    job = jobs.add({"a": 1}, type="nobody.knows")
    later = jobs.add(type="nobody.knows", delay_s=3600)
    row = jobs.wait(job)
    assert (row["state"], row["attempt"]) == ("FAILED", 0)
    assert (time_of_failure(jobs, job) - row["created_at"]).total_seconds() >= 1.0
    record = jobs.failed(job)
    assert record["attempts"] == 0
    assert "nobody.knows" in record["error"]
    assert daemon.wait_for("no node knows this type, jobs failed", type="nobody.knows")["failed"] == 1
    assert jobs.state(later) == "QUEUED"  # it is not due; its plugin may come


def time_of_failure(jobs, job):
    return jobs.failed(job)["failed_at"]


def test_a_type_that_another_live_node_knows_does_not_fail(start_daemon, jobs, side, tmp_path):
    """Its only node is busy for longer than the grace."""
    config = {"jobs": {"unknown_type_grace_s": 0.5}, "daemon": {"slots": 1}}
    start_daemon(config, name="able", plugins={"rare.py": OTHER_PLUGIN})
    blocker = jobs.add([{"wait_file": str(tmp_path / "go")}])
    side.wait_start(blocker)
    start_daemon(config, name="unable")
    waiting = jobs.add(type="rare")
    unknown = jobs.add(type="nobody.knows")
    assert jobs.wait(unknown)["state"] == "FAILED"
    assert jobs.state(waiting) == "QUEUED"
    (tmp_path / "go").touch()
    assert jobs.wait(waiting)["state"] == "COMPLETED"


# --- frames ----------------------------------------------------------------------------------------


def test_jobs_behind_a_long_one_in_a_frame_are_taken_back(start_daemon, jobs, side, tmp_path):
    gate = tmp_path / "go"
    start_daemon({"daemon": {"frame_ms": 1000.0}})
    jobs.wait_all(jobs.add_many(100))  # it learns that these are short
    known = len(side.runs())
    payloads = [[{"wait_file": str(gate)}], *[[{"note": n}] for n in range(60)]]
    with jobs.conn.transaction():
        long, *short = [jobs.add(payload) for payload in payloads]
    assert jobs.wait_all(short) == {"COMPLETED": 60}
    assert jobs.state(long) == "PROCESSING"
    gate.touch()
    assert jobs.wait(long)["state"] == "COMPLETED"
    runs = side.runs()[known:]
    assert len(runs) == 61
    assert {run.attempt for run in runs} == {1}
    assert len({run.pid for run in runs if run.job != long} - {side.runs(long)[0].pid}) == 1


def test_long_jobs_are_not_claimed_ahead(start_daemon, jobs, side, tmp_path):
    """What a busy node holds back is free for a node that comes later."""
    gate = tmp_path / "go"
    first = start_daemon(name="a")
    jobs.wait(jobs.add([{"sleep": 0.3}]))
    ids = jobs.add_many(6, [{"wait_file": str(gate)}])
    wait_until(lambda: len(side.events("start")) == 3)
    start_daemon(name="b")
    wait_until(lambda: len(side.events("start")) == 5)
    # When they were as old as the first one became, a slot seemed about to be free: what was claimed for it is given back.
    wait_until(
        lambda: len(jobs.conn.execute("select from aqd.jobs where state = 'PROCESSING'").fetchall()) == 4
    )
    gate.touch()
    assert jobs.wait_all(ids) == {"COMPLETED": 6}
    assert first.status()["state"] == "running"


# --- queues, priorities, nodes ---------------------------------------------------------------------


def test_a_node_serves_only_its_queues(start_daemon, jobs):
    start_daemon({"daemon": {"queues": ["mail", "other"]}}, name="some")
    mail = jobs.add(queue="mail")
    default = jobs.add()
    for _ in range(3):
        assert jobs.wait(jobs.add(queue="other"))["state"] == "COMPLETED"
    assert jobs.wait(mail)["state"] == "COMPLETED"
    assert (jobs.state(default), jobs.get(default)["attempt"]) == ("QUEUED", 0)
    start_daemon(name="all")
    assert jobs.wait(default)["state"] == "COMPLETED"
    assert nodes_of(jobs, [mail, default]) == {"some": 1, "all": 1}


def test_priorities_go_first_over_queues_and_age(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"slots": 1, "frame_ms": 0.0}}, start=False)
    wanted = []
    for priority in (-100, 0, 100, 7):
        for queue in ("x", "y"):
            wanted.append((-priority, jobs.add(priority=priority, queue=queue)))
    daemon.start()
    assert jobs.wait_all([job for _, job in wanted]) == {"COMPLETED": 8}
    order = [run.job for run in side.runs()]
    rank = {job: negated for negated, job in wanted}
    assert [rank[job] for job in order] == sorted(rank.values())


def test_two_nodes_share_the_work(start_daemon, jobs, side):
    for name in ("a", "b"):
        start_daemon(name=name)
    ids = jobs.add_many(80, [{"sleep": 0.05}])
    assert jobs.wait_all(ids) == {"COMPLETED": 80}
    shares = nodes_of(jobs, ids)
    assert set(shares) == {"a", "b"}
    assert min(shares.values()) >= 10
    assert len(side.runs()) == 80


# --- waking ----------------------------------------------------------------------------------------


def test_a_sleeping_node_is_woken_by_the_notification(start_daemon, jobs):
    daemon = start_daemon({"daemon": {"poll_ms": 60_000}})
    assert daemon.wait_status(lambda s: s["database"]["listener_up"])
    # Wherever it is just then: before the announcement, between announcement and look, or asleep.
    for _ in range(6):
        assert delay_s(jobs.wait(jobs.add(), timeout_s=30)) < 1.5
        assert delay_s(jobs.wait(jobs.add(queue=f"q{_}"), timeout_s=30)) < 1.5


def test_jobs_of_a_transaction_that_was_open_when_the_node_fell_asleep(start_daemon, jobs, side):
    """Their notification was not sent: nobody slept when they were inserted."""
    start_daemon({"daemon": {"poll_ms": 60_000, "slots": 1}})
    wait_asleep(jobs)
    known = jobs.conn.execute("select last_value as n from aqd.sleeps").fetchone()["n"]
    jobs.add_many(3, [{"sleep": 0.5}])  # a backlog: the node strikes itself off
    wait_until(
        lambda: jobs.conn.execute("select last_value >= %s as s from aqd.wakes", [known]).fetchone()["s"]
    )
    with jobs.conn.transaction():
        first = jobs.add()
        wait_asleep(jobs, known)
    began = time.monotonic()
    assert jobs.wait(first)["state"] == "COMPLETED"
    assert time.monotonic() - began < 3.0


def test_jobs_one_by_one_cost_one_claim_each_and_no_more_announcements(start_daemon, jobs):
    """And the node stays announced: whoever comes next wakes it, too. (A single slot whose last job was slow, as any is on a
    busy machine, asks for one job: who gets all that he asked for asks again.)"""
    daemon = start_daemon({"daemon": {"poll_ms": 60_000, "slots": 4}})
    wait_asleep(jobs)
    for _ in range(2):
        jobs.wait(jobs.add())  # the first of its lane and type is looked for more than once
    before = claims_when_attempts(daemon, 2)
    known = jobs.conn.execute("select last_value as n from aqd.sleeps").fetchone()["n"]
    for _ in range(10):
        assert delay_s(jobs.wait(jobs.add())) < 3.0
    assert claims_when_attempts(daemon, 12) - before == 10
    assert jobs.conn.execute("select last_value as n from aqd.sleeps").fetchone()["n"] == known
    assert jobs.conn.execute("select last_value as n from aqd.wakes").fetchone()["n"] < known


def test_a_busy_node_that_strikes_itself_off_takes_no_notifications_from_the_others(start_daemon, jobs):
    """Two nodes sleep; one gets a backlog and strikes off both. What comes then still wakes the other."""
    poll = {"daemon": {"poll_ms": 60_000, "slots": 1}}
    start_daemon({**poll, "daemon": {**poll["daemon"], "queues": ["default"]}})
    known = wait_asleep(jobs)
    start_daemon({**poll, "daemon": {**poll["daemon"], "queues": ["busy"]}})
    wait_asleep(jobs, known)  # the higher number: it strikes off the other one, too
    known = jobs.conn.execute("select last_value as n from aqd.wakes").fetchone()["n"]
    jobs.conn.execute(
        """select aqd.enqueue('fate', '[{"sleep": 1}]', queue => 'busy') from generate_series(1, 6)"""
    )
    struck = "select last_value > %s as s from aqd.wakes"
    wait_until(lambda: jobs.conn.execute(struck, [known]).fetchone()["s"])
    time.sleep(2.0)  # what was notified before has been looked for, also behind floors
    assert delay_s(jobs.wait(jobs.add())) < 5.0


def test_a_slot_that_comes_free_beside_reserved_ones_is_filled_at_once(start_daemon, jobs):
    """The claim before asked for jobs of the reserved slot's queue only, and found none."""
    start_daemon({"daemon": {"poll_ms": 60_000, "slots": 3, "reserved": {"mine": 1}}})
    wait_asleep(jobs)
    ids = jobs.add_many(20, [{"sleep": 0.3}])
    assert jobs.wait_all(ids) == {"COMPLETED": 20}
    row = jobs.conn.execute(
        "select extract(epoch from max(claimed_at) - min(claimed_at)) as s from aqd.all_jobs where id = any(%s)",
        [ids],
    ).fetchone()
    assert row["s"] < 6.0  # two at a time: 2.7 s


def test_without_notifications_polling_finds_the_jobs(start_daemon, jobs):
    daemon = start_daemon({"database": {"notify": False}, "daemon": {"poll_ms": 300}})
    assert not daemon.status()["database"]["listener_up"]
    for _ in range(3):
        assert delay_s(jobs.wait(jobs.add())) < 1.5
    assert wait_asleep_never(jobs)


def wait_asleep_never(jobs):
    return jobs.conn.execute("select last_value as n from aqd.sleeps").fetchone()["n"] == 1


def test_a_delayed_job_starts_on_time_also_between_two_polls(start_daemon, jobs):
    start_daemon({"daemon": {"poll_ms": 60_000}})
    jobs.wait(jobs.add())
    job = jobs.add(delay_s=1.5)
    row = jobs.wait(job)
    assert 0 <= delay_s(row) < 0.7
