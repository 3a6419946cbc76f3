"""Memory by /proc: the parsing by samples, the measuring on real processes, the kernel's counter by files."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aqd import memory
from aqd.memory import Meter, OomWatch, descendants, figures_kb, oom_kills, pause_s, shares_kb, start_stack
from tests.fixtures.processes import wait_until

MIB = 1 << 20
STATUS = b"""Name:\taqd: worker 0
VmPeak:\t  999999 kB
VmRSS:\t   30000 kB
RssAnon:\t   20000 kB
RssFile:\t    9000 kB
RssShmem:\t    1000 kB
VmSwap:\t     500 kB
Threads:\t1
"""
ROLLUP = b"""00400000-7fff00000000 ---p 00000000 00:00 0    [rollup]
Rss:               30000 kB
Pss:               12000 kB
Pss_Anon:           8000 kB
Pss_File:           3000 kB
Pss_Shmem:          1000 kB
Swap:                 40 kB
SwapPss:              20 kB
"""


def test_what_a_process_holds_of_its_own_is_anonymous_shared_and_swapped():
    assert figures_kb(STATUS) == 21_500
    assert figures_kb(b"Name:\tzombie\nState:\tZ (zombie)\n") == 0
    assert figures_kb(b"") == 0


def test_shares():
    assert shares_kb(ROLLUP) == 9020
    assert shares_kb(b"Rss: 30000 kB\nPss: 12000 kB\n") is None
    assert shares_kb(b"") is None


def test_the_start_of_the_stack_is_found_whatever_the_name_is():
    rest = b"S " + b" ".join(str(number).encode() for number in range(4, 53))
    assert start_stack(b"4711 (a) b (c)) " + rest) == 28
    assert start_stack(b"4711 (python) " + rest) == 28
    assert start_stack(b"") == 0
    assert start_stack(b"4711 (python) Z 1 2") == 0


@pytest.mark.parametrize(
    ("left_mib", "seconds"), [(-5, 0.010), (0, 0.010), (64, 64 / 1024), (102.4, 0.1), (10_000, 0.2)]
)
def test_the_pause_is_what_the_fastest_growth_takes(left_mib, seconds):
    assert pause_s(int(left_mib * 1024)) == pytest.approx(seconds, rel=1e-3)


def fill(megabytes):
    """New pages, each written to. Not from the allocator: what was freed before may be there already, and is
    handed out again without a page more (seen: 10 MiB that cost nothing)."""
    size = megabytes * MIB
    pages = mmap.mmap(-1, size or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, size, mmap.PAGESIZE):  # not at once: what is copied would come from the allocator
        pages[place] = 1
    return pages


def used_mib(meter, limit_mib=1 << 20):
    """From the second look on every fork counts."""
    meter.used_kb(limit_mib << 10)
    return meter.used_kb(limit_mib << 10) >> 10


@contextlib.contextmanager
def worker(*, before=40, grow=0, children=()):
    """A meter whose baseline was taken before the worker grew."""
    reader, writer = os.pipe()
    ready_r, ready_w = os.pipe()
    image = fill(before)  # shared with us, as a worker's is with the loader
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            os.write(ready_w, b"x")
            signal.sigwait([signal.SIGUSR1])
            own = fill(grow)
            for child in children:
                child()
            os.write(writer, b"x")
            signal.pause()
            del own
        finally:
            os._exit(0)
    try:
        assert os.read(ready_r, 1) == b"x"
        meter = Meter(pid)
        os.kill(pid, signal.SIGUSR1)
        assert os.read(reader, 1) == b"x"
        yield meter
    finally:
        for fd in (reader, writer, ready_r, ready_w):
            os.close(fd)
        for each in [*descendants(pid), pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        os.waitpid(pid, 0)
        del image


def fork_that_fills(megabytes):
    def child():
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                kept = fill(megabytes)
                os.write(writer, b"x")
                signal.pause()
                del kept
            finally:
                os._exit(0)
        os.read(reader, 1)

    return child


def program_that_fills(megabytes):
    def child():
        code = f"kept = bytearray(b'x' * 4096) * ({megabytes} * 256); print('x', flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdout.read(1)
        keep.append(process)

    keep = []
    return child


def test_the_image_does_not_count():
    with worker(before=60) as meter:
        assert used_mib(meter) < 3


def test_what_the_worker_takes_counts():
    with worker(grow=50) as meter:
        assert 48 <= used_mib(meter) <= 56


def test_a_fork_counts_for_what_it_takes_itself():
    with worker(before=60, grow=10, children=[fork_that_fills(30)]) as meter:
        # The quick figure takes the 10 MiB that both share twice ...
        assert 46 <= used_mib(meter) <= 60
        # ... the exact one, beyond the limit, does not; what the two share of the image does not count.
        assert 36 <= used_mib(meter, limit_mib=5) <= 46


def test_many_forks_of_a_large_worker_take_what_they_share_once():
    with worker(grow=50, children=[fork_that_fills(1)] * 4) as meter:
        assert used_mib(meter) > 200
        assert 48 <= used_mib(meter, limit_mib=64) <= 75


def test_a_fork_counts_from_the_second_look_on():
    with worker(children=[fork_that_fills(50)]) as meter:
        assert meter.used_kb(1 << 20) >> 10 < 5
        assert meter.unsure
        assert meter.used_kb(1 << 20) >> 10 > 40
        assert not meter.unsure


def test_of_forks_that_end_while_they_are_looked_at_only_what_one_has_is_sure(monkeypatch):
    with worker(grow=50, children=[fork_that_fills(1)] * 4) as meter:
        meter.used_kb(1 << 20)
        exact = meter._exact_kb

        def while_one_ends(family, sharers):
            os.kill(family[-1], signal.SIGKILL)
            wait_until(lambda: not figures_kb(_status(family[-1])))
            return exact(family, sharers) * 3

        monkeypatch.setattr(meter, "_exact_kb", while_one_ends)
        assert 48 <= meter.used_kb(40 << 10) >> 10 <= 56
        assert meter.unsure


def _status(pid):
    return Path(f"/proc/{pid}/status").read_bytes()


def test_another_program_counts_whole():
    with worker(grow=5, children=[program_that_fills(40)]) as meter:
        assert 40 <= used_mib(meter) <= 60
        assert 40 <= used_mib(meter, limit_mib=10) <= 60


def test_shared_memory_counts():
    def child():
        shared = mmap.mmap(-1, 30 * MIB)  # anonymous and shared: RssShmem
        shared.write(b"x" * (30 * MIB))
        keep.append(shared)

    keep = []
    with worker(children=[child]) as meter:
        assert 28 <= used_mib(meter) <= 36


def test_a_start_hook_s_memory_can_be_left_out_of_account():
    with worker(grow=40) as meter:
        meter.rebase()
        assert used_mib(meter) < 3


def test_a_process_that_is_gone_uses_nothing():
    with worker(grow=10) as meter:
        pass
    assert used_mib(meter) == 0
    assert descendants(meter.pid) == []


def test_descendants_are_found_over_generations_and_threads():
    code = (
        "import subprocess, threading, sys\n"
        "def start(): started.append(subprocess.Popen(['sh', '-c', 'sleep 60; :']))\n"
        "started = []\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "print('x', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        found = wait_until(lambda: (d := descendants(process.pid)) and len(d) == 2 and d)
        process.kill()
        for pid in found:
            os.kill(pid, signal.SIGKILL)


# --- the kernel's own killing


def counter(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_counter_of_a_unified_hierarchy(tmp_path):
    counter(tmp_path / "cg/system.slice/aqd.service/memory.events", "low 0\nmax 9\noom 3\noom_kill 2\n")
    assert oom_kills("0::/system.slice/aqd.service\n", str(tmp_path / "cg"), "/nowhere") == 2


def test_the_counter_of_a_container_is_at_its_own_root(tmp_path):
    counter(tmp_path / "cg/memory.events", "oom_kill 5\n")
    assert oom_kills("0::/not/visible/here\n", str(tmp_path / "cg"), "/nowhere") == 5


def test_the_counter_of_a_memory_controller_of_its_own(tmp_path):
    counter(tmp_path / "cg/memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    text = "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"
    assert oom_kills(text, str(tmp_path / "cg"), "/nowhere") == 7


def test_the_machine_s_counter_when_there_is_no_other(tmp_path):
    counter(tmp_path / "vmstat", "pgfault 12\noom_kill 4\n")
    assert oom_kills("0::/\n", str(tmp_path / "none"), str(tmp_path / "vmstat")) == 4
    assert oom_kills("", str(tmp_path / "none"), str(tmp_path / "none")) is None


def test_each_rise_explains_one_death_for_a_while(monkeypatch):
    count = [3]
    monkeypatch.setattr(memory, "oom_kills", lambda _text: count[0])
    watch = OomWatch()
    assert not watch.explains_death(10.0)
    count[0] = 5
    watch.look(11.0)
    assert watch.explains_death(11.5)
    assert watch.explains_death(11.5)
    assert not watch.explains_death(11.5)
    count[0] = 6
    watch.look(12.0)
    assert not watch.explains_death(12.0 + memory.OOM_RECENT_S + 0.1)


def test_without_a_counter_nothing_is_put_down_to_the_kernel(monkeypatch):
    monkeypatch.setattr(memory, "oom_kills", lambda _text: None)
    assert not OomWatch().explains_death(1.0)
