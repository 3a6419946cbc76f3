"""What becomes of each error of PostgreSQL: by SQLSTATE, in a dispatcher's session and in the API."""

import socket
from types import SimpleNamespace

import psycopg
import pytest

from aqd import database
from aqd.api import pool
from aqd.config import Database
from aqd.errors import DatabaseUnavailable, Locked, SchemaMismatch
from aqd.sessions import RELAPSE_S, Session
from tests.fixtures.postgres import free_port

# SQLSTATE, is the connection replaced, what the API makes of it on a connection that lives (None: a bug, 500).
STATES = [
    ("08000", True, None),  # connection_exception
    ("08003", True, None),  # connection_does_not_exist
    ("08006", True, None),  # connection_failure
    ("08P01", True, None),  # protocol_violation
    ("0A000", True, None),  # feature_not_supported: "cached plan must not change result type"
    ("22P02", False, None),  # invalid_text_representation
    ("23505", False, None),  # unique_violation
    ("23514", False, None),  # check_violation
    ("25006", True, None),  # read_only_sql_transaction
    ("25P02", False, DatabaseUnavailable),  # in_failed_sql_transaction
    ("25P03", True, None),  # idle_in_transaction_session_timeout
    ("25P04", True, None),  # transaction_timeout
    ("26000", True, None),  # invalid_sql_statement_name: a prepared statement has vanished
    ("28P01", False, None),  # invalid_password: only while connecting
    ("3D000", False, None),  # invalid_catalog_name: only while connecting
    ("3F000", False, SchemaMismatch),  # invalid_schema_name
    ("40001", False, DatabaseUnavailable),  # serialization_failure
    ("40P01", False, DatabaseUnavailable),  # deadlock_detected
    ("42501", False, DatabaseUnavailable),  # insufficient_privilege
    ("42601", False, None),  # syntax_error
    ("42703", False, SchemaMismatch),  # undefined_column
    ("42883", False, SchemaMismatch),  # undefined_function
    ("42P01", False, SchemaMismatch),  # undefined_table
    ("42P05", True, None),  # duplicate_prepared_statement
    ("53000", False, DatabaseUnavailable),  # insufficient_resources
    ("53100", False, DatabaseUnavailable),  # disk_full
    ("53200", False, DatabaseUnavailable),  # out_of_memory
    ("53300", False, DatabaseUnavailable),  # too_many_connections: only while connecting
    ("55P03", False, Locked),  # lock_not_available
    ("57014", False, DatabaseUnavailable),  # query_canceled: statement_timeout
    ("57P01", True, DatabaseUnavailable),  # admin_shutdown
    ("57P02", True, DatabaseUnavailable),  # crash_shutdown
    ("57P03", True, DatabaseUnavailable),  # cannot_connect_now
    ("57P04", True, DatabaseUnavailable),  # database_dropped
    ("57P05", True, DatabaseUnavailable),  # idle_session_timeout
    ("58000", False, DatabaseUnavailable),  # system_error
    ("58030", False, DatabaseUnavailable),  # io_error
    ("XX000", False, DatabaseUnavailable),  # internal_error
    ("XX001", False, DatabaseUnavailable),  # data_corrupted
    ("XX002", False, DatabaseUnavailable),  # index_corrupted
]
ALIVE = SimpleNamespace(closed=False, broken=False)


def error_of(state: str) -> psycopg.Error:
    try:
        return psycopg.errors.lookup(state)("text")
    except KeyError:  # newer than this psycopg
        return type("Newer", (psycopg.OperationalError,), {"sqlstate": state})("text")


@pytest.mark.parametrize(("state", "replaced", "_"), STATES)
def test_whether_the_connection_is_replaced(state, replaced, _):
    assert database.is_disconnect(error_of(state), ALIVE) is replaced
    assert database.is_disconnect(error_of(state), SimpleNamespace(closed=False, broken=True))


@pytest.mark.parametrize(("state", "replaced", "kind"), STATES)
def test_what_the_api_answers(state, replaced, kind):
    error = error_of(state)
    assert type(pool._translated(error)) is (kind or type(error))


def test_errors_without_a_state():
    assert database.is_disconnect(psycopg.OperationalError("server closed the connection"), ALIVE)
    assert database.is_disconnect(psycopg.InterfaceError("the connection is closed"), ALIVE)
    assert not database.is_disconnect(psycopg.ProgrammingError("ours"), ALIVE)


# --- pauses ----------------------------------------------------------------------------------------


class Connections:
    """Instead of a database: connections that can be made, and a clock."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.made = 0
        self.sockets = socket.socketpair()  # those that are cut
        self.log = []
        monkeypatch.setattr("aqd.sessions.database.connect", self.connect)
        monkeypatch.setattr("aqd.sessions.boottime", lambda: self.now)

    def connect(self, *_args, **_options):
        self.made += 1
        return SimpleNamespace(
            closed=False,
            broken=False,
            close=lambda: None,
            pgconn=SimpleNamespace(socket=self.sockets[0].fileno(), parameter_status=lambda _: None),
        )

    def session(self):
        session = Session(Database(url=f"postgresql://127.0.0.1:{free_port()}/x"), "test")
        session._log = SimpleNamespace(
            **{name: lambda event, **_: self.log.append(event) for name in ("info", "warning", "error")}
        )
        return session


@pytest.fixture
def world(monkeypatch):
    made = Connections(monkeypatch)
    yield made
    for each in made.sockets:
        each.close()


def break_down(_conn):
    raise psycopg.errors.ReadOnlySqlTransaction("cannot execute in a read-only transaction")


def test_connections_that_serve_nothing_are_made_less_and_less_often(world):
    """A server that takes connections and refuses to write: neither a spin nor a flood."""
    session = world.session()
    pauses = []
    for _ in range(12):
        with pytest.raises(psycopg.Error):
            session.run(break_down)
        pauses.append(session.pause_s())
        session.run(lambda _: None)  # the connection comes back each time
        assert session.pause_s() == 0.0
    assert pauses[-1] > 2.0
    assert len(world.log) <= 3


def test_one_that_has_lasted_starts_anew(world):
    session = world.session()
    for _ in range(3):
        for _ in range(4):
            with pytest.raises(psycopg.Error):
                session.run(break_down)
        session.run(lambda _: None)
        world.now += RELAPSE_S
        session.run(lambda _: None)
        with pytest.raises(psycopg.Error):
            session.run(break_down)
        assert session.pause_s() <= 0.2
    assert world.log.count("database is back") >= 3


def test_an_idle_one_that_has_lasted_starts_anew(world):
    session = world.session()
    for _ in range(6):
        with pytest.raises(psycopg.Error):
            session.run(break_down)
    session.run(lambda _: None)
    world.now += 10 * RELAPSE_S  # nothing was asked meanwhile
    with pytest.raises(psycopg.Error):
        session.run(break_down)
    assert session.pause_s() <= 0.2


def test_only_the_first_connection_may_wait_for_a_migration(world):
    limits = []
    session = world.session()
    session._prepare = lambda _: limits.append(session._deadline - world.now)
    for _ in range(2):
        with pytest.raises(psycopg.Error):
            session.run(break_down)
    assert limits[0] > 100
    assert limits[1] < 20
