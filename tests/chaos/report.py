"""What rounds have shown, as a table for people: jobs, faults, runs, retries, outcomes, violations."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aqd import __version__
from tests.chaos.storm import Result
from tests.chaos.world import FAKETIME

ROOT = Path(__file__).parents[2]


def versions(postgres: str) -> str:
    """What a replay needs beside the seed."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return (
        f"aqd {__version__}{f' ({commit})' if commit else ''}, Python {platform.python_version()}, "
        f"{postgres}, Linux {platform.release()}, {os.cpu_count()} processors"
    )


def show(console: Console, results: Sequence[Result], minutes: float, about: str, directory: Path) -> None:
    """The table of all rounds together."""
    table = Table(title=f"chaos: {len(results)} rounds in {minutes:.1f} minutes", title_justify="left")
    table.add_column("what")
    table.add_column("number", justify="right")
    table.add_column("of these")
    figures = sum((result.figures for result in results), Counter())
    states: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    for result in results:
        for (kind, state), count in result.states.items():
            states[state] += count
            kinds[kind] += count
        for (kind, reason), count in result.attempts.items():
            attempts[kind if reason == "-" else f"{kind}/{reason}"] += count
    faults = sum((result.faults for result in results), Counter())
    table.add_row("jobs", str(sum(kinds.values())), _counts(kinds))
    table.add_row("final states", str(sum(states.values())), _counts(states))
    table.add_row("runs", str(figures["runs"]), f"{figures['runs without an end']} ended with their process")
    table.add_row("attempts that did not complete", str(sum(attempts.values())), _counts(attempts))
    for name in ("cancelled", "submissions without an answer", "helpers", "starts of nodes"):
        table.add_row(name, str(figures[name]), "")
    table.add_row("faults", str(sum(faults.values())), _counts(faults))
    idle = sum((result.idle_faults for result in results), Counter())
    without = "" if FAKETIME else " (clock steps are skipped: libfaketime is not installed)"
    table.add_row("faults that found nothing to hit", str(sum(idle.values())), _counts(idle) + without)
    explained: Counter[str] = Counter()
    for result in results:
        for name, texts in result.explained.items():
            explained[name] += len(texts)
    for name, count in sorted(explained.items()):
        table.add_row(name, str(count), "allowed, and explained by a fault")
    odd = sum(len(result.odd) for result in results)
    wrong = sum(len(result.wrong) for result in results)
    table.add_row("unexplained", str(odd), "no promise broken, no known reason")
    table.add_row("violations", str(wrong), "", style="bold red" if wrong else "bold green")
    console.print(table)
    for result in results:
        for name, texts in (("violation", result.wrong), ("unexplained", result.odd)):
            for text in texts:
                console.print(
                    f"{name} (seed {result.plan.seed}): {text[:1500]}", markup=False, highlight=False
                )
    console.print(f"{about}\nlogs: {directory}", markup=False, highlight=False)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
