"""``aqd submit``, ``jobs list|show|retry``, ``failed list``: jobs, directly in the database.

The same validation and the same statements as the HTTP service and the Python client; ``--json`` prints the
same documents as the service.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from aqd.cli.command import App
from aqd.cli.db import connect
from aqd.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from aqd.store import AttemptRow, JobRow

STATES = ("QUEUED", "PROCESSING", "COMPLETED", "FAILED", "CANCELLED")


@click.command("submit")
@click.argument("type_", metavar="TYPE")
@click.argument("payload", default="{}")
@click.option("--queue", help='The queue; default: that of the handler, or "default".')
@click.option("--priority", type=int, help="-100 to 100, higher first; default 0.")
@click.option("--run-at", metavar="TIME", help="Not before this moment, such as 2026-11-29T17:40:01Z.")
@click.option("--delay", "delay_s", type=float, metavar="SECONDS", help="Not before that many seconds.")
@click.option("--max-attempts", type=int, help="How often to try it, 1 to 1000.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="How long one attempt may take.")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON, not only its id.")
@click.pass_obj
def submit_command(app: App, /, type_: str, payload: str, as_json: bool, **options: Any) -> None:
    """Submit a job of TYPE and print its id. PAYLOAD is JSON text, or - to read it from standard input."""
    from aqd import config, job, store
    from aqd.api import render
    from aqd.cli.output import print_json

    cfg = config.load(app.config_path, os.environ)
    limit = cfg.jobs.max_payload_bytes
    if payload == "-":
        payload = _read_stdin(limit)
    request = job.validate(type_, payload_json=payload, max_payload_bytes=limit, **options)
    with store.connect(cfg.database, "aqd submit") as conn:
        made = store.enqueue(conn, request)
    if as_json:
        print_json(render.enqueued(made))
    else:
        click.echo(made.id)


def _read_stdin(limit: int) -> str:
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise InputError("payload", f"is larger than {limit} bytes", limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("payload", f"is not UTF-8: {error.reason} at byte {error.start}", "UTF-8") from None


_limit = click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many."
)
_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group("jobs")
def jobs_command() -> None:
    """Look at jobs, try failed ones again."""


@jobs_command.command("list")
@click.option("--state", type=click.Choice(STATES, case_sensitive=False), help="Only jobs in this state.")
@click.option("--type", "type_", help="Only jobs of this type.")
@click.option("--queue", help="Only jobs of this queue.")
@click.option("--before", metavar="ID", help="Only jobs with smaller ids: the page after that one.")
@_limit
@_json
@click.pass_obj
def list_command(
    app: App,
    state: str | None,
    type_: str | None,
    queue: str | None,
    before: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs, newest first."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.output import print_json, print_table, shorten

    cursor = job.parse_id(before, "--before") if before is not None else None
    with connect(app) as conn:
        rows = store.list_jobs(conn, store.JobFilter(state, type_, queue), cursor, limit)
    if as_json:
        print_json([render.job(row) for row in rows])
        return
    print_table(
        ("id", "state", "type", "queue", "attempt", "created", "finished", "error"),
        [
            (r.id, r.state, r.type, r.queue, _attempt(r), r.created_at, r.finished_at, shorten(r.last_error))
            for r in rows
        ],
        empty="no jobs",
    )


def _attempt(row: "JobRow") -> str:
    return str(row.attempt) if row.max_attempts is None else f"{row.attempt}/{row.max_attempts}"


@jobs_command.command("show")
@click.argument("id_", metavar="ID")
@_json
@click.pass_obj
def show_command(app: App, id_: str, as_json: bool) -> None:
    """Show one job: state, payload, result, failed attempts."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.output import print_json

    number = job.parse_id(id_)
    with connect(app) as conn:
        row = store.get_job(conn, number)
        if row is None:
            raise NotFoundError(f"there is no job {number}")
        attempts = store.get_attempts(conn, number)
    if as_json:
        print_json(render.job_in_full(row, attempts))
    else:
        _print_job(row, attempts)


def _print_job(row: "JobRow", attempts: list["AttemptRow"]) -> None:
    from aqd.cli.output import cell, print_table, shorten
    from aqd.log import printable

    facts = {
        "job": row.id,
        "state": row.state,
        "type": row.type,
        "queue": row.queue,
        "priority": row.priority,
        "attempt": _attempt(row),
        "created": row.created_at,
        "not before": row.run_at,
        "claimed": row.claimed_at,
        "finished": row.finished_at,
        "node": row.node_id,
        "took": None if row.wall_s is None else f"{row.wall_s:.3f} s",
        "error": row.last_error,
        "payload": row.payload,
        "result": row.result,
    }
    for name, value in facts.items():
        if value is not None:
            click.echo(printable(f"{name:<12}{cell(value)}"))
    print_table(
        ("attempt", "kind", "finished", "took s", "signal", "exit code", "error"),
        [
            (a.attempt, a.kind, a.finished_at, a.wall_s, a.signal, a.exit_code, shorten(a.error, 200))
            for a in attempts
        ],
        title="attempts that did not complete",
    )
    if attempts and (trace := attempts[-1].traceback):
        click.echo("traceback of the last one:")
        for line in trace.splitlines():
            click.echo(printable(f"  {line}"))


@jobs_command.command("retry")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.pass_obj
def retry_command(app: App, ids: tuple[str, ...]) -> None:
    """Put FAILED jobs back into the queue as if they were new."""
    from aqd import job, store

    numbers = [job.parse_id(text) for text in ids]
    with connect(app) as conn:
        for number in numbers:
            made = store.retry_job(conn, number)
            click.echo(f"job {made.id} is {made.state}")


@click.group("failed")
def failed_command() -> None:
    """Look at the records of jobs that used up their attempts."""


@failed_command.command("list")
@click.option("--all", "resolved", is_flag=True, help="Also records that a retry or a discard has settled.")
@click.option(
    "--before", metavar="RECORD", help="Only records with smaller numbers: the page after that one."
)
@_limit
@_json
@click.pass_obj
def failed_list_command(app: App, resolved: bool, before: str | None, limit: int, as_json: bool) -> None:
    """List the records, newest first."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.output import print_json, print_table, shorten

    cursor = job.parse_id(before, "--before") if before is not None else None
    with connect(app) as conn:
        rows = store.list_failed(conn, cursor, limit, resolved=resolved)
    if as_json:
        print_json([render.failed_job(row) for row in rows])
        return
    print_table(
        ("record", "job", "type", "queue", "kind", "attempts", "failed", "state now", "error"),
        [
            (
                r.id,
                r.job_id,
                r.type,
                r.queue,
                r.kind,
                r.attempts,
                r.failed_at,
                r.state or r.resolution,
                shorten(r.error),
            )
            for r in rows
        ],
        empty="no failed jobs",
    )
