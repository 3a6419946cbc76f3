"""``aqd jobs list`` and ``aqd failed list`` with their filters, on a real PostgreSQL."""

import json

import psycopg
import pytest

from tests.unit.test_cli_database import _environment, database, ok, refused

__all__ = ["_environment", "database"]

WORLD = """
    insert into aqd.jobs (id, run_at, type, queue, state, last_error, tags, meta)
    select n, now(), 'mail', 'q' || n % 2, case when n % 2 = 0 then 'FAILED' else 'QUEUED' end,
           case when n % 2 = 0 then 'Row ' || n || ' is bad' end, array['n:' || n], '{"tenant": 7}'
    from generate_series(1, 6) as n;
    insert into aqd.job_history (id, finished_at, run_at, created_at, attempt, crashes, interruptions, retries,
                                 priority, state, type, queue, payload, result)
    values (7, now(), now(), now(), 1, 0, 0, 0, 0, 'COMPLETED', 'mail', 'q1', '{"a": 1}', '2');
    insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, reason, error)
    select id, now(), 1, type, queue, 'failed', 'exception', last_error from aqd.jobs where state = 'FAILED' order by id;
"""


@pytest.fixture(autouse=True)
def world(database: str) -> None:
    with psycopg.connect(database) as conn:
        conn.execute(WORLD.encode())


def listed(capsys, *args: str) -> list[int]:
    return [int(job["id"]) for job in json.loads(ok(capsys, "jobs", "list", "--json", *args))]


def test_filters(capsys) -> None:
    assert listed(capsys) == [7, 6, 5, 4, 3, 2, 1]
    assert listed(capsys, "--state", "failed", "--state", "COMPLETED") == [7, 6, 4, 2]
    assert listed(capsys, "--tag", "n:3") == [3]
    assert listed(capsys, "--error", "ROW 4") == [4]
    assert listed(capsys, "--finished-after", "2020-01-01T00:00:00Z") == [7]
    assert listed(capsys, "--created-before", "2020-01-01T00:00:00Z", "--state", "queued") == []
    assert listed(capsys, "--oldest", "-n", "2") == [1, 2]
    assert listed(capsys, "--oldest", "-n", "2", "--after", "2") == [3, 4]
    assert listed(capsys, "-n", "2", "--before", "6") == [5, 4]


def test_the_window_is_stated_beside_the_list(capsys) -> None:
    from aqd.cli import command

    assert command.run(["jobs", "list", "--queue", "q1"]) == 0
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 5
    assert "note: finished jobs since" in found.err
    assert "finished_after" in found.err


def test_fields(capsys) -> None:
    (job, *_) = json.loads(ok(capsys, "jobs", "list", "--json", "--fields", "status,payload,result"))
    assert job == {"id": "7", "status": "COMPLETED", "payload": {"a": 1}, "result": 2}


def test_tags_and_meta_are_shown(capsys) -> None:
    lines = ok(capsys, "jobs", "show", "3").splitlines()
    assert "tags        n:3" in lines
    assert 'meta        {"tenant": 7}' in lines


def test_failed_jobs(capsys) -> None:
    records = json.loads(ok(capsys, "failed", "list", "--error", "row", "--kind", "failed", "--json"))
    assert [record["job_id"] for record in records] == ["6", "4", "2"]
    assert ok(capsys, "failed", "list", "--reason", "memory_limit") == "no failed jobs\n"
    (group,) = json.loads(ok(capsys, "failed", "list", "--group-by", "type,error", "--json"))
    assert (group["count"], group["error"]) == (3, "Row # is bad")
    hash = group["filter"]["error_hash"]
    header, line = ok(capsys, "failed", "list", "--group-by", "error").splitlines()
    assert header.split()[0] == "count"
    assert hash in line.split()
    assert listed(capsys, "--error-hash", hash) == [6, 4, 2]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["jobs", "list", "--before", "3", "--oldest"], "--before"),
        (["jobs", "list", "--after", "3"], "--oldest"),
        (["jobs", "list", "--before", "x"], "no job id"),
        (["jobs", "list", "--tag", "a b"], "tag"),
        (["jobs", "list", "--created-after", "yesterday"], "created_after"),
        (["jobs", "list", "--error", ""], "error"),
        (["jobs", "list", "--error", "x", "--state", "completed"], "error"),
        (["jobs", "list", "--fields", "id"], "--json"),
        (["jobs", "list", "--json", "--fields", "id,secret"], "secret"),
        (["failed", "list", "--kind", "No"], "kind"),
        (["failed", "list", "--failed-after", "5"], "failed_after"),
        (["failed", "list", "--group-by", "type", "--before", "3"], "--before"),
    ],
)
def test_refused(capsys, args: list[str], word: str) -> None:
    assert word in refused(capsys, *args)
