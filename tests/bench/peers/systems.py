"""What is compared: each system with its settings, and how many jobs make a run of a few seconds."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.bench.peers import families
from tests.bench.peers.families import Family

PAUSE_S = (0.005, 0.03)  # between two jobs of the latency scenario


@dataclass(frozen=True)
class System:
    """One line of the report."""

    name: str
    family: Family
    title: str
    jobs: int  # of the drain scenario; 0: not measured
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    latency: bool = True
    latency_settings: Mapping[str, Any] = field(default_factory=dict)  # beside or in place of the settings
    latency_title: str = ""
    pause_s: tuple[float, float] = PAUSE_S
    against: str = "aqd"  # the system of ours that it is compared with

    def scenarios(self) -> list[str]:
        return [*(["drain"] if self.jobs else []), *(["latency"] if self.latency else [])]


# Its documentation's page on performance, and a delay of fetches that come back short.
GRAPHILE_FAST = {
    "localQueue": {"size": 500, "refetchDelay": {"durationMs": 10}},
    "completeJobBatchDelay": 0,
    "failJobBatchDelay": 0,
}


def graphile(name: str, title: str, jobs: int, worker: Mapping[str, Any], **options: Any) -> System:
    settings = {"concurrency": 24, "worker": dict(worker)}
    return System(name, families.GRAPHILE, title, jobs, settings, **options)


def systems(slots: int = 4) -> list[System]:
    """All of them, in the order of the report; ``slots``: aqd's."""
    one_each = {"localQueue": {"size": -1}, "completeJobBatchDelay": -1, "failJobBatchDelay": -1}
    return [
        System("aqd", families.AQD, f"{slots} slots, defaults", 100_000, {"daemon": {"slots": slots}}),
        System(
            "aqd-single",
            families.AQD,
            f"{slots} slots, one job a frame",
            3_000,
            {"daemon": {"slots": slots, "frame_ms": 0}},
        ),
        graphile("graphile-worker-fast", "fastest settings, 1 process", 100_000, GRAPHILE_FAST),
        graphile(
            "graphile-worker-fast-2",
            "fastest settings, 2 processes",
            100_000,
            GRAPHILE_FAST,
            processes=2,
            latency=False,
        ),
        # No batching is the default too.
        graphile(
            "graphile-worker",
            "default: one claim, one completion each",
            10_000,
            one_each,
            against="aqd-single",
        ),
        graphile(
            "graphile-worker-2",
            "the same, 2 processes",
            10_000,
            one_each,
            processes=2,
            latency=False,
            against="aqd-single",
        ),
    ]


def choose(everything: Iterable[System], only: str | None) -> list[System]:
    """Those that fit one of the patterns in ``only``, separated by commas; ValueError for a pattern without any."""
    found = list(everything)
    if not only:
        return found
    chosen: set[str] = set()
    for pattern in (each.strip() for each in only.split(",")):
        names = fnmatch.filter([each.name for each in found], pattern)
        if not names:
            raise ValueError(f"there is no system {pattern}; --list shows all")
        chosen.update(names)
    return [each for each in found if each.name in chosen]
