"""``aqd run``, ``api``, ``status``, ``reload``, ``stop``: start the daemon and talk to the running one.

``status``, ``reload`` and ``stop`` need only the control socket; they work while the configuration file
is broken or unreadable, which is when one wants to look at the daemon that still serves the old one.
"""

import os
import select
import sys
from typing import Any

import click

from aqd.cli.command import App
from aqd.errors import WorldError

STATUS_TIMEOUT_S = 5.0
RELOAD_TIMEOUT_S = 120.0
STOP_MARGIN_S = 15.0


@click.command("run")
@click.option("--with-api", is_flag=True, help="Also run the HTTP service as a child of the daemon.")
@click.option(
    "--insecure", is_flag=True, help="Let the HTTP service listen beyond this machine without any key."
)
@click.pass_obj
def run_command(app: App, with_api: bool, insecure: bool) -> int:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C."""
    from aqd import boot

    _set_insecure(insecure)
    return boot.main(app.config_path, with_api)


@click.command("api")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without any key.")
@click.pass_obj
def api_command(app: App, insecure: bool) -> int:
    """Run the HTTP service in the foreground."""
    from aqd import config
    from aqd.api import server

    _set_insecure(insecure)
    return server.run(config.load(app.config_path, os.environ), app.config_path)


def _set_insecure(insecure: bool) -> None:
    """For this process and its children, and so for every reload as well."""
    if insecure:
        os.environ["AQD_API_INSECURE"] = "true"


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="The daemon's answer as it is.")
@click.pass_obj
def status_command(app: App, as_json: bool) -> None:
    """Show what the running daemon does: processes, slots, plugins, problems."""
    from aqd.cli.output import print_json

    answer = _request(app, "status", STATUS_TIMEOUT_S)
    if as_json:
        print_json(answer)
    else:
        _print_status(answer)


@click.command("reload")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=RELOAD_TIMEOUT_S,
    show_default=True,
    help="How many seconds to wait for the outcome.",
)
@click.pass_obj
def reload_command(app: App, timeout_s: float) -> None:
    """Reload configuration and plugins; returns when the new ones serve, or with the reason why not."""
    answer = _request(app, "reload", timeout_s)
    click.echo(f"generation {answer.get('generation', '?')} serves")
    for problem in answer.get("problems", []):
        click.echo(f"problem: {problem}", err=True)


@click.command("stop")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    help="How many seconds to wait for the end; 0 does not wait. Default: drain_s + kill_grace_s + 15.",
)
@click.pass_obj
def stop_command(app: App, timeout_s: float | None) -> None:
    """Stop the daemon: no new jobs, running ones may finish within drain_s. Again: shortens the wait."""
    from aqd import config

    # A pid may be given to somebody else, a pidfd cannot; that the daemon answers once more afterwards
    # proves that it was the daemon's.
    pid = int(_request(app, "status", STATUS_TIMEOUT_S)["pid"])
    pidfd = _open_pidfd(pid)
    try:
        answer = _request(app, "stop", STATUS_TIMEOUT_S)
        if timeout_s == 0:
            click.echo(f"the daemon (pid {pid}) is stopping")
            return
        if timeout_s is None:
            daemon = config.load_leniently(app.config_path, os.environ).daemon
            timeout_s = daemon.drain_s + daemon.kill_grace_s + STOP_MARGIN_S
        if pidfd is not None and answer.get("pid", pid) == pid and not _ended(pidfd, timeout_s):
            raise WorldError(
                f"the daemon (pid {pid}) has not ended after {timeout_s:g} s: `aqd status` shows what still runs, "
                "another `aqd stop` shortens the wait"
            )
    finally:
        if pidfd is not None:
            os.close(pidfd)
    click.echo("the daemon has ended")


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _ended(pidfd: int, timeout_s: float) -> bool:
    """Wait until the process has ended; a zombie counts."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(min(timeout_s, 2_000_000) * 1000))


def _request(app: App, command: str, timeout_s: float) -> dict[str, Any]:
    from aqd import config, control

    cfg = config.load_leniently(app.config_path, os.environ)
    return control.request(config.control_socket(cfg), command, timeout_s)


# --- the status for people ------------------------------------------------------------------------


def _print_status(status: dict[str, Any]) -> None:
    from aqd.cli.output import duration, print_table
    from aqd.log import printable

    facts = [
        f"aqd {status.get('version', '?')}",
        str(status.get("state", "?")),
        f"node {status.get('node', '?')}",
        f"pid {status.get('pid', '?')}",
        f"generation {status.get('generation', '?')}",
        f"up {duration(status.get('uptime_s'))}",
    ]
    click.echo(printable(" · ".join(facts)))
    click.echo(printable(f"configuration: {status.get('config_path') or 'defaults and environment'}"))
    click.echo(printable(_database_line(status.get("database") or {})))
    sums = [f"{number} {name}" for name, number in (status.get("counters") or {}).items()]
    if recycled := status.get("recycled"):
        sums.append(f"{recycled} workers recycled")
    if why := status.get("restarts"):  # ended before their time
        reasons = ", ".join(f"{number} {name}" for name, number in why.items())
        sums.append(f"{sum(why.values())} workers restarted ({reasons})")
    if sums:
        click.echo(printable("since the start: " + ", ".join(sums)))
    for problem in status.get("problems", []):
        click.secho(printable(f"problem: {problem}"), fg="red" if sys.stdout.isatty() else None)
    print_table(
        ("process", "pid", "generation"),
        [(p.get("role"), p.get("pid"), p.get("generation")) for p in status.get("processes", [])],
        title="processes",
    )
    print_table(
        ("slot", "state", "job", "type", "since", "pid", "generation", "done", "held", "restarts"),
        [_slot_row(slot, duration) for slot in status.get("slots", [])],
        title="slots",
    )
    print_table(
        ("plugin", "state", "handlers", "version", "source", "error"),
        [
            tuple(plugin.get(key) for key in ("name", "state", "handlers", "version", "source", "error"))
            for plugin in status.get("plugins", [])
        ],
        title="plugins",
        empty="no plugins",
    )


def _database_line(database: dict[str, Any]) -> str:
    from aqd.cli.output import duration

    since = f" for {duration(database['since_s'])}" if database.get("since_s") is not None else ""
    if not database.get("up"):
        return f"database: away{since}: {database.get('error') or 'not connected yet'}"
    return f"database: up{since}" + ("" if database.get("listener_up", True) else ", without notifications")


def _slot_row(slot: dict[str, Any], duration: Any) -> tuple[Any, ...]:
    return (
        slot.get("slot"),
        slot.get("state"),
        slot.get("job"),
        slot.get("type"),
        duration(slot.get("since_s")),
        slot.get("pid"),
        slot.get("generation"),
        slot.get("jobs_done"),
        slot.get("held"),
        slot.get("restarts"),
    )
