"""Fixtures of tests/system: machines (see machine.py and software.py, whose headers are the manual).

``boot(release, **options)`` gives a running machine until the end of the test, ``module_boot`` until the end of
the module (a boot takes seconds: share it); ``boot_aqd(release, **options)``, also for the module, one with aqd in
it. All skip where no machine can be booted.

``engine`` is a container engine with aqd's image (see engine.py); it skips where none can be started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.system import engine as engines
from tests.system import machine, software


def _factory() -> Iterator[Callable[..., machine.Machine]]:
    if reason := machine.unavailable():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def boot(release: str = "bookworm", **options: Any) -> machine.Machine:
            return stack.enter_context(machine.Machine(release, **options))

        yield boot


boot = pytest.fixture(name="boot")(_factory)
module_boot = pytest.fixture(name="module_boot", scope="module")(_factory)


@pytest.fixture(scope="module")
def boot_aqd(module_boot: Callable[..., machine.Machine]) -> Callable[..., machine.Machine]:
    def boot(release: str = "bookworm", **options: Any) -> machine.Machine:
        binds = {**software.binds(release), **options.pop("binds", {})}
        made = module_boot(release, binds=binds, **options)
        software.install(made)
        return made

    return boot


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    if reason := engines.unavailable():
        pytest.skip(reason)
    with engines.shared() as running:
        yield running
