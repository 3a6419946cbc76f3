"""Filters over jobs as the API's bodies say them.

Pure. Runs in the API's workers. The fields are those of the query string of ``GET /jobs`` and of
:func:`aqd.store.job_filter`, which judges their values; the types here are for the contract.
"""

from datetime import datetime
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

from aqd import store
from aqd.job import Name, State
from aqd.store.filters import ERROR_HASH_PATTERN, MAX_ERROR_CHARS

Aware = Annotated[datetime, Meta(tz=True)]
CreatedAfter = Annotated[Aware | None, Meta(description="Created at this moment or later.")]
CreatedBefore = Annotated[Aware | None, Meta(description="Created before this moment.")]
FinishedAfter = Annotated[Aware | None, Meta(description="COMPLETED or CANCELLED at this moment or later.")]
FinishedBefore = Annotated[Aware | None, Meta(description="COMPLETED or CANCELLED before this moment.")]
ErrorText = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_ERROR_CHARS)] | None,
    Meta(description="Text that the job's last error contains, in upper or lower case. Live jobs only."),
]
ErrorHash = Annotated[
    Annotated[str, Meta(pattern=f"^{ERROR_HASH_PATTERN}$")] | None,
    Meta(description="The kind of the job's last error, as a group of failed jobs names it. Live jobs only."),
]


ListedField = Literal[
    "id",
    "status",
    "type",
    "queue",
    "priority",
    "attempt",
    "max_attempts",
    "timeout_s",
    "retries",
    "run_at",
    "created_at",
    "started_at",
    "finished_at",
    "cancel_requested_at",
    "progress",
    "node",
    "error",
    "tags",
    "meta",
    "payload",
    "result",
    "output",
]
FIELDS: Final[tuple[str, ...]] = get_args(ListedField)


class FilterBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which jobs; all that is given must hold."""

    state: Annotated[
        State | Annotated[list[State], Meta(min_length=1)] | None, Meta(description="One, or several.")
    ] = None
    type: Name | None = None
    queue: Name | None = None
    tag: Annotated[Name | None, Meta(description="One of the job's tags.")] = None
    created_after: CreatedAfter = None
    created_before: CreatedBefore = None
    finished_after: FinishedAfter = None
    finished_before: FinishedBefore = None
    error: ErrorText = None
    error_hash: ErrorHash = None

    def checked(self) -> store.JobFilter:
        """As the store takes it; :class:`InputError` for what contradicts itself."""
        return store.job_filter(**{name: getattr(self, name) for name in self.__struct_fields__})
