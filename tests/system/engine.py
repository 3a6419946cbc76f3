"""A container engine of the tests' own: Debian's dockerd in namespaces of its own, with the images that tests need.

    engine.run("run", "--detach", AQD, "run")       # the docker command; returns its standard output
    engine.compose("up", "--detach")                # docker-compose with packaging/compose.yaml
    engine.enter("curl", "http://127.0.0.1:4000")   # a program of this machine in the engine's network

The fixture ``engine`` (conftest.py) gives one, the same to all processes of a test run: the first that wants it starts
a keeper (``python -m tests.system.engine PLACE``), everybody holds a shared lock while its tests run, and the keeper stops
the engine and removes what it made when nobody holds the lock any more, however the tests have ended. The engine has a
PID namespace: when the keeper is killed, too, all containers die with it.

No registry is needed. The base image is the Debian tree that machines are booted from (machine.py), which has Python and
PostgreSQL; the packages that packaging/Containerfile installs are fetched by this machine's pip and put into the context. Both
are kept in the cache of the machines. From there the engine with its three images is ready in 40 s on two cores:

- ``BASE``: the tree. ``AQD``: packaging/Containerfile on it.
- ``POSTGRES``: a server that speaks as much of the official image's environment as is used here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tests.system import machine

ROOT = Path(__file__).parents[2]
CONTEXT = (
    "aqd",
    "etc",
    "plugins",
    "sql",
    "packaging",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".dockerignore",
)
BASE, AQD, POSTGRES = "localhost/aqd-base", "localhost/aqd", "localhost/aqd-postgres"
# Of the tree, what no image needs.
LEFT_OUT = (
    "./usr/lib/postgresql/15/lib/bitcode",
    "./usr/lib/postgresql/15/lib/llvmjit*",
    "./usr/lib/*/libLLVM*",
    "./usr/lib/*/libz3*",
    "./usr/share/doc",
    "./usr/share/locale",
    "./usr/share/man",
    "./var/cache",
    "./var/lib/apt",
    "./var/log",
)
START_S, STOP_S = 400.0, 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

_POSTGRES_FILE = """
FROM localhost/aqd-base
COPY entrypoint /entrypoint
ENV PGDATA=/var/lib/postgresql/data PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["/entrypoint"]
CMD ["postgres"]
"""
_POSTGRES_ENTRYPOINT = """#!/bin/sh
set -eu
: "${POSTGRES_USER:=postgres}" "${POSTGRES_DB:=$POSTGRES_USER}"
if [ "$(id -u)" = 0 ]; then
    [ -z "${POSTGRES_PASSWORD_FILE:-}" ] || POSTGRES_PASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export POSTGRES_PASSWORD="${POSTGRES_PASSWORD:?is not set}"
    install -d -m 0700 -o postgres -g postgres "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --clear-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    printf '%s\\n' "$POSTGRES_PASSWORD" >/tmp/password
    initdb -U "$POSTGRES_USER" -E UTF8 --locale=C --no-sync --auth-local=trust --auth-host=scram-sha-256 \\
        --pwfile=/tmp/password
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    printf '%s\\n' "listen_addresses = '*'" "unix_socket_directories = '/tmp'" >>"$PGDATA/postgresql.conf"
    # Like the official image: at first a server that can be reached by its unix socket only.
    pg_ctl -w -o "-c listen_addresses=" start
    [ "$POSTGRES_DB" = postgres ] || createdb -h /tmp -U "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl -w -m fast stop
fi
exec "$@"
"""


def unavailable() -> str | None:
    """Why no engine can be started here; None when one can."""
    if reason := machine.unavailable():
        return reason.replace("booting a machine", "a container engine of our own")
    for program, package in (
        ("dockerd", "docker.io"),
        ("docker", "docker.io"),
        ("docker-compose", "docker-compose"),
        ("iptables", "iptables"),
        ("ip", "iproute2"),
        ("curl", "curl"),
    ):
        if shutil.which(program) is None:
            return f"a container engine of our own needs {program} (apt-get install {package})"
    return None


class Engine:
    """A running engine, as the tests see it."""

    def __init__(self, place: Path) -> None:
        facts = json.loads((place / "ready").read_text())
        self.place = place
        self.pid = int(facts["pid"])  # of dockerd, for its namespaces
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("DOCKER_", "COMPOSE_"))
            },
            "DOCKER_HOST": f"unix://{place}/docker.sock",
            "DOCKER_CONFIG": str(place / "config"),
        }

    def run(self, *arguments: str, check: bool = True, timeout_s: float = 120, **options: Any) -> str:
        """``docker ARGUMENTS``; what it printed, both streams together. A failure tells it."""
        return self._call(["docker", *arguments], check=check, timeout_s=timeout_s, **options)

    def compose(self, *arguments: str, check: bool = True, environment: dict[str, str] | None = None) -> str:
        """``docker-compose`` on packaging/compose.yaml, with our images; ``environment`` on top."""
        own = {"AQD_IMAGE": AQD, "AQD_POSTGRES_IMAGE": POSTGRES, **(environment or {})}
        command = [
            "docker-compose",
            f"--file={ROOT}/packaging/compose.yaml",
            *arguments,
        ]
        return self._call(command, check=check, timeout_s=170, env=self.environment | own)

    def enter(self, *command: str, check: bool = True, timeout_s: float = 60, **options: Any) -> str:
        """A command of this machine in the engine's network."""
        return self._call(self.entering(*command), check=check, timeout_s=timeout_s, **options)

    def entering(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--", *command]

    def state(self, container: str) -> dict[str, Any]:
        """``docker inspect``."""
        answer: list[dict[str, Any]] = json.loads(self.run("inspect", container))
        return answer[0]

    def _call(
        self,
        command: list[str],
        *,
        check: bool,
        timeout_s: float,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> str:
        options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
        result = subprocess.run(
            command,
            env=env or self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )
        assert not check or result.returncode == 0, (
            f"{command} ended with {result.returncode}:\n{result.stdout}"
        )
        return result.stdout


# --- sharing one ----------------------------------------------------------------------------------


@contextlib.contextmanager
def shared() -> Iterator[Engine]:
    """The engine of this test run, for as long as the block lasts; started if nobody has yet."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    place = Path(tempfile.gettempdir(), f"aqd-engine-{hashlib.sha256(run.encode()).hexdigest()[:12]}")
    with machine.locked(machine.cache() / "engine.lock"):
        remove_leftovers()
        while True:
            place.mkdir(mode=0o700, exist_ok=True)
            try:
                users = (place / "users").open("a")
            except FileNotFoundError:
                continue  # the place itself was just being removed
            fcntl.flock(users, fcntl.LOCK_SH)
            if (place / "users").exists() and os.fstat(users.fileno()).st_ino == (
                place / "users"
            ).stat().st_ino:
                break
            users.close()  # of one that was just being removed
        with users:
            if not (place / "ready").exists():
                _start_keeper(place)
            engine = Engine(place)
            users_held = os.dup(users.fileno())
    try:
        yield engine
    finally:
        os.close(users_held)


def _start_keeper(place: Path) -> None:
    """Wait until the engine is ready, or fail with what the keeper says."""
    command = [sys.executable, "-m", "tests.system.engine", str(place)]
    with (place / "keeper").open("wb") as log:
        keeper = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not (place / "ready").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.terminate()
            logs = [
                path.read_text(errors="replace")[-3000:]
                for path in (place / "keeper", place / "log")
                if path.exists()
            ]
            raise RuntimeError("the engine did not start:\n" + "\n".join(logs))
        time.sleep(0.1)


def remove_leftovers() -> None:
    """Directories of keepers that were killed: those that nobody uses and nobody keeps."""
    for place in Path(tempfile.gettempdir()).glob("aqd-engine-*"):
        with contextlib.suppress(OSError), (place / "users").open("a") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(place)


def _remove(place: Path) -> None:
    """By who holds the lock ``users``: that file last, so that nobody takes the place for a new one while it is emptied."""
    for group in Path("/sys/fs/cgroup").glob(f"*/{place.name}"):
        for directory in sorted(group.rglob("*"), reverse=True):
            if directory.is_dir():
                with contextlib.suppress(OSError):
                    directory.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
    for each in place.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        elif each.name != "users":
            each.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


# --- the keeper -----------------------------------------------------------------------------------


def keep(place: Path) -> None:
    """Run the engine until nobody holds the lock ``users`` any more."""
    engine = _Daemon(place)
    try:
        engine.start()
        engine.build()
        (place / "ready.new").write_text(json.dumps({"pid": engine.pid}))
        (place / "ready.new").rename(place / "ready")
        with (place / "users").open("a") as users:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    (place / "ready").unlink()
                    break
                time.sleep(0.2)
            engine.stop()
            _remove(place)
    finally:
        engine.stop()


class _Daemon:
    """dockerd, below an unshare(1) with which everything in its PID namespace dies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.place / "config").mkdir()
        dockerd = [
            "dockerd",
            f"--data-root={self.place}/root",
            f"--exec-root={self.place}/run",
            f"--pidfile={self.place}/pid",
            f"--host=unix://{self.place}/docker.sock",
            f"--cgroup-parent=/{self.place.name}",
            "--oom-score-adjust=0",  # a lower one needs CAP_SYS_RESOURCE
        ]
        script = 'ip link set lo up && exec "$@"'
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        keeper = os.getpid()

        def die_with_keeper() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)

        with (self.place / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "sh", "-c", script, "dockerd", *dockerd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_keeper,
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("dockerd did not start")
            time.sleep(0.1)
        (child,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(child)

    def _docker(self, *arguments: str, stdin: IO[bytes] | None = None) -> subprocess.CompletedProcess[bytes]:
        environment = os.environ | {
            "DOCKER_HOST": f"unix://{self.place}/docker.sock",
            "DOCKER_CONFIG": str(self.place / "config"),
            "DOCKER_BUILDKIT": "0",  # Debian's engine has the old builder alone
        }
        return subprocess.run(
            ["docker", *arguments],
            env=environment,
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_S,
            check=False,
        )

    def _must(self, *arguments: str, stdin: IO[bytes] | None = None) -> None:
        result = self._docker(*arguments, stdin=stdin)
        if result.returncode:
            raise RuntimeError(f"docker {arguments}:\n{result.stdout.decode(errors='replace')[-4000:]}")

    def _answers(self) -> bool:
        return self._docker("info").returncode == 0

    def build(self) -> None:
        tree = machine.tree("bookworm")
        archive = [
            "tar",
            f"--directory={tree}",
            "--create",
            *(f"--exclude={each}" for each in LEFT_OUT),
            ".",
        ]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as tar:
            self._must("import", "-", BASE, stdin=tar.stdout)
        context = self.place / "context"
        ignored = shutil.ignore_patterns("__pycache__", "secrets", "wheels")
        context.mkdir()
        for name in CONTEXT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, context / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, context / name)
        shutil.copytree(wheels(), context / "packaging/wheels")
        arguments = [f"BASE={BASE}", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/src/packaging/wheels"]
        arguments = [word for each in arguments for word in ("--build-arg", each)]
        self._must(
            "build", "-f", str(context / "packaging/Containerfile"), "-t", AQD, *arguments, str(context)
        )
        postgres = self.place / "postgres"
        postgres.mkdir()
        (postgres / "Dockerfile").write_text(_POSTGRES_FILE)
        (postgres / "entrypoint").write_text(_POSTGRES_ENTRYPOINT)
        (postgres / "entrypoint").chmod(0o755)
        self._must("build", "-t", POSTGRES, str(postgres))

    def stop(self) -> None:
        if self._process is None:
            return
        if containers := self._docker("ps", "--all", "--quiet").stdout.decode().split():
            self._docker("rm", "--force", "--volumes", *containers)
        os.kill(self.pid or self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def wheels() -> Path:
    """What the Containerfile installs, as this machine's pip fetches it for the tree's Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["examples"],
        *project["build-system"]["requires"],
    ]
    key = hashlib.sha256(" ".join(sorted(wanted)).encode()).hexdigest()[:12]
    place = machine.cache() / f"wheels-{key}"
    with machine.locked(place.with_suffix(".lock")):
        if not place.is_dir():
            new = place.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            fetch = ["download", "--quiet", "--only-binary=:all:", "--python-version=3.11", f"--dest={new}"]
            subprocess.run([sys.executable, "-m", "pip", *fetch, *wanted], check=True, timeout=170)
            new.rename(place)
    return place


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
