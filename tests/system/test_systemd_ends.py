"""aqd.service under a real systemd: stops, restarts, hangs, memory, reboots and power cuts. No job is lost."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.xdist_group("systemd-ends")]


@pytest.fixture(scope="module")
def service(boot_aqd: Callable[..., Machine]) -> Service:
    return Service(boot_aqd("bookworm"))


def running(service: Service, id: str) -> None:
    __tracebackhide__ = True
    service.wait_job(id, "PROCESSING", 30)
    service.machine.wait(lambda: any(str(n.get("job")) == id for n in service.notes()), 30, "begun")


def test_a_stop_waits_for_a_job_and_its_helper(service: Service) -> None:
    service.fresh()
    id = service.submit("sh", "touch /var/lib/aqd/begun; sleep 5; echo slept")
    service.machine.wait(lambda: service.machine.path("/var/lib/aqd/begun").exists(), 30, "begun")
    service.systemctl("stop", "aqd")
    assert service.show("Result") == "success"
    job = service.job(id)
    assert (job["state"], job["attempt"], job["result"]) == ("COMPLETED", 1, "slept\n")


def test_a_signal_to_every_process_is_a_drain(service: Service) -> None:
    service.fresh()
    id = service.submit("fate", [{"print": "a"}, {"sleep": 4}, {"return": "slept"}])
    running(service, id)
    service.systemctl("kill", "--kill-whom=all", "-s", "TERM", "aqd")
    service.machine.wait(lambda: service.show("ActiveState") == "inactive", 40, "inactive")
    assert service.show("Result") == "success"
    job = service.job(id)
    assert (job["state"], job["attempt"], job["result"]) == ("COMPLETED", 1, "slept")


def test_restarts_under_load_lose_nothing(service: Service) -> None:
    service.fresh()
    batch = "\n".join(json.dumps({"type": "fate", "payload": {"sleep": 0.05}}) for _ in range(400))
    service.machine.write("/var/lib/aqd/batch", batch + "\n")
    before = len([n for n in service.notes() if n["event"] == "end"])
    service.aqd("submit", "--batch", "/var/lib/aqd/batch")
    for _ in range(3):
        service.systemctl("restart", "aqd")
    service.machine.wait(
        lambda: service.sql("select count(*) from aqd.jobs where type = 'fate'") == "0", 90, "done"
    )
    assert service.sql("select count(*) from aqd.job_history where payload = '{\"sleep\": 0.05}'") == "400"
    again = "attempt <> 1 and payload = '{\"sleep\": 0.05}'"
    assert service.sql(f"select count(*) from aqd.job_history where {again}") == "0"
    assert len([n for n in service.notes() if n["event"] == "end"]) == before + 400, "each ran once"


def test_a_master_that_hangs_is_replaced(service: Service) -> None:
    service.drop_in("WatchdogSec=3")
    service.systemctl("restart", "aqd")
    id = service.submit("fate", {"attempts": [[{"sleep": 120}], [{"return": "again"}]]})
    running(service, id)
    master = service.show("MainPID")
    service.machine.run("kill", "-STOP", master)
    service.machine.wait(lambda: service.show("NRestarts") == "1", 60, "restarted")
    service.machine.wait(lambda: service.show("ActiveState") == "active", 60, "active")
    assert service.show("MainPID") != master
    job = service.wait_job(id)
    assert (job["attempt"], job["result"]) == (2, "again")
    assert service.machine.journal("_PID=1", "UNIT=aqd.service", "--grep=Watchdog timeout")
    service.fresh()


def test_a_dispatcher_that_hangs_is_replaced(service: Service) -> None:
    service.fresh()
    id = service.submit("fate", [{"sleep": 3}, {"return": "undisturbed"}])
    running(service, id)
    master, (dispatcher,) = service.show("MainPID"), service.pids("aqd: dispatcher")
    service.machine.run("kill", "-STOP", str(dispatcher))
    service.machine.wait(lambda: service.pids("aqd: dispatcher") not in ([dispatcher], []), 60, "a successor")
    service.wait_job(service.submit("fate", {"return": 1}))
    assert service.wait_job(id)["attempt"] in (1, 2)  # 2 if its lease was over before the master noticed
    assert service.show("MainPID") == master
    assert service.show("NRestarts") == "0"


def test_a_job_without_memory_costs_itself_only(service: Service) -> None:
    service.machine.open_limits()
    service.drop_in("MemoryMax=300M")
    service.systemctl("restart", "aqd")
    master = service.show("MainPID")
    scores = {
        name: {int(service.machine.read(f"/proc/{pid}/oom_score_adj")) for pid in service.pids(name)}
        for name in ("aqd: master", "aqd: dispatcher", "aqd: worker")
    }
    assert max(scores["aqd: master"] | scores["aqd: dispatcher"]) < min(scores["aqd: worker"])
    calm = service.submit("fate", [{"sleep": 6}, {"return": "fine"}])
    running(service, calm)
    greedy = service.submit("fate_once", {"alloc": 1024})
    job = service.wait_job(greedy, "FAILED")
    assert "SIGKILL" in job["last_error"]
    assert service.wait_job(calm)["attempt"] == 1
    assert service.show("MainPID") == master
    assert service.show("ActiveState") == "active"
    (line,) = service.machine.journal(f"AQD_JOB_ID={greedy}", "AQD_EVENT=attempt crashed")
    assert line["AQD_REASON"] in ("oom", "signal")
    service.fresh()


def test_jobs_go_on_after_a_reboot_and_a_power_cut(service: Service) -> None:
    machine = service.machine
    service.configure({"daemon": {"drain_s": 2.0}})
    service.systemctl("restart", "aqd")
    service.systemctl("enable", "aqd")
    id = service.submit("fate", [{"wait_file": "/var/lib/aqd/go"}, {"return": "at last"}])
    running(service, id)
    machine.reboot()
    job = service.wait_job(id, "PROCESSING")
    assert (job["attempt"], job["interruptions"]) == (1, 1), "given back by the drain"
    running(service, id)
    machine.cut()
    machine.boot()
    machine.wait(lambda: service.job(id)["attempt"] == 2, 60, "rescued")
    machine.write("/var/lib/aqd/go", "")
    job = service.wait_job(id)
    assert (job["attempt"], job["interruptions"], job["result"]) == (2, 1, "at last")
    service.configure({"daemon": {"drain_s": 15.0}})
    service.systemctl("restart", "aqd")
