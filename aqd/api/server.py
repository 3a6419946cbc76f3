"""``aqd api``: gunicorn with the application, as a service of its own or as a child of the master.

Processes: gunicorn's arbiter (this module's :func:`run`) and its workers, each with a pool of database
connections made after the fork. Workers die with the arbiter, and under ``aqd run --with-api`` the
arbiter dies with the master, so that the port is free for a successor at once (without this, workers
held it for 13 s after a kill -9 of the arbiter).

SIGTERM ends in order, SIGHUP reads the configuration again (host and port stay; a broken configuration
or file of keys is refused and the old one serves on). Fails with exit code :data:`Exit.ERROR` when the address is
taken, :data:`Exit.CONFIG` when a key is wrong or an address beyond this machine would be served without any.
"""

import argparse
import contextlib
import logging
import os
import resource
import runpy
import signal
import socket
import sys
from typing import Any

from gunicorn import glogging  # type: ignore[import-untyped]
from gunicorn.app.base import BaseApplication  # type: ignore[import-untyped]

from aqd import config, journald, keys, log, paths, process, systemd
from aqd.api import app, body, tally
from aqd.api.gate import GateWorker
from aqd.config import Config
from aqd.errors import AqdError, Exit, WorldError
from aqd.log import get_logger

BACKLOG = 1024
_WANTED_FILES = 4096

logger = get_logger("api")


def run(cfg: Config, config_path: str | None, *, fd: int | None = None) -> int:
    """Serve until told to stop; returns the exit code. ``fd`` is a bound socket, handed down."""
    log.configure(cfg.log.level, cfg.log.format, process="api")
    if fd is not None:
        systemd.strip_environment(os.environ)
    elif not systemd.listen_fds():  # else systemd has bound the socket
        fd = _listen(cfg.api.host, cfg.api.port)
        systemd.forget_sockets(os.environ)
    _raise_file_limit()
    tally.shared()  # before the fork: all workers count in the same memory
    server = Server(cfg, config_path, fd)
    if fd is None:
        _compare(cfg)
    try:
        server.run()
    except SystemExit as exit:
        return Exit.OK if exit.code in (0, None) else Exit.ERROR
    return Exit.OK


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn's view of us: settings, and the application for each worker."""

    def __init__(self, cfg: Config, config_path: str | None, fd: int | None) -> None:
        self._aqd = cfg
        self._config_path = config_path
        self._fd = fd
        self._exposed = _exposed(fd)
        self._ring = _ring(cfg, self._exposed)
        super().__init__()

    def load_config(self) -> None:
        """The shipped gunicorn.conf.py, then what aqd.toml says. Called again on SIGHUP."""
        settings = runpy.run_path(str(paths.data_dir("etc") / "gunicorn.conf.py"))
        for name, value in settings.items():
            if name in self.cfg.settings:
                self.cfg.set(name, value)
        api = self._aqd.api
        if self._fd is not None:
            self.cfg.set("bind", f"fd://{self._fd}")
        self.cfg.set("workers", api.workers)
        self.cfg.set("threads", api.threads)
        self.cfg.set("loglevel", self._aqd.log.level)
        self.cfg.set("logger_class", GunicornLog)
        self.cfg.set("post_fork", _post_fork)
        self.cfg.set("worker_exit", _worker_exit)
        self.cfg.set("when_ready", lambda _arbiter: self._tell())
        if not os.access(self.cfg.worker_tmp_dir, os.W_OK):
            self.cfg.set("worker_tmp_dir", None)
        GateWorker.request_timeout_s = api.request_timeout_s
        GateWorker.max_body = body.limit(self._aqd)

    def reload(self) -> None:
        """SIGHUP. gunicorn would end the service for a mistake in the configuration; we go on."""
        try:
            cfg = config.load(self._config_path, os.environ)
            ring = _ring(cfg, self._exposed)
        except AqdError as error:
            logger.error("configuration refused, the old one serves on", reason=str(error))
            self._tell(f"; configuration refused: {error}")
            return
        self._aqd, self._ring = cfg, ring
        log.configure(cfg.log.level, cfg.log.format, process="api")
        super().reload()
        self._tell()

    def _tell(self, trouble: str = "") -> None:
        """The status line of ``systemctl status``, in place of gunicorn's."""
        workers = self._aqd.api.workers
        text = f"serving: {workers} process{'es' if workers != 1 else ''}{trouble}"
        systemd.notify(f"STATUS={' '.join(text.split())}")

    def load(self) -> Any:
        """The WSGI application; called in each worker after the fork."""
        return app.create(self._aqd, self._ring)


class GunicornLog(glogging.Logger):  # type: ignore[misc]
    """gunicorn's messages as events of aqd's log; no access log (see etc/gunicorn.conf.py)."""

    def setup(self, cfg: Any) -> None:
        self.cfg = cfg
        self.loglevel = self.LOG_LEVELS.get(cfg.loglevel, logging.INFO)
        for name in ("gunicorn.error", "gunicorn.access"):
            stale = logging.getLogger(name)
            stale.handlers.clear()
            stale.propagate = False
        self.error_log = logging.getLogger("gunicorn")
        self.error_log.setLevel(self.loglevel)
        self._access_log_enabled = False

    def reopen_files(self) -> None:
        """There are no files."""

    def close_on_exec(self) -> None:
        """There are no files."""


def _exposed(fd: int | None) -> str | None:
    """Where the sockets that we have can be reached from other machines: ``fd``, or those of systemd, from descriptor 3
    on. Asked once, at the start: gunicorn closes these descriptors."""
    fds = [fd] if fd is not None else range(3, 3 + systemd.listen_fds())
    with contextlib.ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.socket(fileno=os.dup(each))) for each in fds]
        except OSError as error:
            source = "--fd" if fd is not None else "LISTEN_FDS"
            raise WorldError(f"not all that was passed are sockets ({source}): {error.strerror}") from None
        return keys.beyond(sockets)


def _compare(cfg: Config) -> None:
    """An administrator who has changed the port in one place only is told which one counts."""
    addresses = []
    for fd in range(3, 3 + systemd.listen_fds()):
        with socket.socket(fileno=os.dup(fd)) as listener:
            addresses.append(listener.getsockname())
    if not any(isinstance(address, tuple) and address[1] == cfg.api.port for address in addresses):
        logger.warning("systemd has passed the address, api.port has no effect", addresses=addresses)


def _ring(cfg: Config, exposed: str | None) -> keys.Ring:
    ring = keys.load(cfg.api, exposed)
    names = [key.name for key in ring.keys]
    logger.info("keys", names=names, open=ring.open, read_only=cfg.api.read_only)
    if cfg.api.admin_api_key and keys.is_short(cfg.api.admin_api_key):  # beyond this machine it is refused
        logger.warning(
            "the admin key is short", advice="aqd api-key new makes a long one", wanted=keys.MIN_CHARS
        )
    if exposed is not None and ring.open:
        logger.warning("everybody who reaches this address may submit and read jobs", address=exposed)
    return ring


def _post_fork(_arbiter: Any, worker: Any) -> None:
    process.die_with_parent(worker.ppid, signal.SIGKILL)


def _worker_exit(_arbiter: Any, worker: Any) -> None:
    """In the worker, as its last act: without it Python would wait five seconds for the pool's threads."""
    application = getattr(worker, "wsgi", None)
    if isinstance(application, app.Application):
        application.close()


def _listen(host: str, port: int) -> int:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            return listener.detach()
    except OSError as error:
        raise WorldError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: list[str] | None = None) -> int:
    """``python -m aqd.api.server --fd N``: how the master starts it."""
    parser = argparse.ArgumentParser(prog="aqd.api.server")
    parser.add_argument("--fd", type=int, help="a bound socket")
    parser.add_argument("--parent", type=int, help="the process to die with")
    options = parser.parse_args(argv)
    if options.fd is not None:
        process.die_with_parent(options.parent or os.getppid(), signal.SIGKILL)
    process.unblock_signals()
    path = os.environ.get("AQD_CONFIG") or None
    try:
        return run(config.load(path, os.environ), path, fd=options.fd)
    except AqdError as error:
        print(journald.as_error(f"aqd: {error}"), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
