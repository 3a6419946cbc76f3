"""What will happen in one round of chaos, drawn from one seed before anything starts.

Pure: no clock, no process, no file. The same seed (and minutes and nodes) gives the same plan; how the machine
interleaves it is its own affair. Moments are seconds from the start of the round.

A plan holds the nodes and their settings, the jobs with what their payloads allow them to become, and the faults.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"

# Enough for whatever the faults take away: a job that can complete must.
ATTEMPTS = 200
# A job that hangs does so for longer than any round lasts.
FOREVER_S = 3600
# The queue that may run only so many jobs at a time, on all nodes together.
NARROW, NARROW_MOST = "narrow", 2


@dataclass(frozen=True, slots=True)
class Job:
    """One submission. ``allowed``: the final states that its payload permits (without cancelling)."""

    number: int
    at_s: float
    kind: str
    type: str
    attempts: list[list[dict[str, Any]]]
    allowed: frozenset[str]
    options: dict[str, Any]
    door: str = "sql"  # sql | api
    cancel_at_s: float | None = None

    @property
    def payload(self) -> dict[str, Any]:
        return {"n": self.number, "attempts": self.attempts}

    @property
    def may_become(self) -> frozenset[str]:
        """With a cancellation: that too."""
        return self.allowed | ({CANCELLED} if self.cancel_at_s is not None else frozenset())


@dataclass(frozen=True, slots=True)
class Fault:
    """One disturbance. ``pick`` (0 to 1) chooses among what is there when its moment has come."""

    at_s: float
    kind: str
    node: int
    duration_s: float
    pick: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``slots`` are those of each node. ``clock``: the nodes run under libfaketime."""

    seed: int
    duration_s: float
    nodes: int
    slots: int
    lease_s: float
    drain_s: float
    notify: bool
    clock: bool
    max_jobs_per_worker: int
    reserved: dict[str, int]
    jobs: list[Job] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def describe(self) -> str:
        """One paragraph for the log: enough to see what a round was about."""
        kinds = Counter(job.kind for job in self.jobs)
        faults = Counter(fault.kind for fault in self.faults)
        cancels = sum(job.cancel_at_s is not None for job in self.jobs)
        return "\n".join(
            [
                f"seed {self.seed}: {self.duration_s:g} s, {self.nodes} nodes with {self.slots} slots each, "
                f"lease {self.lease_s:g} s, drain {self.drain_s:g} s"
                f"{f', {self.max_jobs_per_worker} jobs a worker' if self.max_jobs_per_worker else ''}"
                f"{'' if self.notify else ', without notifications'}{', with false clocks' if self.clock else ''}"
                f"{', slots reserved' if self.reserved else ''}",
                f"  {len(self.jobs)} jobs ({cancels} cancelled): " + _counts(kinds),
                f"  {len(self.faults)} faults: " + _counts(faults),
            ]
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


# --- jobs ----------------------------------------------------------------------------------------

Steps = list[dict[str, Any]]
Draw = tuple[str, list[Steps], dict[str, Any], frozenset[str]]

_OK, _BAD = frozenset({COMPLETED}), frozenset({FAILED})


def _draw(type: str, *attempts: Steps, allowed: frozenset[str] = _OK, **options: Any) -> Draw:
    return type, list(attempts), {"max_attempts": ATTEMPTS, **options}, allowed


def _few(rng: random.Random) -> int:
    return rng.choice([1, 2, 3])


def _short_limit(rng: random.Random) -> float:
    return round(rng.uniform(0.3, 1.2), 2)


# weight, maker. The weights make most jobs ordinary ones: the harm is to be done to them.
KINDS: dict[str, tuple[int, Callable[[random.Random], Draw]]] = {
    "quick": (30, lambda _: _draw("chaos", [])),
    "short": (25, lambda r: _draw("chaos", [{"sleep": round(r.uniform(0.005, 0.3), 3)}])),
    "long": (8, lambda r: _draw("chaos", [{"sleep": round(r.uniform(1, 4), 2)}])),
    # Longer than most leases: while it runs the node has to keep its own, or to let go of it.
    "lasting": (6, lambda r: _draw("chaos", [{"sleep": round(r.uniform(5, 12), 2)}])),
    "narrow": (8, lambda r: _draw("chaos", [{"sleep": round(r.uniform(0.05, 0.6), 2)}], queue=NARROW)),
    "busy": (3, lambda r: _draw("chaos", [{"burn": round(r.uniform(0.05, 0.3), 3)}])),
    "coroutine": (6, lambda r: _draw("chaos_async", [{"sleep": round(r.uniform(0.01, 1), 3)}])),
    "delayed": (6, lambda r: _draw("chaos", [{"sleep": 0.02}], delay_s=round(r.uniform(0.2, 6), 2))),
    "flaky": (6, lambda r: _draw("chaos", *[[{"raise": "not yet"}]] * r.randint(1, 3), [])),
    "failing": (
        4,
        lambda r: _draw("chaos", [{"sleep": 0.02}, {"raise": "no"}], allowed=_BAD, max_attempts=_few(r)),
    ),
    "failing coroutine": (
        1,
        lambda r: _draw("chaos_async", [{"raise": "no"}], allowed=_BAD, max_attempts=_few(r)),
    ),
    "discarded": (1, lambda _: _draw("chaos", [{"discard": "never"}], allowed=_BAD)),
    "exits": (1, lambda r: _draw("chaos", [{"sys_exit": 3}], allowed=_BAD, max_attempts=_few(r))),
    "crashing once": (
        3,
        lambda r: _draw("chaos", [{r.choice(["segv", "abort"]): None}], []),
    ),
    "dying once": (2, lambda r: _draw("chaos", [{"os_exit": r.choice([0, 1, 77])}], [])),
    "poison": (3, lambda r: _draw("chaos_poison", [{r.choice(["segv", "abort"]): None}], allowed=_BAD)),
    "hanging": (
        2,
        lambda r: _draw(
            "chaos",
            [{"hold_gil": FOREVER_S}],
            allowed=_BAD,
            timeout_s=_short_limit(r),
            max_attempts=r.choice([1, 2]),
        ),
    ),
    "hanging once": (1, lambda r: _draw("chaos", [{"hold_gil": 5}], [], timeout_s=_short_limit(r))),
    "swallowing": (
        2,
        lambda r: _draw(
            "chaos", [{"swallow": FOREVER_S}], allowed=_BAD, timeout_s=_short_limit(r), max_attempts=1
        ),
    ),
    "overdue": (
        1,
        lambda r: _draw(
            "chaos_async", [{"sleep": FOREVER_S}], allowed=_BAD, timeout_s=_short_limit(r), max_attempts=2
        ),
    ),
    "eating memory": (
        1,
        lambda _: _draw("chaos_memory", [{"eat": 256}], allowed=_BAD, timeout_s=20.0, max_attempts=2),
    ),
    "forking": (
        4,
        lambda r: _draw(
            "chaos",
            [{"helper": r.choice(["group", "session", "orphan"])}, {"sleep": round(r.uniform(0, 0.5), 2)}],
        ),
    ),
    "forking and dying": (
        1,
        lambda r: _draw("chaos", [{"helper": r.choice(["group", "session", "orphan"])}, {"os_exit": 1}], []),
    ),
    "detaching": (2, lambda r: _draw("chaos_detach", [{"helper": r.choice(["session", "orphan"])}])),
    "alone": (3, lambda r: _draw("chaos_one_shot", [{"sleep": round(r.uniform(0, 0.1), 3)}])),
    "alone and dying": (1, lambda _: _draw("chaos_one_shot", [{"os_exit": 1}], [])),
    "confined": (2, lambda _: _draw("chaos_confined", [{"be_confined": None}])),
    "reporting": (3, lambda _: _draw("chaos", [{"progress": 50}, {"sleep": 0.5}, {"progress": 90}])),
    "heeding": (2, lambda r: _draw("chaos", [{"wait_should_stop": round(r.uniform(0.2, 2), 2)}])),
    "forked": (1, lambda r: _draw("chaos", [{r.choice(["fork", "escape"]): None}])),
    "printing": (
        2,
        lambda r: _draw(
            r.choice(["chaos", "chaos_output"]), [{"print": r.choice([1, 10])}, {"print_bytes": 40}]
        ),
    ),
    "printing and failing": (
        1,
        lambda _: _draw(
            "chaos", [{"print": 10}, {"print_bytes": 40}, {"raise": "no"}], allowed=_BAD, max_attempts=2
        ),
    ),
    "big result": (3, lambda r: _draw("chaos", [{"return_big": r.choice([3_000, 300_000, 900_000])}])),
    "impossible result": (
        1,
        lambda r: _draw(
            "chaos",
            [r.choice([{"return_object": None}, {"return_big": 3_000_000}])],
            allowed=_BAD,
            max_attempts=2,
        ),
    ),
}


def _jobs(rng: random.Random, duration_s: float, per_s: float) -> Iterator[Job]:
    """Single jobs at random moments; now and then a burst of equal quick ones, which travel in frames."""
    names = list(KINDS)
    weights = [KINDS[name][0] for name in names]
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(per_s)) < duration_s:
        kind = rng.choices(names, weights)[0]
        count = rng.randint(2, 25) if kind == "quick" and rng.random() < 0.3 else 1
        for _ in range(count):
            yield _job(rng, number, round(at_s, 3), kind)
            number += 1


def _job(rng: random.Random, number: int, at_s: float, kind: str) -> Job:
    type_, attempts, options, allowed = KINDS[kind][1](rng)
    if rng.random() < 0.3:
        options["priority"] = rng.choice([-10, 5, 50])
    if rng.random() < 0.3:
        options["idempotency_key"] = f"job {number}"
    cancel_at_s = round(at_s + rng.expovariate(1.5), 3) if rng.random() < 0.12 else None
    door = "api" if rng.random() < 0.2 else "sql"
    return Job(number, at_s, kind, type_, attempts, allowed, options, door, cancel_at_s)


# --- faults --------------------------------------------------------------------------------------

# kind: weight, bounds of the duration in seconds (None: a moment's work).
FAULTS: dict[str, tuple[int, tuple[float, float] | None]] = {
    "kill worker": (16, None),
    "kill dispatcher": (6, None),
    "kill loader": (3, None),
    "kill master": (3, (0.0, 2.0)),
    "kill api": (2, None),
    "kill worker and dispatcher": (2, None),
    "kill node": (1, (0.0, 2.0)),
    "stop worker": (4, (0.1, 4.0)),
    "stop dispatcher": (3, (0.1, 4.0)),
    "stop loader": (2, (0.1, 4.0)),
    "stop master": (2, (0.1, 4.0)),
    "stop api": (1, (0.1, 4.0)),
    "freeze node": (2, (0.5, 6.0)),
    "terminate backend": (6, None),
    "stop backend": (3, (0.5, 6.0)),
    "kill backend": (1, None),
    "kill server": (1, (0.0, 2.0)),
    "restart server": (1, (0.0, 1.0)),
    "read-only server": (1, (0.5, 4.0)),
    "reset connection": (4, None),
    "reset connections": (2, None),
    "cut answers": (3, (0.2, 1.0)),
    "silence": (2, (0.5, 7.0)),
    "silent answers": (2, (0.5, 7.0)),
    "silent requests": (2, (0.5, 7.0)),
    "silent connection": (2, (0.5, 7.0)),
    "refuse connections": (2, (0.5, 4.0)),
    "step clock": (3, None),
    "hup": (3, None),
    "term": (2, (0.0, 2.0)),
}
# These can keep a node from its leases. Now and then they last longer than one.
LONG_SHARE = 0.35
HOLD_UPS = frozenset(
    {
        "stop worker",
        "stop dispatcher",
        "stop master",
        "freeze node",
        "stop backend",
        "read-only server",
        "silence",
        "silent answers",
        "silent requests",
        "silent connection",
        "refuse connections",
    }
)


def _faults(rng: random.Random, plan: Plan, every_s: float) -> Iterator[Fault]:
    names = [name for name in FAULTS if name != "step clock" or plan.clock]
    weights = [FAULTS[name][0] for name in names]
    # Something runs before the first fault, and the last ones have an end within the round.
    at_s = 1.0
    while (at_s := at_s + rng.expovariate(1 / every_s)) < plan.duration_s - 1.0:
        kind = rng.choices(names, weights)[0]
        low, high = FAULTS[kind][1] or (0.0, 0.0)
        duration_s = rng.uniform(low, high)
        if kind in HOLD_UPS and rng.random() < LONG_SHARE:
            duration_s = plan.lease_s + rng.uniform(-1, 6)
        yield Fault(round(at_s, 3), kind, rng.randrange(plan.nodes), round(duration_s, 2), rng.random())


def draw(
    seed: int,
    duration_s: float,
    *,
    nodes: int | None = None,
    lease_s: float | None = None,
    jobs_per_s: float = 4.0,
    fault_every_s: float = 1.5,
) -> Plan:
    """The plan of ``seed``. What is not given is drawn too; the load is meant for two cores."""
    rng = random.Random(seed)
    drawn_nodes = rng.choice([1, 2, 4])
    drawn_lease_s = float(rng.choice([4, 6, 8, 12]))
    nodes = nodes or drawn_nodes
    plan = Plan(
        seed=seed,
        duration_s=duration_s,
        nodes=nodes,
        slots=rng.randint(2, {1: 4, 2: 3}.get(nodes, 2)),
        lease_s=lease_s or drawn_lease_s,
        drain_s=rng.choice([0.5, 2.0, 5.0]),
        notify=rng.random() < 0.8,
        clock=rng.random() < 0.3,
        max_jobs_per_worker=rng.choice([0, 0, 5, 30]),
        reserved=rng.choice([{}, {}, {NARROW: 1}]),
    )
    # A few slots could not catch up with what keeps four busy.
    plan.jobs.extend(_jobs(rng, duration_s, jobs_per_s * min(1.0, nodes * plan.slots / 4)))
    plan.faults.extend(_faults(rng, plan, fault_every_s))
    return plan
