"""What one option may be: its type, bounds and spelling, and how its value is shown.

Used by :mod:`aqd.config`, which knows the options themselves; everything here is pure apart from
:func:`read_secret`. A refused value raises :class:`Refused` with the reason; the caller adds where the
value stood and which option it was for.
"""

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "human", "json")
POOLERS = ("auto", "session", "transaction")

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Option(NamedTuple):
    """One option as it can be written: its place, type, bounds, default and names in the environment."""

    section: str
    name: str
    kind: str  # "str" | "int" | "float" | "bool" | "list" | "table" | "counts"
    low: float | None
    high: float | None
    default: Any
    env: tuple[str, ...]  # the first one that is set wins

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


class Refused(Exception):
    """A value was refused; the text is the reason."""


# A database password may itself contain "@" or "/" (wrongly, but people do it): for those URLs everything
# up to the last "@" is hidden.
_DATABASE_URL_PASSWORD = re.compile(r"(?i)(\bpostgres(?:ql)?(?:\+\w+)?://[^:/?#@\s\"']*:)[^\s\"']*@")
_URL_PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^:/?#@\s\"']*:)[^\s\"'/?#@]*@")
_KEY_PASSWORD = re.compile(
    r"(?i)\b((?:ssl)?password|oauth_client_secret|scram_(?:client|server)_key)(\s*=\s*)('(?:\\.|[^'\\])*'?|[^\s&\"']+)"
)

# libpq quotes what it could not parse, which may be a piece of a password.
_LIBPQ_QUOTE = re.compile(r"""(missing "=" after |percent-encoded (?:token|value): )"[^"]*"?""")


def mask(text: str) -> str:
    """``text`` with the passwords of URLs and of libpq's conninfo strings replaced by ``***``."""
    if "://" in text:
        text = _URL_PASSWORD.sub(r"\1***@", _DATABASE_URL_PASSWORD.sub(r"\1***@", text))
    if "=" in text:
        text = _KEY_PASSWORD.sub(r"\1\2***", text)
    if "percent-encoded" in text or 'missing "="' in text:
        text = _LIBPQ_QUOTE.sub(r'\1"***"', text)
    return text


_SECRET_NAME = re.compile(r"(?i)passw|secret|token|credential|api[-_]?key|private[-_]?key|^auth")


def masked(key: str, value: Any) -> Any:
    """A value without its secrets. ``key`` is ``"section.name"``; of plugins' settings, whose meaning is
    not known here, whatever has a name like a secret's is hidden."""
    if isinstance(value, dict):
        return {name: masked(name, item) for name, item in value.items()}
    if value and (key in ("api.admin_api_key", "api.keys") or ("." not in key and _SECRET_NAME.search(key))):
        return "***"
    if isinstance(value, list):
        return [masked("", item) for item in value]
    return mask(value) if isinstance(value, str) else value


def shown(key: str, value: Any) -> str:
    """A value as TOML for people, secrets masked. ``key`` is ``"section.name"``."""
    return toml(masked(key, value))


def check(option: Option, value: Any) -> Any:
    """``value`` as the option's type, or :class:`Refused`."""
    match option.kind:
        case "bool":
            if not isinstance(value, bool):
                raise Refused("must be true or false")
        case "int" | "float":
            value = _check_number(option, value)
        case "str":
            if not isinstance(value, str):
                raise Refused("must be a string in quotes")
            value = _check_text(option, value)
        case "list":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise Refused("must be a list of strings")
            if option.key == "api.cors_origins":
                _check_origins(value)
            else:
                _check_names(value)
        case "table":
            _check_settings(value)
        case "counts":
            _check_counts(value)
    return value


def _check_number(option: Option, value: Any) -> int | float:
    whole = option.kind == "int"
    noun = "whole number" if whole else "number"
    bounds = f"must be a {noun} between {_number(option.low)} and {_number(option.high)}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise Refused(bounds)
    assert option.low is not None
    assert option.high is not None
    if not option.low <= value <= option.high:  # also refuses nan, which no bound lets through
        raise Refused(bounds)
    return int(value) if whole else float(value)


def _check_text(option: Option, text: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text.strip()):
        raise Refused("must not contain control characters")
    text = text.strip()
    match option.key:
        case "database.url" | "database.listen_url":
            if not text:
                if option.default:
                    raise Refused("must not be empty")
                return text
            if re.match(r"postgres(ql)?\+\w+://", text):
                raise Refused("must be a libpq URL, without a driver name: postgresql://user@host/database")
            if not re.match(r"postgres(ql)?://", text) and not re.match(r"\w+\s*=", text):
                raise Refused("must be postgresql://user@host:port/database or 'host=… dbname=… user=…'")
        case "database.pooler":
            _check_choice(text, POOLERS)
        case "log.level":
            text = {"warn": "warning"}.get(text.lower(), text.lower())
            _check_choice(text, LOG_LEVELS)
        case "log.format":
            text = text.lower()
            _check_choice(text, LOG_FORMATS)
        case "api.host" | "daemon.metrics_host":
            if not text or re.search(r"[\s/]", text):
                raise Refused("must be an address or a host name, without port and scheme")
        case "daemon.node_name":
            if len(text.encode(errors="replace")) > 128:
                raise Refused("must be at most 128 bytes long")
    return text


def _check_choice(text: str, choices: tuple[str, ...]) -> None:
    if text not in choices:
        raise Refused(f"must be one of {', '.join(choices)}{did_you_mean(text, choices)}")


def _check_names(names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise Refused(f"{name!r} must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -")
    if len(set(names)) < len(names):
        raise Refused("names the same queue twice")


# As browsers send it (RFC 6454, 6.1): scheme, host, port if it is not the scheme's own; no path, no slash.
_ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:\d{1,5})?|https?://\[[0-9a-f:.]{2,45}\](:\d{1,5})?")


def _check_origins(origins: list[str]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            every = "; each origin is named, there is no way to allow all" if origin == "*" else ""
            raise Refused(f"{brief(origin)} must be an origin such as https://admin.example.org{every}")


def _check_counts(value: Any) -> None:
    if not isinstance(value, dict) or not all(type(number) is int for number in value.values()):
        raise Refused(
            "must be whole numbers by queue, { mail = 2, reports = 1 }; in the environment mail=2,reports=1"
        )
    _check_names(list(value))
    for name, number in value.items():
        if not 0 <= number <= 512:
            raise Refused(f"{name} must be between 0 and 512")


def _check_settings(value: Any) -> None:
    if not isinstance(value, dict):
        raise Refused("must be a table of tables, written [plugins.settings.<plugin>]")
    for plugin, table in value.items():
        if not isinstance(table, dict):
            raise Refused(f"{plugin} must be a table, written [plugins.settings.{plugin}]")
        _check_setting(plugin, table)


def _check_setting(place: str, value: Any) -> None:
    """Settings travel to the workers as MessagePack and must arrive as they were written."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_setting(f"{place}.{name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_setting(f"{place}[{index}]", item)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Refused(f"{place} must fit into 64 bits")
    elif not isinstance(value, str | int | float | bool):
        raise Refused(f"{place} must be a string, number, boolean, list or table, not a date: quote it")


def from_text(option: Option, text: str) -> Any:
    """The text of a variable as the type that TOML would give."""
    match option.kind:
        case "int" | "float":
            try:
                return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
            except ValueError:
                return text  # refused by the check, which knows the bounds
        case "bool":
            lower = text.lower()
            return True if lower in _TRUE else False if lower in _FALSE else text
        case "list":
            if not text.startswith("["):
                return [part.strip() for part in text.split(",") if part.strip()]
            return _toml_value(text)
        case "table":
            return _toml_value(text)
        case "counts":
            if text.startswith("{"):
                return _toml_value(text)
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            return {
                name.strip(): int(number) if re.fullmatch(r"\s*\d{1,9}\s*", number) else number.strip()
                for name, _, number in pairs
            }
    return text


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Refused(f"is not a TOML value: {error}") from None


def read_secret(path: str) -> str:
    """A secret's file without the white space around it: editors and ``echo`` leave a newline."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(65_537)
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}") from None
    if len(data) > 65_536:
        raise Refused("is larger than 64 KiB, so it is no secret")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise Refused("is not UTF-8") from None


def absolute(path: str, base: str) -> str:
    """Children may have another working directory, so a path is made absolute once, here."""
    return os.path.normpath(os.path.join(base, os.path.expanduser(path))) if path else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib  # 3 ms that only a mistake has to pay

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _number(value: float | None) -> str:
    return "?" if value is None else str(int(value)) if value == int(value) else str(value)


def brief(value: Any) -> str:
    text = value if isinstance(value, str) else toml(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def hidden(key: str, value: Any) -> str:
    """A refused value for a message: secrets masked, cut when long."""
    return brief(masked(key, value))


def toml(value: Any) -> str:
    """``value`` in TOML's notation (inline tables for dictionaries)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = msgspec.json.encode(value.encode(errors="replace").decode()).decode()
        return text.replace("\x7f", "\\u007F")  # TOML's escapes are JSON's but for this one
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{_toml_key(key)} = {toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)
