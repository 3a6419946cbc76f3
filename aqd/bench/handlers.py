"""The plugin of ``aqd bench``: handlers whose work is known.

Loaded by the measured daemon, which is given a copy of this file. ``[plugins.settings.bench]`` has ``cost_ms``, what one
job of ``bench_sleep`` or ``bench_cpu`` takes, in milliseconds.
"""

import os
import resource
import signal
import time
from typing import Any

import aqd

NS = 1_000_000_000


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    cost_s = float(handlers.settings("bench").get("cost_ms", 0)) / 1000

    def sleep(_payload: Any) -> dict[str, bool]:
        time.sleep(cost_s)
        return {"ok": True}

    def cpu(_payload: Any) -> dict[str, bool]:
        """Processor time, not time: beside other work it takes longer and costs the same."""
        end = time.thread_time() + cost_s
        while time.thread_time() < end:
            pass
        return {"ok": True}

    handlers.add("bench_noop", noop)
    handlers.add("bench_sleep", sleep)
    handlers.add("bench_cpu", cpu)
    handlers.add("bench_stamp", stamp)
    handlers.add("bench_hold", hold, timeout_s=86_400)
    handlers.add("bench_segfault", segfault, max_crashes=1)


def noop(_payload: Any) -> dict[str, bool]:
    """Nothing; its result is stored like any other."""
    return {"ok": True}


def stamp(_payload: Any) -> dict[str, int]:
    """When it began: nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""
    return {"at": time.clock_gettime_ns(time.CLOCK_MONOTONIC)}


def hold(payload: dict[str, Any]) -> None:
    """Keeps its slot for ``s`` seconds."""
    time.sleep(payload["s"])


def segfault(_payload: Any) -> None:
    """The worker dies as by a bad pointer; no core dump, whose writing would be what is measured."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
