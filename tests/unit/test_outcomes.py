"""What becomes of an entry, from a worker's message or its death; and what a link takes back and fences."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from aqd import channel, messages, outcomes, process
from aqd.claims import ClaimedJob
from aqd.journal import Writer
from aqd.links import OUTSTANDING_MAX, Held, Link
from aqd.page import ENTRIES, Page, StopReason
from aqd.process import boottime_ns
from aqd.recorder import About, Completed, Failed, Released
from aqd.store import Lease

SECOND = 1_000_000_000
KEPT = Lease(extended=True, cancelled=False)


@pytest.fixture
def link() -> Iterator[Link]:
    ours, theirs = channel.pair()
    page_fd = Page.create(slot=0, incarnation=7, generation=1)
    output_fd = process.output_file("test")
    link = Link.open(messages.Attach(0, 7, 1, fresh=True), ours.detach(), page_fd, output_fd)
    yield link
    link.close()
    theirs.close()


def held(id: int, certain_s: float = 60.0) -> Held:
    job = ClaimedJob(id, 99, "noop", "default", 0, "{}", 2, None, None, 0, 0, 0, 0)
    certain_ns = boottime_ns() + int(certain_s * SECOND)
    return Held(id, 99, 2, certain_ns, job, limit_ns=3 * SECOND, max_attempts=5, payload_bytes=2)


def exited(
    reason: StopReason = StopReason.NONE, number: int = -1, signal_: int | None = signal.SIGKILL
) -> messages.Exited:
    return messages.Exited(7, signal_, None if signal_ else 3, reason, number)


def on_its_first(link: Link) -> Held:
    job = held(1)
    link.give([job])
    link.page.begin(0, boottime_ns())
    return job


def test_a_returned_job_is_completed(link: Link) -> None:
    job, done = held(1), messages.Done(0, 5, 7, 2_000, 300, '{"a":1}')
    work = outcomes.from_message(link, job, done)
    assert work == Completed((7, 0), job, done, 0)
    assert work.about == About("default", "noop", 0.0)


@pytest.mark.parametrize(("kind", "counts"), [("interrupted", True), ("unstarted", False)])
def test_what_we_ended_ourselves_is_given_back(link: Link, kind: str, counts: bool) -> None:
    work = outcomes.from_message(link, held(1), messages.Broken(0, 5, 7, 0, 0, kind, "why", "", -1.0))
    assert isinstance(work, Released)
    assert work.interrupted is counts


def test_a_failure_keeps_what_the_handler_wished(link: Link) -> None:
    work = outcomes.from_message(link, held(1), messages.Broken(0, 5, 7, 0, 0, "failed", "no", "tb", 4.5))
    assert isinstance(work, Failed)
    assert (work.retry_after_s, work.max_attempts, work.type, work.attempt) == (4.5, 5, "noop", 2)


def test_a_death_is_a_crash_with_its_signal(link: Link) -> None:
    work = outcomes.from_exit(link, on_its_first(link), 0, exited(), "last words", boottime_ns())
    assert isinstance(work, Failed)
    assert (work.kind, work.reason, work.signal, work.output) == ("crashed", "signal", 9, "last words")
    assert "SIGKILL" in work.error


def test_a_death_is_accounted_for_by_the_page_and_the_kernel(link: Link) -> None:
    job = held(1)
    link.give([job])
    link.page.begin(0, boottime_ns() - 2 * SECOND, cpu_us=3_000_000)
    end = messages.Exited(7, 11, None, 0, -1, cpu_us=3_500_000, peak_kb=4711)
    work = outcomes.from_exit(link, job, 0, end, "", boottime_ns())
    assert isinstance(work, Failed)
    assert (work.cpu_s, work.peak_kb, work.output) == (0.5, 4711, None)
    assert work.wall_s is not None
    assert work.wall_s >= 2


@pytest.mark.parametrize(
    ("end", "reason", "word"),
    [
        (messages.Exited(7, None, 3, 0, -1), "exit", "exit code 3"),
        (messages.Exited(7, None, 0, 0, -1), "exit", "exit code 0"),
        (messages.Exited(7, 9, None, 0, -1, oom=True), "oom", "OOM"),
        (messages.Exited(7, 9, None, StopReason.MEMORY, 0, "used 70 MiB"), "memory_limit", "used 70 MiB"),
    ],
)
def test_a_crash_says_which_of_these_it_was(link: Link, end: messages.Exited, reason: str, word: str) -> None:
    work = outcomes.from_exit(link, on_its_first(link), 0, end, "", boottime_ns())
    assert isinstance(work, Failed)
    assert (work.kind, work.reason) == ("crashed", reason)
    assert reason in outcomes.REASONS
    assert word in work.error


def test_a_death_is_what_we_killed_it_for_only_if_it_met_this_entry(link: Link) -> None:
    job = on_its_first(link)
    kinds = {
        reason: outcomes.from_exit(link, job, 0, exited(reason, number=0), "", boottime_ns())
        for reason in StopReason
    }
    fenced = kinds[StopReason.FENCE]
    assert isinstance(fenced, Failed)
    assert (fenced.kind, fenced.reason) == ("lost", "lease")
    assert isinstance(kinds[StopReason.DRAIN], Released)
    timeout = kinds[StopReason.TIMEOUT]
    assert isinstance(timeout, Failed)
    assert timeout.kind == "timed_out"
    assert "3 s" in timeout.error
    cancelled = kinds[StopReason.CANCEL]
    assert isinstance(cancelled, Failed)
    assert (cancelled.kind, cancelled.reason) == ("cancelled", "cancel")
    for reason in StopReason:  # meant for another entry: this one was merely hit
        other = outcomes.from_exit(link, job, 0, exited(reason, number=4), "", boottime_ns())
        assert isinstance(other, Failed)
        assert other.kind == "crashed"


def test_a_predecessors_job_is_recorded_without_guessing(link: Link) -> None:
    unknown = Held(1, 99, 2, boottime_ns())
    work = outcomes.from_message(link, unknown, messages.Broken(0, 5, 7, 0, 0, "failed", "no", "", -1.0))
    assert isinstance(work, Failed)
    assert (work.type, work.max_attempts, work.retry_after_s) == (None, None, None)


def test_the_ring_is_never_overrun_by_recalls(link: Link) -> None:
    first = on_its_first(link)
    given = 1
    while link.room() > 0:
        with contextlib.suppress(BlockingIOError):  # nobody reads; it stands in the page all the same
            link.give([held(given + 1)])
        given += 1
        link.take_back(*link.page.recall())
        assert given <= 2 * ENTRIES
    assert given <= ENTRIES
    assert link.page.entry(0).job_id == first.id


def test_room_bounds_what_is_unrecorded(link: Link) -> None:
    link.give([held(id) for id in range(100)])
    assert link.room() == OUTSTANDING_MAX - 100
    link.recorded(range(40))
    assert link.room() == OUTSTANDING_MAX - 60


def test_a_lost_lease_fences_its_own_entry_only(link: Link) -> None:
    lost, kept = held(1, 5), held(2, 50)
    link.give([lost, kept])
    certain_ns = boottime_ns() + 60 * SECOND
    assert link.renewed({(1, 99), (2, 99)}, {(2, 99): KEPT}, certain_ns) == [0]
    assert lost.lost
    assert link.page.lease_until_ns == certain_ns


def test_a_row_that_somebody_locks_is_neither_lost_nor_extended(link: Link) -> None:
    job = held(1, 5)
    link.give([job])
    before = job.certain_ns
    assert (
        link.renewed(
            {(1, 99)}, {(1, 99): Lease(extended=False, cancelled=False)}, boottime_ns() + 60 * SECOND
        )
        == []
    )
    assert (job.lost, job.certain_ns, link.page.lease_until_ns) == (False, before, before)


def test_a_cancelled_entry_is_named_once_and_its_lease_goes_on(link: Link) -> None:
    job = held(1, 5)
    link.give([job, held(2, 5)])
    kept = {(1, 99): Lease(extended=True, cancelled=True), (2, 99): KEPT}
    certain_ns = boottime_ns() + 60 * SECOND
    assert link.renewed(set(kept), kept, certain_ns) == []
    assert link.cancelled(kept) == [0]
    assert link.cancelled(kept) == []
    assert job.cancelled
    assert link.page.lease_until_ns == certain_ns


def test_a_note_of_progress_is_passed_on_until_it_is_stored(link: Link) -> None:
    assert link.new_note() is None
    on_its_first(link)
    link.page.write_note(0, 12.5, "an eighth")
    found = link.new_note()
    assert found is not None
    (incarnation, sequence), progress = found
    assert (incarnation, progress) == (7, (1, 99, 12.5, "an eighth"))
    assert link.new_note() == found
    link.noted = sequence
    assert link.new_note() is None
    link.page.write_note(5, 100, "of an entry that is not held")
    assert link.new_note() is None


def test_another_claim_of_the_same_job_does_not_renew_this_one(link: Link) -> None:
    job = held(1, 5)
    link.give([job])
    assert link.renewed({(1, 99), (1, 7)}, {(1, 7): KEPT}, boottime_ns() + 60 * SECOND) == [0]


def test_what_the_predecessor_consumed_is_not_held_for_ever(link: Link) -> None:
    link.give([held(1), held(2)])
    link.page.begin(0, boottime_ns())
    successor = Link(0, 7, 1, link.channel, link.page, link.output_fd)
    successor.adopt()
    assert sorted(successor.held) == [0, 1]
    link.page.end(0)  # its outcome is not in the journal
    assert successor.consumed_before(link.page.finished) == [0]


def test_an_unreadable_message_is_passed_over() -> None:
    ours, theirs = channel.pair()
    page_fd = Page.create(slot=0, incarnation=7, generation=1)
    message = messages.Attach(0, 7, 1, fresh=True)
    link = Link.open(message, ours.detach(), page_fd, process.output_file("test"))
    link.give([held(1), held(2)])
    theirs.send(b"garbage")
    channel.send(theirs, messages.encode(messages.Done(0, 5, 7, 0, 0, None)))  # its memfd is missing
    channel.send(theirs, messages.encode(messages.Done(1, 5, 7, 0, 0, "1")))
    read = link.read_channel()
    assert [m if m is None else m.number for m in read] == [None, None, 1]
    assert link.unrecorded(1)
    link.recorded([1])
    assert not link.unrecorded(1)
    assert link.peeked.peek() is None
    assert not link.closed
    theirs.close()
    assert link.read_channel() == []
    assert link.closed
    link.close()


def test_a_journal_that_was_written_over_is_read_no_more(link: Link) -> None:
    link.give([held(1), held(2)])
    assert Writer(link.page).append(messages.encode(messages.Done(0, 5, 7, 0, 0, "")))
    link.page.journal_head = link.page.journal_head + (1 << 40)
    assert link.has_news
    assert link.read_journal() == [None]
    assert not link.has_news, "nothing to be read, or the dispatcher would look for ever"
    assert not link.waits
    assert link.journal.broken
