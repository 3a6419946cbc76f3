"""A real worker without a daemon, driven over its channel, page and journal: ``python -m tests.process.lone_worker``.

Reads from its arguments the code of the jobs of one frame, and how many such frames are to be sent. A job's result is
what its code leaves in ``result``. Writes a JSON array with the outcomes of the last frame: result, or error.
With ``AQD_TEST_BRIEF`` every job counts as brief and every frame as short, however slow a tracer makes them; with
``AQD_TEST_LIGHT`` as too short to have begun a process, too; with ``AQD_TEST_PAUSE_S`` there is such a pause between frames; ``AQD_TEST_SETTLE_MS`` is how often everything is looked at.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from aqd import channel, costs, journal, log, messages, process, worker
from aqd.config import Config
from aqd.hookspecs import HandlerInfo
from aqd.page import Page
from aqd.plugins import LoadedHandler, Registry


def run(payload: Any) -> Any:
    if payload is None:
        return None
    scope: dict[str, Any] = {"os": os, "sys": sys, "kept": kept}
    exec(compiled[payload], scope)
    return scope.get("result")


kept: list[Any] = []  # by one job for later ones
compiled: dict[str, Any] = {}


def main(codes: list[str | None], frames: int) -> list[Any]:
    # What a job imports or compiles would take longer than it takes itself.
    import ctypes  # noqa: F401
    import fcntl  # noqa: F401
    import resource  # noqa: F401
    import signal  # noqa: F401

    compiled.update((code, compile(code, "job", "exec")) for code in codes if code is not None)
    if "AQD_TEST_BRIEF" in os.environ:
        worker.BRIEF_NS = worker.ANNOUNCE_NS = 10**15
    if "AQD_TEST_LIGHT" in os.environ:
        worker.LIGHT_NS = costs.SAMPLE_NS = 10**15
    worker.SETTLE_MS = int(os.environ.get("AQD_TEST_SETTLE_MS", worker.SETTLE_MS))
    pause_s = float(os.environ.get("AQD_TEST_PAUSE_S", "0"))
    log.configure("info", "auto", process="loader")
    fd = Page.create(0, 1, 1)
    page = Page(fd)
    reader = journal.Reader(page)
    ours, theirs = channel.pair()
    output_fd = process.output_file("test")
    master = os.getpid()
    gc.freeze()
    pid = os.fork()
    if not pid:
        ours.close()
        registry = Registry()
        registry.handlers["run"] = LoadedHandler(HandlerInfo(type="run", plugin="p"), run)
        worker.Worker(registry, Config(), theirs, page, output_fd, [], master).run()
    theirs.close()
    page.lease_until_ns = process.boottime_ns() + 10**15
    page.listening = True
    channel.receive(ours)  # it is up
    outcomes: list[Any] = []
    for _ in range(frames):
        time.sleep(pause_s)
        first = page.write([(1, 1, 1, 0, 0, 0) for _ in codes])
        jobs = [
            messages.JobEntry(number, 1 + number, "run", json.dumps(code), 1, 1, "default", 0)
            for number, code in enumerate(codes, first)
        ]
        channel.send(ours, messages.encode(messages.Frame(jobs)))
        outcomes = []
        try:
            while len(outcomes) < len(codes):
                channel.receive(ours)
                outcomes += [messages.decode_outcome(data) for _, data in reader.read()]
                reader.consume(reader.place)
        except channel.ChannelClosed:
            outcomes += [messages.decode_outcome(data) for _, data in reader.read()]
            break
    ours.close()
    os.waitpid(pid, 0)
    return [
        outcome.error if isinstance(outcome, messages.Broken) else json.loads(outcome.result or "null")
        for outcome in outcomes
    ]


if __name__ == "__main__":
    json.dump(main(json.loads(sys.argv[1]), int(sys.argv[2])), sys.stdout)
