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
    _answer_signals_early(service=_command(given) in ("run", "api"))
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


def _command(given: Sequence[str]) -> str:
    """The first word that is no option of ours, before anything that could parse it properly is imported."""
    words = iter(given)
    for word in words:
        if word in ("-c", "--config"):
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _answer_signals_early(*, service: bool) -> None:
    """Until the daemon or the HTTP service has its own handlers there is nothing to drain: a stop simply ends the
    process, and a reload has nothing to do (its default would kill). Other commands end by SIGTERM anyhow, but as
    PID 1 the kernel would keep it from them (signal(7), pid_namespaces(7)).

    The image's entry point has these signals blocked from its first instruction on, so that none is lost while
    the interpreter starts: now they are answered.
    """
    if service:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
