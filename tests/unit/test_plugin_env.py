"""Packages of plugins in an environment of their own: ``aqd plugin-env``, and what the loader and ``aqd check`` make of it.

The packages are wheels made here; pip is told to use no index.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from aqd import plugin_env
from aqd.errors import Exit
from tests.unit.plugins_support import LOAD, handler, run, write

ROOT = Path(__file__).parents[2]


def wheel(
    folder: Path, name: str, code: str, *, version: str = "1.0", needs: str = "", plugin: bool = True
) -> Path:
    """A wheel of one module, announced as a plugin."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if plugin:
        files[f"{info}/entry_points.txt"] = f"[aqd.plugins]\n{name} = {name}\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in files)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


class Place:
    """A directory with a configuration that names an environment in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plugins = directory / "plugins"
        self.plugins.mkdir()
        self.wheels = directory / "wheels"
        self.wheels.mkdir()
        self.above = directory / "state"
        self.above.mkdir()
        self.venv = self.above / "venv"
        self.config = directory / "aqd.toml"
        self.config.write_text(f'[plugins]\ndir = "{self.plugins}"\nvenv = "{self.venv}"\n')

    def aqd(self, *arguments: str, code: int = 0, user: str = "") -> str:
        """Run a command; returns what it said on both streams."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("AQD_", "PIP_"))}
        environ |= {
            "AQD_CONFIG": str(self.config),
            "PYTHONPATH": str(ROOT),
            "DATABASE_URL": "postgresql://127.0.0.1:1/x",
        }
        wrapper = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups"] if user else []
        done = subprocess.run(
            [*wrapper, sys.executable, "-m", "aqd", *arguments],
            env=environ,
            cwd=self.wheels,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def load(self) -> dict[str, list[object]]:
        return run(self.plugins, f"cfg = config(entry_points=True, venv={str(self.venv)!r})\n{LOAD}")

    def findings(self, code: int) -> dict[str, list[str]]:
        """``aqd check``, by part: result and reason."""
        rows = json.loads(self.aqd("check", "--json", code=code))
        return {row["part"]: [row["result"], row["reason"]] for row in rows}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def open_place() -> Iterator[Place]:
    """One where other users may look: pytest closes its own directories to them."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Place(Path(directory))


def pretend(venv: Path, version: str) -> None:
    file = venv / "pyvenv.cfg"
    ours = f"{sys.version_info.major}.{sys.version_info.minor}."
    file.write_text(file.read_text().replace(f"version = {ours}", f"version = {version}.", 1))


def test_install_use_and_remove(place: Place) -> None:
    """A plugin that comes as a package, with one that it needs, which a drop-in uses too."""
    wheel(place.wheels, "dep", "value = 7\n", plugin=False)
    wheel(place.wheels, "packed", f"import dep\n{handler('packed')}", needs="dep")
    write(place.plugins, {"dropped.py": f"import dep\n{handler('dropped')}"})
    assert place.aqd("plugin-env", "path") == f"{place.venv}\n"
    assert place.aqd("plugin-env", "list") == f"nothing in {place.venv}\n"
    loaded = place.load()  # an environment that is not there yet is no mistake …
    assert set(loaded) == {"dropped"}
    assert "No module named 'dep'" in str(loaded["dropped"][2])

    said = place.aqd("plugin-env", "install", "--no-index", "--find-links", ".", "packed")
    assert "`aqd reload`" in said
    listed = json.loads(place.aqd("plugin-env", "list", "--json"))
    assert [(each["name"], each["requested"]) for each in listed] == [("dep", False), ("packed", True)]
    loaded = place.load()
    assert loaded["packed"] == ["loaded", ["packed"], None]
    assert loaded["dropped"] == ["loaded", ["dropped"], None]
    assert place.findings(Exit.DATABASE)["plugins.venv"] == ["ok", "packages: 2"]

    place.aqd("plugin-env", "remove", "dep")
    found = place.findings(Exit.CONFIG)
    assert found["plugins.venv"] == ["failed", "packed 1.0 requires dep, which is not installed."]
    assert "is not installed" in place.aqd("plugin-env", "remove", "dep", code=Exit.USAGE)


def test_aqds_own_packages_are_neither_copied_nor_replaced(place: Place) -> None:
    wheel(place.wheels, "polite", "", needs=f"msgspec=={msgspec.__version__}")
    wheel(place.wheels, "greedy", "", needs=f"msgspec!={msgspec.__version__}")
    wheel(place.wheels, "msgspec", "raise SystemExit('replaced')\n", version="99.0", plugin=False)
    place.aqd("plugin-env", "install", "--no-index", "./polite-1.0-py3-none-any.whl")
    assert [each.name for each in plugin_env.packages(str(place.venv))] == ["polite"]
    said = place.aqd("plugin-env", "install", "--no-index", "--find-links", ".", "greedy", code=Exit.ERROR)
    assert "conflict" in said or "No matching distribution" in said
    assert [each.name for each in plugin_env.packages(str(place.venv))] == ["polite"]
    # Even one that got in is never what aqd imports.
    shutil.unpack_archive(
        place.wheels / "msgspec-99.0-py3-none-any.whl", plugin_env.packages_dir(str(place.venv)), "zip"
    )
    write(place.plugins, {"looks.py": f"import msgspec\nmsgspec.json\n{handler('looks')}"})
    assert place.load()["looks"] == ["loaded", ["looks"], None]


def test_one_for_another_python_is_told_and_made_anew(place: Place) -> None:
    """After an upgrade of the distribution: neither a crash nor silence, and the way out is named."""
    wheel(place.wheels, "packed", handler("packed"))
    place.aqd("plugin-env", "install", "--no-index", "./packed-1.0-py3-none-any.whl")
    pretend(place.venv, "3.2")
    loaded = place.load()
    assert set(loaded) == {"plugins.venv"}
    assert "was made for Python 3.2, and aqd runs on Python" in str(loaded["plugins.venv"][2])
    assert "`aqd plugin-env rebuild`" in place.findings(Exit.CONFIG)["plugin"][1]
    assert "made for Python 3.2" in place.aqd("plugin-env", "list", code=Exit.CONFIG)
    assert "made for Python 3.2" in place.aqd("plugin-env", "install", "x", code=Exit.CONFIG)

    # What it was installed from is gone: the old environment stays.
    (place.wheels / "packed-1.0-py3-none-any.whl").rename(place.wheels / "away")
    place.aqd("plugin-env", "rebuild", "--no-index", code=Exit.ERROR)
    assert plugin_env.version(str(place.venv)) == "3.2"
    assert [each.name for each in plugin_env.packages(str(place.venv))] == ["packed"]
    (place.wheels / "away").rename(place.wheels / "packed-1.0-py3-none-any.whl")
    place.aqd("plugin-env", "rebuild", "--no-index")
    assert place.load()["packed"] == ["loaded", ["packed"], None]
    assert [path.name for path in place.above.iterdir()] == ["venv"]


def test_a_rebuild_keeps_versions_of_dependencies_and_who_asked(place: Place) -> None:
    wheel(place.wheels, "dep", "value = 1\n", plugin=False)
    wheel(place.wheels, "packed", handler("packed"), needs="dep")
    index = ("--no-index", "--find-links", str(place.wheels))
    place.aqd("plugin-env", "install", *index, "packed")
    before = plugin_env.packages(str(place.venv))
    wheel(place.wheels, "dep", "value = 2\n", version="2.0", plugin=False)
    place.aqd("plugin-env", "rebuild", *index)
    assert plugin_env.packages(str(place.venv)) == before
    assert [(p.name, p.version, p.requested) for p in before] == [
        ("dep", "1.0", False),
        ("packed", "1.0", True),
    ]


BACKEND = """
import zipfile
def build_wheel(directory, settings=None, metadata=None):
    name = "vcs-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as file:
        file.write("vcs.py")
        file.writestr("vcs-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: vcs\\nVersion: 1.0\\n")
        file.writestr("vcs-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr("vcs-1.0.dist-info/RECORD", "vcs.py,,\\n")
    return name
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_rebuild_takes_the_same_commit_of_a_repository(place: Place) -> None:
    source = place.directory / "source"
    folder = source / "sub"
    folder.mkdir(parents=True)
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(system)
    (folder / "backend.py").write_text(BACKEND)

    def commit(value: int) -> str:
        (folder / "vcs.py").write_text(f"value = {value}\n")
        git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@localhost"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
            subprocess.run([*git, *words], check=True)
        return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    first = commit(1)
    wanted = f"git+file://{source}#subdirectory=sub"
    place.aqd("plugin-env", "install", "--no-index", wanted)
    commit(2)
    place.aqd("plugin-env", "rebuild", "--no-index")
    (package,) = plugin_env.packages(str(place.venv))
    assert package.source == f"git+file://{source}@{first}#subdirectory=sub"
    module = Path(plugin_env.packages_dir(str(place.venv)), "vcs.py")
    assert module.read_text() == "value = 1\n"


def test_a_rebuild_takes_a_directory_that_is_used_where_it_lies(place: Place) -> None:
    origin = '{"url": "file:///srv/x", "dir_info": {"editable": true}}'
    wheel(place.wheels, "packed", "")
    place.aqd("plugin-env", "install", "--no-index", "./packed-1.0-py3-none-any.whl")
    info = Path(plugin_env.packages_dir(str(place.venv)), "packed-1.0.dist-info")
    (info / "direct_url.json").write_text(origin)
    said = place.aqd("plugin-env", "rebuild", "--no-index", code=Exit.ERROR)
    assert "Obtaining file:///srv/x" in said  # that is how pip begins with one that is editable


def test_a_rebuild_deletes_nothing_of_others(place: Place) -> None:
    """Not an ordinary directory that the option names by mistake, and not what a rebuild that was killed has put aside."""
    place.venv.mkdir()
    (place.venv / "data").write_text("mine")
    said = place.aqd("plugin-env", "rebuild", code=Exit.CONFIG)
    assert "is no virtual environment: name another place" in said
    assert (place.venv / "data").read_text() == "mine"
    said = place.aqd("plugin-env", "install", "x", code=Exit.CONFIG)
    assert "is no virtual environment" in said
    assert "plugin-env rebuild" not in said

    shutil.rmtree(place.venv)
    wheel(place.wheels, "packed", handler("packed"))
    place.aqd("plugin-env", "install", "--no-index", "./packed-1.0-py3-none-any.whl")
    old = place.above / "venv.old"
    place.venv.rename(old)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    assert f"{old} is in the way" in place.aqd("plugin-env", "rebuild", "--no-index", code=Exit.USAGE)
    assert [each.name for each in plugin_env.packages(str(old))] == ["packed"]
    assert place.venv.is_dir()

    link = place.above / "link"
    link.symlink_to(old)
    place.config.write_text(f'[plugins]\nvenv = "{link}"\n')
    assert "is a symbolic link" in place.aqd("plugin-env", "rebuild", code=Exit.CONFIG)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda venv: (venv / "pyvenv.cfg").unlink(), "is no virtual environment"),
        (lambda venv: shutil.rmtree(venv / "lib"), "is missing or cannot be read"),
        (lambda venv: (shutil.rmtree(venv), venv.symlink_to("/nonexistent")), "is no virtual environment"),
    ],
)
def test_broken_environments(place: Place, harm, reason: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    assert plugin_env.problem(str(place.venv)) is None
    harm(place.venv)
    assert reason in (plugin_env.problem(str(place.venv)) or "")
    assert reason in str(place.load()["plugins.venv"][2])


def test_mistakes(place: Place) -> None:
    assert "there is no such file" in place.aqd("plugin-env", "install", "./x.whl", code=Exit.USAGE)
    assert "`aqd plugin-env install` makes it" in place.aqd("plugin-env", "rebuild", code=Exit.USAGE)
    shutil.rmtree(place.above)
    assert "make that directory first" in place.aqd("plugin-env", "install", "x", code=Exit.CONFIG)
    place.config.write_text("")
    for command in (["install", "x"], ["list"], ["path"]):
        assert "plugins.venv is not set" in place.aqd("plugin-env", *command, code=Exit.CONFIG)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_nothing_of_the_services_user(open_place: Place) -> None:
    """Jobs may write where the environment lies: root installs as their user, and does not import what they may change."""
    place, user = open_place, pwd.getpwnam("nobody")
    os.chown(place.above, user.pw_uid, user.pw_gid)
    marker = place.above / "marker"
    code = f"import os\nopen({str(marker)!r}, 'w').write(str(os.geteuid()))\n{handler('packed')}"
    wheel(place.wheels, "packed", code)
    as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    if subprocess.run([*as_nobody, "test", "-x", sys.executable], check=False).returncode:
        said = place.aqd("plugin-env", "install", "./packed-1.0-py3-none-any.whl", code=Exit.CONFIG)
        assert f"the user nobody, who cannot run {sys.executable}" in said
        pytest.skip("the user nobody cannot run this interpreter")
    place.aqd("plugin-env", "install", "--no-index", "./packed-1.0-py3-none-any.whl")
    assert place.venv.stat().st_uid == user.pw_uid
    assert "root must not run what the user nobody may change" in place.findings(Exit.CONFIG)["plugin"][1]
    place.aqd("plugins")
    assert not marker.exists()
    assert "packed" in place.aqd("plugins", user="nobody")
    assert marker.read_text() == str(user.pw_uid)
    (place.wheels / "packed-1.0-py3-none-any.whl").chmod(0o600)
    said = place.aqd("plugin-env", "install", "./packed-1.0-py3-none-any.whl", code=Exit.USAGE)
    assert "cannot be read by the user nobody" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_rebuilds_nothing_that_others_may_change(open_place: Place) -> None:
    """The directory above is root's, so root stays root: what it installs is then chosen by whoever may write there."""
    place, user = open_place, pwd.getpwnam("nobody")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    os.chown(place.venv, user.pw_uid, user.pw_gid)
    said = place.aqd("plugin-env", "rebuild", "--no-index", code=Exit.CONFIG)
    assert "root must not run what the user nobody may change" in said
    os.chown(place.venv, 0, 0)
    for path, mode in ((place.venv, 0o775), (place.above, 0o757)):
        before = path.stat().st_mode & 0o7777
        path.chmod(mode)
        for command in (["rebuild"], ["install", "x"], ["remove", "x"]):
            said = place.aqd("plugin-env", *command, code=Exit.CONFIG)
            assert f"root must not run what others may change: use `chmod go-w {path}`" in said
        path.chmod(before)
    place.aqd("plugin-env", "rebuild", "--no-index")
