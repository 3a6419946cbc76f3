"""A report as tables for people and as JSON for programs. Pure; the command prints them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from aqd.bench.results import Figure, Report, Result, Row

COLUMNS: Final = ("Workers", "Jobs", "Total Time (s)", "Throughput (jobs/s)", "Failures")
LATENCY: Final = ("p50 (ms)", "p95 (ms)", "p99 (ms)", "max (ms)")
# More rows than this do not fit beside one another.
_MANY: Final = 4


def document(report: Report) -> bytes:
    """The JSON, indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


class Table(NamedTuple):
    """Head and lines, all of the same length."""

    head: tuple[str, ...]
    lines: list[tuple[str, ...]]


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


def tables(result: Result) -> list[Table]:
    """Of one scenario: the table of this field, what stands behind each line of it, how the lines compare."""
    found = []
    if result.rows:
        variants = any(row.variant for row in result.rows)
        timed = any(row.latency is not None for row in result.rows)
        head = (*(("Variant",) if variants else ()), *COLUMNS, *(LATENCY if timed else ()))
        found.append(Table(head, [cells(row, variants, timed) for row in result.rows]))
        found.append(details(result.rows))
    if result.figures:
        wanted = any(each.good for each in result.figures)
        head = ("", "value", *(("wanted",) if wanted else ()), "")
        found.append(Table(head, [_line(each, wanted) for each in result.figures]))
    return found


def cells(row: Row, variants: bool, timed: bool) -> tuple[str, ...]:
    """A row as it stands in the table."""
    found = [
        *((row.variant,) if variants else ()),
        "-" if row.workers is None else str(row.workers),
        f"{row.jobs:,}",
        "-" if row.total_s is None else f"{row.total_s:.2f}",
        "-" if row.throughput is None else number(row.throughput),
        str(row.failures),
    ]
    if timed:
        times = row.latency
        found += (
            ["-"] * len(LATENCY)
            if times is None
            else [f"{each:.2f}" for each in (times.p50_ms, times.p95_ms, times.p99_ms, times.max_ms)]
        )
    return tuple(found)


def details(rows: Sequence[Row]) -> Table:
    """Head and lines of the second table: a line for each fact, a column for each row; the other way round for many."""
    wanted: dict[str, str] = {}
    notes: dict[str, str] = {}
    facts = [_facts(row, wanted, notes) for row in rows]
    names = list(dict.fromkeys(name for each in facts for name in each))
    labels = [_label(row) for row in rows]
    if len(rows) > _MANY:
        heads = [f"{name}{f' ({wanted[name]})' if name in wanted else ''}" for name in names]
        lines = [
            (label, *(each.get(name, "-") for name in names))
            for label, each in zip(labels, facts, strict=True)
        ]
        return Table(("", *heads), lines)
    more = (("wanted",) if wanted else ()) + (("",) if notes else ())
    lines = [
        (
            name,
            *(each.get(name, "-") for each in facts),
            *((wanted.get(name, " "),) if wanted else ()),
            *((notes.get(name, " "),) if notes else ()),
        )
        for name in names
    ]
    return Table(("", *labels, *more), lines)


def _label(row: Row) -> str:
    workers = "" if row.workers is None else f"{row.workers} worker{'s' if row.workers != 1 else ''}"
    return ", ".join(filter(None, (row.variant, workers)))


def _facts(row: Row, wanted: dict[str, str], notes: dict[str, str]) -> dict[str, str]:
    """What is known of a row, by name; what is wanted and said of it is noted down."""
    found = {
        "handler": row.handler + (f" {row.cost_ms:g} ms" if row.cost_ms else ""),
        "payload, bytes": f"{row.payload_bytes:,}",
    }
    if row.frame_ms is not None:
        found["frame_ms"] = f"{row.frame_ms:g}"
    found |= {name.replace("_", " "): number(value) for name, value in row.batch.items()}
    if len(row.runs) > 1:
        found["rounds, jobs/s"] = " ".join(number(each.throughput) for each in row.runs)
    for each in row.figures:
        name = f"{each.name}, {each.unit}" if each.unit else each.name
        found[name] = _value(each)
        if each.good:
            wanted[name] = each.good
        if each.note:
            notes[name] = each.note
    return found


def _value(each: Figure) -> str:
    mark = {None: "", True: " ✓", False: " ✗"}[each.is_good]
    return f"{number(each.value)}{mark}"


def _line(each: Figure, wanted: bool) -> tuple[str, ...]:
    name = f"{each.name}, {each.unit}" if each.unit and each.unit != "×" else each.name
    times = "×" if each.unit == "×" else ""
    value = f"{number(each.value)}{times}" + _value(each).removeprefix(number(each.value))
    return (name, value, *((each.good or " ",) if wanted else ()), each.note or " ")


def number(value: float) -> str:
    """Three or more significant digits, thousands set apart."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
