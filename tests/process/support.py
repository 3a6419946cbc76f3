"""What the process tests have in common: pids, moments, connections of a daemon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from tests.fixtures import processes
from tests.fixtures.daemon import Daemon
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import LocalPostgres
from tests.fixtures.processes import wait_until


def is_gone(pid: int) -> bool:
    """Whether ``pid`` has ended (a zombie has)."""
    process = processes.look(pid)
    return process is None or process.state in "ZX"


def boottime_ns(line: dict[str, Any]) -> int:
    """When a log line was written, on the clock of the side file."""
    offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return round((datetime.fromisoformat(line["at"]).timestamp() - offset) * 1e9)


def pids_of(daemon: Daemon) -> list[int]:
    """The master and everything below it."""
    return [daemon.pid, *(process.pid for process in daemon.tree())]


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def stop_processes(pids: list[int]) -> None:
    """SIGSTOP to each, parents first, until all stand still."""
    send(pids, signal.SIGSTOP)
    wait_until(lambda: all((p := processes.look(pid)) and p.state in "Tt" for pid in pids))


def backends(jobs: Jobs, duty: str = "") -> list[int]:
    """Pids of the server's processes that serve a dispatcher's thread (claimer, recorder, keeper)."""
    rows = jobs.conn.execute(
        """select pid from pg_stat_activity
           where datname = current_database() and application_name like %s""",
        [f"aqd {duty}%"],
    )
    return [row["pid"] for row in rows]


def standby_of(
    primary: LocalPostgres, private_pg: Callable[..., LocalPostgres], **options: str
) -> LocalPostgres:
    """A streaming copy of the cluster, in a directory and at a port of its own."""
    settings = {"hot_standby": "on", "max_connections": "12", "max_wal_senders": "4", **options}
    copy = private_pg(**settings)
    copy.stop()
    for child in sorted(copy.data.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() and not child.is_symlink() else child.unlink()
    arguments = ["-D", str(copy.data), "-R", "-X", "stream", "-c", "fast", "-U", "postgres"]
    where = ["-h", str(primary.socket_dir), "-p", str(primary.port)]
    assert copy._spawn(["pg_basebackup", *arguments, *where]).wait(60) == 0, copy.log()
    copy.password = primary.password
    copy.start()
    return copy


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time that the processes have used so far, in seconds."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
