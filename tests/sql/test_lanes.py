"""Lanes, floors and sweeps against a simulated table: nothing due is hidden for longer than a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aqd.lanes import (
    BOTTOM,
    COST_FACTOR,
    KEEP_LANE_S,
    LANES_PER_CLAIM,
    MAX_SWEEP_S,
    Floor,
    LaneKey,
    Lanes,
    Plan,
    Taken,
)

SLACK_US = 100_000
SECOND_US = 1_000_000
A = LaneKey("a", 0)
B = LaneKey("b", 0)
URGENT = LaneKey("a", 10)
KEYS = [A, B, URGENT, LaneKey("c", -5)]


@dataclass
class Row:
    """A job in the simulated table. ``visible``: its transaction has committed."""

    id: int
    lane: LaneKey
    run_at_us: int
    visible: bool
    locked: bool = False
    taken: bool = False

    @property
    def place(self) -> Floor:
        return Floor(self.run_at_us, self.id)


@dataclass
class Table:
    """What the claim statement does, in a few lines."""

    rows: list[Row] = field(default_factory=list)

    def claim(self, plan: Plan, limit: int, now_us: int) -> list[Row]:
        taken: list[Row] = []
        slack = Floor(now_us - SLACK_US, 0)
        for key, floor in zip(plan.lanes, plan.floors, strict=True):
            start = floor if floor.at_us <= slack.at_us else slack
            due = [
                row
                for row in self.rows
                if row.lane == key
                and row.visible
                and not row.locked
                and not row.taken
                and start < row.place
                and row.run_at_us <= now_us
            ]
            due.sort(key=lambda row: row.place)
            taken += due[: limit - len(taken)]
        for row in taken:
            row.taken = True
        return taken

    def lanes(self) -> list[LaneKey]:
        return list({row.lane for row in self.rows if row.visible and not row.taken})


def claim(lanes: Lanes, table: Table, limit: int, now_us: int) -> list[Row]:
    """One round as ``ClaimBook.claim`` does it, without the sweeping."""
    got: list[Row] = []
    for plan in lanes.plans():
        rows = table.claim(plan, limit - len(got), now_us)
        taken = {
            key: Taken(len(mine), mine[-1].place)
            for key in plan.lanes
            if (mine := [row for row in rows if row.lane == key])
        }
        lanes.took(plan, taken, limit - len(got), now_us)
        got += rows
        if len(got) >= limit:
            break
    return got


class Claiming(RuleBasedStateMachine):
    """One claimer, with enqueuers and other nodes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.lanes = Lanes(SLACK_US / SECOND_US, 1.5)
        self.now_us = 1_700_000_000 * SECOND_US
        self.next_id = 1

    @property
    def now(self) -> float:
        return self.now_us / SECOND_US

    @initialize()
    def begin(self) -> None:
        self.lanes.observe(KEYS, self.now)

    @rule(step_us=st.integers(1, 3 * SECOND_US))
    def time_passes(self, step_us: int) -> None:
        self.now_us += step_us

    @rule(lane=st.sampled_from(KEYS), count=st.integers(1, 5), delay_us=st.sampled_from([0, 0, SECOND_US]))
    def enqueue(self, lane: LaneKey, count: int, delay_us: int) -> None:
        for _ in range(count):
            self.table.rows.append(Row(self.next_id, lane, self.now_us + delay_us, visible=True))
            self.next_id += 1

    @rule(lane=st.sampled_from(KEYS))
    def enqueue_in_open_transaction(self, lane: LaneKey) -> None:
        self.table.rows.append(Row(self.next_id, lane, self.now_us, visible=False))
        self.next_id += 1

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        hidden = [row for row in self.table.rows if not row.visible]
        if hidden:
            data.draw(st.sampled_from(hidden)).visible = True

    @rule(data=st.data())
    def other_node_locks(self, data: st.DataObject) -> None:
        free = [row for row in self.table.rows if not row.taken and not row.locked]
        if free:
            data.draw(st.sampled_from(free)).locked = True

    @rule()
    def other_node_rolls_back(self) -> None:
        for row in self.table.rows:
            row.locked = False

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        mine = [row for row in self.table.rows if row.taken]
        if mine:
            row = data.draw(st.sampled_from(mine))
            row.taken = False
            self.lanes.lower(row.lane, self.now)

    @rule()
    def sweep(self) -> None:
        self.lanes.begin_sweep(self.now)

    @rule(limit=st.integers(1, 7))
    def claim(self, limit: int) -> None:
        before = {key: self.lanes.floor(key) for key in KEYS}
        got = claim(self.lanes, self.table, limit, self.now_us)
        assert len(got) <= limit
        priorities = [row.lane.priority for row in got]
        assert priorities == sorted(priorities, reverse=True)
        if len(got) == limit:
            return
        # Short: everything due that floors and slack do not hide must have been taken.
        for row in self.table.rows:
            if row.visible and not row.taken and not row.locked and row.run_at_us <= self.now_us:
                assert row.place <= before[row.lane], f"{row} was due, in sight, and left"
                assert row.run_at_us < self.now_us - SLACK_US + 1

    @invariant()
    def a_sweep_finds_everything(self) -> None:
        """Nothing is lost for good: new floors, an endless limit, and every due visible row comes."""
        copy = Table([Row(**vars(row)) for row in self.table.rows])
        fresh = Lanes(SLACK_US / SECOND_US, 1.5)
        fresh.observe(KEYS, self.now)
        claim(fresh, copy, 10_000, self.now_us)
        assert not [
            row
            for row in copy.rows
            if row.visible and not row.locked and not row.taken and row.run_at_us <= self.now_us
        ]

    @precondition(lambda self: len(self.table.rows) > 0)
    @rule()
    def drain(self) -> None:
        """After one sweep, claims with a small limit reach every due row."""
        self.lanes.begin_sweep(self.now)
        for _ in range(len(self.table.rows) + len(KEYS) + 1):
            if not claim(self.lanes, self.table, 3, self.now_us):
                break
        assert not [
            row
            for row in self.table.rows
            if row.visible and not row.locked and not row.taken and row.run_at_us <= self.now_us
        ]


Claiming.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestClaiming = Claiming.TestCase


def made(*keys: LaneKey) -> Lanes:
    lanes = Lanes(0.1, 1.5)
    lanes.observe(keys, 0.0)
    return lanes


def test_higher_priority_first_and_equal_ones_take_turns() -> None:
    lanes = made(A, B, URGENT)
    orders = [lanes.plans()[0].lanes for _ in range(4)]
    assert all(order[0] == URGENT for order in orders)
    assert orders[0][1:] == orders[2][1:] == list(reversed(orders[1][1:])) == list(reversed(orders[3][1:]))


def test_full_claim_stops_at_its_last_row_and_leaves_later_lanes_alone() -> None:
    lanes = made(A, URGENT)
    plan = lanes.plans()[0]
    assert not lanes.took(plan, {URGENT: Taken(10, Floor(500, 7))}, 10, 1_000_000)
    assert lanes.floor(URGENT) == Floor(500, 7)
    assert lanes.floor(A) == BOTTOM


def test_short_claim_moves_all_floors_to_now_minus_slack() -> None:
    lanes = made(A, URGENT)
    lanes.took(lanes.plans()[0], {URGENT: Taken(9, Floor(500, 7))}, 10, 1_000_000)
    assert lanes.floor(URGENT) == lanes.floor(A) == Floor(900_000, 0)


def test_sweep_starts_below_and_costs_at_most_two_percent() -> None:
    lanes = made(A)
    assert lanes.sweep_due(0.0)
    lanes.begin_sweep(0.0)
    lanes.took(lanes.plans()[0], {}, 10, 1_000_000)
    assert not lanes.sweep_due(1.4)
    assert lanes.sweep_due(1.5)

    lanes.begin_sweep(10.0)
    assert lanes.floor(A) == BOTTOM
    behind = lanes.took(lanes.plans()[0], {A: Taken(1, Floor(5, 5))}, 1, 2_000_000)
    assert behind
    lanes.swept(0.1)
    assert not lanes.sweep_due(10.0 + 0.1 * COST_FACTOR - 0.01)
    assert lanes.sweep_due(10.0 + 0.1 * COST_FACTOR)
    lanes.swept(1000.0)
    assert lanes.sweep_due(10.0 + MAX_SWEEP_S), "a sweep is put off, but not for ever"


def test_busy_urgent_lane_does_not_make_sweeps_rare() -> None:
    """A claim that never gets to the lanes behind is not counted as sweeping."""
    lanes = made(A, URGENT)
    lanes.took(lanes.plans()[0], {}, 10, 1_000_000)
    lanes.begin_sweep(10.0)
    lanes.took(lanes.plans()[0], {URGENT: Taken(10, Floor(1_000_000, 1))}, 10, 2_000_000)
    assert not lanes.took(lanes.plans()[0], {URGENT: Taken(10, Floor(1_500_000, 2))}, 10, 2_000_000)
    assert lanes.sweep_due(11.5)


def test_empty_lanes_are_kept_for_a_while_and_paused_ones_are_not() -> None:
    lanes = made(A, B)
    assert lanes.observe([A], KEEP_LANE_S - 1) == []
    assert set(lanes.keys()) == {A, B}
    lanes.observe([A], KEEP_LANE_S + 1)
    assert lanes.keys() == [A]
    assert lanes.observe([A, B], KEEP_LANE_S + 2, paused={"a"}) == [B]
    lanes.observe([], KEEP_LANE_S + 2, paused={"b"})
    assert lanes.keys() == []
    assert lanes.plans() == []


def test_discovery_is_rationed_by_its_cost() -> None:
    lanes = made()
    lanes.looked(0.0005, 10.0)
    assert lanes.look_due(10.0)
    lanes.looked(0.05, 10.0)
    assert not lanes.look_due(12.0)
    assert lanes.look_due(12.5)


def test_many_lanes_are_cut_into_several_statements() -> None:
    keys = [LaneKey("q", priority) for priority in range(LANES_PER_CLAIM + 1)]
    plans = made(*keys).plans()
    assert [len(plan.lanes) for plan in plans] == [LANES_PER_CLAIM, 1]
    assert plans[1].lanes == [LaneKey("q", 0)]


def test_restart_forgets_floors_and_sweeps_at_once() -> None:
    lanes = made(A)
    lanes.begin_sweep(0.0)
    lanes.took(lanes.plans()[0], {}, 10, 1_000_000)
    lanes.restart()
    assert lanes.floor(A) == BOTTOM
    assert lanes.sweep_due(0.1)
