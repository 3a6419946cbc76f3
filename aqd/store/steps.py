"""Operations of several statements, told once for every kind of connection.

Pure, but for :func:`drive` and :func:`drive_async`. An operation is a generator: it yields the statement that it wants
run, gets the rows, and returns its result. So the client's synchronous and asynchronous functions and the API,
which borrows a connection for each statement, are one text and cannot drift apart.

Each statement is a transaction of its own on a connection in autocommit. Fails with what the statement or the
operation raises; what earlier statements changed stays changed.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.rows import tuple_row

from aqd import statements
from aqd.database import Connection, Row, run
from aqd.store.listing import refuse_too_broad

T = TypeVar("T")

_ADVICE = "give finished_after, or a type"


class Step(NamedTuple):
    """A named statement to run. ``changes``: whether it writes. ``asked``: the names of what a filter asks for; if that
    takes too long, the filter is to blame (:class:`TooBroad`)."""

    name: str
    params: dict[str, Any]
    changes: bool
    asked: Sequence[str] = ()


Steps: TypeAlias = Generator[Step, list[Row], T]


def look(name: str, **params: Any) -> Step:
    """A statement that reads."""
    return Step(name, params, changes=False)


def change(name: str, **params: Any) -> Step:
    """A statement that writes."""
    return Step(name, params, changes=True)


def run_step(conn: Connection, step: Step) -> list[Row]:
    """Run one statement; see :func:`aqd.database.run`."""
    with refuse_too_broad(list(step.asked), _ADVICE):
        return run(conn, step.name, **step.params)


def drive_by(steps: Steps[T], run_one: Callable[[Step], list[Row]]) -> T:
    """Run an operation; ``run_one`` runs one of its statements."""
    try:
        step = next(steps)
        while True:
            step = steps.send(run_one(step))
    except StopIteration as end:
        result: T = end.value
        return result


def drive(conn: Connection, steps: Steps[T]) -> T:
    """Run an operation on a connection, inside the caller's transaction if there is one."""
    return drive_by(steps, lambda step: run_step(conn, step))


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
    with refuse_too_broad(list(step.asked), _ADVICE):
        async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
            prepare = False if statement.fresh else None
            await cursor.execute(statement.text, args or None, binary=True, prepare=prepare)
            return await cursor.fetchall() if cursor.description is not None else []
