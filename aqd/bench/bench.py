"""What a scenario is, and what it is given: settings, a server, daemons, a place to say what it is doing."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Protocol

from aqd.bench.database import Database, Server
from aqd.bench.node import Node, Tables, running
from aqd.bench.progress import Progress
from aqd.bench.results import Result
from aqd.bench.settings import Settings, Work


class Bench:
    """One run of ``aqd bench``, as scenarios see it."""

    def __init__(self, settings: Settings, server: Server, directory: Path, progress: Progress) -> None:
        self.settings = settings
        self.server = server
        self.directory = directory
        self.progress = progress
        self._numbers = itertools.count(1)

    @property
    def work(self) -> Work:
        """The jobs that were asked for."""
        given = self.settings
        return Work(handler=given.handler, cost_ms=given.cost_ms, payload_bytes=given.payload_bytes)

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """A new database with aqd's schema."""
        with self.server.database(keep=self.settings.keep) as database:
            yield database

    def node(
        self,
        database: Database,
        slots: int,
        *,
        work: Work | None = None,
        tables: Tables | None = None,
        with_api: bool = False,
    ) -> Node:
        """A node that is not started yet. ``tables`` are its configuration beyond the defaults."""
        merged = {section: dict(table) for section, table in (tables or {}).items()}
        merged.setdefault("plugins", {}).setdefault("settings", {})["bench"] = {
            "cost_ms": work.cost_ms if work else 0.0
        }
        if self.settings.frame_ms is not None:
            merged.setdefault("daemon", {}).setdefault("frame_ms", self.settings.frame_ms)
        directory = self.directory / f"node{next(self._numbers)}"
        return Node(directory, database.url, slots, merged, with_api=with_api)

    @contextlib.contextmanager
    def running(
        self,
        database: Database,
        slots: int,
        *,
        work: Work | None = None,
        tables: Tables | None = None,
        with_api: bool = False,
    ) -> Iterator[Node]:
        """The same, started and ready; ended whatever happens."""
        with running(self.node(database, slots, work=work, tables=tables, with_api=with_api)) as node:
            yield node

    def settle(self, seconds: float) -> None:
        """Lets things come to rest; a small run makes do with less, and its figures are not worth more."""
        time.sleep(max(0.2, seconds * min(1.0, self.settings.scale)))

    def started(self, node: Node) -> contextlib.AbstractContextManager[Node]:
        """The same for a node that has been prepared."""
        return running(node)

    def step(
        self, text: str, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """See :meth:`Progress.step`."""
        return self.progress.step(text, total)


class Scenario(Protocol):
    """One thing that is measured. Its docstring says what, how, and what a good figure is; the first line is the help."""

    name: ClassVar[str]

    def run(self, bench: Bench) -> Result:
        """Measures; raises :class:`aqd.errors.AqdError` where that is not possible."""


def summary(scenario: type[Scenario]) -> str:
    """The first line of its docstring."""
    return (scenario.__doc__ or "").strip().partition("\n")[0]
