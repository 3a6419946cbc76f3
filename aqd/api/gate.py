"""The gate: gunicorn's threaded worker, with clients waited for in the event loop only.

Runs in the API's workers, as gunicorn's ``worker_class``. gunicorn's own threaded worker gives a
thread to a connection with the first byte of a request and then reads without a deadline: as many slow
clients as there are threads stop every answer, ``/health`` included (sixteen, with our defaults). Here a
thread gets a request when the whole of it has arrived (bodies are small: ``max_body``).

Promises: a connection that has not sent its request in time is answered 408 and closed, one whose body is
too large 413; ``/health`` has threads of its own, so it answers whatever the others wait for; waiting connections are bounded in number and in bytes, in both directions, and the one that
has waited longest makes room; an answer that is not taken in time is dropped; errors that gunicorn finds
before Falcon are problem documents too.

Rests on these names of gunicorn's ``gthread``, which a test checks: ``enqueue_req``, ``murder_pending``,
``finish_request``, ``poller``, ``nr_conns``, ``TConn.init``, ``parser.unreader.{take_buffered,unread}``,
``handle_request``, ``get_thread_pool``, ``handle``, ``method_queue.defer``.
"""

import contextlib
import functools
import html
import re
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker  # type: ignore[import-untyped]

from aqd.api import pool, problems
from aqd.api.framing import Frame
from aqd.log import get_logger

MAX_WAITING = 512
MAX_WAITING_BYTES = 64 << 20
MAX_UNSENT_BYTES = 64 << 20
HEAD_TIMEOUT_S = 10.0
# After a refusal, how long we listen to the rest so that the client gets to read the answer (RFC 9112, 9.6).
LINGER_S = 2.0
# How long a worker that stops waits for the first byte of connections that it has accepted.
STOP_LINGER_S = 1.0
# More than one, because a look at the database may last, too (HEALTH_TIMEOUT_S); as many connections are set aside.
HEALTH_THREADS = pool.SPARE
_READ = 1 << 18
# As gunicorn will read it; whatever is written in another way waits with the others.
_HEALTH = re.compile(rb"(?:GET|HEAD) (?:https?://[^/ ]*)?(?:/v1)?/health/?(?:\?[^ \r\n]*)? HTTP/1", re.ASCII)
_REASONS = {408: "Request Timeout", 413: "Content Too Large"}

log = get_logger("gate")


class Waiting:
    """A connection whose request has not arrived in full; or, ``refused``, whose rest is of no interest."""

    __slots__ = ("conn", "deadline", "frame", "refused")

    def __init__(self, conn: TConn, frame: Frame, deadline: float) -> None:
        self.conn = conn
        self.frame = frame
        self.deadline = deadline
        self.refused = False


class Unsent:
    """The rest of an answer. ``finish`` is what gunicorn does with the connection afterwards."""

    __slots__ = ("conn", "data", "deadline", "finish")

    def __init__(self, conn: TConn, data: bytearray, deadline: float, finish: Callable[[], None]) -> None:
        self.conn = conn
        self.data = data
        self.deadline = deadline
        self.finish = finish


class GateWorker(ThreadWorker):  # type: ignore[misc]
    """``max_body`` and ``request_timeout_s`` are set by the server before the fork."""

    max_body = 1 << 20
    request_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[socket.socket, Waiting] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._stopping = False
        self._unsent: dict[socket.socket, Unsent] = {}
        self._unsent_bytes = 0

    def get_thread_pool(self) -> ThreadPoolExecutor:
        """Called by gunicorn once, after the fork."""
        self._health = ThreadPoolExecutor(HEALTH_THREADS, thread_name_prefix="aqd-api-health")
        threads: ThreadPoolExecutor = super().get_thread_pool()
        return threads

    # --- requests, in the event loop --------------------------------------------------------------

    def enqueue_req(self, conn: TConn) -> None:
        """gunicorn's word for "this connection may have a request": a thread, if it has a whole one."""
        try:
            conn.init()
            conn.sock.setblocking(False)
            self.poller.register(conn.sock, selectors.EVENT_READ, self._on_readable)
        except OSError:
            self._close(conn)
            return
        deadline = time.monotonic() + min(HEAD_TIMEOUT_S, self.request_timeout_s)
        waiting = Waiting(conn, Frame(self.max_body), deadline)
        self._waiting[conn.sock] = waiting
        leftover = conn.parser.unreader.take_buffered()  # of a pipelining client
        if leftover:
            self._feed(waiting, leftover)
        if conn.sock in self._waiting:
            self._on_readable(conn.sock)  # what has already come saves a turn of the loop
        self._make_room()

    def _on_readable(self, sock: socket.socket) -> None:
        waiting = self._waiting.get(sock)
        if waiting is None:
            return
        try:
            data = sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(waiting)
            return
        if waiting.refused:
            if not data:
                self._drop(waiting)
        elif data:
            self._feed(waiting, data)
        elif waiting.frame.buffer:
            self._hand_over(waiting)  # gunicorn says what is missing
        else:
            self._drop(waiting)

    def _feed(self, waiting: Waiting, data: bytes) -> None:
        frame = waiting.frame
        had_head, expected = frame.has_head, frame.expects_continue
        self._waiting_bytes += len(data)
        whole = frame.feed(data)
        if frame.too_large:
            self._refuse(
                waiting, 413, f"the body may have at most {self.max_body} bytes", bound=self.max_body
            )
        elif whole:
            self._hand_over(waiting)
        elif frame.has_head and not had_head:
            waiting.deadline = time.monotonic() + self.request_timeout_s
        if not whole and frame.expects_continue and not expected:
            with contextlib.suppress(OSError):
                waiting.conn.sock.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def murder_pending(self) -> None:
        """Called by gunicorn in each turn of its loop, at least once a second."""
        super().murder_pending()
        now = time.monotonic()
        if not self.alive and not self._stopping:
            # Accepted in the last moment, its request is on the way: closed at once it would be lost.
            self._stopping = True
            self._drain()
            for waiting in self._waiting.values():
                if not waiting.frame.buffer:
                    waiting.deadline = min(waiting.deadline, now + STOP_LINGER_S)
        for waiting in list(self._waiting.values()):
            if waiting.deadline > now:
                continue
            idle = not waiting.frame.buffer
            if idle or waiting.refused:
                self._drop(waiting)
            else:
                self._refuse(waiting, 408, "the request did not arrive in time")
        for unsent in [each for each in self._unsent.values() if each.deadline <= now]:
            log.info("client too slow", peer=str(unsent.conn.client), unsent=len(unsent.data))
            self._give_up(unsent)

    def _drain(self) -> None:
        """Requests that wait for something need not hold up the end."""
        drain = getattr(getattr(self, "wsgi", None), "drain", None)
        if drain is not None:
            drain()

    def _make_room(self) -> None:
        limit = min(MAX_WAITING, max(1, self.worker_connections // 2))
        while len(self._waiting) > limit or self._waiting_bytes > MAX_WAITING_BYTES:
            self._drop(next(iter(self._waiting.values())))

    def _hand_over(self, waiting: Waiting) -> None:
        self._forget(waiting)
        conn = waiting.conn
        conn.parser.unreader.unread(bytes(waiting.frame.buffer))
        conn.data_ready = True
        if _HEALTH.match(waiting.frame.buffer):
            # What gunicorn's enqueue_req does, with another pool.
            done = self._health.submit(self.handle, conn)
            done.add_done_callback(lambda future: self.method_queue.defer(self.finish_request, conn, future))
        else:
            super().enqueue_req(conn)

    def _refuse(self, waiting: Waiting, status: int, detail: str, **members: Any) -> None:
        """Answer here, and listen for a moment without keeping what comes."""
        problem = problems.Problem(status, detail, **members)
        sock = waiting.conn.sock
        try:
            sock.send(_raw_answer(status, _REASONS[status], problem.body()))
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(waiting)
            return
        waiting.refused = True
        waiting.deadline = time.monotonic() + LINGER_S
        self._waiting_bytes -= len(waiting.frame.buffer)
        waiting.frame.buffer.clear()

    def _forget(self, waiting: Waiting) -> None:
        sock = waiting.conn.sock
        del self._waiting[sock]
        self._waiting_bytes -= len(waiting.frame.buffer)
        with contextlib.suppress(OSError, KeyError, ValueError):
            self.poller.unregister(sock)

    def _drop(self, waiting: Waiting) -> None:
        self._forget(waiting)
        self._close(waiting.conn)

    def _close(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()

    # --- answers, in the event loop ---------------------------------------------------------------

    def finish_request(self, conn: TConn, fs: Any) -> None:
        """gunicorn's word for "the thread is done with this connection": first the rest of the answer."""
        data: bytearray = getattr(conn, "aqd_unsent", bytearray())
        if not data:
            super().finish_request(conn, fs)
            return
        conn.aqd_unsent = bytearray()
        finish = functools.partial(super().finish_request, conn, fs)
        unsent = Unsent(conn, data, time.monotonic() + self.request_timeout_s, finish)
        try:
            conn.sock.setblocking(False)
            self.poller.register(conn.sock, selectors.EVENT_WRITE, self._on_writable)
        except OSError:
            self._close(conn)
            return
        self._unsent[conn.sock] = unsent
        self._unsent_bytes += len(data)
        while self._unsent_bytes > MAX_UNSENT_BYTES:
            self._give_up(next(iter(self._unsent.values())))

    def _on_writable(self, sock: socket.socket) -> None:
        unsent = self._unsent.get(sock)
        if unsent is None:
            return
        try:
            sent = sock.send(unsent.data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._give_up(unsent)
            return
        del unsent.data[:sent]
        self._unsent_bytes -= sent
        if not unsent.data:
            self._forget_unsent(unsent)
            unsent.finish()

    def _give_up(self, unsent: Unsent) -> None:
        self._forget_unsent(unsent)
        self._close(unsent.conn)

    def _forget_unsent(self, unsent: Unsent) -> None:
        del self._unsent[unsent.conn.sock]
        self._unsent_bytes -= len(unsent.data)
        with contextlib.suppress(OSError, KeyError, ValueError):
            self.poller.unregister(unsent.conn.sock)

    # --- in a thread ------------------------------------------------------------------------------

    def handle_request(self, req: Any, conn: TConn) -> Any:
        """As gunicorn's, but sending does not wait."""
        sock = conn.sock
        sock.settimeout(self.request_timeout_s)  # nothing should wait any more; if it does, not for ever
        conn.aqd_unsent = bytearray()
        conn.sock = _PatientSocket(sock, conn.aqd_unsent)
        try:
            return super().handle_request(req, conn)
        except TimeoutError:
            log.info("client too slow", peer=str(conn.client))
            raise StopIteration from None  # gunicorn closes the connection
        finally:
            conn.sock = sock

    def handle_error(self, req: Any, client: Any, addr: Any, exc: Exception) -> None:
        """As gunicorn's, which knows the status of each error, but as a problem document."""
        super().handle_error(req, _ProblemSocket(client), addr, exc)


class _PatientSocket:
    """Sends what the kernel takes at once and keeps the rest in ``unsent``."""

    def __init__(self, sock: socket.socket, unsent: bytearray) -> None:
        self._sock = sock
        self._unsent = unsent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        if not self._unsent:
            # Not MSG_DONTWAIT: with a timeout set, Python itself waits before the call.
            limit = self._sock.gettimeout()
            self._sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while view:
                    view = view[self._sock.send(view) :]
            self._sock.settimeout(limit)
        self._unsent += view


class _ProblemSocket:
    """Takes gunicorn's own HTML error answer and sends the same as a problem document instead."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        head, _, page = bytes(data).partition(b"\r\n\r\n")
        words = head.split(b"\r\n")[0].decode("latin-1").split(" ", 2)
        status = int(words[1]) if len(words) == 3 and words[1].isdigit() else 500
        reason = words[2] if len(words) == 3 else "Error"
        problem = problems.Problem(status, _detail(page, reason))
        self._sock.send(_raw_answer(status, reason, problem.body()))  # gunicorn made it non-blocking


def _detail(page: bytes, reason: str) -> str:
    """The sentence in gunicorn's page, in ASCII and short."""
    found = re.search(rb"</h1>\s*(.*?)\s*</body>", page, re.DOTALL)
    text = html.unescape(found[1].decode("latin-1")) if found else ""
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text[:200] or reason


def _raw_answer(status: int, reason: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: {problems.MEDIA_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body
