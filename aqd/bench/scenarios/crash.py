"""Scenario ``crash``: see :class:`Crash`."""

import signal
from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.database import Database
from aqd.bench.results import Figure, Result
from aqd.bench.settings import Work
from aqd.database import run
from aqd.errors import WorldError

JOBS = 10_000
ROUNDS = 3
EVERY = 10
SEGFAULT = Work(handler="segfault")


class Crash:
    """What it costs that every tenth job kills its process, and that none is lost.

    10,000 jobs of ``--handler``; in turns with the same jobs, each tenth of which ends its worker by SIGSEGV (no core is
    dumped). Its handler is registered with ``max_crashes=1``, so that it is FAILED at the first crash; what counts is the
    replacement of the worker, and that the other jobs that had travelled with it are run.

    Verified each time: all others are COMPLETED, each tenth is FAILED with a record of an attempt that was ``crashed`` by
    signal 11, and nothing else is there. The benchmark ends with an error otherwise.

    A good figure: 0.3 of the rate without crashes, or more.
    """

    name: ClassVar[str] = "crash"

    def run(self, bench: Bench) -> Result:
        (slots, *_), jobs, work = bench.settings.slots(), bench.settings.count(JOBS, EVERY), bench.work
        calm: list[drained.Drain] = []
        crashing: list[drained.Drain] = []
        for _ in range(bench.settings.times(ROUNDS)):
            with bench.database() as database:
                calm.append(drained.drain(bench, database, slots, jobs, work))
            with bench.database() as database:
                crashing.append(
                    drained.drain(
                        bench, database, slots, jobs, work, other=SEGFAULT, every=EVERY, what="crashes"
                    )
                )
                _verify(database, crashing[-1])
        result = Result(scenario=self.name, summary="")
        result.rows = [
            drained.row(calm, slots, work, bench, "without crashes"),
            drained.row(crashing, slots, work, bench, "every 10th segfaults"),
        ]
        found, row = drained.median(crashing), result.rows[1]
        # Those that were to crash are no failures of anybody.
        row.failures -= sum(each.failed for each in crashing)
        for run_, drain in zip(row.runs, crashing, strict=True):
            run_.failures -= drain.failed
        more_s = found.total_s - drained.median(calm).total_s
        row.figures.append(Figure("crashes", found.failed, "", note="all FAILED, as they should be"))
        row.figures.append(Figure("time lost to a crash", more_s / found.failed * 1000, "ms"))
        result.figures.append(
            drained.ratio("with crashes / without", result.rows[1], result.rows[0], "≥ 0.3")
        )
        return result


def _verify(database: Database, drain: drained.Drain) -> None:
    """Raises unless all has ended as it should have."""
    wanted = drain.jobs // EVERY
    ends = [
        (kind, number, int(count))
        for kind, _, number, count in run(database.conn, "bench_ends", after=drain.after)
    ]
    if (
        drain.lost
        or drain.failed != wanted
        or drain.completed != drain.jobs - wanted
        or [each for each in ends if each[0] != "interrupted"] != [("crashed", signal.SIGSEGV, wanted)]
    ):
        raise WorldError(
            f"of {drain.jobs} jobs {drain.completed} have completed, {drain.failed} failed and {drain.lost} are lost; "
            f"{wanted} should have crashed once each, and no other. Attempts that did not complete: {ends}"
        )
