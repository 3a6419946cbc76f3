"""What plugins see: the hooks, the object they register handlers with, and the job they are given.

A plugin is a Python file in the plugins folder, a package there, or an installed distribution with an
entry point in the group ``aqd.plugins``. It imports :mod:`aqd` and marks its hooks with
:data:`aqd.hookimpl`. A hook may take fewer arguments than listed here, never others.

======================  ==========================  ============================================
hook                    runs in                     when
======================  ==========================  ============================================
``aqd_register``        loader (before any fork)    once per generation, right after the import
``aqd_worker_start``    worker                      once, before its first job
``aqd_worker_stop``     worker                      once, before it ends on purpose
``aqd_job_start``       worker                      before the handler of each job
``aqd_job_finish``      worker                      after the handler of each job, however it ended
======================  ==========================  ============================================

Fails: :class:`Handlers` raises :class:`ValueError` or :class:`TypeError` with what, where and the
bound; the plugin is then refused as a whole and the others go on (:mod:`aqd.plugins`).

Imported by every process that runs handlers or talks about them; it depends on the standard library,
msgspec and pluggy only.
"""

import copy
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

import msgspec
import pluggy

PROJECT = "aqd"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# Names of job types and queues, the same rule that a submitted job has to meet.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MAX_ATTEMPTS_BOUND = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)


class Backoff(msgspec.Struct, frozen=True):
    """How long a failed job waits: between ``base_s`` and ``base_s * factor**attempt``, never above ``max_s``.

    The wait is drawn evenly from that range (full jitter), so that a thousand jobs that failed
    together do not come back together. Raises :class:`ValueError` for a range that makes no sense.
    """

    base_s: float = 2.0
    max_s: float = 3600.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        for name, value, low in (
            ("base_s", self.base_s, 0.0),
            ("max_s", self.max_s, 0.0),
            ("factor", self.factor, 1.0),
        ):
            if not _is_number(value) or value < low:
                raise ValueError(f"backoff: {name} must be a number of at least {low:g}, not {value!r}")
        if self.base_s > self.max_s:
            raise ValueError(f"backoff: base_s ({self.base_s:g}) is above max_s ({self.max_s:g})")


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel is told about a job's process; None and empty mean "as it is".

    ``rlimits`` are soft limits by name ("NOFILE"), set around the job. All behind them cannot be undone, so the
    job gets a process of its own.
    """

    oom_score_adj: int | None = None
    rlimits: dict[str, int] = msgspec.field(default_factory=dict)
    hard_rlimits: dict[str, int] = msgspec.field(default_factory=dict)
    nice: int | None = None
    no_new_privs: bool = False
    user: str | None = None
    group: str | None = None

    @property
    def irreversible(self) -> bool:
        """Whether a process that had this applied can run nothing else."""
        return bool(
            self.hard_rlimits or self.nice is not None or self.no_new_privs or self.user or self.group
        )


class HandlerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the node knows about a handler without holding its code; travels between processes.

    ``None`` means "as the configuration says". ``wants_job`` tells a ``(payload, job)`` handler from
    a ``(payload)`` one. ``one_shot``: each job gets a fresh process of its own, by wish or because its
    confinement is irreversible.
    """

    type: str
    plugin: str
    timeout_s: float | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None
    queue: str | None = None
    wants_job: bool = False
    is_async: bool = False
    max_crashes: int | None = None
    memory_limit_mb: int | None = None
    detach: bool = False
    keep_output: bool = False
    one_shot: bool = False
    confinement: Confinement | None = None


PluginState = Literal["loaded", "broken", "late"]


class PluginInfo(msgspec.Struct, kw_only=True):
    """One plugin for status, log and ``aqd plugins``; travels between processes.

    ``source`` is the file or the entry point, ``digest`` the start of its code's SHA-256, ``handlers``
    the job types it serves, ``error`` the reason when ``state`` is ``broken``. A module without hooks
    (a helper beside the plugins) is ``loaded`` with no handlers. ``late``: imported by each worker.
    """

    name: str
    source: str
    version: str = ""
    digest: str = ""
    handlers: list[str] = msgspec.field(default_factory=list)
    state: PluginState = "loaded"
    error: str | None = None


class Handlers:
    """Given to ``aqd_register``: collects the handlers of one plugin.

    Nothing takes effect before the hook has returned; when it raises, all of it is dropped.
    """

    def __init__(self, plugin: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.plugin = plugin
        self._settings = settings
        self._open = True
        self.collected: dict[str, tuple[HandlerInfo, Handler]] = {}

    def add(
        self,
        type: str,
        handler: Handler,
        *,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        queue: str | None = None,
    ) -> None:
        """Run jobs of ``type`` by ``handler``, a function or coroutine function of ``(payload)`` or
        ``(payload, job)`` that returns something JSON can express.

        ``timeout_s`` limits one attempt, ``max_attempts`` (1 to 1000) and ``backoff`` rule the
        retries, ``queue`` is the queue for jobs submitted without one. What is left out comes from
        the configuration; what a job brings along itself wins over both.
        """
        if not self._open:
            raise RuntimeError(f"handlers.add({type!r}): handlers can only be added inside aqd_register")
        check_name("type", type)
        where = f"handler {type!r}"
        if type in self.collected:
            raise ValueError(f"{where}: registered twice by the same plugin")
        if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
            raise ValueError(f"{where}: timeout_s must be a number of seconds above 0, not {timeout_s!r}")
        if max_attempts is not None and not (
            isinstance(max_attempts, int)
            and not isinstance(max_attempts, bool)
            and 1 <= max_attempts <= MAX_ATTEMPTS_BOUND
        ):
            raise ValueError(
                f"{where}: max_attempts must be a whole number from 1 to {MAX_ATTEMPTS_BOUND}, not {max_attempts!r}"
            )
        if backoff is not None and not isinstance(backoff, Backoff):
            raise TypeError(f"{where}: backoff must be an aqd.Backoff, not {backoff!r}")
        if queue is not None:
            check_name("queue", queue, where)
        info = HandlerInfo(
            type=type,
            plugin=self.plugin,
            timeout_s=None if timeout_s is None else float(timeout_s),
            max_attempts=max_attempts,
            backoff=backoff,
            queue=queue,
            wants_job=_wants_job(where, handler),
            is_async=_is_async(where, handler),
        )
        self.collected[type] = (info, handler)

    def handler(
        self,
        type: str,
        *,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        queue: str | None = None,
    ) -> Callable[[F], F]:
        """:meth:`add` as a decorator; the function itself is returned unchanged."""

        def register(function: F) -> F:
            self.add(
                type, function, timeout_s=timeout_s, max_attempts=max_attempts, backoff=backoff, queue=queue
            )
            return function

        return register

    def settings(self, name: str) -> dict[str, Any]:
        """A copy of the table ``[plugins.settings.NAME]`` of the configuration; empty if there is none."""
        return copy.deepcopy(dict(self._settings.get(name, {})))

    def close(self) -> None:
        """End of registration: later calls of :meth:`add` are refused instead of being lost."""
        self._open = False


class _JobLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the job's fields to those of the call (``extra=``), which the standard adapter would replace."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


class JobContext:
    """The job as its handler sees it: the second argument of a ``(payload, job)`` handler.

    ``id`` is the job's number as a string, ``attempt`` counts from 1. Times and the logger are made
    when first asked for: most handlers use neither, and a worker runs thousands of jobs a second.
    """

    __slots__ = (
        "_created_at_us",
        "_logger",
        "_should_stop",
        "attempt",
        "id",
        "max_attempts",
        "queue",
        "type",
    )

    def __init__(
        self,
        *,
        id: str,
        type: str,
        queue: str,
        attempt: int,
        max_attempts: int,
        created_at_us: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.id = id
        self.type = type
        self.queue = queue
        self.attempt = attempt
        self.max_attempts = max_attempts
        self._created_at_us = created_at_us
        self._should_stop = should_stop
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def created_at(self) -> datetime:
        """When the job was submitted (aware, UTC)."""
        return _EPOCH + timedelta(microseconds=self._created_at_us)

    @property
    def logger(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A standard logger whose lines carry the job's id, type and attempt."""
        if self._logger is None:
            fields = {"job_id": self.id, "type": self.type, "attempt": self.attempt}
            self._logger = _JobLogger(logging.getLogger("aqd.job"), fields)
        return self._logger

    @property
    def should_stop(self) -> bool:
        """True once the daemon wants this job to end: a long loop may look here and leave early."""
        return self._should_stop()

    def __repr__(self) -> str:
        return f"<job {self.id} {self.type} attempt {self.attempt}/{self.max_attempts}>"


class Hooks:
    """The hook specifications; ``self`` is not an argument of the hooks."""

    @hookspec
    def aqd_register(self, handlers: Handlers) -> None:
        """Runs in the loader, once per generation: declare the plugin's handlers.

        Keep it quick and free of side effects: workers are forked from this very process, so a
        connection opened or a thread started here would be shared by all of them. Open such things
        in ``aqd_worker_start``.
        """

    @hookspec
    def aqd_worker_start(self, slot: int, generation: int) -> None:
        """Runs in each worker process before its first job: open connections, warm caches.

        ``slot`` is the worker's place (from 0), ``generation`` the load of plugins it was forked
        from. An error here is logged; the worker serves its jobs all the same.
        """

    @hookspec
    def aqd_worker_stop(self, slot: int) -> None:
        """Runs in a worker that leaves on purpose (drain, reload), never in one that is killed."""

    @hookspec
    def aqd_job_start(self, job: JobContext) -> None:
        """Runs in the worker before each job, on the job's own time limit. An error is logged."""

    @hookspec
    def aqd_job_finish(self, job: JobContext, outcome: str, error: BaseException | None) -> None:
        """Runs in the worker after each job that ended in the process itself (not after a kill).

        ``outcome`` is ``completed``, ``failed``, ``timed_out`` or ``interrupted``; ``error`` is the
        exception behind it, or None. An error here is logged and does not change the outcome.
        """


HOOK_NAMES = tuple(name for name in vars(Hooks) if name.startswith(f"{PROJECT}_"))


def check_name(what: str, value: object, where: str = "handler") -> None:
    """Raise unless ``value`` may be the name of a job type or a queue."""
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise ValueError(
            f"{where}: {what} must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -, not {value!r:.200}"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and not math.isnan(value)  # isfinite(10**400) would raise


def _wants_job(where: str, handler: Handler) -> bool:
    """True for ``(payload, job)``, False for ``(payload)``; :class:`TypeError` for anything else."""
    if not callable(handler):
        raise TypeError(f"{where}: {handler!r:.200} cannot be called")
    try:
        signature = inspect.signature(handler)
    except ValueError:  # some callables written in C do not tell their signature
        return False
    takes: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            takes.append(parameter)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            # Whether such a wrapper wants one argument or two is anybody's guess.
            raise TypeError(
                f"{where}: takes *{parameter.name}; name its parameters, (payload) or (payload, job), "
                "or use functools.wraps in the decorator around it"
            )
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise TypeError(f"{where}: the keyword-only parameter {parameter.name!r} has no default")
    required = [p for p in takes if p.default is p.empty]
    if not takes or len(required) > 2:
        raise TypeError(f"{where}: takes {signature}, but is called with (payload) or (payload, job)")
    return len(required) == 2 or (len(takes) >= 2 and takes[1].name == "job")


def _is_async(where: str, handler: Handler) -> bool:
    plain: Any = handler
    while isinstance(plain, functools.partial):
        plain = plain.func
    bodies = [plain] if inspect.isroutine(plain) else [plain, getattr(type(plain), "__call__", None)]  # noqa: B004
    if any(inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise TypeError(f"{where}: is a generator function; calling it would run nothing")
    return any(inspect.iscoroutinefunction(body) for body in bodies)
