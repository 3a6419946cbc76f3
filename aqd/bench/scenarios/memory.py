"""Scenario ``memory``: see :class:`Memory`."""

from typing import ClassVar

from aqd.bench import measure
from aqd.bench.bench import Bench
from aqd.bench.drained import wait_until_empty
from aqd.bench.node import Node
from aqd.bench.results import Figure, Result
from aqd.errors import WorldError

SLOTS = (1, 17)
MEGABYTES = 100
SETTLE_S = 3.0
# A hundred for each worker, so that each has run some.
JOBS = 100
# Objects and not one block: every object that is looked at has its reference count, and so its page, written to.
PLUGIN = f'''"""A plugin that holds {MEGABYTES} MB of Python objects from its import on."""

import aqd

HELD = [b"%07d" % number + b"x" * 960 for number in range({MEGABYTES} * 1024)]


@aqd.hookimpl
def aqd_register(handlers):
    handlers.add("heavy", heavy)


def heavy(_payload):
    return len(HELD)
'''


class Memory:
    """How much memory a further slot takes, when the plugins hold 100 MB.

    A plugin makes 100 MB of small Python objects when it is imported. The daemon runs with 1 and with 17 slots (or the first
    and the last of ``--workers``); what its processes have is read from ``/proc/PID/smaps_rollup`` when they are idle, new
    and again after 100 no-op jobs a slot. USS is what is private to a process and would be free without it; PSS divides what
    is shared among those who share it. A slot's share is the difference of the sums over all of the node's processes (master,
    loader and dispatcher included), divided by the number of further slots.

    A good figure: at most 4 MB of private memory for an idle slot.
    """

    name: ClassVar[str] = "memory"

    def run(self, bench: Bench) -> Result:
        given = bench.settings.slots(SLOTS)
        few, many = min(given), max(given)
        if few == many:
            few, many = 1, many + 1
        sums: dict[int, list[measure.Memory]] = {}
        figures = []
        for slots in (few, many):
            with bench.database() as database:
                node = bench.node(database, slots)
                (node.plugins_dir / "heavy.py").write_text(PLUGIN)
                with bench.started(node), bench.step(f"{slots} slots"):
                    bench.settle(SETTLE_S)
                    sums[slots] = [_sum(node)]
                    figures += _by_role(node, f"{slots} slots, ")
                    database.fill(bench.settings.count(JOBS * slots, slots), bench.work)
                    wait_until_empty(database, node)
                    bench.settle(SETTLE_S)
                    sums[slots].append(_sum(node))
        result = Result(scenario=self.name, summary="", figures=figures)
        for place, when in enumerate(("new", "after jobs")):
            less, more = sums[few][place], sums[many][place]
            slots = many - few
            result.figures += [
                Figure(
                    f"one more slot, {when}: USS",
                    _mb((more.uss - less.uss) / slots),
                    "MB",
                    "≤ 4" if not place else "",
                ),
                Figure(f"one more slot, {when}: PSS", _mb((more.pss - less.pss) / slots), "MB"),
            ]
        return result


def _mb(size: float) -> float:
    return size / 2**20


def _found(node: Node) -> list[tuple[str, measure.Memory]]:
    found = [(role, measure.memory(pid)) for pid, role in node.pids().items()]
    if any(each is None for _, each in found):
        raise WorldError(
            "/proc/PID/smaps_rollup cannot be read: this kernel, or this user, does not allow it"
        )
    return [(role, each) for role, each in found if each is not None]


def _sum(node: Node) -> measure.Memory:
    found = _found(node)
    return measure.Memory(sum(each.uss for _, each in found), sum(each.pss for _, each in found))


def _by_role(node: Node, prefix: str) -> list[Figure]:
    figures = []
    found = _found(node)
    for role in ("master", "loader", "dispatcher", "worker"):
        sizes = [each for name, each in found if name == role]
        if sizes:
            mean_uss, mean_pss = (sum(part) / len(sizes) for part in zip(*sizes, strict=True))
            figures.append(
                Figure(f"{prefix}{role}: USS", _mb(mean_uss), "MB", note=f"PSS {_mb(mean_pss):.1f} MB")
            )
    return figures
