"""All errors of aqd, and the exit codes of its commands.

One root, three kinds: :class:`UserError` (the caller's mistake: a message without a traceback),
:class:`WorldError` (something outside failed: try again), :class:`BugError` (ours). The exceptions
that *handlers* raise or receive stand at the end; they are not failures of aqd.

A message says what happened, to what, and what to do.
"""

from enum import IntEnum
from typing import Self


class Exit(IntEnum):
    """Exit codes of ``aqd`` and of its processes, so that a number in the journal means something."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        self = int.__new__(cls, value)
        self._value_ = value
        self.meaning = meaning
        return self

    OK = 0, "done"
    ERROR = 1, "an error of aqd, or something outside failed"
    USAGE = 2, "wrong command line"
    CONFIG = 3, "the configuration or a plugin was refused"
    DATABASE = 4, "the database is away, or its schema does not fit"
    RUNNING = 5, "another daemon already holds the pid file"
    NOT_RUNNING = 6, "no daemon answers on the control socket"
    REFUSED = 7, "the daemon refused the command (a reload of a broken configuration)"
    LOADER = 8, "the plugins could not be loaded"
    WORKERS = 9, "worker processes cannot start, again and again"
    ORPHANED = 10, "a child found that its master is gone"
    CHANNEL = 11, "a worker's channel broke or carried what it should not"


class AqdError(Exception):
    """Root of all errors that aqd raises about itself."""

    exit_code = Exit.ERROR


class UserError(AqdError):
    """The caller's mistake; the message is the whole explanation."""

    exit_code = Exit.USAGE


class ConfigError(UserError):
    """The configuration was refused: file, key and reason are in the message."""

    exit_code = Exit.CONFIG


class InputError(UserError):
    """A submitted value was refused.

    ``field`` is the path of the value (``"payload.items[3].name"``, ``"priority"``), ``reason`` says
    what is wrong with it, ``bound`` is the limit that was broken where there is one (``64``,
    ``"-100..100"``).
    """

    def __init__(self, field: str, reason: str, bound: str | int | None = None) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason
        self.bound = bound


class TooBroad(UserError):
    """More would have to be looked at than a request may cost; the message says how to ask for less."""


class NotFoundError(UserError):
    """There is no job (queue, schedule, …) of that id."""


class ConflictError(UserError):
    """The object exists but its state forbids what was asked."""


class IdempotencyConflict(ConflictError):
    """An idempotency key stands for job ``id`` already; ``differs`` names the fields in which that job was asked
    for differently (none: the caller wanted no job but a new one)."""

    def __init__(self, message: str, id: int, differs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.id = id
        self.differs = differs


class NotAllowedError(UserError):
    """The API key is missing, wrong, or may not do this."""


class PluginError(UserError):
    """A plugin was refused: file and reason are in the message."""

    exit_code = Exit.CONFIG


class WorldError(AqdError):
    """Something outside of aqd failed; trying again later may succeed."""


class DatabaseUnavailable(WorldError):
    """PostgreSQL cannot be reached, or refused to serve."""

    exit_code = Exit.DATABASE


class SchemaMismatch(WorldError):
    """The database's schema is older or newer than this version of aqd; the message says which."""

    exit_code = Exit.DATABASE


class SchemaUnfit(SchemaMismatch):
    """The same where waiting does not help: no migration that this version of aqd has leads to what it could work with."""


class NotEnded(WorldError, TimeoutError):
    """A job was waited for and has not ended in time. ``ids``: those of which that is true."""

    def __init__(self, message: str, ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ids = ids


class Locked(WorldError):
    """Somebody else's transaction has held a lock on what was wanted for too long; nothing was changed."""

    exit_code = Exit.DATABASE


class KeyInProgress(Locked):
    """Another transaction is submitting under the idempotency key and has not ended; nothing was stored."""


class OutcomeUnknown(DatabaseUnavailable):
    """The connection broke while a change was being committed, or the answer to it was lost on its way: it may or may
    not have happened.

    ``idempotency_keys``: those of the jobs that were being submitted over HTTP, in their order. Under the same key the
    same job may be submitted again, and is not made twice. ``idempotency_key`` is the only one, where there is one.
    """

    def __init__(self, message: str, idempotency_keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.idempotency_keys = idempotency_keys

    @property
    def idempotency_key(self) -> str | None:
        return self.idempotency_keys[0] if len(self.idempotency_keys) == 1 else None


class ServiceUnavailable(WorldError):
    """aqd's HTTP service cannot be reached, or does not serve."""


class NotRunning(WorldError):
    """No daemon answers on the control socket."""

    exit_code = Exit.NOT_RUNNING


class BugError(AqdError):
    """An invariant of aqd is broken: please report it."""


# --- what handlers raise ------------------------------------------------------------------------


class Retry(Exception):
    """Raised by a handler: this attempt failed, try again after ``after_s`` seconds.

    With ``after_s=None`` the handler's normal backoff applies. Attempts still count.
    """

    def __init__(self, after_s: float | None = None, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for a retry")
        self.after_s = after_s
        self.reason = reason


class Discard(Exception):
    """Raised by a handler: the job can never succeed; FAILED at once, without a retry."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler discarded the job")
        self.reason = reason


# --- what handlers receive ----------------------------------------------------------------------


class StopJob(BaseException):
    """Root of the exceptions by which aqd ends a running handler.

    They derive from :class:`BaseException` so that ``except Exception`` does not swallow them; a
    handler that swallows them all the same is killed after ``kill_grace_s``.
    """


class JobTimeout(StopJob):
    """The job ran longer than its ``timeout_s``."""


class JobCancelled(StopJob):
    """Somebody has cancelled the job; whatever becomes of the handler now, it is not run again."""


class JobInterrupted(StopJob):
    """The daemon is stopping (or has lost the job's lease); the attempt is given back."""
