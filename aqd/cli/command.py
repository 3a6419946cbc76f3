"""The command line: finds the command, reports errors on one line, gives the exit code.

Promises: a user's mistake and a failure of the world give one line ``aqd: …`` on standard error and the
exit code of :class:`aqd.errors.Exit`, never a traceback (``AQD_DEBUG=1`` shows it); Ctrl-C ends quietly
with 130, a reader that goes away with 141, as shells report SIGINT and SIGPIPE. Heavy modules (psycopg,
rich, falcon) are imported inside the commands that use them, so that ``aqd run`` reaches the master soon.
"""

import os
import signal
import sys
from collections.abc import Sequence

import click

from aqd.errors import AqdError, Exit


class App:
    """What the global options say; the object of the click context."""

    def __init__(self, config_path: str | None = None) -> None:
        self.config_path = config_path


class _Commands(click.Group):
    """Finds a command in its module when it is asked for."""

    MODULES = {  # noqa: RUF012
        "run": "daemon",
        "api": "daemon",
        "api-key": "api_key",
        "status": "daemon",
        "reload": "daemon",
        "stop": "daemon",
        "check": "inspection",
        "config": "inspection",
        "plugins": "inspection",
        "plugin-env": "plugin_env",
        "health": "inspection",
        "db": "db",
        "demo": "db",
        "bench": "bench",
        "submit": "submit",
        "jobs": "jobs",
        "failed": "jobs",
        "queues": "figures",
        "types": "figures",
        "nodes": "figures",
        "metrics": "figures",
        "completion": "manual",
        "manual": "manual",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.MODULES:
            return None
        from importlib import import_module

        name = f"{cmd_name.replace('-', '_')}_command"
        command = getattr(import_module(f"aqd.cli.{self.MODULES[cmd_name]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.MODULES:
            from aqd.options import did_you_mean

            ctx.fail(f"there is no command {args[0]!r}{did_you_mean(args[0], self.MODULES)}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        from aqd import __version__

        click.echo(f"aqd {__version__}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-c",
    "--config",
    "config_path",
    metavar="PATH",
    help="The configuration file (default: AQD_CONFIG, else /etc/aqd/aqd.toml if it exists).",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def aqd_command(ctx: click.Context, config_path: str | None) -> None:
    """A job-queue daemon on PostgreSQL."""
    ctx.obj = App(config_path)


def run(args: Sequence[str]) -> int:
    """Run one command line, report its errors, return the exit code."""
    if "_AQD_COMPLETE" in os.environ:  # the shell asks for completions
        aqd_command.main(args=list(args), prog_name="aqd")
    try:
        # Not by click's own main(): it ends with 1 and without a word when the reader has gone, and
        # prints an empty line for Ctrl-C.
        with aqd_command.make_context("aqd", list(args)) as ctx:
            result = aqd_command.invoke(ctx)
            if sys.stdout is not None:  # started with descriptor 1 closed
                sys.stdout.flush()
        return int(result) if isinstance(result, int) else Exit.OK
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return Exit.USAGE
    except click.ClickException as error:
        return _report(_usage(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return reader_gone()
    except Exception as error:
        return report(error)


def report(error: Exception) -> int:
    """One line about ``error`` on standard error; the exit code that goes with it."""
    return _report(str(error), error.exit_code) if isinstance(error, AqdError) else _unexpected(error)


def _usage(error: click.ClickException) -> str:
    message = error.format_message().replace("\n\t", " ")  # click lists choices one a line
    ctx = getattr(error, "ctx", None)
    return f"{message.rstrip('.')} (see {ctx.command_path} --help)" if ctx is not None else message


def _report(message: str, code: int) -> int:
    """``message`` on standard error; several problems (one a line) give as many lines."""
    from aqd.journald import as_error
    from aqd.options import mask

    _show_traceback()
    for line in message.splitlines() or [""]:
        print(as_error(f"aqd: {mask(line)}"), file=sys.stderr)
    return int(code)


# Undefined table, function, column, type; no such schema (PostgreSQL, appendix A).
_NO_SCHEMA = ("42P01", "42883", "42703", "42704", "3F000")


def _unexpected(error: Exception) -> int:
    from aqd.log import describe

    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(error, psycopg.Error):
        if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
            # Not from the server: libpq could not make sense of the URL.
            return _report(f"database.url: {' '.join(str(error).split())}", Exit.CONFIG)
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return _report(f"the database cannot be reached: {' '.join(str(error).split())}", Exit.DATABASE)
        if error.sqlstate in _NO_SCHEMA:
            message = "the database holds no schema of aqd, or another version of it: see `aqd db status`, `aqd db migrate`"
            return _report(message, Exit.DATABASE)
        return _report(f"the database refused: {describe(error)}", Exit.DATABASE)
    if isinstance(error, OSError):
        return _report(describe(error), Exit.ERROR)
    hint = "" if os.environ.get("AQD_DEBUG") else " (please report it; AQD_DEBUG=1 shows where it happened)"
    return _report(f"internal error: {describe(error)}{hint}", Exit.ERROR)


def _show_traceback() -> None:
    if os.environ.get("AQD_DEBUG", "") not in ("", "0") and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()


def reader_gone() -> int:
    """Standard output leads nowhere from now on, or the interpreter would complain when it flushes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return 128 + signal.SIGPIPE
