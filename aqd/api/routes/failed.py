"""The dead-letter records: ``GET /admin/failed-jobs``."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from aqd import store
from aqd.api import documents, filters, query, render
from aqd.api.endpoint import Answer, Call, Endpoint, Scope
from aqd.errors import InputError
from aqd.job import Name
from aqd.store.filters import WORD_PATTERN

# Machine-readable words, such as "memory_limit".
Word = Annotated[str, Meta(pattern=f"^{WORD_PATTERN}$")]


class FailedParams(Struct, kw_only=True):
    """Which records, and which page of them."""

    type: Name | None = None
    queue: Name | None = None
    kind: Annotated[Word | None, Meta(description="How the last attempt ended: `failed`, `crashed`, …")] = (
        None
    )
    reason: Annotated[Word | None, Meta(description="Why, in a word: `exception`, `memory_limit`, …")] = None
    error: filters.ErrorText = None
    failed_after: Annotated[filters.Aware | None, Meta(description="FAILED at this moment or later.")] = None
    failed_before: Annotated[filters.Aware | None, Meta(description="FAILED before this moment.")] = None
    resolved: Annotated[
        bool, Meta(description="Also records that a retry, a cancel or a discard has settled.")
    ] = False
    group_by: Annotated[
        Annotated[list[Literal["type", "error"]], Meta(min_length=1, max_length=2)] | None,
        Meta(description="`type`, `error` or `type,error`: the largest groups instead of single records."),
    ] = None
    limit: query.Limit = query.LIMIT_DEFAULT
    cursor: query.Cursor = None


def list_failed(call: Call) -> Answer:
    given: FailedParams = call.params
    asked = store.failed_filter(
        type=given.type,
        queue=given.queue,
        kind=given.kind,
        reason=given.reason,
        error=given.error,
        failed_after=given.failed_after,
        failed_before=given.failed_before,
    )
    if given.group_by is not None:
        return _groups(call, given, asked, frozenset(given.group_by))
    before = render.read_cursor("f", given.cursor) if given.cursor is not None else None
    page = call.pool.read(
        lambda conn: store.list_failed(conn, asked, before, given.limit, resolved=given.resolved)
    )
    return Answer(
        documents.FailedPage(
            failed_jobs=[render.failed_job(row) for row in page.records],
            next_cursor=render.next_cursor("f", page.next),
        )
    )


def _groups(call: Call, given: FailedParams, asked: store.FailedFilter, by: frozenset[str]) -> Answer:
    if given.cursor is not None:
        raise InputError("cursor", "groups have no further pages; leave it out, and give a larger limit")
    found = call.pool.read(
        lambda conn: store.group_failed(
            conn,
            asked,
            given.limit,
            by_type="type" in by,
            by_error="error" in by,
            resolved=given.resolved,
        )
    )
    return Answer(
        documents.FailedPage(
            groups=[render.failed_group(group, asked) for group in found.groups],
            grouped=found.grouped,
            more=found.more,
        )
    )


ENDPOINTS = [
    Endpoint(
        "GET",
        "/admin/failed-jobs",
        list_failed,
        Scope.ADMIN,
        "The records of failed jobs, newest first, or groups of them",
        {200: documents.FailedPage},
        description=(
            "With `group_by` the answer has `groups` instead of `failed_jobs`; each has a `filter`, which"
            " `POST /jobs/retry` and the other changes of many jobs take as it is. It finds the jobs of that type and"
            " error that are FAILED now, also those that `kind`, `reason` or the range of `failed_at` has left out"
            " here: ask with `dry_run=true` first."
        ),
        params=FailedParams,
    ),
]
