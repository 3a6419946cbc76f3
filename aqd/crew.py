"""The node's worker processes as the master holds them: spawn, attach, limit, recall, settle.

Run by the master only. What should be there is decided by :mod:`aqd.slots`, when a job must end by
:mod:`aqd.limits`, how much memory it takes is measured by :mod:`aqd.memory`; this module carries it out. For every worker incarnation it keeps the page and the
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
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aqd import channel, limits, memory, messages, process, slots, strays
from aqd.log import get_logger
from aqd.page import Page, StopReason
from aqd.process import (
    DUMP_SIGNAL,
    STOP_SIGNAL,
    ExitStatus,
    Usage,
    boottime,
    boottime_ns,
    while_stopped,
)

log = get_logger("master")

# Exit statuses of pids nobody has named yet: a worker can die before its birth is reported (about 20 in
# 490 spawns under fire). Orphans that were adopted pass through here too, hence the bound, in seconds.
_UNMATCHED_S = 10.0
# An idle worker moves its counter every few seconds; one that has not for this long is stopped or stuck.
IDLE_LIMIT_S = 20.0
# Of what workers print, so much is kept; and it is cut down when it takes more than the second.
OUTPUT_KEPT, OUTPUT_MAX = 128 << 10, 1 << 20
# How often output files are looked at (500 MiB/s were measured: 100 MiB between two looks, 500 at rest), and how often
# the memory of workers without a limit and the kernel's own killing.
OUTPUT_LOOK_S, SLOW_LOOK_S = 0.2, 1.0
# What a worker without a job has is measured again with growing pauses, as long as it stays the same: hooks may
# have started what grows. (64 idle workers each second took 0.5 % of a core.)
REBASE_MAX_S = 300.0
# A job with a limit is announced before it is written into the page; by then it stands there or never will.
WATCH_S = 0.5
# A look at a worker's memory that takes the master longer (at thousands of forks, 60 µs each) is not repeated before
# twice as long: the others' limits must be met, too.
LONG_LOOK_S = 0.02
# Both ask a worker for something, and are the death of a program that does not know them.
_ASKING = (STOP_SIGNAL, DUMP_SIGNAL)
# Of the output of a worker that ended without ever having had a job, so much goes into the log.
_LAST_WORDS = 500


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
    cancelled: set[int] = field(default_factory=set)
    killed: tuple[StopReason, int] | None = None
    detail: str = ""
    exited: messages.Exited | None = None
    progress: tuple[int, float] = (0, 0.0)
    meter: memory.Meter | None = None
    watch_until: float | None = None
    look_at: float = 0.0
    looked_finished: int = 0
    rebase_at: float = 0.0
    rebase_pause_s: float = 0.0

    @property
    def living(self) -> bool:
        return self.pid is not None and self.exited is None and self.killed is None

    def close(self) -> None:
        process.end_output(self.output_fd)
        self.page.close()
        os.close(self.page_fd)
        os.close(self.output_fd)
        self.channel.close()


class Crew:
    """All seats, living and unsettled. ``loader`` and ``dispatcher`` are set by the master as they come
    and go; None while there is none. ``worker_died(pid, incarnation, orderly)`` is called for each death."""

    def __init__(self, plan: slots.Slots) -> None:
        self.plan = plan
        self.loader: channel.Peer | None = None
        self.dispatcher: channel.Peer | None = None
        self.seats: dict[int, Seat] = {}
        self.gave_up = False
        self.start_limit_s = IDLE_LIMIT_S  # until a worker is in its loop: late plugins and hooks run before
        self.recycle_memory_kb = 0  # 0: never for that
        self.restarts: dict[str, int] = {}
        self.worker_died: Callable[[int, int, bool], None] = lambda _pid, _incarnation, _orderly: None
        self.detaching = False  # some handler may leave processes behind
        self._unmatched: dict[int, tuple[ExitStatus, Usage, float]] = {}
        self._oom = memory.OomWatch()
        self._next_output_look = self._next_slow_look = 0.0

    # --- carrying out the plan

    def act(self) -> None:
        """Do what :meth:`aqd.slots.Slots.plan` says now."""
        for worker in self.plan.workers():
            if worker.state is slots.State.STANDBY and not worker.ready and self.reached_loop(worker):
                self.plan.ready(worker.incarnation)
        for action in self.plan.plan(boottime()):
            match action:
                case slots.Spawn():
                    self._spawn(action)
                case slots.Attach(incarnation):
                    self._attach(self.seats[incarnation])
                case slots.Retire(incarnation):
                    self._tell(messages.Retire(incarnation))
                case slots.Close(incarnation):
                    self.close_channel(incarnation)
                case slots.Kill(incarnation, pid):
                    log.warning("worker did not end, killing it", slot=self._slot(incarnation), child=pid)
                    self._kill_group(pid)
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
        seat.meter = memory.Meter(pid)
        self.plan.spawned(incarnation, pid, boottime())
        worker = self.plan.worker(incarnation)
        if worker is not None and worker.state is slots.State.SERVING:
            self._attach(seat)
        log.debug("worker started", slot=seat.slot, child=pid, generation=seat.generation)
        status, usage, at = self._unmatched.pop(pid, (None, Usage(), 0.0))
        if status is not None and at > boottime() - _UNMATCHED_S:
            self._exited(seat, status, usage)

    def reaped(self, pid: int, status: ExitStatus, usage: Usage) -> None:
        """A child that is neither loader, dispatcher nor API has ended."""
        for seat in self.seats.values():
            # Its page names it even if its birth was not reported: the loader may have died or been replaced.
            if (seat.pid or seat.page.pid) == pid and seat.exited is None:
                self.spawned(seat.incarnation, pid)
                self._exited(seat, status, usage)
                return
        now = boottime()
        # Not for ever: the number of a long gone orphan may become a worker's. The oldest come first:
        # to look at all of them for each would take the square of what a killed job's thousands of forks are.
        while (
            self._unmatched and self._unmatched[first := next(iter(self._unmatched))][2] <= now - _UNMATCHED_S
        ):
            del self._unmatched[first]
        self._unmatched.pop(pid, None)
        self._unmatched[pid] = (status, usage, now)

    def before_reaping(self, pid: int) -> None:
        """The zombie's group dies with it: what a job left running in the worker's own group."""
        if any((s.pid or s.page.pid) == pid for s in self.seats.values()):
            self._kill_group(pid)

    def _exited(self, seat: Seat, status: ExitStatus, usage: Usage) -> None:
        current = seat.page.current()
        reason, number = seat.killed or (StopReason.NONE, -1)
        if not reason and seat.stop and seat.stop.number == current and status.signal in _ASKING:
            # Its job has taken our handlers away, perhaps by an exec: to be asked was its death.
            reason, number = seat.stop.reason, current
        oom = not reason and status.signal == signal.SIGKILL and self._oom.explains_death(boottime())
        seat.exited = messages.Exited(
            seat.incarnation,
            status.signal,
            status.code,
            reason,
            number,
            seat.detail,
            oom,
            usage.cpu_us,
            usage.peak_kb,
        )
        worker = self.plan.worker(seat.incarnation)
        expected = worker is not None and (
            worker.recycle or worker.state in (slots.State.LEAVING, slots.State.CLOSING)
        )
        if seat.pid is not None:
            self.worker_died(seat.pid, seat.incarnation, expected and status.ok and current < 0)
        if not (expected and status.ok):
            entry = seat.page.entry(current) if current >= 0 else None
            why = reason.name.lower() if reason else "oom" if oom else str(status)
            self.restarts[why] = self.restarts.get(why, 0) + 1
            more = {} if seat.page.started else {"output": _last_words(seat.output_fd)}
            log.warning(
                "worker ended",
                slot=seat.slot,
                child=seat.pid,
                status=str(status),
                reason=why,
                job_id=None if entry is None else str(entry.job_id),
                attempt=None if entry is None else entry.attempt,
                **more,
            )
        else:
            log.debug("worker ended", slot=seat.slot, child=seat.pid, status=str(status))
        self.plan.exited(
            seat.incarnation,
            boottime(),
            reached_loop=seat.page.turns > 0,
            had_job=seat.page.started > 0,
            in_order=status.ok,
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
            worker = self.plan.worker(seat.incarnation)
            serves = worker is not None and worker.state in (slots.State.SERVING, slots.State.LEAVING)
            if seat.pid is None or not (serves or seat.attached or seat.page.written):
                continue  # one that stands by, or was closed before it was ever attached
            self._attach(seat)
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
        if seat is not None and seat.living:
            self._kill(seat, number, StopReason.FENCE)

    def cancel(self, incarnation: int, number: int) -> None:
        """End the job of that entry, now or when the worker comes to it."""
        seat = self.seats.get(incarnation)
        if seat is not None and seat.living and number >= seat.page.finished:
            seat.cancelled.add(number)

    def watch(self, incarnation: int) -> None:
        """A job with a memory limit is about to be sent."""
        seat = self.seats.get(incarnation)
        if seat is not None and seat.living:
            seat.watch_until = boottime() + WATCH_S
            seat.look_at = 0.0
            self._rebase(seat)

    # --- limits

    def enforce(self, grace_s: float, *, stop_all: bool) -> float | None:
        """Look at every page and end what must end; when to look again, None if the tick is soon enough.

        ``stop_all``: the drain is over.
        """
        now_ns, grace_ns = boottime_ns(), int(grace_s * 1e9)
        now = now_ns / 1e9
        moments: list[float] = []
        for seat in self.seats.values():
            if not seat.living:
                continue
            assert seat.pid is not None
            if seat.cancelled:
                seat.cancelled = {n for n in seat.cancelled if n >= seat.page.finished}
            seat.stop, step = limits.review(
                seat.page, seat.stop, now_ns, grace_ns, stop_all=stop_all, cancelled=seat.cancelled
            )
            match step:
                case limits.Soft(number, reason):
                    seat.page.request_stop(number, reason)
                    _signal(seat.pid, STOP_SIGNAL)
                case limits.Dump(number):
                    self._dump(seat, number)
                case limits.Hard(number, reason):
                    self._kill(seat, number, reason)
                case None if seat.page.current() < 0:
                    self._check_idle(seat, now)
            if (look_ns := limits.next_look(seat.page, seat.stop, grace_ns)) is not None:
                moments.append(look_ns / 1e9)
            if seat.killed is None and (look := self._look_at_memory(seat, now)) is not None:
                moments.append(look)
        self._look_slowly(now)
        return min(moments, default=None)

    def _kill(self, seat: Seat, number: int, reason: StopReason, detail: str = "") -> None:
        assert seat.pid is not None
        entry = seat.page.entry(number)
        job = {"job_id": str(entry.job_id), "attempt": entry.attempt}
        fields = {"slot": seat.slot, "child": seat.pid, **job, "reason": reason.name.lower()}
        if while_stopped(seat.pid, lambda: seat.page.current() == number, kill=self._kill_group):
            more = {"detail": detail} if detail else {}
            log.warning("worker killed", **fields, **more)
        elif seat.page.current() == number and not process.may_signal(seat.pid):
            # By a job that has become somebody else: nothing is left but to wait for its end, and to say so.
            log.error("worker cannot be killed", **fields)
        else:
            return
        seat.killed, seat.detail = (reason, number), detail

    @staticmethod
    def _dump(seat: Seat, number: int) -> None:
        """Its stacks, into its output. A handler may have taken the signal's handler away: then not."""
        assert seat.pid is not None
        if seat.page.current() == number and process.catches(seat.pid, DUMP_SIGNAL):
            _signal(seat.pid, DUMP_SIGNAL)

    def _look_at_memory(self, seat: Seat, now: float) -> float | None:
        """Hold the worker to the limit of the job that it is on; when to look again, None for the tick."""
        page, number = seat.page, seat.page.current()
        limit_kb = page.entry(number).memory_kb if number >= 0 else 0
        if seat.meter is None or not (limit_kb or seat.watch_until is not None):
            return None
        if now < seat.look_at:
            return seat.look_at
        smallest_kb = limits.memory_limit_kb(page)
        if not smallest_kb:
            if seat.watch_until is not None and now >= seat.watch_until:
                seat.watch_until = None
            seat.look_at = now + memory.SOONEST_S
            return seat.look_at
        if seat.watch_until is None:
            seat.watch_until = now  # seen without having been announced: by a dispatcher that has died since
        began = time.thread_time()
        # What hooks and earlier jobs have left is not the present job's.
        left_kb = max(0, page.memory_at_kb - seat.meter.baseline_kb) if limit_kb else 0
        if page.started == 1:
            seat.meter.hooks_kb = max(seat.meter.hooks_kb, left_kb)
        used_kb = max(0, self._used_kb(seat, (limit_kb or smallest_kb) + left_kb) - left_kb)
        if left_kb - seat.meter.hooks_kb > smallest_kb:
            self.plan.recycle(seat.incarnation)  # or what each leaves would add up without a limit
        if limit_kb and used_kb > limit_kb and not page.returned(number):
            detail = f"used {used_kb >> 10} MiB of {limit_kb >> 10} MiB"
            self._kill(seat, number, StopReason.MEMORY, detail)
        room_kb = 0 if seat.meter.unsure else (limit_kb or smallest_kb) - used_kb
        pause_s = memory.pause_s(min(room_kb, smallest_kb))
        if (took_s := time.thread_time() - began) > LONG_LOOK_S:
            pause_s = max(pause_s, 2 * took_s)
        seat.look_at = boottime() + pause_s
        return seat.look_at

    def _used_kb(self, seat: Seat, limit_kb: int) -> int:
        assert seat.meter is not None
        taken, length = process.allocated(seat.output_fd)
        written = max(0, length - seat.page.output_at)  # by this job; the rest is its predecessors'
        if taken > OUTPUT_MAX:
            self._cut_output(seat)
            taken, _ = process.allocated(seat.output_fd)  # what it had grown to is not held against the job
        # The loader, and the other workers of its generation.
        sharers = sum(s.generation == seat.generation and s.living for s in self.seats.values())
        return seat.meter.used_kb(limit_kb, max(sharers, 1)) + (min(taken, written) >> 10)

    @staticmethod
    def _cut_output(seat: Seat) -> None:
        with contextlib.suppress(OSError):  # sealed by a job: then it does not grow, and its worker leaves
            process.punch_hole(seat.output_fd, OUTPUT_KEPT)

    @staticmethod
    def _rebase(seat: Seat) -> None:
        """What the worker has before its first job is not a job's: the image, and what its start hooks load."""
        if seat.meter is not None and seat.page.started == 0:
            before = seat.meter.baseline_kb, seat.meter.hooks_kb
            seat.meter.rebase()
            if seat.page.started:  # it has begun meanwhile
                seat.meter.baseline_kb, seat.meter.hooks_kb = before

    def _rebase_again(self, seat: Seat, now: float) -> None:
        meter = seat.meter
        before = (meter.baseline_kb, meter.hooks_kb) if meter is not None else None
        self._rebase(seat)
        same = meter is None or before == (meter.baseline_kb, meter.hooks_kb)
        seat.rebase_pause_s = min(2 * seat.rebase_pause_s, REBASE_MAX_S) if same else SLOW_LOOK_S
        seat.rebase_pause_s = max(seat.rebase_pause_s, SLOW_LOOK_S)
        seat.rebase_at = now + seat.rebase_pause_s

    def _look_slowly(self, now: float) -> None:
        """What need not be looked at in every turn."""
        if now >= self._next_output_look:
            self._next_output_look = now + OUTPUT_LOOK_S
            for seat in self.seats.values():
                if process.allocated(seat.output_fd)[0] > OUTPUT_MAX:
                    self._cut_output(seat)
        if now < self._next_slow_look:
            return
        self._next_slow_look = now + SLOW_LOOK_S
        self._oom.look(now)
        for seat in self.seats.values():
            if seat.living and seat.page.started == 0:
                if now >= seat.rebase_at:
                    self._rebase_again(seat, now)
            elif seat.living and self.recycle_memory_kb and seat.page.finished != seat.looked_finished:
                seat.looked_finished = seat.page.finished
                self._recycle_if_large(seat)

    def _recycle_if_large(self, seat: Seat) -> None:
        worker = self.plan.worker(seat.incarnation)
        if worker is None or worker.recycle or worker.state is not slots.State.SERVING:
            return
        hooks_kb = seat.meter.hooks_kb if seat.meter is not None else 0
        used_kb = self._used_kb(seat, self.recycle_memory_kb + hooks_kb) - hooks_kb
        if used_kb > self.recycle_memory_kb:
            log.info("worker is recycled", slot=seat.slot, child=seat.pid, used_mb=used_kb >> 10)
            self.plan.recycle(seat.incarnation)

    def _check_idle(self, seat: Seat, now: float) -> None:
        """An idle worker that does not move (stopped, stuck in a hook) would hold its slot for ever."""
        seen, since = seat.progress
        limit_s = IDLE_LIMIT_S if seen else self.start_limit_s
        if seat.page.turns != seen:
            seat.progress = (seat.page.turns, now)
        elif now >= since + limit_s and seat.pid is not None:
            seat.progress = (seen, now)
            if while_stopped(
                seat.pid,
                lambda: seat.page.current() < 0 and seat.page.turns == seen,
                kill=self._kill_group,
            ):
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

    def newborns(self) -> bool:
        """Whether one that lives has not reached its loop."""
        return any(s.living and not s.page.turns for s in self.seats.values())

    def at_rest(self) -> bool:
        """Whether all of them live and have nothing to do."""
        for seat in self.seats.values():
            first, last = seat.page.unstarted()
            if not seat.living or first < last or seat.page.current() >= 0:
                return False
        return True

    def busy(self) -> list[Seat]:
        return [s for s in self.seats.values() if s.exited is None and s.page.current() >= 0]

    def _slot(self, incarnation: int) -> int | None:
        seat = self.seats.get(incarnation)
        return seat.slot if seat else None

    def kill_all(self) -> None:
        """The last act of a master that cannot wait any longer."""
        for seat in self.seats.values():
            if seat.pid is not None and seat.exited is None:
                self._kill_group(seat.pid)

    def _kill_group(self, pid: int) -> None:
        strays.kill_group(pid, sparing=self.detaching)

    def pids(self) -> set[int]:
        """Of all workers that are not known to have ended, also where only the page names them yet."""
        seats = [seat for seat in self.seats.values() if seat.exited is None]
        return {pid for seat in seats for pid in (seat.pid, seat.page.pid) if pid}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _last_words(output_fd: int) -> str:
    """The end of an output file, printable."""
    length = process.allocated(output_fd)[1]
    data = os.pread(output_fd, _LAST_WORDS, max(0, length - _LAST_WORDS))
    return data.decode("utf-8", "backslashreplace").replace("\0", "\\0").strip()
