"""PostgreSQL for tests: a server for the session, a database with aqd's schema for each test.

Runs in test processes. Where the server comes from:

1. ``AQD_TEST_DATABASE_URL``: a server that is there; the role needs CREATEDB. Databases are made beside the named
   one and dropped again; the named one is left alone. (``DATABASE_URL`` is not looked at: that is what the
   application itself runs on, and a test must not meet it by accident.)
2. A server of its own, from PostgreSQL's binaries on this machine (``AQD_TEST_POSTGRES_BIN``, Debian's directories,
   PATH) or those of the extra ``aqd[embedded]``: in a temporary folder, reachable by a unix socket only, never as
   root, gone with this process however that ends. It writes without fsync: its data need not outlive anything.

Promises: a test's database is its own and holds the schema of this aqd; a copy of a migrated template takes 40 ms.

Fails with :class:`aqd.errors.WorldError`, which says what to set or install.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psycopg
from psycopg import conninfo

from aqd import database, migrate
from aqd.config import Database
from aqd.database import Connection
from aqd.embedded import DATABASE, EmbeddedPostgres
from aqd.errors import ConfigError, WorldError

_PREFIX: Final = "aqd-testing-"
# A folder younger than this may belong to somebody who has not locked it yet.
_LEFTOVER_S: Final = 60.0
_OPTIONS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "autovacuum": "off",
}


class Server:
    """A server on which databases for tests are made. ``source`` says where it came from."""

    def __init__(self, admin_url: str, source: str) -> None:
        self.source = source
        self._admin_url = admin_url
        self._template: str | None = None

    def create(self) -> str:
        """A new database with aqd's schema; its URL."""
        if self._template is None:
            self._template = self._new_name()
            self._define("create_test_template", name=self._template)
            with contextlib.closing(self.connect(self.url(self._template))) as conn:
                migrate.migrate(conn)
        name = self._new_name()
        self._define("create_test_database", name=name, template=self._template)
        return self.url(name)

    def drop(self, url: str) -> None:
        """Drop what :meth:`create` has made, whoever is still connected to it."""
        name = str(conninfo.conninfo_to_dict(url)["dbname"])
        self._define("drop_test_database", name=name)

    def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            self._define("drop_test_database", name=self._template)
            self._template = None

    def url(self, name: str) -> str:
        """The URL of the database ``name``."""
        if "://" in self._admin_url:
            parts = urlsplit(self._admin_url)
            query = "&".join(each for each in parts.query.split("&") if not each.startswith("dbname="))
            return f"{parts.scheme}://{parts.netloc}/{name}" + (f"?{query}" if query else "")
        return conninfo.make_conninfo(self._admin_url, dbname=name)

    def connect(self, url: str) -> Connection:
        """An autocommit connection, as aqd's own processes have them."""
        return database.connect(Database(url=url), "aqd testing")

    def _define(self, statement: str, **names: str) -> None:
        with contextlib.closing(self.connect(self._admin_url)) as conn:
            database.define(conn, statement, **names)

    def _new_name(self) -> str:
        return f"aqd_test_{os.getpid()}_{secrets.token_hex(4)}"


@contextlib.contextmanager
def open_server(environ: Mapping[str, str] = os.environ) -> Iterator[Server]:
    """The server for this process: see the module. A server of our own takes a second or two to start."""
    if url := environ.get("AQD_TEST_DATABASE_URL"):
        try:
            server = Server(url, "AQD_TEST_DATABASE_URL")
            server.connect(url).close()
        except psycopg.Error as error:
            raise WorldError(f"AQD_TEST_DATABASE_URL: {error}") from None
        try:
            yield server
        finally:
            server.close()
        return
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    folder.chmod(0o755)  # as root the server runs as somebody else, who must get in; what is inside is closed
    binaries = environ.get("AQD_TEST_POSTGRES_BIN")
    own = EmbeddedPostgres(folder / "postgres", binaries=binaries, options=_OPTIONS)
    try:
        try:
            own.start()
        except (ConfigError, WorldError) as error:
            raise WorldError(f"no database for the tests: set AQD_TEST_DATABASE_URL, or: {error}") from error
        assert own.binaries is not None
        # Peer authentication knows this user as the administrator, too.
        administrator = own.url.replace(f"//{DATABASE}@/{DATABASE}?", "//postgres@/postgres?", 1)
        yield Server(administrator, f"PostgreSQL {own.binaries.version} of {own.binaries.source}")
    finally:
        own.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """The folders of runs that were killed: their lock is free (:mod:`aqd.embedded`)."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "postgres" / "lock").open("r+") as lock:
            if time.time() - os.fstat(lock.fileno()).st_mtime > _LEFTOVER_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
