"""Plugins that cannot live in the loader, that are only looked at, and that are installed."""

import hashlib
import os
from pathlib import Path

from tests.unit.plugins_support import ROOT, handler, plugin, printed, run, write

# --- threads ----------------------------------------------------------------------------------------

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='ticker', daemon=True).start()\n"
ENDED = "import threading\nt = threading.Thread(target=len, args=('',))\nt.start()\nt.join()\n"


def test_a_plugin_that_starts_a_thread_is_named_and_loaded_after_the_fork(tmp_path):
    write(
        tmp_path,
        {
            "a_user.py": "import b_helper\n" + handler("user"),
            "b_helper.py": THREAD,
            "c_own.py": THREAD + plugin("handlers.add('own', lambda p: 'own', timeout_s=7)"),
            "d_ended.py": ENDED + handler("ended"),
            "e_rival.py": handler("own"),
        },
    )
    answer = run(
        tmp_path,
        """
        first = plugins.load(cfg)
        answer = dict(threaded=first.threaded, show=show(first), types=first.types(), callable=sorted(first.handlers),
                      modules=sorted(n for n in sys.modules if n in ("a_user", "b_helper", "c_own", "d_ended")))
        """,
    )
    assert answer["threaded"] == {
        "a_user": "started a thread at import: ticker",
        "b_helper": "started a thread at import: ticker",
        "c_own": "started a thread at import: ticker",
    }
    assert answer["show"]["c_own"] == ["late", ["own"], None]
    assert answer["show"]["d_ended"] == ["loaded", ["ended"], None]
    assert answer["show"]["e_rival"][0] == "broken"
    assert answer["types"] == ["ended", "own", "user"]
    assert answer["callable"] == ["ended"]
    assert answer["modules"] == ["d_ended"]

    answer = run(
        tmp_path,
        """
        late = ["a_user", "b_helper", "c_own"]
        registry = plugins.load(cfg, late=late)
        answer = dict(threaded=registry.threaded, show=show(registry), threads=threading.active_count(),
                      types=registry.types(), limit=[i.timeout_s for i in registry.infos() if i.type == "own"],
                      digest=[len(p.digest) for p in registry.plugins])
        answer["before"] = sorted(registry.handlers)
        answer["failed"] = plugins.load_late(registry, cfg, late)
        answer["after"] = sorted(registry.handlers)
        answer["shown"] = show(registry)
        answer["types_after"] = registry.types()
        answer["call"] = registry.handlers["own"].function(None)
        """,
    )
    assert answer["threaded"] == {}
    assert answer["threads"] == 1
    assert answer["show"]["c_own"] == ["late", ["own"], None]
    assert answer["show"]["e_rival"][0] == "broken"
    assert answer["types"] == answer["types_after"] == ["ended", "own", "user"]
    assert answer["limit"] == [7.0]
    assert set(answer["digest"]) == {12}
    assert answer["before"] == ["ended"]
    assert answer["failed"] == {}
    assert answer["after"] == ["ended", "own", "user"]
    assert answer["shown"]["c_own"] == ["loaded", ["own"], None]
    assert answer["call"] == "own"


def test_late_plugins_may_be_broken_too(tmp_path):
    write(
        tmp_path,
        {
            "exits.py": "import os\nos._exit(3)",
            "fickle.py": "import os\nif os.environ.get('WORKER'): 1/0\n" + handler("fickle"),
            "first.py": handler("same"),
            "raises.py": "1/0",
            "second.py": handler("same"),
        },
    )
    answer = run(
        tmp_path,
        """
        late = ["exits", "fickle", "raises", "second", "unknown"]
        registry = plugins.load(cfg, late=late)
        answer = dict(show=show(registry), types=registry.types())
        os.environ["WORKER"] = "1"
        answer["failed"] = plugins.load_late(registry, cfg, ["fickle", "unknown"])
        answer["types_after"] = registry.types()
        """,
    )
    assert answer["show"]["exits"] == ["broken", [], "ended the process that imported it (exit code 3)"]
    assert answer["show"]["raises"][2].startswith("ZeroDivisionError")
    assert answer["show"]["fickle"] == ["late", ["fickle"], None]
    assert answer["show"]["second"][0] == "broken"
    assert "same" in answer["show"]["second"][2]
    assert answer["types"] == ["fickle", "same"]
    assert answer["failed"]["fickle"].startswith("ZeroDivisionError")
    assert answer["failed"]["unknown"] == "is not there any more"
    assert answer["types_after"] == ["same"]


# --- inspection and probing: nothing is imported here ------------------------------------------------

SECONDS = 700_000 + os.getpid()  # all processes of the machine are looked at


def test_inspection_survives_whatever_a_plugin_does_and_imports_nothing(tmp_path):
    write(
        tmp_path,
        {
            "a_exits.py": "import os\nos._exit(0)",
            "b_crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            "c_hangs.py": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
            "c_swallows.py": "import time\nwhile True:\n try: time.sleep(600)\n except BaseException: pass",
            "d_leaves.py": f"import subprocess, os\nsubprocess.Popen(['sleep', '{SECONDS}'])\nos._exit(4)",
            "e_closes.py": "import os\nos.closerange(3, 100)\n" + handler("closes"),
            "f_prints.py": "print('on standard output', flush=True)\n" + handler("prints"),
            "g_threads.py": THREAD + handler("threads"),
            "h_good.py": handler("good"),
        },
    )
    answer = run(
        tmp_path,
        """
        plugins._CHILD_GRACE_S = 0.3
        descriptors = os.listdir("/proc/self/fd")
        found = plugins.inspect(config(import_timeout_s=1))
        answer = dict(show={p.name: [p.state, p.handlers, p.error] for p in found},
                      modules=[n for n in sys.modules if n[1:2] == "_" and n[0] in "abcdefgh"],
                      descriptors=len(os.listdir("/proc/self/fd")) - len(descriptors))
        try: answer["children"] = str(os.waitpid(-1, os.WNOHANG))
        except ChildProcessError: answer["children"] = None
        """,
    )
    show = answer["show"]
    assert show["a_exits"] == ["broken", [], "ended the process that imported it (exit code 0)"]
    assert show["b_crashes"] == ["broken", [], "ended the process that imported it (signal 11 (SIGSEGV))"]
    assert show["c_hangs"] == ["broken", [], "did nothing for 1.3 s and could not be interrupted"]
    assert show["c_swallows"] == show["c_hangs"]
    assert show["d_leaves"] == ["broken", [], "ended the process that imported it (exit code 4)"]
    assert show["e_closes"][0] == "broken"
    assert show["f_prints"] == ["loaded", ["prints"], None]
    assert show["g_threads"] == ["late", ["threads"], None]
    assert show["h_good"] == ["loaded", ["good"], None]
    assert not any(printed)  # standard output belongs to the command
    assert answer["modules"] == []
    assert answer["descriptors"] == 0
    assert answer["children"] is None
    assert not running(f"sleep {SECONDS}")


def running(command: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b" ".join(words).strip().decode(errors="replace") == command:
            found.append(int(entry.name))
    return found


def test_probing_one_plugin(tmp_path):
    write(tmp_path, {"t.py": THREAD + handler("t"), "dots.in.name.py": ""})
    answer = run(
        tmp_path,
        """
        from aqd.errors import PluginError
        info, handlers = plugins.probe(cfg, "t")
        answer = dict(info=[info.name, info.state, info.handlers, info.error], types=[h.type for h in handlers],
                      threads=threading.active_count(), imported="t" in sys.modules)
        answer["bad"] = plugins.probe(cfg, "dots.in.name")[0].state
        try: plugins.probe(cfg, "nobody")
        except PluginError as error: answer["nobody"] = str(error)
        """,
    )
    assert answer["info"] == ["t", "late", ["t"], None]
    assert answer["types"] == ["t"]
    assert answer["threads"] == 1
    assert not answer["imported"]
    assert answer["bad"] == "broken"
    assert "no plugin 'nobody'" in answer["nobody"]


# --- installed plugins ------------------------------------------------------------------------------


def test_entry_points(tmp_path):
    folder, site = tmp_path / "plugins", tmp_path / "site"
    write(folder, {"taken.py": handler("from_the_file")})
    write(
        site,
        {
            "demo_plugin.py": handler("installed"),
            "demo_broken.py": "1/0",
            "demo_taken.py": handler("from_the_distribution"),
            "demo-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.2\n",
            "demo-1.2.dist-info/entry_points.txt": """
                [aqd.plugins]
                works = demo_plugin
                fails = demo_broken
                gone = demo_gone
                attribute = demo_plugin:nothing
                taken = demo_taken
                again = demo_plugin
            """,
        },
    )
    script = """
        registry = plugins.load(config(entry_points=ENTRY_POINTS))
        answer = {p.name + "/" + p.source: [p.handlers, p.error, p.version, p.digest] for p in registry.plugins}
        """
    paths = f"{ROOT}{os.pathsep}{site}"
    answer = run(folder, script.replace("ENTRY_POINTS", "True"), PYTHONPATH=paths)
    source = "entry point {} = {} of demo 1.2"
    digest = hashlib.sha256((site / "demo_plugin.py").read_bytes()).hexdigest()[:12]
    # In the order of their names: "again" comes first and has the module; the same object twice is refused.
    assert answer[f"again/{source.format('again', 'demo_plugin')}"] == [["installed"], None, "1.2", digest]
    assert (
        answer[f"works/{source.format('works', 'demo_plugin')}"][1]
        == "is the same object as the plugin 'again'"
    )
    assert answer[f"fails/{source.format('fails', 'demo_broken')}"][1].startswith("ZeroDivisionError")
    assert answer[f"gone/{source.format('gone', 'demo_gone')}"][1].startswith("ModuleNotFoundError")
    assert "nothing" in answer[f"attribute/{source.format('attribute', 'demo_plugin:nothing')}"][1]
    assert answer[f"taken/{folder}/taken.py"][0] == ["from_the_file"]
    assert (
        answer[f"taken/{source.format('taken', 'demo_taken')}"][1]
        == f"the plugin name 'taken' is already taken by {folder}/taken.py"
    )
    answer = run(folder, script.replace("ENTRY_POINTS", "False"), PYTHONPATH=paths)
    assert list(answer) == [f"taken/{folder}/taken.py"]
