"""pgbench, which comes with PostgreSQL: a writer that costs next to nothing itself, for statements one a transaction.

A process of its own, which ends with this one. Its source: the manual, "pgbench". Fails with :class:`WorldError` where a
transaction has failed.
"""

import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from psycopg import sql

from aqd import statements
from aqd.bench.database import QUEUE, Database
from aqd.bench.settings import Work
from aqd.binaries import Binaries, candidates, spawn
from aqd.errors import WorldError

_PATIENCE_S = 60.0


class Written(NamedTuple):
    """How many transactions, how many of them a second (connecting left out), and how long one took on average."""

    transactions: int
    per_s: float
    mean_ms: float


def find(directory: Path | None = None) -> Path | None:
    """The program: beside a server's (``directory``), on PATH, in Debian's directories; None: it is not installed."""
    places = [directory] if directory else []
    if (found := shutil.which("pgbench")) is not None:
        places.append(Path(found).parent)
    for place in (*places, *(each for each, _ in candidates())):
        if (place / "pgbench").is_file():
            return place / "pgbench"
    return None


def run(
    program: Path,
    database: Database,
    statement: str,
    work: Work,
    writers: int,
    seconds: float,
    *,
    notify: bool,
) -> Written:
    """Runs a ``:ddl`` statement of ``sql/bench.sql`` for whole ``seconds``, prepared, by ``writers`` connections."""
    # Its name stands before it in a comment with a colon, which pgbench would take for a variable.
    plain = statements.get(statement).text.decode().partition("*/")[2]
    text = sql.SQL(plain).format(
        type=sql.Literal("bench_noop"), payload=sql.Literal(work.payload), queue=sql.Literal(QUEUE)
    )
    with tempfile.TemporaryDirectory(prefix="aqd-bench-pgbench-") as name:
        script, log = Path(name) / "script.sql", Path(name) / "log"
        script.write_text(text.as_string(database.conn) + ";\n")
        options = ["-n", "-M", "prepared", "-c", str(writers), "-j", str(min(writers, 2))]
        options += ["-T", str(max(1, round(seconds))), "-f", str(script), database.url]
        environment = Binaries(program.parent, "", "").environment
        if not notify:
            environment["PGOPTIONS"] = "-c aqd.notify=off"
        with log.open("wb") as output:
            process = spawn(
                [str(program), *options],
                account=None,
                environment=environment,
                output=output,
                death_signal=signal.SIGKILL,
            )
        try:
            process.wait(seconds + _PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise WorldError(f"pgbench has not ended:\n{log.read_text()[-2000:]}") from None
        finally:
            process.kill()
            process.wait()
        return parse(log.read_text(errors="replace"))


def parse(text: str) -> Written:
    """What pgbench has printed."""
    number = re.search(r"transactions actually processed: (\d+)", text)
    rate = re.search(r"^tps = ([\d.]+)", text, re.MULTILINE)
    mean = re.search(r"latency average = ([\d.]+) ms", text)
    failed = re.search(r"number of failed transactions: (\d+)", text)
    if number is None or rate is None or mean is None or (failed is not None and int(failed[1])):
        raise WorldError(f"pgbench has failed:\n{text[-2000:]}")
    return Written(int(number[1]), float(rate[1]), float(mean[1]))
