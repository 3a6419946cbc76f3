"""The suite's own safety net: what is left behind after a test must be noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import invariants, processes
from tests.fixtures.daemon import Daemon, toml
from tests.fixtures.jobs import Jobs, SideFile
from tests.fixtures.processes import MARKER, wait_until

LEAVER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


def test_an_orphan_is_found_and_killed() -> None:
    mark = f"orphan-{os.urandom(4).hex()}"
    command = [sys.executable, "-c", LEAVER]
    result = subprocess.run(
        command, env={**os.environ, MARKER: mark}, capture_output=True, text=True, check=True
    )
    orphan = int(result.stdout)
    left = processes.belonging(mark, [])
    assert [each.pid for each in left] == [orphan]
    assert left[0].parent == os.getpid(), "an orphan must come to us"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariants, "GONE_S", 0.1)
        wrong = invariants._left_over([], mark)
    assert wrong == [f"left running: {left[0]}"]
    wait_until(lambda: processes.belonging(mark, []) == [] or None, 5)
    processes.reap_adopted([])
    assert processes.look(orphan) is None


@pytest.mark.parametrize("contained", [False, True])
def test_what_others_keep_in_a_container_is_theirs(contained: bool) -> None:
    """The engine's and the machines' daemons may be below the process that runs another test, which must not kill them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    unshare = ["unshare", "--pid", "--fork", "--kill-child"] if contained else []
    if contained and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a PID namespace")
    mark = f"container-{os.urandom(4).hex()}"
    # The title as setproctitle shows it; its own, because there may be such containers below this process just now.
    title = f"aqd: worker {mark}"
    shell = ["bash", "-c", f'exec -a "{title}" "$@"', "bash"]
    started = subprocess.Popen([*unshare, *shell, *command])

    def titled_aqd() -> list[processes.Process]:
        return [each for each in processes.descendants(os.getpid()) if each.title.startswith(title)]

    try:
        (titled,) = wait_until(titled_aqd, 5)
        assert [each.pid for each in processes.belonging(mark, [])] == ([] if contained else [titled.pid])
    finally:
        started.kill()
        started.wait()


def test_a_zombie_is_found(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork() == 0: os._exit(0)\nprint('forked', flush=True)\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        daemon = Daemon(tmp_path / "d", "none", {})
        daemon.process = parent
        (found,) = invariants._zombies(daemon)
        assert found.startswith("zombie: ")
    finally:
        parent.kill()
        parent.communicate()


def test_bad_rows_are_found(database_url: str, jobs: Jobs) -> None:
    job = jobs.add()
    assert invariants._database([database_url], invariants._PROCESSING) == []
    jobs.conn.execute(
        "update aqd.jobs set state = 'PROCESSING', lease_token = 1, node_id = 'x', attempt = 4, max_attempts = 3, "
        "lease_expires_at = now() - interval '1 minute' where id = %s",
        [job],
    )
    for question in (invariants._PROCESSING, invariants._EXPIRED, invariants._COUNTS):
        (found,) = invariants._database([database_url], question)
        assert found.startswith(question[0])


def test_a_connection_is_found(database_url: str) -> None:
    import psycopg

    with pytest.MonkeyPatch.context() as patch, psycopg.connect(database_url, application_name="aqd keeper"):
        patch.setattr(invariants, "GONE_S", 0.1)
        (found,) = invariants._connections([database_url])
    assert "aqd keeper" in found
    assert invariants._connections([database_url]) == []


def test_overlapping_runs_are_found(side: SideFile) -> None:
    run = '{{"event": "{}", "job": "7", "attempt": {}, "pid": {}, "at_ns": {}, "outcome": "returned"}}\n'
    lines = [
        ("start", 1, 10, 100),
        ("end", 1, 10, 200),
        ("start", 2, 11, 200),
        ("start", 3, 12, 250),
        ("end", 2, 11, 300),
    ]
    side.path.write_text("".join(run.format(*line) for line in lines))
    (found,) = side.overlaps()
    assert found.startswith("job 7: ")
    assert [each.ended_ns for each in side.runs(7)] == [200, 300, None]


def test_toml_reads_back() -> None:
    import tomllib

    config = {
        "a": {"text": 'quote " ü \\', "list": ["x", "y"], "flag": True, "deep": {"er": {"n": 1.5}}},
        "b": {},
    }
    assert tomllib.loads(toml(config)) == config
