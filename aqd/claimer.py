"""The claimer: a thread of the dispatcher that takes jobs when the main thread wants some.

It owns the node's LISTEN connection, which goes to ``database.listen_url`` where a pooler is in front of the database; where
it goes through one, nothing is heard and polling finds the jobs. Between claims it sleeps until a NOTIFY, the poll interval, the moment
at which the next job falls due, or the main thread's wish. A notification is a hint: it means "look", never
"this job"; with notifications off, or lost, the poll interval covers everything. That a job of this node was
cancelled is told over the same connection; without it the next renewal says so.

Order on the way to sleep: announce it (from then on enqueuers notify), look once more, then look again with
growing pauses until the transactions that were writing jobs meanwhile have ended: their rows became visible
without a notification.

While jobs come one by one it stays announced: each notification means one claim, and nothing else is said to the
database. A backlog makes it strike itself off, so that enqueuers do not notify any more: transactions that do
commit one after the other. That strikes off all nodes, which is told to them, and those that still sleep announce it
anew. Whoever is awake for a while and hears notifications all the same strikes too, at most every
:data:`STRIKE_S`: they are for nobody, or for one who will announce himself again. When more than :data:`BRISK` jobs
come in a second it is not announced at all: naps of :data:`NAP_S` are shorter than what notifications would then cost
everybody. (16 writers beside a busy daemon: 0.15 of a bare INSERT's rate with them, 0.78 without.)

Fails: a claim whose answer came later than :data:`STALE_S` is not used but given back, because the
reconciliation may have released it by then. Everything else is the session's affair.
"""

import contextlib
import math
import os
import random
import select
import threading
from collections.abc import Callable

import psycopg

from aqd import database, log
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
# Beyond so many jobs a second notifications cost enqueuers more than they save us. (One application that waits for
# each job comes to less; 16 that only submit come to 300, because each notification waits for the one before.)
BRISK = 150
NAP_S = 0.005
# After a notification whose job was found: another one may have been the first of its lane.
SECOND_LOOK_S = 0.1
STRIKE_S = 1.0
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
        self.delivered = self.taken_in = 0  # jobs, in all; of them the main thread has looked at so many
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
        self.session = Session(database.for_listening(config.database), "claimer", self._on_connect)
        self._schema = schema
        self._node_id = node_id
        self._deliver, self._cancelled = deliver, cancelled
        self._types: frozenset[str] = frozenset()
        self._lowered: list[tuple[str, int]] = []
        self._notified = False
        self._listening = self._said_deaf = False
        self._asleep = False  # announced
        self._struck = False  # another node has struck off all that were
        self._called = False  # a notification has come since the last step
        self._strike_from = 0.0
        self._dry = False  # what was due is claimed, but for what has come since
        self._asked: frozenset[str] = frozenset()  # the pools for which that is known
        self._look_at = 0.0
        self._second_look_at = math.inf
        self._settled_before = 0
        self._brisk, self._arrivals, self._counted_from = False, 0, 0.0
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
    def coming(self) -> int:
        """Jobs that are delivered, and that the main thread has not looked at yet."""
        return self.delivered - self.taken_in

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
        if self.sleeper.announced and self.session.connection is not None:
            with contextlib.suppress(Exception):  # not for longer than a claim under way, see stop()
                self._strike()
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
        """One look for jobs, or one sleep."""
        types = self._types
        if types != self.book.types:
            self.book.set_types(types)
            self._dry = False
        while self._lowered:
            self.book.lower(*self._lowered.pop())
            self._dry = False
        if self.session.doubt is not None:
            self.session.run(lambda _: None)  # gives the connection up, and says why
        self._arrived(0)
        called, self._called = self._called, False
        if called and self._awake_for_a_while() and boottime() >= self._strike_from:
            self._strike()
        wanted = self.wanted
        if wanted.total <= 0 or not types:
            if self.session.connection is None:
                self.session.run(lambda _: None)  # says whether the database is there
            self._wait(_NO_JOBS_S if self.session.connection else 1.0)
            return
        if self._asleep and self._dry and not self._news() and not self._due():
            self._wait(min(self._look_at, self._second_look_at) - boottime())
            return
        if self._struck:
            self._asleep = self._struck = False
        if self._asleep:
            self._look(wanted)
        else:
            self._work(wanted)

    def _awake_for_a_while(self) -> bool:
        """Whether a notification tells nothing: there is a backlog, or we look every few milliseconds."""
        return self._brisk or not (self._asleep or self._dry)

    def _news(self) -> bool:
        """Whether something may be there now that the last claim did not see, or did not ask for."""
        return bool(
            self._notified
            or self._struck
            or self._lowered
            or self._types != self.book.types
            or (self.book.held_back and self.settled != self._settled_before)
            or not self.wanted.pools <= self._asked
        )

    def _due(self) -> bool:
        return boottime() >= min(self._look_at, self._second_look_at)

    def _work(self, wanted: Wish) -> None:
        """While there is a backlog: claim after claim; the first that finds nothing leads to sleep."""
        if self._claim(wanted):
            return
        if self.book.held_back and self.settled != self._settled_before:
            return  # recorded while we looked: there is room
        if self._brisk:
            self._wait(NAP_S)
            return
        if self._listening:
            # Announced only after a look that found nothing, and then looked again: see the header.
            self.session.run(self.sleeper.announce)
            if not self._nothing_written(wanted):
                return  # Announced and awake: who hears a notification in vain will strike.
        self._asleep = True
        self._plan_look()

    def _look(self, wanted: Wish) -> None:
        """Announced: by a notification, or because it is time."""
        quiet = self._dry and not self._news()
        second, fresh = boottime() >= self._second_look_at, False
        if second:  # also where notifications never cease: the claims that follow them see known lanes only
            self._second_look_at = math.inf
            fresh = self.session.run(self.book.new_lanes)
        if quiet:
            if second and not fresh:
                self._plan_look()
                return
            if self.session.run(self.book.nothing_queued):
                self._look_at, self._second_look_at = boottime() + self._poll_s(), math.inf
                return
        found = self._claim(wanted)
        if not found:
            self._plan_look()
        elif self._dry:
            self._second_look_at = min(self._second_look_at, boottime() + SECOND_LOOK_S)
        elif self.sleeper.announced:
            self._strike()
        else:
            self._asleep = False

    def _strike(self) -> None:
        """After the claim, not before: it waits for a commit."""
        self._asleep = False
        self._strike_from = boottime() + STRIKE_S
        if self._listening:
            self.session.run(self.sleeper.woken, self._node_id)

    def _arrived(self, number: int) -> None:
        """Jobs have come, as notifications tell or claims; how many there were in the last second or so decides."""
        now = boottime()
        if now >= self._counted_from + 1.0:
            self._brisk = self._arrivals > BRISK
            self._counted_from, self._arrivals = now, 0
        self._arrivals += number
        self._brisk = self._brisk or self._arrivals > BRISK

    def _claim(self, wanted: Wish) -> bool:
        """Claim and deliver; whether anything was there. :attr:`_dry`: nothing more is, but for what comes now."""
        asked_ns = 0
        wanted = wanted.one_claim()
        self._notified = False
        self._settled_before = self.settled
        self._asked = wanted.pools

        def claim_jobs(conn: Connection) -> list[ClaimedJob]:
            # On the connection: it may have taken a while to make it.
            nonlocal asked_ns
            asked_ns = boottime_ns()
            return [] if self.stopping else self.book.claim(conn, wanted)

        jobs = self.session.run(claim_jobs)
        # Of pools (reserved slots) some may have more.
        self._dry = not jobs or (len(jobs) < wanted.total and not self.config.daemon.reserved)
        if not jobs:
            return False
        if not self._asleep:  # else notifications were counted
            self._arrived(len(jobs))
        self.delivered += len(jobs)  # first: what the main thread asks for from now on is without them
        # Until the main thread has seen these. It may have changed its mind meanwhile, but knew nothing of them. To wait for it
        # between the claims of a large wish left workers idle (no-op jobs, with the recorder's: 34,900 → 39,200 jobs/s).
        self.wanted = self.wanted.less(len(jobs)) if len(jobs) >= wanted.total else NOTHING
        self._deliver(jobs, asked_ns)
        return True

    def _nothing_written(self, wanted: Wish) -> bool:
        """Whether transactions that notify nobody have written nothing; False: something has come up. Who writes is
        asked before each claim: it sees what those have written that are gone by then."""
        writers = self.session.run(self.sleeper.pending_writers)
        looks = 0
        while not self._claim(wanted):
            if not writers:
                return True
            if self.stopping or self._news():
                return False
            self._wait(_WRITER_PAUSES_S[min(looks, len(_WRITER_PAUSES_S) - 1)])
            looks += 1
            writers &= self.session.run(self.sleeper.pending_writers)
            if wanted.exceeds(self.wanted):
                return False  # the main thread wants less by now; somebody's transaction may be long
        return False

    def _poll_s(self) -> float:
        return self.config.daemon.poll_ms / 1000 * random.uniform(0.9, 1.1)

    def _plan_look(self) -> None:
        """After a look that found nothing."""
        due_s = self.session.run(self.book.next_due_s)
        # What the last look could not see is looked for as soon as that is allowed.
        until = [self._poll_s(), *(max(s, 0.001) for s in (due_s, self.book.blind_s()) if s is not None)]
        self._look_at, self._second_look_at = boottime() + min(until), math.inf

    def _wait(self, seconds: float) -> None:
        """Until the main thread's wish, a notification, or the time is over."""
        connection = self.session.connection
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if connection is not None:
            poll.register(connection.pgconn.socket, select.POLLIN)
        for fd, _ in poll.poll(max(seconds, 0) * 1000):
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
        self._listening = self._asleep = self._struck = False
        self._schema(connection)
        database.check_same_database(self.config.database, connection)
        if self.config.database.notify and database.is_pooled(connection):
            self._say_deaf()
        elif self.config.database.notify:
            connection.add_notify_handler(self._on_notify)
            connection.execute(f"listen {CHANNEL}")
            connection.execute(f"listen {CANCEL_CHANNEL}")
            self._listening = True

    def _say_deaf(self) -> None:
        if not self._said_deaf:
            self._said_deaf = True
            logger.warning(
                "jobs are found by polling only",
                reason="a pooler in front of the database delivers no notifications",
                advice="name the server itself in database.listen_url; if the pooler keeps sessions apart, set "
                'database.pooler = "session"',
                poll_ms=self.config.daemon.poll_ms,
            )

    def _on_notify(self, notify: psycopg.Notify) -> None:
        """One that arrived while a statement ran."""
        self._heard(notify.channel, notify.payload)

    def _heard(self, channel: str, payload: str) -> None:
        if channel == CHANNEL:
            if not payload:
                self._notified = self._called = True
                self._arrived(1)
            elif payload != self._node_id:
                self._struck = True
                self._strike_from = boottime() + STRIKE_S  # what we still hear was sent before
                self.sleeper.struck()
        elif payload == self._node_id:
            self._cancelled()
