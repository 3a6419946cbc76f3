"""What the dispatcher holds of one worker: its page, its journal, its channel, and the entries in between.

Run by the dispatcher's main thread. A :class:`Link` knows which entries the worker holds, which outcomes have
been read and which are recorded, and keeps the page's "lease certain until". It survives the worker (until
everything of it is settled) and can be rebuilt by a successor from page, journal and channel alone.

Promises: an outcome is consumed from the journal, or from the channel, only when it, and all before it there, are
recorded; never more than :data:`OUTSTANDING_MAX` entries are unrecorded, so the page's ring is never overrun, and
the channel of a worker whose outcomes are large seldom has no room for them (:data:`SENT_MAX`).

Everything is done for a frame or a batch at a time: what stands in a loop here is paid for by every job.
"""

import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from aqd import channel, messages
from aqd.channel import ChannelClosed, Peeked
from aqd.claims import ClaimedJob
from aqd.journal import Reader
from aqd.page import ENTRIES, Page
from aqd.store import Lease, Progress

# Entries of one worker that are not recorded: what it does while a batch is being written.
OUTSTANDING_MAX = 1000
# Outcomes in its channel that are not recorded: a socket takes 167 messages of 200 bytes, 26 of 4 kB.
SENT_MAX = 128
# Of a result, whatever the configuration says now: it may have been lowered since the worker was forked.
RESULT_MAX = 80 << 20
OUTPUT_MAX = 1 << 20
# From this size on (in bytes) a payload travels as a memfd. A frame's bound (aqd/assign.py) counts a larger
# one as this many bytes, so that the descriptors of a frame are few, too.
INLINE_PAYLOAD = 32 * 1024
# A job that runs longer than this, and twice its expected time, has the others in its frame taken back.
STUCK_NS = 20_000_000
# What an entry takes beside its payload, type and queue.
ENTRY_BYTES = 80


Pair = tuple[int, int]  # (job id, lease token)


class Held(msgspec.Struct, eq=False):
    """A job of ours: claimed, or found on a predecessor's page (then ``job`` is unknown).

    ``certain_ns``: until then its lease certainly holds. ``lost``: somebody else owns it by now. ``cancelled``:
    it is to be ended, and given back if it was not begun.
    ``expected_ns``: how long it will probably take. ``frame_bytes``: what it takes of a frame.
    """

    id: int
    token: int
    attempt: int
    certain_ns: int
    job: ClaimedJob | None = None
    limit_ns: int = 0
    max_attempts: int = 0
    memory_kb: int = 0
    flags: int = 0
    payload_bytes: int = 0
    extra_bytes: int = 0  # tags and meta
    frame_bytes: int = 0
    expected_ns: int = 0
    lost: bool = False
    cancelled: bool = False

    def named(self, slot: int | None = None) -> dict[str, Any]:
        """What the log says of it."""
        type_ = None if self.job is None else self.job.type
        return {"job_id": str(self.id), "type": type_, "attempt": self.attempt, "slot": slot}


Outcome = messages.Done | messages.Broken


@dataclass(slots=True)
class Note:
    """One message in the channel; ``number`` is -1 for one that is not an outcome."""

    number: int
    recorded: bool


@dataclass(slots=True)
class Link:
    """One worker incarnation."""

    slot: int
    incarnation: int
    generation: int
    channel: socket.socket
    page: Page
    output_fd: int
    held: dict[int, Held] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)  # number -> expected_ns, no outcome read yet
    load_ns: int = 0
    retiring: bool = False
    recalling: bool = False
    adopted: bool = False
    closed: bool = False  # its channel: nothing more can come
    exited: messages.Exited | None = None
    settling: bool = False
    ordered: bool = False  # the master has been asked for a successor
    exhausted: bool = False  # it is given nothing more, its successor is on its way
    exhausted_at: float = 0.0
    overtime: bool = False  # its successor does not come: it serves on
    noted: int = 0  # the sequence of the last note of progress that was stored
    journal: Reader = field(init=False)
    # Outcomes in the journal that are not recorded, oldest first: number -> where it begins.
    journaled: dict[int, int] = field(default_factory=dict)
    peeked: Peeked = field(init=False)
    notes: deque[Note] = field(default_factory=deque)  # the same of the channel

    def __post_init__(self) -> None:
        self.journal = Reader(self.page)
        self.peeked = Peeked(self.channel)

    @staticmethod
    def open(message: messages.Attach, channel_fd: int, page_fd: int, output_fd: int) -> "Link":
        page = Page(page_fd)
        os.close(page_fd)
        place = (message.slot, message.incarnation, message.generation)
        return Link(*place, channel.from_fd(channel_fd), page, output_fd)

    @property
    def queue(self) -> str:
        """Of the job that it is on or comes to next; "" if that is not known (a predecessor's)."""
        job = self._next_job()
        return job.queue if job is not None else ""

    @property
    def type(self) -> str:
        """The same job's."""
        job = self._next_job()
        return job.type if job is not None else ""

    def _next_job(self) -> ClaimedJob | None:
        number = next(iter(self.unfinished), None)
        held = self.held.get(number) if number is not None else None
        return held.job if held is not None else None

    def close(self) -> None:
        self.channel.close()
        self.page.close()
        os.close(self.output_fd)

    # --- giving

    def room(self) -> int:
        """How many entries it may still be given: the ring's oldest entry that matters is never overwritten
        (recalled ones have used up numbers, too)."""
        if not self.held:
            return OUTSTANDING_MAX
        if len(self.notes) >= SENT_MAX:
            return 0
        oldest = min(self.held) if self.adopted else next(iter(self.held))
        return min(OUTSTANDING_MAX - len(self.held), ENTRIES - (self.page.written - oldest))

    def give(self, jobs: list[Held]) -> None:
        """Write the jobs into the page, then send them as one frame.

        Raises :class:`ChannelClosed` or :class:`BlockingIOError`; the entries then stand in the page and
        :attr:`held` all the same, and come back by a recall or the worker's settling.
        """
        first = self.page.write(
            [(job.id, job.token, job.attempt, job.limit_ns, job.memory_kb, job.flags) for job in jobs]
        )
        until = min([job.certain_ns for job in jobs])
        self.page.lease_until_ns = min(until, self.page.lease_until_ns) if self.held else until
        entries, fds = [], []
        held_by, unfinished, entry = self.held, self.unfinished, messages.JobEntry
        for number, held in enumerate(jobs, first):
            held_by[number] = held
            unfinished[number] = held.expected_ns
            job = held.job
            assert job is not None
            id, _, type, queue, _, text, attempt, _, _, created, _, _, _, tags, meta, _ = job
            payload: str | None = text
            if held.payload_bytes > INLINE_PAYLOAD:
                fds.append(channel.to_memfd(text.encode()))
                payload = None
            entries.append(
                entry(number, id, type, payload, attempt, held.max_attempts, queue, created, tags, meta)
            )
        self.load_ns += sum([held.expected_ns for held in jobs])
        try:
            channel.send(self.channel, messages.encode(messages.Frame(entries)), fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- reading

    @property
    def has_news(self) -> bool:
        """Whether the journal has something that was not read and can be."""
        return self.page.journal_head != self.journal.place and not self.journal.broken

    @property
    def waits(self) -> bool:
        """Whether the journal has something, and the worker nothing to do."""
        return self.has_news and self.page.idle

    def read_journal(self) -> list[Outcome | None]:
        """The outcomes in the journal that have not been looked at yet; None at the end if what follows cannot be
        read (a handler wrote into it)."""
        found: list[Outcome | None] = []
        decode, journaled, unfinished = messages.decode_outcome, self.journaled, self.unfinished
        finished_ns = 0
        for begin, data in self.journal.read():
            try:
                outcome = decode(data)
            except msgspec.MsgspecError:
                self.journal.broken = True
                break
            number = outcome.number
            journaled[number] = begin
            finished_ns += unfinished.pop(number, 0)
            found.append(outcome)
        self.load_ns -= finished_ns
        if self.journal.broken:
            found.append(None)
        return found

    def read_channel(self) -> list[Outcome | None]:
        """The same of its channel, results from memfds included; None for each message that cannot be read, which
        is passed over. Sets :attr:`closed` after the last one of a dead worker."""
        found: list[Outcome | None] = []
        while not self.closed:
            if not self.notes and (skipped := self.peeked.skip(messages.BELL)) is not False:
                if skipped:
                    continue
                break
            try:
                data = self.peeked.peek()
                if data is None:
                    break
                message = _read(*data)
            except ChannelClosed:
                self.closed = True
                break
            except (ValueError, msgspec.MsgspecError):
                message = None
            if isinstance(message, Outcome):
                self.notes.append(Note(message.number, False))
                self.load_ns -= self.unfinished.pop(message.number, 0)
                found.append(message)
            else:
                self.notes.append(Note(-1, True))
                self._consume()
                if message is None:
                    found.append(None)
        return found

    def unrecorded(self, number: int) -> bool:
        """Whether its outcome was read, and is being recorded."""
        return number in self.journaled or any(note.number == number for note in self.notes)

    def recorded(self, numbers: Iterable[int]) -> None:
        """The outcomes (or the ends) of these entries are settled."""
        held, journaled, unfinished = self.held, self.journaled, self.unfinished
        for number in numbers:
            held.pop(number, None)
            if number in unfinished:
                self.load_ns -= unfinished.pop(number)
            if journaled.pop(number, None) is None:
                for note in self.notes:
                    if note.number == number:
                        note.recorded = True
                        break
        self.journal.consume(next(iter(journaled.values()), self.journal.place))
        self._consume()

    def _consume(self) -> None:
        while self.notes and self.notes[0].recorded:
            self.peeked.consume()
            self.notes.popleft()

    # --- taking back

    def take_back(self, first: int, last: int) -> list[Held]:
        """Entries that will not be started any more."""
        taken = []
        for number in range(first, last):
            self.load_ns -= self.unfinished.pop(number, 0)
            if (held := self.held.pop(number, None)) is not None:
                taken.append(held)
        return taken

    def unstarted(self) -> int:
        first, last = self.page.unstarted()
        return last - first

    def stuck(self, now_ns: int) -> bool:
        """Whether the worker is on a job that takes longer than others should wait behind it."""
        current = self.page.current()
        if current < 0:
            return False
        held = self.held.get(current)
        patience_ns = max(STUCK_NS, 2 * held.expected_ns) if held is not None else STUCK_NS
        return now_ns >= self.page.started_at_ns + patience_ns

    def ends_in_ns(self, now_ns: int) -> int | None:
        """When the only job that it has will probably be done, seen from now; None if it has more, or has not begun."""
        if len(self.unfinished) != 1:
            return None
        number, expected_ns = next(iter(self.unfinished.items()))
        if self.page.current() != number:
            return None
        return self.page.started_at_ns + expected_ns - now_ns

    # --- leases

    def renewed(self, asked: set[Pair], kept: Mapping[Pair, Lease], certain_ns: int) -> list[int]:
        """Note the answer to a renewal (see :class:`aqd.recorder.Renewed`); returns the numbers of entries
        whose lease is lost."""
        lost = []
        for number, held in self.held.items():
            pair = (held.id, held.token)
            if pair in asked:
                lease = kept.get(pair)
                if lease is None:
                    held.lost = True
                    lost.append(number)
                elif lease.extended:
                    held.certain_ns = certain_ns
        # A lost one does not end the others: it is fenced by its number.
        certain = [held.certain_ns for held in self.held.values() if not held.lost]
        if certain:
            self.page.lease_until_ns = min(certain)
        return lost

    def cancelled(self, kept: Mapping[Pair, Lease]) -> list[int]:
        """The numbers of entries that turn out to be cancelled by the answer to a renewal, each once."""
        found = []
        for number, held in self.held.items():
            lease = kept.get((held.id, held.token))
            if lease is not None and lease.cancelled and not held.cancelled:
                held.cancelled = True
                found.append(number)
        return found

    def new_note(self) -> tuple[tuple[int, int], Progress] | None:
        """What the job that runs says of its progress, unless that was stored already; with its key,
        (incarnation, sequence)."""
        note = self.page.note()
        if note is None or note.sequence <= self.noted or (held := self.held.get(note.number)) is None:
            return None
        progress = Progress(held.id, held.token, note.percent, note.message)
        return (self.incarnation, note.sequence), progress

    # --- succession

    def adopt(self) -> bool:
        """Rebuild from the page what a predecessor left; whether something unstarted must be recalled.

        To be called before anything is read: what is finished by now either still lies in journal or channel, and
        turns up there (then :meth:`adopt_entry`), or was recorded and consumed.
        """
        page = self.page
        self.adopted = True
        certain = page.lease_until_ns
        while True:  # the worker goes on meanwhile: no job that it begins may be missed
            started = page.started
            finished, current = page.finished, page.current()
            first, last = page.unstarted()
            if page.started == started:
                break
        for number in sorted({current, *range(first, last)}):
            if number >= finished and not page.skipped(number):
                self.adopt_entry(number, certain)
        return last > first

    def consumed_before(self, finished: int) -> list[int]:
        """Adopted entries below ``finished``, read from the page *before* journal and channel were read to their ends,
        whose outcome is in neither: the predecessor had recorded and consumed it."""
        return [number for number in self.held if number < finished and not self.unrecorded(number)]

    def adopt_entry(self, number: int, certain_ns: int) -> Held:
        entry = self.page.entry(number)
        self.held[number] = held = Held(entry.job_id, entry.token, entry.attempt, certain_ns)
        self.unfinished[number] = 0
        return held


def _read(data: bytes, fds: list[int]) -> messages.FromWorker:
    message = messages.decode_from_worker(data)
    try:
        if isinstance(message, messages.Done) and message.result is None:
            message.result = _from_next(fds, RESULT_MAX).decode()
        if isinstance(message, Outcome) and message.output is None:
            message.output = _from_next(fds, OUTPUT_MAX)
    finally:
        for fd in fds:
            os.close(fd)
    return message


def _from_next(fds: list[int], limit: int) -> bytes:
    if not fds:
        raise ValueError("a descriptor is missing")
    return channel.from_memfd(fds.pop(0), limit)


__all__ = ["INLINE_PAYLOAD", "ChannelClosed", "Held", "Link", "Note", "Outcome"]
