"""When a running job must be ended: pure decisions over a worker's page and a clock.

Run by the master, so that limits hold while the dispatcher is dead or waits for the database. The master
asks :func:`review` for every worker a few times a second, carries out what it says, and before a hard kill
looks at the page once more with the worker stopped (:func:`aqd.process.while_stopped`).

Two steps: the soft one raises an exception in the handler's main thread and is repeated, because loops that
catch everything swallow it; the hard one comes ``grace_s`` later, and shortly before it the worker is asked
for its stacks, so that the record says where it hung. A lost lease has one step only: the worker must be gone
*before* somebody else may start the job, so it is killed ``grace_s`` before its lease could end. Too much
memory has one step, too: a job that allocates 1 GiB/s would not wait (:mod:`aqd.memory` measures it).

:func:`next_look` says when :func:`review` has something to say without anything having happened.
"""

from collections.abc import Container
from dataclasses import dataclass

from aqd.page import ENTRIES, Page, StopReason

# How often the soft step is repeated during the grace.
REPEAT_NS = 250_000_000
# So long before the hard step the stacks are asked for: writing them takes a few milliseconds.
DUMP_NS = 150_000_000


@dataclass(slots=True)
class Stop:
    """An end that is under way, for entry ``number`` only."""

    number: int
    reason: StopReason
    since_ns: int
    repeated_ns: int
    dumped: bool = False


@dataclass(frozen=True, slots=True)
class Soft:
    """Raise the exception in the handler (again)."""

    number: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Dump:
    """Let the worker write down where it is, if it is still on this entry: it will be killed."""

    number: int


@dataclass(frozen=True, slots=True)
class Hard:
    """Kill the worker if it is still on this entry."""

    number: int
    reason: StopReason


def reason_to_stop(
    page: Page,
    number: int,
    now_ns: int,
    grace_ns: int,
    *,
    stop_all: bool,
    cancelled: Container[int] = (),
) -> StopReason:
    """Why entry ``number``, on which the worker is, must end; :data:`StopReason.NONE` to let it run."""
    lease_until = page.lease_until_ns
    if lease_until and now_ns >= lease_until - grace_ns:
        return StopReason.FENCE
    limit = page.entry(number).limit_ns
    if limit and now_ns >= page.started_at_ns + limit and not page.returned(number):
        return StopReason.TIMEOUT
    if number in cancelled and not page.returned(number):
        return StopReason.CANCEL
    return StopReason.DRAIN if stop_all else StopReason.NONE


def review(
    page: Page,
    stop: Stop | None,
    now_ns: int,
    grace_ns: int,
    *,
    stop_all: bool,
    cancelled: Container[int] = (),
) -> tuple[Stop | None, Soft | Dump | Hard | None]:
    """What to do with the job that this worker is on: (the stop under way afterwards, the step to take).

    ``cancelled``: the numbers of entries that somebody wants ended.
    """
    number = page.current()
    if number < 0:
        return None, None
    if stop is not None and stop.number != number:
        stop = None
    reason = reason_to_stop(page, number, now_ns, grace_ns, stop_all=stop_all, cancelled=cancelled)
    if reason is StopReason.FENCE:
        return Stop(number, reason, now_ns, now_ns), Hard(number, reason)
    if stop is None:
        if reason is StopReason.NONE:
            return None, None
        return Stop(number, reason, now_ns, now_ns), Soft(number, reason)
    if now_ns >= stop.since_ns + grace_ns:
        return stop, Hard(number, stop.reason)
    if now_ns >= _dump_at(stop, grace_ns) and not stop.dumped:
        stop.dumped = True
        return stop, Dump(number)
    if now_ns >= stop.repeated_ns + REPEAT_NS:
        stop.repeated_ns = now_ns
        return stop, Soft(number, stop.reason)
    return stop, None


def _dump_at(stop: Stop, grace_ns: int) -> int:
    # Not together with the first soft step, whatever the grace: the stacks would be those of its handling.
    return stop.since_ns + max(grace_ns - DUMP_NS, grace_ns // 2)


def next_look(page: Page, stop: Stop | None, grace_ns: int) -> int | None:
    """The next moment at which :func:`review` may answer something else, if nothing happens until then."""
    number = page.current()
    if number < 0:
        return None
    if stop is not None and stop.number == number:
        hard = stop.since_ns + grace_ns
        return min(hard, _dump_at(stop, grace_ns)) if not stop.dumped else hard
    limit = page.entry(number).limit_ns
    return page.started_at_ns + limit if limit and not page.returned(number) else None


def memory_limit_kb(page: Page) -> int:
    """The smallest memory limit of all entries that the worker is on or may come to, 0 if there is none."""
    last = page.written
    limits = [
        entry.memory_kb
        for entry in page.entries(max(page.finished, last - ENTRIES), last)
        if entry.memory_kb and not page.skipped(entry.number)
    ]
    return min(limits, default=0)
