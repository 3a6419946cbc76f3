"""The contract: what /openapi.json says is what the API does, and nothing changes in it unseen."""

import html.parser
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openapi_spec_validator
import psycopg
import pytest

from aqd.api import openapi, problems
from aqd.api.endpoint import Endpoint
from aqd.api.routes import ENDPOINTS
from tests.fixtures.api import ROOT, Api, running_api
from tests.fixtures.postgres import Postgres

COPY = Path(__file__).parent / "openapi.json"
RENEW = "python -m aqd.api.openapi > tests/api/openapi.json"
KEY = "a-key-for-the-contract"


@pytest.fixture(scope="module")
def keyed(pg: Postgres) -> Iterator[Api]:
    """Named keys, so that every route wants one."""
    with running_api(pg, AQD_API_KEYS=f"contract:admin:{KEY}", LOG_LEVEL="warning") as api:
        yield api


def concrete(endpoint: Endpoint) -> str:
    """A path of the route. There is no such job."""
    return re.sub(r"\{\w+(:\w+)?\}", "1", endpoint.path)


def test_it_is_openapi(shared_api: Api) -> None:
    answer = shared_api.get("/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    document = answer.json
    openapi_spec_validator.validate(document)
    assert document["openapi"].startswith("3.1.")
    assert shared_api.get("/v1/openapi.json").body == answer.body
    for endpoint in ENDPOINTS:
        operation = document["paths"][openapi._template(endpoint.path)][endpoint.method.lower()]
        assert operation["summary"]
        assert not operation["summary"].endswith(".")
    names = [each.name for each in ENDPOINTS]
    assert len(set(names)) == len(names)


def test_the_committed_copy_is_up_to_date() -> None:
    assert openapi.text(ENDPOINTS) == COPY.read_bytes(), f"the contract has changed; if it should: {RENEW}"


def test_the_copy_can_be_renewed_by_that_line() -> None:
    found = subprocess.run(
        [sys.executable, *RENEW.split(" > ")[0].split()[1:]], cwd=ROOT, capture_output=True, check=True
    )
    assert found.stdout == openapi.text(ENDPOINTS)


def test_all_problem_types_are_listed() -> None:
    used = {kind for kind, _ in problems._TITLES.values()}
    for path in sorted((ROOT / "aqd" / "api").rglob("*.py")):
        used |= set(re.findall(r"""\bkind=(?:"([a-z-]+)")""", path.read_text()))
        used |= set(re.findall(r"urn:aqd:([a-z-]+)", path.read_text()))
    assert used == set(problems.KINDS)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.name)
def test_every_route_answers_options_and_head(shared_api: Api, endpoint: Endpoint) -> None:
    for prefix in ("", "/v1"):
        path = prefix + concrete(endpoint)
        options = shared_api.request("OPTIONS", path)
        assert (options.status, options.body) == (200, b"")
        allowed = options.headers["allow"].split(", ")
        assert endpoint.method in allowed
        assert ("HEAD" in allowed) == ("GET" in allowed)
        wrong = shared_api.request("PUT", path)
        assert set(wrong.problem(405)["allowed"]) == {*allowed, "OPTIONS"}
    if endpoint.method == "GET":
        got, head = shared_api.get(path), shared_api.request("HEAD", path)
        assert head.body == b""
        assert head.status == got.status
        assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.name)
def test_every_route_wants_the_key_that_the_contract_says(keyed: Api, endpoint: Endpoint) -> None:
    operation = keyed.get("/openapi.json").json["paths"][openapi._template(endpoint.path)]
    scope = operation[endpoint.method.lower()].get("x-aqd-scope")
    answer = keyed.request(endpoint.method, concrete(endpoint), None if endpoint.method == "GET" else b"{}")
    assert (answer.status == 401) == (scope is not None), answer
    changing = endpoint.method != "GET"
    assert endpoint.changes == changing, "the audit log and the read-only mode go by this"


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(shared_api: Api) -> None:
    answer = shared_api.get("/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    page = _Page()
    page.feed(answer.body.decode())
    assert not page.tags & {"script", "link", "img", "iframe", "object", "form", "base"}
    assert not [name for name in page.attributes if name.startswith("on") or name == "style"]
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link == "openapi.json" or link.removeprefix("#") in page.ids, link
    for endpoint in ENDPOINTS:
        assert endpoint.name in page.ids
        assert f"/v1{openapi._template(endpoint.path)}" in page.text
    assert {f"urn:aqd:{kind}" for kind in problems.KINDS} <= set(re.findall(r"urn:aqd:[a-z-]+", page.text))


def fill(url: str) -> None:
    """Jobs in every state, so that there is something to find and to change."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "select aqd.enqueue('mail', jsonb_build_object('n', n), tags => array['a']) from generate_series(1, 60) as n"
        )
        conn.execute(
            """with failed as (
                   update aqd.jobs set state = 'FAILED', attempt = 1, last_error = 'boom ' || id where id % 2 = 1
                   returning id, type, queue, last_error)
               insert into aqd.failed_jobs (job_id, failed_at, attempts, type, queue, kind, error)
               select id, now(), 1, type, queue, 'failed', last_error from failed"""
        )
        for number in (10, 20, 30):
            conn.execute("select aqd.cancel(%s::bigint)", [number])


@pytest.mark.timeout(900)  # half a minute on an idle machine
def test_schemathesis(keyed: Api, tmp_path: Path) -> None:
    """Every check that it has, on every route, with valid and invalid requests and with chains of them. Left out:
    nothing but the character NUL in valid requests, which a schema cannot forbid and PostgreSQL cannot store."""
    fill(keyed.database_url)
    workers = keyed.wait_workers()
    # What cannot even be sent is refused, too, but with words of its own.
    (tmp_path / "schemathesis.toml").write_text(
        "[checks.negative_data_rejection]\nexpected-statuses = [400, 401, 403, 404, 405, 409, 413, 414, 415, 431]\n"
    )
    found = subprocess.run(
        [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("--config-file", str(tmp_path / "schemathesis.toml")),
            *("run", f"http://127.0.0.1:{keyed.port}/openapi.json"),
            *("--header", f"x-api-key: {KEY}", "--generation-with-security-parameters", "false"),
            *("--checks", "all", "--continue-on-failure"),
            *("--max-examples", "15", "--seed", "1", "--generation-database", "none"),
            *("--generation-allow-x00", "false", "--request-timeout", "30", "--no-color"),
        ],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.api.contract_hooks",
        },
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2000:] + keyed.tail()
    summary = found.stdout[found.stdout.index("== SUMMARY") :]
    assert "generated" in summary
    assert json.dumps(len({openapi._template(e.path) + e.method for e in ENDPOINTS})) in summary
    print(summary)
    assert keyed.workers == workers  # none was lost on the way
