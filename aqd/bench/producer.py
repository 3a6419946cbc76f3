"""A sender: submits jobs at the moments of a fixed schedule, whether or not earlier ones are done, or as fast as it goes.

``Senders`` (in ``aqd bench``) starts several, each a process of its own (``python -m aqd.bench.producer``) with one
connection, so that they share nothing with what measures them. The payload of a stamped job holds the moment at which it was
*to be sent*: a sender that falls behind (the database was slow) does not forgive that by sending less, which is what
"coordinated omission" is about; all the waiting is in the latencies.

A sender gets its orders as JSON in the environment (the URL may hold a password), connects, writes a line ``ready``, waits
until the file ``go`` holds the moment at which all begin, and writes one line of JSON at the end. Moments are nanoseconds
of CLOCK_MONOTONIC.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from aqd import client, statements
from aqd.bench.database import QUEUE, connect
from aqd.bench.node import child_environment
from aqd.binaries import spawn
from aqd.errors import WorldError

_VARIABLE: Final = "AQD_BENCH_ORDERS"
_READY: Final = "ready\n"
_LEAD_S: Final = 0.05
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.002


class Orders(msgspec.Struct):
    """Send first ``offset_ns`` after the moment in the file ``go``, then every ``every_ns`` (0: as fast as it goes), until
    ``for_ns`` after that moment. ``how``: a name in :data:`WAYS`; ``batch`` jobs at a time where it can; ``url`` is the
    database's, ``port`` that of the HTTP service on this machine; ``payload`` is JSON."""

    url: str
    go: str
    offset_ns: int
    every_ns: int
    for_ns: int
    how: str = "stamp"
    batch: int = 1
    payload: str = "{}"
    port: int = 0


class Sent(msgspec.Struct):
    """What a sender did: how many, when the last call had returned, how long calls took (ns), and by how much it was
    behind its schedule at worst (ns)."""

    jobs: int
    last_ns: int
    calls_ns: list[int]
    behind_ns: int


def send(orders: Orders) -> Sent:
    """Follows the schedule."""
    sent = Sent(0, 0, [], 0)
    with contextlib.ExitStack() as stack:
        submit = WAYS[orders.how](orders, stack)
        print(_READY, end="", flush=True)
        start_ns = _go(Path(orders.go))
        due, end_ns = start_ns + orders.offset_ns, start_ns + orders.for_ns
        while due < end_ns:
            now = time.monotonic_ns()
            if now < due:
                time.sleep((due - now) / 1e9)
                now = time.monotonic_ns()
            if not orders.every_ns:
                due = now
                if now >= end_ns:
                    break
            sent.behind_ns = max(sent.behind_ns, now - due)
            submit(due)
            sent.last_ns = time.monotonic_ns()
            sent.calls_ns.append(sent.last_ns - now)
            sent.jobs += orders.batch
            due += orders.every_ns
    return sent


# --- ways to submit ---------------------------------------------------------------------------------

Submit: TypeAlias = Callable[[int], object]
Way: TypeAlias = Callable[[Orders, contextlib.ExitStack], Submit]


def _stamp(orders: Orders, stack: contextlib.ExitStack) -> Submit:
    """One job by the client, whose payload says when it was to be sent."""
    conn = stack.enter_context(contextlib.closing(connect(orders.url)))
    return lambda due: client.enqueue(conn, "bench_stamp", {"at": due}, queue=QUEUE)


def _client(orders: Orders, stack: contextlib.ExitStack) -> Submit:
    """One job by ``client.enqueue``: one statement, which is its own transaction."""
    conn = stack.enter_context(contextlib.closing(connect(orders.url)))
    payload = json.loads(orders.payload)
    return lambda _due: client.enqueue(conn, "bench_noop", payload, queue=QUEUE)


def _batch(orders: Orders, stack: contextlib.ExitStack) -> Submit:
    """Many by ``client.enqueue_many``, in one transaction."""
    conn = stack.enter_context(contextlib.closing(connect(orders.url)))
    jobs = [{"type": "bench_noop", "payload": json.loads(orders.payload), "queue": QUEUE}] * orders.batch

    def submit(_due: int) -> None:
        with conn.transaction():
            client.enqueue_many(conn, jobs)

    return submit


def _copy(orders: Orders, stack: contextlib.ExitStack) -> Submit:
    """Many by COPY into ``aqd.jobs``: the quickest, and without what ``aqd.enqueue`` checks; nobody is woken."""
    conn = stack.enter_context(contextlib.closing(connect(orders.url)))
    statement = statements.get("bench_copy").text

    def submit(_due: int) -> None:
        now = datetime.now(UTC)
        with conn.cursor() as cursor, cursor.copy(statement) as copy:
            for _ in range(orders.batch):
                copy.write_row(("bench_noop", orders.payload, QUEUE, now))

    return submit


def _http(orders: Orders, stack: contextlib.ExitStack) -> Submit:
    """One by ``POST /jobs`` over a connection that stays, or many by ``POST /jobs/batch``."""
    link = stack.enter_context(
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", orders.port, timeout=60))
    )
    job = {"type": "bench_noop", "payload": json.loads(orders.payload), "queue": QUEUE}
    path, document = ("/jobs", job) if orders.batch == 1 else ("/jobs/batch", {"jobs": [job] * orders.batch})
    body = json.dumps(document).encode()

    def submit(_due: int) -> None:
        link.request("POST", path, body, {"Content-Type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
        if answer.status not in (200, 201):
            sys.exit(f"POST {path}: {answer.status} {text[:500].decode(errors='replace')}")

    return submit


WAYS: Final[dict[str, Way]] = {
    "stamp": _stamp,
    "client": _client,
    "batch": _batch,
    "copy": _copy,
    "http": _http,
}


def _go(path: Path) -> int:
    """Waits for the moment to begin, and gives it."""
    deadline = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit("nobody has said when to begin")
        time.sleep(_LOOK_S)
    return int(path.read_text())


class Senders:
    """Several senders that share a rate. ``rate`` in jobs a second, None for as fast as it goes; ``more`` of their
    orders."""

    def __init__(
        self, url: str, directory: Path, number: int, rate: float | None, seconds: float, **more: Any
    ) -> None:
        self.seconds = seconds
        self.start_ns = 0
        self._directory = Path(tempfile.mkdtemp(prefix="senders", dir=directory))
        self._go = self._directory / "go"
        every_ns = round(number / rate * 1e9) if rate else 0
        self._orders = [
            # Evenly between one another, not all at the same moment.
            Orders(url, str(self._go), every_ns * place // number, every_ns, round(seconds * 1e9), **more)
            for place in range(number)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Connected, and about to begin; killed in the end if they have not ended."""
        try:
            for place, orders in enumerate(self._orders):
                with self._output(place).open("wb") as output:
                    environment = child_environment() | {_VARIABLE: json.dumps(msgspec.to_builtins(orders))}
                    self._processes.append(
                        spawn(
                            [sys.executable, "-m", "aqd.bench.producer"],
                            account=None,
                            environment=environment,
                            output=output,
                            death_signal=signal.SIGKILL,
                            directory=os.getcwd(),
                        )
                    )
            self._begin()
            yield
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _begin(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for place, process in enumerate(self._processes):
            while not self._output(place).read_text(errors="replace").startswith(_READY):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise WorldError(f"a sender has not started:\n{self._output(place).read_text()[-2000:]}")
                time.sleep(_LOOK_S)
        self.start_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        scratch = self._go.with_suffix(".new")
        scratch.write_text(str(self.start_ns))
        scratch.rename(self._go)

    def wait(self) -> Sent:
        """Until all have sent everything; their sum."""
        deadline = time.monotonic() + self.seconds + _PATIENCE_S
        total = Sent(0, 0, [], 0)
        for place, process in enumerate(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            text = self._output(place).read_text(errors="replace").removeprefix(_READY)
            try:
                found = msgspec.json.decode(text, type=Sent)
            except msgspec.DecodeError:
                raise WorldError(f"a sender has failed:\n{text[-2000:] or 'no answer'}") from None
            total.jobs += found.jobs
            total.last_ns = max(total.last_ns, found.last_ns)
            total.calls_ns += found.calls_ns
            total.behind_ns = max(total.behind_ns, found.behind_ns)
        return total

    def _output(self, place: int) -> Path:
        return self._directory / f"sender{place}"


if __name__ == "__main__":
    given = msgspec.json.decode(os.environ[_VARIABLE], type=Orders)
    print(msgspec.json.encode(send(given)).decode())
