"""``aqd metrics``, and ``list`` of ``aqd queues``, ``types`` and ``nodes``: figures.

``metrics`` asks the running daemon, and works while the database is away; the lists read the snapshots that the keepers
make, as the HTTP service does.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from aqd.cli import changes
from aqd.cli.command import App
from aqd.cli.db import connect

if TYPE_CHECKING:
    from aqd.store.figures import Stats

TIMEOUT_S = 5.0

_json = click.option("--json", "as_json", is_flag=True, help="As JSON, as the HTTP service shows it.")


@click.command("metrics")
@click.pass_obj
def metrics_command(app: App) -> None:
    """Print the running daemon's metrics in the text format of Prometheus."""
    from aqd import config, control, metrics

    cfg = config.load_leniently(app.config_path, os.environ)
    answer = control.request(config.control_socket(cfg), "metrics", TIMEOUT_S)
    sys.stdout.write(metrics.of_daemon(answer).decode())


@click.group("queues")
def queues_command() -> None:
    """Look at queues; pause, resume and limit them."""


for _command in changes.OF_QUEUES:
    queues_command.add_command(_command)


@queues_command.command("list")
@_json
@click.pass_obj
def queues_list_command(app: App, as_json: bool) -> None:
    """List queues: how many jobs, how old the oldest due one, how fast it goes (every ten seconds anew)."""
    from aqd.api import figures as documents
    from aqd.cli.output import print_json, print_table
    from aqd.store import figures

    with connect(app) as conn:
        rows = figures.list_queues(conn)
    if as_json:
        print_json([documents.queue(row) for row in rows])
        return
    print_table(
        ("queue", *_COLUMNS, "paused", "limit"),
        [(row.queue, *_cells(row.stats), row.paused or None, row.max_running) for row in rows],
        empty="no queues",
    )


@click.group("types")
def types_command() -> None:
    """Look at the types of jobs."""


@types_command.command("list")
@_json
@click.pass_obj
def types_list_command(app: App, as_json: bool) -> None:
    """List types: as queues, and how many live nodes serve each."""
    from aqd import config
    from aqd.api import figures as documents
    from aqd.cli.output import print_json, print_table
    from aqd.store import figures

    ttl_s = config.load(app.config_path, os.environ).keeper.node_ttl_s
    with connect(app) as conn:
        rows = figures.list_types(conn, ttl_s)
    if as_json:
        print_json([documents.type_(row) for row in rows])
        return
    print_table(
        ("type", *_COLUMNS, "nodes", "queue"),
        [(row.type, *_cells(row.stats), row.nodes, row.queue) for row in rows],
        empty="no types",
    )


@click.group("nodes")
def nodes_command() -> None:
    """Look at the daemons."""


@nodes_command.command("list")
@_json
@click.pass_obj
def nodes_list_command(app: App, as_json: bool) -> None:
    """List the daemons on this database, as they reported themselves last."""
    from aqd import config
    from aqd.api import figures as documents
    from aqd.cli.output import print_json, print_table
    from aqd.store import figures

    ttl_s = config.load(app.config_path, os.environ).keeper.node_ttl_s
    with connect(app) as conn:
        rows = figures.list_nodes(conn, ttl_s)
    if as_json:
        print_json([documents.node(row) for row in rows])
        return
    print_table(
        ("node", "state", "slots", "busy", "generation", "version", "pid", "plugins", "types", "seen"),
        [
            (
                row.name,
                row.state if row.live else "silent",
                row.slots,
                (info := figures.node_info(row)).busy,
                row.generation,
                row.version,
                row.pid,
                [plugin.name for plugin in info.plugins],
                row.types,
                row.seen_at,
            )
            for row in rows
        ],
        empty="no nodes",
    )


_COLUMNS = (
    "due",
    "later",
    "running",
    "failed",
    "oldest due",
    "done/min",
    "failed/min",
    "p50",
    "p95",
    "wait p95",
)


def _cells(stats: "Stats | None") -> tuple[Any, ...]:
    from aqd.cli.output import duration

    if stats is None:
        return (None,) * len(_COLUMNS)
    counts, wall, waiting = stats.counts, stats.duration_s, stats.waiting_s
    return (
        counts.due,
        counts.scheduled,
        counts.processing,
        counts.failed,
        duration(stats.oldest_due_s),
        stats.completed_per_min,
        stats.failed_per_min,
        _short(wall.p50 if wall else None),
        _short(wall.p95 if wall else None),
        _short(waiting.p95 if waiting else None),
    )


def _short(seconds: float | None) -> str:
    from aqd.cli.output import duration

    return duration(seconds) if seconds is None or seconds >= 1 else f"{seconds * 1000:.3g} ms"
