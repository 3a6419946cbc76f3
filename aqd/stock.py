"""The node's stock: jobs that are claimed and not yet given to a worker, and the giving.

Run by the dispatcher's main thread. Rows wait here: one of ordinary jobs for each pool (a single one
unless slots are reserved for queues, :mod:`aqd.shares`). They go in frames, of one pool each, to workers that are idle
or about to be (:mod:`aqd.assign` decides how many). One more row: one-shot jobs, whose process can run nothing else, go alone to a
worker that has run nothing yet; if there is none, the least busy worker is given nothing more and the master makes
its successor ready.

Promises: nothing is given whose lease is not certain for longer than a worker needs to be killed; what no worker
becomes free for is given back with its attempt, so that another node may run it; a job runs by what the present
generation's handlers say. A worker is given no more jobs than it may run, unless its successor does not come.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Final, NamedTuple

from aqd import messages
from aqd.assign import ALONE_NS, LEAD_NS, Budget, Estimates
from aqd.channel import ChannelClosed
from aqd.claims import NOTHING, ClaimedJob, Wish
from aqd.config import Config
from aqd.hookspecs import HandlerInfo
from aqd.links import ENTRY_BYTES, INLINE_PAYLOAD, Held, Link
from aqd.page import Flag
from aqd.process import boottime, boottime_ns
from aqd.shares import COMMON, Shares

# Claimed jobs for which no worker became free are given back: another node may be idle.
READY_LIMIT_S: Final = 0.5
# One-shot jobs wait for a process to be made, which may have slow hooks.
FRESH_LIMIT_S: Final = 10.0
# A worker that is used up and whose successor does not come serves on: the loader may be gone for long.
SUCCESSOR_LIMIT_S: Final = 10.0
# The successor of a worker that may run n jobs is ordered when n / 10 are left.
ORDER_AHEAD: Final = 10


class _Rules(NamedTuple):
    """What holds for the jobs of a type, by its handler and the configuration."""

    limit_ns: int
    max_attempts: int
    memory_kb: int
    flags: Flag
    one_shot: bool


class _Row:
    """Jobs that wait for a worker, and since when none of them has got one."""

    __slots__ = ("given_at", "jobs")

    def __init__(self) -> None:
        self.jobs: deque[Held] = deque()
        self.given_at = boottime()

    def append(self, held: Held) -> None:
        if not self.jobs:
            self.given_at = boottime()
        self.jobs.append(held)


class Stock:
    """``release(held, reason)`` gives a job back to the database, ``recall(link)`` takes back what a worker has
    not begun, ``tell`` speaks to the master."""

    def __init__(
        self,
        config: Config,
        release: Callable[[Held, str], None],
        recall: Callable[[Link], None],
        tell: Callable[[messages.FromDispatcher], None],
    ) -> None:
        self.config = config
        self.handlers: dict[str, HandlerInfo] = {}
        self._rules: dict[str, _Rules] = {}
        self.estimates = Estimates(int(config.daemon.frame_ms * 1e6) or ALONE_NS)
        self.budget = Budget(int(config.daemon.frame_ms * 1e6))
        self._release, self._recall, self._tell = release, recall, tell
        self.shares = Shares(config.daemon.reserved)
        self._ready = {pool: _Row() for pool in self.shares.pools}
        self._single = _Row()
        self._look_in_s = inf
        unknown_ns = self.estimates.unknown_ns
        self._means = {pool: Estimates(unknown_ns) for pool in self.shares.pools}

    def _rows(self) -> Iterator[_Row]:
        yield from self._ready.values()
        yield self._single

    def __len__(self) -> int:
        return sum(len(row.jobs) for row in self._rows())

    def __iter__(self) -> Iterator[Held]:
        for row in self._rows():
            yield from row.jobs

    # --- coming in

    def serve(self, handlers: dict[str, HandlerInfo]) -> None:
        """From now on these; what waits is sorted again, what no handler is left for is given back."""
        self.handlers = handlers
        self._rules.clear()
        self.estimates.keep(handlers)
        waiting = [(held, held.job) for held in self if held.job is not None]
        for row in self._rows():
            row.jobs.clear()
        for held, job in sorted(waiting, key=lambda each: (-each[1].priority, each[1].run_at_us, each[1].id)):
            if job.type in handlers:
                self._limit(held, job)
                self.add(held)
            else:
                self._release(held, "not begun")

    def claimed(self, jobs: Iterable[ClaimedJob], certain_ns: int) -> list[Held]:
        """What the node holds of claimed jobs."""
        found = []
        rules_of = self._rules.get
        for job in jobs:
            (
                id,
                token,
                type,
                queue,
                _,
                payload,
                attempt,
                max_attempts,
                timeout_s,
                _,
                _,
                _,
                _,
                tags,
                meta,
                _,
            ) = job
            rules = rules_of(type) or self._rules_of(type)
            size = len(payload) if payload.isascii() else len(payload.encode())
            extra = _bytes(meta or "") + _bytes(tags or "") if meta or tags else 0
            found.append(
                Held(
                    id,
                    token,
                    attempt,
                    certain_ns,
                    job,
                    int(timeout_s * 1e9) if timeout_s else rules.limit_ns,
                    max_attempts or rules.max_attempts,
                    rules.memory_kb,
                    rules.flags,
                    size,
                    extra,
                    min(size, INLINE_PAYLOAD) + extra + len(type) + len(queue) + ENTRY_BYTES,
                )
            )
        return found

    def _limit(self, held: Held, job: ClaimedJob) -> None:
        """By the present generation's handlers."""
        rules = self._rules_of(job.type)
        held.limit_ns = int(job.timeout_s * 1e9) if job.timeout_s else rules.limit_ns
        held.max_attempts = job.max_attempts or rules.max_attempts
        held.memory_kb, held.flags = rules.memory_kb, rules.flags

    def _rules_of(self, type: str) -> _Rules:
        """The handler's limits, else the configuration's: for a job that has none of its own."""
        if (rules := self._rules.get(type)) is None:
            handler, defaults = self.handlers.get(type), self.config.jobs
            rules = _Rules(
                int(((handler and handler.timeout_s) or defaults.timeout_s) * 1e9),
                (handler and handler.max_attempts) or defaults.max_attempts,
                ((handler and handler.memory_limit_mb) or defaults.memory_limit_mb) * 1024,
                Flag.DETACH if handler and handler.detach else Flag.NONE,
                handler is not None and handler.one_shot,
            )
            if handler is not None:  # of what is unknown there may be any number
                self._rules[type] = rules
        return rules

    def add(self, held: Held, *, first: bool = False) -> None:
        """``first``: before the others, because it has waited already (perhaps since an older generation)."""
        assert held.job is not None
        if first:
            self._limit(held, held.job)
        alone = self._rules_of(held.job.type).one_shot
        row = self._single if alone else self._ready[self.shares.pool_of(held.job.queue)]
        if first:
            row.jobs.appendleft(held)
        else:
            row.append(held)

    # --- going out

    def remove(self, held: Held) -> None:
        next(row for row in self._rows() if held in row.jobs).jobs.remove(held)

    def release_all(self, reason: str) -> None:
        for row in self._rows():
            self._release_row(row, reason)

    def release_overdue(self, now: float) -> None:
        """Give back what waits for longer than it should."""
        for row in self._ready.values():
            if now >= row.given_at + READY_LIMIT_S:
                self._release_row(row, "no worker became free")
        if now >= self._single.given_at + FRESH_LIMIT_S:
            self._release_row(self._single, "no process of its own was ready in time")

    def _release_row(self, row: _Row, reason: str) -> None:
        while row.jobs:
            self._release(row.jobs.popleft(), reason)

    def give(self, links: Collection[Link]) -> None:
        """Fill the frames of these workers, all of which serve the present generation."""
        now_ns = boottime_ns()
        fresh_ns = now_ns + int(self.config.daemon.kill_grace_s * 1e9)
        if self._single.jobs:
            self._give_single(links, fresh_ns)
        while self._give_round(links, now_ns, fresh_ns) and not self.budget.frame_ns:
            pass

    def _give_round(self, links: Collection[Link], now_ns: int, fresh_ns: int) -> bool:
        """A frame for each worker that may have one; whether any had."""
        given = False
        for link in sorted(links, key=lambda item: item.load_ns):
            if not any(row.jobs for row in self._ready.values()):
                return False
            self._order_in_time(link)
            room = self._room(link)
            if link.exhausted or link.recalling or room < 1:
                continue
            if not link.page.written and self._next_single(links) is not None:
                continue  # kept for a one-shot job
            if not self.budget.wants_more(link.load_ns, len(link.unfinished)):
                continue
            if link.unfinished and link.stuck(now_ns):
                continue  # what it is given would be taken back, and given to it again, for ever
            row = self._row_for(link, links)
            if row is None or not row.jobs:
                continue
            count = self.budget.frame(
                self._waiting(row), backlog=len(row.jobs), workers=len(links), room=room
            )
            jobs = self._certain([row.jobs.popleft() for _ in range(count)], fresh_ns)
            if jobs:
                row.given_at = boottime()
                self._send(link, jobs)
                self._order_in_time(link)
                given = True
        return given

    def _row_for(self, link: Link, links: Collection[Link]) -> _Row | None:
        """Which row this worker is served from: that of the pool it is on; an idle one's is the first that wants a
        slot and may have one."""
        if not self.shares:
            return next(iter(self._ready.values()))
        if link.unfinished:
            return self._ready[self.shares.pool_of(link.queue)]
        idle, taken = self._slots(links)
        for pool, row in self._ready.items():
            if row.jobs and self.shares.allowed(pool, idle, taken):
                return row
        return None

    def _slots(self, links: Collection[Link]) -> tuple[int, dict[str, int]]:
        """How many workers are idle, and how many each pool has."""
        busy = [link.queue for link in links if link.unfinished]
        usable = sum(1 for link in links if not link.exhausted or link.unfinished)
        return usable - len(busy), self.shares.count(busy)

    def learn(self, jobs: Iterable[tuple[ClaimedJob, int]]) -> None:
        """How long jobs took, in nanoseconds."""
        times: dict[tuple[str, str], list[int]] = {}
        for job, wall_ns in jobs:
            times.setdefault((job.queue, job.type), []).append(wall_ns)
        for (queue, type), walls_ns in times.items():
            self.estimates.learn(type, *walls_ns)
            if self.shares:
                self._means[self.shares.pool_of(queue)].learn(type, *walls_ns)

    def demand(self, links: Collection[Link]) -> Wish:
        """How many jobs to claim now."""
        for link in links:
            if link.exhausted and not link.held and boottime() >= link.exhausted_at + SUCCESSOR_LIMIT_S:
                link.exhausted, link.overtime = False, True
        usable = [link for link in links if not link.exhausted and self._room(link) > 0]
        idle = sum(1 for link in usable if not link.unfinished)
        if self.shares:
            return self._demand_by_pool(links, usable, idle)
        idle += self._idle_soon(usable)
        row = self._ready[COMMON]
        if not idle and boottime() >= row.given_at + READY_LIMIT_S:
            return NOTHING
        mean_ns = self.estimates.mean_ns
        return Wish(
            {COMMON: self.budget.demand(idle=idle, workers=len(usable), ready=len(self), mean_ns=mean_ns)}
        )

    def _idle_soon(self, links: Iterable[Link]) -> int:
        """How many workers will be idle in a moment."""
        now_ns, soon, next_ns = boottime_ns(), 0, inf
        for link in links:
            ends_ns = link.ends_in_ns(now_ns)
            if ends_ns is None or not self.estimates.known(link.type):
                continue
            if ends_ns > LEAD_NS:
                next_ns = min(next_ns, ends_ns - LEAD_NS)
            elif ends_ns > -LEAD_NS:  # else it takes longer than we think, and nobody knows how long
                soon += 1
        self._look_in_s = next_ns / 1e9
        return soon

    def look_in_s(self) -> float:
        """After a :meth:`demand`: when the next one will be another, should nothing happen."""
        look_in_s, self._look_in_s = self._look_in_s, inf
        return look_in_s

    def _demand_by_pool(self, links: Collection[Link], usable: Collection[Link], idle: int) -> Wish:
        """Each pool asks for the slots that it has and may have besides, by how long *its* jobs take."""
        taken = self._slots(links)[1]
        waiting = {pool: len(row.jobs) for pool, row in self._ready.items()}
        for held in self._single.jobs:
            waiting[self._pool(held)] += 1
        by_slot = frozenset(
            pool for pool, mean in self._means.items() if not self.budget.stacks(mean.mean_ns)
        )
        # What waits for a slot of its own will have one.
        due = {pool: waiting[pool] for pool in by_slot}
        left = max(0, idle - sum(due.values()))
        then = {pool: taken.get(pool, 0) + due.get(pool, 0) for pool in self.shares.pools}
        limits = {}
        for pool, row in self._ready.items():
            free = self.shares.allowed(pool, left, then)
            if not free and boottime() >= row.given_at + READY_LIMIT_S:
                continue
            limits[pool] = (
                free
                if pool in by_slot
                else self.budget.demand(
                    idle=free,
                    workers=min(len(usable), taken.get(pool, 0) + free),
                    ready=waiting[pool],
                    mean_ns=self._means[pool].mean_ns,
                )
            )
        return Wish(limits, by_slot, left, then)

    def _room(self, link: Link) -> int:
        most = 0 if link.overtime else self.config.daemon.max_jobs_per_worker
        room = link.room()
        return min(room, most - link.page.written) if most else room

    def _order_in_time(self, link: Link) -> None:
        """Of a worker that will soon have run as many jobs as it may; also one that a predecessor gave its last."""
        if most := self.config.daemon.max_jobs_per_worker:
            if link.page.written >= most and not link.overtime:
                self._exhaust(link)
            elif link.page.written >= most - most // ORDER_AHEAD:
                self._order(link)

    def _exhaust(self, link: Link) -> None:
        """Nothing more for this worker; its successor is made ready meanwhile."""
        if not link.exhausted:
            link.exhausted, link.overtime, link.exhausted_at = True, False, boottime()
        self._order(link)

    def _order(self, link: Link) -> None:
        if not link.ordered:
            link.ordered = True
            self._tell(messages.Recycle(link.incarnation))

    def _give_single(self, links: Collection[Link], fresh_ns: int) -> None:
        fresh = [link for link in links if not link.page.written and not link.exhausted]
        while fresh and (held := self._next_single(links)) is not None:
            self._single.jobs.remove(held)
            jobs = self._certain([held], fresh_ns)
            if jobs:
                self._single.given_at = boottime()
                link = fresh.pop()
                self._send(link, jobs)
                self._exhaust(link)
                link.exhausted_at = inf  # it ends with the job, whether a successor comes or not
        coming = sum(1 for link in links if link.exhausted)
        used = sorted(
            (link for link in links if not (link.exhausted or link.overtime)), key=lambda item: item.load_ns
        )
        for link in used[: max(0, self._singles_that_may(links) - coming)]:
            if link.page.written:
                self._exhaust(link)

    def _next_single(self, links: Collection[Link]) -> Held | None:
        """The first one-shot job that may have a slot."""
        if not self.shares:
            return self._single.jobs[0] if self._single.jobs else None
        idle, taken = self._slots(links)
        return next(
            (held for held in self._single.jobs if self.shares.allowed(self._pool(held), idle, taken)), None
        )

    def _singles_that_may(self, links: Collection[Link]) -> int:
        """How many of the one-shot jobs may have slots now."""
        if not self.shares:
            return len(self._single.jobs)
        idle, taken = self._slots(links)
        number = 0
        for held in self._single.jobs:
            pool = self._pool(held)
            if self.shares.allowed(pool, idle, taken):
                number, idle = number + 1, idle - 1
                taken[pool] = taken.get(pool, 0) + 1
        return number

    def _pool(self, held: Held) -> str:
        return self.shares.pool_of(held.job.queue if held.job is not None else COMMON)

    def _certain(self, jobs: list[Held], fresh_ns: int) -> list[Held]:
        stale = [held for held in jobs if held.certain_ns <= fresh_ns]
        for held in stale:
            self._release(held, "the lease was not certain any more")
        return [held for held in jobs if held.certain_ns > fresh_ns] if stale else jobs

    def _send(self, link: Link, jobs: list[Held]) -> None:
        if any(held.memory_kb for held in jobs):
            self._tell(messages.Watch(link.incarnation))
        try:
            link.give(jobs)
        except (ChannelClosed, BlockingIOError):
            # The entries stand in its page: they come back when it is recalled or settled.
            self._recall(link)

    def _waiting(self, row: _Row) -> Iterator[tuple[int, int]]:
        """What the jobs that wait will probably cost: (ns, bytes in the frame), as far as it is asked for."""
        for held in row.jobs:
            assert held.job is not None
            held.expected_ns = self.estimates.expected_ns(held.job.type)
            yield held.expected_ns, held.frame_bytes


def _bytes(text: str) -> int:
    return len(text if text.isascii() else text.encode())


__all__ = ["READY_LIMIT_S", "Stock"]
