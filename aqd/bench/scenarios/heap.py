"""Scenario ``heap``: see :class:`Heap`."""

import time
from typing import ClassVar

from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE
from aqd.bench.results import Figure, Result, Row, Series
from aqd.database import run
from aqd.errors import WorldError

JOBS = 2_000_000
LIVE = 10_000
REFILL_S = 0.2
# Points of the curve.
POINTS = 20
STUCK_S = 120.0


class Heap:
    """Whether the table of live jobs stays small when millions go through it.

    2,000,000 jobs go through a table in which 10,000 live at any time: five times a second it is filled up to that number
    again. Each job leaves two dead rows; what is not vacuumed in time makes the file longer, for ever. The length of the file
    (``pg_relation_size``) is read each time it is filled.

    A good figure: at most 64 MB, and no longer at the end than after the first tenth. Without the daemon's own vacuum, by
    autovacuum with its defaults, it was 564 MB.
    """

    name: ClassVar[str] = "heap"

    def run(self, bench: Bench) -> Result:
        (slots, *_), jobs, work = bench.settings.slots(), bench.settings.count(JOBS, 100), bench.work
        live = min(jobs, bench.settings.scaled(LIVE, 1000))
        points: list[tuple[float, float]] = []
        with bench.database() as database, bench.running(database, slots, work=work) as node:
            after, stored, moved = database.last_id, 0, time.monotonic()
            label = f"{jobs:,} jobs through a table with {live:,}, {slots} workers"
            with bench.step(label, jobs) as told:
                while True:
                    node.check()
                    count, size = map(int, run(database.conn, "bench_live")[0])
                    done = stored - count
                    if done >= len(points) * jobs / POINTS:
                        points.append((float(done), size / 2**20))
                        moved = time.monotonic()
                    told(done)
                    if done >= jobs:
                        break
                    if missing := min(live - count, jobs - stored):
                        database.fill(missing, work, analyse=False)
                        stored += missing
                    if time.monotonic() - moved > STUCK_S:
                        raise WorldError(f"it does not go on\n{node.log_tail()}")
                    time.sleep(REFILL_S)
            completed, first, committed, finished = run(
                database.conn, "bench_span", queue=QUEUE, after=after
            )[0]
        total_s = (committed or finished) - first
        sizes = [size for _, size in points]
        row = Row(
            variant=f"{live:,} live",
            workers=slots,
            jobs=jobs,
            total_s=total_s,
            throughput=completed / total_s,
            failures=jobs - completed,
            handler=work.handler,
            cost_ms=work.cost_ms,
            payload_bytes=work.payload_bytes,
            frame_ms=bench.settings.frame_ms,
            figures=[
                Figure("heap, longest", max(sizes), "MB", "≤ 64"),
                Figure("heap, after the first tenth", sizes[min(2, len(sizes) - 1)], "MB"),
                Figure("heap, at the end", sizes[-1], "MB"),
            ],
        )
        curve = Series(name="heap of aqd.jobs", x="jobs done", y="MB", points=points)
        return Result(scenario=self.name, summary="", rows=[row], series=[curve])
