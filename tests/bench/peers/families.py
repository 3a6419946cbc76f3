"""How each project is installed, filled, run and asked whether it is done. What is measured stands in ``systems.py``.

A family's driver is a program in ``drivers/`` that runs in the project's own environment: ``fill`` stores the jobs,
``work`` runs them until SIGTERM, ``produce`` stores them one at a time and reports the latencies. Where a project's
worker is a command of its own, that command is used and not an imitation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aqd
from tests.bench.peers.packages import DRIVERS, Cache, node_version
from tests.fixtures.daemon import ROOT, toml


class Command(NamedTuple):
    """A process to start. ``gates``: how often it says "ready", to begin when it is told to."""

    arguments: list[str]
    environment: dict[str, str]
    gates: int = 1


@dataclass(frozen=True)
class Task:
    """What one run is about, for commands. ``settings`` go to the driver as JSON."""

    folder: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A project with a Python driver of ours. ``left`` and ``done`` are questions for :meth:`Store.count`."""

    name: str
    driver: str
    left: tuple[str, ...]  # jobs that are not recorded as done
    done: tuple[str, ...] = ()  # jobs that are, where the project keeps them
    backend: str = "postgres"
    note: str = ""

    def prepare(self, cache: Cache) -> Tool:
        """Installs what is needed; :class:`Unavailable` if that cannot be had."""
        return Tool(str(cache.python(self.name)), {}, cache.packages("python", self.name))

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's own settings."""
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(DRIVERS),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, tool: Tool, role: str, task: Task) -> Command:
        """The driver in one of its roles."""
        settings = json.dumps({**task.settings, **tool.settings})
        return Command([tool.program, str(DRIVERS / self.driver), role, settings], self.environment())

    def workers(self, tool: Tool, task: Task, processes: int) -> list[Command]:
        """What to start for working."""
        return [self.command(tool, "work", task)] * processes


class Tool(NamedTuple):
    """An installed project: the interpreter, what its driver must know about the installation, the versions."""

    program: str
    settings: dict[str, str]
    versions: str


class NodeFamily(Family):
    """A project on Node."""

    def prepare(self, cache: Cache) -> Tool:
        package_json = cache.node_package(self.name)
        node = cache.node(self.name)
        version = ".".join(map(str, node_version(node)))
        what = f"{cache.packages('node', self.name)}, Node {version}"
        return Tool(str(node), {"package_json": str(package_json)}, what)


@dataclass(frozen=True)
class CommandFamily(Family):
    """A project whose worker is a command: ``python -m MODULE ARGUMENTS`` with the driver imported as a module.

    The driver finds the settings in the variable PEERS_SETTINGS; they, and ``processes``, may stand in the arguments
    in braces. ``forks``: the command makes its processes itself, otherwise it is started once for each. ``gates``:
    whether each process waits for the others.
    """

    worker: tuple[str, ...] = ()
    forks: bool = True
    gates: bool = True

    def environment_of(self, task: Task) -> dict[str, str]:
        return {**self.environment(), "PEERS_SETTINGS": json.dumps(dict(task.settings))}

    def command(self, tool: Tool, role: str, task: Task) -> Command:
        return Command([tool.program, str(DRIVERS / self.driver), role], self.environment_of(task))

    def workers(self, tool: Tool, task: Task, processes: int) -> list[Command]:
        values = {**task.settings, "processes": processes}
        arguments = [each.format(**values) for each in self.worker]
        copies = 1 if self.forks else processes
        gates = processes // copies if self.gates else 0
        return [Command([tool.program, "-m", *arguments], self.environment_of(task), gates)] * copies


@dataclass(frozen=True)
class AqdFamily(Family):
    """aqd from this checkout: a real ``aqd run`` with a plugin for the job."""

    def prepare(self, cache: Cache) -> Tool:  # noqa: ARG002
        return Tool(sys.executable, {}, f"{aqd.__version__}, {_checkout()}")

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(ROOT)}

    def workers(self, tool: Tool, task: Task, processes: int) -> list[Command]:  # noqa: ARG002
        plugin = {name: task.settings[name] for name in ("directory", "fifo") if name in task.settings}
        config: dict[str, dict[str, Any]] = {
            "database": {"url": task.settings["url"]},
            "daemon": {"runtime_dir": str(task.folder / "run"), **task.settings["daemon"]},
            "plugins": {
                "dir": str(DRIVERS / "aqd_plugins"),
                "entry_points": False,
                "strict": True,
                "settings": {"peers_noop": {"tally": str(DRIVERS / "tally.py"), **plugin}},
            },
            "log": {"level": "warning"},
        }
        file = task.folder / "aqd.toml"
        file.write_text(toml(config))
        return [Command([tool.program, "-m", "aqd", "-c", str(file), "run"], self.environment(), gates=0)]


def _checkout() -> str:
    """The commit of the checkout, and whether the files are those of the commit."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "aqd", "sql"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"commit {commit}{' and changes' if changed else ''}"


AQD = AqdFamily(
    "aqd",
    "with_aqd.py",
    left=("select count(*) from aqd.jobs",),
    done=("select count(*) from aqd.job_history where state = 'COMPLETED' and result is not null",),
    note="keeps result and history of every job",
)
GRAPHILE = NodeFamily(
    "graphile-worker",
    "with_graphile_worker.mjs",
    left=("select count(*) from graphile_worker.jobs",),
    note="deletes completed jobs, keeps no result",
)
PG_BOSS = NodeFamily(
    "pg-boss",
    "with_pg_boss.mjs",
    left=("select count(*) from pgboss.job where name = 'noop' and state < 'completed'",),
    done=("select count(*) from pgboss.job where name = 'noop' and state = 'completed'",),
    note="keeps completed jobs for a while",
)
PGQUEUER = Family(
    "pgqueuer",
    "with_pgqueuer.py",
    left=("select count(*) from pgqueuer",),
    done=("select count(*) from pgqueuer_log where status = 'successful'",),
    note="deletes completed jobs, keeps a log of changes",
)
PROCRASTINATE = Family(
    "procrastinate",
    "with_procrastinate.py",
    left=("select count(*) from procrastinate_jobs where status in ('todo', 'doing')",),
    done=("select count(*) from procrastinate_jobs where status = 'succeeded'",),
    note="keeps completed jobs and their events",
)
AWA = Family(
    "awa-pg",
    "with_awa.py",
    left=("select count(*) from awa.jobs where state in ('available', 'running', 'scheduled', 'retryable')",),
    done=("select count(*) from awa.jobs where state = 'completed'",),
    note="keeps completed jobs for a while",
)
CELERY = CommandFamily(
    "celery",
    "with_celery.py",
    left=("LLEN celery", "HLEN unacked"),
    backend="redis",
    note="acknowledges before it runs a job, keeps nothing",
    worker=(
        *("celery", "-A", "with_celery", "worker", "--loglevel=WARNING", "--pool=prefork"),
        *("--concurrency={processes}", "--prefetch-multiplier={prefetch}"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ),
    gates=False,  # it consumes when its processes are forked
)
DRAMATIQ = CommandFamily(
    "dramatiq",
    "with_dramatiq.py",
    left=("HLEN dramatiq:default.msgs",),
    backend="redis",
    note="keeps nothing",
    worker=("dramatiq", "with_dramatiq", "--processes={processes}", "--threads={threads}"),
)
RQ = CommandFamily(
    "rq",
    "with_rq.py",
    left=("LLEN rq:queue:default", "LLEN rq:queue:default:intermediate", "ZCARD rq:wip:default"),
    done=("ZCARD rq:finished:default",),
    backend="redis",
    note="keeps completed jobs for a while",
    worker=(
        *("rq.cli", "worker", "--url={url}", "--quiet", "--disable-job-desc-logging"),
        *("--worker-class={worker}", "default"),
    ),
    forks=False,
)
