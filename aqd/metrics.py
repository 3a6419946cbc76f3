"""Figures as the text that Prometheus reads (its exposition format 0.0.4, by prometheus-client).

Used by the API (``GET /metrics``: all nodes, from the database), by ``aqd metrics`` and by the exporter (one node,
from its master, also while the database is away). Not by the master, which does not import the library. Pure: cells in,
text out; nothing is registered globally. What a metric means stands in :data:`aqd.figures.METRICS`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aqd import __version__
from aqd.figures import ENDED, METRICS, Cell

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def text(cells: Iterable[Cell], more: Iterable[Metric] = ()) -> bytes:
    """The cells, and families made elsewhere, as text."""
    return exposition.generate_latest(_Collected([*families(cells), *more]))


def of_daemon(answer: dict[str, Any]) -> bytes:
    """The text of what a master has answered to the command ``metrics``."""
    return text(msgspec.convert(answer["cells"], list[Cell]))


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def families(cells: Iterable[Cell]) -> Iterator[Metric]:
    """One family a metric, in the order of :data:`METRICS`; metrics that this version does not know are left out."""
    build = InfoMetricFamily("aqd_build", "The version that answers.")
    build.add_metric([], {"version": __version__})
    yield build
    by_metric: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_metric[cell.metric].append(cell)
    if attempts := by_metric.get("attempts"):
        yield _ended(attempts)
    for name, metric in METRICS.items():
        found = [cell for cell in by_metric[name] if len(cell.labels) == len(metric.labels)]
        if not found:
            continue
        if metric.gauge:
            gauges = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for cell in found:
                gauges.add_metric(cell.labels, cell.total)
            yield gauges
        elif metric.scale is None:
            counters = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for cell in found:
                counters.add_metric(cell.labels, cell.count)
            yield counters
        else:
            histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for cell in found:
                histograms.add_metric(cell.labels, _cumulative(cell, metric.scale.bounds_s), cell.total)
            yield histograms


def histogram(
    name: str, help: str, labels: tuple[str, ...], cells: Iterable[Cell], bounds_s: list[float]
) -> HistogramMetricFamily:
    """A family of one's own."""
    family = HistogramMetricFamily(name, help, labels=labels)
    for cell in cells:
        family.add_metric(cell.labels, _cumulative(cell, bounds_s), cell.total)
    return family


def _ended(attempts: Iterable[Cell]) -> Metric:
    """Jobs by outcome: their last attempts, whatever the reason."""
    sums: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for cell in attempts:
        if len(cell.labels) == 4 and cell.labels[2] in ENDED:
            sums[cell.labels[0], cell.labels[1], cell.labels[2]] += cell.count
    family = CounterMetricFamily(
        "aqd_jobs", "Jobs that ended on a node, by outcome.", labels=("queue", "type", "outcome")
    )
    for labels, number in sums.items():
        family.add_metric(labels, number)
    return family


def _cumulative(cell: Cell, bounds_s: list[float]) -> list[tuple[str, float]]:
    """Prometheus counts what is not longer than each bound. One of another version may have fewer places, or more."""
    found, below = [], 0
    for place, bound_s in enumerate(bounds_s):
        below += cell.buckets[place] if place < len(cell.buckets) else 0
        found.append((f"{bound_s:g}", float(below)))
    return [*found, ("+Inf", float(cell.count))]
