"""The giving: which worker gets which of the jobs that wait, one-shot ones and used-up workers included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from aqd import channel, messages, process
from aqd.claims import ClaimedJob
from aqd.config import Config, Daemon
from aqd.hookspecs import HandlerInfo
from aqd.links import Held, Link
from aqd.page import Flag, Page
from aqd.process import boottime, boottime_ns
from aqd.stock import FRESH_LIMIT_S, READY_LIMIT_S, SUCCESSOR_LIMIT_S, Stock

HANDLERS = {
    "noop": HandlerInfo(type="noop", plugin="p"),
    "alone": HandlerInfo(type="alone", plugin="p", one_shot=True),
    "hungry": HandlerInfo(type="hungry", plugin="p", memory_limit_mb=64, timeout_s=7, detach=True),
}


class World:
    """A stock with what it says to others, and real links."""

    def __init__(self, **daemon: Any) -> None:
        self.released: list[tuple[int, str]] = []
        self.told: list[messages.FromDispatcher] = []
        config = Config(daemon=msgspec.convert(daemon, Daemon))
        self.stock = Stock(
            config,
            lambda held, reason: self.released.append((held.id, reason)),
            lambda _: None,
            self.told.append,
        )
        self.stock.serve(HANDLERS)
        self.links: list[Link] = []
        self._ends = []
        self._next = 1

    def worker(self) -> Link:
        ours, theirs = channel.pair()
        number = len(self.links) + 1
        message = messages.Attach(number, number, 1, fresh=True)
        page_fd = Page.create(slot=number, incarnation=number, generation=1)
        link = Link.open(message, ours.detach(), page_fd, process.output_file("test"))
        self.links.append(link)
        self._ends.append(theirs)
        return link

    def add(self, type: str, count: int = 1, queue: str = "default") -> list[Held]:
        added = []
        for _ in range(count):
            job = ClaimedJob(self._next, 99, type, queue, 0, "{}", 1, None, None, 0, 0, 0, 0)
            self._next += 1
            (held,) = self.stock.claimed([job], boottime_ns() + 60_000_000_000)
            self.stock.add(held)
            added.append(held)
        return added

    def give(self) -> None:
        self.stock.give(self.links)

    def recycled(self) -> list[int]:
        return [m.incarnation for m in self.told if isinstance(m, messages.Recycle)]

    def close(self) -> None:
        for link in self.links:
            link.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**daemon: Any) -> World:
        made.append(World(**daemon))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ids(link: Link) -> list[int]:
    return [held.id for held in link.held.values()]


def test_limits_come_from_the_job_its_handler_or_the_configuration(world: Callable[..., World]) -> None:
    held = world().add("hungry")[0]
    assert (held.limit_ns, held.memory_kb, held.flags) == (7_000_000_000, 64 * 1024, Flag.DETACH)
    held = world().add("noop")[0]
    assert (held.limit_ns, held.memory_kb, held.flags) == (600_000_000_000, 0, Flag.NONE)


def test_the_master_is_told_before_a_limited_job_is_sent(world: Callable[..., World]) -> None:
    here = world()
    link = here.worker()
    here.add("noop")
    here.give()
    assert here.told == []
    link.recorded([0])
    here.add("hungry")
    here.give()
    assert here.told == [messages.Watch(link.incarnation)]
    assert link.page.entry(1).memory_kb == 64 * 1024


def test_jobs_that_travel_alone_do_so_behind_short_ones_only(world: Callable[..., World]) -> None:
    here = world(frame_ms=0)
    first, second = here.worker(), here.worker()
    here.add("noop", 20)
    here.give()
    assert (ids(first), ids(second)) == ([1], [2])  # nobody knows how long they take
    for link in (first, second):
        link.recorded([0])
    here.stock.estimates.learn("noop", 5_000)
    here.give()
    # In turns, each a message of its own.
    assert (ids(first), ids(second)) == ([3, 5, 7, 9, 11, 13, 15, 17], [4, 6, 8, 10, 12, 14, 16, 18])
    here.give()
    assert len(first.held) == 8
    first.recorded(list(first.held))
    here.stock.estimates.learn("noop", 50_000_000)
    here.give()
    assert ids(first) == [19]


def test_a_one_shot_job_gets_a_fresh_worker_and_nobody_else_does(world: Callable[..., World]) -> None:
    here = world()
    link = here.worker()
    here.add("noop")
    here.give()
    link.recorded([0])
    here.add("alone")
    here.add("noop", 3)
    here.give()
    # The only worker has run something: its successor is ordered, and it is given nothing more.
    assert ids(link) == []
    assert here.recycled() == [link.incarnation]
    here.give()
    assert here.recycled() == [link.incarnation]  # one is enough
    here.links.remove(link)
    link.close()
    fresh = here.worker()
    here.give()
    assert ids(fresh) == [2]
    assert fresh.exhausted
    assert here.recycled() == [link.incarnation, fresh.incarnation]
    after = here.worker()
    here.give()
    assert ids(fresh) == [2]
    assert ids(after)[0] == 3


def test_a_fresh_worker_is_kept_for_the_one_shot_job_that_waits(world: Callable[..., World]) -> None:
    here = world()
    used, fresh = here.worker(), here.worker()
    used.page.write([(1, 1, 1, 0, 0, 0)])
    here.add("alone", 2)
    here.add("noop", 4)
    here.give()
    assert ids(fresh) == [1]
    # The second one-shot job waits for a successor, which is on its way already: the other worker stays in service.
    assert here.recycled() == [fresh.incarnation]
    assert ids(used) == [3]


def test_a_worker_gets_no_more_jobs_than_it_may_run(world: Callable[..., World]) -> None:
    here = world(max_jobs_per_worker=3, frame_ms=1000)
    link = here.worker()
    here.stock.estimates.learn("noop", 1000)
    here.add("noop", 10)
    here.give()
    here.give()
    assert ids(link) == [1, 2, 3]
    assert here.recycled() == [link.incarnation]


def test_the_successor_is_ordered_before_the_last_job_is_given(world: Callable[..., World]) -> None:
    here = world(max_jobs_per_worker=20, frame_ms=0)
    link = here.worker()
    here.add("noop", 30)
    for number in range(30):
        here.give()
        assert here.recycled() == ([link.incarnation] if number >= 17 else [])
        if number in link.held:
            link.recorded([number])
    assert link.page.written == 20
    assert link.exhausted


def test_a_worker_that_a_predecessor_gave_its_last_job_is_replaced(world: Callable[..., World]) -> None:
    """That one may have died before it asked for the successor."""
    here = world(max_jobs_per_worker=2)
    link = here.worker()
    link.page.write([(1, 1, 1, 0, 0, 0)] * 2)
    here.add("noop")
    here.give()
    assert ids(link) == []
    assert here.recycled() == [link.incarnation]
    assert here.stock.demand(here.links).total == 0


@pytest.mark.parametrize("why", ["noop", "alone"])
def test_a_worker_whose_successor_does_not_come_serves_on(world: Callable[..., World], why: str) -> None:
    here = world(max_jobs_per_worker=3 if why == "noop" else 0)
    link = here.worker()
    link.page.write([(1, 1, 1, 0, 0, 0)] * 3)
    here.add(why)
    here.give()
    here.stock.release_all("tests")
    assert link.exhausted
    assert here.stock.demand(here.links).total == 0
    link.exhausted_at -= SUCCESSOR_LIMIT_S
    assert here.stock.demand(here.links).total == 1
    for number in range(3, 6):
        here.add("noop")
        here.give()
        assert len(link.held) == 1
        link.recorded([number])
    # It was ordered, and is still wanted.
    assert here.recycled() == [link.incarnation]


def test_a_worker_that_was_given_a_one_shot_job_gets_nothing_more(world: Callable[..., World]) -> None:
    here = world()
    link = here.worker()
    here.add("alone")
    here.give()
    link.recorded([0])
    here.add("noop")
    assert here.stock.demand(here.links).total == 0
    here.give()
    assert ids(link) == []


def test_what_waits_follows_the_handlers_of_the_next_generation(world: Callable[..., World]) -> None:
    here = world()
    here.add("alone")
    noop, hungry = here.add("noop")[0], here.add("hungry")[0]
    gone = here.add("noop")[0]
    gone.job = gone.job._replace(type="gone") if gone.job else None
    here.stock.serve(
        {
            "noop": HandlerInfo(type="noop", plugin="p", one_shot=True, memory_limit_mb=8),
            "hungry": HandlerInfo(type="hungry", plugin="p", timeout_s=3),
            "alone": HandlerInfo(type="alone", plugin="p"),
        }
    )
    assert [id for id, _ in here.released] == [gone.id]
    assert (noop.memory_kb, hungry.limit_ns, hungry.memory_kb, hungry.flags) == (8192, 3_000_000_000, 0, 0)
    first, second = here.worker(), here.worker()
    here.give()
    assert sorted(map(ids, (first, second))) == [[1], [2]]  # the one-shot job alone, and not with the others
    single = first if ids(first) == [2] else second
    assert single.exhausted


def test_what_comes_back_from_an_older_generation_gets_the_present_limits(
    world: Callable[..., World],
) -> None:
    here = world()
    held = here.add("hungry")[0]
    here.stock.remove(held)
    here.stock.serve({"hungry": HandlerInfo(type="hungry", plugin="p", memory_limit_mb=8)})
    here.stock.add(held, first=True)
    assert (held.memory_kb, held.flags) == (8192, Flag.NONE)


def test_what_no_worker_becomes_free_for_is_given_back(world: Callable[..., World]) -> None:
    here = world()
    here.add("noop")
    here.add("alone")
    now = boottime()
    here.stock.release_overdue(now)
    assert here.released == []
    here.stock.release_overdue(now + READY_LIMIT_S + 0.1)
    assert [id for id, _ in here.released] == [1]
    here.stock.release_overdue(now + FRESH_LIMIT_S + 0.1)
    assert [id for id, _ in here.released] == [1, 2]
    assert not here.stock


def test_an_uncertain_lease_is_not_given(world: Callable[..., World]) -> None:
    here = world()
    link = here.worker()
    for held in [*here.add("noop"), *here.add("alone")]:
        held.certain_ns = boottime_ns() + 1_000_000_000  # kill_grace_s is 5 s
    here.give()
    assert ids(link) == []
    assert sorted(id for id, _ in here.released) == [1, 2]


def queues(here: World) -> list[list[str]]:
    return [[held.job.queue for held in link.held.values() if held.job] for link in here.links]


def test_reserved_slots_are_kept_from_the_others(world: Callable[..., World]) -> None:
    here = world(slots=4, reserved={"mail": 1, "reports": 1}, frame_ms=0)
    for _ in range(4):
        here.worker()
    here.add("noop", 9, queue="slow")
    here.give()
    assert sorted(queues(here)) == [[], [], ["slow"], ["slow"]]
    here.add("noop", 9, queue="mail")
    here.give()
    assert sorted(queues(here)) == [[], ["mail"], ["slow"], ["slow"]]  # the last one is for reports
    here.add("noop", queue="reports")
    here.give()
    assert sorted(queues(here)) == [["mail"], ["reports"], ["slow"], ["slow"]]


def test_what_is_not_reserved_a_queue_with_reserved_slots_may_have_too(world: Callable[..., World]) -> None:
    here = world(slots=4, reserved={"mail": 1, "reports": 1}, frame_ms=0)
    for _ in range(4):
        here.worker()
    here.add("noop", 9, queue="mail")
    here.give()
    assert sorted(queues(here)) == [[], ["mail"], ["mail"], ["mail"]]


def test_a_frame_holds_jobs_of_one_pool(world: Callable[..., World]) -> None:
    here = world(slots=3, reserved={"mail": 1}, frame_ms=100)
    here.stock.estimates.learn("noop", 100_000)
    for _ in range(3):
        here.worker()
    for _ in range(20):
        here.add("noop", queue="slow")
        here.add("noop", queue="mail")
    here.give()
    assert all(len(set(each)) == 1 and len(each) > 1 for each in queues(here)), queues(here)


def test_one_shot_jobs_keep_to_the_shares(world: Callable[..., World]) -> None:
    here = world(slots=3, reserved={"mail": 1}, frame_ms=0)
    for _ in range(3):
        here.worker()
    here.add("alone", 5, queue="slow")
    here.give()
    assert sorted(queues(here)) == [[], ["slow"], ["slow"]]
    here.add("alone", queue="mail")
    here.give()
    assert sorted(queues(here)) == [["mail"], ["slow"], ["slow"]]


def test_a_pool_without_a_slot_gives_its_jobs_back_while_others_go_on(world: Callable[..., World]) -> None:
    here = world(slots=2, reserved={"mail": 1}, frame_ms=0)
    for _ in range(2):
        here.worker()
    here.add("noop", queue="slow")
    here.give()
    waiting = here.add("noop", queue="slow")[0]
    here.add("noop", queue="mail")
    here.give()
    assert sorted(queues(here)) == [["mail"], ["slow"]]
    here.stock.release_overdue(boottime() + READY_LIMIT_S + 1)
    assert here.released == [(waiting.id, "no worker became free")]


def test_each_pool_asks_for_what_it_may_have(world: Callable[..., World]) -> None:
    here = world(slots=4, reserved={"mail": 1}, frame_ms=0)
    for _ in range(4):
        here.worker()
    wish = here.stock.demand(here.links)
    assert (wish.limits, wish.idle) == ({"mail": 4, "": 3}, 4)
    here.add("noop", queue="slow")
    here.give()
    here.add("noop", queue="mail")
    wish = here.stock.demand(here.links)
    assert (wish.limits, wish.idle, wish.taken) == ({"mail": 2, "": 2}, 2, {"mail": 1, "": 1})
    here.add("noop", 3, queue="slow")
    assert here.stock.demand(here.links).limits == {"mail": 0, "": 0}


def test_a_pool_of_long_jobs_is_not_claimed_ahead_because_another_ones_are_short(
    world: Callable[..., World],
) -> None:
    here = world(slots=4, reserved={"fast": 2}, frame_ms=5)
    for _ in range(4):
        here.worker()
    fast, slow = here.add("noop", queue="fast")[0], here.add("hungry", queue="slow")[0]
    assert fast.job is not None
    assert slow.job is not None
    here.give()
    for _ in range(100):
        here.stock.learn([(fast.job, 10_000)])
    here.stock.learn([(slow.job, 3_000_000_000)])
    here.add("hungry", 1, queue="slow")
    here.give()
    limits = here.stock.demand(here.links).limits
    assert limits.get("", 0) == 0
    assert limits["fast"] > 100


def test_a_fresh_worker_is_not_kept_for_a_one_shot_job_that_may_not_have_it(
    world: Callable[..., World],
) -> None:
    here = world(slots=3, reserved={"fast": 1}, frame_ms=0)
    for _ in range(3):
        here.worker()
    here.add("alone", 9, queue="other")
    here.give()
    assert sorted(queues(here)) == [[], ["other"], ["other"]]
    here.add("noop", queue="fast")
    here.give()
    assert sorted(queues(here)) == [["fast"], ["other"], ["other"]]
    assert (
        len(here.recycled()) == 2
    )  # of the two that run one-shot jobs: none is made fresh for those that must wait


def test_a_worker_that_will_be_idle_in_a_moment_is_claimed_for(world: Callable[..., World]) -> None:
    here = world(frame_ms=0)
    link = here.worker()
    here.stock.learn([(here.add("noop")[0].job, 50_000_000)])  # 50 ms
    here.give()

    def wanted(ran_ms: int) -> int:
        link.page.begin(0, boottime_ns() - ran_ms * 1_000_000)
        return here.stock.demand(here.links).total

    assert here.stock.demand(here.links).total == 0, "not begun"
    assert wanted(ran_ms=10) == 0
    assert 0.01 < here.stock.look_in_s() <= 0.03
    assert here.stock.look_in_s() > 1e9, "said once"
    assert wanted(ran_ms=45) == 1
    assert wanted(ran_ms=55) == 1
    assert wanted(ran_ms=90) == 0, "it takes longer than the others did, nobody knows how long"
    here.stock.estimates.keep(())
    assert wanted(ran_ms=45) == 0, "of a type that was never seen nothing is expected"
