"""The recorder's thread with a real database: what cannot be written keeps back nothing else."""

from __future__ import annotations

import json
import queue as queues
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aqd import log, messages, outcomes
from aqd.config import Config, Database
from aqd.links import Held
from aqd.process import boottime_ns
from aqd.recorder import (
    BATCH_MAX,
    LINGER_S,
    Completed,
    Failed,
    Reconciled,
    Recorder,
    Released,
    Renewal,
    Renewed,
    Settled,
    Told,
)
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book


class Desk:
    """A recorder, and what it says."""

    def __init__(self, url: str, **database: float) -> None:
        self.said: queues.SimpleQueue[Told] = queues.SimpleQueue()
        config = msgspec.structs.replace(Config(), database=Database(url=url, **database))  # type: ignore[arg-type]
        self.recorder = Recorder(config, "node-1", self.said.put, lambda _: None)
        self.sizes: list[int] = []
        write = self.recorder._record_completed

        def noted(items: list[Completed]) -> None:
            self.sizes.append(len(items))
            write(items)

        self.recorder._record_completed = noted  # type: ignore[method-assign, assignment]
        self.settled = 0
        self.counts: Counter[str] = Counter()

    def renewed_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                said = self.said.get(timeout=left)
            except queues.Empty:
                return False
            if isinstance(said, Settled):
                self.settled += len(said.keys)
            elif isinstance(said, Renewed):
                return True
            else:
                assert not isinstance(said, Reconciled)
        return False

    def settle(self, number: int, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while self.settled < number:
            said = self.said.get(timeout=max(until - time.monotonic(), 0.001))
            if isinstance(said, Settled):
                self.settled += len(said.keys)
                self.counts.update(said.counts)


@pytest.fixture
def told(database_url: str) -> Desk:
    return Desk(database_url)


def claimed(queue: Queue, connect: Connect, number: int) -> list[Completed]:
    queue.fill(number)
    jobs = []
    mine = book()
    conn = connect()
    while found := mine.claim(conn, number):
        jobs += found
    assert len(jobs) == number
    done = messages.Done(0, boottime_ns(), 1000, 10, 100, "", b"")
    return [
        Completed(
            (1, place),
            Held(job.id, job.token, 1, boottime_ns() + 10**12, job),
            msgspec.structs.replace(done, number=place),
        )
        for place, job in enumerate(jobs)
    ]


def test_rows_that_somebody_has_locked_keep_neither_the_others_nor_renewals(
    told: Desk, queue: Queue, connect: Connect
) -> None:
    """By halves it would take 30 statements of 0.25 s each to come down to three rows: renewals go in between."""
    work = claimed(queue, connect, 300)
    locked = [work[place].held for place in (10, 150, 290)]
    holder = connect(dispatcher=False)
    with holder.transaction():
        holder.execute("select from aqd.jobs where id = any(%s) for update", [[held.id for held in locked]])
        told.recorder.start()
        told.recorder.put(*work)
        renewals = 0
        others = [(work[0].held.id, work[0].held.token)]
        until = time.monotonic() + 60
        while told.settled < len(work) - len(locked) and time.monotonic() < until:
            told.recorder.put(Renewal(others, []))
            assert told.renewed_within(5), "a renewal waited behind locked rows"
            renewals += 1
        assert told.settled == len(work) - len(locked)
        assert renewals > 3, "that was too quick to show anything"
        assert queue.value("select count(*) from aqd.jobs") == len(locked)
    told.settle(len(work))
    assert queue.value("select count(*) from aqd.job_history") == len(work)


def test_what_is_refused_again_and_again_never_becomes_a_larger_statement(
    database_url: str, queue: Queue, connect: Connect
) -> None:
    """A database that is too slow for a batch must be given smaller ones."""
    desk = Desk(database_url, statement_timeout_s=0.2)
    work = claimed(queue, connect, 2400)
    holder = connect(dispatcher=False)
    with holder.transaction():
        holder.execute("lock table aqd.job_history in access exclusive mode")
        desk.recorder.start()
        for number, first in enumerate(range(0, len(work), 200)):
            desk.recorder.put(*work[first : first + 200])
            wait_until(lambda number=number: len(desk.sizes) > number)
        assert max(desk.sizes) < BATCH_MAX
    desk.settle(len(work))
    assert queue.value("select count(*) from aqd.job_history") == len(work)


def failed(key: tuple[int, int], done: Completed, token: int) -> Failed:
    return Failed(
        key, done.id, token, 1, "noop", 1, "failed", "boom", None, boottime_ns(), crashes=0, about=done.about
    )


def given_back(key: tuple[int, int], done: Completed, token: int) -> Released:
    return Released(key, done.id, token, True, "drain", boottime_ns(), about=done.about)


@pytest.mark.parametrize("late_first", [True, False])
@pytest.mark.parametrize("kind", ["completed", "failed", "interrupted"])
def test_of_two_owners_of_a_job_in_one_batch_one_is_counted(
    told: Desk, queue: Queue, connect: Connect, kind: str, late_first: bool
) -> None:
    """This node has lost the lease and claimed the job again, and both attempts end together."""
    done, other = claimed(queue, connect, 2)
    pair: list[Completed | Failed | Released] = []
    for number, token in enumerate((done.held.token, done.held.token ^ 1), start=10):
        key = (1, number)
        if kind == "completed":
            held = Held(done.id, token, 1, boottime_ns() + 10**12, done.held.job)
            pair.append(Completed(key, held, done.done))
        else:
            pair.append((failed if kind == "failed" else given_back)(key, done, token))
    told.recorder.put(other, *(pair[::-1] if late_first else pair))
    told.recorder.start()
    told.settle(3)
    once = Counter(["completed", kind])
    assert told.counts == once + Counter(["lost"])
    cells = [cell for cell in told.recorder.figures.cells() if cell.metric == "attempts"]
    assert {cell.labels[2]: cell.count for cell in cells} == once


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """What the log says of jobs under an event, in their order."""
    path = tmp_path / "log"
    fields = ("job_id", "type", "attempt", "slot")

    def read(event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = [{k: v for k, v in line.items() if k in fields} for line in lines if line["event"] == event]
        return sorted(found, key=lambda line: line["job_id"])

    with path.open("a") as file:
        log.configure("info", "json", process="p", fd=file.fileno(), stdlib=False)
        yield read
        log.configure("info", "human", process="aqd", stdlib=False)


def test_a_line_about_a_job_says_which_attempt_of_what_and_where(
    told: Desk, queue: Queue, connect: Connect, logged: Callable[[str], list[dict[str, Any]]]
) -> None:
    """Also of one that a dead dispatcher had claimed."""
    work = claimed(queue, connect, 6)
    for place in range(1, 6, 2):  # adopted from a page
        held = work[place].held
        held.job = None
    token = 1  # no longer the right one
    late = [Completed(each.key, Held(each.id, token, 1, 0, each.held.job), each.done, 3) for each in work[:2]]
    failures = [
        Failed(each.key, each.id, token, 1, None, 3, "failed", "no", None, 0, about=each.about, slot=4)
        for each in work[2:4]
    ]
    cancelled = [outcomes.unbegun(each.held, "cancelled", boottime_ns()) for each in work[4:]]
    for each in cancelled:
        assert queue.value("select aqd.cancel(%s)", each.id) == "PROCESSING"
    told.recorder.put(*late, *failures, *cancelled)
    told.recorder.start()
    told.settle(6)
    assert logged("lease lost, outcome dropped") == [
        {"job_id": str(each.id), "type": "noop", "attempt": 1, "slot": slot}
        for each, slot in zip(work[:4], (3, 3, 4, 4), strict=True)
    ]
    assert logged("job cancelled") == [
        {"job_id": str(each.id), "type": "noop", "attempt": 1, "slot": None} for each in work[4:]
    ]


def test_a_batch_that_has_come_together_is_not_lingered_for(
    told: Desk, queue: Queue, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes come by the frame; that one frame is less than the last batch says nothing while others wait behind it."""
    work = claimed(queue, connect, 200)
    lingered: list[float] = []
    monkeypatch.setattr("aqd.recorder.time.sleep", lingered.append)
    recorder = told.recorder
    for first in range(0, 100, 20):
        recorder.put(*work[first : first + 20])
    recorder._last = 100
    assert recorder._take() == work[:100]
    assert LINGER_S not in lingered  # other threads may sleep
    recorder.put(*work[100:120])
    assert recorder._take() == work[100:120]
    assert LINGER_S in lingered
    recorder.session.close()
