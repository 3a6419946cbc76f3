"""Database connections of one API worker process: borrowed, watched, thrown away, made again.

Runs in the API's workers; made after gunicorn's fork. One connection a thread at most, so nobody waits
for a connection but only for the database.

Promises (F54): a connection that died while idle is noticed before it is handed out; every statement
has an end on our side too, because a server that is cut off without a word (or a proxy that swallows
everything) would hold a thread for ever; while the database is away requests fail within the connect
timeout, and after the first failure at once, with one probe a second; when it is back the next probe
serves. Nothing waits for psycopg_pool's own reconnection, whose pauses grow to minutes. Nor does a request wait
long for somebody else's lock: as many as there are threads would keep all others away.

How it fails: :class:`DatabaseUnavailable` and :class:`OutcomeUnknown` (503), :class:`SchemaMismatch`, :class:`Locked`.
"""

import contextlib
import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import msgspec
import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from aqd import database
from aqd.config import Config
from aqd.database import Connection
from aqd.errors import DatabaseUnavailable, Locked, OutcomeUnknown, SchemaMismatch
from aqd.log import Suppressor, describe, get_logger

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
CHECK_TIMEOUT_S = 2.0
# Beyond the server's own statement_timeout, which normally comes first.
GRACE_S = 2.0
# For a lock. An application that submits in its transaction holds its key for as long as that takes: duplicates behind
# one of two seconds still get the job that it makes (F64). A second more, because each who waits has a thread.
LOCK_TIMEOUT_S = 3.0
# Of statement_timeout at most, so that it is the lock that is named.
_LOCK_SHARE = 0.6
# Connections beside those of the threads, for requests that must not wait for any (the gate's own threads).
SPARE = 2
# How long requests fail at once after a failed connect, until the next one may try.
PROBE_S = 1.0
# Idle for longer than this, a connection is asked before it is used: a firewall may have forgotten it.
TRUSTED_IDLE_S = 5.0
_POOL_TICK_S = 0.2
# Failed connects in a row that count as "the database is away": one may be a passing reset.
_FAILURES = 2

log = get_logger("database")
# It has a line for each attempt to connect; ours are fewer and say more.
logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


class Pool:
    """``read`` and ``write`` run a function on a connection. Safe for use by many threads."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = msgspec.structs.replace(
            cfg.database, connect_timeout_s=min(cfg.database.connect_timeout_s, CONNECT_TIMEOUT_S)
        )
        self._watch = Watch()
        self._state = _State()
        self._pool: ConnectionPool[Connection] = ConnectionPool(
            connection_class=cast(Any, self),  # only its connect() is used, see below
            min_size=0,
            max_size=cfg.api.threads + SPARE,
            open=True,
            check=self._check,
            max_idle=60.0,
            max_lifetime=1800.0,
            # Give up at once: the next request tries again, under our rules.
            reconnect_timeout=0.05,
            num_workers=2,
            name="aqd-api",
        )

    def read(self, work: Callable[[Connection], T], *, timeout_s: float | None = None, tries: int = 2) -> T:
        """Run ``work``, which changes nothing; again on another connection if its own was lost."""
        while True:
            tries -= 1
            try:
                return self._run(work, timeout_s)
            except _Lost as lost:
                if tries <= 0:
                    self._state.complain(lost.error)
                    raise _unavailable(lost.error) from lost.error
                log.debug("connection lost, reading again", error=describe(lost.error))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work``, one statement that changes something; never twice."""
        try:
            return self._run(work, None)
        except _Lost as lost:
            # An answer with an SQLSTATE means that the transaction was rolled back; the exception are
            # the shut-downs, which can arrive after the commit (waiting for a standby).
            state = lost.error.sqlstate
            if state is not None and not state.startswith(("57P", "08")):
                raise _unavailable(lost.error) from lost.error
            self._state.complain(lost.error)
            raise OutcomeUnknown(
                "the connection to the database broke while the change was being stored; whether it was "
                "is not known: look before sending it again"
            ) from lost.error

    def close(self) -> None:
        """Close all connections; the threads end."""
        self._pool.close(timeout=1.0)
        self._watch.close()

    # --- inside -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[Connection], T], timeout_s: float | None) -> T:
        limit = self._cfg.statement_timeout_s + GRACE_S if timeout_s is None else timeout_s
        with self._borrowed() as conn:
            try:
                with self._watch.limit(conn, limit):
                    result = work(conn)
            except psycopg.Error as error:
                if database.is_disconnect(error, conn):
                    conn.close()
                    raise _Lost(error) from error
                raise _translated(error) from error
        self._state.fine()
        return result

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[Connection]:
        conn = self._borrow()
        try:
            yield conn
        finally:
            conn._aqd_idle_since = time.monotonic()  # type: ignore[attr-defined]
            self._state.give_back()
            self._pool.putconn(conn)

    def _borrow(self) -> Connection:
        began = time.monotonic()
        deadline = began + self._cfg.connect_timeout_s + CHECK_TIMEOUT_S
        with self._state.entered(began):
            while True:
                try:
                    # In small steps, because the pool does not tell those who wait why there is none.
                    conn = self._pool.getconn(timeout=_POOL_TICK_S)
                except PoolTimeout:
                    self._state.raise_if_hopeless(began, deadline)
                else:
                    self._state.lend()
                    return conn

    def connect(self, _conninfo: str, **_kwargs: Any) -> Connection:
        """Called by the pool's worker threads, as the ``connect`` of its connection class."""
        try:
            limit_s = min(LOCK_TIMEOUT_S, self._cfg.statement_timeout_s * _LOCK_SHARE)
            conn = database.connect(self._cfg, "aqd api", lock_timeout_s=limit_s)
        except psycopg.Error as error:
            self._state.failed(error)
            raise
        self._state.connected()
        conn._aqd_idle_since = time.monotonic()  # type: ignore[attr-defined]
        return conn

    def _check(self, conn: Connection) -> None:
        """Before it is handed out. An idle connection has nothing to say: if it is readable, it is the
        server's farewell. That costs 1 µs; a round trip is spent only after a longer idle time."""
        if database.became_read_only(conn):
            conn.close()  # the pool would take it back
            raise psycopg.OperationalError("the server has become read-only")
        poll = select.poll()
        poll.register(conn.fileno(), select.POLLIN)
        idle_s = time.monotonic() - conn._aqd_idle_since  # type: ignore[attr-defined]
        if not poll.poll(0) and idle_s < TRUSTED_IDLE_S:
            return
        with self._watch.limit(conn, CHECK_TIMEOUT_S):
            conn.execute("")


class _Lost(Exception):
    """Internal: the connection broke under ``error``."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(str(error))
        self.error = error


class _State:
    """Whether the database is away, for all threads. While it is, one of them probes and the others
    fail at once; connections that are still at work (the server has no room for one more) count as hope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: psycopg.Error | None = None
        self._failures = 0  # to connect, without a success between; the pool tries twice in a row
        self._failed_at = 0.0
        self._lent = 0
        self._probing = False
        self._lines = Suppressor(10.0)

    @contextlib.contextmanager
    def entered(self, now: float) -> Iterator[None]:
        """The body may try to get a connection; raises at once if it is known that there is no use."""
        probe = False
        with self._lock:
            if self._error is not None and self._failures >= _FAILURES and not self._lent:
                if self._probing or now - self._failed_at < PROBE_S:
                    raise _unavailable(self._error)
                self._probing = probe = True
        try:
            yield
        finally:
            if probe:
                with self._lock:
                    self._probing = False

    def lend(self) -> None:
        """A connection goes out."""
        with self._lock:
            self._lent += 1

    def give_back(self) -> None:
        """It has come back."""
        with self._lock:
            self._lent -= 1

    def raise_if_hopeless(self, began: float, deadline: float) -> None:
        """After waiting in vain for a moment: give up if a connect has failed meanwhile, or at the end."""
        late = time.monotonic() >= deadline
        with self._lock:
            error = self._error if self._failed_at >= began else None
            if error is not None and (late or (self._failures >= _FAILURES and not self._lent)):
                raise _unavailable(error)
        if late:
            # No connection and no error: the server, or the way to it, swallows everything.
            error = psycopg.OperationalError("no answer from the database")
            with self._lock:
                self._failures = _FAILURES
            self.failed(error)
            raise _unavailable(error)

    def failed(self, error: psycopg.Error) -> None:
        with self._lock:
            self._error = error
            self._failures += 1
            self._failed_at = time.monotonic()
        self.complain(error)

    def connected(self) -> None:
        """A connection could be made."""
        with self._lock:
            self._failures = 0

    def complain(self, error: psycopg.Error) -> None:
        """Say it in the log, at most every ten seconds."""
        with self._lock:
            allowed, suppressed = self._lines.allow("database")
        if allowed:
            log.warning("database away", error=describe(error), suppressed=suppressed)

    def fine(self) -> None:
        if self._error is None:
            return
        with self._lock:
            away, self._error, self._failures = self._error is not None, None, 0
            self._lines.reset("database")
        if away:
            log.info("database is back")


class Watch:
    """Ends statements that overstay by shutting their socket down, from a thread of its own.

    ``statement_timeout`` is the server's promise and TCP_USER_TIMEOUT the kernel's; neither helps when
    something between acknowledges all and answers nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, int]] = []  # deadline, number, our own duplicate of the socket
        self._active: set[int] = set()
        self._numbers = itertools.count()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, conn: Connection, seconds: float) -> Iterator[None]:
        """Inside, the connection's socket is shut down after ``seconds``."""
        # A duplicate: the connection may close its descriptor, and the number be used again, at any time.
        fd = os.dup(conn.fileno())
        number = next(self._numbers)
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="aqd-api-watch", daemon=True)
                self._thread.start()
            self._active.add(number)
            heapq.heappush(self._heap, (deadline, number, fd))
            if self._heap[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._active.discard(number)
                os.close(fd)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)

    def _loop(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._active):
                    _, number, fd = heapq.heappop(self._heap)
                    if number in self._active:  # so its descriptor is still open
                        self._active.discard(number)
                        _shut_down(fd)
                self._changed.wait(self._heap[0][0] - now if self._heap else None)


def _shut_down(fd: int) -> None:
    log.warning("a statement overstayed, its connection is cut")
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _unavailable(error: psycopg.Error) -> DatabaseUnavailable:
    """Without names of hosts and roles: those are for the log, not for whoever sends a request."""
    if error.sqlstate is None:
        return DatabaseUnavailable("the database cannot be reached")
    return DatabaseUnavailable(f"the database does not serve: {_first_line(error)}")


def _translated(error: psycopg.Error) -> Exception:
    """An error that left the connection usable, as one of ours; or the same one, if it is a bug."""
    state = error.sqlstate or ""
    # Undefined schema, table, column, function: made by another version, or not made at all.
    if state in ("3F000", "42P01", "42703", "42883"):
        return SchemaMismatch(
            f"the database's schema does not fit this version ({_first_line(error)}): run aqd db migrate"
        )
    if database.lock_denied(error):
        return Locked("somebody else holds a lock on it, nothing was changed")
    # Resources, operator, system, the server's own faults; privileges; conflicts that did not end.
    if state[:2] in ("53", "57", "58", "XX") or state in ("42501", "40001", "40P01", "25P02"):
        return _unavailable(error)
    return error


def _first_line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or type(error).__name__)[:200]
