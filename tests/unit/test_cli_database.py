"""Commands that talk to the database: submit, jobs, failed, db, health, check. On a real PostgreSQL."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from aqd import store
from aqd.claims import ClaimBook
from aqd.cli import command
from aqd.config import Database
from aqd.errors import Exit
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
        assert store.record_failed(conn, failures) == {job.id for job in claimed}
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
    assert [job["id"] for job in json.loads(ok(capsys, "jobs", "list", "--queue", "a", "--json"))] == [
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


@pytest.mark.parametrize("action", ["show", "retry"])
@pytest.mark.usefixtures("database")
def test_jobs_that_are_not_there(capsys, action: str) -> None:
    assert refused(capsys, "jobs", action, "4711") == "aqd: there is no job 4711\n"
    assert "is no job id" in refused(capsys, "jobs", action, "x")


@pytest.mark.usefixtures("database")
def test_an_empty_list(capsys) -> None:
    assert ok(capsys, "jobs", "list") == "no jobs\n"
    assert ok(capsys, "failed", "list") == "no failed jobs\n"
    assert json.loads(ok(capsys, "failed", "list", "--all", "--json")) == []


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
    monkeypatch.setenv("ADMIN_API_KEY", "key")
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
        query = "select count(*) from pg_stat_activity where application_name = 'aqd check'"
        assert conn.execute(query).fetchone() == (0,)
