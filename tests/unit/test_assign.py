"""How many jobs travel together, and how many are claimed: rules that hold for every backlog."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd.assign import (
    AHEAD_MAX,
    ALONE_MAX,
    ALONE_NS,
    FRAME_BYTES_MAX,
    FRAME_JOBS_MAX,
    SMALLEST_NS,
    Budget,
    Estimates,
)

MS = 1_000_000
jobs = st.lists(st.tuples(st.integers(0, 20 * MS), st.integers(0, 40_000)), max_size=300)


@given(jobs, st.integers(0, 50 * MS), st.integers(0, 1000), st.integers(0, 32), st.integers(0, 256))
def test_a_frame_keeps_all_its_bounds(expected, frame_ns, backlog, workers, room):
    count = Budget(frame_ns).frame(expected, backlog=backlog, workers=workers, room=room)
    assert 0 <= count <= len(expected)
    assert count <= max(room, 0)
    assert count <= FRAME_JOBS_MAX
    if expected and room:
        assert count >= 1, "a job that waits, and a worker with room for it"
    if count > 1:
        assert sum(duration for duration, _ in expected[:count]) <= frame_ns
        assert sum(size for _, size in expected[:count]) <= FRAME_BYTES_MAX
        if count > -(-backlog // max(workers, 1)):  # too little to be divided
            assert sum(duration for duration, _ in expected[:count]) <= SMALLEST_NS


def test_short_jobs_travel_together_and_long_ones_alone():
    budget = Budget(5 * MS)
    short, long = (MS, 100), (50 * MS, 100)
    assert budget.frame([short] * 50, backlog=50, workers=2, room=100) == 5
    assert budget.frame([long] * 50, backlog=50, workers=2, room=100) == 1
    assert budget.frame([short, long, short], backlog=50, workers=2, room=100) == 1
    assert budget.frame([short] * 4, backlog=4, workers=2, room=100) == 2  # the other worker's share stays


def test_without_frames_every_job_travels_alone():
    budget = Budget(0)
    assert budget.frame([(1, 1)] * 50, backlog=50, workers=1, room=100) == 1
    assert budget.wants_more(0, 0)
    # Behind others only while they will soon be done.
    assert budget.wants_more(ALONE_NS - 1, ALONE_MAX - 1)
    assert not budget.wants_more(ALONE_NS, 1)
    assert not budget.wants_more(0, ALONE_MAX)


def test_a_worker_is_topped_up_before_it_is_idle():
    budget = Budget(10 * MS)
    assert budget.wants_more(0, 0)
    assert budget.wants_more(4 * MS, 3)
    assert not budget.wants_more(6 * MS, 3)


def test_a_type_never_seen_travels_alone():
    estimates, budget = Estimates(unknown_ns=5 * MS), Budget(5 * MS)
    unknown = estimates.expected_ns("new")
    assert budget.frame([(unknown, 1)] * 10, backlog=10, workers=1, room=100) == 1


def test_a_type_that_got_slow_is_not_stacked_after_its_first_slow_job():
    estimates, budget = Estimates(unknown_ns=5 * MS), Budget(5 * MS)
    for _ in range(100):
        estimates.learn("report", MS // 10)
    assert budget.frame([(estimates.expected_ns("report"), 1)] * 90, backlog=90, workers=1, room=100) > 40
    estimates.learn("report", 100 * MS)
    assert budget.frame([(estimates.expected_ns("report"), 1)] * 90, backlog=90, workers=1, room=100) == 1


def test_a_type_that_got_quick_is_learnt():
    estimates = Estimates(unknown_ns=5 * MS)
    estimates.learn("report", 100 * MS)
    for _ in range(100):
        estimates.learn("report", MS)
    assert estimates.expected_ns("report") < 1.1 * MS


def test_types_that_are_no_longer_served_are_forgotten():
    estimates = Estimates(unknown_ns=7)
    estimates.learn("a", 1)
    estimates.learn("b", 2)
    estimates.keep(["b", "c"])
    assert (estimates.expected_ns("a"), estimates.expected_ns("b")) == (7, 2)


sizes = st.integers(0, 64)
durations = st.one_of(st.just(0.0), st.floats(1.0, 1e12))  # a mean of whole nanoseconds, or none yet


@given(sizes, sizes, st.integers(0, 2000), durations, st.integers(0, 10**8))
def test_demand_is_bounded_and_never_negative(idle, workers, ready, mean_ns, frame_ns):
    idle = min(idle, workers)
    wanted = Budget(frame_ns).demand(idle=idle, workers=workers, ready=ready, mean_ns=mean_ns)
    assert 0 <= wanted <= max(AHEAD_MAX, idle)
    if not workers:
        assert wanted == 0
    if idle > ready:
        assert wanted >= 1, "an idle worker, and nothing for it"


@pytest.mark.parametrize(("idle", "ready", "wanted"), [(3, 0, 3), (3, 2, 1), (0, 0, 0), (1, 5, 0)])
def test_long_jobs_are_not_claimed_ahead(idle, ready, wanted):
    assert Budget(5 * MS).demand(idle=idle, workers=4, ready=ready, mean_ns=60_000 * MS) == wanted


def test_short_jobs_are_claimed_ahead_also_where_each_travels_alone():
    short = {"idle": 0, "workers": 4, "ready": 0, "mean_ns": MS // 100}
    assert Budget(0).demand(**short) == Budget(5 * MS).demand(**short) == AHEAD_MAX
    assert Budget(0).demand(idle=1, workers=4, ready=0, mean_ns=60 * MS) == 1


def test_short_jobs_are_claimed_ahead_from_half_a_target_on():
    short = {"idle": 0, "workers": 16, "mean_ns": MS // 100}
    assert Budget(5 * MS).demand(ready=AHEAD_MAX // 2 - 1, **short) == AHEAD_MAX // 2 + 1
    assert Budget(5 * MS).demand(ready=AHEAD_MAX // 2, **short) == 0
