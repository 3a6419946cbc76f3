"""Where a benchmark ran: the machine, the versions, the settings of PostgreSQL that its figures depend on.

Sources: proc(5) (cpuinfo, meminfo, mounts), uname(2), os-release(5). What a kernel does not say is left out.
"""

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from aqd import __version__
from aqd.database import Connection, run, text_array

SETTINGS: Final = (
    "shared_buffers",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
    "wal_level",
    "wal_compression",
    "wal_sync_method",
    "wal_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "effective_io_concurrency",
    "random_page_cost",
    "work_mem",
    "max_connections",
    "autovacuum",
    "autovacuum_naptime",
    "jit",
    "track_commit_timestamp",
    "shared_preload_libraries",
    "data_checksums",
)
_PACKAGES: Final = ("psycopg", "msgspec", "pluggy")


def machine(data: Path | None = None) -> dict[str, Any]:
    """The machine; ``data`` is where a server of our own keeps its files (its file system decides what a commit costs)."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "system": _system(),
    }
    if data is not None:
        found["data_filesystem"] = filesystem(data)
    return found


def versions(conn: Connection) -> dict[str, str]:
    """aqd, Python, PostgreSQL and what they speak through."""
    found = {
        "aqd": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "postgresql": str(run(conn, "bench_server")[0][0]),
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def server_settings(conn: Connection) -> dict[str, str]:
    """The settings in :data:`SETTINGS` that this server has."""
    return {str(name): str(value) for name, value in run(conn, "bench_settings", names=text_array(SETTINGS))}


def filesystem(path: Path) -> str:
    """Type of the file system that holds ``path``, such as ``ext4``; the longest mount point before it decides."""
    best, found = -1, "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            point, kind = line.split()[1:3]
            place = Path(point.encode().decode("unicode_escape"))  # a blank is \040
            if path.resolve().is_relative_to(place) and len(place.parts) >= best:
                best, found = len(place.parts), kind
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):  # ARM machines have only the latter, if any
                return value.strip()
    return platform.machine()


def _memory_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _system() -> str:
    with contextlib.suppress(OSError):
        return str(platform.freedesktop_os_release()["PRETTY_NAME"])
    return platform.system()
