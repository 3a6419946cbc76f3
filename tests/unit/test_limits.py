"""When a running job must end: a real page, a clock by hand."""

import os

import pytest

from aqd.limits import DUMP_NS, REPEAT_NS, Dump, Hard, Soft, Stop, memory_limit_kb, next_look, review
from aqd.page import Page, StopReason

S = 1_000_000_000
GRACE = 2 * S


@pytest.fixture
def page():
    fd = Page.create(0, 1, 1)
    page = Page(fd)
    os.close(fd)
    yield page
    page.close()


def on_job(page, *, limit_s=10, started_s=100, lease_s=1000, memory_kb=0):
    """The worker is on a new entry."""
    number = page.write([(4711, 1, 1, int(limit_s * S), memory_kb, 0)])
    page.lease_until_ns = lease_s * S
    page.begin(number, started_s * S)
    return number


def look(page, now_s, stop=None, *, stop_all=False, cancelled=()):
    return review(page, stop, int(now_s * S), GRACE, stop_all=stop_all, cancelled=cancelled)


def test_an_idle_worker_is_left_alone_whatever_its_old_lease_says(page):
    assert look(page, 10**9, stop_all=True) == (None, None)
    number = on_job(page)
    page.end(number)
    assert look(page, 10**9, stop_all=True) == (None, None)


def test_a_job_within_its_limits_runs(page):
    on_job(page)
    assert look(page, 109.9) == (None, None)


def test_no_limit_is_none(page):
    on_job(page, limit_s=0, lease_s=10**6)
    assert look(page, 10**5) == (None, None)


def test_the_time_limit_asks_first_repeats_and_then_kills(page):
    number = on_job(page)
    stop, step = look(page, 110)
    assert step == Soft(number, StopReason.TIMEOUT)
    stop, step = look(page, 110.1, stop)
    assert step is None
    stop, step = look(page, 110 + REPEAT_NS / S, stop)
    assert step == Soft(number, StopReason.TIMEOUT)
    stop, step = look(page, 111.8, stop)
    assert step == Soft(number, StopReason.TIMEOUT)
    stop, step = look(page, 112 - DUMP_NS / S, stop)
    assert step == Dump(number)
    stop, step = look(page, 111.99, stop)
    assert step is None
    stop, step = look(page, 112, stop)
    assert step == Hard(number, StopReason.TIMEOUT)


def test_the_reason_that_was_first_stays(page):
    number = on_job(page)
    stop, step = look(page, 110)
    stop, step = look(page, 112.5, stop, stop_all=True)
    assert step == Hard(number, StopReason.TIMEOUT)


def test_a_drain_asks_first_and_then_kills(page):
    number = on_job(page)
    stop, step = look(page, 101, stop_all=True)
    assert step == Soft(number, StopReason.DRAIN)
    stop, step = look(page, 103, stop, stop_all=True)
    assert step == Hard(number, StopReason.DRAIN)


def test_a_stop_that_was_meant_for_an_earlier_entry_does_not_meet_the_next(page):
    first = on_job(page)
    stop, step = look(page, 110)
    assert step == Soft(first, StopReason.TIMEOUT)
    page.end(first)
    second = on_job(page, started_s=111)
    stop, step = look(page, 115, stop)
    assert (stop, step) == (None, None)
    stop, step = look(page, 121, stop)
    assert step == Soft(second, StopReason.TIMEOUT)


@pytest.mark.parametrize("stop_all", [False, True])
def test_a_lease_about_to_end_kills_at_once_and_wins(page, stop_all):
    number = on_job(page, limit_s=1, lease_s=120)
    assert look(page, 117.9)[1] == Soft(number, StopReason.TIMEOUT)
    stop, step = look(page, 118, stop_all=stop_all)
    assert step == Hard(number, StopReason.FENCE)
    assert stop is not None
    assert stop.reason is StopReason.FENCE


def test_a_lease_that_is_renewed_lets_the_job_run_on(page):
    on_job(page, limit_s=0, lease_s=120)
    page.lease_until_ns = 150 * S
    assert look(page, 140) == (None, None)


def test_a_fence_comes_in_the_middle_of_another_stop(page):
    number = on_job(page, lease_s=113)
    stop, _ = look(page, 110)
    assert isinstance(stop, Stop)
    _, step = look(page, 111.5, stop)
    assert step == Hard(number, StopReason.FENCE)


def test_a_cancelled_job_is_asked_first_and_then_killed(page):
    number = on_job(page)
    stop, step = look(page, 101, cancelled={number})
    assert step == Soft(number, StopReason.CANCEL)
    stop, step = look(page, 103, stop, cancelled={number})
    assert step == Hard(number, StopReason.CANCEL)


def test_a_cancelled_job_that_has_returned_is_left_alone(page):
    number = on_job(page)
    page.handler_returned(number)
    assert look(page, 101, cancelled={number}) == (None, None)


def test_a_cancellation_meets_its_own_entry_only_also_when_it_begins_later(page):
    first = on_job(page)
    second = first + 1
    assert look(page, 101, cancelled={second}) == (None, None)
    page.end(first)
    assert on_job(page, started_s=102) == second
    stop, step = look(page, 102, cancelled={second})
    assert step == Soft(second, StopReason.CANCEL)
    page.end(second)
    on_job(page, started_s=103)
    assert look(page, 106, stop, cancelled={second}) == (None, None)


def test_a_cancellation_in_the_middle_of_another_stop_changes_nothing(page):
    number = on_job(page)
    stop, _ = look(page, 110)
    stop, step = look(page, 112, stop, cancelled={number})
    assert step == Hard(number, StopReason.TIMEOUT)


def test_a_lost_lease_asks_for_no_stacks(page):
    on_job(page, lease_s=113)
    stop, _ = look(page, 110)
    _, step = look(page, 111.9, stop)
    assert step == Hard(0, StopReason.FENCE)


def test_the_next_look_is_at_the_limit_then_at_the_stacks_then_at_the_kill(page):
    number = on_job(page)
    assert next_look(page, None, GRACE) == 110 * S
    stop, _ = look(page, 110)
    assert next_look(page, stop, GRACE) == 112 * S - DUMP_NS
    stop, step = look(page, 111.9, stop)
    assert step == Dump(number)
    assert next_look(page, stop, GRACE) == 112 * S
    page.end(number)
    assert next_look(page, stop, GRACE) is None
    on_job(page, limit_s=0)
    assert next_look(page, None, GRACE) is None


def test_the_smallest_memory_limit_of_what_may_still_run_counts(page):
    assert memory_limit_kb(page) == 0
    first = on_job(page, memory_kb=3000)
    assert memory_limit_kb(page) == 3000
    page.write([(1, 1, 1, 0, 0, 0), (2, 1, 1, 0, 2000, 0)])
    assert memory_limit_kb(page) == 2000
    page.recall()
    assert memory_limit_kb(page) == 3000
    page.end(first)
    assert memory_limit_kb(page) == 0
