"""Connecting to a database that does not answer."""

import gc
import os
import socket

import psycopg
import pytest

from aqd import config, database


@pytest.fixture
def no_collector():
    """As in a process that is idle: the collector of garbage does not come by."""
    gc.disable()
    yield
    gc.enable()


def test_a_connection_that_was_given_up_leaves_no_socket(no_collector: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://somebody@127.0.0.1:{silent.getsockname()[1]}/x"
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(psycopg.OperationalError):
            database.connect(config.Database(url=url, connect_timeout_s=2.0), "test")
        assert len(os.listdir("/proc/self/fd")) == before
