"""What was asked for on the command line. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Handler = Literal["noop", "sleep", "cpu"]

# An object with a text in it is not shorter: {"pad": ""}
MIN_PADDED_BYTES: Final = 11


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``jobs``, ``rounds``, ``rate`` and ``seconds`` are None where the scenario's own number holds, multiplied by ``scale``
    (rounds and rates are not); so is an empty ``workers``, the slots of the node, one row each. ``cost_ms`` is what one job
    of the handler takes."""

    scenarios: tuple[str, ...]
    workers: tuple[int, ...] = ()
    jobs: int | None = None
    payload_bytes: int = 2
    handler: Handler = "noop"
    cost_ms: float = 0.0
    frame_ms: float | None = None
    rounds: int | None = None
    rate: float | None = None
    seconds: float | None = None
    scale: float = 1.0
    database_url: str | None = None
    directory: Path | None = None
    keep: bool = False

    def slots(self, default: tuple[int, ...] = (4,)) -> tuple[int, ...]:
        """How many slots, one measurement each."""
        return self.workers or default

    def count(self, default: int, least: int = 1) -> int:
        """How many jobs: what was asked for, else ``default`` in scale, but not fewer than ``least``."""
        return self.jobs if self.jobs is not None else self.scaled(default, least)

    def scaled(self, number: int, least: int = 1) -> int:
        """``number`` in scale, for what ``--jobs`` does not mean (a backlog, a history)."""
        return max(least, round(number * self.scale))

    def duration_s(self, default: float, least: float = 1.0) -> float:
        """How long: what was asked for, else ``default`` in scale, but not shorter than ``least``."""
        return self.seconds if self.seconds is not None else max(least, default * self.scale)

    def times(self, default: int) -> int:
        """How many rounds."""
        return self.rounds if self.rounds is not None else default

    def document(self) -> dict[str, Any]:
        """For the JSON: no URL, which may hold a password."""
        return {
            "scenarios": list(self.scenarios),
            "workers": list(self.workers),
            "jobs": self.jobs,
            "payload_bytes": self.payload_bytes,
            "handler": self.handler,
            "cost_ms": self.cost_ms,
            "frame_ms": self.frame_ms,
            "rounds": self.rounds,
            "rate": self.rate,
            "seconds": self.seconds,
            "scale": self.scale,
            "own_server": self.database_url is None,
        }


@dataclass(frozen=True, kw_only=True)
class Work:
    """The jobs of a measurement: what their handler does and how large their payload is."""

    handler: str = "noop"
    cost_ms: float = 0.0
    payload_bytes: int = 2

    @property
    def type(self) -> str:
        return f"bench_{self.handler}"

    @property
    def payload(self) -> str:
        """JSON text of ``payload_bytes`` bytes."""
        if self.payload_bytes < MIN_PADDED_BYTES:
            return "{}"
        return '{"pad": "' + "x" * (self.payload_bytes - MIN_PADDED_BYTES) + '"}'
