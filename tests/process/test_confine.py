"""What the kernel is told about a job's process: around a job and taken back, or for good in a process of its own."""

from __future__ import annotations

import os
import pwd
import resource

import pytest

from tests.process import probe
from tests.process.support import is_gone

ONE = {"daemon": {"slots": 1}}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
LIMITS = """
import resource
result = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NOFILE", "CPU", "FSIZE", "CORE")}
result["oom"] = int(open("/proc/self/oom_score_adj").read())
result["pid"] = os.getpid()
"""


def oom_score(pid):
    with open(f"/proc/{pid}/oom_score_adj") as file:
        return int(file.read())


def test_what_is_set_for_a_job_is_as_before_afterwards(start_daemon, jobs):
    options = {"oom_score_adj": 900, "rlimits": {"NOFILE": 100, "CPU": 7, "FSIZE": 5000, "CORE": 0}}
    daemon = start_daemon(ONE, plugins=probe.source({"confined": options}))
    before = probe.result(jobs, LIMITS)
    during = probe.result(
        jobs, "end = time.process_time() + 0.2\nwhile time.process_time() < end: pass" + LIMITS, "confined"
    )
    assert [during[name][0] for name in ("NOFILE", "FSIZE", "CORE")] == [100, 5000, 0]
    # Of this job: what the process had used before does not count.
    assert 7 < during["CPU"][0] < 7 + 60
    assert all(during[name][1] == before[name][1] for name in options["rlimits"])
    assert during["oom"] == 900
    assert probe.failure(jobs, "raise RuntimeError", "confined")["error"] == "RuntimeError"
    assert probe.result(jobs, LIMITS) == before
    assert before["oom"] == min(1000, oom_score(daemon.pid) + 300)
    assert before["pid"] == during["pid"]


def test_a_limit_of_file_sizes_does_not_count_earlier_output(start_daemon, jobs):
    start_daemon(ONE, plugins=probe.source({"small": {"rlimits": {"FSIZE": 1000}}}))
    probe.result(jobs, "print('x' * 100_000)")
    probe.result(jobs, "print('y' * 900)", "small")
    attempt = probe.failure(jobs, "print('y' * 1000)\nraise RuntimeError", "small")
    assert "File too large" in attempt["error"]


def test_processor_time_is_a_signal_with_a_name(start_daemon, jobs):
    start_daemon(ONE, plugins=probe.source({"busy": {"rlimits": {"CPU": 1, "CORE": 0}}}))
    attempt = probe.failure(jobs, "while True: pass", "busy")
    assert (attempt["kind"], attempt["reason"]) == ("crashed", "signal")
    assert "SIGXCPU" in attempt["error"]


STATUS = """
import resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
signal_number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number), 0, 0, 0)
result = {
    "uids": [int(n) for n in status["Uid"].split()], "gids": [int(n) for n in status["Gid"].split()],
    "groups": [int(n) for n in status["Groups"].split()],
    "capabilities": [status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
    "no_new_privs": int(status["NoNewPrivs"]), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "home": os.environ.get("HOME"),
    "user": os.environ.get("USER"), "dies_with_parent": signal_number.value,
    "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), "pid": os.getpid(),
    "helper": subprocess.run(["id", "-u"], stdout=subprocess.PIPE, text=True).stdout.strip(),
}
"""


@as_root
def test_what_cannot_be_taken_back_ends_with_its_process(start_daemon, jobs):
    nobody = pwd.getpwnam("nobody")
    options = {
        "user": "nobody",
        "nice": 5,
        "no_new_privs": True,
        "hard_rlimits": {"NOFILE": 64},
        "rlimits": {"CORE": 0},
    }
    daemon = start_daemon(ONE, plugins=probe.source({"other": options, "once": {"one_shot": True}}))
    first = probe.result(jobs, STATUS)
    seen = probe.result(jobs, STATUS, "other")
    assert seen["uids"] == [nobody.pw_uid] * 4
    assert seen["gids"] == [nobody.pw_gid] * 4
    assert seen["groups"] == os.getgrouplist("nobody", nobody.pw_gid)
    assert seen["capabilities"] == ["0" * 16] * 4
    assert (seen["no_new_privs"], seen["nice"], seen["nofile"]) == (1, 5, [64, 64])
    assert (seen["home"], seen["user"], seen["helper"]) == (nobody.pw_dir, "nobody", str(nobody.pw_uid))
    # Both are cleared by a change of user; without them it would outlive a killed master, or be hidden from it.
    assert (seen["dies_with_parent"], seen["dumpable"]) == (9, 1)
    again = probe.result(jobs, STATUS)
    assert {**first, "pid": 0} == {**again, "pid": 0}
    assert is_gone(seen["pid"])
    # By wish, and whatever the job came to.
    once = [probe.result(jobs, "result = os.getpid()", "once") for _ in range(2)]
    assert once[0] != once[1]
    assert probe.failure(jobs, "raise RuntimeError", "once")["reason"] == "exception"
    assert daemon.find("worker fails") == []


@as_root
def test_a_job_of_another_user_is_ended_like_any_other(start_daemon, jobs):
    options = {"user": "nobody", "timeout_s": 0.3}
    start_daemon({"daemon": {"slots": 1, "kill_grace_s": 0.3}}, plugins=probe.source({"other": options}))
    attempt = probe.failure(jobs, "time.sleep(60)", "other")
    assert attempt["kind"] == "timed_out"
    attempt = probe.failure(jobs, "import itertools; sum(itertools.repeat(0))", "other")
    assert attempt["kind"] == "timed_out"
    assert "killed" in attempt["error"]


def test_what_this_daemon_may_not_do_is_refused_with_the_plugin(start_daemon, jobs):
    text = probe.source({"other": {"user": "no-such-user"}})["probe.py"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    above = probe.source({"more": {"rlimits": {"NOFILE": hard + 1}}})["probe.py"]
    daemon = start_daemon(ONE, plugins={"account.py": text, "files.py": above})
    assert jobs.wait(jobs.add([{"return": 1}]))["state"] == "COMPLETED"  # the others serve
    said = " ".join(daemon.aqd("check").stdout.split())
    assert "handler 'other': user = 'no-such-user': there is no such user" in said
    assert f"handler 'more': rlimits: NOFILE = {hard + 1} is above the hard limit of {hard}" in said
