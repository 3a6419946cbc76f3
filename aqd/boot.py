"""``aqd run`` up to the master's loop, in the order that matters.

Fails: exits with an :class:`aqd.errors.Exit` code, see :mod:`aqd.master`.
"""

import os
import sys

from setproctitle import setproctitle

from aqd import config, journald, log, process
from aqd.errors import AqdError, ConfigError, Exit
from aqd.master import Master
from aqd.pidfile import pid_file
from aqd.process import Signals


def main(config_path: str | None = None, with_api: bool = False) -> int:
    """Run the daemon until it is told to stop; returns the exit code."""
    # First of all: as PID 1, a TERM that came before a handler stood would be lost.
    with process.signals_blocked():
        process.open_standard_descriptors()  # before the signals' pipe takes their numbers
        signals = Signals()
    try:
        loaded = config.load_with_sources(config_path, os.environ)
        cfg = loaded.config
        log.configure(cfg.log.level, cfg.log.format, process="master")
        process.become_subreaper()
        setproctitle("aqd: master")
        with pid_file(config.pid_file(cfg)):
            try:
                master = Master(loaded, config_path, with_api, signals)
            except OSError as error:
                where = config.control_socket(cfg)
                raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
            return int(_run(master))
    except AqdError as error:
        print(journald.as_error(f"aqd: {error}"), file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(journald.as_error(f"aqd: {error}"), file=sys.stderr)
        return int(Exit.CONFIG)


def _run(master: Master) -> Exit:
    """What escapes the loop is a fault of ours, whatever its class: never CONFIG, after which systemd would
    not start us again."""
    try:
        return master.run()
    except Exception:
        log.get_logger("master").exception("master fails")
        return Exit.ERROR
