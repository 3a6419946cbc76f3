"""``aqd check``, ``config show``, ``plugins``, ``health``: look without starting anything.

Plugins are never imported here: :func:`aqd.plugins.inspect` does it in a child process, so a plugin that
hangs, crashes or exits cannot take the command with it.
"""

import os
from typing import TYPE_CHECKING, Any

import click

from aqd.cli.command import App
from aqd.errors import ConfigError, Exit

if TYPE_CHECKING:
    from aqd.config import Config

# Below the 10 s that the image's health check has, start of the interpreter included.
HEALTH_TIMEOUT_S = 5.0


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_obj
def check_command(app: App, as_json: bool) -> int:
    """Validate configuration, plugins and database without starting anything.

    Exit code: 0 when all is well, 3 for the configuration or a plugin, 4 for the database.
    """
    from aqd import config
    from aqd.cli.output import print_json, print_table

    findings = Findings()
    try:
        loaded = config.load_with_sources(app.config_path, os.environ)
    except ConfigError as error:
        for line in str(error).splitlines():
            findings.add("configuration", app.config_path or "-", "failed", config.mask(line), Exit.CONFIG)
    else:
        findings.add("configuration", loaded.path or "defaults and environment", "ok", "")
        _check_keys(loaded.config, findings)
        _check_plugins(loaded.config, findings)
        _check_plugin_env(loaded.config.plugins.venv, findings)
        _check_database(loaded.config, findings)
    if as_json:
        print_json([dict(zip(Findings.COLUMNS, row, strict=True)) for row in findings.rows])
    else:
        print_table(Findings.COLUMNS, findings.rows)
    return findings.exit_code


class Findings:
    """Rows of the report; the first failure decides the exit code."""

    COLUMNS = ("part", "what", "result", "reason")

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.exit_code: int = Exit.OK

    def add(self, part: str, what: str, result: str, reason: str, code: int = Exit.OK) -> None:
        self.rows.append((part, what, result, reason))
        self.exit_code = self.exit_code or code


def _check_keys(cfg: Any, findings: Findings) -> None:
    """The API's keys, as it would read them; and whether it would start with them."""
    from aqd import keys

    host = cfg.api.host
    local = keys.is_loopback(host) or host == "localhost"
    try:
        ring = keys.load(cfg.api, None)
        keys.load(cfg.api, None if local else f"{host}:{cfg.api.port}")
    except ConfigError as error:
        for line in str(error).splitlines():
            findings.add("configuration", "keys", "failed", line, Exit.CONFIG)
        return
    if named := ", ".join(key.name for key in ring.keys if key.name != keys.ADMIN):
        findings.add("configuration", "keys", "ok", named)
    if not ring.gives(keys.Scope.ADMIN):
        reason = "not set, and no named key is an admin's: the admin routes are closed (403)"
        findings.add("configuration", "api.admin_api_key", "note", reason)


def _check_plugins(cfg: Any, findings: Findings) -> None:
    from aqd import plugins
    from aqd.errors import PluginError

    try:
        found = plugins.inspect(cfg)
    except (PluginError, OSError) as error:
        findings.add("plugins", str(cfg.plugins.dir or "-"), "failed", str(error), Exit.CONFIG)
        return
    if not found:
        findings.add("plugins", "-", "note", "there are none: every job will be of an unknown type")
    for plugin in found:
        if plugin.error:
            findings.add("plugin", f"{plugin.name} ({plugin.source})", "failed", plugin.error, Exit.CONFIG)
        else:
            findings.add("plugin", plugin.name, "ok", ", ".join(plugin.handlers))


def _check_plugin_env(venv: str, findings: Findings) -> None:
    """The packages of an environment that fits; one that does not is among the broken plugins already."""
    from aqd import plugin_env
    from aqd.cli.plugin_env import check

    if not os.path.lexists(venv) or plugin_env.problem(venv) is not None:
        return
    if wrong := check(venv):
        for line in wrong.splitlines():
            findings.add("plugins.venv", venv, "failed", line, Exit.CONFIG)
    else:
        findings.add("plugins.venv", venv, "ok", f"packages: {len(plugin_env.packages(venv))}")


def _check_database(cfg: Any, findings: Findings) -> None:
    import psycopg

    from aqd import migrate, store
    from aqd.config import mask
    from aqd.database import check_same_database, for_listening
    from aqd.errors import WorldError

    where = mask(cfg.database.url)

    try:
        with store.connect(cfg.database, "aqd check") as conn:
            findings.add("database", where, "ok", "")
            migrate.check(conn)
            findings.add("schema", "aqd", "ok", "")
        if cfg.database.listen_url:
            where = mask(cfg.database.listen_url)
            with store.connect(for_listening(cfg.database), "aqd check") as conn:
                check_same_database(cfg.database, conn)
            findings.add("database", where, "ok", "")
    except (WorldError, psycopg.Error) as error:
        part = "schema" if findings.rows[-1][0] == "database" else "database"
        reason = mask(" ".join(str(error).split()))
        findings.add(part, where if part == "database" else "aqd", "failed", reason, Exit.DATABASE)


@click.group("config")
def config_command() -> None:
    """Look at the configuration."""


@config_command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Values and origins as JSON.")
@click.pass_obj
def show_command(app: App, as_json: bool) -> None:
    """Print the values in effect as TOML, each with where it came from. Secrets are masked."""
    from aqd import config
    from aqd.cli.output import print_json
    from aqd.log import printable

    loaded = config.load_with_sources(app.config_path, os.environ)
    values = {
        key: (getattr(getattr(loaded.config, option.section), option.name), loaded.source_of(key))
        for key, option in config.OPTIONS.items()
    }
    if as_json:
        print_json(
            {
                key: {"value": config.masked(key, value), "source": source}
                for key, (value, source) in values.items()
            }
        )
        return
    click.echo(f"# file: {loaded.path or 'none'}")
    section = ""
    for key, (value, source) in values.items():
        option = config.OPTIONS[key]
        if option.section != section:
            section = option.section
            click.echo(f"\n[{section}]")
        line = f"{option.name} = {config.shown(key, value)}"
        click.echo(printable(line if source == "default" else f"{line:<40}  # {source}"))


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="All that is known as JSON.")
@click.pass_obj
def plugins_command(app: App, as_json: bool) -> None:
    """List the plugins that would be loaded, and why the broken ones would not."""
    from aqd import config, plugins
    from aqd.cli.output import print_json, print_table

    cfg = config.load(app.config_path, os.environ)
    found = plugins.inspect(cfg)
    if as_json:
        print_json(found)
        return
    print_table(
        ("plugin", "state", "handlers", "version", "digest", "source", "error"),
        [(p.name, p.state, p.handlers, p.version, p.digest, p.source, p.error) for p in found],
        empty=f"no plugins in {config.plugins_dir(cfg)}",
    )


@click.command("health")
@click.option("--node", "node", is_flag=True, help="Ask the daemon of this machine whether it takes jobs.")
@click.option("--api", "api", is_flag=True, help="Ask the HTTP service of this machine.")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_obj
def health_command(app: App, node: bool, api: bool, as_json: bool) -> int:
    """Whether a job could be accepted now: exit code 0 or 1. Says how many nodes would run it.

    With --node or --api: whether what runs here does its work, for health checks of containers. The database is then
    asked by it, not by this command.
    """
    from aqd import config
    from aqd.cli.output import print_json

    if node and api:
        raise click.UsageError("--node and --api ask two different processes: give one of them")
    cfg = config.load(app.config_path, os.environ)
    document: dict[str, Any] = {"status": "unavailable", "database": "unavailable", "reason": None}
    document |= _node_health(cfg) if node else _api_health(cfg) if api else _database_health(cfg)
    if as_json:
        print_json(document)
    elif document["reason"]:
        click.echo(f"{document['status']}: {document['reason']}")
    else:
        click.echo(f"ok, state: {document['state']}" if node else f"ok, live nodes: {document['nodes']}")
    return Exit.OK if document["status"] == "ok" else Exit.ERROR


def _database_health(cfg: "Config") -> dict[str, Any]:
    import psycopg

    from aqd import config, store

    found: dict[str, Any] = {"nodes": None}
    try:
        with store.connect(cfg.database, "aqd health") as conn:
            found["database"] = "ok"
            health = store.health(conn, cfg.keeper.node_ttl_s)
    except psycopg.Error as error:
        return found | {"reason": config.mask(" ".join(str(error).split()))}
    return found | {
        "status": "unavailable" if health.problem else "ok",
        "reason": health.problem,
        "nodes": health.live_nodes,
    }


def _node_health(cfg: "Config") -> dict[str, Any]:
    """A node that starts, drains or waits for its database takes no jobs; one that reloads does."""
    from aqd import config, control
    from aqd.errors import NotRunning

    try:
        status = control.request(config.control_socket(cfg), "status", HEALTH_TIMEOUT_S)
    except NotRunning as error:
        return {"state": None, "reason": str(error)}
    database, state = status["database"], status["state"]
    serves = database["up"] and state in ("running", "reloading")
    reason = None if serves else f"the daemon is {state}"
    if reason and not database["up"] and database["error"]:
        reason += f": {config.mask(database['error'])}"
    return {
        "status": "ok" if serves else "unavailable",
        "database": "ok" if database["up"] else "unavailable",
        "state": state,
        "reason": reason,
    }


def _api_health(cfg: "Config") -> dict[str, Any]:
    """``GET /health`` at the address that is configured; a wildcard includes the loopback."""
    import http.client
    import json

    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(cfg.api.host, cfg.api.host)
    connection = http.client.HTTPConnection(host, cfg.api.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"no answer from {host}:{cfg.api.port}: {error or type(error).__name__}"
        return {"nodes": None, "reason": reason}
    finally:
        connection.close()
    found: dict[str, Any] = {"status": answer.get("status"), "database": answer.get("database")}
    if found["status"] != "ok":
        schema = answer.get("schema") or {}
        reason = schema.get("reason") or "the API has no connection to its database"
        return found | {"nodes": None, "reason": reason}
    return found | {"nodes": answer["nodes"]["live"]}
