"""What a running node counts: by ``aqd metrics``, by its exporter, and in the database."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from aqd import control, metrics
from aqd.exporter import CLIENTS_MAX
from aqd.store import figures
from tests.fixtures.daemon import Daemon
from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until
from tests.process.conftest import Proxied

StartDaemon = Callable[..., Daemon]
Samples = dict[tuple[str, ...], float]

# In the order in which the tests name them.
LABELS = ("queue", "type", "outcome", "reason", "operation", "state", "node", "cause", "kind", "le")
SOON = {"keeper": {"figures_s": 0.2}}


def parsed(text: str) -> Samples:
    """Values by name and label values, as the official parser reads them."""
    return {
        (sample.name, *(sample.labels[each] for each in LABELS if each in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(daemon: Daemon) -> Samples:
    return parsed(metrics.of_daemon(control.request(daemon.socket, "metrics", 5.0)).decode())


def scrape(port: int) -> tuple[int, str]:
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    conn.request("GET", "/metrics")
    answer = conn.getresponse()
    return answer.status, answer.read().decode()


def run_some(jobs: Jobs) -> None:
    """Three completed, one failed for good, one failed once and then completed, one whose worker died."""
    done = [jobs.add() for _ in range(3)]
    jobs.add({"raise": "no"}, type="fate_once")
    again = jobs.add({"attempts": [{"raise": "no"}, []]})
    dead = jobs.add({"kill": 9}, type="fate_once")
    jobs.wait_all([*done, again])
    jobs.wait(dead, "FAILED")


EXPECTED = {
    ("aqd_jobs_total", "default", "fate", "completed"): 4.0,
    ("aqd_jobs_total", "default", "fate_once", "failed"): 2.0,
    ("aqd_attempts_total", "default", "fate", "completed", ""): 4.0,
    ("aqd_attempts_total", "default", "fate", "retried", "exception"): 1.0,
    ("aqd_attempts_total", "default", "fate_once", "failed", "exception"): 1.0,
    ("aqd_attempts_total", "default", "fate_once", "failed", "signal"): 1.0,
    ("aqd_attempt_duration_seconds_count", "default", "fate", "completed"): 4.0,
    ("aqd_attempt_duration_seconds_bucket", "default", "fate", "completed", "+Inf"): 4.0,
    ("aqd_job_waiting_seconds_count", "default", "fate"): 5.0,
    ("aqd_job_waiting_seconds_count", "default", "fate_once"): 2.0,
    ("aqd_worker_restarts_total", "signal 9 (SIGKILL)"): 1.0,
}


def contains(found: Samples, wanted: Samples) -> bool:
    return wanted.items() <= found.items()


def test_daemon_tells_its_metrics(start_daemon: StartDaemon, jobs: Jobs) -> None:
    """By command and by the exporter the same; what the keeper has found out included."""
    port = free_port()
    daemon = start_daemon({**SOON, "daemon": {"metrics_port": port, "slots": 2}})
    later = jobs.add(delay_s=3600)
    run_some(jobs)
    wanted = {
        **EXPECTED,
        ("aqd_slots", "node0"): 2.0,
        ("aqd_slots_busy", "node0"): 0.0,
        ("aqd_database_up", "node0"): 1.0,
        ("aqd_listener_up", "node0"): 1.0,
        ("aqd_queue_jobs", "default", "scheduled"): 1.0,
        ("aqd_queue_jobs", "default", "failed"): 2.0,
        ("aqd_database_warning", "old_transaction"): 0.0,
    }
    wait_until(lambda: contains(of(daemon), wanted), 60.0)
    found = of(daemon)
    for operation in ("claim", "record"):
        assert found["aqd_statement_duration_seconds_count", operation] > 0
    assert found["aqd_attempt_duration_seconds_sum", "default", "fate", "completed"] > 0
    assert ("aqd_jobs_dead_rows",) in found
    restarts = ("aqd_worker_restarts_total", "signal 9 (SIGKILL)")
    wait_until(lambda: stored(jobs).get(restarts) == 1, 60.0)

    printed = daemon.aqd("metrics")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert contains(parsed(printed.stdout), wanted)
    status, text = scrape(port)
    assert status == 200
    assert contains(parsed(text), wanted)
    assert jobs.state(later) == "QUEUED"


def test_metrics_while_the_database_is_away(proxied: Proxied, start_daemon: StartDaemon, jobs: Jobs) -> None:
    """The exporter is told by the master, so what was counted is known meanwhile, and written down afterwards."""
    port = free_port()
    daemon = start_daemon({**SOON, "daemon": {"metrics_port": port}}, database=proxied.url)
    jobs.wait(jobs.add())
    job = jobs.add({"sleep": 1.5})
    jobs.wait(job, "PROCESSING")
    key = ("aqd_jobs_total", "default", "fate", "completed")
    age = ("aqd_stats_age_seconds",)
    wait_until(lambda: {key, age} <= parsed(scrape(port)[1]).keys(), 60.0)
    proxied.proxy.refuse()
    proxied.proxy.reset_all()
    wait_until(lambda: parsed(scrape(port)[1])["aqd_database_up", "node0"] == 0, 60.0)
    assert parsed(scrape(port)[1])[key] == 1
    wait_until(lambda: parsed(scrape(port)[1])[age] > 1.0, 60.0)
    proxied.proxy.accept()
    jobs.wait(job, timeout_s=60.0)
    wait_until(lambda: of(daemon).get(key) == 2, 60.0)
    wait_until(lambda: stored(jobs).get(key) == 2, 60.0)


def stored(jobs: Jobs) -> Samples:
    """What all nodes have written down, as the API tells it."""
    with jobs_connection(jobs) as conn:
        return parsed(metrics.text(figures.sum_figures(conn)).decode())


def jobs_connection(jobs: Jobs) -> Any:
    import psycopg

    return psycopg.connect(jobs.url, autocommit=True)


def test_figures_survive_their_processes(start_daemon: StartDaemon, jobs: Jobs) -> None:
    """An outgoing dispatcher writes down its last ones; sums go on over restarts of it and of the daemon."""
    config = {"keeper": {"figures_s": 3600.0}}
    daemon = start_daemon(config)
    run_some(jobs)
    wait_until(lambda: contains(of(daemon), EXPECTED), 60.0)
    # The first ones are written at the start, the next in an hour, or at the end.
    assert daemon.stop() == 0
    wanted = {key: value for key, value in EXPECTED.items() if key[0] != "aqd_worker_restarts_total"}
    assert contains(stored(jobs), wanted)
    again = start_daemon(config)
    jobs.wait(jobs.add())
    assert again.stop() == 0
    assert stored(jobs)["aqd_jobs_total", "default", "fate", "completed"] == 5


def test_dispatcher_killed_loses_its_last_seconds_only(start_daemon: StartDaemon, jobs: Jobs) -> None:
    """What its successor records counts, too, although somebody else has claimed it; the sums never go down."""
    daemon = start_daemon(SOON)
    jobs.wait(jobs.add())
    key = ("aqd_jobs_total", "default", "fate", "completed")
    wait_until(lambda: stored(jobs).get(key) == 1 and of(daemon).get(key) == 1, 60.0)
    job = jobs.add({"sleep": 1.0})
    jobs.wait(job, "PROCESSING")
    os.kill(daemon.process_of("dispatcher"), signal.SIGKILL)
    jobs.wait(job, timeout_s=60.0)
    wait_until(lambda: stored(jobs).get(key) == 2 and of(daemon).get(key) == 2, 60.0)
    assert stored(jobs)["aqd_job_waiting_seconds_count", "default", "fate"] == 2


def test_exporter_is_only_an_exporter(start_daemon: StartDaemon, jobs: Jobs) -> None:
    """Killed, it comes back; hung clients do not keep others out for ever; other paths are not there."""
    port = free_port()
    daemon = start_daemon({"daemon": {"metrics_port": port}})
    assert scrape(port)[0] == 200
    first = daemon.process_of("exporter")
    workers = daemon.workers()
    os.kill(first, signal.SIGKILL)
    daemon.wait_for("exporter ended")
    wait_until(lambda: daemon.process_of("exporter") != first, 60.0)
    hung = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    jobs.wait(jobs.add())
    for each in hung:
        each.close()

    def answers() -> bool:
        try:
            return scrape(port)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_until(answers, 60.0)
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    conn.request("GET", "/")
    assert conn.getresponse().status == 404
    assert daemon.workers() == workers


def test_exporter_port_is_taken(start_daemon: StartDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        daemon = start_daemon({"daemon": {"metrics_port": server.getsockname()[1]}}, start=False)
        daemon.start(wait=False)
        daemon.expected_exit = 3
        assert daemon.wait_exit(60.0) == 3
    assert any("cannot listen on 127.0.0.1" in line for line in daemon.output)


def test_node_says_what_it_is(start_daemon: StartDaemon, jobs: Jobs) -> None:
    daemon = start_daemon(SOON)
    jobs.wait(jobs.add({"sleep": 30}), "PROCESSING")

    def look() -> Any:
        with jobs_connection(jobs) as conn:
            (node,) = figures.list_nodes(conn, 30.0)
        info = figures.node_info(node)
        return (node, info) if info.busy == 1 and info.plugins else None

    node, info = wait_until(look, 60.0)
    assert (node.slots, node.live, node.state) == (2, True, "running")
    (plugin,) = [each for each in info.plugins if each.name == "fate"]
    assert plugin.digest
    assert "echo" in plugin.handlers
    assert info.listener_up is True
    daemon.signal(signal.SIGTERM)
    daemon.signal(signal.SIGTERM)
    daemon.wait_exit(60.0)


def test_slow_clients_have_their_time(start_daemon: StartDaemon) -> None:
    """A byte now and then, by as many clients as there are places, does not keep others out."""
    port = free_port()
    daemon = start_daemon({"daemon": {"metrics_port": port}})
    assert scrape(port)[0] == 200
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS_MAX)]
    for each in slow:
        each.sendall(b"GET /metrics HTTP/1.1\r\n")
    open_still = set(slow)

    def all_hung_up() -> bool:
        for each in list(open_still):
            try:
                each.sendall(b"x")
            except OSError:
                open_still.discard(each)
        return not open_still

    try:
        wait_until(all_hung_up, 60.0)
    finally:
        for each in slow:
            each.close()

    def answers() -> bool:
        try:
            return scrape(port)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_until(answers, 60.0)
    assert daemon.stop() == 0
