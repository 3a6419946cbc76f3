"""A thread's own database connection, with a deadline that holds.

Used by the dispatcher: one session per duty (claimer, recorder, keeper), each with a thread of its own. The
main thread calls :meth:`Session.check` at every tick; a statement that overstays has its socket shut down
under it, which ends any wait at once, also for a peer that vanished without a word or a stopped backend, where
``statement_timeout`` and keep-alives help late or not at all.

Fails: every error of the connection passes to the caller as :class:`psycopg.Error`; the session then
reconnects at the next use, after a pause that grows with jitter, so that a database that is away costs
neither CPU nor a flood of log lines.
"""

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import psycopg

from aqd import database, log
from aqd.config import Database
from aqd.database import Connection
from aqd.errors import SchemaMismatch
from aqd.process import boottime

P = ParamSpec("P")
R = TypeVar("R")

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
# Beyond the server's own statement_timeout, which gives the better message.
MARGIN_S = 2.0
# The first connection may have to wait for another node's migration, or to do it.
PREPARE_LIMIT_S = 120.0
# A connection that is lost sooner than this was no recovery: pauses go on growing and the log stays quiet. (A
# server that takes connections and serves none, a proxy that cuts them.)
RELAPSE_S = 5.0
LOG_EVERY_S = 30.0


class Session:
    """A connection, made when needed. All methods but :meth:`check` and the properties belong to its thread.

    ``prepare(conn)`` runs once on each new connection (LISTEN, a check of the schema).
    """

    def __init__(
        self,
        config: Database,
        name: str,
        prepare: Callable[[Connection], None] = lambda _: None,
        pause_max_s: float = PAUSE_MAX_S,
        limit_s: float | None = None,
        lock_timeout_s: float | None = None,
    ) -> None:
        self.config = config
        self.name = name
        self.up = False
        self.error = ""
        self._prepare = prepare
        self._pause_max_s, self._lock_timeout_s = pause_max_s, lock_timeout_s
        self._limit_s = limit_s or config.statement_timeout_s + MARGIN_S
        self._connection: Connection | None = None
        self._twin: socket.socket | None = None  # of its socket, to cut it
        self._failures = 0  # since a connection last proved good
        self._relapsing = self._prepared = False
        self._away = False  # it was, or is, for another reason than its schema
        self._up_since = 0.0
        self._lock = threading.Lock()
        self._deadline = self._since = 0.0
        self._cut = False
        # Told how long a statement took that succeeded: (the function's name, seconds).
        self.timed: Callable[[str, float], None] = lambda _name, _seconds: None
        # Set by whichever thread: why the connection must not be used any more.
        self.doubt: BaseException | None = None
        # Told, by the session's thread, that :attr:`up` has changed.
        self.changed: Callable[[], None] = lambda: None
        self._log = log.get_logger(name)
        self._suppressor = log.Suppressor(LOG_EVERY_S)

    @property
    def connection(self) -> Connection | None:
        return self._connection

    def run(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``work(connection, …)`` under the deadline; :class:`psycopg.Error` passes through, after which a
        connection that is no longer usable has been dropped."""
        if self.doubt is not None and self._connection is not None:
            self.failed(self.doubt)
        connection = self._connection or self._connect()
        self._begin()
        try:
            result = work(connection, *args, **kwargs)
        except psycopg.Error as error:
            self._end()
            if self._cut or database.is_disconnect(error, connection):
                self.failed(error)
            else:
                self._refused(error)
            raise
        except BaseException:
            self._end()
            raise
        self.timed(getattr(work, "__name__", ""), boottime() - self._since)
        self._end()
        if database.became_read_only(connection):
            # No statement of an idle node writes, so none would fail. What this one has done is done.
            self.failed(psycopg.OperationalError("the server has become read-only"))
            return result
        self.error = ""
        if self._failures and boottime() >= self._up_since + RELAPSE_S:
            self._recovered()
        return result

    def pause_s(self) -> float:
        """How long to wait before the next try after a failure; 0 while all is well."""
        if self.up or not self._failures:
            return 0.0
        longest = min(PAUSE_FIRST_S * 2 ** min(self._failures, 10), self._pause_max_s)
        return random.uniform(longest / 2, longest)

    def _refused(self, error: BaseException) -> None:
        """The server lives and says no (disk full, a right taken away): said now and then, tried again."""
        self.error = log.describe(error)[:300]
        write, suppressed = self._suppressor.allow("refused")
        if write:
            self._log.error("database refuses", error=self.error, suppressed=suppressed or None)

    def failed(self, error: BaseException) -> None:
        """Drop the connection and note why."""
        if self.up and self._failures:
            if boottime() >= self._up_since + RELAPSE_S:
                self._recovered()
            else:
                self._relapsing = True
        self._failures += 1
        self.error = " ".join(str(error).split())[:300] or type(error).__name__
        if self._cut:
            self.error = f"no answer within the deadline of {self._limit_s:g} s"
        # A schema that does not fit is said once for the node, by aqd.schema or the master.
        if not isinstance(error, SchemaMismatch):
            self._away = True
            write, suppressed = self._suppressor.allow("down")
            if write or (self.up and not self._relapsing):
                self._log.warning("database away", error=self.error, suppressed=suppressed or None)
        self.close()

    def close(self) -> None:
        was_up, self.up = self.up, False
        with self._lock:
            connection, self._connection = self._connection, None
            twin, self._twin = self._twin, None
        if twin is not None:
            twin.close()
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()
        if was_up:
            self.changed()

    def _connect(self) -> Connection:
        self._cut, self.doubt = False, None
        try:
            connection = database.connect(
                self.config,
                f"aqd {self.name} {os.getpid()}",
                dispatcher=True,
                lock_timeout_s=self._lock_timeout_s,
            )
        except psycopg.Error as error:
            self.failed(error)
            raise
        with self._lock:
            self._connection = connection
        self._begin(None if self._prepared else PREPARE_LIMIT_S)
        try:
            self._twin = database.twin(connection)
            self._prepare(connection)
        except BaseException as error:
            self._end()
            self.failed(error)
            raise
        self._end()
        if self._failures and not self._relapsing:
            self._say_back()
        self._prepared = self.up = True
        self.error, self._up_since = "", boottime()
        self.changed()
        return connection

    def _recovered(self) -> None:
        """The connection has lasted: what comes now is a new trouble."""
        if self._relapsing:
            self._say_back()
        self._failures, self._relapsing = 0, False
        self._suppressor.reset("down")

    def _say_back(self) -> None:
        if self._away:
            self._log.info("database is back", failures=self._failures)
        self._away = False

    # --- the deadline

    def _begin(self, limit_s: float | None = None) -> None:
        self._since = boottime()
        self._deadline = self._since + (limit_s or self._limit_s)

    def _end(self) -> None:
        self._deadline = 0.0

    def silent_s(self, now: float) -> float:
        """For how long an answer has been waited for; 0 while nothing is asked."""
        return now - self._since if self._deadline else 0.0

    def check(self, now: float) -> None:
        """Called by the main thread: end a statement that overstays its deadline."""
        deadline = self._deadline
        if deadline and now >= deadline:
            self.cut()

    def cut(self) -> None:
        """Called by the main thread: end the statement that is under way, if there is one."""
        with self._lock:  # the thread cannot close the connection meanwhile
            if self._twin is not None and self._deadline:
                self._cut = True
                database.shut_down(self._twin)
