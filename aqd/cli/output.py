"""How the commands print: tables for people, JSON for programs.

Texts from jobs, plugins and the database are made printable first: a job's error message must not be
able to control the terminal of whoever looks at it. On a terminal tables fit its width; elsewhere a row
stays on one line however long, so that ``grep`` and ``awk`` work.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from aqd.log import printable

WIDE = 100_000  # characters: no wrapping when nobody looks


def print_json(value: Any) -> None:
    """``value`` as JSON with two spaces of indentation; what JSON does not know as text."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None, empty: str = ""
) -> None:
    """A table; ``empty`` is printed instead when there are no rows. None becomes ``-``."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        if empty:
            click.echo(empty)
        return
    tty = sys.stdout.isatty()
    console = Console(width=None if tty else WIDE, highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD if tty else None, title=title if tty else None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=not tty)
    for row in cells:
        table.add_row(*(Text(text, style=_style(text)) for text in row))
    if title and not tty:
        click.echo(f"{title}:")
    console.print(table)


def cell(value: Any) -> str:
    """A value as it stands in a table: printable, None as ``-``, moments in local time."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(cell(item) for item in value) or "-"
    if hasattr(value, "astimezone"):
        return str(value.astimezone().strftime("%Y-%m-%d %H:%M:%S"))
    return printable(str(value))


_STYLES = {
    "ok": "green",
    "loaded": "green",
    "COMPLETED": "green",
    "busy": "cyan",
    "PROCESSING": "cyan",
    "broken": "red",
    "failed": "red",
    "FAILED": "red",
    "late": "yellow",
    "note": "yellow",
    "starting": "yellow",
    "backing off": "yellow",
    "leaving": "yellow",
}


def _style(text: str) -> str:
    return _STYLES.get(text, "")


def duration(seconds: float | None) -> str:
    """``0.4 s``, ``12 s``, ``3 min``, ``5.2 h``, ``11 d``: an age at a glance."""
    if seconds is None:
        return "-"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            number = seconds / size
            return f"{number:.1f} {unit}" if number < 10 and number != int(number) else f"{number:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def shorten(text: str | None, limit: int = 60) -> str | None:
    """The beginning of a text, on one line."""
    if text is None:
        return None
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
