"""What is changed by hand: jobs, one or many at a time, and queues.

Used by the API, the client for operators (:mod:`aqd.admin`) and the command line. An :class:`Action` is for jobs in
certain states (:data:`STATES`) and passes over all others. Many jobs are changed like this: the set is chosen once, at
the beginning, at most :data:`MAX_JOBS` of them; then it is worked through in batches of :data:`BATCH`, in id order, each
batch one statement and so one transaction. So it ends however fast the jobs come back (F38: "retry all" over
jobs that fail at once), holds no lock for long, and a job that has moved on meanwhile is left alone.

Promises: of several callers who want the same change of a job one makes it. Fails with :class:`InputError`,
:class:`NotFoundError` and :class:`ConflictError`, nothing changed; if the database goes away in the middle, the batches
before stay changed, and doing it again is harmless.

Functions whose names end in ``_steps`` are for any kind of connection (:mod:`aqd.store.steps`).
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from aqd import job
from aqd.database import Connection, int_array
from aqd.errors import ConflictError, InputError, NotFoundError
from aqd.job import State
from aqd.store.filters import JobFilter
from aqd.store.listing import Window, given, history_params, history_window
from aqd.store.steps import Step, Steps, change, drive, look
from aqd.strict_json import kind_of, show

MAX_JOBS: Final = 10_000
BATCH: Final = 500
MAX_REASON_CHARS: Final = 1000
MAX_RUNNING: Final = 1_000_000


class Action(StrEnum):
    """What may be done to jobs, many or one."""

    RETRY = "retry"
    CANCEL = "cancel"
    DELETE = "delete"
    DISCARD = "discard"


# From which states.
STATES: Final = {
    Action.RETRY: (State.FAILED,),
    Action.CANCEL: (State.QUEUED, State.PROCESSING),
    Action.DELETE: (State.QUEUED, State.FAILED, State.COMPLETED, State.CANCELLED),
    Action.DISCARD: (State.FAILED,),
}
_DONE: Final = {
    Action.RETRY: "retried",
    Action.CANCEL: "cancelled",
    Action.DELETE: "deleted",
    Action.DISCARD: "discarded",
}


class Target(NamedTuple):
    """A job when the set was chosen."""

    id: int
    state: str
    finished_at: datetime | None


class Result(NamedTuple):
    """What became of one job that was named. ``state`` is the one after it, None: there is no such job (any more).
    ``refusal`` is None if it was changed (or would be: a dry run), else the reason."""

    id: int
    state: str | None
    refusal: str | None


class Changed(NamedTuple):
    """What became of many. ``matched``: jobs in the set, or for a dry run all that match. ``skipped``: jobs that were
    named or matched and not changed. ``more``: the filter matches more jobs than were in the set. ``results``
    only for jobs that were named, in their order. ``window``: the finished jobs that were searched, as for a list of the
    same filter."""

    matched: int
    changed: int
    skipped: int
    more: bool
    results: list[Result] | None = None
    window: Window | None = None


class UpdatedJob(NamedTuple):
    """A waiting job after its change."""

    id: int
    state: str
    type: str
    queue: str
    priority: int
    run_at: datetime
    created_at: datetime


class QueueSettings(NamedTuple):
    """What is set for a queue. ``max_running`` None: no limit. The last two are None if nothing ever was."""

    queue: str
    paused: bool
    max_running: int | None
    changed_at: datetime | None
    changed_by: str | None


# --- one job ----------------------------------------------------------------------------------------


def discard_job(conn: Connection, id: int, reason: str, by: str) -> str:
    """Give up a FAILED job: CANCELLED in history, its record resolved with the reason. Its state after that."""
    return drive(conn, discard_steps(id, reason, by))


def discard_steps(id: int, reason: str, by: str) -> Steps[str]:
    """See :func:`discard_job`."""
    yield from _change_one(Action.DISCARD, id, check_reason(reason), _check_text("by", by))
    return State.CANCELLED


def delete_job(conn: Connection, id: int) -> str:
    """Remove a job that does not run, with its attempts and records. The state that it was in."""
    return drive(conn, delete_steps(id))


def delete_steps(id: int) -> Steps[str]:
    """See :func:`delete_job`."""
    return (yield from _change_one(Action.DELETE, id)).state


def _change_one(action: Action, id: int, reason: str = "", by: str = "") -> Steps[Target]:
    """The job as it was. One that has moved on between the look and the change is looked at once more."""
    for _ in range(3):
        rows = yield look("find_named", ids=int_array([id]))
        if not rows:
            raise NotFoundError(f"there is no job {id}")
        target = Target._make(rows[0])
        if target.state not in STATES[action]:
            break
        if (yield from _change_batch(action, [target], reason, by)):
            return target
    raise ConflictError(f"job {id} is {_refusal(action, target.state)}")


def update_job(
    conn: Connection,
    id: int,
    *,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
) -> UpdatedJob:
    """Change the priority or the moment of a job that is QUEUED. A moment in the past means now."""
    return drive(conn, update_steps(id, priority=priority, run_at=run_at, delay_s=delay_s))


def update_steps(
    id: int,
    *,
    priority: int | None = None,
    run_at: datetime | str | None = None,
    delay_s: float | None = None,
) -> Steps[UpdatedJob]:
    """See :func:`update_job`."""
    if priority is None and run_at is None and delay_s is None:
        raise InputError("", "nothing to change: give priority, run_at or delay_s")
    if run_at is not None and delay_s is not None:
        raise InputError("delay_s", "give either run_at or delay_s, not both")
    rows = yield change(
        "update_job",
        id=id,
        priority=None if priority is None else job.check_priority(priority),
        run_at=None if run_at is None else job.parse_moment("run_at", run_at),
        delay_s=None if delay_s is None else job.check_delay(delay_s),
    )
    if rows:
        return UpdatedJob._make(rows[0])
    found = yield look("find_named", ids=int_array([id]))
    if not found:
        raise NotFoundError(f"there is no job {id}")
    raise ConflictError(f"job {id} is {found[0][1]}; only a QUEUED job can be changed")


# --- many jobs --------------------------------------------------------------------------------------


def change_jobs(
    conn: Connection,
    action: Action,
    which: JobFilter | Sequence[int],
    *,
    reason: str | None = None,
    by: str = "",
    dry_run: bool = False,
) -> Changed:
    """Retry, cancel, delete or discard the jobs of a filter, or those named. ``reason`` (of discarding) and
    ``by`` are written down."""
    return drive(conn, change_jobs_steps(action, which, reason=reason, by=by, dry_run=dry_run))


def change_jobs_steps(
    action: Action,
    which: JobFilter | Sequence[int],
    *,
    reason: str | None = None,
    by: str = "",
    dry_run: bool = False,
) -> Steps[Changed]:
    """See :func:`change_jobs`."""
    reason = check_reason(reason) if action is Action.DISCARD else ""
    _check_text("by", by)
    if not isinstance(which, JobFilter):
        return (yield from _change_named(action, list(dict.fromkeys(which)), reason, by, dry_run))
    filters = narrowed(action, which)
    window = history_window(filters, oldest=True)
    params = filters.params() | {"history_before": None} | history_params(filters, window)
    asked = given(which)
    if dry_run:
        count: int = (yield Step("count_changeable", params, False, asked))[0][0]
        return Changed(count, 0, 0, count > MAX_JOBS, window=window)
    rows = yield Step("find_changeable", params | {"limit": MAX_JOBS + 1}, False, asked)
    targets = [Target._make(row) for row in rows[:MAX_JOBS]]
    changed = len((yield from _change_all(action, targets, reason, by)))
    matched = len(targets)
    return Changed(matched, changed, matched - changed, len(rows) > MAX_JOBS, window=window)


def narrowed(action: Action, filters: JobFilter) -> JobFilter:
    """The filter with the states that the action is for. A state that it is not for is refused rather than passed
    over: whoever says "retry what runs" is mistaken about one of the two."""
    for state in filters.states:
        if state not in STATES[action]:
            wanted = ", ".join(STATES[action])
            reason = f"{state} jobs cannot be {_DONE[action]}, only those that are {wanted}"
            raise InputError("state", reason, wanted)
    made = filters._replace(states=filters.states or tuple(map(str, STATES[action])))
    if not made.may_be_live and not made.may_be_finished:
        raise InputError("finished_after", f"jobs that have finished cannot be {_DONE[action]}")
    return made


def _change_named(action: Action, ids: Sequence[int], reason: str, by: str, dry_run: bool) -> Steps[Changed]:
    found = yield from _find(ids)
    targets = [each for each in found.values() if each.state in STATES[action]]
    if dry_run:
        done: dict[int, str | None] = {each.id: each.state for each in targets}
        changed, matched = 0, len(targets)
    else:
        done = yield from _change_all(action, targets, reason, by)
        changed, matched = len(done), len(targets)
        if changed < matched:  # what has moved on meanwhile, as it is now
            found |= yield from _find([each.id for each in targets if each.id not in done])
    results = []
    for id in ids:
        if id in done:
            results.append(Result(id, done[id], None))
        elif id in found:
            results.append(Result(id, found[id].state, _refusal(action, found[id].state)))
        else:
            results.append(Result(id, None, "there is no such job"))
    return Changed(matched, changed, len(ids) - len(done), False, results)


def _find(ids: Iterable[int]) -> Steps[dict[int, Target]]:
    rows = yield look("find_named", ids=int_array(ids))
    return {row[0]: Target._make(row) for row in rows}


def _change_all(action: Action, targets: list[Target], reason: str, by: str) -> Steps[dict[int, str | None]]:
    """The states afterwards of those that were changed, None for the deleted, by id."""
    targets = sorted(targets, key=lambda target: target.id)
    done: dict[int, str | None] = {}
    for first in range(0, len(targets), BATCH):
        done |= yield from _change_batch(action, targets[first : first + BATCH], reason, by)
    return done


def _change_batch(
    action: Action, targets: Sequence[Target], reason: str = "", by: str = ""
) -> Steps[dict[int, str | None]]:
    live = int_array(each.id for each in targets if each.finished_at is None)
    finished = [each for each in targets if each.finished_at is not None]
    rows = []
    match action:
        case Action.RETRY:
            rows += yield change("retry_jobs", ids=live)
        case Action.CANCEL:
            rows += yield change("cancel_jobs", ids=live)
        case Action.DISCARD:
            rows += yield change("discard_jobs", ids=live, reason=reason, by=by)
        case Action.DELETE:
            if len(finished) < len(targets):
                rows += yield change("delete_jobs", ids=live)
            if finished:
                moments = [each.finished_at for each in finished if each.finished_at is not None]
                rows += yield change(
                    "delete_finished",
                    ids=int_array(each.id for each in finished),
                    first_at=min(moments),
                    last_at=max(moments),
                )
    return dict(rows)


def _refusal(action: Action, state: str) -> str:
    wanted = STATES[action]
    if action is Action.DELETE:
        return f"{state}; a job that runs cannot be deleted, cancel it first"
    return f"{state}; only a job that is {' or '.join(wanted)} can be {_DONE[action]}"


def check_reason(value: object) -> str:
    """Why jobs are discarded: a text of 1 to 1000 characters, as it is."""
    bound = f"1..{MAX_REASON_CHARS}"
    if value is None:
        raise InputError("reason", "is missing: say why", bound)
    if not isinstance(value, str):
        raise InputError("reason", f"must be a string, not {kind_of(value)}", bound)
    if not value.strip():
        raise InputError("reason", "is blank: say why", bound)
    if len(value) > MAX_REASON_CHARS:
        raise InputError("reason", f"has {len(value)} characters, not {bound}", bound)
    return _check_text("reason", value)


def _check_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(field, f"must be a string, not {kind_of(value)}")
    if "\0" in value or any("\ud800" <= each <= "\udfff" for each in value):
        raise InputError(field, "contains NUL or a lone surrogate", "Unicode text without NUL")
    return value


# --- queues -----------------------------------------------------------------------------------------


def pause_queue(conn: Connection, queue: str, by: str) -> QueueSettings:
    """No node begins a job of this queue from now on; what runs goes on."""
    return drive(conn, queue_steps(queue, by, paused=True))


def resume_queue(conn: Connection, queue: str, by: str) -> QueueSettings:
    """The opposite of :func:`pause_queue`."""
    return drive(conn, queue_steps(queue, by, paused=False))


def limit_queue(conn: Connection, queue: str, max_running: int | None, by: str) -> QueueSettings:
    """At most so many jobs of this queue run at the same time on all nodes together; None: any number."""
    return drive(conn, queue_steps(queue, by, limited=True, max_running=max_running))


def queue_steps(
    queue: str,
    by: str,
    *,
    paused: bool | None = None,
    limited: bool = False,
    max_running: int | None = None,
) -> Steps[QueueSettings]:
    """Pause, resume or (``limited``) set the limit of a queue, which need not have jobs yet. What is so already is not
    written down again."""
    name = job.check_name("queue", queue)
    _check_text("by", by)
    if paused is not None:
        check_paused(paused)
    if max_running is not None:
        check_max_running(max_running)
    yield change("set_queue", queue=name, paused=paused, limited=limited, max_running=max_running, by=by)
    rows = yield look("get_queue_settings", queue=name)
    return QueueSettings._make(rows[0])


def check_max_running(value: object) -> int:
    """How many jobs of a queue may run at the same time."""
    return job.check_integer("max_running", value, 1, MAX_RUNNING)


def check_paused(value: object) -> bool:
    """Whether a queue is paused."""
    if not isinstance(value, bool):
        raise InputError("paused", f"must be true or false, not {show(value)}")
    return value
