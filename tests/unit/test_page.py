"""The page: two mappings of a real memfd, and a writer that is another process and dies."""

import os
import signal

import pytest

from aqd.page import ENTRIES, SIZE, Page, StopReason


@pytest.fixture
def two():
    """The same page as two processes see it."""
    fd = Page.create(3, 7, 2)
    ours, theirs = Page(fd), Page(fd)
    os.close(fd)
    yield ours, theirs
    ours.close()
    theirs.close()


def rows(*ids):
    return [(job, job * 10, 1, 0, 0, 0) for job in ids]


def test_a_new_page_is_empty_and_names_its_worker(two):
    page, _ = two
    assert (page.slot, page.incarnation, page.generation) == (3, 7, 2)
    assert (page.pid, page.written, page.started, page.finished, page.turns) == (0, 0, 0, 0, 0)
    assert page.current() == -1
    assert page.stop_entry == -1
    assert page.unstarted() == (0, 0)
    assert not page.skipped(0)


def test_the_descriptor_is_not_inherited():
    fd = Page.create(0, 1, 1)
    try:
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_size == SIZE
    finally:
        os.close(fd)


def test_memory_that_is_no_page_is_refused():
    fd = os.memfd_create("other")
    os.ftruncate(fd, SIZE)
    try:
        with pytest.raises(ValueError, match="not a page"):
            Page(fd)
    finally:
        os.close(fd)


def test_what_one_side_writes_the_other_reads(two):
    dispatcher, worker = two
    assert dispatcher.write([(2**62, 2**62 + 1, 3, 4_000)]) == 0
    entry = worker.entry(0)
    assert (entry.number, entry.job_id, entry.token, entry.attempt, entry.limit_ns) == (
        0,
        2**62,
        2**62 + 1,
        3,
        4_000,
    )
    dispatcher.lease_until_ns = 123
    assert worker.lease_until_ns == 123
    worker.begin(0, 55)
    assert (dispatcher.current(), dispatcher.started_at_ns) == (0, 55)
    worker.end(0)
    assert dispatcher.current() == -1
    assert dispatcher.turns == 1
    worker.turn()
    assert dispatcher.turns == 2


def test_entries_are_a_ring_that_goes_round(two):
    dispatcher, worker = two
    for number in range(3 * ENTRIES + 5):
        assert dispatcher.write(rows(number + 1)) == number
        assert worker.entry(number).job_id == number + 1
        worker.begin(number, number)
        worker.end(number)
    last = 3 * ENTRIES + 5
    kept = list(dispatcher.entries(last - ENTRIES, last))
    assert [entry.job_id for entry in kept] == list(range(last - ENTRIES + 1, last + 1))
    assert [entry.number for entry in kept] == list(range(last - ENTRIES, last))
    assert dispatcher.current() == -1


def test_a_frame_across_the_end_of_the_ring(two):
    dispatcher, worker = two
    dispatcher.write(rows(*range(1, ENTRIES - 1)))
    first = dispatcher.write(rows(1001, 1002, 1003, 1004, 1005))
    assert first == ENTRIES - 2
    assert [worker.entry(first + n).job_id for n in range(5)] == [1001, 1002, 1003, 1004, 1005]
    assert worker.entry(3).job_id == 4  # not overwritten: two were left, three went round


def test_a_recall_takes_what_is_unstarted_and_the_worker_passes_over_it(two):
    master, worker = two
    master.write(rows(1, 2, 3))
    worker.begin(0, 1)
    assert master.recall() == (1, 3)
    assert [worker.skipped(n) for n in range(4)] == [False, True, True, False]
    assert master.unstarted() == (3, 3)
    assert master.recall() == (3, 3)  # a second one takes nothing
    assert [worker.skipped(n) for n in range(4)] == [False, True, True, False]


def test_what_was_recalled_stays_recalled_when_more_comes_and_goes(two):
    master, worker = two
    master.write(rows(1, 2, 3))
    worker.begin(0, 1)
    master.recall()
    master.write(rows(4, 5))  # sent while the first job still runs and 1, 2 are still in the channel
    assert master.unstarted() == (3, 5)
    assert master.recall() == (3, 5)
    assert [worker.skipped(n) for n in range(6)] == [False, True, True, True, True, False]


def test_entries_after_a_recall_are_begun(two):
    master, worker = two
    master.write(rows(1, 2, 3))
    master.recall()
    master.write(rows(4))
    assert not worker.skipped(3)
    worker.begin(3, 1)
    assert master.current() == 3
    worker.end(3)
    assert master.unstarted() == (4, 4)


def test_a_recall_of_nothing_is_harmless(two):
    master, worker = two
    assert master.recall() == (0, 0)
    master.write(rows(1))
    assert not worker.skipped(0)
    worker.begin(0, 1)
    assert master.recall() == (1, 1)


def test_a_stop_names_one_entry_only(two):
    master, worker = two
    master.request_stop(0, StopReason.TIMEOUT)
    assert worker.stop_entry == 0
    assert worker.stop_reason is StopReason.TIMEOUT
    master.request_stop(5, StopReason.DRAIN)
    assert (worker.stop_entry, worker.stop_reason) == (5, StopReason.DRAIN)


def test_the_page_outlives_its_worker():
    fd = Page.create(0, 1, 1)
    page = Page(fd)
    try:
        page.write(rows(1, 2, 3))
        pid = os.fork()
        if pid == 0:
            theirs = Page(fd)
            theirs.pid = os.getpid()
            theirs.begin(0, 11)
            theirs.end(0)
            theirs.begin(1, 22)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert page.pid == pid
        assert (page.current(), page.started_at_ns, page.finished) == (1, 22, 1)
        assert page.unstarted() == (2, 3)
        # Whoever comes later, and was not there when it was written, reads the same.
        successor = Page(fd)
        assert successor.entry(successor.current()).job_id == 2
        successor.close()
    finally:
        page.close()
        os.close(fd)


class Recorded:
    """Words that remember in which order they were stored."""

    def __init__(self, words):
        self.words = words
        self.stored = []

    def __getitem__(self, at):
        return self.words[at]

    def __setitem__(self, at, value):
        self.stored.append(at)
        self.words[at] = value

    def release(self):
        self.words.release()


def test_what_announces_is_stored_last(two):
    """A writer may die, and be read, between any two stores: racing it meets such a moment too rarely."""
    page, _ = two
    words = page._words = Recorded(page._words)
    page.write(rows(1, 2))
    assert words.stored[-1] == 8  # ``written``, after both rows
    assert len(words.stored) == 2
    words.stored.clear()
    page.begin(0, 55)
    assert words.stored == [28, 22, 23, 19, 17]  # ``started_at``, then ``started``
    words.stored.clear()
    page.request_stop(0, StopReason.DRAIN)
    assert words.stored == [5, 4]  # the reason, then the entry


def test_what_the_worker_holds_is_noted_for_an_entry_with_a_memory_limit(two):
    page, _ = two
    page.write([(1, 1, 1, 0, 0, 0), (2, 1, 1, 0, 1000, 0)])
    page.begin(0, 1)
    assert page.memory_at_kb == 0
    page.end(0)
    page.begin(1, 2)
    assert page.memory_at_kb > 1000  # this test's own process
