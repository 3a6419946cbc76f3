"""Changing many jobs: ``POST /jobs/retry | cancel | delete | discard``, by ids or by a filter.

The set is chosen once (:mod:`aqd.store.change`). ``dry_run=true`` says how many it would be and changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import falcon
from msgspec import UNSET, Meta, Struct, UnsetType

from aqd import job, store, strict_json
from aqd.api import body, documents, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope, Services
from aqd.api.filters import FilterBody
from aqd.api.operate import operate
from aqd.api.routes.changes import Reason
from aqd.errors import InputError
from aqd.store import Action, JobFilter
from aqd.store.change import MAX_JOBS, check_reason


class BulkParams(Struct):
    """How to do it."""

    dry_run: Annotated[bool, Meta(description="Count only, change nothing.")] = False


class BulkBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which jobs: exactly one of the three."""

    ids: (
        Annotated[list[documents.Id], Meta(min_length=1, max_length=job.MAX_IDS, description="These.")]
        | UnsetType
    ) = UNSET
    filter: (
        Annotated[
            FilterBody,
            Meta(description="All that match; not empty.", extra_json_schema={"minProperties": 1}),
        ]
        | UnsetType
    ) = UNSET
    all: (
        Annotated[
            bool, Meta(description="Really all, which must be said.", extra_json_schema={"const": True})
        ]
        | UnsetType
    ) = UNSET


class BulkDiscardBody(BulkBody, kw_only=True, forbid_unknown_fields=True):
    """Which jobs, exactly one of the three, and why."""

    reason: Reason


def reading(action: Action) -> Callable[[bytes, falcon.Request, Services], BulkBody]:
    """The function that reads the body of one action's route."""

    def read(data: bytes, _req: falcon.Request, _services: Services) -> BulkBody:
        given = body.decode(data, BulkDiscardBody if action is Action.DISCARD else BulkBody)
        which(action, given)
        if isinstance(given, BulkDiscardBody):
            check_reason(given.reason)
        return given

    return read


def which(action: Action, given: BulkBody) -> JobFilter | Sequence[int]:
    """The ids, or the filter, that a body names."""
    names = [name for name in ("ids", "filter", "all") if getattr(given, name) is not UNSET]
    if len(names) != 1:
        what = f"{' and '.join(names)} are given together" if names else "nothing says which jobs"
        raise InputError("", f'{what}: give either "ids", or "filter", or "all": true')
    if given.ids is not UNSET:
        return _ids(given.ids)
    if given.filter is UNSET:
        if given.all is not True:
            raise InputError("all", "can only be true; leave it out instead", "true")
        return JobFilter()
    asked = body.named(given.filter, FilterBody, "filter")
    try:
        filters = asked.checked()
        if filters.is_empty:
            raise InputError("", 'is empty, which would be all jobs: say "all": true if that is meant')
        store.narrowed(action, filters)
    except InputError as error:
        field = f"filter.{error.field}" if error.field else "filter"
        raise InputError(field, error.reason, error.bound) from None
    return filters


def _ids(given: object) -> Sequence[int]:
    """JSON's ids are strings, because not every reader of JSON knows 64 bits."""
    if isinstance(given, list):
        for place, each in enumerate(given):
            if not isinstance(each, str):
                kind = strict_json.kind_of(each)
                raise InputError(f"ids[{place}]", f"must be a string, not {kind}")
        if len(given) > job.MAX_IDS:
            bound = f"1..{job.MAX_IDS}"
            raise InputError("ids", f"are {len(given)}, not {bound}", bound)
    return job.check_ids("ids", given)


def changing(action: Action) -> Callable[[Call], Answer]:
    """The function of one action's route."""

    def change_many(call: Call) -> Answer:
        given: BulkBody = call.body
        steps = store.change_jobs_steps(
            action,
            which(action, given),
            reason=given.reason if isinstance(given, BulkDiscardBody) else None,
            by=call.key,
            dry_run=call.params.dry_run,
        )
        return Answer(render.changed(operate(call.pool, steps), dry_run=call.params.dry_run))

    return change_many


_SET = (
    f" A filter's set is chosen once, the oldest {MAX_JOBS:,} jobs (`more` says that there are others), and worked through "
    "in batches of 500, each a transaction: what fails again at once is not met twice."
)


def _endpoint(action: Action, summary: str, description: str) -> Endpoint:
    return Endpoint(
        "POST",
        f"/jobs/{action}",
        changing(action),
        Scope.ADMIN,
        summary,
        {200: documents.ChangedJobs},
        description=description + _SET,
        params=BulkParams,
        body=BulkDiscardBody if action is Action.DISCARD else BulkBody,
        read=reading(action),
        changes=True,
    )


ENDPOINTS = [
    _endpoint(
        Action.RETRY,
        "FAILED jobs become QUEUED again, as if new",
        "A group of failed jobs has its `filter` for this.",
    ),
    _endpoint(
        Action.CANCEL,
        "Jobs that are QUEUED or PROCESSING do not run, or end and are not run again",
        "What runs is asked to end: its status in `results` is PROCESSING.",
    ),
    _endpoint(
        Action.DELETE,
        "Remove jobs that do not run, with all that is known of them",
        "QUEUED, FAILED, COMPLETED and CANCELLED ones. A filter finds the same jobs as in `GET /jobs`, with the same `window`.",
    ),
    _endpoint(
        Action.DISCARD,
        "FAILED jobs are given up",
        "They become CANCELLED; their failed-job records are resolved as `discarded`, with the reason and the name of the key.",
    ),
]
