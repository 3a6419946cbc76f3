"""The claimer: a thread of the dispatcher that takes jobs when the main thread wants some.

It owns the node's LISTEN connection. Between claims it sleeps until a NOTIFY, the poll interval, the moment
at which the next job falls due, or the main thread's wish. A notification is a hint: it means "look", never
"this job"; with notifications off, or lost, the poll interval covers everything. That a job of this node was
cancelled is told over the same connection; without it the next renewal says so.

Order on the way to sleep: announce it (from then on enqueuers notify), look once more, then look again with
growing pauses until the transactions that were writing jobs meanwhile have ended: their rows became visible
without a notification.

Fails: a claim whose answer came later than :data:`STALE_S` is not used but given back, because the
reconciliation may have released it by then. Everything else is the session's affair.
"""

import os
import random
import select
import threading
from collections.abc import Callable

import psycopg

from aqd import log
from aqd.claims import CANCEL_CHANNEL, CHANNEL, NOTHING, ClaimBook, ClaimedJob, Sleeper, Wish
from aqd.config import Config
from aqd.database import Connection
from aqd.errors import WorldError
from aqd.process import boottime, boottime_ns
from aqd.sessions import Session
from aqd.shares import Shares

logger = log.get_logger("claimer")

# An answer older than this is void. Reconciliation waits for twice as long.
STALE_S = 5.0
# A claim that is under way at the stop is waited for this long: the database may be gone without a word.
STOP_LIMIT_S = 2.0
# Pauses between looks while transactions that may have inserted jobs are open.
_WRITER_PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1)
_NO_JOBS_S = 3600.0
# After an error that is no lost connection: disk full, a right taken away.
REFUSED_PAUSE_S = 1.0


class Claimer(threading.Thread):
    """``deliver(jobs, asked_ns)`` hands claimed jobs to the main thread; ``asked_ns`` is the boot time
    before the claim was sent, from which their lease certainly runs. ``cancelled()``: a job of this node was.

    The main thread sets :attr:`wanted` and calls :meth:`wake`.
    """

    def __init__(
        self,
        config: Config,
        node_id: str,
        deliver: Callable[[list[ClaimedJob], int], None],
        cancelled: Callable[[], None],
        schema: Callable[[Connection], None],
    ) -> None:
        super().__init__(name="claimer", daemon=True)
        self.config = config
        self.wanted = NOTHING
        self.settled = 0  # how often the main thread was told that something is recorded
        self.stopping = False
        self.stop_until = 0.0
        self._ended = threading.Event()
        self.book = ClaimBook(
            node_id,
            config.daemon.lease_s,
            queues=config.daemon.queues,
            aging_s=config.daemon.aging_s,
            shares=Shares(config.daemon.reserved),
        )
        self.sleeper = Sleeper()
        self.session = Session(config.database, "claimer", self._on_connect)
        self._schema = schema
        self._node_id = node_id
        self._deliver, self._cancelled = deliver, cancelled
        self._types: frozenset[str] = frozenset()
        self._lowered: list[tuple[str, int]] = []
        self._notified = False
        self._listening = False
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # --- for the main thread

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def serve(self, types: frozenset[str]) -> None:
        self._types = types
        self.wake()

    def lower(self, queue: str, priority: int) -> None:
        """Jobs of this lane came back on this node: look from its beginning."""
        self._lowered.append((queue, priority))

    def made_room(self) -> None:
        """Something is recorded: a queue that ran as many jobs as it may can run another one."""
        self.settled += 1
        self.book.made_room()
        if self.book.held_back:
            self.wake()

    def stop(self) -> None:
        """Claim nothing more; :attr:`quiet` once no claim is under way."""
        self.stop_until = boottime() + STOP_LIMIT_S
        self.stopping = True
        self.wake()

    @property
    def quiet(self) -> bool:
        """Nothing is being claimed, nor will be."""
        return self._ended.is_set() or (self.stopping and self.session.connection is None)

    @property
    def listener_up(self) -> bool:
        return self._listening and self.session.up

    # --- the thread

    def run(self) -> None:
        while not self.stopping:
            pause_s = 0.0
            try:
                self._step()
            except (psycopg.Error, WorldError):
                pause_s = self.session.pause_s() or REFUSED_PAUSE_S
            except Exception:
                logger.exception("claimer fails")
                pause_s = REFUSED_PAUSE_S
            if pause_s:
                self._asleep = False
                self._pause(pause_s)
        self.session.close()
        self._ended.set()

    def _pause(self, seconds: float) -> None:
        """Until the time is over, or the stop: a wish of the main thread does not make an error better."""
        until = boottime() + seconds
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while not self.stopping and (left := until - boottime()) > 0:
            if poll.poll(left * 1000):
                os.eventfd_read(self._wake_fd)

    def _step(self) -> None:
        """One claim, or one sleep."""
        self.book.set_types(self._types)
        while self._lowered:
            self.book.lower(*self._lowered.pop())
        wanted = self.wanted
        if wanted.total <= 0 or not self._types:
            if self.session.connection is None:
                self.session.run(lambda _: None)  # says whether the database is there
            self._wait(_NO_JOBS_S if self.session.connection else 1.0)
            return
        settled = self.settled
        if self._claim(wanted):
            self._asleep = False
            return
        if self.book.held_back and settled != self.settled:
            return  # recorded while we looked: there is room
        if self._asleep or not self.config.database.notify:
            self._sleep()
        else:
            # Announced only after a look that found nothing, and then looked again: see the header.
            self.session.run(self.sleeper.announce)
            self._asleep = True
            self._notified = False
            if not self._claim(wanted):
                self._wait_for_writers(wanted)

    def _claim(self, wanted: Wish) -> bool:
        """Claim and deliver; whether anything was there."""
        asked_ns = boottime_ns()

        def claim_jobs(conn: Connection) -> list[ClaimedJob]:
            # Asked once more on the connection: it may have taken a while to make it.
            return [] if self.stopping else self.book.claim(conn, wanted)

        jobs = self.session.run(claim_jobs)
        if not jobs:
            return False
        self.wanted = NOTHING  # until the main thread has seen these
        self._deliver(jobs, asked_ns)
        return True

    def _wait_for_writers(self, wanted: Wish) -> None:
        writers = self.session.run(self.sleeper.pending_writers)
        looks = 0
        while writers and not (
            self.stopping or self._notified or self._lowered or self._types != self.book.types
        ):
            self._wait(_WRITER_PAUSES_S[min(looks, len(_WRITER_PAUSES_S) - 1)])
            looks += 1
            if self._claim(wanted):
                self._asleep = False
                return
            writers &= self.session.run(self.sleeper.pending_writers)

    def _sleep(self) -> None:
        poll_s = self.config.daemon.poll_ms / 1000 * random.uniform(0.9, 1.1)
        due_s = self.session.run(self.book.next_due_s)
        # What the last look could not see is looked for as soon as that is allowed.
        until = [poll_s, *(max(s, 0.001) for s in (due_s, self.book.blind_s()) if s is not None)]
        if not self._notified:
            self._wait(min(until))
        if self._notified:
            self._notified = False
            self._asleep = False
            self.session.run(self.sleeper.woken)

    def _wait(self, seconds: float) -> None:
        """Until the main thread's wish, a notification, or the time is over."""
        connection = self.session.connection
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if connection is not None:
            poll.register(connection.pgconn.socket, select.POLLIN)
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif connection is not None:
                self.session.run(self._read_notifications)

    def _read_notifications(self, connection: Connection) -> None:
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._heard(notify.relname.decode(), notify.extra.decode())

    def _on_connect(self, connection: Connection) -> None:
        """LISTEN first, then look: what came in between is found by the look."""
        self._listening = self._asleep = False
        self._schema(connection)
        if self.config.database.notify:
            connection.add_notify_handler(self._on_notify)
            connection.execute(f"listen {CHANNEL}")
            connection.execute(f"listen {CANCEL_CHANNEL}")
            self._listening = True

    def _on_notify(self, notify: psycopg.Notify) -> None:
        """One that arrived while a statement ran."""
        self._heard(notify.channel, notify.payload)

    def _heard(self, channel: str, payload: str) -> None:
        if channel == CHANNEL:
            self._notified = True
        elif payload == self._node_id:
            self._cancelled()
