"""``aqd jobs retry|cancel|delete|update``, ``failed discard``, ``queues pause|resume|limit``: changes by hand.

Directly in the database, by the statements of the HTTP service. Jobs are named by their ids, one by one, or by the
filter of ``aqd jobs list``: then the set is chosen once (:mod:`aqd.store.change`), and ``--dry-run`` counts it only.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aqd.cli.command import App, report
from aqd.cli.db import connect
from aqd.cli.filters import filter_options, take_filter
from aqd.errors import AqdError, Exit, InputError, WorldError

if TYPE_CHECKING:
    from aqd.database import Connection
    from aqd.store import Changed, JobFilter, QueueSettings

Command = TypeVar("Command", bound=Callable[..., Any])

# Pauses between two looks at jobs that were asked to end.
FIRST_LOOK_S = 0.05
LONGEST_PAUSE_S = 1.0

_json = click.option("--json", "as_json", is_flag=True, help="As JSON, as the HTTP service answers.")


def _which_options(command: Command) -> Command:
    """The arguments and options that say which jobs; taken by :func:`_which`."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Only say what would be changed."),
        click.option("--all", "everything", is_flag=True, help="All jobs for which it is possible."),
        filter_options,
        click.argument("ids", metavar="[ID]...", nargs=-1),
    ):
        command = option(command)
    return command


def _which(options: dict[str, Any]) -> "list[int] | JobFilter | None":
    """The ids, or the filter; None: ids to be taken one by one. Takes its options out of ``options``."""
    from aqd import job

    filters = take_filter(options)
    ids, everything = options.pop("ids"), options.pop("everything")
    if sum((bool(ids), everything, not filters.is_empty)) != 1:
        raise click.UsageError("say which jobs: either by ID, or by options such as --type, or --all")
    if not ids:
        return filters
    return list(job.check_ids("ID", ids)) if options["dry_run"] or options["as_json"] else None


def _change(
    app: App, action: str, options: dict[str, Any], one: "Callable[[Connection, int], str]", **more: Any
) -> int:
    """A whole command: jobs one by one with ``one``, which returns the state to print, or as a set."""
    from aqd import store
    from aqd.api import render
    from aqd.cli.output import print_json

    ids = options["ids"]
    which = _which(options)
    with connect(app) as conn:
        if which is None:
            return _for_each(
                conn, ids, lambda conn, number: click.echo(f"job {number} is {one(conn, number)}")
            )
        done = store.change_jobs(
            conn, store.Action(action), which, by=whoami(), dry_run=options["dry_run"], **more
        )
    if options["as_json"]:
        print_json(render.changed(done, dry_run=options["dry_run"]))
    else:
        _print(done, action, dry_run=options["dry_run"])
    refused = done.results is not None and done.skipped and not options["dry_run"]
    return Exit.USAGE if refused else Exit.OK


_DONE = {"retry": "retried", "cancel": "cancelled", "delete": "deleted", "discard": "discarded"}


def _print(done: "Changed", action: str, *, dry_run: bool) -> None:
    for each in done.results or ():
        what = each.refusal if each.refusal is None or each.state is None else f"it is {each.refusal}"
        click.echo(
            f"job {each.id} would be {_DONE[action]}" if what is None else f"job {each.id} would not: {what}"
        )
    if done.results is None:
        count = done.matched if dry_run else done.changed
        would = "would be " if dry_run else ""
        click.echo(f"{count} job{'' if count == 1 else 's'} {would}{_DONE[action]}")
    if done.skipped and not dry_run:
        click.echo(f"{done.skipped} had moved on meanwhile and stay as they are")
    if done.more:
        limit = "at a time no more than the oldest 10,000: run it again for the others"
        click.echo(f"aqd: note: {limit}", err=True)
    if done.window is not None:
        click.echo(f"aqd: note: {done.window.reason} ({done.window.finished_after:%Y-%m-%d} on)", err=True)


def whoami() -> str:
    """What is written down as who did it: ``anna@host``."""
    import getpass
    import socket

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        import os

        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


@click.command("retry")
@_which_options
@_json
@click.pass_obj
def retry_command(app: App, /, **options: Any) -> int:
    """Put FAILED jobs back into the queue as if they were new.

    Jobs for which it is not possible are named and do not keep the others from being retried.
    """
    from aqd import store

    return _change(app, "retry", options, lambda conn, number: store.retry_job(conn, number).state or "gone")


def _refuse_nan(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    """It is in every range that is tested by what lies outside."""
    if value is not None and value != value:
        raise click.BadParameter("nan is not in the range 0<=x<=86400.")
    return value


@click.command("cancel")
@_which_options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 86_400),
    callback=_refuse_nan,
    metavar="SECONDS",
    help="With IDs: wait at most so long for running jobs to end; exit code 1 if one has not.",
)
@_json
@click.pass_obj
def cancel_command(app: App, /, wait_s: float | None, **options: Any) -> int:
    """Cancel jobs: one that waits at once; one that runs is asked to end, and killed if it does not.

    Nothing happens to jobs that have ended. Jobs that do not exist are named and do not keep the others
    from being cancelled.
    """
    from aqd import store

    ids: tuple[str, ...] = options["ids"]
    if wait_s is not None:
        if _which(options) is not None:
            raise click.UsageError("--wait goes with IDs alone")
        return _cancel_and_wait(app, ids, wait_s)

    def cancel(conn: "Connection", number: int) -> str:
        state = store.cancel_job(conn, number).state
        return state if state != "PROCESSING" else "PROCESSING, asked to end"

    return _change(app, "cancel", options, cancel)


def _cancel_and_wait(app: App, ids: Iterable[str], wait_s: float) -> int:
    from aqd import store

    running: list[int] = []

    def cancel(conn: "Connection", number: int) -> None:
        state = store.cancel_job(conn, number).state
        if state == "PROCESSING":
            running.append(number)
        else:
            click.echo(f"job {number} is {state}")

    with connect(app) as conn:
        code = _for_each(conn, ids, cancel)
        late = _wait_for_end(conn, running, wait_s)
    for number in late:
        failed = report(WorldError(f"job {number} is still PROCESSING after {wait_s:g} s, asked to end"))
        code = code or failed
    return code


def _for_each(conn: "Connection", ids: Iterable[str], act: "Callable[[Connection, int], None]") -> int:
    """``act`` on each id; what fails is reported and the others are done. The first failure's exit code."""
    import psycopg

    from aqd import job

    code = 0
    for text in dict.fromkeys(ids):
        try:
            act(conn, job.parse_id(text))
        except (AqdError, psycopg.Error) as error:
            if conn.broken or conn.closed:
                raise  # there will be no others
            failed = report(error)
            code = code or failed
    return code


def _wait_for_end(conn: "Connection", running: list[int], wait_s: float) -> list[int]:
    """Print each job's state when it has ended; returns those that have not after ``wait_s``."""
    import time

    from aqd import store

    waiting, pause = running, FIRST_LOOK_S
    deadline = time.monotonic() + wait_s
    while waiting:
        live = store.job_facts(conn, waiting)  # a job that was asked to end leaves the live jobs when it has
        for number in waiting:
            if number not in live and (row := store.get_job(conn, number)) is not None:
                click.echo(f"job {number} is {row.state}")
        waiting = [number for number in waiting if number in live]
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
    return waiting


@click.command("delete")
@_which_options
@_json
@click.pass_obj
def delete_command(app: App, /, **options: Any) -> int:
    """Remove jobs that do not run, with all that is known of them.

    A job that runs is named and stays: cancel it first.
    """
    from aqd import store

    def delete(conn: "Connection", number: int) -> str:
        return f"deleted, it was {store.delete_job(conn, number)}"

    return _change(app, "delete", options, delete)


@click.command("discard")
@_which_options
@click.option("--reason", required=True, help="Why; kept in the failed jobs' records.")
@_json
@click.pass_obj
def discard_command(app: App, /, reason: str, **options: Any) -> int:
    """Give up FAILED jobs: they become CANCELLED, their records are settled with the reason.

    ID is the job's, not the record's.
    """
    from aqd import store

    def discard(conn: "Connection", number: int) -> str:
        return store.discard_job(conn, number, reason, whoami())

    return _change(app, "discard", options, discard, reason=reason)


@click.command("update")
@click.argument("id_", metavar="ID")
@click.option("--priority", type=int, help="-100 to 100, higher first.")
@click.option("--run-at", metavar="TIME", help="Not before this moment, such as 2026-11-29T17:40:01Z.")
@click.option("--delay", "delay_s", type=float, metavar="SECONDS", help="Not before that many seconds.")
@_json
@click.pass_obj
def update_command(app: App, /, id_: str, as_json: bool, **options: Any) -> None:
    """Change the priority or the moment of a job that is QUEUED."""
    from aqd import job, store
    from aqd.api import render
    from aqd.cli.output import cell, print_json

    if all(value is None for value in options.values()):
        raise click.UsageError("nothing to change: give --priority, --run-at or --delay")
    number = job.parse_id(id_)
    with connect(app) as conn:
        made = store.update_job(conn, number, **options)
    if as_json:
        print_json(render.updated(made))
    else:
        click.echo(f"job {made.id} has priority {made.priority} and waits until {cell(made.run_at)}")


OF_JOBS = (retry_command, cancel_command, delete_command, update_command)


# --- queues -----------------------------------------------------------------------------------------


def _print_queue(made: "QueueSettings", *, as_json: bool) -> None:
    from aqd.api import render
    from aqd.cli.output import print_json

    if as_json:
        print_json(render.queue_settings(made))
        return
    limit = "no limit" if made.max_running is None else f"at most {made.max_running} of its jobs at a time"
    click.echo(f"queue {made.queue} is {'paused' if made.paused else 'served'}, {limit}")


@click.command("pause")
@click.argument("name")
@_json
@click.pass_obj
def pause_command(app: App, name: str, as_json: bool) -> None:
    """Begin no job of a queue until it is resumed; what runs goes on."""
    from aqd import store

    with connect(app) as conn:
        _print_queue(store.pause_queue(conn, name, whoami()), as_json=as_json)


@click.command("resume")
@click.argument("name")
@_json
@click.pass_obj
def resume_command(app: App, name: str, as_json: bool) -> None:
    """Begin the jobs of a paused queue again."""
    from aqd import store

    with connect(app) as conn:
        _print_queue(store.resume_queue(conn, name, whoami()), as_json=as_json)


@click.command("limit")
@click.argument("name")
@click.argument("jobs", metavar="N|none")
@_json
@click.pass_obj
def limit_command(app: App, name: str, jobs: str, as_json: bool) -> None:
    """Let at most N jobs of a queue run at the same time, on all nodes together; none: any number."""
    from aqd import store

    most = None
    if jobs != "none":
        if not (jobs.isascii() and jobs.isdigit() and len(jobs) < 10):
            bound = f"1..{store.MAX_RUNNING}"
            raise InputError("N", f"{jobs!r} is neither a number ({bound}) nor none", bound)
        most = int(jobs)
    with connect(app) as conn:
        _print_queue(store.limit_queue(conn, name, most, whoami()), as_json=as_json)


OF_QUEUES = (pause_command, resume_command, limit_command)
