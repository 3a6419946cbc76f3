"""``aqd submit``: keys, tags and meta; many jobs from a file, all or none. On a real PostgreSQL."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import client
from aqd.store import submit as store_submit
from tests.fixtures.api import ROOT
from tests.unit.test_cli_database import _environment, database, ok, refused  # noqa: F401


@pytest.fixture
def rows(database: str) -> Callable[[], list[Any]]:  # noqa: F811
    def look() -> list[Any]:
        with psycopg.connect(database) as conn:
            return conn.execute(
                "select type, payload, tags, meta, priority from aqd.jobs order by id"
            ).fetchall()

    return look


def given(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """What standard input holds."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_tags_and_meta(capsys, rows) -> None:
    ok(capsys, "submit", "mail", "[1]", "--tag", "b", "--tag", "a:1", "--meta", '{"k": "ü"}')
    assert rows() == [("mail", [1], ["b", "a:1"], {"k": "ü"}, 0)]


def test_keys(capsys, rows) -> None:
    arguments = ("submit", "mail", '{"n": 1}', "--idempotency-key", "order-7")
    id = ok(capsys, *arguments)
    assert ok(capsys, *arguments) == id
    assert json.loads(ok(capsys, *arguments, "--json"))["outcome"] == "existing"
    told = refused(capsys, *arguments, "--priority", "3")
    assert id.strip() in told
    assert "priority" in told
    refused(capsys, *arguments, "--on-conflict", "reject")
    assert ok(capsys, *arguments, "--priority", "3", "--on-conflict", "replace") == id
    assert rows() == [("mail", {"n": 1}, None, None, 3)]


def test_keys_live_as_long_as_configured(capsys, rows, database: str, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("AQD_JOBS_IDEMPOTENCY_TTL_HOURS", "0.5")
    ok(capsys, "submit", "mail", "--idempotency-key", "k")
    given(monkeypatch, '{"type":"mail","idempotency_key":"l"}')
    ok(capsys, "submit", "--batch", "-")
    with psycopg.connect(database) as conn:
        found = conn.execute(
            "select count(*) from aqd.idempotency_keys where expires_at between now() and now() + '30 minutes'"
        ).fetchone()
    assert found == (2,)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("mail", "--tag", "a b"), "tags[0]"),
        (("mail", "--tag", ""), "tags[0]"),
        (("mail", "--tag", "a", "--tag", "a"), "tags[1]"),
        (("mail", "--tag", "\udcff"), "tags[0]"),
        (("mail", *(part for n in range(33) for part in ("--tag", f"t{n}"))), "at most 32"),
        (("mail", "--meta", ""), "meta"),
        (("mail", "--meta", "[]"), "meta: must be a JSON object"),
        (("mail", "--meta", "{"), "meta: is not valid JSON"),
        (("mail", "--meta", '{"a":"\\u0000"}'), "meta.a"),
        (("mail", "--meta", '{"a":NaN}'), "meta.a"),
        (("mail", "--meta", '{"a":1,"a":2}'), "twice"),
        (("mail", "--meta", "[" * 65 + "]" * 65), "64"),
        (("mail", "--meta", '{"a":"' + "x" * 65_536 + '"}'), "65536"),
        (("mail", "--idempotency-key", ""), "idempotency_key"),
        (("mail", "--idempotency-key", "é"), "idempotency_key"),
        (("mail", "--idempotency-key", "x" * 256), "255"),
        (("mail", "--idempotency-key", "k", "--on-conflict", "ignore"), "on_conflict"),
        (("mail", "--on-conflict", "replace"), "on_conflict"),
        ((), "Missing argument 'TYPE'"),
        (("mail", "--batch", "-"), "--batch stands alone"),
        (("--batch", "-", "--priority", "0"), "without priority"),
        (("--batch", "-", "--tag", "a"), "without tags"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_bad_values_are_named(arguments: tuple[str, ...], wanted: str, capsys, rows) -> None:
    assert wanted in refused(capsys, "submit", *arguments)
    assert rows() == []


# --- many -----------------------------------------------------------------------------------------


def test_many_from_a_file(capsys, rows, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store_submit, "CHUNK_JOBS", 10)
    lines = [json.dumps({"type": f"t{n}", "payload": n, "tags": ["x"], "priority": n % 5}) for n in range(35)]
    file = tmp_path / "jobs"
    file.write_bytes("\r\n\n".join(lines).encode())  # Windows' ends, empty lines, no end at the end
    ids = ok(capsys, "submit", "--batch", str(file)).split()
    assert ids == sorted(set(ids), key=int)
    assert len(ids) == 35
    assert rows() == [(f"t{n}", n, ["x"], None, n % 5) for n in range(35)]


def test_many_from_standard_input_as_json(capsys, rows, monkeypatch) -> None:
    line = '{"type":"a","idempotency_key":"k"}\n'
    given(monkeypatch, line + '{"type":"b"}\n' + line)
    documents = json.loads(ok(capsys, "submit", "--batch", "-", "--json"))
    assert [(each["type"], each["outcome"]) for each in documents] == [
        ("a", "created"),
        ("b", "created"),
        ("a", "existing"),
    ]
    assert documents[0]["id"] == documents[2]["id"]
    assert len(rows()) == 2


@pytest.mark.parametrize("text", ["", "\n\n", " \n"])
def test_no_jobs_at_all(text: str, capsys, rows, monkeypatch) -> None:
    given(monkeypatch, text)
    assert ok(capsys, "submit", "--batch", "-") == ""
    assert rows() == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"type":""}', "line 3: type"),
        ('{"type":"a","priority":1000}', "line 3: priority: 1000 is not between -100 and 100"),
        ('{"type":"a","typo":1}', "line 3: typo: unknown field"),
        ('{"type":"a","payload":"\\u0000"}', "line 3: payload"),
        ('{"type":"a","payload":"\ud800"}', "line 3: is not UTF-8"),
        ('{"type":"a","payload":' + "[" * 65 + "]" * 65 + "}", "line 3: is nested deeper than 64"),
        ('{"type":"a"}{"type":"a"}', "line 3: is not valid JSON"),
        ("[]", "line 3"),
        ("null", "line 3"),
        ("nonsense", "line 3: is not valid JSON"),
        ("x" * (1 << 21), "line 3: is longer than 1048576 bytes"),
        ('{"type":"a","idempotency_key":"taken"}', "line 3: the idempotency key"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_one_bad_line_and_nothing_is_stored(line: str, wanted: str, capsys, rows, monkeypatch) -> None:
    monkeypatch.setattr(store_submit, "CHUNK_JOBS", 1)
    ok(capsys, "submit", "mail", "--idempotency-key", "taken")
    given(monkeypatch, '{"type":"a"}\n\n' + line + '\n{"type":"a"}\n')
    assert wanted in refused(capsys, "submit", "--batch", "-")
    assert [row[0] for row in rows()] == ["mail"]


def test_a_file_that_cannot_be_read(capsys, tmp_path: Path) -> None:
    """Before anything else: the database is not needed."""
    told = refused(capsys, "submit", "--batch", "/nowhere/at/all")
    assert told == 'aqd: --batch: "/nowhere/at/all" cannot be read: No such file or directory\n'
    assert "--batch: " in refused(capsys, "submit", "--batch", str(tmp_path))


def test_a_slow_producer_holds_nobody_up(rows, database: str) -> None:  # noqa: F811
    """What has been read waits in memory, not in a transaction that holds its keys."""
    lines = [json.dumps({"type": "mail", "idempotency_key": f"k{n}"}).encode() for n in range(5000)]
    program = [sys.executable, "-m", "aqd", "submit", "--batch", "-"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        process.stdin.write(
            b"\n".join(lines) + b"\n"
        )  # more than a pipe holds: most of it has been read then
        process.stdin.flush()
        with psycopg.connect(database) as conn:
            asked = """select count(*) from pg_stat_activity
                       where datname = current_database() and application_name like 'aqd submit%'"""
            assert conn.execute(asked).fetchone() == (0,)
            conn.execute("set lock_timeout = '10s'")
            first = client.enqueue(conn, "mail", idempotency_key="k0").id
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    ids = out.split()
    assert len(ids) == len(set(ids)) == len(rows()) == 5000
    assert int(ids[0]) == first
