"""What a node does while there is nothing to do, and what a start must not do: counted, not timed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from aqd import pace

SLOTS = 12
SECONDS = 6.0
# Beyond what is wanted; a busy machine stretches the window, but makes nobody wake up more often.
MARGIN = 1.5


def waits(pid: int) -> int:
    """How often a process's main thread has gone to sleep."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


@pytest.fixture
def resting(start_daemon, jobs):
    daemon = start_daemon({"daemon": {"slots": SLOTS}})
    jobs.wait(jobs.add())
    time.sleep(pace.AWAKE_S + 1.0)  # rest is what begins after that time
    return daemon


def test_at_rest_nobody_wakes_up_often_whatever_the_number_of_slots(resting):
    pids = {
        "master": resting.pid,
        "dispatcher": resting.process_of("dispatcher"),
        "loader": resting.process_of("loader"),
    }
    before = {name: waits(pid) for name, pid in pids.items()}
    workers = {pid: waits(pid) for pid in resting.workers().values()}
    began = time.monotonic()
    time.sleep(SECONDS)
    a_second = {name: (waits(pid) - before[name]) for name, pid in pids.items()}
    turns = sum(waits(pid) - count for pid, count in workers.items())
    passed = time.monotonic() - began
    wanted = {
        "master": 1 / pace.REST_S + 0.25,  # and the dispatcher's report
        "dispatcher": 1 / pace.REST_S,
        "loader": 0.0,
    }
    found = {name: (count, (wanted[name] * passed + 1) * MARGIN) for name, count in a_second.items()}
    assert all(count <= bound for count, bound in found.values()), found
    assert len(workers) == SLOTS
    assert turns <= SLOTS * (passed / 5 + 1)


def test_at_rest_a_master_opens_few_files(resting, tmp_path):
    """Not one for each slot: 64 of them a second were half a percent of a core."""
    trace = tmp_path / "trace"
    command = ["strace", "-qq", "-e", "trace=openat", "-o", str(trace), "-p", str(resting.pid)]
    try:
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("there is no strace")
    time.sleep(SECONDS)
    if tracer.poll() is not None:
        pytest.skip("strace may not trace")
    tracer.terminate()
    tracer.wait(10)
    opened = trace.read_text().splitlines()
    # Each second: its children, and the kernel's count of killings. Of each worker that has had no job four files, with
    # pauses that double (not six times in this window, but twice).
    kinds = Counter(re.sub(r"\d+", "N", line.split('"')[1]) for line in opened if '"' in line)
    assert len(opened) <= (SECONDS + 2) * 3 + SLOTS * 4 * 2, kinds


def test_at_rest_few_statements_are_sent(start_daemon, jobs):
    """By a daemon with the default intervals; the server counts a session's when ten seconds have passed, or a
    second, and it does more."""
    usual = {"daemon": {"poll_ms": 1000}, "keeper": {"rescue_s": 1.0, "node_ttl_s": 30.0, "figures_s": 10.0}}
    start_daemon(usual)
    time.sleep(pace.AWAKE_S + 1.0)  # rest is what begins after that time
    transactions = "select xact_commit + xact_rollback as number from pg_stat_database where datname = current_database()"
    before, began = jobs.conn.execute(transactions).fetchone()["number"], time.monotonic()
    time.sleep(12.0)
    after, passed = jobs.conn.execute(transactions).fetchone()["number"], time.monotonic() - began
    # Here one second's look, one rescue, and a good one of everything else.
    assert (after - before) / passed <= 5.0, (after - before, passed)


@pytest.mark.parametrize(
    ("module", "never", "always"),
    [
        (
            "aqd.boot",
            ["psycopg", "asyncio", "ssl", "rich", "falcon", "aqd.plugins", "aqd.worker"],
            [],
        ),
        # What workers need is there before they are forked, and what few need is not.
        ("aqd.loader", ["psycopg", "asyncio", "ssl", "click", "rich"], ["aqd.worker", "aqd.plugins"]),
        ("aqd.dispatcher", ["click", "rich", "falcon", "aqd.plugins"], ["psycopg"]),
    ],
)
def test_modules_of_a_start(module: str, never: list[str], always: list[str]) -> None:
    program = f"import sys, {module}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & set(never)
    assert set(always) <= loaded


def test_a_worker_imports_nothing_of_its_own(start_daemon, jobs):
    """Each would pay for it again, in time and in private memory."""
    source = """
import sys
import aqd

BEFORE = None

@aqd.hookimpl
def aqd_register(handlers):
    handlers.add("modules", lambda _payload: sorted(set(sys.modules) - BEFORE))

@aqd.hookimpl
def aqd_worker_start(slot, generation):
    global BEFORE
    BEFORE = BEFORE or set(sys.modules)
"""
    start_daemon(plugins={"modules.py": source})
    job = jobs.wait(jobs.add(type="modules"))
    assert (job["state"], job["result"]) == ("COMPLETED", [])
