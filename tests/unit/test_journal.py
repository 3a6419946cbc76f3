"""The journal: what a worker appends is read whole and in order, survives both sides, and is never overrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqd import journal
from aqd.journal import RECORD_MAX, Reader, Writer
from aqd.page import JOURNAL_AT, JOURNAL_BYTES, Page


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """The same page, mapped twice."""
    fd = Page.create(0, 1, 1)
    both = Page(fd), Page(fd)
    os.close(fd)
    yield both
    for page in both:
        page.close()


def read(reader: Reader) -> list[bytes]:
    return [record for _, record in reader.read()]


def test_records_arrive_whole_and_in_order(pages: tuple[Page, Page]) -> None:
    writer, reader = Writer(pages[0]), Reader(pages[1])
    assert read(reader) == []
    records = [b"a", b"12345678", b"x" * RECORD_MAX]
    assert all(writer.append(record) for record in records)
    assert read(reader) == records
    assert read(reader) == []


@given(st.lists(st.lists(st.integers(1, RECORD_MAX + 10), max_size=40), max_size=30))
def test_the_ring_gives_back_what_was_put_in(rounds: list[list[int]]) -> None:
    fd = Page.create(0, 1, 1)
    page = Page(fd)
    os.close(fd)
    writer, reader = Writer(page), Reader(page)
    number = 0
    for sizes in rounds:
        written = []
        for size in sizes:
            number += 1
            record = bytes([number % 251]) * size
            if writer.append(record):
                written.append(record)
            else:  # too large, or no room left: then much is unread
                assert size > RECORD_MAX or sum(map(len, written)) > JOURNAL_BYTES - 3 * RECORD_MAX
        assert read(reader) == written
        reader.consume(reader.place)
    assert not reader.broken
    page.close()


def test_what_was_not_consumed_is_kept_and_a_successor_reads_it_again(pages: tuple[Page, Page]) -> None:
    writer, reader = Writer(pages[0]), Reader(pages[1])
    record = b"r" * 1000
    count = 0
    while writer.append(record):
        count += 1
    assert count == JOURNAL_BYTES // 1008
    found = reader.read()
    assert len(found) == count
    assert not writer.append(record)  # read, not recorded
    reader.consume(found[2][0])  # the first two are
    assert writer.append(b"s" * 1000)
    assert not writer.append(record * 2)
    assert read(Reader(pages[1])) == [record] * (count - 2) + [b"s" * 1000]
    # A worker's writer that begins again goes on where the page says.
    assert not Writer(pages[0]).append(record * 2)


def test_what_is_not_whole_yet_is_left_alone(
    pages: tuple[Page, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some machines another core sees the head before the data."""
    now = 100.0
    monkeypatch.setattr(journal, "boottime", lambda: now)
    writer, reader = Writer(pages[0]), Reader(pages[1])
    assert writer.append(b"first")
    assert writer.append(b"late")
    at = JOURNAL_AT + 16 + 8
    pages[0].memory[at : at + 4] = b"\0\0\0\0"
    assert read(reader) == [b"first"]
    assert read(reader) == []
    assert not reader.broken
    pages[0].memory[at : at + 4] = b"late"
    assert read(reader) == [b"late"]
    assert not reader.broken


@pytest.mark.parametrize("what", ["data", "length", "head"])
def test_what_a_handler_has_overwritten_is_told(
    pages: tuple[Page, Page], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    now = 100.0
    monkeypatch.setattr(journal, "boottime", lambda: now)
    writer, reader = Writer(pages[0]), Reader(pages[1])
    assert writer.append(b"record")
    if what == "data":
        pages[0].memory[JOURNAL_AT + 8] = 0
    elif what == "length":
        pages[0].memory[JOURNAL_AT : JOURNAL_AT + 4] = b"\xff\xff\xff\x7f"
    else:
        pages[0].journal_head = 3
    assert read(reader) in ([], [b"record"])
    now = 101.5
    assert read(reader) == []
    assert reader.broken


def test_an_order_of_stores_that_a_kill_cannot_spoil(pages: tuple[Page, Page]) -> None:
    """The head moves last: killed at any moment before, a worker leaves what it had."""
    writer = Writer(pages[0])
    assert writer.append(b"whole")
    head = pages[1].journal_head
    pages[0].memory[JOURNAL_AT + head + 8 : JOURNAL_AT + head + 12] = b"half"
    journal._HEADER.pack_into(pages[0].memory, JOURNAL_AT + head, 4, crc32(b"half"))
    assert read(Reader(pages[1])) == [b"whole"]


@pytest.mark.parametrize(("head", "tail"), [(1 << 46, 0), (8, 16), (4, 0), (8, 4)])
def test_words_that_cannot_be_right(pages: tuple[Page, Page], head: int, tail: int) -> None:
    """A wild store may hit them, too: no endless loop, and no error that every dispatcher meets."""
    pages[0].journal_head, pages[0].journal_tail = head, tail
    reader = Reader(pages[1])
    assert read(reader) == []
    assert reader.broken
