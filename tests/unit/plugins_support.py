"""For the tests of plugins: their sources, and a new interpreter that loads them."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, os, sys, threading
from aqd import plugins
from aqd.config import Config, Plugins
folder = sys.argv[1]
def config(**more):
    options = dict(dir=folder, entry_points=False) | more
    return Config(plugins=Plugins(**options))
cfg = config()
def show(registry):
    return {p.name: [p.state, p.handlers, p.error] for p in registry.plugins}
"""

# What the last run wrote to standard output before its answer.
printed: list[str] = []


def run(folder: Path, script: str, **environment: str) -> dict:
    """Run ``script`` after the prelude in a new interpreter; returns what it leaves in ``answer``."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"PYTHONPATH": str(ROOT), **environment}
    code = PRELUDE + textwrap.dedent(script) + "\nprint('\\n' + json.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environ,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed[:] = done.stdout.splitlines()[:-1]
    return json.loads(done.stdout.splitlines()[-1])


def plugin(body: str, *, before: str = "") -> str:
    """The source of a plugin whose ``aqd_register`` consists of ``body``."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    return f"import aqd\n{before}\n@aqd.hookimpl\ndef aqd_register(handlers):\n{body}\n"


def handler(type: str) -> str:
    return plugin(f"handlers.add({type!r}, lambda payload: {type!r})")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))


LOAD = "answer = show(plugins.load(cfg))"
