"""Reading the end of an output file, and what is stored of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from aqd import process
from aqd.output import LIMIT, tail, text


@pytest.fixture
def fd() -> Iterator[int]:
    made = process.output_file("test")
    yield made
    os.close(made)


def test_a_part_of_it(fd: int) -> None:
    os.write(fd, b"of the job before; of this one; of what came later")
    assert tail(fd, 19, 30) == b"of this one"
    assert tail(fd, 32) == b"of what came later"
    assert tail(fd, 50) == b""
    assert tail(fd, 19, 10_000, limit=5) == b"later"


def test_the_end_of_much(fd: int) -> None:
    os.write(fd, b"a" * 100_000 + b"z")
    assert tail(fd, 0) == b"a" * (LIMIT - 1) + b"z"
    assert tail(fd, 99_999) == b"az"


def test_a_character_is_not_cut_in_two(fd: int) -> None:
    os.write(fd, "€€€".encode())
    for limit in (9, 8, 7, 6):
        assert tail(fd, 0, limit=limit).decode() == ("€€€" if limit == 9 else "€€")
    os.write(fd, b"\x80" * 10)
    assert tail(fd, 0, limit=10) == b"\x80" * 10  # no character at all: nothing is left out


def test_a_file_that_was_truncated(fd: int) -> None:
    os.write(fd, b"x" * 1000)
    os.ftruncate(fd, 0)
    os.write(fd, b"after it")
    assert tail(fd, 900) == b"after it"


def test_a_hole_is_not_output(fd: int) -> None:
    os.write(fd, b"x" * 200_000 + b"end")
    process.punch_hole(fd, 3)
    assert tail(fd, 1, 200_003, limit=20_000).lstrip(b"x") == b"end"
    assert not tail(fd, 1, limit=200_000).startswith(b"\0")
    os.write(fd, b"\0 of the job")
    assert tail(fd, 200_003) == b"\0 of the job"


def test_what_is_stored() -> None:
    assert text(b"caf\xc3\xa9 \xff\0 \xed\xa0\x80\n") == "café \\xff\\0 \\xed\\xa0\\x80\n"
    assert text(b"\xff" * LIMIT + b"end") == ("\\xff" * LIMIT + "end")[-LIMIT:]
    assert "\0" not in text(b"\0" * 10_000_000)
    assert len(text(b"\0" * 10_000_000)) == LIMIT
