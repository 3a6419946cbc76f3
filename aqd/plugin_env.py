"""The plugins' own virtual environment: what an administrator has installed for them beside aqd's packages.

Used by whatever loads plugins, to make the packages importable, and by ``aqd plugin-env`` and ``aqd check``. The
environment (``plugins.venv``) belongs to the administrator: an upgrade of aqd leaves it alone.

Promises:

* Its packages stand behind aqd's own on ``sys.path``, so they never replace one that aqd itself runs on.
* One that does not fit the interpreter is not used, and :func:`problem` says why; a plugin of it must not vanish in
  silence, or its jobs would FAIL as of an unknown type.
* Root does not import what somebody else may change: the service's user owns the directory of the environment, and
  so do its jobs.
* Only files are looked at: nothing of the environment is run here.
"""

import contextlib
import os
import pwd
import site
import stat
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

REBUILD = "`aqd plugin-env rebuild` installs the same packages anew"


class Package(NamedTuple):
    """A distribution in the environment. ``requested``: somebody asked for it, others came as its dependencies.
    ``source`` is the URL where it came from, if it was not found by its name, as pip takes it: of a repository with
    the commit. ``editable``: the source is a directory that is used where it lies."""

    name: str
    version: str
    requested: bool
    source: str
    editable: bool


def problem(venv: str) -> str | None:
    """Why the environment at ``venv`` cannot be used by this process; None if it can, or if there is none."""
    reason = misfit(venv)
    if reason is None and venv and os.path.lexists(venv):
        reason = unsafe(venv)
    return reason


def misfit(venv: str) -> str | None:
    """Why nobody on this Python can use the environment at ``venv``; None if it fits, or if there is none."""
    if not venv or not os.path.lexists(venv):
        return None
    made_for = version(venv)
    if made_for is None:
        return (
            f"{venv} is no virtual environment (pyvenv.cfg is missing or cannot be read): name another place"
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if made_for != ours:
        return f"{venv} was made for Python {made_for}, and aqd runs on Python {ours}: {REBUILD}"
    folder = packages_dir(venv)
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} is missing or cannot be read; {REBUILD}"
    return None


def unsafe(venv: str) -> str | None:
    """Why root, if that is who asks, must not run what is in the environment: others may change it, or the directory
    above. None for everybody else."""
    if os.geteuid() != 0:
        return None
    for path in (venv, os.path.dirname(os.path.abspath(venv))):
        found = os.stat(path)
        if found.st_uid != 0:
            user = str(found.st_uid)
            with contextlib.suppress(KeyError):
                user = pwd.getpwuid(found.st_uid).pw_name
            return f"root must not run what the user {user} may change: use `sudo -u {user} aqd …`"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"root must not run what others may change: use `chmod go-w {path}`"
    return None


def is_environment(path: str) -> bool:
    """Whether a virtual environment is there, be it damaged or another Python's; anything else is not ours to touch."""
    return os.path.isfile(f"{path}/pyvenv.cfg") or any(Path(path).glob("lib/python*/site-packages"))


def version(venv: str) -> str | None:
    """The minor version of Python (``"3.11"``) that the environment was made for, None if it is none."""
    try:
        lines = (Path(venv) / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip() in ("version", "version_info"):  # venv's and virtualenv's name of it
            return ".".join(value.strip().split(".")[:2])
    return None


def packages_dir(venv: str) -> str:
    """Where the packages are, for the interpreter that asks."""
    abi = getattr(sys, "abiflags", "")
    return f"{venv}/lib/python{sys.version_info.major}.{sys.version_info.minor}{abi}/site-packages"


def extend_path(venv: str) -> str | None:
    """Make the packages importable, behind everything else; returns :func:`problem` instead if there is one."""
    reason = problem(venv)
    if reason is None and venv and os.path.lexists(venv):
        folder = packages_dir(venv)
        if folder not in sys.path:
            site.addsitedir(folder)  # also reads .pth files: namespace packages, editable installations
    return reason


def packages(venv: str) -> list[Package]:
    """What is installed in the environment, by name, whichever Python it was made for."""
    found = {package.name.lower(): package for package in _packages(venv)}
    return [found[name] for name in sorted(found)]


def _packages(venv: str) -> Iterator[Package]:
    folders = [str(path) for path in Path(venv).glob("lib/python*/site-packages")]
    for distribution in metadata.distributions(path=folders):
        # Both files are pip's, see "Recording the Direct URL Origin" and "REQUESTED" in PyPA's specifications.
        requested = distribution.read_text("REQUESTED") is not None
        origin = distribution.read_text("direct_url.json")
        name = distribution.metadata["Name"]
        if name:
            yield Package(name, distribution.version, requested, *_source(origin))


def _source(origin: str | None) -> tuple[str, bool]:
    """The URL as pip takes it, and whether it is used where it lies."""
    import msgspec

    class Vcs(msgspec.Struct):
        vcs: str
        commit_id: str

    class Directory(msgspec.Struct):
        editable: bool = False

    class Origin(msgspec.Struct):
        url: str = ""
        subdirectory: str = ""
        vcs_info: Vcs | None = None
        dir_info: Directory | None = None

    try:
        found = msgspec.json.decode(origin or "{}", type=Origin)
    except msgspec.DecodeError:
        return "", False
    url = found.url
    if found.vcs_info is not None:
        url = f"{found.vcs_info.vcs}+{url}@{found.vcs_info.commit_id}"
    if found.subdirectory:
        url += f"#subdirectory={found.subdirectory}"
    return url, found.dir_info is not None and found.dir_info.editable
