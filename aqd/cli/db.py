"""``aqd db migrate``, ``status``, ``roles``, ``reset``, and ``aqd demo``."""

import os
from typing import TYPE_CHECKING

import click

from aqd.cli.command import App
from aqd.errors import Exit

if TYPE_CHECKING:
    from aqd.database import Connection


@click.group("db")
def db_command() -> None:
    """Create, upgrade, look at or empty the database schema."""


def connect(app: App) -> "Connection":
    """A connection for a command; the caller closes it."""
    from aqd import config, store

    return store.connect(config.load(app.config_path, os.environ).database, "aqd")


@db_command.command("migrate")
@click.pass_obj
def migrate_command(app: App) -> None:
    """Bring the schema to this version; safe to run on many machines at once."""
    from aqd import migrate

    with connect(app) as conn:
        applied = migrate.migrate(conn)
        version = migrate.status(conn).current
    for migration in applied:
        click.echo(f"applied {migration.version:04} {migration.name} ({migration.kind})")
    click.echo(f"the schema is at version {version}")


@db_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def status_command(app: App, as_json: bool) -> int:
    """Show the version of the schema; exit code 4 if it does not fit."""
    from aqd import migrate
    from aqd.cli.output import print_json, print_table

    with connect(app) as conn:
        status = migrate.status(conn)
    if as_json:
        print_json(
            {
                "current": status.current,
                "wanted": status.wanted,
                "ok": status.problem is None,
                "problem": status.problem,
                "applied": [entry._asdict() for entry in status.applied],
                "pending": [f"{entry.version:04}_{entry.name}" for entry in status.pending],
            }
        )
    else:
        print_table(
            ("version", "name", "kind", "applied"),
            [(e.version, e.name, e.kind, e.applied_at) for e in status.applied]
            + [(e.version, e.name, e.kind, "pending") for e in status.pending],
        )
        click.echo(status.problem or f"the schema is at version {status.current}, as this aqd needs it")
    return Exit.OK if status.problem is None else Exit.DATABASE


@db_command.command("roles")
@click.option("--prefix", default="aqd", show_default=True, help="What the names of the roles begin with.")
@click.option("--sql", "only_sql", is_flag=True, help="Only print what a superuser must run for it.")
@click.pass_obj
def roles_command(app: App, prefix: str, only_sql: bool) -> None:
    """Make a role for each duty and give it its rights; safe to repeat.

    PREFIX_owner owns the schema and migrates; PREFIX_daemon, PREFIX_api and PREFIX_submit may do what daemons, the API,
    and applications that only submit need, and nothing else. They are groups: make users members of them.
    """
    from aqd import roles

    with connect(app) as conn:
        if only_sql:
            for line in roles.script(conn, prefix):
                click.echo(line)
            return
        made = roles.set_up(conn, prefix)
    for role in made.roles.values():
        click.echo(f"{role}: {'created' if role in made.created else 'was there'}")
    click.echo(f"the schema belongs to {made.roles['owner']}, the others have their rights")


@db_command.command("reset")
@click.option("--yes", is_flag=True, help="Yes, drop every job and all history.")
@click.pass_obj
def reset_command(app: App, yes: bool) -> None:
    """Drop the schema with every job in it and create it anew. Needs --yes."""
    if not yes:
        raise click.UsageError("this drops every job and all history; say --yes if that is what you want")
    from aqd import migrate

    with connect(app) as conn:
        migrate.reset(conn)
    click.echo("the schema is empty and new")


@click.command("demo")
@click.option("--once", is_flag=True, help="End with status 0 after the first PDF.")
def demo_command(once: bool) -> int:
    """Run everything on this machine, database included, and submit a first job."""
    from aqd import demo

    return demo.main(once)
