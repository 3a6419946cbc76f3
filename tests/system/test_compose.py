"""packaging/compose.yaml on a real engine, as somebody would use it who has read its first lines."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.processes import wait_until
from tests.system.engine import ROOT, Engine

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

# Ten were tried by hand, with docker-compose 1.29 and with the plugin.
ROUNDS = 2


class Stack:
    """The services of compose.yaml, as a project of our own."""

    def __init__(self, engine: Engine, keys: Path) -> None:
        self.engine = engine
        self.project = f"aqd{secrets.token_hex(4)}"
        # Below those that the kernel gives to connections, which stay taken for a while.
        self.port = 20_000 + secrets.randbelow(12_000)
        self.keys = keys
        self.environment = {
            "AQD_SECRETS": str(keys),
            "AQD_PORT": str(self.port),
            "COMPOSE_PROJECT_NAME": self.project,
        }

    def __call__(self, *arguments: str, check: bool = True) -> str:
        return self.engine.compose(*arguments, check=check, environment=self.environment)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        label = f"label=com.docker.compose.project={self.project}"
        found = [
            self.engine.state(each)
            for each in self.engine.run("ps", "--all", "--quiet", f"--filter={label}").split()
        ]
        return [
            each for each in found if service in ("", each["Config"]["Labels"]["com.docker.compose.service"])
        ]

    def request(self, path: str, *options: str) -> dict[str, Any]:
        """From the machine, by the published port."""
        url = f"http://127.0.0.1:{self.port}{path}"
        answer: dict[str, Any] = json.loads(self.engine.enter("curl", "--silent", *options, url) or "{}")
        return answer

    def up(self) -> None:
        self("up", "--detach", "--scale", "daemon=3")
        wait_until(lambda: self.live_nodes() == 3, 90, "three nodes")

    def live_nodes(self) -> int:
        answer = self.engine.enter("curl", "--silent", f"http://127.0.0.1:{self.port}/health", check=False)
        return int(json.loads(answer)["nodes"]["live"]) if '"live"' in answer else 0


@pytest.fixture
def stack(engine: Engine, tmp_path: Path) -> Iterator[Stack]:
    made = Stack(engine, tmp_path / "secrets")
    yield made
    print(made("logs", "--no-color", "--tail=50", check=False))
    made("down", "--volumes", "--timeout=5", check=False)


@pytest.fixture
def ready(stack: Stack) -> Stack:
    """With secrets, made by the script that the file names."""
    subprocess.run([ROOT / "packaging/compose-secrets", stack.keys], check=True, timeout=30)
    return stack


def test_nothing_starts_without_secrets(stack: Stack) -> None:
    answer = stack("up", "--detach", check=False)
    assert "postgres_password" in answer
    assert [each for each in stack.containers() if each["State"]["Running"]] == []


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """Each is random, others on the machine cannot reach them, and a second run changes nothing."""
    script, place = ROOT / "packaging/compose-secrets", tmp_path / "secrets"
    subprocess.run([script, place], check=True, timeout=30)
    first = {path.name: path.read_text() for path in place.iterdir()}
    assert set(first) == {"postgres_password", "database_url", "admin_key"}
    password = first["postgres_password"].strip()
    assert first["database_url"] == f"postgresql://aqd:{password}@postgres/aqd\n"
    assert len(password) == len(first["admin_key"].strip()) == 64
    assert password != first["admin_key"].strip()
    assert place.stat().st_mode & 0o777 == 0o700
    subprocess.run([script, place], check=True, timeout=30)
    assert {path.name: path.read_text() for path in place.iterdir()} == first


def test_the_stack(ready: Stack) -> None:
    """Three daemons behind one API: a PDF is made, the key is asked for, nothing was restarted, a stop is a drain."""
    ready.up()
    key = f"x-admin-key: {(ready.keys / 'admin_key').read_text().strip()}"
    job = '{"type": "generate_pdf", "payload": {"text": "hello"}}'
    post = ("--header", "content-type: application/json", "--data", job)
    assert ready.request("/jobs", *post)["status"] == 401
    made = ready.request("/jobs", *post, "--header", key)
    done = ready.request(f"/jobs/{made['id']}?wait_s=30", "--header", key)
    assert done["status"] == "COMPLETED"
    (path,) = [value for value in done["result"].values() if str(value).endswith(".pdf")]
    # Any of the three has it: they share the volume.
    assert ready("exec", "-T", "--index=2", "daemon", "head", "-c4", path) == "%PDF"

    for service in ("api", "daemon"):
        for each in ready.containers(service):
            answer = ready.engine.run("exec", each["Id"], *each["Config"]["Healthcheck"]["Test"][1:])
            assert answer.startswith("ok")
            assert each["HostConfig"]["ReadonlyRootfs"]
            assert each["HostConfig"]["CapDrop"] == ["ALL"]
            assert not [value for value in each["Config"]["Env"] if "postgresql://" in value]
    (migrate,) = ready.containers("migrate")
    assert migrate["State"]["ExitCode"] == 0
    ready("stop")
    assert {each["State"]["ExitCode"] for each in ready.containers()} == {0}
    assert {each["RestartCount"] for each in ready.containers()} == {0}


def test_down_and_up_again(ready: Stack) -> None:
    """From nothing each time: whoever comes up before the database or the schema is there would be restarted."""
    for _ in range(ROUNDS):
        ready.up()
        assert {each["RestartCount"] for each in ready.containers()} == {0}
        states = [(each["State"]["Status"], each["State"]["ExitCode"]) for each in ready.containers()]
        assert sorted(states) == [("exited", 0), *[("running", 0)] * 5]
        ready("down", "--volumes")
        assert ready.containers() == []
        volumes = ready.engine.run("volume", "ls", "--quiet", f"--filter=name={ready.project}")
        assert volumes == ""


def test_the_file_is_what_the_plugin_reads(tmp_path: Path) -> None:
    """The plugin is stricter than 1.29; where it is installed it must accept the file."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs the compose plugin")
    command = [docker, "compose", f"--file={ROOT}/packaging/compose.yaml", "config", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
