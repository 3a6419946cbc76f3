"""What the dispatcher holds of one worker: its channel as a journal, its page, and the entries in between.

Run by the dispatcher's main thread. A :class:`Link` knows which entries the worker holds, which outcomes have
been read and which are recorded, and keeps the page's "lease certain until". It survives the worker (until
everything of it is settled) and can be rebuilt by a successor from page and journal alone.

Promises: an outcome is consumed from the channel only when it, and all before it, are recorded; never more
than :data:`OUTSTANDING_MAX` entries are unrecorded, so the page's ring is never overrun and a worker seldom
waits for room (a socket takes 167 messages of 200 bytes).
"""

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from aqd import channel, messages
from aqd.channel import ChannelClosed, Journal
from aqd.claims import ClaimedJob
from aqd.page import ENTRIES, Page
from aqd.store import Lease, Progress

OUTSTANDING_MAX = 128
# Of a result, whatever the configuration says now: it may have been lowered since the worker was forked.
RESULT_MAX = 80 << 20
OUTPUT_MAX = 1 << 20
# From this size on (in bytes) a payload travels as a memfd. A frame's bound (aqd/assign.py) counts a larger
# one as this many bytes, so that the descriptors of a frame are few, too.
INLINE_PAYLOAD = 32 * 1024
# A job that runs longer than this, and twice its expected time, has the others in its frame taken back.
STUCK_NS = 20_000_000
# What an entry takes beside its payload, type and queue.
_ENTRY_BYTES = 80


Pair = tuple[int, int]  # (job id, lease token)


@dataclass(slots=True)
class Held:
    """A job of ours: claimed, or found on a predecessor's page (then ``job`` is unknown).

    ``certain_ns``: until then its lease certainly holds. ``lost``: somebody else owns it by now. ``cancelled``:
    it is to be ended, and given back if it was not begun.
    ``expected_ns``: how long it will probably take.
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
    expected_ns: int = 0
    payload_bytes: int = 0
    extra_bytes: int = 0  # tags and meta
    lost: bool = False
    cancelled: bool = False

    @property
    def frame_bytes(self) -> int:
        """What it takes of a frame."""
        assert self.job is not None
        names = len(self.job.type) + len(self.job.queue)
        return min(self.payload_bytes, INLINE_PAYLOAD) + self.extra_bytes + names + _ENTRY_BYTES


@dataclass(slots=True)
class Note:
    """One message in the journal; ``number`` is -1 for one that is not an outcome."""

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
    exited: messages.Exited | None = None
    settling: bool = False
    ordered: bool = False  # the master has been asked for a successor
    exhausted: bool = False  # it is given nothing more, its successor is on its way
    exhausted_at: float = 0.0
    overtime: bool = False  # its successor does not come: it serves on
    noted: int = 0  # the sequence of the last note of progress that was stored
    journal: Journal = field(init=False)
    notes: deque[Note] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.journal = Journal(self.channel)

    @staticmethod
    def open(message: messages.Attach, channel_fd: int, page_fd: int, output_fd: int) -> "Link":
        page = Page(page_fd)
        os.close(page_fd)
        place = (message.slot, message.incarnation, message.generation)
        return Link(*place, channel.from_fd(channel_fd), page, output_fd)

    @property
    def queue(self) -> str:
        """Of the job that it is on or comes to next; "" if that is not known (a predecessor's)."""
        number = next(iter(self.unfinished), None)
        held = self.held.get(number) if number is not None else None
        return held.job.queue if held is not None and held.job is not None else ""

    def close(self) -> None:
        self.channel.close()
        self.page.close()
        os.close(self.output_fd)

    # --- giving

    def room(self) -> int:
        """How many entries it may still be given: the ring's oldest entry that matters is never overwritten
        (recalled ones have used up numbers, too)."""
        ring = ENTRIES - (self.page.written - min(self.held)) if self.held else ENTRIES
        return min(OUTSTANDING_MAX - len(self.notes) - len(self.unfinished), ring)

    def give(self, jobs: list[Held]) -> None:
        """Write the jobs into the page, then send them as one frame.

        Raises :class:`ChannelClosed` or :class:`BlockingIOError`; the entries then stand in the page and
        :attr:`held` all the same, and come back by a recall or the worker's settling.
        """
        rows = [(job.id, job.token, job.attempt, job.limit_ns, job.memory_kb, job.flags) for job in jobs]
        first = self.page.write(rows)
        until = min(job.certain_ns for job in jobs)
        self.page.lease_until_ns = min(until, self.page.lease_until_ns) if self.held else until
        entries, fds = [], []
        for number, held in enumerate(jobs, first):
            self.held[number] = held
            self.unfinished[number] = held.expected_ns
            self.load_ns += held.expected_ns
            job = held.job
            assert job is not None
            payload: str | None = job.payload
            if held.payload_bytes > INLINE_PAYLOAD:
                fds.append(channel.to_memfd(job.payload.encode()))
                payload = None
            entries.append(
                messages.JobEntry(
                    number,
                    job.id,
                    job.type,
                    payload,
                    job.attempt,
                    held.max_attempts,
                    job.queue,
                    job.created_at_us,
                    job.tags,
                    job.meta,
                )
            )
        try:
            channel.send(self.channel, messages.encode(messages.Frame(entries)), fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- reading

    def outcomes(self) -> Iterator[messages.Up | messages.Done | messages.Broken | None]:
        """All messages that have not been looked at yet, results from memfds included; None for one that
        cannot be read (a handler wrote into the channel), which is passed over.

        Raises :class:`ChannelClosed` after the last one of a dead worker.
        """
        while True:
            try:
                found = self.journal.peek()
                if found is None:
                    return
                message = _read(*found)
            except (ValueError, msgspec.MsgspecError):
                message = None
            if message is None or isinstance(message, messages.Up):
                self.notes.append(Note(-1, True))
                self._consume()
            else:
                self.notes.append(Note(message.number, False))
                self.load_ns -= self.unfinished.pop(message.number, 0)
            yield message

    def recorded(self, number: int) -> None:
        """The outcome (or the end) of this entry is settled."""
        self.held.pop(number, None)
        self.load_ns -= self.unfinished.pop(number, 0)
        for note in self.notes:
            if note.number == number:
                note.recorded = True
                break
        self._consume()

    def _consume(self) -> None:
        while self.notes and self.notes[0].recorded:
            self.journal.consume()
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

        To be called before :meth:`outcomes`: what is finished by now either still lies in the journal, and
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
        """Adopted entries below ``finished``, read from the page *before* the journal was read to its end,
        whose outcome is not in it: the predecessor had recorded and consumed it."""
        noted = {note.number for note in self.notes}
        return [number for number in self.held if number < finished and number not in noted]

    def adopt_entry(self, number: int, certain_ns: int) -> None:
        entry = self.page.entry(number)
        self.held[number] = Held(entry.job_id, entry.token, entry.attempt, certain_ns)
        self.unfinished[number] = 0


def _read(data: bytes, fds: list[int]) -> messages.Up | messages.Done | messages.Broken:
    message = messages.decode_from_worker(data)
    try:
        if isinstance(message, messages.Done) and message.result is None:
            message.result = _from_next(fds, RESULT_MAX).decode()
        if not isinstance(message, messages.Up) and message.output is None:
            message.output = _from_next(fds, OUTPUT_MAX)
    finally:
        for fd in fds:
            os.close(fd)
    return message


def _from_next(fds: list[int], limit: int) -> bytes:
    if not fds:
        raise ValueError("a descriptor is missing")
    return channel.from_memfd(fds.pop(0), limit)


__all__ = ["INLINE_PAYLOAD", "ChannelClosed", "Held", "Link", "Note"]
