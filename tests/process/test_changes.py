"""Changes by hand beside a running node: it takes part, and is in nobody's way (F38)."""

import threading

import psycopg
import pytest

from aqd import admin
from tests.fixtures.processes import wait_until

# Whoever is not woken finds nothing before the test's deadline.
ASLEEP = {"daemon": {"poll_ms": 600_000}}


@pytest.fixture
def operator(database_url):
    """A connection as an operator's script has it."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


def test_retrying_all_that_fails_at_once_ends(start_daemon, jobs, operator, database_url):
    """F38: each request works on the set that it found, though its jobs are back before it is through; nobody
    deadlocks with the node, and each job has run once for each time that it was retried."""
    count = 1500
    ids = jobs.add_many(count, {"raise": "no"}, type="fate_once")
    start_daemon({"daemon": {"slots": 4}})
    failed = "select count(*)::int as n from aqd.jobs where state = 'FAILED'"
    wait_until(lambda: jobs.conn.execute(failed).fetchone()["n"] == count, 120)

    changed = []

    def retry():
        with psycopg.connect(database_url, autocommit=True) as conn:
            for _ in range(3):
                done = admin.retry_many(conn, admin.job_filter(type="fate_once"))
                assert done.matched <= count
                changed.append(done.changed)

    threads = [threading.Thread(target=retry, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
        assert not thread.is_alive()
    assert sum(changed) >= count
    wait_until(lambda: jobs.conn.execute(failed).fetchone()["n"] == count, 120)
    figures = operator.execute(
        """select sum(j.retries), sum((select count(*) from aqd.job_attempts a where a.job_id = j.id)),
                  sum(f.failures), count(*) from aqd.jobs j join aqd.failed_jobs f on f.job_id = j.id"""
    ).fetchone()
    assert figures == (sum(changed), count + sum(changed), count + sum(changed), count)
    assert {row[0] for row in operator.execute("select id from aqd.jobs")} == set(ids)
    assert admin.discard_many(operator, admin.EVERYTHING, "enough").changed == count
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert operator.execute(deadlocks).fetchone()[0] == 0


def test_a_changed_moment_wakes_who_sleeps(start_daemon, jobs, operator):
    """Now, or in a second: the node had asked when the next job is due, and that was in an hour."""
    start_daemon(ASLEEP)
    jobs.wait(jobs.add({}))
    now, soon = jobs.add({}, delay_s=3600), jobs.add({}, delay_s=3600)
    asleep = "select last_value > (select last_value from aqd.wakes) as asleep from aqd.sleeps"
    wait_until(lambda: jobs.conn.execute(asleep).fetchone()["asleep"], 30)
    admin.update(operator, now, run_at="2020-01-01T00:00:00Z")
    assert jobs.wait(now, timeout_s=60)["state"] == "COMPLETED"
    wait_until(lambda: jobs.conn.execute(asleep).fetchone()["asleep"], 30)
    admin.update(operator, soon, delay_s=1)
    assert jobs.wait(soon, timeout_s=60)["state"] == "COMPLETED"


def test_a_changed_priority_is_noticed(start_daemon, jobs, side, operator, tmp_path):
    """Also where the job is older than all that its new lane has seen: the sweep finds it."""
    gate = tmp_path / "go"
    start_daemon({"daemon": {"slots": 1}})
    holder = jobs.add([{"wait_file": str(gate)}], priority=100)
    side.wait_start(holder)
    first, second = jobs.add({}), jobs.add({})
    admin.update(operator, second, priority=50)
    gate.touch()
    assert jobs.wait_all([holder, first, second], 60) == {"COMPLETED": 3}


def test_resuming_wakes_who_sleeps(start_daemon, jobs, operator):
    admin.pause(operator, "held")
    start_daemon(ASLEEP)
    held = jobs.add({}, queue="held")
    jobs.wait(jobs.add({}, queue="free"))
    assert jobs.state(held) == "QUEUED"
    admin.resume(operator, "held")
    assert jobs.wait(held, timeout_s=60)["state"] == "COMPLETED"


def test_deleting_beside_a_node(start_daemon, jobs, side, operator, tmp_path):
    """What runs stays, what is gone never ran."""
    gate = tmp_path / "go"
    start_daemon({"daemon": {"slots": 1}})
    holder = jobs.add([{"wait_file": str(gate)}])
    side.wait_start(holder)
    waiting = jobs.add_many(50)
    done = admin.delete_many(operator, admin.EVERYTHING)
    # The node may have claimed a few ahead; those were running for us.
    assert done.matched >= done.changed > 0
    gate.touch()
    assert jobs.wait(holder, timeout_s=60)["state"] == "COMPLETED"
    left = [row[0] for row in operator.execute("select id from aqd.all_jobs")]
    jobs.wait_all(left, 60)
    assert len(left) == 51 - done.changed
    assert {run.job for run in side.runs()} == set(left)
    assert set(waiting) >= set(left) - {holder}
