"""The service around the application: start, reload, stop, address, what it leaves alone."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from aqd.errors import Exit
from tests.fixtures import processes
from tests.fixtures.api import ROOT, Api
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until


def environment(tmp_path: Path, **env: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "AQD_API_WORKERS": "1",
        **env,
    }


@contextlib.contextmanager
def aqd_api(tmp_path: Path, *arguments: str, argv: list[str] | None = None, **env: str) -> Any:
    """``aqd api`` as a service of its own; its output goes to a file."""
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            argv or [sys.executable, "-m", "aqd", *(arguments or ("api",))],
            env=environment(tmp_path, **env),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def connects(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def test_on_its_own_it_binds_loopback_and_leaves_no_file(tmp_path: Path) -> None:
    port = free_port()
    with aqd_api(tmp_path, PORT=str(port)) as process:
        wait_until(lambda: connects(port), 20)
        listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == port]
        assert {c.laddr[0] for c in listening} == {"127.0.0.1"}
        wait_until(lambda: processes.descendants(process.pid))
        assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert process.returncode == 0
    assert not connects(port)


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = subprocess.run(
            [sys.executable, "-m", "aqd", "api"],
            env=environment(tmp_path, PORT=str(port)),
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert found.returncode == Exit.ERROR
    assert f"127.0.0.1:{port}" in found.stderr
    assert "in use" in found.stderr
    assert "Traceback" not in found.stderr


def test_systemd_is_told_by_the_service_but_not_by_the_daemons_child(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PORT": str(free_port())}
        file = tmp_path / "aqd.toml"
        file.write_text("[api]\nworkers = 1\n")
        with aqd_api(tmp_path, **env, AQD_CONFIG=str(file), AQD_API_WORKERS="") as api:
            assert b"READY=1" in manager.recv(4096)
            assert manager.recv(4096) == b"STATUS=serving: 1 process"
            file.write_text('[api]\nworkers = "many"\n')
            api.send_signal(signal.SIGHUP)
            refused = manager.recv(4096).decode()
            assert refused.startswith("STATUS=serving: 1 process; configuration refused: ")
            assert "api.workers" in refused
            file.write_text("[api]\nworkers = 2\n")
            api.send_signal(signal.SIGHUP)
            assert manager.recv(4096) == b"STATUS=serving: 2 processes"
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while manager.recv(4096):
                pass
        with socket.create_server(("127.0.0.1", 0)) as listener:
            child = subprocess.Popen(
                [sys.executable, "-m", "aqd.api.server", "--fd", str(listener.fileno())],
                env=environment(tmp_path, **env),
                pass_fds=[listener.fileno()],
                stderr=subprocess.DEVNULL,
            )
            wait_until(lambda: processes.descendants(child.pid), 20)
        child.terminate()
        assert child.wait(20) == 0
        with pytest.raises(BlockingIOError):
            manager.recv(4096)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """The daemon's master is killed: the port must be free for its successor at once."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener:
        script = (
            "import subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-m', 'aqd.api.server', '--fd', '{listener.fileno()}'],"
            f" pass_fds=[{listener.fileno()}])\n"
            "time.sleep(600)\n"
        )
        master = subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment(tmp_path),
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
    wait_until(lambda: len(processes.descendants(master.pid)) >= 2, 20)
    assert connects(port)
    master.kill()
    master.wait()
    wait_until(lambda: not connects(port), 2)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_killed_worker_is_replaced(api: Api) -> None:
    first = api.wait_workers()
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: api.workers and api.workers != first)
    assert api.get("/health").status == 200


def test_the_command_that_asks_for_health(start_api: Callable[..., Api], tmp_path: Path) -> None:
    """``aqd health --api``, what a container's health check asks: the service, not the database."""

    def ask(port: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "aqd", "health", "--api"]
        env = environment(tmp_path, AQD_API_HOST="0.0.0.0", AQD_API_PORT=str(port))
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        return result.returncode, result.stdout + result.stderr

    assert ask(start_api().port) == (0, "ok, live nodes: 0\n")
    away = start_api(DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert ask(away.port) == (1, "unavailable: the API has no connection to its database\n")
    nobody = free_port()
    code, text = ask(nobody)
    assert code == 1
    assert text.startswith(f"unavailable: no answer from 127.0.0.1:{nobody}: ")


def test_reload(start_api: Callable[..., Api], tmp_path: Path) -> None:
    file = tmp_path / "aqd.toml"
    file.write_text('[api]\nadmin_api_key = "one"\nworkers = 1\n')
    api = start_api(AQD_CONFIG=str(file), ADMIN_API_KEY="", AQD_API_WORKERS="")
    arbiter = api.process.pid

    def accepted(key: str) -> bool:
        return api.get("/admin/failed-jobs", x_admin_key=key).status == 200

    assert accepted("one")
    file.write_text('[api]\nadmin_api_key = "two"\nworkers = "many"\n')
    api.process.send_signal(signal.SIGHUP)
    wait_until(lambda: [line for line in api.log if "configuration refused" in line])
    assert accepted("one")

    file.write_text('[api]\nadmin_api_key = "two"\nworkers = 2\n')
    failures = []
    api.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 15
    while not (accepted("two") and not accepted("one") and len(api.workers) == 2):
        failures += [answer for answer in [api.get("/health")] if answer.status != 200]
        assert time.monotonic() < end, api.tail()
    assert failures == []
    assert api.process.pid == arbiter


@pytest.mark.parametrize(
    ("fds", "pid"), [("abc", "1"), ("1", "abc"), ("7", "1"), ("abc", "own"), ("0", "own")]
)
def test_variables_of_systemd_that_are_not_for_it(tmp_path: Path, fds: str, pid: str) -> None:
    """Inherited from a service that started us, or nonsense: it listens itself."""
    port = free_port()
    with started_by(tmp_path, fds, pid, PORT=str(port)) as process:
        wait_until(lambda: "Listening at" in (tmp_path / "log").read_text() or process.poll() is not None, 60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert connects(port)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_sockets_that_systemd_did_not_pass(tmp_path: Path) -> None:
    with started_by(tmp_path, "9", "own", PORT=str(free_port())) as process:
        assert process.wait(60) == Exit.ERROR
    assert "LISTEN_FDS" in (tmp_path / "log").read_text()
    assert "internal error" not in (tmp_path / "log").read_text()


def started_by(tmp_path: Path, fds: str, pid: str, **env: str) -> Any:
    script = (
        "import os, sys; fds, pid = sys.argv[1:]\n"
        "os.environ.update(LISTEN_FDS=fds, LISTEN_PID=str(os.getpid()) if pid == 'own' else pid)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'aqd', 'api'])"
    )
    return aqd_api(tmp_path, argv=[sys.executable, "-c", script, fds, pid], **env)
