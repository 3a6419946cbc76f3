"""README.md taken apart: headings, fenced blocks, tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


class Block(NamedTuple):
    """One fenced block. ``number`` counts the blocks of one language below one heading."""

    heading: str
    language: str
    number: int
    text: str
    line: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.heading, self.language, self.number


class Table(NamedTuple):
    """One table; ``rows`` without head and rule, cells as they are written."""

    heading: str
    head: list[str]
    rows: list[list[str]]


class Page:
    """The page as its tests want it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.headings: list[str] = []
        self.blocks: list[Block] = []
        self.tables: list[Table] = []
        self._read(text.splitlines())

    def _read(self, lines: list[str]) -> None:
        heading, at = "", 0
        while at < len(lines):
            line = lines[at]
            if line.startswith("```"):
                end = lines.index("```", at + 1)
                language = line.removeprefix("```")
                number = sum(1 for b in self.blocks if (b.heading, b.language) == (heading, language))
                text = "\n".join(lines[at + 1 : end]) + "\n"
                self.blocks.append(Block(heading, language, number, text, at + 1))
                at = end
            elif line.startswith("|"):
                end = at
                while end < len(lines) and lines[end].startswith("|"):
                    end += 1
                rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines[at:end]]
                self.tables.append(Table(heading, rows[0], rows[2:]))
                at = end - 1
            elif line.startswith("#"):
                heading = line.lstrip("# ")
                self.headings.append(heading)
            at += 1

    def table(self, first_cell: str, heading: str | None = None) -> Table:
        """The one table whose head begins with ``first_cell`` (below ``heading``)."""
        found = [
            t for t in self.tables if t.head[0] == first_cell and (heading is None or t.heading == heading)
        ]
        assert len(found) == 1, f"{len(found)} tables begin with {first_cell!r} below {heading!r}"
        return found[0]

    def block(self, heading: str, language: str, number: int = 0) -> Block:
        """One block by its place."""
        return next(b for b in self.blocks if b.key == (heading, language, number))


def code(cell: str) -> list[str]:
    """What stands between backquotes in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def only(cell: str) -> str:
    """The one thing between backquotes."""
    (text,) = code(cell)
    return text


PAGE = Page(README.read_text())
