"""The exporter: this node's metrics for Prometheus, on a port of their own (``daemon.metrics_port``).

A process of its own (``python -m aqd.exporter --fd N --parent PID``), a child of the master, started again when it
dies: whoever asks for metrics, however, does nothing to jobs. For each ``GET /metrics`` it asks the master on the
control socket, as ``aqd metrics`` does, so it answers while the database is away. At most :data:`CLIENTS_MAX` clients
at a time, none of them for longer than :data:`PATIENCE_S`, however it spends them; further ones are hung up on.

Answers 503 when the master does not answer. Ends on SIGTERM, and with the master.
"""

import argparse
import contextlib
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle

from aqd import config, control, log, metrics, process
from aqd.errors import AqdError, Exit

CLIENTS_MAX: Final = 16
PATIENCE_S: Final = 10.0
ANSWER_S: Final = 5.0

logger = log.get_logger("exporter")


class Server(ThreadingHTTPServer):
    """Serves on a socket that is bound already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, control_socket: Path) -> None:
        # Past HTTPServer.server_bind, which would ask a name server for our name.
        socketserver.TCPServer.__init__(self, listener.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.control_socket = control_socket
        self._places = threading.BoundedSemaphore(CLIENTS_MAX)
        self._until: dict[socket.socket, float] = {}  # when whose time is over
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            with self._lock:
                self._until[request] = time.monotonic() + PATIENCE_S
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before its number is another's
            self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second. A timeout of the socket would begin anew with each byte that comes."""
        now = time.monotonic()
        with self._lock:
            for request, until in self._until.items():
                if now >= until:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that went away is no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.exception("request fails")


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD of ``/metrics``."""

    server: Server
    timeout = PATIENCE_S
    server_version = "aqd"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"the metrics are at /metrics\n", "text/plain")
            return
        try:
            answer = control.request(self.server.control_socket, "metrics", ANSWER_S)
        except AqdError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain; charset=utf-8")
            return
        self._answer(HTTPStatus.OK, metrics.of_daemon(answer), metrics.MEDIA_TYPE)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, body: bytes, media: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No access log."""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="aqd.exporter")
    parser.add_argument("--fd", type=int, required=True, help="a bound socket")
    parser.add_argument("--parent", type=int, required=True, help="the process to die with")
    options = parser.parse_args(argv)
    # At once, without clearing up: there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(Exit.OK))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process.die_with_parent(options.parent, signal.SIGKILL)
    process.unblock_signals()
    setproctitle("aqd: exporter")
    cfg = config.load_leniently(os.environ.get("AQD_CONFIG") or None, os.environ)
    log.configure(cfg.log.level, cfg.log.format, process="exporter")
    server = Server(socket.socket(fileno=options.fd), config.control_socket(cfg))
    server.serve_forever()
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
