"""aqd bench without a daemon: percentiles, tables, the JSON, the chart, the command line."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import msgspec
import pytest
from psycopg.conninfo import conninfo_to_dict

from aqd.bench import bench, chart, machine, measure, pgbench, report, scenarios
from aqd.bench.database import with_database
from aqd.bench.node import Node, Statements, toml
from aqd.bench.results import Figure, Latency, Report, Result, Row, Run, Series
from aqd.bench.settings import Settings, Work
from aqd.cli import bench as bench_command
from aqd.cli import command
from aqd.errors import Exit, UserError, WorldError
from tests.fixtures.postgres import Postgres
from tests.system.readme_page import PAGE, code

# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(1, 0.5, 1), (1, 0.99, 1), (2, 0.5, 1), (4, 0.5, 2), (100, 0.99, 99), (100, 0.95, 95), (101, 0.99, 100), (300, 1.0, 300)],
)  # fmt: skip
def test_percentiles_are_values_that_occurred(count: int, share: float, expected: int) -> None:
    assert measure.percentile([float(n) for n in range(1, count + 1)], share) == expected


def test_latency_is_in_milliseconds_whatever_the_order() -> None:
    found = measure.latency([0.003, 0.001, 0.002])
    assert found == Latency(
        count=3, mean_ms=pytest.approx(2.0), p50_ms=2.0, p95_ms=3.0, p99_ms=3.0, max_ms=3.0
    )
    assert measure.latency([]) is None


def test_the_median_is_a_run_that_was() -> None:
    assert measure.middle([3.0, 1.0, 2.0], lambda each: each) == 2.0
    assert measure.middle([4.0, 1.0, 2.0, 3.0], lambda each: each) == 2.0


def test_usage_of_a_process() -> None:
    used = measure.usage(1)
    assert used is not None
    assert used.own_s >= 0
    assert measure.usage(2**30) is None
    assert measure.memory(2**30) is None
    assert not measure.runs(2**30)


def test_whether_a_figure_is_good() -> None:
    assert Figure("x", 1150, "", "≤ 1150").is_good is True
    assert Figure("x", 0.79, "", "≥ 0.8").is_good is False
    assert Figure("x", 2.0003, "", "≤ 2").is_good is True  # it is shown as 2
    assert Figure("x", 2.01, "", "≤ 2").is_good is False
    assert Figure("x", 5).is_good is None


def test_statements_since_an_earlier_look() -> None:
    none, early, late = Statements(0, 0.0, ()), Statements(2, 0.1, (1, 1, 0)), Statements(5, 0.4, (1, 2, 2))
    since = late - early
    assert (since.count, since.buckets) == (3, (0, 1, 2))
    assert since.total_s == pytest.approx(0.3)
    assert (early - none).buckets == (1, 1, 0)
    assert since.quantile_ms(0.99) is not None
    assert none.quantile_ms(0.99) is None


# --- settings, files, programs ----------------------------------------------------------------------------


def test_numbers_in_scale() -> None:
    settings = Settings(scenarios=("drain",), scale=0.01)
    assert settings.count(100_000) == 1000
    assert settings.count(300, 20) == 20
    assert settings.duration_s(10) == 1.0
    assert settings.slots() == (4,)
    asked = Settings(scenarios=("drain",), scale=0.01, jobs=7, seconds=0.5, rounds=2, workers=(1, 2))
    assert (asked.count(100_000), asked.duration_s(10), asked.times(3), asked.slots()) == (7, 0.5, 2, (1, 2))
    assert asked.scaled(1_000_000) == 10_000


@pytest.mark.parametrize("size", [2, 11, 100, 5000])
def test_a_payload_is_as_long_as_asked(size: int) -> None:
    text = Work(payload_bytes=size).payload
    assert len(text) == size
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql:///postgres", "dbname=y"),
        ("postgresql://", "dbname=y"),
        ("postgresql:///?dbname=z&port=1", "dbname=y port=1"),
        ("postgresql://u:p%40@h:1/x?sslmode=require", "user=u password=p@ host=h port=1 dbname=y sslmode=require"),
        ("postgresql://u@/x?host=/run&dbname=z", "user=u host=/run dbname=y"),
        ("host=/run dbname=x", "host=/run dbname=y"),
    ],
)  # fmt: skip
def test_a_database_of_the_same_server(url: str, expected: str) -> None:
    assert conninfo_to_dict(with_database(url, "y")) == conninfo_to_dict(expected)
    beside = Postgres(url).url("y")  # the suite's own, which stays a URL
    assert conninfo_to_dict(beside) == conninfo_to_dict(expected)
    assert ("://" in beside) == ("://" in url)


def test_configuration_files_are_toml() -> None:
    import tomllib

    tables = {
        "daemon": {"slots": 4, "node_name": 'a"b\\'},
        "plugins": {"settings": {"bench": {"cost_ms": 0.5}}},
    }
    assert tomllib.loads(toml(tables)) == tables


def test_modules_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell says: a start is to be measured, and not Python's compiler."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/nowhere")
    found = [Node(tmp_path / name, "postgresql:///x", 1, {}).environment() for name in ("a", "b")]
    assert [each["PYTHONPYCACHEPREFIX"] for each in found] == [str(tmp_path / "pycache")] * 2
    assert not any("PYTHONDONTWRITEBYTECODE" in each for each in found)


def test_what_pgbench_says() -> None:
    text = (
        "latency average = 3.500 ms\nnumber of transactions actually processed: 4568\n"
        "number of failed transactions: 0 (0.000%)\ntps = 1142.123 (without initial connection time)\n"
    )
    assert pgbench.parse(text) == (4568, 1142.123, 3.5)
    with pytest.raises(WorldError, match="pgbench has failed"):
        pgbench.parse(text.replace("failed transactions: 0", "failed transactions: 3"))
    with pytest.raises(WorldError, match="connection to server"):
        pgbench.parse("pgbench: error: connection to server failed")


def test_the_machine() -> None:
    found = machine.machine(Path("/proc/self"))
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert found["data_filesystem"] == "proc"


# --- the report -----------------------------------------------------------------------------------------


def made() -> Report:
    """A report with everything that one can hold."""
    timed = Latency(count=300, mean_ms=3.0, p50_ms=2.5, p95_ms=4.0, p99_ms=6.5, max_ms=9.0)
    rows = [
        Row(
            workers=slots,
            jobs=100_000,
            total_s=4.0 / slots,
            throughput=25_000.0 * slots,
            batch={"jobs_per_claim": 450.0},
            figures=[
                Figure("WAL", 1100, "bytes/job", "≤ 1150"),
                Figure("claim p99", 12.5, "ms", note="about"),
            ],
            runs=[
                Run(total_s=4.0, throughput=24_000.0 * slots),
                Run(total_s=4.0, throughput=25_000.0 * slots),
            ],
        )
        for slots in (1, 2)
    ]
    return Report(
        started_at="2026-11-30T12:00:00+00:00",
        seconds=61.0,
        machine={"cpu": "C", "cores": 2, "memory_bytes": 24 << 30, "kernel": "6.1", "system": "D", "data_filesystem": "ext4"},
        versions={"aqd": "0.1.0", "python": "CPython 3.11", "postgresql": "15.18"},
        postgresql={"shared_buffers": "512MB", "fsync": "on", "source": "its own"},
        settings=Settings(scenarios=("drain",)).document(),
        results=[
            Result(scenario="drain", summary="How fast.", rows=rows, figures=[Figure("2 / 1 workers", 2.0, "×")]),
            Result(
                scenario="latency",
                summary="How soon.",
                rows=[Row(variant="idle", workers=4, jobs=300, latency=timed)],
                notes=["a note"],
            ),
            Result(
                scenario="pinned",
                summary="How flat.",
                rows=[Row(variant=f"v{n}", workers=4, jobs=10, throughput=1.0) for n in range(5)],
                series=[Series(name="pinned", x="jobs", y="jobs/s", points=[(1.0, 5.0), (2.0, 4.0)])],
            ),
            Result(scenario="start", summary="How quick.", figures=[Figure("ready", 0.4, "s", "≤ 0.5")]),
        ],
    )  # fmt: skip


def test_the_table_of_this_field(capsys) -> None:
    bench_command.show(made())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = ["Workers", "Jobs", "Total", "Time", "(s)", "Throughput", "(jobs/s)", "Failures"]
    at = lines.index(head)
    assert lines[at + 1] == ["1", "100,000", "4.00", "25,000", "0"]
    assert lines[at + 2] == ["2", "100,000", "2.00", "50,000", "0"]
    assert ["idle", "4", "300", "-", "-", "0", "2.50", "4.00", "6.50", "9.00"] in lines
    assert ["WAL,", "bytes/job", "1,100", "✓", "1,100", "✓", "≤", "1150"] in lines
    assert ["rounds,", "jobs/s", "24,000", "25,000", "48,000", "50,000"] in lines
    assert ["2", "/", "1", "workers", "2×"] in lines
    assert ["ready,", "s", "0.4", "✓", "≤", "0.5"] in lines
    assert ["note:", "a", "note"] in lines


def test_many_rows_are_lines() -> None:
    rows = made().results[2].rows
    head, lines = report.details(rows)
    assert head[:2] == ("", "handler")
    assert [line[0] for line in lines] == [f"v{n}, 4 workers" for n in range(5)]
    head, lines = report.details(rows[:2])
    assert head[:3] == ("", "v0, 4 workers", "v1, 4 workers")


def test_the_json_is_the_report() -> None:
    found = made()
    text = report.document(found)
    assert msgspec.json.decode(text, type=Report) == found
    document = json.loads(text)
    assert {
        "format",
        "started_at",
        "seconds",
        "machine",
        "versions",
        "postgresql",
        "settings",
        "results",
    } == set(document)
    row = document["results"][0]["rows"][0]
    assert {
        "variant", "workers", "jobs", "total_s", "throughput", "failures", "handler", "cost_ms", "payload_bytes",
        "frame_ms", "batch", "latency", "figures", "runs",
    } == set(row)  # fmt: skip
    assert "database_url" not in document["settings"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.0123"), (2.0, "2"), (99.9, "99.9"), (1234.6, "1,235"), (-150.0, "-150")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart.draw(made(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_chart_without_matplotlib_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"aqd\[bench\]"):
        chart.check()


# --- scenarios ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenarios.NAMES)
def test_every_scenario_says_what_it_measures_and_what_is_good(name: str) -> None:
    scenario = scenarios.find(name)
    assert scenario.name == name
    text = inspect.getdoc(scenario) or ""
    assert "A good figure" in text
    assert bench.summary(scenario).endswith(".")
    assert len(bench.summary(scenario)) < 110


def test_the_readme_names_them() -> None:
    rows = PAGE.table("scenario", "Benchmark").rows
    assert [code(row[0])[0] for row in rows] == list(scenarios.NAMES)
    section = PAGE.text.partition("## Benchmark")[2].partition("\n## ")[0]
    options = {
        o for parameter in command.aqd_command.get_command(None, "bench").params for o in parameter.opts
    }  # type: ignore[arg-type, union-attr]
    named = {word for text in code(section) for word in text.split() if word.startswith("--")}
    assert named <= options
    assert {"--json", "--chart", "--workers", "--scale", "--database-url", "--rate"} <= named


def test_list_runs_nothing(capsys) -> None:
    assert command.run(["bench", "--list"]) == Exit.OK
    out = capsys.readouterr().out
    assert all(f"\n{name}\n" in "\n" + out for name in scenarios.NAMES)
    assert out.count("A good figure") == len(scenarios.NAMES)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["drian"], Exit.USAGE, "there is no scenario 'drian'; did you mean drain?"),
        (["drain", "--workers", "0"], Exit.USAGE, "'0': numbers from 1 to 512, separated by commas"),
        (["drain", "--workers", "1,x"], Exit.USAGE, "'1,x': numbers from 1 to 512"),
        (["drain", "--jobs", "0"], Exit.USAGE, "0 is not in the range"),
        (["drain", "--scale", "nan"], Exit.USAGE, "--scale"),
        (["drain", "--rounds", "0"], Exit.USAGE, "--rounds"),
        (["drain", "--handler", "sleeep"], Exit.USAGE, "--handler"),
        (["drain", "--handler", "sleep"], Exit.USAGE, "--handler sleep needs --cost-ms"),
        (["drain", "--cost-ms", "5"], Exit.USAGE, "--cost-ms is for --handler sleep or cpu"),
        (
            ["drain", "--payload-bytes", "5"],
            Exit.USAGE,
            "--payload-bytes: 2 (an empty object), or 11 and more",
        ),
        (
            ["drain", "--database-url", "postgresql:///x", "--directory", "/tmp"],
            Exit.USAGE,
            "--directory is for",
        ),
        (["drain", "--json", "/nowhere/x.json"], Exit.CONFIG, "--json: cannot write /nowhere/x.json"),
        (["drain", "--chart", "/tmp"], Exit.CONFIG, "--chart: cannot write /tmp"),
        (["drain", "--directory", "/nowhere"], Exit.CONFIG, "--directory: /nowhere is no folder"),
        (
            ["drain", "--database-url", "postgresql://u@127.0.0.1:1/x"],
            Exit.DATABASE,
            "the database cannot be reached",
        ),
    ],
)
def test_errors(capsys, arguments: list[str], code: int, message: str) -> None:
    assert command.run(["bench", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.splitlines()[-1].startswith("aqd: ")
