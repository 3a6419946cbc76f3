"""What the dispatcher's main thread makes of a worker's death; its threads are not started."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqd import channel, log, messages, pace, process
from aqd.claims import CLAIM_MAX, NOTHING, ClaimedJob, Wish
from aqd.config import Config
from aqd.dispatcher import Dispatcher
from aqd.journal import Writer
from aqd.links import Held, Link
from aqd.page import Page
from aqd.process import boottime, boottime_ns
from aqd.recorder import Completed, Failed, Released, Renewed


class Desk:
    """A dispatcher, and one worker whose channel and page are in our hands."""

    def __init__(self) -> None:
        self.master, end = channel.pair()
        self.dispatcher = Dispatcher(end, messages.Start(Config(), "node", "node", 1, "0"))
        self.workers_end: socket.socket
        ours, self.workers_end = channel.pair()
        page_fd = Page.create(slot=0, incarnation=7, generation=1)
        attach = messages.Attach(0, 7, 1, fresh=True)
        self.dispatcher._attach(attach, ours.detach(), page_fd, process.output_file("test"))
        self.link: Link = self.dispatcher.links[7]

    def give(self, *ids: int) -> None:
        jobs = [
            Held(
                id,
                99,
                1,
                boottime_ns() + 10**11,
                ClaimedJob(id, 99, "noop", "default", 0, "{}", 1, None, None, 0, 0, 0, 0),
            )
            for id in ids
        ]
        self.link.give(jobs)

    def run(self, number: int, *, send: bool = True) -> None:
        page = self.link.page
        page.begin(number, boottime_ns())
        if send:
            assert Writer(page).append(messages.encode(messages.Done(number, 5, 7, 0, 0, "1")))
        page.end(number)

    def dies(self) -> list[object]:
        """What goes to the recorder."""
        self.workers_end.close()
        self.dispatcher._on_master(messages.Exited(7, None, 1, 0, -1))
        work = []
        while True:
            try:
                work += self.dispatcher.recorder._queue.get_nowait()
            except queue.Empty:
                return work


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.master.close()


def test_what_was_sent_is_recorded_and_what_it_was_on_has_crashed(desk: Desk) -> None:
    desk.give(1, 2, 3)
    desk.run(0)
    desk.link.page.begin(1, boottime_ns())
    done, crashed, released = desk.dies()
    assert isinstance(done, Completed)
    assert done.id == 1
    assert isinstance(crashed, Failed)
    assert (crashed.id, crashed.kind, crashed.reason) == (2, "crashed", "exit")
    assert isinstance(released, Released)
    assert (released.id, released.interrupted) == (3, False)


def test_an_outcome_that_went_elsewhere_is_a_crash_and_no_job_is_held_for_ever(desk: Desk) -> None:
    """A job had put a socket of its own in the channel's place: the page says finished, and nothing came."""
    desk.give(1, 2)
    desk.run(0, send=False)
    released, crashed = desk.dies()
    assert isinstance(released, Released)
    assert isinstance(crashed, Failed)
    assert (released.id, crashed.id, crashed.kind) == (2, 1, "crashed")
    desk.dispatcher._settled([crashed.key], {})
    assert 7 not in desk.dispatcher.links


def test_the_master_is_told_before_the_first_jobs_after_a_rest(desk: Desk) -> None:
    """At rest it looks at the pages so rarely that short limits would be overrun."""
    told = []
    desk.dispatcher.stock.give = lambda _links: told.append(heard(desk.master))  # type: ignore[method-assign]
    job = ClaimedJob(1, 99, "noop", "default", 0, "{}", 1, None, None, 0, 0, 0, 0)
    desk.dispatcher.stock.add(Held(1, 99, 1, boottime_ns() + 10**11, job))
    for _ in range(3):
        desk.dispatcher._tell_working(10.0)
        desk.dispatcher.stock.give([])
    desk.dispatcher._tell_working(10.0 + pace.TELL_S)
    desk.dispatcher.stock.give([])
    assert told == [1, 0, 0, 1]
    assert pace.TELL_S * 1.5 < pace.AWAKE_S


def heard(master: socket.socket) -> int:
    """How many "working" have come."""
    found = 0
    while True:
        try:
            data, _ = channel.receive(master, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return found
        found += isinstance(messages.decode_from_dispatcher(data), messages.Working)


def test_a_worker_whose_journal_is_spoiled_is_fenced_until_that_meets_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.dispatcher, "_check_threads", lambda: None)  # they were not started
    desk.give(1, 2)
    page = desk.link.page
    page.begin(0, boottime_ns())
    page.journal_head = 1 << 40
    fences = []
    for number in (0, 1):
        page.begin(number, boottime_ns())
        desk.dispatcher._tick(1e12)
        while True:
            try:
                data, _ = channel.receive(desk.master, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            message = messages.decode_from_dispatcher(data)
            if isinstance(message, messages.Fence):
                fences.append(message.number)
        page.end(number)
    assert set(fences) == {0, 1}
    assert desk.dispatcher._serving() == []


@pytest.mark.usefixtures("restored_log")
def test_a_lost_lease_is_told_with_the_job_s_name(desk: Desk, tmp_path: Path) -> None:
    waits = ClaimedJob(1, 99, "noop", "default", 0, "{}", 2, None, None, 0, 0, 0, 0)
    desk.dispatcher.stock.add(Held(1, 99, 2, boottime_ns() + 10**11, waits))
    desk.give(2)
    with (tmp_path / "log").open("w") as file:
        log.configure("info", "json", process="p", fd=file.fileno(), stdlib=False)
        desk.dispatcher.leases.renewed(Renewed(boottime_ns(), {(1, 99), (2, 99)}, {}, {}))
    fields = ("event", "job_id", "type", "attempt", "slot")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [tuple(line[field] for field in fields) for line in lines] == [
        ("lease lost", "2", "noop", 1, 0),
        ("lease lost before the start", "1", "noop", 2, None),
    ]


def test_the_claimer_is_woken_when_any_pool_wants_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reserved slots the sum may stay the same, or fall."""
    woken: list[Wish] = []
    claimer = desk.dispatcher.claimer
    monkeypatch.setattr(claimer, "wake", lambda: woken.append(claimer.wanted))
    less, more, fewer = Wish({"mine": 3, "": 0}), Wish({"mine": 1, "": 1}), Wish({"mine": 0, "": 1})
    for wish in (less, more, fewer):
        monkeypatch.setattr(desk.dispatcher.stock, "demand", lambda _links, wish=wish: wish)
        desk.dispatcher._claim([])
        assert claimer.wanted == wish
    assert woken == [less, more]


def test_a_wish_is_met_by_claims() -> None:
    large = Wish({"": CLAIM_MAX + 7})
    assert Wish({"": 3}).one_claim() == Wish({"": 3})
    assert large.one_claim() == Wish({"": CLAIM_MAX})
    assert large.less(CLAIM_MAX) == Wish({"": 7})
    assert large.less(CLAIM_MAX + 7) == NOTHING.less(1) == NOTHING
    pools = Wish({"mine": CLAIM_MAX + 7, "": 2}, frozenset({""}), 3, {"mine": 1})
    assert pools.one_claim() == Wish({"mine": CLAIM_MAX, "": 2}, frozenset({""}), 3, {"mine": 1})
    assert pools.less(CLAIM_MAX) == NOTHING


def test_a_node_that_others_do_not_see_wants_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, keeper = desk.dispatcher, desk.dispatcher.keeper
    monkeypatch.setattr(dispatcher.stock, "demand", lambda links: Wish({"": len(links)}))
    monkeypatch.setattr(dispatcher, "_serving", lambda: ["a link"])
    dispatcher.reconciled = True

    def wanted() -> int:
        dispatcher._look_around = False
        dispatcher._next_tick = boottime() + 60
        dispatcher._turn()
        return dispatcher.claimer.wanted.total

    for seen_until, at_work, wants in (
        (0.0, False, 0),  # not yet
        (boottime() + 60, False, 1),
        (boottime() - 1, False, 0),  # not any more
        (boottime() - 1, True, 1),  # on a long duty, after which it will be
        (0.0, True, 0),
    ):
        keeper._seen_until, keeper._at_work = seen_until, at_work
        assert wanted() == wants


def test_what_is_claimed_and_not_yet_looked_at_is_not_asked_for_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = desk.dispatcher
    monkeypatch.setattr(dispatcher.stock, "demand", lambda _links: Wish({"": 500}))
    dispatcher.claimer.delivered = 200
    dispatcher._claim([])
    assert dispatcher.claimer.wanted == Wish({"": 300})
    dispatcher.claimer.taken_in = 200
    dispatcher._claim([])
    assert dispatcher.claimer.wanted == Wish({"": 500})
