"""aqd.service under a real systemd: starting, reloading, what jobs may and may not do, instances, the API's socket.

Field cases: signals to every process of a service, reloads that return too early, messages of children to systemd.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.machine import RELEASES, Machine
from tests.system.service import Service

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.xdist_group("systemd-life")]


# Where releases of systemd or Python may differ: in both; each other test once.
everywhere = pytest.mark.parametrize("service", RELEASES, indirect=True)
once = pytest.mark.parametrize("service", ["bookworm"], indirect=True)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, boot_aqd: Callable[..., Machine]) -> Service:
    return Service(boot_aqd(request.param))


@everywhere
def test_the_units_are_accepted_and_closed(service: Service) -> None:
    units = ["aqd.service", "aqd-api.service", "aqd-api.socket", "aqd@mail.service"]
    said = service.machine.sh(f"systemd-analyze verify --man=no --recursive-errors=no {' '.join(units)}")
    assert said == ""
    services = [unit for unit in units if unit.endswith(".service")]
    service.machine.run("systemd-analyze", "security", "--no-pager", "--threshold=20", *services)


@everywhere
def test_a_start_waits_for_the_database(service: Service) -> None:
    machine = service.machine
    service.systemctl("stop", "aqd", "postgresql")
    service.drop_in("TimeoutStartSec=10")
    start = machine.popen("systemctl", "start", "aqd")
    machine.wait(lambda: "waiting for database" in service.show("StatusText"), 30, "waiting")
    machine.sh("sleep 12")  # the time that the unit gives is over
    assert service.show("ActiveState") == "activating"
    assert start.poll() is None
    assert "PGSQL" in service.show("StatusText"), "says what is missing"
    service.systemctl("start", "postgresql")
    assert start.wait(60) == 0
    assert (service.show("ActiveState"), service.show("NRestarts")) == ("active", "0")
    assert service.show("StatusText").startswith("running: generation 1, 3 slots")
    service.fresh()


@once
def test_a_broken_plugin(service: Service) -> None:
    machine = service.machine
    service.systemctl("stop", "aqd")
    machine.write("/etc/aqd/plugins.d/broken.py", "1 / 0\n")
    service.fresh()
    assert "plugin broken: ZeroDivisionError" in service.show("StatusText")
    (line,) = machine.journal("-u", "aqd", "-p", "err", "AQD_EVENT=plugin broken", "-n", "1")
    assert (line["PRIORITY"], line["AQD_PLUGIN"]) == ("3", "broken")

    service.configure({"plugins": {"strict": True}})
    service.systemctl("stop", "aqd")
    assert service.systemctl("start", "aqd", check=False), "a start that is refused fails at once"
    service.systemctl("stop", "aqd")
    machine.path("/etc/aqd/plugins.d/broken.py").unlink()
    service.configure({"plugins": {"strict": False}})
    service.fresh()


@everywhere
def test_a_reload_returns_when_the_new_generation_serves(service: Service) -> None:
    service.fresh()
    before = service.status()["generation"]
    # Its import takes long enough to be noticed if nobody waited for it.
    slow = "import time; time.sleep(1.5)\nfrom aqd import hookimpl\n@hookimpl\ndef aqd_register(handlers):\n"
    service.machine.write(
        "/etc/aqd/plugins.d/fresh.py", slow + "    handlers.add('fresh', lambda payload: 'new')\n"
    )
    service.systemctl("reload", "aqd")
    status = service.status()
    assert status["generation"] == before + 1
    assert {slot["generation"] for slot in status["slots"]} == {before + 1}
    assert service.wait_job(service.submit("fresh", {}))["result"] == "new"
    assert service.show("ActiveState") == "active"


@once
def test_a_reload_that_is_refused_fails_and_the_old_generation_serves(service: Service) -> None:
    service.fresh()
    status = service.status()
    good = service.machine.read("/etc/aqd/aqd.toml")
    (last,) = service.machine.journal("-n", "1")
    service.machine.write("/etc/aqd/aqd.toml", good + "[daemons]\nslots = 3\n")
    assert service.systemctl("reload", "aqd", check=False)
    service.machine.write("/etc/aqd/aqd.toml", good)
    assert service.show("ActiveState") == "active"
    assert service.show("SubState") == "running"
    assert "daemons" in service.show("StatusText")
    lines = service.machine.journal("-u", "aqd", "-p", "err", "-n", "5")
    said = [line for line in lines if int(line["__REALTIME_TIMESTAMP"]) > int(last["__REALTIME_TIMESTAMP"])]
    assert any("daemons" in line["MESSAGE"] and "AQD_EVENT" not in line for line in said), "by aqd reload"
    assert any(line.get("AQD_EVENT") == "generation refused" for line in said)
    assert service.status()["generation"] == status["generation"]
    assert service.show("MainPID") == str(status["pid"])
    service.wait_job(service.submit("sh", "true"))
    service.systemctl("reload", "aqd")


@everywhere
def test_jobs_do_not_speak_for_the_service(service: Service) -> None:
    service.fresh()
    id = service.submit("fate", {"note_environment": ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"]})
    service.wait_job(id)
    (note,) = [n for n in service.notes() if n["event"] == "note" and str(n["job"]) == id]
    assert set(note["value"].values()) == {None}
    # The command ends well only when systemd has read what it sent.
    notify = "systemd-notify STOPPING=1 && systemd-notify STATUS=mine && echo read; true"
    job = service.wait_job(service.submit("sh", f"export NOTIFY_SOCKET=/run/systemd/notify; {notify}"))
    assert job["result"] == "read\n", "it did not reach systemd"
    assert (service.show("ActiveState"), service.show("SubState")) == ("active", "running")
    assert service.show("StatusText").startswith("running")


@once
def test_two_daemons_on_one_machine(service: Service) -> None:
    service.fresh()
    machine = service.machine
    own = 'queues = ["mail"]\nruntime_dir = "/run/aqd-mail"\n'
    machine.write(
        "/etc/aqd/mail.toml",
        service.machine.read("/etc/aqd/aqd.toml").replace("[daemon]\n", f"[daemon]\n{own}"),
    )
    service.configure({"daemon": {"queues": ["default"]}})
    service.systemctl("reload", "aqd")
    service.systemctl("start", "aqd@mail")
    try:
        other = json.loads(service.aqd("-c", "/etc/aqd/mail.toml", "status", "--json"))
        assert str(other["pid"]) == service.show("MainPID", "aqd@mail")
        service.wait_job(service.submit("sh", "true", "--queue=mail"))
        service.systemctl("reload", "aqd@mail")
        service.systemctl("stop", "aqd")
        assert json.loads(service.aqd("-c", "/etc/aqd/mail.toml", "status", "--json"))["state"] == "running"
        assert machine.sh("stat -c '%U %a' /run/aqd-mail /var/lib/aqd-mail/pdf") == "aqd 750\naqd 750"
    finally:
        service.systemctl("stop", "aqd@mail")
        service.configure({"daemon": {"queues": []}})


@once
def test_control_groups_of_jobs(service: Service) -> None:
    """The example of a drop-in: jobs make groups below the service's own."""
    example = ROOT / "systemd/aqd.service.d/delegate.conf.example"
    place = "/etc/systemd/system/aqd.service.d/delegate.conf"
    machine = service.machine
    # Where it is: the one hierarchy, or beside older ones.
    script = (
        "group=$(sed -n 's/^0:://p' /proc/self/cgroup); top=/sys/fs/cgroup; [ -d $top/unified ] && top=$top/unified;"
        " mkdir $top$group/mine && rmdir $top$group/mine && echo made || true"
    )
    service.fresh()
    assert "made" not in service.wait_job(service.submit("sh", script))["result"]
    machine.copy(example, place)
    try:
        service.systemctl("daemon-reload")
        service.systemctl("restart", "aqd")
        assert service.wait_job(service.submit("sh", script))["result"] == "made\n"
    finally:
        machine.path(place).unlink()
        service.systemctl("stop", "aqd")


# Each connection is one request. It says how many were answered, and what went wrong.
CLIENT = """
import http.client, json, sys, threading, time
done, wrong, stop = [0], [], threading.Event()
def ask():
    while not stop.is_set():
        try:
            connection = http.client.HTTPConnection("127.0.0.1", 4000, timeout=60)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            body = json.loads(answer.read())
            if answer.status != 200: wrong.append(body)
            connection.close()
            done[0] += 1
        except OSError as error:
            wrong.append(repr(error))
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads: thread.start()
print("asking", flush=True)
sys.stdin.read()
stop.set()
for thread in threads: thread.join()
print(json.dumps({"done": done[0], "wrong": wrong[:5]}))
"""


@everywhere
def test_restarting_the_api_refuses_nobody(service: Service) -> None:
    service.fresh()
    machine = service.machine
    service.systemctl("start", "aqd-api.socket")
    assert service.show("ActiveState", "aqd-api") == "inactive"
    machine.run("curl", "-fsS", "http://127.0.0.1:4000/health")  # the first one starts it
    assert service.show("ActiveState", "aqd-api") == "active"
    client = machine.popen("python3", "-c", CLIENT, stdin=-1)
    assert client.stdout.readline() == "asking\n"  # type: ignore[union-attr]
    before = service.show("MainPID", "aqd-api")
    for _ in range(2):
        service.systemctl("restart", "aqd-api")
        machine.run("curl", "-fsS", "http://127.0.0.1:4000/health")
    service.systemctl("reload", "aqd-api")
    said, _ = client.communicate("", timeout=90)
    report = json.loads(said)
    assert report["wrong"] == []
    assert report["done"] > 10
    assert service.show("MainPID", "aqd-api") != before
    service.systemctl("stop", "aqd-api.socket", "aqd-api")
    service.systemctl("start", "aqd-api")  # without the socket it listens by itself
    machine.run("curl", "-fsS", "http://127.0.0.1:4000/health")
    service.systemctl("stop", "aqd-api")
