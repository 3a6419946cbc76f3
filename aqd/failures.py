"""An exception as text that can be stored: bounded, printable, made in bounded time whatever the exception is.

Used by workers. The standard library's formatter is not: it builds a whole tree of causes, contexts and group
members before it prints a part of it (a group that holds another one twice, forty levels deep, never ends), and
takes a line of 50 MiB as it is.

Promises: at most :data:`MAX_ERROR_CHARS` and :data:`MAX_TRACEBACK_CHARS` characters without NUL or lone surrogates;
an exception whose own code fails (``__str__``, ``__repr__``, notes) is described all the same. That code is the
job's, and so is the time it takes: call this while the job's limit still applies.
"""

import linecache
import reprlib
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from aqd.errors import Discard, Retry

# Together below a message's limit, whatever the characters take in UTF-8.
MAX_ERROR_CHARS: Final = 4_000
MAX_TRACEBACK_CHARS: Final = 24_000
# What is shown of one thing, so that a chain's other parts stay visible beside it.
_MAX_MESSAGE: Final = 4_000
_MAX_NOTE: Final = 1_000
_MAX_LINE: Final = 300
_MAX_FRAMES: Final = 50
# Exceptions shown in all (causes, contexts, members of groups), members of one group, and depth of groups.
_MAX_SHOWN: Final = 40
_MAX_MEMBERS: Final = 10
_MAX_DEPTH: Final = 5
_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


class Explained(Exception):
    """An error of aqd's own about a job: its message is the whole explanation, its class says nothing more."""


def describe(error: BaseException | None, hide: str = "") -> tuple[str, str]:
    """An exception as (one bounded text, bounded traceback). ``hide``: the file that called the handler, whose
    frames, and those before them, are of no interest."""
    if error is None:
        return "", ""
    writer = _Writer(hide)
    try:
        message = writer.message(error)
        plain = issubclass(type(error), Retry | Discard | Explained)
        text = message if plain else _named(error, message)
    except BaseException as broken:
        text = _unmade("text", broken)
    try:
        trace = "".join(writer.chain(error))
    except BaseException as broken:
        trace = _unmade("traceback", broken)
    return printable(text, MAX_ERROR_CHARS), printable(trace, MAX_TRACEBACK_CHARS)


def message_of(error: BaseException) -> str:
    """``str(error)`` as a plain bounded text; never raises what the exception's own code raises."""
    try:
        message = _text_of(error)
    except BaseException as broken:
        message = _unmade("text", broken)
    message = _cut(message, 2 * _MAX_MESSAGE)
    if issubclass(type(error), SystemExit):
        return f"the handler called sys.exit({message})"
    return message


def printable(text: str, limit: int) -> str:
    """Text that PostgreSQL takes: no NUL, no lone surrogate, at most ``limit`` characters (its middle
    is cut out: the beginning says what, the end says where)."""
    text = _cut(text, limit)  # first, because escaping 50 MiB is slow; and again, because it lengthens
    return _cut(text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode(), limit)


class _Repr(reprlib.Repr):
    """``repr`` that looks at a part of large containers only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 50
        self.maxstring = self.maxother = self.maxlong = 2_000
        self.maxlevel = 6


_repr: Final = _Repr().repr
_LARGE: Final = (list, tuple, dict, set, frozenset, bytes, bytearray)


def _text_of(error: BaseException) -> str:
    # What str() would do for these, without writing out a list of ten million items or a key of 50 MiB.
    own, arguments = type(error).__str__, error.args
    if own is KeyError.__str__ and len(arguments) == 1:
        return _repr(arguments[0])
    if own in (BaseException.__str__, KeyError.__str__):
        if len(arguments) > 1:
            return _repr(arguments)
        if arguments and type(arguments[0]) in _LARGE:
            return _repr(arguments[0])
    # A subclass of str may lie about its length; this makes a plain one.
    return str.__str__(str(error))


def _named(error: BaseException, message: str) -> str:
    name = str.__str__(type(error).__qualname__)
    return f"{name}: {message}" if message else name


def _unmade(what: str, broken: BaseException) -> str:
    return f"<its {what} could not be made: {type(broken).__name__}>"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2 - 30
    return f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"


class _Writer:
    """Writes one exception with all that hangs on it; each is shown once, so cycles end."""

    def __init__(self, hide: str) -> None:
        self._hide = hide
        self._seen: set[int] = set()
        self._messages: dict[int, str] = {}

    def message(self, error: BaseException) -> str:
        """Made once: a repr of 50 MiB takes seconds, a job's own code what it likes."""
        if id(error) not in self._messages:
            self._messages[id(error)] = message_of(error)
        return self._messages[id(error)]

    def chain(self, error: BaseException, depth: int = 0) -> Iterator[str]:
        """Oldest first, as Python prints it."""
        links: list[tuple[BaseException, str]] = []
        at: BaseException | None = error
        joint = ""
        cut = False
        while at is not None and id(at) not in self._seen:
            if len(self._seen) >= _MAX_SHOWN:
                cut = True
                break
            self._seen.add(id(at))
            links.append((at, joint))
            if at.__cause__ is not None:
                at, joint = at.__cause__, _CAUSE
            elif at.__suppress_context__:
                at = None
            else:
                at, joint = at.__context__, _CONTEXT
        if cut:
            yield "… earlier exceptions left out …\n\n"
        for link, after in reversed(links):
            yield from self._one(link, depth)
            yield after

    def _one(self, error: BaseException, depth: int) -> Iterator[str]:
        frames = _interesting(error.__traceback__, self._hide)
        if frames:
            yield "Traceback (most recent call last):\n"
            yield from _frames(frames)
        name = type(error).__qualname__
        if (module := type(error).__module__) not in ("builtins", "__main__"):
            name = f"{module}.{name}"
        message = self.message(error)
        yield _cut(f"{name}: {message}" if message else name, _MAX_MESSAGE) + "\n"
        for note in _notes(error):
            yield f"{note}\n"
        if issubclass(type(error), BaseExceptionGroup):
            yield from self._members(error, depth)

    def _members(self, group: Any, depth: int) -> Iterator[str]:
        members: tuple[BaseException, ...] = BaseExceptionGroup.exceptions.__get__(group)
        for number, member in enumerate(members, 1):
            if number > _MAX_MEMBERS or depth >= _MAX_DEPTH or len(self._seen) >= _MAX_SHOWN:
                yield f"  … and {len(members) - number + 1} more …\n"
                return
            yield f"  ---- {number} of {len(members)} ----\n"
            if id(member) in self._seen:
                yield "  (shown above)\n"
                continue
            for piece in self.chain(member, depth + 1):
                yield "".join(f"  {line}" for line in piece.splitlines(keepends=True))


def _notes(error: BaseException) -> Iterator[str]:
    notes = getattr(error, "__notes__", None)
    if type(notes) is not list:
        return
    for note in notes[:10]:
        yield _cut(str.__str__(note) if isinstance(note, str) else _repr(note), _MAX_NOTE)


def _interesting(trace: TracebackType | None, hide: str) -> list[tuple[FrameType, int]]:
    """The handler's own frames: behind the last one of ``hide`` that called it, before those that raised in it."""
    frames = list(traceback.walk_tb(trace))
    hidden = [frame.f_code.co_filename == hide for frame, _ in frames]
    while hidden and hidden[-1]:
        hidden.pop()
    first = len(hidden) - hidden[::-1].index(True) if True in hidden else 0
    return frames[first : len(hidden)]


def _frames(entries: list[tuple[FrameType, int]]) -> Iterator[str]:
    half = _MAX_FRAMES // 2
    for number, (frame, line) in enumerate(entries):
        if len(entries) > _MAX_FRAMES and half <= number < len(entries) - half:
            if number == half:
                yield f"  … {len(entries) - _MAX_FRAMES} frames cut …\n"
            continue
        code = frame.f_code
        yield _cut(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}\n', _MAX_LINE)
        linecache.lazycache(code.co_filename, frame.f_globals)
        source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        if source:
            yield f"    {_cut(source, _MAX_LINE)}\n"
