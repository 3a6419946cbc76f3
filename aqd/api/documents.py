"""The documents of the API: one msgspec struct each, from which JSON and the contract are made.

Pure. Names are those of :class:`aqd.job.JobRequest` and of DESIGN's words; ids are strings, moments RFC 3339 in UTC,
``_s`` are seconds. ``Raw`` is JSON text that is passed through without being parsed.
"""

from typing import Annotated

from msgspec import Meta, Raw, Struct

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
    """What ``POST /jobs`` answers. ``outcome``: ``created``; under an idempotency key also ``existing`` (the first job, as
    it is now; null where it has been deleted) and ``replaced``."""

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
    """A job in a list: everything but payload, result, output and attempts."""

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
    complete, oldest first."""

    jobId: Id
    payload: MaybeJson
    result: MaybeJson
    output: str | None
    timings: Timings
    crashes: int
    interruptions: int
    attempts: list[Attempt]


class JobPage(Struct, kw_only=True):
    """``next_cursor`` is null on the last page."""

    jobs: list[Job]
    next_cursor: str | None


class FailedJob(Struct, kw_only=True):
    """A dead-letter record; ``id`` is the record's, ``job_id`` the job's, ``status`` what became of it."""

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


class FailedPage(Struct, kw_only=True):
    """``next_cursor`` is null on the last page."""

    failed_jobs: list[FailedJob]
    next_cursor: str | None


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
