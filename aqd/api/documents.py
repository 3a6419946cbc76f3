"""The documents of the API: one msgspec struct each, from which JSON and the contract are made.

Pure. Names are those of :class:`aqd.job.JobRequest` and of DESIGN's words; ids are strings, moments RFC 3339 in UTC,
``_s`` are seconds. ``Raw`` is JSON text that is passed through without being parsed.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from aqd.job import Moment, State

Id = Annotated[str, Meta(pattern="^[1-9][0-9]{0,18}$", description="A job's id.")]
Json = Annotated[Raw, Meta(description="Any JSON value.")]
MaybeJson = Annotated[Raw | None, Meta(description="Any JSON value.")]


class BatchFault(Struct, kw_only=True, omit_defaults=True):
    """What is wrong with one job of a batch, ``index`` its place from 0; the members are those of :class:`Problem`."""

    index: int
    detail: str
    field: str | None = None
    bound: str | int | None = None
    job_id: str | None = None
    differs: list[str] | None = None


class Problem(Struct, kw_only=True, omit_defaults=True):
    """An error (RFC 9457). ``type`` is stable; switch on it."""

    type: Annotated[str, Meta(pattern="^urn:aqd:[a-z-]+$")]
    title: str
    status: int
    detail: str
    field: Annotated[str, Meta(description="The path of the value that was refused.")] | None = None
    bound: Annotated[str | int, Meta(description="The limit that was broken.")] | None = None
    scope: Annotated[str, Meta(description="The scope that the key has not.")] | None = None
    job_id: Annotated[str, Meta(description="The job that an idempotency key stands for.")] | None = None
    differs: (
        Annotated[list[str], Meta(description="The fields in which it was asked for differently.")] | None
    ) = None
    errors: Annotated[list[BatchFault], Meta(description="The jobs of a batch that were refused.")] | None = (
        None
    )


class Enqueued(Struct, kw_only=True):
    """What submitting or retrying answers. ``jobId`` is ``id`` for clients of earlier systems."""

    id: Id
    jobId: Id
    status: State | None
    run_at: Moment | None
    created_at: Moment | None


class Submitted(Enqueued, kw_only=True):
    """What ``POST /jobs`` answers. ``outcome``: ``created``; under an idempotency key also ``existing`` and ``replaced``.
    Of an existing job ``status``, ``queue`` and the moments are those of the job as it is now, null where it has been
    deleted; ``type`` and ``priority`` are as asked for, also where the priority has been changed since."""

    type: str
    queue: str | None
    priority: int
    outcome: str


class BatchResult(Struct, kw_only=True):
    """What became of one job of a batch, ``index`` its place from 0. ``status`` and ``job`` or ``problem`` are what
    ``POST /jobs`` would have answered: 201 or 200, or 400 or 409."""

    index: int
    status: int
    id: Id | None
    job: Submitted | None
    problem: Problem | None


class BatchAnswer(Struct, kw_only=True):
    """The results in the order of the jobs, and how many of each kind."""

    results: list[BatchResult]
    created: int
    existing: int
    replaced: int
    refused: int


class Cancelled(Struct, kw_only=True):
    """The job's state after cancelling; PROCESSING means that it was asked to end."""

    id: Id
    jobId: Id
    status: State
    cancel_requested_at: Moment | None
    finished_at: Moment | None


class Progress(Struct, kw_only=True):
    """What the handler last said about how far it is."""

    percent: float | None
    message: str | None


class Job(Struct, kw_only=True):
    """What is known of every job: everything but payload, result, output and attempts."""

    id: Id
    status: State
    type: str
    queue: str
    priority: int
    attempt: int
    max_attempts: int | None
    timeout_s: float | None
    retries: int
    run_at: Moment
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    cancel_requested_at: Moment | None
    progress: Progress | None
    node: str | None
    error: str | None
    tags: list[str]
    meta: MaybeJson


class Timings(Struct, kw_only=True):
    """Of the attempt that ended the job; ``waited_s`` until its (last) start."""

    waited_s: float | None
    wall_s: float | None
    cpu_s: float | None
    peak_kb: int | None


class Attempt(Struct, kw_only=True):
    """An attempt that did not complete."""

    attempt: int
    kind: str
    reason: str | None
    error: str | None
    traceback: str | None
    signal: int | None
    exit_code: int | None
    started_at: Moment | None
    finished_at: Moment
    wall_s: float | None
    cpu_s: float | None
    peak_kb: int | None
    node: str | None
    output: str | None


class JobInFull(Job, kw_only=True):
    """One job: payload, result, what it used, the output that its handler keeps, and the attempts that did not
    complete, oldest first (of more than a hundred the last ones; `GET /jobs/{id}/attempts` has all)."""

    jobId: Id
    payload: MaybeJson
    result: MaybeJson
    output: str | None
    timings: Timings
    crashes: int
    interruptions: int
    attempts: list[Attempt]


class ListedJob(Struct, kw_only=True):
    """A job in a list: the fields that were asked for, always with ``id``; by default all but ``payload``, ``result`` and
    ``output``."""

    id: Id
    status: State | UnsetType = UNSET
    type: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    max_attempts: int | UnsetType | None = UNSET
    timeout_s: float | UnsetType | None = UNSET
    retries: int | UnsetType = UNSET
    run_at: Moment | UnsetType = UNSET
    created_at: Moment | UnsetType = UNSET
    started_at: Moment | UnsetType | None = UNSET
    finished_at: Moment | UnsetType | None = UNSET
    cancel_requested_at: Moment | UnsetType | None = UNSET
    progress: Progress | UnsetType | None = UNSET
    node: str | UnsetType | None = UNSET
    error: str | UnsetType | None = UNSET
    tags: list[str] | UnsetType = UNSET
    meta: MaybeJson | UnsetType = UNSET
    payload: MaybeJson | UnsetType = UNSET
    result: MaybeJson | UnsetType = UNSET
    output: str | UnsetType | None = UNSET


class Window(Struct, kw_only=True):
    """Of the finished jobs only those of this range were searched, for ``reason``; live jobs all."""

    finished_after: Moment
    finished_before: Moment | None
    reason: str


class JobPage(Struct, kw_only=True):
    """``next_cursor`` is null on the last page. A page may have fewer jobs than ``limit`` and yet not be the last: it
    has a bound in bytes, too. ``window`` is null where everything was searched that was asked for."""

    jobs: list[ListedJob]
    next_cursor: str | None
    window: Window | None


class AttemptPage(Struct, kw_only=True):
    """``next_cursor`` is null on the last page."""

    attempts: list[Attempt]
    next_cursor: str | None


class FailedJob(Struct, kw_only=True):
    """A dead-letter record; ``id`` is the record's, ``job_id`` the job's, ``status`` what became of it, null once the job
    has left the queue. ``note`` and ``discarded_by``: why it was discarded, and by whom."""

    id: Id
    job_id: Id
    status: State | None
    type: str
    queue: str
    kind: str
    reason: str | None
    error: str | None
    traceback: str | None
    attempts: int
    failures: int
    failed_at: Moment
    retried_at: Moment | None
    resolved_at: Moment | None
    resolution: str | None
    note: str | None
    discarded_by: str | None


class GroupFilter(Struct, kw_only=True, omit_defaults=True):
    """The group's jobs that are FAILED now, as ``POST /jobs/retry`` and its like take it."""

    state: State
    type: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
    error_hash: str | UnsetType = UNSET


class FailedGroup(Struct, kw_only=True):
    """Records of failed jobs that have ``type`` and ``error`` in common; null is what they were not grouped by.

    ``error`` is the first line, its numbers as ``#``. ``failed_now``: how many of the jobs are FAILED at the moment, the
    others have been retried or have left. ``filter`` finds them.
    """

    type: str | None
    error: str | None
    count: int
    failed_now: int
    first_failed_at: Moment
    last_failed_at: Moment
    sample_job_id: Id
    filter: GroupFilter


class FailedPage(Struct, kw_only=True):
    """Either ``failed_jobs``, with ``next_cursor`` (null on the last page), or with ``group_by`` instead ``groups``, the
    largest first, of the newest ``grouped`` records; ``more``: there are older ones, which were not looked at."""

    failed_jobs: list[FailedJob] | UnsetType = UNSET
    next_cursor: str | UnsetType | None = UNSET
    groups: list[FailedGroup] | UnsetType = UNSET
    grouped: int | UnsetType = UNSET
    more: bool | UnsetType = UNSET


class Updated(Struct, kw_only=True):
    """A waiting job after its change."""

    id: Id
    jobId: Id
    status: State
    type: str
    queue: str
    priority: int
    run_at: Moment
    created_at: Moment


class Settled(Struct, kw_only=True):
    """A job that was given up, and its state since."""

    id: Id
    jobId: Id
    status: State


class Deleted(Struct, kw_only=True):
    """A job that is no more; ``status`` is the state in which it was last."""

    id: Id
    jobId: Id
    status: State


class ChangedJob(Struct, kw_only=True):
    """What became of a job that was named. ``status`` is its state now, null where there is no such job (any more);
    ``detail`` says why it was not changed. In a trial ``changed`` is false, and ``detail`` null where it would be."""

    id: Id
    changed: bool
    status: State | None
    detail: str | None


class ChangedJobs(Struct, kw_only=True):
    """What became of many. ``matched``: jobs that the change was for. ``skipped``: those that were named or matched
    and not changed. ``more``: the filter matches more than one request changes. ``results`` only for ``ids``, in their
    order. ``window`` as in a list of jobs."""

    dry_run: bool
    matched: int
    changed: int
    skipped: int
    more: bool
    results: list[ChangedJob] | None
    window: Window | None


class QueueSettings(Struct, kw_only=True):
    """What is set for a queue. ``max_running`` null: no limit. Who changed it last, and when: null if nobody ever has."""

    queue: str
    paused: bool
    max_running: int | None
    changed_at: Moment | None
    changed_by: str | None


class Schema(Struct, kw_only=True, omit_defaults=True):
    """Whether the database's schema is this version's."""

    ok: bool
    current: int | None = None
    wanted: int | None = None
    reason: str | None = None


class LiveNodes(Struct, kw_only=True):
    """How many daemons have been seen lately."""

    live: int


class Health(Struct, kw_only=True, omit_defaults=True):
    """Status, schema and nodes. No node is no failure: jobs are accepted, and wait."""

    status: str
    database: str
    schema: Schema | None = None
    nodes: LiveNodes | None = None
