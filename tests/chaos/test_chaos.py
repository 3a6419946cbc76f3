"""The chaos suite on itself, and three short rounds of it: one, two and four nodes with fixed seeds.

For longer rounds with other seeds there is ``tests/chaos/run``. The checks are tried on forged evidence: each must
find the violation that was planted, and nothing in the same evidence without it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import checks, plan
from tests.chaos.checks import Attempt, Cancelled, Event, Row
from tests.chaos.plan import Job
from tests.chaos.storm import Storm
from tests.chaos.watch import Helper, Run, Seen, born
from tests.chaos.world import PLUGIN, World
from tests.fixtures.postgres import LocalPostgres

S = 1_000_000_000


# --- short rounds ---------------------------------------------------------------------------------


# Chosen so that together they hold every kind of job and of fault; a change of the plan may want others.
SHORT = [(1, 1383), (2, 359), (4, 2133)]


def short(nodes: int, seed: int) -> plan.Plan:
    """With a lease that a busy machine does not lose by itself."""
    return plan.draw(seed, 18.0, nodes=nodes, lease_s=8.0, fault_every_s=1.0)


def test_the_short_rounds_together_leave_nothing_out() -> None:
    plans = [short(*each) for each in SHORT]
    assert {fault.kind for each in plans for fault in each.faults} == set(plan.FAULTS)
    assert {job.kind for each in plans for job in each.jobs} == set(plan.KINDS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "seed"), SHORT)
def test_a_short_round_breaks_no_promise(
    nodes: int, seed: int, private_pg: Callable[..., LocalPostgres], tmp_path: Path
) -> None:
    drawn = short(nodes, seed)
    print(drawn.describe())
    world = World(drawn, tmp_path, private_pg())
    try:
        result = Storm(world, print).run()
    finally:
        world.close()
    print("unexplained:", *result.odd, sep="\n  ")
    print("explained:", result.explained)
    assert not result.wrong, "\n".join(result.wrong)
    assert sum(result.states.values()) >= len(drawn.jobs)


@pytest.mark.timeout(180)
def test_a_cancelled_job_that_loses_its_lease_is_no_miscount(
    private_pg: Callable[..., LocalPostgres], tmp_path: Path
) -> None:
    """Its attempt is "cancelled" in the database, and lost to the node that counts."""
    steps: list[list[dict[str, Any]]] = [[{"sleep": 10.0}]]
    lasting = Job(0, 0.2, "lasting", "chaos", steps, frozenset({"COMPLETED"}), {}, cancel_at_s=1.2)
    silence = plan.Fault(0.8, "silence", 0, 3.0, 0.5)
    world = World(
        plan.Plan(0, 4.5, 1, 1, 3.0, 0.5, True, False, 0, {}, [lasting], [silence]), tmp_path, private_pg()
    )
    try:
        result = Storm(world, print).run()
    finally:
        world.close()
    assert not result.wrong, "\n".join(result.wrong)
    assert result.attempts == {("cancelled", "lease"): 1}


# --- the plan -------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan.draw(7, 60.0) == plan.draw(7, 60.0)
    assert plan.draw(7, 60.0) != plan.draw(8, 60.0)


def test_plans_draw_everything_sooner_or_later() -> None:
    plans = [plan.draw(seed, 120.0) for seed in range(12)]
    assert {each.nodes for each in plans} == {1, 2, 4}
    assert {job.kind for each in plans for job in each.jobs} == set(plan.KINDS)
    assert {fault.kind for each in plans for fault in each.faults} == set(plan.FAULTS)
    assert {each.notify for each in plans} == {each.clock for each in plans} == {True, False}
    assert {job.door for each in plans for job in each.jobs} == {"sql", "api"}
    assert any(job.cancel_at_s is not None for each in plans for job in each.jobs)


def test_a_plan_stays_within_its_round() -> None:
    drawn = plan.draw(3, 30.0, nodes=2)
    assert drawn.nodes * drawn.slots <= 8
    assert all(0 <= job.at_s < 30 for job in drawn.jobs)
    assert all(1 <= fault.at_s < 29 and fault.node < 2 for fault in drawn.faults)
    assert [job.number for job in drawn.jobs] == list(range(len(drawn.jobs)))


def test_own_ends_follow_from_the_payload() -> None:
    assert checks.own_ends(job(attempts=[[{"raise": "x"}], []])) == {("failed", "exception")}
    assert checks.own_ends(job(attempts=[[{"segv": None}]], timeout_s=1)) == {
        ("crashed", "signal"),
        ("timed_out", "timeout"),
    }
    assert checks.own_ends(job(attempts=[[{"return_big": 900_000}]])) == frozenset()


# --- the checks find what is planted --------------------------------------------------------------


def job(number: int = 0, allowed: str = "COMPLETED", cancelled: bool = False, **more: Any) -> Job:
    attempts = more.pop("attempts", [[]])
    return Job(
        number, 0.0, more.pop("kind", "quick"), "chaos", attempts, frozenset({allowed}), more,
        cancel_at_s=1.0 if cancelled else None,
    )  # fmt: skip


def row(id: int = 1, state: str = "COMPLETED", attempt: int = 1, number: int = 0, **counts: int) -> Row:
    return Row(id, number, state, attempt, counts.get("crashes", 0), counts.get("interruptions", 0))


def run(
    began_s: float, ended_s: float | None, attempt: int = 1, node: str = "n0", pid: int = 100, **more: Any
) -> Run:
    return Run(
        1, attempt, node, pid, int(began_s * S),
        ended_ns=None if ended_s is None else int(ended_s * S),
        outcome=None if ended_s is None else more.pop("outcome", "returned"),
        **more,
    )  # fmt: skip


def attempt(kind: str, number: int = 1, node: str = "n0", began_s: float = 1, ended_s: float = 2) -> Attempt:
    return Attempt(1, number, kind, None, node, int(began_s * S), int(ended_s * S))


def event(
    kind: str, began_s: float, ended_s: float, node: str | None = "n0", pid: int | None = None
) -> Event:
    return Event(kind, node, pid, int(began_s * S), int(ended_s * S))


def test_a_forged_double_run_is_found() -> None:
    honest = [run(1, 2), run(2.1, 3, 2, "n1", 200)]
    assert checks.overlaps(honest, [], []) == ([], [])
    forged = [run(1, 2), run(1.5, 3, 2, "n1", 200)]
    assert "ran twice at once" in checks.overlaps(forged, [], []).wrong[0]


def test_a_run_without_an_end_overlaps_as_long_as_its_process_lived() -> None:
    alive = run(1, None, alive_ns=3 * S)
    assert checks.overlaps([alive, run(2, 4, 2)], [], []).wrong
    assert checks.overlaps([alive, run(3.1, 4, 2)], [], []) == ([], [])


def test_a_lock_that_was_held_is_an_overlap_whatever_the_moments_say() -> None:
    assert checks.overlaps([run(1, None), run(5, 6, 2, held_by=100)], [], []).wrong


def test_only_a_stopped_master_explains_an_overlap_and_only_after_the_lease() -> None:
    runs = [run(1, None, alive_ns=9 * S), run(5, 6, 2, "n1", 200)]
    frozen = [event("freeze node", 1.5, 8)]
    assert checks.overlaps(runs, [attempt("lost")], frozen).explained
    assert checks.overlaps(runs, [attempt("failed")], frozen).wrong
    assert checks.overlaps(runs, [attempt("lost")], [event("freeze node", 1.5, 8, "n1")]).wrong
    assert checks.overlaps(runs, [attempt("lost")], [event("stop worker", 1.5, 8)]).wrong


def test_a_vanished_and_a_doubled_job_are_found() -> None:
    assert checks.lost({1: 0}, set(), [row()]) == []
    assert checks.lost({1: 0, 2: 1}, set(), [row()]) == ["job 2 was acknowledged and is nowhere"]
    assert checks.lost({1: 0}, set(), [row(), row()]) == ["job 1 exists 2 times"]


def test_a_job_that_is_there_twice_under_one_key_is_found() -> None:
    keyed = {1: job(1, idempotency_key="job 1"), 2: job(2)}
    assert checks.doubled(keyed, [row(10, number=1), row(11, number=2), row(12, number=2)]) == []
    assert checks.doubled(keyed, [row(10, number=1), row(11, number=1)]) == [
        "job 1 is there 2 times under one key"
    ]


def test_only_an_unanswered_submission_may_appear() -> None:
    assert checks.lost({1: 0}, {5}, [row(), row(2, number=5)]) == []
    assert "submitted by nobody" in checks.lost({1: 0}, set(), [row(), row(2, number=5)])[0]


def test_a_changed_terminal_state_is_found() -> None:
    terminal = checks.Terminal()
    assert terminal.observe([row(state="PROCESSING"), row(2, "FAILED")]) == []
    assert terminal.observe([row(), row(2, "FAILED")]) == []
    assert (
        "was COMPLETED after attempt 1 and is QUEUED"
        in terminal.observe([row(state="QUEUED"), row(2, "FAILED")])[0]
    )
    assert "was FAILED and has vanished" in terminal.observe([row()])[0]
    assert terminal.observe([row(attempt=2), row(2, "FAILED")])


def test_a_state_that_the_payload_does_not_allow_is_found() -> None:
    jobs = {0: job(), 1: job(1, "FAILED", cancelled=True)}
    assert checks.outcomes(jobs, [row(), row(2, "CANCELLED", number=1)]) == []
    wrong = checks.outcomes(jobs, [row(state="CANCELLED"), row(2, "COMPLETED", number=1), row(3, "QUEUED")])
    assert len(wrong) == 3


def test_attempts_that_do_not_add_up_are_found() -> None:
    twice = [run(1, 2, 1, outcome="RuntimeError"), run(3, 4, 2)]
    assert checks.attempts_add_up([row(attempt=2)], [attempt("failed")], twice) == []
    assert checks.attempts_add_up([row(attempt=2)], [], twice)
    assert checks.attempts_add_up([row(attempt=2)], [attempt("failed")] * 2, twice)
    assert checks.attempts_add_up([row(attempt=2)], [attempt("crashed")], twice)  # crashes is 0
    assert checks.attempts_add_up([row()], [], [run(1, 2), run(3, 4)])  # twice in one attempt
    assert checks.attempts_add_up([row()], [], [run(1, 2), run(3, 4, 2)])  # an attempt too many
    assert checks.attempts_add_up([row()], [], [])  # completed by nobody


def test_an_interrupted_attempt_is_given_back() -> None:
    runs = [run(1, 2, outcome="JobInterrupted"), run(3, 4)]
    assert checks.attempts_add_up([row(interruptions=1)], [attempt("interrupted")], runs) == []
    assert checks.attempts_add_up([row()], [attempt("interrupted")], runs)


def test_a_repeat_needs_a_kill_of_that_very_worker_or_a_lost_lease() -> None:
    jobs, rows = {0: job()}, [row(attempt=2)]
    runs = [run(1, 2), run(3, 4, 2)]

    def verdict(kind: str, *events: Event) -> checks.Verdict:
        return checks.repeats(jobs, rows, runs, [attempt(kind)], events)

    assert verdict("crashed").wrong
    assert verdict("crashed", event("kill worker", 2, 2, pid=200)).wrong
    assert verdict("crashed", event("kill worker", 2, 2, "n1", 100)).wrong
    assert verdict("crashed", event("kill worker", 2, 2, pid=100)).explained
    assert verdict("lost", event("kill master", 2.5, 2.5)).explained
    assert verdict("lost").wrong
    assert verdict("failed", event("silence", 1, 3)).wrong


def test_a_cancelled_job_that_runs_again_is_found() -> None:
    rows = [row(state="CANCELLED")]
    assert checks.cancelled([Cancelled(1, "CANCELLED", 0, 5 * S)], rows, []) == []
    assert checks.cancelled([Cancelled(1, "CANCELLED", 0, 5 * S)], rows, [run(6, 7)])
    asked = [Cancelled(1, "PROCESSING", 1, 5 * S)]
    assert checks.cancelled(asked, rows, [run(5.1, 7)]) == []  # it was on its way
    assert checks.cancelled(asked, rows, [run(5.1, 7, 2)])
    assert checks.cancelled(asked, [row(state="FAILED")], [])
    assert checks.cancelled([Cancelled(1, "COMPLETED", 1, 5 * S)], rows, [])
    assert checks.cancelled([Cancelled(1, None, 0, 5 * S)], rows, [])


def test_a_job_before_its_time_is_found() -> None:
    assert checks.early({1: 3 * S}, [run(3, 4)]) == []
    assert checks.early({1: 3 * S}, [run(2.5, 4)])


def test_a_memory_eater_that_got_away_is_found() -> None:
    jobs = {0: job(kind="eating memory", attempts=[[{"eat": 256}]])}
    assert checks.eaten(jobs, [row()], [run(1, None)]) == []
    assert checks.eaten(jobs, [row()], [run(1, 2)])


def test_records_and_failed_jobs_are_the_same() -> None:
    rows = [row(state="FAILED", attempt=3), row(2)]
    assert checks.records(rows, {1: 3}) == []
    assert checks.records(rows, {})
    assert checks.records(rows, {1: 2})
    assert checks.records(rows, {1: 3, 2: 1})


def test_helpers_may_only_outlive_a_master_that_was_killed() -> None:
    helper = Helper(1, 1, "n0", 100, 200, "orphan", 5 * S, 77)
    assert checks.left_helpers([helper], []).wrong
    assert checks.left_helpers([helper], [event("kill master", 3, 3)]).wrong
    assert checks.left_helpers([helper], [event("kill master", 6, 6)]).explained
    helper.gone_ns = 6 * S
    assert checks.left_helpers([helper], []) == ([], [])


def test_what_may_stay_is_left_alone() -> None:
    helper = Helper(1, 1, "n0", 100, 200, "session", 100 * S, 77, detached=True)
    assert checks.left_helpers([helper], []) == ([], [])
    assert checks.ended_helpers([helper], []) == []
    helper.gone_ns = 101 * S
    assert checks.ended_helpers([helper], [])
    assert checks.ended_helpers([helper], [event("term", 100, 101)]) == []


def test_a_one_shot_job_in_a_used_process_is_found() -> None:
    jobs = {0: job(), 1: replace(job(1), type="chaos_one_shot")}
    rows = [row(), row(2, number=1)]
    runs = [run(1, 2, born=7), run(3, 4, born=7)]
    assert checks.alone(jobs, rows, runs) == []
    runs[1].job = 2
    assert "shared 100 with jobs [1]" in checks.alone(jobs, rows, runs)[0]
    runs[1].born = 8  # another process with the same number
    assert checks.alone(jobs, rows, runs) == []


def test_poison_beyond_its_budget_is_found() -> None:
    jobs = {0: replace(job(allowed="FAILED"), type="chaos_poison")}
    assert checks.budgets(jobs, [row(state="FAILED", attempt=3, crashes=3)]) == []
    assert checks.budgets(jobs, [row(state="FAILED", attempt=4, crashes=4)])
    assert checks.budgets(jobs, [row(state="FAILED", attempt=2, crashes=2)])


def test_an_end_without_a_cause_is_odd() -> None:
    jobs, rows = {0: job(), 1: job(1, attempts=[[{"segv": None}], []])}, [row(), row(2, number=1)]
    crashed = [attempt("crashed")]
    assert checks.unexplained(jobs, rows, crashed, [])
    assert checks.unexplained(jobs, rows, crashed, [event("kill worker", 1.5, 1.5)]) == []
    assert checks.unexplained(jobs, rows, crashed, [event("kill worker", 50, 50)])
    own = crashed[0]._replace(job=2, reason="signal")
    assert checks.unexplained(jobs, rows, [own], []) == []
    assert checks.unexplained(jobs, rows, [own._replace(reason="exit")], [])
    assert checks.unexplained(jobs, rows, [attempt("lost")], [event("silence", 1, 2, None)]) == []


def test_a_jobs_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    """What ``held_by`` rests on: helpers do not hold the lock, and it does not outlive its process."""
    spec = importlib.util.spec_from_file_location("chaos_plugin", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    plugin._settings["locks"] = str(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "1")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    helper = int(holder.stdout.readline())
    assert plugin.take_lock("1")[1] == holder.pid
    holder.kill()
    holder.wait()
    assert born(helper) is not None
    assert plugin.take_lock("1")[1] == 0
    os.kill(helper, signal.SIGKILL)


HOLDER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
helper = os.fork()
if helper:
    print(helper, flush=True)
time.sleep(60)
"""


def test_the_side_file_is_read_into_runs_and_helpers() -> None:
    seen = Seen()
    line = {"job": "1", "attempt": 1, "pid": 1, "node": "n0"}
    seen.take({**line, "event": "start", "at_ns": S, "held_by": 5}, S)
    seen.take(
        {**line, "event": "spawned", "at_ns": S, "child": 2**22 + 1, "how": "group", "type": "chaos"}, 2 * S
    )
    seen.look(2 * S)
    assert (seen.runs[0].held_by, seen.runs[0].alive_ns, seen.runs[0].ended_ns) == (5, 2 * S, None)
    assert seen.helpers[0].gone_ns == 2 * S  # there is no such process
    seen.take({**line, "event": "end", "at_ns": 3 * S, "outcome": "returned"}, 3 * S)
    assert (seen.runs[0].known_until_ns, seen.runs[0].outcome) == (3 * S, "returned")
    assert not seen.open
