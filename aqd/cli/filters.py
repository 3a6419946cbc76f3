"""The options that say which jobs, for every command that takes a filter: alike in name and meaning with the query
string of ``GET /jobs``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from aqd.store import JobFilter

Command = TypeVar("Command", bound=Callable[..., Any])

STATES = ("QUEUED", "PROCESSING", "COMPLETED", "FAILED", "CANCELLED")
_OPTIONS = (
    click.option(
        "--state",
        "state",
        multiple=True,
        type=click.Choice(STATES, case_sensitive=False),
        help="Only jobs in this state; may be repeated.",
    ),
    click.option("--type", "type", help="Only jobs of this type."),
    click.option("--queue", help="Only jobs of this queue."),
    click.option("--tag", help="Only jobs with this tag."),
    click.option("--created-after", metavar="TIME", help="Created then or later: 2026-11-29T17:40:01Z."),
    click.option("--created-before", metavar="TIME", help="Created before then."),
    click.option("--finished-after", metavar="TIME", help="COMPLETED or CANCELLED then or later."),
    click.option("--finished-before", metavar="TIME", help="COMPLETED or CANCELLED before then."),
    click.option("--error", metavar="TEXT", help="Whose last error contains TEXT; only jobs not finished."),
    click.option("--error-hash", metavar="HASH", help="Whose last error is of this kind: see failed list."),
)
NAMES = (
    "state",
    "type",
    "queue",
    "tag",
    "created_after",
    "created_before",
    "finished_after",
    "finished_before",
    "error",
    "error_hash",
)


def filter_options(command: Command) -> Command:
    """Adds the options; the command takes them as ``**options`` and gives them to :func:`take_filter`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_filter(options: dict[str, Any]) -> "JobFilter":
    """The filter that the options say, taken out of them; :class:`InputError` names the option's field."""
    from aqd import store

    given = {name: options.pop(name) for name in NAMES}
    given["state"] = given["state"] or None
    return store.job_filter(**given)
