"""Has a whole HTTP/1.1 request arrived? Pure: bytes in, yes or "not yet" out.

Used by the gate (:mod:`aqd.api.gate`) to keep slow senders away from the worker threads. It judges
nothing but size: whatever it does not understand counts as whole, so that gunicorn's parser sees it and
refuses it with the proper answer.

Sources: RFC 9112 sections 2 (message format), 6 (body length), 7.1 (chunked coding).
"""

import re
from typing import Final

# More than gunicorn's own limits (etc/gunicorn.conf.py), so that it is gunicorn who refuses.
MAX_HEAD: Final = 64 << 10
# Chunks of one byte carry five more of framing; more than this is not worth waiting for.
MAX_FRAMING: Final = 1 << 20

_LENGTH = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r]*)", re.IGNORECASE)
_CODING = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect[ \t]*:[ \t]*100-continue[ \t]*\r", re.IGNORECASE)
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_MAX_SIZE_LINE = 4096


class Frame:
    """One request that is arriving. Feed it until it says that it is whole.

    ``max_body`` bounds the body: beyond it the request is ``too_large``, and nobody should read on.
    """

    __slots__ = (
        "_chunk_at",
        "_end",
        "_max_body",
        "_searched",
        "_size",
        "buffer",
        "expects_continue",
        "too_large",
    )

    def __init__(self, max_body: int) -> None:
        self.buffer = bytearray()
        self.expects_continue = False  # the client waits for "100 Continue" before it sends the body
        self.too_large = False
        self._max_body = max_body
        self._searched = 0
        self._end: int | None = None  # where the body ends, once the head is here and names a length
        self._chunk_at: int | None = None  # where the next chunk's size line begins
        self._size = 0  # of the chunks before that

    @property
    def has_head(self) -> bool:
        """Whether the whole head is here, so that what is missing is the body."""
        return self._end is not None or self._chunk_at is not None

    def feed(self, data: bytes) -> bool:
        """Add what arrived; True when a thread can take the request without waiting for the client."""
        self.buffer += data
        if not self.has_head and not self._find_head():
            return len(self.buffer) > MAX_HEAD
        if self._end is not None:
            return len(self.buffer) >= self._end
        if self._chunk_at is not None:
            return self._chunks_done()
        return True

    def _find_head(self) -> bool:
        at = self.buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        self._searched = len(self.buffer)
        if at < 0:
            return False
        head = bytes(self.buffer[: at + 2])
        body_at = at + 4
        if _CODING.search(head):
            self._chunk_at = body_at
        else:
            lengths = _LENGTH.findall(head)
            digits = lengths[0].strip() if len(lengths) == 1 else b"0"
            length = int(digits) if digits.isdigit() and len(digits) < 16 else 0
            self.too_large = length > self._max_body
            self._end = body_at if self.too_large else body_at + length
        self.expects_continue = self._end != body_at and bool(_EXPECT.search(head))
        return True

    def _chunks_done(self) -> bool:
        """Walk over the chunks that are here; True at the end, at nonsense, or when it is too much."""
        buffer = self.buffer
        assert self._chunk_at is not None
        while True:
            line = _SIZE_LINE.match(buffer, self._chunk_at, self._chunk_at + _MAX_SIZE_LINE)
            if line is None:
                rest = len(buffer) - self._chunk_at
                return b"\n" in buffer[self._chunk_at :] or rest >= _MAX_SIZE_LINE
            size = int(line[1], 16)
            if size == 0:
                return self._trailer_done(line.end())
            if self._size + size > self._max_body or self._chunk_at > MAX_HEAD + self._max_body + MAX_FRAMING:
                self.too_large = True
                return True
            following = line.end() + size + 2
            if following > len(buffer):
                return False
            self._size += size
            self._chunk_at = following

    def _trailer_done(self, at: int) -> bool:
        """A trailer section ends with an empty line; usually there is nothing but that line."""
        return (
            self.buffer.startswith(b"\r\n", at)
            or self.buffer.find(b"\r\n\r\n", at) >= 0
            or len(self.buffer) - at > MAX_HEAD
        )
