"""How an attempt may end: completed, or by which exception for which reason; and what a stop raises in a handler.

Pure. Used by the worker and by :mod:`aqd.testing`.
"""

import json
from typing import Any, Final, NamedTuple

import msgspec

from aqd import confine
from aqd.errors import Discard, JobCancelled, JobInterrupted, JobTimeout, Retry, StopJob
from aqd.failures import Explained
from aqd.page import StopReason


class ResultRefused(Explained):
    """What the handler returned cannot be stored."""


class HandlerMissing(Explained):
    """The plugin of this type could not be imported in this worker."""


class Ending(NamedTuple):
    """How an attempt ended. ``reason``: see :data:`aqd.outcomes.REASONS`; empty if it completed."""

    kind: str
    reason: str = ""
    result: str = ""
    error: str = ""
    traceback: str = ""
    retry_after_s: float = -1.0


COMPLETED: Final = Ending("completed")  # without a result

# In this order; the first whose class fits.
_REASONS: Final[tuple[tuple[type[BaseException], str, str], ...]] = (
    (Discard, "discarded", "discard"),
    (Retry, "failed", "retry"),
    (SystemExit, "failed", "interpreter_exit"),
    (ResultRefused, "failed", "result"),
    (HandlerMissing, "failed", "plugin_import"),
    (confine.ConfinementRefused, "failed", "confinement"),
    (BaseException, "failed", "exception"),
)

# Why the master asked for the end decides, not which of the exceptions came of it: a handler may raise another.
_STOPPED: Final[dict[StopReason, tuple[str, str]]] = {
    StopReason.TIMEOUT: ("timed_out", "timeout"),
    StopReason.CANCEL: ("cancelled", "cancel"),
    StopReason.DRAIN: ("interrupted", "drain"),
}


def why(error: BaseException, stop: StopReason | None) -> tuple[str, str]:
    """(kind, reason). ``stop``: why the master has asked for the end of just this job; None if it has not, and then a
    StopJob is the handler's own doing, for it may raise anything."""
    if stop is not None:
        # A task group hands on what was raised in a task in a group of its own.
        members = error.exceptions if issubclass(type(error), BaseExceptionGroup) else ()  # type: ignore[attr-defined]
        if any(issubclass(type(found), StopJob) for found in (error, *members[:100])):
            return _STOPPED.get(stop, ("interrupted", "drain"))
    return next((kind, reason) for cls, kind, reason in _REASONS if issubclass(type(error), cls))


def stop_exception(reason: StopReason) -> StopJob:
    if reason is StopReason.TIMEOUT:
        return JobTimeout("the job ran longer than its timeout_s")
    if reason is StopReason.CANCEL:
        return JobCancelled("the job was cancelled")
    if reason is StopReason.FENCE:
        return JobInterrupted("the job's lease is lost")
    return JobInterrupted("the daemon is stopping")


def decode_payload(text: str) -> Any:
    """The payload as the handler gets it: what ``json.loads`` returns."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # numbers that the standard library takes and msgspec does not
        return json.loads(text)
