"""Doing harm: each kind of fault of the plan, carried out on the world as it is at that moment.

``begin(world, fault)`` does it and returns a :class:`Harm` that says what was done and how it is undone, or None where
there was nothing to do it to (no such process at the moment, the server is down already). What is undone later is
undone by ``Harm.end``; the disturbance is written into ``world.events`` with its moments when it is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.chaos.plan import Fault
from tests.chaos.watch import boottime_ns, born
from tests.chaos.world import Node, World


@dataclass(slots=True)
class Harm:
    """What was done. ``undo`` is called once, when the fault's duration is over or the round ends."""

    kind: str
    node: str | None
    pid: int | None = None
    began_ns: int = field(default_factory=boottime_ns)
    undo: Callable[[], None] | None = None

    def end(self, world: World) -> None:
        """Undo it. :class:`psycopg.Error` if that needs a server that is away just now: try again later."""
        if self.undo is not None:
            self.undo()
            self.undo = None
        world.note(self.kind, self.node, self.pid, self.began_ns)

    def __str__(self) -> str:
        return " ".join(
            part for part in (self.kind, self.node or "", f"pid {self.pid}" if self.pid else "") if part
        )


def begin(world: World, fault: Fault) -> Harm | None:
    """Carry it out."""
    node = world.nodes[fault.node]
    with contextlib.suppress(psycopg.Error):  # the server is away: nothing to do it to
        return _KINDS[fault.kind](world, node, fault)
    return None


def lasts_s(world: World, fault: Fault) -> float:
    """How long until it is undone. The duration of a kill is the pause before the next start; a stop in good order
    is a disturbance for as long as it may take."""
    if fault.kind == "term":
        return world.plan.drain_s + 2.0
    return fault.duration_s


# --- processes ------------------------------------------------------------------------------------


def _choose(pids: list[int], pick: float) -> int | None:
    return pids[int(pick * len(pids))] if pids else None


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill(role: str) -> Callable[[World, Node, Fault], Harm | None]:
    def act(_world: World, node: Node, fault: Fault) -> Harm | None:
        pid = _choose(node.of_role(role), fault.pick)
        if pid is None:
            return None
        harm = Harm(fault.kind, node.name, pid)
        _send([pid], signal.SIGKILL)
        return harm

    return act


def _kill_pair(_world: World, node: Node, fault: Fault) -> Harm | None:
    worker = _choose(node.of_role("worker"), fault.pick)
    dispatcher = _choose(node.of_role("dispatcher"), 0)
    if worker is None or dispatcher is None:
        return None
    harm = Harm(fault.kind, node.name, worker)
    pair = [worker, dispatcher] if fault.pick < 0.5 else [dispatcher, worker]
    _send(pair, signal.SIGKILL)
    return harm


def _kill_master(_world: World, node: Node, fault: Fault) -> Harm | None:
    if not node.up:
        return None
    harm = Harm(fault.kind, node.name, node.pid)
    node.kill()
    node.start_at = time.monotonic() + fault.duration_s
    return harm


def _kill_node(_world: World, node: Node, fault: Fault) -> Harm | None:
    if not node.up:
        return None
    harm = Harm(fault.kind, node.name, node.pid)
    node.kill_everything()
    node.start_at = time.monotonic() + fault.duration_s
    return harm


def _stop(role: str) -> Callable[[World, Node, Fault], Harm | None]:
    def act(_world: World, node: Node, fault: Fault) -> Harm | None:
        pid = _choose(node.of_role(role), fault.pick)
        return None if pid is None else _stopped(fault, node.name, [pid])

    return act


def _stopped(fault: Fault, node: str | None, pids: list[int]) -> Harm:
    """SIGSTOP now and SIGCONT later, to the very same processes."""
    births = {pid: born(pid) for pid in pids}
    harm = Harm(fault.kind, node, pids[0] if len(pids) == 1 else None)
    _send(pids, signal.SIGSTOP)
    harm.undo = lambda: _send([pid for pid in pids if born(pid) == births[pid]], signal.SIGCONT)
    return harm


def _freeze(_world: World, node: Node, fault: Fault) -> Harm | None:
    """As when the machine sleeps: the whole tree, parents first."""
    if not node.up:
        return None
    return _stopped(
        fault, node.name, [node.pid, *(each.pid for each in node.tree() if each.state not in "ZX")]
    )


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal: Python has to start before it can have one."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)  # proc_pid_status(5)
        return bool(caught >> (number - 1) & 1)
    return False


def _hup(_world: World, node: Node, fault: Fault) -> Harm | None:
    if not node.up or not _handles(node.pid, signal.SIGHUP):
        return None
    node.signal(signal.SIGHUP)
    return Harm(fault.kind, node.name)


def _term(world: World, node: Node, fault: Fault) -> Harm | None:
    if not node.up or node.leaving_until is not None:
        return None
    node.leaving_until = time.monotonic() + world.stop_allowance_s()
    node.start_at = time.monotonic() + fault.duration_s
    node.killed = not _handles(node.pid, signal.SIGTERM)  # so early it is as good as SIGKILL
    node.signal(signal.SIGTERM)
    harm = Harm(fault.kind, node.name)
    # It lasts as long as the drain may.
    harm.undo = lambda: None
    return harm


# --- the database ---------------------------------------------------------------------------------


def _terminate_backend(world: World, _node: Node, fault: Fault) -> Harm | None:
    pid = _choose(world.backends(), fault.pick)
    if pid is None:
        return None
    with world.connect() as conn:
        conn.execute("select pg_terminate_backend(%s)", [pid])
    return Harm(fault.kind, None)


def _stop_backend(world: World, _node: Node, fault: Fault) -> Harm | None:
    pid = _choose(world.backends(), fault.pick)
    return None if pid is None else _stopped(fault, None, [pid])


def _kill_backend(world: World, _node: Node, fault: Fault) -> Harm | None:
    """The server ends all others too and recovers."""
    pid = _choose(world.backends(), fault.pick)
    if pid is None:
        return None
    harm = Harm(fault.kind, None)
    _send([pid], signal.SIGKILL)
    return harm


def _kill_server(world: World, _node: Node, fault: Fault) -> Harm | None:
    if world.server.process is None:
        return None
    harm = Harm(fault.kind, None)
    world.server.kill()
    harm.undo = world.start_server
    return harm


def _restart_server(world: World, _node: Node, fault: Fault) -> Harm | None:
    if world.server.process is None:
        return None
    harm = Harm(fault.kind, None)
    # A stopped backend cannot hear that it should end.
    with contextlib.suppress(psycopg.Error):
        _send(world.backends(), signal.SIGCONT)
    # Right after its start a server may overlook a child when it stops; then it is killed (by the fixture).
    with contextlib.suppress(RuntimeError):
        world.server.stop("immediate" if fault.pick < 0.5 else "fast")
    harm.undo = world.start_server
    return harm


def _read_only(world: World, _node: Node, fault: Fault) -> Harm | None:
    """As after a switch-over, for the sessions that are there."""

    def make(value: str) -> None:
        with world.connect() as conn:
            conn.execute(f"alter system set default_transaction_read_only = {value}")
            conn.execute("select pg_reload_conf()")

    harm = Harm(fault.kind, None)
    harm.undo = lambda: make("off")
    with contextlib.suppress(psycopg.Error):  # it may be so all the same
        make("on")
    return harm


# --- the way to it --------------------------------------------------------------------------------


def _ways(world: World, node: Node, fault: Fault) -> tuple[str | None, list[Node]]:
    """One node's way, or now and then all of them."""
    return (None, world.nodes) if fault.pick > 0.8 else (node.name, [node])


def _reset_one(_world: World, node: Node, fault: Fault) -> Harm | None:
    end = node.way.choose(fault.pick)
    if end is None:
        return None
    node.way.reset_one(end)
    return Harm(fault.kind, node.name)


def _reset_all(world: World, node: Node, fault: Fault) -> Harm | None:
    name, nodes = _ways(world, node, fault)
    for each in nodes:
        each.way.reset_all()
    return Harm(fault.kind, name)


def _silence(direction: str) -> Callable[[World, Node, Fault], Harm | None]:
    def act(world: World, node: Node, fault: Fault) -> Harm | None:
        name, nodes = _ways(world, node, fault)
        harm = Harm(fault.kind, name)
        for each in nodes:
            match direction:
                case "both":
                    each.way.swallow()
                case "answers":
                    each.way.swallow(answers=True)
                case "requests":
                    each.way.swallow_requests()

        def undo() -> None:
            for each in nodes:
                if fault.pick * 10 % 1 < 0.5:
                    each.way.reset_all()  # what was kept back is lost for good
                each.way.forward()

        harm.undo = undo
        return harm

    return act


def _silent_connection(_world: World, node: Node, fault: Fault) -> Harm | None:
    end = node.way.choose(fault.pick)
    if end is None:
        return None
    harm = Harm(fault.kind, node.name)
    node.way.silence_one(end, on=True)
    harm.undo = lambda: node.way.silence_one(end, on=False)
    return harm


def _cut_answers(_world: World, node: Node, fault: Fault) -> Harm | None:
    """Reset in the middle of an answer: what was asked may have been done."""
    harm = Harm(fault.kind, node.name)
    node.way.cut_answers_after(int(fault.pick * 400))
    harm.undo = node.way.forward
    return harm


def _refuse(_world: World, node: Node, fault: Fault) -> Harm | None:
    harm = Harm(fault.kind, node.name)
    node.way.refuse()
    node.way.reset_all()
    harm.undo = node.way.accept
    return harm


# --- the clock ------------------------------------------------------------------------------------


def _step_clock(world: World, node: Node, fault: Fault) -> Harm | None:
    file = world.clock_files.get(node.name)
    if file is None:
        return None
    seconds = int((fault.pick - 0.5) * 7200)
    file.write_text(f"{seconds:+d}s\n")
    return Harm(fault.kind, node.name)


_KINDS: dict[str, Callable[[World, Node, Fault], Harm | None]] = {
    "kill worker": _kill("worker"),
    "kill dispatcher": _kill("dispatcher"),
    "kill loader": _kill("loader"),
    "kill api": _kill("api"),
    "kill master": _kill_master,
    "kill node": _kill_node,
    "kill worker and dispatcher": _kill_pair,
    "stop worker": _stop("worker"),
    "stop dispatcher": _stop("dispatcher"),
    "stop loader": _stop("loader"),
    "stop master": _stop("master"),
    "stop api": _stop("api"),
    "freeze node": _freeze,
    "terminate backend": _terminate_backend,
    "stop backend": _stop_backend,
    "kill backend": _kill_backend,
    "kill server": _kill_server,
    "restart server": _restart_server,
    "read-only server": _read_only,
    "reset connection": _reset_one,
    "reset connections": _reset_all,
    "cut answers": _cut_answers,
    "silence": _silence("both"),
    "silent answers": _silence("answers"),
    "silent requests": _silence("requests"),
    "silent connection": _silent_connection,
    "refuse connections": _refuse,
    "step clock": _step_clock,
    "hup": _hup,
    "term": _term,
}
