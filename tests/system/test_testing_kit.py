"""``aqd.testing`` as its users have it: a project of their own, with pytest run over it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from aqd.errors import WorldError
from tests.fixtures.postgres import Postgres, local_binaries

ROOT = Path(__file__).parents[2]
PROJECT = {
    "pytest.ini": """
        [pytest]
        aqd_plugins = plugins
    """,
    "conftest.py": """
        import os
        import pathlib
        pytest_plugins = ["aqd.testing.fixtures"]
        pathlib.Path("pid").write_text(str(os.getpid()))
    """,
    "plugins/greet.py": """
        import aqd

        @aqd.hookimpl
        def aqd_register(handlers):
            word = handlers.settings("greet").get("word", "Hello")

            @handlers.handler("greet", queue="mail", max_attempts=2)
            def greet(payload, job):
                if not payload["name"].isalpha():
                    raise aqd.Discard("not a name")
                if payload["name"] == "Twice" and job.attempt == 1:
                    raise ConnectionError("the mail server is away")
                return f"{word} {payload['name']}"
    """,
    "shop.py": """
        from aqd import client

        def order(conn, name):
            conn.execute("create table if not exists orders (name text)")
            conn.execute("insert into orders values (%s)", [name])
            client.enqueue(conn, "greet", {"name": name}, tags=["order"])
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., str]:
    """Writes the project, runs pytest over it as ``run(tests, outcome)`` and gives what it said."""

    def run(tests: str, outcome: str, *arguments: str, **environment: str) -> str:
        for name, source in (PROJECT | {"test_shop.py": tests}).items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments],
            cwd=tmp_path,
            env=inherited | {"PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        said = done.stdout + done.stderr
        assert re.search(rf"=+ {outcome} in [0-9.]+s", said), said
        return said

    return run


GOOD = """
    import psycopg
    import pytest
    import shop
    from aqd.config import Config, Plugins
    from aqd.testing import run_handler

    def test_a_handler():
        assert run_handler("greet", {"name": "Ada"}, plugin="plugins/greet.py").result == "Hello Ada"
        assert run_handler("greet", {"name": "4"}, plugin="plugins/greet.py").kind == "discarded"

    def test_the_queue(aqd_queue):
        job = aqd_queue.enqueue("greet", {"name": "Twice"})
        assert len(aqd_queue.drain().retried) == 1
        aqd_queue.drain(retries=True)
        aqd_queue.travel(3600)
        aqd_queue.drain().assert_completed()
        assert aqd_queue.assert_completed(job.id) == "Hello Twice"

    def test_committed(aqd_queue):
        with psycopg.connect(aqd_queue.url) as conn:
            shop.order(conn, "Ada")
        aqd_queue.assert_enqueued("greet", {"name": "Ada"}, tag="order", count=1)
        aqd_queue.drain().assert_completed()

    def test_rolled_back(aqd_queue):
        with psycopg.connect(aqd_queue.url) as conn:
            shop.order(conn, "Ada")
            aqd_queue.on(conn).drain().assert_completed()
            conn.rollback()
        aqd_queue.assert_not_enqueued()

    urls = set()
    kept = []

    @pytest.mark.parametrize("number", range(3))
    def test_a_database_is_the_tests_own(aqd_queue, number):
        aqd_queue.enqueue("greet")
        assert len(aqd_queue.jobs()) == 1
        assert aqd_queue.url not in urls
        urls.add(aqd_queue.url)
        kept.append(psycopg.connect(aqd_queue.url))  # an application's pool is no hindrance

    class TestSettings:
        @pytest.fixture
        def aqd_config(self):
            return Config(plugins=Plugins(settings={"greet": {"word": "Ahoy"}}))

        def test_settings(self, aqd_queue):
            job = aqd_queue.enqueue("greet", {"name": "Ada"})
            aqd_queue.drain()
            assert aqd_queue.assert_completed(job.id) == "Ahoy Ada"
"""


def test_a_project_on_a_server_that_is_there(
    project: Callable[..., str], pg: Postgres, tmp_path: Path
) -> None:
    project(GOOD, "8 passed", AQD_TEST_DATABASE_URL=pg.admin_url)
    beginning = f"aqd_test_{(tmp_path / 'pid').read_text()}_"
    with pg.connect() as conn:
        all_there_are = "select datname from pg_database where starts_with(datname, %s)"
        left = conn.execute(all_there_are, [beginning]).fetchall()
    assert left == []


def test_a_project_with_a_server_of_its_own(project: Callable[..., str], open_dir: Path) -> None:
    try:
        binaries = local_binaries()
    except WorldError as error:
        pytest.skip(f"needs PostgreSQL's binaries: {error}")
    said = project(
        """
        def test_server(aqd_server, aqd_queue):
            print(aqd_server.source, aqd_queue.conn.execute("show fsync").fetchone())
            aqd_queue.enqueue("greet", {"name": "Ada"})
            aqd_queue.drain().assert_completed()
        """,
        "1 passed",
        "-s",
        TMPDIR=str(open_dir),
        AQD_TEST_DATABASE_URL="",
        AQD_TEST_POSTGRES_BIN=str(binaries.directory),
    )
    assert f"PostgreSQL {binaries.version}" in said
    assert "('off',)" in said
    assert list(open_dir.iterdir()) == []  # no server and no data are left


def test_what_is_wrong_is_said(project: Callable[..., str], pg: Postgres) -> None:
    said = project(
        """
        def test_traceback(aqd_queue):
            aqd_queue.enqueue("greet", {"name": None})
            aqd_queue.drain().assert_completed()

        def test_type(aqd_queue):
            aqd_queue.enqueue("gret", {"name": "Ada"})
            aqd_queue.drain()

        def test_payload(aqd_queue):
            aqd_queue.enqueue("greet", {"name": "Ada"})
            aqd_queue.assert_enqueued("greet", {"name": "Bob"})
        """,
        "3 failed",
        AQD_TEST_DATABASE_URL=pg.admin_url,
    )
    assert "AttributeError: 'NoneType' object has no attribute 'isalpha'" in said
    assert "greet.py" in said
    assert "due jobs of types that no plugin serves: gret (1); served are: greet" in said
    assert re.search(r"found 0; there are:\nE +1 greet QUEUED {\"name\": \"Ada\"}", said)


def test_no_server_is_an_error_that_says_what_to_do(project: Callable[..., str]) -> None:
    said = project(
        "def test_server(aqd_queue): pass\ndef test_nothing(): pass",
        "1 passed, 1 error",
        AQD_TEST_DATABASE_URL="postgresql://nobody@127.0.0.1:1/nothing",
    )
    assert "AQD_TEST_DATABASE_URL:" in said


def test_pytest_does_not_import_aqd_because_it_is_installed() -> None:
    """A suite asks for the fixtures itself; see the header of aqd.testing.fixtures."""
    assert [point.value for point in entry_points(group="pytest11") if point.value.startswith("aqd")] == []
