"""Reserved slots: whoever comes in which order, a queue gets its own, and nobody takes what is kept for another."""

from hypothesis import given
from hypothesis import strategies as st

from aqd.shares import COMMON, Shares

QUEUES = ["mail", "reports", "slow", "other"]


def test_without_reservations_everything_is_allowed() -> None:
    shares = Shares({"mail": 0})
    assert not shares
    assert shares.pools == (COMMON,)
    assert shares.pool_of("mail") == COMMON
    assert shares.allowed(COMMON, 5, {COMMON: 3}) == 5


@given(
    st.dictionaries(st.sampled_from(QUEUES[:2]), st.integers(0, 3)),
    st.integers(7, 10),
    st.lists(st.tuples(st.booleans(), st.sampled_from(QUEUES)), max_size=60),
)
def test_a_queue_always_gets_its_reserved_slots(
    reserved: dict[str, int], slots: int, story: list[tuple[bool, str]]
) -> None:
    """Jobs come and go; at any moment a queue that has not its reserved slots yet finds them free."""
    shares = Shares(reserved)
    running: list[str] = []
    for comes, queue in story:
        if not comes:
            if queue in running:
                running.remove(queue)
            continue
        idle, taken = slots - len(running), shares.count(running)
        if shares.allowed(shares.pool_of(queue), idle, taken):
            running.append(queue)
        else:
            assert running.count(queue) >= reserved.get(queue, 0)
        assert len(running) <= slots
        owed = sum(max(0, number - running.count(name)) for name, number in reserved.items())
        assert owed <= slots - len(running)


@given(st.integers(1, 3), st.integers(4, 8))
def test_all_that_is_free_beyond_the_reservations_may_be_taken(kept: int, slots: int) -> None:
    shares = Shares({"mail": kept})
    assert shares.allowed(COMMON, slots, {}) == slots - kept
    assert shares.allowed("mail", slots, {}) == slots
    assert shares.allowed(COMMON, slots - kept, {"mail": kept}) == slots - kept
