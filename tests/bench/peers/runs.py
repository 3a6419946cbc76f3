"""One run of one system: a fresh store, filled or not, workers started, watched, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.peers import machine
from tests.bench.peers.families import Task, Tool
from tests.bench.peers.figures import Drain, Latency
from tests.bench.peers.packages import Cache
from tests.bench.peers.servers import Servers, Store
from tests.bench.peers.systems import System
from tests.bench.peers.workers import GO, Failed, Workers, run_driver

FILL_S = 120.0
DRAIN_S = 120.0
WATCH_S = 0.005  # between two looks at the counts
SETTLE_S = 0.3  # afterwards, for jobs that run a second time
LATENCY_S = 20.0
WARM_UP = 20
RECORD = struct.Struct("=QQ")  # see drivers/tally.py


class Runner:
    """Runs systems on ``servers`` with what ``cache`` has installed."""

    def __init__(self, servers: Servers, cache: Cache) -> None:
        self._servers = servers
        self._cache = cache
        self._tools: dict[str, Tool] = {}

    def prepare(self, system: System) -> None:
        """Installs what the system needs; :class:`Unavailable`."""
        name = system.family.name
        if name not in self._tools:
            self._tools[name] = system.family.prepare(self._cache)
        if system.family.backend == "redis":
            self._cache.redis_server()

    def versions(self) -> dict[str, str]:
        """Of what was prepared."""
        return {name: tool.versions for name, tool in self._tools.items()}

    @contextlib.contextmanager
    def _store(self, system: System) -> Iterator[Store]:
        if system.family.backend == "redis":
            with self._servers.redis(self._cache.redis_server()) as store:
                yield store
        else:
            with self._servers.database() as store:
                yield store

    def drain(self, system: System, jobs: int) -> Drain:
        """Fills, then starts the workers, and measures until the last job is recorded."""
        family, tool = system.family, self._tools[system.family.name]
        with _folder() as place, self._store(system) as store:
            tally = place / "tally"
            tally.mkdir()
            settings = {
                **system.settings,
                "url": store.url,
                "jobs": jobs,
                "directory": str(tally),
                "go": str(place / GO),
            }
            task = Task(place, settings)
            run_driver(family.command(tool, "fill", task), place, FILL_S)
            if (stored := store.count(family.left)) != jobs:
                raise Failed(f"filling stored {stored:,} jobs and not {jobs:,}")
            store.filled()
            with Workers(family.workers(tool, task, system.processes), place) as workers:
                workers.go()
                found = _watch(system, store, workers, tally, jobs)
            if family.done and (done := store.count(family.done)) != jobs:
                raise Failed(f"{done:,} of {jobs:,} jobs are recorded as done")
            return found

    def latency(self, system: System, jobs: int) -> Latency:
        """Stores one job at a time for idle workers."""
        family, tool = system.family, self._tools[system.family.name]
        with _folder() as place, self._store(system) as store:
            fifo = place / "fifo"
            os.mkfifo(fifo, 0o600)
            settings = {
                **system.settings,
                **system.latency_settings,
                "url": store.url,
                "directory": str(place),
                "fifo": str(fifo),
                "go": str(place / GO),
                "warm_up": WARM_UP,
                "limit_s": LATENCY_S,
                "pause_s": system.pause_s,
            }
            run_driver(family.command(tool, "fill", Task(place, {**settings, "jobs": 0})), place, FILL_S)
            task = Task(place, {**settings, "jobs": jobs})
            with Workers(family.workers(tool, task, system.processes), place) as workers:
                workers.go()
                text = run_driver(family.command(tool, "produce", task), place, LATENCY_S + 30)
                workers.check()
            return Latency([each / 1e6 for each in json.loads(text.splitlines()[-1])])


def _watch(system: System, store: Store, workers: Workers, tally: Path, jobs: int) -> Drain:
    """From the first start of a handler until nothing is left."""
    deadline = time.monotonic() + DRAIN_S
    roots = [store.server, *workers.pids]
    before: float | None = None
    while True:
        ran, first = counted(tally)
        if ran and before is None:
            before = machine.cpu_s(roots)
        if ran >= jobs:
            break
        workers.check()
        if time.monotonic() > deadline:
            raise Failed(f"{ran:,} of {jobs:,} jobs ran within {DRAIN_S:g} s; log: {workers.last_line()}")
        time.sleep(WATCH_S)
    while True:
        end = time.monotonic_ns()  # an answer of 0 is about the moment of the question
        if store.count(system.family.left) == 0:
            break
        workers.check()
        if time.monotonic() > deadline:
            raise Failed("all jobs ran, but not all were recorded as done")
        time.sleep(WATCH_S)
    cpu, wal = machine.cpu_s(roots) - (before or 0.0), store.wal_bytes()
    time.sleep(SETTLE_S)
    if (ran := counted(tally)[0]) != jobs:
        raise Failed(f"{ran:,} runs of {jobs:,} jobs")
    return Drain(jobs, (end - first) / 1e9, cpu, wal)


def counted(tally: Path) -> tuple[int, int]:
    """How often handlers have run so far, and the moment of the first: (count, nanoseconds)."""
    count, first = 0, 0
    for entry in os.scandir(tally):
        if entry.name.endswith(".new"):
            continue
        with open(entry.path, "rb") as file:
            ran, moment = RECORD.unpack(file.read(RECORD.size))
        count += ran
        first = min(first, moment) if first else moment
    return count, first


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aqd-peers-", ignore_cleanup_errors=True) as name:
        yield Path(name)
