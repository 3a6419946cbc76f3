"""The state machine of the slots: a table of cases, and a random life against a world that misbehaves."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aqd.slots import (
    BACKOFF_MAX_S,
    CLOSE_LIMIT_S,
    SPAWN_LIMIT_S,
    Attach,
    Close,
    GiveUp,
    Kill,
    Missing,
    Retire,
    Slots,
    Spawn,
    State,
    backoff_s,
)


def serving(count=2, **options):
    return Slots(count, serving=1, loader_up=True, **options)


def born(plan, now=0.0):
    """Spawns and reports every worker that is wanted now; their incarnations."""
    spawns = [action for action in plan.plan(now) if isinstance(action, Spawn)]
    for action in spawns:
        plan.spawned(action.incarnation, 1000 + action.incarnation, now)
    return [action.incarnation for action in spawns]


def test_nothing_is_spawned_before_a_generation_serves():
    plan = Slots(2)
    assert plan.plan(0.0) == []
    plan.serving = 1
    assert plan.plan(0.0) == []  # its loader is not up
    plan.loader_up = True
    assert plan.plan(0.0) == [Spawn(0, 1, 1), Spawn(1, 2, 1)]
    assert plan.plan(0.0) == []
    assert not plan.settled_in()
    plan.spawned(1, 11, 0.1)
    plan.spawned(2, 12, 0.1)
    assert plan.settled_in()


def test_a_reload_replaces_each_worker_after_its_end_and_not_before():
    plan = serving()
    first, second = born(plan)
    plan.serving = 2
    assert plan.plan(1.0) == [Retire(first), Retire(second)]
    assert plan.retired(first, 1.1) == [Close(first)]
    assert plan.plan(1.1) == []
    plan.exited(first, 1.2, reached_loop=True)
    assert plan.plan(1.2) == [Spawn(0, 3, 2)]
    assert plan.retired(first, 1.3) == []


def test_a_shrunk_node_keeps_its_low_slots():
    plan = serving(3)
    born(plan)
    plan.count = 1
    assert plan.plan(0.0) == [Retire(2), Retire(3)]
    plan.exited(2, 0.1, reached_loop=True)
    plan.exited(3, 0.1, reached_loop=True)
    assert plan.plan(99.0) == []
    plan.count = 3
    assert [action.slot for action in plan.plan(99.0)] == [1, 2]


def test_a_drain_retires_all_and_spawns_none():
    plan = serving()
    born(plan)
    plan.draining = True
    assert plan.plan(0.0) == [Retire(1), Retire(2)]
    plan.exited(1, 0.1, reached_loop=True)
    assert plan.plan(50.0) == []
    assert plan.next_at() is None


def standing_by(plan, now=0.0):
    """The one worker of the plan is to be recycled, and its successor's pid is known; both."""
    (old,) = born(plan, now)
    plan.recycle(old)
    (successor,) = born(plan, now)
    return old, successor


def test_a_recycled_worker_serves_until_its_successor_is_ready():
    plan = serving(1)
    old, successor = standing_by(plan)
    assert plan.worker(old).state is State.SERVING
    assert plan.worker(successor).state is State.STANDBY
    assert plan.plan(1.0) == []
    plan.ready(successor)
    assert plan.plan(1.0) == [Retire(old)]
    assert plan.recycled == 1
    assert plan.retired(old, 1.1) == [Close(old)]
    assert plan.plan(1.1) == []  # never two that may run jobs
    plan.exited(old, 1.2, reached_loop=True)
    assert plan.plan(1.2) == [Attach(successor)]
    assert plan.slots()[0].worker is plan.worker(successor)
    assert plan.settled_in()
    assert plan.plan(9.0) == []
    assert plan.slots()[0].restarts == 0


def test_a_successor_takes_over_at_once_when_the_old_worker_dies():
    plan = serving(1)
    old, successor = standing_by(plan)
    plan.exited(old, 0.1, reached_loop=True)
    assert plan.plan(0.1) == [Attach(successor)]
    assert plan.worker(successor).state is State.SERVING


@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_that_leaves_by_itself_is_recycled_if_it_was_to_be(in_order):
    plan = serving(1)
    old, successor = standing_by(plan)
    plan.exited(old, 0.1, reached_loop=True, in_order=in_order)
    assert plan.plan(0.1) == [Attach(successor)]
    assert (plan.recycled, plan.slots()[0].restarts) == ((1, 0) if in_order else (0, 1))


def test_a_successor_that_is_being_spawned_becomes_the_worker_when_the_old_one_dies():
    plan = serving(1)
    (old,) = born(plan)
    plan.recycle(old)
    assert plan.plan(0.0) == [Spawn(0, 2, 1)]
    plan.exited(old, 0.1, reached_loop=True)
    assert plan.plan(0.1) == []
    plan.spawned(2, 1002, 0.2)
    assert plan.worker(2).state is State.SERVING
    assert plan.settled_in()


def test_a_successor_that_fails_is_tried_again_after_a_pause_and_the_old_one_serves_on():
    plan = serving(1, failures_max=2)
    old, successor = standing_by(plan)
    now = 0.0
    for pause in (0.25, 0.5, 1.0, 2.0):
        plan.exited(successor, now, reached_loop=False)
        assert plan.plan(now) == []
        assert plan.next_at() == now + pause
        assert plan.worker(old).state is State.SERVING
        now += pause
        (successor,) = born(plan, now)
    assert plan.failures_in_a_row == 0  # the slot is served: no reason to give up
    plan.ready(successor)
    assert plan.plan(now) == [Retire(old)]


def test_a_successor_that_dies_while_the_old_worker_leaves_is_replaced_in_the_end():
    plan = serving(1)
    old, successor = standing_by(plan)
    plan.ready(successor)
    assert plan.plan(0.0) == [Retire(old)]
    plan.exited(successor, 0.1, reached_loop=True, had_job=False)
    assert plan.plan(0.1) == []
    plan.exited(old, 0.2, reached_loop=True)
    assert plan.plan(0.2) == [Spawn(0, 3, 1)]


@pytest.mark.parametrize("change", ["reload", "drain", "shrink"])
def test_successors_are_discarded_when_they_are_not_wanted_any_more(change):
    plan = serving(1)
    old, successor = standing_by(plan)
    if change == "reload":
        plan.serving = 2
    elif change == "drain":
        plan.draining = True
    else:
        plan.count = 0
    assert plan.plan(0.1) == [Retire(old), Close(successor)]
    plan.exited(old, 0.2, reached_loop=True)
    assert plan.plan(0.2) == ([Spawn(0, 3, 2)] if change == "reload" else [])
    plan.exited(successor, 0.3, reached_loop=True)
    assert plan.plan(0.3) == []


def test_only_a_worker_that_serves_its_slot_is_recycled():
    plan = serving(1)
    _, successor = standing_by(plan)
    plan.recycle(successor)
    plan.recycle(99)
    assert not plan.worker(successor).recycle


def test_a_crash_of_a_worker_that_had_served_costs_no_pause():
    plan = serving(1)
    for _ in range(100):
        (worker,) = born(plan)
        plan.exited(worker, 0.0, reached_loop=True)
    assert plan.slots()[0].restarts == 100


def test_failed_starts_pause_longer_and_longer_and_then_give_up():
    plan = serving(1, failures_max=5)
    now, pauses = 0.0, []
    for _ in range(5):
        (worker,) = born(plan, now)
        plan.exited(worker, now, reached_loop=False)
        pauses.append(plan.slots()[0].not_before - now)
        assert not any(isinstance(action, Spawn) for action in plan.plan(now + pauses[-1] * 0.99))
        now += pauses[-1]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert plan.plan(now) == [GiveUp(5)]


def test_the_failures_of_all_slots_add_up_and_one_success_clears_them():
    plan = serving(3, failures_max=4)
    for worker in born(plan):
        plan.exited(worker, 0.0, reached_loop=False)
    one, *_others = born(plan, 1.0)
    plan.exited(one, 1.0, reached_loop=True)
    assert plan.failures_in_a_row == 0
    assert GiveUp(4) not in plan.plan(1.0)


def test_a_new_generation_starts_with_a_clean_slate():
    plan = serving(1, failures_max=1)
    (worker,) = born(plan)
    plan.exited(worker, 0.0, reached_loop=False)
    assert plan.plan(0.0) == [GiveUp(1)]
    plan.serving = 2
    plan.generation_changed()
    assert plan.plan(0.0) == [Spawn(0, 2, 2)]


def test_a_worker_that_is_never_seen_is_closed_and_then_missed():
    plan = serving(1)
    assert plan.plan(0.0) == [Spawn(0, 1, 1)]
    assert plan.plan(SPAWN_LIMIT_S - 0.01) == []
    assert plan.plan(SPAWN_LIMIT_S) == [Close(1)]
    missed = SPAWN_LIMIT_S + CLOSE_LIMIT_S
    assert plan.plan(missed - 0.01) == []
    assert plan.plan(missed) == [Missing(1)]


def test_a_late_born_worker_is_killed_if_its_closed_channel_does_not_end_it():
    plan = serving(1)
    plan.plan(0.0)
    plan.plan(SPAWN_LIMIT_S)
    plan.spawned(1, 77, SPAWN_LIMIT_S + 1)
    assert plan.worker(1).state is State.CLOSING
    assert plan.plan(SPAWN_LIMIT_S + CLOSE_LIMIT_S) == [Kill(1, 77)]
    # And again, should it not have helped.
    assert plan.plan(SPAWN_LIMIT_S + 2 * CLOSE_LIMIT_S) == [Kill(1, 77)]


@pytest.mark.parametrize("event", ["spawned", "retired", "exited"])
def test_events_of_unknown_workers_are_ignored(event):
    plan = serving()
    before = copy.deepcopy(plan)
    if event == "spawned":
        plan.spawned(99, 1, 0.0)
    elif event == "retired":
        assert plan.retired(99, 0.0) == []
    else:
        plan.exited(99, 0.0, reached_loop=False)
    assert plan == before


def test_the_pause_grows_to_its_bound():
    pauses = [backoff_s(failures) for failures in range(200)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert max(pauses) == BACKOFF_MAX_S


class World(RuleBasedStateMachine):
    """Carries the actions out, late or never, on processes that are born, stuck and die as they like."""

    @initialize(count=st.integers(1, 4), failures_max=st.integers(2, 6), recycling=st.booleans())
    def start(self, count, failures_max, recycling):
        self.plan = Slots(count, failures_max)
        self.now = 0.0
        self.generation = 0
        self.most = count
        self.asked = set()  # spawn requests whose fork has not been seen
        self.alive = {}  # incarnation -> is its channel open?
        self.retiring = set()
        self.attached = set()  # what the dispatcher may give jobs to
        self.gave_up = False
        if recycling:  # not left to chance: it takes five right steps in a row
            self.new_generation()
            self.act()
            self.fork_all()
            for incarnation in sorted(self.alive):
                self.plan.recycle(incarnation)

    # --- the master's turn

    @rule(after=st.sampled_from([0.0, 0.01, 0.3, 2.0, 6.0, 40.0]))
    def turn(self, after):
        self.now += after
        self.act()

    def act(self):
        at_once = []
        for action in self.plan.plan(self.now):
            at_once.append(action)
            match action:
                case Spawn(slot, incarnation, generation):
                    assert not self.plan.draining
                    assert self.plan.loader_up
                    assert generation == self.plan.serving
                    assert slot < self.plan.count
                    assert incarnation not in self.alive
                    self.asked.add(incarnation)
                case Attach(incarnation):
                    self.attach(incarnation)
                case Retire(incarnation):
                    assert incarnation in self.alive
                    assert incarnation in self.attached
                    worker = self.plan.worker(incarnation)
                    if worker.generation == self.plan.serving and worker.slot < self.plan.count:
                        slot = next(s for s in self.plan.slots() if s.number == worker.slot)
                        assert self.plan.draining or slot.successor.ready, "a gap in service"
                    assert incarnation not in self.retiring
                    self.retiring.add(incarnation)
                case Close(incarnation):
                    if incarnation in self.alive:
                        self.alive[incarnation] = False
                case Kill(incarnation, pid):
                    assert pid == 1000 + incarnation
                    assert self.alive[incarnation] is False, "killed without having been asked to end"
                    self.gone(incarnation, reached_loop=True)
                case Missing(incarnation):
                    assert incarnation in self.asked
                    self.asked.discard(incarnation)
                    self.plan.exited(incarnation, self.now, reached_loop=False)
                case GiveUp(failures):
                    assert failures >= self.plan.failures_max
                    self.gave_up = True
        slots = [action.slot for action in at_once if isinstance(action, Spawn)]
        assert len(slots) == len(set(slots))

    def attach(self, incarnation):
        assert self.alive[incarnation]
        assert incarnation not in self.attached
        self.attached.add(incarnation)

    def gone(self, incarnation, *, reached_loop):
        del self.alive[incarnation]
        self.attached.discard(incarnation)
        self.retiring.discard(incarnation)
        self.plan.exited(incarnation, self.now, reached_loop=reached_loop)

    # --- processes

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def fork(self, data):
        self.forked(data.draw(st.sampled_from(sorted(self.asked))))

    def fork_all(self):
        for incarnation in sorted(self.asked):
            self.forked(incarnation)

    def forked(self, incarnation):
        self.asked.discard(incarnation)
        closed = self.plan.worker(incarnation).state is State.CLOSING
        self.alive[incarnation] = not closed
        self.plan.spawned(incarnation, 1000 + incarnation, self.now)
        if self.plan.worker(incarnation).state is State.SERVING:
            self.attach(incarnation)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), reached_loop=st.booleans())
    def die(self, data, reached_loop):
        self.gone(data.draw(st.sampled_from(sorted(self.alive))), reached_loop=reached_loop)

    @precondition(lambda self: self.retiring)
    @rule(data=st.data())
    def retired(self, data):
        incarnation = data.draw(st.sampled_from(sorted(self.retiring)))
        self.retiring.discard(incarnation)
        assert self.plan.retired(incarnation, self.now) == [Close(incarnation)]
        self.alive[incarnation] = False

    # --- what the master is told

    @rule()
    def new_generation(self):
        self.generation += 1
        self.plan.serving, self.plan.loader_up = self.generation, True
        self.plan.generation_changed()
        self.gave_up = False

    @rule()
    def loader_lost(self):
        self.plan.loader_up = False

    @rule(count=st.integers(1, 4))
    def resize(self, count):
        self.plan.count = count
        self.most = max(self.most, count)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def recycle(self, data):
        self.plan.recycle(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def ready(self, data):
        self.plan.ready(data.draw(st.sampled_from(sorted(self.alive))))

    # --- what always holds

    @invariant()
    def one_worker_with_jobs_a_slot(self):
        workers = self.plan.workers()
        assert {worker.incarnation for worker in workers} == self.asked | set(self.alive)
        taken = [worker.slot for worker in workers]
        assert all(taken.count(slot) <= 2 for slot in taken)
        assert len(set(taken)) <= self.most
        serving = [worker.slot for worker in workers if worker.incarnation in self.attached]
        assert len(serving) == len(set(serving)), "two workers of one slot may run jobs"

    @invariant()
    def nothing_to_do_before_the_next_moment(self):
        """The master sleeps until ``next_at``: a plan that had something to do earlier would be late."""
        plan = copy.deepcopy(self.plan)
        plan.plan(self.now)
        moment = plan.next_at()
        until = self.now + 1000.0 if moment is None else max(self.now, moment - 1e-6)
        assert [a for a in plan.plan(until) if not isinstance(a, GiveUp)] == []

    def teardown(self):
        """The world behaves from now on: every worker that is not wanted ends, every slot is filled."""
        if not hasattr(self, "plan"):
            return
        self.new_generation()
        for _ in range(200):
            self.act()
            self.fork_all()
            for incarnation in sorted(self.alive):
                self.plan.ready(incarnation)
            for incarnation in sorted(self.retiring):
                self.retiring.discard(incarnation)
                self.plan.retired(incarnation, self.now)
                self.alive[incarnation] = False
            for incarnation in sorted(n for n, is_open in self.alive.items() if not is_open):
                self.gone(incarnation, reached_loop=True)
            if self.plan.settled_in() and len(self.alive) == self.plan.count:
                break
            moment = self.plan.next_at()
            self.now = max(self.now, moment if moment is not None else self.now)
        assert self.plan.settled_in(), "not every slot has a worker of the serving generation"
        assert len(self.alive) == self.plan.count
        self.plan.draining = True
        for action in self.plan.plan(self.now):
            assert isinstance(action, Retire)
            self.plan.retired(action.incarnation, self.now)
            self.plan.exited(action.incarnation, self.now, reached_loop=True)
        assert self.plan.workers() == []


World.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRandomLife = World.TestCase
