"""Limits are the master's own affair: they hold although the dispatcher cannot move, and nothing reaches the database."""

import signal

import pytest

from tests.fixtures.processes import wait_until
from tests.process.support import is_gone, send, stop_processes


@pytest.mark.parametrize(
    ("steps", "options", "reason"),
    [
        ([{"swallow": 120}], {"timeout_s": 0.5}, "timeout"),
        ([{"sleep": 0.3}, {"alloc": 300}, {"sleep": 120}], {}, "memory_limit"),
    ],
    ids=["time", "memory"],
)
def test_they_hold_while_the_dispatcher_stands_still(start_daemon, jobs, side, steps, options, reason):
    daemon = start_daemon({"daemon": {"lease_s": 60.0}, "jobs": {"memory_limit_mb": 100}})
    job = jobs.add({"attempts": [steps, [{"return": "again"}]]}, **options)
    worker = side.wait_start(job)["pid"]
    dispatcher = daemon.process_of("dispatcher")
    stop_processes([dispatcher])
    try:
        # It is killed while the dispatcher stands still (which the master would bear for longer).
        wait_until(lambda: is_gone(worker))
        assert not is_gone(dispatcher)
    finally:
        send([dispatcher], signal.SIGCONT)
    assert jobs.wait(job)["result"] == "again"
    assert [attempt["reason"] for attempt in jobs.attempts(job)] == [reason]
