"""pytest fixtures: a real database for each test, and a queue that is run to its end.

A test suite asks for them in its top ``conftest.py``::

    pytest_plugins = ["aqd.testing.fixtures"]

(or ``addopts = "-p aqd.testing.fixtures"``). They are no entry point of pytest's (``pytest11``), on purpose: that
would import aqd and psycopg (0.3 s) into every run of pytest in an environment that has aqd, whether it tests
handlers or not, and before coverage measures anything; what a suite uses should stand in the suite.

What they load: the option ``aqd_plugins`` of pytest's configuration (paths beside it, of files or folders), or the
fixture ``aqd_sources``, overridden; without either the plugins of ``aqd_config``. Everything is made only for the
tests that ask for it.

========================  =========  ===============================================================
fixture                   scope      gives
========================  =========  ===============================================================
``aqd_server``            session    :class:`aqd.testing.Server`; started at its first use
``aqd_database_url``      function   the URL of a new database with aqd's schema
``aqd_sources``           function   paths or modules of plugins; to be overridden
``aqd_config``            function   :class:`aqd.config.Config`, the built-in one; to be overridden
``aqd_plugins``           function   :class:`aqd.testing.LoadedPlugins`
``aqd_queue``             function   :class:`aqd.testing.Queue`
========================  =========  ===============================================================

Under pytest-xdist every process has a server of its own, unless ``AQD_TEST_DATABASE_URL`` names one for all.

Fails: a missing server or a refused plugin is an error of the fixture, with the reason.
"""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from aqd.config import Config
from aqd.testing.databases import Server, open_server
from aqd.testing.handlers import LoadedPlugins, Source, load_plugins
from aqd.testing.queue import Queue


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of pytest's configuration file."""
    parser.addini(
        "aqd_plugins", "plugin files, or folders of plugins, that aqd's fixtures load", type="paths"
    )


@pytest.fixture(scope="session")
def aqd_server() -> Iterator[Server]:
    """The PostgreSQL server of this run."""
    with open_server() as server:
        yield server


@pytest.fixture
def aqd_database_url(aqd_server: Server) -> Iterator[str]:
    """A new database with aqd's schema, dropped after the test."""
    url = aqd_server.create()
    yield url
    aqd_server.drop(url)


@pytest.fixture
def aqd_sources(pytestconfig: pytest.Config) -> Sequence[Source]:
    """What to load. Override it to name modules: ``return [myapp.jobs]``."""
    paths: list[Source] = list(pytestconfig.getini("aqd_plugins"))
    return paths


@pytest.fixture
def aqd_config() -> Config:
    """The daemon's configuration. Override it: ``return aqd.config.load("etc/aqd.toml", {})``."""
    return Config()


@pytest.fixture
def aqd_plugins(aqd_sources: Sequence[Source], aqd_config: Config) -> Iterator[LoadedPlugins]:
    """The plugins, loaded as a daemon does it."""
    with load_plugins(*aqd_sources, config=aqd_config) as loaded:
        yield loaded


@pytest.fixture
def aqd_queue(aqd_database_url: str, aqd_server: Server, aqd_plugins: LoadedPlugins) -> Iterator[Queue]:
    """A queue in the test's own database."""
    with contextlib.closing(aqd_server.connect(aqd_database_url)) as conn:
        yield Queue(conn, aqd_plugins, aqd_database_url)
