"""The dispatcher: the node's only queue client, between PostgreSQL and the workers.

A process of its own (``python -m aqd.dispatcher MASTER_PID``, channel to the master at descriptor 3). One
thread per duty, each with its own connection: claimer, recorder, keeper. The main thread, which is this module,
owns the channels and timers and never waits for the database. It holds no plugin code.

What it holds is written down elsewhere before it acts: a claimed job in its row, a job given to a worker
in the worker's page, an outcome in the worker's channel until it is recorded. So it may die at any moment: its
successor is handed the same channels and pages by the master, takes back what was not begun, and finds every
outcome that was not recorded; the workers notice nothing.

Promises: every lease it uses is certain (it counts from before the statement was sent); a lost lease ends the
job; what cannot be run soon is given back with its attempt.

Ends: 0 when told to hand over; by SIGTERM as its parent-death signal it kills the workers' groups first (under
systemd the unit's cgroup does that).
"""

import contextlib
import gc
import os
import queue
import select
import signal
import socket
import sys
from typing import NoReturn

from setproctitle import setproctitle

from aqd import __version__, channel, log, messages, outcomes, output, process, strays
from aqd.caretaker import Caretaker
from aqd.channel import ChannelClosed
from aqd.claimer import STALE_S, Claimer
from aqd.claims import ClaimedJob
from aqd.errors import BugError, Exit
from aqd.hookspecs import HandlerInfo
from aqd.leases import Leases
from aqd.links import Held, Link, Outcome
from aqd.pace import AWAKE_S, REST_S, TELL_S
from aqd.process import boottime, boottime_ns, signal_group
from aqd.recorder import Failed, NodeGone, Reconciled, Reconciliation, Recorder, Renewed, Settled, Told, Work
from aqd.schema import Schema
from aqd.stock import Stock

logger = log.get_logger("dispatcher")

TICK_S = 0.05
BUSY_TICK_S = 0.005  # what need not be looked at in each of a thousand turns a second
IDLE_TICK_S = 0.2
REPORT_S, REST_REPORT_S = 1.0, 4.0
RECONCILE_S = 5.0
# A cancellation may be announced while its job is on the way from the claim to us: looked for once more then.
CANCEL_LOOK_S = 1.0
# Objects that are made between two looks for cycles. With Python's 700 a seventh of this process's time went into it
# (no-op jobs, 3 alternations: 21.7 → 19.2 µs a job, 0.33 → 0.28 of what workers and server took).
GARBAGE = 50_000
SWITCH_S = 0.0005  # how long a thread that has an answer to read waits for the others; Python's 5 ms made claims slow
HAND_OVER_S = 3.0  # how long an outgoing dispatcher waits for its claimer and recorder


class Dispatcher:
    """The main thread's state. :meth:`run` returns the exit code."""

    def __init__(self, ends: socket.socket, start: messages.Start) -> None:
        config = start.config
        self.config = config
        self.node_id = start.node_id
        self.master = channel.Peer(ends, messages.encode)
        self.links: dict[int, Link] = {}
        self.stock = Stock(config, self._release, self._recall, self.master.send)
        self.generation = 0
        self.reconciled = self.draining = self.drained = self.handing_over = False
        self.hand_over_until = 0.0
        self.counters: dict[str, int] = {}
        self.pending = 0  # entries put to the recorder and not settled
        self.inbox: queue.SimpleQueue[tuple[list[ClaimedJob], int] | Told | None] = queue.SimpleQueue()
        self._inbox_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.schema = Schema(config.database)
        self.claimer = Claimer(
            config,
            start.node_id,
            lambda jobs, ns: self._post((jobs, ns)),
            lambda: self._post(None),
            self.schema,
        )
        self.recorder = Recorder(config, start.node_id, self._post, self.schema)
        self.leases = Leases(
            config, self.links, self.stock, self.recorder, self.master, self._recall, self._release
        )
        self.keeper = Caretaker(start, self.schema)
        self.keeper.time(self.claimer.session, self.recorder.session)
        self.recorder.figures = self.keeper.counted
        self.epoll = select.epoll()
        self._by_fd: dict[int, Link] = {}
        self._next_tick = self._next_renew = self._next_report = self._next_reconcile = 0.0
        self._cancel_look = self._next_tell = 0.0
        self._rest_from = boottime() + AWAKE_S
        self._reported_up = (False, False, False, False)
        self._look_around = False
        self.claimer.session.changed = self.recorder.session.changed = self.keeper.changed = self._poke
        self.schema.sessions = self.claimer.session, self.recorder.session, self.keeper.session
        self.schema.wake = self.claimer.wake

    def _post(self, message: "tuple[list[ClaimedJob], int] | Told | None") -> None:
        """From the other threads; None: a job of ours was cancelled."""
        self.inbox.put(message)
        os.eventfd_write(self._inbox_fd, 1)

    def _poke(self) -> None:
        """From the other threads: a connection has come or gone."""
        self._look_around = True
        os.eventfd_write(self._inbox_fd, 1)

    # --- the loop

    def run(self) -> Exit:
        self.epoll.register(self.master, select.EPOLLIN)
        self.epoll.register(self._inbox_fd, select.EPOLLIN)
        self.master.send(messages.Hello(__version__, os.getpid()))
        for thread in (self.claimer, self.recorder, self.keeper):
            thread.start()
        try:
            while True:
                self._turn()
                if self.handing_over and self._may_leave():
                    return Exit.OK
        except ChannelClosed:
            # Without a master nobody fences the workers, and their leases must not be renewed.
            self.kill_workers()
            return Exit.ORPHANED

    def _turn(self) -> None:
        for fd, _ in self._events():
            if fd == self.master.fileno():
                self._read_master()
            elif fd == self._inbox_fd:
                self._read_inbox()
            elif (link := self._by_fd.get(fd)) is not None:
                self._read_link(link)
        for link in self.links.values():
            if link.waits:
                self._outcomes(link, link.read_journal())
        now = boottime()
        if now >= self._next_tick or self._look_around or self.draining or self.handing_over:
            self._next_tick, self._look_around = now + BUSY_TICK_S, False
            self._tick(now)
        if not (self.draining or self.handing_over):
            links = self._serving()
            if self.stock:
                self._tell_working(now)
                self.stock.give(links)
            if self.reconciled:
                self._claim(links if self.keeper.registered else [])
        self.master.flush()

    def _tick_s(self) -> float:
        """How long to wait at most."""
        if any(link.unfinished for link in self.links.values()):
            self._rest_from = boottime() + AWAKE_S
            return TICK_S
        calm = not (self.stock or self.pending or self.draining or self.handing_over or self.master.waiting)
        return REST_S if calm and boottime() >= self._rest_from else IDLE_TICK_S

    def _tell_working(self, now: float) -> None:
        """The master looks rarely at pages while nothing runs."""
        if now >= self._next_tell:
            self._next_tell = now + TELL_S
            self._next_report = min(self._next_report, now + REPORT_S)
            self.master.send(messages.Working())

    def _events(self) -> list[tuple[int, int]]:
        """Sleep until something happens. While we are awake no worker needs to ring."""
        pause_s = min(self._tick_s(), self.stock.look_in_s())
        for link in self.links.values():
            link.page.listening = True
            if link.has_news:  # those that came while we were awake, of which nobody has rung
                pause_s = min(pause_s, 0.0 if link.page.idle else BUSY_TICK_S)
        events = self.epoll.poll(pause_s)
        for link in self.links.values():
            link.page.listening = False
        return events

    def _tick(self, now: float) -> None:
        for session in (self.claimer.session, self.recorder.session, self.keeper.session):
            session.check(now)
        for link in self.links.values():
            if link.has_news:  # not told of yet, or by a bell that had no room
                self._outcomes(link, link.read_journal())
            # Again and again: a fence misses a worker that has gone on to another entry meanwhile.
            if link.journal.broken and link.exited is None:
                self.master.send(messages.Fence(link.incarnation, link.page.current()))
        if self.claimer.stopping and not self.claimer.quiet and now >= self.claimer.stop_until:
            self.claimer.session.cut()  # what it may have claimed ends with its lease
        if now >= self._next_renew:
            self._next_renew = now + self.config.daemon.renew_s
            self.leases.renew()
        if self._cancel_look and now >= self._cancel_look:
            self._cancel_look = 0.0
            self.leases.renew()
        if now >= self._next_reconcile and self.reconciled and not self.handing_over:
            self._next_reconcile = now + RECONCILE_S
            if self.recorder.session.up and not self.recorder.reconciliation_waits:
                self.recorder.reconciliation_waits = True
                self.recorder.put(Reconciliation(self.leases.pairs(), boottime_ns()))
        sessions_up = self.claimer.session.up, self.recorder.session.up
        up = (*sessions_up, self.claimer.listener_up, self.keeper.registered)
        if now >= self._next_report or up != self._reported_up:
            calm = now >= self._rest_from and not (self.draining or self.handing_over or self.pending)
            self._next_report, self._reported_up = now + (REST_REPORT_S if calm else REPORT_S), up
            self._report()
        # What expired during an outage and waits in our hands is recorded, not rescued by our own keeper.
        if not self.recorder.session.up or not self.pending:
            self.keeper.may_rescue = self.recorder.session.up and self.reconciled
        self._free_stuck(boottime_ns())
        self._drop_consumed()
        self._check_threads()
        self.stock.release_overdue(now)
        if self.draining and not self.drained and self._nothing_under_way():
            self._maybe_drained()

    def _check_threads(self) -> None:
        """A duty whose thread has ended is done by nobody: better a new dispatcher."""
        for thread in (self.claimer, self.recorder, self.keeper):
            if not thread.is_alive() and not getattr(thread, "stopping", False):
                raise BugError(f"the {thread.name}'s thread has ended")

    def _drop_consumed(self) -> None:
        """A predecessor may have recorded and consumed an outcome just before its worker said "finished"."""
        for link in [link for link in self.links.values() if link.adopted and link.held]:
            finished = link.page.finished
            self._read_link(link)
            if numbers := link.consumed_before(finished):
                self._settled([(link.incarnation, number) for number in numbers], {}, own=False)

    def _maybe_drained(self) -> None:
        # The keeper ends first: a sign of life that is on its way would bring the node's row back.
        if not any(link.held for link in self.links.values()) and self.keeper.finished():
            self.drained = True
            self._put(NodeGone())
            self.master.send(messages.Drained())

    def _report(self) -> None:
        # At the end the claimer has closed its connection: that says nothing of the database.
        leaving = self.draining or self.handing_over
        sessions = (self.recorder.session,) if leaving else (self.claimer.session, self.recorder.session)
        down = [s.error or "not connected yet" for s in sessions if not s.up]
        if self.generation and not self.keeper.registered and not leaving:
            down.append(self.keeper.session.error or "the node is not registered yet")
        if self.schema.unfit:
            down.insert(0, self.schema.unfit)
        troubles = [s.error for s in (*sessions, self.keeper.session) if s.error]
        types = {}
        for link in self.links.values():
            held = link.held.get(link.page.current())
            if held is not None and held.job is not None:
                types[link.incarnation] = held.job.type
        held_by = {link.incarnation: len(link.held) for link in self.links.values() if link.held}
        listening = self.claimer.listener_up
        self.master.send(
            messages.Report(
                not down,
                (down + troubles or [""])[0],
                listening,
                held_by,
                types,
                self.counters,
                self.recorder.session.silent_s(boottime()),
                self.keeper.registered,
                self.schema.unfit,
            )
        )
        self.keeper.pass_figures(self.master.send, len(types), listening)

    # --- from the master

    def _read_master(self) -> None:
        for data, fds in self.master.received():
            message = messages.decode_to_dispatcher(data)
            if isinstance(message, messages.Attach):
                self._attach(message, *fds)
                continue
            for fd in fds:
                os.close(fd)
            self._on_master(message)

    def _on_master(self, message: messages.ToDispatcher) -> None:
        match message:
            case messages.Serve(generation, handlers):
                self._serve(generation, handlers)
            case messages.AttachedAll():
                self.recorder.put(Reconciliation(self.leases.pairs(), boottime_ns(), first=True))
            case messages.Exited(incarnation):
                if link := self.links.get(incarnation):
                    self._settle(link, message)
            case messages.Recalled(incarnation, first, last):
                if link := self.links.get(incarnation):
                    self._recalled(link, first, last)
            case messages.Retire(incarnation):
                if link := self.links.get(incarnation):
                    link.retiring = True
                    self._recall(link)
                    self._maybe_retired(link)
            case messages.Facts():
                self.keeper.learn(message)
            case messages.Drain():
                self._next_report = 0.0
                self.draining = self.keeper.draining = True
                self.claimer.stop()
                self.stock.release_all("drain")
                for link in self.links.values():
                    self._recall(link)
            case messages.HandOver():
                self.handing_over = True
                self.hand_over_until = boottime() + HAND_OVER_S
                self.claimer.stop()
                self.stock.release_all("hand over")

    def _may_leave(self) -> bool:
        """Everything of ours is recorded, or it must wait for the successor."""
        if boottime() >= self.hand_over_until or not self.recorder.session.up:
            return True
        return self._nothing_under_way() and self.keeper.finished()

    def _nothing_under_way(self) -> bool:
        """No claim, and nothing that waits to be given or recorded."""
        return self.claimer.quiet and not self.pending and not self.stock and self.inbox.empty()

    def _serve(self, generation: int, handlers: list[HandlerInfo]) -> None:
        self.generation = generation
        known = {handler.type: handler for handler in handlers}
        self.stock.serve(known)
        self.recorder.handlers = known
        self.claimer.serve(frozenset(known))
        self.keeper.serve(generation, handlers)
        for link in self.links.values():
            if link.generation != generation:
                self._recall(link)  # what is not begun runs on the new generation

    # --- workers come and go

    def _attach(self, message: messages.Attach, channel_fd: int, page_fd: int, output_fd: int) -> None:
        link = Link.open(message, channel_fd, page_fd, output_fd)
        self.links[link.incarnation] = link
        self._by_fd[link.channel.fileno()] = link
        # Edge-triggered: outcomes stay in the socket until they are recorded.
        self.epoll.register(link.channel, select.EPOLLIN | select.EPOLLET)
        if not message.fresh:
            unstarted = link.adopt()
            self._read_link(link)
            if unstarted:
                self._recall(link)

    def _detach(self, link: Link) -> None:
        """Its descriptor is duplicated in the master: a closed one would go on reporting."""
        del self.links[link.incarnation]
        if self._by_fd.pop(link.channel.fileno(), None) is not None:
            self.epoll.unregister(link.channel)
        link.close()

    def _read_link(self, link: Link) -> None:
        if found := link.read_channel():
            self._outcomes(link, found)
        if link.has_news:
            self._outcomes(link, link.read_journal())
        # The end of a worker is announced by the master, with the reason.
        if link.closed and self._by_fd.pop(link.channel.fileno(), None) is not None:
            self.epoll.unregister(link.channel)

    def _outcomes(self, link: Link, found: list[Outcome | None]) -> None:
        works: list[Work] = []
        times: list[tuple[ClaimedJob, int]] = []
        held_by, from_message = link.held, outcomes.from_message
        for outcome in found:
            if outcome is None:
                # The job it is on has written into channel or journal, or its result is unreadable.
                logger.error("unreadable message, ending the worker", slot=link.slot)
                self.master.send(messages.Fence(link.incarnation, link.page.current()))
                continue
            if (held := held_by.get(outcome.number)) is None:
                held = link.adopt_entry(outcome.number, link.page.lease_until_ns)
                link.unfinished.pop(outcome.number, None)
            if held.job is not None:
                times.append((held.job, outcome.wall_ns))
            works.append(from_message(link, held, outcome))
        self.stock.learn(times)
        self._put(*works)

    def _put(self, *works: Work) -> None:
        if works:
            self.pending += len(works)
            self.recorder.put(*works)

    def _settle(self, link: Link, exited: messages.Exited) -> None:
        """A worker is dead: what it sent is recorded, what it was on has crashed, the rest is ours again."""
        self._read_link(link)
        link.exited, link.recalling = exited, False
        page, now_ns = link.page, boottime_ns()
        current = page.current()
        if current in link.held and not link.unrecorded(current):
            self._ended_with_worker(link, current, exited, now_ns)
        elif current >= 0:
            link.unfinished.pop(current, None)
        self._give_back(link.take_back(*page.unstarted()))
        # An outcome that was "sent" and is not here went elsewhere: the job had put something in the channel's place.
        lost = [number for number in link.held if number < page.finished and not link.unrecorded(number)]
        for number in lost if not link.adopted else ():
            self._ended_with_worker(link, number, exited, now_ns)
        link.settling = True
        self._maybe_settled(link)

    def _ended_with_worker(self, link: Link, number: int, exited: messages.Exited, now_ns: int) -> None:
        """The attempt that ended with its worker."""
        held = link.held[number]
        link.load_ns -= link.unfinished.pop(number, 0)
        printed = output.text(output.tail(link.output_fd, link.page.output_at))
        work = outcomes.from_exit(link, held, number, exited, printed, now_ns)
        if isinstance(work, Failed) and work.kind == "lost":
            logger.warning("lease lost, worker was killed", **held.named(link.slot))
        self._put(work)

    def _maybe_settled(self, link: Link) -> None:
        if link.settling and not link.held and not link.journaled and all(n.recorded for n in link.notes):
            self.master.send(messages.Settled(link.incarnation))
            self._detach(link)

    def _maybe_retired(self, link: Link) -> None:
        if link.retiring and not link.held and not link.recalling and link.exited is None:
            self.master.send(messages.Retired(link.incarnation))
            link.retiring = False
            link.generation = -1  # nothing more for it, whatever generation serves

    # --- recall and release

    def _recall(self, link: Link) -> None:
        if not link.recalling and link.exited is None and link.unstarted():
            link.recalling = True
            self.master.send(messages.Recall(link.incarnation))

    def _recalled(self, link: Link, first: int, last: int) -> None:
        link.recalling = False
        self._give_back(link.take_back(first, last))
        for number, held in link.held.items():
            if held.lost:  # begun before the recall
                self.master.send(messages.Fence(link.incarnation, number))
        self._maybe_retired(link)

    def _give_back(self, taken: list[Held]) -> None:
        """Run them elsewhere on this node, or release them."""
        for held in reversed(taken):
            if held.lost:
                self._count("lost", 1)
            elif held.cancelled:
                self._release(held, "cancelled")
            elif (
                self.draining
                or self.handing_over
                or held.job is None
                or held.job.type not in self.stock.handlers
            ):
                self._release(held, "not begun")
            else:
                self.stock.add(held, first=True)

    def _release(self, held: Held, reason: str) -> None:
        if held.job is not None:
            self.claimer.lower(held.job.queue, held.job.priority)
        self._put(outcomes.unbegun(held, reason, boottime_ns()))

    def _free_stuck(self, now_ns: int) -> None:
        """Jobs behind one that runs longer than expected are taken back."""
        for link in self.links.values():
            if len(link.unfinished) > 1 and link.exited is None and link.stuck(now_ns):
                self._recall(link)

    # --- from the threads

    def _read_inbox(self) -> None:
        os.eventfd_read(self._inbox_fd)
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case Settled(keys, counts):
                    self._settled(keys, counts)
                case Renewed():
                    self.leases.renewed(message)
                case Reconciled():
                    self.reconciled = True
                case None:
                    self.leases.renew()
                    self._cancel_look = boottime() + CANCEL_LOOK_S
                case (jobs, asked_ns):
                    self._claimed(jobs, asked_ns)

    def _settled(self, keys: list[tuple[int, int]], counts: dict[str, int], *, own: bool = True) -> None:
        if own:  # recorded by our recorder
            self.claimer.made_room()
            self.pending -= len(keys)
            self.keeper.may_rescue = self.reconciled
        for name, number in counts.items():
            self._count(name, number)
        numbers: dict[int, list[int]] = {}
        for incarnation, number in keys:
            numbers.setdefault(incarnation, []).append(number)
        for incarnation, recorded in numbers.items():
            if (link := self.links.get(incarnation)) is not None:
                link.recorded(recorded)
                self._maybe_settled(link)
                self._maybe_retired(link)

    def _count(self, name: str, number: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + number

    # --- giving and claiming

    def _claimed(self, jobs: list[ClaimedJob], asked_ns: int) -> None:
        certain_ns = asked_ns + int(self.config.daemon.lease_s * 1e9)
        self.claimer.taken_in += len(jobs)
        late = boottime_ns() - asked_ns > STALE_S * 1e9
        refused = late or self.draining or self.handing_over
        for job, held in zip(jobs, self.stock.claimed(jobs, certain_ns), strict=True):
            if refused or job.type not in self.stock.handlers:
                self._release(held, "the claim's answer came too late" if late else "not begun")
            elif held.extra_bytes and (work := outcomes.unsendable(held, boottime_ns())) is not None:
                self._put(work)
            else:
                self.stock.add(held)

    def _serving(self) -> list[Link]:
        return [
            link
            for link in self.links.values()
            if link.generation == self.generation
            and not link.retiring
            and link.exited is None
            and not link.journal.broken
            and link.page.turns  # it is in its loop: hooks may run for long before
        ]

    def _claim(self, links: list[Link]) -> None:
        wanted = self.stock.demand(links).less(self.claimer.coming)
        if wanted != (before := self.claimer.wanted):
            self.claimer.wanted = wanted
            if wanted.exceeds(before):
                self.claimer.wake()

    # --- the end

    def kill_workers(self) -> None:
        for link in self.links.values():
            if link.page.pid and link.exited is None:
                signal_group(link.page.pid, signal.SIGKILL)
        strays.kill_all(self.node_id)


def main() -> NoReturn:
    """Entry point of the process."""
    held: list[Dispatcher] = []

    def on_term(_number: int, _frame: object) -> None:
        # The parent-death signal, or a TERM for the whole group: only the first ends us.
        if os.getppid() != master:
            for dispatcher in held:
                dispatcher.kill_workers()
            os._exit(Exit.ORPHANED)

    master = int(sys.argv[1])
    signal.signal(signal.SIGTERM, on_term)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    process.unblock_signals()
    process.die_with_parent(master, signal.SIGTERM)
    setproctitle("aqd: dispatcher")
    code = Exit.ERROR
    try:
        ends = channel.from_fd(process.FIRST_PASSED_FD)
        data, _ = channel.receive(ends)
        start = messages.decode_to_dispatcher(data)
        assert isinstance(start, messages.Start)
        log.configure(start.config.log.level, start.config.log.format, process="dispatcher")
        gc.freeze()  # what is loaded stays, and jobs are in no cycles
        gc.set_threshold(GARBAGE)
        sys.setswitchinterval(SWITCH_S)
        held.append(Dispatcher(ends, start))
        code = held[0].run()
    except ChannelClosed:
        code = Exit.ORPHANED
    except BaseException:
        with contextlib.suppress(BaseException):
            logger.exception("dispatcher fails")
    finally:
        log.settle()
        os._exit(code)


if __name__ == "__main__":
    main()
