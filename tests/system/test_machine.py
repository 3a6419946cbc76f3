"""The machines of machine.py: what tests rely on when they reboot them and cut their power."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.machine import RELEASES, Machine

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.xdist_group("machine")]


@pytest.mark.parametrize("release", RELEASES)
def test_a_machine(boot: Callable[..., Machine], release: str) -> None:
    machine, other = boot(release), boot(release, name="other")
    assert machine.sh("systemctl is-system-running") == "running"
    assert f"VERSION_CODENAME={release}" in machine.read("/etc/os-release")
    assert other.sh("hostname") == "other"
    machine.write("/root/kept", "x")
    assert machine.sh("cat /root/kept") == "x"
    assert other.run("cat", "/root/kept", check=False).returncode

    machine.reboot()
    machine.cut()
    machine.boot()
    assert machine.sh("cat /root/kept") == "x"
    assert len(machine.sh("journalctl --list-boots --no-pager --quiet | grep -v IDX").splitlines()) == 3
    assert machine.show("postgresql", "ActiveState") == {"ActiveState": "active"}

    machine.open_limits()
    greedy = ["--unit=greedy", "--property=MemoryMax=20M", "tail", "/dev/zero"]
    assert machine.run("systemd-run", "--wait", *greedy, check=False).returncode
    # Only with cgroup v2 does systemd know who killed it.
    assert machine.show("greedy", "Result")["Result"] in ("oom-kill", "signal")
