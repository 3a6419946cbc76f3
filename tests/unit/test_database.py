"""Connecting: to a database that does not answer; what a URL's options say."""

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


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", {}),
        ("-c work_mem=5MB", {"work_mem": "5MB"}),
        ("-cwork_mem=5MB  --search-path=a,\\ b", {"work_mem": "5MB", "search_path": "a, b"}),
        ("-c a.b=x=y -c c=", {"a.b": "x=y", "c": ""}),
        (r"--x=a\\b", {"x": "a\\b"}),
        ("-B 100", {}),
    ],
)
def test_options_are_read_as_postgresql_reads_them(options: str, settings: dict[str, str]) -> None:
    assert database._settings_of(options) == settings
