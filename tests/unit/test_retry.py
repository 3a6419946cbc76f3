"""Retry decisions: when a job runs again, and when it never does."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd.hookspecs import Backoff
from aqd.retry import MAX_RETRY_AFTER_S, decide

REPEATED = ["failed", "crashed", "timed_out", "lost"]

backoffs = st.builds(
    lambda low, more, factor: Backoff(base_s=low, max_s=low + more, factor=factor),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(1, 100),
)


@given(
    st.sampled_from(REPEATED),
    st.integers(1, 999),
    backoffs,
    st.one_of(st.none(), st.floats(), st.integers(-(10**400), 10**400)),
    st.integers(0, 2**32),
)
def test_a_wait_is_always_a_usable_number_within_the_bounds(kind, attempt, backoff, wish, seed):
    wait = decide(kind, attempt, 1000, backoff, Random(seed), retry_after_s=wish).retry_in_s
    assert isinstance(wait, float)
    if wish is None or (isinstance(wish, float) and math.isnan(wish)):
        assert backoff.base_s <= wait <= backoff.max_s
    else:
        assert 0 <= wait <= MAX_RETRY_AFTER_S


@pytest.mark.parametrize("kind", REPEATED)
def test_attempts_used_up_means_failed_for_good(kind):
    rng = Random(1)
    assert decide(kind, 2, 3, Backoff(), rng).retry_in_s is not None
    assert decide(kind, 3, 3, Backoff(), rng).retry_in_s is None
    assert decide(kind, 4, 3, Backoff(), rng).retry_in_s is None
    # The handler's own wish buys no further attempt.
    assert decide(kind, 3, 3, Backoff(), rng, retry_after_s=1).retry_in_s is None


@pytest.mark.parametrize("kind", ["discarded", "unknown_type"])
def test_some_ends_are_never_repeated(kind):
    assert decide(kind, 1, 1000, Backoff(), Random(1), retry_after_s=1).retry_in_s is None


@pytest.mark.parametrize("kind", ["completed", "interrupted", ""])
def test_what_is_no_failure_is_refused(kind):
    with pytest.raises(ValueError, match="not a failed attempt"):
        decide(kind, 1, 3, Backoff(), Random(1))


def test_the_range_grows_with_the_attempts_and_stops_at_the_bound():
    backoff = Backoff(base_s=2, max_s=100, factor=2)
    rng = Random(7)
    for attempt, top in [(1, 4), (2, 8), (3, 16), (5, 64), (6, 100), (50, 100)]:
        waits = [decide("failed", attempt, 1000, backoff, rng).retry_in_s for _ in range(400)]
        assert min(waits) >= 2
        assert max(waits) <= top
        # Full jitter: all of the range is used, the first retry included.
        middle = (2 + top) / 2
        assert 120 < sum(wait < middle for wait in waits) < 280


def test_growth_beyond_what_a_float_can_hold_is_the_upper_bound():
    wait = decide("failed", 900, 1000, Backoff(base_s=1, max_s=50, factor=100), Random(1)).retry_in_s
    assert 1 <= wait <= 50


def test_a_job_that_kills_its_process_again_and_again_is_poison():
    def after(crashes, kind="crashed"):
        return decide(kind, 2, 1000, Backoff(), Random(1), crashes=crashes, max_crashes=3)

    assert after(1).retry_in_s is not None
    assert after(2).retry_in_s is None
    assert "3 times" in after(2).verdict
    assert after(50, "failed").retry_in_s is not None  # only crashes spend the crash budget
    assert not after(50, "failed").verdict


def test_the_handlers_own_moment_replaces_the_backoff():
    def ask(after_s):
        return decide("failed", 1, 5, Backoff(), Random(1), retry_after_s=after_s).retry_in_s

    assert ask(17.5) == 17.5
    assert ask(0) == 0.0
    assert ask(-5) == 0.0
    assert ask(math.inf) == MAX_RETRY_AFTER_S
    assert 2 <= ask(True) <= 4  # no number: the backoff decides


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"base_s": -1}, "base_s"),
        ({"base_s": math.nan}, "base_s"),
        ({"max_s": math.inf}, "max_s"),
        ({"factor": 0.5}, "factor"),
        ({"factor": True}, "factor"),
        ({"base_s": "2"}, "base_s"),
        ({"base_s": 10, "max_s": 5}, "above max_s"),
        ({"max_s": 10**400}, "max_s"),
    ],
)
def test_a_backoff_that_makes_no_sense_is_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        Backoff(**fields)
