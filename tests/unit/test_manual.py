"""The manual pages and the completion: made of what the program says, and whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aqd import config
from aqd.cli import manual
from aqd.cli.command import run
from aqd.errors import Exit
from tests.system import readme_code

ROOT = Path(__file__).parents[2]
PAGES = {"aqd": manual.commands_page, "aqd.toml": manual.options_page}


def plain(page: str) -> str:
    text = "\n".join(PAGES[page]())
    text = re.sub(r"\\f[BP]", "", text)
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\(rs", "\\")


def test_every_command_and_option_is_in_the_page() -> None:
    text = plain("aqd")
    for name, command in readme_code.commands().items():
        start = text.index(f"\n.SS {name}\n")
        section = text[start : text.find("\n.S", start + 1)]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                if option != "--help":
                    assert option in section, f"{name} {option}"
    for code in Exit:
        assert f"\n.TP\n{int(code)}\n{code.meaning}\n" in text


def test_every_option_is_in_the_page_with_its_explanation() -> None:
    text = plain("aqd.toml")
    for option in config.OPTIONS.values():
        if option.kind != "table":
            assert re.search(rf"\n\.TP\n{option.name} = .*\n\S", text), option.key
        for name in option.env:
            assert name in text
    sections = {option.section for option in config.OPTIONS.values()}
    assert set(re.findall(r"^\.SH \[(\w+)\]$", text, re.MULTILINE)) == sections


@pytest.mark.parametrize("page", PAGES)
def test_the_formatter_has_nothing_to_say(page: str) -> None:
    man = shutil.which("man")
    if man is None or shutil.which("groff") is None:
        pytest.skip("no man and groff")
    done = subprocess.run(
        [man, "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", "-"],
        input="\n".join(PAGES[page]()),
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_no_text_becomes_a_request() -> None:
    assert manual._text(".TH is 'x'\n`a-b` \\") == "\\&.TH is \\(aqx\\(aq\n\\fBa\\-b\\fP \\(rs"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_AQD_COMPLETE" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, timeout=30, check=True)


def test_bash_completes_a_command(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    program = tmp_path / "aqd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m aqd "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(aqd completion bash)"
        COMP_WORDS=(aqd plugin-env in) COMP_CWORD=2
        _aqd_completion aqd
        echo "${COMPREPLY[@]}"
    """
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [bash, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["install"], done.stderr
