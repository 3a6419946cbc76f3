"""The comparison with peers: its figures, its choice of systems, its report and its reasons for skipping."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from aqd.bench import chart
from tests.bench.peers import __main__ as program
from tests.bench.peers import machine, packages, report, runs, servers, systems
from tests.bench.peers.figures import Drain, Latency, Result, percentile, ratio
from tests.bench.peers.packages import DRIVERS, Cache, Unavailable
from tests.bench.peers.runs import RECORD, counted
from tests.bench.peers.workers import Failed

ALL = systems.systems()


def drained(*rates: float, jobs: int = 1000, wal: int | None = 500_000) -> list[Drain]:
    return [Drain(jobs, jobs / rate, 0.5, wal) for rate in rates]


def text(*things: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(*things)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


class TestFigures:
    @pytest.mark.parametrize(("percent", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (0.5, 1)])
    def test_percentile(self, percent: float, expected: float) -> None:
        assert percentile(list(range(100, 0, -1)), percent) == expected

    def test_percentile_of_one(self) -> None:
        assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0

    @pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], 0), ([1], 101)])
    def test_percentile_of_nothing(self, values: list[float], percent: float) -> None:
        with pytest.raises(ValueError):
            percentile(values, percent)

    def test_median_of_rounds(self) -> None:
        result = Result(drained(100, 300, 200), [Latency([1, 2, 3]), Latency([5, 6, 7])])
        assert result.rate == pytest.approx(200)
        assert result.wal_per_job == 500
        assert result.cpu_per_1000 == 0.5
        assert result.latency(50) == 4

    def test_nothing_measured(self) -> None:
        result = Result(reason="there is no npm")
        assert (result.rate, result.wal_per_job, result.cpu_per_1000, result.latency(99)) == (None,) * 4

    def test_ratio(self) -> None:
        assert ratio(3.0, 2.0) == 1.5
        assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None

    def test_counts_of_all_processes(self, tmp_path: Path) -> None:
        (tmp_path / "10").write_bytes(RECORD.pack(3, 900))
        (tmp_path / "11-140").write_bytes(RECORD.pack(4, 700))
        (tmp_path / "12.new").write_bytes(b"")  # not whole yet
        assert counted(tmp_path) == (7, 700)


class TestSystems:
    def test_names_are_unique_and_drivers_exist(self) -> None:
        assert len({each.name for each in ALL}) == len(ALL)
        for each in ALL:
            assert (DRIVERS / each.family.driver).is_file()
            assert each.scenarios()
            assert each.against in {"aqd", "aqd-single"}

    def test_versions_of_everything_are_pinned(self) -> None:
        table = packages.versions()
        pinned = {*table["python"], *table["node"], "aqd"}
        assert {each.family.name for each in ALL} == pinned
        wanted = [
            name
            for kind in ("python", "node")
            for entry in table[kind].values()
            for name in entry["packages"]
        ]
        assert all("==" in name or "@" in name for name in wanted), wanted

    def test_choice(self) -> None:
        names = [each.name for each in systems.choose(ALL, "graphile-worker-fast, aqd")]
        assert names == ["aqd", "graphile-worker-fast"]  # in the order of the report
        assert {each.name for each in systems.choose(ALL, "rq*")} == {"rq", "rq-simple"}
        assert systems.choose(ALL, None) == ALL

    def test_slots(self) -> None:
        (one,) = systems.choose(systems.systems(slots=7), "aqd")
        assert one.settings["daemon"]["slots"] == 7

    def test_drivers_shadow_no_package(self) -> None:
        """The folder comes first on the drivers' path."""
        names = {path.stem for path in DRIVERS.glob("*.py")}
        assert names.isdisjoint(
            {"aqd", "awa", "celery", "dramatiq", "pgqueuer", "procrastinate", "redis", "rq"}
        )

    @pytest.mark.parametrize("file", sorted(DRIVERS.rglob("*.py")), ids=lambda path: path.name)
    def test_drivers_are_python(self, file: Path) -> None:
        ast.parse(file.read_text(), feature_version=(3, 11))


class TestProgram:
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert program.main(["--list"]) == 0
        output = capsys.readouterr().out
        assert all(each.name in output for each in ALL)

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (["--only", "aqd,sidekiq"], "sidekiq"),
            (["--rounds", "0"], "positive"),
            (["--jobs", "many"], "--jobs"),
            (["--scenario", "enqueue"], "enqueue"),
            (["--directory", "/nowhere"], "/nowhere is no folder"),
        ],
    )
    def test_mistakes(self, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            program.parse(arguments)
        assert caught.value.code == 2
        assert word in capsys.readouterr().err

    def test_postgresql_is_on_a_disk(self, open_dir: Path) -> None:
        """Where a commit costs what it costs: /tmp may be memory."""
        assert program.parse([]).directory == Path("/var/tmp")
        assert program.parse(["--directory", str(open_dir)]).directory == open_dir
        assert machine.describe(Path("/proc"))["files"] == "on proc (/proc)"
        with contextlib.closing(servers.Servers(open_dir)) as ours:
            assert ours.postgres.data.is_relative_to(open_dir)
            with ours.postgres.connect() as conn:
                assert conn.execute("show data_directory").fetchone() == (str(ours.postgres.data),)

    def test_one_that_fails_is_no_others_trouble(self) -> None:
        class Runner:
            def __init__(self) -> None:
                self.rounds: list[str] = []

            def prepare(self, system: systems.System) -> None:
                if system.name == "rq":
                    raise Unavailable("there is no redis-server")

            def drain(self, system: systems.System, jobs: int) -> Drain:
                self.rounds.append(system.name)
                if system.name == "celery":
                    raise Failed("a worker ended with 1: [Errno 5]")
                return Drain(jobs, 2.0, 1.0, None)

        options = program.parse(["--only", "aqd,celery,rq,dramatiq", "--scenario", "drain", "--jobs", "10"])
        results = {each.name: Result() for each in options.systems}
        runner = Runner()
        console = Console(file=io.StringIO())
        program.measure(options, runner, results, console)  # type: ignore[arg-type]
        assert runner.rounds == ["aqd", "celery", "dramatiq", "aqd", "dramatiq"]
        assert report.skipped(options.systems, results) == [
            "celery: a worker ended with 1: [Errno 5]",
            "rq: there is no redis-server",
        ]
        assert results["aqd"].rate == 5


class TestReport:
    @pytest.fixture
    def results(self) -> dict[str, Result]:
        found = {each.name: Result() for each in ALL}
        found["aqd"] = Result(drained(40_000, 60_000), [Latency([2.0, 3.0, 4.0])])
        found["aqd-single"] = Result(drained(9_000))
        found["graphile-worker-fast"] = Result(drained(40_000), [Latency([1.5, 2.5, 8.0])])
        found["graphile-worker"] = Result(drained(3_000))
        found["celery"] = Result(drained(1_000, wal=None))
        found["rq"] = Result(reason="there is no npm")
        return found

    def test_drain(self, results: dict[str, Result]) -> None:
        lines = {
            line.split("│")[1].strip(): line
            for line in text(report.drain_table(ALL, results)).splitlines()
            if "│" in line
        }
        assert "50,000" in lines["aqd"]
        assert "40,000 60,000" in lines["aqd"]
        assert "1.25" in lines["graphile-worker-fast"]
        assert "3.00 *" in lines["graphile-worker"]  # against aqd with one job a frame
        assert "50.00" in lines["celery"]
        assert "–" in lines["celery"]  # no WAL
        assert "rq" not in lines

    def test_chart(self, results: dict[str, Result], tmp_path: Path) -> None:
        drain, latency = report.panels(ALL, results)
        rates = {row.variant: row.throughput for row in drain.rows}
        assert rates == {
            "aqd": 50_000,
            "aqd-single": 9_000,
            "graphile-worker-fast": 40_000,
            "graphile-worker": 3_000,
            "celery": 1_000,
        }
        assert [row.variant for row in latency.rows] == ["aqd", "graphile-worker-fast"]
        assert latency.rows[1].latency is not None
        assert (latency.rows[1].latency.p50_ms, latency.rows[1].latency.max_ms) == (2.5, 8.0)
        chart.draw_results([drain, latency], ["here"], tmp_path / "peers.png")
        assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")

    def test_latency(self, results: dict[str, Result]) -> None:
        output = text(report.latency_table(ALL, results))
        (line,) = [line for line in output.splitlines() if "graphile-worker-fast" in line]
        assert [part.strip() for part in line.split("│")[3:-1]] == [
            "3",
            "2.50",
            "8.00",
            "8.00",
            "2.50",
            "1.20",
        ]

    def test_without_aqd(self, results: dict[str, Result]) -> None:
        chosen = systems.choose(ALL, "celery")
        assert "–" in text(report.drain_table(chosen, {"celery": results["celery"]}))

    def test_document(self, results: dict[str, Result]) -> None:
        document = json.loads(json.dumps(report.document(ALL, results, {"machine": {"processors": "2"}})))
        assert document["machine"] == {"processors": "2"}
        assert document["systems"]["aqd"]["drain"][0]["rate"] == pytest.approx(40_000)
        assert document["systems"]["rq"]["reason"] == "there is no npm"


class TestMissingTools:
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A PATH with nothing in it."""
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        return folder

    @pytest.mark.usefixtures("path")
    def test_no_npm(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="no npm"):
            Cache(tmp_path / "cache").node_package("pg-boss")

    @pytest.mark.usefixtures("path")
    def test_no_redis(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="no redis-server"):
            Cache(tmp_path / "cache").redis_server()

    def test_an_installation_that_fails_is_tried_once(self, tmp_path: Path, path: Path) -> None:
        npm = path / "npm"
        npm.write_text("#!/bin/sh\necho >&2 first\necho >&2 'E404: no such package'\nexit 1\n")
        npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
        said: list[str] = []
        cache = Cache(tmp_path / "cache", said.append)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"^npm failed: E404: no such package$"):
                cache.node_package("pg-boss")
        assert len(said) == 1

    def test_an_installation_is_made_again_for_other_versions(self, tmp_path: Path, path: Path) -> None:
        npm = path / "npm"
        npm.write_text("#!/bin/sh\nexit 0\n")
        npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
        said: list[str] = []
        cache = Cache(tmp_path / "cache", said.append)
        first = cache.node_package("pg-boss")
        assert cache.node_package("pg-boss") == first
        assert len(said) == 1
        cache.table["node"]["pg-boss"]["packages"] = ["pg-boss@0.0.1"]
        cache.node_package("pg-boss")
        assert said[1:] == ["installing pg-boss@0.0.1"]

    def test_node_that_is_too_old(self, tmp_path: Path, path: Path) -> None:
        node = path / "node"
        node.write_text("#!/bin/sh\necho v20.1.0\n")
        node.chmod(node.stat().st_mode | stat.S_IXUSR)
        with pytest.raises(Unavailable, match="no npm"):  # where a newer one would come from
            Cache(tmp_path / "cache").node("pg-boss")
        node.write_text("#!/bin/sh\necho v99.0.0\n")
        assert Cache(tmp_path / "cache").node("pg-boss") == node


def test_deadlines_are_bounded() -> None:
    """No wait of a run is for ever."""
    assert max(runs.FILL_S, runs.DRAIN_S, runs.LATENCY_S, packages.INSTALL_S) <= 300
