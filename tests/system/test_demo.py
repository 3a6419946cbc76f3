"""``aqd demo`` and ``packaging/demo`` as a newcomer runs them: twice, after kill -9, as another user."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pypdf
import pytest

from aqd import demo as demo_module
from aqd import embedded
from aqd.binaries import can_reach, server_account
from tests.fixtures import processes
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import MARKER, wait_until

ROOT = Path(__file__).parents[2]
# Beyond the demo's own limits for the server, the daemon and the first job, so that it is the demo which says what
# is slow. Its cluster is written durably: with four writers on the same disk a run takes 25 s instead of 3.
START_S = embedded.START_S + demo_module.READY_S + demo_module.JOB_S + 30

pytestmark = [pytest.mark.xdist_group("demo"), pytest.mark.timeout(3 * START_S)]


class Demo:
    """A demo in a process of its own, in a directory and on a port of its own."""

    def __init__(self, directory: Path, port: int, mark: str) -> None:
        self.directory = directory
        self.port = port
        self.lines: list[str] = []
        self._mark = mark
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory.parent),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "AQD_DEMO_DIR": str(self.directory),
            "AQD_DEMO_PORT": str(self.port),
            # What a developer may have set for something else; the demo must not touch that database.
            "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/production",
            MARKER: self._mark,
        }

    def start(self, *arguments: str, command: list[str] | None = None, user: int | None = None) -> Demo:
        self.lines = []
        self.process = subprocess.Popen(
            [*(command or [sys.executable, "-m", "aqd", "demo"]), *arguments],
            env=self.environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait(self) -> int:
        """Until it has ended; its exit status. All output is in ``lines`` then."""
        assert self.process is not None
        assert self._reader is not None
        try:
            status = self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the demo has not ended within {START_S:g} s:\n{self.text}")
        self._reader.join(10)
        return status

    def wait_until_up(self) -> None:
        def up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.text
            return any(line.startswith("Ctrl-C") for line in self.lines)

        wait_until(up, START_S)

    def pdf(self) -> Path:
        found = re.search(r"^the PDF: (.+)$", self.text, re.MULTILINE)
        assert found, self.text
        return Path(found.group(1))


@pytest.fixture(scope="module")
def shared_dir() -> Iterator[Path]:
    """One directory for all tests of this file: each finds what the ones before left, like a user."""
    with tempfile.TemporaryDirectory(prefix="aqd-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name) / "demo"


@pytest.fixture
def demo(shared_dir: Path) -> Iterator[Demo]:
    yield from running(shared_dir)


@pytest.fixture
def new_demo(open_dir: Path) -> Iterator[Demo]:
    """In a directory where nothing is yet."""
    yield from running(open_dir / "demo")


def running(directory: Path) -> Iterator[Demo]:
    mark = f"{os.getpid()}-{os.urandom(4).hex()}"
    one = Demo(directory, free_port(), mark)
    yield one
    try:
        wait_until(lambda: not processes.belonging(mark, []), 30)
        wait_until(lambda: not embedded.server_processes(one.directory / "postgres/data"), 30)
    except TimeoutError:
        left = processes.belonging(mark, [])
        processes.kill_all(left)
        pytest.fail("left running: " + ", ".join(map(str, left)))
    finally:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        processes.reap_adopted([])


def text_of(pdf: Path) -> str:
    return "".join(page.extract_text() for page in pypdf.PdfReader(pdf).pages)


def test_twice_in_a_row(new_demo: Demo) -> None:
    demo = new_demo
    assert demo.start("--once").wait() == 0, demo.text
    first = demo.pdf()
    assert "Hello World" in text_of(first)
    assert stat.S_IMODE((demo.directory / "admin-key").stat().st_mode) == 0o600
    key = (demo.directory / "admin-key").read_text()
    assert key.strip() not in demo.text

    assert demo.start("--once").wait() == 0, demo.text
    assert "making a PostgreSQL" not in demo.text
    assert demo.pdf() != first, "the second run must continue with the data of the first"
    assert first.exists()
    assert (demo.directory / "admin-key").read_text() == key


def test_the_commands_that_it_prints(demo: Demo) -> None:
    demo.start().wait_until_up()
    assert demo.process is not None
    text = demo.text.replace("\\\n", " ")
    commands = [
        line.strip() for line in text.splitlines() if line.startswith(("  curl", f"  {sys.executable}"))
    ]
    assert len(commands) == 6
    if shutil.which("curl") is None:
        commands = [command for command in commands if not command.startswith("curl")]
    answers = {}
    for command in commands:
        command = command.replace("curl", "curl --silent --show-error --fail", 1)
        result = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, timeout=30, env=demo.environment()
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        answers[command] = result.stdout
    assert "generate_pdf" in answers[commands[-1]]

    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 0, demo.text
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", demo.port))


def kill_demo(demo: Demo) -> None:
    assert demo.process is not None
    demo.process.kill()


def kill_everything(demo: Demo) -> None:
    assert demo.process is not None
    tree = processes.descendants(demo.process.pid)
    demo.process.kill()
    processes.kill_all(tree)


def kill_master(demo: Demo) -> None:
    assert demo.process is not None
    tree = processes.descendants(demo.process.pid)
    demo.process.kill()
    processes.kill_all([each for each in tree if "aqd: master" in each.title])


@pytest.mark.parametrize("kill", [kill_demo, kill_everything, kill_master])
def test_again_after_kill_9(demo: Demo, kill: Callable[[Demo], None]) -> None:
    demo.start().wait_until_up()
    kill(demo)
    demo.wait()
    assert demo.start("--once").wait() == 0, demo.text
    assert demo.pdf().exists()


def test_the_daemon_ends_by_itself(demo: Demo) -> None:
    demo.start().wait_until_up()
    assert demo.process is not None
    tree = processes.descendants(demo.process.pid)
    processes.kill_all([each for each in tree if "aqd: master" in each.title])
    assert demo.wait() == 1
    assert "the daemon ended with status -9" in demo.text


def test_the_database_ends_by_itself(demo: Demo) -> None:
    demo.start().wait_until_up()
    assert demo.process is not None
    before = embedded.server_processes(demo.directory / "postgres/data")
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "starting it again" in demo.text, START_S)
    wait_until(
        lambda: set(embedded.server_processes(demo.directory / "postgres/data")) - set(before), START_S
    )
    health = ["curl", "--silent", "--fail", f"http://127.0.0.1:{demo.port}/health"]
    if shutil.which("curl"):
        wait_until(lambda: subprocess.run(health, capture_output=True).returncode == 0, START_S)
    demo.process.send_signal(signal.SIGTERM)
    assert demo.wait() == 0, demo.text


def test_a_port_in_use(demo: Demo) -> None:
    with socket.create_server(("127.0.0.1", demo.port)):
        assert demo.start("--once").wait() == 1
    assert f"cannot listen on 127.0.0.1:{demo.port}: Address already in use" in demo.text
    assert "Traceback" not in demo.text


def test_a_second_demo_on_the_same_directory(demo: Demo) -> None:
    demo.start().wait_until_up()
    assert demo.process is not None
    second = Demo(demo.directory, free_port(), demo._mark).start("--once")
    assert second.wait() == 1
    assert f"in use by process {demo.process.pid}" in second.text
    assert demo.process.poll() is None
    demo.process.send_signal(signal.SIGTERM)
    assert demo.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_as_an_ordinary_user(new_demo: Demo) -> None:
    demo = new_demo
    account = server_account()
    assert account is not None
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = sysconfig.get_paths()["platlib"]
    for needed in (libraries, ROOT / "aqd"):
        if not can_reach(account, Path(needed)):
            pytest.skip(f"{account.pw_name} cannot reach {needed}")
    python = next((each for each in (sys.executable, system) if can_reach(account, Path(each))), None)
    if python is None:
        pytest.skip(f"{account.pw_name} can execute neither {sys.executable} nor {system}")
    os.chown(demo.directory.parent, account.pw_uid, account.pw_gid)
    environment = {**demo.environment(), "PYTHONPATH": f"{ROOT}:{libraries}"}
    demo.environment = lambda: environment  # type: ignore[method-assign]
    for _again in range(2):
        command = [python, "-m", "aqd", "demo"]
        assert demo.start("--once", command=command, user=account.pw_uid).wait() == 0, demo.text
    assert demo.pdf().stat().st_uid == account.pw_uid
    assert stat.S_IMODE(demo.directory.stat().st_mode) == 0o700


def test_the_script_with_an_environment_that_is_ready(demo: Demo, open_dir: Path) -> None:
    """packaging/demo itself, without the installation: the stamp says that it has been done."""
    python = open_dir / "venv/bin/python"
    python.parent.mkdir(parents=True)
    run = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}"
    python.write_text(f'#!/bin/sh\n{run} "$@"\n')
    python.chmod(0o755)
    with (ROOT / "pyproject.toml").open("rb") as project:
        checksum = subprocess.run(["cksum"], stdin=project, capture_output=True, text=True, check=True).stdout
    (open_dir / "venv/.aqd-demo").write_text(f"{ROOT} {checksum}")
    environment = {**demo.environment(), "AQD_VENV": str(open_dir / "venv")}
    demo.environment = lambda: environment  # type: ignore[method-assign]
    assert demo.start("--once", command=[str(ROOT / "packaging/demo")]).wait() == 0, demo.text
    assert "installing" not in demo.text
    assert "Hello World" in text_of(demo.pdf())
