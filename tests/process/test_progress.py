"""What a handler says of its progress, and what it is told while it runs."""

import pytest

from tests.fixtures.processes import wait_until


def test_what_was_said_while_the_row_was_locked_is_stored_afterwards(start_daemon, jobs, tmp_path):
    gates = [tmp_path / name for name in ("first", "second")]
    end, said = tmp_path / "end", tmp_path / "said"
    start_daemon({"daemon": {"lease_s": 20.0, "renew_s": 0.2}})
    job, sibling = (
        jobs.add(
            [{"wait_file": str(gate)}, {"progress": 33}, {"touch": str(said)}, {"wait_file": str(end)}],
        )
        for gate in gates
    )
    wait_until(lambda: jobs.state(job) == jobs.state(sibling) == "PROCESSING")
    with jobs.conn.transaction():
        jobs.conn.execute("select from aqd.jobs where id = %s for update", [job])
        gates[0].touch()
        wait_until(said.exists)
        gates[1].touch()
        # Said later, stored: by then it was tried with the other one, too.
        wait_until(lambda: jobs.get(sibling)["progress_percent"] == 33)
        assert jobs.get(job)["progress_percent"] is None
    wait_until(lambda: jobs.get(job)["progress_percent"] == 33)
    end.touch()
    assert jobs.wait_all([job, sibling]) == {"COMPLETED": 2}


TOLD = """
import pathlib
import threading
import time
from aqd import hookimpl
from aqd.errors import StopJob

@hookimpl
def aqd_register(handlers):
    handlers.add("heeding", heeding)

def heeding(payload, job):
    seen = [job.should_stop]

    def work():  # no exception reaches it here
        pathlib.Path(payload).touch()
        while not job.should_stop:
            time.sleep(0.01)
        seen.append(job.should_stop)

    thread = threading.Thread(target=work)
    if payload:
        thread.start()
        while True:
            try:
                while len(seen) < 2:  # a join that is interrupted takes the thread for ended
                    time.sleep(0.01)
                return seen
            except StopJob:
                pass
    return seen
"""


@pytest.mark.parametrize("why", ["time", "cancel", "drain"])
def test_a_job_is_told_that_it_should_stop(start_daemon, jobs, why, tmp_path):
    """Where nothing can be raised, too; and the next job in the worker is told nothing."""
    daemon = start_daemon(
        {"daemon": {"slots": 1, "kill_grace_s": 4.0, "drain_s": 0.1, "renew_s": 0.2}},
        plugins={"told.py": TOLD},
    )
    begun = tmp_path / "begun"
    job = jobs.add(str(begun), type="heeding", timeout_s=2.0 if why == "time" else 60.0)
    wait_until(begun.exists, 15)  # sooner, it would be ended before it can hold the exception
    if why == "cancel":
        jobs.conn.execute("select aqd.cancel(%s)", [job])
    elif why == "drain":
        daemon.signal(15)
    assert jobs.wait(job)["result"] == [False, True]
    if why == "drain":
        assert daemon.wait_exit() == 0
    else:
        assert jobs.wait(jobs.add("", type="heeding"))["result"] == [False]
