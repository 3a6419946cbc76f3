"""The suite's own database fixture by way of testcontainers, on a real engine: tests run against it, and it is gone
afterwards, also when pytest was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.fixtures.processes import wait_until
from tests.system.engine import POSTGRES, ROOT, Engine

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

OPEN = """
from tests.fixtures.postgres import open_postgres
server = open_postgres()
print(server.source, server.major, flush=True)
input()
"""


def environment(engine: Engine) -> dict[str, str]:
    ours = ("AQD_", "PYTEST_", "COV_")
    rest = {name: value for name, value in engine.environment.items() if not name.startswith(ours)}
    return {**rest, "AQD_TEST_POSTGRES_IMAGE": POSTGRES}


def servers(engine: Engine) -> set[str]:
    """Containers of testcontainers."""
    found = engine.run("ps", "--all", "--quiet", "--filter=label=org.testcontainers=true")
    return set(found.split())


def test_tests_run_on_a_container_and_none_is_left(engine: Engine) -> None:
    """One test, because each counts all containers of testcontainers that the engine has: two at once would see each other's."""
    run_that_ends(engine)
    run_that_is_killed(engine)


def run_that_ends(engine: Engine) -> None:
    chosen = ["tests/sql/test_reads.py", "-k", "health", "-p", "no:cacheprovider", "--no-header"]
    command = engine.entering(sys.executable, "-m", "pytest", *chosen)
    before = servers(engine)
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert f"database: container of {POSTGRES}" in result.stdout
    assert servers(engine) == before


def run_that_is_killed(engine: Engine) -> None:
    before = servers(engine)
    command = engine.entering(sys.executable, "-c", OPEN)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(engine),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == f"container of {POSTGRES} 15\n"
        assert len(servers(engine) - before) == 1
        os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: servers(engine) == before, 60, "no container")
