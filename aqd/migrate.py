"""Bringing the database's schema to the version that this aqd needs.

Run by ``aqd db migrate``, by ``aqd demo`` and by tests; :func:`check` by everything that opens a
connection for good. Migrations are ``sql/migrations/NNNN_name.sql``, each with a first line
``-- aqd: online`` (the aqd before it goes on working during and after it) or ``-- aqd: breaking``.

Promises: all pending files are applied in *one* transaction under an advisory lock that ends with it, so
that any number of starters may race on an empty database and a kill at any moment leaves the old
schema or the new one. The bookkeeping table is made inside the lock too, because ``if not exists`` is not
safe against a second session. Applied files never change: checksums are compared. What is made belongs to the
schema's owner, whoever of its members migrates. A breaking migration is not applied under living nodes. While a long transaction (a
dump) is in the way, running nodes are held up for a second or two at a time, not until it ends.

Fails with :class:`SchemaMismatch` (older, newer, or other than this aqd's files: the last two are :class:`SchemaUnfit`; or something of the application's
depends on what a migration replaces; the message says which and what to do) and :class:`DatabaseUnavailable` (another migrator held the lock too long).
"""

import functools
import hashlib
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import psycopg

from aqd.database import ADVISORY_CLASS, ADVISORY_MIGRATION, Connection, run, text_array
from aqd.errors import BugError, DatabaseUnavailable, SchemaMismatch, SchemaUnfit
from aqd.paths import data_dir

# How long a migrator tries: another one may be at work, or a long transaction in the tables.
LOCK_WAIT_S: Final = 60
# How long it waits for one table at a time. Whoever wants the table meanwhile, also to read, queues behind it; at
# a stretch that must cost no running node a lease. In the pauses the nodes go on.
TABLE_WAIT_S: Final = 1.0
TABLE_PAUSE_S: Final = 1.0

# Without a sign of life for so long a node counts as gone, whatever its keeper.node_ttl_s is: it gives three in this time.
NODE_TTL_S: Final = 30.0

R = TypeVar("R")

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_KIND = re.compile(r"-- aqd: (online|breaking)\n")


class Migration(NamedTuple):
    """One file. ``checksum`` is the SHA-256 of its text."""

    version: int
    name: str
    kind: str
    checksum: str
    text: str


class Applied(NamedTuple):
    """One row of ``aqd.migrations``."""

    version: int
    name: str
    kind: str
    checksum: str
    applied_at: datetime


class SchemaStatus(NamedTuple):
    """What the database has (``current``, 0 if nothing) and what this aqd needs (``wanted``).

    ``pending`` are files not yet applied; ``unknown`` are applied ones that this aqd has no file for;
    ``changed`` are versions whose file differs from what was applied.
    """

    current: int
    wanted: int
    applied: list[Applied]
    pending: list[Migration]
    unknown: list[Applied]
    changed: list[int]

    @property
    def problem(self) -> str | None:
        """Why this aqd cannot work with the database, or None.

        A newer schema is accepted if everything unknown is ``online``: that is what lets nodes be
        upgraded one after the other.
        """
        if self.changed:
            numbers = ", ".join(str(version) for version in self.changed)
            return (
                f"migration {numbers} was applied from another text than this aqd ships; "
                "use the aqd that the database was set up with"
            )
        breaking = [entry for entry in self.unknown if entry.kind == "breaking"]
        if breaking:
            return (
                f"the database's schema is at version {self.current}, this aqd knows up to {self.wanted}: "
                f"upgrade aqd (migration {breaking[0].version}, {breaking[0].name!r}, is not compatible)"
            )
        if self.pending:
            if self.current == 0:
                return "the database holds no schema of aqd yet: run 'aqd db migrate'"
            return (
                f"the database's schema is at version {self.current}, this aqd needs {self.wanted}: "
                "run 'aqd db migrate'"
            )
        return None

    def demand(self) -> None:
        """Raise :class:`SchemaMismatch` if there is a problem; :class:`SchemaUnfit` if it is none of what is pending."""
        if self.problem is not None:
            unfit = self.changed or any(entry.kind == "breaking" for entry in self.unknown)
            raise (SchemaUnfit if unfit else SchemaMismatch)(self.problem)


def load_files(directory: Path | None = None) -> list[Migration]:
    """The migrations that this aqd ships, in order. Read once: the program may be upgraded under a process that runs, which
    then knows no more than before."""
    return list(_shipped()) if directory is None else _load_files(directory)


@functools.cache
def _shipped() -> list[Migration]:
    return _load_files(data_dir("sql") / "migrations")


def newest() -> int:
    """The newest version of the schema that this process knows."""
    return len(_shipped())


def _load_files(directory: Path) -> list[Migration]:
    found: list[Migration] = []
    for path in sorted(directory.glob("*.sql")):
        match = _FILE.fullmatch(path.name)
        text = path.read_text(encoding="utf-8")
        kind = _KIND.match(text)
        if match is None or kind is None:
            raise BugError(f"{path}: must be named NNNN_name.sql and begin with '-- aqd: online|breaking'")
        if int(match[1]) != len(found) + 1:
            raise BugError(f"{path}: the next migration must be number {len(found) + 1}")
        checksum = hashlib.sha256(text.encode()).hexdigest()
        found.append(Migration(int(match[1]), match[2], kind[1], checksum, text))
    return found


def status(conn: Connection, directory: Path | None = None) -> SchemaStatus:
    """Compare the database with the shipped files. Changes nothing. Raises :class:`SchemaMismatch` for a role that
    may not look."""
    files = load_files(directory)
    applied: list[Applied] = []
    try:
        if run(conn, "has_migrations")[0][0]:
            applied = [Applied(*row) for row in run(conn, "list_migrations")]
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaMismatch(
            f"this role may not use the schema of aqd ({error.diag.message_primary}): make it a member of the role "
            "of its duty, see 'aqd db roles'"
        ) from error
    return _compare(files, applied)


def check(conn: Connection, directory: Path | None = None) -> SchemaStatus:
    """:func:`status`, raising :class:`SchemaMismatch` if this aqd cannot work with the database."""
    found = status(conn, directory)
    found.demand()
    return found


def migrate(conn: Connection, directory: Path | None = None) -> list[Migration]:
    """Apply what is pending and return it (an empty list if nothing was).

    ``conn`` must be idle and in autocommit. Raises :class:`SchemaMismatch` for a database that this
    aqd does not understand, for a role that may not change it, and for a breaking migration while nodes live; the
    database is then untouched.
    """
    files = load_files(directory)
    found = status(conn, directory)
    if found.applied and not found.pending and found.problem is None:
        return []  # no right but to look is needed, and nobody is waited for
    if found.changed or found.unknown:
        found.demand()  # also to one who may only look
    return locked(conn, lambda: _apply(conn, files))


def reset(conn: Connection, directory: Path | None = None) -> None:
    """Drop everything of aqd, jobs included, and set the schema up anew, in one transaction. Roles keep their duties."""
    files = load_files(directory)

    def again() -> None:
        _become_owner(conn)
        noted = run(conn, "list_roles") if run(conn, "has_roles")[0][0] else []
        run(conn, "drop_schema")
        _apply(conn, files)
        if noted:
            duties, roles = zip(*noted, strict=True)
            run(conn, "note_roles", duties=text_array(duties), roles=text_array(roles))
            run(conn, "grant_rights")

    locked(conn, again)


def locked(conn: Connection, work: Callable[[], R]) -> R:
    """``work()`` in a transaction that only one migrator can be in."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            with conn.transaction():
                run(conn, "limit_migration", lock_timeout=f"{round(left * 1000)}ms")
                run(conn, "lock_migrations", **{"class": ADVISORY_CLASS, "what": ADVISORY_MIGRATION})
                run(conn, "limit_migration", lock_timeout=f"{round(TABLE_WAIT_S * 1000)}ms")
                return work()
        except psycopg.errors.InsufficientPrivilege as error:
            raise SchemaMismatch(
                f"this role may not change the schema ({error.diag.message_primary}): run 'aqd db migrate' as a role "
                "that may"
            ) from error
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            if time.monotonic() + TABLE_PAUSE_S >= deadline:
                raise DatabaseUnavailable(
                    f"the migration waited {LOCK_WAIT_S} s for a lock and gave up: another 'aqd db migrate' is at "
                    f"work, or a long transaction uses the tables ({error.diag.message_primary})"
                ) from error
        time.sleep(TABLE_PAUSE_S)


def _become_owner(conn: Connection) -> bool:
    """Act as the schema's owner until the end of the transaction; whether there is a schema."""
    exists, owner, ours, user = run(conn, "become_owner")[0]
    if not ours:
        raise SchemaMismatch(
            f"the schema aqd belongs to the role {owner}, and only its members may change it: run 'aqd db migrate' as "
            f"one of them; where its tables are {user}'s, let a superuser say: alter schema aqd owner to {user}"
        )
    return bool(exists)


def _apply(conn: Connection, files: list[Migration]) -> list[Migration]:
    if not _become_owner(conn):
        run(conn, "create_migrations_schema")
    run(conn, "create_migrations")
    found = _compare(files, [Applied(*row) for row in run(conn, "list_migrations")])
    if found.changed or found.unknown:
        found.demand()
    _refuse_breaking(conn, found)
    for migration in found.pending:
        try:
            conn.execute(migration.text.encode())
        except psycopg.errors.DependentObjectsStillExist as error:
            what = "; ".join((error.diag.message_detail or "").splitlines())
            raise SchemaMismatch(
                f"migration {migration.version} ({migration.name}) replaces what other objects in the database depend on "
                f"({error.diag.message_primary}: {what}); nothing was changed. Drop those objects, run 'aqd db migrate', "
                "and make them again"
            ) from error
        run(
            conn,
            "note_migration",
            version=migration.version,
            name=migration.name,
            kind=migration.kind,
            checksum=migration.checksum,
        )
    if run(conn, "has_roles")[0][0]:
        run(conn, "grant_rights")  # also to what is new
    return found.pending


def _refuse_breaking(conn: Connection, found: SchemaStatus) -> None:
    """Nodes that are at work would not know what has become of their tables."""
    breaking = [each for each in found.pending if each.kind == "breaking"]
    if not breaking or not found.applied:
        return
    run(conn, "lock_nodes")
    if nodes := run(conn, "live_nodes", ttl_s=NODE_TTL_S):
        raise SchemaMismatch(
            f"migration {breaking[0].version} ({breaking[0].name}) is breaking, and nodes of the version before are at "
            f"work: stop them first ({', '.join(f'{name}, aqd {version}' for name, version in nodes)}); one that was "
            f"killed counts as gone after {NODE_TTL_S:g} s"
        )


def _compare(files: list[Migration], applied: list[Applied]) -> SchemaStatus:
    known = {migration.version: migration for migration in files}
    done = {entry.version for entry in applied}
    return SchemaStatus(
        current=max(done, default=0),
        wanted=max(known, default=0),
        applied=applied,
        pending=[migration for migration in files if migration.version not in done],
        unknown=[entry for entry in applied if entry.version not in known],
        changed=[
            entry.version
            for entry in applied
            if entry.version in known and known[entry.version].checksum != entry.checksum
        ],
    )
