"""Where the next claim looks: lanes, floors and sweeps. Pure: no clock, no database.

Used by the dispatcher's claimer through ``claims.ClaimBook``. A *lane* is (queue, priority); its QUEUED
jobs are one range of the index ``jobs_ready``, ordered by (run_at, id). A *floor* is the place in that
range where the last claim stopped. Starting there keeps a claim from walking over entries that were
claimed before and that vacuum may not remove while some transaction is old: with 400,000 jobs behind
an open snapshot that is the difference between 4,200 and 31,000 jobs/s.

What a floor hides, a *sweep* finds: it begins all lanes anew. It is due every ``sweep_s``, unless it costs
more than 2 % of the time. So ``sweep_s`` bounds the delay of whatever appears behind a floor: a job of a
transaction that stayed open longer than the slack, a released or rescued job, another node's claim
that was rolled back.

Promises: no due job stays hidden for longer than a sweep; lanes of higher priority come first; lanes of
equal priority take turns; a lane whose first job has been due for ``aging_s`` gets one of eleven jobs claimed, so
that a steady stream of urgent jobs starves nobody for ever. Moments are unix microseconds of the *database's* clock, ``now`` is the
caller's monotonic clock.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

# A statement with 200 lanes takes 3.2 ms, with one 2.2 ms; beyond that it is cut into several.
LANES_PER_CLAIM: Final = 256
# An empty lane is still probed for this long (10 µs each), so that its next job needs no discovery.
KEEP_LANE_S: Final = 60.0
# Sweeping and discovering may take one part in so many of the time, but a sweep is never put off
# for longer than MAX_SWEEP_S.
COST_FACTOR: Final = 50
MAX_SWEEP_S: Final = 30.0
_CHEAP_LOOK_S: Final = 0.001
# Of so many jobs claimed by priority one more is claimed by age.
AGED_SHARE: Final = 10
# At most so many at once: what a claim of a thousand jobs owes.
MAX_OWED: Final = 100


class Floor(NamedTuple):
    """Everything up to and including this place was looked at."""

    at_us: int
    id: int


BOTTOM: Final = Floor(0, 0)


class LaneKey(NamedTuple):
    """A lane's name."""

    queue: str
    priority: int


class Plan(NamedTuple):
    """One claim statement: lanes in the order in which they are served, and their floors. ``limited``: the queue
    of all of them, if it may run only so many jobs at a time."""

    lanes: list[LaneKey]
    floors: list[Floor]
    limited: str | None = None


class Taken(NamedTuple):
    """The rows that one lane of a plan gave: how many, and the last one's place."""

    rows: int
    last: Floor


class _Lane:
    __slots__ = ("floor", "key", "seen_at", "target")

    def __init__(self, key: LaneKey, now: float) -> None:
        self.key = key
        self.floor = BOTTOM
        self.target = BOTTOM  # where the floor was when the running sweep began
        self.seen_at = now


class Lanes:
    """The lanes that this node knows, their floors, and when to sweep."""

    def __init__(self, slack_s: float, sweep_s: float) -> None:
        self._slack_us = round(slack_s * 1_000_000)
        self._sweep_s = sweep_s
        self._lanes: dict[LaneKey, _Lane] = {}
        self._groups: list[list[_Lane]] = []  # by priority, highest first
        self._turn = 0
        self._next_sweep = 0.0
        self._sweep_began = 0.0
        self._sweep_cost = 0.0
        self._next_look = 0.0
        self._limited: frozenset[str] = frozenset()
        self._paused: frozenset[str] = frozenset()
        self._aged: list[LaneKey] = []  # longest waiting first
        # By pool: ten times what is owed to age, minus what has been paid back.
        self._credit: dict[str, int] = {}

    def keys(self) -> list[LaneKey]:
        """All lanes, highest priority first."""
        return [lane.key for group in self._groups for lane in group]

    def floor(self, key: LaneKey) -> Floor:
        """The lane's floor; the bottom for a lane that is not known."""
        lane = self._lanes.get(key)
        return lane.floor if lane else BOTTOM

    # discovery

    def observe(
        self,
        found: Iterable[LaneKey],
        now: float,
        paused: Collection[str] = (),
        limited: Collection[str] = (),
    ) -> list[LaneKey]:
        """Take over what a discovery saw; returns the lanes that are new.

        Lanes that were not seen are empty: they are kept for a while. ``paused``: queues whose lanes are dropped;
        ``limited``: queues that have a limit.
        """
        self.settings(paused, limited)
        fresh = []
        for key in found:
            if key.queue in paused:
                continue
            lane = self._lanes.get(key)
            if lane is None:
                self._lanes[key] = _Lane(key, now)
                fresh.append(key)
            else:
                lane.seen_at = now
        for key, lane in list(self._lanes.items()):
            if now - lane.seen_at > KEEP_LANE_S:
                del self._lanes[key]
        self._regroup()
        return fresh

    def settings(self, paused: Collection[str], limited: Collection[str]) -> None:
        """Take over what is set for queues: the lanes of paused ones are dropped, and not made again."""
        self._paused, self._limited = frozenset(paused), frozenset(limited)
        for key in [key for key in self._lanes if key.queue in self._paused]:
            del self._lanes[key]
        self._regroup()

    def look_due(self, now: float) -> bool:
        """Whether an idle claimer may look for new lanes."""
        return now >= self._next_look

    def looked(self, cost_s: float, now: float) -> None:
        """A discovery took the server ``cost_s``; it walks over dead entries as a sweep does, so it is
        rationed alike."""
        self._next_look = now + (0.0 if cost_s < _CHEAP_LOOK_S else min(cost_s * COST_FACTOR, MAX_SWEEP_S))

    # sweeping

    def sweep_due(self, now: float) -> bool:
        """Whether the next claim must begin all lanes anew."""
        return now >= self._next_sweep

    def begin_sweep(self, now: float) -> None:
        """Begin all lanes anew; each is swept when it has come to where it was."""
        for lane in self._lanes.values():
            lane.target = max(lane.target, lane.floor)
            lane.floor = BOTTOM
        self._sweep_began = now
        self._sweep_cost = 0.0
        self._next_sweep = now + self._sweep_s

    def swept(self, cost_s: float) -> None:
        """Looking behind the floors (a claim for which :meth:`took` said so, a discovery) took ``cost_s``."""
        self._sweep_cost += cost_s
        wait = min(self._sweep_cost * COST_FACTOR, MAX_SWEEP_S)
        self._next_sweep = self._sweep_began + max(wait, self._sweep_s)

    def restart(self) -> None:
        """Forget all floors and sweep at once: what may be claimed has changed."""
        for lane in self._lanes.values():
            lane.floor = lane.target = BOTTOM
        self._next_sweep = 0.0
        self._next_look = 0.0

    def lower(self, key: LaneKey, now: float) -> None:
        """This node put a job back into the lane, behind its floor."""
        if key.queue in self._paused:
            return
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = _Lane(key, now)
            self._regroup()
        else:
            lane.floor = lane.target = BOTTOM

    def blind_s(self, now: float, *, looked: bool) -> float:
        """Seconds until a claim may look where one without a sweep did not: behind the floors, and, unless
        it ``looked``, for lanes that are new."""
        until = self._next_sweep if looked else min(self._next_sweep, self._next_look)
        return max(until - now, 0.0)

    # aging

    def may_age(self) -> list[LaneKey]:
        """The lanes that others may keep from being served: all but those of the highest priority."""
        return [lane.key for group in self._groups[1:] for lane in group]

    def age(self, waited_s: Mapping[LaneKey, float], aging_s: float) -> None:
        """Take over for how long the first due job of lanes has been due."""
        self._aged = sorted(
            (key for key, waited in waited_s.items() if waited >= aging_s), key=lambda key: -waited_s[key]
        )

    def aged_plan(self, wanted: Callable[[LaneKey], bool], pool: str = "") -> tuple[Plan, int] | None:
        """The statement for what is owed to age, if anything is, and how many jobs: the longest waiting lane's.
        ``pool``: whose claims these are; each has an account of its own."""
        owed = self._credit.get(pool, 0) // AGED_SHARE
        if not owed:
            return None
        key = next((key for key in self._aged if key in self._lanes and wanted(key)), None)
        return (self.plan_for([key])[0], owed) if key is not None else None

    def claimed(self, number: int, pool: str = "") -> None:
        """So many jobs were claimed by priority. While nobody waits too long no debt grows, and it never grows
        beyond what a large claim owes: a pool without a slot has lanes that wait, and no turn to give them."""
        most = MAX_OWED * AGED_SHARE if self._aged else AGED_SHARE
        self._credit[pool] = min(self._credit.get(pool, 0) + number, most)

    def claimed_aged(self, key: LaneKey, number: int, pool: str = "") -> None:
        """A lane had its turn by age; the next time it is another one's, until the lanes are looked at again."""
        self._aged.remove(key)
        if number:
            self._credit[pool] -= number * AGED_SHARE
            self._aged.append(key)

    # claiming

    def plans(self, wanted: Callable[[LaneKey], bool] | None = None) -> list[Plan]:
        """The statements that would look into all lanes (or those ``wanted``); equal priorities begin with
        another lane each time."""
        order: list[_Lane] = []
        self._turn += 1
        for group in self._groups:
            first = self._turn % len(group)
            order += group[first:]
            order += group[:first]
        if wanted is not None:
            order = [lane for lane in order if wanted(lane.key)]
        return self._cut(order)

    def plan_for(self, keys: Sequence[LaneKey]) -> list[Plan]:
        """As :meth:`plans`, for some lanes only, highest priority first."""
        wanted = sorted((key for key in keys if key in self._lanes), key=lambda key: -key.priority)
        return self._cut([self._lanes[key] for key in wanted])

    def _cut(self, order: Sequence[_Lane]) -> list[Plan]:
        """One statement for as many lanes as it may have; for each queue with a limit one of its own."""
        plans: list[Plan] = []
        for lane in order:
            limited = lane.key.queue if lane.key.queue in self._limited else None
            if not plans or plans[-1].limited != limited or len(plans[-1].lanes) >= LANES_PER_CLAIM:
                plans.append(Plan([], [], limited))
            plans[-1].lanes.append(lane.key)
            plans[-1].floors.append(lane.floor)
        return plans

    def took(self, plan: Plan, taken: dict[LaneKey, Taken], limit: int, now_us: int) -> bool:
        """Move the floors after a claim of at most ``limit`` rows, executed at ``now_us``.

        A lane that gave fewer rows than were asked for holds nothing else that is due for us, so its
        floor becomes that moment minus the slack. If the limit was reached, the lane that reached it
        continues after its last row, and those behind it were not looked at. Returns whether the claim
        looked behind where a floor was before the sweep.
        """
        if limit <= 0:  # nothing was looked at: a limited queue is full
            return False
        drained = Floor(max(now_us - self._slack_us, 0), 0)
        behind = False
        for key in plan.lanes:
            lane = self._lanes.get(key)
            mine = taken.get(key)
            if mine is not None:
                limit -= mine.rows
            if lane is not None:
                behind = behind or lane.floor < lane.target
                lane.floor = mine.last if mine is not None and limit <= 0 else drained
                if lane.floor >= lane.target:
                    lane.target = BOTTOM
            if limit <= 0:
                break
        return behind

    def _regroup(self) -> None:
        groups: dict[int, list[_Lane]] = {}
        for lane in self._lanes.values():
            groups.setdefault(lane.key.priority, []).append(lane)
        self._groups = [
            sorted(groups[priority], key=lambda lane: lane.key.queue)
            for priority in sorted(groups, reverse=True)
        ]
