"""Memory limits hold while a job runs, whoever of its processes takes the memory; the kernel's own are told apart."""

import os
from pathlib import Path

import pytest

from tests.fixtures.processes import wait_until
from tests.process.support import is_gone

LIMIT = 64  # MiB

# Takes 1 MiB after the other, at most 1 GiB/s, and keeps account in a file: [MiB taken, when the limit was reached].
EATER = """
import os, struct, subprocess, sys, time
from aqd import hookimpl

LOOP = '''
import os, struct, sys, time
def eat(path, how_many, limit, kept):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    begin, reached = time.monotonic(), 0
    for number in range(1, how_many + 1):
        kept.append(b"x" * (1 << 20))
        if number == limit:
            reached = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        os.pwrite(fd, struct.pack("qq", number, reached), 0)
        while time.monotonic() < begin + number / 1024:
            pass
    os.close(fd)
'''
exec(LOOP)
image = b"i" * (100 << 20)  # the loader's: shared by all workers, nobody's use
kept = []

@hookimpl
def aqd_register(handlers):
    for name, function in (("eat", in_process), ("eat_program", in_program), ("eat_fork", in_fork)):
        handlers.add(name, function, memory_limit_mb=LIMIT, max_attempts=1)
    handlers.add("talk", talk, memory_limit_mb=LIMIT, max_attempts=1)
    handlers.add("forks", forks, memory_limit_mb=LIMIT, max_attempts=1)
    handlers.add("free_eat", in_process, max_attempts=1)

def in_process(payload):
    eat(payload["path"], payload["mb"], LIMIT, kept)
    time.sleep(payload.get("hold_s", 0))
    kept.clear()
    return "done"

def in_program(payload):
    call = f"{LOOP}\\neat({payload['path']!r}, {payload['mb']}, {LIMIT}, [])"
    subprocess.run([sys.executable, "-S", "-c", call], check=True)
    return "done"

def in_fork(payload):
    pid = os.fork()
    if pid == 0:
        eat(payload["path"], payload["mb"], LIMIT, [])
        os._exit(0)
    os.waitpid(pid, 0)
    return "done"

def talk(payload):
    # At most 256 MiB/s: what it takes until it is cut back is the pace times the time between two looks.
    for _ in range(payload["mb"]):
        os.write(1, b"y" * (1 << 20))
        time.sleep(1 / 256)
    return "done"

def forks(payload):
    # Each has the same 40 MiB.
    kept.append(b"x" * (40 << 20))
    pids = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            time.sleep(payload["seconds"])
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    kept.clear()
    return "done"
""".replace("LIMIT", str(LIMIT))


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(plugins={"eater.py": EATER})


def taken(path):
    """(MiB taken, boottime in ns when the limit was reached)."""
    data = path.read_bytes()
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


@pytest.mark.parametrize("who", ["eat", "eat_program", "eat_fork"])
def test_a_job_is_ended_before_it_has_taken_twice_its_limit(daemon, jobs, side, tmp_path, who):
    workers = daemon.workers()
    account = tmp_path / "account"
    job = jobs.add({"path": str(account), "mb": 1024}, who)
    row = jobs.wait(job)
    assert row["state"] == "FAILED"
    (attempt,) = jobs.attempts(job)
    assert (attempt["kind"], attempt["reason"], attempt["signal"]) == ("crashed", "memory_limit", 9)
    assert f"MiB of {LIMIT} MiB" in attempt["error"]
    mb, reached_ns = taken(account)
    assert LIMIT - 8 <= mb < 2 * LIMIT
    line = daemon.wait_for("worker killed", reason="memory", job_id=str(job))
    assert line["detail"] in attempt["error"]
    assert is_gone(line["child"])
    freed = wait_until(lambda: [s for s in side.events("worker_start") if s["at_ns"] > reached_ns])
    print(f"{who}: {mb} MiB of {LIMIT}, {(freed[0]['at_ns'] - reached_ns) / 1e6:.1f} ms to a new worker")
    daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    assert len(set(workers.values()) & set(daemon.workers().values())) == 1
    assert daemon.status()["restarts"] == {"memory": 1}


def test_within_its_limit_a_job_runs(daemon, jobs, tmp_path):
    ids = [jobs.add({"path": str(tmp_path / str(n)), "mb": LIMIT - 14}, "eat") for n in range(6)]
    assert jobs.wait_all(ids) == {"COMPLETED": 6}


def test_what_earlier_jobs_have_left_is_not_the_next_one_s_use(start_daemon, jobs, tmp_path):
    daemon = start_daemon({"daemon": {"slots": 1}}, plugins={"eater.py": EATER})
    (old,) = daemon.workers().values()
    assert jobs.wait(jobs.add([{"alloc": 2 * LIMIT}]))["result"]["pid"] == old
    job = jobs.add({"path": str(tmp_path / "account"), "mb": LIMIT // 2, "hold_s": 0.5}, "eat")
    assert jobs.wait(job)["state"] == "COMPLETED"
    # And since that much was left, a fresh worker takes its place.
    daemon.wait_status(lambda s: s["recycled"] == 1 and s["slots"][0]["pid"] not in (None, old))
    job = jobs.add({"path": str(tmp_path / "more"), "mb": 1024}, "eat")
    assert jobs.wait(job)["state"] == "FAILED"
    assert taken(tmp_path / "more")[0] < 2 * LIMIT


def test_what_a_job_shares_with_its_forks_counts_once(daemon, jobs):
    assert jobs.wait(jobs.add({"seconds": 1.0}, "forks"))["state"] == "COMPLETED"


def test_without_a_limit_there_is_none(daemon, jobs, tmp_path):
    assert jobs.wait(jobs.add({"path": str(tmp_path / "a"), "mb": 400}, "free_eat"))["state"] == "COMPLETED"


def test_a_limit_behind_a_long_queue_of_others_is_watched(daemon, jobs, tmp_path):
    """The jobs before it in the same frames have none, and are short."""
    first = jobs.add_many(60, {"path": str(tmp_path / "none"), "mb": 1}, "free_eat")
    account = tmp_path / "account"
    job = jobs.add({"path": str(account), "mb": 1024}, "eat")
    assert jobs.wait(job)["state"] == "FAILED"
    assert taken(account)[0] < 2 * LIMIT
    assert jobs.wait_all(first) == {"COMPLETED": 60}


def test_a_gibibyte_of_output_takes_little_memory(daemon, jobs):
    peak = [0]
    job = jobs.add({"mb": 1024}, "talk")

    def look():
        for slot in daemon.workers().values():
            try:
                stat = os.stat(f"/proc/{slot}/fd/1")
            except OSError:
                continue
            peak[0] = max(peak[0], stat.st_blocks * 512)
        return jobs.state(job) == "COMPLETED"

    wait_until(look, 30)
    print(f"output took {peak[0] >> 20} MiB at most")
    assert 0 < peak[0] < 2 * LIMIT << 20
    wait_until(
        lambda: all(os.stat(f"/proc/{p}/fd/1").st_blocks * 512 <= 2 << 20 for p in daemon.workers().values())
    )


# --- the kernel's killing

CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def cgroup():
    """A memory cgroup of 300 MiB; its directory."""
    if not os.access(CGROUP, os.W_OK) or not (CGROUP / "memory.limit_in_bytes").exists():
        pytest.skip("no memory cgroup can be made here")
    path = CGROUP / f"aqd-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield path
    wait_until(lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()


def test_the_kernel_kills_the_worker_and_the_attempt_says_so(cgroup, start_daemon, jobs, side, tmp_path):
    enter = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    small = EATER.replace("100 << 20", "1 << 20")
    daemon = start_daemon(plugins={"eater.py": small}, wrapper=enter)
    gate = tmp_path / "go"
    sibling = jobs.add([{"wait_file": str(gate)}])
    other = side.wait_start(sibling)["pid"]
    job = jobs.add({"path": str(tmp_path / "account"), "mb": 1024}, "free_eat")
    assert jobs.wait(job)["state"] == "FAILED"
    (attempt,) = jobs.attempts(job)
    assert (attempt["kind"], attempt["reason"], attempt["signal"]) == ("crashed", "oom", 9)
    assert daemon.wait_for("worker ended", job_id=str(job))["reason"] == "oom"
    gate.touch()
    row = jobs.wait(sibling)
    assert (row["state"], row["attempt"]) == ("COMPLETED", 1)
    assert side.runs(sibling)[0].pid == other
    assert not daemon.find("dispatcher ended")


def test_a_worker_that_dies_before_its_first_job_leaves_its_last_words(start_daemon):
    dying = """
import os
from aqd import hookimpl

@hookimpl
def aqd_worker_start(slot, generation):
    print("no table reserved for me", flush=True)
    os._exit(3)
"""
    daemon = start_daemon({"daemon": {"spawn_failures_max": 2}}, plugins={"dying.py": dying}, wait=False)
    line = daemon.wait_for("worker ended")
    assert "no table reserved" in line["output"]
    daemon.expected_exit = None
    daemon.wait_exit()
