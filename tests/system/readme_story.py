"""The page's examples as one story: run in its order, on one daemon, each followed by a look at what it did.

A block without an entry in :data:`CHECKS` only has to succeed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import psycopg
import pypdf
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aqd import client, config
from aqd.store import EnqueuedJob
from tests.fixtures import processes
from tests.fixtures.daemon import Daemon
from tests.fixtures.jobs import Jobs
from tests.fixtures.processes import wait_until
from tests.system.readme_page import PAGE, ROOT, Block

KEY = "the-key-of-the-story"
# Where there is no curl: what the page needs of it.
CURL = """
import sys, urllib.error, urllib.request
args, headers, options = sys.argv[1:], {}, {"-X": None, "-d": None}
url = None
while args:
    arg = args.pop(0)
    if arg == "-H":
        name, _, value = args.pop(0).partition(":")
        headers[name] = value.strip()
    elif arg in options:
        options[arg] = args.pop(0)
    else:
        url = arg
body = options["-d"].encode() if options["-d"] else None
try:
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=options["-X"])) as answer:
        print(answer.read().decode(), end="")
except urllib.error.HTTPError as refused:
    print(refused.read().decode(), end="")
    sys.exit(22)
"""


class World:
    """One daemon with the API, and a shell in which ``aqd`` and ``curl`` mean it."""

    def __init__(self, daemon: Daemon, jobs: Jobs, port: int) -> None:
        self.daemon = daemon
        self.jobs = jobs
        self.port = port
        self.home = daemon.directory
        self.database_url = str(daemon.config["database"]["url"])
        self.roles: list[str] = []
        self.notes: dict[str, Any] = {}
        self._bin = self.home / "bin"
        self._prepare()

    def _prepare(self) -> None:
        self._bin.mkdir()
        for plugin in (ROOT / "plugins").glob("*.py"):
            shutil.copy(plugin, self.daemon.plugins_dir)
        key = self.home / ".local/share/aqd/admin-key"
        key.parent.mkdir(parents=True)
        key.write_text(KEY + "\n")
        self._script("aqd", f'exec {sys.executable} -m aqd "$@"')
        if real := shutil.which("curl"):
            self._script("curl", f'exec {real} --silent --show-error --fail-with-body "$@"')
        else:
            (self._bin / "curl.py").write_text(CURL)
            self._script("curl", f'exec {sys.executable} {self._bin}/curl.py "$@"')
        with psycopg.connect(self.database_url) as conn:
            conn.execute("create table orders (item text)")

    def _script(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        env = self.daemon.environment()
        return env | {
            "PATH": f"{self._bin}:{env['PATH']}",
            "HOME": str(self.home),
            "AQD_CONFIG": str(self.daemon.config_file),
        }

    # --- running blocks

    def run(self, block: Block) -> str:
        """Do what the block says; its output."""
        match block.language:
            case "sh":
                text = block.text.replace("localhost:4000", f"127.0.0.1:{self.port}")
                return self._command(block, ["sh", "-e", "-c", text], self.environment())
            case "python" if found := re.match(r"# plugins/(\w+\.py)\n", block.text):
                (self.daemon.plugins_dir / found.group(1)).write_text(block.text)
                return ""
            case "python":
                # For the application, DATABASE_URL is its own; aqd's settings come from the daemon's file.
                env = self.environment() | {"DATABASE_URL": self.database_url}
                env |= {"AQD_URL": f"http://127.0.0.1:{self.port}", "AQD_KEY": KEY}
                return self._command(block, [sys.executable, "-c", block.text], env)
            case "sql":
                return self._sql(block.text)
            case "toml":
                return self._toml(block.text)
        raise AssertionError(f"line {block.line}: nobody knows how to run {block.language!r}")

    def _command(self, block: Block, command: list[str], env: dict[str, str]) -> str:
        done = subprocess.run(
            command, cwd=self.home, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        said = f"README line {block.line}\n{block.text}{done.stdout}{done.stderr}\n{self.daemon.tail()}"
        assert done.returncode == 0, f"status {done.returncode} of {said}"
        return done.stdout

    def _sql(self, text: str) -> str:
        """Role names are the cluster's, not the database's: the test makes ones of its own."""
        self.roles += [
            f"{role}_{os.getpid()}" for role in re.findall(r"^create role (\w+)", text, re.MULTILINE)
        ]
        for mine in self.roles:
            text = re.sub(rf"\b{mine.rpartition('_')[0]}\b(?=;| login)", mine, text)
        out = []
        with psycopg.connect(self.database_url, autocommit=True) as conn:
            cursor = conn.execute(text)
            while True:
                if cursor.description:
                    out += [str(row) for row in cursor.fetchall()]
                if not cursor.nextset():
                    return "\n".join(out)

    def _toml(self, text: str) -> str:
        """The file of an administrator who pastes it; settings of plugins also go into the daemon's own."""
        document = tomllib.loads(text)
        if "project" in document:
            return ""
        file = self.home / "pasted.toml"
        file.write_text(text)
        config.load(str(file), {})
        settings = document.get("plugins", {}).get("settings", {})
        mine = {name: table for name, table in settings.items() if name != "generate_pdf"}
        if mine:
            merged = {**self.daemon.config["plugins"]["settings"], **mine}
            self.daemon.configure({"plugins": {"settings": merged}})
            done = self.daemon.aqd("reload")
            assert done.returncode == 0, done.stderr
        return ""

    def drop_roles(self) -> None:
        with psycopg.connect(self.database_url, autocommit=True) as conn:
            for role in self.roles:
                conn.execute(f"drop owned by {role}")
                conn.execute(f"drop role {role}")

    def submit(self, type: str, payload: Any, state: str = "COMPLETED") -> dict[str, Any]:
        """A job through the command line; its row when it is in ``state``."""
        done = self.daemon.aqd("submit", type, json.dumps(payload))
        assert done.returncode == 0, done.stderr
        return self.jobs.wait(int(done.stdout), state)


# --- what each block did ------------------------------------------------------------------------------

Check = Callable[[World, str], None]
CHECKS: dict[tuple[str, str, int], Check] = {}


def check(heading: str, number: int = 0, language: str = "sh") -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[heading, language, number] = function
        return function

    return add


def shape(value: Any) -> Any:
    """Names and kinds of a document, whatever its values."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


@check("Submit a job")
def the_literal_example(world: World, output: str) -> None:
    answer = json.loads(output)
    shown = json.loads(PAGE.block("Submit a job", "json").text)
    assert shape(answer) == shape(shown)
    assert (answer["id"], answer["jobId"], answer["status"]) == ("1", "1", "QUEUED")
    world.jobs.wait(1, "COMPLETED")


@check("Submit a job", 1)
def its_result(world: World, output: str) -> None:
    answer = json.loads(output)
    shown = json.loads(PAGE.block("Submit a job", "json", 1).text)
    assert shape(answer) == shape(shown)
    assert list(answer) == list(shown)
    assert answer["status"] == "COMPLETED"
    pages = pypdf.PdfReader(answer["result"]["file"]).pages
    assert "Hello World" in pages[0].extract_text()
    the_processes(world)


def the_processes(world: World) -> None:
    """The drawing shows these processes and no others."""
    drawing = PAGE.block("The processes of one machine", "text").text

    def kind(title: str) -> str:
        return re.sub(r"\[(idle|generate_pdf 42)\]", "[…]", re.sub(r"\d+(?= g)|(?<=g)\d+", "N", title))

    shown = {kind(found) for found in re.findall(r"(?:aqd|gunicorn): .+?(?=\s{2}|$)", drawing, re.MULTILINE)}
    here = {kind(each.title) for each in [processes.look(world.daemon.pid), *world.daemon.tree()] if each}
    here.discard("gunicorn: worker [aqd.api]")
    assert shown == here


@check("A handler in ten lines")
def the_handler(world: World, output: str) -> None:
    assert re.search(r"^ plugin +greet +ok +greet", output, re.MULTILINE)
    assert "generation 2 serves" in output
    job = int(output.split()[-1])
    result = world.jobs.wait(job, "COMPLETED")["result"]
    assert (result["text"], result["attempt"]) == ("Hello World", 1)


@check("A handler in ten lines", 1)
def the_list(_world: World, output: str) -> None:
    assert "generate_pdf" in output
    assert "COMPLETED" in output


@check("A handler in ten lines", 2)
def the_failure(world: World, output: str) -> None:
    assert "KeyError: 'name'" in output
    assert "Traceback" in output
    job = int(re.search(r"^job +(\d+)", output, re.MULTILINE)[1])  # type: ignore[index]
    assert world.jobs.wait(job, "FAILED")["attempt"] == 3
    done = world.daemon.aqd("jobs", "retry", str(job))
    assert done.stdout == f"job {job} is QUEUED\n", done.stderr
    assert world.jobs.wait(job, "FAILED")["attempt"] == 3


@check("Several workers")
def several_at_once(world: World, output: str) -> None:
    assert " greet " in output
    ids = [int(id) for id in re.findall(r'^{"id":"(\d+)"', output, re.MULTILINE)]
    assert world.jobs.wait_all(ids, 60) == {"COMPLETED": 8}
    workers = {world.jobs.get(job)["result"]["worker"] for job in ids}
    assert len(workers) > 1, "one worker ran all of them"


@check("Several workers", 1)
def their_results(_world: World, output: str) -> None:
    assert len(output.splitlines()) == 8
    assert '"worker"' in output


@check("Cancel one")
def a_running_job_cancelled(world: World, output: str) -> None:
    job = int(re.search(r"^job (\d+) is CANCELLED$", output, re.MULTILINE)[1])  # type: ignore[index]
    assert world.jobs.get(job)["state"] == "CANCELLED"
    assert [(a["kind"], a["reason"]) for a in world.jobs.attempts(job)] == [("cancelled", "cancel")]


@check("Kill things and see")
def a_worker_killed(world: World, output: str) -> None:
    assert "worker killed by signal 9 (SIGKILL)" in output
    job = int(output.split()[0])
    row = world.jobs.wait(job, "COMPLETED", 40)
    assert row["attempt"] == 2
    assert [(a["kind"], a["signal"]) for a in world.jobs.attempts(job)] == [("crashed", 9)]


@check("Kill things and see", 1)
def the_dispatcher_killed(world: World, output: str) -> None:
    world.daemon.wait_for("dispatcher ended", status="signal 9 (SIGKILL)")
    assert world.jobs.wait(int(output), "COMPLETED", 40)["attempt"] == 1


@check("Kill things and see", 2)
def the_master_killed(world: World, output: str) -> None:
    world.daemon.killed = True
    assert world.daemon.wait_exit() == -9
    assert world.jobs.state(int(output)) == "PROCESSING"
    world.daemon.start()
    row = world.jobs.wait(int(output), "COMPLETED", 60)
    assert row["attempt"] == 2
    assert [a["kind"] for a in world.jobs.attempts(int(output))] == ["lost"]


@check("Submitting jobs")
def with_options(world: World, output: str) -> None:
    row = world.jobs.get(int(json.loads(output)["id"]))
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("mail", 10, 8)
    assert (row["run_at"] - row["created_at"]).total_seconds() == 3600
    assert (row["tags"], row["meta"]) == (["customer:7"], {"asked_by": "shop"})


@check("Idempotency keys")
def twice_with_a_key(_world: World, output: str) -> None:
    first, second = [json.loads(line) for line in output.splitlines()]
    assert first["id"] == second["id"]
    assert (first["outcome"], second["outcome"]) == ("created", "existing")


@check("Many at once")
def batches(world: World, output: str) -> None:
    answer, *ids = output.splitlines()
    results = json.loads(answer)["results"]
    assert [each["status"] for each in results] == [201, 400, 201]
    assert results[1]["problem"]["field"] == "type"
    assert len(ids) == 2
    assert (world.jobs.get(int(ids[0]))["priority"], world.jobs.get(int(ids[1]))["tags"]) == (5, ["bulk"])


@check("Waiting for a job")
def waited_for(_world: World, output: str) -> None:
    answer, said = output.splitlines()
    assert json.loads(answer)["status"] == "COMPLETED"
    assert said == f"job {json.loads(answer)['id']} is COMPLETED"


@check("Looking at jobs")
def filtered(_world: World, output: str) -> None:
    greeted, tagged, queued, *tables = output.splitlines()
    assert all(job["type"] == "greet" for job in json.loads(greeted)["jobs"])
    found = json.loads(tagged)["jobs"]
    assert {job["status"] for job in found} == {"QUEUED", "CANCELLED"}
    assert all(set(job) == {"id", "status", "tags", "payload"} for job in found)
    assert set(json.loads(queued)) == {"jobs", "next_cursor", "window"}
    assert "queue" in json.loads(queued)["window"]["reason"]
    assert sum("KeyError: 'name'" in line for line in tables) >= 2


@check("Looking at jobs", 0, "sql")
def looking(_world: World, output: str) -> None:
    assert "KeyError: 'name'" in output
    assert "customer:7" in output
    assert "lost" in output
    assert "running" in output


@check("Changing jobs and queues")
def many_changed(_world: World, output: str) -> None:
    tried, done, records, deleted = output.splitlines()
    assert json.loads(tried)["dry_run"] is True
    changed = json.loads(done)["changed"]
    assert changed == json.loads(tried)["matched"] > 0
    record = json.loads(records)["failed_jobs"][0]
    assert (record["resolution"], record["discarded_by"]) == ("discarded", "admin")
    assert record["note"] == "no name, nobody to greet"
    assert deleted == "1 job deleted"


@check("Who goes first")
def queues_changed(_world: World, output: str) -> None:
    assert [line.partition(" is ")[2] for line in output.splitlines()] == [
        "served, at most 2 of its jobs at a time",
        "paused, at most 2 of its jobs at a time",
        "served, at most 2 of its jobs at a time",
    ]


@check("Figures")
def figures(_world: World, output: str) -> None:
    (queue,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert (queue["queue"], queue["max_running"]) == ("mail", 2)
    text = output[output.rindex("\n{") :].partition("}\n")[2]
    named = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {"aqd_jobs_total", "aqd_api_requests_total", "aqd_slots"} <= named


@check("Keys")
def a_new_key(_world: World, output: str) -> None:
    shown = tomllib.loads(PAGE.block("Keys", "toml").text)["keys"]["billing"]
    made = tomllib.loads(output[output.index("[keys") :])["keys"]["billing"]
    assert list(made) == list(shown)
    assert made["scopes"] == shown["scopes"]


@check("Cancelling jobs")
def a_waiting_job_cancelled(world: World, output: str) -> None:
    answer = json.loads(output)
    assert (answer["status"], world.jobs.get(int(answer["id"]))["attempt"]) == ("CANCELLED", 0)


@check("SQL", 0, "sql")
def in_a_transaction(world: World, output: str) -> None:
    job = int(re.search(r"\d+", output)[0])  # type: ignore[index]
    assert world.jobs.wait(job, "COMPLETED")["result"]["text"] == "Hello SQL"


@check("SQL", 1, "sql")
def the_small_role(world: World, _output: str) -> None:
    with psycopg.connect(world.database_url, autocommit=True) as conn:
        conn.execute(f"set role {world.roles[-1]}")
        (job,) = conn.execute("select aqd.enqueue('greet', '{\"name\": \"role\"}', tags => '{a}')").fetchone()  # type: ignore[misc]
        world.jobs.wait(job, "COMPLETED")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("insert into aqd.jobs (type, run_at) values ('greet', now())")


@check("SQL", 2, "sql")
def the_larger_role(world: World, _output: str) -> None:
    with psycopg.connect(world.database_url, autocommit=True) as conn:
        conn.execute(f"set role {world.roles[-1]}")

        def made(**options: Any) -> EnqueuedJob:
            return client.enqueue(conn, "greet", {"name": "role", "seconds": 50}, **options)

        later = made(delay_s=3600, idempotency_key="role")
        assert made(delay_s=3600, idempotency_key="role").outcome == "existing"
        replaced = made(delay_s=1800, idempotency_key="role", on_conflict="replace")
        assert (replaced.id, replaced.outcome) == (later.id, "replaced")
        assert [each.id for each in client.jobs(conn, type="greet", state="QUEUED")][-1] <= later.id
        assert client.cancel(conn, later.id).state == "CANCELLED"
        running = made()
        world.jobs.wait(running.id, "PROCESSING")
        assert conn.execute("select aqd.cancel(%s)", (running.id,)).fetchone() == ("PROCESSING",)
        assert client.wait(conn, running.id, 60).state == "CANCELLED"


@check("Python", 0, "python")
def the_client(world: World, output: str) -> None:
    first, *others = output.splitlines()
    job, state = first.split()
    later, *found = others
    assert state == "COMPLETED"
    assert later == "CANCELLED"
    assert {line.split()[1] for line in found} == {"QUEUED", "CANCELLED"}
    row = world.jobs.wait(int(job), "COMPLETED")
    assert (row["result"]["text"], row["priority"]) == ("Hello Python", 5)
    assert world.jobs.conn.execute("select item from orders order by item").fetchall() == [
        {"item": "book"},
        {"item": "lamp"},
    ]


@check("Python", 1, "python")
def the_http_client(world: World, output: str) -> None:
    told, listed = output.splitlines()
    id = told.split()[0]
    assert "Hello HTTP" in told
    assert listed == f"['{id}']"
    wait_until(lambda: world.jobs.conn.execute("select from aqd.jobs where type = 'noop'").fetchone() is None)


@check("Handlers", 0, "toml")
def the_example_plugin(world: World, _output: str) -> None:
    assert world.submit("shout", {"text": "hello"})["result"] == "HELLO?"
    refused = world.submit("shout", {}, "FAILED")
    assert (refused["attempt"], refused["last_error"]) == (1, "payload.text is missing")
    assert world.submit("wait", {})["result"] == {"attempt": 2}


@check("Limits of a job")
def the_careful_plugin(world: World, output: str) -> None:
    count, crash = [int(word) for word in re.findall(r"^(\d+)$", output, re.MULTILINE)]
    assert "counted 3" in output
    assert "poison job, crashed 2 times" in output
    for line in ("about to crash", "Fatal Python error: Segmentation fault", "in string_at"):
        assert line in output
    assert world.jobs.get(count)["state"] == "COMPLETED"
    assert world.jobs.get(crash)["state"] == "FAILED"
    attempts = [(a["kind"], a["reason"], a["signal"]) for a in world.jobs.attempts(crash)]
    assert attempts == [("crashed", "signal", 11)] * 2


@check("Handlers", 2, "toml")
def the_hooks(world: World, _output: str) -> None:
    job = world.submit("noop", {})
    found = world.daemon.wait_for(
        lambda line: str(line["event"]).startswith("job took "), job_id=str(job["id"])
    )
    assert found["event"].endswith("s: completed")


@check("Handlers")
def the_allowed_program(world: World, output: str) -> None:
    assert world.jobs.wait(int(output), "COMPLETED")["result"]["stdout"] == "hello\n"
