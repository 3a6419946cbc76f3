"""Slots reserved per queue on a node: how many more a queue's jobs may take. Pure.

Used by the dispatcher (giving) and its claimer (claiming). A *pool* is a queue with reserved slots, or all others
together (:data:`COMMON`). A pool may take a free slot unless it is one of those that the other pools' reservations
still have to come to. So a queue has its reserved slots whenever it wants them, and whatever is free beyond the
others' reservations; one slow queue cannot take them all.
"""

from collections.abc import Iterable, Mapping
from typing import Final

COMMON: Final = ""


class Shares:
    """``reserved``: slots by queue. Falsy when there is nothing to keep."""

    def __init__(self, reserved: Mapping[str, int]) -> None:
        self._reserved = {queue: slots for queue, slots in reserved.items() if slots}
        self.pools: tuple[str, ...] = (*self._reserved, COMMON)

    def __bool__(self) -> bool:
        return bool(self._reserved)

    def pool_of(self, queue: str) -> str:
        """The pool of a queue's jobs."""
        return queue if queue in self._reserved else COMMON

    def allowed(self, pool: str, idle: int, taken: Mapping[str, int]) -> int:
        """How many of ``idle`` slots the pool may take while the pools hold as many as ``taken`` says."""
        kept = sum(
            max(0, slots - taken.get(queue, 0)) for queue, slots in self._reserved.items() if queue != pool
        )
        return max(0, idle - kept)

    def count(self, queues: Iterable[str]) -> dict[str, int]:
        """Slots taken by pool, from the queue of each slot that is."""
        taken: dict[str, int] = {}
        for queue in queues:
            pool = self.pool_of(queue)
            taken[pool] = taken.get(pool, 0) + 1
        return taken
