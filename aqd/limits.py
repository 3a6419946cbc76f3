"""When a running job must be ended: pure decisions over a worker's page and a clock.

Run by the master, so that limits hold while the dispatcher is dead or waits for the database. The master
asks :func:`review` for every worker a few times a second, carries out what it says, and before a hard kill
looks at the page once more with the worker stopped (:func:`aqd.process.while_stopped`).

Two steps: the soft one raises an exception in the handler's main thread and is repeated, because loops that
catch everything swallow it; the hard one comes ``grace_s`` later. A lost lease has one step only: the worker
must be gone *before* somebody else may start the job, so it is killed ``grace_s`` before its lease could end.
"""

from dataclasses import dataclass

from aqd.page import Page, StopReason

# How often the soft step is repeated during the grace.
REPEAT_NS = 250_000_000


@dataclass(slots=True)
class Stop:
    """An end that is under way, for entry ``number`` only."""

    number: int
    reason: StopReason
    since_ns: int
    repeated_ns: int


@dataclass(frozen=True, slots=True)
class Soft:
    """Raise the exception in the handler (again)."""

    number: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Hard:
    """Kill the worker if it is still on this entry."""

    number: int
    reason: StopReason


def reason_to_stop(page: Page, number: int, now_ns: int, grace_ns: int, *, stop_all: bool) -> StopReason:
    """Why entry ``number``, on which the worker is, must end; :data:`StopReason.NONE` to let it run."""
    lease_until = page.lease_until_ns
    if lease_until and now_ns >= lease_until - grace_ns:
        return StopReason.FENCE
    limit = page.entry(number).limit_ns
    if limit and now_ns >= page.started_at_ns + limit and not page.returned(number):
        return StopReason.TIMEOUT
    return StopReason.DRAIN if stop_all else StopReason.NONE


def review(
    page: Page, stop: Stop | None, now_ns: int, grace_ns: int, *, stop_all: bool
) -> tuple[Stop | None, Soft | Hard | None]:
    """What to do with the job that this worker is on: (the stop under way afterwards, the step to take)."""
    number = page.current()
    if number < 0:
        return None, None
    if stop is not None and stop.number != number:
        stop = None
    reason = reason_to_stop(page, number, now_ns, grace_ns, stop_all=stop_all)
    if reason is StopReason.FENCE:
        return Stop(number, reason, now_ns, now_ns), Hard(number, reason)
    if stop is None:
        if reason is StopReason.NONE:
            return None, None
        return Stop(number, reason, now_ns, now_ns), Soft(number, reason)
    if now_ns >= stop.since_ns + grace_ns:
        return stop, Hard(number, stop.reason)
    if now_ns >= stop.repeated_ns + REPEAT_NS:
        stop.repeated_ns = now_ns
        return stop, Soft(number, stop.reason)
    return stop, None
