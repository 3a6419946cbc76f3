"""The life of a job under leases as a state machine, against the real statements on a real PostgreSQL.

Two nodes, an operator and a keeper do what they can do, in any order, with tokens of all ages. Three ways:
one after the other; one inside a transaction that is held open while the other is sent (it must wait or pass
over the row) and then committed or rolled back; both at the same moment. A model in Python says what may have
become of each job: one operation after the other, for every job by itself, or passed over where the statement
says "skip locked". Anything else is an order that the statements get wrong.

``AQD_TEST_EXAMPLES=5000`` runs as many random lives; the suite runs a fixed few.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.lease_model import (
    MAX_INTERRUPTIONS,
    Cancel,
    Claim,
    Complete,
    Fail,
    Job,
    Lease,
    Nothing,
    Operation,
    Progress,
    Reconcile,
    Release,
    Renew,
    Rescue,
    Retry,
)
from tests.sql.support import Queue

EXAMPLES = int(os.environ.get("AQD_TEST_EXAMPLES") or 0)
LATER_S = 3600.0
NODES = ("node-a", "node-b")
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

    @rule(picks=st.lists(st.integers(0, 50), max_size=3), due=st.booleans())
    def time_passes(self, picks: list[int], due: bool) -> None:
        """Leases expire; what was for later falls due."""
        for id, _ in self.pick([pick - pick % 4 for pick in picks]):
            if self.jobs[id].state == "PROCESSING":
                self.queue.expire(id)
                self.jobs[id] = replace(self.jobs[id], expired=True)
        if due:
            self.queue.conn.execute("update aqd.jobs set run_at = now() where state = 'QUEUED'")
            self.jobs = {id: replace(job, due=True) for id, job in self.jobs.items()}
        self.compare()

    specification = st.tuples(
        st.sampled_from(KINDS), st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 11)
    )

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

    # The first one changes something; the second one should be one that finds jobs by itself in every third case.
    pair = st.tuples(
        st.sampled_from(sorted(set(KINDS) - {"renew", "progress"})),
        st.sampled_from((*KINDS, "claim", "reconcile", "rescue", "rescue")),
    )
    picks = st.lists(st.integers(0, 50), min_size=1, max_size=4)
    choices = st.tuples(st.integers(0, 11), st.integers(0, 11))

    @rule(
        kinds=pair,
        picks=picks,
        choices=choices,
        expired=st.booleans(),
        commit=st.sampled_from((True, True, False)),
    )
    def overlapping(
        self, kinds: tuple[str, str], picks: list[int], choices: tuple[int, int], expired: bool, commit: bool
    ) -> None:
        """The first one's transaction is open while the second one is sent, for the same jobs."""
        self.prepare(picks, expired=expired or "rescue" in kinds)
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

    @rule(kinds=pair, picks=picks, choices=choices, expired=st.booleans())
    def racing(
        self, kinds: tuple[str, str], picks: list[int], choices: tuple[int, int], expired: bool
    ) -> None:
        """Both at once; who comes first is open."""
        self.prepare(picks, expired=expired or "rescue" in kinds)
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

    def prepare(self, picks: list[int], *, expired: bool) -> None:
        """Something runs that two may fight over."""
        if not self.current():
            self.enqueue(2, max_attempts=2, later=False)
            self.alone(("claim", [0], 2))
        if expired:
            self.time_passes(picks, due=False)

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
                return Reconcile(node, leases[1:])
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
            phases=(Phase.generate,),  # who wins a race is different in each repetition
            stateful_step_count=30,
            deadline=None,
            derandomize=not EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert lives.waits[0] > 20 or EXAMPLES, "hardly anything ever waited for a lock"
    assert lives.queue.value(deadlocks) == 0
