"""Operations of several statements, told once for every kind of connection.

Pure, but for :func:`drive` and :func:`drive_async`. An operation is a generator: it yields the statement that it wants
run, gets the rows, and returns its result. So the client's synchronous and asynchronous functions and the API,
which borrows a connection for each statement, are one text and cannot drift apart.

Each statement is a transaction of its own on a connection in autocommit. Fails with what the statement or the
operation raises; what earlier statements changed stays changed.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.rows import tuple_row

from aqd import statements
from aqd.database import Connection, Row, run

T = TypeVar("T")


class Step(NamedTuple):
    """A named statement to run. ``changes``: whether it writes."""

    name: str
    params: dict[str, Any]
    changes: bool


Steps: TypeAlias = Generator[Step, list[Row], T]


def look(name: str, **params: Any) -> Step:
    """A statement that reads."""
    return Step(name, params, changes=False)


def change(name: str, **params: Any) -> Step:
    """A statement that writes."""
    return Step(name, params, changes=True)


def drive_by(steps: Steps[T], run_step: Callable[[Step], list[Row]]) -> T:
    """Run an operation; ``run_step`` runs one of its statements."""
    try:
        step = next(steps)
        while True:
            step = steps.send(run_step(step))
    except StopIteration as end:
        result: T = end.value
        return result


def drive(conn: Connection, steps: Steps[T]) -> T:
    """Run an operation on a connection, inside the caller's transaction if there is one."""
    return drive_by(steps, lambda step: run(conn, step.name, **step.params))


async def drive_async(conn: psycopg.AsyncConnection[Any], steps: Steps[T]) -> T:
    """As :func:`drive`; a conflict (40P01, 40001) is the caller's to repeat."""
    try:
        step = next(steps)
        while True:
            step = steps.send(await _run_async(conn, step))
    except StopIteration as end:
        result: T = end.value
        return result


async def _run_async(conn: psycopg.AsyncConnection[Any], step: Step) -> list[Row]:
    statement = statements.get(step.name)
    # Integers as text, typed by the statement's cast (aqd/database.py).
    args = tuple(
        str(value) if type(value) is int else value
        for value in map(step.params.__getitem__, statement.params)
    )
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.text, args or None, binary=True)
        return await cursor.fetchall() if cursor.description is not None else []
