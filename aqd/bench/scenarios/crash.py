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

ROUNDS = 3
EVERY = 10
SEGFAULT = Work(handler="segfault")
# The cheapest jobs there are, beside which a crash weighs most; and such as a job more often is.
WORKS = ((Work(), 10_000), (Work(handler="sleep", cost_ms=20.0), 1_000))


class Crash:
    """What it costs that every tenth job kills its process, and that none is lost.

    10,000 no-op jobs, and 1,000 that sleep for 20 ms (or those of ``--handler``); in turns with the same jobs, each tenth of
    which ends its worker by SIGSEGV (no core is dumped) instead. The handler of those is registered with ``max_crashes=1``, so that it is FAILED at the first crash; what counts is the
    replacement of the worker, and that the other jobs that had travelled with it are run.

    Verified each time: all others are COMPLETED, each tenth is FAILED with a record of an attempt that was ``crashed`` by
    signal 11, and nothing else is there. The benchmark ends with an error otherwise.

    A good figure: 0.3 of the rate without crashes, or more.
    """

    name: ClassVar[str] = "crash"

    def run(self, bench: Bench) -> Result:
        works = WORKS if bench.settings.handler == "noop" else ((bench.work, WORKS[1][1]),)
        result = Result(scenario=self.name, summary="")
        for work, number in works:
            self._compare(bench, work, bench.settings.count(number, EVERY), result)
        return result

    def _compare(self, bench: Bench, work: Work, jobs: int, result: Result) -> None:
        slots = bench.settings.slots()[0]
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
        name = work.handler + (f" {work.cost_ms:g} ms" if work.cost_ms else "")
        without = drained.row(calm, slots, work, bench, name)
        row = drained.row(crashing, slots, work, bench, f"{name}, every 10th segfaults")
        # Those that were to crash are no failures of anybody.
        row.failures -= sum(each.failed for each in crashing)
        for run_, drain in zip(row.runs, crashing, strict=True):
            run_.failures -= drain.failed
        found = drained.median(crashing)
        more_s = found.total_s - drained.median(calm).total_s
        row.figures.append(Figure("crashes", found.failed, "", note="all FAILED, as they should be"))
        row.figures.append(Figure("time lost to a crash", more_s / found.failed * 1000, "ms"))
        result.rows += [without, row]
        result.figures.append(drained.ratio(f"{name}: with crashes / without", row, without, "≥ 0.3"))


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
