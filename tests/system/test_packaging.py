"""packaging/environment.sh: which Python, which directory, what is said when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH of our own, with the few programs that the script needs."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("sh", "cksum", "cat", "rm", "env"):
        (place / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}")
    return place


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Root without the right to write where the file modes say no.
NO_OVERRIDE = ["setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override"]


def script(
    tools: Path, text: str, *, wrapper: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``text`` with the functions of environment.sh; everything said is in ``stdout``."""
    return subprocess.run(
        [
            *wrapper,
            "/bin/sh",
            "-euc",
            f'root={ROOT}; . "$root/packaging/environment.sh"; {text}',
            "packaging/demo",
        ],
        env={"PATH": str(tools), "HOME": str(tools.parent), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
        check=False,
    )


def test_an_old_python_is_passed_over(tools: Path) -> None:
    program(tools / "python3", "exit 1")
    program(tools / "python3.12", "exit 0")
    assert script(tools, "find_python").stdout.strip() == str(tools / "python3.12")


def test_python_can_be_named(tools: Path) -> None:
    program(tools / "python3", "exit 0")
    assert script(tools, "find_python", PYTHON=sys.executable).stdout.strip() == sys.executable


# A Python without ensurepip, until apt-get has "installed" it.
WITHOUT_ENSUREPIP = """
case "$2" in
    *ensurepip*) [ -e "$HOME/installed" ] ;;
    *print*) echo python3.11-venv ;;
esac
"""


def test_root_installs_ensurepip(tools: Path) -> None:
    python = program(tools / "python3", WITHOUT_ENSUREPIP)
    program(
        tools / "apt-get", 'echo "apt-get $*" >> "$HOME/calls"; [ "$1" = update ] || : > "$HOME/installed"'
    )
    program(tools / "id", "echo 0")
    result = script(tools, f"need_ensurepip {python}")
    assert result.returncode == 0, result.stdout
    line = "apt-get update && apt-get install --yes --no-install-recommends python3.11-venv"
    assert line in result.stdout
    assert (tools.parent / "calls").read_text().splitlines() == line.split(" && ")


def test_others_are_told_how(tools: Path) -> None:
    python = program(tools / "python3", WITHOUT_ENSUREPIP)
    program(tools / "apt-get", 'echo called > "$HOME/calls"')
    program(tools / "id", "echo 1000")
    result = script(tools, f"need_ensurepip {python}")
    assert result.returncode == 1
    assert "Run as root, then start again: apt-get update && apt-get install" in result.stdout
    assert "python3.11-venv" in result.stdout
    assert not (tools.parent / "calls").exists()


def test_the_environment_is_elsewhere_when_the_checkout_is_not_ours(tools: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "packaging").mkdir(parents=True)
    own = script(tools, f"root={checkout}; choose_venv").stdout.strip()
    assert own == str(checkout / ".venv")
    assert script(tools, "choose_venv", AQD_VENV="/x/y").stdout.strip() == "/x/y"
    wrapper: list[str] = []
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None or subprocess.run([setpriv, *NO_OVERRIDE[1:], "true"], check=False).returncode:
            pytest.skip("root may write everywhere, and setpriv cannot take that right away here")
        wrapper = [setpriv, *NO_OVERRIDE[1:]]
    checkout.chmod(0o555)
    chosen = script(tools, f"root={checkout}; choose_venv", wrapper=wrapper).stdout.strip()
    assert chosen == f"{tools.parent}/.local/share/aqd/venv"


def test_an_installation_is_not_repeated(tools: Path, tmp_path: Path) -> None:
    """The stamp names the checkout and the checksum of its pyproject.toml."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    program(python, 'case "$*" in *pip*) echo "$*" >> "$HOME/pip" ;; esac')
    for extras in ("dev", "dev", "other"):
        result = script(tools, f"environment {extras} {extras}", AQD_VENV=str(tmp_path / "venv"))
        assert result.returncode == 0, result.stdout
    installations = [line for line in (tmp_path / "pip").read_text().splitlines() if "install" in line]
    assert [line.split("--editable ")[1] for line in installations] == [f"{ROOT}[dev]", f"{ROOT}[other]"]


def test_a_failed_installation_is_tried_again(tools: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    program(python, 'case "$*" in *"pip install"*) echo no network; exit 1 ;; esac')
    for _again in range(2):
        result = script(tools, "environment dev dev", AQD_VENV=str(tmp_path / "venv"))
        assert result.returncode == 1
        assert "no network" in result.stdout
        assert "the installation failed; the reason is above" in result.stdout
