"""The worker's own part, without a process around it: the order of its page, its outcomes, its failure texts."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aqd import (
    Discard,
    JobCancelled,
    JobInterrupted,
    JobTimeout,
    Retry,
    channel,
    journal,
    log,
    messages,
    output,
    process,
)
from aqd.config import Config
from aqd.errors import Exit
from aqd.failures import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS
from aqd.hookspecs import Confinement, HandlerInfo, JobContext
from aqd.page import Page, StopReason
from aqd.plugins import LoadedHandler, Registry
from aqd.process import boottime_ns
from aqd.strays import MARKER
from aqd.title import Title
from aqd.worker import Worker


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker marks its environment and its log: what later tests start or say must not have the mark."""
    monkeypatch.setenv(MARKER, "")  # whereby it is put back
    yield
    log.context()


class Untouched(output.Streams):
    """The output of a worker that runs in the test's own process: its descriptors stay as they are."""

    def __init__(self, output_fd: int) -> None:
        self.output_fd = output_fd

    def restore(self) -> None:
        pass


class Untitled(Title):
    """The test's process keeps its own title."""

    def __init__(self) -> None:
        pass

    def show_job(self, type: str, id: int) -> None:
        pass


class Bench:
    """A worker whose channel and page are in our hands."""

    def __init__(self, page_type: type[Page] = Page) -> None:
        fd = Page.create(0, 1, 1)
        self.page = page_type(fd)
        os.close(fd)
        self.journal = journal.Reader(self.page)
        self.ours, theirs = channel.pair()
        self.ours.settimeout(2)
        self.registry = Registry()
        self.output_fd = process.output_file("test")
        self.worker = Worker(
            self.registry, Config(), theirs, self.page, self.output_fd, ["late"], os.getppid()
        )
        self.worker.streams = Untouched(self.output_fd)
        self.worker.title = Untitled()
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
        for _, record in self.journal.read():
            return messages.decode_outcome(record)
        data, fds = self.sent()
        for fd in fds:
            os.close(fd)
        return messages.decode_from_worker(data)

    def sent(self) -> tuple[bytes, list[int]]:
        """The next message in the channel that is not the word that the journal has something (after 1 ms)."""
        while (found := channel.receive(self.ours))[0] == messages.BELL:
            pass
        return found

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

    def begin(self, number: int, *figures: Any) -> None:
        assert self.recall() == (number, number + 1)
        super().begin(number, *figures)


class RecalledJustAfter(Page):
    """The same, a moment later: the entry counts as begun."""

    __slots__ = ()

    def begin(self, number: int, *figures: Any) -> None:
        super().begin(number, *figures)
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


def failed(bench: Bench, function: Callable[[Any], Any], **options: Any) -> messages.Broken:
    bench.run(function, **options)
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Broken)
    return outcome


def raising(error: BaseException) -> Callable[[Any], None]:
    def handler(_: Any) -> None:
        raise error

    return handler


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("handler", "kind", "reason", "text"),
    [
        (raising(ValueError("no")), "failed", "exception", "ValueError: no"),
        (raising(Retry(None, "later")), "failed", "retry", "later"),
        (raising(Discard("never")), "discarded", "discard", "never"),
        (raising(SystemExit(3)), "failed", "interpreter_exit", "sys.exit(3)"),
        (raising(KeyboardInterrupt()), "failed", "exception", "KeyboardInterrupt"),
        (raising(RecursionError()), "failed", "exception", "RecursionError"),
        # Nobody has asked for an end: it is the handler's own doing.
        (raising(JobTimeout()), "failed", "exception", "JobTimeout"),
        (raising(JobCancelled()), "failed", "exception", "JobCancelled"),
        (lambda _: object(), "failed", "result", "cannot be stored"),
        (lambda _: CYCLE, "failed", "result", "nested deeper"),
        (lambda _: "x" * (64 << 20), "failed", "result", "too large"),
        (lambda _: float("nan"), "failed", "result", "cannot be stored"),
    ],
)
def test_why_an_attempt_did_not_complete(
    bench: Bench, handler: Callable[[Any], Any], kind: str, reason: str, text: str
) -> None:
    outcome = failed(bench, handler)
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert text in outcome.error


@pytest.mark.parametrize(
    ("stop", "error", "kind", "reason"),
    [
        (StopReason.TIMEOUT, JobTimeout(), "timed_out", "timeout"),
        (StopReason.CANCEL, JobCancelled(), "cancelled", "cancel"),
        (StopReason.DRAIN, JobInterrupted(), "interrupted", "drain"),
        (StopReason.CANCEL, BaseExceptionGroup("tasks", [JobCancelled()]), "cancelled", "cancel"),
        (StopReason.DRAIN, JobCancelled(), "interrupted", "drain"),  # the handler's own idea
        (StopReason.CANCEL, ValueError(), "failed", "exception"),
    ],
)
def test_an_end_that_was_asked_for(
    bench: Bench, stop: StopReason, error: BaseException, kind: str, reason: str
) -> None:
    def handler(_: Any) -> None:
        bench.page.request_stop(0, stop)
        raise error

    outcome = failed(bench, handler)
    assert (outcome.kind, outcome.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("stop", "raised"),
    [
        (StopReason.TIMEOUT, JobTimeout),
        (StopReason.CANCEL, JobCancelled),
        (StopReason.DRAIN, JobInterrupted),
        (StopReason.FENCE, JobInterrupted),
    ],
)
def test_what_a_stop_raises_in_the_handler(
    bench: Bench, stop: StopReason, raised: type[BaseException]
) -> None:
    """One that catches it and returns has completed: the work was done."""

    def handler(_: Any) -> str:
        bench.page.request_stop(0, stop)
        try:
            bench.worker._on_stop(0, None)
        except raised:
            return "done"
        return "was not raised"

    bench.run(handler)
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Done)
    assert outcome.result == '"done"'


def test_a_type_whose_plugin_could_not_be_imported_here(bench: Bench) -> None:
    bench.worker._missing["gone"] = "its plugin p could not be imported in this worker: no such module"
    bench.page.write([(1, 2, 1, 0, 0, 0)])
    bench.page.lease_until_ns = boottime_ns() + 10**12
    bench.worker._run(messages.JobEntry(0, 1, "gone", "{}", 1, 5, "default", 0), "{}")
    outcome = bench.outcome()
    assert isinstance(outcome, messages.Broken)
    assert (outcome.kind, outcome.reason) == ("failed", "plugin_import")
    assert "no such module" in outcome.error


def test_what_the_kernel_refuses_at_run_time(bench: Bench) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    confinement = Confinement(oom_score_adj=oom_score() + 1, rlimits={"NOFILE": hard + 1})
    before = oom_score()
    outcome = failed(bench, lambda _: None, confinement=confinement)
    assert bench.ran == []
    assert (outcome.kind, outcome.reason) == ("failed", "confinement")
    assert f"NOFILE = {hard + 1}" in outcome.error
    # What was already done is undone.
    assert (oom_score(), resource.getrlimit(resource.RLIMIT_NOFILE)) == (before, (soft, hard))


def oom_score() -> int:
    with open("/proc/self/oom_score_adj") as file:
        return int(file.read())


def test_after_a_job_of_its_own_a_worker_leaves(bench: Bench) -> None:
    bench.run(lambda _: None)
    assert bench.worker._leaving is None
    bench.run(lambda _: None, 1, one_shot=True)
    assert bench.worker._leaving == Exit.OK


def test_what_an_attempt_used(bench: Bench) -> None:
    def use(_: Any) -> None:
        kept = b"x" * (200 << 20)
        subprocess.run(["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"], check=True)
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        del kept

    bench.run(use)
    large = bench.outcome()
    bench.run(lambda _: None, 1)
    small = bench.outcome()
    assert isinstance(large, messages.Done)
    assert isinstance(small, messages.Done)
    # The helper's time is in it: it is the only one that is anywhere near.
    assert large.cpu_us > 60_000 > small.cpu_us
    assert bench.page.cpu_at_us > large.cpu_us
    # The mark is set back with each job.
    assert large.peak_kb > small.peak_kb + (150 << 10)


def test_output_goes_with_what_did_not_complete(bench: Bench) -> None:
    def talk(size: int, then: BaseException | None = None) -> Callable[[Any], None]:
        def handler(_: Any) -> None:
            os.write(bench.output_fd, b"o" * size)
            if then is not None:
                raise then

        return handler

    assert failed(bench, talk(100, ValueError())).output == b"o" * 100
    bench.run(talk(5), 1)
    assert bench.outcome().output == b""  # type: ignore[union-attr]
    bench.run(talk(6), 2, keep_output=True)
    assert bench.outcome().output == b"o" * 6  # type: ignore[union-attr]
    assert bench.page.output_at == 105
    # Longer ones come beside the message, behind a result that does so, too.
    bench.run(lambda _: os.write(bench.output_fd, b"p" * 90_000) and "r" * 50_000, 3, keep_output=True)
    data, fds = bench.sent()
    done = messages.decode_from_worker(data)
    assert isinstance(done, messages.Done)
    assert (done.result, done.output) == (None, None)
    result, printed = (channel.from_memfd(fd, 1 << 20) for fd in fds)
    assert result == b'"' + b"r" * 50_000 + b'"'
    assert printed == b"p" * 65_536


def test_progress_is_on_the_page(bench: Bench) -> None:
    seen: list[Any] = []
    kept: list[Any] = []

    def handler(_: Any, job: JobContext) -> None:
        kept.append(job)
        for percent, message in (
            (0, ""),
            (12.34, "a\0b \ud800"),
            (None, "x" * (50 << 20)),
            (100, "😀" * 100),
        ):
            job.progress(percent, message)
            seen.append(bench.page.note())
        for bad in (-1, 100.1, float("nan"), True, "5"):
            with pytest.raises((TypeError, ValueError), match="progress: percent"):
                job.progress(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="progress: message"):
            job.progress(1, 5)  # type: ignore[arg-type]

    info = HandlerInfo(type="t", plugin="p", wants_job=True)
    bench.registry.handlers["t"] = LoadedHandler(info, handler)
    bench.page.write([(1, 2, 1, 0, 0, 0)])
    bench.page.lease_until_ns = boottime_ns() + 10**12
    bench.worker._run(messages.JobEntry(0, 1, "t", "{}", 1, 5, "default", 0), "{}")
    assert isinstance(bench.outcome(), messages.Done)
    assert [(note.percent, note.message) for note in seen] == [
        (0.0, ""),
        (12.34, "a\\0b \\ud800"),
        (None, "x" * 256),
        (100.0, "😀" * 64),
    ]
    kept[0].progress(50, "too late")
    assert bench.page.note() == seen[-1]


def test_a_stop_in_the_middle_of_a_note_does_not_silence_the_later_ones(bench: Bench) -> None:
    bench.page.write_note(0, 1, "one")
    bench.page._words[24] += 1  # as left by an exception between the two writings of the sequence
    assert bench.page.note() is None
    bench.page.write_note(0, 2, "two")
    note = bench.page.note()
    assert note is not None
    assert (note.message, note.sequence) == ("two", 4)
