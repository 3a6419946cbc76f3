"""The node's worker processes as the master holds them: spawn, attach, limit, recall, settle.

Run by the master only. What should be there is decided by :mod:`aqd.slots`, when a job must end by
:mod:`aqd.limits`; this module carries it out. For every worker incarnation it keeps the page and the
dispatcher's end of the channel, from the spawn until the dispatcher says that the worker is *settled*, so
that a dispatcher that dies is replaced without the workers noticing, and a job that was running when worker
and dispatcher died together is still attributed.

Promises: every exit status of a worker is matched or counted; nothing here waits longer than the tenth of a
second in which a stopped process must stop; a kill meets the entry it was meant for or nobody.
"""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass

from aqd import channel, limits, messages, process, slots
from aqd.log import get_logger
from aqd.page import Page, StopReason
from aqd.process import STOP_SIGNAL, ExitStatus, boottime, boottime_ns, signal_group, while_stopped

log = get_logger("master")

# Exit statuses of pids nobody has named yet: a worker can die before its birth is reported (about 20 in
# 490 spawns under fire). Orphans that were adopted pass through here too, hence the bound, in seconds.
_UNMATCHED_S = 10.0
# An idle worker moves its counter every few seconds; one that has not for this long is stopped or stuck.
IDLE_LIMIT_S = 20.0


@dataclass(slots=True)
class Seat:
    """What the master keeps of one worker incarnation."""

    slot: int
    incarnation: int
    generation: int
    page: Page
    page_fd: int
    output_fd: int
    channel: socket.socket
    pid: int | None = None
    attached: bool = False
    stop: limits.Stop | None = None
    killed: tuple[StopReason, int] | None = None
    exited: messages.Exited | None = None
    progress: tuple[int, float] = (0, 0.0)

    def close(self) -> None:
        self.page.close()
        os.close(self.page_fd)
        os.close(self.output_fd)
        self.channel.close()


class Crew:
    """All seats, living and unsettled. ``loader`` and ``dispatcher`` are set by the master as they come
    and go; None while there is none."""

    def __init__(self, plan: slots.Slots) -> None:
        self.plan = plan
        self.loader: channel.Peer | None = None
        self.dispatcher: channel.Peer | None = None
        self.seats: dict[int, Seat] = {}
        self.gave_up = False
        self.start_limit_s = IDLE_LIMIT_S  # until a worker is in its loop: late plugins and hooks run before
        self.restarts: dict[str, int] = {}
        self._unmatched: dict[int, tuple[ExitStatus, float]] = {}

    # --- carrying out the plan

    def act(self) -> None:
        """Do what :meth:`aqd.slots.Slots.plan` says now."""
        for action in self.plan.plan(boottime()):
            match action:
                case slots.Spawn():
                    self._spawn(action)
                case slots.Retire(incarnation):
                    self._tell(messages.Retire(incarnation))
                case slots.Close(incarnation):
                    self.close_channel(incarnation)
                case slots.Kill(incarnation, pid):
                    log.warning("worker did not end, killing it", slot=self._slot(incarnation), child=pid)
                    signal_group(pid, signal.SIGKILL)
                case slots.Missing(incarnation):
                    self._missing(incarnation)
                case slots.GiveUp(failures):
                    if not self.gave_up:
                        log.error("workers cannot start, giving up", failures=failures)
                    self.gave_up = True

    def close_channel(self, incarnation: int) -> None:
        """The worker finds the end of its channel and ends. Only for one that holds nothing."""
        if seat := self.seats.get(incarnation):
            with contextlib.suppress(OSError):
                seat.channel.shutdown(socket.SHUT_RDWR)

    def _spawn(self, action: slots.Spawn) -> None:
        try:
            seat, workers_end = self._new_seat(action)
        except OSError as error:  # out of descriptors or memory: the slot backs off
            log.error("worker cannot be started", slot=action.slot, error=str(error))
            self.plan.exited(action.incarnation, boottime(), reached_loop=False)
            return
        self.seats[action.incarnation] = seat
        try:
            if self.loader is None:
                raise channel.ChannelClosed
            # Not queued: the worker's end must not stay open here, or its end would never be seen. There is
            # room: few workers are being started at a time.
            message = messages.encode(messages.SpawnWorker(action.slot, action.incarnation))
            channel.send(self.loader.channel, message, [workers_end.fileno(), seat.page_fd, seat.output_fd])
        except (channel.ChannelClosed, OSError):
            log.warning("loader takes no requests", slot=action.slot)
            self._forget(seat)
        finally:
            workers_end.close()

    @staticmethod
    def _new_seat(action: slots.Spawn) -> tuple[Seat, socket.socket]:
        page_fd = Page.create(action.slot, action.incarnation, action.generation)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, page_fd)
            output_fd = process.output_file(f"aqd-output-{action.slot}.{action.incarnation}")
            undo.callback(os.close, output_fd)
            workers_end, ours = channel.pair()
            undo.callback(workers_end.close)
            undo.callback(ours.close)
            place = (action.slot, action.incarnation, action.generation)
            seat = Seat(*place, Page(page_fd), page_fd, output_fd, ours)
            undo.pop_all()
        return seat, workers_end

    def _missing(self, incarnation: int) -> None:
        seat = self.seats[incarnation]
        if pid := seat.page.pid:
            self.spawned(incarnation, pid)
        else:
            log.warning("worker was never seen", slot=seat.slot)
            self._forget(seat)

    def _forget(self, seat: Seat) -> None:
        """It never lived: nothing to settle."""
        self.plan.exited(seat.incarnation, boottime(), reached_loop=False)
        del self.seats[seat.incarnation]
        seat.close()

    # --- births and deaths

    def spawned(self, incarnation: int, pid: int) -> None:
        """The worker's pid is known; its end may be, too."""
        seat = self.seats.get(incarnation)
        if seat is None or seat.pid is not None:
            return
        seat.pid = pid
        seat.progress = (seat.page.turns, boottime())
        self.plan.spawned(incarnation, pid, boottime())
        self._attach(seat)
        log.debug("worker started", slot=seat.slot, child=pid, generation=seat.generation)
        status, at = self._unmatched.pop(pid, (None, 0.0))
        if status is not None and at > boottime() - _UNMATCHED_S:
            self._exited(seat, status)

    def reaped(self, pid: int, status: ExitStatus) -> None:
        """A child that is neither loader, dispatcher nor API has ended."""
        for seat in self.seats.values():
            # Its page names it even if its birth was not reported: the loader may have died or been replaced.
            if (seat.pid or seat.page.pid) == pid and seat.exited is None:
                self.spawned(seat.incarnation, pid)
                self._exited(seat, status)
                return
        now = boottime()
        # Not for ever: the number of a long gone orphan may become a worker's.
        self._unmatched = {p: (s, t) for p, (s, t) in self._unmatched.items() if t > now - _UNMATCHED_S}
        self._unmatched[pid] = (status, now)

    def before_reaping(self, pid: int) -> None:
        """The zombie's group dies with it: what a job left running in the worker's own group."""
        if any(s.pid == pid for s in self.seats.values()):
            signal_group(pid, signal.SIGKILL)

    def _exited(self, seat: Seat, status: ExitStatus) -> None:
        reason, number = seat.killed or (StopReason.NONE, -1)
        seat.exited = messages.Exited(seat.incarnation, status.signal, status.code, reason, number)
        worker = self.plan.worker(seat.incarnation)
        expected = worker is not None and worker.state in (slots.State.LEAVING, slots.State.CLOSING)
        current = seat.page.current()
        if not (expected and status.ok):
            job = str(seat.page.entry(current).job_id) if current >= 0 else None
            why = reason.name.lower() if reason else str(status)
            self.restarts[why] = self.restarts.get(why, 0) + 1
            log.warning(
                "worker ended", slot=seat.slot, child=seat.pid, status=str(status), reason=why, job_id=job
            )
        else:
            log.debug("worker ended", slot=seat.slot, child=seat.pid, status=str(status))
        self.plan.exited(
            seat.incarnation, boottime(), reached_loop=seat.page.turns > 0, had_job=seat.page.started > 0
        )
        if seat.attached or seat.page.written:
            self._tell(seat.exited)
        else:
            self.settled(seat.incarnation)

    def settled(self, incarnation: int) -> None:
        """All outcomes of a dead worker are recorded."""
        seat = self.seats.get(incarnation)
        if seat is not None and seat.exited is not None:
            del self.seats[incarnation]
            seat.close()

    # --- the dispatcher

    def _tell(self, message: messages.ToDispatcher, fds: tuple[int, ...] = ()) -> None:
        if self.dispatcher is not None:
            with contextlib.suppress(channel.ChannelClosed):
                self.dispatcher.send(message, fds)

    def _attach(self, seat: Seat) -> None:
        if self.dispatcher is None:
            return
        fresh = not seat.attached and seat.page.written == 0
        seat.attached = True
        message = messages.Attach(seat.slot, seat.incarnation, seat.generation, fresh)
        self._tell(message, (seat.channel.fileno(), seat.page_fd, seat.output_fd))

    def attach_all(self) -> None:
        """Hand everything to a new dispatcher; its predecessor has been reaped."""
        for seat in self.seats.values():
            if seat.pid is None:
                continue
            self._attach(seat)
            worker = self.plan.worker(seat.incarnation)
            if seat.exited is not None:
                self._tell(seat.exited)
            elif worker is not None and worker.state is slots.State.LEAVING:
                self._tell(messages.Retire(seat.incarnation))
        self._tell(messages.AttachedAll())

    def recall(self, incarnation: int) -> None:
        """Take back what the worker has not begun, and tell the dispatcher which entries those are."""
        seat = self.seats.get(incarnation)
        if seat is None or seat.pid is None or seat.exited is not None:
            return  # its end was, or will be, announced: the dispatcher settles it then
        taken: list[tuple[int, int]] = []

        def look() -> bool:
            taken.append(seat.page.recall())
            return False

        while_stopped(seat.pid, look)
        if taken:
            self._tell(messages.Recalled(incarnation, *taken[0]))

    def fence(self, incarnation: int, number: int) -> None:
        """The lease of that entry is lost: kill the worker if it is on it."""
        seat = self.seats.get(incarnation)
        if seat is not None and seat.exited is None:
            self._kill(seat, number, StopReason.FENCE)

    # --- limits

    def enforce(self, grace_s: float, *, stop_all: bool) -> None:
        """Look at every page and end what must end. ``stop_all``: the drain is over."""
        now_ns, grace_ns = boottime_ns(), int(grace_s * 1e9)
        for seat in self.seats.values():
            if seat.pid is None or seat.exited is not None or seat.killed is not None:
                continue
            seat.stop, step = limits.review(seat.page, seat.stop, now_ns, grace_ns, stop_all=stop_all)
            match step:
                case limits.Soft(number, reason):
                    seat.page.request_stop(number, reason)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(seat.pid, STOP_SIGNAL)
                case limits.Hard(number, reason):
                    self._kill(seat, number, reason)
                case None if seat.page.current() < 0:
                    self._check_idle(seat, now_ns / 1e9)

    def _kill(self, seat: Seat, number: int, reason: StopReason) -> None:
        assert seat.pid is not None
        if while_stopped(seat.pid, lambda: seat.page.current() == number):
            seat.killed = (reason, number)
            job = str(seat.page.entry(number).job_id)
            log.warning(
                "worker killed", slot=seat.slot, child=seat.pid, job_id=job, reason=reason.name.lower()
            )

    def _check_idle(self, seat: Seat, now: float) -> None:
        """An idle worker that does not move (stopped, stuck in a hook) would hold its slot for ever."""
        seen, since = seat.progress
        limit_s = IDLE_LIMIT_S if seen else self.start_limit_s
        if seat.page.turns != seen:
            seat.progress = (seat.page.turns, now)
        elif now >= since + limit_s and seat.pid is not None:
            seat.progress = (seen, now)
            if while_stopped(seat.pid, lambda: seat.page.current() < 0 and seat.page.turns == seen):
                log.warning("idle worker does not move, killing it", slot=seat.slot, child=seat.pid)

    def forgive(self, now: float) -> None:
        """The master itself has not run for a while (a suspend, a freeze): nobody else has, either."""
        for seat in self.seats.values():
            seat.progress = (seat.page.turns, now)

    def reached_loop(self, worker: slots.Worker) -> bool:
        """Whether it takes jobs; until then hooks and late plugins run."""
        seat = self.seats.get(worker.incarnation)
        return seat is not None and seat.page.turns > 0

    def any_reached_loop(self, generation: int) -> bool:
        return any(s.generation == generation and s.page.turns > 0 for s in self.seats.values())

    def busy(self) -> list[Seat]:
        return [s for s in self.seats.values() if s.exited is None and s.page.current() >= 0]

    def _slot(self, incarnation: int) -> int | None:
        seat = self.seats.get(incarnation)
        return seat.slot if seat else None

    def kill_all(self) -> None:
        """The last act of a master that cannot wait any longer."""
        for seat in self.seats.values():
            if seat.pid is not None and seat.exited is None:
                signal_group(seat.pid, signal.SIGKILL)
