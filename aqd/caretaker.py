"""The keeper's thread in the dispatcher: its connection, its pauses, this node's sign of life, and its figures.

What is to be kept (rescue, unknown types, partitions, retention, vacuum, snapshots) is :mod:`aqd.keeper`; this
thread gives it a session, tells the other nodes that this one lives and which types it serves, and writes down what
the dispatcher has counted. What cannot be written is kept, added up, until it can.
"""

import threading
from collections.abc import Callable, Iterable

import msgspec
import psycopg

from aqd import keeper, log, messages, migrate, store
from aqd.database import Connection
from aqd.errors import WorldError
from aqd.figures import CELLS_MAX, Cell, Figures
from aqd.hookspecs import HandlerInfo
from aqd.process import boottime
from aqd.sessions import Session
from aqd.store import figures, text

logger = log.get_logger("keeper")

# A step is several statements, each with the server's own limit: so many times that limit for all.
STEP_STATEMENTS = 2.0
# How long the last figures may take when the process is about to leave.
LAST_S = 1.0
# The sign of life is given whenever what it says has changed, and so many times within the time after which the others
# would take this node for gone; and often enough for a breaking migration, which does not know that time.
SIGNS_PER_TTL = 6
SIGNS_S = migrate.NODE_TTL_S / 3
# So long after the last job the sessions of the database have told its statistics of all that they did.
CALM_S = 15.0
# Characters of what a plugin says of itself.
TEXT_MAX = 200
ERROR_MAX = 2_000
REFUSALS = (
    *(psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError),
    psycopg.errors.ProgramLimitExceeded,
)
# Functions whose time is shown, and as what.
OPERATIONS = {
    "claim_jobs": "claim",
    "record_columns": "record",
    "record_failed": "record",
    "release": "record",
    "renew": "renew",
}

Send = Callable[[messages.FromDispatcher], None]


class Caretaker(threading.Thread):
    """The main thread calls :meth:`serve` when the types change, :meth:`pass_figures` now and then, and sets the
    flags."""

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
        self._seen_until = 0.0
        self._at_work = False  # on a duty, such as a vacuum, after which the sign of life comes
        # Told when :attr:`registered` becomes true, and at the end.
        self.changed: Callable[[], None] = lambda: None
        # Not before the first reconciliation, nor while outcomes wait for the recorder's connection: what this
        # node holds is recorded, not rescued by its own hand.
        self.may_rescue = False
        self.counted = Figures()  # filled by the threads, drained once a second
        self._unwritten = Figures()
        self._gauges: list[Cell] | None = None  # not yet passed on
        self._info = figures.NodeInfo()
        self._info_refused = False  # and said so
        self._next_figures = 0.0
        self._lived: tuple[store.NodeState, float] | None = None  # the last sign of life, and when
        self._worked_at = boottime()
        self._leave_by: float | None = None
        self._ended = False
        self._start, self._schema = start, schema
        self._keeper = keeper.Keeper(start.config, start.node_id)
        self._serving: tuple[int, list[HandlerInfo]] | None = None
        self._declared: list[HandlerInfo] = []
        self._wake = threading.Event()

    # --- for the main thread

    @property
    def registered(self) -> bool:
        """Whether others see this node. One that they do not see claims nothing: they take it for gone, and a breaking
        migration would not know of it. CLOCK_BOOTTIME: a machine that has slept was not seen meanwhile. A duty that takes
        long is no reason to stop: a migration waits for its locks, too."""
        return boottime() < self._seen_until or (self._at_work and self._seen_until > 0.0)

    def serve(self, generation: int, handlers: Iterable[HandlerInfo]) -> None:
        self._serving = (generation, list(handlers))
        self._wake.set()

    def time(self, *sessions: Session) -> None:
        """Count how long the statements of these sessions take."""
        for session in sessions:
            session.timed = self._timed

    def _timed(self, function: str, seconds: float) -> None:
        if (operation := OPERATIONS.get(function)) is not None:
            self.counted.statement(operation, seconds)

    def learn(self, facts: messages.Facts) -> None:
        """What only the master knows of the node."""
        # Texts of whoever wrote the plugin, and PostgreSQL does not take every one. No whole traceback: the
        # row is written every few seconds.
        plugins = [
            figures.NodePlugin(
                name=text.clean(each.name, TEXT_MAX) or "",
                version=text.clean(each.version, TEXT_MAX) or "",
                digest=text.clean(each.digest, TEXT_MAX) or "",
                state=each.state,
                handlers=each.handlers,
                error=text.clean(each.error, ERROR_MAX),
            )
            for each in facts.plugins
        ]
        self._info = msgspec.structs.replace(self._info, plugins=plugins)
        self._unwritten.add(Cell("restarts", (cause,), number) for cause, number in facts.restarts.items())

    def pass_figures(self, send: Send, busy: int, listening: bool) -> None:
        """Hand what was counted since the last call to the master, and have it written down."""
        if busy != self._info.busy or listening != self._info.listener_up:
            self._info = msgspec.structs.replace(self._info, busy=busy, listener_up=listening)
        cells = self.counted.drain()
        self._unwritten.add(cells)
        if busy or any(cell.metric == "attempts" for cell in cells):
            self._worked_at = boottime()
        gauges, self._gauges = self._gauges, None
        for first in range(0, len(cells), CELLS_MAX):
            send(messages.Counted(cells[first : first + CELLS_MAX]))
        for first in range(0, len(gauges or ()), CELLS_MAX):
            send(messages.Seen((gauges or [])[first : first + CELLS_MAX], first == 0))

    def finished(self) -> bool:
        """Asked by the main thread before it leaves: whether the last sign of life is given and the last figures are
        written, or have had their time."""
        if self._leave_by is None:
            self._leave_by = boottime() + LAST_S
            self.stopping = True
            self._wake.set()
        return self._ended or not self.is_alive() or boottime() >= self._leave_by

    # --- the thread

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
        try:
            self._unwritten.add(self.counted.drain())
            self._write()
        except (psycopg.Error, WorldError) as error:
            logger.info("the last figures are lost", error=log.describe(error))
        self._ended = True
        self.changed()

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
            info=_json(self._info),
        )
        signs_s = min(start.config.keeper.node_ttl_s / SIGNS_PER_TTL, SIGNS_S)
        if self._lived is None or self._lived[0] != state or boottime() >= self._lived[1] + signs_s:
            began = boottime()
            if not self._live(state):
                self.session.run(self._schema)  # says why, and that all connections are to be given up
                return 1.0  # it fits again
            before = self.registered
            self._lived, self._seen_until = (state, began), began + migrate.NODE_TTL_S
            if not before:
                self.changed()
        if serving[1] != self._declared:
            self.session.run(store.declare_handlers, serving[1])
            self._declared = serving[1]
        figures_s = start.config.keeper.figures_s
        if boottime() >= self._next_figures:
            self._next_figures = boottime() + figures_s
            self._write()
            self._gauges = self.session.run(figures.gauges)
        if not self.may_rescue:
            return 0.2
        self._keeper.idle = boottime() >= self._worked_at + CALM_S
        self._at_work = self.registered
        try:
            pause = self.session.run(self._keeper.step, boottime())
        finally:
            self._at_work = False
        return min(pause, signs_s, figures_s)

    def _live(self, state: store.NodeState) -> bool:
        """The sign of life, without decoration if need be: other nodes would fail the node's jobs as of unknown types.
        False under a schema that is not ours any more."""
        try:
            return self.session.run(store.node_seen, state)
        except REFUSALS as error:
            self.session.run(self._schema)  # it may be what has changed
            if state.info is None:
                raise
            if not self._info_refused:
                logger.error("node info refused", error=log.describe(error))
            self._info_refused = True
        return self.session.run(store.node_seen, state._replace(info=None))

    def _write(self) -> None:
        cells = self._unwritten.drain()
        try:
            self.session.run(figures.add_figures, self._start.node_id, cells)
        except BaseException:
            self._unwritten.add(cells)  # twice, if only the answer was lost: of figures that is bearable
            raise


def _json(info: figures.NodeInfo) -> str | None:
    """As JSON text; None for what is none."""
    try:
        return msgspec.json.encode(info).decode()
    except (UnicodeError, msgspec.MsgspecError):
        return None
