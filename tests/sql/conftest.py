"""Connections of the kinds that aqd uses, for the tests of the SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aqd import database, store
from aqd.config import Database
from tests.sql.support import Queue

Connect = Callable[..., database.Connection]


@pytest.fixture
def connect(database_url: str) -> Iterator[Connect]:
    """``connect(dispatcher=True, notify=True, prepare=True)``: a further connection to the test's database."""
    made: list[database.Connection] = []

    def make(*, dispatcher: bool = True, notify: bool = True, prepare: bool = True) -> database.Connection:
        cfg = Database(url=database_url, notify=notify, prepare=prepare)
        made.append(store.connect(cfg, "test", dispatcher=dispatcher))
        return made[-1]

    yield make
    for conn in made:
        conn.close()


@pytest.fixture
def conn(connect: Connect) -> database.Connection:
    """A connection as the dispatcher makes it."""
    return connect()


@pytest.fixture
def queue(connect: Connect) -> Queue:
    return Queue(connect(dispatcher=False))
