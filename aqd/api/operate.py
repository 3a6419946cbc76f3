"""Operations of several statements on the connections of a worker process.

Runs in the API's workers. Each statement borrows a connection for itself, so that a change of thousands of jobs holds
none for long. Promises: an error after the first of several changes is never told as "nothing was changed": it
becomes :class:`OutcomeUnknown`, which says how far it came.
"""

from typing import TypeVar

from aqd import store
from aqd.api.pool import Pool
from aqd.errors import DatabaseUnavailable, Locked, OutcomeUnknown

T = TypeVar("T")


def operate(pool: Pool, steps: store.Steps[T]) -> T:
    """Run an operation of :mod:`aqd.store.change`."""
    changed = 0

    def run_one(step: store.Step) -> list[tuple[object, ...]]:
        nonlocal changed
        use = pool.write if step.changes else pool.read
        try:
            rows = use(lambda conn: store.run_step(conn, step))
        except (DatabaseUnavailable, Locked) as error:
            if not changed:
                raise
            raise OutcomeUnknown(
                f"{error}; before that {changed} had been changed and stay so: asking again changes the others"
            ) from error
        changed += len(rows) if step.changes else 0
        return rows

    return store.drive_by(steps, run_one)
