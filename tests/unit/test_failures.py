"""Exceptions as text: whatever they are, in bounded time and space."""

from __future__ import annotations

import time
from typing import Any

import pytest

from aqd import Retry
from aqd.failures import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS, Explained, describe, printable


def test_it_reads_as_python_writes_it() -> None:
    def inner() -> None:
        raise KeyError("key")

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        error.add_note("a note")
        text, trace = describe(error)
    assert text == "ValueError: outer"
    assert (
        trace.index("KeyError: 'key'")
        < trace.index("direct cause")
        < trace.index("ValueError: outer\na note\n")
    )
    assert 'raise KeyError("key")' in trace
    assert f'File "{__file__}"' in trace


def test_the_frames_of_whoever_called_the_handler_are_left_out() -> None:
    space: dict[str, Any] = {}
    exec(compile("def handler():\n    raise ValueError", "<handler>", "exec"), space)
    try:
        space["handler"]()
    except ValueError as error:
        trace = describe(error, __file__)[1]
    assert "in handler" in trace
    assert __file__ not in trace


class LyingText(str):
    __slots__ = ()

    def __len__(self) -> int:
        return 3

    def replace(self, *_: Any) -> Any:
        raise SystemExit


class Lying(Exception):
    def __str__(self) -> str:
        return LyingText("\0" * 100_000)


class Raising(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> Any:
        return 5


class NoClass(Exception):
    @property
    def __class__(self) -> Any:
        raise SystemExit


class OddNotes(Exception):
    def __init__(self) -> None:
        self.__notes__ = ["n" * 10_000_000, Raising(), LyingText("\ud800")] * 1000


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


def wide() -> BaseException:
    return ExceptionGroup(
        "wide", [ExceptionGroup("in", [ValueError(n) for n in range(1000)]) for _ in range(1000)]
    )


def shared() -> BaseException:
    """The standard library's formatter would make 2**60 exceptions of it."""
    group = ExceptionGroup("leaf", [ValueError("leaf")])
    for _ in range(60):
        group = ExceptionGroup("g", [group, group])
    return group


def cycle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    return ExceptionGroup("cycle", [first, second])


def long_chain() -> BaseException:
    error: BaseException = ValueError("oldest")
    for number in range(50_000):
        later = ValueError(number)
        later.__cause__, error = error, later
    return error


def deep_stack() -> BaseException:
    def down() -> None:
        down()

    try:
        down()
    except RecursionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuntimeError("x" * (50 << 20)),
        lambda: RuntimeError("\0" * (50 << 20)),
        lambda: KeyError("\0" * (50 << 20)),
        lambda: RuntimeError("\ud800" * 1_000_000, "😀" * 1_000_000),
        lambda: ValueError(list(range(5_000_000))),
        lambda: ValueError(b"\xff" * (50 << 20)),
        Lying,
        Raising,
        NoText,
        NoClass,
        OddNotes,
        Endless,
        wide,
        shared,
        cycle,
        long_chain,
        deep_stack,
        lambda: Retry(1.0, "r" * 1_000_000),
    ],
)
def test_it_can_always_be_written(make: Any) -> None:
    error = make()
    begin = time.thread_time()
    text, trace = describe(error)
    assert time.thread_time() - begin < 2  # an order of magnitude and more above what it takes
    assert 0 < len(text) <= MAX_ERROR_CHARS
    assert 0 < len(trace) <= MAX_TRACEBACK_CHARS
    assert "\0" not in text + trace
    (text + trace).encode()


def test_groups_show_their_members() -> None:
    trace = describe(ExceptionGroup("many", [ValueError("first"), KeyError("second")]))[1]
    assert "many (2 sub-exceptions)" in trace
    assert "ValueError: first" in trace
    assert "KeyError: 'second'" in trace
    assert "and 990 more" in describe(wide())[1]
    assert "shown above" in describe(shared())[1]


def test_printable_keeps_both_ends() -> None:
    text = printable("begin" + "x" * 10_000 + "end", 1000)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert len(text) <= 1000


def test_what_is_raised_from_outside_shows_where_the_handler_was() -> None:
    """The soft stop's own frame, in the file of the caller, is not the handler's, and hides nothing."""
    here: dict[str, Any] = {}
    source = (
        "def call(handler):\n    return handler()\n\n\ndef on_stop():\n    raise RuntimeError('it is time')\n"
    )
    exec(compile(source, "caller.py", "exec"), here)

    def handler() -> None:
        here["on_stop"]()

    with pytest.raises(RuntimeError) as caught:
        here["call"](handler)
    trace = describe(caught.value, "caller.py")[1]
    assert "in test_what_is_raised" in trace
    assert 'here["on_stop"]()' in trace
    assert "in call" not in trace
    assert "in on_stop" not in trace


def test_an_error_of_our_own_does_not_name_its_class() -> None:
    class Refused(Explained):
        pass

    text, trace = describe(Refused("it cannot be stored"))
    assert text == "it cannot be stored"
    assert "it cannot be stored" in trace
