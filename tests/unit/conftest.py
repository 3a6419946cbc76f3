"""Fixtures that several unit tests share."""

import logging
from collections.abc import Iterator

import pytest

from aqd import log


@pytest.fixture
def restored_log() -> Iterator[None]:
    """The log is state of the process: give it back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    log._dropped = 0
    log.context()  # a worker that ran in this process has left that of its last job
    yield
    log.context()
    log.configure("info", "human", process="aqd", stdlib=False)
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
