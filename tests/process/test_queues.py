"""Queues as a running node serves them: limits over several nodes, reserved slots, pauses, and a turn for the patient."""

from collections import Counter

from tests.fixtures.processes import wait_until


def most_at_once(runs):
    """The largest number of runs that overlapped."""
    moments = sorted([(run.started_ns, 1) for run in runs] + [(run.ended_ns, -1) for run in runs])
    now = most = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def set_queue(jobs, queue, **columns):
    for name, value in columns.items():
        jobs.conn.execute(
            f"insert into aqd.queues (queue, {name}) values (%s, %s) on conflict (queue) do update set {name} = %s",
            [queue, value, value],
        )


def add(jobs, count, queue, seconds, **options):
    return [jobs.add({"sleep": seconds}, queue=queue, **options) for _ in range(count)]


def test_a_limit_holds_across_nodes(start_daemon, jobs, side):
    set_queue(jobs, "narrow", max_running=3)
    narrow = add(jobs, 24, "narrow", 0.1)
    wide = add(jobs, 24, "wide", 0.1)
    for name in ("one", "two"):
        start_daemon({"daemon": {"slots": 4, "node_name": name, "poll_ms": 200}})
    assert jobs.wait_all(narrow + wide, 60) == {"COMPLETED": 48}
    runs = side.runs()
    assert most_at_once([run for run in runs if run.job in narrow]) <= 3
    assert most_at_once(runs) > 3  # the other queue took what was left


def test_a_limited_queue_goes_on_when_a_job_is_recorded_and_not_when_the_next_poll_comes(
    start_daemon, jobs, side
):
    """One runs at a time; the node polls once in ten minutes."""
    set_queue(jobs, "narrow", max_running=1)
    ids = add(jobs, 15, "narrow", 0.02)
    start_daemon({"daemon": {"slots": 4, "poll_ms": 600_000}})
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 15}
    assert most_at_once(side.runs()) == 1


def test_a_slow_queue_leaves_the_reserved_slots(start_daemon, jobs, side):
    slow = add(jobs, 10, "slow", 60, priority=100)
    start_daemon({"daemon": {"slots": 3, "reserved": {"mail": 1}, "drain_s": 0.0, "kill_grace_s": 0.5}})
    wait_until(lambda: len(side.events("start")) == 2)
    mail = add(jobs, 20, "mail", 0.01)
    assert jobs.wait_all(mail, 60) == {"COMPLETED": 20}
    started = Counter(event["job"] for event in side.events("start"))
    assert sum(started[str(id)] for id in slow) == 2


def test_a_stream_of_short_jobs_does_not_make_a_node_take_more_long_ones_than_it_has_slots_for(
    start_daemon, jobs, side
):
    """Withheld from other nodes, they would be claimed and given back in a loop."""
    add(jobs, 300, "fast", 0)
    start_daemon({"daemon": {"slots": 4, "reserved": {"fast": 2}, "drain_s": 0.0, "kill_grace_s": 0.5}})
    wait_until(lambda: len(side.runs()) > 100)
    add(jobs, 200, "slow", 60)
    wait_until(lambda: sum(event["job"] in slow_ids(jobs) for event in side.events("start")) == 2)
    for _ in range(40):
        jobs.wait(jobs.add({}, queue="fast"))
        assert claimed(jobs, "slow") == 2


def slow_ids(jobs):
    return {str(row["id"]) for row in jobs.conn.execute("select id from aqd.jobs where queue = 'slow'")}


def claimed(jobs, queue):
    statement = "select count(*)::int as n from aqd.jobs where state = 'PROCESSING' and queue = %s"
    return jobs.conn.execute(statement, [queue]).fetchone()["n"]


def test_one_shot_jobs_that_may_have_no_slot_keep_none_from_others(start_daemon, jobs, side):
    plugin = """
import time
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    handlers.add("alone", lambda payload: time.sleep(60), one_shot=True)
"""
    config = {"slots": 3, "reserved": {"fast": 1}, "drain_s": 0.0, "kill_grace_s": 0.5}
    start_daemon({"daemon": config}, plugins={"alone.py": plugin})
    for _ in range(20):
        jobs.add({}, type="alone", queue="slow")
    wait_until(lambda: claimed(jobs, "slow") >= 2)
    assert jobs.wait_all(add(jobs, 20, "fast", 0.01), 60) == {"COMPLETED": 20}


def test_a_pause_is_kept_and_ends(start_daemon, jobs, side):
    set_queue(jobs, "held", paused=True)
    held = add(jobs, 3, "held", 0)
    free = add(jobs, 3, "free", 0)
    start_daemon()
    assert jobs.wait_all(free) == {"COMPLETED": 3}
    assert {jobs.state(id) for id in held} == {"QUEUED"}
    set_queue(jobs, "held", paused=False)
    assert jobs.wait_all(held) == {"COMPLETED": 3}
    set_queue(jobs, "held", paused=True)
    jobs.wait(jobs.add({}, queue="free"))

    def passed_over():
        """A job that came after the pause was seen has run, the paused one has not."""
        (one,) = add(jobs, 1, "held", 0)
        jobs.wait(jobs.add({}, queue="free"))
        return jobs.state(one) == "QUEUED"

    wait_until(passed_over, 30)


def test_urgent_jobs_do_not_starve_the_rest(start_daemon, jobs, side):
    """The urgent queue never runs dry, the other one gets its turn all the same."""
    for _ in range(300):
        jobs.add({"sleep": 0.05}, queue="urgent", priority=100)
    old = [jobs.add({}, queue="old", run_at="2020-01-01T00:00:00Z") for _ in range(3)]
    jobs.conn.execute("update aqd.jobs set run_at = now() - interval '1 hour' where queue = 'old'")
    start_daemon({"daemon": {"slots": 2, "aging_s": 1.0}})
    assert jobs.wait_all(old, 60) == {"COMPLETED": 3}
    urgent = jobs.conn.execute("select count(*)::int as n from aqd.jobs where queue = 'urgent'").fetchone()
    assert urgent["n"] > 0


def test_tags_and_meta_reach_the_handler(start_daemon, jobs):
    plugin = """
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    handlers.add("look", lambda payload, job: [list(job.tags), job.meta])
"""
    start_daemon(plugins={"look.py": plugin})
    casts = "select aqd.enqueue('look', tags => '{a:1,b}', meta => '{\"trace\": \"é\", \"n\": [1]}') as id"
    first = jobs.conn.execute(casts).fetchone()["id"]
    second = jobs.add({}, type="look")
    large = jobs.conn.execute(
        "select aqd.enqueue('look', meta => jsonb_build_object('x', repeat('y', 60000))) as id"
    ).fetchone()["id"]
    assert jobs.wait(first)["result"] == [["a:1", "b"], {"trace": "é", "n": [1]}]
    assert jobs.wait(second)["result"] == [[], {}]
    assert len(jobs.wait(large)["result"][1]["x"]) == 60_000
    row = jobs.get(first)
    assert (row["tags"], row["meta"]) == (["a:1", "b"], {"trace": "é", "n": [1]})


def test_a_job_that_no_worker_can_be_handed_ends_and_harms_nobody(daemon, jobs):
    """No way in lets it through (meta has a bound): it is put into the table by hand."""
    row = jobs.conn.execute(
        """insert into aqd.jobs (type, run_at, meta, payload)
           values ('fate', now(), jsonb_build_object('x', repeat('y', 100000)),
                   to_jsonb(repeat('z', 32000))) returning id"""
    ).fetchone()
    others = jobs.add_many(20)
    jobs.wait(row["id"], "FAILED")
    assert jobs.failed(row["id"])["reason"] == "too_large"
    assert jobs.wait_all(others) == {"COMPLETED": 20}
    assert daemon.status()["restarts"].get("dispatcher", 0) == 0
