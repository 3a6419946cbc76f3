"""The image on a real engine (engine.py): what is in it, and the daemon as PID 1 of a container (F09 and its neighbours).

Each module has a network with a PostgreSQL of its own; jobs go in and out by the command line inside the containers.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aqd.errors import Exit
from tests.fixtures.processes import wait_until
from tests.system.engine import AQD, POSTGRES, Engine, wheels
from tests.system.readme_page import PAGE

# Also the time in which the engine is started and the images are built.
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PLUGINS = Path(__file__).parents[1] / "fixtures/plugins"
# Of "docker stop": whoever needs them was killed (exit code 137).
STOP_S = 120
# Runs until it is released.
GATE = "/var/lib/aqd/gate"
HELD = [{"wait_file": GATE}, {"return": "done"}]
URL = "postgresql://postgres:secret@database/postgres"


class Containers:
    """Containers on one network, and what they are asked."""

    def __init__(self, engine: Engine, network: str) -> None:
        self.engine = engine
        self.network = network
        self.made: list[str] = []

    def start(
        self, *arguments: str, command: tuple[str, ...] = ("run",), env: dict[str, str] | None = None
    ) -> str:
        """A container of the image, with the test's plugins; its id."""
        settings = {
            "DATABASE_URL": URL,
            "AQD_API_HOST": "127.0.0.1",
            "AQD_PLUGINS_DIR": "/etc/aqd/plugins",
            "AQD_DAEMON_SLOTS": "4",
            **(env or {}),
        }
        variables = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        mount = f"--volume={PLUGINS}:/etc/aqd/plugins:ro"
        given = ["run", "--detach", f"--network={self.network}", mount, *variables, *arguments, AQD, *command]
        self.made.append(self.engine.run(*given).strip())
        return self.made[-1]

    def serving(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """As :meth:`start`, when the daemon takes jobs."""
        made = self.start(*arguments, env=env)
        self.wait_health(made, "--node", "ok")
        return made

    def wait_health(self, container: str, option: str, beginning: str) -> None:
        """Until ``aqd health OPTION`` says so."""
        asked = ("health", option)
        wait_until(
            lambda: self.aqd(container, *asked, check=False).startswith(beginning),
            60,
            f"{beginning} {option}",
        )

    def aqd(self, container: str, *arguments: str, check: bool = True, **options: Any) -> str:
        interactive = ["--interactive"] if "input" in options else []
        return self.engine.run("exec", *interactive, container, "aqd", *arguments, check=check, **options)

    def submit(self, container: str, *payloads: Any) -> list[str]:
        """Jobs of the type "fate"; their ids."""
        lines = "".join(json.dumps({"type": "fate", "payload": each}) + "\n" for each in payloads)
        return self.aqd(container, "submit", "--batch", "-", input=lines).split()

    def job(self, container: str, number: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.aqd(container, "jobs", "show", number, "--json"))
        return answer

    def wait_state(self, container: str, number: str, state: str) -> None:
        wait_until(lambda: self.job(container, number)["status"] == state, 60, f"a job that is {state}")

    def stop(self, container: str) -> int:
        """``docker stop``; the exit code, 137 when it had to be killed."""
        self.engine.run("stop", f"--time={STOP_S}", container, timeout_s=STOP_S + 60)
        return int(self.engine.state(container)["State"]["ExitCode"])

    def release(self, container: str) -> None:
        """The jobs HELD may end."""
        self.engine.run("exec", container, "touch", GATE)

    def zombies(self, container: str) -> str:
        table = self.engine.run("exec", container, "ps", "-e", "-o", "stat=,ppid=,args=")
        return "\n".join(line for line in table.splitlines() if line.startswith("Z"))


class Network(NamedTuple):
    """A network in which "database" is a PostgreSQL with aqd's schema."""

    engine: Engine
    name: str
    database: str  # the container


@pytest.fixture(scope="module")
def network(engine: Engine) -> Iterator[Network]:
    """Names are our own: several test processes share the engine."""
    name = f"aqd-{secrets.token_hex(4)}"
    engine.run("network", "create", name)
    settings = [f"--network={name}", "--network-alias=database", "--env=POSTGRES_PASSWORD=secret"]
    database = engine.run("run", "--detach", *settings, POSTGRES).strip()
    try:
        ready = ("exec", database, "pg_isready", "--host=127.0.0.1")
        wait_until(lambda: "accepting" in engine.run(*ready, check=False), 60, "a database")
        engine.run("run", "--rm", f"--network={name}", f"--env=DATABASE_URL={URL}", AQD, "db", "migrate")
        yield Network(engine, name, database)
    finally:
        engine.run("rm", "--force", "--volumes", database, check=False)
        engine.run("network", "rm", name, check=False)


@pytest.fixture
def containers(network: Network) -> Iterator[Containers]:
    """Removed after the test, with the end of what they logged shown if it failed."""
    made = Containers(network.engine, network.name)
    yield made
    for each in made.made:
        print(network.engine.run("logs", each, check=False)[-4000:])
        network.engine.run("rm", "--force", "--volumes", each, check=False)


def test_what_is_in_the_image(engine: Engine) -> None:
    """No root, no compiler, no shell before the daemon, no secret."""
    config = engine.state(AQD)["Config"]
    assert config["User"] == "10001:0"
    assert config["Entrypoint"][-1] == "aqd"
    assert "sh" not in config["Entrypoint"]
    assert config["Cmd"] == ["run"]
    assert config["Healthcheck"]["Test"] == ["CMD", "aqd", "health"]
    assert config["Labels"]["org.opencontainers.image.title"] == "aqd"
    assert not [each for each in config["Env"] if "URL" in each or "KEY" in each or "PIP" in each]
    script = """
        id -u; id -gn; aqd --version
        for name in gcc cc make; do command -v $name || true; done
        find /opt /etc/aqd -writable ! -type l; touch /var/lib/aqd/x && echo writable
    """
    answer = engine.run("run", "--rm", "--entrypoint=sh", AQD, "-c", script).split("\n")
    from aqd import __version__

    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert answer == ["10001", "root", f"aqd {__version__}", "writable", ""]


def test_packages_of_plugins(engine: Engine, tmp_path: Path) -> None:
    """An image derived from ours, as the README has it."""
    (wheel,) = wheels().glob("pathspec-*.whl")
    shutil.copy(wheel, tmp_path)
    lines = PAGE.block("In containers", "dockerfile", 0).text.replace(
        "FROM aqd\n", f"FROM {AQD}\nCOPY *.whl /tmp/\n"
    )
    (tmp_path / "Dockerfile").write_text(lines.replace("'reportlab>=4'", f"--no-index /tmp/{wheel.name}"))
    engine.run("build", "--quiet", "--tag=localhost/derived", str(tmp_path))
    assert "pathspec" in engine.run("run", "--rm", "localhost/derived", "plugin-env", "list")
    assert engine.state("localhost/derived")["Config"]["User"] == "10001:0"


def test_nothing_usable_is_the_default(engine: Engine) -> None:
    """Without a key the API does not start: in a container it listens for everybody."""
    answer = engine.run("run", "--rm", f"--env=DATABASE_URL={URL}", AQD, "api", check=False)
    assert "without any key" in answer
    code = ("run", "--detach", f"--env=DATABASE_URL={URL}", AQD, "api")
    made = engine.run(*code).strip()
    assert engine.run("wait", made).strip() == str(int(Exit.CONFIG))
    engine.run("rm", made)


@pytest.mark.parametrize("command", ["run", "api"])
def test_term_at_any_moment_of_the_start(containers: Containers, command: str) -> None:
    """The kernel drops a SIGTERM for which PID 1 has no handler yet: it must wait instead, and end the process with 0."""
    key = {"ADMIN_API_KEY": "k" * 40}
    codes = {}
    for later_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5):
        made = containers.start(command=(command,), env=key)
        time.sleep(later_s)  # the moment that is tried
        codes[later_s] = containers.stop(made)
    assert set(codes.values()) == {0}, codes


def test_commands_end_by_term_too(containers: Containers) -> None:
    """As PID 1 they would not, by default."""
    daemon = containers.serving()
    (job,) = containers.submit(daemon, {"sleep": 120})
    waiting = containers.start(command=("jobs", "wait", job))
    assert containers.stop(waiting) == 128 + 15
    containers.aqd(daemon, "jobs", "cancel", "--wait", "30", job)


@pytest.mark.parametrize("hook", [False, True])
def test_a_stop_within_the_drain(containers: Containers, hook: bool) -> None:
    """The job ends in peace and the node leaves in order; ``aqd stop`` before it, as a preStop hook, does the same."""
    witness = containers.serving(env={"AQD_DAEMON_QUEUES": "other"})
    daemon = containers.serving(env={"AQD_DAEMON_DRAIN_S": "100"})
    (job,) = containers.submit(daemon, HELD)
    containers.wait_state(daemon, job, "PROCESSING")
    with ThreadPoolExecutor(1) as executor:
        if hook:  # its process is cut off when PID 1 ends
            stopping: Future[Any] = executor.submit(containers.aqd, daemon, "stop", check=False)
        else:
            stopping = executor.submit(containers.stop, daemon)
        wait_until(lambda: "drain begins" in containers.engine.run("logs", daemon), 60, "a drain")
        containers.release(daemon)
        stopping.result()
    assert containers.stop(daemon) == 0
    found = containers.job(witness, job)
    assert (found["status"], found["attempt"], found["result"]) == ("COMPLETED", 1, "done")
    nodes = containers.aqd(witness, "nodes", "list")
    assert witness[:12] in nodes
    assert daemon[:12] not in nodes


def test_no_zombie_and_no_stranger(containers: Containers) -> None:
    """200 jobs that fork twice, and a stranger that is adopted and ends with the loader's exit code."""
    daemon = containers.serving()
    before = json.loads(containers.aqd(daemon, "status", "--json"))
    jobs = containers.submit(daemon, *[{"spawn": {"daemonize": True, "seconds": 0.2}}] * 200)
    containers.aqd(daemon, "jobs", "wait", "--timeout=120", *jobs)
    stranger = f"(sleep 0.3; exit {int(Exit.LOADER)}) & exit 0"
    containers.engine.run("exec", "--detach", daemon, "sh", "-c", stranger)
    left = ("exec", daemon, "pgrep", "--count", "--full", "^sleep")
    wait_until(lambda: containers.engine.run(*left, check=False).strip() == "0", 30, "no sleeper")
    wait_until(lambda: not containers.zombies(daemon), 30, "no zombie")
    after = json.loads(containers.aqd(daemon, "status", "--json"))
    assert after["state"] == "running"
    assert after["pid"] == 1
    assert [slot["pid"] for slot in after["slots"]] == [slot["pid"] for slot in before["slots"]]
    assert after["processes"] == before["processes"]
    assert containers.stop(daemon) == 0


def test_read_only_as_any_user(containers: Containers) -> None:
    """OpenShift's way: a user that no passwd knows, group 0; only /tmp and the volume can be written."""
    made = (
        "--read-only",
        "--tmpfs=/tmp",
        "--user=1234567:0",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
    )
    daemon = containers.serving(*made, "--volume=/var/lib/aqd")
    (job,) = containers.submit(daemon, {"return": 1})
    containers.aqd(daemon, "jobs", "wait", "--timeout=60", job)
    assert containers.engine.run("exec", daemon, "touch", "/opt/aqd/x", check=False).count("Read-only") == 1
    containers.engine.run("exec", daemon, "touch", "/var/lib/aqd/x")
    containers.aqd(daemon, "health")
    assert containers.stop(daemon) == 0


def test_memory_for_one_job_too_many(containers: Containers) -> None:
    """At the container's limit the kernel kills the job that wants too much; master and siblings go on."""
    daemon = containers.serving("--memory=300m", "--memory-swap=300m")
    before = json.loads(containers.aqd(daemon, "status", "--json"))
    (calm,) = containers.submit(daemon, HELD)
    containers.wait_state(daemon, calm, "PROCESSING")
    greedy = {"attempts": [{"alloc": 2000}, {"return": "second"}]}
    (killed,) = containers.submit(daemon, greedy)
    containers.aqd(daemon, "jobs", "wait", "--timeout=90", killed)
    assert containers.job(daemon, calm)["status"] == "PROCESSING"
    containers.release(daemon)
    containers.aqd(daemon, "jobs", "wait", "--timeout=90", calm)
    found = containers.job(daemon, killed)
    assert (found["attempt"], found["result"]) == (2, "second")
    assert (containers.job(daemon, calm)["attempt"], containers.job(daemon, calm)["result"]) == (1, "done")
    after = json.loads(containers.aqd(daemon, "status", "--json"))
    assert after["started_at"] == before["started_at"]
    assert sum(after["restarts"].values()) == 1
    state = containers.engine.state(daemon)
    assert (state["RestartCount"], state["State"]["Running"]) == (0, True)
    assert containers.stop(daemon) == 0


def test_the_log_is_json(containers: Containers) -> None:
    daemon = containers.serving()
    containers.stop(daemon)
    lines = [json.loads(line) for line in containers.engine.run("logs", daemon).splitlines()]
    assert lines[0]["event"] == "daemon starts"
    assert lines[-1]["event"] == "daemon ended"
    assert {line["pid"] for line in lines if line["process"] == "master"} == {1}


def test_health_is_what_it_says(containers: Containers, network: Network) -> None:
    """``--node`` and ``--api`` ask what runs in the container; both notice that the database is away."""
    daemon = containers.serving()
    api = containers.start(command=("api",), env={"AQD_API_HOST": "0.0.0.0", "ADMIN_API_KEY": "k" * 40})
    asked = {daemon: "--node", api: "--api"}
    nobody = {daemon: "--api", api: "--node"}
    containers.wait_health(api, "--api", "ok")
    for each, option in nobody.items():
        assert containers.aqd(each, "health", option, check=False).startswith("unavailable: no")
    network.engine.run("stop", network.database)
    with contextlib.ExitStack() as back:
        back.callback(network.engine.run, "start", network.database)
        for each, option in asked.items():
            containers.wait_health(each, option, "unavailable")
    for each, option in asked.items():
        containers.wait_health(each, option, "ok")
    assert [containers.stop(each) for each in asked] == [0, 0]
