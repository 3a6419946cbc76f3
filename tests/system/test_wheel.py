"""The built wheel, installed outside of the checkout: everything is in it, and nothing reaches back."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("wheel")


def build(kind: str, target: Path) -> Path:
    """Builds without fetching anything: the backend is a development dependency."""
    command = [
        sys.executable,
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "--outdir",
        str(target),
        str(ROOT),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = target.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and the dependencies of this one."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A directory named in a .pth file is searched, but its own .pth files (an editable aqd) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin/python"


def run(python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-P", *arguments],
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tracked(*folders: str) -> set[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return {name for name in answer.splitlines() if (ROOT / name).is_file()}


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = tracked("aqd") | {f"aqd/_data/{name}" for name in tracked("sql", "plugins", "etc")}
    assert names == expected


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        read = {
            name.split("/", 1)[1]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "aqd = aqd.cli:main" in read["entry_points.txt"]
    assert "Requires-Python: >=3.11" in read["METADATA"]
    assert "MIT License" in read["licenses/LICENSE"]


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "wheel"),
        str(source),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    (again,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert first.namelist() == second.namelist()


def test_it_comes_from_the_wheel(installed: Path) -> None:
    code = "import aqd, aqd.paths as p; print(aqd.__file__, *map(p.data_dir, ['sql', 'plugins', 'etc']))"
    result = run(installed, "-c", code)
    assert result.returncode == 0, result.stderr
    places = [Path(place) for place in result.stdout.split()]
    assert all(place.is_relative_to(installed.parents[1]) for place in places)
    assert places[2] == places[0].parent / "_data/plugins"


def test_commands(installed: Path, empty_database_url: str) -> None:
    version = run(installed, "-m", "aqd", "--version")
    assert version.stdout.startswith("aqd "), version.stderr

    migrated = run(installed, "-m", "aqd", "db", "migrate", DATABASE_URL=empty_database_url)
    assert migrated.returncode == 0, migrated.stderr

    checked = run(installed, "-m", "aqd", "check", DATABASE_URL=empty_database_url)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for handler in ("generate_pdf", "noop", "shell"):
        assert handler in checked.stdout
