"""The daemon as a service of a machine: what its administrator does, and what its jobs do."""

from __future__ import annotations

import json
from typing import Any

from tests.fixtures.daemon import toml
from tests.system.machine import Machine

CONFIG: dict[str, dict[str, Any]] = {
    "daemon": {
        "slots": 3,
        "poll_ms": 200,
        "lease_s": 8.0,
        "renew_s": 1.0,
        "drain_s": 15.0,
        "kill_grace_s": 1.0,
        "node_name": "here",
    },
    "jobs": {"backoff_base_s": 0.02, "backoff_max_s": 0.2},
    "keeper": {"rescue_s": 0.2},
    "plugins": {
        "dir": "/etc/aqd/plugins.d",
        "entry_points": False,
        "settings": {"fate": {"side": "/var/lib/aqd/side"}},
    },
}

# Jobs that are commands of a shell; the result is what it said.
SH = """
import subprocess
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    handlers.add("sh", lambda script: subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout)
"""


class Service:
    """aqd.service in ``machine``. The wishes of administrators go to systemctl."""

    def __init__(self, machine: Machine, config: dict[str, dict[str, Any]] | None = None) -> None:
        self.machine = machine
        self.config = {section: dict(table) for section, table in CONFIG.items()}
        machine.write("/etc/aqd/plugins.d/sh.py", SH)
        self.configure(config or {})

    def configure(self, change: dict[str, dict[str, Any]]) -> None:
        for section, table in change.items():
            self.config.setdefault(section, {}).update(table)
        self.machine.write("/etc/aqd/aqd.toml", toml(self.config))

    def systemctl(self, *argv: str, check: bool = True, timeout_s: float = 90) -> int:
        __tracebackhide__ = True
        return self.machine.run("systemctl", *argv, check=check, timeout_s=timeout_s).returncode

    def drop_in(self, text: str, unit: str = "aqd.service") -> None:
        """Override settings of the unit (``""``: not any more)."""
        self.machine.write(f"/etc/systemd/system/{unit}.d/test.conf", f"[Service]\n{text}\n")
        self.systemctl("daemon-reload")

    def fresh(self) -> None:
        """Running, whatever came before; without overrides."""
        self.drop_in("")
        self.systemctl("reset-failed", "aqd", check=False)
        self.systemctl("start", "aqd")

    def show(self, name: str, unit: str = "aqd") -> str:
        return self.machine.show(unit, name)[name]

    def aqd(self, *argv: str) -> str:
        """A command of aqd, as its user."""
        __tracebackhide__ = True
        return self.machine.run("runuser", "-u", "aqd", "--", "aqd", *argv).stdout.strip()

    def status(self) -> dict[str, Any]:
        return json.loads(self.aqd("status", "--json"))

    def sql(self, query: str) -> str:
        __tracebackhide__ = True
        return self.machine.run("runuser", "-u", "aqd", "--", "psql", "-qAtXc", query).stdout.strip()

    def submit(self, type: str, payload: object, *options: str) -> str:
        """The new job's id."""
        __tracebackhide__ = True
        return self.aqd("submit", type, json.dumps(payload), *options)

    def job(self, id: str) -> dict[str, Any]:
        return json.loads(self.sql(f"select to_jsonb(j) from aqd.all_jobs j where id = {id}"))

    def wait_job(self, id: str, state: str = "COMPLETED", timeout_s: float = 60) -> dict[str, Any]:
        __tracebackhide__ = True

        def look() -> dict[str, Any] | None:
            job = self.job(id)
            return job if job["state"] == state else None

        return self.machine.wait(look, timeout_s, f"{state}: job {id}")

    def pids(self, title: str) -> list[int]:
        """Processes of the service whose title begins so (``"aqd: worker"``)."""
        lines = self.machine.sh(f"pgrep -u aqd -f '^{title}' || true").split()
        return [int(line) for line in lines]

    def notes(self) -> list[dict[str, Any]]:
        """What jobs of the plugin fate have written into their side file."""
        side = self.machine.path("/var/lib/aqd/side")
        return [json.loads(line) for line in side.read_text().splitlines()] if side.exists() else []
