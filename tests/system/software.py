"""aqd inside a machine, installed from the checkout's wheel as an administrator would without a package.

``boot_aqd(release)`` (conftest.py) gives a machine with a running PostgreSQL, a database and role "aqd" (peer
authentication), /usr/bin/aqd, the units of systemd/, the user aqd and the plugin ``fate`` in /etc/aqd/plugins.d; no
unit is started. A machine of one's own: ``Machine(release, binds=binds(release))``, then ``install(machine)``.

The dependencies are fetched once for each release (10 s) and kept beside the trees (machine.cache); the wheel is
built once for each test process. Both appear read-only in /opt.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from tests.system import machine as machines
from tests.system.machine import Machine

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests/fixtures/plugins"
UNITS = Path("/usr/lib/systemd/system")
CONFIG = """
[plugins]
dir = "/etc/aqd/plugins.d"
entry_points = false
[plugins.settings.fate]
side = "/var/lib/aqd/side"
"""


def binds(release: str) -> dict[str, Path]:
    """What a machine must bind to have aqd: the environment with the dependencies, and the unpacked wheel."""
    return {"/opt/aqd": _environment(release), "/opt/aqd-code": _code(release)}


def install(machine: Machine, config: str = CONFIG) -> None:
    """Put aqd into a running machine."""
    machine.write("/usr/bin/aqd", "#!/opt/aqd/bin/python\nfrom aqd.cli import main\nmain()\n", 0o755)
    for unit in (ROOT / "systemd").iterdir():
        if unit.suffix in (".service", ".socket"):
            machine.copy(unit, str(UNITS / unit.name))
    machine.copy(ROOT / "systemd/aqd.sysusers", "/usr/lib/sysusers.d/aqd.conf")
    machine.copy(ROOT / "systemd/aqd.tmpfiles", "/usr/lib/tmpfiles.d/aqd.conf")
    machine.write("/etc/aqd/aqd.toml", config)
    machine.copy(PLUGINS / "fate.py", "/etc/aqd/plugins.d/fate.py")
    machine.sh(
        "systemd-sysusers aqd.conf && systemd-tmpfiles --create aqd.conf && systemctl daemon-reload &&"
        " cd / && su postgres -c 'createuser aqd && createdb --owner=aqd aqd'"
    )


def _python(release: str) -> str:
    """The version of the release's Python, such as 3.11."""
    link = (machines.tree(release) / "usr/bin/python3").readlink()
    return link.name.removeprefix("python")


def _environment(release: str) -> Path:
    """A virtual environment with what pyproject.toml asks for, to lie at /opt/aqd."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    key = hashlib.sha256(" ".join(sorted(wanted)).encode()).hexdigest()[:12]
    place = machines.cache() / f"{release}-environment-{key}"
    with machines.locked(place.with_suffix(".lock")):
        if place.is_dir():
            return place
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        version = _python(release)
        packages = new / f"lib/python{version}/site-packages"
        packages.mkdir(parents=True)
        (new / "bin").mkdir()
        (new / "bin/python").symlink_to("/usr/bin/python3")
        (new / "pyvenv.cfg").write_text(
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n"
        )
        platforms = [
            f"--platform={name}_{platform.machine()}" for name in ("manylinux2014", "manylinux_2_28")
        ]
        fetch = [
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--root-user-action=ignore",
            "--no-compile",
        ]
        target = [f"--target={packages}", "--only-binary=:all:", f"--python-version={version}", *platforms]
        subprocess.run([sys.executable, "-m", "pip", *fetch, *target, *wanted], check=True, timeout=170)
        (packages / "aqd.pth").write_text("/opt/aqd-code\n")
        _compile(release, new, "/opt/aqd")
        new.rename(place)
    return place


@functools.cache
def _wheel() -> Path:
    """The wheel of this checkout, made without fetching anything."""
    place = Path(tempfile.mkdtemp(prefix="aqd-wheel-", dir="/var/tmp"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(place, ignore_errors=True) if os.getpid() == owner else None)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(place.glob("*.whl"))


@functools.cache
def _code(release: str) -> Path:
    place = _wheel().parent / release
    with zipfile.ZipFile(_wheel()) as archive:
        archive.extractall(place)
    for path in (place, *place.rglob("*")):  # zipfile follows our umask
        path.chmod(0o755 if path.is_dir() else 0o644)
    _compile(release, place, "/opt/aqd-code")
    return place


def _compile(release: str, directory: Path, target: str) -> None:
    """Byte code by the release's own Python: the machine sees the directory read-only."""
    script = 'mount --bind "$0" "$1/mnt" && exec chroot "$1" python3 -m compileall -q -s /mnt -p "$2" /mnt'
    subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation=private",
            "sh",
            "-euc",
            script,
            str(directory),
            str(machines.tree(release)),
            target,
        ],
        stdout=subprocess.DEVNULL,  # it complains about files that are templates
        check=False,
        timeout=170,
    )
