"""Scenario ``idle``: see :class:`Idle`."""

import time
from typing import ClassVar

from aqd import client
from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.database import QUEUE, Database
from aqd.bench.drained import wait_until_empty
from aqd.bench.node import Node
from aqd.bench.results import Figure, Result, Row

SLOTS = (1, 64)
SECONDS = 30.0
# Sessions report what they have done when ten seconds have passed, or with their next transaction after a second.
SETTLE_S = 12.0
ENQUEUES = 50
PAUSE_S = 0.1
# A node that is asked this rarely looks only when it is woken.
SELDOM = {"daemon": {"poll_ms": 600_000}}


class Idle:
    """What a daemon without jobs costs, and how often it looks when one comes.

    The daemon runs for 30 seconds (``--seconds``) with 1 and with 64 slots (or ``--workers``), with the default ``poll_ms``.
    Queries are the transactions of its database (pg_stat_database; each statement of the daemon's is one), processor time
    that of all its processes, in percent of one core. What PostgreSQL uses for them is given beside it, if it runs here.

    Then a daemon that polls every ten minutes gets 50 jobs, one every tenth of a second: how many claims it makes for each.
    A first one, whose lane and type it does not know yet, is not counted: it is looked for up to four times.

    A good figure: at most 4 queries a second and 0.5 % of a core, whatever the number of slots; one claim for one job.
    """

    name: ClassVar[str] = "idle"

    def run(self, bench: Bench) -> Result:
        result = Result(scenario=self.name, summary="")
        for slots in bench.settings.slots(SLOTS):
            with bench.database() as database:
                with bench.running(database, slots) as node:
                    rest = self._rest(bench, database, node)
                with bench.running(database, slots, tables=SELDOM) as node:
                    row = self._wake(bench, database, node)
            row.figures = rest + row.figures
            result.rows.append(row)
        return result

    def _rest(self, bench: Bench, database: Database, node: Node) -> list[Figure]:
        seconds = bench.settings.duration_s(SECONDS)
        with bench.step(f"{node.slots} slots at rest for {seconds:g} s"):
            bench.settle(SETTLE_S)
            before, used = measure.counters(database.conn), _used(bench, node)
            began = time.monotonic()
            time.sleep(seconds)
            used_after, after = _used(bench, node), measure.counters(database.conn)
            passed = time.monotonic() - began
        queries = after.transactions - before.transactions - 1  # the first look
        figures = [
            Figure("queries", queries / passed, "/s", "≤ 4"),
            Figure("CPU of the node", (used_after[0] - used[0]) / passed * 100, "%", "≤ 0.5"),
        ]
        if bench.server.postmaster is not None:
            figures.append(Figure("CPU of PostgreSQL", (used_after[1] - used[1]) / passed * 100, "%"))
        return figures

    def _wake(self, bench: Bench, database: Database, node: Node) -> Row:
        jobs = bench.settings.count(ENQUEUES, 5)
        with bench.step(f"{node.slots} slots: {jobs} jobs one after the other", jobs) as told:
            client.enqueue(database.conn, "bench_noop", queue=QUEUE)
            wait_until_empty(database, node)
            time.sleep(1.5)  # it has looked around, and told its master so
            claims, done = node.statements("claim"), node.done()
            began = time.monotonic()
            for number in range(jobs):
                time.sleep(PAUSE_S)
                client.enqueue(database.conn, "bench_noop", queue=QUEUE)
                told(number + 1)
            wait_until_empty(database, node)
            total_s = time.monotonic() - began
            time.sleep(1.5)
            claims = node.statements("claim") - claims
            completed = node.done() - done
        return Row(
            workers=node.slots,
            jobs=jobs,
            total_s=total_s,
            failures=jobs - completed,
            figures=[Figure("claims for one enqueue", claims.count / jobs, "", "≤ 1")],
        )


def _used(bench: Bench, node: Node) -> tuple[float, float]:
    """Seconds of processor time: of the node, of the server."""
    found = 0.0
    if bench.server.postmaster is not None:
        each = [measure.usage(pid) for pid in measure.tree(bench.server.postmaster)]
        found = sum(used.own_s + used.reaped_s for used in each if used is not None)
    return sum(node.usage().values()), found
