"""Finds plugins and imports their code: files and packages of the plugins folder, and entry points.

Used by whatever loads plugins (loader, worker, and the child process behind ``aqd plugins``).

What counts as a plugin: ``NAME.py`` and ``NAME/__init__.py`` in the plugins folder, and each entry
point of the group ``aqd.plugins``. Names that begin with ``.`` or ``_`` or end with ``~`` (editors'
copies), everything that does not end in ``.py`` and folders without ``__init__.py`` are passed over in
silence. What looks like a plugin and cannot be one (a dangling link, an unreadable file, a name taken
twice) is found *with a reason* and never passed over.

Promises:

* No byte code is read or written for anything below the plugins folder. Python trusts a ``.pyc`` whose
  recorded time (in seconds) and size fit; two versions written within a second with the same length
  would run the older one after a reload. Helpers imported from there obey the same rule.
* A plugin shadows nothing. The folder stands at the very end of ``sys.path``, so helpers beside a
  plugin are found by plain ``import helper`` but never instead of the standard library or an installed
  package; and a plugin whose name is taken (``json.py``) becomes the module ``aqd_plugin_json``.
* A file is executed once per process, as a plugin and as somebody's helper alike.

Fails: :class:`aqd.errors.PluginError` when the folder itself is not there; the import functions let
through whatever the plugin's code raises.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from aqd import plugin_env
from aqd.errors import PluginError
from aqd.paths import data_dir

if TYPE_CHECKING:
    from aqd.config import Plugins

ENTRY_POINT_GROUP = "aqd.plugins"
MODULE_PREFIX = "aqd_plugin_"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DIGEST_LENGTH = 12

# The SHA-256 of what was executed, by path: a plugin's digest must describe the code that runs, not a
# file that was replaced a moment later.
_executed: dict[str, str] = {}
_folders: set[str] = set()


@dataclass(frozen=True)
class Candidate:
    """Something that is, or claims to be, a plugin. ``error`` says why it cannot be imported at all."""

    name: str
    source: str
    path: Path | None = None
    entry_point: metadata.EntryPoint | None = None
    version: str = ""
    error: str | None = None

    @property
    def is_package(self) -> bool:
        return self.path is not None and self.path.name == "__init__.py"


def folder(cfg: "Plugins") -> Path:
    """The plugins folder, absolute; the shipped one unless ``plugins.dir`` names another."""
    if not cfg.dir:
        return data_dir("plugins")
    path = Path(os.path.abspath(os.path.expanduser(cfg.dir)))
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise PluginError(f"plugins.dir: {path} is not a folder")
        os.scandir(path).close()
    except OSError as error:
        raise PluginError(f"plugins.dir: {path} cannot be read: {error.strerror}") from None
    return path


def find(cfg: "Plugins") -> list[Candidate]:
    """All candidates: those of the folder by name, then entry points by name. Imports nothing, but makes the packages of
    ``plugins.venv`` importable; if they cannot be, the environment itself is a candidate with the reason.

    A name belongs to the first who has it; later ones carry an error that names both.
    """
    reason = plugin_env.extend_path(cfg.venv)
    found: list[Candidate] = []
    owners: dict[str, Candidate] = {}
    candidates = list(_in_folder(folder(cfg)))
    if reason is not None:
        candidates.insert(0, Candidate("plugins.venv", cfg.venv, error=reason))
    if cfg.entry_points:
        candidates += _installed()
    for candidate in candidates:
        owner = owners.setdefault(candidate.name, candidate)
        if owner is not candidate:
            reason = f"the plugin name {candidate.name!r} is already taken by {owner.source}"
            candidate = Candidate(candidate.name, candidate.source, version=candidate.version, error=reason)
        found.append(candidate)
    return found


def import_plugin(candidate: Candidate) -> object:
    """Import the candidate's code; returns the object that carries its hooks (usually the module)."""
    if candidate.entry_point is not None:
        return candidate.entry_point.load()
    assert candidate.path is not None
    name = candidate.name
    if _is_free_for(name, candidate.path):
        return importlib.import_module(name)
    name = MODULE_PREFIX + name
    search = [str(candidate.path.parent)] if candidate.is_package else None
    loader = _Loader(name, str(candidate.path))
    spec = importlib.util.spec_from_file_location(
        name, candidate.path, loader=loader, submodule_search_locations=search
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def add_to_path(path: Path) -> None:
    """Make helpers in ``path`` importable, behind everything else and without byte code."""
    text = str(path)
    if text not in _folders:
        _folders.add(text)
        if _path_hook not in sys.path_hooks:
            sys.path_hooks.insert(0, _path_hook)
        for known in list(sys.path_importer_cache):
            if _is_below(known):
                del sys.path_importer_cache[known]
    if text not in sys.path:
        sys.path.append(text)
    importlib.invalidate_caches()


def forget(before: set[str], candidate: Candidate) -> None:
    """Drop the modules that a refused plugin brought in: its own, and those below the plugins folder.

    ``before`` are the names in ``sys.modules`` before its import. Installed packages that it imported
    stay: they are sound, and importing many of them twice in one process breaks them.
    """
    own = {candidate.name, MODULE_PREFIX + candidate.name}
    if candidate.path is None:
        own = set()
    for name in set(sys.modules) - before:
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if name.partition(".")[0] in own or (isinstance(origin, str) and _is_below(origin)):
            sys.modules.pop(name, None)


def digest(candidate: Candidate) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the plugin's code; "" if it cannot be read.

    For a single file that is what ``sha256sum`` prints; for a package it covers the names and the
    contents of all its ``.py`` files. Code that has been executed counts as it was then.
    """
    path = candidate.path
    if candidate.entry_point is not None:
        module = sys.modules.get(candidate.entry_point.module)
        origin = getattr(module, "__file__", None)
        path = Path(origin) if isinstance(origin, str) else None
    if path is None:
        return ""
    try:
        if path.name != "__init__.py":
            return _file_digest(path)[:_DIGEST_LENGTH]
        total = hashlib.sha256()
        for file in sorted(path.parent.rglob("*.py")):
            total.update(f"{_file_digest(file)}  {file.relative_to(path.parent)}\n".encode())
        return total.hexdigest()[:_DIGEST_LENGTH]
    except OSError:
        return ""


# --- finding ------------------------------------------------------------------------------------


def _in_folder(path: Path) -> Iterator[Candidate]:
    for name in sorted(os.listdir(path)):
        if name.startswith((".", "_")) or name.endswith("~"):
            continue
        entry = path / name
        if name.endswith(".py"):
            stem, target = name.removesuffix(".py"), entry
        else:
            stem, target = name, entry / "__init__.py"
        try:
            mode = target.stat().st_mode
        except OSError as error:
            # A folder without __init__.py is data; anything else that ends in .py is meant for us.
            if target is entry or os.path.lexists(target) or isinstance(error, PermissionError):
                yield Candidate(stem, str(target), error=_unreadable(target, error))
            continue
        if target is entry and stat.S_ISDIR(mode):
            continue
        reason = None
        if not stat.S_ISREG(mode):
            reason = "is not a regular file"  # reading a FIFO would wait for ever
        elif _FILE_NAME.fullmatch(stem) is None:
            reason = f"{stem!r} cannot be a plugin's name: only letters, digits, _ and - are allowed"
        elif not os.access(target, os.R_OK):
            reason = "cannot be read: Permission denied"
        yield Candidate(stem, str(target), path=None if reason else target, error=reason)


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    return f"cannot be read: {error.strerror}"


def _installed() -> list[Candidate]:
    found: dict[tuple[str, str], Candidate] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution, version = "", ""
        if entry_point.dist is not None:
            distribution, version = entry_point.dist.name, entry_point.dist.version
        source = (
            f"entry point {entry_point.name} = {entry_point.value} of {distribution or 'unknown'} {version}"
        )
        # One distribution may be found twice (an editable install and its folder on the path).
        key = (entry_point.name, entry_point.value)
        found.setdefault(
            key, Candidate(entry_point.name, source.rstrip(), entry_point=entry_point, version=version)
        )
    return [found[key] for key in sorted(found)]


# --- importing ----------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the source each time. Reads it once, so the code and its digest are of one version."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        _executed[path] = hashlib.sha256(data).hexdigest()
        code: CodeType = self.source_to_code(data, path)
        return code


def _path_hook(path: str) -> importlib.machinery.FileFinder:
    """For ``sys.path_hooks``: serves the plugins folders and what lies below, declines the rest."""
    if not _is_below(path) or not os.path.isdir(path):
        raise ImportError("not a plugins folder", path=path)
    extensions = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
    return importlib.machinery.FileFinder(path, extensions, (_Loader, importlib.machinery.SOURCE_SUFFIXES))


def _is_below(path: str) -> bool:
    return any(path == top or path.startswith(top + os.sep) for top in _folders)


def _is_free_for(name: str, path: Path) -> bool:
    """True if ``import name`` would give this very file: nothing else on the machine has that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module without __spec__, such as __main__
        return False
    return spec is not None and spec.origin == str(path)


def _file_digest(path: Path) -> str:
    return _executed.get(str(path)) or hashlib.sha256(path.read_bytes()).hexdigest()
