"""The journal: outcomes of one worker, in the memory that it shares with the master and the dispatcher.

A ring behind the page (:mod:`aqd.page`). The worker appends the outcome of every job as soon as it is known, which
costs no system call and outlives the worker; the dispatcher reads, records, and only then moves the tail. So a
dispatcher that dies is replaced without the worker noticing, and its successor finds every outcome that was not
recorded. That there is something to read the worker says by a message in its channel when it has reached the end of
a frame, or before it goes on to a next job (:meth:`aqd.worker.Worker.announce`).

Before, each outcome was a message in the channel, which the dispatcher peeked at and consumed later: half of its main
thread's time went into receiving (py-spy, no-op jobs).

Layout: records at multiples of 8 bytes: length and CRC-32 (4 bytes each, native), then the data, which never goes
over the end of the ring: a length of 0 says that the rest of it is unused. ``head`` and ``tail`` count bytes and
only grow. The checksum is for machines on which another core may see the new head before the data, and for
handlers that write where they should not.

What does not fit travels as a message in the channel (:class:`aqd.channel.Journal`).
"""

import struct
from typing import Final
from zlib import crc32

from aqd.page import JOURNAL_AT, JOURNAL_BYTES, Page
from aqd.process import boottime

# A larger record goes another way, so that a few of them do not fill the ring.
RECORD_MAX: Final = 8 * 1024
_HEADER: Final = struct.Struct("@II")
# A record that is not whole for so long will never be.
_BROKEN_S: Final = 1.0


class Writer:
    """The worker's side."""

    __slots__ = ("_head", "_memory", "_page")

    def __init__(self, page: Page) -> None:
        self._page = page
        self._memory = page.memory
        self._head = page.journal_head

    def append(self, record: bytes) -> bool:
        """Whether there was room for it."""
        length = len(record)
        if length > RECORD_MAX:
            return False
        head = self._head
        at = head % JOURNAL_BYTES
        left = JOURNAL_BYTES - at
        size = 8 + (length + 7 & ~7)
        skipped = left if size > left else 0
        if head + skipped + size - self._page.journal_tail > JOURNAL_BYTES:
            return False
        memory = self._memory
        if skipped:
            _HEADER.pack_into(memory, JOURNAL_AT + at, 0, 0)
            at = 0
        at += JOURNAL_AT
        memory[at + 8 : at + 8 + length] = record
        _HEADER.pack_into(memory, at, length, crc32(record))
        self._page.journal_head = self._head = head + skipped + size
        return True


class Reader:
    """The dispatcher's side. ``broken``: something stands there that no worker has written, and nothing behind it can
    be read."""

    __slots__ = ("_failing_since", "_memory", "_page", "broken", "place")

    def __init__(self, page: Page) -> None:
        self._page = page
        self._memory = page.memory
        self.place = page.journal_tail  # up to here it was read
        self.broken = False
        self._failing_since = 0.0

    def read(self) -> list[tuple[int, bytes]]:
        """The records that were not read yet, each with the place where it begins."""
        found: list[tuple[int, bytes]] = []
        place, head = self.place, self._page.journal_head
        if not 0 <= head - place <= JOURNAL_BYTES or (place | head) % 8:
            self.broken = True  # a wild store into the page itself
        if self.broken:
            return found
        memory, unpack = self._memory, _HEADER.unpack_from
        failed = False
        while place < head:
            at = JOURNAL_AT + place % JOURNAL_BYTES
            length, checksum = unpack(memory, at)
            if not length:
                place += JOURNAL_BYTES - place % JOURNAL_BYTES
                continue
            record = memory[at + 8 : at + 8 + length]
            if crc32(record) != checksum or length > RECORD_MAX:
                failed = True
                break
            found.append((place, record))
            place += 8 + (length + 7 & ~7)
        self.place = place
        self._judge(failed, place > head)
        return found

    def consume(self, place: int) -> None:
        """Everything before it is recorded: the worker may write there again."""
        self._page.journal_tail = place

    def _judge(self, failed: bool, beyond: bool) -> None:
        if not failed:
            self._failing_since, self.broken = 0.0, beyond
        elif not self._failing_since:
            self._failing_since = boottime()
        else:
            self.broken = boottime() >= self._failing_since + _BROKEN_S
