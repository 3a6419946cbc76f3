"""A worker: one process, one job at a time, forked from a loader's warm image.

It receives frames of jobs over its channel, runs each by its handler and sends one outcome for each. It
talks to nobody else: no database, no ids of its own, no lease. What it is on stands in its page
(:mod:`aqd.page`), where the master and the dispatcher see it even when it is dead.

Promises: an outcome is sent before the page says that the job is finished; whatever a handler raises,
returns or leaves behind, the loop goes on or the process ends; a child that a handler forked and let escape
never runs the loop; failure records are bounded, printable text.

Ends: by ``os._exit`` (a normal exit takes 100 ms and more with a large heap): 0 at the end of its channel,
:data:`aqd.errors.Exit.ORPHANED` when its master is gone, ``CHANNEL`` when it is sent nonsense.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn

import msgspec
from setproctitle import setproctitle

from aqd import channel, log, messages, plugins, process
from aqd.config import Config
from aqd.errors import Discard, Exit, InputError, JobInterrupted, JobTimeout, Retry, StopJob
from aqd.hookspecs import JobContext
from aqd.job import encode_json
from aqd.page import Page, StopReason
from aqd.plugins import LoadedHandler, Registry
from aqd.process import STOP_SIGNAL, boottime_ns

logger = log.get_logger("worker")

# An idle worker shows in its page that it is alive; the master's limit is a multiple of this.
IDLE_TURN_MS = 5000
# Together below a message's limit, whatever the characters take in UTF-8.
MAX_ERROR_CHARS = 4_000
MAX_TRACEBACK_CHARS = 24_000
# What a result may take inside the outcome itself; a larger one travels as a memfd. A socket takes 167
# messages of 200 bytes, 26 of 4 kB, 4 of 62 kB, and a worker whose socket is full waits.
INLINE_RESULT = 2 * 1024


class Worker:
    """The loop of one worker process. :meth:`run` never returns."""

    def __init__(
        self,
        registry: Registry,
        config: Config,
        ends: socket.socket,
        page: Page,
        output_fd: int,
        late: list[str],
        master_pid: int,
    ) -> None:
        self.registry = registry
        self.config = config
        self.channel = ends
        self.page = page
        self.output_fd = output_fd
        self.late = late
        self.master_pid = master_pid
        self.pid = os.getpid()
        self._interruptible = False
        self._task: asyncio.Task[Any] | None = None
        self._softened = -1
        self._title = f"aqd: worker {page.slot} g{page.generation}"

    # --- life

    def run(self) -> NoReturn:
        """Everything after the fork, in the order that matters."""
        os.setsid()
        self.page.pid = self.pid
        process.die_with_parent(self.master_pid, wait_s=5.0)
        self._install_signals()
        code = Exit.ERROR
        try:
            setproctitle(f"{self._title} [starting]")
            log.configure(self.config.log.level, self.config.log.format, process=f"worker {self.page.slot}")
            log.context(slot=self.page.slot)
            self._load_late()
            self._hook("aqd_worker_start", slot=self.page.slot, generation=self.page.generation)
            self.page.turn()
            channel.send(self.channel, messages.encode(messages.Up(self.pid)))
            code = self._serve()
            self._hook("aqd_worker_stop", slot=self.page.slot)
        except channel.ChannelClosed:
            code = Exit.OK
        except BaseException:
            logger.exception("worker fails")
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _install_signals(self) -> None:
        # A TERM or INT for the whole group (a terminal, systemctl kill) does not end a job: it goes on
        # and the master drains. Handlers, not SIG_IGN: that would be inherited by what the job starts.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _nothing)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(STOP_SIGNAL, self._on_stop)
        signal.set_wakeup_fd(-1)
        os.register_at_fork(after_in_child=self._disown)
        process.unblock_signals()

    def _disown(self) -> None:
        """In a child that a handler forked: the channel is not its own."""
        if os.getpid() != self.pid:
            self.channel.close()

    def _load_late(self) -> None:
        if self.late:
            for name, reason in plugins.load_late(self.registry, self.config, self.late).items():
                logger.error("plugin broken in this worker", plugin=name, reason=reason)

    def _hook(self, name: str, **arguments: Any) -> None:
        for plugin, error in self.registry.call(name, **arguments):
            logger.error("hook failed", hook=name, plugin=plugin, error=log.describe(error))

    # --- the loop

    def _serve(self) -> Exit:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        setproctitle(f"{self._title} [idle]")
        while True:
            if not poll.poll(IDLE_TURN_MS):
                self.page.turn()
                if os.getppid() != self.master_pid:
                    return Exit.ORPHANED
                continue
            try:
                data, fds = channel.receive(self.channel)
            except channel.ChannelClosed:
                return Exit.OK
            try:
                frame = messages.decode_frame(data)
            except ValueError:
                logger.exception("not a frame")
                return Exit.CHANNEL
            for entry in frame.jobs:
                payload = entry.payload
                if payload is None:
                    payload = channel.from_memfd(fds.pop(0), 1 << 30).decode()
                self._run(entry, payload)
            setproctitle(f"{self._title} [idle]")

    def _run(self, entry: messages.JobEntry, payload: str) -> None:
        """One attempt, from its begin in the page to its outcome in the channel."""
        started_ns = boottime_ns()
        lease_until = self.page.lease_until_ns
        before = resource.getrusage(resource.RUSAGE_SELF)
        self.page.begin(entry.number, started_ns)
        # After the begin: see the page's header. Looking before it let one recall in seven be run all the same.
        if self.page.skipped(entry.number):
            self.page.end(entry.number)
            return
        setproctitle(f"{self._title} [{entry.type} {entry.id}]")
        error: BaseException | None = None
        value: Any = None
        if started_ns >= lease_until:
            kind = "unstarted"  # the node lost touch with the database: somebody else may start it
        else:
            kind, value, error = self._attempt(entry, payload)
        if os.getpid() != self.pid:
            os._exit(Exit.ERROR)  # a child that the handler forked and let escape
        after = resource.getrusage(resource.RUSAGE_SELF)
        wall_ns = boottime_ns() - started_ns
        cpu_us = int((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e6)
        self.page.handler_returned(entry.number)
        figures = (entry.number, started_ns, wall_ns, cpu_us, after.ru_maxrss)
        if kind == "completed":
            self._send_done(figures, value)
        else:
            self._send_broken(figures, kind, error)
        self.page.end(entry.number)

    def _send_done(self, figures: tuple[int, int, int, int, int], result: str) -> None:
        # One character is one byte at least: short texts are decided without encoding them.
        if len(result) * 4 <= INLINE_RESULT or len(data := result.encode()) <= INLINE_RESULT:
            channel.send(self.channel, messages.encode(messages.Done(*figures, result)))
            return
        fd = channel.to_memfd(data)
        try:
            channel.send(self.channel, messages.encode(messages.Done(*figures, None)), [fd])
        finally:
            os.close(fd)

    def _send_broken(
        self, figures: tuple[int, int, int, int, int], kind: str, error: BaseException | None
    ) -> None:
        wish = -1.0
        if isinstance(error, Retry) and isinstance(error.after_s, int | float):
            wish = float(max(0.0, min(error.after_s, 1e12)))
        text, trace = describe(error)
        message = messages.Broken(*figures, kind, text, trace, wish)
        channel.send(self.channel, messages.encode(message))

    # --- one attempt

    def _attempt(self, entry: messages.JobEntry, payload: str) -> tuple[str, Any, BaseException | None]:
        """(kind, result text, error). Nothing a handler raises gets past this."""
        job: JobContext | None = None
        loaded = self.registry.handlers.get(entry.type)
        hooks = self.registry.manager.hook
        try:
            if loaded is None:
                raise LookupError(f"this worker has no handler for the type {entry.type!r}")
            if (
                loaded.info.wants_job
                or hooks.aqd_job_start.get_hookimpls()
                or hooks.aqd_job_finish.get_hookimpls()
            ):
                job = self._context(entry)
            kind, result, error = self._guarded(loaded, entry, payload, job)
        except StopJob as stop:
            # It came in the moment between the handler's end and the flag.
            self._interruptible = False
            kind, result, error = _stopped(stop), None, stop
        except BaseException as failure:
            kind, result, error = "failed", None, failure
        if job is not None and hooks.aqd_job_finish.get_hookimpls():
            self._hook(
                "aqd_job_finish", job=job, outcome="failed" if kind == "discarded" else kind, error=error
            )
        log.context(slot=self.page.slot)
        return kind, result, error

    def _guarded(
        self, loaded: LoadedHandler, entry: messages.JobEntry, payload: str, job: JobContext | None
    ) -> tuple[str, Any, BaseException | None]:
        log.context(slot=self.page.slot, job_id=str(entry.id), type=entry.type, attempt=entry.attempt)
        try:
            try:
                self._interruptible = True
                if job is not None:
                    self._hook("aqd_job_start", job=job)
                value = self._call(loaded, decode_payload(payload), job)
                self._interruptible = False
                return "completed", self._result(value), None
            finally:
                self._interruptible = False
        except StopJob as stop:
            return _stopped(stop), None, stop
        except Discard as discard:
            return "discarded", None, discard
        except BaseException as error:
            return "failed", None, error

    def _call(self, loaded: LoadedHandler, payload: Any, job: JobContext | None) -> Any:
        arguments = (payload, job) if loaded.info.wants_job else (payload,)
        if not loaded.info.is_async:
            return loaded.function(*arguments)
        try:
            with asyncio.Runner() as runner:
                return runner.run(self._coroutine(loaded.function(*arguments)))
        except asyncio.CancelledError:
            if self._softened == self.page.current():
                raise _stop_exception(self.page.stop_reason) from None
            raise
        finally:
            self._task = None

    async def _coroutine(self, awaitable: Coroutine[Any, Any, Any]) -> Any:
        self._task = asyncio.current_task()
        return await awaitable

    def _result(self, value: Any) -> str:
        if value is None:
            return ""
        try:
            return encode_json(value, field="result", max_bytes=self.config.jobs.max_result_bytes)
        except InputError as error:
            raise ValueError(f"the handler's result cannot be stored: {error}") from None

    def _context(self, entry: messages.JobEntry) -> JobContext:
        return JobContext(
            id=str(entry.id),
            type=entry.type,
            queue=entry.queue,
            attempt=entry.attempt,
            max_attempts=entry.max_attempts,
            created_at_us=entry.created_at_us,
            should_stop=lambda: self.page.stop_entry == entry.number,
        )

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        """The soft step: end the job that the page names, if it is the one we are on."""
        current = self.page.current()
        if (
            not self._interruptible
            or os.getpid() != self.pid
            or current < 0
            or self.page.stop_entry != current
        ):
            return
        task, first = self._task, self._softened != current
        self._softened = current
        if task is not None and first:
            # A coroutine is cancelled, which lets it clean up; if it does not heed, the exception follows.
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        raise _stop_exception(self.page.stop_reason)


def decode_payload(text: str) -> Any:
    """The payload as the handler gets it: what ``json.loads`` returns."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # numbers that the standard library takes and msgspec does not
        return json.loads(text)


def _stop_exception(reason: StopReason) -> StopJob:
    if reason is StopReason.TIMEOUT:
        return JobTimeout("the job ran longer than its timeout_s")
    return JobInterrupted("the daemon is stopping")


def _stopped(stop: StopJob) -> str:
    return "timed_out" if isinstance(stop, JobTimeout) else "interrupted"


def _nothing(_number: int, _frame: FrameType | None) -> None:
    pass


def describe(error: BaseException | None) -> tuple[str, str]:
    """An exception as (one bounded line, bounded traceback), printable whatever it is."""
    if error is None:
        return "", ""
    name = type(error).__qualname__
    try:
        message = str(error)
    except BaseException as broken:
        message = f"<its text could not be made: {type(broken).__name__}>"
    if isinstance(error, SystemExit):
        message = f"the handler called sys.exit({message})"
    if isinstance(error, Retry | Discard):
        text = message
    else:
        text = f"{name}: {message}" if message else name
    try:
        trace = "".join(traceback.format_exception(type(error), error, _own_frames(error), limit=50))
    except BaseException as broken:
        trace = f"<the traceback could not be made: {type(broken).__name__}>"
    return printable(text, MAX_ERROR_CHARS), printable(trace, MAX_TRACEBACK_CHARS)


def _own_frames(error: BaseException) -> Any:
    """The traceback from the handler's first frame on, without this module's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def printable(text: str, limit: int) -> str:
    """Text that PostgreSQL takes: no NUL, no lone surrogate, at most ``limit`` characters (its middle
    is cut out: the beginning says what, the end says where)."""
    text = _cut(text, limit)  # first, because escaping 50 MiB is slow; and again, because it lengthens
    return _cut(text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode(), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2 - 30
    return f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"
