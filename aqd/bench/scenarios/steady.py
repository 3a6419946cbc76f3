"""Scenario ``steady``: see :class:`Steady`."""

from collections import defaultdict
from typing import ClassVar

from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.open_loop import stream
from aqd.bench.results import Result, Series

RATE = 500.0
SECONDS = 30.0
SENDERS_MAX = 32


class Steady:
    """Latencies while jobs come in at a fixed rate, whatever becomes of them.

    Senders, each a process with a connection of its own, submit one job at a time on a schedule (``--rate``, 500 a second)
    for 30 seconds (``--seconds``). The schedule waits for nobody, and a job's clock starts when it was *to be* sent: where the
    database or the daemon stands still for a second, all that was due meanwhile is in the figures with its waiting
    ("coordinated omission" is leaving that out).

    A good figure: the achieved rate is the wanted one, and p99 stays near that of an idle system. Where the senders are far
    behind, the rate is beyond the machine.
    """

    name: ClassVar[str] = "steady"

    def run(self, bench: Bench) -> Result:
        rate = bench.settings.rate or RATE
        result = Result(scenario=self.name, summary="")
        for slots in bench.settings.slots():
            with bench.database() as database, bench.running(database, slots) as node:
                row, latencies = stream(
                    bench, database, node, rate, bench.settings.duration_s(SECONDS), SENDERS_MAX
                )
            row.variant = f"{rate:g} jobs/s"
            result.rows.append(row)
            result.series += _by_second(slots, latencies)
        return result


def _by_second(slots: int, latencies: list[tuple[float, float]]) -> list[Series]:
    """p50 and p99 of the jobs that were due in each second."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for at_s, latency_s in latencies:
        seconds[int(at_s)].append(latency_s * 1000)
    return [
        Series(
            name=f"{slots} workers, {name}",
            x="second",
            y="latency, ms",
            points=[(at, measure.percentile(sorted(found), share)) for at, found in sorted(seconds.items())],
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
