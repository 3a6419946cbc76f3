"""The configuration: one frozen value made from a TOML file and the environment.

Used by every process; the master hands it on to its children as MessagePack. Only the standard library
and msgspec are imported, because the master reads the configuration on its way to the first fork.

Promises: what is returned is complete, of the right types, within its bounds and free of combinations
that cannot work. The environment wins over the file, ``AQD_<SECTION>_<KEY>`` wins over the common name
(``DATABASE_URL``, ``PORT``, …), and an empty variable counts as not set, because compose files and
unit files set variables that nobody has filled in.

Fails with :class:`aqd.errors.ConfigError`, which lists *all* problems, one a line, each with its file or
variable, the key, the value (secrets masked) and the reason. Nothing is ignored in silence: a misspelt
key that changes nothing is how a daemon runs for months with the wrong lease.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from aqd import paths
from aqd.errors import ConfigError
from aqd.options import (
    LOG_FORMATS,
    LOG_LEVELS,
    Option,
    Refused,
    absolute,
    brief,
    check,
    did_you_mean,
    from_text,
    hidden,
    mask,
    masked,
    read_secret,
    shown,
)

__all__ = [
    "LOG_FORMATS",
    "LOG_LEVELS",
    "OPTIONS",
    "Config",
    "Loaded",
    "Option",
    "load",
    "load_with_sources",
    "mask",
    "masked",
    "shown",
]

DEFAULT_PATH = "/etc/aqd/aqd.toml"

_DAY_S = 86_400


class Database(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the jobs are. ``url`` is a libpq URL or ``key=value`` string."""

    url: str = "postgresql:///aqd"
    connect_timeout_s: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    statement_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    notify: bool = True
    prepare: bool = True
    listen_url: str = ""
    pooler: str = "auto"
    migrate: bool = True


class Daemon(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node: its slots, its lease, how it stops."""

    slots: Annotated[int, Meta(ge=1, le=512)] = 4
    poll_ms: Annotated[int, Meta(ge=10, le=600_000)] = 1000
    lease_s: Annotated[float, Meta(ge=1, le=_DAY_S)] = 30.0
    renew_s: Annotated[float, Meta(ge=0.1, le=_DAY_S)] = 8.0
    drain_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 30.0
    kill_grace_s: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    queues: list[str] = msgspec.field(default_factory=list)
    frame_ms: Annotated[float, Meta(ge=0, le=1000)] = 5.0
    runtime_dir: str = ""
    node_name: str = ""
    spawn_failures_max: Annotated[int, Meta(ge=1, le=10_000)] = 20
    max_jobs_per_worker: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    recycle_memory_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    reserved: dict[str, int] = msgspec.field(default_factory=dict)
    aging_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 60.0
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65_535)] = 0


class Jobs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Defaults and bounds of jobs; a handler or a job may set its own attempts, timeout and backoff."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    timeout_s: Annotated[float, Meta(ge=0.1, le=30 * _DAY_S)] = 600.0
    memory_limit_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    backoff_base_s: Annotated[float, Meta(ge=0.01, le=30 * _DAY_S)] = 2.0
    backoff_max_s: Annotated[float, Meta(ge=0.01, le=30 * _DAY_S)] = 3600.0
    max_crashes: Annotated[int, Meta(ge=1, le=1000)] = 3
    max_interruptions: Annotated[int, Meta(ge=0, le=100_000)] = 20
    unknown_type_grace_s: Annotated[float, Meta(ge=0, le=30 * _DAY_S)] = 60.0
    max_payload_bytes: Annotated[int, Meta(ge=1024, le=64 << 20)] = 1 << 20
    max_result_bytes: Annotated[int, Meta(ge=1024, le=64 << 20)] = 1 << 20
    idempotency_ttl_hours: Annotated[float, Meta(ge=0.01, le=87_600)] = 24.0


class Plugins(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where handlers come from. ``venv`` is the environment of what they import beside aqd's own packages;
    ``settings`` maps a plugin's name to its own table, handed to it as is."""

    dir: str = ""
    venv: str = ""
    entry_points: bool = True
    strict: bool = False
    import_timeout_s: Annotated[float, Meta(ge=0.1, le=600)] = 10.0
    settings: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


class Api(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP service. An empty ``admin_api_key`` closes the admin routes; it never opens them. What the keys mean
    is :mod:`aqd.keys`'s."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 4000
    workers: Annotated[int, Meta(ge=1, le=64)] = 2
    threads: Annotated[int, Meta(ge=1, le=256)] = 8
    admin_api_key: str = ""
    admin_api_key_file: str = ""
    keys: str = ""
    keys_file: str = ""
    insecure: bool = False
    read_only: bool = False
    cors_origins: list[str] = msgspec.field(default_factory=list)
    request_timeout_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0


class Keeper(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Intervals and retention of the house-keeping thread."""

    rescue_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    node_ttl_s: Annotated[float, Meta(ge=1, le=_DAY_S)] = 30.0
    history_days: Annotated[int, Meta(ge=1, le=3650)] = 14
    failed_days: Annotated[int, Meta(ge=1, le=3650)] = 90
    figures_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0


class Log(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``level`` is one of :data:`LOG_LEVELS`, ``format`` one of :data:`LOG_FORMATS`."""

    level: str = "info"
    format: str = "auto"


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration; see ``etc/aqd.toml`` for the meaning of each option."""

    database: Database = Database()
    daemon: Daemon = Daemon()
    jobs: Jobs = Jobs()
    plugins: Plugins = msgspec.field(default_factory=Plugins)
    api: Api = msgspec.field(default_factory=Api)
    keeper: Keeper = Keeper()
    log: Log = Log()


class Loaded(NamedTuple):
    """A configuration together with where each value came from."""

    config: Config
    path: str | None  # the file that was read, if any
    sources: dict[str, str]  # "daemon.slots" -> "default" | the file | the variable

    def source_of(self, key: str) -> str:
        return self.sources.get(key, "default")


# The names people know from other systems, beside AQD_<SECTION>_<KEY>.
COMMON_ENV = {
    "database.url": "DATABASE_URL",
    "api.port": "PORT",
    "daemon.poll_ms": "WORKER_POLL_MS",
    "daemon.slots": "WORKER_CONCURRENCY",
    "jobs.max_attempts": "MAX_ATTEMPTS",
    "log.level": "LOG_LEVEL",
    "api.admin_api_key": "ADMIN_API_KEY",
    "api.admin_api_key_file": "ADMIN_API_KEY_FILE",
}
PDF_OUTPUT_DIR = "PDF_OUTPUT_DIR"
SECRETS = frozenset({"database.url", "database.listen_url", "api.admin_api_key", "api.keys"})
# Where such values stand, or what can be tried against them.
SECRET_FILES = frozenset({"api.admin_api_key_file", "api.keys_file"})

# Variables that begin with AQD_ and are no options. The prefixes belong to the test suite, to what the
# daemon tells its own children, and to what a job's process is told about itself.
_OTHER_ENV = frozenset({"AQD_CONFIG", "AQD_DEBUG", "AQD_VENV"})
_OTHER_ENV_PREFIXES = ("AQD_TEST_", "AQD_INTERNAL_", "AQD_JOB_", "AQD_DEMO_", "AQD_EMBEDDED_")
# Kubernetes sets these for every Service whose name begins with "aqd" (AQD_API_PORT=tcp://10.0.0.1:4000).
_KUBERNETES = re.compile(r"AQD(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")

_PATHS = frozenset({"dir", "venv", "runtime_dir", "admin_api_key_file", "keys_file"})
_SUN_PATH_MAX = 107  # unix(7): sun_path holds 108 bytes with its final NUL


def _options() -> dict[str, Option]:
    kinds: dict[Any, str] = {
        str: "str",
        int: "int",
        float: "float",
        bool: "bool",
        list: "list",
        dict: "table",
    }
    found = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            base, low, high = field.type, None, None
            if get_origin(base) is Annotated:
                base, meta = get_args(base)
                low, high = meta.ge, meta.le
            key = f"{section.name}.{field.name}"
            env = [f"AQD_{section.name}_{field.name}".upper()]
            if key in COMMON_ENV:
                env.append(COMMON_ENV[key])
            default = field.default if field.default is not msgspec.NODEFAULT else get_origin(base)()
            kind = "counts" if base == dict[str, int] else kinds[get_origin(base) or base]
            found[key] = Option(section.name, field.name, kind, low, high, default, tuple(env))
    return found


OPTIONS: dict[str, Option] = _options()


# --- public ---------------------------------------------------------------------------------------


def load(path: str | None, environ: Mapping[str, str]) -> Config:
    """Read, override, validate. ``path`` None means ``AQD_CONFIG``, else :data:`DEFAULT_PATH` if it
    exists, else the defaults. Raises :class:`ConfigError`."""
    return load_with_sources(path, environ).config


def load_with_sources(path: str | None, environ: Mapping[str, str]) -> Loaded:
    """As :func:`load`, with the origin of every value that is not the default."""
    return _Reader(environ).read(path)


def load_leniently(path: str | None, environ: Mapping[str, str]) -> Config:
    """What can be understood of the configuration, the rest at its default; raises nothing.

    For finding a running daemon: ``aqd status`` is needed most when the file has just been broken, and
    whoever may use the control socket need not be allowed to read the file.
    """
    return _Reader(environ).read(path, lenient=True).config


def encode(cfg: Config) -> bytes:
    """The configuration as MessagePack, for a child process."""
    return msgspec.msgpack.encode(cfg)


def decode(data: bytes) -> Config:
    """The inverse of :func:`encode`."""
    return msgspec.msgpack.decode(data, type=Config)


# What a reload cannot change: other processes find the daemon by it, or hold outcomes for that database.
RESTART_ONLY = (
    "database.url",
    "database.listen_url",
    "daemon.runtime_dir",
    "daemon.node_name",
    "daemon.metrics_host",
    "daemon.metrics_port",
)


def without_secrets(cfg: Config) -> Config:
    """For the loader and thereby the handlers, which have no business with the daemon's secrets."""
    for key in SECRETS | SECRET_FILES:
        section, _, name = key.partition(".")
        table = msgspec.structs.replace(getattr(cfg, section), **{name: ""})
        cfg = msgspec.structs.replace(cfg, **{section: table})
    return cfg


def secret_variables() -> frozenset[str]:
    """All names by which the environment may give a secret or the file that holds it."""
    names = {name for key in SECRETS | SECRET_FILES for name in OPTIONS[key].env}
    return frozenset({"PGPASSWORD", *names, *(f"{name}_FILE" for name in names)})


def keep(old: Config, new: Config, keys: Iterable[str]) -> tuple[Config, list[str]]:
    """``new`` with the values of ``keys`` as they are in ``old``, and the keys where they differed."""
    changed = []
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(old, section), name)
        if getattr(getattr(new, section), name) != value:
            changed.append(key)
            table = msgspec.structs.replace(getattr(new, section), **{name: value})
            new = msgspec.structs.replace(new, **{section: table})
    return new, changed


def runtime_dir(cfg: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of pid file and control socket; the daemon and ``aqd status`` must agree on it.

    ``/run/aqd`` is also taken by an ordinary user who owns it: ``sudo -u aqd aqd status`` has no
    ``RUNTIME_DIRECTORY`` and would otherwise look elsewhere than the unit does.
    """
    if cfg.daemon.runtime_dir:
        return Path(cfg.daemon.runtime_dir)
    if given := environ.get("RUNTIME_DIRECTORY", ""):
        return Path(given.split(":")[0])
    uid = os.geteuid()
    shared = Path("/run/aqd")
    if uid == 0:
        return shared
    try:
        if shared.stat().st_uid == uid:
            return shared
    except OSError:
        pass
    if session := environ.get("XDG_RUNTIME_DIR", ""):
        return Path(session) / "aqd"
    return Path(f"/tmp/aqd-{uid}")


def pid_file(cfg: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """The file that the running daemon holds locked."""
    return runtime_dir(cfg, environ) / "aqd.pid"


def control_socket(cfg: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """The unix socket on which the master answers ``aqd status``, ``reload`` and ``stop``."""
    return runtime_dir(cfg, environ) / "control.sock"


def plugins_dir(cfg: Config) -> Path:
    """The folder of drop-in plugins: the configured one, else the shipped one."""
    return Path(cfg.plugins.dir) if cfg.plugins.dir else paths.data_dir("plugins")


def node_name(cfg: Config) -> str:
    """The name under which this node appears in status and database."""
    return cfg.daemon.node_name or os.uname().nodename


# --- reading --------------------------------------------------------------------------------------


class _Reader:
    """Collects values and problems from the file and the environment; used once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def read(self, path: str | None, *, lenient: bool = False) -> Loaded:
        file = self._find(path)
        if file is not None:
            try:
                self._read_file(file)
            except ConfigError:
                if not lenient:
                    raise
        self._read_environment()
        self._read_admin_key_file()
        config = self._build()
        if lenient:
            return Loaded(config, file, self.sources)
        if not self.problems:
            self.problems = _impossible(config, self.sources)
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return Loaded(config, file, self.sources)

    def _find(self, path: str | None) -> str | None:
        if path is None:
            path = self.environ.get("AQD_CONFIG") or None
        if path is not None:
            return os.path.abspath(path)
        try:
            os.stat(DEFAULT_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            pass  # it is there but closed to us: reading it will say so
        return DEFAULT_PATH

    # the file

    def _read_file(self, file: str) -> None:
        import tomllib

        try:
            with open(file, "rb") as stream:
                document = tomllib.load(stream)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 (byte {error.start})") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{file}: is not valid TOML: {error}") from None
        for section, table in document.items():
            if section not in Config.__struct_fields__:
                self.problems.append(f"{file}: {self._unknown_section(section, table)}")
            elif not isinstance(table, dict):
                self.problems.append(
                    f"{file}: {section} = {brief(table)}: must be a table, written [{section}]"
                )
            else:
                for name, value in table.items():
                    self._take_from_file(file, section, name, value)

    def _take_from_file(self, file: str, section: str, name: str, value: Any) -> None:
        key = f"{section}.{name}"
        option = OPTIONS.get(key)
        if option is None:
            elsewhere = [o for o in OPTIONS.values() if o.name == name]
            if elsewhere:
                hint = f"; {name} belongs to [{elsewhere[0].section}]"
            else:
                hint = did_you_mean(name, [o.name for o in OPTIONS.values() if o.section == section])
            self.problems.append(f"{file}: {key}: there is no such option{hint}")
            return
        try:
            checked = check(option, value)
            if option.name in _PATHS:
                checked = absolute(checked, os.path.dirname(file))
        except Refused as bad:
            self.problems.append(f"{file}: {key} = {hidden(key, value)}: {bad}")
            return
        self.values[key] = checked
        self.sources[key] = file

    def _unknown_section(self, section: str, table: Any) -> str:
        if isinstance(table, dict):
            return f"[{section}]: there is no such section{did_you_mean(section, Config.__struct_fields__)}"
        homes = [o for o in OPTIONS.values() if o.name == section]
        hint = f"; {section} belongs to [{homes[0].section}]" if homes else ""
        return f"{section}: options stand in sections{hint}"

    # the environment

    def _read_environment(self) -> None:
        known = set(_OTHER_ENV)
        for option in OPTIONS.values():
            for name in reversed(option.env):  # the strongest last
                self._take_from_environment(option, name)
                known.update((name, f"{name}_FILE") if option.key in SECRETS else (name,))
        directory = self.environ.get(PDF_OUTPUT_DIR, "").strip()
        if directory != _legible(directory):
            self.problems.append(f"environment: {PDF_OUTPUT_DIR} = {_legible(directory)}: is not UTF-8")
        elif directory:
            settings = {name: dict(table) for name, table in self.values.get("plugins.settings", {}).items()}
            settings.setdefault("generate_pdf", {})["output_dir"] = absolute(directory, os.getcwd())
            self.values["plugins.settings"] = settings
            before = self.sources.get("plugins.settings")
            self.sources["plugins.settings"] = f"{before}, {PDF_OUTPUT_DIR}" if before else PDF_OUTPUT_DIR
        for name in self.environ:
            if not name.startswith("AQD_") or name in known or name.startswith(_OTHER_ENV_PREFIXES):
                continue
            if not _KUBERNETES.fullmatch(name):
                hint = did_you_mean(name, sorted(known))
                self.problems.append(f"environment: {name}: there is no such option{hint}")

    def _take_from_environment(self, option: Option, name: str) -> None:
        text = self.environ.get(name, "").strip()
        if text and name.endswith("_PORT") and _KUBERNETES_URL.match(text):
            text = ""
        source = name
        if option.name in ("url", "listen_url") and (file := self.environ.get(f"{name}_FILE", "").strip()):
            if text:
                self.problems.append(f"environment: {name} and {name}_FILE are both set: keep one of them")
                return
            source = f"{name}_FILE"
            try:
                _check_encoding(file)
                text = read_secret(file)
            except Refused as bad:
                self.problems.append(f"environment: {source} = {_legible(file)}: {bad}")
                return
            if not text:
                self.problems.append(f"environment: {source} = {file}: the file is empty")
        if not text:
            return
        try:
            _check_encoding(text)
            value = check(option, from_text(option, text))
            if option.name in _PATHS:
                value = absolute(value, os.getcwd())
        except Refused as bad:
            self.problems.append(f"environment: {source} = {hidden(option.key, _legible(text))}: {bad}")
            return
        if option.kind == "table":
            merged = {plugin: dict(table) for plugin, table in self.values.get(option.key, {}).items()}
            for plugin, table in value.items():
                merged.setdefault(plugin, {}).update(table)
            value = merged
        self.values[option.key] = value
        self.sources[option.key] = source

    def _read_admin_key_file(self) -> None:
        """``admin_api_key_file`` gives the key unless a stronger source has given it already."""
        key, file = "api.admin_api_key", "api.admin_api_key_file"
        path = self.values.get(file, "")
        if not path:
            return
        key_strength, file_strength = self._strength(key), self._strength(file)
        if self.values.get(key) and key_strength == file_strength:
            where = f"{self.sources[key]} and {self.sources[file]}"
            self.problems.append(
                f"{where}: admin_api_key and admin_api_key_file are both set: keep one of them"
            )
        elif self.values.get(key) and key_strength > file_strength:
            self.values[file] = ""
            self.sources.pop(file)
        else:
            try:
                self.values[key] = check(OPTIONS[key], read_secret(path))
                self.sources[key] = f"{path} ({self.sources[file]})"
            except Refused as bad:
                self.problems.append(f"{self.sources[file]}: {file} = {path}: {bad}")

    def _strength(self, key: str) -> int:
        """0 the default, 1 the file, 2 a common variable, 3 an AQD_ variable."""
        source = self.sources.get(key)
        if source is None:
            return 0
        if source not in self.environ:
            return 1
        return 3 if source.startswith("AQD_") else 2

    def _build(self) -> Config:
        sections = {}
        for section in msgspec.structs.fields(Config):
            prefix = f"{section.name}."
            given = {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}
            sections[section.name] = section.type(**given)
        return Config(**sections)


def _check_encoding(text: str) -> None:
    """Of the environment's bytes Python makes lone surrogates where they are not UTF-8 (PEP 383), and nothing later
    could encode them: not the log, not what children are told, not what a key is compared by."""
    if text != _legible(text):
        raise Refused("is not UTF-8")


def _legible(text: str) -> str:
    return text.encode(errors="replace").decode()


def _impossible(cfg: Config, sources: Mapping[str, str]) -> list[str]:
    """Values that are right one by one and wrong together."""
    found = []

    def refuse(reason: str, *keys: str) -> None:
        section_of = {key: getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1]) for key in keys}
        values = ", ".join(f"{key} = {shown(key, value)}" for key, value in section_of.items())
        where = ", ".join(dict.fromkeys(sources[key] for key in keys if key in sources)) or "the defaults"
        found.append(f"{where}: {values}: {reason}")

    daemon, jobs = cfg.daemon, cfg.jobs
    if daemon.renew_s > daemon.lease_s / 3:
        reason = "renew_s must be at most a third of lease_s, so that two renewals may fail"
        refuse(reason, "daemon.renew_s", "daemon.lease_s")
    if daemon.lease_s <= 2 * daemon.kill_grace_s:
        reason = "lease_s must be more than twice kill_grace_s, or workers are killed before they can renew"
        refuse(reason, "daemon.lease_s", "daemon.kill_grace_s")
    if sum(daemon.reserved.values()) >= daemon.slots:
        reason = "the reserved slots must be fewer than all, or other queues would have none"
        refuse(reason, "daemon.reserved", "daemon.slots")
    if jobs.backoff_max_s < jobs.backoff_base_s:
        refuse("backoff_max_s must not be below backoff_base_s", "jobs.backoff_max_s", "jobs.backoff_base_s")
    if len(os.fsencode(f"{daemon.runtime_dir}/control.sock")) > _SUN_PATH_MAX:
        reason = f"the path of the control socket in it would be longer than {_SUN_PATH_MAX} bytes"
        refuse(reason, "daemon.runtime_dir")
    return found
