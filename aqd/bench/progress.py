"""What is going on, on standard error: a bar on a terminal, a line a step elsewhere.

The bar is drawn twice a second at most: on a machine that is measured its drawing is work, too. Whoever reads may have
gone away; that must not end a benchmark.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

_A_SECOND: Final = 2


class Progress:
    """Use as a context manager; ``step`` for each thing that takes time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bars: Bars | None = None
        self._scenario = ""
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=_A_SECOND,
                transient=True,
            )

    def __enter__(self) -> "Progress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def scenario(self, name: str) -> None:
        """Steps belong to this one from now on."""
        self._scenario = name

    def say(self, text: str) -> None:
        """A line that stays."""
        with contextlib.suppress(OSError):
            if self._bars is not None:
                self._console.print(text)
            elif sys.stderr is not None:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Shows that something is under way; call what it gives with how much of ``total`` is done."""
        name = f"{self._scenario}: {text}" if self._scenario else text
        if self._bars is None:
            self.say(name)
            yield lambda _done: None
            return
        bars = self._bars
        task = bars.add_task(name, total=total)
        try:
            yield lambda done: bars.update(task, completed=done)
        finally:
            bars.remove_task(task)
