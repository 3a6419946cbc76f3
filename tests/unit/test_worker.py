"""The worker's own part, without a process around it: the order of its page, its outcomes, its failure texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aqd import Retry, channel, messages, output, process
from aqd.config import Config
from aqd.hookspecs import HandlerInfo
from aqd.page import Page
from aqd.plugins import LoadedHandler, Registry
from aqd.process import boottime_ns
from aqd.failures import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS, describe, printable
from aqd.worker import Worker


class Untouched(output.Streams):
    """The output of a worker that runs in the test's own process: its descriptors stay as they are."""

    def __init__(self, output_fd: int) -> None:
        self.output_fd = output_fd

    def restore(self) -> None:
        pass


class Bench:
    """A worker whose channel and page are in our hands."""

    def __init__(self, page_type: type[Page] = Page) -> None:
        fd = Page.create(0, 1, 1)
        self.page = page_type(fd)
        os.close(fd)
        self.ours, theirs = channel.pair()
        self.ours.settimeout(2)
        self.registry = Registry()
        self.output_fd = process.output_file("test")
        self.worker = Worker(
            self.registry, Config(), theirs, self.page, self.output_fd, ["late"], os.getppid()
        )
        self.worker.streams = Untouched(self.output_fd)
        self.worker.prepare()
        self.ran: list[int] = []

    def run(self, function: Callable[[Any], Any], number: int = 0, **options: Any) -> None:
        info = HandlerInfo(type="t", plugin="p", **options)

        def handler(payload: Any) -> Any:
            self.ran.append(number)
            return function(payload)

        self.registry.handlers["t"] = LoadedHandler(info, handler)
        self.page.write([(1, 2, 1, 0, 0, 0)])
        self.page.lease_until_ns = boottime_ns() + 10**12
        self.worker._run(messages.JobEntry(number, 1, "t", "{}", 1, 5, "default", 0), "{}")

    def outcome(self) -> messages.FromWorker:
        data, fds = channel.receive(self.ours)
        for fd in fds:
            os.close(fd)
        return messages.decode_from_worker(data)

    def close(self) -> None:
        self.ours.close()
        self.worker.channel.close()
        self.page.close()
        os.close(self.output_fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


class RecalledJustBefore(Page):
    """The master stops the worker and takes back everything at the last moment before the begin."""

    __slots__ = ()

    def begin(self, number: int, now_ns: int, cpu_us: int = 0, output_at: int = 0) -> None:
        assert self.recall() == (number, number + 1)
        super().begin(number, now_ns, cpu_us, output_at)


class RecalledJustAfter(Page):
    """The same, a moment later: the entry counts as begun."""

    __slots__ = ()

    def begin(self, number: int, now_ns: int, cpu_us: int = 0, output_at: int = 0) -> None:
        super().begin(number, now_ns, cpu_us, output_at)
        assert self.recall() == (number + 1, number + 1)


def test_an_entry_that_was_taken_back_is_not_run() -> None:
    bench = Bench(RecalledJustBefore)
    bench.run(lambda _: None)
    assert bench.ran == []
    assert (bench.page.current(), bench.page.finished) == (-1, 1)
    bench.ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        bench.outcome()
    bench.close()


def test_an_entry_that_counts_as_begun_is_run() -> None:
    bench = Bench(RecalledJustAfter)
    bench.run(lambda _: None)
    assert bench.ran == [0]
    assert isinstance(bench.outcome(), messages.Done)
    bench.close()


def test_the_page_says_where_the_worker_is(bench: Bench) -> None:
    seen = []
    bench.run(lambda _: seen.append((bench.page.current(), bench.page.returned(0))))
    assert seen == [(0, False)]
    assert (bench.page.current(), bench.page.finished, bench.page.returned(0)) == (-1, 1, True)


def test_without_a_certain_lease_nothing_begins(bench: Bench) -> None:
    bench.page.write([(1, 2, 1, 0, 0, 0)])
    bench.worker._run(messages.JobEntry(0, 1, "t", "{}", 1, 5, "default", 0), "{}")
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Broken)
    assert outcome.kind == "unstarted"


def test_a_large_result_travels_beside_its_message(bench: Bench) -> None:
    bench.run(lambda _: "x" * 100_000)
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Done)
    assert outcome.result is None


def test_a_wish_is_passed_on(bench: Bench) -> None:
    def wish(_: Any) -> None:
        raise Retry(2.5)

    bench.run(wish)
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Broken)
    assert (outcome.kind, outcome.retry_after_s) == ("failed", 2.5)


@pytest.mark.parametrize("text", ["\0" * 50_000, "\ud800" * 50_000, "😀" * 50_000, "x" * 5_000_000])
def test_failure_texts_fit_into_a_message(bench: Bench, text: str) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError(text)

    bench.run(fail)
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Broken)
    assert len(outcome.error) <= MAX_ERROR_CHARS
    assert len(outcome.traceback) <= MAX_TRACEBACK_CHARS
    assert "\0" not in outcome.error + outcome.traceback
    (outcome.error + outcome.traceback).encode()


def test_cycles_and_groups_can_be_described() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    group = ExceptionGroup("many", [first, KeyError("third")])
    for error in (first, group):
        text, trace = describe(error)
        assert text
        assert "first" in trace


def test_printable_keeps_both_ends() -> None:
    text = printable("begin" + "x" * 10_000 + "end", 1000)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert len(text) <= 1000
