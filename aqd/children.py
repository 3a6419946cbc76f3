"""The master's long-lived children: the dispatcher, the API under ``--with-api``, and the exporter of metrics.

Run by the master only. Each is fork + exec, in a session of its own, and is started again with a growing
pause when it dies. A successor of the dispatcher is started only after its predecessor was *reaped*: two
that peek at one journal would both record.
"""

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from aqd import channel, keys, messages, process, strays, systemd
from aqd.config import Config, secret_variables
from aqd.errors import ConfigError
from aqd.figures import Cell, Figures
from aqd.hookspecs import PluginInfo
from aqd.log import get_logger
from aqd.process import ExitStatus, boottime

log = get_logger("master")

BACKOFF_FIRST_S = 0.1
# Without a dispatcher nothing is recorded and no lease renewed: its pauses stay far below a lease. (With 30 s,
# nine kills in 40 s made outcomes wait in the channels until their leases had run out.)
DISPATCHER_BACKOFF_MAX_S = 1.0
SERVICE_BACKOFF_MAX_S = 30.0
# After a kill -9 of a master, an API that was just being started holds the port until it notices.
PORT_PATIENCE_S = 5.0
# One that lived for this long starts with a clean slate.
STABLE_S = 30.0
# The dispatcher's main thread never waits for the database and reports every second.
SILENCE_LIMIT_S = 15.0
# A reload waits for a new one to be connected, but not for a database that is away.
CONNECT_S = 5.0


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What children get: systemd's variables are the master's alone (gunicorn would send READY for us), and
    what marks a job's helpers is not for the helpers of another daemon's job that are a daemon themselves."""
    env = {k: v for k, v in environ.items() if k not in (strays.MARKER, strays.DETACH, strays.NODE)}
    systemd.strip_environment(env)
    return env


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """For the loader and thereby the handlers."""
    secret = secret_variables()
    return {k: v for k, v in env.items() if k not in secret}


@dataclass(slots=True)
class Respawn:
    """When a child may be started (again); ``longest_s`` bounds the pause."""

    longest_s: float
    failures: int = 0
    not_before: float = 0.0
    started: float = 0.0

    def begin(self, now: float) -> None:
        self.started = now

    def ended(self, now: float, *, at_once: bool = False) -> None:
        if at_once or now - self.started >= STABLE_S:
            self.failures = 0
        else:
            self.failures += 1
        pause = (
            min(BACKOFF_FIRST_S * 2 ** min(self.failures - 1, 20), self.longest_s)
            if self.failures > 1
            else 0.0
        )
        self.not_before = now + pause


class DispatcherChild:
    """The dispatcher process as the master holds it."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self.pid: int | None = None
        self.peer: channel.Peer | None = None
        self.respawn = Respawn(DISPATCHER_BACKOFF_MAX_S)
        self.handing_over = False
        self.heard = 0.0
        # What all of them have counted, and what the last one has seen.
        self.figures = Figures()
        self.gauges: list[Cell] = []
        self.seen_at = 0.0
        self._told: tuple[list[PluginInfo] | None, dict[str, int]] = (None, {})
        self.report: messages.Report | None = None
        self.hello: messages.Hello | None = None
        self._hello_at = 0.0
        self.drained = False

    def start(self, start: messages.Start) -> channel.Peer:
        """Fork + exec; the caller then sends everything that it holds. :class:`OSError` if that cannot be."""
        ours, theirs = channel.pair()
        with theirs:
            argv = process.python_argv("aqd.dispatcher", str(os.getpid()))
            self.pid = process.spawn(argv, self._env, [theirs.fileno()])
        self.peer = channel.Peer(ours, messages.encode)
        now = boottime()
        self.heard = now
        self.respawn.begin(now)
        self.report = self.hello = None
        self.handing_over = self.drained = False
        self._told = (None, self._told[1])
        with contextlib.suppress(channel.ChannelClosed):
            self.peer.send(start)
        return self.peer

    def send(self, message: messages.ToDispatcher) -> None:
        if self.peer is not None:
            with contextlib.suppress(channel.ChannelClosed):
                self.peer.send(message)

    def tell_facts(self, plugins: list[PluginInfo], restarts: dict[str, int]) -> None:
        """Say what it cannot know, if it does not know it yet."""
        told_plugins, told = self._told
        more = {cause: number - told.get(cause, 0) for cause, number in restarts.items()}
        news = {cause: number for cause, number in more.items() if number}
        if news or plugins != told_plugins:
            self.send(messages.Facts(plugins, news))
            self._told = (list(plugins), dict(restarts))

    def see(self, message: messages.Seen) -> None:
        """Told in parts, the first of which says that all are new."""
        self.gauges = message.cells if message.first else self.gauges + message.cells
        self.seen_at = boottime()

    def flush(self) -> None:
        if self.peer is not None:
            with contextlib.suppress(channel.ChannelClosed):
                self.peer.flush()

    def greeted(self, hello: messages.Hello) -> None:
        """It runs."""
        self.hello, self._hello_at = hello, boottime()

    @property
    def claims(self) -> bool:
        """Whether it is connected and its node is known, so that it claims what it is asked for."""
        return self.report is not None and self.report.database_up and self.report.registered

    def serves(self, now: float) -> bool:
        """Whether it claims jobs, or has had its time and would if there were a database."""
        return (
            self.hello is not None
            and not self.handing_over
            and (self.claims or now >= self._hello_at + CONNECT_S)
        )

    def hand_over(self) -> None:
        """Let it end in order; a successor follows its reaping."""
        self.handing_over = True
        self.send(messages.HandOver())

    def check(self, now: float) -> None:
        """A main thread that says nothing is stuck or stopped."""
        if self.pid is not None and now >= self.heard + SILENCE_LIMIT_S:
            log.error("dispatcher is silent, killing it", child=self.pid, silent_s=round(now - self.heard, 1))
            self.heard = now
            process.signal_group(self.pid, signal.SIGKILL)

    def exited(self, status: ExitStatus) -> None:
        expected = self.handing_over and status.ok
        if not expected:
            log.warning("dispatcher ended", child=self.pid, status=str(status))
        self.respawn.ended(boottime(), at_once=expected)
        if self.peer is not None:
            self.peer.close()
        self.pid = self.peer = self.report = self.hello = None


class ServiceChild:
    """A child that serves on a port of its own (``name``, run by ``module``), started again when it dies.

    The master binds the socket and passes it on: after a kill -9 of gunicorn's arbiter its workers held the
    port for 13 s. A child and what it forks are one process group, killed together.
    """

    name = ""
    module = ""

    def __init__(self, env: dict[str, str], host: str, port: int) -> None:
        self._env = env
        self.pid: int | None = None
        self.stopping = False
        self.respawn = Respawn(SERVICE_BACKOFF_MAX_S)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._bind(host, port)
            self._check()
        except (OSError, ConfigError):
            self.listener.close()
            raise
        self.listener.listen(1024)

    def _check(self) -> None:
        """Refuse by :class:`ConfigError` to serve on what was bound."""

    def _bind(self, host: str, port: int) -> None:
        deadline, said = boottime() + PORT_PATIENCE_S, False
        while True:
            try:
                return self.listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or boottime() >= deadline:
                    reason = error.strerror or error
                    raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
            if not said:
                log.warning(f"{self.name} port is taken, waiting for it", port=port, seconds=PORT_PATIENCE_S)
                said = True
            time.sleep(0.05)

    def start(self) -> None:
        """:class:`OSError` if that cannot be."""
        argv = process.python_argv(
            self.module, "--fd", str(process.FIRST_PASSED_FD), "--parent", str(os.getpid())
        )
        self.pid = process.spawn(argv, self._env, [self.listener.fileno()], blocked=False)
        self.respawn.begin(boottime())

    def exited(self, status: ExitStatus) -> None:
        """It has ended (of the API: its arbiter)."""
        expected = self.stopping and status.ok
        if expected:
            log.debug(f"{self.name} ended", child=self.pid, status=str(status))
        else:
            log.warning(f"{self.name} ended", child=self.pid, status=str(status))
        self.pid = None
        self.stopping = False
        self.respawn.ended(boottime(), at_once=expected)

    def stop(self) -> None:
        """Let it answer what it has begun, and end; unless the daemon drains, it is started again at once."""
        if self.pid is not None:
            self.stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class ApiChild(ServiceChild):
    """gunicorn (``--with-api``)."""

    name, module = "api", "aqd.api.server"

    def __init__(self, env: dict[str, str], config: Config) -> None:
        self._api = config.api
        super().__init__(env, config.api.host, config.api.port)

    def _check(self) -> None:
        self.exposed = keys.beyond([self.listener])
        keys.load(self._api, self.exposed)  # refused here, it is not refused again and again there


class ExporterChild(ServiceChild):
    """The node's metrics (``daemon.metrics_port``)."""

    name, module = "exporter", "aqd.exporter"


class Services:
    """All of them that are wanted."""

    def __init__(
        self, env: dict[str, str], config_path: str | None, config: Config, *, with_api: bool
    ) -> None:
        self.all: list[ServiceChild] = []
        env = env | ({"AQD_CONFIG": config_path} if config_path else {})
        self.api = ApiChild(env, config) if with_api else None
        if self.api is not None:
            self.all.append(self.api)
        daemon = config.daemon
        if daemon.metrics_port:
            self.all.append(ExporterChild(without_secrets(env), daemon.metrics_host, daemon.metrics_port))

    def pids(self) -> list[int]:
        """Of those that run."""
        return [service.pid for service in self.all if service.pid is not None]

    def start(self, now: float) -> None:
        """Start those that do not run and may."""
        for service in self.all:
            if service.pid is None and now >= service.respawn.not_before:
                try:
                    service.start()
                except OSError as error:
                    log.error(f"{service.name} cannot be started", error=str(error))
                    service.respawn.ended(boottime())

    def stop(self) -> None:
        for service in self.all:
            service.stop()

    def before_reaping(self, pid: int) -> None:
        """What they have forked ends with them, while the number is still theirs."""
        if pid in self.pids():
            process.signal_group(pid, signal.SIGKILL)

    def exited(self, pid: int, status: ExitStatus) -> bool:
        """Whether ``pid`` was one of them."""
        for service in self.all:
            if service.pid == pid:
                service.exited(status)
                return True
        return False
