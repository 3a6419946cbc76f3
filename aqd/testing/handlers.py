"""Handlers for tests: plugins loaded as the daemon loads them, and :func:`run_handler` for a single function.

Runs in test processes. Fails with :class:`aqd.errors.PluginError` for a plugin that a daemon would report as broken
(all reasons, one a line), :class:`LookupError` for a job type that no plugin serves, and
:class:`aqd.errors.InputError` for a job that could not be submitted.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, TypeAlias, Unpack

import msgspec
from msgspec import UNSET

from aqd import job as jobs
from aqd import plugin_files, plugins
from aqd.config import Config
from aqd.errors import PluginError
from aqd.hookspecs import NAME_PATTERN, Backoff, HandlerInfo, Handlers
from aqd.plugins import LoadedHandler, Registry
from aqd.strict_json import encode_json
from aqd.testing.attempts import Attempt, AttemptOptions, Bench, Outcome

# A plugin's file, a package's folder, a folder of plugins; or a module that is imported already.
Source: TypeAlias = str | os.PathLike[str] | ModuleType
Settings: TypeAlias = Mapping[str, Mapping[str, Any]]

_NOT_ASKED_FOR: Final = "not asked for"


class LoadedPlugins:
    """Plugins in this process, and the worker's part around them. A context manager; :func:`load_plugins` makes it."""

    def __init__(self, registry: Registry, config: Config) -> None:
        self.registry = registry
        self.config = config
        self._bench: Bench | None = None

    def __enter__(self) -> "LoadedPlugins":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """``aqd_worker_stop`` is called if a handler has run."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None

    @property
    def types(self) -> list[str]:
        """The job types that can be run."""
        return sorted(self.registry.handlers)

    @property
    def infos(self) -> list[HandlerInfo]:
        """What the handlers want: queue, attempts, limits."""
        return self.registry.infos()

    def run(self, type: str, payload: Any = UNSET, **options: Unpack[AttemptOptions]) -> Outcome:
        """One attempt of a job of ``type``, without a database."""
        return self.attempt(self._attempt(type, payload, options))

    def attempt(self, job: Attempt) -> Outcome:
        """One attempt of a job that is there already (:class:`aqd.testing.Queue` has claimed it)."""
        loaded = self._loaded(job.type)
        if self._bench is None:
            self._bench = Bench(self.registry, self.config)
        return self._bench.make(job, loaded)

    def max_attempts(self, type: str, own: int | None) -> int:
        """How many attempts a job has: its own number, else the handler's, else the configuration's."""
        return own or self._loaded(type).info.max_attempts or self.config.jobs.max_attempts

    def timeout_s(self, type: str, own: float | None) -> float:
        """How long an attempt may take, in the same order."""
        return own or self._loaded(type).info.timeout_s or self.config.jobs.timeout_s

    def backoff(self, type: str) -> Backoff:
        """How long a job waits for its retry."""
        jobs = self.config.jobs
        return self._loaded(type).info.backoff or Backoff(jobs.backoff_base_s, jobs.backoff_max_s)

    def keeps_output(self, type: str) -> bool:
        """Whether the output of completed jobs is kept."""
        return self._loaded(type).info.keep_output

    def _loaded(self, type: str) -> LoadedHandler:
        try:
            return self.registry.handlers[type]
        except KeyError:
            known = ", ".join(self.types) or "none"
            raise LookupError(f"no plugin serves the type {type!r}; those that are served: {known}") from None

    def _attempt(self, type: str, payload: Any, options: AttemptOptions) -> Attempt:
        info = self._loaded(type).info
        tags, meta = options.get("tags"), options.get("meta")
        request = jobs.validate(
            type,
            payload,
            queue=options.get("queue"),
            max_attempts=options.get("max_attempts"),
            timeout_s=options.get("timeout_s"),
            tags=tags,
            meta=meta,
            max_payload_bytes=self.config.jobs.max_payload_bytes,
        )
        number = options.get("attempt", 1)
        if number < 1:
            raise ValueError(f"attempt: counts from 1, not {number}")
        created = options.get("created_at") or datetime.now(UTC)
        return Attempt(
            id=options.get("job_id", 1),
            type=type,
            queue=request.queue or info.queue or jobs.DEFAULT_QUEUE,
            payload=request.payload,
            attempt=number,
            max_attempts=max(number, self.max_attempts(type, request.max_attempts)),
            created_at_us=round(created.timestamp() * 1e6),
            timeout_s=self.timeout_s(type, request.timeout_s),
            tags=encode_json(list(request.tags), field="tags") if request.tags else None,
            meta=request.meta,
            stop_after_s=options.get("stop_after_s"),
            stop=options.get("stop", "cancel"),
        )


def load_plugins(
    *sources: Source, settings: Settings | None = None, config: Config | None = None
) -> LoadedPlugins:
    """Load plugins as a daemon does, and refuse them where it would.

    ``sources``: paths of plugin files, of packages or of folders of plugins, or modules that are imported already;
    none means what ``config`` says (``plugins.dir`` and installed entry points). ``settings``: the tables
    ``[plugins.settings.NAME]``, instead of the configuration's. ``config`` is the built-in one unless it is given
    (``aqd.config.load("etc/aqd.toml", {})``).
    """
    config = config or Config()
    if settings is not None:
        tables = {name: dict(table) for name, table in settings.items()}
        config = _with_plugins(config, settings=tables)
    registry: Registry | None = None
    for folder, names in _folders([source for source in sources if not isinstance(source, ModuleType)]):
        if registry is not None:
            raise ValueError("plugins of several folders: name one folder, or files of one folder")
        registry = _load(_with_plugins(config, dir=folder, entry_points=False), names)
    if not sources:
        registry = _load(config, None)
    registry = registry or Registry()
    for source in sources:
        if isinstance(source, ModuleType):
            plugins.add_imported(registry, config, source)
    if problems := registry.problems():
        raise PluginError("\n".join(problems))
    return LoadedPlugins(registry, config)


def _with_plugins(config: Config, **changes: Any) -> Config:
    return msgspec.structs.replace(config, plugins=msgspec.structs.replace(config.plugins, **changes))


def _folders(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[str, set[str] | None]]:
    """Folders of plugins, each with the names of the plugins that are wanted, None for all."""
    found: dict[str, set[str] | None] = {}
    for source in paths:
        path = Path(os.path.abspath(source))
        if path.is_dir() and not (path / "__init__.py").exists():
            found[str(path)] = None
        elif path.exists():
            names = found.setdefault(str(path.parent), set())
            if names is not None:
                names.add(path.stem if path.suffix == ".py" else path.name)
        else:
            raise PluginError(f"there is no plugin {path}")
    return list(found.items())


def _load(config: Config, names: set[str] | None) -> Registry:
    skip: dict[str, str] = {}
    if names is not None:
        found = {candidate.name for candidate in plugin_files.find(config.plugins)}
        if missing := names - found:
            raise PluginError(f"{config.plugins.dir}: {', '.join(sorted(missing))} cannot be a plugin")
        skip = dict.fromkeys(found - names, _NOT_ASKED_FOR)
    with _timer_kept():
        registry = plugins.load(config, skip=skip)
        registry.plugins = [plugin for plugin in registry.plugins if plugin.error != _NOT_ASKED_FOR]
        if registry.threaded:  # as in a worker, after the fork
            for name, reason in plugins.load_late(registry, config, list(registry.threaded)).items():
                raise PluginError(f"plugin {name}: {reason}")
    return registry


@contextlib.contextmanager
def _timer_kept() -> Iterator[None]:
    """The limit of a plugin's import uses the process's one timer, which may be that of pytest-timeout."""
    left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
    since = time.monotonic()
    try:
        yield
    finally:
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - time.monotonic() + since, 0.001), every_s)


def run_handler(
    handler: Callable[..., Any] | str,
    payload: Any = UNSET,
    *,
    plugin: Source | LoadedPlugins | None = None,
    settings: Settings | None = None,
    config: Config | None = None,
    **options: Unpack[AttemptOptions],
) -> Outcome:
    """Run one attempt of a job in this process.

    ``handler``: a function of ``(payload)`` or ``(payload, job)``, plain or async, or the name of a job type that
    ``plugin`` serves (a path, a module, or what :func:`load_plugins` has made). With the function alone no options of
    a handler are known, and no hooks are called; with the type all is as the plugin registers it.
    """
    if isinstance(plugin, LoadedPlugins):
        return plugin.run(_type_of(handler), payload, **options)
    if plugin is not None:
        with load_plugins(plugin, settings=settings, config=config) as loaded:
            return loaded.run(_type_of(handler), payload, **options)
    if isinstance(handler, str):
        raise TypeError(f"the type {handler!r} needs plugin=, the file that registers it")
    name = getattr(handler, "__name__", "")
    type = name if NAME_PATTERN.fullmatch(name) else "handler"
    registry = Registry()
    collected = Handlers("test", {})
    collected.add(type, handler)
    registry.handlers[type] = LoadedHandler(*collected.collected[type])
    with LoadedPlugins(registry, config or Config()) as single:
        return single.run(type, payload, **options)


def _type_of(handler: Callable[..., Any] | str) -> str:
    if not isinstance(handler, str):
        raise TypeError("with plugin=, name the job type instead of the function")
    return handler
