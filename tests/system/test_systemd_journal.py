"""aqd's lines in a real journal: fields to ask for, priorities, and nothing left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.machine import RELEASES, Machine
from tests.system.service import Service

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.xdist_group("systemd-journal")]

FLOOD = """
import time
from aqd import hookimpl

def flood(how, job):
    for number in range(how["lines"]):
        getattr(job.logger, how["level"])("flood", extra={"number": number})
        if number % 20 == 0:
            time.sleep(0.01)  # the journal reads meanwhile

@hookimpl
def aqd_register(handlers):
    handlers.add("flood", flood)
"""


@pytest.fixture(scope="module", params=RELEASES)
def service(request: pytest.FixtureRequest, boot_aqd: Callable[..., Machine]) -> Service:
    machine = boot_aqd(request.param)
    # As strict as it gets: what is beyond the limits of services is dropped.
    machine.write(
        "/etc/systemd/journald.conf.d/test.conf", "[Journal]\nRateLimitIntervalSec=1h\nRateLimitBurst=5\n"
    )
    machine.run("systemctl", "restart", "systemd-journald")
    machine.write("/etc/aqd/plugins.d/flood.py", FLOOD)
    service = Service(machine)
    service.systemctl("start", "aqd")
    return service


def test_a_jobs_lines_are_found_by_its_number(service: Service) -> None:
    id = service.submit("fate", [{"log": "half way"}, {"raise": "no"}], "--max-attempts=1")
    service.wait_job(id, "FAILED")
    machine = service.machine
    lines = machine.wait(
        lambda: machine.journal(f"AQD_JOB_ID={id}")[1:] and machine.journal(f"AQD_JOB_ID={id}"), 30
    )
    said, failed = lines
    assert (said["AQD_EVENT"], said["PRIORITY"], said["AQD_LOGGER"]) == ("half way", "6", "job")
    assert (failed["AQD_EVENT"], failed["PRIORITY"]) == ("attempt failed", "4")
    assert failed["AQD_ERROR"] == "RuntimeError: no"
    for line in lines:
        assert (line["AQD_TYPE"], line["AQD_ATTEMPT"], line["_SYSTEMD_UNIT"]) == ("fate", "1", "aqd.service")
        assert line["AQD_SLOT"] in ("0", "1", "2")
        assert line["SYSLOG_IDENTIFIER"] == "aqd"
    assert not machine.journal(f"AQD_JOB_ID={id}", "-p", "err")
    shown = machine.sh(f"journalctl -q -o cat AQD_JOB_ID={id} AQD_EVENT='attempt failed'")
    assert shown.startswith(f"dispatcher/recorder  attempt failed  job_id={id} type=fate attempt=1 slot=")


def test_the_api_logs_there_too(service: Service) -> None:
    service.systemctl("start", "aqd-api")
    (line,) = service.machine.journal("-u", "aqd-api", "AQD_EVENT=keys", "-n", "1")
    assert (line["AQD_PROCESS"], line["PRIORITY"]) == ("api", "6")
    service.systemctl("stop", "aqd-api")


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_flood_does_not_hide_an_error(service: Service, level: str) -> None:
    machine = service.machine
    before = len(machine.journal("AQD_EVENT=flood"))
    floods = [service.submit("flood", {"level": level, "lines": 5000}) for _ in range(3)]
    machine.write("/etc/aqd/plugins.d/broken.py", "1 / 0\n")
    for _ in range(3):
        assert service.systemctl("reload", "aqd", check=False)
    machine.path("/etc/aqd/plugins.d/broken.py").unlink()
    for id in floods:
        service.wait_job(id)
    assert not machine.journal("--grep=Suppressed .* messages from aqd"), "the limit of the machine applied"
    lines = machine.journal("AQD_EVENT=flood")[before:]
    assert len(lines) > 200
    # Where the queue was full it came through the stream, then without fields of its own.
    refused = machine.journal("-u", "aqd", "-p", "err", "--grep=master  generation refused  reason=")
    since = int(lines[0]["__REALTIME_TIMESTAMP"])
    assert len([line for line in refused if int(line["__REALTIME_TIMESTAMP"]) >= since]) == 3
    service.systemctl("reload", "aqd")
