"""aqd bench with real daemons, small: what it writes, and that nothing is left of it however it ends.

No duration and no rate is asserted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aqd.bench import pgbench, scenarios
from aqd.bench.bench import Bench
from aqd.bench.database import Server
from aqd.bench.progress import Progress
from aqd.bench.scenarios import enqueue
from aqd.bench.settings import Settings
from aqd.binaries import find_binaries
from aqd.errors import AqdError
from tests.fixtures import processes
from tests.fixtures.postgres import Postgres
from tests.fixtures.processes import MARKER, wait_until

ROOT = Path(__file__).parents[2]


class Benchmark:
    """Starts ``aqd bench`` with a mark that all its processes carry."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"bench-{os.getpid()}-{os.urandom(4).hex()}"
        self.json_file = directory / "out.json"
        self.chart_file = directory / "out.png"
        self.err_file = directory / "err"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.directory),
            "PYTHONPATH": str(ROOT),
            # Somebody's own settings, which must not be looked at.
            "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x",
            MARKER: self.mark,
        }
        with self.err_file.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "aqd", "bench", *arguments],
                cwd=self.directory,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> tuple[str, dict[str, Any]]:
        """To the end: the output, and the JSON."""
        process = self.start(*arguments, "--json", str(self.json_file))
        out, _ = process.communicate(timeout=150)
        assert process.returncode == 0, self.errors()
        return out, json.loads(self.json_file.read_text())

    def errors(self) -> str:
        return self.err_file.read_text()

    def left(self) -> list[processes.Process]:
        """What still runs."""
        return processes.belonging(self.mark, ())


@pytest.fixture
def benchmark(open_dir: Path) -> Iterator[Benchmark]:
    found = Benchmark(open_dir)
    yield found
    processes.kill_all(found.left())


def databases(pg: Postgres) -> list[str]:
    with pg.connect() as conn:
        rows = conn.execute("select datname from pg_database where datname like 'aqd\\_bench\\_%'")
        return [str(name) for (name,) in rows]


def check_clean(benchmark: Benchmark, pg: Postgres) -> None:
    assert benchmark.left() == []
    assert databases(pg) == []
    folders = [each.name for each in benchmark.directory.iterdir() if each.is_dir()]
    assert [name for name in folders if name.startswith("aqd-bench")] == []


# What each scenario has to bring, run small: (options, rows, figures of rows, figures that compare)
SMALL: dict[str, tuple[list[str], int, set[str], set[str]]] = {
    "drain": (["--workers", "1,2"], 2, {"WAL", "statements", "commits", "dead tuples", "CPU worker"}, {"2 / 1 workers"}),
    "latency": (["--workers", "2"], 2, {"p50", "p99", "achieved rate"}, set()),
    "steady": (["--workers", "2", "--rate", "40"], 1, {"wanted rate", "achieved rate"}, set()),
    "scale": (["--workers", "1,2"], 4, {"efficiency"}, set()),
    "crash": (["--workers", "2", "--jobs", "40"], 4, {"crashes"}, {"noop: with crashes / without"}),
    "idle": (["--workers", "2"], 1, {"queries", "CPU of the node", "claims for one enqueue"}, set()),
    "memory": (["--workers", "1,2", "--jobs", "10"], 0, set(), {"one more slot, new: USS", "one more slot, new: PSS"}),
    "start": (["--workers", "2"], 0, set(), {"2 slots: ready", "2 slots: reload, all slots", "2 slots: stop"}),
    "pinned": (["--workers", "2", "--jobs", "400"], 2, {"last / first quarter"}, {"pinned / not pinned"}),
    "heap": (["--workers", "2"], 1, {"heap, longest", "heap, at the end"}, set()),
    "backlog": (["--workers", "2"], 2, {"claim p99"}, {"with a backlog / empty"}),
    "history": (["--workers", "2"], 2, {"WAL"}, {"with history / empty"}),
}  # fmt: skip


def test_every_scenario_is_tried() -> None:
    assert {*SMALL, "enqueue"} == set(scenarios.NAMES)


def test_enqueue(benchmark: Benchmark, pg: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with few of its many measurements: each takes a second at least."""
    ways = (
        enqueue.bare(2),
        enqueue.function(2),
        enqueue.function(2, notify=False),
        enqueue.Way("client.enqueue_many", 1, how="batch", batch=10),
        enqueue.Way("COPY", 1, how="copy", batch=10),
    )
    busy = (
        enqueue.Way("client.enqueue", 1, how="client"),
        enqueue.Way("POST /jobs", 1, how="http"),
        enqueue.Way("POST /jobs/batch", 1, how="http", batch=10),
    )
    situations = {"no daemon": ways, "daemon busy": busy, "daemon runs them": busy[:1]}
    monkeypatch.setattr(enqueue, "SITUATIONS", situations)
    settings = Settings(scenarios=("enqueue",), rounds=1, seconds=0.3, workers=(2,), payload_bytes=50)
    server = Server(pg.admin_url, "the test's", lambda _text: None)
    result = enqueue.Enqueue().run(Bench(settings, server, benchmark.directory, Progress()))
    wanted = [way for each in situations.values() for way in each]
    if pgbench.find() is None:
        wanted = [way for way in wanted if not way.statement]
        assert result.notes
    else:
        assert len(result.figures) == 2
    assert [row.batch["jobs_per_submit"] for row in result.rows] == [way.batch for way in wanted]
    assert all(row.jobs and row.throughput and row.payload_bytes == 50 for row in result.rows)
    assert databases(pg) == []


@pytest.mark.parametrize("name", SMALL)
def test_a_scenario(name: str, benchmark: Benchmark, pg: Postgres) -> None:
    options, rows, of_rows, comparing = SMALL[name]
    out, document = benchmark.run(
        name, "--scale", "0.001", "--rounds", "1", "--database-url", pg.admin_url, *options
    )
    (result,) = document["results"]
    assert result["scenario"] == name
    assert len(result["rows"]) == rows
    for row in result["rows"]:
        assert row["jobs"] > 0
        assert row["failures"] == 0
        if row["latency"] is not None:
            assert row["latency"]["count"] == row["jobs"]
            assert 0 < row["latency"]["p50_ms"] <= row["latency"]["p99_ms"] <= row["latency"]["max_ms"]
    named = {figure["name"] for row in result["rows"] for figure in row["figures"]}
    assert of_rows <= named
    assert comparing <= {figure["name"] for figure in result["figures"]}
    if rows:
        assert "Throughput (jobs/s)" in out
    check_clean(benchmark, pg)


def test_one_run_of_several(benchmark: Benchmark, pg: Postgres) -> None:
    """Other jobs, another daemon, the chart, the JSON on standard output."""
    pytest.importorskip("matplotlib")
    process = benchmark.start(
        *("drain", "start", "--scale", "0.0005", "--rounds", "2", "--workers", "2", "--database-url", pg.admin_url),
        *("--handler", "sleep", "--cost-ms", "1", "--payload-bytes", "200", "--frame-ms", "0"),
        *("--json", "-", "--chart", str(benchmark.chart_file)),
    )  # fmt: skip
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 0, benchmark.errors()
    document = json.loads(out)
    drain, start = document["results"]
    (row,) = drain["rows"]
    assert (row["jobs"], row["handler"], row["cost_ms"], row["payload_bytes"]) == (50, "sleep", 1.0, 200)
    assert row["frame_ms"] == 0
    assert len(row["runs"]) == 2
    assert start["figures"]
    assert document["versions"]["postgresql"]
    assert document["postgresql"]["fsync"] in ("on", "off")
    assert pg.admin_url not in out
    assert benchmark.chart_file.read_bytes().startswith(b"\x89PNG")
    check_clean(benchmark, pg)


@pytest.fixture
def own_server() -> None:
    try:
        find_binaries(os.environ.get("AQD_EMBEDDED_BINARIES"))
    except AqdError as error:
        pytest.skip(f"needs a server of its own: {error}")


@pytest.mark.usefixtures("own_server")
def test_a_server_of_its_own(benchmark: Benchmark, pg: Postgres) -> None:
    _, document = benchmark.run(
        *("drain", "--scale", "0.001", "--rounds", "1", "--workers", "2", "--directory", str(benchmark.directory))
    )  # fmt: skip
    server = document["postgresql"]
    assert (server["shared_buffers"], server["fsync"], server["synchronous_commit"]) == ("512MB", "on", "on")
    assert document["machine"]["data_filesystem"]
    assert document["results"][0]["notes"] == []  # it keeps the moments of commits
    assert "CPU postgresql" in {each["name"] for each in document["results"][0]["rows"][0]["figures"]}
    check_clean(benchmark, pg)


def test_what_is_kept(benchmark: Benchmark, pg: Postgres) -> None:
    benchmark.run(
        *(
            "drain",
            "--scale",
            "0.001",
            "--rounds",
            "1",
            "--workers",
            "1",
            "--keep",
            "--database-url",
            pg.admin_url,
        )
    )
    (name,) = databases(pg)
    try:
        assert name in benchmark.errors()
        (folder,) = benchmark.directory.glob("aqd-bench-run-*")
        assert str(folder) in benchmark.errors()
        assert (folder / "node1" / "log").stat().st_size
        with pg.connect(name) as conn:
            assert conn.execute("select count(*) from aqd.job_history").fetchone() == (100,)
    finally:
        pg.drop_database(name)
    assert benchmark.left() == []


ENDLESS = ("drain", "--jobs", "1000", "--handler", "sleep", "--cost-ms", "60000", "--workers", "2")
Ending = Callable[[subprocess.Popen[str]], None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_ended_by_a_signal(number: signal.Signals, benchmark: Benchmark, pg: Postgres) -> None:
    process = benchmark.start(*ENDLESS, "--database-url", pg.admin_url)
    wait_until(lambda: "running 1,000 jobs" in benchmark.errors(), 60)
    assert len(databases(pg)) == 1
    process.send_signal(number)
    process.send_signal(number)  # impatience does not spoil it
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == ""
    assert "Traceback" not in benchmark.errors()
    check_clean(benchmark, pg)


@pytest.mark.usefixtures("own_server")
def test_killed(benchmark: Benchmark, pg: Postgres) -> None:
    """Everything ends with it; its files are removed by a later run, when they are old enough to be nobody's."""
    process = benchmark.start(*ENDLESS, "--directory", str(benchmark.directory))
    wait_until(lambda: "running 1,000 jobs" in benchmark.errors(), 60)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not benchmark.left(), 30)
    (folder,) = benchmark.directory.glob("aqd-bench-*/postgres")
    os.utime(folder / "lock", (0, 0))
    benchmark.run(
        *("drain", "--scale", "0.001", "--rounds", "1", "--workers", "1", "--directory", str(benchmark.directory))
    )  # fmt: skip
    assert not folder.exists()


def test_a_scenario_that_fails(benchmark: Benchmark, pg: Postgres) -> None:
    """It is told, and the others go on: after an hour of measuring nothing is to be lost."""
    process = benchmark.start(
        *ENDLESS, "start", "--rounds", "1", "--json", str(benchmark.json_file), "--database-url", pg.admin_url
    )
    wait_until(lambda: "running 1,000 jobs" in benchmark.errors(), 60)
    (master,) = [each for each in benchmark.left() if each.title.startswith("aqd: master")]
    os.kill(master.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "aqd: drain: the daemon ended with status -9" in benchmark.errors().splitlines()
    drain, start = json.loads(benchmark.json_file.read_text())["results"]
    assert "ended with status -9" in drain["error"]
    assert start["figures"]
    assert start["error"] == ""
    assert "reload served" in out
    check_clean(benchmark, pg)


def test_a_server_that_cannot_be_reached(benchmark: Benchmark, pg: Postgres) -> None:
    process = benchmark.start(
        *("drain", "--scale", "0.001", "--workers", "512", "--rounds", "1", "--database-url", "postgresql:///nowhere?host=/nowhere")
    )  # fmt: skip
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4
    assert benchmark.errors().splitlines()[-1].startswith("aqd: the database cannot be reached")
    assert out == ""
    check_clean(benchmark, pg)
