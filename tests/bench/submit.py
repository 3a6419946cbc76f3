"""How fast jobs are submitted: ``POST /jobs`` and ``POST /jobs/batch`` beside the same statement driven by pgbench.

    python -m tests.bench.submit [--seconds 5] [--rounds 3] [--clients 8]

Everything in one run, alternating, on a PostgreSQL of its own with default durability: only the ratios mean
something. The clients are processes with one kept connection each that send bytes made beforehand, so that what is
measured is the service and not the client. Needs pgbench beside psql.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aqd.binaries import find_binaries
from tests.fixtures.api import Api
from tests.fixtures.postgres import LocalPostgres

JOB = {"type": "noop", "payload": {"to": "somebody@example.org", "n": 4711}}
BATCH = 100
STATEMENT = """select aqd.enqueue('noop', '{"to": "somebody@example.org", "n": 4711}');"""


def send(port: int, path: str, body: bytes, seconds: float, result: multiprocessing.Queue[int]) -> None:
    """One client: as many requests as there is time for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 201), text
        done += 1
    result.put(done)


def by_http(api: Api, path: str, document: object, seconds: float, clients: int) -> float:
    """Requests per second."""
    body = json.dumps(document).encode()
    results: multiprocessing.Queue[int] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=send, args=(api.port, path, body, seconds, results))
        for _ in range(clients)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    total = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return total / (time.monotonic() - began)


def by_pgbench(binary: str, url: str, seconds: float, clients: int) -> float:
    """Transactions per second."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(STATEMENT)
        script.flush()
        threads = min(clients, os.cpu_count() or 1)
        load = ["-c", str(clients), "-j", str(threads), "-T", str(max(1, round(seconds)))]
        found = subprocess.run(
            [binary, "-n", "-M", "prepared", "-f", script.name, *load, url],
            capture_output=True,
            text=True,
            check=True,
        )
    rate = re.search(r"tps = ([0-9.]+)", found.stdout)
    assert rate is not None, found.stdout
    return float(rate[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    binaries = find_binaries()
    pgbench = shutil.which("pgbench") or str(Path(binaries.directory, "pgbench"))
    server = LocalPostgres(binaries, {"fsync": "on", "shared_buffers": "256MB"})
    api = None
    try:
        name = server.create_database(template=server.template)
        url = server.url(name)
        api = Api(url, {"AQD_API_WORKERS": "2", "AQD_API_THREADS": "8", "LOG_LEVEL": "warning"})
        api.wait_workers(2)
        rates: dict[str, list[float]] = {}
        batch = {"jobs": [JOB] * BATCH}
        for number in range(options.rounds):
            timing = (options.seconds, options.clients)
            for what, rate in (
                ("pgbench, one a transaction", lambda t=timing: by_pgbench(pgbench, url, *t)),
                ("POST /jobs", lambda t=timing: by_http(api, "/jobs", JOB, *t)),
                ("POST /jobs/batch", lambda t=timing: by_http(api, "/jobs/batch", batch, *t) * BATCH),
            ):
                rates.setdefault(what, []).append(rate())
                print(f"{number + 1}/{options.rounds}  {what:28} {rates[what][-1]:10,.0f} jobs/s", flush=True)
        base = statistics.median(rates["pgbench, one a transaction"])
        print(
            f"\n{options.clients} clients, 2 API workers × 8 threads, {server.source}, {os.cpu_count()} processors"
        )
        for what, found in rates.items():
            middle = statistics.median(found)
            print(f"{what:28} {middle:10,.0f} jobs/s   {middle / base:6.2f} ×")
        return 0
    finally:
        if api is not None:
            api.close()
        server.close()


if __name__ == "__main__":
    sys.exit(main())
