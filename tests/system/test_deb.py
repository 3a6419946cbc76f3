"""Debian's package as administrators use it: install, configure, upgrade under load, downgrade, remove, purge.

In booted machines without a network. The story of bookworm is one test, because each step begins where the one before
has left the machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system import debian
from tests.system.machine import Machine
from tests.unit.plugins_support import handler
from tests.unit.test_plugin_env import wheel

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("deb"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests/fixtures/plugins"
LONG_S = 60
# Submits a short job every tenth of a second until the file is there; prints how many.
STREAM = """
import os, time
import psycopg
from aqd import client
count = 0
with psycopg.connect("postgresql:///aqd", autocommit=True) as conn:
    while not os.path.exists("/run/enough"):
        client.enqueue(conn, "echo", {"n": count})
        count += 1
        time.sleep(0.1)
print(count)
"""


class Host:
    """A machine with the package, and what is asked of it again and again."""

    def __init__(self, machine: Machine, release: str) -> None:
        self.machine = machine
        self.release = release

    def install(self, deb: Path, *, code: int = 0) -> str:
        name = f"/root/{deb.name}"
        if not self.machine.path(name).exists():
            self.machine.copy(deb, name)
        done = self.machine.run("dpkg", "--install", name, check=False, timeout_s=240)
        assert done.returncode == code, done.stdout
        return done.stdout

    def aqd(self, *arguments: str, code: int = 0) -> str:
        """As the service's user."""
        done = self.machine.run("runuser", "-u", "aqd", "--", "aqd", *arguments, check=False)
        assert done.returncode == code, done.stdout
        return done.stdout.strip()

    def sql(self, statement: str) -> str:
        return self.machine.sh(f"cd / && runuser -u postgres -- psql -qAtc {shlex.quote(statement)} aqd")

    def active(self, unit: str) -> str:
        return self.machine.run("systemctl", "is-active", unit, check=False).stdout.strip()

    def submit(self, type: str, payload: Any, **options: Any) -> str:
        """By SQL, which takes a tenth of the time of a command."""
        named = "".join(f", {name} => {_quoted(str(value))}" for name, value in options.items())
        return self.sql(f"select aqd.enqueue({_quoted(type)}, {_quoted(json.dumps(payload))}::jsonb{named})")

    def finished(self, id: str) -> dict[str, Any]:
        """The job, when it has ended."""
        question = f"select to_jsonb(j) from aqd.all_jobs j where id = {id} and state in ('COMPLETED', 'FAILED', 'CANCELLED')"
        return json.loads(self.machine.wait(lambda: self.sql(question), 60, f"done with job {id}"))

    def mode(self, path: str) -> str:
        return self.machine.sh(f"stat --format='%a %U %G' {path}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _host(boot: Callable[..., Machine], release: str) -> Host:
    if reason := debian.unavailable(release):
        pytest.skip(reason)
    debian.package(release)
    machine = boot(release)
    # Thousands of files, each of which dpkg would otherwise wait for the disk with.
    machine.write("/etc/dpkg/dpkg.cfg.d/fast", "force-unsafe-io\n")
    return Host(machine, release)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Not tmp_path, of which pytest keeps three: packages are large."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def test_lintian_finds_no_error() -> None:
    program = shutil.which("lintian")
    if program is None:
        pytest.skip("no lintian (apt-get install lintian)")
    if reason := debian.unavailable("bookworm"):
        pytest.skip(reason)
    done = subprocess.run(
        [program, "--allow-root", "--fail-on", "error,warning", str(debian.package("bookworm"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_mistakes_of_who_builds(tmp_path: Path) -> None:
    def said(*command: str, input: str = "") -> str:
        done = subprocess.run(
            command, input=input, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
        )
        assert done.returncode == 1
        return done.stderr

    assert "there is a package for bookworm and trixie, not for sid" in said(
        str(ROOT / "packaging/build-deb"), "sid"
    )
    # A conffile that would not say what the package needs is no package.
    if Path("/usr/bin/python3").exists():
        text = (ROOT / "etc/aqd.toml").read_text().replace('\n#venv = ""\n', "\n")
        assert "must have the line '#venv = \"\"' once" in said(
            str(ROOT / "packaging/debian/configuration"), input=text
        )


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Where it may fetch nothing: neither half a set of wheels in the cache nor its own environment."""
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    places = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(scratch)}
    done = subprocess.run(
        [ROOT / "packaging/build-deb", "bookworm"],
        env={**os.environ, **places, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "the wheels could not be fetched" in done.stdout
    assert list((cache / "aqd/deb").iterdir()) == []
    assert list(scratch.iterdir()) == []


def test_bookworm_from_installation_to_purge(boot: Callable[..., Machine], scratch: Path) -> None:
    host = _host(boot, "bookworm")
    first = debian.package("bookworm")
    install(host, first)
    start(host)
    secrets(host)
    configure(host)
    packages_of_plugins(host)
    second = debian.successor(first, "0.9", {"later": "online"}, scratch)
    upgrade_under_load(host, first, second)
    third = debian.successor(first, "0.10", {"later": "online", "much_later": "breaking"}, scratch)
    downgrades(host, first, second, third)
    instance(host)
    scripts_again(host)
    remove_and_install_again(host, third)
    purge(host)


def test_trixie(boot: Callable[..., Machine]) -> None:
    host = _host(boot, "trixie")
    install(host, debian.package("trixie"))
    start(host)
    host.machine.run("dpkg", "--purge", "aqd", timeout_s=120)
    assert host.active("aqd") == "inactive"


# --- the steps ----------------------------------------------------------------------------------------


def install(host: Host, deb: Path) -> None:
    """Everything is in its place, and nothing runs: there is no database yet."""
    machine = host.machine
    assert "see /usr/share/doc/aqd/README.Debian" in host.install(deb)
    assert machine.run("dpkg", "--audit").stdout == ""
    for unit in ("aqd", "aqd-api"):
        assert host.active(unit) == "inactive"
        assert machine.run("systemctl", "is-enabled", unit, check=False).stdout.strip() == "disabled"
    assert host.mode("/etc/default/aqd") == "640 root aqd"
    conffiles = machine.sh("dpkg-query --show --showformat='${Conffiles}' aqd")
    assert "/etc/aqd/aqd.toml " in conffiles
    assert "/etc/default/aqd " in conffiles
    assert machine.sh("aqd --version").startswith("aqd ")
    for path in (
        "/usr/share/man/man1/aqd.1.gz",
        "/usr/share/man/man5/aqd.toml.5.gz",
        "/usr/share/bash-completion/completions/aqd",
        "/usr/share/zsh/vendor-completions/_aqd",
        "/usr/share/fish/vendor_completions.d/aqd.fish",
        "/usr/share/doc/aqd/README.md.gz",
    ):
        assert machine.path(path).is_file(), path
    # Nothing of the place where it was built.
    assert not machine.sh(
        "grep -rlIE '^(command = |../../../bin/)' /usr/lib/aqd/pyvenv.cfg /usr/lib/aqd/lib/python*/site-packages/*.dist-info/RECORD || :"
    )
    shown = json.loads(host.aqd("config", "show", "--json"))
    assert shown["plugins.dir"] == {"value": "/etc/aqd/plugins.d", "source": "/etc/aqd/aqd.toml"}
    assert shown["plugins.venv"] == {"value": "/var/lib/aqd/plugins-venv", "source": "/etc/aqd/aqd.toml"}
    assert {each["source"] for each in shown.values()} == {"default", "/etc/aqd/aqd.toml"}
    found = {plugin["name"]: plugin["state"] for plugin in json.loads(host.aqd("plugins", "--json"))}
    assert found == {"generate_pdf": "loaded", "noop": "loaded"}


def start(host: Host) -> None:
    """The commands of README.Debian; the first job of the README."""
    machine = host.machine
    readme = machine.read("/usr/share/doc/aqd/README.Debian")
    commands = [line.strip() for line in readme.splitlines() if line.startswith("    ")]
    assert len(commands) == 5
    machine.sh("cd /\n" + "\n".join(commands), timeout_s=180)
    for unit in ("aqd", "aqd-api"):
        assert host.active(unit) == "active"
    body = '{"type":"generate_pdf","payload":{"text":"Hello World"}}'
    answer = machine.sh(
        f"curl --silent --show-error --fail -H 'Content-Type: application/json' -d '{body}' http://127.0.0.1:4000/jobs"
    )
    job = host.finished(json.loads(answer)["id"])
    assert job["state"] == "COMPLETED"
    assert job["result"]["file"].startswith("/var/lib/aqd/pdf/")
    assert machine.path(job["result"]["file"]).read_bytes().startswith(b"%PDF")


def secrets(host: Host) -> None:
    """By /etc/default/aqd, and by credentials that only root can read."""
    machine = host.machine
    key = "k" * 24
    machine.sh(f"echo 'ADMIN_API_KEY={key}' >>/etc/default/aqd && systemctl restart aqd-api")
    code = (
        "curl --silent --output /dev/null --write-out '%{http_code}' http://127.0.0.1:4000/admin/failed-jobs"
    )
    assert machine.sh(code) in ("401", "403")
    assert machine.sh(f"{code} -H 'x-admin-key: {key}'") == "200"
    readme = machine.read("/usr/share/doc/aqd/README.Debian")
    (command,) = (line.strip() for line in readme.splitlines() if line.startswith("  systemd-run"))
    machine.sh("echo DATABASE_URL=postgresql:///elsewhere >>/etc/default/aqd")
    assert '"elsewhere" does not exist' in machine.sh(command, check=False)
    machine.sh("sed --in-place /^DATABASE_URL=/d /etc/default/aqd")
    machine.sh(command)
    machine.write("/etc/aqd/database_url", "postgresql:///aqd?application_name=secret\n", 0o600)
    machine.write(
        "/etc/systemd/system/aqd.service.d/secret.conf",
        "[Service]\nLoadCredential=database_url:/etc/aqd/database_url\n"
        "Environment=DATABASE_URL_FILE=%d/database_url\n",
    )
    machine.sh("systemctl daemon-reload && systemctl restart aqd", timeout_s=120)
    assert json.loads(host.aqd("status", "--json"))["database"]["up"]


def configure(host: Host) -> None:
    """An edited configuration, a plugin, `systemctl reload`."""
    machine = host.machine
    machine.copy(PLUGINS / "fate.py", "/etc/aqd/plugins.d/fate.py")
    text = machine.read("/etc/aqd/aqd.toml")
    for line in ("slots = 3", 'queues = ["default"]', "drain_s = 90.0"):
        name = line.split(" =")[0]
        default = next(each for each in text.splitlines() if each.startswith(f"#{name} = "))
        text = text.replace(default, line)
    text = text.replace("#[plugins.settings]", '[plugins.settings.fate]\nside = "/var/lib/aqd/side"')
    machine.write("/etc/aqd/aqd.toml", text)
    machine.write("/etc/systemd/system/aqd.service.d/drain.conf", "[Service]\nTimeoutStopSec=120\n")
    machine.sh("systemctl daemon-reload && systemctl reload aqd", timeout_s=120)
    assert len(json.loads(host.aqd("status", "--json"))["slots"]) == 3
    assert host.finished(host.submit("echo", {"a": 1}))["result"] == {"a": 1}


def packages_of_plugins(host: Host) -> None:
    """`aqd plugin-env` by root, into what belongs to the service's user."""
    machine = host.machine
    with tempfile.TemporaryDirectory() as directory:
        wheel(Path(directory), "dep", "value = 7\n", plugin=False)
        wheel(Path(directory), "packed", f"import dep\n{handler('packed')}", needs="dep")
        machine.copy(Path(directory), "/srv/wheels")
    machine.sh("chmod 755 /srv/wheels")
    machine.run("aqd", "plugin-env", "install", "--no-index", "--find-links", "/srv/wheels", "packed")
    assert host.mode("/var/lib/aqd/plugins-venv") == "755 aqd aqd"
    machine.sh("systemctl reload aqd", timeout_s=120)
    assert host.finished(host.submit("packed", {}))["result"] == "packed"
    assert "packages: 2" in host.aqd("check")


OLD = "/opt/old/usr/lib/aqd/bin/python3 -m aqd -c /etc/old.toml run"


def old_node(host: Host, deb: Path) -> None:
    """A second daemon, which stays at its version, because dpkg does not know of it."""
    machine = host.machine
    machine.sh(
        f"dpkg-deb --extract /root/{deb.name} /opt/old && install -d -o aqd -g aqd /run/old &&"
        " ln -sf /usr/bin/python3 /opt/old/usr/lib/aqd/bin/python3"
    )
    machine.write(
        "/etc/old.toml",
        '[daemon]\nslots = 2\nqueues = ["default", "old"]\nruntime_dir = "/run/old"\n'
        '[plugins]\ndir = "/etc/aqd/plugins.d"\nentry_points = false\n',
    )
    machine.sh(f"systemd-run --unit=old --uid=aqd --property=Type=notify {OLD}", timeout_s=120)


def upgrade_under_load(host: Host, first: Path, second: Path) -> None:
    """A long job and a stream of short ones during ``dpkg --install``; beside it a node that stays at the old version."""
    machine = host.machine
    long = host.submit("fate", [{"sleep": LONG_S}], max_attempts=1)
    machine.wait(lambda: host.sql(f"select state from aqd.jobs where id = {long}") == "PROCESSING")
    old_node(host, first)
    stream = machine.popen("runuser", "-u", "aqd", "--", "/opt/old/usr/lib/aqd/bin/python3", "-c", STREAM)
    before = machine.show("aqd", "MainPID")
    said = host.install(second)
    assert "waiting for running jobs" in said
    assert machine.show("aqd", "MainPID") != before
    assert (host.active("aqd"), host.active("aqd-api"), host.active("old")) == ("active", "active", "active")
    machine.write("/run/enough", "")
    count = int(stream.communicate(timeout=60)[0])
    assert count > LONG_S

    machine.wait(lambda: host.sql("select count(*) from aqd.jobs") == "0", 60, "done with all jobs")
    # None lost, none interrupted, none run twice: each in its first attempt.
    where = "type = 'echo' and payload ? 'n'"
    assert (
        host.sql(f"select count(*), min(attempt), max(attempt) from aqd.job_history where {where}")
        == f"{count}|1|1"
    )
    assert host.finished(long)["attempt"] == 1
    assert host.sql("select count(*) from aqd.job_attempts") == "0"
    assert host.sql("select kind from aqd.migrations where name = 'later'") == "online"  # once
    # The old node works with the new schema.
    assert host.finished(host.submit("echo", 1, queue="old"))["result"] == 1
    # What the administrator has changed is as it was; packages of plugins have outlived the upgrade.
    assert "slots = 3\n" in machine.read("/etc/aqd/aqd.toml")
    assert "ADMIN_API_KEY=" in machine.read("/etc/default/aqd")
    assert host.mode("/etc/default/aqd") == "640 root aqd"
    assert host.finished(host.submit("packed", {}))["result"] == "packed"
    assert "aqd 0.9" in host.aqd("--version")


def downgrades(host: Host, first: Path, second: Path, third: Path) -> None:
    """Back is possible over online migrations, and refused over a breaking one before anything is stopped."""
    machine = host.machine
    host.install(first)
    assert host.active("aqd") == "active"
    assert host.finished(host.submit("echo", 2))["result"] == 2

    machine.sh("systemctl stop old", timeout_s=120)
    # A package that is only unpacked can be asked, and could migrate.
    machine.copy(third, f"/root/{third.name}")
    machine.sh(f"dpkg-deb -x /root/{third.name} /tmp/aqd-next && chmod 755 /tmp/aqd-next")
    packages = machine.sh("echo /tmp/aqd-next/usr/lib/aqd/lib/python3*/site-packages")
    python = ("runuser", "-u", "aqd", "--", "env", f"PYTHONPATH={packages}", "/usr/bin/python3", "-m", "aqd")
    said = machine.run(*python, "db", "status", check=False).stdout
    assert re.search(r"much_later +breaking +pending", said), said
    host.install(third)
    assert host.finished(host.submit("echo", 3))["result"] == 3
    before = machine.show("aqd", "MainPID", "ActiveState")
    said = host.install(second, code=1)
    assert "aqd: downgrade refused: the database has migration" in said
    assert "(much_later), which the older version cannot work with" in said
    assert machine.show("aqd", "MainPID", "ActiveState") == before
    assert machine.sh("dpkg-query --show --showformat='${Status} ${Version}' aqd").startswith(
        "install ok installed 0.10-"
    )
    assert "0.10" in host.aqd("--version")
    # An older one that is run all the same says why it cannot.
    program = OLD.removesuffix("run").split()
    done = machine.run("runuser", "-u", "aqd", "--", *program, "db", "status", check=False)
    assert done.returncode == 4
    assert "'much_later', is not compatible)" in done.stdout


def instance(host: Host) -> None:
    """A second daemon of the machine, and the API behind its socket."""
    machine = host.machine
    machine.write("/etc/aqd/mail.toml", '[daemon]\nruntime_dir = "/run/aqd-mail"\nslots = 1\n')
    machine.sh("systemctl enable aqd@mail aqd-api.socket && systemctl start aqd@mail", timeout_s=120)
    machine.sh("systemctl stop aqd-api && systemctl start aqd-api.socket aqd-api", timeout_s=120)


ALL = ("aqd", "aqd@mail", "aqd-api.socket", "aqd-api")


def scripts_again(host: Host) -> None:
    """What dpkg does after failures: scripts that run twice, and ones that take back what others did."""
    machine = host.machine

    def script(name: str, *arguments: str) -> None:
        environment = ("DPKG_MAINTSCRIPT_PACKAGE=aqd", f"DPKG_MAINTSCRIPT_NAME={name}")
        machine.run("env", *environment, f"/var/lib/dpkg/info/aqd.{name}", *arguments, timeout_s=180)

    def states() -> list[str]:
        return [host.active(unit) for unit in ALL]

    on, off = "active", "inactive"
    assert states() == [on, on, on, on]
    for words in (["upgrade", "99"], ["upgrade", "99"], ["failed-upgrade", "0.10", "99"]):
        script("prerm", *words)
        assert states() == [off, off, on, on]
    script("postinst", "configure", "0.10")
    assert states() == [on, on, on, on]
    for words, undo in (
        (["remove"], ["abort-remove"]),
        (["deconfigure", "in-favour", "x", "1"], ["abort-deconfigure", "in-favour", "x", "1"]),
    ):
        script("prerm", *words)
        assert states() == [off, off, off, off]
        script("postinst", *undo)
        assert states() == [on, on, on, on]
    assert not machine.path("/run/aqd.upgrade").exists()


def remove_and_install_again(host: Host, deb: Path) -> None:
    machine = host.machine
    machine.run("dpkg", "--remove", "aqd", timeout_s=180)
    for unit in ALL:
        assert host.active(unit) == "inactive", unit
    assert not machine.path("/usr/lib/aqd").exists()
    assert "slots = 3\n" in machine.read("/etc/aqd/aqd.toml")
    host.install(deb)
    assert "slots = 3\n" in machine.read("/etc/aqd/aqd.toml")
    for unit in ALL:
        assert host.active(unit) == "active", unit
    assert host.finished(host.submit("packed", {}))["result"] == "packed"


def purge(host: Host) -> None:
    """Ours is gone; what is the administrator's and the jobs' stays, and so does the database."""
    machine = host.machine
    machine.run("dpkg", "--purge", "aqd", timeout_s=180)
    left = machine.sh(
        "find /etc/aqd /etc/default/aqd /var/lib/aqd /var/log/aqd /usr/lib/aqd /run/aqd -type f 2>/dev/null || :"
    )
    assert sorted(left.split()) == [
        "/etc/aqd/database_url",
        "/etc/aqd/mail.toml",
        "/etc/aqd/plugins.d/fate.py",
        "/var/lib/aqd/pdf/1.pdf",
        "/var/lib/aqd/side",
    ]
    assert machine.sh("find /etc/systemd/system -name 'aqd*' -type l") == ""
    assert machine.run("dpkg-query", "--show", "aqd", check=False).returncode == 1
    assert int(host.sql("select count(*) from aqd.all_jobs")) > 0
