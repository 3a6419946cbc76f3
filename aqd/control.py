"""The control socket: how ``aqd status``, ``reload`` and ``stop`` speak to the running master.

A unix stream socket in the runtime directory, one line of JSON each way; its permissions are the guard.
:class:`Server` is the master's side: it never blocks, bounds the number and the size of what it holds, and
lets an answer come later (a reload answers when the new generation serves). :func:`request` is the client's.
"""

import contextlib
import json
import os
import selectors
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aqd.errors import AqdError, Exit, NotRunning

MAX_LINE = 64 * 1024
MAX_CLIENTS = 32


class DaemonRefused(AqdError):
    """The daemon answered that it will not: the message is its reason."""

    exit_code = Exit.REFUSED


def request(socket_path: Path, command: str, timeout_s: float, **args: Any) -> dict[str, Any]:
    """Send one command, return the answer.

    Raises :class:`NotRunning` when nobody answers on the socket or within ``timeout_s`` seconds,
    :class:`DaemonRefused` when the answer is a refusal.
    """
    line = json.dumps({"command": command, **args}).encode() + b"\n"
    received = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            _connect(client, str(socket_path), timeout_s)
            client.sendall(line)
            while not received.endswith(b"\n"):
                data = client.recv(MAX_LINE)
                if not data:
                    raise NotRunning(f"the daemon at {socket_path} closed the connection without an answer")
                received += data
        except TimeoutError:
            raise NotRunning(
                f"the daemon at {socket_path} did not answer {command!r} within {timeout_s:g} s"
            ) from None
        except PermissionError:
            raise NotRunning(
                f"no permission to speak to the daemon at {socket_path} (try as its user)"
            ) from None
        except OSError as error:
            raise NotRunning(f"no daemon answers at {socket_path}: {error.strerror or error}") from None
    answer: dict[str, Any] = json.loads(received)
    if not answer.get("ok", True):
        raise DaemonRefused(str(answer.get("error", "the daemon refused")))
    return answer


def _connect(client: socket.socket, path: str, timeout_s: float) -> None:
    """A unix socket whose queue is full refuses at once (EAGAIN, connect(2)): that is "busy", not "absent"."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return client.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(0.01)


class Client:
    """One connection on the master's side."""

    def __init__(self, server: "Server", connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._received = bytearray()
        self._answer = b""
        self.asked = False  # a whole command has come

    def fileno(self) -> int:
        return self._connection.fileno()

    def answer(self, body: dict[str, Any]) -> None:
        """Send the answer and close when it is out; harmless if the client has gone."""
        if self._connection.fileno() < 0:
            return
        self._answer = json.dumps(body, default=str).encode() + b"\n"
        self._server.selector.modify(self._connection, selectors.EVENT_WRITE, self.on_event)
        self.on_event()

    def on_event(self) -> None:
        """Readable or writable."""
        try:
            if self._answer:
                sent = self._connection.send(self._answer, socket.MSG_NOSIGNAL)
                self._answer = self._answer[sent:]
                if not self._answer:
                    self.close()
                return
            data = self._connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._received += data
        if not data or len(self._received) > MAX_LINE:
            self.close()
        elif self._received.endswith(b"\n"):
            self._dispatch(bytes(self._received))
            self._received.clear()

    def _dispatch(self, line: bytes) -> None:
        self.asked = True
        try:
            body = json.loads(line)
            command = body.pop("command")
            if not isinstance(command, str):
                raise TypeError("command is not a string")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.answer({"ok": False, "error": 'expected one line of JSON like {"command": "status"}'})
            return
        self._server.handle(self, command, body)

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self._server.selector.unregister(self._connection)
            self._connection.close()
        self._server.clients.pop(self, None)


class Server:
    """The master's side. Events are carried by ``selector``, whose data is a callable without arguments."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        handle: Callable[[Client, str, dict[str, Any]], None],
    ) -> None:
        """Bind at ``path``, replacing a stale socket: the pid file's lock says that no other daemon lives."""
        self.path, self.selector, self.handle = path, selector, handle
        self.clients: dict[Client, None] = {}  # in the order of their coming
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        os.chmod(path, 0o660)
        self._listener.listen(128)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self.clients) >= MAX_CLIENTS:
            # The one that has been silent for longest goes: whoever hangs must not lock `aqd status` out.
            silent = next((known for known in self.clients if not known.asked), None)
            if silent is None:
                connection.close()
                return
            silent.close()
        connection.setblocking(False)
        client = Client(self, connection)
        self.clients[client] = None
        self.selector.register(connection, selectors.EVENT_READ, client.on_event)

    def close(self) -> None:
        """Close all and remove the socket file."""
        for client in list(self.clients):
            client.close()
        self.selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class Waiting:
    """Clients whose answer depends on a generation that is not there yet."""

    def __init__(self) -> None:
        self._clients: list[tuple[Client, int]] = []

    def add(self, client: Client, generation: int) -> None:
        """It waits for ``generation`` or a later one. Whoever asks while a candidate is loading waits for the
        next one: this one may have read the files before they were changed."""
        self._clients.append((client, generation))

    def answer(self, body: dict[str, Any], last: int, first: int = 0) -> None:
        """Answer those that wait for one of the generations from ``first`` to ``last``."""
        waiting, self._clients = self._clients, []
        for client, generation in waiting:
            if first <= generation <= last:
                client.answer(body)
            else:
                self._clients.append((client, generation))
