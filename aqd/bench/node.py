"""One measured daemon: ``aqd run`` with a configuration of its own, started, asked and ended.

Everything stands in one folder: ``aqd.toml``, ``plugins/bench.py``, ``log`` (JSON lines), ``run/``. All options are the
defaults but those that are named. Nothing of the caller's configuration is inherited. It ends with this process, also
after ``kill -9``. Fails with :class:`WorldError`, which shows the end of the log.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from aqd import control
from aqd.bench import measure
from aqd.binaries import spawn
from aqd.config import OPTIONS
from aqd.errors import NotRunning, WorldError
from aqd.figures import Cell
from aqd.histogram import STATEMENTS

READY_S: Final = 60.0
STOP_S: Final = 60.0
_ASK_S: Final = 5.0
_LEFTOVER_S: Final = 5.0
_LOG_LINES: Final = 15

Tables = Mapping[str, Mapping[str, Any]]


class Node:
    """``start`` and ``stop``; what it is doing; what its processes have used."""

    def __init__(
        self, directory: Path, url: str, slots: int, tables: Tables, *, with_api: bool = False
    ) -> None:
        self.directory = directory
        self.slots = slots
        self.with_api = with_api
        self.config_file = directory / "aqd.toml"
        self.log_file = directory / "log"
        self.plugins_dir = directory / "plugins"
        self._socket = directory / "run" / "control.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.plugins_dir.mkdir(parents=True)
        (directory / "run").mkdir()
        handlers = Path(__file__).with_name("handlers.py")
        shutil.copyfile(handlers, self.plugins_dir / "bench.py")
        merged: dict[str, dict[str, Any]] = {
            "database": {"url": url},
            "daemon": {
                "slots": slots,
                "drain_s": 5.0,
                "kill_grace_s": 1.0,
                "runtime_dir": str(directory / "run"),
                "node_name": "bench",
            },
            "plugins": {"dir": str(self.plugins_dir), "entry_points": False},
            "log": {"format": "json"},
        }
        for section, table in tables.items():
            merged.setdefault(section, {}).update(table)
        self.config_file.write_text(toml(merged))
        self.config_file.chmod(0o600)  # the URL may hold a password

    # --- starting and ending

    def start(self, environment: Mapping[str, str] | None = None, *, wait: bool = True) -> None:
        """``wait``: until all slots are ready for jobs. ``environment`` is added to the daemon's."""
        command = [sys.executable, "-m", "aqd", "-c", str(self.config_file), "run"]
        if self.with_api:
            command.append("--with-api")
        with self.log_file.open("ab") as output:
            self._process = spawn(
                command,
                account=None,
                environment={**self.environment(), **(environment or {})},
                output=output,
                death_signal=signal.SIGKILL,
                directory=str(self.directory),
                umask=-1,
            )
        if wait:
            self.wait(is_ready, READY_S, "ready")

    def environment(self) -> dict[str, str]:
        """The daemon's: :func:`child_environment`, and compiled modules beside the node's folder, where every node of a run
        finds those of the one before. Whether the caller's Python may write them is no matter of a measurement."""
        found = {**child_environment(), "PYTHONPYCACHEPREFIX": str(self.directory.parent / "pycache")}
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        return found

    def stop(self) -> None:
        """In good order, else by force; its workers end with it."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorldError(
                f"the daemon has not ended after {STOP_S:g} s and was killed\n{self.log_tail()}"
            ) from None
        finally:
            self._process = None

    def kill(self) -> None:
        """At once, and returns when nothing of it is left: its processes die with the master."""
        if self._process is None:
            return
        pids = measure.tree(self._process.pid)
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + _LEFTOVER_S
        while any(measure.runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)

    def check(self) -> None:
        """Raises if it has ended by itself."""
        if self._process is None or (status := self._process.poll()) is not None:
            ended = "has not been started" if self._process is None else f"ended with status {status}"
            raise WorldError(f"the daemon {ended}\n{self.log_tail()}")

    # --- asking

    @property
    def pid(self) -> int:
        """The master's."""
        assert self._process is not None
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """The answer of ``aqd status``."""
        return control.request(self._socket, "status", _ASK_S)

    def reload(self, timeout_s: float = READY_S) -> None:
        """Returns when the new generation serves."""
        control.request(self._socket, "reload", timeout_s)

    def wait(
        self, question: Callable[[dict[str, Any]], bool], timeout_s: float, what: str, pause_s: float = 0.01
    ) -> dict[str, Any]:
        """Asks until ``question`` is true of the status, and returns that status."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            with contextlib.suppress(NotRunning):
                status = self.status()
                if question(status):
                    return status
            if time.monotonic() > deadline:
                raise WorldError(f"the daemon is not {what} after {timeout_s:g} s\n{self.log_tail()}")
            time.sleep(pause_s)

    def done(self) -> int:
        """How many attempts have been recorded so far, as its dispatcher told the master last (once a second)."""
        return sum(cell.count for cell in self.cells() if cell.metric == "attempts")

    def cells(self) -> list[Cell]:
        """What ``aqd metrics`` shows."""
        return msgspec.convert(control.request(self._socket, "metrics", _ASK_S)["cells"], list[Cell])

    def statements(self, operation: str) -> "Statements":
        """How often the dispatcher has run ``claim``, ``record`` or ``renew``, and how long that took."""
        for cell in self.cells():
            if cell.metric == "statement" and cell.labels == (operation,):
                return Statements(cell.count, cell.total, tuple(cell.buckets))
        return Statements(0, 0.0, ())

    def pids(self) -> dict[int, str]:
        """All processes by their role: ``master``, ``loader``, ``dispatcher``, ``worker``, ``api``, ``other``."""
        status = self.status()
        roles = {int(each["pid"]): str(each["role"]) for each in status["processes"]}
        roles |= {int(slot["pid"]): "worker" for slot in status["slots"] if slot["pid"]}
        found: dict[int, str] = {}
        for pid in measure.tree(self.pid):
            above = measure.parent(pid)
            found[pid] = roles.get(pid) or ("api" if roles.get(above or 0) == "api" else "other")
        return found

    def usage(self) -> dict[str, float]:
        """Processor seconds by role. Those of workers that have ended count as ``worker`` (their master waited for
        them), like what little loaders and dispatchers before them have used."""
        found = dict.fromkeys(("master", "dispatcher", "worker"), 0.0)
        for pid, role in self.pids().items():
            used = measure.usage(pid)
            if used is None:
                continue
            found[role] = found.get(role, 0.0) + used.own_s
            below = "worker" if role == "master" else role
            found[below] = found.get(below, 0.0) + used.reaped_s
        return found

    def log_tail(self) -> str:
        """The end of the log, for messages."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return ""


class Statements:
    """Statements of one kind: number, seconds, and a histogram by :data:`aqd.histogram.STATEMENTS`. ``-`` gives those
    since an earlier look."""

    def __init__(self, count: int, total_s: float, buckets: tuple[int, ...]) -> None:
        self.count = count
        self.total_s = total_s
        self.buckets = buckets

    def __sub__(self, before: "Statements") -> "Statements":
        earlier = before.buckets or (0,) * len(self.buckets)
        differences = tuple(now - then for now, then in zip(self.buckets, earlier, strict=True))
        return Statements(self.count - before.count, self.total_s - before.total_s, differences)

    def quantile_ms(self, share: float) -> float | None:
        """Drawn straight through its bucket (which reaches from half to the whole of its upper bound)."""
        seconds = STATEMENTS.quantile_s(self.buckets, share)
        return None if seconds is None else seconds * 1000


def is_ready(status: dict[str, Any]) -> bool:
    """It runs, and each slot has a worker that has been told it may begin."""
    return status["state"] == "running" and all(slot["state"] in ("idle", "busy") for slot in status["slots"])


@contextlib.contextmanager
def running(node: Node) -> Iterator[Node]:
    """A started node, ended whatever happens."""
    try:
        node.start()
        yield node
    except BaseException:
        node.kill()
        raise
    finally:
        node.stop()


def child_environment() -> dict[str, str]:
    """Ours without aqd's options: a benchmark must not run on the database of somebody's DATABASE_URL."""
    options = {name for option in OPTIONS.values() for name in option.env}
    options |= {f"{name}_FILE" for name in options} | {"AQD_CONFIG", "NOTIFY_SOCKET"}
    return {name: value for name, value in os.environ.items() if name not in options}


def toml(tables: Tables) -> str:
    """TOML of nested tables; JSON's notation of strings, numbers and lists is TOML's too."""
    lines: list[str] = []

    def write(path: str, table: Mapping[str, Any]) -> None:
        lines.append(f"[{path}]")
        for key, value in table.items():
            if not isinstance(value, Mapping):
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        for key, value in table.items():
            if isinstance(value, Mapping):
                write(f"{path}.{key}", value)

    for section, table in tables.items():
        write(section, table)
    return "\n".join(lines) + "\n"
