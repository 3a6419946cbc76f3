"""What the comparison prints: rich tables, and the same as JSON and for a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from aqd.bench.results import Latency, Row, Run
from aqd.bench.results import Result as Panel
from tests.bench.peers.figures import Result, ratio
from tests.bench.peers.systems import System

Results = Mapping[str, Result]


def number(value: float | None, digits: int = 0) -> str:
    """With separators; a dash for nothing."""
    return "–" if value is None else f"{value:,.{digits}f}"


def drain_table(systems: Sequence[System], results: Results) -> Table:
    """Rates, and what a job costs."""
    table = Table(title="drain: no-op jobs, first start to last record", title_justify="left")
    table.add_column("system", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for heading in ("jobs", "jobs/s", "rounds", "aqd ÷ it", "WAL B/job", "CPU s/1000"):
        table.add_column(heading, justify="right")
    for system in systems:
        result = results[system.name]
        if not result.drains:
            continue
        table.add_row(
            system.name,
            system.title,
            number(result.drains[0].jobs),
            number(result.rate),
            " ".join(number(each.rate) for each in result.drains),
            _against(system, results),
            number(result.wal_per_job),
            number(result.cpu_per_1000, 3),
        )
    return table


def _against(system: System, results: Results) -> str:
    """The ratio of ours to it; which of ours, where that is not plain aqd."""
    if system.family.name == "aqd" or system.against not in results:
        return "–"
    found = ratio(results[system.against].rate, results[system.name].rate)
    if found is None:
        return "–"
    mark = "" if system.against == "aqd" else " *"
    return f"{found:.2f}{mark}"


def latency_table(systems: Sequence[System], results: Results) -> Table:
    """Percentiles in milliseconds."""
    table = Table(
        title="latency: idle, one job at a time, enqueue call to handler start, ms", title_justify="left"
    )
    table.add_column("system", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for heading in ("jobs", "p50", "p95", "p99", "p50 of rounds", "aqd ÷ it (p50)"):
        table.add_column(heading, justify="right")
    for system in systems:
        result = results[system.name]
        if not result.latencies:
            continue
        ours = results["aqd"].latency(50) if "aqd" in results else None
        found = None if system.family.name == "aqd" else ratio(ours, result.latency(50))
        table.add_row(
            system.name,
            system.latency_title or system.title,
            number(len(result.latencies[0].values)),
            *(number(result.latency(percent), 2) for percent in (50, 95, 99)),
            " ".join(number(each.at(50), 2) for each in result.latencies),
            number(found, 2),
        )
    return table


def skipped(systems: Sequence[System], results: Results) -> list[str]:
    """A line for each system that was not, or not wholly, measured."""
    return [f"{each.name}: {results[each.name].reason}" for each in systems if results[each.name].reason]


def notes(systems: Sequence[System]) -> list[str]:
    """What one has to know to read the figures."""
    families = {each.family.name: each.family.note for each in systems}
    lines = [f"{name}: {note}" for name, note in families.items() if note]
    if any(each.against != "aqd" for each in systems):
        lines.append("* against aqd-single, which also sends each job alone")
    return lines


def document(systems: Sequence[System], results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for ``--json``."""
    return {
        **about,
        "systems": {
            each.name: {
                "settings": dict(each.settings),
                "title": each.title,
                "processes": each.processes,
                "against": each.against,
                "reason": results[each.name].reason,
                "drain": [
                    {
                        "jobs": found.jobs,
                        "seconds": found.seconds,
                        "rate": found.rate,
                        "cpu_s": found.cpu_s,
                        "wal_bytes": found.wal_bytes,
                    }
                    for found in results[each.name].drains
                ],
                "rate": results[each.name].rate,
                "latency_ms": [found.values for found in results[each.name].latencies],
                "p50_p95_p99_ms": [results[each.name].latency(percent) for percent in (50, 95, 99)],
            }
            for each in systems
        },
    }


def panels(systems: Sequence[System], results: Results) -> list[Panel]:
    """The same as panels of :mod:`aqd.bench.chart`."""
    drains = Panel(scenario="drain", summary="no-op jobs, first start to last record")
    latencies = Panel(scenario="latency", summary="idle, one job at a time")
    for each in systems:
        found = results[each.name]
        if found.drains:
            runs = [Run(total_s=drain.seconds, throughput=drain.rate) for drain in found.drains]
            row = Row(variant=each.name, jobs=found.drains[0].jobs, throughput=found.rate, runs=runs)
            drains.rows.append(row)
        if found.latencies:
            count = sum(len(each_round.values) for each_round in found.latencies)
            shown = Latency(
                count=count,
                mean_ms=sum(map(sum, (each_round.values for each_round in found.latencies))) / count,
                p50_ms=found.latency(50) or 0.0,
                p95_ms=found.latency(95) or 0.0,
                p99_ms=found.latency(99) or 0.0,
                max_ms=max(max(each_round.values) for each_round in found.latencies),
            )
            latencies.rows.append(Row(variant=each.name, jobs=count, latency=shown))
    return [each for each in (drains, latencies) if each.rows]
