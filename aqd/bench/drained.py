"""One measured drain: jobs that wait, a daemon that is ready, a start, and what it took until all are recorded.

The queue is paused while it is filled and while the daemon starts; resuming it is the starting shot. So start-up is in no
figure, and the clock is the database's: from the first claim (``claimed_at``) to the commit of the last outcome.
Everything is counted as a difference between the start and the end: WAL and transaction ids exactly (nobody else may be
at work on the server), processor time to 10 ms for each process, transactions and dead tuples as the sessions report them
when they end, that is after the daemon has stopped, which adds some dozens of statements to a run of any length.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import psycopg

from aqd import admin
from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database, connect
from aqd.bench.node import Node, Statements, Tables
from aqd.bench.results import Figure, Row, Run
from aqd.bench.settings import Work
from aqd.database import run
from aqd.errors import WorldError

# The daemon has started and looked around, and its sessions have reported that.
_SETTLE_S: Final = 2.0
_LOOK_S: Final = 0.1
# Without a job recorded for so long a drain is given up.
_STUCK_S: Final = 120.0
# The dispatcher tells its master what it has counted every second.
_TOLD_S: Final = 5.0

BY: Final = "aqd bench"


class Drain(NamedTuple):
    """What one drain was. ``after``: its jobs have higher ids; ``cpu_s``: seconds of processor time by role
    (``postgresql`` among them where it could be seen)."""

    jobs: int
    completed: int
    failed: int
    lost: int
    total_s: float
    cpu_s: dict[str, float]
    transactions: int
    writes: int
    wal_bytes: int
    page_images: int
    dead_tuples: int
    heap_bytes: int
    claims: Statements
    records: Statements
    after: int
    started_at: float
    by_commit: bool

    @property
    def throughput(self) -> float:
        """Jobs a second that ended, however."""
        return (self.completed + self.failed) / self.total_s

    @property
    def run(self) -> Run:
        return Run(total_s=self.total_s, throughput=self.throughput, failures=self.failed + self.lost)

    @property
    def batch(self) -> dict[str, float]:
        """How many jobs travelled together."""
        found = {}
        for name, statements in (("jobs_per_claim", self.claims), ("jobs_per_record", self.records)):
            if statements.count:
                found[name] = self.jobs / statements.count
        return found


def drain(
    bench: Bench,
    database: Database,
    slots: int,
    jobs: int,
    work: Work,
    *,
    priority: int = 0,
    other: Work | None = None,
    every: int = 0,
    tables: Tables | None = None,
    pinned: bool = False,
    what: str = "",
) -> Drain:
    """Fills and drains. Each ``every``-th job is of the ``other`` work. ``pinned``: beside it a transaction holds a snapshot
    from before the first claim until the end. ``what`` is said of it. Other jobs of the database may wait behind those."""
    after = database.last_id
    admin.pause(database.conn, QUEUE, by=BY)
    label = f"{what or work.handler}, {slots} workers"
    with bench.step(f"{label}: storing {jobs:,} jobs", jobs) as told:
        database.fill(jobs, work, priority=priority, other=other, every=every, told=told)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(bench.running(database, slots, work=work, tables=tables))
        bench.settle(_SETTLE_S)
        database.checkpoint()
        stack.enter_context(snapshot(database) if pinned else contextlib.nullcontext())
        claims, records = node.statements("claim"), node.statements("record")
        before, cpu = measure.counters(database.conn), _usage(bench, node)
        done = node.done()
        admin.resume(database.conn, QUEUE, by=BY)
        with bench.step(f"{label}: running {jobs:,} jobs", jobs) as told:
            _wait(database, node, Lane(priority, after), jobs, done, told)
        after_cpu, at_end = _usage(bench, node), measure.counters(database.conn)
        _wait_told(node, done + jobs)
        claims, records = node.statements("claim") - claims, node.statements("record") - records
    ended = measure.counters(database.conn)
    completed, first, committed, finished = run(database.conn, "bench_span", queue=QUEUE, after=after)[0]
    states = {
        str(state): int(count)
        for state, count in run(database.conn, "bench_states", queue=QUEUE, after=after)
    }
    failed = states.get("FAILED", 0)
    last = committed or finished
    if failed:
        (failed_at,) = run(database.conn, "bench_failed_at", queue=QUEUE, after=after)[0]
        last = max(last or 0, failed_at)
    if first is None or last is None:
        raise WorldError(f"no job has completed\n{node.log_tail()}")
    return Drain(
        jobs=jobs,
        completed=completed,
        failed=failed,
        lost=jobs - completed - failed,
        total_s=last - first,
        cpu_s={role: after_cpu[role] - cpu.get(role, 0.0) for role in after_cpu},
        transactions=ended.transactions - before.transactions,
        writes=at_end.next_xid - before.next_xid,
        wal_bytes=at_end.wal_bytes - before.wal_bytes,
        page_images=at_end.page_images - before.page_images,
        dead_tuples=ended.dead_tuples - before.dead_tuples,
        heap_bytes=ended.jobs_heap_bytes,
        claims=claims,
        records=records,
        after=after,
        started_at=first,
        by_commit=committed is not None,
    )


def _usage(bench: Bench, node: Node) -> dict[str, float]:
    found = node.usage()
    if bench.server.postmaster is not None:
        used = [measure.usage(pid) for pid in measure.tree(bench.server.postmaster)]
        found["postgresql"] = sum(each.own_s + each.reaped_s for each in used if each is not None)
    return found


class Lane(NamedTuple):
    """Where the measured jobs are, and after which id."""

    priority: int = 0
    after: int = 0

    def is_empty(self, database: Database) -> bool:
        """None of them waits or runs any more."""
        rows = run(database.conn, "bench_waits", queue=QUEUE, priority=self.priority, after=self.after)
        return not rows[0][0]


@contextlib.contextmanager
def snapshot(database: Database) -> Iterator[None]:
    """A REPEATABLE READ transaction that has taken its snapshot, and so holds back vacuum: somebody's report, or dump."""
    with contextlib.closing(connect(database.url)) as conn:
        conn.autocommit = False
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        run(conn, "bench_last_id")
        yield


def _wait(
    database: Database, node: Node, lane: Lane, jobs: int, done: int, told: Callable[[int], None]
) -> None:
    """Until no job of the queue waits or runs. The database is only asked when the daemon says that it may be so."""
    last, moved = -1, time.monotonic()
    while True:
        node.check()
        now = node.done() - done
        if now != last:
            last, moved = now, time.monotonic()
            told(min(now, jobs))
        stuck = time.monotonic() - moved
        # The counts are a second old, and a job may have several attempts: then the database is asked now and then.
        if (now >= jobs or stuck > 2.0) and lane.is_empty(database):
            return
        if stuck > _STUCK_S:
            raise WorldError(f"no job has ended for {_STUCK_S:g} s\n{node.log_tail()}")
        time.sleep(_LOOK_S)


def wait_until_empty(database: Database, node: Node) -> None:
    """Until no job of the queue waits or runs, whatever their number."""
    deadline = time.monotonic() + _STUCK_S
    while not Lane().is_empty(database):
        node.check()
        if time.monotonic() > deadline:
            raise WorldError(f"jobs still wait or run after {_STUCK_S:g} s\n{node.log_tail()}")
        time.sleep(_LOOK_S)


def _wait_told(node: Node, wanted: int) -> None:
    """Until the master has heard of the last attempts; a look that comes too soon would miss statements."""
    deadline = time.monotonic() + _TOLD_S
    while node.done() < wanted and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def median(drains: Sequence[Drain]) -> Drain:
    """The one in the middle by throughput."""
    return measure.middle(drains, lambda each: each.throughput)


def ratio(name: str, of: Row, to: Row, good: str = "") -> Figure:
    """How the rate of one row is to that of another."""
    assert of.throughput is not None
    assert to.throughput is not None
    return Figure(name, of.throughput / to.throughput, "×", good)


def row(drains: Sequence[Drain], slots: int, work: Work, bench: Bench, variant: str = "") -> Row:
    """Several drains of one kind as a line of the table: the median one, and the failures of all."""
    found = median(drains)
    return Row(
        variant=variant,
        workers=slots,
        jobs=found.jobs,
        total_s=found.total_s,
        throughput=found.throughput,
        failures=sum(each.run.failures for each in drains),
        handler=work.handler,
        cost_ms=work.cost_ms,
        payload_bytes=work.payload_bytes,
        frame_ms=bench.settings.frame_ms,
        batch=found.batch,
        figures=per_job(found),
        runs=[each.run for each in drains],
    )


def per_job(found: Drain) -> list[Figure]:
    """What one job has cost. Statements are counted as transactions, of which each of the daemon's is one (122 where
    pg_stat_statements had 99; the rest are those of the starting shot and of the end); commits are those that wrote."""
    jobs = found.jobs
    figures = [
        Figure("WAL", found.wal_bytes / jobs, "bytes/job"),
        Figure("page images in it", found.page_images / jobs, "/job"),
        Figure("statements", found.transactions / jobs, "/job"),
        Figure("commits", found.writes / jobs, "/job"),
        Figure("dead tuples", found.dead_tuples / jobs, "/job"),
        Figure("heap of aqd.jobs", found.heap_bytes / 2**20, "MB"),
    ]
    figures += [Figure(f"CPU {role}", used / jobs * 1e6, "µs/job") for role, used in found.cpu_s.items()]
    for name, statements in (("claim", found.claims), ("record", found.records)):
        if (figure := p99(name, statements)) is not None:
            figures.append(figure)
    return figures


def p99(name: str, statements: Statements, good: str = "") -> Figure | None:
    """What 99 of 100 statements do not exceed, as the dispatcher has measured it, round trip included. It counts in buckets
    that double, so the true value may be up to twice or half as much."""
    high = statements.quantile_ms(0.99)
    return None if high is None else Figure(f"{name} p99", high, "ms", good, "± a factor of 2")
