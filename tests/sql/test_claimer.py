"""The claimer's thread against a real database: what wakes it, what it must not sleep through, whom it makes notify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aqd import claims, store
from aqd.claimer import STRIKE_S, Claimer
from aqd.claims import CLAIM_MAX, COMMON, NOTHING, ClaimedJob, Wish
from aqd.config import Config, Daemon, Database
from aqd.database import Connection
from aqd.job import validate
from aqd.process import boottime, boottime_ns
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue

# Far away: what only the poll would find is not found.
POLL_MS = 60_000


class Node:
    """A claimer whose main thread wants what :attr:`wish` says, again and again."""

    def __init__(self, url: str, name: str = "node", wish: Wish | None = None, **daemon: Any) -> None:
        config = Config(database=Database(url=url), daemon=Daemon(poll_ms=POLL_MS, **daemon))
        self.claimer = Claimer(config, name, self._deliver, lambda: None, lambda _conn: None)
        self.wish = wish or Wish({COMMON: 10})
        self.jobs: list[ClaimedJob] = []
        self.delays_s: dict[str, float] = {}  # by queue
        self.while_awake: list[bool] = []
        self.announced = 0
        self.strikes: list[float] = []
        self.after_delivery: Callable[[list[ClaimedJob]], None] = lambda _jobs: None
        sleeper = self.claimer.sleeper
        announce, woken = sleeper.announce, sleeper.woken

        def counted_announce(conn: Connection) -> None:
            self.announced += 1
            announce(conn)

        def counted_woken(conn: Connection, node_id: str) -> None:
            self.strikes.append(boottime())
            woken(conn, node_id)

        sleeper.announce, sleeper.woken = counted_announce, counted_woken  # type: ignore[method-assign]

    def start(self, *types: str) -> None:
        self.claimer.wanted = self.wish
        self.claimer.serve(frozenset(types or ("noop",)))
        self.claimer.start()

    def want(self, wish: Wish) -> None:
        self.wish = self.claimer.wanted = wish
        self.claimer.wake()

    def _deliver(self, jobs: list[ClaimedJob], _asked_ns: int) -> None:
        for job in jobs:
            self.delays_s[job.queue] = max(self.delays_s.get(job.queue, 0.0), job.waited_s)
        self.while_awake.append(not self.claimer._asleep)
        self.claimer.wanted = self.wish
        self.after_delivery(jobs)
        self.jobs += jobs

    def sleeps(self) -> bool:
        """Nothing but news or the far poll makes it look."""
        claimer = self.claimer
        looks_at = min(claimer._look_at, claimer._second_look_at)
        return claimer._asleep and claimer._dry and not claimer._notified and looks_at > boottime() + 30

    def stop(self) -> None:
        self.claimer.stop()
        self.claimer.join(10)
        assert self.claimer.quiet


@pytest.fixture
def node(database_url: str) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str = "node", **options: Any) -> Node:
        made.append(Node(database_url, name, **options))
        return made[-1]

    yield make
    for each in made:
        if each.claimer.is_alive():
            each.stop()


def somebody_announced(queue: Queue) -> bool:
    return bool(queue.value("select s.last_value > w.last_value from aqd.sleeps s, aqd.wakes w"))


# --- what is news


def test_a_type_that_comes_with_a_reload_is_looked_for(node: Callable[..., Node], queue: Queue) -> None:
    one = node()
    one.start("noop")
    wait_until(one.sleeps)
    queue.add(type="later")
    wait_until(one.sleeps)
    one.claimer.serve(frozenset({"noop", "later"}))
    wait_until(lambda: one.jobs)


def test_a_pool_that_was_not_asked_is_looked_into(node: Callable[..., Node], queue: Queue) -> None:
    """All slots that are not reserved are taken; one of them comes free."""
    pools = frozenset({"mine", COMMON})
    full = Wish({"mine": 2, COMMON: 0}, pools, 2, {COMMON: 2})
    one = node(wish=full, slots=4, reserved={"mine": 2})
    one.start()
    wait_until(one.sleeps)
    queue.add(3)
    for taken in (1, 2, 3):
        wait_until(one.sleeps)
        assert len(one.jobs) == taken - 1
        one.wish = full
        one.claimer.wanted = Wish({"mine": 2, COMMON: 1}, pools, 3, {COMMON: 1})
        one.claimer.wake()
        wait_until(lambda taken=taken: len(one.jobs) == taken)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_who_writes_is_asked_before_the_claim(
    node: Callable[..., Node], connect: Connect, queue: Queue, moment: str
) -> None:
    """A transaction that enqueued before the announcement ends just before, or just after, we ask who writes."""
    one, writer = node(), connect(dispatcher=False)
    sleeper = one.claimer.sleeper
    announce, ask = sleeper.announce, sleeper.pending_writers

    def announce_late(conn: Connection) -> None:
        if not one.announced:
            writer.execute("begin")
            store.enqueue(writer, validate("noop"))
        announce(conn)

    def ask_and_end(conn: Connection) -> set[str]:
        if moment == "before" and writer.info.transaction_status:
            writer.execute("commit")
        found = ask(conn)
        if writer.info.transaction_status:
            writer.execute("commit")
        return found

    sleeper.announce, sleeper.pending_writers = announce_late, ask_and_end  # type: ignore[method-assign]
    one.start()
    wait_until(lambda: one.jobs)
    assert one.while_awake == [True], "it went to sleep over a job"


def test_notifications_that_never_cease_put_no_second_look_off(
    node: Callable[..., Node], connect: Connect, queue: Queue
) -> None:
    """Each claim is followed by another notification, and finds a job in a lane that is known."""
    one, writer = node(), connect(dispatcher=False)
    rare = [f"rare{number}" for number in range(6)]  # 0.35 s apart: some come just after a sweep, every 1.5 s
    began = 0.0

    def next_job(_jobs: list[ClaimedJob]) -> None:
        time.sleep(0.01)  # so that it is not brisk
        come = int((boottime() - began) / 0.35)
        for queue_name in rare[:come]:
            if queue_name not in sent:
                sent.add(queue_name)
                store.enqueue(writer, validate("noop", queue=queue_name))
        if not set(rare) <= one.delays_s.keys():
            store.enqueue(writer, validate("noop"))

    sent: set[str] = set()
    one.start()
    wait_until(one.sleeps)
    began, one.after_delivery = boottime(), next_job
    queue.add()
    wait_until(lambda: set(rare) <= one.delays_s.keys(), 30)
    assert max(one.delays_s[name] for name in rare) < 1.0


def test_what_is_not_wanted_any_more_is_not_claimed(
    node: Callable[..., Node], connect: Connect, queue: Queue
) -> None:
    """The wish may shrink (to nothing, where the node is not registered any more) while somebody writes for minutes."""
    one, writer = node(), connect(dispatcher=False)
    announce, wait = one.claimer.sleeper.announce, one.claimer._wait
    naps: list[float] = []

    def announce_late(conn: Connection) -> None:
        if not one.announced:
            writer.execute("begin")
            store.enqueue(writer, validate("noop"))
        announce(conn)

    def napped(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:  # it looks again and again
            one.claimer.wanted = NOTHING  # without a word, as the main thread does it
            writer.execute("commit")
        wait(seconds)

    one.claimer.sleeper.announce, one.claimer._wait = announce_late, napped  # type: ignore[method-assign]
    one.start()
    wait_until(lambda: one.jobs or max(naps, default=0.0) > 1.0)
    assert not one.jobs
    one.want(Wish({COMMON: 10}))
    wait_until(lambda: one.jobs)


def test_a_claim_is_as_old_as_its_statement_and_not_as_its_connection(
    node: Callable[..., Node], queue: Queue
) -> None:
    """Of several hosts the first may take its whole time to be silent: what is claimed after that is not too late."""
    queue.add()
    one = node()
    connected: list[int] = []
    asked: list[int] = []

    def prepare(_conn: Connection) -> None:
        connected.append(boottime_ns())

    def deliver(jobs: list[ClaimedJob], asked_ns: int) -> None:
        asked.append(asked_ns)
        one.jobs += jobs

    one.claimer._schema, one.claimer._deliver = prepare, deliver
    one.start()
    wait_until(lambda: one.jobs)
    assert asked[0] >= connected[0]


# --- whom it makes notify


def test_a_node_that_stops_is_struck_off(node: Callable[..., Node], queue: Queue) -> None:
    one = node()
    one.start()
    wait_until(one.sleeps)
    assert somebody_announced(queue)
    one.stop()
    assert not somebody_announced(queue)


def test_a_stop_without_the_database_is_a_stop(node: Callable[..., Node], queue: Queue) -> None:
    one = node()
    one.start()
    wait_until(one.sleeps)
    one.claimer._wait = lambda _seconds: time.sleep(0.01)  # type: ignore[method-assign]  # it does not hear of it
    one.claimer.wake()
    queue.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and application_name like 'aqd claimer%'"
    )
    one.stop()


def test_a_brisk_node_strikes_off_one_that_is_gone(node: Callable[..., Node], queue: Queue) -> None:
    """It starts under load, so it has announced nothing itself."""
    queue.conn.execute("select nextval('aqd.sleeps')")
    queue.fill(1000)
    one = node(wish=Wish({COMMON: 200}))
    one.start()
    wait_until(lambda: one.jobs)

    def struck_under_load() -> bool:
        queue.fill(300)
        queue.add()
        return not somebody_announced(queue)

    wait_until(struck_under_load)
    assert one.announced == 0
    assert len(one.strikes) == 1


def test_a_large_wish_is_met_by_several_claims_without_another_word(
    node: Callable[..., Node], queue: Queue
) -> None:
    """The main thread may be busy: what it wants is claimed meanwhile, no more of it, and by claims that are short."""
    queue.fill(4 * CLAIM_MAX)
    wish = Wish({COMMON: 2 * CLAIM_MAX + 50})
    one = node(wish=wish)
    sizes: list[int] = []

    def deliver(jobs: list[ClaimedJob], _asked_ns: int) -> None:
        one.jobs += jobs  # and nothing is said of what else is wanted
        sizes.append(len(jobs))

    one.claimer._deliver = deliver
    one.start()
    wait_until(lambda: len(one.jobs) >= wish.total)
    wait_until(lambda: one.claimer.wanted == NOTHING)
    one.stop()
    assert sizes == [CLAIM_MAX, CLAIM_MAX, 50]
    assert queue.value("select count(*) from aqd.jobs where state = 'PROCESSING'") == wish.total


def test_what_is_left_of_a_large_wish_is_given_up_when_nothing_more_is_wanted(
    node: Callable[..., Node], queue: Queue
) -> None:
    """Also where that is said while the claim is under way."""
    queue.fill(3 * CLAIM_MAX)
    one = node(wish=Wish({COMMON: 3 * CLAIM_MAX}))
    claim = one.claimer.book.claim

    def claim_meanwhile(conn: Connection, wish: int | Wish) -> list[ClaimedJob]:
        one.claimer.wanted = NOTHING
        return claim(conn, wish)

    one.claimer.book.claim = claim_meanwhile  # type: ignore[method-assign]
    one.claimer._deliver = lambda jobs, _asked_ns: one.jobs.extend(jobs)
    waited: list[float] = []
    wait = one.claimer._wait

    def noted(seconds: float) -> None:
        waited.extend([seconds] if one.jobs else [])
        wait(seconds)

    one.claimer._wait = noted  # type: ignore[method-assign]
    one.start()
    wait_until(lambda: waited)  # it has nothing more to do, and was not stopped
    one.stop()
    assert len(one.jobs) == CLAIM_MAX


def test_a_full_node_with_a_backlog_strikes_at_most_once_a_second(
    node: Callable[..., Node], queue: Queue
) -> None:
    queue.fill(2)
    one = node(wish=Wish({COMMON: 1}))
    one.after_delivery = lambda _jobs: setattr(one.claimer, "wanted", NOTHING)
    one.start()
    wait_until(lambda: one.jobs)
    for strikes in (1, 2, 3):

        def somebody_sleeps_and_is_struck_off(strikes: int = strikes) -> bool:
            queue.conn.execute("select nextval('aqd.sleeps')")
            queue.add()
            return len(one.strikes) == strikes

        wait_until(somebody_sleeps_and_is_struck_off)
    first, second, third = one.strikes
    assert min(second - first, third - second) >= STRIKE_S
    assert one.announced == 0


def test_one_that_sleeps_on_announces_anew_when_it_is_struck_off(
    node: Callable[..., Node], connect: Connect, queue: Queue
) -> None:
    one = node()
    one.start()
    wait_until(one.sleeps)
    known = one.announced
    claims.Sleeper().woken(connect(), "another")
    wait_until(lambda: one.announced == known + 1 and one.sleeps())
    assert somebody_announced(queue)
    queue.add()
    wait_until(lambda: one.jobs)
    assert one.delays_s["default"] < 5.0
    assert not one.strikes
