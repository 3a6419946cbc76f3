"""Scenario ``enqueue``: see :class:`Enqueue`."""

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from aqd import client
from aqd.bench import measure, pgbench
from aqd.bench.bench import Bench
from aqd.bench.database import Database
from aqd.bench.drained import snapshot, wait_until_empty
from aqd.bench.node import READY_S, Node
from aqd.bench.producer import Senders
from aqd.bench.results import Figure, Result, Row, Run
from aqd.bench.settings import Work
from aqd.errors import WorldError

ROUNDS = 3
SECONDS = 3.0
BATCH = 1000
HTTP_BATCH = 100
HOLD = Work(handler="hold")
HOLD_S = 86_400


@dataclass(frozen=True)
class Way:
    """One kind of submitting: ``statement`` by pgbench, or ``how`` by our senders."""

    name: str
    writers: int
    statement: str = ""
    how: str = ""
    batch: int = 1
    notify: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, {self.writers} writer{'s' if self.writers != 1 else ''}"


def bare(writers: int) -> Way:
    return Way("bare INSERT", writers, statement="bench_insert")


def function(writers: int, *, notify: bool = True) -> Way:
    name = "aqd.enqueue" if notify else "aqd.enqueue, NOTIFY off"
    return Way(name, writers, statement="bench_enqueue", notify=notify)


# What is submitted in which situation; what is compared stands next to each other.
SITUATIONS: dict[str, tuple[Way, ...]] = {
    "no daemon": (
        *(each for writers in (1, 4, 16, 64) for each in (bare(writers), function(writers))),
        Way("client.enqueue", 1, how="client"),
        Way("client.enqueue", 16, how="client"),
        Way("client.enqueue_many", 1, how="batch", batch=BATCH),
        Way("client.enqueue_many", 4, how="batch", batch=BATCH),
        Way("COPY", 1, how="copy", batch=BATCH),
        Way("COPY", 4, how="copy", batch=BATCH),
    ),
    "daemon busy": (
        bare(16),
        function(16),
        Way("POST /jobs", 1, how="http"),
        Way("POST /jobs", 16, how="http"),
        Way("POST /jobs/batch", 4, how="http", batch=HTTP_BATCH),
    ),
    "daemon busy, pinned": (bare(16), function(16)),
    "daemon asleep": (bare(16), function(16), function(16, notify=False)),
    "daemon runs them": (bare(16), function(16), function(16, notify=False)),
}
WANTED = {"daemon busy": "≥ 0.7", "daemon busy, pinned": "≥ 0.7"}


class Enqueue:
    """How fast jobs are submitted, by which way, beside whom; against a bare INSERT of the same row.

    Each way for 3 seconds (``--seconds``), one job a transaction unless it says how many; in each situation the ways follow one
    another in a new database, three rounds, the median counts. "bare INSERT" and "aqd.enqueue" are driven by pgbench with
    prepared statements; the others by Python processes with a connection each. 1,000 jobs go into one ``client.enqueue_many`` or
    COPY, 100 into one ``POST /jobs/batch``.

    Situations: no daemon; a daemon whose slots are all busy (with the HTTP service); the same while another session holds
    an old snapshot; a daemon that sleeps and serves another queue, which every submitted job wakes in vain; a daemon that
    runs what comes in. NOTIFY is on unless it says otherwise: it is sent while a daemon sleeps.

    A good figure: aqd.enqueue with 16 writers and a busy daemon at 0.7 of the bare INSERT or more, also under an old snapshot.
    """

    name: ClassVar[str] = "enqueue"

    def run(self, bench: Bench) -> Result:
        result = Result(scenario=self.name, summary="")
        program = pgbench.find(bench.server.programs)
        if program is None:
            result.notes.append("pgbench is not installed: no bare INSERT, and no aqd.enqueue by it")
        slots = bench.settings.slots()[0]
        rows: dict[tuple[str, Way], list[Row]] = {}
        for _ in range(bench.settings.times(ROUNDS)):
            for situation, ways in SITUATIONS.items():
                with _situation(bench, situation, slots) as (database, node, port):
                    for way in ways:
                        if way.statement and program is None:
                            continue
                        with bench.step(f"{situation}: {way.label}"):
                            row = _measure(bench, database, way, program, port)
                            if situation == "daemon runs them":
                                assert node is not None
                                wait_until_empty(database, node)
                        row.variant = f"{way.label}, {situation}"
                        row.workers = None if node is None else slots
                        rows.setdefault((situation, way), []).append(row)
        result.rows = [_median(each) for each in rows.values()]
        medians = dict(zip(rows, result.rows, strict=True))
        for (situation, way), row in medians.items():
            base = medians.get((situation, bare(way.writers)))
            if way.statement and base is not None and base is not row:
                assert row.throughput is not None
                assert base.throughput is not None
                wanted = WANTED.get(situation, "") if way.notify else ""
                name = f"{way.label} / bare INSERT, {situation}"
                result.figures.append(Figure(name, row.throughput / base.throughput, "×", wanted))
        return result


@contextlib.contextmanager
def _situation(bench: Bench, situation: str, slots: int) -> Iterator[tuple[Database, Node | None, int]]:
    """A new database in that situation, its node, and the port of the HTTP service (0: there is none)."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(bench.database())
        if situation == "no daemon":
            yield database, None, 0
            return
        port = _free_port() if situation == "daemon busy" else 0
        tables: dict[str, dict[str, object]] = {"api": {"port": port}} if port else {}
        if situation == "daemon asleep":
            tables["daemon"] = {"queues": ["other"]}
        node = stack.enter_context(bench.running(database, slots, tables=tables, with_api=bool(port)))
        if situation.startswith("daemon busy"):
            for _ in range(slots):  # as an application would, so that the daemon is woken
                client.enqueue(database.conn, HOLD.type, {"s": HOLD_S}, queue="hold")
            node.wait(lambda status: all(s["state"] == "busy" for s in status["slots"]), READY_S, "busy")
        if port:
            _wait_for_http(node, port)
        if situation.endswith("pinned"):
            stack.enter_context(snapshot(database))
        yield database, node, port
        if situation.startswith("daemon busy"):
            node.kill()  # its jobs would not end


def _measure(bench: Bench, database: Database, way: Way, program: Path | None, port: int) -> Row:
    seconds = bench.settings.duration_s(SECONDS)
    work = Work(payload_bytes=bench.settings.payload_bytes)
    row = Row(jobs=0, payload_bytes=work.payload_bytes, batch={"jobs_per_submit": float(way.batch)})
    if way.statement:
        assert program is not None
        found = pgbench.run(program, database, way.statement, work, way.writers, seconds, notify=way.notify)
        row.jobs, row.throughput = found.transactions, found.per_s
        row.figures = [Figure("call, mean", found.mean_ms, "ms")]
    else:
        senders = Senders(
            database.url,
            bench.directory,
            way.writers,
            None,
            seconds,
            how=way.how,
            batch=way.batch,
            payload=work.payload,
            port=port,
        )
        with senders.running():
            sent = senders.wait()
        row.jobs, row.throughput = sent.jobs, sent.jobs / ((sent.last_ns - senders.start_ns) / 1e9)
        calls = measure.latency(each / 1e9 for each in sent.calls_ns)
        if calls is not None:
            row.figures = [
                Figure("call, mean", calls.mean_ms, "ms"),
                Figure("call, p99", calls.p99_ms, "ms"),
            ]
    row.total_s = row.jobs / row.throughput if row.throughput else None
    return row


def _median(rows: list[Row]) -> Row:
    found = measure.middle(rows, lambda row: row.throughput or 0.0)
    found.runs = [Run(total_s=row.total_s or 0.0, throughput=row.throughput or 0.0) for row in rows]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_http(node: Node, port: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        node.check()
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as link,
        ):
            link.request("GET", "/health")
            if link.getresponse().status == 200:
                return
        if time.monotonic() > deadline:
            raise WorldError(f"the HTTP service does not answer after {READY_S:g} s\n{node.log_tail()}")
        time.sleep(0.05)
