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
import difflib
import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import msgspec
import pluggy

PROJECT = "aqd"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# Names of job types and queues, the same rule that a submitted job has to meet.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NAME_RULE = "1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
MAX_ATTEMPTS_BOUND = 1000
# Of setrlimit(2), without RLIMIT_; and its "no limit" as a number.
RLIMITS = ("NOFILE", "FSIZE", "CPU", "CORE", "AS", "DATA", "STACK", "NPROC", "MEMLOCK")
UNLIMITED = -1
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


class HandlerOptions(TypedDict, total=False):
    """The options of :meth:`Handlers.add` and :meth:`Handlers.handler`; None is "as if it were left out"."""

    # Retries and time. ``timeout_s`` limits one attempt; ``max_crashes`` counts those that ended with their process.
    timeout_s: float | None
    max_attempts: int | None
    max_crashes: int | None
    backoff: Backoff | None
    # The queue of jobs that are submitted without one.
    queue: str | None
    # The job's processes: what they may take together, whether what is left running may stay, whether the end of
    # the output is kept when the job completes, too.
    memory_limit_mb: int | None
    detach: bool | None
    keep_output: bool | None
    # A fresh process for each job: by wish, or implied by the options behind ``rlimits``.
    one_shot: bool | None
    oom_score_adj: int | None
    rlimits: Mapping[str, int | str] | None
    hard_rlimits: Mapping[str, int | str] | None
    nice: int | None
    no_new_privs: bool | None
    user: str | None
    group: str | None


# --- checking options: each function returns the value as it is kept, or raises


def _fail(option: str, must: str, value: object) -> ValueError:
    return ValueError(f"{option} must be {must}, not {value!r:.200}")


def _whole(low: int, high: int) -> Callable[[str, Any], Any]:
    def check(option: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _fail(option, f"a whole number from {low} to {high}", value)
        return value

    return check


def _check_seconds(option: str, value: Any) -> float:
    if not (_is_number(value) and value > 0):
        raise _fail(option, "a number of seconds above 0", value)
    return float(value)


def _check_backoff(option: str, value: Any) -> Backoff:
    if not isinstance(value, Backoff):
        raise TypeError(f"{option} must be an aqd.Backoff, not {value!r:.200}")
    return value


def _check_queue(option: str, value: Any) -> str:
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise _fail(option, NAME_RULE, value)
    return value


def _check_flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail(option, "True or False", value)
    return value


def _check_account(option: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _fail(option, "the name of one (or its number as a text)", value)
    return value


def _check_limits(option: str, value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise TypeError(f'{option} must be a mapping such as {{"NOFILE": 256}}, not {value!r:.200}')
    kept = {}
    for name, number in value.items():
        if name not in RLIMITS:
            raise ValueError(f"{option}: there is no {name!r:.200}; the names are {', '.join(RLIMITS)}")
        if number == "unlimited":
            kept[name] = UNLIMITED
        elif isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise _fail(f"{option}: {name}", 'a whole number of at least 0 or "unlimited"', number)
        else:
            kept[name] = number
    return kept


# One line an option; those of the second table become the handler's Confinement.
_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "timeout_s": _check_seconds,
    "max_attempts": _whole(1, MAX_ATTEMPTS_BOUND),
    "max_crashes": _whole(1, MAX_ATTEMPTS_BOUND),
    "backoff": _check_backoff,
    "queue": _check_queue,
    "memory_limit_mb": _whole(1, 1 << 20),
    "detach": _check_flag,
    "keep_output": _check_flag,
    "one_shot": _check_flag,
}
_CONFINEMENT: dict[str, Callable[[str, Any], Any]] = {
    "oom_score_adj": _whole(-1000, 1000),
    "rlimits": _check_limits,
    "hard_rlimits": _check_limits,
    "nice": _whole(-20, 19),
    "no_new_privs": _check_flag,
    "user": _check_account,
    "group": _check_account,
}


def _checked_options(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`HandlerInfo` that the options make."""
    fields: dict[str, Any] = {}
    confined: dict[str, Any] = {}
    for name, value in options.items():
        check = _OPTIONS.get(name) or _CONFINEMENT.get(name)
        if check is None:
            known = [*_OPTIONS, *_CONFINEMENT]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
            raise TypeError(f"{where}: there is no option {name!r}; {hint}")
        if value is not None:
            kept = check(f"{where}: {name}", value)
            (fields if name in _OPTIONS else confined)[name] = kept
    if confined and (confinement := Confinement(**confined)) != Confinement():
        fields["confinement"] = confinement
        fields["one_shot"] = fields.get("one_shot", False) or confinement.irreversible
    return fields


class Handlers:
    """Given to ``aqd_register``: collects the handlers of one plugin.

    Nothing takes effect before the hook has returned; when it raises, all of it is dropped.
    """

    def __init__(self, plugin: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.plugin = plugin
        self._settings = settings
        self._open = True
        self.collected: dict[str, tuple[HandlerInfo, Handler]] = {}

    def add(self, type: str, handler: Handler, **options: Unpack[HandlerOptions]) -> None:
        """Run jobs of ``type`` by ``handler``, a function or coroutine function of ``(payload)`` or
        ``(payload, job)`` that returns something JSON can express.

        The options are those of :class:`HandlerOptions`. What is left out comes from the configuration; what a
        job brings along itself wins over both.
        """
        if not self._open:
            raise RuntimeError(f"handlers.add({type!r}): handlers can only be added inside aqd_register")
        check_name("type", type)
        where = f"handler {type!r}"
        if type in self.collected:
            raise ValueError(f"{where}: registered twice by the same plugin")
        fields = _checked_options(where, options)
        self.collected[type] = (
            HandlerInfo(
                type=type,
                plugin=self.plugin,
                wants_job=_wants_job(where, handler),
                is_async=_is_async(where, handler),
                **fields,
            ),
            handler,
        )

    def handler(self, type: str, **options: Unpack[HandlerOptions]) -> Callable[[F], F]:
        """:meth:`add` as a decorator; the function itself is returned unchanged."""

        def register(function: F) -> F:
            self.add(type, function, **options)
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
        "_meta",
        "_progress",
        "_should_stop",
        "_tags",
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
        progress: Callable[[float | None, str], None] = lambda _percent, _message: None,
        tags: str | None = None,
        meta: str | None = None,
    ) -> None:
        self.id = id
        self.type = type
        self.queue = queue
        self.attempt = attempt
        self.max_attempts = max_attempts
        self._created_at_us = created_at_us
        self._should_stop = should_stop
        self._progress = progress
        self._tags, self._meta = tags, meta  # JSON text
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def created_at(self) -> datetime:
        """When the job was submitted (aware, UTC)."""
        return _EPOCH + timedelta(microseconds=self._created_at_us)

    @property
    def tags(self) -> tuple[str, ...]:
        """What the job was submitted with to be found by."""
        return tuple(msgspec.json.decode(self._tags)) if self._tags else ()

    @property
    def meta(self) -> dict[str, Any]:
        """What was submitted beside the payload: a trace id, who asked. A new dict each time."""
        return json.loads(self._meta) if self._meta else {}

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

    def progress(self, percent: float | None, message: str = "") -> None:
        """Say how far the job is: shown beside it while it runs, stored every few seconds (1 µs a call).

        ``percent`` from 0 to 100, None if that cannot be known; a long ``message`` is cut.
        """
        if percent is not None:
            if not _is_number(percent):
                raise TypeError(
                    f"progress: percent must be a number from 0 to 100 or None, not {percent!r:.200}"
                )
            if not 0 <= percent <= 100:
                raise ValueError(f"progress: percent must be from 0 to 100, not {percent!r:.200}")
        if not isinstance(message, str):
            raise TypeError(f"progress: message must be a text, not {message!r:.200}")
        self._progress(percent, message)

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

        ``outcome`` is ``completed``, ``failed``, ``timed_out``, ``cancelled`` or ``interrupted``; ``error`` is the
        exception behind it, or None. An error here is logged and does not change the outcome.
        """


HOOK_NAMES = tuple(name for name in vars(Hooks) if name.startswith(f"{PROJECT}_"))


def check_name(what: str, value: object, where: str = "handler") -> None:
    """Raise unless ``value`` may be the name of a job type or a queue."""
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise ValueError(f"{where}: {what} must be {NAME_RULE}, not {value!r:.200}")


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
