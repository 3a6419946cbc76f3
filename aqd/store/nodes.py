"""Nodes: their signs of life, what they declare, and the types that none of them knows."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from aqd import migrate
from aqd.database import Connection, execute, int_array, run, text_array
from aqd.hookspecs import HandlerInfo


class NodeState(NamedTuple):
    """What a node says about itself. ``info`` is JSON text, see :class:`aqd.store.figures.NodeInfo`."""

    node_id: str
    name: str
    pid: int
    version: str
    generation: int
    slots: int
    types: Collection[str]
    state: str
    info: str | None = None


def node_seen(conn: Connection, node: NodeState) -> bool:
    """Say that the node lives, and what it can do; False, and nothing is said, if the schema is by now one that this aqd
    cannot work with."""
    values = node._asdict() | {"types": text_array(sorted(node.types)), "schema": migrate.newest()}
    return execute(conn, "node_seen", **values)[1] > 0


def declare_handlers(conn: Connection, handlers: Iterable[HandlerInfo]) -> None:
    """Say what handlers want for jobs that do not say it themselves: their queue and number of attempts."""
    known = sorted(handlers, key=lambda handler: handler.type)
    run(
        conn,
        "declare_handlers",
        types=text_array(handler.type for handler in known),
        queues=text_array(handler.queue for handler in known),
        max_attempts=int_array(handler.max_attempts for handler in known),
    )


def node_gone(conn: Connection, node_id: str) -> None:
    """Say that the node has ended."""
    run(conn, "node_gone", node_id=node_id)


def fail_unknown(
    conn: Connection, grace_s: float, node_ttl_s: float, limit: int, stale_s: float = 60.0
) -> list[tuple[int, str]]:
    """Fail due jobs whose type no live node has declared for ``grace_s``; returns their (id, type).

    To be called every few seconds: the grace counts only while calls are less than ``stale_s`` apart.
    """
    if not run(conn, "note_unknown_types", node_ttl_s=node_ttl_s, stale_s=stale_s):
        return []
    rows = run(
        conn, "fail_unknown_types", grace_s=grace_s, node_ttl_s=node_ttl_s, stale_s=stale_s, limit=limit
    )
    return [(row[0], row[1]) for row in rows]
