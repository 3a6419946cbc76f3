"""Jobs that are submitted while others run: as fast as it goes, or on a schedule (:mod:`aqd.bench.producer`)."""

import math
import time
from typing import Final

from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database
from aqd.bench.drained import wait_until_empty
from aqd.bench.node import Node
from aqd.bench.producer import Senders
from aqd.bench.results import Figure, Row
from aqd.database import run
from aqd.errors import WorldError

SENDERS: Final = 8
STAMP_BYTES: Final = len('{"at": 1234567890123456}')
_FLOOD_S: Final = 3.0
# One connection sends so many a second without falling behind, on most machines.
_A_SENDER: Final = 150.0


def _senders(bench: Bench, rate: float | None = None) -> int:
    """How many share a rate, so that none has to hurry; as fast as it goes: enough for commits to be made together. Fewer
    in a small run, in which starting them would take longest."""
    if rate is not None:
        return max(2, math.ceil(rate / _A_SENDER))
    return max(2, round(SENDERS * min(1.0, bench.settings.scale)))


def flood(bench: Bench, database: Database, node: Node) -> float:
    """Jobs a second that this machine submits (one at a time) and runs when both go on together: all of them over the
    time from the first claim until the last is recorded, a tail without submitting included."""
    seconds = max(0.5, _FLOOD_S * min(1.0, bench.settings.scale))
    after = database.last_id
    senders = Senders(database.url, node.directory, _senders(bench), None, seconds)
    with bench.step(f"capacity of {node.slots} workers with submitting"), senders.running():
        sent = senders.wait()
        wait_until_empty(database, node)
    completed, first, committed, finished = run(database.conn, "bench_span", queue=QUEUE, after=after)[0]
    if completed != sent.jobs:
        raise WorldError(f"{sent.jobs} jobs were sent, {completed} have completed\n{node.log_tail()}")
    return float(completed / ((committed or finished) - first))


def stream(
    bench: Bench, database: Database, node: Node, rate: float, seconds: float, most: int = SENDERS
) -> tuple[Row, list[tuple[float, float]]]:
    """Sends at ``rate`` jobs a second for ``seconds``. Gives the row, whose latencies count from when each job was to be
    sent, and each job's latency: (seconds since the beginning, seconds)."""
    after, claims = database.last_id, node.statements("claim")
    loop = Senders(database.url, node.directory, min(most, _senders(bench, rate)), rate, seconds)
    label = f"{rate:,.0f} jobs/s to {node.slots} workers for {seconds:g} s"
    with bench.step(label, round(seconds)) as told, loop.running():
        while (passed := (time.monotonic_ns() - loop.start_ns) / 1e9) < seconds:
            node.check()
            told(max(0, round(passed)))
            time.sleep(0.1)
        sent = loop.wait()
        wait_until_empty(database, node)
    time.sleep(1.2)  # the dispatcher tells what it has counted every second
    claims = node.statements("claim") - claims
    stamps = run(database.conn, "bench_stamps", queue=QUEUE, after=after)
    found = measure.latency((start - due) / 1e9 for due, start in stamps)
    call = measure.latency(each / 1e9 for each in sent.calls_ns)
    if found is None or call is None:
        raise WorldError(f"no job has completed\n{node.log_tail()}")
    sending_s = (sent.last_ns - loop.start_ns) / 1e9
    row = Row(
        workers=node.slots,
        jobs=sent.jobs,
        total_s=sending_s,
        throughput=sent.jobs / sending_s,
        failures=sent.jobs - found.count,
        handler="stamp",
        payload_bytes=STAMP_BYTES,
        frame_ms=bench.settings.frame_ms,
        batch={"jobs_per_claim": found.count / claims.count} if claims.count else {},
        latency=found,
        figures=[
            Figure("wanted rate", rate, "jobs/s"),
            Figure("achieved rate", sent.jobs / sending_s, "jobs/s"),
            Figure("senders behind at most", sent.behind_ns / 1e6, "ms"),
            Figure("enqueue call p50", call.p50_ms, "ms"),
            Figure("enqueue call p99", call.p99_ms, "ms"),
        ],
    )
    return row, [((due - loop.start_ns) / 1e9, (start - due) / 1e9) for due, start in stamps]
