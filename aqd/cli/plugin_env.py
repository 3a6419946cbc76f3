"""``aqd plugin-env``: install what plugins import into the virtual environment ``plugins.venv``.

pip does the work: that of aqd's own installation, told to act on the other environment. It sees aqd's packages as
installed there (by a .pth file) and may not choose other versions of them, because aqd's come first on the path: what
does not go together is refused at the installation and not found by a job.

Root becomes the owner of the directory above, which is the service's user: that user's jobs may write there, so root
must run nothing of it, and a package's build script has no business with root's rights.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path

import click

from aqd import plugin_env
from aqd.cli.command import App
from aqd.errors import ConfigError, Exit, UserError, WorldError

RELOAD = "`aqd reload` makes the running daemon use it"
# So that options behind PKG are pip's.
_PIPS_OPTIONS = {"ignore_unknown_options": True}


@click.group("plugin-env")
def plugin_env_command() -> None:
    """Packages that plugins need, in a virtual environment that outlives upgrades of aqd."""


@plugin_env_command.command("install", context_settings=_PIPS_OPTIONS)
@click.argument("packages", metavar="PKG...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def install_command(app: App, packages: tuple[str, ...]) -> None:
    """Install or upgrade packages: names, name==version, files, URLs, or -r FILE; options of pip are passed on."""
    venv = _venv(app)
    given = [_absolute(each) for each in packages]
    _become_owner(venv)
    _check_readable(given)
    if reason := plugin_env.problem(venv):
        raise ConfigError(f"plugins.venv: {reason}")
    if not os.path.lexists(venv):
        _make(venv)
    _install(venv, ["--upgrade", *given])
    click.echo(f"installed into {venv}; {RELOAD}")


@plugin_env_command.command("remove")
@click.argument("packages", metavar="PKG...", nargs=-1, required=True)
@click.pass_obj
def remove_command(app: App, packages: tuple[str, ...]) -> None:
    """Remove packages; what came with them as their dependencies stays."""
    venv = _venv(app)
    _become_owner(venv)
    if reason := plugin_env.problem(venv):
        raise ConfigError(f"plugins.venv: {reason}")
    known = {_normal(package.name) for package in plugin_env.packages(venv)}
    for name in packages:
        if _normal(name) not in known:
            raise UserError(f"{name} is not installed in {venv}")
    if _pip(venv, "uninstall", "--yes", *packages):
        raise WorldError("pip could not remove them; its reason is above")
    click.echo(f"removed from {venv}; {RELOAD}")


@plugin_env_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def list_command(app: App, as_json: bool) -> int:
    """List what is installed; exit code 3 if the environment does not fit aqd's Python."""
    from aqd.cli.output import print_json, print_table

    venv = _venv(app)
    found = plugin_env.packages(venv)
    if as_json:
        print_json([package._asdict() for package in found])
    else:
        rows = [(p.name, p.version, p.requested, p.source) for p in found]
        print_table(("package", "version", "requested", "source"), rows, empty=f"nothing in {venv}")
    reason = plugin_env.misfit(venv)
    if reason is not None:
        click.echo(f"aqd: plugins.venv: {reason}", err=True)
    return Exit.OK if reason is None else Exit.CONFIG


@plugin_env_command.command("path")
@click.pass_obj
def path_command(app: App) -> None:
    """Print where the environment is, whether it exists or not."""
    click.echo(_venv(app))


@plugin_env_command.command("rebuild", context_settings=_PIPS_OPTIONS)
@click.argument("options", metavar="[PIP'S OPTIONS]", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def rebuild_command(app: App, options: tuple[str, ...]) -> None:
    """Make the environment anew for aqd's Python, with the same packages.

    For after an upgrade of Python. Each package, those that came as dependencies too, is installed in the version that
    it has now; one that came from a file, a URL or a repository from there again, of a repository the same commit. If one of
    them cannot be installed, the old environment is put back.
    """
    venv = _venv(app)
    _become_owner(venv)
    old = f"{venv}.old"
    _check_replaceable(venv, old)
    before = plugin_env.packages(venv)
    own = {_normal(name) for name, _ in _own_versions()}
    # aqd may have brought a dependency itself in the meantime: then that one counts.
    again = [package for package in before if package.requested or _normal(package.name) not in own]
    os.rename(venv, old)
    try:
        _make(venv)
        if again:
            _install(venv, [*(word for package in again for word in _requirement(package)), *options])
            _mark_dependencies(venv, {_normal(package.name) for package in before if package.requested})
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        os.rename(old, venv)
        raise
    shutil.rmtree(old)
    names = ", ".join(f"{package.name} {package.version}" for package in again)
    click.echo(f"{venv} is made anew with {names or 'no packages'}; {RELOAD}")


def check(venv: str) -> str:
    """What is wrong among the packages of an environment that fits, one a line; "" if nothing is."""
    done = subprocess.run(_pips(venv, "check"), capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode else ""


# --- rebuilding ---------------------------------------------------------------------------------------


def _check_replaceable(venv: str, old: str) -> None:
    """Only an environment is replaced, by somebody who may, and nothing is deleted that this call has not made."""
    if not os.path.isdir(venv):
        raise UserError(f"{venv} is not there: `aqd plugin-env install` makes it")
    if os.path.islink(venv):
        raise ConfigError(f"plugins.venv: {venv} is a symbolic link: name what it points to")
    if not plugin_env.is_environment(venv):
        raise ConfigError(f"plugins.venv: {venv} is no virtual environment: name another place")
    if reason := plugin_env.unsafe(venv):
        raise ConfigError(f"plugins.venv: {reason}")
    above = os.path.dirname(venv)
    if not os.access(above, os.W_OK):
        raise UserError(f"{above} cannot be changed by you: run this as the user who owns it")
    if os.path.lexists(old):
        raise UserError(
            f"{old} is in the way. If a rebuild was interrupted, it is the environment from before: "
            f"put it back (remove {venv}, rename {old} to it), or remove it, then start again"
        )


def _requirement(package: plugin_env.Package) -> list[str]:
    if package.editable:
        return ["--editable", package.source]
    # The bare URL: with the name before it, older versions of pip refuse a repository's that has no host.
    return [package.source or f"{package.name}=={package.version}"]


def _mark_dependencies(venv: str, requested: set[str]) -> None:
    """pip was told all of them by name: take back that somebody has asked for those that were dependencies."""
    for mark in Path(plugin_env.packages_dir(venv)).glob("*.dist-info/REQUESTED"):
        if _normal(metadata.Distribution.at(mark.parent).metadata["Name"]) not in requested:
            mark.unlink()


# --- how ----------------------------------------------------------------------------------------------


def _venv(app: App) -> str:
    from aqd import config

    venv = config.load_leniently(app.config_path, os.environ).plugins.venv
    if not venv:
        raise ConfigError(
            "plugins.venv is not set: name a directory for it in the configuration, such as /var/lib/aqd/plugins-venv"
        )
    return venv


def _become_owner(venv: str) -> None:
    """Root goes on as the owner of the directory above, for good; nobody else may."""
    above = os.path.dirname(venv)
    try:
        uid = os.stat(above).st_uid
    except OSError as error:
        raise ConfigError(f"plugins.venv: {above}: {error.strerror}; make that directory first") from None
    if os.geteuid() != 0:
        if not os.access(above if not os.path.lexists(venv) else venv, os.W_OK):
            raise UserError(
                f"{venv} cannot be changed by you: run this as root, or as the user who owns {above}"
            )
        return
    if uid != 0:
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            raise ConfigError(
                f"plugins.venv: {above} belongs to the user id {uid}, who has no name"
            ) from None
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.seteuid(uid)
        if not os.access(sys.executable, os.X_OK, effective_ids=True):
            os.seteuid(0)  # even to say so takes modules that lie where that user cannot look
            raise ConfigError(
                f"plugins.venv: {above} belongs to the user {user.pw_name}, who cannot run {sys.executable}"
            )
        os.seteuid(0)
        os.setuid(uid)
        os.environ["HOME"] = user.pw_dir
    os.umask(0o022)


def _absolute(given: str) -> str:
    """A file's or directory's name as pip understands it; a plain word is a package even beside a folder of that name."""
    if "://" in given or given.startswith("-"):
        return given
    if os.sep not in given and not given.endswith((".whl", ".zip", ".tar.gz", ".txt")):
        return given
    if not os.path.exists(given):
        raise UserError(f"{given}: there is no such file")
    return os.path.abspath(given)


def _check_readable(given: Sequence[str]) -> None:
    for each in given:
        if os.path.isabs(each) and not os.access(each, os.R_OK):
            name = pwd.getpwuid(os.geteuid()).pw_name
            raise UserError(f"{each} cannot be read by the user {name}, who installs: put it where it can be")


def _make(venv: str) -> None:
    done = subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], cwd="/", check=False)
    if done.returncode:
        raise WorldError(f"the virtual environment {venv} could not be made; the reason is above")
    Path(plugin_env.packages_dir(venv), "aqd.pth").write_text(f"{_own_packages()}\n")


def _install(venv: str, arguments: Sequence[str]) -> None:
    with _constraints() as file:
        code = _pip(venv, "install", "--no-cache-dir", "--constraint", file, *arguments)
    if code:
        raise WorldError("pip could not install that; its reason is above")


@contextlib.contextmanager
def _constraints() -> Iterator[str]:
    """A file that holds the versions of aqd's own packages."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for name, version in _own_versions():
            file.write(f"{name}=={version}\n")
        file.flush()
        yield file.name


def _own_versions() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions(path=[_own_packages()]):
        if name := distribution.metadata["Name"]:
            yield name, distribution.version


def _own_packages() -> str:
    return sysconfig.get_paths()["purelib"]


def _pip(venv: str, *arguments: str) -> int:
    return subprocess.run(_pips(venv, *arguments), check=False).returncode


def _pips(venv: str, *arguments: str) -> list[str]:
    if util.find_spec("pip") is None:
        raise WorldError(f"pip is missing beside {sys.executable}: install it there")
    ours = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        f"{venv}/bin/python",
    ]
    return [*ours, *arguments]


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
