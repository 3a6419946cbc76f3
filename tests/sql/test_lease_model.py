"""The life of a job under leases as a state machine, against the real statements on a real PostgreSQL.

Two nodes, an operator and a keeper do what they can do, in any order, with tokens of all ages. Three ways:
one after the other; one inside a transaction that is held open while the other is sent (it must wait or pass
over the row) and then committed or rolled back; both at the same moment. A model in Python says what may have
become of each job: one operation after the other, for every job by itself, or passed over where the statement
says "skip locked". Anything else is an order that the statements get wrong.

``AQD_TEST_EXAMPLES=5000`` runs as many random lives; the suite runs a fixed few.
"""

# ruff: noqa: ARG002 - all operations are called alike, whatever they need

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aqd import database, store
from aqd.claims import ClaimedJob
from aqd.errors import ConflictError, NotFoundError
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book

EXAMPLES = int(os.environ.get("AQD_TEST_EXAMPLES", "0"))
MAX_INTERRUPTIONS = 2
LATER_S = 3600.0
LEASE_S = 3600.0
NODES = ("node-a", "node-b")
TERMINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})

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
                    job, state="PROCESSING", token=claimed.token, node=self.node, attempt=claimed.attempt
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


Specification = tuple[str, list[int], int]
KINDS = (
    "claim",
    "renew",
    "progress",
    "complete",
    "fail",
    "release",
    "reconcile",
    "rescue",
    "retry",
    "cancel",
)
FAIL_KINDS = ("failed", "crashed", "timed_out", "cancelled")


class Lives(RuleBasedStateMachine):
    """The machine. Its connections are set by the test."""

    sessions: ClassVar[Sequence[psycopg.Connection[Any]]]
    queue: ClassVar[Queue]
    waits: ClassVar[list[int]] = [0]  # how often one really waited for the other

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[int, Job] = {}
        self.seen: dict[int, Job] = {}  # as last found in the database
        self.leases: list[Lease] = []  # all that ever were
        self.tokens: set[int] = set()
        for table in ("jobs", "job_history", "job_attempts", "failed_jobs"):
            self.queue.conn.execute(f"delete from aqd.{table}")

    # --- what happens

    @initialize(count=st.integers(1, 3), max_attempts=st.integers(1, 3))
    def begin(self, count: int, max_attempts: int) -> None:
        self.enqueue(count, max_attempts, later=False)
        self.alone(("claim", [0], 2))

    @rule(count=st.integers(1, 2), max_attempts=st.integers(1, 3), later=st.booleans())
    def enqueue(self, count: int, max_attempts: int, later: bool) -> None:
        for id in self.queue.add(count, max_attempts=max_attempts, delay_s=LATER_S if later else None):
            self.jobs[id] = Job(max_attempts, due=not later)
        self.compare()

    @precondition(lambda self: self.current())
    @rule(picks=st.lists(st.integers(0, 50), min_size=1, max_size=3))
    def expire(self, picks: list[int]) -> None:
        for id, _ in self.pick([4 * pick for pick in picks]):
            self.queue.expire(id)
            self.jobs[id] = replace(self.jobs[id], expired=True)
        self.compare()

    @precondition(lambda self: any(job.state == "QUEUED" and not job.due for job in self.jobs.values()))
    @rule()
    def time_passes(self) -> None:
        self.queue.conn.execute("update aqd.jobs set run_at = now() where state = 'QUEUED'")
        self.jobs = {id: replace(job, due=True) for id, job in self.jobs.items()}
        self.compare()

    specification = st.tuples(
        st.sampled_from(KINDS), st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 11)
    )

    @precondition(lambda self: self.jobs)
    @rule(what=specification)
    def alone(self, what: Specification) -> None:
        operation = self.build(what)
        answer = operation.run(self.sessions[0])
        operation.check(self.jobs, answer)
        for id, job in self.jobs.items():
            self.jobs[id], told = operation.apply(id, job, answer)
            assert operation.said(id, answer) in (None, told), f"job {id}, {job}: {operation} -> {answer}"
        self.note_claims(operation, answer)
        self.compare()

    pair = st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
    picks = st.lists(st.integers(0, 50), min_size=1, max_size=4)
    choices = st.tuples(st.integers(0, 11), st.integers(0, 11))

    @precondition(lambda self: self.leases)
    @rule(kinds=pair, picks=picks, choices=choices, expired=st.booleans(), commit=st.booleans())
    def overlapping(
        self, kinds: tuple[str, str], picks: list[int], choices: tuple[int, int], expired: bool, commit: bool
    ) -> None:
        """The first one's transaction is open while the second one is sent, for the same jobs."""
        if expired and self.current():
            self.expire(picks)
        one, two = self.build((kinds[0], picks, choices[0])), self.build((kinds[1], picks, choices[1]))
        call = Call(lambda: two.run(self.sessions[1]))
        try:
            with self.sessions[0].transaction(force_rollback=not commit):
                first_answer = one.run(self.sessions[0])
                call.start()
                waited = self.wait_for_lock(call)
        finally:
            call.finish()
        if waited:
            self.waits[0] += 1
        if commit:
            self.settle(one, first_answer, two, call.result(), skippable=(two,))
        else:
            self.settle(Nothing(), None, two, call.result(), skippable=(two,))

    @precondition(lambda self: self.leases)
    @rule(kinds=pair, picks=picks, choices=choices, expired=st.booleans())
    def racing(
        self, kinds: tuple[str, str], picks: list[int], choices: tuple[int, int], expired: bool
    ) -> None:
        """Both at once; who comes first is open."""
        if expired and self.current():
            self.expire(picks)
        one, two = self.build((kinds[0], picks, choices[0])), self.build((kinds[1], picks, choices[1]))
        calls = [Call(lambda: one.run(self.sessions[0])), Call(lambda: two.run(self.sessions[1]))]
        for call in calls:
            call.start()
        for call in calls:
            call.finish()
        self.settle(one, calls[0].result(), two, calls[1].result(), skippable=(one, two))

    # --- what must be true

    def settle(
        self, one: Operation, first: Any, two: Operation, second: Any, skippable: Sequence[Operation]
    ) -> None:
        """For each job by itself, the two happened one after the other, or one passed it over."""
        actual = self.read()
        assert actual.keys() == self.jobs.keys()
        for id, job in self.jobs.items():
            said = (one.said(id, first), two.said(id, second))
            possible = []
            for order in ((one, two), (two, one)):
                for skipped in (None, *(each for each in skippable if each.skips)):
                    possible.append(_outcome(id, job, order, (one, first), (two, second), skipped))
            assert any(
                after == actual[id] and all(s in (None, t) for s, t in zip(said, told, strict=True))
                for after, told in possible
            ), f"job {id}: {job}\n{one} -> {first}\n{two} -> {second}\n{actual[id]} {said}, not {possible}"
        self.adopt(actual)
        self.note_claims(one, first)
        self.note_claims(two, second)

    def compare(self) -> None:
        actual = self.read()
        assert actual == self.jobs
        self.adopt(actual)

    def adopt(self, actual: dict[int, Job]) -> None:
        for id, job in self.seen.items():
            assert job.state not in ("COMPLETED", "CANCELLED") or actual[id] == job, (
                "a terminal state changed"
            )
        self.jobs = self.seen = actual
        for job in actual.values():
            kinds = [kind for _, kind, _, _ in job.attempts]
            assert not (job.cancel and job.state in ("QUEUED", "FAILED"))
            assert job.interruptions <= MAX_INTERRUPTIONS + 1
            assert job.retries or job.crashes == kinds.count("crashed")
            assert job.retries or job.interruptions == kinds.count("interrupted")
            counted = len(kinds) - kinds.count("interrupted") + (job.state in ("PROCESSING", "COMPLETED"))
            exhausted = job.state == "FAILED" and kinds[-1] == "interrupted"
            assert job.retries or job.attempt == counted + exhausted

    def read(self) -> dict[int, Job]:
        """All jobs as the database has them; each in exactly one place."""
        rows = self.queue.conn.execute(READ).fetchall()
        found = {
            row[0]: Job(*row[1:11], tuple(map(tuple, row[11])), row[12] and tuple(row[12]), *row[13:])
            for row in rows
        }
        assert len(found) == len(rows), "a job is in two places"
        return found

    def note_claims(self, operation: Operation, answer: Any) -> None:
        if isinstance(operation, Claim) and answer:
            tokens = {job.token for job in answer}
            assert not tokens & self.tokens, "a token was used twice"
            self.tokens |= tokens
            self.leases += [(job.id, job.token) for job in answer]

    # --- choosing

    def current(self) -> list[Lease]:
        return [(id, job.token) for id, job in self.jobs.items() if job.state == "PROCESSING" and job.token]

    def pick(self, picks: Sequence[int]) -> list[Lease]:
        """One in four numbers chooses among all leases that ever were, the others among the present ones."""
        found = []
        for pick in picks if self.leases else ():
            pool = self.leases if pick % 4 == 3 else self.current() or self.leases
            found.append(pool[pick // 4 % len(pool)])
        return found

    def build(self, what: Specification) -> Operation:
        kind, picks, choice = what
        node, leases = NODES[choice % 2], self.pick(picks)
        match kind:
            case "claim":
                return Claim(node, (1, 2, 100)[choice % 3])
            case "renew":
                return Renew(list(dict.fromkeys(leases)))
            case "complete":
                return Complete(leases)
            case "fail":
                return Fail(leases, FAIL_KINDS[choice % 4], (None, 0.0, LATER_S)[choice % 3])
            case "release":
                return Release(leases, interrupted=choice % 3 != 0)
            case "reconcile":
                return Reconcile(node, leases)
            case "rescue":
                return Rescue((1, 100)[choice % 2])
            case "progress":
                return Progress(leases, float(choice))
            case "cancel":
                return Cancel(
                    leases[0][0] if leases and choice % 3 else list(self.jobs)[picks[0] % len(self.jobs)]
                )
            case _:
                ids = [id for id, job in self.jobs.items() if job.state == "FAILED"] or list(self.jobs)
                return Retry(ids[picks[0] % len(ids)])

    def wait_for_lock(self, call: Call) -> bool:
        """Until the other session has answered, or waits for us."""
        pid = self.sessions[1].info.backend_pid
        blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
        return (
            wait_until(
                lambda: (
                    (call.done.is_set() and "answered") or (bool(self.queue.value(blocked, pid)) and "waits")
                )
            )
            == "waits"
        )


class Nothing(Operation):
    """What was rolled back."""

    def apply(self, id: int, job: Job, answer: Any) -> tuple[Job, bool]:
        return job, False

    def said(self, id: int, answer: Any) -> None:
        return None


def _outcome(
    id: int,
    job: Job,
    order: tuple[Operation, Operation],
    one: tuple[Operation, Any],
    two: tuple[Operation, Any],
    skipped: Operation | None,
) -> tuple[Job, tuple[Any, Any]]:
    """The job after both in this order, and what each should have said."""
    told: dict[bool, Any] = {}
    for operation in order:
        answer = one[1] if operation is one[0] else two[1]
        told[operation is one[0]] = False
        if operation is not skipped:
            job, told[operation is one[0]] = operation.apply(id, job, answer)
    return job, (told[True], told[False])


class Call(threading.Thread):
    """A function in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.done = threading.Event()
        self._answer: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answer = self.function()
        except BaseException as error:
            self._error = error
        self.done.set()

    def finish(self) -> None:
        """Wait for the answer; without one the connection is of no further use."""
        if self.ident is not None:
            assert self.done.wait(30), "no answer"

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


READ = """
    select j.id, j.max_attempts, j.state, j.state <> 'QUEUED' or j.run_at <= now(), j.lease_token, j.node_id,
           j.lease_expires_at is not null and j.lease_expires_at < now(),
           j.attempt, j.crashes, j.interruptions, j.retries,
           array(select jsonb_build_array(a.attempt, a.kind, a.lease_token, coalesce(a.reason = 'lease', false))
                 from aqd.job_attempts a where a.job_id = j.id order by a.id),
           (select jsonb_agg(jsonb_build_array(coalesce(f.resolution, 'open'), f.failures)) -> 0
            from aqd.failed_jobs f where f.job_id = j.id),
           j.cancel_requested_at is not null, j.progress_percent
    from (
        select id, max_attempts, state, run_at, lease_token, node_id, lease_expires_at, attempt, crashes,
               interruptions, retries, cancel_requested_at, progress_percent
        from aqd.jobs
        union all
        select id, max_attempts, state, run_at, lease_token, node_id, null, attempt, crashes, interruptions,
               retries, cancel_requested_at, null
        from aqd.job_history
    ) as j
"""


@pytest.fixture
def lives(connect: Connect) -> type[Lives]:
    Lives.sessions = [connect(), connect()]
    Lives.queue = Queue(connect(dispatcher=False))
    Lives.waits[0] = 0
    return Lives


@pytest.mark.timeout(EXAMPLES + 180)
def test_every_order_of_operations(lives: type[Lives]) -> None:
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    run_state_machine_as_test(
        lives,
        settings=settings(
            max_examples=EXAMPLES or 60,
            phases=(Phase.generate, Phase.shrink),
            stateful_step_count=30,
            deadline=None,
            derandomize=not EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert lives.waits[0] > 20, "hardly anything ever waited for a lock"
    assert lives.queue.value(deadlocks) == 0
