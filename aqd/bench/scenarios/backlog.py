"""Scenario ``backlog``: see :class:`Backlog`."""

from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database
from aqd.bench.results import Result
from aqd.bench.settings import Work

JOBS = 100_000
ROUNDS = 3
LOWER = 1_000_000
FUTURE = 500_000
FAILED = 500_000
UNKNOWN = 300_000
PRIORITY = 10
A_YEAR_S = 365 * 86_400.0
# A keeper would fail the jobs of an unknown type after a minute; they are to stay in front.
TABLES = {"jobs": {"unknown_type_grace_s": 86_400.0}}


class Backlog:
    """Whether it is slower to work through jobs when many others are in the table.

    Two databases take turns: one is empty, the other holds 1,000,000 due jobs of lower priority (half of them in another
    queue), 500,000 for next year and 500,000 FAILED ones in the same lane, and 300,000 of a type that no node knows, due before
    all others, in front of the lane. In each, 100,000 jobs of higher priority are drained (:mod:`aqd.bench.drained`).

    The duration of claims is what the dispatcher has measured, round trip included, in a histogram whose buckets double; no
    statement is logged or explained, which would be part of what is measured.

    A good figure: at least 0.9 of the rate with an empty table, and 99 of 100 claims below 20 ms.
    """

    name: ClassVar[str] = "backlog"

    def run(self, bench: Bench) -> Result:
        (slots, *_), jobs, work = bench.settings.slots(), bench.settings.count(JOBS), bench.work
        empty: list[drained.Drain] = []
        full: list[drained.Drain] = []
        with bench.database() as first, bench.database() as second:
            self._fill(bench, second, work)
            for _ in range(bench.settings.times(ROUNDS)):
                for database, found, what in ((first, empty, "empty"), (second, full, "backlog")):
                    found.append(
                        drained.drain(
                            bench,
                            database,
                            slots,
                            jobs,
                            work,
                            priority=PRIORITY,
                            tables=TABLES,
                            what=what,
                        )
                    )
        result = Result(scenario=self.name, summary="")
        for found, variant in ((empty, "empty table"), (full, "with a backlog")):
            row = drained.row(found, slots, work, bench, variant)
            # What comes after the measured jobs has begun before the daemon could be stopped, so the figures of one job
            # are not comparable.
            claims = drained.p99("claim", drained.median(found).claims, "≤ 20")
            row.figures = [claims] if claims else []
            result.rows.append(row)
        result.figures.append(
            drained.ratio("with a backlog / empty", result.rows[1], result.rows[0], "≥ 0.9")
        )
        return result

    def _fill(self, bench: Bench, database: Database, work: Work) -> None:
        scaled = bench.settings.scaled
        lower = scaled(LOWER)
        for what, number, options in (
            ("of lower priority", lower - lower // 2, {"priority": -10}),
            ("of another queue", lower // 2, {"priority": -10, "queue": "other"}),
            ("for next year", scaled(FUTURE), {"priority": PRIORITY, "in_s": A_YEAR_S}),
            ("FAILED", scaled(FAILED), {"priority": PRIORITY, "state": "FAILED"}),
            (
                "of an unknown type",
                scaled(UNKNOWN),
                {"priority": PRIORITY, "in_s": -60.0, "type": "unknown"},
            ),
        ):
            with bench.step(f"storing {number:,} jobs {what}", number) as told:
                database.fill(number, work, told=told, **({"queue": QUEUE} | options))
