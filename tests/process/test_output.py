"""What jobs print: kept with a failed attempt whatever became of its process, never in anybody's way."""

from __future__ import annotations

import signal

import pytest

from tests.process import probe

# Out of every buffer that there is: Python's, the C library's, a helper's.
TALK = """
print("from print", end=" ")
sys.stderr.write("from stderr ")
os.write(1, b"from write ")
ctypes.CDLL(None).printf(b"from printf ")
subprocess.run(["sh", "-c", "printf 'from a helper '; printf 'and its errors ' >&2"])
"""
ALL = "from print from stderr from write from printf from a helper and its errors "


@pytest.fixture
def daemon(start_daemon):
    return start_daemon({"daemon": {"slots": 1}}, plugins=probe.source({"kept": {"keep_output": True}}))


@pytest.mark.parametrize(
    ("end", "kind", "reason"),
    [
        ("raise RuntimeError", "failed", "exception"),
        ("os._exit(7)", "crashed", "exit"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", "signal"),
        ("sys.exit(3)", "failed", "interpreter_exit"),
    ],
)
def test_all_of_it_is_there_after_a_failure_of_any_kind(daemon, jobs, end, kind, reason):
    attempt = probe.failure(jobs, TALK + end)
    assert (attempt["kind"], attempt["reason"], attempt["output"]) == (kind, reason, ALL)


def test_a_completed_job_keeps_its_output_if_the_handler_asks(daemon, jobs):
    kept, other = (jobs.add({"code": TALK}, type=type) for type in ("kept", "probe"))
    assert jobs.wait(kept)["state"] == jobs.wait(other)["state"] == "COMPLETED"
    rows = jobs.conn.execute("select id, output from aqd.job_history where id = any(%s)", [[kept, other]])
    assert {row["id"]: row["output"] for row in rows} == {kept: ALL, other: None}


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"])
def test_a_crash_leaves_the_python_stack(daemon, jobs, name):
    attempt = probe.failure(
        jobs, f"def at_fault():\n    os.kill(os.getpid(), {getattr(signal, name).value})\nat_fault()"
    )
    assert name in attempt["error"]
    assert "Fatal Python error" in attempt["output"]
    assert "in at_fault" in attempt["output"]


def test_the_stack_is_dumped_before_a_hard_kill(start_daemon, jobs):
    start_daemon(
        {"daemon": {"slots": 1, "kill_grace_s": 0.5}}, plugins=probe.source({"short": {"timeout_s": 0.3}})
    )
    attempt = probe.failure(
        jobs, "import itertools\ndef in_c_code():\n    sum(itertools.repeat(0))\nin_c_code()", type="short"
    )
    assert (attempt["kind"], attempt["reason"]) == ("timed_out", "timeout")
    assert "in in_c_code" in attempt["output"]


def test_much_of_it_without_newlines_and_not_even_text(daemon, jobs):
    attempt = probe.failure(
        jobs,
        r"""
for _ in range(640):
    os.write(1, b"\xff\0" + b"x" * 16382)
print("\udcff lone", "\N{SNOWMAN}", "the end")
raise RuntimeError
""",
    )
    text = attempt["output"]
    assert len(text) <= 65536
    assert text.endswith("\\udcff lone ☃ the end\n")
    assert r"\xff\0x" in text


HOSTILE = {
    "closed": "os.close(1); os.close(2); os.close(0)",
    "objects closed": "sys.stdout.close(); sys.stderr.close()",
    "replaced": "import io; sys.stdout = sys.stderr = io.StringIO()",
    "gone": "del sys.stdout; sys.stderr = None",
    "detached": "sys.stdout.detach(); sys.stderr.detach()",
    "reconfigured": "sys.stdout.reconfigure(encoding='ascii', errors='strict', write_through=False)",
    "truncated": "print('x' * 100_000); open('/dev/stdout', 'w').close()",
    "led elsewhere": "fd = os.open('/dev/null', os.O_WRONLY); os.dup2(fd, 1); os.dup2(fd, 2)",
    "another number": "os.close(1); os.close(2); open('/dev/null', 'w')",
    "much": "print('x' * 3_000_000)",
    "no tracebacks": "import faulthandler; faulthandler.disable()",
    "buffered": "sys.stdout = open(1, 'w', closefd=False); print('held back')",
}


def test_what_a_job_does_to_its_output_does_not_hurt_the_next(daemon, jobs):
    worker = daemon.workers()[0]
    for name, code in HOSTILE.items():
        probe.result(jobs, code)
        attempt = probe.failure(jobs, TALK + "os.read(0, 1); print('\\N{SNOWMAN}'); raise RuntimeError")
        assert attempt["output"] == ALL + "☃\n", name
    assert daemon.workers()[0] == worker
    attempt = probe.failure(jobs, "os.abort()")
    assert attempt["output"].startswith("Fatal Python error: Aborted")


def test_a_plugin_that_cannot_be_imported_in_the_worker(start_daemon, jobs):
    text = """
import os, threading, time
import aqd

if "AQD_INTERNAL_WORKER" in os.environ:
    raise RuntimeError("no licence left")
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

@aqd.hookimpl
def aqd_register(handlers):
    handlers.add("late", len, max_attempts=1)
"""
    start_daemon({"daemon": {"slots": 1}}, plugins={"threads.py": text})
    jobs.wait(job := jobs.add({}, type="late"), "FAILED")
    (attempt,) = jobs.attempts(job)
    assert (attempt["kind"], attempt["reason"]) == ("failed", "plugin_import")
    assert "its plugin threads could not be imported in this worker" in attempt["error"]
    assert "no licence left" in attempt["error"]


def test_a_failed_job_has_its_own_output_only(daemon, jobs):
    """What a job holds back in a stream of its own making still is its own."""
    attempt = probe.failure(
        jobs, "sys.stdout = open(1, 'w', closefd=False); print('late'); raise RuntimeError"
    )
    assert attempt["output"] == "late\n"
    assert probe.failure(jobs, "raise RuntimeError")["output"] is None
