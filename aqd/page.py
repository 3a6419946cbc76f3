"""The page: memory that one worker incarnation shares with the master and the dispatcher.

It says, without a system call and even after the worker's death, which jobs the worker holds, which one
it is on and since when, until when its lease is certain. The *master* enforces limits and fences with
it while the dispatcher is dead or waits for the database; a successor settles what is left by it.

Layout: native 8-byte words (``memoryview.cast("Q")``; such stores never tore in 11 million reads,
``struct`` with an explicit byte order did). Every 64-byte block has exactly one writer.

==========  ==========  =================================================================================
block       writer      words
==========  ==========  =================================================================================
0           master      magic, incarnation, slot, generation, stop_entry, stop_reason, skip_from, skip_to
1           dispatcher  written, lease_until, journal_tail, listening
2           worker      pid, started, finished, started_at, turns, returned, cpu_at, output_at
3           worker      note_sequence, note_entry, note_percent, note_length, memory_at, journal_head
4…          dispatcher  the frame table: a ring of :data:`ENTRIES` ×
                        (job id, token, attempt, limit, memory limit, flags)
after it    worker      the note's text, :data:`NOTE_BYTES`
after it    worker      the journal, :data:`JOURNAL_BYTES`: see :mod:`aqd.journal`
==========  ==========  =================================================================================

Entries are numbered 0, 1, 2, … for the worker's whole life; entry *k* stands at ``k % ENTRIES``.

* ``written``: entries below it stand in the table. Written **before** the frame is sent, so a dispatcher
  that dies in between leaves a table that claims too much, never too little.
* ``started``/``finished``: the worker has begun/ended all entries below. ``started > finished`` means that
  it is on entry ``started - 1`` since ``started_at``; ``started_at`` is stored *before* ``started``.
  ``finished`` is stored after the outcome stood in the journal (or was sent); ``returned`` before: from then on the
  worker may wait for room in its channel, which is not the job's time.
* ``cpu_at``, ``output_at``: what the process had used, and written to its output, when the entry began; stored
  before ``started``. With them an attempt is accounted for after the worker's death.
* ``memory_at``: what the process and its helpers held (:func:`aqd.memory.held_kb`) when the present entry began, if that
  has a memory limit: what hooks have started and earlier jobs have left is not its use.
* the note: what the handler reports of its progress. ``note_sequence`` is odd while it is written; a reader that
  meets an odd or a changed one reads again another time.
* ``skip_from … skip_to``: a recall. The master wrote it while the worker was stopped; the worker passes
  over these entries, and looks *after* it has stored ``started``: a stop before that is a recall that it
  heeds, one after it sees the entry as begun. A recall always takes everything unstarted, so one range is
  enough.

All moments are CLOCK_BOOTTIME in nanoseconds; limit 0 means none.

Memory that was never touched costs nothing: an idle worker's page is 8 kB of its :data:`SIZE`.
"""

import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import chain
from typing import Final

from aqd import memory

# More than are outstanding (aqd/links.py): what a recall took back has used up numbers, too.
ENTRIES: Final = 2048
_WORDS_PER_ENTRY: Final = 6
_MEMORY_LIMIT: Final = 4  # its place in an entry
_TABLE: Final = 32
_NOTE_AT: Final = (_TABLE + ENTRIES * _WORDS_PER_ENTRY) * 8
# UTF-8 bytes of a progress message.
NOTE_BYTES: Final = 256
JOURNAL_AT: Final = -(-(_NOTE_AT + NOTE_BYTES) // 4096) * 4096
# An outcome without a result takes some 50 bytes.
JOURNAL_BYTES: Final = 256 * 1024
SIZE: Final = JOURNAL_AT + JOURNAL_BYTES
_MAGIC: Final = 0x6171642D70616733  # "aqd-pag3"


class StopReason(IntEnum):
    """Why a running job is being ended by aqd."""

    NONE = 0
    TIMEOUT = 1
    DRAIN = 2
    FENCE = 3
    CANCEL = 4
    MEMORY = 5


class Flag(IntFlag):
    """What else the master must know of an entry."""

    NONE = 0
    DETACH = 1  # what the job leaves running stays


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the frame table. ``limit_ns``: longest run time, ``memory_kb``: most memory; 0 = none."""

    number: int
    job_id: int
    token: int
    attempt: int
    limit_ns: int
    memory_kb: int = 0
    flags: int = 0


# What the dispatcher writes of an entry: (job id, token, attempt, limit_ns, memory_kb, flags).
Row = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Note:
    """A handler's own word on its progress. ``percent`` 0 to 100, None if it gave none; ``sequence`` grows
    with every note of the worker."""

    sequence: int
    number: int
    percent: float | None
    message: str


def _row(number: int) -> int:
    return _TABLE + number % ENTRIES * _WORDS_PER_ENTRY


class Page:
    """A mapped page. Each property notes its one writer. ``memory``: all of it, for :mod:`aqd.journal`."""

    __slots__ = ("_words", "memory")

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, SIZE)
        self._words = memoryview(self.memory).cast("Q")
        if self._words[0] != _MAGIC:
            self.close()
            raise ValueError("not a page of this version of aqd")

    @staticmethod
    def create(slot: int, incarnation: int, generation: int) -> int:
        """A new page as a memfd; the caller closes the descriptor. Writer: master."""
        fd = os.memfd_create(f"aqd-page-{slot}.{incarnation}", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        with mmap.mmap(fd, SIZE) as mapped, memoryview(mapped).cast("Q") as words:
            words[0], words[1], words[2], words[3] = _MAGIC, incarnation, slot, generation
        return fd

    def close(self) -> None:
        self._words.release()
        self.memory.close()

    @property
    def incarnation(self) -> int:
        return self._words[1]

    @property
    def slot(self) -> int:
        return self._words[2]

    @property
    def generation(self) -> int:
        return self._words[3]

    # --- master's block

    def request_stop(self, number: int, reason: StopReason) -> None:
        """Ask for the end of entry ``number`` only. Writer: master (then it signals)."""
        self._words[5] = reason
        self._words[4] = number + 1

    @property
    def stop_entry(self) -> int:
        """The entry to be ended, -1 if none."""
        return self._words[4] - 1

    @property
    def stop_reason(self) -> StopReason:
        return StopReason(self._words[5])

    def recall(self) -> tuple[int, int]:
        """Take back all that is unstarted; only while the worker is stopped or dead. Writer: master.

        Returns the numbers (from, to) that came back *now*: what an earlier recall took is not in it.
        """
        first, last = self.unstarted()
        self._words[6], self._words[7] = self.started, last
        return first, last

    def skipped(self, number: int) -> bool:
        """Has entry ``number`` been recalled?"""
        return self._words[6] <= number < self._words[7]

    # --- dispatcher's block

    @property
    def written(self) -> int:
        return self._words[8]

    @property
    def lease_until_ns(self) -> int:
        """Until then the lease of everything held is certain; 0 while nothing was sent."""
        return self._words[9]

    @lease_until_ns.setter
    def lease_until_ns(self, value: int) -> None:
        self._words[9] = value

    @property
    def journal_tail(self) -> int:
        """What stands in the journal before this place is recorded. Writer: dispatcher."""
        return self._words[10]

    @journal_tail.setter
    def journal_tail(self, value: int) -> None:
        self._words[10] = value

    @property
    def listening(self) -> bool:
        """Whether the dispatcher may be asleep, so that it has to be told of what is new in the journal. Were that
        read too early, it looks for itself some milliseconds later. Writer: dispatcher."""
        return self._words[11] != 0

    @listening.setter
    def listening(self, value: bool) -> None:
        self._words[11] = value

    @property
    def idle(self) -> bool:
        """Whether the worker has ended all that it was given."""
        return self._words[18] >= self._words[8]

    def write(self, rows: Sequence[Row]) -> int:
        """Append rows; returns the first one's number.

        Writer: dispatcher, which keeps ``written`` less than :data:`ENTRIES` above what is recorded.
        """
        words = self._words
        first = words[8]
        place = first % ENTRIES
        before_end = ENTRIES - place
        for at, part in ((place, rows[:before_end]), (0, rows[before_end:])):
            if part:
                flat = array("Q", chain.from_iterable(part))
                start = _TABLE + at * _WORDS_PER_ENTRY
                words[start : start + len(flat)] = flat
        words[8] = first + len(rows)
        return first

    def entry(self, number: int) -> Entry:
        at = _row(number)
        words = self._words
        return Entry(number, *words[at : at + _WORDS_PER_ENTRY])

    # --- worker's block

    @property
    def pid(self) -> int:
        return self._words[16]

    @pid.setter
    def pid(self, value: int) -> None:
        self._words[16] = value

    @property
    def started(self) -> int:
        return self._words[17]

    @property
    def finished(self) -> int:
        return self._words[18]

    @property
    def started_at_ns(self) -> int:
        return self._words[19]

    @property
    def turns(self) -> int:
        """Grows with every turn of the worker's loop, idle ones too (every few seconds)."""
        return self._words[20]

    @property
    def cpu_at_us(self) -> int:
        """Processor time, helpers' included, that the process had used when the present entry began."""
        return self._words[22]

    @property
    def output_at(self) -> int:
        """Length of the worker's output when the present entry began."""
        return self._words[23]

    @property
    def memory_at_kb(self) -> int:
        """What the worker and its helpers held when the present entry began; only for an entry with a memory limit."""
        return self._words[28]

    @property
    def journal_head(self) -> int:
        """What stands in the journal before this place is whole. Writer: worker."""
        return self._words[29]

    @journal_head.setter
    def journal_head(self, value: int) -> None:
        self._words[29] = value

    def begin(
        self, number: int, now_ns: int, cpu_us: int = 0, output_at: int = 0, helpers: Iterable[int] = ()
    ) -> None:
        """The worker begins entry ``number``; ``helpers``: those that are not its own. The order matters: see the
        module's header."""
        words = self._words
        words[28] = memory.held_kb(helpers) if words[_row(number) + _MEMORY_LIMIT] else 0  # 40 µs
        words[22] = cpu_us
        words[23] = output_at
        words[19] = now_ns
        words[17] = number + 1

    def end(self, number: int) -> None:
        """The outcome of entry ``number`` stands in the journal, or has been sent."""
        words = self._words
        words[18] = number + 1
        words[20] += 1

    def handler_returned(self, number: int) -> None:
        """Entry ``number`` is over but for the sending of its outcome. Writer: worker."""
        self._words[21] = number + 1

    def returned(self, number: int) -> bool:
        return self._words[21] > number

    def write_note(self, number: int, percent: float | None, message: str) -> None:
        """What the handler of entry ``number`` says of its progress; a longer message is cut. Writer: worker."""
        text = message.encode("utf-8", "backslashreplace")[:NOTE_BYTES]
        words = self._words
        words[24] = sequence = words[24] | 1  # a writing that an exception has interrupted left it odd
        words[25] = number + 1
        words[26] = 0 if percent is None else 1 + round(max(0.0, min(percent, 100.0)) * 100)
        words[27] = len(text)
        self.memory[_NOTE_AT : _NOTE_AT + len(text)] = text
        words[24] = sequence + 1

    def note(self) -> Note | None:
        """The last note; None if there is none, or it is being written."""
        words = self._words
        sequence = words[24]
        if not sequence or sequence % 2:
            return None
        number, percent, length = words[25] - 1, words[26], min(words[27], NOTE_BYTES)
        text = self.memory[_NOTE_AT : _NOTE_AT + length]
        if words[24] != sequence:
            return None
        message = text.decode("utf-8", "ignore")  # a character may have been cut in two
        return Note(sequence, number, (percent - 1) / 100 if percent else None, message)

    def turn(self) -> None:
        self._words[20] += 1

    # --- readers

    def current(self) -> int:
        """The number of the entry the worker is on, -1 if none."""
        started = self._words[17]
        return started - 1 if started > self._words[18] else -1

    def unstarted(self) -> tuple[int, int]:
        """The numbers (from, to) that were written, neither begun nor recalled."""
        first = max(self._words[17], self._words[7])
        return first, max(first, self._words[8])

    def entries(self, first: int, last: int) -> Iterator[Entry]:
        for number in range(first, last):
            yield self.entry(number)
