"""What schemathesis must know about this API and OpenAPI cannot say. Named by SCHEMATHESIS_HOOKS; runs in its process.

Only cases that are meant to be valid are touched, so that they are; invalid ones go out as they were made.
"""

from typing import Any

import schemathesis

WHOLE = ("priority", "max_attempts", "max_running", "limit")


@schemathesis.hook
def map_case(context: Any, case: schemathesis.Case) -> schemathesis.Case:
    """Keep a case that is valid by the schema within the rules that bind several values."""
    if case.query and "wait_s" in case.query:
        case.query["wait_s"] = 0.01  # a run is not there to wait
    if isinstance(case.body, dict) and case.body.get("atomic") is False:
        del case.body["atomic"]  # by which faults are told in an answer of 200, one by one
    if case.meta is None or case.meta.generation.mode.is_negative:
        return case
    if case.query:
        case.query.pop("cursor", None)  # it is opaque: only the page before gives one
        _make_findable(case.query)
    if isinstance(case.body, dict):
        _make_whole(case.body)
        if isinstance(
            case.body.get("ids"), list
        ):  # nineteen nines are no id, which a pattern of digits cannot say
            case.body["ids"] = [id if int(id) < 1 << 63 else "1" for id in case.body["ids"]]
        if isinstance(case.body.get("filter"), dict):
            case.body["filter"] = _set(case.operation.path, case.body["filter"])
        jobs = case.body.get("jobs")
        for job in jobs if isinstance(jobs, list) else [case.body]:
            if isinstance(job, dict) and "type" in job:
                _make_possible(job)
                if case.headers and job.get("idempotency_key") is not None:
                    case.headers.pop("Idempotency-Key", None)  # the same key, or only one of the two
    return case


def _make_whole(value: Any) -> None:
    """78.0 is an integer to JSON Schema; here integers are written as such."""
    if isinstance(value, list):
        for item in value:
            _make_whole(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in WHOLE and isinstance(item, float):
                value[name] = int(item)
            elif name not in ("payload", "meta"):
                _make_whole(item)


def _make_findable(filters: dict[str, Any]) -> None:
    for name in [name for name in filters if name.endswith("_before")]:
        filters.pop(name.replace("_before", "_after"), None)  # an empty range is refused
    if "state" in filters:  # live jobs have not finished
        for name in ("finished_after", "finished_before"):
            filters.pop(name, None)
    if "error" in filters or "error_hash" in filters:  # finished jobs have none
        for name in ("state", "finished_after", "finished_before"):
            filters.pop(name, None)


def _set(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """A filter that has something in it and names no job to which this cannot be done."""
    filters = {name: value for name, value in given.items() if value is not None}
    _make_findable(filters)
    names = ("state",) if path.endswith("/delete") else ("state", "finished_after", "finished_before")
    for name in names:
        filters.pop(name, None)
    return filters or {"type": "mail"}


def _make_possible(job: dict[str, Any]) -> None:
    if job.get("idempotency_key") is None:
        job.pop("on_conflict", None)  # which says what to do about a key
