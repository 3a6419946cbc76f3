"""The ``aqd`` command: ``main`` is the entry point of the script and of ``python -m aqd``.

Runs in: the process the user started; ``aqd run`` and ``aqd api`` become the daemon and the service in it.
This module is small because it comes first: until ``main`` has run, PID 1 of a container ignores SIGTERM,
and a stop that comes while modules are being imported would be lost (16 times of 16 in a trial).

The commands: :mod:`aqd.cli.command` (the command line and its errors), ``daemon``, ``api_key``, ``inspection``,
``submit``, ``jobs``, ``db``; ``output`` prints.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    given = list(sys.argv[1:] if args is None else args)
    if "run" in given:
        _answer_signals_early()
    from aqd.cli import command

    code = command.run(given)
    try:
        if sys.stdout is not None:  # started with descriptor 1 closed
            sys.stdout.flush()
    except BrokenPipeError:
        code = command.reader_gone()
    except ValueError:  # closed already
        pass
    sys.exit(code)


def _answer_signals_early() -> None:
    """Until the master has its own handlers there is nothing to drain: a stop simply ends the process,
    and a reload has nothing to do (its default would kill)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
