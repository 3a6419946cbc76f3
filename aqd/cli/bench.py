"""``aqd bench``: measure this aqd on this machine.

Everything heavy (scenarios, rich, matplotlib) is imported when the command line is known to be good; so is what
would otherwise be missing only after a long run (a folder for the files, matplotlib for the chart).
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aqd.errors import ConfigError, Exit

if TYPE_CHECKING:
    from aqd.bench.results import Report


class _Workers(click.ParamType[tuple[int, ...]]):
    """``4`` or ``1,2,4``."""

    name = "numbers"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found: list[int] = []
        for part in str(value).split(","):
            if not part.strip().isdecimal() or not self.low <= int(part) <= self.high:
                self.fail(
                    f"{value!r}: numbers from {self.low} to {self.high}, separated by commas", param, ctx
                )
            if int(part) not in found:
                found.append(int(part))
        return tuple(found)


class _Number(click.FloatRange):
    """A range without nan, which lies in every one."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no number", param, ctx)
        return float(found)


def _scenarios(ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    from aqd.bench import scenarios
    from aqd.options import did_you_mean

    if "all" in value:
        return scenarios.NAMES
    for name in value:
        if name not in scenarios.NAMES:
            hint = did_you_mean(name, scenarios.NAMES)
            raise click.UsageError(f"there is no scenario {name!r}{hint} (--list explains all)", ctx)
    return tuple(dict.fromkeys(value)) or scenarios.DEFAULT


@click.command("bench")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...", callback=_scenarios)
@click.option("--list", "as_list", is_flag=True, help="Say what the scenarios measure, and how; run nothing.")
@click.option(
    "--workers",
    type=_Workers(1, 512),
    default=(),
    help="Slots of the daemon; several, separated by commas, are measured in turns. Default: 4, or the scenario's own.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 100_000_000),
    help="How many jobs, instead of each scenario's own number.",
)
@click.option(
    "--payload-bytes",
    type=click.IntRange(2, 1_000_000),
    default=2,
    show_default=True,
    help="Length of each job's payload.",
)
@click.option(
    "--handler",
    type=click.Choice(["noop", "sleep", "cpu"]),
    default="noop",
    show_default=True,
    help="What each job does.",
)
@click.option(
    "--cost-ms",
    type=_Number(0, 60_000),
    help="How long a job sleeps, or how much processor time it takes.",
)
@click.option(
    "--frame-ms",
    type=_Number(0, 1000),
    help="daemon.frame_ms of the measured daemon; 0 sends each job alone.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), help="How often each measurement is made; the median counts."
)
@click.option("--rate", type=_Number(0.1, 1_000_000), help="Jobs a second of the scenario steady.")
@click.option("--seconds", type=_Number(0.1, 86_400), help="How long what is measured by time goes on.")
@click.option(
    "--scale",
    type=_Number(0.000_01, 100),
    default=1.0,
    show_default=True,
    help="Multiplies each scenario's own numbers: 0.01 for a first look.",
)
@click.option(
    "--database-url",
    metavar="URL",
    help="A server on which databases aqd_bench_… may be made and dropped. Default: a PostgreSQL of its own.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Where a PostgreSQL of its own keeps its files. Default: /var/tmp.",
)
@click.option(
    "--keep", is_flag=True, help="Leave databases, configurations and logs for a look, and say where."
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Also write everything as JSON; - is standard output."
)
@click.option("--chart", "chart_file", metavar="FILE", help="Also draw it, as a PNG; needs aqd[bench].")
def bench_command(
    scenarios: tuple[str, ...],
    as_list: bool,
    workers: tuple[int, ...],
    jobs: int | None,
    payload_bytes: int,
    handler: str,
    cost_ms: float | None,
    frame_ms: float | None,
    rounds: int | None,
    rate: float | None,
    seconds: float | None,
    scale: float,
    database_url: str | None,
    directory: Path | None,
    keep: bool,
    json_file: str | None,
    chart_file: str | None,
) -> int:
    """Measure how fast this aqd is on this machine, with a real daemon and a real database.

    SCENARIO is one or more of those that --list explains, or "all"; without any: drain and latency.
    """
    from aqd.bench import chart, report, run
    from aqd.bench.settings import MIN_PADDED_BYTES, Settings

    if as_list:
        _explain()
        return Exit.OK
    if handler == "noop" and cost_ms:
        raise click.UsageError("--cost-ms is for --handler sleep or cpu: noop costs nothing")
    if handler != "noop" and not cost_ms:
        raise click.UsageError(f"--handler {handler} needs --cost-ms, what one job takes")
    if 2 < payload_bytes < MIN_PADDED_BYTES:
        raise click.UsageError(f"--payload-bytes: 2 (an empty object), or {MIN_PADDED_BYTES} and more")
    if database_url and directory:
        raise click.UsageError("--directory is for a PostgreSQL of its own, --database-url names another")
    _check_writable("--json", json_file)
    _check_writable("--chart", chart_file)
    if chart_file is not None:
        chart.check()
    found = run.run(
        Settings(
            scenarios=scenarios,
            workers=workers,
            jobs=jobs,
            payload_bytes=payload_bytes,
            handler=handler,  # type: ignore[arg-type]
            cost_ms=cost_ms or 0.0,
            frame_ms=frame_ms,
            rounds=rounds,
            rate=rate,
            seconds=seconds,
            scale=scale,
            database_url=database_url,
            directory=directory,
            keep=keep,
        )
    )
    # The files first: whoever reads the table may go away.
    if json_file is not None and json_file != "-":
        Path(json_file).write_bytes(report.document(found))
    if chart_file is not None:
        chart.draw(found, Path(chart_file))
    if json_file == "-":
        click.echo(report.document(found), nl=False)
    else:
        show(found)
    failed = [each for each in found.results if each.error]
    for each in failed:
        for line in each.error.splitlines():
            click.echo(f"aqd: {each.scenario}: {line}", err=True)
    return Exit.ERROR if failed else Exit.OK


def show(found: "Report") -> None:
    """All of it, on standard output: where it ran, then each scenario."""
    from aqd.bench import report
    from aqd.cli.output import print_table

    for line in report.heading(found):
        click.echo(line)
    for result in found.results:
        click.secho(f"\n{result.scenario}: {result.summary}", bold=True)
        for number, table in enumerate(report.tables(result)):
            if number:
                click.echo()
            print_table(table.head, table.lines)
        for note in result.notes:
            click.echo(f"note: {note}")


def _check_writable(option: str, name: str | None) -> None:
    """Now, and not after half an hour."""
    if name is None or (option == "--json" and name == "-"):
        return
    path = Path(name)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}: cannot write {name}")


def _explain() -> None:
    import inspect

    from aqd.bench import scenarios

    for name in scenarios.NAMES:
        click.secho(name, bold=True)
        text = inspect.getdoc(scenarios.find(name)) or ""
        click.echo("".join(f"    {line}".rstrip() + "\n" for line in text.splitlines()))
