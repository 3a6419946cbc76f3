"""Debian's package of this checkout, for the tests that install it; and later versions of it.

``package(release)`` is built by packaging/build-deb once for each state of what goes into it, and kept beside the trees
of the machines. ``successor`` is the same package with a higher version and more migrations: repacked, because all that
an upgrade meets is what lies in the archive.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.system import machine as machines

ROOT = Path(__file__).parents[2]
# What is in the package, or makes it.
PARTS = (
    "aqd",
    "etc",
    "packaging",
    "plugins",
    "sql",
    "systemd",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "pyproject.toml",
)
DAY_S = 86400.0
MIGRATIONS = "usr/lib/aqd/lib/{python}/site-packages/aqd/_data/sql/migrations"


def unavailable(release: str) -> str | None:
    """Why the package of this release cannot be built and installed here; None when it can."""
    if reason := machines.unavailable():
        return reason
    for program, name in (("dpkg-deb", "dpkg"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"building the package needs {program} (apt-get install {name})"
    return None


@functools.cache
def package(release: str) -> Path:
    """The package for a release of Debian."""
    place = machines.cache() / f"deb-{release}-{_digest()}"
    with machines.locked(machines.cache() / f"deb-{release}.lock"):
        if not place.is_dir():
            _forget_old(f"deb-{release}-*")
            new = place.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)  # of a run that was killed
            new.mkdir()
            try:
                _build(release, new)
            except BaseException:
                shutil.rmtree(new)
                raise
            new.rename(place)
        os.utime(place)  # wanted now
    (found,) = place.glob("*.deb")
    return found


def _forget_old(pattern: str) -> None:
    """Remove what no test has wanted for a day; what is younger may be another run's, which goes on."""
    for older in machines.cache().glob(pattern):
        if older.stat().st_mtime < time.time() - DAY_S:
            shutil.rmtree(older)


def _build(release: str, output: Path) -> None:
    with subprocess.Popen(
        [ROOT / "packaging/build-deb", release],
        env={**os.environ, "AQD_DEB_OUTPUT": str(output)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as build:
        try:
            said, _ = build.communicate(timeout=600)
        except BaseException:
            # Not the shell alone: what it has started would go on.
            os.killpg(build.pid, signal.SIGKILL)
            raise
    assert build.returncode == 0, f"packaging/build-deb {release}:\n{said}"


def _digest() -> str:
    total = hashlib.sha256()
    for part in PARTS:
        top = ROOT / part
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(f"{path.relative_to(ROOT)} {path.stat().st_mode & 0o777}\n".encode())
                total.update(path.read_bytes())
    return total.hexdigest()[:16]


def version_of(deb: Path) -> str:
    return subprocess.run(
        ["dpkg-deb", "--field", str(deb), "Version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def successor(deb: Path, version: str, migrations: Mapping[str, str], target: Path) -> Path:
    """``deb`` as version ``version``, with migrations on top (name → online or breaking), in the directory ``target``."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        tree = Path(scratch, "tree")
        subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
        (packages,) = tree.glob("usr/lib/aqd/lib/python*/site-packages")
        init = packages / "aqd/__init__.py"
        # Its byte code is valid no more, as the hash of the source says.
        init.write_text(re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', init.read_text()))
        folder = packages / "aqd/_data/sql/migrations"
        number = len(list(folder.glob("*.sql")))
        for name, kind in migrations.items():
            number += 1
            (folder / f"{number:04}_{name}.sql").write_text(
                f"-- aqd: {kind}\ncreate table aqd.{name} (id bigint);\n"
            )
        old = version_of(deb)
        new = re.sub(r"^[^-]+", version, old)
        for script in (tree / "DEBIAN").iterdir():
            if script.name in ("control", "preinst", "prerm", "postinst"):
                text = script.read_text().replace(old, new)
                script.write_text(re.sub(r'(?m)^(    /usr/bin/python3 - )"\d+"', rf'\1"{number:04}"', text))
        path = target / f"aqd_{new}.deb"
        subprocess.run(
            ["dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "--build", str(tree), str(path)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return path
