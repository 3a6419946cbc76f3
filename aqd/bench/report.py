"""A report as tables for people (where it ran, then each scenario) and as JSON for programs."""

from collections.abc import Iterable, Sequence

import click
import msgspec

from aqd.bench.results import Figure, Latency, Report, Result, Row

COLUMNS = ("Workers", "Jobs", "Total Time (s)", "Throughput (jobs/s)", "Failures")


def document(report: Report) -> bytes:
    """The JSON, indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def show(report: Report) -> None:
    """All of it, on standard output."""
    for line in heading(report):
        click.echo(line)
    for result in report.results:
        click.echo()
        show_result(result)


def heading(report: Report) -> list[str]:
    """Machine, versions and settings, in three lines."""
    where, server = report.machine, report.postgresql
    memory = f"{where['memory_bytes'] / 2**30:.0f} GiB" if where.get("memory_bytes") else "? memory"
    facts = [where["cpu"], f"{where['cores']} cores", memory, f"Linux {where['kernel']}", where["system"]]
    if "data_filesystem" in where:
        facts.append(f"data on {where['data_filesystem']}")
    versions = report.versions
    names = ("shared_buffers", "synchronous_commit", "fsync", "full_page_writes", "max_wal_size")
    settings = ", ".join(f"{name} {server[name]}" for name in names if name in server)
    return [
        " · ".join(facts),
        f"aqd {versions['aqd']} · {versions['python']} · PostgreSQL {versions['postgresql']} ({server['source']})",
        f"{settings} · {report.seconds:.0f} s in all",
    ]


def show_result(result: Result) -> None:
    """One scenario."""
    from aqd.cli.output import print_table

    click.secho(f"{result.scenario}: {result.summary}", bold=True)
    variants = any(row.variant for row in result.rows)
    head = (*(("Variant",) if variants else ()), *COLUMNS)
    print_table(head, [cells(row, variants) for row in result.rows])
    click.echo("\n".join(_lines(result)))


def cells(row: Row, variants: bool) -> tuple[str, ...]:
    """A row as it stands in the table."""
    return (
        *((row.variant,) if variants else ()),
        "-" if row.workers is None else str(row.workers),
        f"{row.jobs:,}",
        "-" if row.total_s is None else f"{row.total_s:.2f}",
        "-" if row.throughput is None else number(row.throughput),
        str(row.failures),
    )


def _lines(result: Result) -> Iterable[str]:
    for row in result.rows:
        name = ", ".join(filter(None, (row.variant, f"{row.workers} workers" if row.workers else "")))
        yield f"  {name}: {work(row)}"
        if row.latency is not None:
            yield f"    enqueue → handler start: {latency(row.latency)}"
        if len(row.runs) > 1:
            yield f"    rounds: {', '.join(number(each.throughput) for each in row.runs)} jobs/s"
        yield from (f"    {line}" for line in figures(row.figures))
    yield from (f"  {line}" for line in figures(result.figures))
    yield from (f"  note: {note}" for note in result.notes)


def work(row: Row) -> str:
    """What its jobs were, and how they travelled."""
    facts = [
        row.handler + (f" {row.cost_ms:g} ms" if row.cost_ms else ""),
        f"payload {row.payload_bytes:,} bytes",
    ]
    if row.frame_ms is not None:
        facts.append(f"frame_ms {row.frame_ms:g}")
    facts += [f"{value:,.1f} {name.replace('_', ' ')}" for name, value in row.batch.items()]
    return ", ".join(facts)


def latency(found: Latency) -> str:
    """Percentiles in one line."""
    return (
        f"p50 {found.p50_ms:.2f} ms, p95 {found.p95_ms:.2f} ms, p99 {found.p99_ms:.2f} ms, "
        f"max {found.max_ms:.2f} ms ({found.count:,} jobs)"
    )


def figures(found: Sequence[Figure]) -> list[str]:
    """One line each."""
    return [figure(each) for each in found]


def figure(each: Figure) -> str:
    """``WAL: 1,012 bytes/job (≤ 1150: yes)``."""
    text = f"{each.name}: {number(each.value)}{' ' if each.unit and each.unit != '×' else ''}{each.unit}"
    remarks = []
    if each.good:
        remarks.append(f"wanted {each.good}: {'yes' if each.is_good else 'no'}")
    if each.note:
        remarks.append(each.note)
    return text + (f" ({'; '.join(remarks)})" if remarks else "")


def number(value: float) -> str:
    """Three or more significant digits, thousands set apart."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
