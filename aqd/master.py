"""The master: forks, waits, enforces, answers. One thread; no database, no plugin, no API code.

``aqd run`` is this process. It owns the slots (:mod:`aqd.slots` decides, :mod:`aqd.crew` acts), loads
generations (:mod:`aqd.generations`), keeps the dispatcher and the API alive (:mod:`aqd.children`), and
answers on the control socket. It is a child subreaper, so whatever its jobs leave behind becomes its child
and is reaped, as PID 1 too.

Promises: signal handlers only write a byte; nothing is waited for without a deadline; the log never blocks
it; a stop wins over everything; a broken configuration or plugin never takes a serving generation down.

Fails: exits with an :class:`aqd.errors.Exit` code: CONFIG (refused at start), RUNNING (another daemon holds
the pid file), LOADER (the first generation cannot be loaded), WORKERS (workers cannot start), DATABASE (the schema
is of a newer aqd).
"""

import os
import selectors
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from aqd import (
    __version__,
    channel,
    config,
    control,
    keys,
    log,
    messages,
    pace,
    process,
    slots,
    status,
    strays,
    systemd,
)
from aqd.children import DispatcherChild, Services, child_environment, without_secrets
from aqd.config import Config
from aqd.crew import Crew
from aqd.errors import ConfigError, Exit
from aqd.generations import LOADER_MARGIN_S, Generations, Loader
from aqd.hookspecs import PluginInfo
from aqd.process import Signals, boottime

logger = log.get_logger("master")

# What the master has open beside its slots, and for each slot (two incarnations may be held).
DESCRIPTORS, DESCRIPTORS_PER_SLOT = 128, 8
# After the drain and the grace: outcomes may still be written for so long, then the leases must do; and not
# even so long if the database has owed an answer for the second.
FINAL_S, SILENT_S = 10.0, 1.0
# While starting is slow (the database is away), systemd is asked for so much more at a time.
EXTEND_S = 30.0
# Having not run for so long, the master was suspended: nobody else is to blame for having been silent.
FROZEN_S = 3.0
# So many workers in a row may end before their loop until a reload is taken back.
UNPROVED_FAILURES_MAX = 3


class Master:
    """The daemon's top process. :meth:`run` returns its exit code."""

    def __init__(
        self,
        loaded: config.Loaded,
        config_path: str | None,
        with_api: bool,
        signals: Signals,
    ) -> None:
        self.config = cfg = loaded.config
        self.config_path = config_path
        self.config_file = loaded.path
        self.signals = signals
        self.started_at = datetime.now(UTC)
        self.started = boottime()
        self.node_name = config.node_name(cfg)
        # The machine's boot and this process's start make it unique over reboots and reused pids.
        self.node_id = f"{self.node_name}/{os.getpid()}/{os.urandom(6).hex()}"
        self.selector = selectors.DefaultSelector()
        self.plan = slots.Slots(cfg.daemon.slots, cfg.daemon.spawn_failures_max)
        self.crew = Crew(self.plan)
        self.pace = pace.Pace()
        self.crew.recycle_memory_kb = cfg.daemon.recycle_memory_mb << 10
        env = child_environment(os.environ)
        self.generations = Generations(
            without_secrets(env) | {strays.NODE: self.node_id},
            ready=self._generation_ready,
            refused=lambda errors: self._generation_refused(errors, self.generations.last),
            spawned=self._spawned,
            opened=self._loader_opened,
            closed=self._loader_closed,
        )
        self.dispatcher = DispatcherChild(env)
        self.services = Services(env, config_path, cfg, with_api=with_api)
        self.api = self.services.api
        self.hunt = strays.Hunt(self.node_id, self._known_children, self.generations.sessions)
        self.crew.worker_died = lambda pid, incarnation, orderly: self.hunt.worker_died(
            pid, incarnation, boottime(), orderly=orderly
        )
        self.control = control.Server(config.control_socket(cfg), self.selector, self._on_command)
        self.selector.register(signals, selectors.EVENT_READ, lambda: None)
        self.draining_until: float | None = None
        self.exit_code = Exit.OK
        self._last_turn = boottime()
        self._look_at: float | None = None  # when a page, or what a dead worker left, wants a look
        # What the workers serve, and the dispatcher must know, also while that generation's loader is dead.
        self.served: Loader | None = None
        self.ready_sent = False
        self.problems: list[str] = []
        self._reload_again = False
        self._reload_not_before = 0.0
        self._load_failures = 0
        self._reloads = control.Waiting()
        self._switching = False
        self.systemd = systemd.Notifier()
        self._watchdog = systemd.watchdog_interval_s()
        self._next_watchdog = self._next_extend = 0.0
        self._status_line = ""

    # --- the loop

    def run(self) -> Exit:
        logger.info("daemon starts", version=__version__, slots=self.config.daemon.slots)
        self.generations.load(self.config)
        self._start_children(boottime())  # beside the loader, and not after the first tick
        while not self._turn():
            pass
        self._end()
        logger.info("daemon ended", exit_code=int(self.exit_code))
        return self.exit_code

    def _turn(self) -> bool:
        """Wait for something, deal with it; whether the daemon is done."""
        for key, _ in self.selector.select(self._timeout()):
            key.data()
        for number in self.signals.read():
            self._on_signal(number)
        self._reap()
        now = boottime()
        if now >= self._last_turn + FROZEN_S:
            self.crew.forgive(now)
            self.dispatcher.heard = now
        self._last_turn = now
        self.generations.check(now)
        self.dispatcher.check(now)
        self._start_children(now)
        drain_over = self.draining_until is not None and now >= self.draining_until
        looks = [
            self.crew.enforce(self.config.daemon.kill_grace_s, stop_all=drain_over),
            self.hunt.turn(now),
        ]
        self._look_at = min((moment for moment in looks if moment is not None), default=None)
        self.crew.act()
        self._prove_generation()
        self.dispatcher.flush()
        self.generations.flush()
        self._finish_reload()
        self._tell_systemd(now)
        return self._done(now)

    def _timeout(self) -> float:
        # A pid not yet known or a message not yet sent wants a look soon, too: the tick covers that.
        now = boottime()
        if not self._at_rest():
            self.pace.worked(now)
        moments = [self.plan.next_at(), self.generations.next_at(), self._look_at]
        if self.draining_until is not None and self.draining_until > now:
            moments.append(self.draining_until)
        if self._watchdog is not None:
            moments.append(self._next_watchdog)
        tick_s = self.pace.tick_s(now, newborns=self.crew.newborns())
        soonest = min((m for m in moments if m is not None), default=now + tick_s)
        return max(0.0, min(tick_s, soonest - now))

    def _at_rest(self) -> bool:
        """Nothing runs, nothing is under way, nothing is missing."""
        peer, loader = self.dispatcher.peer, self.generations.serving
        return (
            self.crew.at_rest()
            and self.draining_until is None
            and not (self._switching or self._reload_again or self.generations.candidate is not None)
            and (loader is not None and not loader.peer.waiting)
            and (peer is not None and not peer.waiting and self.dispatcher.hello is not None)
            and all(service.pid is not None for service in self.services.all)
        )

    def _on_signal(self, number: int) -> None:
        match number:
            case signal.SIGTERM | signal.SIGINT:
                self.stop(signal.Signals(number).name)
            case signal.SIGHUP:
                self.reload("SIGHUP")

    def _reap(self) -> None:
        for pid, exit_status, usage in process.reap(self._before_reaping):
            if pid == self.dispatcher.pid:
                self._read_dispatcher()
                self._dispatcher_closed()
                self.dispatcher.exited(exit_status)
            elif self.services.exited(pid, exit_status):
                pass
            elif self.generations.exited(pid, exit_status):
                if self.generations.serving is None:
                    self.crew.loader, self.plan.loader_up = None, False
            else:
                self.crew.reaped(pid, exit_status, usage)

    def _before_reaping(self, pid: int) -> None:
        """What dies with a child, while the child's number is still its own."""
        self.crew.before_reaping(pid)
        self.services.before_reaping(pid)

    def _known_children(self) -> set[int]:
        """Whoever is a child of ours by right: all others were adopted."""
        others = {*self.services.pids(), *([self.dispatcher.pid] if self.dispatcher.pid is not None else [])}
        return self.crew.pids() | self.generations.pids() | others

    def _start_children(self, now: float) -> None:
        if self._done_serving():
            return
        child = self.dispatcher
        if child.pid is None and now >= child.respawn.not_before:
            self._start_dispatcher()  # beside the first loader: each takes a third of a second
        if self.draining_until is not None:
            return
        self.services.start(now)
        idle = self.generations.serving is None and self.generations.candidate is None
        if (
            (idle or self._reload_again)
            and self.generations.candidate is None
            and now >= self._reload_not_before
        ):
            # The loader has died, or a reload came during another: files may have changed, load all anew.
            self.reload("again" if self._reload_again else "loader lost")

    # --- generations

    def reload(self, cause: str) -> None:
        """Load configuration and plugins into a candidate generation; the serving one goes on meanwhile."""
        if self.draining_until is not None:
            return
        if self.generations.candidate is not None:
            self._reload_again = True
            return
        self._reload_again = False
        logger.info("reload begins", cause=cause)
        self.systemd.send(systemd.reloading())
        try:
            cfg, self.config_file, _ = config.load_with_sources(self.config_path, os.environ)
            if self.api is not None:
                keys.load(cfg.api, self.api.exposed)
        except ConfigError as error:
            if self.generations.serving is None:
                cfg = self.config  # a dead loader must be replaced by what is known to work
                self.problems = [str(error)]
            else:
                self._generation_refused([str(error)], self.generations.last + 1)
                return
        self.generations.load(cfg)

    def _generation_ready(self, loader: Loader) -> None:
        first = self.plan.serving is None
        self._load_failures = 0
        self.problems = _broken(loader.plugins)
        for plugin in loader.plugins:
            if plugin.error:
                logger.error("plugin broken", plugin=plugin.name, source=plugin.source, reason=plugin.error)
        old, self.config = self.config, self._reloadable(loader.config)
        changed = old != self.config
        log.configure(self.config.log.level, self.config.log.format, process="master")
        self.served = loader
        self.plan.serving, self.plan.loader_up = loader.generation, True
        self.plan.count = self.config.daemon.slots
        self.crew.recycle_memory_kb = self.config.daemon.recycle_memory_mb << 10
        # Until a worker of it has reached its loop there may be a way back.
        unproved = self.generations.previous is not None
        self.plan.failures_max = UNPROVED_FAILURES_MAX if unproved else self.config.daemon.spawn_failures_max
        self.plan.generation_changed()
        self.crew.loader, self.crew.gave_up = loader.peer, False
        self.crew.detaching |= any(handler.detach for handler in loader.handlers)
        imports_s = self.config.plugins.import_timeout_s * (1 + len(loader.late))
        self.crew.start_limit_s = imports_s + LOADER_MARGIN_S
        process.allow_descriptors(DESCRIPTORS + DESCRIPTORS_PER_SLOT * self.plan.count)
        self._switching = True
        if self.dispatcher.pid is not None:
            if changed:
                self.dispatcher.hand_over()  # its successor starts with the new configuration
            else:
                self.dispatcher.send(messages.Serve(loader.generation, loader.handlers))
        if self.api is not None and (changed or self.config.api.keys_file):
            self.api.stop()  # and start again: the listening socket is ours, nobody is refused meanwhile
        event = "generation loaded" if first else "generation replaced"
        types = sorted(h.type for h in loader.handlers)
        logger.info(event, generation=loader.generation, types=types, broken=len(self.problems))

    def _reloadable(self, cfg: Config) -> Config:
        """The new configuration without what only a restart can change."""
        fixed = [*config.RESTART_ONLY, *(("api.host", "api.port") if self.api is not None else ())]
        cfg, kept = config.keep(self.config, cfg, fixed)
        for key in kept:
            logger.warning("option changes only with a restart", option=key)
        return cfg

    def _generation_refused(self, errors: list[str], generation: int) -> None:
        self._load_failures += 1
        self._reload_not_before = boottime() + min(0.5 * 2 ** min(self._load_failures, 10), 30.0)
        served = self.served.plugins if self.served is not None else []
        self.problems = [*errors, *_broken(served)]
        for error in errors:
            logger.error("generation refused", reason=error)
        if self.plan.serving is None:
            self._give_up(Exit.LOADER)
            return
        answer = {"ok": False, "error": "; ".join(errors), "generation": self.plan.serving}
        self._reloads.answer(answer, generation, generation)
        self.systemd.send("READY=1")

    def _prove_generation(self) -> None:
        """Keep the way back until a worker has reached its loop; take it if they cannot start."""
        failed = self.plan.serving or 0
        if self.crew.gave_up and self.draining_until is None:
            if self.generations.previous is None:
                self._give_up(Exit.WORKERS)
                return
            self.generations.revert()
            self._generation_refused(
                [f"the workers of generation {failed} end before they are ready"], failed
            )
        elif self.generations.previous is not None and self.crew.any_reached_loop(failed):
            self.generations.proved()
            self.plan.failures_max = self.config.daemon.spawn_failures_max

    def _finish_reload(self) -> None:
        """The new generation serves once every slot has switched, or is busy with its last old job, and jobs are claimed
        for it."""
        if not self._switching or self.draining_until is not None:
            return
        busy = {seat.slot for seat in self.crew.busy()}
        for slot in self.plan.slots():
            worker = slot.worker
            new = worker is not None and worker.generation == self.plan.serving
            if slot.number not in busy and not (
                new and worker is not None and self.crew.reached_loop(worker)
            ):
                return
        if not self.dispatcher.serves(boottime()):
            return
        self._switching = False
        if self.ready_sent:
            logger.info("reload done", generation=self.plan.serving)
            self.systemd.send("READY=1")
        serving = self.plan.serving or 0
        self._reloads.answer({"ok": True, "generation": serving, "problems": self.problems}, serving)

    def _loader_opened(self, loader: Loader) -> None:
        self.selector.register(loader.peer, selectors.EVENT_READ, lambda: self.generations.on_channel(loader))

    def _loader_closed(self, loader: Loader) -> None:
        self._unregister(loader.peer)

    def _spawned(self, incarnation: int, pid: int) -> None:
        self.pace.born(boottime())
        self.crew.spawned(incarnation, pid)

    def _unregister(self, peer: channel.Peer) -> None:
        if peer.fileno() >= 0 and peer.fileno() in self.selector.get_map():
            self.selector.unregister(peer)

    # --- the dispatcher

    def _start_dispatcher(self) -> None:
        start = messages.Start(self.config, self.node_id, self.node_name, os.getpid(), __version__)
        try:
            peer = self.dispatcher.start(start)
        except OSError as error:  # out of descriptors, processes or memory
            logger.error("dispatcher cannot be started", error=str(error))
            self.dispatcher.respawn.ended(boottime())
            return
        self.selector.register(peer, selectors.EVENT_READ, self._read_dispatcher)
        self.crew.dispatcher = peer
        if (served := self.served) is not None:
            self.dispatcher.send(messages.Serve(served.generation, served.handlers))
        self.crew.attach_all()
        if self.draining_until is not None:
            self.dispatcher.send(messages.Drain())

    def _read_dispatcher(self) -> None:
        peer = self.dispatcher.peer
        if peer is None:
            return
        try:
            for data, fds in peer.received():
                for fd in fds:
                    os.close(fd)
                self.dispatcher.heard = boottime()
                self._on_dispatcher(messages.decode_from_dispatcher(data))
        except channel.ChannelClosed:
            self._dispatcher_closed()  # its death follows by SIGCHLD
        except (ValueError, msgspec.MsgspecError) as error:  # another version's, after an upgrade on disk
            logger.error("unreadable message, killing the dispatcher", error=str(error))
            self._dispatcher_closed()
            if self.dispatcher.pid is not None:
                process.signal_group(self.dispatcher.pid, signal.SIGKILL)

    def _dispatcher_closed(self) -> None:
        peer = self.dispatcher.peer
        self.crew.dispatcher = None
        if peer is not None:
            self._unregister(peer)

    def _on_dispatcher(self, message: messages.FromDispatcher) -> None:
        match message:
            case messages.Hello(version):
                self.dispatcher.greeted(message)
                if version != __version__:
                    logger.warning(
                        "restart needed: the program was upgraded", running=__version__, installed=version
                    )
                    self.problems.append(f"restart needed: aqd {version} is installed, {__version__} runs")
            case messages.Recall(incarnation):
                self.crew.recall(incarnation)
            case messages.Retired(incarnation):
                for action in self.plan.retired(incarnation, boottime()):
                    assert isinstance(action, slots.Close)
                    self.crew.close_channel(action.incarnation)
            case messages.Settled(incarnation):
                self.crew.settled(incarnation)
            case messages.Fence(incarnation, number):
                self.crew.fence(incarnation, number)
            case messages.Cancel(incarnation, number):
                self.crew.cancel(incarnation, number)
            case messages.Working():
                self.pace.worked(boottime())
            case messages.Watch(incarnation):
                self.crew.watch(incarnation)
            case messages.Recycle(incarnation):
                self.plan.recycle(incarnation)
            case messages.Report():
                before, self.dispatcher.report = self.dispatcher.report, message
                if message.unfit and message.unfit != (before.unfit if before is not None else ""):
                    logger.error("schema does not fit", reason=message.unfit)
                    # One that has served waits, with the jobs that its workers are on.
                    if not self.ready_sent and self.draining_until is None:
                        self._give_up(Exit.DATABASE)
                self.dispatcher.tell_facts(self.served.plugins if self.served else [], self.crew.restarts)
            case messages.Counted(cells):
                self.dispatcher.figures.add(cells)
            case messages.Seen():
                self.dispatcher.see(message)
            case messages.Drained():
                self.dispatcher.drained = True

    # --- stopping

    def stop(self, cause: str) -> None:
        """Begin the drain; a second call ends it at once."""
        now = boottime()
        if self.draining_until is not None:
            if now < self.draining_until:
                logger.info("drain cut short", cause=cause)
                self.draining_until = now
            return
        logger.info(
            "drain begins", cause=cause, drain_s=self.config.daemon.drain_s, busy=len(self.crew.busy())
        )
        self.draining_until = now + self.config.daemon.drain_s
        # drain_s may be longer than what the unit allows for a stop.
        longest = self.config.daemon.drain_s + self.config.daemon.kill_grace_s + FINAL_S + EXTEND_S
        self.systemd.send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(longest * 1e6)}")
        self.generations.abandon_candidate()
        self.plan.draining = True
        self.dispatcher.send(messages.Drain())
        self.services.stop()
        self._reloads.answer({"ok": False, "error": "the daemon is stopping"}, self.generations.last + 1)

    def _give_up(self, code: Exit) -> None:
        self.exit_code = code
        self.stop(f"gave up ({code.name.lower()})")

    def _done_serving(self) -> bool:
        return self.draining_until is not None and not self.crew.seats

    def _stopping_jobs(self) -> bool:
        """Whether a job is still being ended: what the leases are left with must not run any more."""
        return bool(self.crew.busy())

    def _done(self, now: float) -> bool:
        if self.draining_until is None:
            return False
        over = self.draining_until + self.config.daemon.kill_grace_s
        report = self.dispatcher.report
        silent = report is not None and (not report.database_up or report.silent_s > SILENT_S)
        if now >= over + (0.0 if silent and not self._stopping_jobs() else FINAL_S):
            logger.error("drain did not end, leaving the rest to the leases", unsettled=len(self.crew.seats))
            return True
        if self.crew.seats:
            return False
        if self.dispatcher.pid is not None:
            if not self.dispatcher.handing_over and (self.dispatcher.drained or self.dispatcher.peer is None):
                self.dispatcher.hand_over()
            return False
        return not self.services.pids()

    def _end(self) -> None:
        """Nothing is left behind: not a process, not a socket, not a pid file (its lock goes with us)."""
        self.crew.kill_all()
        self.generations.close()
        for pid in (self.dispatcher.pid, *self.services.pids()):
            if pid is not None:
                process.signal_group(pid, signal.SIGKILL)
        deadline = boottime() + 2.0
        while boottime() < deadline:
            for _ in process.reap(lambda _: None):
                pass
            left = [pid for pid in process.children() if not strays.detached(strays.environment(pid))]
            if not left:
                break
            if os.getpid() != 1 and boottime() > deadline - 1.5:
                for pid in left:  # adopted: what jobs left running. All children of ours are ours.
                    strays.kill_group(pid)
            self.selector.select(0.01)
            self.signals.read()
        self.control.close()

    # --- answering

    def _on_command(self, client: control.Client, command: str, _: dict[str, Any]) -> None:
        match command:
            case "status":
                client.answer(status.describe(self))
            case "metrics":
                client.answer(status.metrics(self))
            case "reload":
                if self.draining_until is not None:
                    client.answer({"ok": False, "error": "the daemon is stopping"})
                    return
                self._reloads.add(client, self.generations.last + 1)
                self.reload("aqd reload")
            case "stop":
                client.answer({"ok": True, "pid": os.getpid()})
                self.stop("aqd stop")
            case _:
                client.answer(
                    {
                        "ok": False,
                        "error": f"unknown command {command[:64]!r}; known: status, metrics, reload, stop",
                    }
                )

    @property
    def state(self) -> str:
        """One word for the status: see :mod:`aqd.status`."""
        report = self.dispatcher.report
        if self.draining_until is not None:
            return "draining"
        if self.generations.candidate is not None and self.plan.serving is not None:
            return "reloading"
        if report is not None and not report.database_up:
            return "waiting for database"
        return "running" if self.ready_sent else "starting"

    def _tell_systemd(self, now: float) -> None:
        if not self.ready_sent and self.draining_until is None:
            loaded = self.plan.serving is not None and not self._switching
            if self.dispatcher.claims and loaded:
                self.ready_sent = True
                self.systemd.send("READY=1")
                logger.info(
                    "daemon ready", seconds=round(now - self.started, 3), generation=self.plan.serving
                )
            elif now >= self._next_extend:
                self._next_extend = now + EXTEND_S / 2
                self.systemd.hint(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        if self._watchdog is not None and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog
            self.systemd.hint("WATCHDOG=1")
        self.systemd.flush()
        line = status.line(self)
        if line != self._status_line and self.systemd.hint(f"STATUS={line}"):
            self._status_line = line


def _broken(plugins: Sequence[PluginInfo]) -> list[str]:
    return [f"plugin {p.name}: {p.error}" for p in plugins if p.error]
