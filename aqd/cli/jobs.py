"""``aqd jobs list|show``, ``failed list``: jobs, directly in the database.

The same validation and the same statements as the HTTP service and the Python client; ``--json`` prints the
same documents as the service.
"""

from typing import TYPE_CHECKING, Any

import click

from aqd.cli import changes
from aqd.cli.command import App
from aqd.cli.db import connect
from aqd.cli.filters import filter_options, take_filter
from aqd.cli.output import cell
from aqd.cli.waiting import wait_command
from aqd.errors import InputError, NotFoundError
from aqd.strict_json import show

if TYPE_CHECKING:
    from aqd.store import FailedFilter

_limit = click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many."
)
_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group("jobs")
def jobs_command() -> None:
    """Look at jobs, wait for them, change them."""


jobs_command.add_command(wait_command)
for _command in changes.OF_JOBS:
    jobs_command.add_command(_command)


@jobs_command.command("list")
@filter_options
@click.option("--oldest", is_flag=True, help="The oldest first.")
@click.option("--before", metavar="ID", help="Only jobs with smaller ids: the page after that one.")
@click.option(
    "--after", metavar="ID", help="Only jobs with larger ids: with --oldest, the page after that one."
)
@click.option(
    "--fields",
    metavar="NAMES",
    help="With --json: which fields, such as id,status,payload. Default: all but payload, result and output.",
)
@_limit
@_json
@click.pass_obj
def list_command(
    app: App,
    /,
    oldest: bool,
    before: str | None,
    after: str | None,
    fields: str | None,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """List jobs, newest first."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.job_text import attempt_of, progress, state
    from aqd.cli.output import print_json, print_table, shorten

    filters = take_filter(options)
    for name, given, fits in (("--before", before, not oldest), ("--after", after, oldest)):
        if given is not None and not fits:
            raise InputError(name, "goes with the newest first" if oldest else "goes with --oldest")
    page_end = after if oldest else before
    cursor = None if page_end is None else job.parse_id(page_end, "--after" if oldest else "--before")
    shown = _fields(fields, as_json)
    with connect(app) as conn:
        page = store.list_jobs(conn, filters, cursor, limit, oldest=oldest, fields=shown)
    if page.window is not None and page.next is None:
        since = cell(page.window.finished_after)
        click.echo(f"aqd: note: finished jobs since {since} only: {page.window.reason}", err=True)
    if as_json:
        print_json([render.listed_job(row, shown) for row in page.jobs])
        return
    print_table(
        ("id", "state", "type", "queue", "attempt", "created", "finished", "progress", "error"),
        [
            (
                r.id,
                state(r),
                r.type,
                r.queue,
                attempt_of(r),
                r.created_at,
                r.finished_at,
                shorten(progress(r)),
                shorten(r.last_error),
            )
            for r in page.jobs
        ],
        empty="no jobs",
    )


def _fields(given: str | None, as_json: bool) -> tuple[str, ...]:
    from aqd.api import render
    from aqd.api.filters import FIELDS

    if given is None:
        return render.LISTED
    if not as_json:
        raise InputError("--fields", "goes with --json")
    names = tuple(given.split(","))
    for name in names:
        if name not in FIELDS:
            raise InputError("--fields", f"{show(name)} is none of {', '.join(FIELDS)}", ", ".join(FIELDS))
    return names


@jobs_command.command("show")
@click.argument("id_", metavar="ID")
@click.option("--output", "everything", is_flag=True, help="All kept output of all attempts.")
@_json
@click.pass_obj
def show_command(app: App, id_: str, everything: bool, as_json: bool) -> None:
    """Show one job: state, payload, result, failed attempts with the end of what the last one wrote."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.job_text import print_job
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
        print_job(row, attempts, everything=everything)


@click.group("failed")
def failed_command() -> None:
    """Look at the records of jobs that used up their attempts, and settle them."""


failed_command.add_command(changes.discard_command)


@failed_command.command("list")
@click.option("--all", "resolved", is_flag=True, help="Also records that a retry or a discard has settled.")
@click.option("--type", "type", help="Only jobs of this type.")
@click.option("--queue", help="Only jobs of this queue.")
@click.option("--kind", help="Only those that ended so: failed, crashed, timed_out, lost, unknown_type.")
@click.option("--reason", help="Only those with this reason, such as memory_limit.")
@click.option("--error", metavar="TEXT", help="Only those whose error contains TEXT.")
@click.option("--failed-after", metavar="TIME", help="FAILED then or later: 2026-11-29T17:40:01Z.")
@click.option("--failed-before", metavar="TIME", help="FAILED before then.")
@click.option(
    "--group-by",
    type=click.Choice(("type", "error", "type,error")),
    help="Groups instead of single records, the largest first. Their hash goes with --error-hash.",
)
@click.option(
    "--before", metavar="RECORD", help="Only records with smaller numbers: the page after that one."
)
@_limit
@_json
@click.pass_obj
def failed_list_command(
    app: App,
    /,
    resolved: bool,
    group_by: str | None,
    before: str | None,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """List the records, newest first."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.output import print_json, print_table, shorten

    filters = store.failed_filter(**options)
    if group_by is not None:
        if before is not None:
            raise InputError("--before", "goes with single records; groups have no further pages")
        _print_groups(app, filters, group_by.split(","), limit, resolved=resolved, as_json=as_json)
        return
    cursor = job.parse_id(before, "--before") if before is not None else None
    with connect(app) as conn:
        records = store.list_failed(conn, filters, cursor, limit, resolved=resolved).records
    if as_json:
        print_json([render.failed_job(row) for row in records])
        return
    print_table(
        ("record", "job", "type", "queue", "kind", "reason", "attempts", "failed", "state now", "error"),
        [
            (
                r.id,
                r.job_id,
                r.type,
                r.queue,
                r.kind,
                r.reason,
                r.attempts,
                r.failed_at,
                r.state or (f"{r.resolution}: {shorten(r.note)}" if r.note else r.resolution),
                shorten(r.error),
            )
            for r in records
        ],
        empty="no failed jobs",
    )


def _print_groups(
    app: App, filters: "FailedFilter", by: list[str], limit: int, *, resolved: bool, as_json: bool
) -> None:
    from aqd import store
    from aqd.api import render
    from aqd.cli.output import print_json, print_table, shorten

    with connect(app) as conn:
        found = store.group_failed(
            conn, filters, limit, by_type="type" in by, by_error="error" in by, resolved=resolved
        )
    if found.more:
        click.echo(f"aqd: note: these are groups of the newest {found.grouped} records only", err=True)
    if as_json:
        print_json([render.failed_group(group, filters) for group in found.groups])
        return
    print_table(
        ("count", "FAILED now", "type", "first", "last", "job", "hash", "error"),
        [
            (
                g.size,
                g.failed_now,
                g.type,
                g.first_failed_at,
                g.last_failed_at,
                g.sample_job_id,
                g.error_hash,
                shorten(g.error, 80),
            )
            for g in found.groups
        ],
        empty="no failed jobs",
    )
