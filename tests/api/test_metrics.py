"""``/queues``, ``/types``, ``/nodes`` and ``/metrics``, as those who watch them read them."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aqd import store
from aqd.config import Database
from aqd.figures import Attempt, Figures
from aqd.store import figures
from tests.fixtures.api import Api
from tests.fixtures.processes import wait_until
from tests.process.test_figures import Samples, parsed
from tests.sql.support import Queue

StartApi = Callable[..., Api]


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with store.connect(Database(url=database_url), "test", dispatcher=True) as conn:
        yield conn


@pytest.fixture
def queue(conn: psycopg.Connection[Any]) -> Queue:
    return Queue(conn)


def seen(conn: psycopg.Connection[Any], id: str = "n1", **more: Any) -> None:
    plugin = (
        '{"name": "mail", "version": "1.2", "digest": "ab12", "state": "loaded", "handlers": ["mail"],'
        ' "error": null}'
    )
    info = f'{{"busy": 3, "listener_up": true, "plugins": [{plugin}]}}'
    state = store.NodeState(id, "host", 7, "0.1", 2, 4, ["mail"], "running", info)
    store.node_seen(conn, state._replace(**more))


def fill(conn: psycopg.Connection[Any], queue: Queue) -> None:
    """A node that has run some jobs, some that wait, and a snapshot of it."""
    seen(conn)
    queue.fill(4, type="mail", queue="mail")
    queue.fill(1, type="mail", queue="mail", state="'FAILED'")
    queue.conn.execute("insert into aqd.queues (queue, paused, max_running) values ('mail', true, 5)")
    one = Figures()
    one.attempts([Attempt("mail", "mail", "completed", "", 0.5, 0.1)] * 3)
    one.attempts([Attempt("mail", "mail", "failed", "timeout", 9.0, 0.1)])
    one.statement("claim", 0.002)
    figures.add_figures(conn, "n1", one.drain())
    with conn.transaction():
        figures.refresh_stats(conn)


def scrape(api: Api) -> Samples:
    answer = api.get("/metrics")
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.body.decode())


def test_queues(api: Api, conn: psycopg.Connection[Any], queue: Queue) -> None:
    fill(conn, queue)
    (found,) = api.get("/queues").json["queues"]
    assert api.get("/queues/mail").json == found
    assert (found["queue"], found["paused"], found["max_running"], found["changed_by"]) == (
        "mail",
        True,
        5,
        None,
    )
    assert found["as_of"].endswith("Z")
    told = found["figures"]
    assert told["counts"] == {"due": 4, "scheduled": 0, "processing": 0, "failed": 1}
    assert told["oldest_due_s"] > 3000
    assert told["last_hour"] == {
        "completed": 3,
        "failed": 1,
        "cancelled": 0,
        "retried": 0,
        "interrupted": 0,
    }
    assert told["completed_per_min"] == pytest.approx(3 * told["failed_per_min"], rel=0.01)
    assert 0.25 < told["duration_s"]["p50"] < 1.1
    assert told["waiting_s"]["p99"] < 0.3


def test_types(api: Api, conn: psycopg.Connection[Any], queue: Queue) -> None:
    fill(conn, queue)
    (found,) = api.get("/types").json["types"]
    assert api.get("/v1/types/mail").json == found
    assert (found["type"], found["nodes"], found["figures"]["counts"]["due"]) == ("mail", 1, 4)


def test_nodes(api: Api, conn: psycopg.Connection[Any], queue: Queue) -> None:
    seen(conn)
    seen(conn, "n2", name="second", info=None, state="draining")
    queue.conn.execute("update aqd.nodes set seen_at = now() - interval '1 hour' where node_id = 'n2'")
    first, second = api.get("/nodes").json["nodes"]
    assert (first["node_id"], first["slots"], first["busy"], first["generation"], first["live"]) == (
        "n1",
        4,
        3,
        2,
        True,
    )
    assert first["plugins"] == [
        {
            "name": "mail",
            "version": "1.2",
            "digest": "ab12",
            "state": "loaded",
            "handlers": ["mail"],
            "error": None,
        }
    ]
    assert (second["state"], second["live"], second["busy"], second["plugins"]) == (
        "draining",
        False,
        None,
        [],
    )


def test_pages_of_names(api: Api, queue: Queue, conn: psycopg.Connection[Any]) -> None:
    for name in ("a", "b/c", "d.e"):
        queue.fill(1, queue=name)
    with conn.transaction():
        figures.refresh_stats(conn)
    names, path = [], "/queues?limit=1"
    while path:
        page = api.get(path).json
        names += [each["queue"] for each in page["queues"]]
        path = page["next_cursor"] and f"/queues?limit=1&cursor={page['next_cursor']}"
    assert names == ["a", "b/c", "d.e"]


def test_names_with_slashes(api: Api, queue: Queue, conn: psycopg.Connection[Any]) -> None:
    """%2F in a path is part of the name, as far as it was sent so."""
    queue.fill(1, type="mail/send", queue="team/a")
    with conn.transaction():
        figures.refresh_stats(conn)
    for path in ("/queues/team%2Fa", "/v1/queues/team%2fa", "/queues/team%2Fa/", "/queues/%74eam%2Fa?"):
        assert api.get(path).json["queue"] == "team/a", path
    assert api.get("/types/mail%2Fsend").json["type"] == "mail/send"
    for path in ("/queues/team/a", "/queues%2Fteam%2Fa", "/queues/team%252Fb", "/jobs/1%2F2", "/%2F"):
        api.get(path).problem(404)


def test_names_with_slashes_in_other_forms(api: Api) -> None:
    """The absolute form of a target (RFC 9112, 3.2.2) means the same; what was encoded twice is decoded once."""
    for target, name in (
        ("/queues/q%2Fz/pause", "q/z"),
        (f"http://127.0.0.1:{api.port}/queues/absolute%2Fz/pause", "absolute/z"),
        ("HTTP://x/v1/queues/absolute%2Fy/pause?", "absolute/y"),
    ):
        answer = api.admin("POST", target)
        assert (answer.status, answer.json["queue"]) == (200, name), answer
    for path in ("/queues/q%252Fz/resume", "/queues/q%2F%252Fz/resume", "/queues/q%ED%B0%AFz/resume"):
        api.admin("POST", path).problem(400)
    assert api.get("/queues/q%2Fz").json["paused"]


@pytest.mark.parametrize("path", ["/queues", "/types"])
def test_nothing_is_known_yet(path: str, shared_api: Api) -> None:
    answer = shared_api.get(path)
    assert (answer.status, answer.json) == (200, {path[1:]: [], "next_cursor": None})
    shared_api.get(f"{path}/nowhere").problem(404, "nowhere")
    assert shared_api.get("/nodes").json == {"nodes": []}


def cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("path", ["/queues", "/types"])
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("cursor=%00", "cursor"),
        ("cursor=%F0%9F%A6%86", "cursor"),
        (f"cursor={cursor('j12')}", "cursor"),
        (f"cursor={cursor('q')}", "cursor"),
        (f"cursor={cursor('q a')}", "cursor"),
        ("state=due", "state"),
    ],
)
def test_bad_questions(path: str, query: str, field: str, shared_api: Api) -> None:
    problem = shared_api.get(f"{path}?{query}").problem(400)
    assert problem["field"] == field


@pytest.mark.parametrize("name", ["%00", "a%20b", "x" * 129, "%ED%A0%80", "%F0%9F%A6%86"])
@pytest.mark.parametrize("path", ["/queues", "/types"])
def test_names_that_are_none(path: str, name: str, shared_api: Api) -> None:
    assert shared_api.get(f"{path}/{name}").status in (400, 404)


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_of_all_nodes(api: Api, conn: psycopg.Connection[Any], queue: Queue) -> None:
    fill(conn, queue)
    one = Figures()
    one.attempts([Attempt("mail", "mail", "completed", "", 0.5, 0.1)])
    figures.add_figures(conn, "n2", one.drain())
    seen(conn, "n2", name="other")
    found = scrape(api)
    wanted = {
        ("aqd_jobs_total", "mail", "mail", "completed"): 4.0,
        ("aqd_jobs_total", "mail", "mail", "failed"): 1.0,
        ("aqd_attempts_total", "mail", "mail", "failed", "timeout"): 1.0,
        ("aqd_attempt_duration_seconds_count", "mail", "mail", "completed"): 4.0,
        ("aqd_attempt_duration_seconds_sum", "mail", "mail", "completed"): 2.0,
        ("aqd_attempt_duration_seconds_bucket", "mail", "mail", "completed", "0.256"): 0.0,
        ("aqd_attempt_duration_seconds_bucket", "mail", "mail", "completed", "0.512"): 4.0,
        ("aqd_attempt_duration_seconds_bucket", "mail", "mail", "completed", "+Inf"): 4.0,
        ("aqd_job_waiting_seconds_count", "mail", "mail"): 5.0,
        ("aqd_statement_duration_seconds_count", "claim"): 1.0,
        ("aqd_queue_jobs", "mail", "due"): 4.0,
        ("aqd_queue_jobs", "mail", "failed"): 1.0,
        ("aqd_slots", "host"): 4.0,
        ("aqd_slots", "other"): 4.0,
        ("aqd_slots_busy", "host"): 3.0,
        ("aqd_listener_up", "host"): 1.0,
        ("aqd_database_warning", "old_transaction"): 0.0,
        ("aqd_database_warning", "dead_rows"): 0.0,
    }
    assert wanted.items() <= found.items()
    assert found["aqd_queue_oldest_due_seconds", "mail"] > 3000
    assert ("aqd_jobs_dead_rows",) in found
    assert ("aqd_stats_age_seconds",) in found


def test_metrics_are_well_formed(api: Api, conn: psycopg.Connection[Any], queue: Queue) -> None:
    """Each family has its type and its help, and histograms only go up."""
    fill(conn, queue)
    api.get("/jobs")
    text = api.get("/metrics").body.decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert family.name.startswith("aqd_")
        if family.type == "histogram":
            last: dict[tuple[str, ...], float] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    key = tuple(v for k, v in sorted(sample.labels.items()) if k != "le")
                    assert sample.value >= last.get(key, 0.0)
                    last[key] = sample.value


def test_requests_of_all_workers(start_api: StartApi) -> None:
    """Whichever worker is asked, it knows all of them; a killed one takes nothing with it."""
    api = start_api(AQD_API_WORKERS="3", AQD_API_THREADS="2")
    for _ in range(40):
        assert api.get("/health").status == 200
    for _ in range(5):
        api.get("/v1/jobs?limit=0").problem(400)
        api.get("/nowhere").problem(404)
    wanted = {
        ("aqd_api_requests_total", "GET", "/health", "200"): 40.0,
        ("aqd_api_requests_total", "GET", "/jobs", "400"): 5.0,
        ("aqd_api_requests_total", "none", "none", "404"): 5.0,
        ("aqd_api_request_duration_seconds_count", "GET", "/health"): 40.0,
    }

    def numbers() -> Samples:
        """As of one worker, with the labels in the order of these tests."""
        text = api.get("/metrics").body.decode()
        return {
            (
                sample.name,
                *(sample.labels[each] for each in ("method", "route", "status") if each in sample.labels),
            ): (sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("aqd_api_") and "le" not in sample.labels
        }

    for _ in range(12):  # a request is counted when its answer is made
        wait_until(lambda: wanted.items() <= numbers().items(), 60.0)
    before = api.workers
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(api.workers) == 3 and before[0] not in api.workers, 60.0)
    for _ in range(12):
        assert wanted.items() <= numbers().items()


def test_metrics_without_a_database(start_api: StartApi) -> None:
    """503 and not half of it: counters that are missing would look as if they had begun anew."""
    api = start_api(database="postgresql://127.0.0.1:1/nowhere")
    api.get("/metrics").problem(503)
    api.get("/queues").problem(503)


def test_labels_of_any_name(api: Api, conn: psycopg.Connection[Any]) -> None:
    """What a text format could trip over is escaped."""
    name = 'host "a"\\b\nc'
    seen(conn, name=name)
    assert scrape(api)["aqd_slots", name] == 4.0
