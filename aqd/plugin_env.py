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
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

REBUILD = "`aqd plugin-env rebuild` installs the same packages anew"


class Package(NamedTuple):
    """A distribution in the environment. ``requested``: somebody asked for it, others came as its dependencies.
    ``source`` is the URL where it came from, if it was not found by its name."""

    name: str
    version: str
    requested: bool
    source: str


def problem(venv: str) -> str | None:
    """Why the environment at ``venv`` cannot be used by this process; None if it can, or if there is none."""
    reason = misfit(venv)
    if reason is None and venv and os.path.lexists(venv) and os.geteuid() == 0:
        owner = owner_of(venv)
        if owner is not None:
            return f"root must not run what the user {owner} may change: use `sudo -u {owner} aqd …`"
    return reason


def misfit(venv: str) -> str | None:
    """Why nobody on this Python can use the environment at ``venv``; None if it fits, or if there is none."""
    if not venv or not os.path.lexists(venv):
        return None
    made_for = version(venv)
    if made_for is None:
        return f"{venv} is no virtual environment (pyvenv.cfg is missing or cannot be read); {REBUILD}"
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if made_for != ours:
        return f"{venv} was made for Python {made_for}, and aqd runs on Python {ours}: {REBUILD}"
    folder = packages_dir(venv)
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} is missing or cannot be read; {REBUILD}"
    return None


def owner_of(venv: str) -> str | None:
    """The name of the ordinary user who may change the environment, because it or the directory above is theirs."""
    for path in (venv, os.path.dirname(os.path.abspath(venv))):
        uid = os.stat(path).st_uid
        if uid != 0:
            with contextlib.suppress(KeyError):
                return pwd.getpwuid(uid).pw_name
            return str(uid)
    return None


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
            yield Package(name, distribution.version, requested, _url(origin))


def _url(origin: str | None) -> str:
    import msgspec

    if not origin:
        return ""
    try:
        url = msgspec.json.decode(origin, type=dict[str, object]).get("url", "")
    except msgspec.DecodeError:
        return ""
    return url if isinstance(url, str) else ""
