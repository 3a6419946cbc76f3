"""Which process each slot should have: a pure state machine. Events and a clock in, actions out.

Run by the master, which carries the actions out (:mod:`aqd.master`); nothing here does input or output.

A slot has at most one worker that may run jobs, so a node never runs more jobs than it has slots: on a reload
an idle worker is replaced at once and a busy one when it has finished. A worker that is *recycled* keeps
serving until a *successor* stands by that has reached its loop: recycling leaves no gap.

A worker's life (rows) and what may happen to it (columns); an empty cell is impossible or ignored::

    state      spawned       not wanted any more   retired     overdue           exited
    SPAWNING   -> SERVING    -> CLOSING, Close     .           -> CLOSING, Close  gone (a failed start)
    SERVING    .             -> LEAVING, Retire    .           .                  gone
    LEAVING    .             .                     -> CLOSING  .                  gone
    CLOSING    (remembered)  .                     .           Kill or Missing    gone

    a successor is SPAWNING, then
    STANDBY    .             -> CLOSING, Close     .           .                  gone (tried again)

    recycled   SERVING, no successor -> Spawn one;  its successor is ready -> LEAVING, Retire
    promotion  the slot's worker is gone -> its successor is the slot's worker; STANDBY -> SERVING, Attach

"Not wanted" is one rule for reload, shrink and drain: another generation than the serving one, a slot number
at or above the count, or a drain. It holds for successors, too.

A worker that ends before it reached its loop counts as a failed start; the slot then waits, doubling from
:data:`BACKOFF_FIRST_S` to :data:`BACKOFF_MAX_S`. A worker that reached it clears the count: a crash in a job
costs that job's attempt, not the slot's readiness. ``failures_max`` failed starts in a row over all slots,
with none successful in between, make :meth:`Slots.plan` answer :class:`GiveUp`. A successor that fails delays
only the next one: its slot is served.
"""

from dataclasses import dataclass, field
from enum import Enum

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
# A worker's pid is known within milliseconds (p99 86 ms in a sketch under load). What stays unknown is
# closed: should it be born later, it finds the end of its channel.
SPAWN_LIMIT_S = 10.0
# So many at a time: requests for hundreds of slots would not fit into the loader's channel, and the last ones
# would look lost before their turn has come.
SPAWNING_MAX = 16
# One that reaches its loop and dies before it had a job is not respawned faster than this.
IDLE_DEATH_PAUSE_S = 0.2
# A worker whose channel was closed ends at once; one that does not is killed.
CLOSE_LIMIT_S = 5.0


class State(Enum):
    SPAWNING = "starting"
    STANDBY = "standing by"
    SERVING = "serving"
    LEAVING = "leaving"
    CLOSING = "closing"


@dataclass(slots=True)
class Worker:
    """One life of one worker process."""

    incarnation: int
    slot: int
    generation: int
    state: State
    since: float
    pid: int | None = None
    recycle: bool = False
    ready: bool = False


@dataclass(slots=True)
class Slot:
    number: int
    worker: Worker | None = None
    successor: Worker | None = None
    failures: int = 0
    not_before: float = 0.0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Spawn:
    slot: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Attach:
    """It takes over its slot: the dispatcher may give it jobs from now on."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Retire:
    incarnation: int


@dataclass(frozen=True, slots=True)
class Close:
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Its pid never became known: probably it was never forked. Look at its page, then forget it."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    failures: int


Action = Spawn | Attach | Retire | Close | Kill | Missing | GiveUp


@dataclass(slots=True)
class Slots:
    """The slots of a node. ``serving`` is the generation that workers should have, None for none yet;
    ``loader_up`` whether its loader can fork more of them."""

    count: int
    failures_max: int = 20
    serving: int | None = None
    loader_up: bool = False
    draining: bool = False
    failures_in_a_row: int = 0
    recycled: int = 0
    _slots: dict[int, Slot] = field(default_factory=dict)  # by number, from 0 on without a gap
    _made: int = 0
    _workers: dict[int, Worker] = field(default_factory=dict)
    _next: int = 1

    # --- what is there

    def slots(self) -> list[Slot]:
        """All slots that are wanted or still have a worker, by number."""
        if self._made < self.count:  # asked for several times in each turn of the master's loop
            self._slots |= {number: Slot(number) for number in range(self._made, self.count)}
            self._made = self.count
        return [s for s in self._slots.values() if s.number < self.count or s.worker or s.successor]

    def worker(self, incarnation: int) -> Worker | None:
        return self._workers.get(incarnation)

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def settled_in(self) -> bool:
        """Every wanted slot has a serving worker of the serving generation."""
        return self.serving is not None and all(
            s.worker is not None and s.worker.state is State.SERVING and s.worker.generation == self.serving
            for s in self.slots()
            if s.number < self.count
        )

    # --- what happens

    def spawned(self, incarnation: int, pid: int, now: float) -> None:
        """The worker's pid is known."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return
        worker.pid = pid
        if worker.state is State.SPAWNING:
            standby = self._slots[worker.slot].successor is worker
            worker.state, worker.since = State.STANDBY if standby else State.SERVING, now

    def recycle(self, incarnation: int) -> None:
        """Replace this worker by a fresh one, once that is ready."""
        worker = self._workers.get(incarnation)
        if worker is not None and self._slots[worker.slot].worker is worker:
            worker.recycle = True

    def ready(self, incarnation: int) -> None:
        """The worker has reached its loop."""
        if (worker := self._workers.get(incarnation)) is not None:
            worker.ready = True

    def retired(self, incarnation: int, now: float) -> list[Action]:
        """The dispatcher holds nothing of this worker any more."""
        worker = self._workers.get(incarnation)
        if worker is None or worker.state is not State.LEAVING:
            return []
        return self._close(worker, now)

    def exited(
        self,
        incarnation: int,
        now: float,
        *,
        reached_loop: bool,
        had_job: bool = True,
        in_order: bool = False,
    ) -> None:
        """The worker was reaped (or could not be forked at all). ``in_order``: it left by itself and without an
        error, as one does after a one-shot job; which is what it should if it is to be recycled."""
        worker = self._workers.pop(incarnation, None)
        if worker is None:
            return
        slot = self._slots[worker.slot]
        successor = slot.successor is worker
        if successor:
            slot.successor = None
        else:
            slot.worker = None
        left = worker.recycle and in_order and worker.state is State.SERVING
        self.recycled += left
        wanted_to_end = left or worker.state in (State.LEAVING, State.CLOSING)
        if reached_loop:
            slot.failures = 0
            if not successor:
                self.failures_in_a_row = 0
            slot.not_before = now if had_job or wanted_to_end else now + IDLE_DEATH_PAUSE_S
        elif not wanted_to_end or worker.pid is None:
            slot.failures += 1
            if not successor:
                self.failures_in_a_row += 1
            slot.not_before = now + backoff_s(slot.failures)
        if not (wanted_to_end or successor):
            slot.restarts += 1

    def generation_changed(self) -> None:
        """A new generation serves: what kept the old one from starting may be mended."""
        self.failures_in_a_row = 0
        for slot in self._slots.values():
            slot.failures, slot.not_before = 0, 0.0

    # --- what to do

    def plan(self, now: float) -> list[Action]:
        """All that is to be done now; call it after every event and when :meth:`next_at` comes."""
        actions: list[Action] = []
        for slot in self._slots.values():
            actions += self._promote(slot, now)
        for worker in self.workers():
            actions += self._plan_worker(worker, now)
        if not self._spawning:
            return actions
        if self.failures_in_a_row >= self.failures_max:
            return [*actions, GiveUp(self.failures_in_a_row)]
        spawning = sum(1 for worker in self._workers.values() if worker.state is State.SPAWNING)
        empty = [slot for slot in self.slots() if slot.number < self.count and slot.worker is None]
        for slot in [*empty, *self._successors_missing()]:
            if spawning >= SPAWNING_MAX:
                break
            if now >= slot.not_before:
                spawning += 1
                worker = Worker(self._next, slot.number, self.serving or 0, State.SPAWNING, now)
                self._next += 1
                self._workers[worker.incarnation] = worker
                if slot.worker is None:
                    slot.worker = worker
                else:
                    slot.successor = worker
                actions.append(Spawn(slot.number, worker.incarnation, worker.generation))
        return actions

    def _promote(self, slot: Slot, now: float) -> list[Action]:
        """The slot's worker is gone: its successor takes over."""
        successor = slot.successor
        if slot.worker is not None or successor is None or successor.state is State.CLOSING:
            return []
        if not self._wanted(successor):
            return []  # it is closed below
        slot.worker, slot.successor = successor, None
        if successor.state is not State.STANDBY:
            return []  # it serves when its pid is known
        successor.state, successor.since = State.SERVING, now
        return [Attach(successor.incarnation)]

    def _successors_missing(self) -> list[Slot]:
        return [
            slot
            for slot in self.slots()
            if slot.worker is not None
            and slot.worker.recycle
            and slot.worker.state is State.SERVING
            and slot.successor is None
        ]

    def _plan_worker(self, worker: Worker, now: float) -> list[Action]:
        if worker.state is State.SPAWNING:
            if not self._wanted(worker) or now >= worker.since + SPAWN_LIMIT_S:
                return self._close(worker, now)
        elif worker.state is State.SERVING:
            if not self._wanted(worker):
                worker.state, worker.since = State.LEAVING, now
                return [Retire(worker.incarnation)]
            successor = self._slots[worker.slot].successor
            if worker.recycle and successor is not None and successor.ready and self._wanted(successor):
                self.recycled += 1
                worker.state, worker.since = State.LEAVING, now
                return [Retire(worker.incarnation)]
        elif worker.state is State.STANDBY:
            if not self._wanted(worker):
                return self._close(worker, now)
        elif worker.state is State.CLOSING and now >= worker.since + CLOSE_LIMIT_S:
            worker.since = now
            if worker.pid is None:
                return [Missing(worker.incarnation)]
            return [Kill(worker.incarnation, worker.pid)]
        return []

    def next_at(self) -> float | None:
        """When :meth:`plan` must be called again without an event, None if never."""
        moments = [w.since + SPAWN_LIMIT_S for w in self._workers.values() if w.state is State.SPAWNING]
        moments += [w.since + CLOSE_LIMIT_S for w in self._workers.values() if w.state is State.CLOSING]
        if self._spawning:
            moments += [s.not_before for s in self.slots() if s.worker is None and s.number < self.count]
            moments += [s.not_before for s in self._successors_missing()]
        return min(moments, default=None)

    @property
    def _spawning(self) -> bool:
        return not self.draining and self.loader_up and self.serving is not None

    def _wanted(self, worker: Worker) -> bool:
        return not self.draining and worker.slot < self.count and worker.generation == self.serving

    def _close(self, worker: Worker, now: float) -> list[Action]:
        worker.state, worker.since = State.CLOSING, now
        return [Close(worker.incarnation)]


def backoff_s(failures: int) -> float:
    """How long a slot waits after so many failed starts in a row."""
    return float(min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 20), BACKOFF_MAX_S)) if failures else 0.0
