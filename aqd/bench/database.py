"""Databases for a benchmark: a server of our own or one that is named, and in it databases ``aqd_bench_…``.

Our own server has PostgreSQL's default durability (fsync, synchronous commit), 512 MB of shared buffers, and
keeps the moments of commits, so that it is known when an outcome was durable (ten bytes a transaction). Its files are in
``/var/tmp`` unless ``--directory`` says otherwise: ``/tmp`` is memory on many machines, and a commit there costs
nothing.

Promises: whatever was made is dropped, whatever happens; a server of our own ends with this process also after
``kill -9``, and the next run removes its files. Fails with :class:`WorldError` (no server, no right to make databases).
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psycopg
from psycopg import conninfo

from aqd import migrate
from aqd.bench import measure
from aqd.bench.settings import Work
from aqd.binaries import can_reach, server_account
from aqd.database import Connection, define, run
from aqd.embedded import DATABASE, EmbeddedPostgres
from aqd.errors import ConfigError

QUEUE: Final = "bench"
_PREFIX: Final = "aqd-bench-"
_KEEP: Final = "keep"
_FILL_JOBS: Final = 50_000  # in one statement: a few seconds, and something to show
# A folder younger than this may belong to somebody who has not locked it yet.
_LEFTOVER_S: Final = 60.0
_OPTIONS: Final = {"shared_buffers": "512MB", "track_commit_timestamp": "on"}


class Database:
    """One database with aqd's schema; ``conn`` is an autocommit connection of the benchmark's own."""

    def __init__(self, name: str, url: str, may_checkpoint: bool) -> None:
        self.name = name
        self.url = url
        self.may_checkpoint = may_checkpoint
        self.conn = connect(url)

    def fill(
        self,
        number: int,
        work: Work,
        *,
        queue: str = QUEUE,
        priority: int = 0,
        in_s: float = 0.0,
        state: str = "QUEUED",
        type: str | None = None,
        other: Work | None = None,
        every: int = 0,
        analyse: bool = True,
        told: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Stores ``number`` equal jobs (``type`` instead of the work's own; each ``every``-th ``other``) and analyses the
        tables; ``told`` of how many there are so far."""
        done = 0
        while done < number:
            part = min(_FILL_JOBS, number - done)
            run(
                self.conn,
                "bench_fill",
                type=type or work.type,
                other=other.type if other else "",
                every=every,
                payload=work.payload,
                queue=queue,
                priority=priority,
                in_s=in_s,
                state=state,
                number=part,
            )
            done += part
            told(done)
        if analyse:
            define(self.conn, "bench_analyze")

    def fill_history(
        self, number: int, days: int, *, type: str, told: Callable[[int], None] = lambda _done: None
    ) -> None:
        """Stores ``number`` completed jobs over the last ``days`` days (today's are among them), and analyses."""
        done = 0
        for day in range(days):
            run(self.conn, "bench_partition", days_ago=day)
            left = number * (day + 1) // days - done
            while left:
                part = min(_FILL_JOBS, left)
                run(self.conn, "bench_fill_history", type=type, queue="history", number=part, days_ago=day)
                left -= part
                done += part
                told(done)
        define(self.conn, "bench_analyze")

    @property
    def last_id(self) -> int:
        return int(run(self.conn, "bench_last_id")[0][0])

    def checkpoint(self) -> bool:
        """Whether there was one: the role may lack the right."""
        if self.may_checkpoint:
            define(self.conn, "bench_checkpoint")
        return self.may_checkpoint


class Server:
    """Where databases are made. ``postmaster`` is its first process, if it is one of this machine; ``data`` are the files,
    ``programs`` the folder of the programs of a server of our own."""

    def __init__(
        self,
        admin_url: str,
        source: str,
        report: Callable[[str], None],
        data: Path | None = None,
        programs: Path | None = None,
    ) -> None:
        self.admin_url = admin_url
        self.programs = programs
        self.source = source
        self.data = data
        self._report = report
        with contextlib.closing(connect(admin_url)) as conn:
            _, backend, self._may_checkpoint = run(conn, "bench_server")[0]
            self.postmaster = _postmaster(conn, backend)
            self.strangers = [str(name) for (name,) in run(conn, "list_bench_databases")]

    @contextlib.contextmanager
    def database(self, *, keep: bool = False) -> Iterator[Database]:
        """A new database, dropped in the end unless it is to be kept."""
        name = f"aqd_bench_{os.getpid()}_{secrets.token_hex(3)}"
        self._define("create_bench_database", name)
        found = None
        try:
            found = Database(name, with_database(self.admin_url, name), self._may_checkpoint)
            with contextlib.closing(connect(found.url)) as conn:
                migrate.migrate(conn)
            yield found
        finally:
            if found is not None:
                found.conn.close()
            if keep:
                self._report(f"the database {name} is kept")
            else:
                self._define("drop_bench_database", name)

    def _define(self, statement: str, name: str) -> None:
        with contextlib.closing(connect(self.admin_url)) as conn:
            define(conn, statement, name=name)


def connect(url: str) -> Connection:
    """An autocommit connection without limits of time: a fill may take minutes."""
    return psycopg.connect(
        url, autocommit=True, application_name="aqd bench", connect_timeout=10, client_encoding="utf8"
    )


def with_database(url: str, name: str) -> str:
    """``url`` (or key=value words of libpq) with another database, as key=value words."""
    return conninfo.make_conninfo(url, dbname=name)


def _postmaster(conn: Connection, backend: int) -> int | None:
    """The parent of the backend that serves ``conn``, if it is a process that we can see."""
    here = conn.info.host.startswith("/") or conn.info.hostaddr in ("127.0.0.1", "::1")
    if not here or not _is_postgres(backend):
        return None
    found = measure.parent(backend)
    return found if found is not None and _is_postgres(found) else None


def _is_postgres(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("postgres")
    return False


@contextlib.contextmanager
def open_server(
    url: str | None, directory: Path | None, report: Callable[[str], None], *, keep: bool = False
) -> Iterator[Server]:
    """The server at ``url``, or one of our own with its files below ``directory``."""
    if url is not None:
        server = Server(url, "the given server", report)
        if server.strangers:
            report(
                f"databases of other runs are there ({', '.join(server.strangers)}): "
                "drop those whose run is no longer under way"
            )
        yield server
        return
    base = place(directory)
    _remove_leftovers(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    folder.chmod(0o755)  # as root the server runs as somebody else, who must get in; what is inside is closed
    binaries = os.environ.get("AQD_EMBEDDED_BINARIES")
    own = EmbeddedPostgres(folder / "postgres", binaries=binaries, options=_OPTIONS)
    try:
        own.start()
        assert own.binaries is not None
        # Peer authentication knows this user as the administrator, too.
        administrator = own.url.replace(f"//{DATABASE}@/{DATABASE}?", "//postgres@/postgres?", 1)
        source = f"its own, from {own.binaries.source}"
        yield Server(administrator, source, report, own.data, own.binaries.directory)
    finally:
        own.stop()
        if keep:
            (folder / _KEEP).touch()
            report(f"the server's files are kept in {own.data}, for a PostgreSQL of the same version")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def place(directory: Path | None) -> Path:
    """Where a server's files belong; :class:`ConfigError` if they cannot be in ``directory``."""
    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(f"--directory: {directory} is no folder")
        if not can_reach(server_account(), directory):
            raise ConfigError(f"--directory: PostgreSQL's user cannot enter {directory}")
        return directory
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())


def _remove_leftovers(base: Path) -> None:
    """The folders of runs that were killed: their lock is free (:mod:`aqd.embedded`). Those that were to be kept are."""
    for folder in base.glob(f"{_PREFIX}*"):
        if (folder / _KEEP).exists():
            continue
        with contextlib.suppress(OSError), (folder / "postgres" / "lock").open("r+") as lock:
            if time.time() - os.fstat(lock.fileno()).st_mtime > _LEFTOVER_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
