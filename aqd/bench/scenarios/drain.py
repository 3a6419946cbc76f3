"""Scenario ``drain``: see :class:`Drain`."""

from typing import ClassVar

from aqd.bench import drained
from aqd.bench.bench import Bench
from aqd.bench.results import Result

JOBS = 100_000
ROUNDS = 3
# Of one no-op job, whatever the machine.
WANTED = {"WAL": "≤ 1150", "statements": "≤ 0.02", "commits": "≤ 0.01", "dead tuples": "≤ 2"}


class Drain:
    """How fast a backlog is worked off: jobs per second, and what a job costs.

    100,000 jobs that do nothing wait; results and history are stored as always. Each round has a database of its own;
    the rounds of several ``--workers`` alternate, so that whatever else the machine does meets all of them alike. The
    row is the median round. :mod:`aqd.bench.drained` says where the clock starts and ends.

    A good figure: above the fastest mode of graphile-worker with two processes on the same machine
    (``tests/bench/peers``); at most 1,150 bytes of WAL, 0.02 statements, 0.01 commits and 2 dead tuples for a job, which
    do not depend on the machine. ``--frame-ms 0`` sends each job alone to its worker.
    """

    name: ClassVar[str] = "drain"

    def run(self, bench: Bench) -> Result:
        jobs, work = bench.settings.count(JOBS), bench.work
        drains: dict[int, list[drained.Drain]] = {slots: [] for slots in bench.settings.slots()}
        for _ in range(bench.settings.times(ROUNDS)):
            for slots, found in drains.items():
                with bench.database() as database:
                    found.append(drained.drain(bench, database, slots, jobs, work))
        result = Result(scenario=self.name, summary="")
        result.rows = [drained.row(found, slots, work, bench) for slots, found in drains.items()]
        if work.type == "bench_noop":
            for figure in (each for row in result.rows for each in row.figures):
                figure.good = WANTED.get(figure.name, "")
        first = result.rows[0]
        for each in result.rows[1:]:
            name = f"{each.workers} / {first.workers} workers"
            result.figures.append(drained.ratio(name, each, first))
        if not all(each.by_commit for found in drains.values() for each in found):
            result.notes.append(
                "the server keeps no moments of commits (track_commit_timestamp): the clock ends with the last handler"
            )
        return result
