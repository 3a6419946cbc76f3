"""A worker: one process, one job at a time, forked from a loader's warm image.

It receives frames of jobs over its channel, runs each by its handler and writes one outcome for each into its
journal (:mod:`aqd.journal`; a large one is sent). It talks to nobody else: no database, no ids of its own, no lease. What it is on stands in its page
(:mod:`aqd.page`), where the master and the dispatcher see it even when it is dead.

Promises: an outcome is in the journal before the page says that the job is finished; whatever a handler raises,
returns or leaves behind, the loop goes on or the process ends; a child that a handler forked and let escape
never runs the loop; failure records are bounded, printable text; what a job printed, started, blocked or
closed is put right before the next one begins (descriptors 0 to 2, ``sys``'s streams, helpers, and what
:mod:`aqd.tidy` says), and an outcome is told only when the job's helpers are dead, so that a retry cannot meet them.

Ends: by ``os._exit`` (a normal exit takes 100 ms and more with a large heap): 0 at the end of its channel and
after a one-shot job, :data:`aqd.errors.Exit.ORPHANED` when its master is gone, ``CHANNEL`` when it is sent
nonsense, ``ERROR`` when helpers of a job cannot be ended (the master then ends its whole session), or a job has
changed or closed what cannot be put right.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from aqd import channel, confine, journal, log, messages, output, plugins, process
from aqd.config import Config
from aqd.costs import Costs
from aqd.endings import COMPLETED, Ending, HandlerMissing, ResultRefused, decode_payload, stop_exception, why
from aqd.errors import Exit, InputError, Retry
from aqd.failures import describe
from aqd.helpers import Helpers
from aqd.hookspecs import HandlerInfo, JobContext
from aqd.page import NOTE_BYTES, Page
from aqd.plugins import LoadedHandler, Registry
from aqd.process import STOP_SIGNAL, boottime_ns
from aqd.strict_json import encode_json
from aqd.tidy import BRIEF_NS, LIGHT_NS, Tidy
from aqd.title import Title

if TYPE_CHECKING:
    import asyncio

logger = log.get_logger("worker")

# An idle worker shows in its page that it is alive; the master's limit is a multiple of this.
IDLE_TURN_MS = 8000
# Everything is looked at (aqd/tidy.py) so long after it was looked at last, with the next brief job, or when no other job
# has come for so long.
SETTLE_MS = 5
# What a result, and what an output, may take inside the outcome itself; a larger one travels as a memfd. A
# socket takes 167 messages of 200 bytes, 26 of 4 kB, 4 of 62 kB, and a worker whose socket is full waits.
INLINE_RESULT = 2 * 1024
# An outcome is told of at the end of its frame; before the next job is begun if it has waited for so long. The
# dispatcher looks for itself, too, but less often.
ANNOUNCE_NS = 1_000_000
_SO_COOKIE = 57  # socket(7)
# Offsets in the output only grow. 1 TiB at 500 MiB/s takes half an hour.
OUTPUT_LENGTH_MAX = 1 << 40

# Signals that mean something else in a worker than in the children that jobs fork.
_OURS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_SIGNAL))


_UNNOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


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
        self._own = process.own_memory()
        self.helpers = Helpers(page.incarnation)
        self.streams: output.Streams
        self.tidy: Tidy
        self.costs: Costs
        self.title: Title
        self._missing: dict[str, str] = {}  # type → why its late plugin could not be imported here
        self._interruptible = False
        self._task: asyncio.Task[Any] | None = None
        self._softened = -1
        self._leaving: Exit | None = None
        self._slot = page.slot
        self._note_lock = threading.Lock()
        self._fork_mask = threading.local()  # each thread has its own mask
        self._disowned = False
        self._printed = 0  # length of the output before the present job
        self._cookie = self._channel_cookie()
        hooks = registry.manager.hook
        self._watchers = hooks.aqd_job_start.get_hookimpls, hooks.aqd_job_finish.get_hookimpls
        self._suspects = 0  # jobs that were run since everything was last looked at
        self._thorough_until = 0
        self._job_id = 0  # of the last one
        self._deprived = False  # one of them has closed the channel
        self._journal = journal.Writer(page)
        self._unannounced_ns = 0  # since when there has been something in the journal that was not told

    # --- life

    def run(self) -> NoReturn:
        """Everything after the fork, in the order that matters."""
        # Before it leaves the loader's session: who is in none that the master knows, and on no page, is a stray.
        self.page.pid = self.pid
        os.setsid()
        process.become_subreaper()
        process.die_with_parent(self.master_pid, wait_s=5.0)
        self._install_signals()
        code = Exit.ERROR
        try:
            self.title = Title(f"aqd: worker {self._slot} g{self.page.generation}")
            self.title.show("starting")
            log.rename(f"worker {self.page.slot}")  # the loader's: what jobs print is led elsewhere
            log.context(slot=self.page.slot)
            self.streams = output.Streams(self.output_fd)
            confine.raise_oom_score()
            self._load_late()
            self._hook("aqd_worker_start", slot=self.page.slot, generation=self.page.generation)
            self.prepare()
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
            log.settle()
            os._exit(code)

    def prepare(self) -> None:
        """What is here before the first job is no job's: processes, output, processor time."""
        self.helpers.spare_present()
        self._printed = self.streams.size()
        self.costs = Costs()
        self.tidy = Tidy()

    def _install_signals(self) -> None:
        # A TERM or INT for the whole group (a terminal, systemctl kill) does not end a job: it goes on
        # and the master drains. Handlers, not SIG_IGN: that would be inherited by what the job starts. Python
        # itself ignores PIPE and XFSZ; with these handlers its writes fail as ever and helpers get the default.
        take_no_notice()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(STOP_SIGNAL, self._on_stop)
        signal.set_wakeup_fd(-1)
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._disown
        )
        process.unblock_signals()

    def _before_fork(self) -> None:
        # A child that is terminated as soon as it lives must not meet our handler, which takes no notice.
        if not self._disowned:
            self._fork_mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)

    def _after_fork(self) -> None:
        if not self._disowned:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._fork_mask.old)

    def _disown(self) -> None:
        """In a child that a handler forked: the channel is not its own, and whoever terminates it means it."""
        if not self._disowned:
            self._disowned = True
            self.channel.close()
            self._interruptible = False
            for number in _OURS - {signal.SIGINT}:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._fork_mask.old)

    def _load_late(self) -> None:
        if self.late:
            promised = {name: list(infos) for name, infos in self.registry.late.items()}
            for name, reason in plugins.load_late(self.registry, self.config, self.late).items():
                logger.error("plugin broken in this worker", plugin=name, reason=reason)
                for info in promised.get(name, ()):
                    self._missing[info.type] = (
                        f"its plugin {name} could not be imported in this worker: {reason}"
                    )

    def _hook(self, name: str, **arguments: Any) -> None:
        for plugin, error in self.registry.call(name, **arguments):
            logger.error("hook failed", hook=name, plugin=plugin, error=log.describe(error))

    # --- the loop

    def _serve(self) -> Exit:
        self.title.show("idle")
        resting = True  # until then the title names the last job, which may have left something
        self._wait_ms(IDLE_TURN_MS)
        while True:
            self._check_channel()  # a job may have closed it and opened something else, all of it at once
            try:
                data, fds = channel.receive(self.channel)
            except channel.ChannelClosed:
                return Exit.OK
            except BlockingIOError:
                if resting:
                    self.page.turn()
                    if os.getppid() != self.master_pid:
                        return Exit.ORPHANED
                    continue
                if self._suspects:
                    self._tidy(None, True)
                    if self._leaving is not None:
                        self._announce()
                        return self._leaving
                log.context(slot=self._slot)
                self.title.show("idle")
                resting = True
                self._wait_ms(IDLE_TURN_MS)
                continue
            if resting:
                resting = False
                self._wait_ms(SETTLE_MS)
            try:
                frame = messages.decode_frame(data)
            except ValueError:
                logger.exception("not a frame")
                return Exit.CHANNEL
            self.costs.begin_frame()
            for entry in frame.jobs:
                payload = entry.payload
                if payload is None:
                    payload = channel.from_memfd(fds.pop(0), 1 << 30).decode()
                self._run(entry, payload)
                if self._leaving is not None:
                    break
            self._announce()
            if self._leaving is not None:
                return self._leaving

    def _wait_ms(self, limit_ms: int) -> None:
        """How long a receive waits from now on (SO_RCVTIMEO in socket(7)), so that none has to poll first."""
        self.channel.setblocking(True)
        limit = struct.pack("@ll", *divmod(limit_ms * 1000, 1_000_000))
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _run(self, entry: messages.JobEntry, payload: str) -> None:
        """One attempt, from its begin in the page to its outcome in the journal.

        A no-op job costs 13 system calls (a test counts them), and more time here than in them: what stands in one
        piece would cost 0.1 µs for each call that a tidier form had.
        """
        number, page, costs, streams = entry.number, self.page, self.costs, self.streams
        loaded = self.registry.handlers.get(entry.type)
        info = None if loaded is None else loaded.info
        if info is not None and (confinement := info.confinement) and "FSIZE" in confinement.rlimits:
            # The limit holds for the output, too, and that may be beyond it by what earlier jobs wrote.
            streams.clear()
            self._printed = 0
        started_ns = boottime_ns()
        if self._unannounced_ns and started_ns - self._unannounced_ns > ANNOUNCE_NS:
            self._announce()
        lease_until = page.lease_until_ns
        page.begin(number, started_ns, costs.cpu_us, self._printed, self.helpers.standing)
        # After the begin: see the page's header. Looking before it let one recall in seven be run all the same.
        if page.skipped(number):
            page.end(number)
            return
        self.title.show_job(entry.type, entry.id)
        if not costs.settled:
            costs.reset_peak()
        if started_ns < lease_until:
            ending = self._attempt(entry, payload, loaded)
        else:
            # The node lost touch with the database: somebody else may start it.
            ending = Ending("unstarted", "lease")
        ended_ns = boottime_ns()
        wall_ns = ended_ns - started_ns
        thorough = wall_ns > BRIEF_NS or ended_ns > self._thorough_until or self.tidy.told()
        if thorough:
            self._thorough_until = ended_ns + SETTLE_MS * 1_000_000
        self._job_id = entry.id
        self._suspects += 1
        self._tidy(info, thorough)
        page.handler_returned(number)
        if wall_ns < LIGHT_NS and costs.settled and not (thorough or self.helpers.standing):
            cpu_us, peak_kb = costs.end_light_job(ended_ns)
        else:
            if not self.helpers.alone():
                thorough = True
                self._end_helpers(entry, info)
            cpu_us, peak_kb = costs.end_job(thorough)
        if ending is COMPLETED and info is not None and not info.keep_output:
            data = messages.encode(messages.Done(number, started_ns, wall_ns, cpu_us, peak_kb, "", b""))
            self._tell(data, [], started_ns + wall_ns)
        else:
            data, fds = self._message(number, (started_ns, wall_ns, cpu_us, peak_kb), ending, info)
            self._tell(data, fds, started_ns + wall_ns)
        page.end(number)
        self._printed = streams.size()
        if self._printed > OUTPUT_LENGTH_MAX:
            streams.clear()  # a job has stretched it: near its largest size nothing more could be written
            self._printed = 0
        if info is not None and info.one_shot and self._leaving is None:
            self._leaving = Exit.OK

    def _tidy(self, info: HandlerInfo | None, thorough: bool) -> None:
        """What a job may have turned round in this process, and what would hit the next one."""
        suspects = self._suspects
        spoiled = self.streams.spoiled()
        if spoiled is None:
            self._die_deprived()
        if thorough:
            self._suspects = 0
            if self._channel_cookie() != self._cookie:
                if suspects == 1:
                    self._die_deprived()
                # Who it was is not known, and this one's outcome can still stand in the journal.
                self._deprived = True
        lasting = self.tidy.restore(thorough)
        self.streams.restore()
        if thorough:
            self.tidy.listen()
            if self._deprived:
                lasting.append("descriptors")
        if spoiled:
            lasting.append("output")
        if lasting and not (info is not None and info.one_shot):
            logger.warning(
                "a job has changed its worker for good, leaving",
                job_id=str(self._job_id),
                what=lasting,
                among=suspects,
            )
            self._leaving = Exit.ERROR

    def _channel_cookie(self) -> bytes:
        """Unique to this very socket (0.5 µs)."""
        try:
            return self.channel.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        except OSError:
            return b""

    def _die_deprived(self) -> NoReturn:
        """What is sent would go to whoever has the channel's number now, and never be seen."""
        with contextlib.suppress(OSError):
            os.write(2, b"aqd: the job has closed descriptors of its worker\n")
        os._exit(Exit.ERROR)

    def _end_helpers(self, entry: messages.JobEntry, info: HandlerInfo | None) -> None:
        left: list[int] | None = None
        with contextlib.suppress(OSError):  # out of descriptors, for one
            left = self.helpers.end_job(info is not None and info.detach)
        if left != []:
            logger.error("helpers of a job cannot be ended, leaving", job_id=str(entry.id), children=left)
            self._leaving = Exit.ERROR

    def _tell(self, data: bytes, fds: list[int], ended_ns: int) -> None:
        """An outcome: into the journal if there is room for it, else by the channel. Closes ``fds``."""
        try:
            if fds or not self._journal.append(data):
                self._check_channel()
                channel.send(self.channel, data, fds)
            elif not self._unannounced_ns:
                self._unannounced_ns = ended_ns
        finally:
            for fd in fds:
                os.close(fd)

    def _message(
        self, number: int, figures: tuple[int, int, int, int], ending: Ending, info: HandlerInfo | None
    ) -> tuple[bytes, list[int]]:
        """The message, and the descriptors of what is too large for it; the caller closes them."""
        completed = ending.kind == "completed"
        printed = b""
        if ending.kind != "unstarted" and (not completed or (info is not None and info.keep_output)):
            printed = output.tail(self.output_fd, self._printed)
        result: str | None = ending.result
        end: bytes | None = printed
        fds: list[int] = []
        # One character is one byte at least: short texts are decided without encoding them.
        if len(ending.result) * 4 > INLINE_RESULT and len(data := ending.result.encode()) > INLINE_RESULT:
            fds.append(channel.to_memfd(data))
            result = None
        if len(printed) > INLINE_RESULT:
            try:
                fds.append(channel.to_memfd(printed))
                end = None
            except OSError:  # out of descriptors: its very end is better than nothing
                end = printed[-INLINE_RESULT:]
        if completed:
            return messages.encode(messages.Done(number, *figures, result, end)), fds
        broken = messages.Broken(
            number,
            *figures,
            ending.kind,
            ending.error,
            ending.traceback,
            ending.retry_after_s,
            ending.reason,
            end,
        )
        return messages.encode(broken), fds

    def _announce(self) -> None:
        """Say that there is something in the journal, should the dispatcher be asleep."""
        if self._unannounced_ns and not self._deprived:
            self._unannounced_ns = 0
            if not self.page.listening:
                return
            self._check_channel()
            # A channel that is full has told the dispatcher already.
            with contextlib.suppress(BlockingIOError):
                channel.send(self.channel, messages.BELL, flags=socket.MSG_DONTWAIT)

    def _check_channel(self) -> None:
        if self._channel_cookie() != self._cookie:
            self._die_deprived()

    # --- one attempt

    def _attempt(self, entry: messages.JobEntry, payload: str, loaded: LoadedHandler | None) -> Ending:
        """Nothing a handler raises gets past this. Everything in here is on the job's time."""
        job: JobContext | None = None
        error: BaseException | None = None
        ending = COMPLETED
        log.context(slot=self._slot, job_id=str(entry.id), type=entry.type, attempt=entry.attempt)
        try:
            if loaded is None:
                if entry.type in self._missing:
                    raise HandlerMissing(self._missing[entry.type])
                raise LookupError(f"this worker has no handler for the type {entry.type!r}")
            info = loaded.info
            if info.wants_job or self._watched():
                job = self._context(entry)
            if job is not None or info.is_async or info.detach or info.confinement is not None:
                value = self._guarded(loaded, payload, job)
            else:
                self._interruptible = True
                value = loaded.function(decode_payload(payload))
                self._interruptible = False
            if value is not None:
                ending = Ending("completed", "", self._result(value))
        except BaseException as failure:
            # A stop may have come in the moment between the handler's end and the flag.
            self._interruptible = False
            error = failure
        if not self._own[0]:
            os._exit(Exit.ERROR)  # a child that the handler forked and let escape
        if error is not None:
            ending = self._failed(entry.number, error)
        if job is not None and self._watched():
            outcome = "failed" if ending.kind == "discarded" else ending.kind
            self._hook("aqd_job_finish", job=job, outcome=outcome, error=error)
        return ending

    def _watched(self) -> bool:
        """Whether a hook wants to know of jobs."""
        started, finished = self._watchers
        return bool(started() or finished())

    def _failed(self, number: int, error: BaseException) -> Ending:
        kind, reason = why(error, self.page.stop_reason if self.page.stop_entry == number else None)
        wish = -1.0
        if issubclass(type(error), Retry) and isinstance(error.after_s, int | float):  # type: ignore[attr-defined]
            wish = float(max(0.0, min(error.after_s, 1e12)))  # type: ignore[attr-defined]
        return Ending(kind, reason, "", *describe(error, __file__), wish)

    def _guarded(self, loaded: LoadedHandler, payload: str, job: JobContext | None) -> Any:
        """What the handler returns, with what its options ask for around it."""
        info = loaded.info
        if info.confinement is None and not info.detach:
            return self._interruptibly(loaded, payload, job)
        with contextlib.ExitStack() as surroundings:
            if info.confinement is not None and info.confinement.irreversible:
                confine.irrevocably(info.confinement, self.master_pid)
            elif info.confinement is not None:
                surroundings.enter_context(confine.around(info.confinement))
            if info.detach:
                surroundings.enter_context(self.helpers.marked_detached())
            return self._interruptibly(loaded, payload, job)

    def _interruptibly(self, loaded: LoadedHandler, payload: str, job: JobContext | None) -> Any:
        """A stop is let in only while the handler and the hooks before it run."""
        info = loaded.info
        try:
            self._interruptible = True
            if job is not None:
                self._hook("aqd_job_start", job=job)
            arguments = (decode_payload(payload), job) if info.wants_job else (decode_payload(payload),)
            if info.is_async:
                value = self._run_coroutine(loaded.function(*arguments))
            else:
                value = loaded.function(*arguments)
            self._interruptible = False
            return value
        finally:
            self._interruptible = False

    def _run_coroutine(self, awaitable: Coroutine[Any, Any, Any]) -> Any:
        import asyncio  # the loader has, if there is a handler for it

        try:
            with asyncio.Runner() as runner:
                return runner.run(self._coroutine(awaitable))
        except asyncio.CancelledError as cancelled:
            if self._softened == self.page.current():
                stop = stop_exception(self.page.stop_reason)
                raise stop.with_traceback(cancelled.__traceback__) from None
            raise
        finally:
            self._task = None

    async def _coroutine(self, awaitable: Coroutine[Any, Any, Any]) -> Any:
        from asyncio import current_task

        self._task = current_task()
        return await awaitable

    def _result(self, value: Any) -> str:
        try:
            return encode_json(value, field="result", max_bytes=self.config.jobs.max_result_bytes)
        except InputError as error:
            raise ResultRefused(f"the handler's result cannot be stored: {error}") from None

    def _context(self, entry: messages.JobEntry) -> JobContext:
        return JobContext(
            id=str(entry.id),
            type=entry.type,
            queue=entry.queue,
            attempt=entry.attempt,
            max_attempts=entry.max_attempts,
            created_at_us=entry.created_at_us,
            tags=entry.tags,
            meta=entry.meta,
            should_stop=lambda: self.page.stop_entry == entry.number,
            progress=lambda percent, message: self._note(entry.number, percent, message),
        )

    def _note(self, number: int, percent: float | None, message: str) -> None:
        """The job's progress, from whatever thread; one that is over (or a forked child) has nothing to say."""
        if os.getpid() != self.pid or self.page.current() != number:
            return
        text = str.__str__(message)[:NOTE_BYTES].replace("\0", "\\0")
        with self._note_lock:
            self.page.write_note(number, percent, text)

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
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                task.get_loop().call_soon_threadsafe(task.cancel)
                return
        raise stop_exception(self.page.stop_reason)


def take_no_notice() -> None:
    """Of what is meant for all. (The loader does, too: what stands already need not be set.)"""
    for number in _UNNOTICED:
        if signal.getsignal(number) is not _nothing:
            signal.signal(number, _nothing)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    pass
