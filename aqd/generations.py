"""Loaders and generations: how new plugins and configuration come into service.

Run by the master only. A generation is one load of configuration and plugins by one loader process, from
which its workers are forked. A *candidate* is loaded beside the serving one; only when it is ready does the
master switch, so a broken plugin or a loader that dies never takes the old generation down.

What can go wrong while loading, and what becomes of it:

* a plugin that raises is reported by the loader itself as broken; at the start the others serve, but a
  generation in which it was not broken is not given up for it: the candidate is refused;
* a plugin that kills the loader (a crash in C code, an endless loop that no exception ends) is known by the
  loader's last :class:`~aqd.messages.Importing`: the loader is started again, and the second time without
  it (the first may have been the kernel's doing, or an operator's);
* a plugin that starts a thread cannot be forked from: the loader is started again and leaves it to the
  workers to import it after the fork;
* a generation whose workers die before they reach their loop (a hook or a late plugin kills them) is given
  up after a few, and the one before serves again: its loader is kept until the new one is *proved*;
* strict mode, or a loader that cannot start at all: the candidate is refused and the old one serves on.
"""

import contextlib
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from aqd import channel, messages, process
from aqd.config import Config, without_secrets
from aqd.hookspecs import HandlerInfo, PluginInfo
from aqd.log import get_logger
from aqd.process import ExitStatus, boottime

log = get_logger("master")

# Beyond a plugin's own limit, which the loader enforces by an exception: start-up, and code that no
# exception ends.
LOADER_MARGIN_S = 20.0

# After a loader's death a worker that it forked has left its session, or has ended for want of a parent.
NEWBORN_S = 10.0


@dataclass(slots=True)
class Loader:
    """One loader process and what it has reported so far."""

    generation: int
    config: Config
    pid: int
    peer: channel.Peer
    deadline: float
    skip: dict[str, str]
    late: list[str]
    importing: str | None = None
    suspect: str | None = None
    overdue: bool = False
    handlers: list[HandlerInfo] = field(default_factory=list)
    plugins: list[PluginInfo] = field(default_factory=list)


class Generations:
    """The serving loader and the candidate. The master registers the channels and reports deaths.

    ``ready(loader)`` and ``refused(errors)`` are called when a candidate's fate is known, ``spawned`` for
    every worker that the serving loader has forked, ``opened``/``closed`` when a channel comes or goes.
    """

    def __init__(
        self,
        env: dict[str, str],
        *,
        ready: Callable[[Loader], None],
        refused: Callable[[list[str]], None],
        spawned: Callable[[int, int], None],
        opened: Callable[[Loader], None],
        closed: Callable[[Loader], None],
    ) -> None:
        self.serving: Loader | None = None
        self.previous: Loader | None = None  # until the serving one is proved
        self.candidate: Loader | None = None
        self._env = env
        self._ready, self._refused, self._spawned = ready, refused, spawned
        self._opened, self._closed = opened, closed
        self.last = 0  # the number of the generation that was started last
        self._let_go: set[int] = set()
        # By their loaders' numbers, with the moment at which they are over.
        self._sessions: dict[int, float] = {}

    # --- starting and ending

    def load(self, config: Config) -> None:
        """Start a candidate with this configuration; there must be none."""
        assert self.candidate is None
        self.last += 1
        self._start(config, self.last, {}, [])

    def _start(
        self,
        config: Config,
        generation: int,
        skip: dict[str, str],
        late: list[str],
        suspect: str | None = None,
    ) -> None:
        try:
            ours, theirs = channel.pair()
            with theirs:
                argv = process.python_argv("aqd.loader", str(os.getpid()))
                pid = process.spawn(argv, self._env, [theirs.fileno()])
        except OSError as error:  # out of descriptors, processes or memory
            self._refused([f"the loader cannot be started: {error}"])
            return
        peer = channel.Peer(ours, messages.encode)
        limit = config.plugins.import_timeout_s + LOADER_MARGIN_S
        loader = Loader(generation, config, pid, peer, boottime() + limit, skip, late, suspect=suspect)
        self.candidate = loader
        self._sessions[pid] = math.inf
        self._opened(loader)
        with contextlib.suppress(channel.ChannelClosed):
            peer.send(messages.Load(without_secrets(config), generation, os.getpid(), skip, late))

    def sessions(self) -> set[int]:
        """Of which a newborn worker may still be, that is about to lead its own. What else is in the session of a loader
        that has gone (a server that a plugin started at import) belongs to nobody."""
        now = boottime()
        self._sessions = {pid: until for pid, until in self._sessions.items() if now < until}
        return set(self._sessions)

    def pids(self) -> set[int]:
        """Of all loaders that have not been reaped."""
        living = (self.serving, self.previous, self.candidate)
        return {loader.pid for loader in living if loader is not None} | self._let_go

    def _end(self, loader: Loader) -> None:
        """Let go of a loader: it ends when its channel does. Its death needs no further notice."""
        if loader.peer.fileno() < 0:
            return
        self._let_go.add(loader.pid)
        self._closed(loader)
        loader.peer.close()

    def abandon_candidate(self) -> None:
        """A stop wins over a reload."""
        if self.candidate is not None:
            _kill(self.candidate)
            self._end(self.candidate)
            self.candidate = None

    def close(self) -> None:
        self.abandon_candidate()
        self.proved()
        if self.serving is not None:
            self._end(self.serving)
            self.serving = None

    # --- events

    def on_channel(self, loader: Loader) -> None:
        """The loader's channel is readable."""
        if not self._known(loader):
            return  # let go of by an event of the same turn
        try:
            for data, fds in loader.peer.received():
                for fd in fds:
                    os.close(fd)
                self._on_message(loader, messages.decode_from_loader(data))
                if not self._known(loader):
                    return
        except channel.ChannelClosed:
            self._closed(loader)  # its death follows by SIGCHLD
        except (ValueError, msgspec.MsgspecError) as error:  # another version's, after an upgrade on disk
            log.error("unreadable message, killing the loader", child=loader.pid, error=str(error))
            self._closed(loader)
            _kill(loader)

    def _known(self, loader: Loader) -> bool:
        return any(loader is known for known in (self.candidate, self.serving, self.previous))

    def _on_message(self, loader: Loader, message: messages.FromLoader) -> None:
        match message:
            case messages.Spawned(incarnation, pid):
                self._spawned(incarnation, pid)
            case messages.Importing(plugin):
                loader.importing = plugin
                loader.deadline = boottime() + loader.config.plugins.import_timeout_s + LOADER_MARGIN_S
            case messages.Loaded():
                self._on_loaded(loader, message)
            case messages.LoadRefused(errors) if loader is not self.candidate:
                # It served and cannot any more; its death follows, and a new generation after it.
                log.error("loader fails", generation=loader.generation, error="; ".join(errors))
            case messages.LoadRefused(errors):
                self._end(loader)
                self.candidate = None
                self._refused(errors)

    def _on_loaded(self, loader: Loader, message: messages.Loaded) -> None:
        if message.threaded:
            log.info("plugins start threads, importing them after the fork", plugins=message.threaded)
            self._restart(loader, loader.skip, sorted({*loader.late, *message.threaded}))
            return
        loader.handlers, loader.plugins = message.handlers, message.plugins
        loader.importing = None
        if errors := self._newly_broken(loader):
            self._end(loader)
            self.candidate = None
            self._refused(errors)
            return
        self.proved()
        self.previous, self.serving, self.candidate = self.serving, loader, None
        self._ready(loader)

    def proved(self) -> None:
        """A worker of the serving generation has reached its loop: there is no way back any more."""
        if self.previous is not None:
            self._end(self.previous)
            self.previous = None

    def revert(self) -> None:
        """The serving generation's workers cannot start: the one before serves again."""
        assert self.serving is not None
        assert self.previous is not None
        self._end(self.serving)
        self.serving, self.previous = self.previous, None
        self._ready(self.serving)

    def _newly_broken(self, candidate: Loader) -> list[str]:
        """What the serving generation does better: switching would take its handlers out of service.

        A plugin that is broken there, too, is no reason; nor is any when no generation serves.
        """
        if self.serving is None:
            return []
        known = {(p.name, p.source) for p in self.serving.plugins if p.error}
        return [
            f"plugin {p.name} ({p.source}): {p.error}"
            for p in candidate.plugins
            if p.error and (p.name, p.source) not in known
        ]

    def _restart(
        self, loader: Loader, skip: dict[str, str], late: list[str], suspect: str | None = None
    ) -> None:
        self._end(loader)
        self.candidate = None
        self._start(loader.config, loader.generation, skip, late, suspect)

    def exited(self, pid: int, status: ExitStatus) -> bool:
        """A child has ended; whether it was a loader."""
        if pid in self._sessions:
            self._sessions[pid] = boottime() + NEWBORN_S
        loader = self.candidate
        if loader is not None and loader.pid == pid:
            self.on_channel(loader)  # what it said before it died
            if self.candidate is loader:
                self._candidate_died(loader, status)
        if self.serving is not None and self.serving.pid == pid:
            log.warning("loader ended", child=pid, status=str(status), generation=self.serving.generation)
            self._end(self.serving)
            self.serving = None
        if self.previous is not None and self.previous.pid == pid:
            self._end(self.previous)
            self.previous = None
        if pid not in self._let_go:
            return False
        self._let_go.discard(pid)
        return True

    def _candidate_died(self, loader: Loader, status: ExitStatus) -> None:
        plugin = loader.importing
        if plugin is None or plugin in loader.skip:
            self._end(loader)
            self.candidate = None
            self._refused([f"the loader ended with {status} before it was ready"])
            return
        if loader.suspect != plugin:
            log.warning("loader died while importing, trying again", plugin=plugin, status=str(status))
            self._restart(loader, loader.skip, loader.late, suspect=plugin)
            return
        reason = f"killed the loader during its import: {status}"
        if loader.overdue:
            reason = f"did not finish its import within {loader.config.plugins.import_timeout_s:g} s, nor could it be stopped"
        log.warning("plugin kills the loader, loading without it", plugin=plugin, reason=reason)
        self._restart(loader, {**loader.skip, plugin: reason}, loader.late)

    def check(self, now: float) -> None:
        """End a candidate that is overdue (its death then says which plugin it was)."""
        loader = self.candidate
        if loader is not None and now >= loader.deadline and not loader.overdue:
            loader.overdue = True
            _kill(loader)

    def next_at(self) -> float | None:
        return self.candidate.deadline if self.candidate and not self.candidate.overdue else None

    def flush(self) -> None:
        for loader in (self.serving, self.candidate):
            if loader is not None:
                with contextlib.suppress(channel.ChannelClosed):
                    loader.peer.flush()


def _kill(loader: Loader) -> None:
    process.signal_group(loader.pid, signal.SIGKILL)
