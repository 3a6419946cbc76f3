"""Several jobs in one frame: what one of them turns round is not the next one's, and what they cost.

Nothing is asked of the kernel after a brief job that the interpreter would have told (:mod:`aqd.tidy`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A no-op job needs 13, two of them only where an account may change; before they were counted it was 32.
SYSTEM_CALLS_MAX = 15


def outcomes(codes: list[str | None], frames: int = 1, wrapper: list[str] | None = None) -> list[Any]:
    argv = [sys.executable, "-m", "tests.process.lone_worker", json.dumps(codes), str(frames)]
    done = subprocess.run(
        [*(wrapper or []), *argv],
        cwd=ROOT,
        env={**os.environ, "AQD_TEST_BRIEF": "1"},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


LEFT = {
    "a directory": ("os.chdir('/proc')", "result = os.getcwd() == '/proc'"),
    "a limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (50, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "import resource as r; result = r.getrlimit(r.RLIMIT_NOFILE)[0] == 50",
    ),
    "a limit by C code": (
        "import ctypes, resource as r; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "ctypes.CDLL(None).setrlimit(7, (ctypes.c_ulong * 2)(50, hard))",
        "import resource as r; result = r.getrlimit(r.RLIMIT_NOFILE)[0] == 50",
    ),
    "a umask": ("os.umask(0o777)", "result = os.umask(0o022) == 0o777"),
    "an alarm": (
        "import signal; signal.setitimer(signal.ITIMER_REAL, 100)",
        "import signal; result = signal.getitimer(signal.ITIMER_REAL)[0] > 0",
    ),
    "a profiler's clock": (
        "import signal; signal.setitimer(signal.ITIMER_PROF, 100)",
        "import signal; result = signal.getitimer(signal.ITIMER_PROF)[0] > 0",
    ),
    "an ignored signal": (
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
        "import signal; result = signal.getsignal(signal.SIGALRM) == signal.SIG_IGN",
    ),
    "a blocked signal": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "import signal; result = bool(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    "another standard output": (
        "os.dup2(0, 1); os.dup2(0, 2)",
        "result = os.fstat(1).st_ino == os.fstat(0).st_ino",
    ),
    "no standard descriptors": ("os.closerange(0, 3)", "result = os.open('/dev/null', 0) < 3"),
    "no sys.stdout": (
        "sys.stdout = None; sys.stderr.close()",
        "print(end='', file=sys.stderr); result = None",
    ),
    "a helper": (
        "import subprocess; kept.append(subprocess.Popen(['sleep', '60']).pid)",
        "result = os.path.exists(f'/proc/{kept[0]}')",
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_the_next_job_of_a_frame_has_what_it_expects(what: str) -> None:
    leave, look = LEFT[what]
    assert outcomes([None, leave, look, None])[2] in (False, None)


def test_what_c_code_does_unseen_lasts_for_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function that was looked up before, so that nobody tells of its call."""
    look = "result = os.getcwd()"
    leave = "import ctypes; kept[0](b'/proc') if kept else kept.append(ctypes.CDLL(None).chdir)"
    home = outcomes([look])[0]
    assert outcomes([look, leave, look, None], frames=2) == [home, None, "/proc", None]
    monkeypatch.setenv("AQD_TEST_PAUSE_S", "0.5")  # a hundred times as long as the worker lets it be
    assert outcomes([look, leave.replace("kept[0]", "kept.pop()"), None], frames=3)[0] == home


def test_a_job_that_closes_the_workers_descriptors_among_others() -> None:
    """Which one it was is not known at the end of the frame: every outcome stands, and the worker leaves."""
    found = outcomes([None, "os.close(max(map(int, os.listdir('/proc/self/fd')[:-1])))", "result = 5", None])
    assert found[2] == 5


def test_system_calls_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every job: what is looked at every few milliseconds would count the speed of the machine."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    monkeypatch.setenv("AQD_TEST_SETTLE_MS", "1000000")
    monkeypatch.setenv("AQD_TEST_LIGHT", "1")

    def calls(frames: int) -> int:
        trace = tmp_path / f"{frames}"
        outcomes([None] * 50, frames, ["strace", "-f", "-c", "-o", str(trace)])
        total = re.search(r"^\s*100\.00\s+\S+\s+\S+\s+(\d+)", trace.read_text(), re.MULTILINE)
        assert total is not None, trace.read_text()
        return int(total[1])

    try:
        one = calls(1)
    except subprocess.CalledProcessError:
        pytest.skip("strace may not trace here")
    assert (calls(21) - one) / 1000 < SYSTEM_CALLS_MAX
