"""What jobs are charged: by the kernel's account, and by the clock if they were too short to wait."""

from aqd.costs import SAMPLE_NS, Costs


def test_light_jobs_are_charged_by_the_clock_to_the_last_nanosecond() -> None:
    costs = Costs()
    before, begin_ns = costs.cpu_us, costs._ended_ns
    used = [costs.end_light_job(begin_ns + count * 1_500)[0] for count in range(1, 101)]
    assert set(used) == {1, 2}
    assert sum(used) == costs.cpu_us - before == 150


def test_what_the_clock_says_too_much_is_not_the_next_ones_and_not_for_long() -> None:
    costs = Costs()
    costs.cpu_us += 1_000_000_000  # as if light jobs had been preempted
    assert costs.end_job(False)[0] == 0
    assert costs.cpu_us < 1_000_000_000
    costs.cpu_us += 1_000_000_000
    costs.end_light_job(costs._sampled_ns + SAMPLE_NS + 1)
    assert costs.cpu_us < 1_000_000_000
