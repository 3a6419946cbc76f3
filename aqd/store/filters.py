"""Which jobs: the one filter that listing, counting and changing many jobs at once share.

Pure, but for the parameters of the SQL function ``aqd.find_jobs`` (migration 0003), which is what a filter means.
Used by the API, the client and the command line. Promises: a filter made by :func:`job_filter` holds only what
PostgreSQL takes. Fails with :class:`InputError`, which names the field and the bound.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from aqd import job
from aqd.database import int_array, text_array
from aqd.errors import InputError
from aqd.job import State
from aqd.strict_json import kind_of, show

MAX_ERROR_CHARS: Final = 200
WORD_PATTERN: Final = "[a-z_]{1,64}"
ERROR_HASH_PATTERN: Final = "[0-9a-f]{16}"
LIVE_STATES: Final = frozenset({State.QUEUED, State.PROCESSING, State.FAILED})
FINISHED_STATES: Final = frozenset({State.COMPLETED, State.CANCELLED})

_WORD = re.compile(WORD_PATTERN)
_ERROR_HASH = re.compile(ERROR_HASH_PATTERN)


class JobFilter(NamedTuple):
    """Which jobs; what is None (or empty) is not asked for, and all that is given must hold.

    ``…_after`` is inclusive, ``…_before`` exclusive. ``error`` is contained in the job's last error, upper or lower
    case alike; ``error_hash`` is ``aqd.error_hash`` of it: both hold for live jobs only, because finished ones
    have no error. A finished range holds for COMPLETED and CANCELLED jobs only.
    """

    states: tuple[str, ...] = ()
    type: str | None = None
    queue: str | None = None
    tag: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    finished_after: datetime | None = None
    finished_before: datetime | None = None
    error: str | None = None
    error_hash: str | None = None
    ids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it lets every job pass."""
        return self == ANY

    @property
    def may_be_live(self) -> bool:
        """Whether a live job (QUEUED, PROCESSING, FAILED) can match."""
        return (
            self.finished_after is None
            and self.finished_before is None
            and (not self.states or not LIVE_STATES.isdisjoint(self.states))
        )

    @property
    def may_be_finished(self) -> bool:
        """Whether a job in history (COMPLETED, CANCELLED) can match."""
        return (
            self.error is None
            and self.error_hash is None
            and (not self.states or not FINISHED_STATES.isdisjoint(self.states))
        )

    def params(self) -> dict[str, Any]:
        """The parameters of ``aqd.find_jobs``, by name, but for the window."""
        return self._asdict() | {
            "states": text_array(self.states) if self.states else None,
            "ids": int_array(self.ids) if self.ids else None,
        }


ANY: Final = JobFilter()


def job_filter(
    *,
    state: str | Sequence[str] | None = None,
    type: str | None = None,
    queue: str | None = None,
    tag: str | None = None,
    created_after: datetime | str | None = None,
    created_before: datetime | str | None = None,
    finished_after: datetime | str | None = None,
    finished_before: datetime | str | None = None,
    error: str | None = None,
    error_hash: str | None = None,
    ids: Iterable[int | str] | None = None,
) -> JobFilter:
    """The filter made of single values, checked. ``state`` is one or several; moments are aware datetimes or
    RFC 3339 text."""
    made = JobFilter(
        states=_states(state),
        type=None if type is None else job.check_name("type", type),
        queue=None if queue is None else job.check_name("queue", queue),
        tag=None if tag is None else job.check_name("tag", tag),
        created_after=None if created_after is None else job.parse_moment("created_after", created_after),
        created_before=None if created_before is None else job.parse_moment("created_before", created_before),
        finished_after=None if finished_after is None else job.parse_moment("finished_after", finished_after),
        finished_before=None
        if finished_before is None
        else job.parse_moment("finished_before", finished_before),
        error=None if error is None else check_error("error", error),
        error_hash=None if error_hash is None else check_error_hash(error_hash),
        ids=() if ids is None else job.check_ids("ids", ids),
    )
    check_range("created", made.created_after, made.created_before)
    check_range("finished", made.finished_after, made.finished_before)
    if not (made.may_be_live or made.may_be_finished):
        raise _impossible(made)
    return made


def check_error(field: str, value: object) -> str:
    """A text to look for in errors."""
    if not isinstance(value, str):
        raise InputError(field, f"must be a string, not {kind_of(value)}")
    if not 1 <= len(value) <= MAX_ERROR_CHARS:
        bound = f"1..{MAX_ERROR_CHARS}"
        raise InputError(field, f"has {len(value)} characters, not {bound}", bound)
    if "\0" in value or (not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value)):
        raise InputError(field, "contains what no error can: NUL or a lone surrogate")
    return value


def check_error_hash(value: object) -> str:
    """A hash as ``aqd.error_hash`` gives it."""
    if not isinstance(value, str) or not _ERROR_HASH.fullmatch(value):
        bound = "16 hexadecimal digits"
        raise InputError("error_hash", f"{show(value)} is no hash of an error: {bound}", bound)
    return value


def check_word(field: str, value: object) -> str:
    """A machine-readable word: the kind or the reason of a failure."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        bound = "1..64 characters of a-z _"
        raise InputError(field, f"{show(value)} is no such word: {bound}", bound)
    return value


def check_range(what: str, after: datetime | None, before: datetime | None) -> None:
    """Refuses a range that nothing can be in."""
    if after is not None and before is not None and after >= before:
        raise InputError(f"{what}_before", f"is not later than {what}_after")


def _states(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    given = (value,) if isinstance(value, str) else value
    words = ", ".join(State)
    if not isinstance(given, list | tuple | set | frozenset):
        raise InputError("state", f"must be a state or an array of states, not {kind_of(value)}", words)
    if not given:
        raise InputError("state", "is empty; leave it out instead", words)
    for each in given:
        if not isinstance(each, str) or each not in tuple(State):
            raise InputError("state", f"{show(each)} is none of {words}", words)
    return tuple(dict.fromkeys(str(each) for each in given))


def _impossible(made: JobFilter) -> InputError:
    """Nothing can match: rather an error than an empty answer that looks like good news."""
    if made.error is not None or made.error_hash is not None:
        field = "error" if made.error is not None else "error_hash"
        return InputError(
            field, "holds for QUEUED, PROCESSING and FAILED jobs only: finished ones have no error"
        )
    field = "finished_after" if made.finished_after is not None else "finished_before"
    return InputError(field, "holds for COMPLETED and CANCELLED jobs only: others have not finished")
