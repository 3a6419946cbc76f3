"""Real machines: a Debian tree, booted under its own systemd in systemd-nspawn.

    with Machine("trixie") as machine:               # or the fixtures boot / module_boot (conftest.py)
        machine.write("/etc/default/x", "A=1\\n")     # also before the boot: Machine(…), write, boot()
        machine.run("systemctl", "start", "postgresql")
        machine.journal("-u", "postgresql")          # list of entries
        machine.reboot()                             # orderly; the disk stays
        machine.cut(); machine.boot()                # power cut; the disk stays

- ``Machine(release, name=, packages=(), binds={}, network=None)``. ``release``: bookworm or trixie. ``name``: its
  host name. ``packages`` are added to the tree (another tree, another minute). ``binds``: directories of the host
  that appear in the machine, ``{"/opt/x": Path(…)}``, read-only. ``network``: a network namespace's path, such as
  /run/netns/NAME (made by ``ip netns add``); else the machine has a loopback of its own and nothing more.
- ``run(*argv, check=True, timeout_s=60, input="")`` -> CompletedProcess with stdout and stderr together; a failure
  tells them. ``sh(script)`` -> stripped output. ``popen(*argv)`` for what shall go on in the background.
- ``show(unit, "MainPID", …)`` -> dict; ``wait(question)`` asks until the answer is true and returns it.
- ``open_limits()`` lets MemoryMax= and TasksMax= bite (cgroup v1 hosts need a detour).
- Each machine has a disk of its own: an overlay above the tree, in ``/var/tmp``, until ``close``. Several run at once.

The tree is made once for each release and list of packages, below $AQD_TEST_CACHE or ~/.cache/aqd-tests, from
the apt sources of this machine: 30 to 60 s, 600 MB each. Delete it to get a fresh one. Without root, mmdebstrap,
systemd-nspawn or a Debian archive the tests are skipped with the reason (``unavailable()``).

When the test process is killed, its machines power off (parent-death signal); their mounts are in a namespace
of their own and go too. The directory of the disk stays until the next machine is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RELEASES = ("bookworm", "trixie")
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "libnss-systemd", "ca-certificates", "procps", "iproute2", "curl"),
    *("python3", "python3-venv", "postgresql"),
)
_CGROUPS = Path("/sys/fs/cgroup")
_DISKS = Path("/var/tmp")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


# --- what is needed -------------------------------------------------------------------------------


def unavailable() -> str | None:
    """Why no machine can be booted here; None when one can."""
    if os.geteuid() != 0:
        return "booting a machine needs root"
    for program, package in (
        ("mmdebstrap", "mmdebstrap"),
        ("systemd-nspawn", "systemd-container"),
        ("nsenter", "util-linux"),
    ):
        if shutil.which(program) is None:
            return f"booting a machine needs {program} (apt-get install {package})"
    return None if _archive() else "booting a machine needs Debian's archive in this machine's apt sources"


def _archive() -> str | None:
    """The address of Debian's archive, as this machine's own apt knows it."""
    try:
        host = platform.freedesktop_os_release()
        command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    wanted = f"{host.get('VERSION_CODENAME')} main "
    if host.get("ID") != "debian":
        return None
    return next((line.removeprefix(wanted) for line in lines if line.startswith(wanted)), None)


def cache() -> Path:
    """Where trees are kept from run to run: never in the checkout."""
    if place := os.environ.get("AQD_TEST_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aqd-tests")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One test process at a time makes what the others wait for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tree(release: str, packages: Sequence[str] = ()) -> Path:
    """The Debian tree with these packages on top of the usual ones; made if it does not exist."""
    wanted = sorted({*PACKAGES, *packages})
    key = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:12]
    place = cache() / f"{release}-{key}"
    with locked(place.with_suffix(".lock")):
        if place.is_dir():
            return place
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        command = [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            "--dpkgopt=force-unsafe-io",
            f"--include={','.join(wanted)}",
            # Kept across reboots, and without a disk's waiting: what a power cut takes is memory, not this.
            '--customize-hook=mkdir -p "$1/var/log/journal"',
            '--customize-hook=for place in "$1"/etc/postgresql/*/main/conf.d; do '
            'echo "fsync = off" >"$place/test.conf"; done',
            release,
            str(new),
            f"deb {_archive()} {release} main",
        ]
        made = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(f"mmdebstrap {release} failed with {made.returncode}:\n{made.stdout[-4000:]}")
        new.rename(place)
    return place


def _sweep() -> None:
    """Throw away the disks of test processes that were killed."""
    for disk in _DISKS.glob("aqd-machine-*"):
        if not Path("/proc", disk.name.split("-")[2]).exists():
            _kill_group(disk.name)
            _remove_cgroups(disk.name)
            shutil.rmtree(disk, ignore_errors=True)


def _cgroups(name: str) -> list[Path]:
    if not (_CGROUPS / "systemd").is_dir():  # one hierarchy; a systemd of the host makes us a scope
        return []
    return [
        _CGROUPS / kind / name
        for kind in ("systemd", "unified", "memory", "pids")
        if (_CGROUPS / kind).is_dir()
    ]


def _kill_group(name: str) -> None:
    """What still runs of a machine: its own systemd, with which all else goes."""
    for group in _cgroups(name)[:1]:
        for file in group.rglob("cgroup.procs"):
            for pid in file.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _remove_cgroups(name: str) -> None:
    for group in _cgroups(name):
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()


# --- a machine ------------------------------------------------------------------------------------


class Machine:
    """One machine; the header of this file says how to use it."""

    def __init__(
        self,
        release: str = "bookworm",
        *,
        name: str = "",
        packages: Sequence[str] = (),
        binds: Mapping[str, Path] | None = None,
        network: str | None = None,
    ) -> None:
        self.release = release
        self.name = name or f"m{secrets.token_hex(4)}"
        self.binds = dict(binds or {})
        self.network = network
        self.leader: int | None = None  # its PID 1, as seen from here
        self._tree = tree(release, packages)
        _sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"aqd-machine-{os.getpid()}-", dir=_DISKS))
        for part in ("upper", "work", "root"):
            (self._directory / part).mkdir()
        (self._directory / "upper").chmod(0o755)
        # One's own, so that systemd does not take each start for the first boot ever (machine-id(5)).
        self.write("/etc/machine-id", secrets.token_hex(16) + "\n")
        self.write("/etc/hostname", self.name + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        try:
            return self.boot()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on and off

    def boot(self, timeout_s: float = 90) -> Machine:
        """Switch it on, and wait until systemd has started everything."""
        assert self._process is None, "it is on"
        for group in _cgroups(self._directory.name):
            group.mkdir(exist_ok=True)
        address = self._directory / "notify"
        address.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            (self._directory / "console").open("ab") as console,
        ):
            ready.bind(str(address))
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(address)},
                preexec_fn=self._before_exec,
            )
            self._wait_ready(ready, time.monotonic() + timeout_s)
        return self

    def _command(self) -> list[str]:
        layers = ",".join(
            f"{key}={value}"
            for key, value in (
                ("lowerdir", self._tree),
                ("upperdir", self._directory / "upper"),
                ("workdir", self._directory / "work"),
            )
        )
        nspawn = [
            "systemd-nspawn",
            "--quiet",
            "--register=no",
            "--boot",
            "--notify-ready=yes",
            "--console=pipe",
        ]
        if not Path("/run/systemd/system").exists():
            nspawn.append("--keep-unit")  # there is no systemd here that could give it one
        network = f"--network-namespace-path={self.network}" if self.network else "--private-network"
        binds = [f"--bind-ro={source}:{target}" for target, source in self.binds.items()]
        root = str(self._directory / "root")
        script = 'mount -t overlay -o "$0" aqd-machine "$1" && shift && exec "$@"'
        inner = [*nspawn, network, *binds, "-M", self.name, "-D", root]
        return ["unshare", "--mount", "--propagation=private", "sh", "-euc", script, layers, root, *inner]

    def _wait_ready(self, ready: socket.socket, deadline: float) -> None:
        assert self._process is not None
        ready.settimeout(0.2)
        while True:
            try:
                message = ready.recv(4096).decode()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not boot:\n{self.console()}") from None
                continue
            if found := re.search(r"X_NSPAWN_LEADER_PID=(\d+)", message):
                self.leader = int(found[1])
            if "READY=1" in message.split("\n"):
                return

    def reboot(self, timeout_s: float = 90) -> None:
        """``systemctl reboot``: services are stopped in order."""
        self.run("systemctl", "reboot", check=False)
        self._wait_off(timeout_s)
        self.boot()

    def cut(self) -> None:
        """Power cut: everything in it is gone at once. ``boot`` switches it on again."""
        assert self.leader is not None
        os.kill(self.leader, signal.SIGKILL)
        self._wait_off(30)

    def halt(self, timeout_s: float = 90) -> None:
        """``systemctl poweroff``."""
        self.run("systemctl", "poweroff", check=False)
        self._wait_off(timeout_s)

    def _wait_off(self, timeout_s: float) -> None:
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} is still on after {timeout_s:g} s:\n{self.console()}"
            ) from None
        self._process = self.leader = None
        _remove_cgroups(self._directory.name)

    def close(self) -> None:
        """Switch it off without ceremony and throw its disk away."""
        if self._process is not None:
            if self.leader is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.leader, signal.SIGKILL)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._wait_off(30)
        shutil.rmtree(self._directory, ignore_errors=True)

    def console(self) -> str:
        """The end of what the boots wrote."""
        return (self._directory / "console").read_text(errors="replace")[-4000:]

    def _before_exec(self) -> None:
        # Not SIGKILL, which the systemd in it would survive: on SIGTERM nspawn lets it power off.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        # Without groups of its own a machine would share those of this process with others. Names may repeat.
        for group in _cgroups(self._directory.name):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def open_limits(self) -> None:
        """Let its systemd write limits of memory and tasks, which nspawn shows read-only on cgroup v1; v2 needs nothing."""
        if not self.path("/sys/fs/cgroup/memory").is_dir():
            return
        for kind in ("memory", "pids"):
            self.run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{kind}")
        self.run("systemctl", "daemon-reexec")

    # --- doing things in it

    def _enter(self, argv: Sequence[str]) -> list[str]:
        assert self.leader is not None, "it is off"
        return ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "--", *argv]

    _ENVIRONMENT: Mapping[str, str] = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/root",
        "SYSTEMD_PAGER": "",
        "DEBIAN_FRONTEND": "noninteractive",
    }

    def run(
        self, *argv: str, check: bool = True, timeout_s: float = 60, input: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as its root; ``stdout`` holds both streams."""
        __tracebackhide__ = True
        done = subprocess.run(
            self._enter(argv),
            input=input,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(self._ENVIRONMENT),
            cwd="/",
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {' '.join(argv)} -> {done.returncode}\n{done.stdout}")
        return done

    def sh(self, script: str, *, check: bool = True, timeout_s: float = 60) -> str:
        """Run a shell script; what it said."""
        __tracebackhide__ = True
        return self.run("sh", "-euc", script, check=check, timeout_s=timeout_s).stdout.strip()

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in it and do not wait."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        return subprocess.Popen(self._enter(argv), text=True, env=dict(self._ENVIRONMENT), cwd="/", **options)

    def path(self, path: str) -> Path:
        """Where a file of the machine is found from here: while it is on all of them, else what differs from the tree."""
        base = Path(f"/proc/{self.leader}/root") if self.leader else self._directory / "upper"
        return base / path.lstrip("/")

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Make a file, and its directories."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(mode)

    def copy(self, source: Path, target: str) -> None:
        """Copy a file or a directory into it; ``target`` is the new path."""
        place = self.path(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, place)

    def read(self, path: str) -> str:
        """A file's text."""
        return self.path(path).read_text()

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """``systemctl show``."""
        text = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def journal(self, *arguments: str) -> list[dict[str, Any]]:
        """Entries of ``journalctl ARGUMENTS``, all their fields. What has been said until now is among them."""
        self.run("journalctl", "--sync")
        done = self.run("journalctl", "--output=json", "--all", "--no-pager", *arguments, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines or done.returncode in (0, 1), done.stdout  # 1: nothing was found
        return lines

    def wait(self, question: Callable[[], T], timeout_s: float = 30, what: str = "") -> T:
        """Ask until the answer is true, and return it."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_s
        while not (answer := question()):
            if time.monotonic() > deadline:
                lines = self.run("journalctl", "--no-pager", "--lines=400", check=False).stdout.splitlines()
                tail = "\n".join([line for line in lines if "pam_unix" not in line][-40:])
                raise AssertionError(f"{self.name}: not {what or 'true'} after {timeout_s:g} s\n{tail}")
            time.sleep(0.1)
        return answer


if __name__ == "__main__":  # python -m tests.system.machine: make the trees that tests will want
    if reason := unavailable():
        raise SystemExit(reason)
    for each in RELEASES:
        print(tree(each), flush=True)
