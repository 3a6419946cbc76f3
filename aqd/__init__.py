"""aqd: a job-queue daemon on PostgreSQL with one crash-isolated process per slot.

What plugins import: :class:`aqd.Retry`, :class:`aqd.Discard`, :class:`aqd.JobTimeout`,
:class:`aqd.JobCancelled`, :class:`aqd.JobInterrupted`, :class:`aqd.Backoff` and :data:`aqd.hookimpl`. Applications import
:mod:`aqd.client`.
"""

from typing import TYPE_CHECKING, Any

from aqd.errors import Discard, JobCancelled, JobInterrupted, JobTimeout, Retry

if TYPE_CHECKING:
    from aqd.hookspecs import Backoff, hookimpl

__version__ = "0.1.0"
__all__ = [
    "Backoff",
    "Discard",
    "JobCancelled",
    "JobInterrupted",
    "JobTimeout",
    "Retry",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    # Not at import: pluggy and what it brings take 0.1 s, which every start of every process would pay.
    if name in ("Backoff", "hookimpl"):
        from aqd import hookspecs

        return getattr(hookspecs, name)
    raise AttributeError(f"module 'aqd' has no attribute {name!r}")
