"""Claiming: the thin loop around ``lanes`` and the protocol of sleeping.

Used by the dispatcher's claimer thread. :class:`ClaimBook` runs the claim statement over the known lanes,
moves their floors, sweeps and discovers; :class:`Sleeper` announces sleep so that enqueuers notify only
while somebody sleeps.

Promises: never more rows than asked for; every claim statement has a token of its own; a job is returned
once. ``lower`` may be called from another thread, everything else belongs to one thread.

How it fails: a lost connection passes through as :class:`psycopg.OperationalError`. Rows of a claim whose
COMMIT got no answer stay PROCESSING under a token that nobody holds: ``store.reconcile`` returns them.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Final, NamedTuple

import psycopg

from aqd.database import Connection, int_array, run, text_array
from aqd.lanes import Floor, LaneKey, Lanes, Plan, Taken
from aqd.shares import COMMON, Shares

CHANNEL: Final = "aqd_jobs"
# Its payload is the node that runs the job which was cancelled (aqd.cancel).
CANCEL_CHANNEL: Final = "aqd_cancel"

# All processors busy with no-op jobs: of claims of 1,000 99 of 100 took less than 98–145 ms on a slow machine, of 300 25. On a
# faster one, 3 alternations: 300 22 ms at 38,400 jobs/s, 200 15 ms at 37,300.
CLAIM_MAX: Final = 200
# Above this many lanes one pass over the index is cheaper than a probe for each.
_MANY_LANES: Final = 5000


class ClaimedJob(NamedTuple):
    """A job that this node holds. ``payload``, ``tags`` and ``meta`` are JSON text; moments are unix microseconds."""

    id: int
    token: int
    type: str
    queue: str
    priority: int
    payload: str
    attempt: int
    max_attempts: int | None
    timeout_s: float | None
    created_at_us: int
    interruptions: int
    crashes: int
    run_at_us: int
    tags: str | None = None
    meta: str | None = None
    claimed_at_us: int = 0

    @property
    def waited_s(self) -> float:
        """How long it was due before it was claimed, by the database's clock."""
        return max(self.claimed_at_us - max(self.run_at_us, self.created_at_us), 0) / 1e6


# The last column of ClaimedJob is the database's clock; behind it stands what the claim says of itself: room, picked,
# and what it cost there. The time on our side would count the network and our own scheduler, and put sweeps off for them.
_NOW_US: Final = len(ClaimedJob._fields) - 1
_SAID: Final = _NOW_US + 1
# In C, which is half of the time that the rows take: 0.25 µs a job for all of it, 0.65 with lambdas and _make.
_new_job: Final = tuple.__new__
_lane_of: Final = itemgetter(ClaimedJob._fields.index("queue"), ClaimedJob._fields.index("priority"))
_place_of: Final = itemgetter(ClaimedJob._fields.index("run_at_us"), ClaimedJob._fields.index("id"))

# Jobs that somebody changed while they were being claimed are looked for again so many times.
_MISSES: Final = 5
# A queue that is full is not asked again for so long, unless this node has recorded something.
FULL_S: Final = 0.2
# How often, while a job comes to the age at which it is owed a turn, the heads of lanes are looked at.
LOOKS_AT_HEADS: Final = 6


class Wish(NamedTuple):
    """How many jobs a node wants, by pool (:mod:`aqd.shares`). Those of the pools ``by_slot`` take a slot each, of
    ``idle`` ones, while the pools hold as many slots as ``taken`` says; the others are short and claimed ahead."""

    limits: Mapping[str, int]
    by_slot: frozenset[str] = frozenset()
    idle: int = 0
    taken: Mapping[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.limits.values())

    @property
    def pools(self) -> frozenset[str]:
        """Those of which jobs are wanted."""
        return frozenset(pool for pool, limit in self.limits.items() if limit > 0)

    def exceeds(self, other: "Wish") -> bool:
        """Whether more of some pool is wanted."""
        return any(limit > other.limits.get(pool, 0) for pool, limit in self.limits.items())

    def one_claim(self) -> "Wish":
        """What the next claim asks for."""
        if self.total <= CLAIM_MAX:
            return self
        return self._replace(limits={pool: min(limit, CLAIM_MAX) for pool, limit in self.limits.items()})

    def less(self, number: int) -> "Wish":
        """What is left of it when so many jobs have been claimed. Pools share slots: there it depends on what came."""
        if not number:
            return self
        if len(self.limits) != 1 or self.total <= number:
            return NOTHING
        (pool,) = self.limits
        return self._replace(limits={pool: self.total - number})


NOTHING: Final = Wish({})


class ClaimBook:
    """What this node may claim and where it stopped.

    ``queues`` empty means all queues. ``sweep_s`` bounds the delay of jobs that appear behind a floor
    and of changes to ``aqd.queues``. ``aging_s`` 0: priority alone decides. ``held_back``: the last claim found a
    queue that runs as many jobs as it may.
    """

    def __init__(
        self,
        node_id: str,
        lease_s: float,
        slack_s: float = 0.1,
        sweep_s: float = 1.5,
        queues: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        aging_s: float = 0.0,
        shares: Shares | None = None,
    ) -> None:
        self.node_id = node_id
        self.lease_s = lease_s
        self._slack_s = slack_s
        self._queues = text_array(queues)
        self._types: frozenset[str] = frozenset()
        self._types_array = "{}"
        self._lanes = Lanes(slack_s, sweep_s)
        self._clock = clock
        self._aging_s = aging_s
        self._shares = shares or Shares({})
        self.held_back = False
        self._sweep_s = sweep_s
        self._full: set[str | None] = set()  # queues that had no more room, not asked again for a moment
        self._full_until = self._settings_at = self._heads_at = 0.0
        self._room_made = False
        self._lowered: deque[LaneKey] = deque()
        self._many = False
        self._now_us = 0
        self._swept = self._looked = False  # by the last claim
        self._queued = True

    @property
    def types(self) -> frozenset[str]:
        """The types that are claimed."""
        return self._types

    def set_types(self, types: frozenset[str]) -> None:
        """Claim these types only. Floors hide what was not claimable before, so they are forgotten."""
        if types != self._types:
            self._types = types
            self._types_array = text_array(sorted(types))
            self._lanes.restart()

    def lower(self, queue: str, priority: int) -> None:
        """This node gave a job of the lane back. From any thread: taken over by the next claim, because a
        claim under way would move the floor again."""
        self._lowered.append(LaneKey(queue, priority))

    def sweep_due(self, now: float) -> bool:
        """Whether :meth:`claim` would sweep at the monotonic moment ``now``."""
        return self._lanes.sweep_due(now)

    def claim(self, conn: Connection, wish: int | Wish) -> list[ClaimedJob]:
        """Take at most so many due jobs, those of higher priority first. A number is enough where no slots are
        reserved.

        One statement while the known lanes give jobs. Discovery of lanes goes before it when a sweep is
        due, and after it when it found nothing. An error after a statement that gave jobs is no error: they are
        claimed, and the next call meets it again.
        """
        if isinstance(wish, int):
            wish = Wish({COMMON: wish})
        self.held_back = False
        if wish.total <= 0 or not self._types:
            return []
        jobs: list[ClaimedJob] = []
        try:
            self._claim_into(jobs, conn, wish)
        except psycopg.Error:
            if not jobs:
                raise
        return jobs

    def made_room(self) -> None:
        """Something is recorded: queues that were full may not be. From any thread."""
        self._room_made = True

    def _claim_into(self, jobs: list[ClaimedJob], conn: Connection, wish: Wish) -> None:
        while self._lowered:
            self._lanes.lower(self._lowered.popleft(), self._clock())
        now = self._clock()
        if self._room_made or now >= self._full_until:
            self._room_made = False
            self._full.clear()
            self._full_until = now + FULL_S
        swept = self._lanes.sweep_due(now)
        if swept:
            self._full.clear()
            self._lanes.begin_sweep(now)
            self._discover(conn)
            self._look_at_heads(conn)
        elif now >= self._settings_at:  # sweeps may be far between where they are dear
            rows = run(conn, "queue_settings")
            self._lanes.settings(
                {queue for queue, paused, _ in rows if paused},
                {queue for queue, _, limited in rows if limited},
            )
            self._settings_at = now + self._sweep_s
        self._swept, self._looked = swept, False
        self._claim_pools(jobs, conn, wish, None)
        if not jobs and not swept and self._lanes.look_due(self._clock()):
            fresh = frozenset(self._discover(conn))
            self._looked = True
            self._claim_pools(jobs, conn, wish, fresh)

    def new_lanes(self, conn: Connection) -> bool:
        """Look for lanes that were not known, if that is allowed now; whether there are any."""
        return self._lanes.look_due(self._clock()) and bool(self._discover(conn))

    def nothing_queued(self, conn: Connection) -> bool:
        """Look for lanes, if that is allowed now; whether no job is QUEUED at all, whether due or not."""
        if not self._lanes.look_due(self._clock()):
            return False
        self._discover(conn)
        return not self._queued

    def blind_s(self) -> float | None:
        """Seconds until a claim may see what the last one, which found nothing, could not: a notified job
        that came back behind a floor, or is the first of its lane. None if it looked everywhere.

        Whoever sleeps longer than that after a notification sleeps through the job.
        """
        return None if self._swept else self._lanes.blind_s(self._clock(), looked=self._looked)

    def next_due_s(self, conn: Connection) -> float | None:
        """Seconds until the first job in the known lanes falls due that was not due at the last claim; 0 if
        it is due now, None if there is none. Of any type: an unknown one wakes the claimer once for nothing."""
        keys = self._lanes.keys()
        if not keys or not self._now_us:
            return None
        rows = run(
            conn,
            "next_due",
            queues=text_array([key.queue for key in keys]),
            priorities=int_array([key.priority for key in keys]),
            since_us=self._now_us,
        )
        wait = rows[0][0]
        return None if wait is None else max(float(wait), 0.0)

    def _claim_pools(
        self, jobs: list[ClaimedJob], conn: Connection, wish: Wish, only: Collection[LaneKey] | None
    ) -> None:
        """From all lanes, or from some ``only``; pool by pool where slots are reserved."""
        idle, taken = wish.idle, dict(wish.taken)
        for pool in self._shares.pools:

            def wanted(key: LaneKey, pool: str = pool) -> bool:
                return self._shares.pool_of(key.queue) == pool and (only is None or key in only)

            limit = wish.limits.get(pool, 0)
            if pool in wish.by_slot:
                limit = min(limit, self._shares.allowed(pool, idle, taken))
            before = len(jobs)
            if limit > 0:
                everything = not self._shares and only is None
                self._claim(jobs, conn, before + limit, None if everything else wanted, pool)
            if pool in wish.by_slot:
                idle -= len(jobs) - before
                taken[pool] = taken.get(pool, 0) + len(jobs) - before

    def _claim(
        self,
        jobs: list[ClaimedJob],
        conn: Connection,
        most: int,
        wanted: Callable[[LaneKey], bool] | None,
        pool: str,
    ) -> None:
        """Until there are ``most``."""
        aged = self._lanes.aged_plan(wanted or _any, pool)
        if aged is not None:
            plan, owed = aged
            found = self._claim_plan(conn, plan, min(owed, most - len(jobs)))
            jobs += found
            self._lanes.claimed_aged(plan.lanes[0], len(found), pool)
        for plan in self._lanes.plans(wanted):
            if len(jobs) >= most:
                break
            found = self._claim_plan(conn, plan, most - len(jobs))
            jobs += found
            self._lanes.claimed(len(found), pool)

    def _look_at_heads(self, conn: Connection) -> None:
        """For how long lanes have waited that others may keep from being served."""
        now = self._clock()
        if now < self._heads_at:
            return
        self._heads_at = now + self._aging_s / LOOKS_AT_HEADS
        keys = self._lanes.may_age() if self._aging_s else []
        waited: dict[LaneKey, float] = {}
        if keys:
            rows = run(
                conn,
                "lane_heads",
                queues=text_array([key.queue for key in keys]),
                priorities=int_array([key.priority for key in keys]),
                types=self._types_array,
            )
            waited = {LaneKey(queue, priority): waited_s for queue, priority, waited_s, _ in rows if queue}
            self._lanes.swept(rows[-1][3])
        self._lanes.age(waited, self._aging_s)

    def _claim_plan(self, conn: Connection, plan: Plan, limit: int) -> list[ClaimedJob]:
        if plan.limited in self._full:  # with many priorities it would be asked again for each
            self.held_back = True
            return []
        for _ in range(_MISSES):
            jobs, room, picked, walk_us = self._take(conn, plan, limit)
            if jobs or not picked:
                break
        if room < limit:
            self.held_back = True
            self._full.add(plan.limited)
            limit = room
        # Missed ones lie behind where the floors would go.
        if len(jobs) == picked and self._lanes.took(plan, _taken(plan, jobs), limit, self._now_us):
            self._lanes.swept(walk_us / 1e6)
        return jobs

    def _take(self, conn: Connection, plan: Plan, limit: int) -> tuple[list[ClaimedJob], int, int, int]:
        """One claim statement: jobs in the order of the lanes; how many there might have been, how many were picked,
        what that cost the server in microseconds."""
        rows = run(
            conn,
            "claim_jobs",
            queues=text_array([key.queue for key in plan.lanes]),
            priorities=int_array([key.priority for key in plan.lanes]),
            floors_us=int_array([floor.at_us for floor in plan.floors]),
            floor_ids=int_array([floor.id for floor in plan.floors]),
            slack_s=self._slack_s,
            types=self._types_array,
            limit=limit,
            token=secrets.randbits(63) or 1,
            lease_s=self.lease_s,
            node_id=self.node_id,
            limited=plan.limited,
        )
        self._now_us = rows[0][_NOW_US]
        room, picked, walk_us = map(int, rows[0][_SAID].split())
        if rows[0][0] is None:
            rows.clear()
        jobs = [_new_job(ClaimedJob, row[:_SAID]) for row in rows]
        jobs.sort(key=_place_of)
        if len(plan.lanes) > 1:
            places: dict[tuple[str, int], int] = {key: place for place, key in enumerate(plan.lanes)}
            jobs.sort(key=lambda job: places[_lane_of(job)])
        return jobs, room, picked, walk_us

    def _discover(self, conn: Connection) -> list[LaneKey]:
        if not self._many:
            rows = run(conn, "list_lanes", queues=self._queues, max_lanes=_MANY_LANES)
            self._many = len(rows) >= _MANY_LANES
        if self._many:
            rows = run(conn, "list_lanes_distinct", queues=self._queues)
            self._many = len(rows) >= _MANY_LANES // 2
        now = self._clock()
        self._settings_at = now + self._sweep_s
        self._queued = any(row[1] is not None for row in rows)
        cost_s = rows[-1][4]
        self._lanes.swept(cost_s)
        self._lanes.looked(cost_s, now)
        return self._lanes.observe(
            [LaneKey(queue, priority) for queue, priority, *_ in rows if priority is not None],
            now,
            paused={queue for queue, priority, paused, _, _ in rows if priority is None and paused},
            limited={queue for queue, priority, _, limited, _ in rows if priority is None and limited},
        )


def _any(_key: LaneKey) -> bool:
    return True


def _taken(plan: Plan, jobs: list[ClaimedJob]) -> dict[LaneKey, Taken]:
    """Count and last place per lane; the jobs of a lane stand in order."""
    if len(plan.lanes) == 1:
        return {plan.lanes[0]: _gave(len(jobs), jobs[-1])} if jobs else {}
    lanes = list(map(_lane_of, jobs))
    last = dict(zip(lanes, jobs, strict=True))
    return {LaneKey(*lane): _gave(rows, last[lane]) for lane, rows in Counter(lanes).items()}


def _gave(rows: int, last: ClaimedJob) -> Taken:
    return Taken(rows, Floor(last.run_at_us, last.id))


class Sleeper:
    """The protocol of going to sleep over two sequences.

    1. ``announce``: whoever enqueues from now on notifies.
    2. ``pending_writers``, *then* claim. A transaction that enqueued before the announcement notifies nobody;
       it is either still seen as a writer, or what it wrote is seen by the claim that follows.
    3. While any of the writers seen first is still there: wait a little, and do 2 again. Sleep only
       after a claim that came *after* the last of them was gone.
    4. ``woken`` by a node that will be awake for a while: it strikes off all that have announced sleep, itself, others,
       and nodes that are gone. They are told so by a notification with the node's id (``struck``), after which
       those that sleep on begin with 1 again.

    A race makes surplus notifications, until somebody whom they disturb strikes once more. Polling bounds what is
    lost otherwise: by a crash, a pooler, or where the striking session dies between setval and commit, because then those
    that are struck off are not told.

    The connection must LISTEN on :data:`CHANNEL` before the first ``announce``.
    """

    def __init__(self) -> None:
        self.announced = False  # and not struck off since, as far as this node knows

    def announce(self, conn: Connection) -> None:
        """Tell enqueuers that this node is about to sleep."""
        self.announced = True  # also if the answer is lost
        run(conn, "announce_sleep")

    def woken(self, conn: Connection, node_id: str) -> None:
        """This node will be awake for a while: nobody needs to be notified, but who announces sleep anew."""
        run(conn, "note_wake", node_id=node_id)
        self.announced = False

    def struck(self) -> None:
        """Another node has struck off all."""
        self.announced = False

    def pending_writers(self, conn: Connection) -> set[str]:
        """Transactions that may hold jobs not yet visible. Ask before the claim, see the class."""
        return {row[0] for row in run(conn, "pending_writers")}
