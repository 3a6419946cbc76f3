"""The node's stock: jobs that are claimed and not yet given to a worker, and the giving.

Run by the dispatcher's main thread. Two rows wait here. Ordinary jobs go in frames to workers that are idle or
about to be (:mod:`aqd.assign` decides how many). One-shot jobs, whose process can run nothing else, go alone to a
worker that has run nothing yet; if there is none, the least busy worker is given nothing more and the master makes
its successor ready.

Promises: nothing is given whose lease is not certain for longer than a worker needs to be killed; what no worker
becomes free for is given back with its attempt, so that another node may run it; a job runs by what the present
generation's handlers say. A worker is given no more jobs than it may run, unless its successor does not come.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from math import inf
from typing import Final

from aqd import messages
from aqd.assign import Budget, Estimates
from aqd.channel import ChannelClosed
from aqd.claims import ClaimedJob
from aqd.config import Config
from aqd.hookspecs import HandlerInfo
from aqd.links import Held, Link
from aqd.page import Flag
from aqd.process import boottime, boottime_ns

# Claimed jobs for which no worker became free are given back: another node may be idle.
READY_LIMIT_S: Final = 0.5
# One-shot jobs wait for a process to be made, which may have slow hooks.
FRESH_LIMIT_S: Final = 10.0
# A worker that is used up and whose successor does not come serves on: the loader may be gone for long.
SUCCESSOR_LIMIT_S: Final = 10.0
# The successor of a worker that may run n jobs is ordered when n / 10 are left.
ORDER_AHEAD: Final = 10


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
        self.estimates = Estimates(int(config.daemon.frame_ms * 1e6) or 1)
        self.budget = Budget(int(config.daemon.frame_ms * 1e6))
        self._release, self._recall, self._tell = release, recall, tell
        self._ready: deque[Held] = deque()
        self._single: deque[Held] = deque()
        self._last_given = self._last_single = boottime()

    def __len__(self) -> int:
        return len(self._ready) + len(self._single)

    def __iter__(self) -> Iterator[Held]:
        yield from self._ready
        yield from self._single

    # --- coming in

    def serve(self, handlers: dict[str, HandlerInfo]) -> None:
        """From now on these; what waits is sorted again, what no handler is left for is given back."""
        self.handlers = handlers
        self.estimates.keep(handlers)
        waiting = [(held, held.job) for held in self if held.job is not None]
        self._ready.clear()
        self._single.clear()
        for held, job in sorted(waiting, key=lambda each: (-each[1].priority, each[1].run_at_us, each[1].id)):
            if job.type in handlers:
                self._limit(held, job)
                self.add(held)
            else:
                self._release(held, "not begun")

    def claimed(self, job: ClaimedJob, certain_ns: int) -> Held:
        """What the node holds of a claimed job."""
        held = Held(job.id, job.token, job.attempt, certain_ns, job)
        self._limit(held, job)
        held.payload_bytes = _bytes(job.payload)
        if job.meta or job.tags:
            held.extra_bytes = _bytes(job.meta or "") + _bytes(job.tags or "")
        return held

    def _limit(self, held: Held, job: ClaimedJob) -> None:
        """The job's own limits, else its handler's, else the configuration's."""
        handler, defaults = self.handlers.get(job.type), self.config.jobs
        limit_s = job.timeout_s or (handler and handler.timeout_s) or defaults.timeout_s
        memory_mb = (handler and handler.memory_limit_mb) or defaults.memory_limit_mb
        held.limit_ns = int(limit_s * 1e9)
        held.memory_kb = memory_mb * 1024
        held.max_attempts = job.max_attempts or (handler and handler.max_attempts) or defaults.max_attempts
        held.flags = Flag.DETACH if handler and handler.detach else Flag.NONE

    def add(self, held: Held, *, first: bool = False) -> None:
        """``first``: before the others, because it has waited already (perhaps since an older generation)."""
        assert held.job is not None
        if first:
            self._limit(held, held.job)
        handler = self.handlers.get(held.job.type)
        row = self._single if handler is not None and handler.one_shot else self._ready
        if first:
            row.appendleft(held)
            return
        if not row and row is self._ready:
            self._last_given = boottime()
        elif not row:
            self._last_single = boottime()
        row.append(held)

    # --- going out

    def remove(self, held: Held) -> None:
        row = self._ready if held in self._ready else self._single
        row.remove(held)

    def release_all(self, reason: str) -> None:
        for row in (self._ready, self._single):
            _release_row(row, self._release, reason)

    def release_overdue(self, now: float) -> None:
        """Give back what waits for longer than it should."""
        if self._ready and now >= self._last_given + READY_LIMIT_S:
            _release_row(self._ready, self._release, "no worker became free")
        if self._single and now >= self._last_single + FRESH_LIMIT_S:
            _release_row(self._single, self._release, "no process of its own was ready in time")

    def give(self, links: Collection[Link]) -> None:
        """Fill the frames of these workers, all of which serve the present generation."""
        now_ns = boottime_ns()
        fresh_ns = now_ns + int(self.config.daemon.kill_grace_s * 1e9)
        if self._single:
            self._give_single(links, fresh_ns)
        for link in sorted(links, key=lambda item: item.load_ns):
            if not self._ready:
                return
            self._order_in_time(link)
            room = self._room(link)
            if link.exhausted or link.recalling or room < 1:
                continue
            if self._single and not link.page.written:
                continue  # kept for a one-shot job
            if not self.budget.wants_more(link.load_ns, len(link.unfinished)):
                continue
            if link.unfinished and link.stuck(now_ns):
                continue  # what it is given would be taken back, and given to it again, for ever
            count = self.budget.frame(
                self._waiting(), backlog=len(self._ready), workers=len(links), room=room
            )
            jobs = self._certain([self._ready.popleft() for _ in range(count)], fresh_ns)
            if jobs:
                self._last_given = boottime()
                self._send(link, jobs)
                self._order_in_time(link)

    def demand(self, links: Collection[Link]) -> int:
        """How many jobs to claim now."""
        for link in links:
            if link.exhausted and not link.held and boottime() >= link.exhausted_at + SUCCESSOR_LIMIT_S:
                link.exhausted, link.overtime = False, True
        usable = [link for link in links if not link.exhausted]
        idle = sum(1 for link in usable if not link.unfinished)
        if not idle and boottime() >= self._last_given + READY_LIMIT_S:
            return 0
        return self.budget.demand(
            idle=idle, workers=len(usable), ready=len(self), mean_ns=self.estimates.mean_ns
        )

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
        while self._single and fresh:
            jobs = self._certain([self._single.popleft()], fresh_ns)
            if jobs:
                self._last_single = boottime()
                link = fresh.pop()
                self._send(link, jobs)
                self._exhaust(link)
                link.exhausted_at = inf  # it ends with the job, whether a successor comes or not
        coming = sum(1 for link in links if link.exhausted)
        used = sorted(
            (link for link in links if not (link.exhausted or link.overtime)), key=lambda item: item.load_ns
        )
        for link in used[: max(0, len(self._single) - coming)]:
            if link.page.written:
                self._exhaust(link)

    def _certain(self, jobs: list[Held], fresh_ns: int) -> list[Held]:
        for held in jobs:
            if held.certain_ns <= fresh_ns:
                self._release(held, "the lease was not certain any more")
        return [held for held in jobs if held.certain_ns > fresh_ns]

    def _send(self, link: Link, jobs: list[Held]) -> None:
        if any(held.memory_kb for held in jobs):
            self._tell(messages.Watch(link.incarnation))
        try:
            link.give(jobs)
        except (ChannelClosed, BlockingIOError):
            # The entries stand in its page: they come back when it is recalled or settled.
            self._recall(link)

    def _waiting(self) -> Iterator[tuple[int, int]]:
        """What the jobs that wait will probably cost: (ns, bytes in the frame), as far as it is asked for."""
        for held in self._ready:
            assert held.job is not None
            held.expected_ns = self.estimates.expected_ns(held.job.type)
            yield held.expected_ns, held.frame_bytes


def _bytes(text: str) -> int:
    return len(text if text.isascii() else text.encode())


def _release_row(row: deque[Held], release: Callable[[Held, str], None], reason: str) -> None:
    while row:
        release(row.popleft(), reason)


__all__ = ["READY_LIMIT_S", "Stock"]
