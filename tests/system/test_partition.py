"""Nodes as machines of their own, each with its own network: one is cut off for longer than its lease, and comes back.

PostgreSQL is on machine 0, the nodes on the others. Handlers write down what they do, by a clock that all share, in a file:
so it is seen from outside that a job never runs in two places, also where the first run was killed and never said so.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.fixtures.jobs import Jobs
from tests.fixtures.network import network
from tests.fixtures.postgres import LocalPostgres, local_binaries
from tests.fixtures.processes import wait_until

__all__ = ["network"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

LEASE_S = 4.0
CONFIG = {
    "database": {"connect_timeout_s": 1.0, "statement_timeout_s": 1.0},
    "daemon": {"slots": 2, "poll_ms": 100, "lease_s": LEASE_S, "renew_s": 0.8, "kill_grace_s": 0.5},
    "jobs": {"max_attempts": 10},
}
# Writes a line every 20 ms for as long as it lives.
BEAT = """
import json, os, time
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    path = handlers.settings("beat")["file"]

    def beat(payload, job):
        until = time.monotonic() + payload["for_s"]
        while True:
            line = {"job": job.id, "attempt": job.attempt, "pid": os.getpid(), "node": payload_node(), "at": now()}
            with open(path, "ab", buffering=0) as file:
                file.write((json.dumps(line) + "\\n").encode())
            if time.monotonic() >= until:
                return "done"
            time.sleep(0.02)

    def now():
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def payload_node():
        return os.readlink("/proc/self/ns/net")

    handlers.add("beat", beat)
"""


def beats(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs_of(path: Path) -> dict[str, list[tuple[float, float, int, str]]]:
    """(first beat, last beat, pid, network) of each run of each job, in order."""
    found: dict[tuple, list[float]] = defaultdict(list)
    for each in beats(path):
        found[each["job"], each["pid"], each["attempt"], each["node"]].append(each["at"])
    jobs: dict[str, list] = defaultdict(list)
    for (job, pid, _, node), moments in found.items():
        jobs[str(job)].append((min(moments), max(moments), pid, node))
    return {job: sorted(runs) for job, runs in jobs.items()}


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_is_cut_off_and_comes_back(network, start_daemon, tmp_path, nodes):
    net = network(nodes + 1)
    with net.inside(0):
        pg = LocalPostgres(local_binaries(), {"listen_addresses": "*"})
    try:
        with (pg.data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.77.0.0/24 scram-sha-256\n")
        name = pg.create_database(template=pg.template)
        with pg.connect() as conn:
            conn.execute("select pg_reload_conf()")
        url = f"postgresql://postgres:{pg.password}@{net.address(0)}:{pg.port}/{name}"
        jobs = Jobs(pg.url(name))  # a unix socket is a file, which no network is between
        path = tmp_path / "beats"
        config = {**CONFIG, "plugins": {"settings": {"beat": {"file": str(path)}, "fate": {"side": ""}}}}
        daemons = [
            start_daemon(
                config,
                name=f"machine{number}",
                database=url,
                plugins={"beat.py": BEAT},
                wrapper=net.wrapper(number),
            )
            for number in range(1, nodes + 1)
        ]
        # Long jobs on every machine, and short ones all the time.
        long = [jobs.add({"for_s": LEASE_S * 2}, type="beat") for _ in range(2 * nodes)]
        lost = daemons[0]
        others = daemons[1:]
        wait_until(lambda: len(runs_of(path)) == len(long), 30, "all slots to be busy")
        where = {job: runs[0][3] for job, runs in runs_of(path).items()}
        assert len(set(where.values())) == nodes
        mark = lost.mark()
        net.cut(1)
        fenced = [
            lost.wait_for("worker killed", 30, after=mark, reason="fence", count=n + 1) for n in range(2)
        ]
        assert fenced
        # They are killed, and a moment later they are dead.
        lost.wait_status(
            lambda s: s["state"] == "waiting for database" and s["restarts"].get("fence") == 2, 60
        )
        short = [jobs.add({"for_s": 0}, type="beat") for _ in range(40)]
        # Its jobs are rescued and run elsewhere; everything ends without it.
        assert jobs.wait_all(long + short, 90) == {"COMPLETED": len(long) + 40}
        assert [each.status()["state"] for each in others] == ["running"] * len(others)
        net.mend(1)
        lost.wait_status(lambda s: s["state"] == "running" and s["database"]["listener_up"], 30)
        # It works again: each machine gets as much as it has slots for.
        more = [jobs.add({"for_s": 1}, type="beat") for _ in range(2 * nodes)]
        assert jobs.wait_all(more, 60) == {"COMPLETED": len(more)}
        runs = runs_of(path)
        mine = {node for job in more for *_, node in runs[str(job)]}
        assert len(mine) == nodes
        overlaps = [
            (job, before, after)
            for job, each in runs.items()
            for before, after in itertools.pairwise(each)
            if before[1] >= after[0]
        ]
        assert overlaps == []
        again = [job for job in long if len(runs[str(job)]) > 1]
        assert len(again) == 2
        assert {row["kind"] for job in again for row in jobs.attempts(job)} == {"lost"}
        assert all(len(runs[str(job)]) == 1 for job in short + more)
        jobs.close()
        for daemon in daemons:
            assert daemon.stop() == 0
    finally:
        pg.close()
