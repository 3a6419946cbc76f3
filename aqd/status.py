"""What ``aqd status`` shows, and the one line in systemd's STATUS: views of the master's state.

Run by the master. Reads only; costs a few microseconds per slot.

The states of a node: ``starting`` (the first generation is loading, or its workers are), ``waiting for
database``, ``running``, ``reloading`` (the old generation serves meanwhile), ``draining``.
"""

import os
from typing import TYPE_CHECKING, Any

import msgspec

from aqd import __version__
from aqd.figures import Cell, gauge
from aqd.process import boottime
from aqd.slots import Slot, State

if TYPE_CHECKING:
    from aqd.master import Master


def describe(master: "Master") -> dict[str, Any]:
    """The whole status as plain JSON values. Ids are strings, ``_s`` are seconds."""
    report = master.dispatcher.report
    serving = master.generations.serving
    now = boottime()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "node": master.node_id,
        "state": master.state,
        "started_at": master.started_at.isoformat(),
        "uptime_s": round(now - master.started, 3),
        "config_path": master.config_file,
        "generation": master.plan.serving,
        "problems": master.problems,
        "database": {
            "up": report is not None and report.database_up,
            "error": report.database_error or None if report else None,
            "listener_up": report is not None and report.listener_up,
        },
        "processes": _processes(master),
        "slots": [_slot(master, slot, now) for slot in master.plan.slots()],
        "plugins": [msgspec.to_builtins(p) for p in serving.plugins] if serving else [],
        "types": sorted(h.type for h in serving.handlers) if serving else [],
        "counters": report.counters if report else {},
        "restarts": master.crew.restarts,
        "recycled": master.plan.recycled,
    }


def metrics(master: "Master") -> dict[str, Any]:
    """What :func:`aqd.metrics.of_daemon` makes text of: figures since the start, and gauges, as cells."""
    report, node = master.dispatcher.report, master.node_name
    own = [
        gauge("slots", master.plan.count, node),
        gauge("busy", len(master.crew.busy()), node),
        gauge("listener_up", report is not None and report.listener_up, node),
        gauge("database_up", report is not None and report.database_up, node),
        gauge("generation", master.plan.serving or 0, node),
        *(Cell("restarts", (cause,), number) for cause, number in master.crew.restarts.items()),
    ]
    for cell in master.dispatcher.gauges:
        if cell.metric == "stats_age":  # it has grown since
            own.append(gauge("stats_age", cell.total + boottime() - master.dispatcher.seen_at))
        else:
            own.append(cell)
    cells = [*own, *master.dispatcher.figures.cells()]
    return {"ok": True, "cells": msgspec.to_builtins(cells)}


def line(master: "Master") -> str:
    """One line for ``systemctl status``."""
    report = master.dispatcher.report
    parts = [f"{master.state}: generation {master.plan.serving or '-'}, {master.plan.count} slots"]
    if report is not None and not report.database_up:
        parts.append(report.database_error or "database not reached yet")
    parts += master.problems[:3]
    return "; ".join(parts).replace("\n", " ")[:400]


def _processes(master: "Master") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "master", "pid": os.getpid()}]
    for loader in (master.generations.serving, master.generations.candidate):
        if loader is not None:
            found.append({"role": "loader", "pid": loader.pid, "generation": loader.generation})
    if master.dispatcher.pid is not None:
        found.append({"role": "dispatcher", "pid": master.dispatcher.pid})
    for service in master.services.all:
        if service.pid is not None:
            found.append({"role": service.name, "pid": service.pid})
    return found


def _slot(master: "Master", slot: Slot, now: float) -> dict[str, Any]:
    view: dict[str, Any] = {
        "slot": slot.number,
        "pid": None,
        "generation": None,
        "state": "backing off" if now < slot.not_before else "starting",
        "job": None,
        "type": None,
        "since_s": None,
        "jobs_done": 0,
        "held": 0,
        "restarts": slot.restarts,
    }
    worker = slot.worker
    seat = master.crew.seats.get(worker.incarnation) if worker else None
    if worker is None or seat is None:
        return view
    page, report = seat.page, master.dispatcher.report
    view |= {"pid": worker.pid, "generation": worker.generation, "jobs_done": page.finished}
    number = page.current()
    if number >= 0:
        view["job"] = str(page.entry(number).job_id)
        view["since_s"] = round(now - page.started_at_ns / 1e9, 3)
    if report is not None:
        view["held"] = report.held.get(worker.incarnation, 0)
        view["type"] = report.types.get(worker.incarnation) if number >= 0 else None
    if worker.state in (State.LEAVING, State.CLOSING):
        view["state"] = "leaving"
    elif worker.state is State.SERVING:
        view["state"] = "busy" if number >= 0 else "idle" if page.turns else "starting"
    return view
