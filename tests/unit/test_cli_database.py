"""Commands that talk to the database: submit, jobs, failed, db, health, check. On a real PostgreSQL."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import store
from aqd.claims import ClaimBook, ClaimedJob
from aqd.cli import command
from aqd.config import Database
from aqd.errors import Exit
from tests.fixtures.processes import wait_until
from tests.unit.test_cli import COMMON, GOOD


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name in COMMON or (
            name.startswith(("AQD_", "ADMIN_API_KEY")) and not name.startswith("AQD_TEST_")
        ):
            monkeypatch.delenv(name)
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("AQD_CONFIG", str(tmp_path / "empty.toml"))


@pytest.fixture
def database(database_url: str, monkeypatch) -> str:
    monkeypatch.setenv("DATABASE_URL", database_url)
    return database_url


@pytest.fixture
def empty_database(empty_database_url: str, monkeypatch) -> str:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    return empty_database_url


def ok(capsys, *args: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    code = command.run(list(args))
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def refused(capsys, *args: str, code: int = Exit.USAGE) -> str:
    assert command.run(list(args)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def fail_all(url: str, error: str = "ValueError: no") -> list[int]:
    """Claim everything and record it as failed for good, as a daemon would."""
    with store.connect(Database(url=url), "tests") as conn:
        book = ClaimBook("test-node", 30.0)
        book.set_types(frozenset({"noop", "mail"}))
        claimed = book.claim(conn, 100)
        failures = [
            store.Failure(job.id, job.token, "failed", error, "Traceback\n  line\nValueError: no", None, 0.0)
            for job in claimed
        ]
        assert set(store.record_failed(conn, failures)) == {job.id for job in claimed}
    return [job.id for job in claimed]


# --- submit ---------------------------------------------------------------------------------------


def test_submit_prints_the_id_and_stores_what_was_said(database: str, capsys) -> None:
    id = int(
        ok(
            capsys,
            *(
                "submit",
                "mail",
                '{"to": "me", "n": 0.10000000000000000001}',
                "--queue",
                "slow",
                "--priority",
                "-5",
            ),
            *("--max-attempts", "3", "--timeout", "7.5", "--run-at", "2030-01-01T00:00:00Z"),
        )
    )
    with psycopg.connect(database) as conn:
        row = conn.execute(
            "select type, payload::text, queue, priority, max_attempts, timeout_s::float8, "
            "run_at = '2030-01-01Z', state from aqd.jobs where id = %s",
            [id],
        ).fetchone()
    assert row == (
        *("mail", '{"n": 0.10000000000000000001, "to": "me"}', "slow", -5, 3, 7.5, True, "QUEUED"),
    )


@pytest.mark.usefixtures("database")
def test_submit_from_standard_input(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO('{"text": "zwölf"}'.encode())))
    id = ok(capsys, "submit", "noop", "-").strip()
    assert json.loads(ok(capsys, "jobs", "show", id, "--json"))["payload"] == {"text": "zwölf"}


@pytest.mark.usefixtures("database")
def test_submit_as_json_and_without_payload(capsys) -> None:
    document = json.loads(ok(capsys, "submit", "noop", "--delay", "60", "--json"))
    assert document["status"] == "QUEUED"
    assert document["id"] == document["jobId"]
    assert document["run_at"] > document["created_at"]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["bad type"], "type: "),
        (["noop", "{"], "payload: is not valid JSON"),
        (["noop", '{"a": "\\u0000"}'], "payload.a: "),
        (["noop", '"\\ud800"'], "surrogate"),
        (["noop", "NaN"], "NaN"),
        (["noop", "[" * 65 + "]" * 65], "nested deeper than 64"),
        (["noop", "--priority", "101"], "priority: "),
        (["noop", "--run-at", "tomorrow"], "run_at: "),
        (["noop", "--delay", "1", "--run-at", "2030-01-01T00:00:00Z"], "not both"),
        (["noop", "--max-attempts", "0"], "max_attempts: "),
    ],
)
@pytest.mark.usefixtures("database")
def test_submit_refuses_what_the_service_refuses(capsys, args: list[str], wanted: str) -> None:
    assert wanted in refused(capsys, "submit", *args)
    assert json.loads(ok(capsys, "jobs", "list", "--json")) == []


@pytest.mark.usefixtures("database")
def test_submit_bounds_standard_input(capsys, monkeypatch) -> None:
    monkeypatch.setenv("AQD_JOBS_MAX_PAYLOAD_BYTES", "2000")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"' + b"x" * 2000 + b'"')))
    assert "larger than 2000 bytes" in refused(capsys, "submit", "noop", "-")
    assert "2000" in refused(capsys, "submit", "noop", '"' + "x" * 2000 + '"')


# --- looking and retrying -------------------------------------------------------------------------


@pytest.mark.usefixtures("database")
def test_the_list_is_filtered_paged_and_one_line_each(capsys) -> None:
    ids = [
        ok(capsys, "submit", kind, "--queue", queue).strip()
        for kind, queue in (("noop", "a"), ("mail", "a"), ("noop", "b"))
    ]
    lines = ok(capsys, "jobs", "list").splitlines()
    assert [line.split()[0] for line in lines] == ["id", *reversed(ids)]
    listed = json.loads(ok(capsys, "jobs", "list", "--type", "noop", "--json"))
    assert [job["id"] for job in listed] == [ids[2], ids[0]]
    recent = ("--created-after", "2020-01-01T00:00:00Z", "--json")
    assert [job["id"] for job in json.loads(ok(capsys, "jobs", "list", "--queue", "a", *recent))] == [
        ids[1],
        ids[0],
    ]
    assert len(json.loads(ok(capsys, "jobs", "list", "-n", "2", "--json"))) == 2
    assert [j["id"] for j in json.loads(ok(capsys, "jobs", "list", "--before", ids[1], "--json"))] == [ids[0]]
    assert ok(capsys, "jobs", "list", "--state", "failed") == "no jobs\n"


def test_a_failed_job_is_shown_listed_and_retried(database: str, capsys) -> None:
    id = ok(capsys, "submit", "mail", '{"to": "\\u001b[2J"}', "--max-attempts", "1").strip()
    assert fail_all(database, "ValueError: \033[2J no") == [int(id)]
    shown = ok(capsys, "jobs", "show", id)
    assert "\033" not in shown
    for text in (
        f"job         {id}",
        "state       FAILED",
        "attempt     1/1",
        "traceback of the last one:",
        "    line",
    ):
        assert text in shown.splitlines(), shown
    document = json.loads(ok(capsys, "jobs", "show", id, "--json"))
    assert document["status"] == "FAILED"
    assert [a["kind"] for a in document["attempts"]] == ["failed"]

    assert id in ok(capsys, "failed", "list").splitlines()[1].split()
    (record,) = json.loads(ok(capsys, "failed", "list", "--json"))
    assert (record["job_id"], record["type"]) == (id, "mail")

    assert ok(capsys, "jobs", "retry", id) == f"job {id} is QUEUED\n"
    assert "only a FAILED job can be retried" in refused(capsys, "jobs", "retry", id)


@pytest.mark.parametrize("action", ["show", "retry", "cancel"])
@pytest.mark.usefixtures("database")
def test_jobs_that_are_not_there(capsys, action: str) -> None:
    assert refused(capsys, "jobs", action, "4711") == "aqd: there is no job 4711\n"
    assert "is no job id" in refused(capsys, "jobs", action, "x")


@pytest.mark.usefixtures("database")
def test_an_empty_list(capsys) -> None:
    assert ok(capsys, "jobs", "list") == "no jobs\n"
    assert ok(capsys, "failed", "list") == "no failed jobs\n"
    assert json.loads(ok(capsys, "failed", "list", "--all", "--json")) == []


# --- cancelling -----------------------------------------------------------------------------------


@pytest.fixture
def node(database: str) -> Iterator[store.Connection]:
    """The connection of one that claims and records."""
    with store.connect(Database(url=database), "tests") as conn:
        yield conn


def claim(node: store.Connection) -> list[ClaimedJob]:
    book = ClaimBook("test-node", 30.0)
    book.set_types(frozenset({"noop", "mail"}))
    return sorted(book.claim(node, 100), key=lambda job: job.id)


def failure(job: ClaimedJob, retry_in_s: float | None = None, **more: Any) -> store.Failure:
    return store.Failure(job.id, job.token, "failed", "boom", None, retry_in_s, 0.0, **more)


def submit(capsys, *args: str) -> str:
    return ok(capsys, "submit", "noop", *args).strip()


def test_cancel_says_what_became_of_each(node: store.Connection, capsys) -> None:
    running, done, failed = (submit(capsys) for _ in range(3))
    claimed = claim(node)
    store.record_completed(node, [store.Completion(claimed[1].id, claimed[1].token, None, 0.0)])
    store.record_failed(node, [failure(claimed[2])])
    waiting, later = submit(capsys), submit(capsys, "--delay", "3600")
    wanted = [
        f"job {waiting} is CANCELLED",
        f"job {running} is PROCESSING, asked to end",
        f"job {later} is CANCELLED",
        f"job {done} is COMPLETED",
        f"job {failed} is FAILED",
    ]
    for _ in range(2):
        assert ok(capsys, "jobs", "cancel", waiting, running, later, done, failed).splitlines() == wanted
    lines = {line.split()[0]: line for line in ok(capsys, "jobs", "list").splitlines()}
    assert "PROCESSING, cancelling" in lines[running]
    assert "cancelling" not in "".join(line for id, line in lines.items() if id != running)
    shown = ok(capsys, "jobs", "show", running)
    assert "state       PROCESSING, cancelling" in shown.splitlines()
    assert "cancel      asked for at " in shown
    assert json.loads(ok(capsys, "jobs", "show", running, "--json"))["cancel_requested_at"]


@pytest.mark.parametrize("action", ["cancel", "retry"])
def test_one_bad_id_does_not_keep_the_others(node: store.Connection, capsys, action: str) -> None:
    ids = [submit(capsys) for _ in range(3)]
    for job in claim(node):
        store.record_failed(node, [failure(job, retry_in_s=None if action == "retry" else 3600)])
    given = [ids[0], "999999", ids[1], "x", ids[0], ids[2]]
    assert command.run(["jobs", action, *given]) == Exit.USAGE
    captured = capsys.readouterr()
    state = "QUEUED" if action == "retry" else "CANCELLED"
    assert captured.out.splitlines() == [f"job {id} is {state}" for id in ids]
    assert captured.err.splitlines()[0] == "aqd: there is no job 999999"
    assert "is no job id" in captured.err.splitlines()[1]


def test_a_job_that_cannot_be_had_is_named_and_the_others_are_cancelled(
    database: str, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("AQD_DATABASE_STATEMENT_TIMEOUT_S", "0.5")
    locked, free = submit(capsys), submit(capsys)
    with psycopg.connect(database) as other:
        other.execute("select from aqd.jobs where id = %s for update", [locked])
        assert command.run(["jobs", "cancel", locked, free]) == Exit.DATABASE
    captured = capsys.readouterr()
    assert captured.out == f"job {free} is CANCELLED\n"
    assert captured.err.startswith("aqd: ")
    assert captured.err.count("\n") == 1


def test_a_lost_connection_ends_the_command(node: store.Connection, capsys, monkeypatch) -> None:
    first, second = submit(capsys), submit(capsys)
    real = store.cancel_job

    def cut(conn: store.Connection, id: int) -> store.Cancelled:
        node.execute("select pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
        return real(conn, id)

    monkeypatch.setattr(store, "cancel_job", cut)
    assert "terminating connection" in refused(capsys, "jobs", "cancel", first, second, code=Exit.DATABASE)
    assert [job["status"] for job in json.loads(ok(capsys, "jobs", "list", "--json"))] == ["QUEUED"] * 2


def test_waiting_for_the_end(node: store.Connection, capsys, monkeypatch) -> None:
    ids = [submit(capsys) for _ in range(3)]
    first, second, late = claim(node)
    real = store.job_facts

    def one_ends(conn: store.Connection, waiting: Any) -> Any:
        """The node's part: at each look one more job has ended."""
        if first.id in waiting and second.id not in waiting:
            store.record_failed(node, [failure(first, retry_in_s=0.0)])
        elif second.id in waiting:
            store.record_completed(node, [store.Completion(second.id, second.token, "1", 0.0)])
        return real(conn, waiting)

    monkeypatch.setattr(store, "job_facts", one_ends)
    assert command.run(["jobs", "cancel", "--wait", "2", *ids]) == Exit.ERROR
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"job {second.id} is COMPLETED", f"job {first.id} is CANCELLED"]
    assert captured.err == f"aqd: job {late.id} is still PROCESSING after 2 s, asked to end\n"
    assert ok(capsys, "jobs", "cancel", "--wait", "0", *ids[:2]).splitlines() == [
        f"job {first.id} is CANCELLED",
        f"job {second.id} is COMPLETED",
    ]
    assert str(late.id) in failing_to_end(capsys, str(late.id))


def failing_to_end(capsys, id: str) -> str:
    return refused(capsys, "jobs", "cancel", "--wait", "0", id, code=Exit.ERROR)


# --- how a job went -------------------------------------------------------------------------------


def test_show_prints_reasons_and_what_was_used(node: store.Connection, capsys) -> None:
    id = submit(capsys)
    (job,) = claim(node)
    node.execute(
        "update aqd.jobs set progress_percent = 40, progress_message = E'page 2\n\x1b[2J' where id = %s", [id]
    )
    assert r"progress    40 %, page 2\n\x1b[2J" in ok(capsys, "jobs", "show", id).splitlines()
    assert r"40 %, page 2 \x1b[2J" in ok(capsys, "jobs", "list")
    crashed = failure(job, reason="signal", signal=11, wall_s=2.5, cpu_s=1.25, peak_kb=51_200)
    store.record_failed(node, [crashed._replace(kind="crashed")])
    lines = ok(capsys, "jobs", "show", id).splitlines()
    assert "crashes     1" in lines
    header = next(n for n, line in enumerate(lines) if line.split()[:3] == ["attempt", "kind", "reason"])
    row = lines[header + 1]
    for text in ("crashed", "signal", "2.5", "1.25", "50 MiB", "SIGSEGV", "boom"):
        assert f" {text} " in f"{row} ", row
    assert " signal " in f"{ok(capsys, 'failed', 'list').splitlines()[1]} "


def test_show_prints_the_end_of_the_last_output(node: store.Connection, capsys) -> None:
    id = submit(capsys)
    for output in ("of the first", "\n".join(f"line {n}\t\x1b[31m" for n in range(100)) + "\n", None):
        (job,) = claim(node)
        if output is None:
            store.record_completed(
                node, [store.Completion(job.id, job.token, "1", 0.0, output="and done\r\n")]
            )
        else:
            store.record_failed(node, [failure(job, retry_in_s=0.0, output=output)])
        if output == "of the first":
            assert "output of attempt 1:\n  of the first\n" in ok(capsys, "jobs", "show", id)
    shown = ok(capsys, "jobs", "show", id)
    assert "\033" not in shown
    lines = shown.splitlines()
    begin = lines.index("output of attempt 2 (its end; --output prints all that is kept):")
    assert lines[begin + 1] == "  line 60 \\x1b[31m"
    assert lines[begin + 40] == "  line 99 \\x1b[31m"
    assert lines[begin + 41 :] == ["output of the attempt that completed:", "  and done\\r"]
    assert "of the first" not in shown
    whole = ok(capsys, "jobs", "show", id, "--output").splitlines()
    assert "  of the first" in whole
    assert "  line 0  \\x1b[31m" in whole
    assert json.loads(ok(capsys, "jobs", "show", id, "--json"))["output"] == "and done\r\n"


def test_show_bounds_a_line_without_end(node: store.Connection, capsys) -> None:
    id = submit(capsys)
    store.record_failed(node, [failure(claim(node)[0], output="x" * 60_000)])
    lines = ok(capsys, "jobs", "show", id).splitlines()
    assert max(map(len, lines)) < 9_000
    assert max(map(len, ok(capsys, "jobs", "show", id, "--output").splitlines())) == 60_002


# --- the schema -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_database")
def test_the_life_of_a_schema(capsys) -> None:
    assert command.run(["db", "status"]) == Exit.DATABASE
    assert "run 'aqd db migrate'" in capsys.readouterr().out
    first = ok(capsys, "db", "migrate").splitlines()
    assert first[0].startswith("applied 0001 ")
    assert ok(capsys, "db", "migrate").splitlines() == first[-1:]
    status = json.loads(ok(capsys, "db", "status", "--json"))
    assert (status["ok"], status["pending"], status["current"]) == (True, [], status["wanted"])
    assert "as this aqd needs it" in ok(capsys, "db", "status")
    ok(capsys, "submit", "noop")
    refused(capsys, "db", "reset")
    assert len(json.loads(ok(capsys, "jobs", "list", "--json"))) == 1
    assert ok(capsys, "db", "reset", "--yes") == "the schema is empty and new\n"
    assert ok(capsys, "jobs", "list") == "no jobs\n"


@pytest.mark.usefixtures("empty_database")
def test_without_a_schema_the_message_says_what_to_do(capsys) -> None:
    assert "aqd db migrate" in refused(capsys, "jobs", "list", code=Exit.DATABASE)
    assert "aqd db migrate" in refused(capsys, "submit", "noop", code=Exit.DATABASE)


def test_health(database: str, capsys, monkeypatch) -> None:
    assert ok(capsys, "health") == "ok, live nodes: 0\n"
    with store.connect(Database(url=database), "tests") as conn:
        store.node_seen(conn, store.NodeState("n1", "n", 1, "9", 1, 4, ["noop"], "running"))
    assert json.loads(ok(capsys, "health", "--json")) == {
        "status": "ok",
        "database": "ok",
        "reason": None,
        "nodes": 1,
    }
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@127.0.0.1:1/d")
    assert command.run(["health"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("unavailable: connection")
    assert captured.err == ""


@pytest.mark.usefixtures("empty_database")
def test_health_without_a_schema(capsys) -> None:
    assert command.run(["health"]) == 1
    assert "aqd db migrate" in capsys.readouterr().out


# --- check ----------------------------------------------------------------------------------------


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "good.py").write_text(GOOD)
    monkeypatch.setenv("AQD_PLUGINS_DIR", str(tmp_path / "plugins"))
    return tmp_path / "plugins"


def findings(capsys) -> dict[str, tuple[str, str]]:
    return {
        row["part"] + " " + row["what"]: (row["result"], row["reason"])
        for row in json.loads(capsys.readouterr().out)
    }


@pytest.mark.usefixtures("database", "plugins")
def test_check_when_all_is_well(capsys, monkeypatch) -> None:
    monkeypatch.setenv("ADMIN_API_KEY", "a-key-for-this-one")
    assert command.run(["check", "--json"]) == 0
    assert {result for result, _ in findings(capsys).values()} == {"ok"}
    assert command.run(["check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["plugin", "good", "ok", "greet"] in rows
    assert ["schema", "aqd", "ok", "-"] in rows


@pytest.mark.usefixtures("database", "plugins")
def test_check_notes_that_there_is_no_admin_key(capsys) -> None:
    assert command.run(["check", "--json"]) == 0
    assert findings(capsys)["configuration api.admin_api_key"][0] == "note"


@pytest.mark.usefixtures("database")
def test_check_names_a_broken_plugin_and_still_looks_at_the_database(plugins: Path, capsys) -> None:
    (plugins / "bad.py").write_text("import nonsense_that_is_not_there\n")
    assert command.run(["check", "--json"]) == Exit.CONFIG
    found = findings(capsys)
    result, reason = found[f"plugin bad ({plugins / 'bad.py'})"]
    assert result == "failed"
    assert "nonsense_that_is_not_there" in reason
    assert found["schema aqd"][0] == "ok"


@pytest.mark.usefixtures("empty_database", "plugins")
def test_check_without_database_and_without_schema(capsys, monkeypatch) -> None:
    assert command.run(["check", "--json"]) == Exit.DATABASE
    result, reason = findings(capsys)["schema aqd"]
    assert result == "failed"
    assert "aqd db migrate" in reason
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@127.0.0.1:1/d")
    assert command.run(["check", "--json"]) == Exit.DATABASE
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert any(row["part"] == "database" and row["result"] == "failed" for row in json.loads(out))


def test_check_of_a_refused_configuration(capsys, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[daemon]\nslots = 0\n[log]\nlevel = 1\n")
    assert command.run(["-c", str(tmp_path / "bad.toml"), "check", "--json"]) == Exit.CONFIG
    rows = json.loads(capsys.readouterr().out)
    assert [row["result"] for row in rows] == ["failed", "failed"]


def test_check_leaves_nothing_behind(database: str, plugins: Path) -> None:
    """No process, no bytecode, no connection."""
    done = subprocess.run(
        [sys.executable, "-m", "aqd", "check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in plugins.iterdir()] == ["good.py"]
    with psycopg.connect(database) as conn:
        query = """select count(*) from pg_stat_activity
                   where datname = current_database() and application_name = 'aqd check'"""
        # A backend sees a moment later that its client has gone.
        wait_until(lambda: conn.execute(query).fetchone() == (0,))
