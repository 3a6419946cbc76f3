"""A reload brings new plugins and configuration into service, or leaves everything as it was and says why."""

import os
import re
import signal
import threading
import time
from pathlib import Path

from aqd.errors import Exit
from tests.fixtures import processes
from tests.fixtures.processes import wait_until
from tests.process.support import backends

ANSWERS = """
from aqd import hookimpl
import helper

@hookimpl
def aqd_register(handlers):
    handlers.add("versioned", lambda payload: ["{0}", helper.VERSION])
"""
HELPER = 'VERSION = "{0}"\n'

ONE_TYPE = """
from aqd import hookimpl

@hookimpl
def aqd_register(handlers):
    handlers.add("{0}", lambda payload: "{0}")
"""

WITH_A_THREAD = """
import threading, time
from aqd import hookimpl

def talk():
    while True:
        time.sleep(0.001)
        lines.append("x")
        del lines[100:]

lines = []
threading.Thread(target=talk, daemon=True, name="talker").start()

@hookimpl
def aqd_register(handlers):
    handlers.add("threaded", lambda payload: [t.name for t in threading.enumerate()])
"""

# Each is the text of a plugin that goes wrong in its own way, and what is said about it.
BROKEN = {
    "syntax": ("def (:\n", "SyntaxError"),
    "missing": ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    "leaves": ("import sys\nsys.exit(0)\n", "sys.exit"),
    "endless": ("while True:\n    pass\n", "took longer than 1.5 s"),
    "half": (
        ONE_TYPE.format("half") + "    raise RuntimeError('in the middle')\n",
        "in the middle",
    ),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
    "vanishes": ("import os\nos._exit(0)\n", "exit code 0"),
}


def write(daemon, name, text):
    (daemon.plugins_dir / f"{name}.py").write_text(text)


def reload(daemon, *, ok=True):
    """``aqd reload``; what it printed."""
    done = daemon.aqd("reload")
    said = done.stdout + done.stderr
    assert done.returncode == (0 if ok else Exit.REFUSED), f"{said}\n{daemon.tail()}"
    assert "Traceback" not in said
    return said


def result(jobs, type, payload=None):
    row = jobs.wait(jobs.add(payload, type=type))
    assert row["state"] == "COMPLETED", row
    return row["result"]


def plugin(daemon, name):
    return next((p for p in daemon.status()["plugins"] if p["name"] == name), None)


# --- new code


def test_new_code_serves_after_the_reload_helpers_included(start_daemon, jobs):
    """F15: the same size, within the same second; one plugin gone, one new."""
    daemon = start_daemon(
        plugins={
            "versioned.py": ANSWERS.format("1"),
            "helper.py": HELPER.format("1"),
            "old.py": ONE_TYPE.format("old"),
        }
    )
    assert result(jobs, "versioned") == ["1", "1"]
    before = plugin(daemon, "versioned")
    master, dispatcher = daemon.pid, daemon.process_of("dispatcher")
    for number in ("2", "3"):
        write(daemon, "versioned", ANSWERS.format(number))
        write(daemon, "helper", HELPER.format(number))
        (daemon.plugins_dir / "old.py").unlink(missing_ok=True)
        write(daemon, "added", ONE_TYPE.format("added"))
        assert "generation" in reload(daemon)
        assert result(jobs, "versioned") == [number, number]
        assert result(jobs, "added") == "added"
    state = daemon.status()
    assert state["generation"] == 3
    assert state["problems"] == []
    assert "old" not in state["types"]
    assert "added" in state["types"]
    after = plugin(daemon, "versioned")
    assert after["digest"] != before["digest"]
    assert after["source"].endswith("versioned.py")
    assert plugin(daemon, "old") is None
    # Neither the master nor (as the configuration is the same) the dispatcher was replaced.
    assert (daemon.pid, daemon.process_of("dispatcher")) == (master, dispatcher)
    assert sum(p.title.startswith("aqd: loader") for p in daemon.tree()) == 1


def test_a_busy_worker_finishes_its_job_with_the_old_code(start_daemon, jobs, side, tmp_path):
    gate = tmp_path / "go"
    slow = f"""
import os, time
from aqd import hookimpl

def slow(payload):
    open({str(tmp_path / "begun")!r}, "a").close()
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.01)
    return "VERSION"

@hookimpl
def aqd_register(handlers):
    handlers.add("slow", slow)
"""
    daemon = start_daemon(plugins={"slow.py": slow.replace("VERSION", "old")})
    job = jobs.add(type="slow")
    wait_until((tmp_path / "begun").exists)
    busy = next(slot["pid"] for slot in daemon.status()["slots"] if slot["state"] == "busy")
    write(daemon, "slow", slow.replace("VERSION", "new"))
    reload(daemon)  # answers although one slot is still busy with the old one
    slots = {slot["pid"]: slot["generation"] for slot in daemon.status()["slots"]}
    assert slots.pop(busy) == 1
    assert list(slots.values()) == [2]
    gate.touch()
    row = jobs.wait(job)
    assert (row["state"], row["result"], row["attempt"]) == ("COMPLETED", "old", 1)
    daemon.wait_status(lambda s: [slot["generation"] for slot in s["slots"]] == [2, 2])
    assert processes.look(busy) is None
    assert result(jobs, "slow") == "new"
    assert side.events("worker_stop", pid=busy), "it was not retired in order"


def test_the_master_holds_no_plugin_no_driver_and_no_framework(daemon, jobs):
    jobs.wait(jobs.add())
    reload(daemon)
    files = set(re.findall(r"/\S+", Path(f"/proc/{daemon.pid}/maps").read_text()))
    assert files
    for name in ("psycopg", "libpq", "falcon", "gunicorn", "fate"):
        assert not [path for path in files if name in path], name
    environment = Path(f"/proc/{daemon.pid}/environ").read_bytes()
    assert environment  # of this very process
    assert len(os.listdir(f"/proc/{daemon.pid}/task")) == 1
    loader = Path(f"/proc/{daemon.process_of('loader')}/maps").read_text()
    assert "libpq" not in loader


# --- refused


def test_a_reload_with_a_broken_plugin_leaves_the_old_generation_in_service(start_daemon, jobs, side):
    """F16: nothing is interrupted, the type is still served, and everybody is told why."""
    daemon = start_daemon(plugins={"good.py": ONE_TYPE.format("good")})
    gate = side.path.parent / "go"
    running = jobs.add([{"wait_file": str(gate)}, {"return": "undisturbed"}])
    side.wait_start(running)
    workers = daemon.workers()
    for number, (name, said) in enumerate([("syntax", "SyntaxError"), ("leaves", "sys.exit")], 1):
        write(daemon, "good", BROKEN[name][0])
        answer = reload(daemon, ok=False)
        assert "good.py" in answer
        assert said in answer
        state = daemon.status()
        assert (state["generation"], state["state"]) == (1, "running")
        assert any("good" in problem and said in problem for problem in state["problems"])
        assert len(daemon.find("generation refused")) == number
        assert daemon.workers() == workers
        assert result(jobs, "good") == "good"
    write(daemon, "good", ONE_TYPE.format("good"))
    reload(daemon)
    state = daemon.status()
    assert state["generation"] > 1
    assert state["problems"] == []
    gate.touch()
    row = jobs.wait(running)
    assert (row["attempt"], row["result"]) == (1, "undisturbed")


def test_a_reload_with_a_broken_configuration_changes_nothing(daemon, jobs):
    good = daemon.config_file.read_text()
    workers = daemon.workers()
    for text, said in (
        (good.replace("slots = 2", "slots = -2"), "slots"),
        (good.replace("slots = 2", "slotz = 2"), "slotz"),
        ("this is [not toml", "aqd.toml"),
        (None, "aqd.toml"),
    ):
        if text is None:
            daemon.config_file.unlink()
        else:
            daemon.config_file.write_text(text)
        daemon.signal(signal.SIGHUP)
        state = daemon.wait_status(lambda s, said=said: any(said in p for p in s["problems"]))
        assert (state["generation"], state["state"]) == (1, "running")
    assert daemon.workers() == workers
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    daemon.config_file.write_text(good)
    reload(daemon)
    assert daemon.status()["problems"] == []


def test_plugins_that_go_wrong_at_the_start_are_named_and_the_others_serve(start_daemon, jobs):
    """F59, and F12: whatever a plugin does at import."""
    daemon = start_daemon(
        {"plugins": {"import_timeout_s": 1.5}},
        plugins={f"{name}.py": text for name, (text, _) in BROKEN.items()},
    )
    state = daemon.status()
    for name, (_, said) in BROKEN.items():
        found = plugin(daemon, name)
        assert found["state"] == "broken", name
        assert said in found["error"], found
        assert any(name in problem and said in problem for problem in state["problems"])
        assert daemon.find("plugin broken", plugin=name)
    assert "half" not in state["types"]
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    # What was broken before does not keep a reload from succeeding.
    write(daemon, "added", ONE_TYPE.format("added"))
    reload(daemon)
    assert result(jobs, "added") == "added"
    assert plugin(daemon, "syntax")["state"] == "broken"


def test_strict_mode_refuses_the_start(start_daemon):
    daemon = start_daemon(
        {"plugins": {"strict": True}}, plugins={"syntax.py": BROKEN["syntax"][0]}, wait=False
    )
    daemon.expected_exit = Exit.LOADER
    assert daemon.wait_exit() == Exit.LOADER
    refused = daemon.wait_for("generation refused")
    assert "syntax.py" in refused["reason"]
    assert "SyntaxError" in refused["reason"]


def test_a_plugin_that_nothing_stops_is_killed_with_its_loader(start_daemon, jobs, tmp_path):
    """It catches every exception; the old generation serves meanwhile, and a stop would win."""
    seen = tmp_path / "seen"
    stubborn = f"""
import os, time
with open({str(seen)!r}, "a") as file:
    print(os.getpid(), file=file)
while True:
    try:
        while True:
            time.sleep(0.01)
    except BaseException:
        pass
"""
    daemon = start_daemon({"plugins": {"import_timeout_s": 2.0}})
    write(daemon, "stubborn", stubborn)
    daemon.signal(signal.SIGHUP)
    daemon.wait_state("reloading")
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    # The margin is long (a slow machine's start is no fault); the test does not wait for it. Blamed for
    # the death of its loader is only who was at it twice.
    for attempt in (1, 2):
        wait_until(lambda n=attempt: seen.exists() and seen.read_text().count("\n") == n)
        os.kill(int(seen.read_text().split()[-1]), signal.SIGKILL)
    daemon.wait_for("generation refused")
    state = daemon.wait_state("running")
    assert state["generation"] == 1
    assert any("stubborn" in problem for problem in state["problems"])
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def importing(daemon):
    """Loaders of the second generation."""
    return [p.pid for p in daemon.tree() if "loader g2" in p.title and p.state != "Z"]


# --- the moment


def test_twenty_hangups_in_a_row_are_one_or_two_reloads(daemon, jobs):
    before = daemon.fds()
    ids = jobs.add_many(200, [{"sleep": 0.005}])
    most = 0
    for _ in range(20):
        daemon.signal(signal.SIGHUP)
        tree = daemon.tree()
        most = max(most, sum("aqd: worker" in p.title for p in tree))
    daemon.wait_status(lambda s: s["state"] == "running" and s["generation"] > 1)
    assert jobs.wait_all(ids) == {"COMPLETED": 200}
    assert {row["attempt"] for row in (jobs.get(job) for job in ids[::20])} == {1}
    assert most <= 4
    wait_until(lambda: sum("loader" in p.title for p in daemon.tree()) == 1, 10)
    state = daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    assert 2 <= state["generation"] <= 21
    wait_until(lambda: daemon.fds() <= before, 5)


def test_a_reload_asked_for_during_another_answers_for_what_it_asked(start_daemon, jobs, tmp_path):
    """Files may have changed after the first one had read them: its success is not the second's."""
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    slow = f"""
import os, time
open({str(begun)!r}, "a").close()
while os.path.exists({str(gate)!r}):
    time.sleep(0.01)
"""
    daemon = start_daemon(plugins={"a.py": ONE_TYPE.format("a1"), "b.py": slow})
    begun.unlink()
    gate.touch()
    answers = []
    first = threading.Thread(target=lambda: answers.append(daemon.aqd("reload")))
    first.start()
    wait_until(begun.exists)  # a.py has been read
    write(daemon, "a", ONE_TYPE.format("a2"))
    second = threading.Thread(target=lambda: answers.append(daemon.aqd("reload")))
    second.start()
    wait_until(lambda: len(clients(daemon)) == 2)
    gate.unlink()
    first.join()
    second.join()
    assert [done.returncode for done in answers] == [0, 0]
    assert "a2" in daemon.status()["types"], "the second reload was answered by the first one's outcome"
    assert "a1" not in daemon.status()["types"]


def clients(daemon):
    """Connections that the master holds on its control socket, besides the listening one."""
    inode = {name for name in processes.descriptors(daemon.pid).values() if name.startswith("socket:")}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    path = str(daemon.socket)
    connected = [line for line in lines if line[-1] == path and line[5] == "03"]
    return [line for line in connected if f"socket:[{line[6]}]" in inode]


def test_a_stop_wins_over_a_reload(start_daemon):
    daemon = start_daemon({"plugins": {"import_timeout_s": 50.0}})
    write(daemon, "slow", "import time\ntime.sleep(60)\n")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(daemon.aqd("reload")))
    waiting.start()
    wait_until(lambda: any("loader g2" in p.title for p in daemon.tree()))
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_exit(5) == 0
    waiting.join()
    assert answers[0].returncode == Exit.REFUSED
    assert "stopping" in answers[0].stderr


def test_the_old_loader_speaks_in_the_moment_in_which_the_new_one_is_ready(daemon, jobs, tmp_path):
    """Both events wait for the master in one turn of its loop: the second comes from one it has let go."""
    old = daemon.process_of("loader")
    os.kill(old, signal.SIGSTOP)
    os.kill(daemon.workers()[0], signal.SIGKILL)
    # Its successor was asked for, after the short pause that an idle death costs.
    daemon.wait_status(lambda s: (s["slots"][0]["pid"], s["slots"][0]["state"]) == (None, "starting"))
    gate = tmp_path / "gate"
    gate.touch()
    write(daemon, "slow", f"import os, time\nwhile os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n")
    daemon.signal(signal.SIGHUP)
    new = wait_until(lambda: next(iter(importing(daemon)), None))
    daemon.signal(signal.SIGSTOP)
    gate.unlink()
    wait_until(lambda: waits_for_a_message(new), 10)  # it has said that it is ready
    os.kill(old, signal.SIGCONT)
    wait_until(lambda: any("worker 0 g1 [idle]" in p.title for p in daemon.tree()), 5)
    began = time.monotonic()
    daemon.signal(signal.SIGCONT)
    daemon.wait_for("reload done")
    assert time.monotonic() - began < 4, "a worker that had lived was looked for"
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    assert sum("aqd: worker" in p.title for p in daemon.tree()) == 2


def waits_for_a_message(pid):
    """Inside recvmsg(2), with nothing to do."""
    number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return number == {"x86_64": "47", "aarch64": "212"}.get(os.uname().machine)


def test_a_loader_that_dies_while_the_files_are_broken_is_replaced_by_what_still_works(start_daemon, jobs):
    daemon = start_daemon(plugins={"good.py": ONE_TYPE.format("good")})
    write(daemon, "good", BROKEN["syntax"][0])
    os.kill(daemon.process_of("loader"), signal.SIGKILL)
    daemon.wait_status(lambda s: s["state"] == "running" and s["generation"] == 2)
    assert plugin(daemon, "good")["state"] == "broken"
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_workers_that_cannot_start_with_the_new_plugins_are_told(start_daemon, jobs, tmp_path):
    """A hook that kills the worker is known only once workers start; the mended file then serves."""
    dies = """
import os
from aqd import hookimpl

@hookimpl
def aqd_worker_start(slot):
    os._exit(3)
"""
    daemon = start_daemon({"daemon": {"slots": 1, "spawn_failures_max": 50}})
    write(daemon, "dies", dies)
    mark = daemon.mark()
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("worker ended", after=mark, count=2)
    (daemon.plugins_dir / "dies.py").unlink()
    reload(daemon)
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


# --- configuration


def test_slots_are_added_and_taken_away(start_daemon, jobs, side):
    daemon = start_daemon()
    daemon.configure({"daemon": {"slots": 4}})
    reload(daemon)
    assert sorted(daemon.workers()) == [0, 1, 2, 3]
    gates = [side.path.parent / f"go{n}" for n in range(4)]
    running = [jobs.add([{"wait_file": str(gate)}]) for gate in gates]
    for job in running:
        side.wait_start(job)
    daemon.configure({"daemon": {"slots": 1}})
    reload(daemon)
    assert len(daemon.status()["slots"]) == 4  # the busy ones finish first
    extra = jobs.add()
    for gate in gates:
        gate.touch()
    assert jobs.wait_all([*running, extra]) == {"COMPLETED": 5}
    assert {jobs.get(job)["attempt"] for job in running} == {1}
    daemon.wait_status(lambda s: [slot["slot"] for slot in s["slots"]] == [0])
    assert sum("aqd: worker" in p.title for p in daemon.tree()) == 1


def test_what_a_reload_cannot_change_is_named_and_the_rest_is_taken(start_daemon, jobs):
    daemon = start_daemon({"jobs": {"max_attempts": 3}})
    daemon.configure({"daemon": {"node_name": "renamed"}, "jobs": {"max_attempts": 1}})
    reload(daemon)
    assert daemon.find("option changes only with a restart", option="daemon.node_name")
    job = jobs.add([{"raise": "once"}])
    assert jobs.wait(job)["attempt"] == 1


def test_a_reload_is_done_when_its_new_dispatcher_claims(start_daemon, jobs):
    """``systemctl reload`` says so: what is asked right after it must not hear of a database that is waited for."""
    daemon = start_daemon()
    before = daemon.process_of("dispatcher")

    def hold_up():
        waits = (
            "select from pg_locks where relation = 'aqd.nodes'::regclass and not granted and pid <> all(%s)"
        )
        wait_until(lambda: before not in {p.pid for p in daemon.tree()}, 60)
        wait_until(lambda: jobs.conn.execute(waits, [earlier]).fetchone() is not None, 60)
        jobs.conn.execute("rollback")

    earlier = backends(jobs)
    jobs.conn.execute("begin; lock table aqd.nodes in access exclusive mode")
    holder = threading.Thread(target=hold_up)
    holder.start()
    daemon.configure({"daemon": {"poll_ms": 1234}})
    reload(daemon)
    status = daemon.status()
    holder.join()
    assert status["state"] == "running", status["database"]
    assert daemon.process_of("dispatcher") != before
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"


def test_a_reload_does_not_wait_for_a_database_that_is_away(proxied, start_daemon):
    daemon = start_daemon(database=proxied.url)
    proxied.proxy.refuse()
    proxied.proxy.reset_all()
    daemon.configure({"daemon": {"poll_ms": 1234}})
    reload(daemon)
    assert daemon.status()["state"] == "waiting for database"
    proxied.proxy.accept()
    daemon.wait_status(lambda s: s["state"] == "running", timeout_s=60)


# --- plugins with threads


def test_a_plugin_that_starts_a_thread_is_imported_after_the_fork(start_daemon, jobs):
    """F13: no fork beside a running thread; its workers come up and serve, again and again."""
    daemon = start_daemon(plugins={"threaded.py": WITH_A_THREAD})
    assert daemon.find("plugins start threads, importing them after the fork")
    assert plugin(daemon, "threaded")["state"] == "late"
    assert "talker" in result(jobs, "threaded")
    assert len(os.listdir(f"/proc/{daemon.process_of('loader')}/task")) == 1
    started = time.monotonic()
    for _ in range(5):
        old = set(daemon.workers().values())
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        daemon.wait_status(
            lambda s, old=old: all(slot["state"] == "idle" and slot["pid"] not in old for slot in s["slots"])
        )
        assert "talker" in result(jobs, "threaded")
    assert time.monotonic() - started < 20
    write(daemon, "threaded", WITH_A_THREAD.replace('"talker"', '"walker"'))
    reload(daemon)
    assert "walker" in result(jobs, "threaded")


def test_a_generation_whose_workers_cannot_start_is_taken_back(daemon, jobs):
    bad = "import os\nimport aqd\n\n@aqd.hookimpl\ndef aqd_worker_start(slot):\n    os._exit(3)\n"
    (daemon.plugins_dir / "bad.py").write_text(bad)
    answer = daemon.aqd("reload")
    assert answer.returncode == int(Exit.REFUSED)
    assert "end before they are ready" in answer.stderr
    status = daemon.wait_status(lambda s: all(slot["state"] == "idle" for slot in s["slots"]))
    assert status["generation"] == 1
    assert any("generation 2" in problem for problem in status["problems"])
    assert jobs.wait(jobs.add())["state"] == "COMPLETED"
    (daemon.plugins_dir / "bad.py").unlink()
    assert daemon.aqd("reload").returncode == 0
    assert daemon.status()["problems"] == []


STRANGE = '__version__ = "1\\0\\ud800"\nraise ValueError("a\\0b\\ud800" + "x" * 100_000)\n'


def test_a_plugin_whose_error_no_database_takes_does_not_hide_its_node(start_daemon, jobs):
    """The sign of life is what claims and other nodes depend on."""
    daemon = start_daemon(plugins={"strange.py": STRANGE})
    jobs.wait(jobs.add())

    def info():
        return jobs.conn.execute("select info from aqd.nodes").fetchone()["info"]

    wait_until(lambda: (info() or {}).get("plugins"), 60.0)
    (strange,) = [each for each in info()["plugins"] if each["name"] == "strange"]
    assert strange["state"] == "broken"
    assert "a\\x00b\\ud800" in strange["error"]
    assert len(strange["error"]) < 3000
    assert not [line for line in daemon.lines if line["level"] == "error" and "refuse" in line["event"]]


def test_a_node_lives_although_what_it_says_of_itself_is_refused(start_daemon, jobs):
    jobs.conn.execute("alter table aqd.nodes add constraint none check (info is null)")
    daemon = start_daemon()
    job = jobs.add()
    jobs.wait(job)
    wait_until(lambda: jobs.conn.execute("select from aqd.nodes where types <> '{}'").fetchone() is not None)
    assert daemon.stop() == 0
    said = [line for line in daemon.lines if line["event"] == "node info refused"]
    assert len(said) == 1
