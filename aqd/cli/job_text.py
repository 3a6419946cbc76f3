"""One job as ``aqd jobs show`` prints it: facts, attempts, and what the attempts wrote.

Promises: what a job, its handler or its helpers have written reaches the terminal escaped
(:func:`aqd.log.printable`) and indented, so that it can neither control the terminal nor pass for a line of
this command; without ``everything`` at most :data:`TAIL_LINES` lines and :data:`TAIL_CHARS` characters of it.
"""

import signal
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from aqd.cli.output import cell, print_table, shorten
from aqd.log import printable

if TYPE_CHECKING:
    from aqd.store import AttemptRow, JobRow

TAIL_LINES = 40
TAIL_CHARS = 8_000


def print_job(row: "JobRow", attempts: Sequence["AttemptRow"], *, everything: bool) -> None:
    """``everything``: the output of all attempts, whole; else the end of the last one's."""
    for name, value in _facts(row).items():
        if value is not None:
            click.echo(printable(f"{name:<12}{cell(value)}"))
    print_table(
        ("attempt", "kind", "reason", "finished", "took s", "cpu s", "peak", "signal", "exit code", "error"),
        [
            (
                a.attempt,
                a.kind,
                a.reason,
                a.finished_at,
                a.wall_s,
                a.cpu_s,
                memory(a.peak_kb),
                signal_name(a.signal),
                a.exit_code,
                shorten(a.error, 200),
            )
            for a in attempts
        ],
        title="attempts that did not complete",
    )
    if attempts and (trace := attempts[-1].traceback):
        _print_text("traceback of the last one", trace, whole=True)
    for attempt in attempts if everything else attempts[-1:]:
        if attempt.output:
            _print_text(f"output of attempt {attempt.attempt}", attempt.output, whole=everything)
    if row.output:
        _print_text("output of the attempt that completed", row.output, whole=everything)


def _facts(row: "JobRow") -> dict[str, Any]:
    return {
        "job": row.id,
        "state": state(row),
        "type": row.type,
        "queue": row.queue,
        "priority": row.priority,
        "attempt": attempt_of(row),
        "created": row.created_at,
        "not before": row.run_at,
        "claimed": row.claimed_at,
        "finished": row.finished_at,
        "cancel": _asked(row.cancel_requested_at),
        "node": row.node_id,
        "progress": progress(row),
        "took": None if row.wall_s is None else f"{row.wall_s:.3f} s",
        "cpu": None if row.cpu_s is None else f"{row.cpu_s:.3f} s",
        "peak memory": memory(row.peak_kb),
        "crashes": row.crashes or None,
        "interrupted": row.interruptions or None,
        "retries": row.retries or None,
        "error": row.last_error,
        "tags": row.tags or None,
        "meta": row.meta,
        "payload": row.payload,
        "result": row.result,
    }


def state(row: "JobRow") -> str:
    """The state; of a running job that was asked to end, that too."""
    cancelling = row.state == "PROCESSING" and row.cancel_requested_at is not None
    return f"{row.state}, cancelling" if cancelling else row.state


def attempt_of(row: "JobRow") -> str:
    """``2/5``; ``2`` where the bound is the handler's."""
    return str(row.attempt) if row.max_attempts is None else f"{row.attempt}/{row.max_attempts}"


def progress(row: "JobRow") -> str | None:
    """What the handler last said about how far it is: ``40 %, page 2 of 5``."""
    parts = [None if row.progress_percent is None else f"{row.progress_percent:g} %", row.progress_message]
    return ", ".join(part for part in parts if part) or None


def memory(kilobytes: int | None) -> str | None:
    """``123 MiB``."""
    return None if kilobytes is None else f"{kilobytes / 1024:.{1 if kilobytes < 10_240 else 0}f} MiB"


def signal_name(number: int | None) -> str | None:
    """``SIGSEGV``; a real-time signal has no name in Python."""
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _asked(at: datetime | None) -> str | None:
    return None if at is None else f"asked for at {cell(at)}"


def _print_text(title: str, text: str, *, whole: bool) -> None:
    lines = text.rstrip("\n").split("\n")
    shown = lines if whole else lines[-TAIL_LINES:]
    if not whole:
        shown = "\n".join(shown)[-TAIL_CHARS:].split("\n")
    cut = (
        "" if sum(map(len, shown)) == sum(map(len, lines)) else " (its end; --output prints all that is kept)"
    )
    click.echo(f"{title}{cut}:")
    for line in shown:
        click.echo(f"  {printable(line.expandtabs())}")
