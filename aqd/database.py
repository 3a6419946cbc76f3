"""Connections, and the one way in which statements are run.

Used by the dispatcher's threads, the API, the client and the command line, each with connections of
its own: a connection is never shared between threads and never survives a fork.

Promises: a connection has keep-alives, a bound on unacknowledged data and a ``statement_timeout``, so
that the server's side of a fault ends by itself; refuses a standby; runs in autocommit (each statement is
one transaction) and in UTC. :func:`run` repeats a statement that PostgreSQL ended as deadlock victim
or for a serialisation conflict (40P01, 40001), with jitter. How it fails: every other error of psycopg
passes through unchanged; :func:`is_disconnect` tells whether the connection is lost.

Parameters: integers and lists go out as text with an unknown type, and the cast that each parameter
carries in ``sql/`` gives the type. psycopg would pick int2, int4 or int8 by value, hence a prepared
statement for each mixture; and its array dumpers cost 1 µs an element.
"""

import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
import psycopg
from psycopg import conninfo, sql
from psycopg.rows import tuple_row

from aqd import statements
from aqd.config import Database
from aqd.errors import BugError, WorldError

Connection: TypeAlias = psycopg.Connection[Any]
Row: TypeAlias = tuple[Any, ...]

# First argument of advisory locks ("aqd" in ASCII); the second says what is locked.
ADVISORY_CLASS: Final = 1_634_821_120
ADVISORY_MIGRATION: Final = 1
ADVISORY_PARTITION: Final = 2  # also written out in migration 0001
ADVISORY_DUTY: Final = 100  # + the number of the keeper's duty

_CONFLICT_TRIES: Final = 8
# Prepared after this many runs: an API connection does not prepare what it runs once.
_PREPARE_AFTER: Final = 2

# A queue is often empty when it is analysed; a plan made then, or by a generic estimate, reads the
# table instead of the primary key (75 µs a job instead of 12).
# Without jit=off every plan with a discouraged node (cost 1e10) is compiled first: 0.8 s, seconds for claims.
_DISPATCHER_SETTINGS: Final = {
    "jit": "off",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


class AqdConnection(psycopg.Connection[Any]):
    """As :func:`connect` makes them. ``travelling`` is the statement that makes our settings for one transaction, where
    a pooler gives the next one to another session; empty where the session is ours."""

    travelling: bytes = b""
    was_read_only: bool = False  # when it was made, and ever since: a role may be one that only reads

    @contextlib.contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        """psycopg's, with our settings."""
        outermost = not in_transaction(self)
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if outermost and self.travelling:
                psycopg.RawCursor(self).execute(self.travelling)
            yield transaction


def is_pooled(conn: Connection) -> bool:
    """Whether each transaction of this connection of ours may be in another session, so that nothing of a session
    (LISTEN, SET) lasts. A pooler shows because it gives out cancel keys of its own, for processes that do not exist; in
    which mode it works does not show, so the configuration may say it."""
    return isinstance(conn, AqdConnection) and bool(conn.travelling)


def became_read_only(conn: Connection) -> bool:
    """Whether the server was taken out of service (``default_transaction_read_only``) since this connection of ours was made,
    as its last answer said. Reads go on there, and show what was true until then."""
    read_only = _is_read_only(conn)
    if isinstance(conn, AqdConnection) and not read_only:
        conn.was_read_only = False  # opened: the next turn counts
    return read_only and not getattr(conn, "was_read_only", True)


def _is_read_only(conn: Connection) -> bool:
    return conn.pgconn.parameter_status(b"default_transaction_read_only") == b"on"


def for_listening(cfg: Database) -> Database:
    """Where a connection goes that is to hear notifications."""
    return msgspec.structs.replace(cfg, url=cfg.listen_url, pooler="auto") if cfg.listen_url else cfg


def check_same_database(cfg: Database, listening: Connection) -> None:
    """Raises :class:`WorldError` if ``listen_url`` leads to another database than ``url``: jobs would be claimed in the
    one and looked for in the other."""
    if not cfg.listen_url:
        return
    with connect(cfg, "aqd check") as conn:
        if run(conn, "which_database") != run(listening, "which_database"):
            raise WorldError("database.listen_url and database.url lead to different databases")


def connect(
    cfg: Database, application_name: str, *, dispatcher: bool = False, lock_timeout_s: float | None = None
) -> Connection:
    """A new connection; raises :class:`psycopg.OperationalError` if there is none to be had.

    ``dispatcher`` adds the planner settings that keep the hot statements on their primary keys. A statement that
    waits for one lock longer than ``lock_timeout_s`` fails with 55P03.
    """
    given = conninfo.conninfo_to_dict(cfg.url)
    prepare_threshold = _PREPARE_AFTER if cfg.prepare else None
    defaults: dict[str, Any] = {
        "application_name": application_name,
        "connect_timeout": max(2, round(cfg.connect_timeout_s)),  # libpq knows whole seconds from 2 up
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        # tcp(7) TCP_USER_TIMEOUT: how long sent data may stay unacknowledged.
        "tcp_user_timeout": round((cfg.statement_timeout_s + 5) * 1000),
        "target_session_attrs": "read-write",
        # Names and payloads are UTF-8 whatever the environment says.
        "client_encoding": "utf8",
    }
    parameters = {key: value for key, value in defaults.items() if key not in given}
    options: dict[str, str] = {}
    while True:
        try:
            conn = AqdConnection.connect(
                cfg.url, autocommit=True, prepare_threshold=prepare_threshold, **parameters
            )
            break
        except psycopg.Error as error:
            # A pooler takes no start-up options: they are settings like ours then.
            if "unsupported startup parameter" in str(error) and not options:
                options = _settings_of(str(given.get("options") or os.environ.get("PGOPTIONS", "")))
                parameters["options"] = ""
                if options:
                    continue
            # psycopg's frame holds the error, the error's traceback that frame, and the frame the half-open
            # connection: its socket would stay until the next full garbage collection, which an idle process
            # never has.
            raise error.with_traceback(None) from None
    settings = options | {
        "timezone": "UTC",
        "statement_timeout": f"{round(cfg.statement_timeout_s * 1000)}ms",
        "idle_in_transaction_session_timeout": "60s",
        # Short statements never earn a compilation back, and a scan that is "off" but the only one (a
        # table without an index) has a cost that always asks for one: 300 ms instead of 1.
        "jit": "off",
        "aqd.notify": "on" if cfg.notify else "off",
    }
    if dispatcher:
        settings |= _DISPATCHER_SETTINGS
    if lock_timeout_s is not None:
        settings["lock_timeout"] = f"{max(1, round(lock_timeout_s * 1000))}ms"
    try:
        # connect_timeout ends with the authentication; a proxy may swallow everything after it.
        with _cut_after(conn, cfg.connect_timeout_s):
            pooled = run(
                conn,
                "configure_session",
                names=text_array(settings),
                values=text_array(settings.values()),
                pid={"auto": conn.info.backend_pid, "session": None, "transaction": 0}[cfg.pooler],
            )[0][0]
        conn.was_read_only = _is_read_only(conn)
        if pooled:
            conn.prepare_threshold = None
            conn.travelling = _travelling(settings)
    except BaseException:
        conn.close()
        raise
    return conn


@contextlib.contextmanager
def _cut_after(conn: Connection, seconds: float) -> Iterator[None]:
    """End what waits on the connection when the time is over."""
    with twin(conn) as ours:
        cut = threading.Timer(seconds, shut_down, [ours])
        cut.daemon = True
        cut.start()
        try:
            yield
        finally:
            cut.cancel()
            cut.join()  # it may be about to


def _travelling(settings: Mapping[str, str]) -> bytes:
    """One statement that makes these settings until the transaction ends."""
    pairs = [
        sql.SQL("set_config({}, {}, true)").format(name, sql.Literal(value))
        for name, value in settings.items()
    ]
    return sql.SQL("select {}").format(sql.SQL(", ").join(pairs)).as_bytes()


def _settings_of(options: str) -> dict[str, str]:
    """The settings in ``-c name=value --name=value`` (PostgreSQL manual, "Connection Settings"); other options of the
    server's command line are not for connections."""
    words = re.findall(r"(?:\\.|\S)+", options)
    text = "\0".join(re.sub(r"\\(.)", r"\1", word) for word in words) + "\0"
    return {
        name.replace("-", "_"): value for name, value in re.findall(r"(?:-c\0?|--)([^=\0]+)=([^\0]*)\0", text)
    }


def twin(conn: Connection) -> socket.socket:
    """A descriptor of our own for the connection's socket, to be closed with it. To be called by the connection's thread:
    libpq closes its own when the connection is lost, and the number may be somebody else's by the time another looks at it.
    :class:`psycopg.OperationalError` if it is lost already, or no descriptor is left."""
    try:
        return socket.socket(fileno=os.dup(conn.pgconn.socket))
    except OSError as error:
        raise psycopg.OperationalError(f"no descriptor for a connection: {error}") from error


def shut_down(twin: socket.socket) -> None:
    """End whatever waits on the connection of this :func:`twin`, from any thread: the socket is shut down under it."""
    with contextlib.suppress(OSError):
        twin.shutdown(socket.SHUT_RDWR)


def run(conn: Connection, name: str, /, **params: Any) -> list[Row]:
    """Run the named statement and return its rows (an empty list for one that gives none)."""
    return execute(conn, name, **params)[0]


def execute(conn: Connection, name: str, /, **params: Any) -> tuple[list[Row], int]:
    """As :func:`run`, with the number of rows that the statement touched."""
    statement = statements.get(name)
    if len(params) != len(statement.params):
        raise BugError(f"{name} takes {statement.params}, was given {tuple(params)}")
    args = tuple([_plain(params[key]) for key in statement.params])
    prepare = False if statement.fresh else None  # None: after a few runs
    travelling = b"" if in_transaction(conn) else getattr(conn, "travelling", b"")
    tries = 0
    while True:
        # An application's connection may have another row factory.
        cursor = psycopg.RawCursor(conn, row_factory=tuple_row)
        try:
            if travelling:
                # Of a pipeline all is one transaction, and one round trip: 0.2 ms more instead of three round trips.
                with conn.pipeline():
                    psycopg.RawCursor(conn).execute(travelling)
                    cursor.execute(statement.text, args or None, binary=True)
            else:
                cursor.execute(statement.text, args or None, binary=True, prepare=prepare)
            rows = cursor.fetchall() if cursor.description is not None else []
            return rows, cursor.rowcount
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
            tries += 1
            # Inside a transaction everything before it is gone too: the caller must decide.
            if tries >= _CONFLICT_TRIES or conn.closed or in_transaction(conn):
                raise
            time.sleep(random.uniform(0.002, 0.01) * tries)
        finally:
            cursor.close()


def _plain(value: Any) -> Any:
    return str(value) if type(value) is int else value


def in_transaction(conn: Connection) -> bool:
    """Whether the connection is inside a transaction block (also a failed one)."""
    return conn.info.transaction_status in (
        psycopg.pq.TransactionStatus.INTRANS,
        psycopg.pq.TransactionStatus.INERROR,
    )


# Errors after which a connection is of no further use, though it may look alive, by SQLSTATE (PostgreSQL manual,
# appendix A): connection exceptions; the server ends; the transaction's or session's time is over (FATAL); it has
# become read-only (switched over); it does not know, or knows already, what was prepared here (something between
# has changed the session under us); the schema has changed under a prepared statement.
_LOST_CLASSES: Final = ("08", "57P")
_LOST_STATES: Final = frozenset({"25006", "25P03", "25P04", "26000", "42P05", "0A000"})


def is_disconnect(error: BaseException, conn: Connection) -> bool:
    """Whether the connection must be replaced: it is gone, or of no further use."""
    if conn.closed or conn.broken:
        return True
    state: str | None = getattr(error, "sqlstate", None)
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_LOST_CLASSES) or state in _LOST_STATES


def lock_denied(error: psycopg.Error, table: str = "") -> bool:
    """Whether the statement ended because it waited in vain for somebody else's lock (of this table): that is
    lock_timeout, or statement_timeout in the middle of such a wait, where the context names the row by its place.
    Who waits in a row has two waits: for his turn, and for the one that holds it."""
    # The first line names the row's table, or cites the statement inside a function.
    place = (error.diag.context or "").partition("\n")[0]
    if error.sqlstate == "55P03":
        return table in place
    return error.sqlstate == "57014" and table in place and re.search(r"\(\d+,\d+\)", place) is not None


def define(conn: Connection, name: str, /, **identifiers: str) -> None:
    """Run a ``:ddl`` statement, which takes names instead of values and cannot be prepared."""
    template = sql.SQL(statements.get(name).text.decode())
    names = {key: sql.Identifier(value) for key, value in identifiers.items()}
    conn.execute(template.format(**names), prepare=False)


# --- array literals -------------------------------------------------------------------------------


def int_array(values: Iterable[int | None]) -> str:
    """An array of integers as PostgreSQL reads it from text (manual: "Array Input and Output Syntax")."""
    return "{" + ",".join(["NULL" if v is None else str(v) for v in values]) + "}"


def float_array(values: Iterable[float | None]) -> str:
    """An array of doubles; ``repr`` is exact in both directions. An integer beyond all doubles is for PostgreSQL to
    refuse, like every other value that cannot be stored."""
    return "{" + ",".join(["NULL" if v is None else _float(v) for v in values]) + "}"


def _float(value: float) -> str:
    try:
        return repr(float(value))
    except OverflowError:
        return "1e999"  # out of range (22003)


def bool_array(values: Iterable[bool]) -> str:
    """An array of booleans."""
    return "{" + ",".join(["t" if v else "f" for v in values]) + "}"


def text_array(values: Iterable[str | None]) -> str:
    """An array of texts."""
    return (
        "{"
        + ",".join(
            ["NULL" if v is None else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values]
        )
        + "}"
    )


# --- arrays in binary format ----------------------------------------------------------------------
#
# For batches of hundreds. Per element, here and in the server: a double 30 + 20 ns instead of 560 + 130 (repr, strtod), an
# integer 30 + 15 instead of 70 + 50, a text that occurs often 30 + 50 instead of 110 + 60. Of a record of 500 that is
# 2.2 µs a job here and 1.0 there.


class Packed(bytes):
    """An array as array_recv reads it: dimensions, whether there are nulls, the elements' type, count and lower bound;
    then each element's length (-1: null) and value."""


class _PackedDumper(psycopg.adapt.Dumper):
    """As it is, and of no type: the parameter's cast gives it, as with literals, so that both are one prepared
    statement."""

    format = psycopg.pq.Format.BINARY

    def dump(self, obj: Packed) -> Packed:
        return obj


psycopg.adapters.register_dumper(Packed, _PackedDumper)

_HEAD: Final = struct.Struct("!iiIii")
_LENGTH: Final = struct.Struct("!i")
_NULL: Final = _LENGTH.pack(-1)
_INT8, _FLOAT8, _TEXT = 20, 701, 25  # pg_type.oid


@lru_cache(maxsize=64)
def _eights(count: int, code: str) -> struct.Struct:
    """Elements of eight bytes with their lengths."""
    return struct.Struct("!" + ("i" + code) * count)


def _head(count: int, oid: int, nulls: bool = False) -> bytes:
    head = _HEAD.pack(1, nulls, oid, count, 1)
    return head if count else b"\0" * 8 + head[8:12]  # no elements, no dimension


def _pack(values: Sequence[Any], code: str, oid: int) -> Packed:
    count = len(values)
    fields: list[Any] = [8] * (2 * count)
    fields[1::2] = values
    return Packed(_head(count, oid) + _eights(count, code).pack(*fields))


def packed_ints(values: Sequence[int | None]) -> Packed | str:
    """An array of bigint; with nulls among them, or what is no bigint, a literal."""
    try:
        return _pack(values, "q", _INT8)
    except struct.error:
        return int_array(values)


def packed_floats(values: Sequence[float | None]) -> Packed | str:
    """An array of doubles; with nulls among them, or what is no double, a literal."""
    try:
        return _pack(values, "d", _FLOAT8)
    except (struct.error, OverflowError):
        return float_array(values)


def packed_texts(values: Sequence[str | None]) -> Packed:
    """An array of texts; one that occurs often is encoded once."""
    known: dict[str | None, bytes] = {None: _NULL}
    for value in set(values):
        if value is not None:
            data = value.encode()
            known[value] = _LENGTH.pack(len(data)) + data
    return Packed(_head(len(values), _TEXT, None in values) + b"".join([known[value] for value in values]))
