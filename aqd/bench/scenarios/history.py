"""Scenario ``history``: see :class:`History`."""

from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.results import Result
from aqd.database import define

JOBS = 100_000
ROUNDS = 3
ROWS = 10_000_000
DAYS = 10


class History:
    """Whether it is slower when millions of jobs have completed before.

    Two databases take turns: one is new, the other has 10,000,000 completed jobs (of another type) in its history, evenly over
    today and the nine days before, with all indexes, vacuumed. In each, 100,000 jobs are drained, whose completions go into
    the same partition as a million others.

    A good figure: 0.95 of the rate with an empty history, or more.
    """

    name: ClassVar[str] = "history"

    def run(self, bench: Bench) -> Result:
        (slots, *_), jobs, work = bench.settings.slots(), bench.settings.count(JOBS), bench.work
        rows = bench.settings.scaled(ROWS, DAYS)
        empty: list[drained.Drain] = []
        full: list[drained.Drain] = []
        with bench.database() as first, bench.database() as second:
            with bench.step(f"storing {rows:,} completed jobs", rows) as told:
                second.fill_history(rows, DAYS, type="bench_old", told=told)
            with bench.step("vacuum"):
                define(second.conn, "bench_vacuum")
            for _ in range(bench.settings.times(ROUNDS)):
                for database, found, what in ((first, empty, "empty"), (second, full, "history")):
                    found.append(drained.drain(bench, database, slots, jobs, work, what=what))
        result = Result(scenario=self.name, summary="")
        result.rows = [
            drained.row(empty, slots, work, bench, "empty history"),
            drained.row(full, slots, work, bench, f"{rows:,} completed"),
        ]
        result.figures.append(drained.ratio("with history / empty", result.rows[1], result.rows[0], "≥ 0.95"))
        return result
