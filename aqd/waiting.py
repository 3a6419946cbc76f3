"""Waiting until jobs have ended: when to announce, to look and to listen.

Used by the API's waiters (:mod:`aqd.api.waiters`), the client and the command line. :class:`Rhythm` is pure: a
clock in, moments out. :class:`Ear` takes the notifications of one channel off a connection and leaves all others
to whom they are meant for. :func:`watch` and :func:`watch_async` put the two together on the caller's connection.

Promises: a job that has ended is noticed by its notification, within milliseconds; without one (lost, switched off,
swallowed by a pooler, not announced because the role only reads, ended by a node of the version before or by a
rescue) by the next look, within
:data:`LOOK_S`. Between looks nothing is asked of the database.

How it fails: errors of psycopg pass through; :class:`NotEnded` when the time is over.
"""

import asyncio
import contextlib
import math
import os
import select
import time
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from psycopg.pq import PGnotify, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import tuple_row

from aqd import job, statements, store
from aqd.database import AqdConnection, Connection, int_array, is_pooled, run
from aqd.errors import InputError, NotEnded, NotFoundError
from aqd.job import State
from aqd.store import JobRow
from aqd.store.wait import ANNOUNCED_S, CHANNEL, REFUSED

ENDED: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})

ANNOUNCE_S: Final = 5.0
# Between two looks, with notifications and where there are none.
LOOK_S: Final = 2.0
LOOK_DEAF_S: Final = 1.0
# Whoever was recording when nobody waited yet has not heard of us: looks soon after the announcement find that.
FIRST_LOOK_S: Final = 0.05

LISTEN: Final = f"listen {CHANNEL}"
UNLISTEN: Final = f"unlisten {CHANNEL}"


class Rhythm:
    """When to announce that somebody waits, and when to look; moments and ``now`` by one monotonic clock, seconds.

    ``deaf``: there are no notifications, so nothing is announced and looks are more frequent.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self._longest_s = LOOK_DEAF_S if deaf else LOOK_S
        self._pause_s = self._longest_s
        self._deaf = deaf
        self._known_until = -math.inf
        self.announce_at = math.inf if deaf else -math.inf
        self.look_at = -math.inf

    def announced(self, now: float) -> None:
        """It was announced; look next."""
        if now >= self._known_until:
            self._pause_s = FIRST_LOOK_S
            self.look_at = now
        self._known_until = now + ANNOUNCED_S
        self.announce_at = now + ANNOUNCE_S

    def refused(self) -> None:
        """It may not be announced: deaf from now on."""
        self._longest_s = self._pause_s = LOOK_DEAF_S
        self.announce_at = math.inf

    def looked(self, now: float) -> None:
        """All jobs were looked at."""
        self.look_at = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)

    @property
    def next_at(self) -> float:
        """When something is due."""
        return min(self.announce_at, self.look_at)


class Ear:
    """Hears which jobs have ended, on a connection that listens: a set of ids, ``heard``, that its user empties.

    A connection may be listening to other channels, or to this one (``shared``), for its owner: those notifications
    go where psycopg would have taken them, to the owner's handlers or to his next ``notifies()``.
    """

    def __init__(self, pgconn: PGconn, *, shared: bool = False) -> None:
        self.heard: set[int] = set()
        self._pgconn = pgconn
        self._shared = shared
        self._owner = pgconn.notify_handler

    def attach(self) -> None:
        """Hear from now on."""
        self._pgconn.notify_handler = self._hear

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pgconn.notify_handler = self._owner

    def read(self) -> None:
        """Take what has arrived. (What arrives during a statement is taken by psycopg, and handed over.)"""
        self._pgconn.consume_input()
        while (notify := self._pgconn.notifies()) is not None:
            self._hear(notify)

    def _hear(self, notify: PGnotify) -> None:
        if ours := notify.relname == CHANNEL.encode():
            # Anybody may notify: what is not a list of ids says nothing.
            words = notify.extra.split(b",")
            self.heard.update(int(word) for word in words if word.isdigit() and len(word) < 20)
        if self._owner is not None and (self._shared or not ours):
            self._owner(notify)


def check_timeout(timeout_s: float | None) -> float:
    """Seconds, infinite for None; :class:`InputError` for anything that is no time."""
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise InputError("timeout_s", "must be a number of seconds, 0 or more, or None for ever", "0..")
    return float(timeout_s)


def wait(conn: Connection, id: int | str, timeout_s: float | None = None) -> JobRow:
    """Wait until a job has ended, COMPLETED, FAILED or CANCELLED, and return it as it is then.

    ``conn`` is a psycopg connection in autocommit mode (:class:`InputError` where it is not, or is in a
    transaction). It is used for that long, listens to the channel ``aqd_ended`` and stops listening afterwards;
    notifications of other channels go to its own handlers, or to its next ``notifies()``, as always.

    :class:`NotEnded`, which is a ``TimeoutError``, after ``timeout_s`` seconds (None: never; 0: a look);
    :class:`NotFoundError` if there is no such job, or no longer.
    """
    number = job.parse_id(str(id))
    until = time.monotonic() + check_timeout(timeout_s)
    while True:
        with contextlib.closing(watch(conn, [number], timeout_s, until)) as ended:
            next(ended)
        row = store.get_job(conn, number)
        if row is None:
            raise NotFoundError(f"there is no job {number}")
        if row.state in ENDED:  # else somebody has retried it meanwhile
            return row


async def wait_async(
    conn: psycopg.AsyncConnection[Any], id: int | str, timeout_s: float | None = None
) -> JobRow:
    """As :func:`wait`, on an asynchronous connection."""
    number = job.parse_id(str(id))
    until = time.monotonic() + check_timeout(timeout_s)
    while True:
        async with contextlib.aclosing(watch_async(conn, [number], timeout_s, until)) as ended:
            await anext(ended)
        rows = await _run_async(conn, "get_job_live", str(number)) or await _run_async(
            conn, "get_job_finished", str(number), None
        )
        if not rows:
            raise NotFoundError(f"there is no job {number}")
        row = JobRow._make(rows[0])
        if row.state in ENDED:
            return row


def watch(
    conn: Connection, ids: list[int], timeout_s: float | None = None, until: float | None = None
) -> Generator[int, None, None]:
    """The ids of these jobs, each when it has ended or is found not to exist.

    ``conn`` must be in autocommit mode and outside of a transaction, which would not see what others commit.
    Raises :class:`InputError` where it is not, and :class:`NotEnded` if some have not ended after ``timeout_s``,
    or at the moment ``until`` (monotonic) where waiting has begun before.
    """
    until = time.monotonic() + check_timeout(timeout_s) if until is None else until
    _check_connection(conn)
    left = set(ids)
    shared, pooled = run(conn, "is_listening", pid=conn.info.backend_pid)[0]
    deaf = is_pooled(conn) if isinstance(conn, AqdConnection) else pooled
    with Ear(conn.pgconn, shared=shared) as ear:
        try:
            if not deaf:
                conn.execute(LISTEN)
            rhythm = Rhythm(deaf=deaf)
            while True:
                now = time.monotonic()
                if now >= rhythm.announce_at:
                    if store.announce_wait(conn):
                        rhythm.announced(now)
                    else:
                        rhythm.refused()
                if ear.heard & left or now >= rhythm.look_at:
                    ended = store.find_ended(conn, left)
                    rhythm.looked(now)
                    ear.heard.clear()
                    left.difference_update(ended)
                    yield from ended
                if not left:
                    return
                if now >= until:
                    raise _not_ended(left, timeout_s)
                pause_s = min(rhythm.next_at, until) - time.monotonic()
                if not ear.heard & left and pause_s > 0:
                    poll = select.poll()
                    poll.register(conn.pgconn.socket, select.POLLIN)
                    if poll.poll(pause_s * 1000):
                        with conn.lock:  # another thread may be using it
                            ear.read()
        finally:
            if not (shared or deaf or conn.closed):
                with contextlib.suppress(psycopg.Error):
                    conn.execute(UNLISTEN)


async def watch_async(
    conn: psycopg.AsyncConnection[Any],
    ids: list[int],
    timeout_s: float | None = None,
    until: float | None = None,
) -> AsyncGenerator[int, None]:
    """As :func:`watch`, on an asynchronous connection."""
    until = time.monotonic() + check_timeout(timeout_s) if until is None else until
    _check_connection(conn)
    left = set(ids)
    shared, deaf = (await _run_async(conn, "is_listening", str(conn.info.backend_pid)))[0]
    with Ear(conn.pgconn, shared=shared) as ear:
        try:
            if not deaf:
                await conn.execute(LISTEN)
            rhythm = Rhythm(deaf=deaf)
            while True:
                now = time.monotonic()
                if now >= rhythm.announce_at:
                    try:
                        await _run_async(conn, "announce_wait", ANNOUNCED_S)
                        rhythm.announced(now)
                    except REFUSED:
                        rhythm.refused()
                if ear.heard & left or now >= rhythm.look_at:
                    ended = [row[0] for row in await _run_async(conn, "find_ended", int_array(left))]
                    rhythm.looked(now)
                    ear.heard.clear()
                    left.difference_update(ended)
                    for id in ended:
                        yield id
                if not left:
                    return
                if now >= until:
                    raise _not_ended(left, timeout_s)
                pause_s = min(rhythm.next_at, until) - time.monotonic()
                if not ear.heard & left and pause_s > 0 and await _readable(conn.pgconn.socket, pause_s):
                    async with conn.lock:
                        ear.read()
        finally:
            if not (shared or deaf or conn.closed):
                with contextlib.suppress(psycopg.Error):
                    await conn.execute(UNLISTEN)


async def _readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read, within that time."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    # A descriptor of our own: a loop has one reader for each, and another task may be using the connection.
    fd = os.dup(fd)
    try:
        loop.add_reader(fd, ready.set)
        await asyncio.wait_for(ready.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return True


async def _run_async(
    conn: psycopg.AsyncConnection[Any], name: str, *arguments: object
) -> list[tuple[Any, ...]]:
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(statements.get(name).text, arguments or None, binary=True)
        return await cursor.fetchall()


def _check_connection(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """LISTEN begins with a commit, and a transaction may have a snapshot that shows no end of anything."""
    if not conn.autocommit:
        raise InputError(
            "conn", "must be in autocommit mode to wait on: in a transaction the end of a job is not seen"
        )
    # ACTIVE is no transaction: another thread or task is using the connection.
    if conn.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        raise InputError("conn", "is inside a transaction, in which the end of a job is not seen")


def _not_ended(left: set[int], timeout_s: float | None) -> NotEnded:
    ids = tuple(sorted(left))
    some = ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
    verb = "has" if len(ids) == 1 else "have"
    return NotEnded(f"job{'' if len(ids) == 1 else 's'} {some} {verb} not ended after {timeout_s:g} s", ids)
