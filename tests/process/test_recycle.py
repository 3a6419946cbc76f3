"""Workers are replaced before they are used up, and the slot serves meanwhile."""

import itertools
import os

from tests.fixtures.processes import wait_until


def test_a_worker_that_has_grown_is_replaced_between_jobs(start_daemon, jobs):
    daemon = start_daemon({"daemon": {"recycle_memory_mb": 60, "slots": 1}})
    (old,) = daemon.workers().values()
    assert jobs.wait(jobs.add([{"alloc": 20}]))["result"]["pid"] == old
    assert jobs.wait(jobs.add([{"alloc": 80}]))["result"]["pid"] == old
    line = daemon.wait_for("worker is recycled", child=old)
    assert line["used_mb"] >= 80
    daemon.wait_status(lambda s: s["slots"][0]["pid"] not in (None, old) and s["slots"][0]["state"] == "idle")
    assert jobs.wait(jobs.add())["result"]["pid"] != old
    status = daemon.status()
    assert (status["recycled"], status["restarts"], status["slots"][0]["restarts"]) == (1, {}, 0)
    assert not daemon.find("worker ended", level="warning")


def test_no_worker_runs_more_jobs_than_it_may(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"max_jobs_per_worker": 5}})
    ids = jobs.add_many(100, [{"sleep": 0.01}])
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 100}
    by_pid = {}
    for run in side.runs():
        by_pid[run.pid] = by_pid.get(run.pid, 0) + 1
    assert max(by_pid.values()) == 5
    assert sum(by_pid.values()) == 100
    assert len(by_pid) >= 20
    status = daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    assert status["recycled"] >= 18
    assert status["restarts"] == {}
    wait_until(lambda: len([p for p in daemon.tree() if "aqd: worker" in p.title]) == 2)


def test_the_successor_is_ready_before_the_old_worker_leaves(start_daemon, jobs, side):
    slow = (
        "import time\nfrom aqd import hookimpl\n\n@hookimpl\ndef aqd_worker_start():\n    time.sleep(0.2)\n"
    )
    daemon = start_daemon({"daemon": {"max_jobs_per_worker": 3, "slots": 1}}, plugins={"slow.py": slow})
    ids = jobs.add_many(15, [{"sleep": 0.05}])
    assert jobs.wait_all(ids, 60) == {"COMPLETED": 15}
    daemon.wait_status(lambda s: s["recycled"] >= 4)
    pids = list(dict.fromkeys(run.pid for run in side.runs()))
    assert len(pids) == 5
    for old, new in itertools.pairwise(pids):
        born = side.wait("worker_start", pid=new)
        ended = side.wait("worker_stop", pid=old)
        assert born["at_ns"] < ended["at_ns"]
        # And never two that may run jobs: the new one begins after the old one's last outcome.
        last = [run for run in side.runs() if run.pid == old][-1]
        first = next(run for run in side.runs() if run.pid == new)
        assert last.ended_ns < first.started_ns


def test_while_successors_cannot_start_the_old_worker_serves(start_daemon, jobs, tmp_path):
    broken = tmp_path / "broken"
    plugin = f"""
import os
from aqd import hookimpl

@hookimpl
def aqd_worker_start():
    if os.path.exists({str(broken)!r}):
        os._exit(5)
"""
    config = {"daemon": {"recycle_memory_mb": 60, "slots": 1, "spawn_failures_max": 2}}
    daemon = start_daemon(config, plugins={"breaks.py": plugin})
    (old,) = daemon.workers().values()
    broken.touch()
    jobs.wait(jobs.add([{"alloc": 80}]))
    daemon.wait_for("worker ended", status="exit code 5", count=3)
    assert jobs.wait(jobs.add())["result"]["pid"] == old
    broken.unlink()
    daemon.wait_status(lambda s: s["recycled"] == 1 and s["slots"][0]["pid"] not in (None, old))
    assert jobs.wait(jobs.add())["result"]["pid"] != old


def test_a_successor_takes_over_when_the_old_worker_is_killed(start_daemon, jobs, side):
    daemon = start_daemon({"daemon": {"recycle_memory_mb": 60, "slots": 1}})
    (old,) = daemon.workers().values()
    gate = side.path.parent / "go"
    jobs.wait(jobs.add([{"alloc": 80}]))
    # Busy when the successor is ready, so it cannot leave.
    job = jobs.add([{"alloc": 1}, {"wait_file": str(gate)}], max_attempts=1)
    side.wait_start(job)
    wait_until(lambda: len([p for p in daemon.tree() if "aqd: worker" in p.title]) == 2)
    successor = next(p.pid for p in daemon.tree() if "aqd: worker" in p.title and p.pid != old)
    side.wait("worker_start", pid=successor)
    os.kill(old, 9)
    jobs.wait(job)
    assert jobs.wait(jobs.add())["result"]["pid"] == successor
    assert daemon.workers() == {0: successor}
