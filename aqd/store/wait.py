"""Waiting for jobs to end: announcing it, looking, telling.

Used by whoever waits (the API's waiters, the client, the command line) and by the recorder, which tells. The
protocol: who waits listens to :data:`CHANNEL`, then announces it for :data:`ANNOUNCED_S`, then looks, and does the
last two again and again (:mod:`aqd.waiting`). Who has ended jobs reads in the same statement whether somebody
waits, and only then tells, which costs a statement more.

How it fails: a notification that is lost costs the time until the next look.
"""

import contextlib
from collections.abc import Iterable
from typing import Final

import psycopg

from aqd.database import Connection, int_array, run

CHANNEL: Final = "aqd_ended"
ANNOUNCED_S: Final = 15.0


# Of a role that only reads, of a session or server that does not write: who waits can look, and no more.
REFUSED: Final = (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)


def announce_wait(conn: Connection) -> bool:
    """For :data:`ANNOUNCED_S` seconds whoever ends jobs tells. False: that is not allowed here."""
    try:
        run(conn, "announce_wait", for_s=ANNOUNCED_S)
    except REFUSED:
        return False
    return True


def find_ended(conn: Connection, ids: Iterable[int]) -> list[int]:
    """Which of these jobs have ended, or do not exist."""
    return [row[0] for row in run(conn, "find_ended", ids=int_array(ids))]


def tell_ended(conn: Connection, ids: Iterable[int]) -> None:
    """Tell whoever waits. Never fails: what happened is written down already, and who waits looks for himself."""
    with contextlib.suppress(psycopg.Error):
        run(conn, "tell_ended", ids=int_array(ids))
