"""What jobs leave running ends with them; what they start has ordinary surroundings."""

from __future__ import annotations

import os
import signal

import pytest

from tests.fixtures import processes
from tests.fixtures.processes import wait_until
from tests.process import probe
from tests.process.support import is_gone

ONE = {"daemon": {"slots": 1}}
# Each leaves processes behind and says their numbers in ``result``.
LEAVE = {
    "a child": "result = [subprocess.Popen(['sleep', '600']).pid]",
    "in a session of its own": "result = [subprocess.Popen(['sleep', '600'], start_new_session=True).pid]",
    "a daemon": "result = [int(subprocess.run(['sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & echo $!'], "
    "stdout=subprocess.PIPE).stdout)]",
    "one that takes no notice": "p = subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; echo; sleep 600; :'], "
    "stdout=subprocess.PIPE); p.stdout.readline(); result = [p.pid]",
    "a fork": """
pid = os.fork()
if pid == 0:
    time.sleep(600)
result = [pid]
""",
    "of a thread": """
result = []
def start():
    result.append(subprocess.Popen(['sleep', '600']).pid)
    started.set()
    time.sleep(600)
started = threading.Event()
threading.Thread(target=start, daemon=True).start()
started.wait()
""",
    "a tree": """
p = subprocess.Popen(['sh', '-c', '(sleep 600 & echo $!; setsid sleep 600 & echo $!; wait) & wait'], stdout=subprocess.PIPE)
result = [p.pid, int(p.stdout.readline()), int(p.stdout.readline())]
""",
    "stopped": "p = subprocess.Popen(['sleep', '600']); os.kill(p.pid, signal.SIGSTOP); result = [p.pid]",
    "dead, and not waited for": "p = os.spawnlp(os.P_NOWAIT, 'true', 'true'); result = [p]",
}


@pytest.mark.parametrize("end", ["", "\nprint(result)\nraise RuntimeError"])
def test_nothing_outlives_its_job(start_daemon, jobs, end):
    daemon = start_daemon(ONE, plugins=probe.source())
    worker = daemon.workers()[0]
    for name, code in LEAVE.items():
        if end:
            pids = [int(word) for word in probe.failure(jobs, code + end)["output"].strip("[]\n").split(",")]
        else:
            pids = probe.result(jobs, code)
        # At the very moment that the outcome is known: a retry could not have met them.
        assert [pid for pid in pids if not is_gone(pid)] == [], name
        assert processes.descendants(worker) == [], name
    assert daemon.workers()[0] == worker


def test_a_job_that_forks_faster_than_it_can_be_killed(start_daemon, jobs):
    """Its worker gives up after a second, with the outcome sent, and the master ends the whole group."""
    daemon = start_daemon(ONE, plugins=probe.source())
    name = f"comet-{os.urandom(4).hex()}"  # all processes of the machine are looked at
    worker = probe.result(
        jobs,
        f"""
runner = "import os\\nwhile True:\\n  if os.fork(): os._exit(0)"
subprocess.Popen([sys.executable, "-S", "-c", runner, "{name}"])
time.sleep(0.2)
result = os.getpid()
""",
    )
    wait_until(lambda: not any(name in p.title for p in processes.table().values()), 15)
    assert probe.result(jobs, "result = 5") == 5
    # Either it was caught after all, or the worker has left.
    if daemon.workers()[0] != worker:
        daemon.wait_for("helpers of a job cannot be ended, leaving")


def test_a_handler_may_leave_something_behind(start_daemon, jobs):
    daemon = start_daemon(ONE, plugins=probe.source({"detached": {"detach": True}}))
    # A program, and a fork that only the worker knows of; one that is dead already is no reason to go on looking.
    kept = probe.result(
        jobs,
        LEAVE["a daemon"]
        + "\nkept = result\n"
        + LEAVE["a child"]
        + "\nresult += kept\ndead = os.spawnlp(os.P_NOWAIT, 'true', 'true')"
        + "\nos.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)",
        type="detached",
    )
    gone = probe.result(jobs, LEAVE["a daemon"])
    assert is_gone(gone[0])
    assert not any(is_gone(pid) for pid in kept)
    assert {p.pid for p in processes.descendants(daemon.workers()[0])} == set(kept)
    for pid in kept:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(processes.look(pid).state == "Z" for pid in kept))
    # Reaped with the next job.
    probe.result(jobs, "")
    assert processes.descendants(daemon.workers()[0]) == []


def test_what_a_hook_has_started_stays(start_daemon, jobs):
    hooks = """
@aqd.hookimpl
def aqd_worker_start():
    global helper
    helper = subprocess.Popen(["sleep", "600"])
"""
    daemon = start_daemon(ONE, plugins=probe.source(hooks=hooks))
    gone = probe.result(jobs, LEAVE["a daemon"])[0]
    assert is_gone(gone)
    pid, status = probe.result(jobs, "result = [helper.pid, helper.poll()]")
    assert status is None
    assert not is_gone(pid)
    # Its end is for the plugin to see, not for the worker.
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid))
    probe.result(jobs, "")
    assert probe.result(jobs, "result = helper.wait()") == -signal.SIGTERM
    assert processes.descendants(daemon.workers()[0]) == []


START = {
    # The list is made of the descriptor that it is read with, too: one more than 0 to 2.
    "subprocess": "out = subprocess.run([*cmd], stdout=subprocess.PIPE, close_fds=False, restore_signals=False).stdout",
    "posix_spawn": """
os.waitpid(os.posix_spawn(cmd[0], cmd, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, path, os.O_CREAT | os.O_WRONLY, 0o600)]), 0)
out = open(path).read()""",
    "system": "import shlex; os.system(shlex.join(cmd) + ' > ' + path); out = open(path).read()",
    "fork and exec": """
pid = os.fork()
if pid == 0:
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), 1)
    os.execv(cmd[0], cmd)
os.waitpid(pid, 0)
out = open(path).read()""",
}


@pytest.mark.parametrize("how", START)
def test_the_surroundings_of_a_helper(start_daemon, jobs, tmp_path, how):
    secrets = {
        "WATCHDOG_USEC": "1000000000",
        "LISTEN_FDNAMES": "x",
        "ADMIN_API_KEY": "not for handlers, not for handlers",
        "PGPASSWORD": "nor this",
    }
    start_daemon(ONE, plugins=probe.source(), env=secrets)
    code = f"""
start = {START[how]!r}
result = ""
# Each looks at itself: Python would ignore signals of its own, a shell blocks them for moments.
for number, cmd in enumerate([["/bin/ls", "/proc/self/fd"], ["/bin/grep", "^Sig[BI]", "/proc/self/status"], ["/usr/bin/env"]]):
    path = {str(tmp_path / "out")!r} + str(number)
    exec(start)
    result += out.decode() if isinstance(out, bytes) else out
"""
    lines = probe.result(jobs, code).splitlines()
    # ls has one open itself, for the folder that it lists.
    assert [line for line in lines if line.isdigit()] == ["0", "1", "2", "3"]
    blocked, ignored = (int(line.split()[1], 16) for line in lines if line.startswith("Sig"))
    # The C library's own two, 32 and 33, are ignored in whatever posix_spawn(3) has started.
    assert (blocked, ignored & ~(0b11 << 31)) == (0, 0)
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert {name for name in names if name.startswith(("WATCHDOG", "LISTEN", "NOTIFY"))} == set()
    assert names & secrets.keys() == set()
    assert "AQD_INTERNAL_WORKER" in names
    assert "AQD_INTERNAL_DETACH" not in names


def test_signals_as_python_code_knows_them(start_daemon, jobs):
    """Broken pipes and full files are exceptions; a forked child can be terminated; a mask does not last."""
    start_daemon(ONE, plugins=probe.source())
    assert probe.result(
        jobs,
        """
import multiprocessing, resource, tempfile
result = []
r, w = os.pipe(); os.close(r)
try: os.write(w, b"x")
except BrokenPipeError: result.append("EPIPE")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
try:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(b"x" * 10); file.write(b"x")
except OSError as error: result.append(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start(); child.terminate(); child.join(10); result.append(child.exitcode)
""",
    ) == ["EPIPE", 27, -signal.SIGTERM]
    probe.result(jobs, "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())")
    probe.result(jobs, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    probe.result(jobs, "signal.setitimer(signal.ITIMER_REAL, 0.05)")
    assert probe.result(
        jobs,
        "time.sleep(0.1); result = [subprocess.run(['sh', '-c', 'exit 3']).returncode, len(signal.pthread_sigmask(0, ()))]",
    ) == [3, 0]


def test_a_child_that_escapes_from_its_handler_ends(start_daemon, jobs, side):
    hooks = """
@aqd.hookimpl
def aqd_job_finish(job):
    import fate
    fate.write("finished")
"""
    daemon = start_daemon(ONE, plugins=probe.source(hooks=hooks))
    pid = probe.result(jobs, "result = os.fork()\nif result: os.waitpid(result, 0)")
    assert is_gone(pid)
    assert [event["pid"] for event in side.events("finished")] == [daemon.workers()[0]]


def test_what_a_plugin_starts_at_import_does_not_pile_up(start_daemon, jobs):
    """Each load would leave one more behind."""
    daemon = start_daemon(ONE, plugins=probe.source(hooks="server = subprocess.Popen(['sleep', '7770'])"))
    [first] = [p.pid for p in daemon.tree() if p.title == "sleep 7770"]
    assert daemon.aqd("reload").returncode == 0
    wait_until(lambda: is_gone(first), 20)
    second = probe.result(jobs, "result = server.pid")
    assert not is_gone(second)
