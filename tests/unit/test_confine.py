"""What a daemon with few rights may not promise to its handlers."""

from __future__ import annotations

import ctypes
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from aqd.confine import refusals
from aqd.hookspecs import Confinement

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give rights up")


def in_child(function: Callable[[], list[str]]) -> list[str]:
    """What ``function`` returns in a process that gives its rights up."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    found: list[str] = json.loads(text)
    return found


def without_rights(confinement: Confinement) -> list[str]:
    def ask() -> list[str]:
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (5, 5))
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, as after an exec: /proc/self is its own
        return refusals(confinement)

    return in_child(ask)


@as_root
@pytest.mark.parametrize(
    ("confinement", "message"),
    [
        (
            Confinement(user="root"),
            "user = 'root': needs a daemon that runs as root, this one lacks CAP_SETUID",
        ),
        (
            Confinement(group="root"),
            "group = 'root': needs a daemon that runs as root, this one lacks CAP_SETGID",
        ),
        (Confinement(nice=-20), "nice = -20: is below the daemon's own"),
        (Confinement(oom_score_adj=-1000), "oom_score_adj = -1000: refused by the kernel"),
        (
            Confinement(hard_rlimits={"CORE": 6}),
            "hard_rlimits: CORE = 6 is above the daemon's hard limit of 5",
        ),
        (Confinement(hard_rlimits={"CORE": -1}), "hard_rlimits: CORE = unlimited is above"),
        (Confinement(rlimits={"CORE": 6}), "rlimits: CORE = 6 is above the hard limit of 5"),
    ],
)
def test_what_it_may_not_do(confinement: Confinement, message: str) -> None:
    (said,) = without_rights(confinement)
    assert said.startswith(message)


@as_root
def test_what_anybody_may_do() -> None:
    before = Path("/proc/self/oom_score_adj").read_text()
    confinement = Confinement(
        nice=19,
        oom_score_adj=1000,
        rlimits={"CORE": 5, "NOFILE": 10},
        hard_rlimits={"CORE": 0, "CPU": 1},
        no_new_privs=True,
    )
    assert without_rights(Confinement(rlimits={"CORE": 5}, hard_rlimits={"CPU": 10})) == []
    assert without_rights(confinement) == ["rlimits: CORE = 5 is above the hard limit of 0"]
    assert Path("/proc/self/oom_score_adj").read_text() == before


@as_root
def test_root_needs_to_be_able_to_end_it() -> None:
    def ask() -> list[str]:
        libc = ctypes.CDLL(None)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()
        libc.capget(header, sets)
        for index in range(3):
            sets[index] &= ~(1 << 5)
        assert libc.capset(header, sets) == 0
        return refusals(Confinement(user="nobody"))

    (said,) = in_child(ask)
    assert said.endswith("this one lacks CAP_KILL (it could not end the job)")


@as_root
def test_accounts_that_do_not_exist() -> None:
    assert refusals(Confinement(user="nobody", group="nogroup")) == []
    assert refusals(Confinement(user="65534", group="65534")) == []
    assert refusals(Confinement(user="no-such")) == ["user = 'no-such': there is no such user"]
    assert refusals(Confinement(group="no-such")) == ["group = 'no-such': there is no such group"]
    assert refusals(Confinement(user="99999999999999999999")) != []
