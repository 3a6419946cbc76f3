"""The keeper's thread in the dispatcher: its connection, its pauses, and this node's sign of life.

What is to be kept (rescue, unknown types, partitions, retention, vacuum) is :mod:`aqd.keeper`; this thread
gives it a session, and tells the other nodes that this one lives and which types it serves.
"""

import threading
from collections.abc import Callable, Iterable

import psycopg

from aqd import keeper, log, messages, store
from aqd.database import Connection
from aqd.errors import WorldError
from aqd.hookspecs import HandlerInfo
from aqd.process import boottime
from aqd.sessions import Session

logger = log.get_logger("keeper")

# A step is several statements, each with the server's own limit: so many times that limit for all.
STEP_STATEMENTS = 2.0


class Caretaker(threading.Thread):
    """The main thread calls :meth:`serve` when the types change, and sets the flags."""

    def __init__(self, start: messages.Start, schema: Callable[[Connection], None]) -> None:
        super().__init__(name="keeper", daemon=True)
        self.session = Session(
            start.config.database,
            "keeper",
            schema,
            limit_s=STEP_STATEMENTS * start.config.database.statement_timeout_s,
        )
        self.stopping = False
        self.draining = False
        # Not before the first reconciliation, nor while outcomes wait for the recorder's connection: what this
        # node holds is recorded, not rescued by its own hand.
        self.may_rescue = False
        self._start = start
        self._keeper = keeper.Keeper(start.config, start.node_id)
        self._serving: tuple[int, list[HandlerInfo]] | None = None
        self._declared: list[HandlerInfo] = []
        self._wake = threading.Event()

    def serve(self, generation: int, handlers: Iterable[HandlerInfo]) -> None:
        self._serving = (generation, list(handlers))
        self._wake.set()

    def run(self) -> None:
        while not self.stopping:
            try:
                pause = self._step()
            except (psycopg.Error, WorldError):
                pause = self.session.pause_s() or 1.0
            except Exception:
                logger.exception("keeper fails")
                pause = 5.0
            self._wake.wait(pause)
            self._wake.clear()

    def _step(self) -> float:
        start, serving = self._start, self._serving
        if serving is None:
            return 1.0
        state = store.NodeState(
            node_id=start.node_id,
            name=start.node_name,
            pid=start.master_pid,
            version=start.version,
            generation=serving[0],
            slots=start.config.daemon.slots,
            types=sorted(handler.type for handler in serving[1]),
            state="draining" if self.draining else "running",
        )
        self.session.run(store.node_seen, state)
        if serving[1] != self._declared:
            self.session.run(store.declare_handlers, serving[1])
            self._declared = serving[1]
        if not self.may_rescue:
            return 0.2
        pause = self.session.run(self._keeper.step, boottime())
        return min(pause, start.config.keeper.node_ttl_s / 3)
