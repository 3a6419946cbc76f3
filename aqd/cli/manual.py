"""``aqd manual`` and ``aqd completion``: the manual pages, and the shells' completion.

Nothing is written a second time here: aqd(1) is made of the commands' own help and of :class:`aqd.errors.Exit`,
aqd.toml(5) of the sample file ``etc/aqd.toml``, whose comments a test holds to the options; completion is click's.
"""

import inspect
import re
from collections.abc import Iterator

import click

from aqd import __version__
from aqd.errors import Exit

_OPTION = re.compile(r"#(\w+ = .*|\[[\w.]+\])")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the script that lets a shell complete commands and options of aqd.

    For bash, in ~/.bashrc: eval "$(aqd completion bash)". Debian's package has them in place.
    """
    from click.shell_completion import get_completion_class

    from aqd.cli.command import aqd_command

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(aqd_command, {}, "aqd", "_AQD_COMPLETE").source())


@click.command("manual")
@click.argument("page", type=click.Choice(["aqd", "aqd.toml"]), default="aqd")
def manual_command(page: str) -> None:
    """Print the manual page aqd(1) or aqd.toml(5), for man: aqd manual aqd.toml | man -l -"""
    click.echo("\n".join(commands_page() if page == "aqd" else options_page()))


# --- aqd(1) -----------------------------------------------------------------------------------------


def commands_page() -> Iterator[str]:
    """aqd(1), line by line."""
    from aqd.cli.command import aqd_command

    with click.Context(aqd_command, info_name="aqd") as context:
        yield from _head("AQD", 1, "aqd", aqd_command.help or "")
        yield ".SH SYNOPSIS"
        yield f"{_bold('aqd')} [OPTIONS] COMMAND [ARGUMENTS]"
        yield ".SH OPTIONS"
        yield from _options(aqd_command, context)
        yield ".SH COMMANDS"
        yield from _commands(aqd_command, context)
    yield ".SH EXIT STATUS"
    for code in Exit:
        yield f".TP\n{_bold(str(int(code)))}\n{_text(code.meaning)}"
    yield ".SH FILES"
    yield ".TP\n.I /etc/aqd/aqd.toml\nThe configuration, see\n.BR aqd.toml (5)."
    yield ".SH SEE ALSO"
    yield ".BR aqd.toml (5),\n.BR systemctl (1)"


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        with click.Context(command, info_name=name, parent=context) as below:
            if isinstance(command, click.Group):
                yield from _commands(command, below)
                continue
            usage = " ".join([below.command_path, *command.collect_usage_pieces(below)])
            yield f".SS {_text(below.command_path)}"
            yield _bold(usage)
            for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
                yield f".PP\n{_text(paragraph)}"
            yield from _options(command, below)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1] and "--help" not in parameter.opts:
            yield f".TP\n{_bold(record[0])}\n{_text(record[1])}"


# --- aqd.toml(5) ------------------------------------------------------------------------------------


def options_page() -> Iterator[str]:
    """aqd.toml(5), line by line: ``etc/aqd.toml`` in another dress."""
    from aqd.paths import data_dir

    yield from _head("AQD.TOML", 5, "aqd.toml", "configuration of aqd")
    yield ".SH DESCRIPTION"
    for block in (data_dir("etc") / "aqd.toml").read_text(encoding="utf-8").split("\n\n"):
        yield from _block(block.strip().splitlines())
    yield ".SH SEE ALSO"
    yield ".BR aqd (1)"


def _block(lines: list[str]) -> Iterator[str]:
    """A section's name, an option below its explanation, or paragraphs."""
    option = _OPTION.fullmatch(lines[-1])
    explanation = [line.removeprefix("#").removeprefix(" ") for line in lines[: -1 if option else None]]
    if option is not None:
        yield f".TP\n{_bold(option[1])}"
        yield _text("\n".join(explanation))
    elif lines[0].startswith("["):
        yield f".SH {_text(lines[0])}"
    else:
        for paragraph in "\n".join(explanation).split("\n\n"):
            yield f".PP\n{_text(paragraph)}"


# --- roff -------------------------------------------------------------------------------------------


def _head(title: str, section: int, name: str, what: str) -> Iterator[str]:
    yield f'.TH {title} {section} "" "aqd {__version__}"'
    # No hyphenation, no stretched lines, no wider space after a sentence: commands are copied from here.
    yield ".nh\n.ad l\n.ss 12 0"
    yield f".SH NAME\n{_text(name)} \\- {_text(what.rstrip('.'))}"


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fP"


def _text(text: str) -> str:
    """Text as roff: nothing in it is a request; what stands between back quotes is bold; indented lines are kept."""
    text = text.replace("\\", "\\(rs").replace("-", "\\-").replace("'", "\\(aq")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fP", text)
    lines = [f"\\&{line}" if line.startswith(".") else line for line in text.split("\n")]
    return "\n".join(
        f".br\n\\ \\ \\ \\ {line.strip()}\n.br" if line.startswith("  ") else line for line in lines
    )
