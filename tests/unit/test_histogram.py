"""Histograms, and figures that are added up, drained and bounded."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd import figures, histogram
from aqd.figures import OTHER, Attempt, Cell, Figures
from aqd.histogram import JOBS, STATEMENTS, Scale


@pytest.mark.parametrize(
    ("seconds", "place"),
    [
        (0.0, 0),
        (-1.0, 0),
        (0.000999, 0),
        (0.001, 1),
        (0.0019, 1),
        (0.002, 2),
        (1.0, 10),
        (4194.303, 22),
        (4194.304, 23),
        (1e300, 23),
        (math.inf, 23),
    ],
)
def test_places(seconds: float, place: int) -> None:
    assert JOBS.index(seconds) == place


@pytest.mark.parametrize("scale", [JOBS, STATEMENTS])
def test_bounds_are_those_of_the_places(scale: Scale) -> None:
    bounds = scale.bounds_s
    assert len(bounds) == scale.size - 1
    for place, bound in enumerate(bounds):
        assert scale.index(bound * 0.999) == place
        assert scale.index(bound * 1.001) == place + 1


def test_quantiles_of_nothing_and_of_one() -> None:
    assert JOBS.quantile_s([0] * JOBS.size, 0.5) is None
    assert JOBS.quantile_s([], 0.99) is None
    one = [0] * JOBS.size
    one[10] = 1
    assert JOBS.quantile_s(one, 0.5) == pytest.approx(0.768)
    assert JOBS.quantile_s(one, 1.0) == pytest.approx(1.024)
    last = [0] * JOBS.size
    last[-1] = 5
    assert JOBS.quantile_s(last, 0.5) == pytest.approx(4194.304)


@given(st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bucket(times: list[float], share: float) -> None:
    buckets = [0] * JOBS.size
    for seconds in times:
        buckets[JOBS.index(seconds)] += 1
    exact = sorted(times)[math.ceil(share * len(times)) - 1]
    found = JOBS.quantile_s(buckets, share)
    assert found is not None
    # At most twice too long, or half too short; below the first bound nothing is known but the bound.
    assert found <= max(2 * exact, 0.001) * 1.0001
    assert exact < 0.001 or found >= min(exact / 2, JOBS.bounds_s[-1]) * 0.9999


def test_attempts_are_counted_by_what_they_are() -> None:
    counted = Figures()
    counted.attempts(
        [
            Attempt("default", "mail", "completed", "", 0.5, 0.01),
            Attempt("default", "mail", "completed", "", 1.5, None),
            Attempt("default", "mail", "retried", "exception", None, 0.02),
        ]
    )
    cells = {cell.key: cell for cell in counted.cells()}
    assert cells["attempts", "default", "mail", "completed", ""].count == 2
    assert cells["attempts", "default", "mail", "retried", "exception"].count == 1
    duration = cells["duration", "default", "mail", "completed"]
    assert (duration.count, duration.total, sum(duration.buckets)) == (2, 2.0, 2)
    assert cells["waiting", "default", "mail"].count == 2


def test_pairs_are_bounded() -> None:
    """Whatever is submitted: a client that makes up a queue for each job does not fill our memory."""
    counted = Figures(pairs_max=3)
    counted.attempts(Attempt(f"q{n}", "t", "completed", "", 0.1, 0.1) for n in range(5000))
    labels = {cell.labels[:2] for cell in counted.cells()}
    assert labels == {("q0", "t"), ("q1", "t"), ("q2", "t"), (OTHER, OTHER)}
    assert sum(cell.count for cell in counted.drain() if cell.metric == "attempts") == 5000
    counted.attempts([Attempt("new", "t", "completed", "", 0.1, 0.1)])
    assert {cell.labels[0] for cell in counted.drain()} == {OTHER}, "the bound holds beyond a drain"
    assert len(counted._found) <= figures.FOUND_MAX


def test_drained_once() -> None:
    """What several threads count arrives once, whenever it is drained."""
    counted, received = Figures(), Figures()
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            received.add(counted.drain())

    def count() -> None:
        for _ in range(2000):
            counted.attempts([Attempt("q", "t", "completed", "", 0.1, 0.1)] * 3)
            counted.statement("claim", 0.001)

    drainer = threading.Thread(target=drain)
    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in (drainer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    drainer.join()
    received.add(counted.drain())
    cells = {cell.key: cell for cell in received.cells()}
    assert cells["attempts", "q", "t", "completed", ""].count == 18_000
    assert cells["duration", "q", "t", "completed"].buckets[JOBS.index(0.1)] == 18_000
    assert cells["statement", "claim"].count == 6000
    assert counted.drain() == []


def test_histograms_of_other_versions_are_added() -> None:
    """More places, or fewer: the common ones are added, and neither is lost."""
    both = Figures()
    both.add([Cell("duration", ("q", "t", "completed"), 2, 1.0, [1, 1])])
    both.add([Cell("duration", ("q", "t", "completed"), 3, 1.0, [1, 0, 2])])
    both.add([Cell("duration", ("q", "t", "completed"), 1, 1.0, [1])])
    (cell,) = both.cells()
    assert (cell.count, cell.total, cell.buckets) == (6, 3.0, [3, 1, 2])
    given = [Cell("duration", ("q", "t", "completed"), 1, 1.0, [1])]
    both.add(given)
    assert given[0].buckets == [1], "what is given is not changed"


def test_every_metric_says_what_it_is() -> None:
    for metric in figures.METRICS.values():
        assert metric.name.startswith("aqd_")
        assert metric.help.endswith(".")
        assert metric.scale in (None, histogram.JOBS, histogram.STATEMENTS)


def test_pairs_of_others_are_bounded_too() -> None:
    """The master adds up what one dispatcher after the other has counted; nothing that was counted is lost."""
    received = Figures(pairs_max=3)
    for number in range(5):
        one = Figures(pairs_max=3)
        one.attempts(Attempt(f"q{number}", f"t{n}", "completed", "", 1.0, 1.0) for n in range(4))
        one.statement("claim", 0.1)
        received.add(one.drain())
    cells = {cell.key: cell.count for cell in received.cells()}
    pairs = {key[1:3] for key in cells if key[0] == "attempts"}
    assert pairs == {*(("q0", f"t{n}") for n in range(3)), ("other", "other")}
    assert sum(count for key, count in cells.items() if key[0] == "attempts") == 20
    assert cells["statement", "claim"] == 5
    assert len(received.cells()) == 3 * 4 + 1
