"""Scenario ``start``: see :class:`Start`."""

import os
import socket
import statistics
import time
from typing import Any, ClassVar

from aqd.bench.bench import Bench
from aqd.bench.database import Database
from aqd.bench.node import READY_S, is_ready
from aqd.bench.results import Figure, Result
from aqd.errors import WorldError

ROUNDS = 5
SLOTS = (4, 16)


class Start:
    """How long a daemon takes to start, to reload and to stop.

    The schema is there. "ready" is from just before fork and exec of ``aqd run`` to its ``READY=1``, which systemd would
    wait for; "all slots" to the moment at which each has an idle worker. "reload served" is the time of ``aqd reload``, that
    is until the new generation takes jobs; "reload, all slots" until no worker of the old one is left. "stop" is from SIGTERM to
    the end of the master, without jobs. Medians of 5 rounds, with 4 and 16 slots (or ``--workers``), after one
    that does not count: it compiles Python's modules.

    A good figure: ready within 0.5 s; a reload of 16 slots within 1 s.
    """

    name: ClassVar[str] = "start"

    def run(self, bench: Bench) -> Result:
        result = Result(scenario=self.name, summary="")
        for slots in bench.settings.slots(SLOTS):
            found: dict[str, list[float]] = {}
            with bench.database() as database:
                rounds = bench.settings.times(ROUNDS)
                with bench.step(f"{slots} slots", rounds) as told:
                    _once(bench, database, slots)  # compiles the modules, if nobody has yet
                    for number in range(rounds):
                        for name, seconds in _once(bench, database, slots).items():
                            found.setdefault(name, []).append(seconds)
                        told(number + 1)
            wanted = {"ready": "≤ 0.5", "reload, all slots": "≤ 1"}
            for name, times in found.items():
                note = f"{min(times):.3f} to {max(times):.3f}"
                result.figures.append(
                    Figure(
                        f"{slots} slots: {name}", statistics.median(times), "s", wanted.get(name, ""), note
                    )
                )
        return result


def _once(bench: Bench, database: Database, slots: int) -> dict[str, float]:
    found = {}
    node = bench.node(database, slots)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = str(node.directory / "notify")
        manager.bind(address)
        manager.settimeout(READY_S)
        try:
            began = time.monotonic()
            node.start({"NOTIFY_SOCKET": address}, wait=False)
            try:
                while b"READY=1" not in manager.recv(4096).split(b"\n"):
                    pass
            except TimeoutError:
                node.check()
                raise WorldError(f"the daemon is not ready after {READY_S:g} s\n{node.log_tail()}") from None
            found["ready"] = time.monotonic() - began
            node.wait(is_ready, READY_S, "ready", pause_s=0.002)
            found["all slots"] = time.monotonic() - began

            def reloaded(status: dict[str, Any]) -> bool:
                return is_ready(status) and all(slot["generation"] == 2 for slot in status["slots"])

            began = time.monotonic()
            node.reload()
            found["reload served"] = time.monotonic() - began
            node.wait(reloaded, READY_S, "reloaded", pause_s=0.002)
            found["reload, all slots"] = time.monotonic() - began
            began = time.monotonic()
            node.stop()
            found["stop"] = time.monotonic() - began
        finally:
            node.kill()
            os.unlink(address)
    return found
