"""One round: the plan's moments carried out on the world, everything watched, and a result.

One loop over a heap of moments: submit, cancel, do harm, undo it, look. Then the harm ends, what was submitted must
come to its end, the nodes must be at rest with what they had open at first, stop in good order, and leave nothing.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.chaos import checks, faults
from tests.chaos.checks import Attempt, Cancelled, Row
from tests.chaos.faults import Harm
from tests.chaos.plan import NARROW, NARROW_MOST, Fault, Job, Plan
from tests.chaos.watch import Watcher, boottime_ns, born
from tests.chaos.world import World
from tests.fixtures.processes import wait_until

LOOK_S = 0.5
REST_S = 60.0

_ROWS = """
    select id, (payload->>'n')::int as number, state, attempt, crashes, interruptions
    from aqd.all_jobs where payload ? 'n'
"""
# now() and the boot time of the moment are taken together: the difference of the two clocks.
_ATTEMPTS = """
    select job_id as job, attempt, kind, to_jsonb(a)->>'reason' as reason,
           split_part(node_id, '/', 1) as node,
           (extract(epoch from coalesce(started_at, finished_at)) * 1e9)::bigint as began_ns,
           (extract(epoch from finished_at) * 1e9)::bigint as ended_ns, coalesce(error, '') as error
    from aqd.job_attempts a
"""
_NARROW = "select count(*) as running from aqd.jobs where state = 'PROCESSING' and queue = %s"
_OUTPUTS = """
    select job_id, length(output) from aqd.job_attempts where length(output) > 65536
    union all select id, length(output) from aqd.job_history where length(output) > 65536
"""


@dataclass
class Result:
    """What a round has shown. ``wrong`` are violations; ``odd`` has no known reason but breaks no promise."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    explained: dict[str, list[str]] = field(default_factory=dict)
    states: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind of job, state)
    attempts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, reason)
    faults: Counter[str] = field(default_factory=Counter)
    idle_faults: Counter[str] = field(default_factory=Counter)  # there was nothing to do it to
    figures: Counter[str] = field(default_factory=Counter)
    settled_s: float = 0.0


class Storm:
    """Runs ``world.plan``; :meth:`run` returns the result."""

    def __init__(self, world: World, say: Callable[[str], None] = lambda _: None) -> None:
        self.world = world
        self.plan = world.plan
        self.say = say
        self.result = Result(self.plan)
        self.watcher = Watcher(world.side)
        self.terminal = checks.Terminal()
        self.acknowledged: dict[int, int] = {}
        self.id_of: dict[int, int] = {}
        self.unanswered: set[int] = set()
        self.due_ns: dict[int, int] = {}
        self.answers: list[Cancelled] = []
        self.harms: list[Harm] = []
        self._conn: psycopg.Connection[dict[str, Any]] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._began = 0.0
        self._over = False  # no more harm
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="api")
        self._posts: dict[Future[int], tuple[Job, int]] = {}

    # --- the round

    def run(self) -> Result:
        try:
            self.world.start()
            self.watcher.start()
            self._storm()
            self._settle()
            self._rest()
        finally:
            self._calm()
            self.world.stop()
            self.watcher.stop()
            self._pool.shutdown()
        self._after()
        self._judge()
        return self.result

    def _storm(self) -> None:
        self._began = time.monotonic()
        for job in self.plan.jobs:
            self._at(job.at_s, lambda job=job: self._submit(job))
            if job.cancel_at_s is not None:
                self._at(job.cancel_at_s, lambda job=job: self._cancel(job))
        for fault in self.plan.faults:
            self._at(fault.at_s, lambda fault=fault: self._harm(fault))
        self._at(LOOK_S, self._look_again)
        while self._now() < self.plan.duration_s:
            while self._heap and self._heap[0][0] <= self._now():
                heapq.heappop(self._heap)[2]()
            self._collect()
            self.world.revive()
            time.sleep(0.01)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _at(self, moment_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (moment_s, next(self._count), action))

    def _calm(self) -> None:
        """No harm goes on."""
        self.world.calm()
        deadline = time.monotonic() + REST_S
        while self.harms and time.monotonic() < deadline:
            for harm in list(self.harms):
                self._undo(harm)
            time.sleep(0.05)

    def _settle(self) -> None:
        """Everything that was submitted comes to its end."""
        self._over = True
        self._calm()
        # What was still to be submitted or cancelled comes now.
        while self._heap or self._posts:
            if self._heap:
                heapq.heappop(self._heap)[2]()
            self._collect()
            time.sleep(0.001)
        self._calm()
        began = moved = time.monotonic()
        last: list[Row] | None = None
        # However long there is something to do, but not for long without anything being done.
        while time.monotonic() < moved + 2 * self.plan.lease_s + REST_S:
            self.world.revive()
            rows = self._look()
            if rows is not None and all(row.state in checks.FINAL for row in rows):
                break
            if rows != last:
                last, moved = rows, time.monotonic()
            time.sleep(0.2)
        self.result.settled_s = time.monotonic() - began

    def _rest(self) -> None:
        """The nodes have nothing to do and hold nothing more than at first; no helper is left."""
        deadline = time.monotonic() + REST_S
        unquiet = ["not looked at"]
        while unquiet and time.monotonic() < deadline:
            self.world.revive()
            time.sleep(0.2)
            looks = (self.world.quiet, self.world.miscounted)
            unquiet = [text for node in self.world.nodes for look in looks if (text := look(node))]
            with self.watcher.lock:
                helpers = checks.left_helpers(self.watcher.seen.helpers, self.world.events)
                ended = checks.ended_helpers(self.watcher.seen.helpers, self.world.events)
            unquiet += helpers.wrong
        self.result.wrong += unquiet + ended
        self.result.explained["helpers of a killed master"] = helpers.explained
        self._compare_api()

    def _after(self) -> None:
        """All nodes are stopped. What was allowed to stay is ended by us, as is what a killed master has left;
        any other helper has been reported by now."""
        stayed = [each for each in self.watcher.seen.helpers if each.gone_ns is None]
        for helper in stayed:
            if born(helper.pid) == helper.born:
                os.kill(helper.pid, signal.SIGKILL)
        # On a busy machine one that is killed runs on for a moment.
        wait_until(
            lambda: all(born(each.pid) != each.born for each in stayed), REST_S, "killed helpers to be gone"
        )
        self.result.wrong += [f"left running: {each}" for each in self.world.left_over()]
        self.result.wrong += self.world.left_in_database()
        self.result.wrong += self.world.wrong

    # --- what the plan's jobs ask for

    @property
    def conn(self) -> psycopg.Connection[dict[str, Any]]:
        if self._conn is None or self._conn.closed or self._conn.broken:
            self._conn = psycopg.connect(
                self.world.url,
                autocommit=True,
                row_factory=dict_row,
                application_name="chaos",
                connect_timeout=5,
                options="-c default_transaction_read_only=off",
            )
        return self._conn

    def _submit(self, job: Job, door: str = "") -> None:
        before_ns = boottime_ns()
        if (door or job.door) == "api":  # which may be silent for seconds
            self._posts[self._pool.submit(self._post, job)] = (job, before_ns)
            return
        try:
            self._acknowledged(job, self._enqueue(job), before_ns)
        except psycopg.Error:
            self._not_answered(job)

    def _collect(self) -> None:
        """What the API has answered meanwhile."""
        for future in [future for future in self._posts if future.done()]:
            job, before_ns = self._posts.pop(future)
            try:
                self._acknowledged(job, future.result(), before_ns)
            except (OSError, http.client.HTTPException):
                self._not_answered(job)

    def _acknowledged(self, job: Job, id: int, before_ns: int) -> None:
        self.acknowledged[id] = job.number
        self.id_of[job.number] = id
        if delay_s := job.options.get("delay_s"):
            self.due_ns[id] = before_ns + int(delay_s * 1e9)

    def _not_answered(self, job: Job) -> None:
        """It may be there or not. As an application would: once more, by the way that is always open."""
        self.unanswered.add(job.number)
        self.result.figures["submissions without an answer"] += 1
        self._at(self._now() + 0.5, lambda: self._submit(job, "sql"))

    def _enqueue(self, job: Job) -> int:
        named = "".join(f", {name} => %({name})s" for name in job.options)
        row = self.conn.execute(
            f"select aqd.enqueue(%(type)s, %(payload)s::text::jsonb{named}) as id",
            {"type": job.type, "payload": json.dumps(job.payload), **job.options},
        ).fetchone()
        assert row is not None
        return int(row["id"])

    def _post(self, job: Job) -> int:
        status, answer = self._http(
            "POST", "/jobs", {"type": job.type, "payload": job.payload, **job.options}
        )
        if status != 201:
            raise OSError(f"the API answered {status}")
        return int(answer["id"])

    def _http(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        http_ = http.client.HTTPConnection("127.0.0.1", self.world.api_port, timeout=2)
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            http_.request(method, path, None if body is None else json.dumps(body), headers)
            answer = http_.getresponse()
            return answer.status, json.loads(answer.read())
        except ValueError as error:
            raise OSError(f"not JSON: {error}") from error
        finally:
            http_.close()

    def _cancel(self, job: Job) -> None:
        id = self.id_of.get(job.number)
        if id is None:
            return  # not submitted, or nobody knows
        with contextlib.suppress(psycopg.Error):
            with self.conn.transaction():
                row = self.conn.execute("select aqd.cancel(%s) as state", [id]).fetchone()
                found = self.conn.execute("select attempt from aqd.all_jobs where id = %s", [id]).fetchone()
            assert row is not None
            self.answers.append(Cancelled(id, row["state"], found["attempt"] if found else 0, boottime_ns()))
            self.result.figures["cancelled"] += 1

    # --- the harm

    def _harm(self, fault: Fault) -> None:
        if self._over:
            return
        harm = faults.begin(self.world, fault)
        if harm is None:
            self.result.idle_faults[fault.kind] += 1
            return
        self.say(f"{self._now():7.2f} {harm}{f' for {fault.duration_s:g} s' if fault.duration_s else ''}")
        self.result.faults[fault.kind] += 1
        if harm.undo is None:
            harm.end(self.world)
            return
        self.harms.append(harm)
        self._at(self._now() + faults.lasts_s(self.world, fault), lambda: self._undo(harm))

    def _undo(self, harm: Harm) -> None:
        if harm in self.harms:
            try:
                harm.end(self.world)
            except psycopg.Error:  # the server is away, or not back yet
                if not self._over:
                    self._at(self._now() + 0.2, lambda: self._undo(harm))
            else:
                self.harms.remove(harm)

    # --- looking

    def _look_again(self) -> None:
        self._look()
        if not self._over:
            self._at(self._now() + LOOK_S, self._look_again)

    def _look(self) -> list[Row] | None:
        """Final states do not change; None while the database is away."""
        with contextlib.suppress(psycopg.Error):
            rows = [checks.row_of(row) for row in self.conn.execute(_ROWS)]
            changed = self.terminal.observe(rows)
            self.result.wrong += changed
            row = self.conn.execute(_NARROW, [NARROW]).fetchone()
            if row is not None and row["running"] > NARROW_MOST:
                self.result.wrong.append(f"{row['running']} jobs of a queue run that may run {NARROW_MOST}")
            return rows
        return None

    def _compare_api(self) -> None:
        """The API, once it is up again, says of every job what the database says; on a busy machine not at once."""
        for id in list(self.acknowledged)[:: max(1, len(self.acknowledged) // 20)]:
            row = self.conn.execute("select state from aqd.all_jobs where id = %s", [id]).fetchone()
            try:
                status, answer = wait_until(
                    lambda id=id: self._answered(f"/jobs/{id}"), REST_S, f"the API answers for job {id}"
                )
            except TimeoutError as error:
                self.result.wrong.append(f"at rest: {error}")
                return
            if row is not None and (status, answer.get("status")) != (200, row["state"]):
                said = f"{status} {answer.get('status') or answer}"
                self.result.wrong.append(f"the API says {said} of job {id}, which is {row['state']}")

    def _answered(self, path: str) -> tuple[int, Any] | None:
        """None: nobody does, or the database is away."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, answer = self._http("GET", path)
            return None if status == 503 else (status, answer)
        return None

    def _judge(self) -> None:
        result, events = self.result, self.world.events
        rows = [checks.row_of(row) for row in self.conn.execute(_ROWS)]
        offset = time.time_ns() - boottime_ns()
        attempts = [
            Attempt(**{**row, "began_ns": row["began_ns"] - offset, "ended_ns": row["ended_ns"] - offset})
            for row in self.conn.execute(_ATTEMPTS)
        ]
        open_records = {
            row["job_id"]: row["attempts"]
            for row in self.conn.execute(
                "select job_id, attempts from aqd.failed_jobs where resolved_at is null"
            )
        }
        jobs, runs = checks.numbered(self.plan.jobs), self.watcher.seen.runs
        result.wrong += self.terminal.observe(rows)
        result.wrong += checks.lost(self.acknowledged, self.unanswered, rows)
        result.wrong += checks.doubled(jobs, rows)
        result.wrong += checks.outcomes(jobs, rows)
        result.wrong += checks.attempts_add_up(rows, attempts, runs)
        result.wrong += checks.cancelled(self.answers, rows, runs)
        result.wrong += checks.early(self.due_ns, runs)
        result.wrong += checks.eaten(jobs, rows, runs)
        result.wrong += checks.alone(jobs, rows, runs)
        result.wrong += checks.budgets(jobs, rows)
        result.wrong += checks.records(rows, open_records)
        result.wrong += [f"too much output kept: {row}" for row in self.conn.execute(_OUTPUTS)]
        for name, verdict in (
            ("overlaps after a freeze", checks.overlaps(runs, attempts, events)),
            ("repeats after a kill", checks.repeats(jobs, rows, runs, attempts, events)),
        ):
            result.wrong += verdict.wrong
            result.explained[name] = verdict.explained
        result.odd += checks.unexplained(jobs, rows, attempts, events)
        for row in rows:
            result.states[jobs[row.number].kind, row.state] += 1
        for each in attempts:
            result.attempts[each.kind, each.reason or "-"] += 1
        result.figures["runs"] = len(runs)
        result.figures["runs without an end"] = sum(run.outcome is None for run in runs)
        result.figures["helpers"] = len(self.watcher.seen.helpers)
        result.figures["starts of nodes"] = sum(node.starts for node in self.world.nodes)
        if self._conn is not None:
            self._conn.close()
