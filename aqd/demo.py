"""``aqd demo``: everything on this machine, database included, and a first job.

Runs in: its own process, the parent of an embedded PostgreSQL and of ``aqd run --with-api``. Keeps
everything below one directory (see :func:`demo_directory`): ``postgres/``, ``pdf/``, ``admin-key``,
``demo.toml``, ``daemon.log``, ``run/``. A second run continues with the same data.

Promises: nothing of it is reachable from outside this machine; Ctrl-C and SIGTERM end all of it in good
order; when this process is killed the others end by themselves, and the next run waits for that.

Fails with the reason in one line: the port is in use, another demo uses the directory, no PostgreSQL
binaries, the daemon did not start (the end of its log is shown).
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg

from aqd import config, embedded, migrate
from aqd.binaries import can_reach, server_account, spawn
from aqd.errors import AqdError, ConfigError, Exit, WorldError

HOST = "127.0.0.1"
PORT = 4000
SLOTS = 4
READY_S = 60.0
JOB_S = 60.0
LEFTOVER_S = 20.0
PORT_S = 3.0  # an API that was killed may take a moment to let go of it
EXAMPLE = '{"type":"generate_pdf","payload":{"text":"Hello World"}}'


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: unwinds whatever is under way."""


def main(once: bool = False) -> int:
    """Runs the demo until Ctrl-C (``once``: until the first PDF); returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _on_signal)
    try:
        Demo(demo_directory(), _port()).run(once)
    except Stopped:
        say("stopped.")
    return Exit.OK


def demo_directory() -> Path:
    """Where the demo keeps everything.

    ``AQD_DEMO_DIR``; else below ``XDG_DATA_HOME``; else ``/var/lib/aqd-demo`` for root, because
    the server's user must be able to enter it, and ``~/.local/share/aqd`` for everybody else.
    """
    if chosen := os.environ.get("AQD_DEMO_DIR"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_DATA_HOME", "")
    if os.geteuid() == 0:
        usable = os.path.isabs(base) and can_reach(server_account(), _existing(Path(base)))
        return Path(base, "aqd") if usable else Path("/var/lib/aqd-demo")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local/share") / "aqd"


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def _port() -> int:
    text = os.environ.get("AQD_DEMO_PORT") or str(PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65_535:
        raise ConfigError(f"environment: AQD_DEMO_PORT = {text}: must be a port, 1 to 65535")
    return int(text)


def say(text: str) -> None:
    """Tells the user. Whoever reads may have gone away; that must not stop the stopping."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


class Demo:
    """One demo: start, first job, wait, stop."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.url = f"http://localhost:{port}"
        self.config_file = directory / "demo.toml"
        self.key_file = directory / "admin-key"
        self.log_file = directory / "daemon.log"
        self.runtime_dir = directory / "run"
        self.server = embedded.EmbeddedPostgres(
            directory / "postgres", binaries=os.environ.get("AQD_EMBEDDED_BINARIES"), report=say
        )
        self.daemon: subprocess.Popen[bytes] | None = None
        # The user's proxy has no business between two processes of one machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def run(self, once: bool) -> None:
        """All of it, and the stop whatever happens."""
        say(f"aqd demo: everything is kept in {self.directory}")
        try:
            self.start()
            self.first_job()
            if not once:
                self.explain()
                self.watch()
        finally:
            # A second Ctrl-C must not leave half of it running: the stop has its own time limits.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            self.stop()

    def start(self) -> None:
        """Database, schema, daemon with API, until the API says that all is well."""
        self.server.start()
        assert self.server.binaries is not None
        say(f"PostgreSQL {self.server.binaries.version} runs (unix socket {self.server.socket_dir})")
        # Only now: a daemon of an earlier demo may just be ending, and only the server's lock proves
        # that the earlier demo itself is gone.
        self._wait_for_leftover()
        _check_port(self.port)
        self._prepare_files()
        with psycopg.connect(self.server.url, autocommit=True) as conn:
            migrate.migrate(conn)
        command = [sys.executable, "-m", "aqd", "--config", str(self.config_file), "run", "--with-api"]
        with self.log_file.open("wb") as output:
            # SIGKILL when we die: its database ends at the same moment, so a drain could record nothing.
            self.daemon = spawn(
                command,
                account=None,
                environment=child_environment(),
                output=output,
                death_signal=signal.SIGKILL,
                directory=os.getcwd(),
                umask=-1,
            )
        self._wait_for_health()
        say(
            f"the daemon runs: process {self.daemon.pid}, {SLOTS} slots, API on {self.url}, log {self.log_file}"
        )

    def first_job(self) -> None:
        """The README's example, literally, and where its PDF is."""
        say(f"\nPOST {self.url}/jobs  {EXAMPLE}")
        status, job = self._request("/jobs", EXAMPLE.encode())
        say(f"  {status} {json.dumps(job)}")
        deadline = time.monotonic() + JOB_S
        while status in (200, 201) and job.get("status") not in ("COMPLETED", "FAILED"):
            if time.monotonic() > deadline:
                raise WorldError(
                    f"job {job.get('id')} is {job.get('status')} after {JOB_S:g} s\n{self._log_tail()}"
                )
            time.sleep(0.05)
            self._check_daemon()
            status, job = self._request(f"/jobs/{job['id']}")
        if job.get("status") != "COMPLETED":
            raise WorldError(f"the example did not complete: {json.dumps(job)}")
        say(f"GET {self.url}/jobs/{job['id']}\n  {status} {json.dumps(job)}")
        say(f"\nthe PDF: {job['result']['file']}")

    def explain(self) -> None:
        """What to try next."""
        aqd = f"{sys.executable} -m aqd --config {self.config_file}"
        say(
            f"""
Now try, in another terminal:

  curl -X POST {self.url}/jobs -H "Content-Type: application/json" \\
    -d '{EXAMPLE}'
  curl {self.url}/jobs/1
  curl '{self.url}/jobs?state=COMPLETED&limit=10'
  curl {self.url}/health
  curl -H "x-admin-key: $(cat {self.key_file})" {self.url}/admin/failed-jobs
  {aqd} status

Ctrl-C stops everything; the data stay for the next time."""
        )

    def watch(self) -> None:
        """Until a signal: the server is started again if it dies, the daemon's end is ours."""
        while True:
            time.sleep(0.5)
            self._check_daemon()
            self.server.revive()

    def stop(self) -> None:
        """Daemon first, then its database."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(LEFTOVER_S)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        self.server.stop()

    # --- parts

    def _wait_for_leftover(self) -> None:
        """A daemon that an earlier demo left behind is draining; the lock on its pid file says until when."""
        deadline = time.monotonic() + LEFTOVER_S
        told = False
        with contextlib.suppress(FileNotFoundError), (self.runtime_dir / "aqd.pid").open() as file:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                if not told:
                    say("a daemon of an earlier demo is still ending; waiting for it")
                    told = True
                file.seek(0)
                if time.monotonic() > deadline and (pid := file.read().strip()).isdigit():
                    os.kill(int(pid), signal.SIGKILL)
                    deadline += LEFTOVER_S
                time.sleep(0.05)

    def _prepare_files(self) -> None:
        for path in (self.runtime_dir, self.directory / "pdf"):
            path.mkdir(exist_ok=True)
        if not self.key_file.exists() or not self.key_file.read_text().strip():
            with open(os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
        text = {
            name: json.dumps(str(value))
            for name, value in {"url": self.server.url, "run": self.runtime_dir}.items()
        }
        self.config_file.write_text(
            f"""# Written by aqd demo at each start.
[database]
url = {text["url"]}

[daemon]
slots = {SLOTS}
drain_s = 5
kill_grace_s = 2
runtime_dir = {text["run"]}

[api]
host = "{HOST}"
port = {self.port}
admin_api_key_file = {json.dumps(str(self.key_file))}

[plugins.settings.generate_pdf]
output_dir = {json.dumps(str(self.directory / "pdf"))}

[log]
format = "human"
"""
        )

    def _wait_for_health(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            self._check_daemon()
            with contextlib.suppress(OSError):
                status, _body = self._request("/health")
                if status == 200:
                    return
            if time.monotonic() > deadline:
                raise WorldError(f"the API was not healthy after {READY_S:g} s\n{self._log_tail()}")
            time.sleep(0.05)

    def _check_daemon(self) -> None:
        if self.daemon is not None and (status := self.daemon.poll()) is not None:
            raise WorldError(f"the daemon ended with status {status}\n{self._log_tail()}")

    def _request(self, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON of one request; :class:`OSError` when there is no answer."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", data=body, headers=headers)
        try:
            with self._http.open(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read() or b"{}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:])
        return ""


def child_environment() -> dict[str, str]:
    """Ours without aqd's options: the demo must not run on the database of somebody's DATABASE_URL."""
    options = {name for option in config.OPTIONS.values() for name in option.env}
    options |= {f"{name}_FILE" for name in options} | {"AQD_CONFIG"}
    return {name: value for name, value in os.environ.items() if name not in options}


def _check_port(port: int) -> None:
    deadline = time.monotonic() + PORT_S
    with socket.socket() as probe:
        # As the API will: connections of an earlier run in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                probe.bind((HOST, port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise WorldError(
                        f"cannot listen on {HOST}:{port}: {error.strerror}. Stop what uses it, or choose "
                        "another port: AQD_DEMO_PORT=4001 packaging/demo"
                    ) from None
            time.sleep(0.05)


def _on_signal(_number: int, _frame: object) -> None:
    raise Stopped


def run() -> int:
    """As :func:`main`, with errors as one line: for ``python -m aqd.demo``."""
    try:
        return main("--once" in sys.argv[1:])
    except AqdError as error:
        print(f"aqd: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
