"""Watching the runs from outside: the side file as it grows, and the processes that it names.

One thread. For every run that has begun and not ended it knows until when the process was certainly alive, and for
every helper that a job started whether it still is. No clock of aqd's and no word of it is used.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVERY_S = 0.1


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def born(pid: int) -> int | None:
    """Start of the living process ``pid`` in ticks since boot; None for a dead one (a zombie is)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(slots=True)
class Run:
    """One run of a job. ``alive_ns``: when its process was last seen alive, while it had not ended.
    ``held_by``: the process that held the job's lock when this run began, 0: nobody."""

    job: int
    attempt: int
    node: str
    pid: int
    began_ns: int
    held_by: int = 0
    ended_ns: int | None = None
    outcome: str | None = None
    alive_ns: int = 0
    dead: bool = False
    born: int | None = None

    def __post_init__(self) -> None:
        self.alive_ns = max(self.alive_ns, self.began_ns)

    @property
    def known_until_ns(self) -> int:
        """It certainly went on until then."""
        return self.ended_ns if self.ended_ns is not None else self.alive_ns

    def __str__(self) -> str:
        end = f"{self.outcome} after {(self.known_until_ns - self.began_ns) / 1e9:.2f} s"
        if self.ended_ns is None:
            end = f"{'ended with its process' if self.dead else 'goes on'} {end[5:]}"
        return f"attempt {self.attempt} on {self.node} by {self.pid} at {self.began_ns / 1e9:.3f}: {end}"


@dataclass(slots=True)
class Helper:
    """A process that a job started."""

    job: int
    attempt: int
    node: str
    parent: int
    pid: int
    how: str
    started_ns: int
    born: int | None
    detached: bool = False  # the handler's options allow it to stay
    gone_ns: int | None = None


@dataclass(slots=True)
class Seen:
    """What the side file says, in order."""

    runs: list[Run] = field(default_factory=list)
    helpers: list[Helper] = field(default_factory=list)
    open: dict[tuple[int, int, int], Run] = field(default_factory=dict)

    def take(self, line: dict[str, Any], now_ns: int) -> None:
        """One line of the side file."""
        event = line["event"]
        if event not in ("start", "end", "spawned"):
            return
        job, attempt, pid = int(line["job"]), line["attempt"], line["pid"]
        key = (job, attempt, pid)
        if event == "start":
            run = Run(job, attempt, line["node"], pid, line["at_ns"], line.get("held_by", 0), born=born(pid))
            self.runs.append(run)
            self.open[key] = run
        elif event == "end" and key in self.open:
            run = self.open.pop(key)
            run.ended_ns, run.outcome = line["at_ns"], line["outcome"]
        elif event == "spawned":
            child = line["child"]
            started = born(child)
            helper = Helper(job, attempt, line["node"], pid, child, line["how"], line["at_ns"], started)
            helper.detached = line["type"] == "chaos_detach"
            if started is None:
                helper.gone_ns = now_ns
            self.helpers.append(helper)

    def look(self, now_ns: int) -> None:
        """Which processes of open runs, and which helpers, still live."""
        for key, run in list(self.open.items()):
            if run.born is not None and born(run.pid) == run.born:
                run.alive_ns = now_ns
            else:
                # Its last line may have been written after we read the file: that comes with the next look.
                run.dead = True
                if now_ns > run.alive_ns + 2_000_000_000:
                    del self.open[key]
        for helper in self.helpers:
            if helper.gone_ns is None and born(helper.pid) != helper.born:
                helper.gone_ns = now_ns


class Watcher(threading.Thread):
    """Follows ``side`` until :meth:`stop`. ``with watcher.lock`` before reading ``watcher.seen``."""

    def __init__(self, side: Path) -> None:
        super().__init__(name="watcher", daemon=True)
        self.side = side
        self.seen = Seen()
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self._offset = 0
        self._done = threading.Event()

    def run(self) -> None:
        try:
            while not self._done.wait(EVERY_S):
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        """One look."""
        with self.lock:
            now_ns = boottime_ns()
            for line in self._lines():
                self.seen.take(line, now_ns)
            self.seen.look(now_ns)

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines that are new."""
        if not self.side.exists():
            return []
        with self.side.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def stop(self) -> None:
        """A last look, and the end."""
        self._done.set()
        self.join(10)
        if self.error is not None:
            raise self.error
        self.step()
