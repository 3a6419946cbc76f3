"""The command line: usage, errors and exit codes, signals, pipes; commands that need no daemon and no database."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from aqd import __version__, cli, config
from aqd.cli import command, output
from aqd.errors import Exit
from tests.fixtures.processes import wait_until

COMMON = (
    "DATABASE_URL",
    "PORT",
    "WORKER_POLL_MS",
    "WORKER_CONCURRENCY",
    "MAX_ATTEMPTS",
    "LOG_LEVEL",
    "PDF_OUTPUT_DIR",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path: Path) -> None:
    """No configuration of this machine."""
    for name in list(os.environ):
        if name in COMMON or name.startswith(("AQD_", "ADMIN_API_KEY")):
            monkeypatch.delenv(name)
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("AQD_CONFIG", str(tmp_path / "empty.toml"))


def aqd(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command as its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "aqd", *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def failing(capsys, args: Sequence[str], code: int) -> str:
    """Run a command in this process that must fail; returns the one line of its error."""
    assert command.run(args) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("aqd: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err.removeprefix("aqd: ").rstrip("\n")


# --- usage ----------------------------------------------------------------------------------------


def test_version() -> None:
    assert aqd("--version").stdout == f"aqd {__version__}\n"


def walk(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found = []
    with click.Context(group) as ctx:
        for name in group.list_commands(ctx):
            each = group.get_command(ctx, name)
            assert each is not None
            found.append(((*prefix, name), each))
            if isinstance(each, click.Group):
                found += walk(each, (*prefix, name))
    return found


def test_every_command_has_help(capsys) -> None:
    commands = walk(command.aqd_command)
    top = "run api check config plugins status reload stop db demo submit jobs failed health"
    assert " ".join(path[0] for path, _ in commands if len(path) == 1).split() == list(
        command.aqd_command.MODULES
    )
    assert set(top.split()) <= set(command.aqd_command.MODULES)
    assert {path for path, _ in commands} >= {
        ("config", "show"),
        ("db", "migrate"),
        ("db", "status"),
        ("db", "reset"),
        ("jobs", "list"),
        ("jobs", "show"),
        ("jobs", "retry"),
        ("jobs", "cancel"),
        ("jobs", "delete"),
        ("jobs", "update"),
        ("failed", "list"),
        ("failed", "discard"),
        ("queues", "pause"),
        ("queues", "resume"),
        ("queues", "limit"),
    }
    for path, each in commands:
        assert each.help, path
        for parameter in each.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path}: {parameter.name}"
        assert command.run([*path, "--help"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_no_command_shows_the_help_and_fails(capsys) -> None:
    assert command.run([]) == Exit.USAGE
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["stauts"], "there is no command 'stauts'; did you mean status?"),
        (["frobnicate"], "there is no command 'frobnicate' ("),
        (["status", "--jsno"], "No such option"),
        (["jobs", "show"], "Missing argument 'ID'"),
        (["jobs", "list", "--limit", "0"], "0 is not in the range"),
        (["jobs", "list", "--state", "DONE"], "'DONE' is not one of"),
        (["jobs", "cancel"], "say which jobs: either by ID, or by options such as --type, or --all"),
        (["jobs", "delete", "1", "--all"], "say which jobs: either"),
        (["jobs", "retry", "--type", "x", "--all"], "say which jobs: either"),
        (["jobs", "cancel", "--all", "--wait", "1"], "--wait goes with IDs alone"),
        (["jobs", "update", "1"], "nothing to change: give --priority, --run-at or --delay"),
        (["failed", "discard", "1"], "Missing option '--reason'"),
        (["queues", "limit", "q"], "Missing argument 'N|none'"),
        (["api-key", "new", "x"], "Missing option '--scope'. Choose from: submit, read, admin ("),
        (["jobs", "cancel", "1", "--wait", "-1"], "-1.0 is not in the range"),
        (["jobs", "cancel", "1", "--wait", "nan"], "nan is not in the range"),
        (["db", "reset"], "this drops every job and all history; say --yes"),
        (["stop", "--timeout", "x"], "'x' is not a valid float"),
    ],
)
def test_wrong_usage_is_one_line(capsys, args: list[str], wanted: str) -> None:
    assert wanted in failing(capsys, args, Exit.USAGE)


# --- errors ---------------------------------------------------------------------------------------


def test_each_problem_of_the_configuration_is_one_line(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "bad.toml").write_text("[daemon]\nslots = 0\nslot = 1\n")
    monkeypatch.setenv("PORT", "x")
    assert command.run(["-c", str(tmp_path / "bad.toml"), "config", "show"]) == Exit.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("aqd: ") for line in lines)


def test_a_missing_file_is_named(capsys) -> None:
    message = failing(capsys, ["--config", "/missing/aqd.toml", "plugins"], Exit.CONFIG)
    assert message == "/missing/aqd.toml: cannot be read: No such file or directory"


def test_the_debug_switch_shows_the_traceback(monkeypatch) -> None:
    monkeypatch.setenv("AQD_DEBUG", "1")
    assert "Traceback" in aqd("-c", "/missing", "config", "show", code=Exit.CONFIG).stderr


def test_a_bug_is_reported_as_ours_on_one_line(capsys, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("postgresql://u:hunter2@h/d\ntwo lines")

    monkeypatch.setattr(config, "load_with_sources", broken)
    message = failing(capsys, ["config", "show"], Exit.ERROR)
    assert message.startswith("internal error: ZeroDivisionError")
    assert "AQD_DEBUG=1" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("url", "code", "wanted"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/d", Exit.DATABASE, "the database cannot be reached: connection"),
        ("postgresql://u:hunter2@127.0.0.1:x/d", Exit.DATABASE, "invalid integer value"),
        ("postgresql://u:%zzhunter2@h/d", Exit.CONFIG, "database.url: "),
        ("host=h password=a hunter2", Exit.CONFIG, "database.url: "),
        ("postgresql://u:hunter2@h/d?passwort=x", Exit.CONFIG, "database.url: "),
    ],
)
def test_a_database_that_is_away_and_a_url_that_is_wrong(
    capsys, monkeypatch, url: str, code: int, wanted: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("AQD_DATABASE_CONNECT_TIMEOUT_S", "2")
    message = failing(capsys, ["jobs", "list"], code)
    assert wanted in message
    assert "hunter2" not in message


def test_no_daemon(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AQD_DAEMON_RUNTIME_DIR", str(tmp_path))
    for name in ("status", "reload", "stop"):
        assert str(tmp_path / "control.sock") in failing(capsys, [name], Exit.NOT_RUNNING)


# --- signals and pipes ----------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error() -> None:
    command_line = f"{sys.executable} -m aqd config show | head -1; echo ${{PIPESTATUS[0]}}"
    loop = f"for i in 1 2 3; do {command_line}; done"
    done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("# file: ")


def test_a_reader_that_is_gone_already() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "aqd", "config", "show"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_ends_quietly() -> None:
    """While it waits for the payload on standard input."""
    master, slave = pty.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "aqd", "submit", "noop", "-"],
            stdin=slave,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DATABASE_URL": "postgresql://127.0.0.1:1/d"},
        )
        _wait_until_reading(child.pid)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    finally:
        os.close(slave)
        os.close(master)
    assert (child.returncode, out, err) == (130, "", "")


def _wait_until_reading(pid: int) -> None:
    """Until the process sleeps in read(0, …)."""

    def reads() -> bool:
        try:
            number, first = Path(f"/proc/{pid}/syscall").read_text().split()[:2]
        except (ValueError, PermissionError):
            return False
        return (number, first) in (("0", "0x0"), ("63", "0x0"))  # read on x86-64 and on arm64

    wait_until(reads, 20, "the command never read its standard input")


def test_signals_before_the_master_is_up() -> None:
    """A stop ends the process with 0 (PID 1 would otherwise ignore it), a reload does not kill it."""
    program = """
        import time
        from aqd import cli
        from aqd.cli import command
        def run(args):
            print("importing", flush=True)
            while True:  # a signal may come just before a single sleep, and be seen after it
                time.sleep(0.05)
        command.run = run
        cli.main(["run"])
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"importing\n"
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.communicate()


def test_run_reaches_the_daemon_without_detours() -> None:
    program = """
        import sys, types
        def main(config_path, with_api):
            print(config_path, with_api, *sys.modules)
            return 42
        boot = types.ModuleType("aqd.boot")
        boot.main = main
        import aqd
        sys.modules["aqd.boot"] = aqd.boot = boot
        from aqd import cli
        cli.main(["-c", "x.toml", "run", "--with-api"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    path, with_api, *modules = done.stdout.split()
    assert (done.returncode, path, with_api) == (42, "x.toml", "True")
    assert not {"rich", "psycopg", "falcon", "gunicorn", "asyncio", "tomllib", "aqd.plugins"} & set(modules)


# --- configuration --------------------------------------------------------------------------------


def test_config_show_is_toml_that_gives_the_same_configuration(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "aqd.toml").write_text('[daemon]\nslots = 7\n[plugins.settings.mail]\nhost = "h"\n')
    monkeypatch.setenv("PORT", "5000")
    assert command.run(["-c", str(tmp_path / "aqd.toml"), "config", "show"]) == 0
    text = capsys.readouterr().out
    document = tomllib.loads(text)
    assert (document["daemon"]["slots"], document["api"]["port"]) == (7, 5000)
    assert re.search(r"^slots = 7 +# .*/aqd\.toml$", text, re.MULTILINE)
    assert re.search(r"^port = 5000 +# PORT$", text, re.MULTILINE)
    (tmp_path / "again.toml").write_text(text)
    monkeypatch.delenv("PORT")
    assert config.load(str(tmp_path / "again.toml"), {}) == config.load(
        str(tmp_path / "aqd.toml"), {"PORT": "5000"}
    )


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_show_hides_secrets(capsys, monkeypatch, form: list[str]) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("ADMIN_API_KEY", "hunter2")
    monkeypatch.setenv("AQD_PLUGINS_SETTINGS", '{mail = {password = "hunter2"}}')
    assert command.run(["config", "show", *form]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert out.count("***") == 3
    if form:
        shown = json.loads(out)
        assert shown["database.url"] == {"value": "postgresql://u:***@h/d", "source": "DATABASE_URL"}
        assert set(shown) == set(config.OPTIONS)


# --- plugins --------------------------------------------------------------------------------------

GOOD = """
import aqd
@aqd.hookimpl
def aqd_register(handlers):
    handlers.add("greet", lambda payload: None)
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch) -> Path:
    directory = tmp_path / "plugins"
    directory.mkdir()
    (directory / "good.py").write_text(GOOD)
    monkeypatch.setenv("AQD_PLUGINS_DIR", str(directory))
    monkeypatch.setenv("AQD_PLUGINS_ENTRY_POINTS", "no")
    return directory


def test_plugins_lists_good_and_broken_ones_without_importing_them_here(plugins: Path, capsys) -> None:
    (plugins / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (plugins / "syntax.py").write_text("def broken(:\n")
    assert command.run(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, "one line each and a heading"
    rows = {line.split()[0]: line for line in lines}
    assert "greet" in rows["good"]
    assert "loaded" in rows["good"]
    assert "SyntaxError" in rows["syntax"]
    assert str(plugins / "syntax.py") in rows["syntax"]
    assert "broken" in rows["leaves"]
    assert not {"good", "leaves"} & set(sys.modules)

    assert command.run(["plugins", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["good"]["handlers"] == ["greet"]
    assert found["syntax"]["state"] == "broken"


def test_no_plugins(plugins: Path, capsys) -> None:
    (plugins / "good.py").unlink()
    assert command.run(["plugins"]) == 0
    assert capsys.readouterr().out == f"no plugins in {plugins}\n"


# --- printing -------------------------------------------------------------------------------------


def test_tables_cannot_be_used_to_control_the_terminal(capsys) -> None:
    output.print_table(["a", "b"], [["\033[2J\n[red]x[/red]", None], [["p", "q"], True]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "\\x1b[2J\\n[red]x[/red]" in lines[1]
    assert lines[2].split() == ["p,", "q", "yes"]


def test_a_row_stays_one_line_when_nobody_looks(capsys) -> None:
    output.print_table(["a", "b"], [["x" * 500, "y y" * 200]])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.42, "0.4 s"),
        (59.6, "60 s"),
        (300, "5 min"),
        (5400, "90 min"),
        (90_000, "25 h"),
        (864_000, "10 d"),
    ],
)
def test_durations(seconds: float | None, wanted: str) -> None:
    assert output.duration(seconds) == wanted


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], ""),
        (["run"], "run"),
        (["-c", "run", "api"], "api"),
        (["--config=x", "--help", "run"], "run"),
        (["submit", "run"], "submit"),
        (["--config"], ""),
    ],
)
def test_which_command_it_is(given: list[str], name: str) -> None:
    """Known before anything is imported: a daemon and a service end by SIGTERM with 0, other commands do not."""
    assert cli._command(given) == name


BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
os.execv(sys.executable, [sys.executable, "-m", "aqd", *sys.argv[1:]])
"""


@pytest.mark.parametrize(("command", "code"), [("run", 0), ("api", 0), ("jobs", -15)])
def test_a_blocked_term_is_answered(command: str, code: int) -> None:
    """As the image's entry point leaves it: one that came before the interpreter was there waits for us."""
    script = "import os, signal\n" + BLOCKED.replace(
        "os.execv", "os.kill(os.getpid(), signal.SIGTERM); os.execv", 1
    )
    result = subprocess.run(
        [sys.executable, "-c", script, command], capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, b"", b"")
