"""What the code says about itself, for comparison with the page: log events, problem types, commands."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click

from tests.system.readme_page import ROOT

LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
# Counted by the API itself (aqd/api/tally.py).
API_METRICS = {"aqd_api_requests_total", "aqd_api_request_duration_seconds"}
# What takes the place of KIND in "attempt KIND".
ATTEMPT_KINDS = ("failed", "discarded", "timed_out", "crashed", "cancelled", "lost")
# What takes the place of NAME in "NAME ended".
SERVICES = ("api", "exporter")


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "aqd").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def log_events() -> dict[str, set[str]]:
    """Every event that a logger of :mod:`aqd.log` is given, with its levels."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, module in sources():
        if path.name in ("log.py", "demo.py", "embedded.py"):
            continue
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        for event, level in _events_of(node, function):
                            found[event].add(level)
    return found


def _events_of(call: ast.Call, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    if not isinstance(call.func, ast.Attribute) or not call.args:
        return
    target, method = ast.unparse(call.func.value), call.func.attr
    if method == "_complain":
        level = "warning"
    elif method in LEVELS and (
        target in ("log", "logger", "self._log", "self.log") or target.startswith("log.get_logger(")
    ):
        level = LEVELS[method]
    else:
        return
    for text in _texts(call.args[0], function):
        yield text, level


def _texts(argument: ast.expr, function: ast.FunctionDef) -> list[str]:
    """The texts that an expression may be; ``event`` as a parameter is somebody else's text."""
    match argument:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr():
            kind = ast.unparse(argument)
            if re.match(r"f'{(self|service)\.name} ", kind):
                return [f"{name}{kind.partition('}')[2][:-1]}" for name in SERVICES]
            assert kind in ("f'attempt {item.kind}'", "f'attempt {row.kind}'"), kind
            return [f"attempt {each}" for each in ATTEMPT_KINDS]
        case ast.IfExp():
            return _texts(argument.body, function) + _texts(argument.orelse, function)
        case ast.Name(id=name) if name in [a.arg for a in function.args.args]:
            return []
        case ast.Name(id=name):
            values = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and name in [ast.unparse(t) for t in node.targets]
            ]
            assert values, f"{function.name}: where does the event {name} come from?"
            return [text for value in values for text in _texts(value, function)]
    raise AssertionError(f"{function.name}: an event that nobody can document: {ast.unparse(argument)}")


def commands() -> dict[str, click.Command]:
    """``aqd submit`` -> the command, for every command that does something."""
    from aqd.cli.command import aqd_command

    def below(prefix: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from below(f"{prefix} {name}", child)
        else:
            yield prefix, command

    return dict(below("aqd", aqd_command))


def strings(*names: str) -> set[str]:
    """All string constants of some modules."""
    found = set()
    for name in names:
        for node in ast.walk(ast.parse((ROOT / "aqd" / name).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def kinds_and_reasons() -> set[tuple[str, str]]:
    """Pairs that stand beside each other in the code: ``"failed", "exception"``."""
    from aqd.outcomes import REASONS

    kinds = {*ATTEMPT_KINDS, "interrupted"}
    found = set()
    for name in ("outcomes.py", "worker.py"):
        for node in ast.walk(ast.parse((ROOT / "aqd" / name).read_text())):
            if isinstance(node, ast.Tuple):
                texts = [e.value if isinstance(e, ast.Constant) else None for e in node.elts]
                found |= {(k, r) for k, r in pairwise(texts) if k in kinds and r in REASONS}
    return found
