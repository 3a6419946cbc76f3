"""aqd and its peers, measured side by side on this machine.

    python -m tests.bench.peers                                  everything, 2 rounds
    python -m tests.bench.peers --only aqd,graphile-worker-fast  some
    python -m tests.bench.peers --list                           what there is

Two scenarios. *drain*: a queue is filled with no-op jobs, then the workers start; the rate is the number of jobs over
the time from the first start of a handler to the moment when all are recorded as done, so that starting up costs
nobody anything. (Nor does the first fetch; of the default numbers of jobs it is 5 % at most, so --jobs should not be
small.) *latency*: one job at a time for idle workers, from the call that enqueues to the start of the handler.

Every run has a fresh database (or an empty Redis), and the systems take turns, A B C A B C, so that a machine that
changes its mind does so for all. Each run is checked: every job ran once, and is gone or recorded as done.
What the peers need is installed below the cache folder, versions as in ``versions.toml``; what cannot be had is
skipped with a line that says why. Only ratios within one run of this program mean something.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from aqd.bench import chart
from aqd.bench.database import place
from aqd.errors import AqdError, ConfigError, UserError
from tests.bench.peers import machine, report
from tests.bench.peers.figures import Result
from tests.bench.peers.packages import Cache, Unavailable, default_cache
from tests.bench.peers.runs import Runner
from tests.bench.peers.servers import Servers
from tests.bench.peers.systems import System, choose, systems
from tests.bench.peers.workers import Failed
from tests.fixtures import processes

LATENCY_JOBS = 300
# What may go wrong with one system: no package, no job run, a table that is not there, a server that is gone.
TROUBLE = (Unavailable, Failed, AqdError, psycopg.Error, OSError, RuntimeError, ValueError)
WIDTH = 132  # of the report in a file


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a mistake in it exits with status 2."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAMES", help="systems, separated by commas; aqd* is a pattern")
    parser.add_argument("--scenario", choices=("drain", "latency", "all"), default="all")
    parser.add_argument("--rounds", type=_positive, default=2, help="of each system (2)")
    parser.add_argument("--jobs", type=_positive, help="of each drain, in place of each system's own number")
    parser.add_argument("--latency-jobs", type=_positive, default=LATENCY_JOBS, help=f"({LATENCY_JOBS})")
    parser.add_argument("--slots", type=_positive, default=4, help="aqd's (4)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where packages are installed")
    parser.add_argument("--directory", type=Path, help="where PostgreSQL's files are meanwhile (/var/tmp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw it, as a PNG (matplotlib)")
    parser.add_argument("--list", action="store_true", help="show the systems and leave")
    options = parser.parse_args(arguments)
    try:
        options.systems = choose(systems(options.slots), options.only)
        options.directory = place(options.directory)
        if options.chart:
            chart.check()
    except (ValueError, ConfigError, UserError) as error:
        parser.error(str(error))
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if options.list:
        for each in options.systems:
            what = ", ".join(each.scenarios())
            console.print(
                f"{each.name:24} {each.title}  [dim]({what})[/dim]", highlight=False, soft_wrap=True
            )
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # alike: end everything, show what there is
        signal.signal(number, signal.default_int_handler)
    processes.become_subreaper()
    cache = Cache(options.cache.expanduser().absolute(), say=lambda text: console.print(f"[dim]{text}"))
    servers = Servers(options.directory)
    results = {each.name: Result() for each in options.systems}
    runner = Runner(servers, cache)
    about: dict[str, Any] = {"machine": machine.describe(options.directory)}
    status = 0
    try:
        if any(each.family.backend == "postgres" for each in options.systems):
            about["postgres"] = servers.settings()
        measure(options, runner, results, console)
    except KeyboardInterrupt:
        console.print("interrupted; this is what there is so far")
        status = 130
    except AqdError as error:  # no PostgreSQL
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    finally:
        servers.close()
    about["versions"] = runner.versions()
    show(console, options.systems, results, about)
    if options.json:
        options.json.write_text(json.dumps(report.document(options.systems, results, about), indent=1) + "\n")
    if options.chart:
        machine_line = ", ".join(f"{name} {what}" for name, what in about["machine"].items())
        chart.draw_results(report.panels(options.systems, results), [machine_line], options.chart)
    return status or (1 if report.skipped(options.systems, results) else 0)


def measure(
    options: argparse.Namespace, runner: Runner, results: dict[str, Result], console: Console
) -> None:
    """All rounds of all systems; one that fails is left out from then on, and is no other's trouble."""

    def attempt(system: System, act: Callable[[], str | None], label: str) -> None:
        if results[system.name].reason:
            return
        try:
            said = act()
        except TROUBLE as error:
            results[system.name].reason = str(error) or type(error).__name__
            said = f"skipped: {error}"
        if said:
            console.print(f"{label}  {system.name:24} {said}", highlight=False, markup=False, soft_wrap=True)

    for system in options.systems:
        attempt(system, partial(runner.prepare, system), "   ")
    for number in range(1, options.rounds + 1):
        for name, scenario in (("drain", drain), ("latency", latency)):
            for system in options.systems:
                if options.scenario in (name, "all") and name in system.scenarios():
                    act = partial(scenario, system, options, runner, results[system.name])
                    attempt(system, act, f"{number}/{options.rounds}")


def drain(system: System, options: argparse.Namespace, runner: Runner, result: Result) -> str:
    found = runner.drain(system, options.jobs or system.jobs)
    result.drains.append(found)
    return f"{found.rate:10,.0f} jobs/s   ({found.jobs:,} in {found.seconds:.2f} s)"


def latency(system: System, options: argparse.Namespace, runner: Runner, result: Result) -> str:
    found = runner.latency(system, options.latency_jobs)
    result.latencies.append(found)
    return f"{found.at(50):10,.2f} ms p50   {found.at(99):.2f} ms p99   ({len(found.values)} jobs)"


def show(console: Console, chosen: list[System], results: dict[str, Result], about: dict[str, Any]) -> None:
    """The report."""
    console.print()
    for name, values in about.items():
        text = ", ".join(f"{key} {value}" for key, value in values.items())
        if name == "versions":
            text = "; ".join(f"{key} ({value})" for key, value in values.items())
        console.print(f"{name}: {text}", highlight=False, markup=False, soft_wrap=True)
    for table in (report.drain_table(chosen, results), report.latency_table(chosen, results)):
        if table.row_count:
            console.print()
            console.print(table)
    for line in [*report.notes(chosen), *(f"skipped: {each}" for each in report.skipped(chosen, results))]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
