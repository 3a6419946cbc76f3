"""The loader: imports a generation's plugins once, then forks workers from that warm image.

A process of its own (``python -m aqd.loader MASTER_PID``, channel at descriptor 3), because the master must
stay free of plugin code (a reload could never drop it) and importing in every worker would cost memory and
seconds. One thread; it knows no jobs.

A worker is forked twice, so that it becomes the master's child (the master is a subreaper) and its exit
status comes to the master first hand. The intermediate process reports the worker's pid and exits.

Promises: never forks with a second Python thread alive; the fork happens with all signals blocked; the
image is frozen for the garbage collector before the first fork, so that workers share its pages.

Fails: reports :class:`~aqd.messages.LoadRefused` and exits with LOADER; exits with 0 when its channel ends.
"""

import contextlib
import gc
import os
import socket
import sys
import threading
import warnings
from typing import NoReturn

from setproctitle import setproctitle

from aqd import __version__, channel, log, messages, output, plugins, process, title
from aqd.errors import Exit, PluginError
from aqd.page import Page

# Here and not after the fork, where each worker would pay for it in time and in private memory: 16 slots took twice
# the processor time to start, and 1.5 MB more each.
from aqd.worker import Worker, take_no_notice

logger = log.get_logger("loader")


class Loader:
    """One generation's loader."""

    def __init__(self, ends: socket.socket, load: messages.Load) -> None:
        self.channel = ends
        self.load = load
        self.registry = plugins.load(
            load.config,
            skip=load.skip,
            late=load.late,
            progress=lambda name: self._send(messages.Importing(name)),
        )

    def _send(self, message: messages.FromLoader) -> None:
        channel.send(self.channel, messages.encode(message))

    def run(self) -> Exit:
        """Report, then fork on request until the channel ends."""
        registry, strict = self.registry, self.load.config.plugins.strict
        errors = registry.problems() if strict else []
        if errors:
            self._send(messages.LoadRefused([f"strict mode: {e}" for e in errors], registry.plugins))
            return Exit.LOADER
        threaded = sorted(registry.threaded)
        if not threaded and threading.active_count() > 1:
            names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
            self._send(messages.LoadRefused([f"a plugin started threads that cannot be forked: {names}"], []))
            return Exit.LOADER
        if any(info.is_async for info in registry.infos()):
            # Only then: it brings 40 modules and 27 mappings, without which a fork costs an eighth less.
            import asyncio  # noqa: F401
        title.locate()
        setproctitle(f"aqd: loader g{self.load.generation}")
        gc.collect()
        gc.freeze()
        self._send(messages.Loaded(__version__, registry.infos(), registry.plugins, threaded))
        while not threaded:
            try:
                data, fds = channel.receive(self.channel)
            except channel.ChannelClosed:
                return Exit.OK
            request = messages.decode_to_loader(data)
            if not isinstance(request, messages.SpawnWorker) or len(fds) != 3:
                logger.error("not a request", got=type(request).__name__)
                return Exit.CHANNEL
            self._fork(request, *fds)
        return Exit.OK

    def _fork(self, request: messages.SpawnWorker, channel_fd: int, page_fd: int, output_fd: int) -> None:
        if threading.active_count() > 1:
            logger.error("a thread appeared in the loader, not forking", threads=threading.active_count())
            log.settle()
            os._exit(Exit.LOADER)
        try:
            with process.signals_blocked():
                intermediate = process.bare_fork()
                if intermediate == 0:
                    self._intermediate(request, channel_fd, page_fd, output_fd)
            os.waitpid(intermediate, 0)
        except OSError as error:  # out of processes or memory: the master misses it, and asks again later
            logger.error("cannot fork a worker", error=str(error))
        finally:
            for fd in (channel_fd, page_fd, output_fd):
                os.close(fd)

    def _intermediate(
        self, request: messages.SpawnWorker, channel_fd: int, page_fd: int, output_fd: int
    ) -> NoReturn:
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(channel_fd, page_fd, output_fd)
            self._send(messages.Spawned(request.incarnation, pid))
        except BaseException:
            with contextlib.suppress(BaseException):
                logger.exception("cannot fork a worker")
                log.settle()
        finally:
            os._exit(0)

    def _become_worker(self, channel_fd: int, page_fd: int, output_fd: int) -> NoReturn:
        try:
            self.channel.close()
            page = Page(page_fd)
            os.close(page_fd)
            ends = channel.from_fd(channel_fd)
            Worker(
                self.registry, self.load.config, ends, page, output_fd, self.load.late, self.load.master_pid
            ).run()
        except BaseException:
            with contextlib.suppress(BaseException):
                logger.exception("worker cannot start")
                log.settle()
        finally:
            os._exit(Exit.ERROR)


def main() -> NoReturn:
    """Entry point of the process."""
    # A TERM for the whole group is the master's affair: the loader ends when its channel does.
    take_no_notice()
    process.unblock_signals()
    process.die_with_parent(int(sys.argv[1]))
    output.unbuffer()
    code = Exit.LOADER
    ends = channel.from_fd(process.FIRST_PASSED_FD)
    try:
        data, _ = channel.receive(ends)
        load = messages.decode_to_loader(data)
        assert isinstance(load, messages.Load)
        setproctitle(f"aqd: loader g{load.generation}")
        log.configure(load.config.log.level, load.config.log.format, process="loader")
        # Python 3.12 looks for threads in /proc/self/stat, where the blanks of our title mislead it (CPython,
        # warn_about_fork_with_threads). Whether there are any is asked before each fork.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        # Native thread pools cost a process per slot far more than they bring; an administrator's
        # own setting stays.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        try:
            code = Loader(ends, load).run()
        except PluginError as error:
            channel.send(ends, messages.encode(messages.LoadRefused([str(error)], [])))
    except channel.ChannelClosed:
        code = Exit.OK
    except BaseException as error:
        logger.exception("loader fails")
        with contextlib.suppress(channel.ChannelClosed, OSError):
            channel.send(ends, messages.encode(messages.LoadRefused([f"loader: {log.describe(error)}"], [])))
    finally:
        log.settle()
        os._exit(code)


if __name__ == "__main__":
    main()
