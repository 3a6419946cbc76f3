"""Finding and loading plugins: real folders, and a new interpreter for each case (sys.modules stays clean)."""

import hashlib
import os
import py_compile
import shutil
import tempfile
from pathlib import Path

import pytest

from aqd import plugin_files, plugins
from aqd.config import Config, Plugins
from aqd.errors import PluginError
from tests.unit.plugins_support import ROOT, handler, plugin, run, write

# --- what works -------------------------------------------------------------------------------------


def test_files_packages_and_helpers_beside_them(tmp_path):
    write(
        tmp_path,
        {
            "one.py": "import helper\n__version__ = '1.2'\n"
            + plugin("handlers.add('one', lambda p: helper.VALUE)"),
            "two/__init__.py": "from .inner import f\nimport two.inner\n" + plugin("handlers.add('two', f)"),
            "two/inner.py": "import os\nprint('inner', flush=True)\nasync def f(payload, job): ...\n",
            "helper.py": "import os\nVALUE = 'from the helper'\nopen(os.environ['TRACE'], 'a').write('x')\n",
        },
    )
    trace = tmp_path / "trace"
    answer = run(
        tmp_path,
        """
        seen = []
        registry = plugins.load(cfg, progress=seen.append)
        handlers = {t: (h.info.wants_job, h.info.is_async) for t, h in registry.handlers.items()}
        answer = dict(show=show(registry), handlers=handlers, result=registry.handlers["one"].function(None),
                      types=registry.types(), digests={p.name: p.digest for p in registry.plugins}, seen=seen,
                      versions={p.name: p.version for p in registry.plugins}, problems=registry.problems(),
                      inner=[name for name in sys.modules if name.endswith("inner")])
        """,
        TRACE=str(trace),
    )
    assert answer["show"] == {
        "helper": ["loaded", [], None],
        "one": ["loaded", ["one"], None],
        "two": ["loaded", ["two"], None],
    }
    assert answer["handlers"] == {"one": [False, False], "two": [True, True]}
    assert answer["result"] == "from the helper"
    assert answer["types"] == ["one", "two"]
    assert answer["seen"] == ["helper", "one", "two"]
    assert answer["versions"] == {"helper": "", "one": "1.2", "two": ""}
    assert answer["problems"] == []
    digest = hashlib.sha256((tmp_path / "one.py").read_bytes()).hexdigest()[:12]
    assert answer["digests"]["one"] == digest
    assert len(answer["digests"]["two"]) == 12
    # Executed once, although it is a file of the folder and somebody's helper; a package's parts likewise.
    assert trace.read_text() == "x"
    assert answer["inner"] == ["two.inner"]


def test_a_packages_digest_covers_all_of_its_files(tmp_path):
    write(tmp_path, {"p/__init__.py": handler("a"), "p/lazy.py": "V = 1\n"})
    script = "answer = [p.digest for p in plugins.load(cfg).plugins]"
    first = run(tmp_path, script)
    assert run(tmp_path, script) == first
    write(tmp_path, {"p/lazy.py": "V = 2\n"})
    assert run(tmp_path, script) != first


def test_a_plugin_shadows_neither_the_standard_library_nor_installed_packages(tmp_path):
    write(
        tmp_path,
        {
            "json.py": "import json\nassert hasattr(json, 'dumps')\n" + handler("json"),
            "pluggy/__init__.py": "from . import part\n" + handler("pluggy"),
            "pluggy/part.py": "",
            "user.py": "import colorsys, json\nassert hasattr(json, 'dumps')\ncolorsys.hsv_to_rgb\n"
            + handler("user"),
            "colorsys.py": "",
        },
    )
    answer = run(
        tmp_path,
        """
        registry = plugins.load(cfg)
        import colorsys, pluggy
        mine = [n for n in sys.modules if (getattr(sys.modules[n], "__file__", "") or "").startswith(folder)]
        answer = dict(show=show(registry), mine=sorted(mine), path=sys.path[-1],
                      stolen=[m.__name__ for m in (json, pluggy, colorsys) if m.__file__.startswith(folder)])
        """,
    )
    assert {name: entry[2] for name, entry in answer["show"].items()} == dict.fromkeys(
        ["colorsys", "json", "pluggy", "user"]
    )
    assert answer["stolen"] == []
    assert answer["mine"] == [
        "aqd_plugin_colorsys",
        "aqd_plugin_json",
        "aqd_plugin_pluggy",
        "aqd_plugin_pluggy.part",
        "user",
    ]
    assert answer["path"] == str(tmp_path)


def test_byte_code_is_never_trusted_and_never_written(tmp_path):
    """Two versions of one length within a second: Python's own import runs the older one."""
    write(
        tmp_path, {"versioned.py": "import helper\n" + plugin("handlers.add('v', lambda p: helper.V + '1')")}
    )
    write(tmp_path, {"helper.py": "V = '1'\n"})
    for name in ("versioned.py", "helper.py"):
        path = tmp_path / name
        os.utime(path, (1_700_000_000, 1_700_000_000))
        py_compile.compile(str(path), doraise=True)
        path.write_text(path.read_text().replace("'1'", "'2'"))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    old = sorted(tmp_path.glob("__pycache__/*"))
    assert len(old) == 2
    script = "r = plugins.load(cfg); answer = [r.handlers['v'].function(None), [p.digest for p in r.plugins]]"
    result, digests = run(tmp_path, script)
    assert result == "22"
    assert digests == [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()[:12]
        for name in ("helper.py", "versioned.py")
    ]
    for path in old:
        path.unlink()
    assert run(tmp_path, script)[0] == "22"
    assert not list(tmp_path.glob("__pycache__/*"))


def test_a_file_replaced_after_the_import_keeps_the_digest_of_what_runs(tmp_path):
    write(tmp_path, {"a.py": "open(__file__, 'a').write('# changed')\n" + handler("a")})
    before = hashlib.sha256((tmp_path / "a.py").read_bytes()).hexdigest()[:12]
    assert run(tmp_path, "answer = plugins.load(cfg).plugins[0].digest") == before


def test_settings_reach_the_plugin(tmp_path):
    write(tmp_path, {"a.py": plugin("mine = handlers.settings('a')\nhandlers.add('a', lambda p: mine)")})
    answer = run(
        tmp_path,
        """
        registry = plugins.load(config(settings={"a": {"folder": "/x"}}))
        answer = registry.handlers["a"].function(None)
        """,
    )
    assert answer == {"folder": "/x"}


def test_hooks_of_one_plugin_do_not_disturb_those_of_another(tmp_path):
    hook = "@aqd.hookimpl\ndef aqd_worker_start(slot): "
    late = "@aqd.hookimpl\ndef aqd_job_start(job): raise aqd.JobTimeout()\n"
    write(
        tmp_path,
        {
            "a.py": "import aqd, sys\ncalls = []\n" + hook + "calls.append(slot)\n",
            "b.py": "import aqd, sys\n" + hook + "sys.exit(3)\n",
            "c.py": "import aqd\n" + hook + "raise ValueError('no')\n" + late,
            "d.py": "import aqd, a\n@aqd.hookimpl\ndef aqd_worker_start(): a.calls.append('d')\n",
        },
    )
    answer = run(
        tmp_path,
        """
        import aqd
        registry = plugins.load(cfg)
        failures = registry.call("aqd_worker_start", slot=4, generation=1)
        try:
            passed = registry.call("aqd_job_start", job=None)
        except aqd.JobTimeout:
            passed = "through"
        answer = [sys.modules["a"].calls, sorted([name, type(e).__name__] for name, e in failures), passed,
                  registry.call("aqd_worker_stop", slot=4)]
        """,
    )
    assert sorted(map(str, answer[0])) == ["4", "d"]
    assert answer[1] == [["b", "SystemExit"], ["c", "ValueError"]]
    assert answer[2] == "through"
    assert answer[3] == []


# --- what is broken ---------------------------------------------------------------------------------

BROKEN = {
    "syntax": ("def (", "SyntaxError", "syntax.py, line 1"),
    # ValueError before Python 3.11.4: both say what is wrong.
    "nul_bytes": ("\0", "null bytes", ""),
    "not_utf8": ("# \udcff\nx = '\udcff'", "SyntaxError", ""),
    "missing_import": (
        "\nimport no_such_module",
        "ModuleNotFoundError: No module named 'no_such_module'",
        ".py:2)",
    ),
    "exits": ("import sys\nsys.exit(0)", "called sys.exit(0)", "exits.py:2)"),
    "exits_text": ("import sys\nsys.exit('bye')", "called sys.exit('bye')", ""),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    "generator_exit": ("raise GeneratorExit", "GeneratorExit", ""),
    "own_base": ("class Mine(BaseException): ...\nraise Mine('x' * 9999)", "Mine: xxxx", "…"),
    "bad_str": (
        "class E(Exception):\n def __str__(self): raise E\nraise E",
        "E: (its message cannot be shown)",
        "",
    ),
    "recursion": ("def f(): f()\nf()", "RecursionError", ""),
    "multi_line": ("raise ValueError('a\\n\\nb')", "ValueError: a b", ""),
    "loops": ("while True: pass", "took longer than 0.5 s", "loops.py:1)"),
    "loops_catching": (
        "import time\nfor _ in range(3):\n try: time.sleep(3600)\n except BaseException: pass",
        "took longer than 0.5 s",
        "",
    ),
    "loops_translating": (
        "import time\ntry: time.sleep(3600)\nexcept BaseException: raise ValueError('no answer')",
        "took longer than 0.5 s",
        "loops_translating.py:3)",
    ),
    "sleeps": ("import time\ntime.sleep(3600)", "took longer than 0.5 s", "sleeps.py:2)"),
    "regex": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "took longer than 0.5 s", "regex.py:2)"),
    "loops_registering": (plugin("while True: pass"), "took longer than 0.5 s", ""),
    "half": (
        plugin("handlers.add('half', len)\nraise RuntimeError('half way')"),
        "RuntimeError: half way",
        "",
    ),
    "bad_handler": (plugin("handlers.add('x y', len)"), "type must be 1 to 128", ""),
    "same_twice": (
        plugin("handlers.add('t', len)\nhandlers.add('t', len)"),
        "handler 't': registered twice",
        "",
    ),
    "wrong_argument": (
        "import aqd\n@aqd.hookimpl\ndef aqd_register(handlrs): ...",
        "hook aqd_register(handlrs): the argument 'handlrs' does not exist; allowed are handlers",
        "",
    ),
    "surplus_argument": (
        "import aqd\n@aqd.hookimpl\ndef aqd_job_start(job, slot): ...",
        "the argument 'slot' does not exist; allowed are job",
        "",
    ),
    "star_arguments": (
        "import aqd\n@aqd.hookimpl\ndef aqd_job_start(*args): ...",
        "'args' does not exist",
        "",
    ),
    "unknown_hook": (
        "import aqd\n@aqd.hookimpl\ndef aqd_regster(handlers): ...",
        "there is no hook 'aqd_regster'; the hooks are aqd_register, ",
        "",
    ),
    "unmarked": ("def aqd_register(handlers): ...", "aqd_register lacks the decorator @aqd.hookimpl", ""),
    "asynchronous": (
        "import aqd\n@aqd.hookimpl\nasync def aqd_register(handlers): ...",
        "must be a plain function",
        "",
    ),
    "wrapper": (
        "import aqd\n@aqd.hookimpl(wrapper=True)\ndef aqd_job_start(job): yield",
        "wrappers are not",
        "",
    ),
    "zz_rival": (handler("good"), "two handlers of the type 'good': one in ", "good.py, one in "),
    "helper_broken": ("1 / 0", "ZeroDivisionError", "helper_broken.py:1)"),
    "user_of_broken": ("import helper_broken", "ZeroDivisionError", "helper_broken.py:1)"),
    "name.with.dots": ("", "cannot be a plugin's name", ""),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """All the broken ones at once, with a good one among them."""
    folder = tmp_path_factory.mktemp("broken")
    for name, (source, _, _) in BROKEN.items():
        (folder / f"{name}.py").write_bytes(source.encode(errors="surrogateescape"))
    write(folder, {"good.py": handler("good")})
    os.mkfifo(folder / "fifo.py")
    (folder / "dangling.py").symlink_to("/nonexistent/x.py")
    (folder / "dangling_package").mkdir()
    (folder / "dangling_package" / "__init__.py").symlink_to("/nonexistent/x.py")
    # Passed over in silence:
    write(
        folder,
        {".#lock.py": "1/0", "_private.py": "1/0", "copy.py~": "1/0", "notes.txt": "1/0", "data/x.py": "1/0"},
    )
    (folder / "empty").mkdir()
    (folder / "folder.py").mkdir()
    return folder, run(
        folder,
        """
        import signal
        registry = plugins.load(config(import_timeout_s=0.5))
        answer = dict(show=show(registry), types=registry.types(), problems=registry.problems(),
                      sources={p.name: p.source for p in registry.plugins},
                      modules=sorted(n for n in sys.modules if (getattr(sys.modules[n], "__file__", "") or "").startswith(folder)),
                      registered=[name for name, _ in registry.manager.list_name_plugin()],
                      hooks=[i.plugin_name for i in registry.manager.hook.aqd_register.get_hookimpls()],
                      timer=signal.getitimer(signal.ITIMER_REAL), threaded=registry.threaded,
                      alarm=signal.getsignal(signal.SIGALRM) == signal.SIG_DFL)
        """,
    )


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_plugin_is_reported_with_its_file_and_reason(broken, name):
    folder, answer = broken
    _, reason, place = BROKEN[name]
    state, handlers, error = answer["show"][name]
    assert (state, handlers) == ("broken", [])
    assert reason in error
    assert place in error
    assert "\n" not in error
    assert len(error) < 900
    assert answer["sources"][name] == str(folder / f"{name}.py")
    assert f"plugin {name} ({folder}/{name}.py): {error}" in answer["problems"]


def test_files_that_cannot_be_read_are_reported_and_leftovers_are_not(broken):
    _, answer = broken
    assert answer["show"]["fifo"][2] == "is not a regular file"
    assert answer["show"]["dangling"][2] == "is a link to /nonexistent/x.py, which does not exist"
    assert answer["show"]["dangling_package"][2] == "is a link to /nonexistent/x.py, which does not exist"
    assert set(answer["show"]) == {*BROKEN, "good", "fifo", "dangling", "dangling_package"}
    assert len(answer["problems"]) == len(BROKEN) + 3


def test_nothing_is_left_of_broken_plugins_and_the_good_one_works(broken):
    _, answer = broken
    assert answer["show"]["good"] == ["loaded", ["good"], None]
    assert answer["types"] == ["good"]
    assert answer["modules"] == ["good"]
    assert answer["registered"] == ["good"]
    assert answer["hooks"] == ["good"]
    assert answer["timer"] == [0.0, 0.0]
    assert answer["alarm"]
    assert answer["threaded"] == {}


def test_an_unreadable_file_is_reported():
    """As an ordinary user: root may read everything."""
    folder = Path(tempfile.mkdtemp(prefix="aqd-plugins-"))
    try:
        folder.chmod(0o755)
        write(
            folder,
            {"good.py": handler("good"), "secret.py": handler("secret"), "closed/__init__.py": handler("c")},
        )
        (folder / "secret.py").chmod(0)
        (folder / "closed").chmod(0)
        answer = run(
            folder,
            """
            plugins.load(config())                          # imports all of aqd that is needed
            if os.getuid() == 0:
                os.setgroups([]); os.setgid(65534); os.setuid(65534)
            for name in ("good", "secret", "closed"): sys.modules.pop(name, None)
            answer = show(plugins.load(cfg))
            """,
        )
        (folder / "closed").chmod(0o755)
    finally:
        shutil.rmtree(folder)
    assert answer["good"] == ["loaded", ["good"], None]
    assert answer["secret"] == ["broken", [], "cannot be read: Permission denied"]
    assert answer["closed"] == ["broken", [], "cannot be read: Permission denied"]


def test_a_name_belongs_to_the_first(tmp_path):
    write(tmp_path, {"twin.py": handler("a"), "twin/__init__.py": handler("b")})
    answer = run(tmp_path, "answer = [[p.source, p.handlers, p.error] for p in plugins.load(cfg).plugins]")
    assert sorted(answer, key=lambda entry: entry[2] is None) == [
        [
            f"{tmp_path}/twin.py",
            [],
            f"the plugin name 'twin' is already taken by {tmp_path}/twin/__init__.py",
        ],
        [f"{tmp_path}/twin/__init__.py", ["b"], None],
    ]


def test_a_skipped_plugin_is_reported_without_being_touched(tmp_path):
    write(tmp_path, {"a.py": "import os\nos._exit(7)\n", "b.py": handler("b")})
    answer = run(tmp_path, "answer = show(plugins.load(cfg, skip={'a': 'ended the loader', 'zzz': 'gone'}))")
    assert answer == {"a": ["broken", [], "ended the loader"], "b": ["loaded", ["b"], None]}


def test_a_child_that_a_plugin_forks_at_import_does_not_go_on_as_the_loader(tmp_path):
    trace = tmp_path / "trace"
    write(tmp_path, {"forks.py": "import os\nos.fork()\n" + handler("forks"), "next.py": handler("next")})
    answer = run(
        tmp_path,
        f"""
        registry = plugins.load(cfg, progress=lambda name: open({str(trace)!r}, "a").write(name + " "))
        while True:
            try: os.waitpid(-1, 0)
            except ChildProcessError: break
        answer = show(registry)
        """,
    )
    assert answer["next"][0] == "loaded"
    assert trace.read_text() == "forks next "


def test_signal_handlers_stay_the_processs_own(tmp_path):
    write(
        tmp_path,
        {
            "a.py": "import signal\nsignal.signal(signal.SIGTERM, lambda *a: None)\nsignal.alarm(1)\n"
            + handler("a")
        },
    )
    answer = run(
        tmp_path,
        """
        import signal, time
        def mine(*_): ...
        signal.signal(signal.SIGTERM, mine)
        registry = plugins.load(cfg)
        answer = [signal.getsignal(signal.SIGTERM) is mine, registry.types(), signal.alarm(0)]
        """,
    )
    assert answer == [True, ["a"], 0]


@pytest.mark.parametrize(
    ("file", "reason"),
    [(False, "No such file or directory"), (True, "is not a folder")],
    ids=["missing", "file"],
)
def test_a_plugins_folder_that_is_not_there_is_the_callers_error(tmp_path, file, reason):
    folder = tmp_path / "plugins"
    if file:
        folder.touch()
    cfg = Config(plugins=Plugins(dir=str(folder)))
    for function in (plugins.load, plugins.inspect):
        with pytest.raises(PluginError, match=f"plugins.dir: {folder} .*{reason}"):
            function(cfg)


def test_without_a_setting_the_shipped_folder_is_used():
    assert plugin_files.folder(Plugins()) == ROOT / "plugins"
