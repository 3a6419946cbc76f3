"""A dispatcher's session while its server is taken out of service and put back."""

from __future__ import annotations

import errno
import os
import socket

import psycopg
import pytest
from psycopg import conninfo

from aqd import database
from aqd.config import Database
from aqd.sessions import Session


def turn(conn: database.Connection, to: str) -> None:
    conn.execute(f"set default_transaction_read_only = {to}".encode())


def test_every_turn_to_read_only_is_noticed(database_url: str) -> None:
    """Also by a connection that was made while it was read-only."""
    read_only = "-c default_transaction_read_only=on"
    url = conninfo.make_conninfo(database_url, target_session_attrs="any", options=read_only)
    session = Session(Database(url=url), "test")
    session.run(turn, "on")
    first = session.connection
    assert first is not None, "a role may be one that only reads"
    session.run(turn, "off")
    assert session.connection is first
    session.run(turn, "on")
    assert session.connection is None
    assert "read-only" in session.error


def test_a_cut_meets_its_own_connection_only(database_url: str) -> None:
    """libpq closes what is lost by itself, in the session's thread, and whoever opens something next is given the number."""
    session = Session(Database(url=database_url), "test")

    def lose_and_cut(conn: database.Connection) -> None:
        number = conn.pgconn.socket
        own = os.dup(number)
        innocent, other_end = socket.socketpair()
        os.dup2(innocent.fileno(), number)
        session.cut()
        other_end.setblocking(False)
        with pytest.raises(BlockingIOError):
            other_end.recv(1)
        os.dup2(own, number)
        with socket.socket(fileno=own) as mine:
            assert mine.recv(1) == b""
        innocent.close()
        other_end.close()

    session.run(lose_and_cut)
    session.close()


def test_without_a_descriptor_there_is_no_connection(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection itself could not be made: an error of the database's, and the next attempt may do."""
    session = Session(Database(url=database_url), "test")

    def none_left(_fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", none_left)
        with pytest.raises(psycopg.OperationalError, match="Too many open files"):
            session.run(lambda _: None)
    assert "Too many open files" in session.error
    assert session.run(lambda conn: conn.execute("select 1").fetchone()) == (1,)
    session.close()
