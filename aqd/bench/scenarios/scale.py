"""Scenario ``scale``: see :class:`Scale`."""

import math
import os
from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.results import Figure, Result, Series
from aqd.bench.settings import Work

SLOTS = (1, 2, 4, 8, 16)
ROUNDS = 1
# So that a measurement takes some seconds, whatever the number of slots.
SLEEPS = 60
CPUS = 150
WORKS = (Work(handler="sleep", cost_ms=50.0), Work(handler="cpu", cost_ms=20.0))


class Scale:
    """What more slots bring: efficiency against the ideal, for handlers that wait and handlers that compute.

    1, 2, 4, 8 and 16 slots (or ``--workers``). "sleep": 60 jobs of 50 ms for each slot, whose ideal is 3 s. "cpu": 150 jobs of
    20 ms of processor time for each slot that has a core to itself; the ideal is their processor time divided by the cores,
    or by the slots where those are fewer. ``--handler`` and ``--cost-ms`` take one of the two with another duration. Efficiency
    is the ideal duration divided by the measured one, from the first claim to the last recorded outcome.

    A good figure: 0.95 or more with sleeping handlers, up to 16 slots. Computing handlers share the cores with PostgreSQL,
    if that runs on the same machine.
    """

    name: ClassVar[str] = "scale"

    def run(self, bench: Bench) -> Result:
        cores = len(os.sched_getaffinity(0))
        works = WORKS if bench.settings.handler == "noop" else (bench.work,)
        result = Result(scenario=self.name, summary="")
        for work in works:
            points = []
            for slots in bench.settings.slots(SLOTS):
                width = slots if work.handler == "sleep" else min(slots, cores)
                each = bench.settings.scaled(SLEEPS if work.handler == "sleep" else CPUS, 4)
                jobs = bench.settings.jobs or each * width
                found = []
                for _ in range(bench.settings.times(ROUNDS)):
                    with bench.database() as database:
                        found.append(drained.drain(bench, database, slots, jobs, work))
                row = drained.row(found, slots, work, bench, f"{work.handler} {work.cost_ms:g} ms")
                assert row.total_s is not None
                ideal_s = math.ceil(jobs / width) * work.cost_ms / 1000
                efficiency = ideal_s / row.total_s
                wanted = "≥ 0.95" if work.handler == "sleep" else ""
                row.figures = [Figure("efficiency", efficiency, "", wanted), Figure("ideal", ideal_s, "s")]
                points.append((float(slots), efficiency))
                result.rows.append(row)
            name = f"{work.handler} {work.cost_ms:g} ms"
            result.series.append(Series(name=name, x="slots", y="efficiency", points=points))
        return result
