"""What a benchmark has found, as it stands in the JSON of ``--json``.

Times end in ``_s`` (seconds) or ``_ms`` (milliseconds). A value that was not or could not be measured is null: nothing
is estimated. Pure.
"""

from typing import Any, Final

import msgspec

FORMAT: Final = 1


class Latency(msgspec.Struct, kw_only=True):
    """Times in milliseconds; the percentiles are values that occurred (nearest rank)."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


class Figure(msgspec.Struct):
    """A number with its unit. ``good``: what it is wanted to be, such as ``≤ 1150``; ``note``: how it was got."""

    name: str
    value: float
    unit: str = ""
    good: str = ""
    note: str = ""

    @property
    def is_good(self) -> bool | None:
        """Whether the value, in three digits as it is shown, is as wanted; None where nothing is said about it."""
        if not self.good:
            return None
        shown = round(self.value) if abs(self.value) >= 100 else float(f"{self.value:.3g}")
        sign, _, bound = self.good.partition(" ")
        return shown <= float(bound) if sign == "≤" else shown >= float(bound)


class Run(msgspec.Struct, kw_only=True):
    """One measurement of a row."""

    total_s: float
    throughput: float
    failures: int = 0


class Row(msgspec.Struct, kw_only=True):
    """A line of the table: the median of its runs.

    ``variant`` tells the rows of a scenario apart; ``throughput`` is in jobs a second; ``failures`` are jobs that were
    to complete and did not, of all runs; ``batch`` says how many jobs travelled together
    (``jobs_per_claim``, ``jobs_per_record``, or ``jobs_per_submit``).
    """

    variant: str = ""
    workers: int | None = None
    jobs: int
    total_s: float | None = None
    throughput: float | None = None
    failures: int = 0
    handler: str = "noop"
    cost_ms: float = 0.0
    payload_bytes: int = 2
    frame_ms: float | None = None
    batch: dict[str, float] = {}
    latency: Latency | None = None
    figures: list[Figure] = []
    runs: list[Run] = []


class Series(msgspec.Struct, kw_only=True):
    """Points of a curve, for the chart."""

    name: str
    x: str
    y: str
    points: list[tuple[float, float]]


class Result(msgspec.Struct, kw_only=True):
    """What a scenario has found. ``figures`` compare its rows; ``error`` says why there are none."""

    scenario: str
    summary: str
    seconds: float = 0.0
    rows: list[Row] = []
    figures: list[Figure] = []
    series: list[Series] = []
    notes: list[str] = []
    error: str = ""


class Report(msgspec.Struct, kw_only=True):
    """All of a run: the document of ``--json``."""

    format: int = FORMAT
    started_at: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    postgresql: dict[str, str]
    settings: dict[str, Any]
    results: list[Result]
