"""The named SQL statements of ``sql/*.sql``.

Used by every process that talks to PostgreSQL. A file holds statements, each opened by a line
``-- name: claim_jobs :many`` (or ``:many fresh``: planned at each call) and followed by comments that say why it is written so and which index
it uses. Parameters are written ``:name`` (as psql does) and become ``$1``, ``$2``, … here, so that
the hot path hands libpq the final text and a tuple; every parameter carries a cast (``:ids::bigint[]``),
so that its type never depends on the value.

Promises: pure reading, once a process; the text sent carries the statement's name as a comment (visible
in ``pg_stat_activity`` and in server logs) and no other comment. Fails with :class:`BugError` on a
malformed file or an unknown name: both are ours.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from aqd.errors import BugError
from aqd.paths import data_dir

KINDS = frozenset({"one", "many", "exec", "rows", "ddl"})

_HEADER = re.compile(
    r"^-- name: (?P<name>[a-z][a-z0-9_]*) :(?P<kind>[a-z]+)(?P<fresh> fresh)?$", re.MULTILINE
)
# Quoted text and casts are matched only to be stepped over.
_TOKEN = re.compile(
    r"(?P<keep>'(?:[^']|'')*'|\"[^\"]*\"|::)|(?P<comment>--[^\n]*)|(?P<end>;)|:(?P<param>[a-z_][a-z0-9_]*)"
)


class Statement(NamedTuple):
    """One statement. ``text`` has ``$n`` placeholders, ``params`` their names in that order."""

    name: str
    kind: str  # one row, many rows, exec (no rows), rows (the count matters), ddl (a template)
    text: bytes
    params: tuple[str, ...]
    fresh: bool  # never prepared, because a plan made for another size of the table would be a bad one
    comment: str
    file: str


def get(name: str) -> Statement:
    """The statement of that name."""
    try:
        return load_all()[name]
    except KeyError:
        raise BugError(f"there is no SQL statement named {name!r}") from None


@lru_cache(maxsize=1)
def load_all() -> dict[str, Statement]:
    """All statements by name."""
    found: dict[str, Statement] = {}
    for path in sorted(data_dir("sql").glob("*.sql")):
        for statement in parse(path.read_text(encoding="utf-8"), path):
            if statement.name in found:
                raise BugError(
                    f"{path}: statement {statement.name!r} is also in {found[statement.name].file}"
                )
            found[statement.name] = statement
    return found


def parse(source: str, path: Path) -> list[Statement]:
    """The statements of one file."""
    headers = list(_HEADER.finditer(source))
    if not headers:
        raise BugError(f"{path}: holds no '-- name:' line")
    result = []
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        body = source[header.end() : following.start() if following else len(source)]
        result.append(_statement(header, body, path))
    return result


def _statement(header: re.Match[str], body: str, path: Path) -> Statement:
    name, kind = header["name"], header["kind"]
    if kind not in KINDS:
        raise BugError(f"{path}: {name}: unknown kind :{kind}")
    params: dict[str, int] = {}
    comments: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if match["param"] is not None:
            return f"${params.setdefault(match['param'], len(params) + 1)}"
        if match["comment"] is not None:
            comments.append(match["comment"][2:].strip())
            return ""
        if match["end"] is not None:
            raise BugError(f"{path}: {name}: ends by the next name, not by a semicolon")
        return match[0]

    text = _TOKEN.sub(replace, body)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise BugError(f"{path}: {name}: holds no statement")
    text = f"/* aqd:{name} */ " + "\n".join(lines)
    return Statement(
        name=name,
        kind=kind,
        text=text.encode(),
        params=tuple(params),
        fresh=header["fresh"] is not None,
        comment="\n".join(comments),
        file=path.name,
    )
