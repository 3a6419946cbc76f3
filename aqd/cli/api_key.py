"""``aqd api-key new``: make a named key for the HTTP service.

Touches nothing: the key is printed once, with the table that belongs into the file of ``api.keys_file``. Neither can
be found out again from the other.
"""

import click

from aqd.errors import InputError


@click.group("api-key")
def api_key_command() -> None:
    """Make named keys for the HTTP service."""


@api_key_command.command("new")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(["submit", "read", "admin"]),
    help="What it may do; may be given several times. admin includes the others.",
)
@click.option("--json", "as_json", is_flag=True, help="Key, hash and scopes as JSON.")
def new_command(name: str, scopes: tuple[str, ...], as_json: bool) -> None:
    """Print a new random key, once, and the table that makes the service know it."""
    from aqd import keys
    from aqd.cli.output import print_json
    from aqd.options import toml

    if reason := keys.check_name(name):
        raise InputError("NAME", reason)
    given = list(dict.fromkeys(scopes))
    key = keys.new()
    if as_json:
        print_json({"name": name, "key": key, "sha256": keys.digest(key), "scopes": given})
        return
    click.echo(f"The key, shown this once: {key}")
    click.echo(
        "For the file that api.keys_file names; then `systemctl reload aqd-api` (SIGHUP to `aqd api`),"
        " or `aqd reload` under --with-api:\n"
    )
    click.echo(f"[keys.{name}]\nsha256 = {toml(keys.digest(key))}\nscopes = {toml(given)}")
