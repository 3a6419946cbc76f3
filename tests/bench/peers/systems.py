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


def graphile_fast(size: int) -> dict[str, Any]:
    """The settings of its documentation's page on performance, and a delay of fetches that come back short.

    That page has a local queue of 500 jobs. Of 1,000 to 5,000 the larger cost less processor time a job (500: 31 us,
    1,000: 28, 5,000: 23), so the largest is measured too; more jobs are then locked by a process that may die.
    """
    return {
        "localQueue": {"size": size, "refetchDelay": {"durationMs": 10}},
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
            20_000,
            {"daemon": {"slots": slots, "frame_ms": 0}},
        ),
        *(
            graphile(
                f"graphile-worker-{word}{'-2' if processes == 2 else ''}",
                f"batching, local queue of {size:,}, {processes} process{'es' if processes == 2 else ''}",
                100_000,
                graphile_fast(size),
                processes=processes,
                latency=word == "fast" and processes == 1,
            )
            for word, size in (("fast", 500), ("5000", 5000))
            for processes in (1, 2)
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
        System(
            "pg-boss",
            families.PG_BOSS,
            "4 workers × batch 500, polls every 0.5 s",
            10_000,
            {
                "notify": False,
                "work": {"localConcurrency": 4, "batchSize": 500, "pollingIntervalSeconds": 0.5},
            },
            latency=False,
        ),
        System(
            "pg-boss-fast",
            families.PG_BOSS,
            "the same, burstWhenBatchFull; latency: notify",
            40_000,
            {
                "notify": False,
                "work": {
                    "localConcurrency": 4,
                    "batchSize": 500,
                    "pollingIntervalSeconds": 0.5,
                    "burstWhenBatchFull": True,
                },
            },
            latency_settings={"notify": True},
        ),
        System(
            "pgqueuer",
            families.PGQUEUER,
            "5 consumers × batch 10 (its benchmark's default)",
            10_000,
            {"consumers": 5, "batch": 10},
        ),
        System(
            "pgqueuer-fast",
            families.PGQUEUER,
            "2 consumers × batch 200",
            40_000,
            {"consumers": 2, "batch": 200},
            latency=False,
        ),
        System(
            "pgqueuer-fast-2",
            families.PGQUEUER,
            "1 consumer × batch 200, 2 processes",
            40_000,
            {"consumers": 1, "batch": 200},
            processes=2,
            latency=False,
        ),
        System(
            "procrastinate",
            families.PROCRASTINATE,
            "concurrency 10; latency: LISTEN on",
            2_000,
            {"worker": {"concurrency": 10, "listen_notify": False}},
            latency_settings={"worker": {"concurrency": 10, "listen_notify": True}},
        ),
        System("awa-pg", families.AWA, "64 workers", 30_000, {"workers": 64}),
        System("awa-pg-fast", families.AWA, "256 workers", 30_000, {"workers": 256}, latency=False),
        System(
            "awa-pg-fast-2",
            families.AWA,
            "128 workers, 2 processes",
            30_000,
            {"workers": 128},
            processes=2,
            latency=False,
        ),
        System(
            "celery",
            families.CELERY,
            "Redis, prefork, 2 processes, prefetch 64, results ignored",
            5_000,
            {"prefetch": 64},
            processes=2,
        ),
        System(
            "dramatiq",
            families.DRAMATIQ,
            "Redis, 2 processes × 4 threads",
            8_000,
            {"threads": 4},
            processes=2,
        ),
        System(
            "rq",
            families.RQ,
            "Redis, 2 workers, a fork a job",
            400,
            {"worker": "with_rq.Forking"},
            processes=2,
        ),
        System(
            "rq-simple",
            families.RQ,
            "Redis, 2 workers without forks",
            1_500,
            {"worker": "with_rq.Simple"},
            processes=2,
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
