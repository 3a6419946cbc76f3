"""Chaos for as long as wanted: rounds of random work and random harm, checked from outside.

    tests/chaos/run --minutes 30 --seed 7             rounds with the seeds 7, 8, 9, …
    tests/chaos/run --rounds 1 --seed 11 --nodes 2    one of them again

Prints each round's seed before it begins, a table at the end; exit status 1 if a promise was broken. Logs, the side
file and the plan of every round that shows something stay in the directory that is named at the end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.chaos import plan as plans
from tests.chaos import report
from tests.chaos.storm import Result, Storm
from tests.chaos.world import World
from tests.fixtures import processes
from tests.fixtures.postgres import LocalPostgres, local_binaries


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/chaos/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="no round begins after this (default 3)")
    parser.add_argument("--rounds", type=int, default=None, help="at most so many rounds")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: drawn)")
    parser.add_argument("--nodes", type=int, default=None, choices=(1, 2, 4), help="default: drawn by round")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a round's storm (default 60)")
    parser.add_argument("--lease", type=float, default=None, help="lease_s (default: drawn by round)")
    parser.add_argument("--every", type=float, default=1.5, help="seconds from fault to fault (default 1.5)")
    parser.add_argument("--jobs", type=float, default=4.0, help="submissions a second (default 4)")
    parser.add_argument("--keep", type=Path, default=None, help="directory for logs (default: a new one)")
    parser.add_argument("--verbose", action="store_true", help="print every fault as it happens")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    directory = given.keep or Path(tempfile.mkdtemp(prefix="aqd-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    console = Console(width=None if sys.stdout.isatty() else 160)
    say = (
        (lambda text: console.print(text, markup=False, highlight=False))
        if given.verbose
        else (lambda _: None)
    )
    processes.become_subreaper()
    results: list[Result] = []
    began = time.monotonic()
    about = ""
    try:
        while time.monotonic() - began < given.minutes * 60 and len(results) != given.rounds:
            plan = plans.draw(
                seed + len(results),
                given.seconds,
                nodes=given.nodes,
                lease_s=given.lease,
                jobs_per_s=given.jobs,
                fault_every_s=given.every,
            )
            console.print(plan.describe(), markup=False, highlight=False)
            server = LocalPostgres(local_binaries())
            about = about or report.versions(server.source)
            try:
                results.append(round_of(plan, directory / f"seed-{plan.seed}", server, say))
            except Exception:  # the suite's own fault: said, remembered, and on to the next round
                console.print_exception()
                results.append(Result(plan, wrong=["the round broke off, see above"]))
            finally:
                server.close()
            last = results[-1]
            console.print(
                f"  settled after {last.settled_s:.1f} s, {len(last.wrong)} violations, {len(last.odd)} unexplained",
                highlight=False,
            )
    except KeyboardInterrupt:
        console.print("interrupted")
    report.show(console, results, (time.monotonic() - began) / 60, about, directory)
    return 1 if any(result.wrong for result in results) else 0


def round_of(plan: plans.Plan, directory: Path, server: LocalPostgres, say) -> Result:
    """One round. Its directory is kept only if it shows something."""
    directory.mkdir(parents=True)
    (directory / "plan.txt").write_text(
        plan.describe() + "\n" + "\n".join(map(str, [*plan.jobs, *plan.faults]))
    )
    faults = (directory / "faults.txt").open("a", buffering=1)

    def told(text: str) -> None:
        faults.write(text + "\n")
        say(text)

    world = World(plan, directory, server)
    try:
        with faults:
            result = Storm(world, told).run()
    finally:
        world.close()
    if result.wrong or result.odd:
        (directory / "violations.txt").write_text("\n".join([*result.wrong, "--- unexplained", *result.odd]))
    else:
        shutil.rmtree(directory)
    return result


if __name__ == "__main__":
    sys.exit(main())
