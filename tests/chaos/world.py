"""The world of a round: a PostgreSQL server of its own, and nodes that reach it through proxies of their own.

Nodes are those of ``tests/fixtures/daemon.py``; everything here can be killed, stopped, cut off and started again
while the round goes on. Nothing here decides what happens: see ``plan.py`` and ``faults.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from aqd import control
from aqd.errors import Exit, NotRunning
from tests.chaos.checks import Event
from tests.chaos.plan import NARROW, NARROW_MOST, Plan
from tests.chaos.watch import boottime_ns
from tests.fixtures import processes
from tests.fixtures.daemon import ROOT, Daemon
from tests.fixtures.postgres import LocalPostgres, free_port
from tests.fixtures.proxy import Proxy

PLUGIN = Path(__file__).parent / "plugins" / "chaos.py"
# Debian's libfaketime, whatever the architecture; None: clocks are not stepped.
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
# Completed jobs, and attempts that ended otherwise, as one node has written them. With its lease an attempt is "cancelled"
# if the job was asked to end; to the node it is lost like any other, and it may not have been the node that wrote it.
_COUNTED = ("failed", "discarded", "crashed", "timed_out", "cancelled")
_COUNTS = """
    select (select count(*) from aqd.job_history where node_id = %(node)s and state = 'COMPLETED'),
           (select count(*) from aqd.job_attempts where node_id = %(node)s and kind = any(%(kinds)s)
             and reason is distinct from 'lease')
"""
_LEFT = {
    "session left": "select pid, application_name, state, query from pg_stat_activity"
    " where datname = current_database() and application_name like 'aqd%'",
    "lock left": "select locktype, mode, pid, objid from pg_locks"
    " where pid <> pg_backend_pid() and locktype = 'advisory'",
    "partition that belongs to nothing": "select c.relname from pg_class c"
    " join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'aqd'"
    " where c.relkind = 'r' and c.relname like 'job\\_history\\_%' and not c.relispartition",
    "prepared transaction": "select gid from pg_prepared_xacts",
}


class Way(Proxy):
    """A proxy that can also single out one connection or one direction."""

    def choose(self, pick: float) -> socket.socket | None:
        """A client's end of some connection."""
        with contextlib.suppress(RuntimeError):  # changed while we looked: as good as none
            ends = [end for end, pipe in self._pipes.items() if not pipe.answers]
            return ends[int(pick * len(ends))] if ends else None
        return None

    def reset_one(self, end: socket.socket) -> None:
        self._order(lambda: self._reset(self._pipes[end]) if end in self._pipes else None)

    def swallow_requests(self) -> None:
        """What clients say is kept back; what the server still has to say arrives."""

        def order() -> None:
            self._swallow_requests, self._swallow_answers = True, False

        self._order(order)

    def silence_one(self, end: socket.socket, *, on: bool) -> None:
        """Neither direction of one connection is read any more; TCP holds what comes."""

        def order() -> None:
            pipe = self._pipes.get(end)
            if pipe is None:
                return
            for sock in (pipe.source, pipe.sink):
                with contextlib.suppress(KeyError, ValueError):
                    if on:
                        self._selector.unregister(sock)
                    elif not self._pipes[sock].ended:
                        self._selector.register(sock, 1)

        self._order(order)


class Node(Daemon):
    """One daemon, the way that it takes to the database, and whether it is meant to be up."""

    def __init__(
        self,
        name: str,
        directory: Path,
        mark: str,
        config: dict[str, dict[str, Any]],
        way: Way,
        **options: Any,
    ) -> None:
        super().__init__(directory, mark, config, **options)
        self.name = name
        self.way = way
        self.start_at = 0.0  # monotonic; when it may come up again
        self.leaving_until: float | None = None  # a stop in good order must be over by then
        self.starts = 0
        self.started_ns = 0

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answer(self) -> dict[str, Any] | None:
        """Its status; None if it does not say."""
        with contextlib.suppress(NotRunning, OSError, ValueError):
            return control.request(self.socket, "status", 2.0)
        return None

    def of_role(self, role: str) -> list[int]:
        """Pids of living processes whose title says ``role``, wherever below the master they stand."""
        if not self.up:
            return []
        if role == "master":
            return [self.pid]
        start = "gunicorn" if role == "api" else f"aqd: {role}"
        return sorted(
            each.pid for each in self.tree() if each.title.startswith(start) and each.state not in "ZX"
        )


class World:
    """Server, nodes, side file; ``events`` is what was done to them."""

    def __init__(self, plan: Plan, directory: Path, server: LocalPostgres) -> None:
        self.plan = plan
        self.directory = directory
        self.server = server
        self.mark = f"chaos-{os.getpid()}-{os.urandom(4).hex()}"
        self.database = server.create_database(template=server.template)
        self.url = server.url(self.database)
        self.side = directory / "side.jsonl"
        self.locks = directory / "locks"
        self.locks.mkdir(parents=True)
        self.api_port = free_port()
        self.clock_files: dict[str, Path] = {}
        self.events: list[Event] = []
        self.wrong: list[str] = []
        self.baseline: dict[str, dict[str, int]] = {}
        self.first_dispatcher: dict[str, list[int]] = {}
        self.sessions: list[int] = []
        self.nodes = [self._node(number) for number in range(plan.nodes)]

    def _node(self, number: int) -> Node:
        name = f"n{number}"
        way = Way("127.0.0.1", self.server.port)
        parts = urlsplit(self.server.tcp_url(self.database))
        account = parts.netloc.rpartition("@")[0]
        url = urlunsplit(parts._replace(netloc=f"{account}@127.0.0.1:{way.port}"))
        plan = self.plan
        config: dict[str, dict[str, Any]] = {
            "database": {"url": url, "statement_timeout_s": 4.0, "notify": plan.notify},
            "daemon": {
                "node_name": name,
                "slots": plan.slots,
                "lease_s": plan.lease_s,
                "renew_s": plan.lease_s / 6,
                "drain_s": plan.drain_s,
                "max_jobs_per_worker": plan.max_jobs_per_worker,
                "reserved": plan.reserved,
            },
            "jobs": {
                "timeout_s": 60.0,
                "max_crashes": 1000,
                "max_interruptions": 1000,
                "backoff_max_s": 0.5,
            },
            "keeper": {"rescue_s": 0.3},
            "log": {"level": "info"},
            "plugins": {
                "settings": {"chaos": {"side": str(self.side), "locks": str(self.locks), "node": name}}
            },
        }
        options: dict[str, Any] = {"with_api": number == 0, "env": self._clock(name)}
        if number == 0:
            config["api"] = {"port": self.api_port, "workers": 1, "threads": 4}
        node = Node(name, self.directory / name, self.mark, config, way, **options)
        node.plugins_dir.mkdir()
        shutil.copy(PLUGIN, node.plugins_dir)
        return node

    def _clock(self, name: str) -> dict[str, str]:
        """The environment of a node whose wall clock can be stepped."""
        if not self.plan.clock or FAKETIME is None:
            return {}
        file = self.clock_files[name] = self.directory / f"{name}.clock"
        file.write_text("+0s\n")
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": f"{ROOT}:{Path(__file__).parent / 'clock'}",
        }

    # --- life

    def start(self) -> None:
        """All nodes, and what they have open when nothing goes on."""
        with self.connect() as conn:
            conn.execute("insert into aqd.queues (queue, max_running) values (%s, %s)", [NARROW, NARROW_MOST])
        for node in self.nodes:
            self._start(node)
        for node in self.nodes:
            node.wait_state("running", 60.0)
        for node in self.nodes:
            processes.wait_until(lambda node=node: self._steady(node), 30.0, f"{node.name} at rest")
            self.baseline[node.name] = self.descriptors(node)
            self.first_dispatcher[node.name] = node.of_role("dispatcher")

    def _start(self, node: Node) -> None:
        node.start(wait=False)
        node.starts += 1
        node.started_ns = boottime_ns()
        node.leaving_until = None
        self.sessions.append(node.pid)

    def _at_rest(self, node: Node) -> bool:
        status = node.answer()
        return (
            status is not None
            and status["state"] == "running"
            and all(slot["state"] == "idle" for slot in status["slots"])
        )

    def _steady(self, node: Node) -> bool:
        """At rest, with every connection made and nothing opened or closed for a second."""
        if not self._at_rest(node):
            return False
        before = self.descriptors(node)
        time.sleep(1.0)
        return self._at_rest(node) and self.descriptors(node) == before

    def revive(self) -> None:
        """Nodes that are down and should be up are started; one that ended by itself, or does not end, is wrong."""
        now = time.monotonic()
        for node in self.nodes:
            if node.up:
                if node.leaving_until is not None and now > node.leaving_until:
                    self.wrong.append(f"{node.name} did not end within its time:\n{node.tail(20)}")
                    self.note("kill node", node.name, node.pid)
                    node.kill_everything()
                continue
            if not node.killed and node.process is not None:
                status = node.process.returncode
                if status == Exit.LOADER and self._loader_was_hit(node):
                    pass  # it says that it could not load anything, which was our doing
                elif node.leaving_until is None:
                    self.wrong.append(f"{node.name} ended by itself with {status}:\n{node.tail(20)}")
                elif status != 0:
                    self.wrong.append(f"{node.name} was stopped and ended with {status}:\n{node.tail(20)}")
                node.killed = True  # said once
            if now >= node.start_at:
                node.killed = False
                self._start(node)

    def _loader_was_hit(self, node: Node) -> bool:
        return any(
            event.kind in ("kill loader", "stop loader")
            and event.touches(node.name, node.started_ns, boottime_ns())
            for event in self.events
        )

    def stop_allowance_s(self) -> float:
        """A stop in good order: drain, grace, the time for outcomes; and as much again for the machine."""
        return 2 * (self.plan.drain_s + 1.0 + 10.0) + 20.0

    def note(self, kind: str, node: str | None, pid: int | None = None, began_ns: int | None = None) -> Event:
        """A disturbance that has happened (and is over now)."""
        now = boottime_ns()
        event = Event(kind, node, pid, now if began_ns is None else began_ns, now)
        self.events.append(event)
        return event

    # --- the database, by a way of our own

    @contextlib.contextmanager
    def connect(self) -> Iterator[psycopg.Connection]:
        """Not through any proxy. What was made read-only is not so for us."""
        with psycopg.connect(
            self.url,
            autocommit=True,
            application_name="chaos",
            connect_timeout=5,
            options="-c default_transaction_read_only=off",
        ) as conn:
            yield conn

    def backends(self) -> list[int]:
        """Server processes that serve the nodes."""
        with self.connect() as conn:
            rows = conn.execute(
                "select pid from pg_stat_activity where datname = current_database()"
                " and application_name like 'aqd%' order by pid"
            )
            return [row[0] for row in rows]

    # --- looking

    def descriptors(self, node: Node) -> dict[str, int]:
        """How many descriptors master, dispatcher and loaders have open."""
        found = {}
        for role in ("master", "dispatcher", "loader"):
            for pid in node.of_role(role):
                with contextlib.suppress(OSError):
                    found[role] = found.get(role, 0) + len(processes.descriptors(pid))
        return found

    def _open(self, node: Node, role: str) -> dict[str, int]:
        """What those are: paths, and kinds of the nameless ones."""
        found: Counter[str] = Counter()
        for pid in node.of_role(role):
            found.update(what.partition(":[")[0] for what in processes.descriptors(pid).values())
        return dict(found)

    def quiet(self, node: Node) -> str:
        """Empty once the node is at rest with what it had open at first; else what is still different."""
        if not self._at_rest(node):
            return f"{node.name} is not at rest: {node.answer()}"
        now = self.descriptors(node)
        more = {role: n for role, n in now.items() if n > self.baseline[node.name].get(role, 0)}
        if more:
            return (
                f"{node.name} has more open than at first: {now} against {self.baseline[node.name]}: "
                f"{ {role: self._open(node, role) for role in more} }"
            )
        if zombies := processes.zombies_below(node.pid):
            return f"{node.name} has zombies: {', '.join(map(str, zombies))}"
        return ""

    def miscounted(self, node: Node) -> str:
        """Empty unless the dispatcher has lived through all of the round and its counters are not the rows."""
        status = node.answer()
        if (
            status is None
            or node.starts > 1
            or node.of_role("dispatcher") != self.first_dispatcher[node.name]
        ):
            return ""
        counters = status["counters"]
        said = (counters.get("completed", 0), sum(counters.get(kind, 0) for kind in _COUNTED))
        with self.connect() as conn:
            rows = conn.execute(_COUNTS, {"node": status["node"], "kinds": list(_COUNTED)}).fetchone()
        return "" if said == rows else f"{node.name} counts {said} and has written {rows}: {counters}"

    # --- the end

    def stop(self) -> None:
        """Every node in good order; what is left is wrong, and killed."""
        for node in self.nodes:
            if node.up:
                node.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_allowance_s()
        for node in self.nodes:
            with contextlib.suppress(TimeoutError):
                processes.wait_until(lambda node=node: not node.up, max(0.1, deadline - time.monotonic()))
            if node.up:
                self.wrong.append(f"{node.name} did not end at the end:\n{node.tail(20)}")
                node.kill_everything()
            elif node.process is not None and node.process.returncode != 0 and not node.killed:
                self.wrong.append(f"{node.name} ended with {node.process.returncode} at the end")

    def start_server(self) -> None:
        if self.server.process is None:
            self.server.start()

    def calm(self) -> None:
        """Everything that can be put right is."""
        self.start_server()
        for node in self.nodes:
            node.way.forward()
            node.way.accept()
            if node.up:
                for each in (node.pid, *(child.pid for child in node.tree())):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGCONT)

    def left_in_database(self) -> list[str]:
        """After all nodes have stopped: no session, no lock, no half-made partition."""
        wrong = []
        with self.connect() as conn:
            for what, statement in _LEFT.items():
                with contextlib.suppress(TimeoutError):
                    processes.wait_until(lambda s=statement: not conn.execute(s).fetchall(), 10.0)
                wrong += [f"{what}: {row}" for row in conn.execute(statement).fetchall()]
        return wrong

    def left_over(self) -> list[processes.Process]:
        return processes.belonging(self.mark, self.sessions)

    def close(self) -> None:
        """Nothing of the round stays, whatever happened."""
        for node in self.nodes:
            if node.up:
                node.kill_everything()
        processes.kill_all(self.left_over())
        processes.reap_adopted(self.sessions)
        for pid in self.sessions if self.clock_files else []:
            for file in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                (Path("/dev/shm") / file).unlink(missing_ok=True)
        for node in self.nodes:
            node.close()
            node.way.close()
            if node.lines or node.output:
                text = "\n".join([*map(json.dumps, node.lines), "--- other output", *node.output])
                (node.directory / "log").write_text(text + "\n")
        (self.directory / "server.log").write_text(self.server.log())
