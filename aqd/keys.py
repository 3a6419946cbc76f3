"""API keys: where they are written, what each may do, and whether an address may be served without any.

Used by the API, by the master (``--with-api`` must not open what ``aqd api`` would refuse) and by ``aqd api-key``;
only the standard library is imported. A named key has scopes. It stands in the file ``api.keys_file``, as the SHA-256
of a random key, so that who reads the file (a backup, a repository) has no key::

    [keys.billing]
    sha256 = "9f86d081…"
    scopes = ["submit", "read"]

or in the environment, as itself: ``AQD_API_KEYS="billing:submit+read:KEY,grafana:read:KEY"``. A plain hash is enough
because the keys are random (256 bits from ``aqd api-key new``): there is nothing to guess. The key called "admin" is
``api.admin_api_key`` and may do everything.

Promises: no key at all never means "open to everybody" beyond this machine. Fails with
:class:`aqd.errors.ConfigError`, which lists every mistake by its place and never shows a key.
"""

import hashlib
import hmac
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from aqd.config import Api
from aqd.errors import ConfigError

ADMIN: Final = "admin"  # the name of api.admin_api_key
MIN_CHARS: Final = 16
MAX_FILE_BYTES: Final = 1 << 20
_PREFIX: Final = "aqd_"  # tools that look for leaked secrets go by such a prefix

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_WORDS = "1 to 64 of the characters A-Z a-z 0-9 _ -"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VISIBLE = re.compile(r"[!-~]+")
# What stands in examples and in files that nobody has filled in, and what people type to have anything at all.
# Everybody knows these "keys".
_PLACEHOLDER = re.compile(
    r"""<.*> | \$\{?\w+\}? | \{\{.*\}\} | .*….* | .*\.\.\. | x{3,} | \*{3,}
    | (please[-_ ]?)?(change|replace|insert)([-_ ]?(me|this|it|with|here|your))?([-_ ].*|[!.\d]*)
    | your[-_ ].* | [\w-]*api[-_]?key
    | ((my|the|our|super|api|admin|root|secret|passw[o0]rd|passwd|test|key|token|dummy|sample|placeholder|example|todo
        |none|null|undefined)[-_ !.\d]*)+""",
    re.IGNORECASE | re.VERBOSE,
)


class Scope(StrEnum):
    """What a key may do. ADMIN includes the others."""

    SUBMIT = "submit"
    READ = "read"
    ADMIN = "admin"


class Key(NamedTuple):
    """A key as it is kept: ``digest`` is the SHA-256 of the key's bytes."""

    name: str
    scopes: frozenset[Scope]
    digest: bytes


class Ring(NamedTuple):
    """All keys of a service. ``open``: SUBMIT and READ need none."""

    keys: tuple[Key, ...]
    open: bool

    def find(self, given: bytes) -> Key | None:
        """The key with these bytes. Every key is compared, and each in constant time: how long it takes tells nothing."""
        digest = hashlib.sha256(given).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def gives(self, scope: Scope) -> bool:
        """Whether any key has this scope."""
        return any(scope in key.scopes for key in self.keys)


def new() -> str:
    """A fresh random key."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What stands in the file for ``key``."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> str | None:
    """What is wrong with a key's name, if anything."""
    if not _NAME.fullmatch(name):
        return f"a key's name must be {_NAME_WORDS}"
    return f'"{ADMIN}" is the name of api.admin_api_key' if name == ADMIN else None


def load(api: Api, exposed: str | None) -> Ring:
    """The keys of a service; raises :class:`ConfigError`, also where it would be open to a network. ``exposed``: where it
    listens beyond this machine, from :func:`beyond`.

    Named keys are needed wherever there are any; a file or text of keys that holds none is a mistake and not "no keys",
    or a file cut short would open the service. Without named keys, SUBMIT and READ are open on this machine (loopback, unix
    sockets); beyond it they want the admin key, which must be a long one there. ``insecure`` says that something else
    guards a service without any key; where there is one, it opens nothing.
    """
    problems: list[str] = []
    named = [
        *(_from_file(api.keys_file, problems) if api.keys_file else ()),
        *_from_text(api.keys, problems),
    ]
    keys = list(named)
    if admin := api.admin_api_key.strip():
        keys.append(Key(ADMIN, frozenset(Scope), hashlib.sha256(admin.encode()).digest()))
        if is_placeholder(admin):
            problems.append("api.admin_api_key: is a placeholder; make a key with `aqd api-key new`")
        elif exposed is not None and is_short(admin):
            problems.append(
                f"api.admin_api_key: on {exposed}, beyond this machine, a key has at least {MIN_CHARS} characters; make one "
                "with `aqd api-key new`"
            )
    problems += _twice(keys)
    if problems:
        raise ConfigError("\n".join(problems))
    if exposed is not None and not keys and not api.insecure:
        raise ConfigError(
            f"the API would listen on {exposed}, beyond this machine, without any key: make one with `aqd api-key new` "
            "and name its file in api.keys_file, or set ADMIN_API_KEY, or bind to 127.0.0.1; --insecure (api.insecure) "
            "starts all the same, where something in front of it asks who is there"
        )
    return Ring(tuple(keys), open=not named and (exposed is None or not keys))


def beyond(listeners: Iterable[socket.socket]) -> str | None:
    """The first address that can be reached from other machines, as text; None when all are local."""
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            continue
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            return f"a socket of family {listener.family}"
        host, port = listener.getsockname()[:2]
        if not is_loopback(host):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return None


def is_loopback(host: str) -> bool:
    """Whether a numeric address is this machine's own; False for a name, which may be anything."""
    import ipaddress

    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def is_placeholder(key: str) -> bool:
    """Whether a "key" was only copied from an example or a template."""
    return bool(_PLACEHOLDER.fullmatch(key.strip()))


def is_short(key: str) -> bool:
    """Whether a key could be found by trying."""
    return len(key.strip()) < MIN_CHARS


def _twice(keys: list[Key]) -> list[str]:
    found: list[str] = []
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            found.append(f"API keys: there are two keys called {key.name}")
        elif (other := digests.get(key.digest)) is not None:
            found.append(f"API keys: {other} and {key.name} are the same key; give each its own")
        names.add(key.name)
        digests.setdefault(key.digest, key.name)
    return found


def _scopes(words: object) -> frozenset[Scope] | None:
    """The scopes of a list of words; None if it is none."""
    known = tuple(Scope)
    if not isinstance(words, list) or not words or not all(word in known for word in words):
        return None
    given = frozenset(Scope(word) for word in words)
    return frozenset(Scope) if Scope.ADMIN in given else given


_SCOPES_WORDS = "scopes must be a list of submit, read, admin, at least one"


# --- the file -------------------------------------------------------------------------------------


def _from_file(path: str, problems: list[str]) -> list[Key]:
    import tomllib

    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            problems.append(f"{path}: is larger than 1 MiB")
            return []
        document = tomllib.loads(data.decode())
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror} (api.keys_file)")
        return []
    except UnicodeDecodeError as error:
        problems.append(f"{path}: is not UTF-8 (byte {error.start})")
        return []
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        # Only where: the message may quote what stands there, which may be a key by mistake.
        where = re.search(r"\(at [^)]*\)$", str(error))
        problems.append(f"{path}: is not valid TOML {where[0] if where else ''}".rstrip())
        return []
    found, before = [], len(problems)
    for name, table in document.items():
        if name != "keys" or not isinstance(table, dict):
            problems.append(f"{path}: keys stand in tables of their own, written [keys.NAME]")
        else:
            found = [key for each, entry in table.items() if (key := _entry(path, each, entry, problems))]
    if not document.get("keys") and len(problems) == before:
        problems.append(f"{path}: holds no key (api.keys_file); leave the option out where none is wanted")
    return found


def _entry(path: str, name: str, entry: Any, problems: list[str]) -> Key | None:
    place = f"{path}: keys.{name}" if _NAME.fullmatch(name) else f"{path}: a table in [keys]"
    found = []
    if reason := check_name(name):
        found.append(reason)
    if not isinstance(entry, Mapping):
        problems.append(f"{place}: must be a table, written [keys.NAME]")
        return None
    if unknown := sorted(set(entry) - {"sha256", "scopes"}):
        hint = (
            "; a key itself does not belong here, only its sha256" if {"key", "secret"} & set(unknown) else ""
        )
        found.append(f"there is no such field: {', '.join(unknown)[:80]}{hint}")
    scopes = _scopes(entry.get("scopes"))
    if scopes is None:
        found.append(_SCOPES_WORDS)
    hexed = entry.get("sha256")
    if not isinstance(hexed, str) or not _SHA256.fullmatch(hexed):
        found.append("sha256 must be the 64 hexadecimal digits that `aqd api-key new` prints")
    elif hexed == digest(""):
        found.append("sha256 is that of an empty key")
    elif not found and scopes is not None:
        return Key(name, scopes, bytes.fromhex(hexed))
    problems += [f"{place}: {reason}" for reason in found]
    return None


# --- the environment ------------------------------------------------------------------------------


def _from_text(text: str, problems: list[str]) -> list[Key]:
    found: list[Key] = []
    parts = [part for part in text.split(",") if part.strip()]
    if text.strip() and not parts:
        problems.append("api.keys: holds no key")
    for number, part in enumerate(parts, start=1):
        place = f"api.keys: key {number}"
        name, first, rest = part.strip().partition(":")
        scopes_text, second, key = rest.partition(":")
        if not first or not second:
            problems.append(f"{place}: must be written name:submit+read:KEY")
            continue
        if reason := check_name(name):
            problems.append(f"{place}: {reason}")
            continue
        place = f"api.keys: {name}"
        scopes = _scopes(scopes_text.split("+"))
        if scopes is None:
            problems.append(f"{place}: {_SCOPES_WORDS}, joined by +")
        elif is_placeholder(key):
            problems.append(f"{place}: the key is a placeholder; make one with `aqd api-key new`")
        elif not _VISIBLE.fullmatch(key) or is_short(key):
            problems.append(f"{place}: a key has at least {MIN_CHARS} visible ASCII characters, and no comma")
        else:
            found.append(Key(name, scopes, hashlib.sha256(key.encode()).digest()))
    return found
