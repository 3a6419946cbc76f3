"""Scenario ``pinned``: see :class:`Pinned`."""

from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database
from aqd.bench.results import Figure, Result, Series
from aqd.database import run

JOBS = 400_000
SLICES = 4


class Pinned:
    """Whether it slows down while somebody else's transaction holds back vacuum.

    A session takes a snapshot (REPEATABLE READ) just before the first claim and keeps it to the end: a dump, a report, a
    forgotten psql. From then on no dead row can be removed, and a queue that walks over them falls, after 400,000 jobs, to a
    seventh of its rate. Those are drained, and the rate of each quarter is read off the moments at which jobs had finished;
    once more without the snapshot, for comparison.

    A good figure: the last 100,000 at 0.8 of the rate of the first, or more.
    """

    name: ClassVar[str] = "pinned"

    def run(self, bench: Bench) -> Result:
        (slots, *_), jobs, work = bench.settings.slots(), bench.settings.count(JOBS, SLICES), bench.work
        result = Result(scenario=self.name, summary="")
        for variant, pinned in (("pinned", True), ("not pinned", False)):
            found: list[drained.Drain] = []
            rates: list[list[float]] = []
            for _ in range(bench.settings.times(1)):
                with bench.database() as database:
                    found.append(
                        drained.drain(bench, database, slots, jobs, work, pinned=pinned, what=variant)
                    )
                    rates.append(_rates(database, found[-1]))
            row = drained.row(found, slots, work, bench, variant)
            middle = rates[found.index(drained.median(found))]
            size = jobs // SLICES
            row.figures += [
                Figure(f"jobs {size * n + 1:,} to {size * (n + 1):,}", rate, "jobs/s")
                for n, rate in enumerate(middle)
            ]
            row.figures.append(
                Figure("last / first quarter", middle[-1] / middle[0], "×", "≥ 0.8" if pinned else "")
            )
            result.rows.append(row)
            points = [(float(size * (n + 1)), rate) for n, rate in enumerate(middle)]
            result.series.append(Series(name=variant, x="jobs done", y="jobs/s", points=points))
        result.figures.append(drained.ratio("pinned / not pinned", result.rows[0], result.rows[1]))
        return result


def _rates(database: Database, drain: drained.Drain) -> list[float]:
    """Jobs a second of each quarter."""
    size = drain.jobs // SLICES
    rows = run(database.conn, "bench_slices", queue=QUEUE, after=drain.after, size=size)
    found, before = [], drain.started_at
    for _, count, finished_at in rows[:SLICES]:
        found.append(count / max(finished_at - before, 1e-6))
        before = finished_at
    return found
