"""Texts from jobs as PostgreSQL takes them: no NUL, no lone surrogate, bounded. And batches without repetitions."""

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

MAX_ERROR: Final = 8_192
MAX_TRACEBACK: Final = 65_536
MAX_OUTPUT: Final = 65_536
MAX_PROGRESS: Final = 1_000


class _Entry(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def token(self) -> int: ...


Entry = TypeVar("Entry", bound=_Entry)


def clean(text: str | None, limit: int) -> str | None:
    """Text that PostgreSQL takes: no NUL, no lone surrogate, bounded; the end of a long one is kept,
    because that is where a traceback says what happened."""
    if text is None:
        return None
    return _without_middle(_escape(_without_middle(text, limit)), limit)  # escaping lengthens it


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def clean_output(text: str | None) -> str | None:
    """What a job has printed, as PostgreSQL takes it: only the end of a long one, where it says how it ended."""
    return text and _escape(text[-MAX_OUTPUT:])[-MAX_OUTPUT:]


def _escape(text: str) -> str:
    if "\0" in text:
        text = text.replace("\0", "\\0")
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def once(entries: Iterable[Entry]) -> list[Entry]:
    """Without repetitions of an (id, token), which would be written down twice."""
    return list({(entry.id, entry.token): entry for entry in entries}.values())
