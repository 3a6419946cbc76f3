"""What the lease statements should do to a job: the model of ``test_lease_model.py``.

:class:`Job` is what is known of one job, by the model or from the database. An :class:`Operation` is one function of
the store, with what it does to each job by itself, whatever the others do.
"""

# ruff: noqa: ARG002 - all operations are called alike, whatever they need

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aqd import database, store
from aqd.claims import ClaimedJob
from aqd.errors import ConflictError, NotFoundError
from tests.sql.support import book

MAX_INTERRUPTIONS = 2
LEASE_S = 3600.0

Lease = tuple[int, int]  # (job id, token)
Attempt = tuple[int, str, int | None, bool]  # one not completed: number, kind, token, whether rescue wrote it


@dataclass(frozen=True)
class Job:
    """What is known of a job, in the database or by the model. ``due``, ``expired``: where they mean something."""

    max_attempts: int
    state: str = "QUEUED"
    due: bool = True
    token: int | None = None
    node: str | None = None
    expired: bool = False
    attempt: int = 0
    crashes: int = 0
    interruptions: int = 0
    retries: int = 0
    attempts: tuple[Attempt, ...] = ()
    record: tuple[str, int] | None = None  # dead letter: (resolution, or "open"; number of failures)
    cancel: bool = False
    percent: float | None = None

    def ended(self, kind: str, *, rescued: bool = False, **changes: Any) -> Job:
        """The attempt is over and noted, the lease gone."""
        noted = (*self.attempts, (self.attempt, kind, self.token, rescued))
        return replace(self, token=None, node=None, expired=False, attempts=noted, **changes)

    def cancelled(self, *, begun: bool = True, rescued: bool = False) -> Job:
        """It was asked to end, and has ended; token and node stay, to be seen."""
        record = self.record and ("cancelled", self.record[1])
        ended = replace(
            self, state="CANCELLED", due=True, expired=False, record=record, cancel=True, percent=None
        )
        if begun:
            return replace(ended, attempts=(*self.attempts, (self.attempt, "cancelled", self.token, rescued)))
        return replace(ended, attempt=self.attempt - (self.state == "PROCESSING"))

    def failed(self, kind: str, *, rescued: bool = False, **changes: Any) -> Job:
        """The attempt is over, and it was the last one."""
        record = ("open", 1 if self.record is None else self.record[1] + 1)
        return self.ended(kind, rescued=rescued, state="FAILED", record=record, **changes)

    def holds(self, token: int) -> bool:
        return self.state == "PROCESSING" and self.token == token


class Operation:
    """One statement (or the few that make one function of the store), and what it should do.

    ``skips``: passes over rows that somebody else has locked.
    """

    skips = False

    def run(self, conn: Any) -> Any:
        raise NotImplementedError

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, Any]:
        """What becomes of the job, and what the caller should be told of it: whether it was changed by him."""
        raise NotImplementedError

    def said(self, id: int, answer: Any) -> Any:
        """What the caller was told; None: nothing about this job."""
        raise NotImplementedError

    def check(self, jobs: dict[int, Job], answer: Any) -> None:
        """What must be true of the answer if nobody else was at work. ``jobs`` as before."""


@dataclass
class Claim(Operation):
    node: str
    limit: int
    skips = True

    def run(self, conn: Any) -> list[ClaimedJob]:
        return book(node_id=self.node, lease_s=LEASE_S).claim(conn, self.limit)

    def apply(self, id: int, job: Job, answer: list[ClaimedJob]) -> tuple[Job, bool]:
        for claimed in answer:
            if claimed.id == id and job.state == "QUEUED" and job.due:
                assert (claimed.interruptions, claimed.crashes) == (job.interruptions, job.crashes)
                taken = replace(
                    job,
                    state="PROCESSING",
                    token=claimed.token,
                    node=self.node,
                    attempt=claimed.attempt,
                    percent=None,
                )
                return (taken, True) if claimed.attempt == job.attempt + 1 else (job, False)
        return job, False

    def said(self, id: int, answer: list[ClaimedJob]) -> bool:
        return any(claimed.id == id for claimed in answer)

    def check(self, jobs: dict[int, Job], answer: list[ClaimedJob]) -> None:
        ready = {id for id, job in jobs.items() if job.state == "QUEUED" and job.due}
        assert len({job.id for job in answer}) == len(answer) == min(self.limit, len(ready))


@dataclass
class Renew(Operation):
    leases: list[Lease]
    skips = True

    def run(self, conn: Any) -> dict[Lease, store.Lease]:
        return store.renew(conn, self.leases, LEASE_S)

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        if any(job.holds(token) for each, token in self.leases if each == id):
            return replace(job, expired=False), True
        return job, False

    def said(self, id: int, answer: dict[Lease, store.Lease]) -> bool:
        return any(lease.extended for (each, _), lease in answer.items() if each == id)

    def check(self, jobs: dict[int, Job], answer: dict[Lease, store.Lease]) -> None:
        assert answer == {
            (id, token): store.Lease(extended=True, cancelled=jobs[id].cancel)
            for id, token in self.leases
            if jobs[id].holds(token)
        }


@dataclass
class Progress(Operation):
    leases: list[Lease]
    percent: float
    skips = True

    def run(self, conn: Any) -> set[int]:
        return store.store_progress(
            conn, [store.Progress(id, token, self.percent, "") for id, token in self.leases]
        )

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        if any(job.holds(token) for each, token in self.leases if each == id):
            return replace(job, percent=self.percent), True
        return job, False

    def said(self, id: int, answer: set[int]) -> bool:
        return id in answer


@dataclass
class Complete(Operation):
    leases: list[Lease]

    def run(self, conn: Any) -> set[int]:
        return store.record_completed(
            conn, [store.Completion(id, token, '"done"', 0.0) for id, token in self.leases]
        )

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        for each, token in self.leases:
            if each == id and job.holds(token):
                record = job.record and ("completed", job.record[1])
                return replace(job, state="COMPLETED", expired=False, record=record, percent=None), True
            if each == id and job.state == "COMPLETED" and job.token == token:
                return job, True  # by an earlier try
        return job, False

    def said(self, id: int, answer: set[int]) -> bool:
        return id in answer


@dataclass
class Fail(Operation):
    leases: list[Lease]
    kind: str
    retry_in_s: float | None

    def run(self, conn: Any) -> set[int]:
        failures = [
            store.Failure(id, token, self.kind, "boom", "Traceback", self.retry_in_s, 0.0)
            for id, token in self.leases
        ]
        return store.record_failed(conn, failures)

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        tokens = [token for each, token in self.leases if each == id]
        if any(job.holds(token) for token in tokens):
            if job.cancel or self.kind == "cancelled":
                return job.cancelled(), True
            crashes = job.crashes + (self.kind == "crashed")
            if self.retry_in_s is None:
                return job.failed(self.kind, crashes=crashes), True
            return job.ended(self.kind, state="QUEUED", due=not self.retry_in_s, crashes=crashes), True
        return job, any(token in tokens and not rescued for _, _, token, rescued in job.attempts)

    def said(self, id: int, answer: set[int]) -> bool:
        return id in answer


@dataclass
class Release(Operation):
    leases: list[Lease]
    interrupted: bool

    def run(self, conn: Any) -> dict[int, str]:
        releases = [store.Release(id, token, self.interrupted, "drain", 0.0) for id, token in self.leases]
        return store.release(conn, releases, MAX_INTERRUPTIONS)

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, str]:
        if not any(job.holds(token) for each, token in self.leases if each == id):
            return job, ""
        if not self.interrupted:
            after = _untouched(job)
        elif job.cancel:
            after = job.cancelled()
        elif job.interruptions >= MAX_INTERRUPTIONS:
            after = job.failed("interrupted", interruptions=job.interruptions + 1)
        else:
            after = job.ended("interrupted", state="QUEUED", interruptions=job.interruptions + 1)
            after = replace(after, attempt=job.attempt - 1)
        return after, after.state

    def said(self, id: int, answer: dict[int, str]) -> str:
        return answer.get(id, "")


def _untouched(job: Job) -> Job:
    """Back in the queue as if it had never been claimed, unless it was asked to end."""
    if job.cancel:
        return job.cancelled(begun=False)
    return replace(job, state="QUEUED", attempt=job.attempt - 1, token=None, node=None, expired=False)


@dataclass
class Reconcile(Operation):
    node: str
    held: list[Lease]
    skips = True

    def run(self, conn: Any) -> int:
        return store.reconcile(conn, self.node, self.held, 0.0)

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        if self._fits(id, job):
            return _untouched(job), True
        return job, False

    def _fits(self, id: int, job: Job) -> bool:
        return job.state == "PROCESSING" and job.node == self.node and (id, job.token) not in self.held

    def said(self, id: int, answer: int) -> None:
        return None

    def check(self, jobs: dict[int, Job], answer: int) -> None:
        assert answer == sum(self._fits(id, job) for id, job in jobs.items())


@dataclass
class Rescue(Operation):
    limit: int
    skips = True

    def run(self, conn: Any) -> store.RescueResult:
        return store.rescue(conn, self.limit, 0.0, 0.0, 5)

    def apply(self, id: int, job: Job, answer: store.RescueResult) -> tuple[Job, str]:
        if job.state != "PROCESSING" or not job.expired or not self.said(id, answer):
            return job, ""
        if job.cancel:
            after = job.cancelled(rescued=True)
        elif job.attempt >= job.max_attempts:
            after = job.failed("lost", rescued=True)
        else:
            after = job.ended("lost", rescued=True, state="QUEUED")
        return after, after.state

    def said(self, id: int, answer: store.RescueResult) -> str:
        lists = {"QUEUED": answer.requeued, "FAILED": answer.failed, "CANCELLED": answer.cancelled}
        return "".join(state for state, ids in lists.items() if id in ids)

    def check(self, jobs: dict[int, Job], answer: store.RescueResult) -> None:
        expired = sum(job.state == "PROCESSING" and job.expired for job in jobs.values())
        assert sum(map(len, answer)) == min(self.limit, expired)


@dataclass
class Retry(Operation):
    id: int

    def run(self, conn: Any) -> bool:
        try:
            store.retry_job(conn, self.id)
        except (ConflictError, NotFoundError):
            return False
        return True

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        if id != self.id or job.state != "FAILED":
            return job, False
        fresh = replace(job, state="QUEUED", due=True, attempt=0, crashes=0, interruptions=0, percent=None)
        return replace(fresh, retries=job.retries + 1), True

    def said(self, id: int, answer: bool) -> bool:
        return answer and id == self.id


@dataclass
class Cancel(Operation):
    id: int

    def run(self, conn: Any) -> str:
        return str(database.run(conn, "cancel_job", id=self.id)[0][0])

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, str | None]:
        if id != self.id:
            return job, None
        if job.state == "QUEUED":
            job = job.cancelled(begun=False)
        elif job.state == "PROCESSING":
            job = replace(job, cancel=True)
        return job, job.state

    def said(self, id: int, answer: str) -> str | None:
        return answer if id == self.id else None


class Nothing(Operation):
    """What was rolled back."""

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        return job, False

    def said(self, id: int, answer: Any) -> None:
        return None
