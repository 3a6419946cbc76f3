"""Loads plugins: each one for itself, so that a broken one is reported and stops nobody else.

Runs in the loader (:func:`load`, before any fork), in workers (:func:`load_late`, for plugins that
cannot live in the loader) and, in a child process of its own, behind ``aqd plugins`` and ``aqd check``
(:func:`inspect`): the command line never runs a plugin's code itself.

Promises:

* A plugin is loaded whole or not at all. What it registered before it failed is taken back.
* Each plugin that was found appears in :attr:`Registry.plugins`, with the reason if it is broken.
* Two handlers of one type: the plugin that comes second is refused, and the reason names both.
* A plugin whose import leaves a Python thread running is not kept: threads do not survive the fork into
  workers, but locks they hold do. It is named in :attr:`Registry.threaded`; the loader then has to
  start again with it in ``late``, and its workers import it after the fork.

Fails: :class:`aqd.errors.PluginError` if the plugins folder itself cannot be read. All else is a
:class:`PluginInfo` in state ``broken``. What cannot be survived in one process (``os._exit``, a crash,
a loop in C code at import) ends the loader; ``progress`` has told who is to blame, and the next one is
given that name in ``skip``.
"""

import contextlib
import inspect as _inspect
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from aqd import confine, plugin_files, plugin_guard
from aqd.errors import PluginError, StopJob
from aqd.failures import printable
from aqd.hookspecs import HOOK_NAMES, PROJECT, Handler, HandlerInfo, Handlers, Hooks, PluginInfo
from aqd.plugin_files import Candidate

if TYPE_CHECKING:
    from aqd.config import Config

# Characters of a name, a path, a version; of why a plugin is broken.
MAX_TEXT = 1_000
MAX_REASON = 65_536
_NOTHING: Mapping[str, str] = MappingProxyType({})
# What a child may take beyond the plugin's own limit before it is killed: C code cannot be interrupted.
_CHILD_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class LoadedHandler:
    """A handler that can be called in this process."""

    info: HandlerInfo
    function: Handler


class _Probe(msgspec.Struct):
    """What a child found out about one plugin."""

    info: PluginInfo
    handlers: list[HandlerInfo]


class Registry:
    """The plugins of one generation, as far as this process has them.

    ``handlers`` can be called here; ``late`` holds, by plugin, what is known of handlers that cannot.
    """

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Hooks)
        self.handlers: dict[str, LoadedHandler] = {}
        self.late: dict[str, list[HandlerInfo]] = {}
        self.plugins: list[PluginInfo] = []
        self.threaded: dict[str, str] = {}

    def infos(self) -> list[HandlerInfo]:
        """All handlers that workers of this generation serve, the late ones included, by type."""
        infos = [handler.info for handler in self.handlers.values()]
        infos += [info for late in self.late.values() for info in late]
        return sorted(infos, key=lambda info: info.type)

    def types(self) -> list[str]:
        """The job types of :meth:`infos`."""
        return [info.type for info in self.infos()]

    def problems(self) -> list[str]:
        """One line for each broken plugin: its source and the reason."""
        return [f"plugin {p.name} ({p.source}): {p.error}" for p in self.plugins if p.state == "broken"]

    def call(self, hook: str, **arguments: Any) -> list[tuple[str, BaseException]]:
        """Call a hook of all plugins; returns the errors by plugin instead of stopping at the first.

        Only the exceptions by which aqd ends a job get through.
        """
        failures: list[tuple[str, BaseException]] = []
        for implementation in reversed(getattr(self.manager.hook, hook).get_hookimpls()):
            try:
                implementation.function(*[arguments[name] for name in implementation.argnames])
            except StopJob:
                raise
            except BaseException as error:
                failures.append((implementation.plugin_name, error))
        return failures

    def put(self, info: PluginInfo) -> None:
        """Add a plugin, or replace what was known of it."""
        for index, known in enumerate(self.plugins):
            if known.name == info.name and known.source == info.source:
                self.plugins[index] = info
                return
        self.plugins.append(info)


def load(
    cfg: "Config",
    *,
    skip: Mapping[str, str] = _NOTHING,
    late: Collection[str] = (),
    progress: Callable[[str], None] = lambda _name: None,
) -> Registry:
    """Load all plugins into this process.

    ``skip``: plugins (name → reason) that are reported as broken without being touched. ``late``:
    plugins that are looked at in a child only. ``progress`` is called with a plugin's name before its
    code runs. Check :attr:`Registry.threaded` before forking.
    """
    registry = Registry()
    candidates = plugin_files.find(cfg.plugins)
    plugin_files.add_to_path(plugin_files.folder(cfg.plugins))
    for candidate in candidates:
        if candidate.error is not None:
            _refuse(registry, candidate, candidate.error)
        elif candidate.name in skip:
            _refuse(registry, candidate, skip[candidate.name])
        elif candidate.name in late:
            progress(candidate.name)
            _add_late(registry, cfg, candidate)
        else:
            progress(candidate.name)
            _load_one(registry, cfg, candidate, refuse_threads=True)
    return registry


def load_late(registry: Registry, cfg: "Config", names: Collection[str]) -> dict[str, str]:
    """Load the plugins ``names`` after the fork; returns the reasons (by name) of those that failed.

    For workers: threads may now start. A plugin that fails here, though its probe was fine, is broken
    in this worker only.
    """
    failed: dict[str, str] = {}
    plugin_files.add_to_path(plugin_files.folder(cfg.plugins))
    for candidate in plugin_files.find(cfg.plugins):
        if candidate.name not in names or candidate.error is not None:
            continue
        registry.late.pop(candidate.name, None)
        info = _load_one(registry, cfg, candidate, refuse_threads=False)
        if info.error is not None:
            failed[candidate.name] = info.error
    for name in set(names) - failed.keys() - {plugin.name for plugin in registry.plugins}:
        failed[name] = "is not there any more"
    return failed


def add_imported(registry: Registry, cfg: "Config", module: ModuleType) -> None:
    """Register a module that is imported already, for :mod:`aqd.testing`: what is wrong with it is raised as it is."""
    name = module.__name__.rpartition(".")[2]
    candidate = Candidate(name, getattr(module, "__file__", None) or name)
    handlers = Handlers(name, cfg.plugins.settings)
    _register(registry, candidate, module, handlers)
    handlers.close()
    for type, (handler, function) in handlers.collected.items():
        registry.handlers[type] = LoadedHandler(handler, function)
    info = _describe(candidate)
    info.handlers = sorted(handlers.collected)
    registry.put(info)


def probe(cfg: "Config", name: str) -> tuple[PluginInfo, list[HandlerInfo]]:
    """Import the plugin ``name`` in a child process and tell what it registers; bounded in time.

    Raises :class:`PluginError` if there is no plugin of that name.
    """
    for candidate in plugin_files.find(cfg.plugins):
        if candidate.name == name:
            return _probe(cfg, candidate)
    raise PluginError(f"there is no plugin {name!r} in {plugin_files.folder(cfg.plugins)} or installed")


def inspect(cfg: "Config") -> list[PluginInfo]:
    """What :func:`load` would find, found in a child process: for the command line.

    A plugin that takes the child down with it is blamed and passed over in the next try.
    """
    plugin_files.folder(cfg.plugins)  # a folder that is not there is an error of the caller
    skip: dict[str, str] = {}
    while True:

        def work(report: Callable[[str], None]) -> bytes:
            return msgspec.msgpack.encode(load(cfg, skip=skip, progress=report).plugins)

        answer = plugin_guard.ask_child(work, cfg.plugins.import_timeout_s + _CHILD_GRACE_S)
        if answer.data is not None:
            return msgspec.msgpack.decode(answer.data, type=list[PluginInfo])
        if not answer.last or answer.last in skip:
            raise PluginError(f"the plugins could not be inspected: {answer.failure}")
        skip[answer.last] = answer.failure


# --- one plugin -----------------------------------------------------------------------------------


def _load_one(registry: Registry, cfg: "Config", candidate: Candidate, *, refuse_threads: bool) -> PluginInfo:
    """Import and register one plugin into ``registry``; on any failure nothing of it is left."""
    modules = set(sys.modules)
    threads = set(threading.enumerate())
    handlers = Handlers(candidate.name, cfg.plugins.settings)
    info = _describe(candidate)

    def work() -> None:
        plugin = plugin_files.import_plugin(candidate)
        info.version = info.version or _version(plugin)
        _register(registry, candidate, plugin, handlers)

    near = str(plugin_files.folder(cfg.plugins))
    error = plugin_guard.limited(cfg.plugins.import_timeout_s, work, near)
    handlers.close()
    info.digest = plugin_files.digest(candidate)
    info.handlers = sorted(handlers.collected)
    started = [thread.name for thread in threading.enumerate() if thread not in threads]
    if error is None and not (started and refuse_threads):
        for type, (handler, function) in handlers.collected.items():
            registry.handlers[type] = LoadedHandler(handler, function)
        registry.put(info)
        return info
    if registry.manager.has_plugin(candidate.name):
        registry.manager.unregister(name=candidate.name)
    plugin_files.forget(modules, candidate)
    if error is not None:
        return _refuse(registry, candidate, error)
    registry.threaded[candidate.name] = f"started {_count(started)} at import: {', '.join(started)}"
    registry.late[candidate.name] = [handler for handler, _ in handlers.collected.values()]
    info.state = "late"
    registry.put(info)
    return info


def _register(registry: Registry, candidate: Candidate, plugin: object, handlers: Handlers) -> None:
    """Check and register the hooks of ``plugin``, then let it declare its handlers."""
    manager = registry.manager
    _check_hooks(manager, plugin)
    registered = manager.get_name(plugin)
    if registered is not None:
        raise PluginError(f"is the same object as the plugin {registered!r}")
    manager.register(plugin, candidate.name)
    for implementation in manager.hook.aqd_register.get_hookimpls():
        if implementation.plugin is plugin:
            implementation.function(*[handlers for _ in implementation.argnames])
    refused = [
        f"handler {info.type!r}: {reason}"
        for info, _ in handlers.collected.values()
        if info.confinement is not None
        for reason in confine.refusals(info.confinement)
    ]
    if refused:
        raise PluginError("; ".join(refused))
    owners = {info.type: info.plugin for info in registry.infos()}
    for type in handlers.collected:
        if type in owners:
            sources = {known.name: known.source for known in registry.plugins}
            owner = owners[type]
            raise PluginError(
                f"two handlers of the type {type!r}: one in {sources.get(owner, owner)}, one in {candidate.source}"
            )


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse what pluggy would accept in silence, or refuse with less to go by."""
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        hook = name if options is None else options.get("specname") or name
        if options is None:
            if name in HOOK_NAMES and _inspect.isroutine(getattr(plugin, name)):
                raise PluginError(f"{name} lacks the decorator @aqd.hookimpl, so it would never be called")
            continue
        if hook not in HOOK_NAMES:
            raise PluginError(f"there is no hook {hook!r}; the hooks are {', '.join(HOOK_NAMES)}")
        function: Any = getattr(plugin, name)
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"hook {hook}: wrappers are not supported")
        if _inspect.iscoroutinefunction(function) or _inspect.isgeneratorfunction(function):
            raise PluginError(f"hook {hook}: must be a plain function (no async, no yield)")
        allowed = [p for p in _inspect.signature(getattr(Hooks, hook)).parameters if p != "self"]
        for parameter in _inspect.signature(function).parameters.values():
            optional = parameter.default is not parameter.empty
            named = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if optional or (named and parameter.name in allowed):
                continue
            raise PluginError(
                f"hook {hook}{_inspect.signature(function)}: the argument {parameter.name!r} does not exist; "
                f"allowed are {', '.join(allowed)}, or fewer"
            )


def _add_late(registry: Registry, cfg: "Config", candidate: Candidate) -> None:
    info, handlers = _probe(cfg, candidate)
    taken = sorted({handler.type for handler in handlers} & set(registry.types()))
    if info.error is None and taken:
        info.state, info.error = "broken", f"another plugin already serves the type {', '.join(taken)}"
    if info.error is None:
        registry.late[candidate.name] = handlers
    registry.put(info)


def _probe(cfg: "Config", candidate: Candidate) -> tuple[PluginInfo, list[HandlerInfo]]:
    def work(_report: Callable[[str], None]) -> bytes:
        registry = Registry()
        plugin_files.add_to_path(plugin_files.folder(cfg.plugins))
        info = _load_one(registry, cfg, candidate, refuse_threads=False)
        return msgspec.msgpack.encode(_Probe(info, registry.infos()))

    if candidate.error is not None:
        return _describe(candidate, error=candidate.error), []
    answer = plugin_guard.ask_child(work, cfg.plugins.import_timeout_s + _CHILD_GRACE_S)
    if answer.data is None:
        return _describe(candidate, error=answer.failure), []
    found = msgspec.msgpack.decode(answer.data, type=_Probe)
    if found.info.error is None:
        found.info.state = "late"
    return found.info, found.handlers


def _refuse(registry: Registry, candidate: Candidate, reason: str) -> PluginInfo:
    info = _describe(candidate, error=reason)
    registry.put(info)
    return info


def _describe(candidate: Candidate, error: str | None = None) -> PluginInfo:
    # Lone surrogates (of a file's name, of an exception's text) cannot be sent: the whole load would fail.
    return PluginInfo(
        name=printable(candidate.name, MAX_TEXT),
        source=printable(candidate.source, MAX_TEXT),
        version=printable(candidate.version, MAX_TEXT),
        digest=plugin_files.digest(candidate),
        state="broken" if error is not None else "loaded",
        error=None if error is None else printable(error, MAX_REASON),
    )


def _version(plugin: object) -> str:
    version = None
    with contextlib.suppress(Exception):  # an entry point may be any object
        version = getattr(plugin, "__version__", None)
    return printable(version, MAX_TEXT) if isinstance(version, str) else ""


def _count(threads: list[str]) -> str:
    return "a thread" if len(threads) == 1 else f"{len(threads)} threads"
