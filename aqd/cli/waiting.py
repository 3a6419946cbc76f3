"""``aqd jobs wait``: until jobs have ended, for scripts.

Told by the database when a job ends (:mod:`aqd.waiting`), so that it may be used for as many jobs as there are, and
for hours, without asking all the time.
"""

import contextlib

import click

from aqd.cli.command import App, report
from aqd.cli.db import connect
from aqd.errors import Exit, NotEnded, NotFoundError


def _refuse_nan(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    """It is in every range that is tested by what lies outside."""
    if value is not None and value != value:
        raise click.BadParameter("nan is not in the range x>=0.")
    return value


@click.command("wait")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    callback=_refuse_nan,
    metavar="SECONDS",
    help="Wait at most so long, 0 to look once; default: for ever.",
)
@click.pass_obj
def wait_command(app: App, ids: tuple[str, ...], timeout_s: float | None) -> int:
    """Wait until jobs have ended, and print the state of each when it has.

    The exit code is 0 if all are COMPLETED, else 1: one is FAILED or CANCELLED, has not ended in time, or does
    not exist (exit code 2).
    """
    from aqd import job, store, waiting

    numbers = list(dict.fromkeys(job.parse_id(each) for each in ids))
    code: int = Exit.OK
    with connect(app) as conn:
        try:
            with contextlib.closing(waiting.watch(conn, numbers, timeout_s)) as ended:
                for number in ended:
                    row = store.get_job(conn, number)
                    if row is None:
                        code = report(NotFoundError(f"there is no job {number}"))
                        continue
                    click.echo(f"job {number} is {row.state}")
                    if row.state != job.State.COMPLETED:
                        code = code or Exit.ERROR
        except NotEnded as late:
            failed = report(late)
            code = code or failed
    return code
