"""How the repository is laid out, and that its layers and its set-up commands are what they claim to be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = {
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "aqd",
    "plugins",
    "etc",
    "sql",
    "tests",
    "packaging",
}
TOP |= {"systemd"}
LONGEST = 600
SCRIPTS = (
    "packaging/build-deb",
    "packaging/compose-secrets",
    "packaging/demo",
    "packaging/environment.sh",
    "packaging/postgres.sh",
    "packaging/test",
    "tests/chaos/run",
    ".ci/run",
)


def files() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in answer.splitlines() if (ROOT / name).is_file()]


def test_top_level() -> None:
    top = {name.split("/")[0] for name in files()}
    assert {name for name in top if not name.startswith(".")} == TOP


def test_no_file_is_too_long() -> None:
    sources = [
        name for name in files() if name.endswith((".py", ".sql", ".sh")) and not name.startswith("tests/")
    ]
    lengths = {name: (ROOT / name).read_text().count("\n") for name in sources}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_every_module_says_what_it_is() -> None:
    modules = [
        name for name in files() if name.startswith(("aqd/", "plugins/", "tests/")) and name.endswith(".py")
    ]
    texts = {name: (ROOT / name).read_text() for name in modules}
    assert [name for name, text in texts.items() if text and not text.startswith('"""')] == []


def test_layers() -> None:
    """Imports only go down (the contracts stand in pyproject.toml)."""
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run(
        [str(program), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_scripts_are_posix(script: str, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    options = ["--posix"] if shell == "bash" else []
    result = subprocess.run(
        [program, *options, "-n", str(ROOT / script)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", [name for name in SCRIPTS if not name.endswith(".sh")])
def test_scripts_are_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
