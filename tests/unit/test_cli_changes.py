"""``aqd jobs retry|cancel|delete|update``, ``failed discard``, ``queues …``: sets, trials, what is printed.

One by one by ids: tests/unit/test_cli_database.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import store
from aqd.cli import command
from aqd.errors import Exit

Conn = psycopg.Connection[Any]


@pytest.fixture
def conn(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Conn]:
    """The database that the commands use."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("AQD_CONFIG", str(tmp_path / "empty.toml"))
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


def ok(capsys, *args: str) -> str:
    assert command.run(args) == Exit.OK
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys, *args: str, code: int = Exit.USAGE) -> str:
    assert command.run(args) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"aqd: [^\n]+\n", captured.err), captured.err
    return captured.err


def failed(conn: Conn, count: int, type: str = "mail", error: str = "boom") -> list[int]:
    """Jobs that have failed, as their rows say it."""
    query = "select aqd.enqueue(%s) from generate_series(1, %s)"
    ids = [row[0] for row in conn.execute(query, [type, count])]
    conn.execute("update aqd.jobs set state = 'FAILED', last_error = %s where id = any(%s)", [error, ids])
    conn.execute(
        """insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error)
           select id, now(), 1, type, queue, 'failed', last_error from aqd.jobs where id = any(%s)""",
        [ids],
    )
    return ids


def states(conn: Conn) -> dict[str, int]:
    return dict(conn.execute("select state, count(*) from aqd.all_jobs group by 1 order by 1").fetchall())


def test_a_kind_of_failure_is_looked_at_and_retried(conn: Conn, capsys) -> None:
    """From the list of groups by its hash; first only counted."""
    failed(conn, 3, error="cannot reach 10.0.0.1")
    failed(conn, 1, error="out of cheese")
    groups = json.loads(ok(capsys, "failed", "list", "--group-by", "type,error", "--json"))
    hash = groups[0]["filter"]["error_hash"]
    which = ["--error-hash", hash]
    assert ok(capsys, "jobs", "retry", *which, "--dry-run") == "3 jobs would be retried\n"
    assert states(conn) == {"FAILED": 4}
    assert ok(capsys, "jobs", "retry", *which) == "3 jobs retried\n"
    assert ok(capsys, "jobs", "retry", *which) == "0 jobs retried\n"
    assert states(conn) == {"FAILED": 1, "QUEUED": 3}
    assert ok(capsys, "jobs", "retry", "--all") == "1 job retried\n"


def test_cancel_and_delete_by_filter(conn: Conn, capsys) -> None:
    failed(conn, 2)
    conn.execute("select aqd.enqueue('a', tags => '{x}'), aqd.enqueue('b')")
    assert ok(capsys, "jobs", "cancel", "--tag", "x") == "1 job cancelled\n"
    which = ["--state", "cancelled", "--state", "queued", "--type", "a"]
    assert ok(capsys, "jobs", "delete", *which, "--dry-run") == "1 job would be deleted\n"
    done = json.loads(ok(capsys, "jobs", "delete", "--type", "mail", "--json"))
    assert (done["matched"], done["changed"], done["results"], done["dry_run"]) == (2, 2, None, False)
    assert states(conn) == {"CANCELLED": 1, "QUEUED": 1}
    assert "QUEUED" in refused(capsys, "jobs", "retry", "--state", "queued")
    assert "last error" not in refused(capsys, "jobs", "delete", "--error", "")


def test_a_bound_and_a_window_are_told(conn: Conn, capsys, monkeypatch) -> None:
    monkeypatch.setattr("aqd.store.change.MAX_JOBS", 2)
    conn.execute("select aqd.enqueue('a', queue => 'q') from generate_series(1, 3)")
    assert command.run(["jobs", "cancel", "--queue", "q"]) == Exit.OK
    captured = capsys.readouterr()
    assert captured.out == "2 jobs cancelled\n"
    assert captured.err.startswith("aqd: note: at a time no more than")
    assert command.run(["jobs", "delete", "--queue", "q"]) == Exit.OK
    captured = capsys.readouterr()
    assert captured.out == "2 jobs deleted\n"
    assert "history has no index for queue" in captured.err.splitlines()[1]


def test_ids_one_by_one_or_as_a_trial(conn: Conn, capsys) -> None:
    one, two = failed(conn, 2)
    waits = conn.execute("select aqd.enqueue('a')").fetchone()[0]
    given = [str(id) for id in (one, waits, 999)]
    assert ok(capsys, "jobs", "retry", "--dry-run", *given).splitlines() == [
        f"job {one} would be retried",
        f"job {waits} would not: it is QUEUED; only a job that is FAILED can be retried",
        "job 999 would not: there is no such job",
    ]
    assert states(conn) == {"FAILED": 2, "QUEUED": 1}
    assert command.run(["jobs", "retry", "--json", *given]) == Exit.USAGE
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["id"], r["changed"]) for r in results] == [(given[0], True), (given[1], False), ("999", False)]

    assert command.run(["jobs", "delete", *given, str(two)]) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"job {one} is deleted, it was QUEUED",
        f"job {waits} is deleted, it was QUEUED",
        f"job {two} is deleted, it was FAILED",
    ]
    assert captured.err == "aqd: there is no job 999\n"
    assert states(conn) == {}


def test_discard_says_why_and_by_whom(conn: Conn, capsys, monkeypatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "anna")
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    one, _, _ = failed(conn, 3)
    assert ok(capsys, "failed", "discard", str(one), "--reason", "known") == f"job {one} is CANCELLED\n"
    assert "only a job that is FAILED" in refused(capsys, "failed", "discard", str(one), "--reason", "known")
    assert ok(capsys, "failed", "discard", "--type", "mail", "--reason", "old") == "2 jobs discarded\n"
    rows = conn.execute("select resolution, note, discarded_by from aqd.failed_jobs order by id").fetchall()
    assert rows == [("discarded", note, "anna@box") for note in ("known", "old", "old")]
    assert "discarded: known" in ok(capsys, "failed", "list", "--all")
    assert "reason: is blank" in refused(capsys, "failed", "discard", "--all", "--reason", " ")
    assert "1..1000" in refused(capsys, "failed", "discard", str(one), "--reason", "x" * 1001)


def test_update(conn: Conn, capsys) -> None:
    id = str(conn.execute("select aqd.enqueue('a', delay_s => 60)").fetchone()[0])
    said = ok(capsys, "jobs", "update", id, "--priority", "-5", "--run-at", "2031-01-01T00:00:00Z")
    assert said.startswith(f"job {id} has priority -5 and waits until 20")
    assert json.loads(ok(capsys, "jobs", "update", id, "--delay", "5", "--json"))["priority"] == -5
    assert "priority: " in refused(capsys, "jobs", "update", id, "--priority", "101")
    assert "not both" in refused(
        capsys, "jobs", "update", id, "--delay", "1", "--run-at", "2031-01-01T00:00:00Z"
    )
    assert "delay_s: " in refused(capsys, "jobs", "update", id, "--delay", "nan")
    assert refused(capsys, "jobs", "update", "999", "--priority", "1") == "aqd: there is no job 999\n"
    store.cancel_job(conn, int(id))
    assert "only a QUEUED job" in refused(capsys, "jobs", "update", id, "--priority", "1")


def test_queues(conn: Conn, capsys) -> None:
    assert ok(capsys, "queues", "pause", "mail/out") == "queue mail/out is paused, no limit\n"
    assert ok(capsys, "queues", "limit", "mail/out", "3") == (
        "queue mail/out is paused, at most 3 of its jobs at a time\n"
    )
    assert json.loads(ok(capsys, "queues", "resume", "mail/out", "--json"))["max_running"] == 3
    assert ok(capsys, "queues", "limit", "mail/out", "none") == "queue mail/out is served, no limit\n"
    for value in ("0", "-1", "x", "1e3", "٣", "9999999"):
        assert "1000000" in refused(capsys, "queues", "limit", "--", "mail", value)
    assert "queue: " in refused(capsys, "queues", "pause", "a b")
