"""The shipped plugins called directly: what they make, what they refuse, what they leave behind."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pypdf
import pytest

import aqd
from aqd import plugins
from aqd.config import Config
from aqd.hookspecs import Handlers, JobContext
from tests.fixtures.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
OPEN_SANS = "ttf_opensans"


def load(name: str, **settings):
    """A fresh copy of the plugin's module, registered with ``settings``; returns (module, handler)."""
    spec = importlib.util.spec_from_file_location(f"shipped_{name}", ROOT / "plugins" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = Handlers(name, {name: settings})
    module.aqd_register(handlers)
    return module, handlers.collected[name][1]


def job(id: str = "42") -> JobContext:
    return JobContext(
        id=id,
        type="generate_pdf",
        queue="default",
        attempt=1,
        max_attempts=5,
        created_at_us=1_767_225_600_000_000,
    )


def test_all_shipped_plugins_load_and_start_no_thread():
    """In a child, as `aqd plugins` does it."""
    found = {plugin.name: plugin for plugin in plugins.inspect(Config())}
    assert {name: plugin.error for name, plugin in found.items()} == dict.fromkeys(
        path.stem for path in (ROOT / "plugins").glob("*.py")
    )
    assert {plugin.state for plugin in found.values()} == {"loaded"}
    assert {"generate_pdf", "noop", "shell"} <= {
        type for plugin in found.values() for type in plugin.handlers
    }


def test_noop():
    _, noop = load("noop")
    assert noop({"return": {"a": [1]}}) == {"a": [1]}
    assert noop({}) is None
    assert noop([1]) is None
    assert noop(None) is None


# --- generate_pdf -----------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path, monkeypatch):
    folder = tmp_path / "made" / "pdf"
    monkeypatch.setenv("PDF_OUTPUT_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def module():
    return load("generate_pdf")[0]


@pytest.fixture
def make(out, module):
    def make(payload, id="42", **settings):
        module._settings.clear()
        module._settings.update(settings)
        return module.generate_pdf(payload, job(id))

    return make


def text_of(result) -> str:
    reader = pypdf.PdfReader(result["file"])
    assert len(reader.pages) == result["pages"]
    return "\n".join(page.extract_text() for page in reader.pages)


def test_the_readmes_example(make, out):
    result = make({"text": "Hello World"})
    assert result == {"file": str(out / "42.pdf"), "pages": 1, "bytes": (out / "42.pdf").stat().st_size}
    assert text_of(result) == "Hello World"
    assert os.listdir(out) == ["42.pdf"]


def test_a_second_run_replaces_its_own_file_by_the_same_bytes(make, out):
    make({"text": "Привет"})
    first = (out / "42.pdf").read_bytes()
    (out / "42.pdf").write_bytes(b"half a fi")
    make({"text": "Привет"})
    assert (out / "42.pdf").read_bytes() == first
    # Bytes that do not depend on the time of day.
    assert pypdf.PdfReader(out / "42.pdf").metadata.creation_date == job().created_at
    make({"text": "Привет"}, id="43")
    assert sorted(os.listdir(out)) == ["42.pdf", "43.pdf"]


def test_nobody_sees_half_a_file(make, out, module, monkeypatch):
    make({"text": "first"})

    def fail(*_):
        raise aqd.JobTimeout()

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(aqd.JobTimeout):
        make({"text": "second"})
    assert os.listdir(out) == ["42.pdf"]
    assert text_of({"file": out / "42.pdf", "pages": 1}) == "first"


def test_title_and_filename(make, out):
    result = make({"text": "body", "title": "A\nTitle", "filename": "réport.pdf", "other": 1})
    assert result["file"] == str(out / "réport-42.pdf")
    assert text_of(result) == "A Title\nbody"
    assert pypdf.PdfReader(result["file"]).metadata.title == "A Title"


def test_long_text_flows_over_pages_and_all_of_it_is_there(make):
    words = [f"word{number}" for number in range(6000)]
    result = make({"text": " ".join(words)})
    assert result["pages"] > 5
    assert text_of(result).split() == words


@pytest.mark.parametrize("character", ["x", "Ж", "\u00a0"])
def test_a_very_long_word_is_broken_up(make, character):
    result = make({"text": "a" + character * 20_000 + "z"})
    assert result["pages"] > 2
    text = text_of(result).replace("\n", "")
    assert text.startswith("a")
    assert text.endswith("z")
    if character != "\u00a0":
        assert text == "a" + character * 20_000 + "z"


def test_lines_pages_and_control_characters(make):
    result = make({"text": "one\r\ntwo\rthree\u2028four\x00\x07\x1b[0m\n\n\nfive\fsix\ttab\x85seven"})
    assert result["pages"] == 2
    assert text_of(result).split() == ["one", "two", "three", "four[0m", "five", "six", "tab", "seven"]


def test_nothing_in_the_text_is_a_command(make):
    """fpdf2 would replace {nb} by the number of pages, and marks text by ** and __."""
    for text in ("{nb} **not bold** __no__", "{nb} **Ж** __"):
        assert text_of(make({"text": text})) == text


@pytest.mark.skipif(importlib.util.find_spec(OPEN_SANS) is None, reason="the examples extra is not installed")
def test_other_alphabets_need_nothing_but_the_examples_extra(make, module, monkeypatch):
    monkeypatch.setattr(module, "FONT_FOLDERS", ())
    text = "Привет, мир – Ωμέγα – Việt Nam – zażółć – 5 €"
    assert text_of(make({"text": text})) == text


def machine_has(module, text: str) -> bool:
    needed = {ord(character) for character in text}
    return any(needed <= module.coverage(path) for path in module.preferred_fonts())


def test_symbols_come_from_a_second_font(make, module):
    text = "Привет → ✓"
    if not machine_has(module, text):
        pytest.skip("no font with symbols on this machine")
    assert text_of(make({"text": text})) == text


def test_two_fonts_are_combined_when_none_has_everything(make, module, tmp_path):
    """Cut two fonts out of Open Sans so that each has what the other lacks."""
    from fontTools import subset

    paths = []
    for name, keep in (("latin", "abc ?"), ("cyrillic", "Жя ")):
        options = subset.Options()
        font = subset.load_font(module_font(), options)
        cut = subset.Subsetter(options)
        cut.populate(text=keep)
        cut.subset(font)
        paths.append(str(tmp_path / f"{name}.ttf"))
        subset.save_font(font, paths[-1], options)
        font.close()
    module_fonts = module.FONT_FOLDERS, module.find_spec
    module.FONT_FOLDERS, module.find_spec = (), lambda _name: None
    try:
        assert text_of(make({"text": "abЖя c"}, fonts=paths)) == "abЖя c"
        with pytest.raises(aqd.Discard, match=r"Q \(U\+0051\)"):
            make({"text": "aЖQ"}, fonts=paths)
    finally:
        module.FONT_FOLDERS, module.find_spec = module_fonts


def module_font() -> str:
    spec = importlib.util.find_spec(OPEN_SANS)
    if spec is None:
        pytest.skip("the examples extra is not installed")
    return str(Path(spec.submodule_search_locations[0], "ttf", "OpenSans-Regular.ttf"))


def test_right_to_left_text(make, module):
    if importlib.util.find_spec("uharfbuzz") is None or not machine_has(module, "שלוםمرحبا"):
        pytest.skip("needs uharfbuzz and a font with Hebrew and Arabic letters")
    text = text_of(make({"text": "שלום עולם\nمرحبا بالعالم\nabc"}))
    assert "שלום" in text
    assert "مرحبا" in text


def test_right_to_left_text_without_text_shaping_is_refused_not_reversed(make, module, monkeypatch):
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "uharfbuzz" else importlib.util.find_spec(name)
    )
    with pytest.raises(aqd.Discard, match=r"payload.text: .*uharfbuzz.*aqd\[examples\]"):
        make({"text": "שלום"})


UNASSIGNED = "\U0003ff00"


def test_characters_that_no_font_has_are_named(make):
    with pytest.raises(aqd.Discard) as refusal:
        make({"text": f"fine {UNASSIGNED} ok"})
    assert "payload.text" in str(refusal.value)
    assert f"{UNASSIGNED} (U+3FF00)" in str(refusal.value)
    assert "plugins.settings.generate_pdf.fonts" in str(refusal.value)
    with pytest.raises(aqd.Discard, match=r"payload\.title"):
        make({"text": "fine", "title": UNASSIGNED})


def test_characters_that_no_font_has_may_be_replaced(make):
    assert text_of(make({"text": f"Жa {UNASSIGNED} b"}, on_missing="replace")) == "Жa ? b"


def test_what_cannot_be_seen_is_no_reason_to_fail(make):
    result = make({"text": "Ж\u200b\u200d\ufe0fя e\u0301 a\u2003b \U000e0100"})
    text = text_of(result)
    assert "é" in text
    assert text.replace("\u200b", "").replace("\u200d", "").replace("\ufe0f", "").startswith("Жя")


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (None, "payload: must be an object"),
        ([], "payload: must be an object"),
        ("text", "payload: must be an object"),
        ({}, "payload.text: is missing"),
        ({"text": None}, "payload.text: must be a string, not NoneType"),
        ({"text": 5}, "payload.text: must be a string"),
        ({"text": "\ud800"}, "payload.text: contains half a surrogate"),
        ({"text": "a", "title": 5}, "payload.title: must be a string"),
        ({"text": "a", "title": "x" * 201}, "payload.title: has 201 characters, the bound is 200"),
        ({"text": "a", "filename": 5}, "payload.filename: must be a string"),
        ({"text": "a", "filename": "../x"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": "/etc/passwd"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": "a\\b"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": "a\0b"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": "a\nb"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": "\udc80"}, "payload.filename: must be a plain name"),
        ({"text": "a", "filename": ".."}, "payload.filename: must not begin"),
        ({"text": "a", "filename": ".hidden"}, "payload.filename: must not begin"),
        ({"text": "a", "filename": "-rf"}, "payload.filename: must not begin"),
        ({"text": "a", "filename": "x" * 101}, "payload.filename: has 101 bytes, the bound is 100"),
        ({"text": "a", "filename": "é" * 51}, "payload.filename: has 102 bytes, the bound is 100"),
        ({"text": "\f" * 5001}, "payload.text: needs more than 5000 pages"),
    ],
)
def test_a_payload_that_can_never_work_is_discarded(make, out, payload, field):
    with pytest.raises(aqd.Discard) as refusal:
        make(payload)
    assert str(refusal.value).startswith(field)
    assert not list(out.parent.glob("**/*.pdf"))


def test_an_empty_text_is_an_empty_page(make):
    assert make({"text": ""})["pages"] == 1


def test_where_files_go_without_a_setting(module, tmp_path, monkeypatch):
    monkeypatch.delenv("PDF_OUTPUT_DIR", raising=False)
    module._settings.clear()
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}/state:{tmp_path}/other")
    assert module.output_dir() == tmp_path / "state" / "pdf"
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setenv("XDG_DATA_HOME", f"{tmp_path}/data")
    assert module.output_dir() == tmp_path / "data" / "aqd" / "pdf"
    module._settings["output_dir"] = f"{tmp_path}/set"
    assert module.output_dir() == tmp_path / "set"
    monkeypatch.setenv("PDF_OUTPUT_DIR", f"{tmp_path}/env")
    assert module.output_dir() == tmp_path / "env"


def test_somebody_elses_folder_below_tmp_is_not_used(module, tmp_path, monkeypatch):
    monkeypatch.delenv("PDF_OUTPUT_DIR", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    module._settings.clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", f"{tmp_path}/file/below")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    own = tmp_path / f"aqd-pdf-{os.getuid()}"
    assert module.output_dir() == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    (tmp_path / "trap").mkdir()
    own.symlink_to(tmp_path / "trap")
    with pytest.raises(PermissionError, match="somebody else"):
        module.output_dir()


@pytest.mark.parametrize("settings", [{"on_missing": "ignore"}, {"fonts": "x.ttf"}])
def test_wrong_settings_break_the_plugin(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        load("generate_pdf", **settings)


# --- shell ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def shell():
    return load("shell", allow=["sh", "cat", "/bin/echo", "no-such-program"], allow_env=["MINE"])[1]


def test_shell_runs_what_is_allowed(shell):
    assert shell({"argv": ["/bin/echo", "$HOME; ls", "ü"]}) == {
        "exit_code": 0,
        "stdout": "$HOME; ls ü\n",
        "stderr": "",
    }
    assert shell(
        {"argv": ["sh", "-c", "pwd; echo $MINE; echo e >&2"], "env": {"MINE": "1"}, "cwd": "/usr"}
    ) == {
        "exit_code": 0,
        "stdout": "/usr\n1\n",
        "stderr": "e\n",
    }
    assert shell({"argv": ["cat"], "stdin": "é\n"})["stdout"] == "é\n"
    assert shell({"argv": ["cat"]})["stdout"] == ""


def test_shell_passes_no_secrets_on(shell, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@h/d")
    monkeypatch.setenv("PATH", "/tmp/evil")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    environment = shell({"argv": ["sh", "-c", "env"]})["stdout"]
    assert "secret" not in environment
    assert "/tmp/evil" not in environment
    assert "TZ=Asia/Tokyo" in environment


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "payload: must be an object"),
        ({}, "payload.argv: must be a list"),
        ({"argv": "ls -l"}, "payload.argv: must be a list of strings: there is no shell"),
        ({"argv": []}, "payload.argv: must be a list"),
        ({"argv": ["sh", 5]}, "payload.argv: must be a list"),
        ({"argv": ["sh", "a\0b"]}, "payload.argv[1]: contains a NUL"),
        ({"argv": ["sh", "\ud800"]}, "payload.argv[1]: contains half a surrogate"),
        ({"argv": ["sh"] * 1001}, "payload.argv: has 1001 entries, the bound is 1000"),
        ({"argv": ["cat", "x" * 200_000]}, "payload.argv: the arguments and the environment are too long"),
        ({"argv": ["rm"]}, "payload.argv[0]: 'rm' is not allowed"),
        ({"argv": ["/bin/sh"]}, "payload.argv[0]: '/bin/sh' is not allowed"),
        ({"argv": ["./sh"]}, "payload.argv[0]: './sh' is not allowed"),
        ({"argv": ["echo"]}, "payload.argv[0]: 'echo' is not allowed"),
        ({"argv": ["/bin/../bin/echo"]}, "payload.argv[0]: '/bin/../bin/echo' is not allowed"),
        ({"argv": ["sh"], "env": {"LD_PRELOAD": "/x.so"}}, "payload.env: 'LD_PRELOAD' is not allowed"),
        ({"argv": ["sh"], "env": {"MINE": 5}}, "payload.env: must be an object of strings"),
        ({"argv": ["sh"], "env": {"MINE": "a\0"}}, "payload.env.MINE: contains a NUL"),
        ({"argv": ["sh"], "cwd": "etc"}, "payload.cwd: must be an absolute path"),
        ({"argv": ["sh"], "stdin": 5}, "payload.stdin: must be a string"),
        ({"argv": ["sh"], "stdin": "\ud800"}, "payload.stdin: contains half a surrogate"),
        ({"argv": ["sh"], "ok_codes": [256]}, "payload.ok_codes: must be a list of numbers"),
        ({"argv": ["sh"], "ok_codes": 1}, "payload.ok_codes: must be a list of numbers"),
        ({"argv": ["sh"], "shell": True}, "payload.shell: is not known"),
    ],
)
def test_shell_discards_what_is_malformed_or_not_allowed(shell, payload, message):
    with pytest.raises(aqd.Discard) as refusal:
        shell(payload)
    assert str(refusal.value).startswith(message)


def test_shell_allows_nothing_unless_configured():
    _, shell = load("shell")
    with pytest.raises(aqd.Discard, match=r"no program is allowed.*plugins\.settings\.shell\.allow"):
        shell({"argv": ["/bin/true"]})


@pytest.mark.parametrize(
    "settings", [{"allow": "sh"}, {"allow": [5]}, {"allow": ["bin/sh"]}, {"allow_env": "X"}, {"path": 5}]
)
def test_wrong_shell_settings_break_the_plugin(settings):
    with pytest.raises(ValueError, match=f"plugins.settings.shell.{next(iter(settings))}"):
        load("shell", **settings)


def test_shell_fails_when_the_program_does(shell):
    with pytest.raises(RuntimeError, match=r"^sh ended with exit code 3: the reason$"):
        shell({"argv": ["sh", "-c", "echo out; echo the reason >&2; exit 3"]})
    with pytest.raises(RuntimeError, match=r"^sh was killed by SIGSEGV$"):
        shell({"argv": ["sh", "-c", "kill -SEGV $$"]})
    assert shell({"argv": ["sh", "-c", "exit 3"], "ok_codes": [0, 3]})["exit_code"] == 3
    with pytest.raises(RuntimeError, match="exit code 0"):
        shell({"argv": ["sh", "-c", "exit 0"], "ok_codes": [3]})
    with pytest.raises(FileNotFoundError, match="no-such-program is allowed, but"):
        shell({"argv": ["no-such-program"]})
    with pytest.raises(FileNotFoundError):
        shell({"argv": ["sh"], "cwd": "/no/such/folder"})


def test_shell_bounds_the_output_and_drains_the_rest(shell):
    result = shell(
        {"argv": ["sh", "-c", "head -c 3000000 /dev/zero; echo end; head -c 3000000 /dev/zero >&2"]}
    )
    assert len(result["stdout"]) == len(result["stderr"]) == 65536
    assert result["stdout"].endswith("\ufffdend\n")  # a NUL could not be stored
    assert result["stdout_dropped"] == 3_000_004 - 65536
    assert result["stderr_dropped"] == 3_000_000 - 65536


def test_shell_feeds_large_input_to_programs_that_read_write_or_ignore_it(shell):
    text = "0123456789abcdef" * 65536
    assert shell({"argv": ["cat"], "stdin": text})["stdout_dropped"] == len(text) - 65536
    assert shell({"argv": ["sh", "-c", "exec <&-; echo ok"], "stdin": text})["stdout"] == "ok\n"
    assert shell({"argv": ["sh", "-c", "echo ok"], "stdin": text})["stdout"] == "ok\n"


SLEEP = f"sleep {600_000 + os.getpid()}"  # tests may run beside one another


def alive(command: str) -> bool:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip() == command.encode():
                return True
    return False


def gone(command: str) -> bool:
    """Wait for SIGKILL to have its effect."""
    try:
        return wait_until(lambda: not alive(command))
    except TimeoutError:
        return False


@pytest.mark.parametrize("leave", ["SLEEP &", "SLEEP >/dev/null 2>&1 &", "(trap '' TERM HUP; SLEEP) &"])
def test_shell_waits_for_the_program_only_and_leaves_nothing_behind(shell, leave):
    began = time.monotonic()
    assert shell({"argv": ["sh", "-c", f"{leave.replace('SLEEP', SLEEP)} echo done"]})["stdout"] == "done\n"
    assert time.monotonic() - began < 10
    assert gone(SLEEP)


@pytest.mark.parametrize("stop", [aqd.JobTimeout, aqd.JobInterrupted])
def test_shell_kills_everything_when_the_job_is_stopped(shell, stop):
    """Stopped as soon as the program runs, and again and again, as the master repeats it."""
    started = looking = False

    def raise_it(*_):
        nonlocal started, looking
        if looking:
            return  # the machine is slow: the next signal came before the look was over
        looking = True
        started = started or alive(SLEEP)
        looking = False
        frame = sys._getframe()
        while started and frame is not None:
            if frame.f_code.co_filename == str(ROOT / "plugins" / "shell.py"):
                raise stop
            frame = frame.f_back

    old = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(stop):
            shell({"argv": ["sh", "-c", f"trap '' TERM; ({SLEEP}; true) & wait"]})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert gone(SLEEP)


def test_a_signal_that_stops_no_job_does_not_stop_the_program(shell):
    """TERM for the whole group of the daemon, say: its handler in a worker does nothing."""
    seen = []
    old = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        result = shell({"argv": ["sh", "-c", f"kill -TERM {os.getpid()}; sleep 0.1; echo done"]})
        assert result["stdout"] == "done\n"
        assert seen == [1]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_stop_while_the_program_starts_leaves_no_program_behind(monkeypatch):
    """The worst moment: it runs already, but Popen has not returned, so nobody knows its number."""
    begin = subprocess.Popen.__init__

    def interrupted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)
        assert alive(SLEEP)

    def raise_it(*_):
        raise aqd.JobTimeout

    monkeypatch.setattr(subprocess.Popen, "__init__", interrupted)
    old = signal.signal(signal.SIGUSR1, raise_it)
    try:
        with pytest.raises(aqd.JobTimeout):
            load("shell", allow=["sleep"])[1]({"argv": SLEEP.split()})
        assert signal.getsignal(signal.SIGUSR1) is raise_it
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert gone(SLEEP)


def test_the_program_dies_with_a_worker_that_is_killed():
    code = (
        "import sys, importlib.util as u\n"
        f"spec = u.spec_from_file_location('shell', {str(ROOT / 'plugins' / 'shell.py')!r})\n"
        "m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "m._settings.update(allow=['sleep'], allow_env=[], path=m.DEFAULT_PATH)\n"
        f"m.shell({{'argv': {SLEEP.split()!r}}})\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: alive(SLEEP) or worker.poll() is not None, 30)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
    assert gone(SLEEP)
