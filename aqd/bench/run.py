"""All of a benchmark: the server, each scenario, and the cleaning up whatever happens.

Run by ``aqd bench``. SIGTERM and SIGHUP end it as Ctrl-C does. While it cleans up, signals are put off: half a clean-up
would leave what it promises to remove.
"""

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psycopg

from aqd.bench import machine, scenarios
from aqd.bench.bench import Bench, summary
from aqd.bench.database import connect, open_server
from aqd.bench.progress import Progress
from aqd.bench.results import Report, Result
from aqd.bench.settings import Settings
from aqd.errors import AqdError
from aqd.log import describe

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(settings: Settings) -> Report:
    """Measures. A scenario that fails is told with its error, and the others go on: after an hour of measuring nothing is
    to be lost. Raises :class:`aqd.errors.AqdError` and psycopg's errors where none could begin."""
    started, began = datetime.now(UTC), time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        progress = stack.enter_context(Progress())
        with progress.step("starting PostgreSQL" if settings.database_url is None else "connecting"):
            server = stack.enter_context(
                open_server(settings.database_url, settings.directory, progress.say, keep=settings.keep)
            )
        directory = stack.enter_context(_directory(settings.keep, progress))
        bench = Bench(settings, server, directory, progress)
        with contextlib.closing(connect(server.admin_url)) as conn:
            versions, server_settings = machine.versions(conn), machine.server_settings(conn)
        results = [_measure(bench, name) for name in settings.scenarios]
        return Report(
            started_at=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - began,
            machine=machine.machine(server.data),
            versions=versions,
            postgresql=server_settings | {"source": server.source},
            settings=settings.document(),
            results=results,
        )


def _measure(bench: Bench, name: str) -> Result:
    bench.progress.scenario(name)
    began = time.monotonic()
    scenario = scenarios.find(name)
    try:
        result = scenario().run(bench)
    except (AqdError, psycopg.Error, OSError) as error:
        bench.progress.say(f"{name} has failed: {describe(error)}")
        result = Result(scenario=name, summary="", error=str(error))
    result.summary = summary(scenario)
    result.seconds = time.monotonic() - began
    return result


@contextlib.contextmanager
def _directory(keep: bool, progress: Progress) -> Iterator[Path]:
    """Configurations and logs of the daemons."""
    path = Path(tempfile.mkdtemp(prefix="aqd-bench-run-"))
    try:
        yield path
    finally:
        if keep:
            progress.say(f"configurations and logs are kept in {path}")
        else:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The first signal ends the benchmark; what comes while it cleans up is put off until that is done."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def end(number: int, _frame: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # made by somebody else's C code
                signal.signal(number, handler)
