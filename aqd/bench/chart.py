"""A report as a PNG: a panel for each thing that a scenario has measured.

matplotlib is imported here only, with the backend that needs no display. Colours are those of Okabe and Ito, which
people who see red and green alike can tell apart.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from aqd.bench.report import heading, number
from aqd.bench.results import Figure, Report, Result, Row, Series
from aqd.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_WIDTH_IN: Final = 7.5
_HEIGHT_IN: Final = 3.6
_LINE_IN: Final = 0.16
_DPI: Final = 110
_PERCENTILES: Final = ("p50_ms", "p95_ms", "p99_ms", "max_ms")


def check() -> None:
    """Raises :class:`UserError` where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--chart: matplotlib is not installed; it comes with aqd[bench]") from None


def draw(report: Report, path: Path) -> None:
    """The whole report."""
    draw_results(report.results, heading(report), path)


def draw_results(results: Sequence[Result], lines: Sequence[str], path: Path) -> None:
    """All panels in one picture, two in a row, under these lines."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = [panel for result in results for panel in _panels(result)]
    columns = min(2, max(1, len(panels)))
    heights = [
        max(panel.height_in for panel in panels[first : first + columns])
        for first in range(0, len(panels), columns)
    ] or [_HEIGHT_IN]
    figure, axes = plt.subplots(
        len(heights),
        columns,
        figsize=(_WIDTH_IN * columns, sum(heights) + 1.0),
        squeeze=False,
        dpi=_DPI,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    places = [place for line in axes for place in line]
    for place, panel in zip(places, panels, strict=False):
        panel.draw(place)
    for place in places[len(panels) :]:
        place.set_axis_off()
    figure.suptitle("\n".join(lines), fontsize=8)
    figure.savefig(path, format="png")
    plt.close(figure)


class _Panel(NamedTuple):
    """A part of the picture, with ``lines`` of labels."""

    draw: Callable[["Axes"], None]
    lines: int = 0

    @property
    def height_in(self) -> float:
        return max(_HEIGHT_IN, _LINE_IN * self.lines + 1.0)


def _panels(result: Result) -> list[_Panel]:
    """Rates, latencies, curves, and figures where there is nothing else."""
    panels: list[_Panel] = []
    rows = [row for row in result.rows if row.throughput is not None and row.latency is None]
    if rows and not result.series:
        panels.append(_Panel(lambda place: _rates(place, result, rows), 2 * len(rows)))
    if timed := [row for row in result.rows if row.latency is not None]:
        panels.append(_Panel(lambda place: _latencies(place, result, timed), 4 * len(timed)))
    for curves in _by_axes(result.series):
        panels.append(_Panel(partial(_curves, result=result, curves=curves)))
    if not panels:
        named = [("", each) for each in result.figures]
        named += [(f"{_label(row)}: ", each) for row in result.rows for each in row.figures]
        panels.append(_Panel(lambda place: _figures(place, result, named), len(named)))
    return panels


def _label(row: Row) -> str:
    workers = "" if row.workers is None else f"{row.workers} worker{'s' if row.workers != 1 else ''}"
    return "\n".join(filter(None, (row.variant, workers)))


def _rates(place: "Axes", result: Result, rows: Sequence[Row]) -> None:
    """Bars, with the lowest and the highest round as a line."""
    values = [row.throughput or 0.0 for row in rows]
    colours = list(_COLOURS[: len(rows)]) if len(rows) <= len(_COLOURS) else [_COLOURS[0]] * len(rows)
    bars = place.barh([_label(row) for row in rows], values, color=colours)
    place.bar_label(bars, [f" {number(value)}" for value in values], fontsize=8)
    for index, row in enumerate(rows):
        if len(row.runs) > 1:
            rounds = [run.throughput for run in row.runs]
            place.plot([min(rounds), max(rounds)], [index, index], color="black", linewidth=1)
    _finish(place, result, "jobs/s")
    place.set_xlim(0, max(values) * 1.18 or 1)
    place.invert_yaxis()


def _latencies(place: "Axes", result: Result, rows: Sequence[Row]) -> None:
    """Groups of bars on a logarithmic scale: percentiles lie far apart."""
    height = 0.8 / len(_PERCENTILES)
    for index, name in enumerate(_PERCENTILES):
        values = [getattr(row.latency, name) for row in rows]
        bars = place.barh(
            [line + index * height for line in range(len(rows))],
            values,
            height=height,
            color=_COLOURS[index],
            label=name.removesuffix("_ms"),
        )
        place.bar_label(bars, [f" {number(value)}" for value in values], fontsize=7)
    place.set_yticks(
        [line + height * (len(_PERCENTILES) - 1) / 2 for line in range(len(rows))],
        [_label(row) for row in rows],
    )
    place.set_xscale("log")
    place.xaxis.set_major_formatter("{x:g}")
    place.xaxis.set_minor_formatter("")
    low, high = place.get_xlim()
    place.set_xlim(low, high * 2)  # room for the numbers and the legend
    place.legend(fontsize=7, loc="right")
    place.invert_yaxis()
    _finish(place, result, "ms, enqueue → handler start")


def _by_axes(series: Sequence[Series]) -> list[list[Series]]:
    found: dict[tuple[str, str], list[Series]] = {}
    for each in series:
        found.setdefault((each.x, each.y), []).append(each)
    return list(found.values())


def _curves(place: "Axes", result: Result, curves: Sequence[Series]) -> None:
    for index, each in enumerate(curves):
        xs, ys = zip(*each.points, strict=True)
        place.plot(xs, ys, marker="o", color=_COLOURS[index % len(_COLOURS)], label=each.name)
    place.set_ylim(bottom=0)
    place.set_ylabel(curves[0].y)
    place.legend(fontsize=7)
    _finish(place, result, curves[0].x)


def _figures(place: "Axes", result: Result, figures: Sequence[tuple[str, Figure]]) -> None:
    """Numbers of different units are no bars: a table."""
    place.set_axis_off()
    place.set_title(result.scenario, fontsize=9)
    if not figures:
        return
    cells = [[f"{of}{each.name}", f"{number(each.value)} {each.unit}"] for of, each in figures]
    table = place.table(cells, loc="center", cellLoc="left", colWidths=[0.55, 0.35])
    table.auto_set_font_size(False)
    table.set_fontsize(8)


def _finish(place: "Axes", result: Result, axis: str) -> None:
    place.set_title(f"{result.scenario}: {result.summary}", fontsize=9)
    place.set_xlabel(axis, fontsize=8)
    place.tick_params(labelsize=8)
    place.grid(axis="x", alpha=0.3)
    place.set_axisbelow(True)
