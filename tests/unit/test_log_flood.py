"""Flood control: a line that would come a thousand times comes once, with a count."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aqd.log import Suppressor


def test_suppressor_lets_one_line_through_in_an_interval() -> None:
    suppressor = Suppressor(10.0)
    assert suppressor.allow("connect", now=100.0) == (True, 0)
    assert [suppressor.allow("connect", now=100.0 + t) for t in (1, 5, 9.9)] == [
        (False, 1),
        (False, 2),
        (False, 3),
    ]
    assert suppressor.allow("other", now=105.0) == (True, 0)
    assert suppressor.allow("connect", now=110.0) == (True, 3)
    assert suppressor.allow("connect", now=111.0) == (False, 1)
    assert suppressor.reset("connect") == 1
    assert suppressor.allow("connect", now=112.0) == (True, 0)


def test_suppressor_is_bounded() -> None:
    suppressor = Suppressor(1000.0)
    for number in range(10_000):
        assert suppressor.allow(f"key {number}", now=float(number))[0]
    assert len(suppressor._seen) <= Suppressor.MAX_KEYS
    assert suppressor.allow("key 9999", now=9999.5) == (False, 1)


@given(st.lists(st.floats(0, 50), max_size=200), st.floats(0.1, 10))
def test_suppressor_counts_every_line_once(gaps: list[float], interval: float) -> None:
    suppressor = Suppressor(interval)
    now, shown, suppressed = 0.0, [], 0
    for gap in gaps:
        now += gap
        allowed, count = suppressor.allow("k", now=now)
        if allowed:
            shown.append(now)
            suppressed += count
    assert all(later - earlier >= interval for earlier, later in itertools.pairwise(shown))
    assert len(shown) + suppressed + suppressor.reset("k") == len(gaps)
