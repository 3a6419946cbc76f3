"""Slow and greedy clients wait in the event loop: sixteen of them must not stop ``/health``."""

import contextlib
import http.client
import inspect
import select
import socket
import time
from collections.abc import Iterator

import pytest
from gunicorn.http.unreader import Unreader
from gunicorn.workers import gthread
from hypothesis import given
from hypothesis import strategies as st

from aqd.api.framing import MAX_HEAD, Frame
from tests.fixtures import processes
from tests.fixtures.api import Api, read_answer, running_api
from tests.fixtures.postgres import Postgres
from tests.fixtures.processes import wait_until

HEAD = b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"type":"x"}'
WHOLE = HEAD + b"Content-Length: 12\r\n\r\n" + BODY
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n5;ext=1\r\n"
    + BODY[:5]
    + b"\r\n7\r\n"
    + BODY[5:]
    + b"\r\n0\r\n\r\n"
)


# --- framing, pure --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        WHOLE,
        WHOLE.replace(b"Content-Length: 12", b"CONTENT-LENGTH:12 "),
        CHUNKED,
        CHUNKED[:-2] + b"X-Trailer: 1\r\n\r\n",
    ],
)
@given(data=st.data())
def test_a_request_is_whole_with_its_last_byte_however_it_is_cut(
    request_: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(request_) - 1), max_size=6)))
    frame = Frame(1000)
    for begin, end in zip([0, *cuts], [*cuts, len(request_)], strict=True):
        assert frame.feed(request_[begin:end]) == (end == len(request_))
    assert bytes(frame.buffer) == request_


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_any_bytes_are_framed_without_an_error(pieces: list[bytes]) -> None:
    for head in (b"", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", HEAD + b"Content-Length: 5\r\n\r\n"):
        frame = Frame(1000)
        frame.feed(head)
        for piece in pieces:
            frame.feed(piece)


@pytest.mark.parametrize(
    ("request_", "whole", "too_large"),
    [
        (HEAD + b"Content-Length: 1001\r\n\r\n", True, True),
        (HEAD + b"Content-Length: 1000\r\n\r\n", False, False),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", True, False),
        (HEAD + b"Content-Length: x\r\n\r\n", True, False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n", True, True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n", False, False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + b"a" * 1000 + b"\r\n1\r\n", True, True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", True, False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, True, False),
        (b"a" * (MAX_HEAD + 1), True, False),
        (b"a" * MAX_HEAD, False, False),
    ],
)
def test_what_is_not_waited_for(request_: bytes, whole: bool, too_large: bool) -> None:
    frame = Frame(1000)
    assert frame.feed(request_) is whole
    assert frame.too_large is too_large


def test_gunicorn_still_has_what_the_gate_rests_on() -> None:
    for name in (
        "enqueue_req",
        "murder_pending",
        "handle_request",
        "handle_error",
        "finish_request",
        "accept",
        "handle",
        "get_thread_pool",
    ):
        assert hasattr(gthread.ThreadWorker, name)
    for caller in ("accept", "on_client_socket_readable", "on_pending_socket_readable", "finish_request"):
        assert "self.enqueue_req(" in inspect.getsource(getattr(gthread.ThreadWorker, caller))
    assert "self.tpool.submit(self.handle, conn)" in inspect.getsource(gthread.ThreadWorker.enqueue_req)
    assert "self.method_queue.defer(self.finish_request, conn, fut)" in inspect.getsource(
        gthread.ThreadWorker.enqueue_req
    )
    assert "self.get_thread_pool()" in inspect.getsource(gthread.ThreadWorker.init_process)
    assert "self.murder_pending()" in inspect.getsource(gthread.ThreadWorker.run)
    assert hasattr(Unreader, "take_buffered")
    assert hasattr(Unreader, "unread")


# --- the real thing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow_api(pg: Postgres) -> Iterator[Api]:
    """Two threads and little patience."""
    env = {
        "AQD_API_THREADS": "2",
        "AQD_API_REQUEST_TIMEOUT_S": "3",
        "AQD_JOBS_MAX_PAYLOAD_BYTES": str(16 << 20),
    }
    with running_api(pg, **env) as api:
        api.wait_workers()
        yield api


def health_is_quick(api: Api) -> None:
    began = time.monotonic()
    assert api.get("/health").status == 200
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "beginning",
    [b"", b"P", HEAD, WHOLE[:-1], HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", WHOLE + WHOLE[:-1]],
    ids=["silent", "one byte", "half a head", "half a body", "half a chunk", "pipelined half"],
)
def test_slow_senders_do_not_stop_health(narrow_api: Api, beginning: bytes) -> None:
    api = narrow_api
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(api.connect()) for _ in range(40)]
        for sock in socks:
            sock.sendall(beginning)
        health_is_quick(api)
        for sock in socks[:3]:  # and they are served when they come to an end
            sock.sendall(WHOLE[len(beginning) :] if WHOLE.startswith(beginning) else b"")
        if WHOLE.startswith(beginning):
            assert [read_answer(sock).status for sock in socks[:3]] == [201] * 3
        health_is_quick(api)


def test_slow_readers_do_not_stop_health(narrow_api: Api) -> None:
    api = narrow_api
    size = 6_000_000  # more than the kernel's buffers on both sides
    large = api.post("/jobs", b'{"type":"x","payload":"' + b"a" * size + b'"}').headers["location"]
    mark = len(api.log)
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(5):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect(("127.0.0.1", api.port))
            sock.sendall(f"GET {large} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            socks.append(sock)
        wait_until(lambda: all(_readable(sock) for sock in socks), 30)
        health_is_quick(api)
        # Who reads on gets all of it and may ask again, who does not is cut off after the time limit.
        answer = read_answer(socks[0])
        assert len(answer.json["payload"]) == size
        socks[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(socks[0]).status == 200
        wait_until(lambda: sum("client too slow" in line for line in api.log[mark:]) == 4, 30)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            read_answer(socks[1])


def _readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_who_is_too_slow_is_told(narrow_api: Api) -> None:
    api = narrow_api
    with api.connect() as silent, api.connect() as half:
        half.sendall(WHOLE[:-1])
        assert read_answer(half).problem(408)["type"] == "urn:aqd:request-timeout"
        assert silent.recv(1) == b""


def test_too_many_waiting_make_room(shared_api: Api) -> None:
    api = shared_api
    api.wait_workers()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(api.connect())
        first.sendall(b"P")
        for _ in range(420):  # more than half of worker_connections
            stack.enter_context(api.connect()).sendall(b"P")
        health_is_quick(api)
        assert first.recv(1) == b""


def test_pipelined_requests_are_all_answered(narrow_api: Api) -> None:
    with narrow_api.connect() as sock:
        sock.sendall(WHOLE * 3 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while data := sock.recv(65536):
            received += data
    assert received.count(b"HTTP/1.1 201") == 3
    assert received.count(b"HTTP/1.1 200") == 1


def test_stopping_ends_idle_connections_and_finishes_busy_ones(api: Api) -> None:
    with api.connect() as idle, api.connect() as busy:
        busy.sendall(WHOLE[:-1])
        assert api.get("/health").status == 200
        api.process.terminate()
        wait_until(lambda: "SIGTERM" in "".join(api.log) or "term" in "".join(api.log))
        busy.sendall(WHOLE[-1:])
        assert read_answer(busy).status == 201
        assert idle.recv(1) == b""
    assert api.stop() == 0


def test_workers_die_with_the_arbiter(api: Api) -> None:
    workers = api.wait_workers()
    with api.connect() as sock:
        sock.sendall(WHOLE[:-1])
        api.process.kill()
        api.process.wait()
        wait_until(lambda: not api.workers and not [pid for pid in workers if _alive(pid)], 2.0)


def _alive(pid: int) -> bool:
    found = processes.look(pid)
    return found is not None and found.state not in "ZX"
