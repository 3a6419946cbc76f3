"""aqd: a job-queue daemon on PostgreSQL with one crash-isolated process per slot.

What plugins import: :class:`aqd.Retry`, :class:`aqd.Discard`, :class:`aqd.JobTimeout`,
:class:`aqd.JobInterrupted`, :class:`aqd.Backoff` and :data:`aqd.hookimpl`. Applications import :mod:`aqd.client`.
"""

from aqd.errors import Discard, JobInterrupted, JobTimeout, Retry
from aqd.hookspecs import Backoff, hookimpl

__version__ = "0.1.0"
__all__ = ["Backoff", "Discard", "JobInterrupted", "JobTimeout", "Retry", "__version__", "hookimpl"]
