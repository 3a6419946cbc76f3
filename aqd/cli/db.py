"""``aqd db migrate``, ``status``, ``reset``, and ``aqd demo``."""

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
        before = migrate.status(conn)
        migrate.migrate(conn)
        after = migrate.status(conn)
    if before.current == after.current:
        click.echo(f"the schema is at version {after.current} already")
    else:
        click.echo(f"the schema went from version {before.current or 'none'} to {after.current}")


@db_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def status_command(app: App, as_json: bool) -> int:
    """Show the version of the schema; exit code 4 if it does not fit."""
    from aqd import migrate
    from aqd.cli.output import print_json

    with connect(app) as conn:
        status = migrate.status(conn)
    fits = status.current == status.wanted
    if as_json:
        print_json(status)
    else:
        click.echo(f"version {status.current or 'none'}, wanted {status.wanted}")
        for name in status.pending:
            click.echo(f"pending: {name}")
        if not fits:
            click.echo("run `aqd db migrate`" if status.pending else "this aqd is older than the schema")
    return Exit.OK if fits else Exit.DATABASE


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
        migrate.migrate(conn)
    click.echo("the schema is empty and new")


@click.command("demo")
@click.option("--once", is_flag=True, help="End with status 0 after the first PDF.")
def demo_command(once: bool) -> int:
    """Run everything on this machine, database included, and submit a first job."""
    from aqd import demo

    return demo.main(once)
