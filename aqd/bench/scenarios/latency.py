"""Scenario ``latency``: see :class:`Latency`."""

import random
import time
from typing import ClassVar

from aqd import client
from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database
from aqd.bench.drained import wait_until_empty
from aqd.bench.node import Node
from aqd.bench.open_loop import STAMP_BYTES, flood, stream
from aqd.bench.results import Figure, Result, Row
from aqd.bench.settings import Work
from aqd.database import run

JOBS = 300
WARM_UP = 10
LOAD_S = 10.0
PAUSE_S = (0.02, 0.04)
STAMP = Work(handler="stamp")


class Latency:
    """From the call that submits a job to the first line of its handler.

    "idle": 300 jobs, one at a time: each is submitted 20 to 40 ms after the one before has been recorded, so that the node
    has gone to sleep and has to be woken. The clock starts before ``client.enqueue`` is called and is read again by the
    handler; both are CLOCK_MONOTONIC of the same machine.

    "50 % load": senders submit one at a time, in processes of their own, first as fast as they can, for the capacity of
    this machine with its submitting (jobs over the time until all are recorded); then at half of it, on a schedule. A job's
    clock starts when it was to be sent, so whatever holds up a sender is in the latencies, too.

    A good figure, idle: p50 at most 3 ms, p99 at most 15 ms.
    """

    name: ClassVar[str] = "latency"

    def run(self, bench: Bench) -> Result:
        result = Result(scenario=self.name, summary="")
        for slots in bench.settings.slots():
            with bench.database() as database, bench.running(database, slots) as node:
                result.rows.append(self._idle(bench, database, node))
            with bench.database() as database, bench.running(database, slots) as node:
                result.rows.append(self._loaded(bench, database, node))
        return result

    def _idle(self, bench: Bench, database: Database, node: Node) -> Row:
        jobs = bench.settings.count(JOBS, 20)
        calls_s: list[float] = []
        after, began = 0, 0.0
        with bench.step(f"idle, {node.slots} workers: {jobs} jobs, one at a time", jobs) as told:
            for number in range(-WARM_UP, jobs):
                if number == 0:
                    after, began = database.last_id, time.monotonic()
                time.sleep(random.uniform(*PAUSE_S))
                sent_ns = time.monotonic_ns()
                job = client.enqueue(database.conn, STAMP.type, {"at": sent_ns}, queue=QUEUE)
                call_s = (time.monotonic_ns() - sent_ns) / 1e9
                if number >= 0:
                    calls_s.append(call_s)
                    told(number + 1)
                _wait_completed(database, node, job.id)
        total_s = time.monotonic() - began
        stamps = run(database.conn, "bench_stamps", queue=QUEUE, after=after)
        found = measure.latency((start - sent) / 1e9 for sent, start in stamps)
        assert found is not None
        call = measure.latency(calls_s)
        assert call is not None
        return Row(
            variant="idle",
            workers=node.slots,
            jobs=jobs,
            total_s=total_s,
            failures=jobs - found.count,
            handler="stamp",
            payload_bytes=STAMP_BYTES,
            latency=found,
            figures=[
                Figure("p50", found.p50_ms, "ms", "≤ 3"),
                Figure("p99", found.p99_ms, "ms", "≤ 15"),
                Figure("enqueue call p50", call.p50_ms, "ms"),
            ],
        )

    def _loaded(self, bench: Bench, database: Database, node: Node) -> Row:
        capacity = flood(bench, database, node)
        wait_until_empty(database, node)
        row, _ = stream(bench, database, node, capacity / 2, bench.settings.duration_s(LOAD_S))
        row.variant = "50 % load"
        row.figures.insert(0, Figure("capacity with submitting", capacity, "jobs/s"))
        return row


def _wait_completed(database: Database, node: Node, job: int) -> None:
    while not run(database.conn, "bench_is_completed", id=job)[0][0]:
        node.check()
        time.sleep(0.002)
