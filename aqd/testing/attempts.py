"""One attempt in the test's own process, made by the worker's own code.

Used by the rest of :mod:`aqd.testing`. A :class:`Bench` is a worker without its process: it has a page, so that
stops and progress take their usual way, but no channel that anybody listens to, no session, no signals of its own
outside of an attempt.

Promises: what a handler raises ends in the outcome that the daemon would record. Let through are only exceptions
that are meant for whoever runs the tests: KeyboardInterrupt, pytest's own (``pytest.fail()`` in a stand-in that the
handler calls). What the handler prints still appears where the test looks for it (``capsys``).

Fails: :class:`RuntimeError` when an attempt is begun inside another one, or in a forked child.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TextIO, TypedDict, cast

import msgspec

from aqd import log, messages
from aqd.config import Config
from aqd.endings import Ending, decode_payload
from aqd.errors import StopJob
from aqd.output import LIMIT as OUTPUT_LIMIT
from aqd.page import Page, StopReason
from aqd.plugins import LoadedHandler, Registry
from aqd.process import STOP_SIGNAL, boottime_ns
from aqd.strays import MARKER, NODE
from aqd.worker import Worker

Kind = Literal["completed", "failed", "discarded", "timed_out", "cancelled", "interrupted"]
Stop = Literal["timeout", "cancel", "drain"]

_REASONS: Final = {"timeout": StopReason.TIMEOUT, "cancel": StopReason.CANCEL, "drain": StopReason.DRAIN}
# As the master does it: loops that catch everything swallow the first exception.
_REPEAT_S: Final = 0.25
_WORKER_START: Final = "aqd_worker_start"


class AttemptOptions(TypedDict, total=False):
    """What a test may say about the job that it runs; what is left out is as for a first attempt."""

    attempt: int
    # Default: the handler's, else the configuration's; no smaller than ``attempt``.
    max_attempts: int | None
    # Default: the handler's queue, else "default".
    queue: str | None
    job_id: int
    tags: list[str] | None
    meta: dict[str, Any] | None
    created_at: datetime | None
    # Default: the handler's, else the configuration's.
    timeout_s: float | None
    # End the job after so many seconds as ``stop`` says: "cancel" (the default), "drain", "timeout".
    stop_after_s: float | None
    stop: Stop


class Progress(NamedTuple):
    """What the handler has said by ``job.progress``."""

    percent: float | None
    message: str


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended.

    ``kind``: ``discarded`` is recorded as failed, without a retry. ``reason``: as in ``GET /jobs/{id}/attempts``
    (``exception``, ``retry``, ``result``, ``timeout``, …); empty if it completed. ``result``: what ``json.loads``
    gives of what would be stored (so a tuple has become a list). ``error`` and ``traceback``: as they would be
    recorded; ``exception``: the object itself. ``retry_after_s``: the wish of ``aqd.Retry``. ``output``: the end of
    what went through ``sys.stdout`` and ``sys.stderr``. ``hook_errors``: what went wrong in the hooks
    ``aqd_job_start`` and ``aqd_job_finish``, which a daemon only logs.
    """

    kind: Kind
    reason: str = ""
    result: Any = None
    error: str = ""
    traceback: str = ""
    exception: BaseException | None = None
    retry_after_s: float | None = None
    progress: list[Progress] = field(default_factory=list)
    output: str = ""
    wall_s: float = 0.0
    hook_errors: list[str] = field(default_factory=list)
    # As it would be stored; None if the handler returned None.
    result_json: str | None = field(default=None, repr=False)

    @property
    def completed(self) -> bool:
        return self.kind == "completed"

    def assert_completed(self) -> Any:
        """The result; :class:`AssertionError` with the handler's traceback if there is none."""
        if not self.completed:
            raise AssertionError(
                f"the attempt {self.kind} ({self.reason}): {self.error}\n{self.traceback}"
            ) from self.exception
        return self.result


class Attempt(NamedTuple):
    """A job to be run. ``payload``, ``tags`` and ``meta`` are JSON text."""

    id: int
    type: str
    queue: str
    payload: str
    attempt: int
    max_attempts: int
    created_at_us: int
    timeout_s: float
    tags: str | None = None
    meta: str | None = None
    stop_after_s: float | None = None
    stop: Stop = "cancel"


class Bench(Worker):
    """A worker in this process. Belongs to one thread; :meth:`close` it."""

    def __init__(self, registry: Registry, config: Config) -> None:
        fd = Page.create(0, 1, 1)
        try:
            page = Page(fd)
        finally:
            os.close(fd)
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # connected to nobody
        # A worker marks its own environment; a daemon that the test starts must not take over this mark.
        before = {name: os.environ.get(name) for name in (MARKER, NODE)}
        super().__init__(registry, config, ours, page, -1, [], os.getppid())
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._begun = False
        self._error: BaseException | None = None
        self._said: list[Progress] = []
        self._hook_errors: list[str] = []

    def close(self) -> None:
        """Calls ``aqd_worker_stop`` if there was a job."""
        if self.channel.fileno() < 0:
            return
        if self._begun:
            self._hook("aqd_worker_stop", slot=0)
        self.channel.close()
        self.page.close()

    def make(self, job: Attempt, loaded: LoadedHandler) -> Outcome:
        """One attempt. Before the first one ``aqd_worker_start`` is called; what it raises passes through."""
        if os.getpid() != self.pid:
            raise RuntimeError("these plugins were loaded by the parent process: load them here")
        if self.page.current() >= 0:
            raise RuntimeError("a handler is running already: handlers cannot run jobs")
        if not self._begun:
            self._begun = True
            for _, failed in self.registry.call(_WORKER_START, slot=0, generation=self.page.generation):
                raise failed
        number = self.page.write([(job.id, 1, job.attempt, round(job.timeout_s * 1e9), 0, 0)])
        entry = messages.JobEntry(
            number=number,
            id=job.id,
            type=job.type,
            payload=None,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            queue=job.queue,
            created_at_us=job.created_at_us,
            tags=job.tags,
            meta=job.meta,
        )
        self._error, self._said, self._hook_errors = None, [], []
        # Confinement is the kernel's and would be the test's own for good.
        info = msgspec.structs.replace(loaded.info, confinement=None, detach=False)
        started_ns = boottime_ns()
        self.page.begin(number, started_ns)
        try:
            with _copied_output() as printed, self._stopped(number, job):
                ending = self._attempt(entry, job.payload, LoadedHandler(info, loaded.function))
        finally:
            self.page.handler_returned(number)
            self.page.end(number)
            log.context()
        wall_s = (boottime_ns() - started_ns) / 1e9
        if (error := self._error) is not None and not isinstance(error, _RECORDED):
            raise error
        return self._outcome(ending, printed.text(), wall_s)

    def _outcome(self, ending: Ending, printed: str, wall_s: float) -> Outcome:
        stored = ending.result or None
        return Outcome(
            kind=cast("Kind", ending.kind),
            reason=ending.reason,
            result=None if stored is None else decode_payload(stored),
            error=ending.error,
            traceback=ending.traceback,
            exception=self._error,
            retry_after_s=None if ending.retry_after_s < 0 else ending.retry_after_s,
            progress=self._said,
            output=printed,
            wall_s=wall_s,
            hook_errors=self._hook_errors,
            result_json=stored,
        )

    @contextlib.contextmanager
    def _stopped(self, number: int, job: Attempt) -> Iterator[None]:
        """While this lasts, the job is asked to end when its time is over, as the master asks.

        Signals reach Python in the main thread only: in another one no exception comes, but ``job.should_stop``
        still turns True.
        """
        delay_s, stop = job.timeout_s, StopReason.TIMEOUT
        if job.stop_after_s is not None and job.stop_after_s < delay_s:
            delay_s, stop = job.stop_after_s, _REASONS[job.stop]
        main = threading.current_thread() is threading.main_thread()
        target = threading.get_ident()
        over = threading.Event()

        def ask() -> None:
            if over.wait(delay_s):
                return
            self.page.request_stop(number, stop)
            while main and not over.is_set():
                signal.pthread_kill(target, STOP_SIGNAL)
                over.wait(_REPEAT_S)

        before = signal.signal(STOP_SIGNAL, self._on_stop) if main else None
        timer = threading.Thread(target=ask, name="aqd.testing stop", daemon=True)
        timer.start()
        try:
            yield
        finally:
            over.set()
            timer.join()
            if main:
                signal.signal(STOP_SIGNAL, before)

    # --- what the worker tells others

    def _failed(self, number: int, error: BaseException) -> Ending:
        self._error = error
        return super()._failed(number, error)

    def _note(self, number: int, percent: float | None, message: str) -> None:
        super()._note(number, percent, message)
        if self.page.current() == number:
            self._said.append(Progress(percent, message))

    def _hook(self, name: str, **arguments: Any) -> None:
        for plugin, error in self.registry.call(name, **arguments):
            self._hook_errors.append(f"{name} of the plugin {plugin}: {log.describe(error)}")


# Everything else is for whoever runs the tests.
_RECORDED: Final = (Exception, StopJob, SystemExit, asyncio.CancelledError, BaseExceptionGroup)


class _Copy:
    """A text stream that hands everything on and keeps the end of it."""

    def __init__(self, target: TextIO, kept: "_Kept") -> None:
        self._target, self._kept = target, kept

    def write(self, text: str) -> int:
        self._kept.add(text)
        return self._target.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _Kept:
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._size += len(text)
        if self._size > 4 * OUTPUT_LIMIT:
            self._pieces = [self.text()]
            self._size = len(self._pieces[0])

    def text(self) -> str:
        return "".join(self._pieces)[-OUTPUT_LIMIT:]


@contextlib.contextmanager
def _copied_output() -> Iterator[_Kept]:
    kept = _Kept()
    with (
        contextlib.redirect_stdout(cast("TextIO", _Copy(sys.stdout, kept))),
        contextlib.redirect_stderr(cast("TextIO", _Copy(sys.stderr, kept))),
    ):
        yield kept
