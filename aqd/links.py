"""What the dispatcher holds of one worker: its channel as a journal, its page, and the entries in between.

Run by the dispatcher's main thread. A :class:`Link` knows which entries the worker holds, which outcomes have
been read and which are recorded, and keeps the page's "lease certain until". It survives the worker (until
everything of it is settled) and can be rebuilt by a successor from page and journal alone.

Promises: an outcome is consumed from the channel only when it, and all before it, are recorded; never more
than :data:`OUTSTANDING_MAX` entries are unrecorded, so the page's ring is never overrun and the worker can
always send (278 small messages fit into a socket).
"""

import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from aqd import channel, messages
from aqd.channel import ChannelClosed, Journal
from aqd.claims import ClaimedJob
from aqd.page import ENTRIES, Page

OUTSTANDING_MAX = 200
# From this size on (in bytes) a payload travels as a memfd. A frame's bound (aqd/assign.py) counts a larger
# one as this many bytes, so that the descriptors of a frame are few, too.
INLINE_PAYLOAD = 32 * 1024
# What an entry takes beside its payload, type and queue.
_ENTRY_BYTES = 80


@dataclass(slots=True)
class Held:
    """A job of ours: claimed, or found on a predecessor's page (then ``job`` is unknown).

    ``certain_ns``: until then its lease certainly holds. ``lost``: somebody else owns it by now.
    ``expected_ns``: how long it will probably take.
    """

    id: int
    token: int
    attempt: int
    certain_ns: int
    job: ClaimedJob | None = None
    limit_ns: int = 0
    max_attempts: int = 0
    expected_ns: int = 0
    payload_bytes: int = 0
    lost: bool = False

    @property
    def frame_bytes(self) -> int:
        """What it takes of a frame."""
        assert self.job is not None
        names = len(self.job.type) + len(self.job.queue)
        return min(self.payload_bytes, INLINE_PAYLOAD) + names + _ENTRY_BYTES


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
    held: dict[int, Held] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)  # number -> expected_ns, no outcome read yet
    load_ns: int = 0
    last_outcome_ns: int = 0
    retiring: bool = False
    recalling: bool = False
    exited: messages.Exited | None = None
    settling: bool = False
    journal: Journal = field(init=False)
    notes: deque[Note] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.journal = Journal(self.channel)

    @staticmethod
    def open(message: messages.Attach, channel_fd: int, page_fd: int) -> "Link":
        page = Page(page_fd)
        os.close(page_fd)
        return Link(message.slot, message.incarnation, message.generation, channel.from_fd(channel_fd), page)

    def close(self) -> None:
        self.channel.close()
        self.page.close()

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
        rows = [(job.id, job.token, job.attempt, job.limit_ns) for job in jobs]
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
                )
            )
        try:
            channel.send(self.channel, messages.encode(messages.Frame(entries)), fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- reading

    def outcomes(self, result_limit: int) -> Iterator[messages.Up | messages.Done | messages.Broken]:
        """All messages that have not been looked at yet, results from memfds included.

        Raises :class:`ChannelClosed` after the last one of a dead worker.
        """
        while True:
            found = self.journal.peek()
            if found is None:
                return
            data, fds = found
            message = messages.decode_from_worker(data)
            if isinstance(message, messages.Done) and message.result is None:
                message.result = channel.from_memfd(fds.pop(0), result_limit).decode()
            for fd in fds:
                os.close(fd)
            if isinstance(message, messages.Up):
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

    # --- leases

    def renewed(self, kept: set[int], asked: dict[int, int], certain_ns: int) -> list[int]:
        """Note the answer to a renewal; returns the numbers of entries whose lease is lost."""
        lost = []
        for number, held in self.held.items():
            if asked.get(held.id) == held.token:
                if held.id in kept:
                    held.certain_ns = certain_ns
                else:
                    held.lost = True
                    lost.append(number)
        # A lost one does not end the others: it is fenced by its number.
        certain = [held.certain_ns for held in self.held.values() if not held.lost]
        if certain:
            self.page.lease_until_ns = min(certain)
        return lost

    # --- succession

    def adopt(self) -> bool:
        """Rebuild from the page what a predecessor left; whether something unstarted must be recalled.

        To be called before :meth:`outcomes`: what is finished by now either still lies in the journal, and
        turns up there (then :meth:`adopt_entry`), or was recorded and consumed.
        """
        page = self.page
        certain = page.lease_until_ns
        while True:  # the worker goes on meanwhile: no job that it begins may be missed
            started = page.started
            finished, current = page.finished, page.current()
            first, last = page.unstarted()
            if page.started == started:
                break
        for number in sorted({current, *range(first, last)}):
            if number >= finished:
                self.adopt_entry(number, certain)
        return last > first

    def adopt_entry(self, number: int, certain_ns: int) -> None:
        entry = self.page.entry(number)
        self.held[number] = Held(entry.job_id, entry.token, entry.attempt, certain_ns)
        self.unfinished[number] = 0


__all__ = ["INLINE_PAYLOAD", "ChannelClosed", "Held", "Link", "Note"]
