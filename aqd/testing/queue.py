"""A real queue in a test: what is enqueued is run in this process when the test says so.

Runs in test processes. :meth:`Queue.drain` claims with the daemon's statements, lets the worker's code run the
handler, and records with the daemon's statements, one job at a time, so that the order is that of one slot:
priority, then time. There is no background: nothing runs outside of :meth:`~Queue.drain`, and a test never waits.

The connection may be the application's own, inside its transaction (:meth:`Queue.on`): what it has enqueued is then
run although nothing is committed, and all of it is gone after a rollback.

Promises: an exception of a handler is the job's, never the test's (:meth:`Report.assert_completed` says which it was).
Fails with :class:`AssertionError` for due jobs whose type no plugin serves and for a queue that does not become
empty, and with psycopg's errors when the connection (or its transaction) is broken.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack

import psycopg
from msgspec import UNSET

from aqd import client, retry, store
from aqd.claims import ClaimBook, ClaimedJob
from aqd.database import int_array, run, text_array
from aqd.job import State, validate
from aqd.store import AttemptRow, Completion, EnqueuedJob, Failure, JobRow, Release
from aqd.testing.attempts import Attempt, Outcome
from aqd.testing.handlers import LoadedPlugins

NODE_ID: Final = "aqd.testing"
# Attempts that one drain() makes: a job that enqueues its like for ever is a mistake to be told, not waited for.
LIMIT: Final = 1000
_SHOWN: Final = 10


class EnqueueOptions(TypedDict, total=False):
    """The options of :func:`aqd.client.enqueue`."""

    queue: str | None
    priority: int | None
    run_at: datetime | str | None
    delay_s: float | None
    max_attempts: int | None
    timeout_s: float | None
    idempotency_key: str | None
    on_conflict: str
    tags: Sequence[str]
    meta: dict[str, Any] | None
    idempotency_ttl_hours: float


@dataclass(frozen=True)
class Job:
    """A job as it is stored, its JSON decoded. ``row`` has the rest (:class:`aqd.store.JobRow`)."""

    id: int
    state: str
    type: str
    queue: str
    priority: int
    payload: Any
    result: Any
    attempt: int
    run_at: datetime
    last_error: str | None
    tags: tuple[str, ...]
    meta: dict[str, Any]
    row: JobRow = field(repr=False, compare=False)


@dataclass(frozen=True)
class Ran:
    """One attempt of a drain: how it ended, and the job as it was after it."""

    job: Job
    outcome: Outcome


@dataclass(frozen=True)
class Report:
    """What a drain did, in this order. A job that was retried appears once for each attempt."""

    ran: list[Ran]

    def __len__(self) -> int:
        return len(self.ran)

    def __iter__(self) -> Iterator[Ran]:
        return iter(self.ran)

    @property
    def completed(self) -> list[Ran]:
        """Attempts that completed."""
        return [ran for ran in self.ran if ran.outcome.completed]

    @property
    def retried(self) -> list[Ran]:
        """Attempts after which the job waited for another one."""
        return [ran for ran in self.ran if ran.job.state == State.QUEUED]

    @property
    def failed(self) -> list[Ran]:
        """Attempts after which the job was FAILED."""
        return [ran for ran in self.ran if ran.job.state == State.FAILED]

    def assert_completed(self) -> "Report":
        """Every job that was run is COMPLETED, the retried ones in the end; gives the report."""
        last = {ran.job.id: ran for ran in self.ran}
        bad = [ran for ran in last.values() if not ran.outcome.completed]
        if bad:
            lines = [
                f"job {ran.job.id} {ran.job.type}, attempt {ran.job.attempt}, {ran.outcome.kind} "
                f"({ran.outcome.reason}), now {ran.job.state}: {ran.outcome.error}\n{ran.outcome.traceback}"
                for ran in bad[:_SHOWN]
            ]
            raise AssertionError(
                f"{len(bad)} of {len(last)} jobs did not complete:\n" + "\n".join(lines)
            ) from bad[0].outcome.exception
        return self


class Queue:
    """The jobs of one database and the plugins that run them. The fixture ``aqd_queue`` makes one.

    ``conn`` is any psycopg connection to a database with aqd's schema; it stays the caller's, who commits. On one
    that is not in autocommit, what a drain does is part of its transaction.
    """

    def __init__(self, conn: psycopg.Connection[Any], plugins: LoadedPlugins, url: str = "") -> None:
        self.conn = conn
        self.plugins = plugins
        # For connections of the application's own; empty if it is not known.
        self.url = url
        # What the handlers want for jobs that do not say it themselves, as a daemon declares it at its start.
        store.declare_handlers(conn, plugins.infos)

    def on(self, conn: psycopg.Connection[Any]) -> "Queue":
        """The same plugins on the application's own connection, and so in its transaction."""
        return Queue(conn, self.plugins, self.url)

    def enqueue(self, type: str, payload: Any = UNSET, **options: Unpack[EnqueueOptions]) -> EnqueuedJob:
        """:func:`aqd.client.enqueue` on :attr:`conn`."""
        return client.enqueue(self.conn, type, payload, **options)

    # --- running

    def drain(
        self,
        *,
        retries: bool = False,
        limit: int = LIMIT,
        queues: Sequence[str] = (),
        unserved: bool = False,
    ) -> Report:
        """Run what is due until nothing is, jobs that handlers enqueue meanwhile included.

        ``retries``: a job that this drain has put back for a retry is due at once, until it completes or its
        attempts are used up. ``queues``: of these only. Paused queues are left alone, as by a daemon. ``unserved``:
        due jobs whose type no plugin serves may stay. More than ``limit`` attempts are an :class:`AssertionError`.
        """
        report = Report([])
        again: set[int] = set()
        while True:
            claimed = self._claim(queues)
            if claimed is None:
                if not (retries and again and self._make_due(again)):
                    break
                continue
            if len(report) >= limit:
                store.release(
                    self.conn, [Release(claimed.id, claimed.token, False, "limit of drain()", 0.0)], 1000
                )
                raise AssertionError(
                    f"drain() has run {limit} attempts and there are more due, the next one is job {claimed.id} "
                    f"{claimed.type}: a handler that enqueues its like for ever? (limit= allows more)"
                )
            ran = self._run(claimed)
            report.ran.append(ran)
            (again.add if ran.job.state == State.QUEUED else again.discard)(ran.job.id)
        left = run(self.conn, "list_unserved_types", types=text_array(self.plugins.types))
        if left and not unserved:
            kinds = ", ".join(f"{type} ({number})" for type, number in left)
            known = ", ".join(self.plugins.types) or "none"
            raise AssertionError(f"due jobs of types that no plugin serves: {kinds}; served are: {known}")
        return report

    def travel(self, seconds: float) -> int:
        """Let time pass for what waits: every QUEUED job is due so many seconds sooner. The number of jobs."""
        return len(run(self.conn, "bring_forward", seconds=float(seconds)))

    def _claim(self, queues: Sequence[str]) -> ClaimedJob | None:
        # A new book each time: it looks at everything, where an old one remembers for a second what it saw.
        book = ClaimBook(NODE_ID, self.plugins.config.daemon.lease_s, queues=queues)
        book.set_types(frozenset(self.plugins.types))
        found = book.claim(self.conn, 1)
        return found[0] if found else None

    def _make_due(self, ids: set[int]) -> bool:
        return bool(run(self.conn, "make_due", ids=int_array(sorted(ids))))

    def _run(self, claimed: ClaimedJob) -> Ran:
        plugins = self.plugins
        attempt = Attempt(
            id=claimed.id,
            type=claimed.type,
            queue=claimed.queue,
            payload=claimed.payload,
            attempt=claimed.attempt,
            max_attempts=plugins.max_attempts(claimed.type, claimed.max_attempts),
            created_at_us=claimed.created_at_us,
            timeout_s=plugins.timeout_s(claimed.type, claimed.timeout_s),
            tags=claimed.tags,
            meta=claimed.meta,
        )
        outcome = plugins.attempt(attempt)
        if outcome.completed:
            kept = outcome.output if plugins.keeps_output(claimed.type) else None
            store.record_completed(
                self.conn,
                [
                    Completion(
                        claimed.id,
                        claimed.token,
                        outcome.result_json,
                        0.0,
                        wall_s=outcome.wall_s,
                        output=kept or None,
                    )
                ],
            )
        else:
            store.record_failed(self.conn, [self._failure(claimed, attempt, outcome)])
        return Ran(self.job(claimed.id), outcome)

    def _failure(self, claimed: ClaimedJob, attempt: Attempt, outcome: Outcome) -> Failure:
        decision = retry.decide(
            outcome.kind,
            attempt.attempt,
            attempt.max_attempts,
            self.plugins.backoff(claimed.type),
            random.Random(),
            retry_after_s=outcome.retry_after_s,
        )
        return Failure(
            claimed.id,
            claimed.token,
            kind="failed" if outcome.kind == "discarded" else outcome.kind,
            error=outcome.error,
            traceback=outcome.traceback or None,
            retry_in_s=decision.retry_in_s,
            age_s=0.0,
            wall_s=outcome.wall_s,
            reason=outcome.reason,
            output=outcome.output or None,
        )

    # --- looking

    def job(self, id: int | str) -> Job:
        """The job; :class:`aqd.errors.NotFoundError` if there is none."""
        return _job(client.get(self.conn, id))

    def attempts(self, id: int | str) -> list[AttemptRow]:
        """Its attempts that did not complete, as they were recorded."""
        return store.get_attempts(self.conn, int(id))

    def jobs(
        self,
        *,
        type: str | None = None,
        state: str | None = None,
        queue: str | None = None,
        tag: str | None = None,
        where: Callable[[Job], bool] | None = None,
    ) -> list[Job]:
        """All jobs, the finished ones included, in the order in which they were enqueued."""
        found = []
        for (id,) in run(self.conn, "list_all_ids"):
            row = store.get_job(self.conn, id)
            if (
                row is not None
                and type in (None, row.type)
                and state in (None, row.state)
                and queue in (None, row.queue)
                and (tag is None or tag in (row.tags or ()))
                and (where is None or where(_job(row)))
            ):
                found.append(_job(row))
        return found

    def assert_enqueued(
        self,
        type: str,
        payload: Any = ...,
        *,
        queue: str | None = None,
        tag: str | None = None,
        where: Callable[[Job], bool] | None = None,
        count: int | None = None,
    ) -> list[Job]:
        """There is a job (or there are exactly ``count``) of ``type``, whatever became of it; gives them.

        ``payload`` must be equal, if it is given.
        """
        wanted = payload if payload is ... else _as_stored(payload)
        found = [
            job
            for job in self.jobs(type=type, queue=queue, tag=tag, where=where)
            if wanted is ... or job.payload == wanted
        ]
        if len(found) != count if count is not None else not found:
            what = f"{type!r}" + ("" if payload is ... else f" with the payload {payload!r}")
            number = "a job" if count is None else f"{count} jobs"
            raise AssertionError(f"expected {number} of type {what}, found {len(found)}; {self._there()}")
        return found

    def assert_not_enqueued(self, type: str | None = None, payload: Any = ...) -> None:
        """There is no such job; without ``type`` no job at all."""
        wanted = payload if payload is ... else _as_stored(payload)
        found = [job for job in self.jobs(type=type) if wanted is ... or job.payload == wanted]
        if found:
            raise AssertionError(f"expected no such job, found {len(found)}; {self._there()}")

    def assert_completed(self, id: int | str) -> Any:
        """The job is COMPLETED; its result."""
        found = self.job(id)
        if found.state != State.COMPLETED:
            why = f": {found.last_error}" if found.last_error else ""
            raise AssertionError(f"job {id} {found.type} is {found.state}{why}")
        return found.result

    def assert_failed(self, id: int | str) -> str:
        """The job is FAILED; its last error."""
        found = self.job(id)
        if found.state != State.FAILED:
            raise AssertionError(f"job {id} {found.type} is {found.state}")
        return found.last_error or ""

    def _there(self) -> str:
        jobs = self.jobs()
        if not jobs:
            return "there are no jobs at all"
        lines = [
            f"  {job.id} {job.type} {job.state} {json.dumps(job.payload)[:200]}"
            for job in itertools.islice(jobs, _SHOWN)
        ]
        more = f"\n  and {len(jobs) - _SHOWN} more" if len(jobs) > _SHOWN else ""
        return "there are:\n" + "\n".join(lines) + more


def _as_stored(payload: Any) -> Any:
    return json.loads(validate("payload", payload).payload)


def _job(row: JobRow) -> Job:
    return Job(
        id=row.id,
        state=row.state,
        type=row.type,
        queue=row.queue,
        priority=row.priority,
        payload=None if row.payload is None else json.loads(row.payload),
        result=None if row.result is None else json.loads(row.result),
        attempt=row.attempt,
        run_at=row.run_at,
        last_error=row.last_error,
        tags=tuple(row.tags or ()),
        meta=json.loads(row.meta) if row.meta else {},
        row=row,
    )
