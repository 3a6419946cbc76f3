"""Channels between the processes of a node: SOCK_SEQPACKET pairs with typed frames and descriptors.

Used by all processes. A message is whole or absent, below :data:`MAX_MESSAGE` bytes; what is larger
travels as a sealed memfd beside it. Messages are msgspec MessagePack structs (:mod:`aqd.messages`),
never pickle. An empty message is never sent: it would look like the end of the channel.

After ECONNRESET one must **read on**: a process that died with an unread message makes one receive fail
and only then delivers what it had sent before. :func:`receive` does.
"""

import array
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

# 212,000 bytes passed and 220,000 failed with EMSGSIZE under the default wmem_max; half of it is safe.
MAX_MESSAGE: Final = 128 * 1024
_SO_PEEK_OFF: Final = 42
# Plain numbers: to combine members of an enumeration takes longer than the system call.
_PEEK: Final = int(socket.MSG_PEEK)
_NOSIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_MAX_FDS: Final = 8
_ANCILLARY: Final = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_buffer = bytearray(MAX_MESSAGE)  # one per process; messages are copied out before the next receive


class ChannelClosed(Exception):
    """The other side has closed the channel, and all it sent was received."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of channels (close-on-exec)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def from_fd(fd: int) -> socket.socket:
    """The channel that was inherited or received as descriptor ``fd``."""
    os.set_inheritable(fd, False)
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)


def send(channel: socket.socket, message: bytes, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message; :class:`BlockingIOError` if a non-blocking channel is full (or with MSG_DONTWAIT),
    :class:`ChannelClosed` if nobody reads any more."""
    if not message or len(message) >= MAX_MESSAGE:
        raise ValueError(f"a message has 1 to {MAX_MESSAGE - 1} bytes, not {len(message)}")
    try:
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            channel.sendmsg([message], rights, flags | _NOSIGNAL)
        else:
            channel.send(message, flags | _NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        raise ChannelClosed from None


def receive(channel: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """The next message and its descriptors (close-on-exec, the caller's to close).

    :class:`BlockingIOError` if there is none on a non-blocking channel (or with MSG_DONTWAIT),
    :class:`ChannelClosed` at the end.
    """
    # recvmsg, not socket.recv_fds: that ignores its flags, and descriptors came inheritable.
    while True:
        try:
            size, ancillary, got, _ = channel.recvmsg_into([_buffer], _ANCILLARY, flags | _CLOEXEC)
            break
        except ConnectionResetError:
            continue
    if not ancillary and not got & _CUT:
        if size == 0:
            raise ChannelClosed
        return bytes(memoryview(_buffer)[:size]), []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if got & _CUT:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"a message of more than {MAX_MESSAGE} bytes or {_MAX_FDS} descriptors was cut off")
    if size == 0:
        raise ChannelClosed
    return bytes(memoryview(_buffer)[:size]), list(fds)


class Peeked:
    """The reading side of a worker's channel: peek, record, only then consume. For outcomes that are too large for
    the journal (:mod:`aqd.journal`).

    SO_PEEK_OFF (socket(7)) keeps the place up to which was peeked *in the socket*, so it is set back to 0
    by a successor, which then finds every unconsumed message again, even if the worker is dead.
    Data that stays in the socket would make a level-triggered poll spin: register it edge-triggered.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        channel.setblocking(False)
        channel.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)

    def peek(self) -> tuple[bytes, list[int]] | None:
        """The next message not yet peeked at; None if there is none now; :class:`ChannelClosed`."""
        try:
            return receive(self.channel, _PEEK)
        except BlockingIOError:
            return None

    def skip(self, message: bytes) -> bool | None:
        """Forget the next message if it is this one, which carries no descriptors; whether it was, None if there is
        none now. Only while nothing that was peeked at waits to be consumed. (2 µs less than :meth:`peek` and :meth:`consume`.)"""
        try:
            size = self.channel.recv_into(_buffer, 0, _PEEK)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return False
        if size == len(message) and _buffer.startswith(message):
            self.channel.recv_into(_buffer)
            return True
        self.channel.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        return False

    def consume(self) -> None:
        """Forget the oldest message. Only for what was peeked at."""
        try:
            _, fds = receive(self.channel)
        except ValueError:
            return  # one that was too large: gone now
        for fd in fds:
            os.close(fd)


def to_memfd(data: bytes) -> int:
    """``data`` as a sealed memfd, for what is too large for a message; the caller closes it."""
    fd = os.memfd_create("aqd-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_memfd(fd: int, limit: int) -> bytes:
    """The content of a memfd, which is closed; :class:`ValueError` beyond ``limit`` bytes."""
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise ValueError(f"{size} bytes are more than the limit of {limit}")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


class Peer:
    """A non-blocking channel to another process of the node, with what could not be sent yet.

    Nothing is lost while the other side is slow or stopped: messages wait here, in order, and go out with
    the next :meth:`flush` (call it at every turn of the loop: writability is not reliable, POLLOUT vanishes
    at a quarter of the buffer although sends still succeed). Descriptors sent along stay the caller's; what
    waits holds duplicates.
    """

    def __init__(self, channel: socket.socket, encode: Callable[[Any], bytes]) -> None:
        channel.setblocking(False)
        self.channel = channel
        self._encode = encode
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self.channel.fileno()

    @property
    def waiting(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._waiting)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send or keep for later; :class:`ChannelClosed` if the other side is gone."""
        data = self._encode(message)
        if self.flush():
            try:
                send(self.channel, data, fds)
                return
            except BlockingIOError:
                pass
        self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> bool:
        """Send what waits, as far as it goes; whether all of it went."""
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                send(self.channel, data, fds)
            except BlockingIOError:
                return False
            self._drop_first()
        return True

    def _drop_first(self) -> None:
        _, fds = self._waiting.popleft()
        for fd in fds:
            os.close(fd)

    def received(self) -> Iterator[tuple[bytes, list[int]]]:
        """All messages that are there now; raises :class:`ChannelClosed` after the last one."""
        while True:
            try:
                yield receive(self.channel)
            except BlockingIOError:
                return

    def close(self) -> None:
        while self._waiting:
            self._drop_first()
        self.channel.close()
