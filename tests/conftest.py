"""Loads the fixtures of ``tests/fixtures``. Nothing else belongs here."""

pytest_plugins = [
    "tests.fixtures.postgres",
    "tests.fixtures.jobs",
    "tests.fixtures.daemon",
    "tests.fixtures.examples",
]
