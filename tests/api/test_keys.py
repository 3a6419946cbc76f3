"""Named keys and scopes; what is open where; read-only mode (F69). The log: test_audit.py."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqd import keys
from aqd.errors import Exit
from tests.fixtures.api import ADMIN_KEY, ROOT, Answer, Api, running_api
from tests.fixtures.postgres import Postgres, free_port
from tests.fixtures.processes import wait_until

SUBMIT, READ, BOTH, ADMIN = (f"{word}-0123456789abcdef" for word in ("submit", "read", "both", "admin"))
NAMED = f"app:submit:{SUBMIT}, grafana:read:{READ},both:submit+read:{BOTH},ops:admin:{ADMIN}"
JOB = {"type": "mail", "payload": {}}


def toml(**entries: tuple[str, list[str]]) -> str:
    """A file of keys."""
    return "\n".join(
        f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nscopes = {json.dumps(scopes)}'
        for name, (key, scopes) in entries.items()
    )


@pytest.fixture(scope="module")
def named(pg: Postgres) -> Iterator[Api]:
    """An API with named keys and an admin key."""
    with running_api(pg, AQD_API_KEYS=NAMED) as api:
        yield api


def submit(api: Api, **headers: str) -> Answer:
    return api.post("/jobs", JOB, **headers)


# --- scopes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "may_submit", "may_read", "may_admin"),
    [
        (SUBMIT, True, False, False),
        (READ, False, True, False),
        (BOTH, True, True, False),
        (ADMIN, True, True, True),
        (ADMIN_KEY, True, True, True),
    ],
)
@pytest.mark.parametrize("header", ["x-admin-key", "x-api-key", "authorization"])
def test_scopes(named: Api, key: str, may_submit: bool, may_read: bool, may_admin: bool, header: str) -> None:
    value = key.encode() if header != "authorization" else b"Bearer " + key.encode()
    body = json.dumps(JOB).encode()
    for method, path, may in (
        ("POST", "/jobs", may_submit),
        ("POST", "/v1/jobs", may_submit),
        ("GET", "/jobs", may_read),
        ("HEAD", "/jobs", may_read),
        ("GET", "/admin/failed-jobs", may_admin),
        ("POST", "/jobs/999/retry", may_admin),
    ):
        headers = {header: value, "content-type": "application/json"}
        answer = named.request(
            method, path, body if path.endswith("/jobs") and method == "POST" else None, headers
        )
        assert (answer.status != 403) == may, (method, path, answer)
        assert answer.status not in (401, 500)
        if not may and method != "HEAD":
            problem = answer.problem(403, "has not the scope")
            assert problem["type"] == "urn:aqd:scope-missing"
            assert problem["scope"] in ("submit", "read", "admin")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "wrong",
        SUBMIT[:-1],
        SUBMIT + "x",
        SUBMIT.upper(),
        "app",
        hashlib.sha256(SUBMIT.encode()).hexdigest(),
        f"{SUBMIT},{SUBMIT}",
        "aqd_" + "A" * 8000,
    ],
)
def test_a_key_that_is_none(named: Api, key: str) -> None:
    for answer in (
        submit(named, x_api_key=key),
        named.get("/jobs", x_api_key=key),
        named.get("/jobs?limit=0", x_api_key=key),
    ):
        assert answer.problem(401, "API key is")["type"] == "urn:aqd:unauthorized"
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_without_a_key(named: Api) -> None:
    submit(named).problem(401, "the API key is missing")
    named.get("/jobs").problem(401, "the API key is missing")
    named.get("/admin/failed-jobs").problem(401, "the admin key is missing")
    assert named.get("/health").status == 200
    assert named.get("/openapi.json").status == named.get("/docs").status == 200
    assert named.request("OPTIONS", "/jobs").status == 200


def test_one_key_only(named: Api) -> None:
    named.get("/jobs", x_api_key=READ, x_admin_key=ADMIN).problem(400, "once")
    named.get("/jobs", x_api_key=READ, authorization=f"Bearer {READ}").problem(400, "once")


def test_a_key_in_the_query_is_no_key(named: Api) -> None:
    answer = named.get(f"/jobs?x-api-key={READ}")
    assert READ.encode() not in answer.body
    answer.problem(401)


def test_idempotency_keys_are_those_of_a_name(named: Api) -> None:
    headers = {"idempotency_key": "one"}
    first = submit(named, x_api_key=SUBMIT, **headers)
    again = submit(named, x_api_key=SUBMIT, **headers)
    other = submit(named, x_api_key=BOTH, **headers)
    assert (first.status, again.status, other.status) == (201, 200, 201)
    assert first.json["id"] == again.json["id"] != other.json["id"]


def test_no_key_has_the_scope(start_api: Callable[..., Api]) -> None:
    api = start_api(ADMIN_API_KEY="", AQD_API_KEYS=f"app:submit:{SUBMIT}")
    for key in ("", SUBMIT):
        assert api.get("/jobs", x_api_key=key).problem(403)["type"] == "urn:aqd:scope-missing"
    problem = api.get("/admin/failed-jobs").problem(403, "no admin key")
    assert problem["type"] == "urn:aqd:admin-key-not-configured"
    assert submit(api, x_api_key=SUBMIT).status == 201


def test_on_loopback_without_named_keys_only_admin_needs_one(start_api: Callable[..., Api]) -> None:
    api = start_api()
    for headers in (
        {},
        {"x_api_key": "whatever"},
        {"authorization": "Basic eDp5"},
        {"x_admin_key": ADMIN_KEY[:4]},
    ):
        assert submit(api, **headers).status == 201
        assert api.get("/jobs", **headers).status == 200
        assert api.get("/admin/failed-jobs", **headers).status == 401


# --- the file -------------------------------------------------------------------------------------


def test_a_file_of_keys_is_read_again_by_sighup(start_api: Callable[..., Api], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(toml(app=(SUBMIT, ["submit"]), old=(READ, ["read"])))
    api = start_api(AQD_API_KEYS_FILE=str(file))
    assert api.get("/jobs", x_api_key=READ).status == 200
    assert submit(api, x_api_key=SUBMIT).status == 201

    file.write_text('[keys.app]\nsha256 = "oops"\n')
    api.process.send_signal(signal.SIGHUP)
    wait_until(lambda: [line for line in api.log if "configuration refused" in line])
    assert api.get("/jobs", x_api_key=READ).status == 200

    for text in ("", "# nothing\n"):  # somebody cut it short
        api.log.clear()
        file.write_text(text)
        api.process.send_signal(signal.SIGHUP)
        wait_until(lambda: [line for line in api.log if "configuration refused" in line])
        assert api.get("/jobs").status == 401
        assert api.get("/jobs", x_api_key=READ).status == 200

    file.write_text(toml(new=(BOTH, ["read"])))
    api.process.send_signal(signal.SIGHUP)
    wait_until(lambda: api.get("/jobs", x_api_key=BOTH).status == 200)
    wait_until(lambda: api.get("/jobs", x_api_key=READ).status == 401)


def refusal(tmp_path: Path, file: str | None = None, **env: str) -> str:
    """What ``aqd api`` says when it does not start."""
    if file is not None:
        (tmp_path / "keys.toml").write_bytes(file.encode("latin-1"))
        env["AQD_API_KEYS_FILE"] = str(tmp_path / "keys.toml")
    found = run_api(tmp_path, **env)
    assert found.returncode == Exit.CONFIG, found
    assert "Traceback" not in found.stderr
    assert all(line.startswith("aqd: ") for line in found.stderr.splitlines() if not line.startswith("{"))
    return found.stderr


def run_api(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aqd", "api", *arguments],
        env=environment(tmp_path, **env),
        capture_output=True,
        text=True,
        timeout=60,
    )


def environment(tmp_path: Path, **env: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "AQD_API_WORKERS": "1",
        "PORT": str(free_port()),
        **env,
    }


HASH = "0" * 64


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("[keys.app", "is not valid TOML"),
        ("\xff", "is not UTF-8"),
        (f'sha256 = "{HASH}"', "[keys.NAME]"),
        (f'[app]\nsha256 = "{HASH}"\nscopes = ["read"]', "[keys.NAME]"),
        ("[keys]\napp = 1", "keys.app: must be a table"),
        (f'[keys."a b"]\nsha256 = "{HASH}"\nscopes = ["read"]', "a key's name must be"),
        (f'[keys.admin]\nsha256 = "{HASH}"\nscopes = ["read"]', "is the name of api.admin_api_key"),
        (f'[keys.app]\nsha256 = "{HASH}"', "scopes must be a list of"),
        (f'[keys.app]\nsha256 = "{HASH}"\nscopes = []', "scopes must be a list of"),
        (f'[keys.app]\nsha256 = "{HASH}"\nscopes = "read"', "scopes must be a list of"),
        (f'[keys.app]\nsha256 = "{HASH}"\nscopes = ["write"]', "scopes must be a list of"),
        (f'[keys.app]\nsha256 = "{HASH}"\nscopes = [["read"]]', "scopes must be a list of"),
        ('[keys.app]\nscopes = ["read"]', "sha256 must be the 64"),
        (f'[keys.app]\nsha256 = "{HASH[1:]}"\nscopes = ["read"]', "sha256 must be the 64"),
        ('[keys.app]\nsha256 = 7\nscopes = ["read"]', "sha256 must be the 64"),
        (f'[keys.app]\nsha256 = "{keys.digest("")}"\nscopes = ["read"]', "of an empty key"),
        (f'[keys.app]\nkey = "hunter2hunter2"\nsha256 = "{HASH}"\nscopes = ["read"]', "only its sha256"),
        (f'[keys.app]\nsha256 = "{HASH}"\nscopes = ["read"]\nexpires = 2026-01-01', "no such field: expires"),
        (toml(a=(READ, ["read"]), b=(READ, ["admin"])), "are the same key"),
        ("#" * (keys.MAX_FILE_BYTES + 1), "larger than 1 MiB"),
        ("x = " + "[" * 5000, "is not valid TOML"),
        ("", "holds no key"),
        ("# [keys.app]\n", "holds no key"),
        ("[keys]\n", "holds no key"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, file: str, word: str) -> None:
    (tmp_path / "keys.toml").write_bytes(file.encode("latin-1"))
    with pytest.raises(keys.ConfigError, match=r"keys\.toml: |API keys: ") as refused:
        keys.load(keys.Api(keys_file=str(tmp_path / "keys.toml")), None)
    assert word in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_an_empty_file_of_keys_opens_nothing(tmp_path: Path) -> None:
    assert "keys.toml: holds no key" in refusal(tmp_path, "")
    assert "api.keys: holds no key" in refusal(tmp_path, AQD_API_KEYS=" , ")


def test_all_mistakes_are_told_at_once_and_by_the_service(tmp_path: Path) -> None:
    text = f'[keys.one]\nsha256 = "x"\n[keys.two]\nscopes = ["read"]\n[keys.ok]\nsha256 = "{HASH}"\nscopes = ["read"]'
    said = refusal(tmp_path, text)
    assert said.count("keys.one") == 2
    assert said.count("keys.two") == 1
    assert "keys.ok" not in said


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path, AQD_API_KEYS_FILE=str(tmp_path / "none"))
    assert "Is a directory" in refusal(tmp_path, AQD_API_KEYS_FILE=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("app", "must be written name:submit+read:KEY"),
        ("app:read", "must be written name:submit+read:KEY"),
        (f"app::{READ}", "scopes must be a list of"),
        (f"app:write:{READ}", "scopes must be a list of"),
        (f"app:read+:{READ}", "scopes must be a list of"),
        (f":read:{READ}", "a key's name must be"),
        (f"admin:read:{READ}", "is the name of api.admin_api_key"),
        ("app:read:", "at least 16"),
        ("app:read:short", "at least 16"),
        ("app:read:0123456789 abcdef", "at least 16"),
        ("app:read:0123456789äbcdef", "at least 16"),
        ("app:read:<put-a-long-key-here>", "placeholder"),
        ("app:read:${BILLING_API_KEY}", "placeholder"),
        (f"app:read:{READ},app:submit:{SUBMIT}", "two keys called app"),
        (f"app:read:{READ},two:submit:{READ}", "are the same key"),
    ],
)
def test_keys_in_the_environment_that_are_refused(text: str, word: str) -> None:
    with pytest.raises(keys.ConfigError) as refused:
        keys.load(keys.Api(keys=text), None)
    assert word in str(refused.value)
    assert READ not in str(refused.value)
    assert "short" not in str(refused.value)


def test_the_same_name_in_file_and_environment(tmp_path: Path) -> None:
    (tmp_path / "k").write_text(toml(app=(READ, ["read"])))
    with pytest.raises(keys.ConfigError, match="two keys called app"):
        keys.load(keys.Api(keys_file=str(tmp_path / "k"), keys=f"app:submit:{SUBMIT}"), None)


def test_a_named_key_must_not_be_the_admin_key(tmp_path: Path) -> None:
    """It would silently be an admin's."""
    (tmp_path / "k").write_text(toml(app=(READ, ["read"])))
    with pytest.raises(keys.ConfigError, match="app and admin are the same key"):
        keys.load(keys.Api(keys_file=str(tmp_path / "k"), admin_api_key=f" {READ}"), None)
    said = refusal(tmp_path, AQD_API_KEYS=f"app:read:{READ}", ADMIN_API_KEY=READ)
    assert "app and admin are the same key" in said
    assert READ not in said


@pytest.mark.parametrize(
    "key",
    [
        "changeme",
        "Change-Me!",
        "change_this",
        "<your key>",
        "your-admin-key",
        "${ADMIN_API_KEY}",
        "$KEY",
        "xxxxxxxx",
        "{{ admin_key }}",
        "placeholder",
        "TODO",
        *(
            "admin",
            "Secret",
            "password",
            "Passw0rd",
            "test",
            "key",
            "dummy",
            "sample",
            "admin123",
            "test-key",
        ),
        *("my_secret_key", "super-secret", "replace-with-a-long-key", "replace_me_please", "ReplaceThis"),
        *(
            "insert-key-here",
            "insert your key",
            "ADMIN_API_KEY",
            "MY_APP_API_KEY",
            "…",
            "aqd_…",
            "aqd_...",
            "...",
        ),
    ],
)
def test_a_key_that_was_only_copied_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(keys.ConfigError, match="placeholder"):
        keys.load(keys.Api(admin_api_key=key), None)


@pytest.mark.parametrize(
    "key",
    [
        *(SUBMIT, ADMIN, ADMIN_KEY, "the-key-of-the-story", "another key than that", "correct horse battery"),
        *(
            "keystone-9Q",
            "insertion",
            "replacement-part",
            "tested-by-fire",
            "administrator-7f3a",
            "aqd_admin_key_9Q4r",
        ),
    ],
)
def test_keys_that_only_look_like_a_copied_one(key: str) -> None:
    assert not keys.is_placeholder(key)


def test_a_fresh_key_is_no_placeholder() -> None:
    assert not [key for key in (keys.new() for _ in range(2000)) if keys.is_placeholder(key)]


def test_a_short_admin_key_is_not_for_a_network(tmp_path: Path) -> None:
    for key in ("short-one", "fifteen-chars-x"):
        keys.load(keys.Api(admin_api_key=key), None)
        for insecure in (False, True):
            with pytest.raises(keys.ConfigError, match="at least 16 characters") as refused:
                keys.load(keys.Api(admin_api_key=key, insecure=insecure), "0.0.0.0:4000")
            assert key not in str(refused.value)
    keys.load(keys.Api(admin_api_key="sixteen-chars-xx"), "0.0.0.0:4000")
    said = refusal(tmp_path, AQD_API_HOST="0.0.0.0", ADMIN_API_KEY="fifteen-chars-x")
    assert "api.admin_api_key: " in said


def test_a_short_admin_key_is_warned_of_on_this_machine(start_api: Callable[..., Api]) -> None:
    for key, count in (("fifteen-chars-x", 1), ("sixteen-chars-xx", 0)):
        api = start_api(ADMIN_API_KEY=key)
        wait_until(lambda api=api: answers(api))
        lines = [line for line in api.log if "the admin key is short" in line]
        assert [json.loads(line)["level"] for line in lines] == ["warning"] * count


def test_insecure_opens_nothing_where_there_is_any_key() -> None:
    where = "0.0.0.0:4000"
    assert keys.load(keys.Api(insecure=True), where).open
    assert not keys.load(keys.Api(insecure=True, admin_api_key=ADMIN), where).open
    assert not keys.load(keys.Api(insecure=True, keys=f"app:submit:{SUBMIT}"), where).open
    assert keys.load(keys.Api(insecure=True, admin_api_key=ADMIN), None).open
    assert not keys.load(keys.Api(insecure=True, keys=f"app:submit:{SUBMIT}"), None).open


def test_a_placeholder_stops_the_service(tmp_path: Path) -> None:
    said = refusal(tmp_path, ADMIN_API_KEY="changeme")
    assert "api.admin_api_key" in said
    assert "changeme" not in said


def test_check_reads_the_keys_too(tmp_path: Path) -> None:
    def findings(**env: str) -> list[tuple[str, str]]:
        found = subprocess.run(
            [sys.executable, "-m", "aqd", "check", "--json"],
            env=environment(tmp_path, **env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        rows = json.loads(found.stdout)
        return [(row["result"], row["reason"]) for row in rows if row["what"] == "keys"]

    assert findings(AQD_API_KEYS=NAMED) == [("ok", "app, grafana, both, ops")]
    [(result, reason)] = findings(AQD_API_KEYS="app:read:short")
    assert (result, "at least 16" in reason) == ("failed", True)
    [(result, reason)] = findings(AQD_API_HOST="0.0.0.0")
    assert (result, "without any key" in reason) == ("failed", True)


# --- where it listens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("127.0.0.1", None),
        ("127.8.8.8", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("0.0.0.0", "0.0.0.0:"),
        ("::", "[::]:"),
        ("::ffff:0.0.0.0", "[::ffff:0.0.0.0]:"),
    ],
)
def test_what_counts_as_this_machine(address: str, shown: str | None) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        try:
            listener.bind((address, 0))
        except OSError as error:
            pytest.fail(f"{address}: {error}")
        found = keys.beyond([listener])
    assert found is None if shown is None else found is not None and found.startswith(shown)


def test_a_unix_socket_is_this_machine(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert keys.beyond([listener]) is None


@pytest.mark.parametrize("key", ["", "   ", "\n"])
def test_a_blank_key_is_none(key: str) -> None:
    with pytest.raises(keys.ConfigError, match="without any key"):
        keys.load(keys.Api(admin_api_key=key, keys=key), "0.0.0.0:4000")


def test_beyond_this_machine_without_a_key_it_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    said = refusal(tmp_path, AQD_API_HOST="0.0.0.0", ADMIN_API_KEY_FILE=str(tmp_path / "secret"))
    assert "without any key" in said
    assert "--insecure" in said


def test_nor_on_a_socket_that_was_passed_to_it(tmp_path: Path) -> None:
    """The socket decides, not api.host: systemd and the daemon pass one."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        found = subprocess.run(
            [sys.executable, "-m", "aqd.api.server", "--fd", str(listener.fileno())],
            env=environment(tmp_path),
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == Exit.CONFIG
        assert "without any key" in found.stderr
        # As systemd does it: the variables say descriptor 3 and this very process.
        script = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.set_inheritable(3, True)\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'aqd', 'api'])"
        )
        found = subprocess.run(
            [sys.executable, "-c", script, str(listener.fileno())],
            env=environment(tmp_path),
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == Exit.CONFIG, found
        assert "without any key" in found.stderr


def test_the_daemon_with_its_api_does_not_start_either(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "aqd", "run", "--with-api"],
        env=environment(tmp_path, AQD_API_HOST="0.0.0.0", AQD_DAEMON_RUNTIME_DIR=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == Exit.CONFIG, found
    assert "without any key" in found.stderr
    assert "Traceback" not in found.stderr


@contextlib.contextmanager
def serving(tmp_path: Path, *arguments: str, **env: str) -> Iterator[Api]:
    """``aqd api`` on all addresses of this machine."""
    given = environment(tmp_path, AQD_API_HOST="0.0.0.0", **env)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "aqd", "api", *arguments],
            env=given,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    api: Any = Api.__new__(Api)
    api.port = int(given["PORT"])
    try:
        wait_until(lambda: answers(api) or process.poll() is not None, 60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield api
    finally:
        process.terminate()
        process.wait(60)


def answers(api: Api) -> bool:
    try:
        return api.get("/openapi.json").status == 200
    except OSError:
        return False


def test_beyond_this_machine_with_the_admin_key_everything_needs_it(
    tmp_path: Path, database_url: str
) -> None:
    with serving(tmp_path, DATABASE_URL=database_url, ADMIN_API_KEY="a-good-long-enough-one") as api:
        submit(api).problem(401)
        api.get("/jobs").problem(401)
        assert submit(api, x_api_key="a-good-long-enough-one").status == 201
        assert api.get("/jobs", x_admin_key="a-good-long-enough-one").status == 200
        assert api.get("/health").status == 200


def test_beyond_this_machine_with_insecure(tmp_path: Path, database_url: str) -> None:
    with serving(tmp_path, "--insecure", DATABASE_URL=database_url) as api:
        assert submit(api).status == 201
        assert api.get("/jobs").status == 200
        api.get("/admin/failed-jobs").problem(403, "no admin key")
    assert "everybody who reaches this address" in (tmp_path / "log").read_text()


# --- read-only ------------------------------------------------------------------------------------


def test_read_only(start_api: Callable[..., Api]) -> None:
    api = start_api(AQD_API_READ_ONLY="true")
    with psycopg.connect(api.database_url, autocommit=True) as conn:
        job = conn.execute("select aqd.enqueue('mail')").fetchone()
        assert job is not None
        problem = submit(api).problem(403, "read-only")
        assert problem["type"] == "urn:aqd:read-only"
        for action in ("retry", "cancel"):
            api.admin("POST", f"/jobs/{job[0]}/{action}").problem(403, "read-only")
        api.post(f"/jobs/{job[0]}/cancel").problem(401)
        assert (
            api.get("/jobs").status == api.get(f"/jobs/{job[0]}").status == api.get("/health").status == 200
        )
        assert conn.execute("select count(*), min(state) from aqd.all_jobs").fetchall() == [(1, "QUEUED")]
