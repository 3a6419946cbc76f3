"""What must be true whatever happens: pure functions over what was seen from outside.

Each takes plain records (the plan's jobs, rows of the database, runs of the side file, the disturbances that really
happened) and returns sentences about what is wrong; an empty list is good news. Where the guarantee has an exception
(a run is repeated because its worker was killed before it could say that it was done), the exception must be
explained by a disturbance at that place and time; what was explained is counted, never dropped in silence.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.chaos.plan import CANCELLED, COMPLETED, FAILED, Job
from tests.chaos.watch import Helper, Run

FINAL = frozenset({COMPLETED, FAILED, CANCELLED})
# Kinds of attempts that use one up; an interrupted one is given back.
COUNTED = frozenset({"failed", "crashed", "timed_out", "lost", "cancelled"})
SECOND = 1_000_000_000


class Row(NamedTuple):
    """A job as the database has it. ``number`` is its number in the plan."""

    id: int
    number: int
    state: str
    attempt: int
    crashes: int
    interruptions: int


class Attempt(NamedTuple):
    """A row of ``job_attempts``. ``node`` is the node's name; moments are boot time."""

    job: int
    attempt: int
    kind: str
    reason: str | None
    node: str
    began_ns: int
    ended_ns: int
    error: str = ""


class Event(NamedTuple):
    """A disturbance as it happened. ``node`` None: all of them; ``pid`` None: no single process."""

    kind: str
    node: str | None
    pid: int | None
    began_ns: int
    ended_ns: int

    def touches(self, node: str, began_ns: int, ended_ns: int) -> bool:
        """Whether it went on at ``node`` at some moment between the two."""
        return self.node in (None, node) and self.began_ns <= ended_ns and self.ended_ns >= began_ns


class Cancelled(NamedTuple):
    """An answer of ``aqd.cancel`` and the job's attempt as it was in the same transaction."""

    job: int
    answer: str | None
    attempt: int
    answered_ns: int


class Verdict(NamedTuple):
    """``wrong``: violations. ``explained``: exceptions that a disturbance accounts for."""

    wrong: list[str]
    explained: list[str]


# As the plugin registers them.
ONE_SHOT = frozenset({"chaos_one_shot", "chaos_confined"})
MAX_CRASHES = 3

MASTER_STOPPED = frozenset({"stop master", "freeze node"})
# The end of a worker before its outcome was sent, or of the master, who keeps what was sent.
KILLS = frozenset({"kill worker", "kill worker and dispatcher", "kill master", "kill node", "term"})
MASTER_GONE = frozenset({"kill master", "kill node"})


# --- while it goes on -----------------------------------------------------------------------------


class Terminal:
    """Remembers every final state that was ever seen."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[str, int]] = {}

    def observe(self, rows: Iterable[Row]) -> list[str]:
        """``rows``: all jobs as they are now."""
        wrong = []
        now = {row.id: row for row in rows}
        for id, (state, attempt) in self.seen.items():
            row = now.get(id)
            if row is None:
                wrong.append(f"job {id} was {state} and has vanished")
            elif (row.state, row.attempt) != (state, attempt):
                wrong.append(
                    f"job {id} was {state} after attempt {attempt} and is {row.state} after {row.attempt}"
                )
        self.seen |= {id: (row.state, row.attempt) for id, row in now.items() if row.state in FINAL}
        return wrong


# --- at the end -----------------------------------------------------------------------------------


def lost(acknowledged: Mapping[int, int], unanswered: set[int], rows: Iterable[Row]) -> list[str]:
    """Every acknowledged id exists exactly once, and nothing exists that nobody submitted.

    ``acknowledged``: id → number; ``unanswered``: numbers whose submission may or may not have been committed.
    """
    count = Counter(row.id for row in rows)
    wrong = [f"job {id} was acknowledged and is nowhere" for id in acknowledged if not count[id]]
    wrong += [f"job {id} exists {n} times" for id, n in count.items() if n > 1]
    for row in rows:
        if row.id in acknowledged and acknowledged[row.id] != row.number:
            wrong.append(f"job {row.id} was number {acknowledged[row.id]} and is {row.number}")
        if row.id not in acknowledged and row.number not in unanswered:
            wrong.append(f"job {row.id} (number {row.number}) was submitted by nobody")
    return wrong


def doubled(jobs: Mapping[int, Job], rows: Iterable[Row]) -> list[str]:
    """A job that was submitted under a key is there once, however often it was submitted for want of an answer."""
    keyed = {number for number, job in jobs.items() if "idempotency_key" in job.options}
    counts = Counter(row.number for row in rows if row.number in keyed)
    return [
        f"job {number} is there {count} times under one key" for number, count in counts.items() if count > 1
    ]


def outcomes(jobs: Mapping[int, Job], rows: Iterable[Row]) -> list[str]:
    """Every job is in a final state, and in one that its payload allows."""
    wrong = []
    for row in rows:
        job = jobs[row.number]
        if row.state not in FINAL:
            wrong.append(f"job {row.id} ({job.kind}) is still {row.state}, attempt {row.attempt}")
        elif row.state not in job.may_become:
            wrong.append(
                f"job {row.id} ({job.kind}) is {row.state}, attempt {row.attempt}, "
                f"not {' or '.join(sorted(job.may_become))}"
            )
    return wrong


def overlaps(runs: Iterable[Run], attempts: Iterable[Attempt], events: Sequence[Event]) -> Verdict:
    """No two runs of a job at the same time.

    The exception: whoever cannot act cannot fence. A worker whose master stood still (SIGSTOP) beyond the lease
    may still be there when the job begins elsewhere; its lease was not valid any more.
    """
    verdict = Verdict([], [])
    lost_ones = {(each.job, each.attempt) for each in attempts if each.kind == "lost"}
    for job, before, after in _pairs(runs):
        if not (after.held_by or before.known_until_ns > after.began_ns):
            continue
        text = f"job {job} ran twice at once: {before}; {after}" + (
            f" (the lock was held by {after.held_by})" if after.held_by else ""
        )
        frozen = any(
            event.kind in MASTER_STOPPED and event.touches(before.node, before.began_ns, after.began_ns)
            for event in events
        )
        if frozen and (job, before.attempt) in lost_ones:
            verdict.explained.append(text)
        else:
            verdict.wrong.append(text)
    return verdict


def repeats(
    jobs: Mapping[int, Job],
    rows: Iterable[Row],
    runs: Iterable[Run],
    attempts: Iterable[Attempt],
    events: Sequence[Event],
) -> Verdict:
    """A job runs again after its handler returned only if the news could not be kept: the worker was killed before
    it was sent, the master died, or the lease ran out before the database could be told."""
    verdict = Verdict([], [])
    kind_of = {row.id: jobs[row.number] for row in rows}
    ended = {(each.job, each.attempt): each.kind for each in attempts}
    for job, before, after in _pairs(runs):
        if (
            before.outcome != "returned"
            or job not in kind_of
            or ("failed", "result") in own_ends(kind_of[job])
        ):
            continue
        assert before.ended_ns is not None
        kind = ended.get((job, before.attempt), "?")
        text = f"job {job} ran again after it had returned ({kind}): {before}; {after}"
        around = [e for e in events if e.touches(before.node, before.ended_ns - SECOND // 2, after.began_ns)]
        killed = any(e.kind in KILLS and e.pid in (None, before.pid) for e in around)
        if (kind == "lost" and around) or killed:
            verdict.explained.append(text)
        else:
            verdict.wrong.append(text)
    return verdict


def attempts_add_up(rows: Iterable[Row], attempts: Iterable[Attempt], runs: Iterable[Run]) -> list[str]:
    """The attempt column against the rows of job_attempts and against the runs that really happened."""
    wrong = []
    by_job: dict[int, list[Attempt]] = defaultdict(list)
    for each in attempts:
        by_job[each.job].append(each)
    runs_of: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        runs_of[run.job].append(run)
    for row in rows:
        if row.state in FINAL:
            wrong += _adds_up(row, by_job[row.id], runs_of[row.id])
    return wrong


def _adds_up(row: Row, attempts: list[Attempt], runs: list[Run]) -> Iterable[str]:
    name = f"job {row.id} ({row.state}, attempt {row.attempt})"
    numbers = sorted(each.attempt for each in attempts if each.kind in COUNTED)
    expected = list(range(1, row.attempt + (row.state != COMPLETED)))
    kinds = [(each.attempt, each.kind) for each in attempts]
    if numbers != expected:
        yield f"{name} has counted attempts {numbers} in job_attempts, not {expected}: {kinds}"
    count = Counter(each.kind for each in attempts)
    if row.crashes != count["crashed"]:
        yield f"{name} has crashes = {row.crashes}, but {count['crashed']} such attempts"
    if row.interruptions != count["interrupted"]:
        yield f"{name} has interruptions = {row.interruptions}, but {count['interrupted']} such attempts"
    returned = Counter(each.attempt for each in attempts if each.kind == "interrupted")
    for number, times in Counter(run.attempt for run in runs).items():
        if times > 1 + returned[number]:
            yield f"{name} began {times} times as attempt {number}: " + "; ".join(map(str, runs))
        if number > row.attempt and not returned[number]:
            yield f"{name} ran as attempt {number}"
    if row.state == COMPLETED and not any(
        run.attempt == row.attempt and run.outcome == "returned" for run in runs
    ):
        yield f"{name} was never seen to return: " + "; ".join(map(str, runs))


def cancelled(answers: Iterable[Cancelled], rows: Iterable[Row], runs: Iterable[Run]) -> list[str]:
    """The answer holds, and what was cancelled never begins again."""
    wrong = []
    state_of = {row.id: row.state for row in rows}
    runs_of: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        runs_of[run.job].append(run)
    for job, answer, attempt, answered_ns in answers:
        state = state_of.get(job, "nowhere")
        allowed = {CANCELLED, COMPLETED} if answer == "PROCESSING" else {answer}
        if state not in allowed:
            wrong.append(f"job {job} was answered {answer} when it was cancelled and is {state}")
        for run in runs_of[job]:
            late = run.began_ns > answered_ns
            if late and (answer != "PROCESSING" or run.attempt > attempt):
                wrong.append(f"job {job} was answered {answer} in attempt {attempt} and ran again: {run}")
    return wrong


def early(not_before_ns: Mapping[int, int], runs: Iterable[Run]) -> list[str]:
    """Nothing begins before it is due. A tenth of a second is left to the difference of two clocks."""
    return [
        f"job {run.job} began {(not_before_ns[run.job] - run.began_ns) / 1e9:.2f} s before it was due"
        for run in runs
        if run.began_ns < not_before_ns.get(run.job, 0) - SECOND // 10
    ]


def eaten(jobs: Mapping[int, Job], rows: Iterable[Row], runs: Iterable[Run]) -> list[str]:
    """Whoever eats memory is ended."""
    eaters = {row.id for row in rows if jobs[row.number].kind == "eating memory"}
    return [
        f"job {run.job} ate its fill: {run}"
        for run in runs
        if run.job in eaters and run.outcome == "returned"
    ]


def records(rows: Iterable[Row], open_records: Mapping[int, int]) -> list[str]:
    """``open_records``: job → attempts of the dead-letter records that are open. One for each FAILED job."""
    failed = {row.id: row.attempt for row in rows if row.state == FAILED}
    wrong = [f"job {id} is FAILED without an open record" for id in failed.keys() - open_records.keys()]
    wrong += [f"job {id} is not FAILED and has an open record" for id in open_records.keys() - failed.keys()]
    wrong += [
        f"job {id} failed after {failed[id]} attempts, its record says {open_records[id]}"
        for id in failed.keys() & open_records.keys()
        if failed[id] != open_records[id]
    ]
    return wrong


def left_helpers(helpers: Iterable[Helper], events: Sequence[Event]) -> Verdict:
    """Processes that jobs started and nobody ended. Without a service manager a master that is killed outright
    leaves some: what had a session of its own."""
    verdict = Verdict([], [])
    for helper in helpers:
        if helper.gone_ns is not None or helper.detached:
            continue
        text = f"job {helper.job} left a process ({helper.how}): {helper.pid} on {helper.node}"
        excused = _happened(MASTER_GONE, helper, events, helper.started_ns - SECOND)
        (verdict.explained if excused else verdict.wrong).append(text)
    return verdict


def ended_helpers(helpers: Iterable[Helper], events: Sequence[Event]) -> list[str]:
    """Processes that were allowed to stay and were ended all the same, though their node did not end."""
    return [
        f"job {helper.job} was allowed to leave {helper.pid} ({helper.how}), and it was ended"
        for helper in helpers
        if helper.detached
        and helper.gone_ns is not None
        and not _happened(MASTER_GONE | {"term"}, helper, events, helper.started_ns - 60 * SECOND)
    ]


def _happened(kinds: frozenset[str], helper: Helper, events: Iterable[Event], after_ns: int) -> bool:
    return any(
        event.kind in kinds and event.node == helper.node and event.ended_ns > after_ns for event in events
    )


def alone(jobs: Mapping[int, Job], rows: Iterable[Row], runs: Iterable[Run]) -> list[str]:
    """The worker of a one-shot job runs nothing before and nothing after it."""
    types = {row.id: jobs[row.number].type for row in rows}
    users: dict[tuple[int, int | None], list[Run]] = defaultdict(list)
    for run in runs:
        users[run.pid, run.born].append(run)
    return [
        f"job {run.job} wants a process of its own and shared {run.pid} with jobs "
        f"{sorted({each.job for each in users[run.pid, run.born]} - {run.job})}"
        for run in runs
        if types.get(run.job) in ONE_SHOT and run.born and len(users[run.pid, run.born]) > 1
    ]


def budgets(jobs: Mapping[int, Job], rows: Iterable[Row]) -> list[str]:
    """Poison ends with its crash budget, not with its attempts."""
    return [
        f"job {row.id} is {row.state} after {row.crashes} crashes"
        for row in rows
        if jobs[row.number].type == "chaos_poison"
        and (row.crashes > MAX_CRASHES or (row.state == FAILED and row.crashes < MAX_CRASHES))
    ]


# --- oddities -------------------------------------------------------------------------------------

_STEP_ENDS = {
    "raise": ("failed", "exception"),
    "discard": ("failed", "discard"),
    "sys_exit": ("failed", "interpreter_exit"),
    "return_object": ("failed", "result"),
    "segv": ("crashed", "signal"),
    "abort": ("crashed", "signal"),
    "os_exit": ("crashed", "exit"),
    "eat": ("crashed", "memory_limit"),
}


def own_ends(job: Job) -> frozenset[tuple[str, str]]:
    """(kind, reason) of attempts that the payload itself brings about."""
    found = set()
    for step in itertools.chain.from_iterable(job.attempts):
        for name, argument in step.items():
            if name in _STEP_ENDS:
                found.add(_STEP_ENDS[name])
            if name == "return_big" and argument > 1 << 20:
                found.add(("failed", "result"))
    if "timeout_s" in job.options:
        found.add(("timed_out", "timeout"))
    return frozenset(found)


_HOLD_UP = frozenset({"stop worker", "stop master", "freeze node", "stop dispatcher"})
_EXPLAINS: dict[str, frozenset[str] | None] = {
    "crashed": frozenset({"kill worker", "kill worker and dispatcher"}),
    "timed_out": _HOLD_UP,
    "interrupted": frozenset({"term"}),
    "lost": None,  # anything that keeps a node from renewing for long enough
    "cancelled": frozenset(),
    "failed": frozenset(),
}


def unexplained(
    jobs: Mapping[int, Job], rows: Iterable[Row], attempts: Iterable[Attempt], events: Sequence[Event]
) -> list[str]:
    """Attempts that ended in a way for which neither the payload nor a disturbance is the cause."""
    kind_of = {row.id: jobs[row.number] for row in rows}
    odd = []
    for each in attempts:
        job = kind_of.get(each.job)
        if job is None or (each.kind, each.reason) in own_ends(job):
            continue
        if each.kind == "cancelled" and job.cancel_at_s is not None:
            continue
        kinds = _EXPLAINS[each.kind]
        if not any(
            (kinds is None or event.kind in kinds)
            and event.touches(each.node, each.began_ns - 2 * SECOND, each.ended_ns + SECOND)
            for event in events
        ):
            odd.append(
                f"job {each.job} ({job.kind}) attempt {each.attempt} on {each.node} is {each.kind}"
                f"{f' ({each.reason})' if each.reason else ''} after "
                f"{(each.ended_ns - each.began_ns) / 1e9:.2f} s for no known reason: {each.error[:200]}"
            )
    return odd


def _pairs(runs: Iterable[Run]) -> Iterable[tuple[int, Run, Run]]:
    """Each two runs of a job that follow one another."""
    by_job: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.job].append(run)
    for job, each in by_job.items():
        each.sort(key=lambda run: run.began_ns)
        for before, after in itertools.pairwise(each):
            yield job, before, after


def numbered(jobs: Iterable[Job]) -> dict[int, Job]:
    return {job.number: job for job in jobs}


def row_of(values: Mapping[str, Any]) -> Row:
    return Row(**{name: values[name] for name in Row._fields})
