"""Whether the dispatcher can work with the database's schema: asked on every connection that it makes.

Run by its threads. The first connection may have to make the schema. What is not there yet is waited for; what is of a newer
aqd and breaking will never fit, which :attr:`Schema.unfit` says. One thread may find that out long after the others have
connected (its sign of life is refused, or it alone lost its connection): then none of them goes on with what it has.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence

from aqd import log, migrate
from aqd.config import Database
from aqd.database import Connection
from aqd.errors import SchemaMismatch, SchemaUnfit
from aqd.sessions import Session

logger = log.get_logger("dispatcher")


class Schema:
    """To be called with each new connection; raises :class:`aqd.errors.SchemaMismatch`."""

    def __init__(self, config: Database) -> None:
        self._migrate = config.migrate
        self._ready = False
        self._lock = threading.Lock()
        self._waits_for = ""
        # Wakes whoever has nothing to do, and would keep its connection.
        self.wake: Callable[[], None] = lambda: None
        self.unfit = ""  # why no waiting helps
        self.sessions: Sequence[Session] = ()
        migrate.load_files()  # of our own version, whatever is installed by the time of the first connection

    def __call__(self, connection: Connection) -> None:
        # Nobody waits for another one's connection, which may be silent, but for the schema to be made.
        with contextlib.nullcontext() if self._ready else self._lock:
            self._look(connection)

    def _look(self, connection: Connection) -> None:
        try:
            if not self._ready and self._migrate:
                migrate.migrate(connection)
            migrate.check(connection)
        except SchemaUnfit as error:
            self.unfit = str(error)
            for session in self.sessions:
                session.doubt = error
            self.wake()
            raise
        except SchemaMismatch as error:
            self.unfit = ""
            if str(error) != self._waits_for:  # once for all threads
                self._waits_for = str(error)
                logger.warning("waiting for the schema", reason=self._waits_for)
            raise
        self._ready, self.unfit, self._waits_for = True, "", ""
