"""Installs what the comparison drives: each package into a folder of its own below the cache, once.

A folder carries a stamp with what was asked for; a changed ``versions.toml`` makes it anew. Nothing is installed into
the project's own environment, and of the machine only Redis, by Debian's package, if it is missing and we are root.

Fails with :class:`Unavailable`, whose text is the reason that the report gives for skipping a system.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DRIVERS = HERE / "drivers"
INSTALL_S = 300.0
ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}


class Unavailable(Exception):
    """A system cannot be measured here; the text says why."""


def versions() -> dict[str, Any]:
    """The table of what is installed."""
    return tomllib.loads((HERE / "versions.toml").read_text())


def default_cache() -> Path:
    """Where the installations are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "aqd-peers"


class Cache:
    """The folder of installations."""

    def __init__(self, directory: Path, say: Callable[[str], None] = print) -> None:
        self.directory = directory
        self.table = versions()
        self._say = say
        self._failed: dict[str, Unavailable] = {}

    def python(self, name: str) -> Path:
        """The interpreter of the virtual environment with ``[python.NAME]``."""
        packages = self.table["python"][name]["packages"]

        def make(folder: Path) -> None:
            command([sys.executable, "-m", "venv", str(folder)])
            command([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *packages])

        return self._make(f"python-{name}", packages, make) / "bin/python"

    def node_package(self, name: str) -> Path:
        """The ``package.json`` beside whose ``node_modules`` ``[node.NAME]`` is installed."""
        folder = self._npm(f"node-{name}", self.table["node"][name]["packages"])
        return folder / "package.json"

    def node(self, name: str) -> Path:
        """A Node that is new enough for ``[node.NAME]``: the machine's, or one from npm."""
        wanted = tuple(self.table["node"][name]["node"])
        program = shutil.which("node")
        if program is not None and node_version(Path(program)) >= wanted:
            return Path(program)
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        package = self.table["node-runtime"].get(architecture)
        if package is None:
            raise Unavailable(
                f"it needs Node {'.'.join(map(str, wanted))}, and there is none for {architecture}"
            )
        folder = self._npm("node-runtime", [package])
        return Path(folder, "node_modules", package.partition("@")[0], "bin/node")

    def redis_server(self) -> str:
        """The program ``redis-server``."""
        if program := shutil.which("redis-server"):
            return program
        # Debian's redis-tools has the same program under this name; redis-server would start a service.
        if program := shutil.which("redis-check-rdb"):
            return program
        if (known := self._failed.get("redis")) is not None:
            raise known
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise Unavailable("there is no redis-server, and it cannot be installed (not root, or no apt)")
        self._say("installing Redis (Debian's redis-tools)")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            command(["apt-get", "-qq", "update"], environment)
            package = self.table["debian"]["redis"]
            command(["apt-get", "-qq", "install", "--no-install-recommends", package], environment)
        except Unavailable as error:
            self._failed["redis"] = error
            raise
        return self.redis_server()

    def packages(self, kind: str, name: str) -> str:
        """What ``[KIND.NAME]`` asks for, for people."""
        return ", ".join(self.table[kind][name]["packages"])

    def _npm(self, name: str, packages: list[str]) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise Unavailable("there is no npm")

        def make(folder: Path) -> None:
            folder.mkdir(parents=True)
            (folder / "package.json").write_text(json.dumps({"private": True}))
            command(
                [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent", *packages]
            )

        return self._make(name, packages, make)

    def _make(self, name: str, packages: list[str], make: Callable[[Path], None]) -> Path:
        """The folder ``name``, made anew when it is not of ``packages``."""
        folder = self.directory / name
        stamp = folder / "stamp"
        wanted = hashlib.sha256("\n".join([sys.version, *packages]).encode()).hexdigest()
        if stamp.is_file() and stamp.read_text() == wanted:
            return folder
        if (known := self._failed.get(name)) is not None:
            raise known
        self._say(f"installing {', '.join(packages)}")
        shutil.rmtree(folder, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            make(folder)
        except Unavailable as error:
            self._failed[name] = error
            raise
        stamp.write_text(wanted)
        return folder


def node_version(program: Path) -> tuple[int, ...]:
    """E.g. ``(24, 22, 3)``; empty when it does not say."""
    answer = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    numbers = answer.stdout.strip().lstrip("v").split(".")
    return tuple(int(each) for each in numbers) if all(each.isdigit() for each in numbers) else ()


def command(arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Runs an installer; :class:`Unavailable` with the end of what it said."""
    name = Path(arguments[0]).name
    try:
        answer = subprocess.run(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} did not end within {INSTALL_S:g} s") from None
    except OSError as error:
        raise Unavailable(f"{name}: {error.strerror}") from None
    if answer.returncode != 0:
        said = (answer.stderr.strip() or answer.stdout.strip()).splitlines() or ["(nothing said)"]
        raise Unavailable(f"{name} failed: {said[-1].strip()}")
