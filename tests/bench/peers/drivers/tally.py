"""What a handler of the comparison does in place of work: it is counted, or it says when it began. Standard library.

Imported by the drivers inside the peers' own environments, and by the plugin that stands for them in aqd. The twin
for Node is ``tally.mjs``.

Drain: every thread of every process has a file of its own below ``directory``, 16 bytes of shared memory: how often
the handler ran and the moment of its first run. An increment there costs a fraction of a microsecond and no system
call, so that what is measured is the queue; and it is written before the handler returns, so that no job can be
recorded without having been counted.

Latency: the handler writes the moment of its start into a FIFO, from which the producer reads it. Moments are
CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share (Node's ``process.hrtime`` is the same clock).
"""

import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable

RECORD = struct.Struct("=QQ")
MOMENT = struct.Struct("=Q")
ANSWER_S = 20.0


class Tally:
    """``ran()`` is the body of a handler."""

    def __init__(self, directory: str, fifo: str | None = None) -> None:
        self._directory = directory
        self._fifo = fifo
        self._local = threading.local()
        self.ran: Callable[[], None] = self._tell if fifo else self._count

    def _count(self) -> None:
        local = self._local
        if getattr(local, "pid", None) != os.getpid():  # the first run, or the first after a fork
            self._open()
        local.words[0] += 1

    def _open(self) -> None:
        moment = time.monotonic_ns()
        pid = os.getpid()
        path = os.path.join(self._directory, f"{pid}-{threading.get_ident()}")
        # Under another name until it is whole: the harness reads these files all the time.
        descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, RECORD.pack(0, moment))
        os.rename(path + ".new", path)
        self._local.words = memoryview(mmap.mmap(descriptor, RECORD.size)).cast("Q")
        self._local.pid = pid
        os.close(descriptor)

    def _tell(self) -> None:
        moment = time.monotonic_ns()
        assert self._fifo is not None
        descriptor = os.open(self._fifo, os.O_RDWR)  # waits for no reader, should there be none any more
        os.write(descriptor, MOMENT.pack(moment))
        os.close(descriptor)


class Producer:
    """Enqueues one job at a time and collects how long each took until its handler began."""

    def __init__(self, fifo: str, pause_s: list[float]) -> None:
        # For reading and writing: a FIFO without a writer would answer "end of file" between two handlers.
        self._descriptor = os.open(fifo, os.O_RDWR)
        self._pause_s = pause_s

    def pause(self) -> float:
        """How long to leave the system idle: random, so that no poll of it is met in step."""
        return random.uniform(*self._pause_s)

    def wait(self, began: int) -> int:
        """Nanoseconds from ``began`` to the start of the handler."""
        import select

        if not select.select([self._descriptor], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"a job was not started within {ANSWER_S:g} s")
        return int(MOMENT.unpack(os.read(self._descriptor, MOMENT.size))[0]) - began

    def measure(self, enqueue: Callable[[], object], jobs: int, warm_up: int, limit_s: float) -> list[int]:
        """``jobs`` latencies in nanoseconds, or as many as ``limit_s`` allows; ``warm_up`` more come before."""
        found: list[int] = []
        end = time.monotonic() + limit_s
        while len(found) < jobs + warm_up and time.monotonic() < end:
            time.sleep(self.pause())
            began = time.monotonic_ns()
            enqueue()
            found.append(self.wait(began))
        return found[warm_up:]
