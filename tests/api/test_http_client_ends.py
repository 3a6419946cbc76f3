"""The HTTP client: changes of which nobody knows whether they were made, what its messages say, what it refuses itself."""

# ruff: noqa: F811

import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aqd import http_calls, http_client
from aqd.errors import (
    ConflictError,
    DatabaseUnavailable,
    InputError,
    NotFoundError,
    OutcomeUnknown,
    ServiceUnavailable,
)
from tests.api.test_http_client import Connect, answer, answering, connect, problem  # noqa: F401
from tests.fixtures.api import ADMIN_KEY, Api

# --- changes of which nobody knows ----------------------------------------------------------------


def doubtful(client: Any) -> list[tuple[Callable[[], Any], tuple[str, ...]]]:
    """Changes of all kinds, and the keys that their errors carry."""
    return [
        (lambda: client.enqueue("fate", idempotency_key="k"), ("k",)),
        (lambda: client.enqueue("fate", idempotency_key="k", on_conflict="replace"), ("k",)),
        (lambda: client.enqueue("fate", idempotency_key="k", on_conflict="reject"), ("k",)),
        (
            lambda: client.enqueue_many(
                [{"type": "fate", "idempotency_key": key, "on_conflict": "reject"} for key in ("k", "l")]
            ),
            ("k", "l"),
        ),
        (lambda: client.retry(1), ()),
        (lambda: client.cancel(1), ()),
        (lambda: client.discard(1, "x"), ()),
        (lambda: client.delete(1), ()),
        (lambda: client.update(1, priority=1), ()),
        (lambda: client.pause("q"), ()),
        (lambda: client.change_jobs("cancel", ids=[1]), ()),
    ]


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        answer(500, b"<html>"),
        answer(502, b"<html>"),
        answer(504),
        answer(502, b'{"type": "about:blank", "detail": "upstream"}'),
        answer(200, b"<html>"),
        answer(200, b"\x1f\x8b", "Content-Encoding: gzip"),
        problem(503, "outcome-unknown"),
    ],
)
def test_a_change_that_may_have_been_made(connect: Connect, given: bytes) -> None:
    """Whether tries were left or not: something has been sent, and nobody says what has become of it."""
    with answering(given) as (port, _):
        client = connect(port, retries=1)
        for change, keys in doubtful(client):
            with pytest.raises(OutcomeUnknown) as caught:
                change()
            assert caught.value.idempotency_keys == keys
            assert caught.value.idempotency_key == (keys[0] if len(keys) == 1 else None)
        with pytest.raises(OutcomeUnknown) as caught:
            client.enqueue("fate")
        assert caught.value.idempotency_key, "the one that was drawn"
        for look in (
            lambda: client.get(1),
            lambda: list(client.jobs()),
            lambda: client.change_jobs("cancel", all=True, dry_run=True),
        ):
            with pytest.raises((ServiceUnavailable, OutcomeUnknown)) as seen:
                look()
            assert type(seen.value) is (OutcomeUnknown if b"unknown" in given else ServiceUnavailable)


def test_a_change_that_has_not_been_made(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()[1]
    for change, _ in doubtful(connect(nobody, retries=1)):
        with pytest.raises(ServiceUnavailable, match="cannot be reached"):
            change()
    for given, error in [
        (answer(503, b"<html>"), ServiceUnavailable),
        (answer(429), ServiceUnavailable),
        (answer(301, b"", "Location: http://127.0.0.1:1/"), ServiceUnavailable),
        (problem(500, "internal-error"), ServiceUnavailable),
        (problem(503, "database-unavailable"), DatabaseUnavailable),
        (problem(409, "wrong-state"), ConflictError),
    ]:
        with answering(given) as (port, _):
            for change, _ in doubtful(connect(port, retries=0)):
                with pytest.raises(error) as caught:
                    change()
                assert type(caught.value) is error


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (problem(503, "database-unavailable"), OutcomeUnknown),
        (answer(401), OutcomeUnknown),
        (problem(409, "wrong-state"), ConflictError),
        (problem(404, "not-found"), NotFoundError),
    ],
)
def test_what_the_last_try_says_is_not_all(connect: Connect, last: bytes, error: type[Exception]) -> None:
    """The answer to the first one was lost; what a later one says of the job is so, what it says of itself is not."""
    with answering(b"", last) as (port, _), pytest.raises(error) as caught:
        connect(port, retries=1).cancel(1)
    assert type(caught.value) is error


# --- URLs -----------------------------------------------------------------------------------------


def test_no_password_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "PAUSE_FIRST_S", 0.01)
    for given in (
        answer(200, b"<html>"),
        answer(404, b"<html>"),
        answer(500),
        problem(404, "no-such-route"),
        b"",
    ):
        with answering(given) as (port, _):
            url = f"http://user:hidden@127.0.0.1:{port}/place"
            with http_client.Client(url, retries=0) as client:
                for call in (
                    lambda client=client: list(client.jobs(error="secret")),
                    lambda client=client: client.retry(1),
                ):
                    with pytest.raises((ServiceUnavailable, OutcomeUnknown)) as caught:
                        call()
                    assert "hidden" not in str(caught.value)
                    assert "secret" not in str(caught.value)
                    assert f"127.0.0.1:{port}/place/v1/jobs" in str(caught.value) or given == b""


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_where_the_api_is(api: Api, path: str) -> None:
    with http_client.Client(f"http://127.0.0.1:{api.port}{path}") as client:
        assert client.get(client.enqueue("fate").id).type == "fate"


def test_a_path_that_the_api_has_not(api: Api, connect: Connect) -> None:
    """It looked like a job that does not exist."""
    kind = api.get("/nothing").problem(404, "no such route")["type"]
    assert kind == api.get("/v1/v1/jobs/1").json["type"] == "urn:aqd:no-such-route"
    assert api.get("/jobs/1").json["type"] == "urn:aqd:not-found"
    with http_client.Client(f"http://127.0.0.1:{api.port}/elsewhere") as client:
        for call in (lambda: client.get(1), lambda: client.enqueue("fate"), lambda: client.failed_jobs()):
            with pytest.raises(ServiceUnavailable, match="is the URL right") as caught:
                call()
            assert "/elsewhere/v1/" in str(caught.value)


# --- what no request can say ----------------------------------------------------------------------


def test_what_no_request_can_say_is_refused_here(connect: Connect) -> None:
    client = connect(1, retries=0)
    half = "\ud800"
    for call, field in [
        (lambda: client.discard(1, half), "reason"),
        (lambda: client.discard(1, object()), "reason"),
        (lambda: list(client.jobs(error=half)), "error"),
        (lambda: list(client.jobs(state=["QUEUED", half])), "state"),
        (lambda: list(client.jobs(type=b"x")), "type"),
        (lambda: client.queues(**{half: 1}), ""),
        (lambda: list(client.jobs(created_after=datetime(2030, 1, 1))), "created_after"),
        (lambda: client.queues(limit=object()), "limit"),
        (lambda: client.change_jobs("retry", filter={"error": half}), "filter.error"),
        (lambda: client.change_jobs("retry", filter={"error": object()}), "filter.error"),
        (
            lambda: client.change_jobs("retry", filter={"created_after": datetime(2030, 1, 1)}),
            "filter.created_after",
        ),
        (lambda: client.change_jobs("retry", filter="x"), "filter"),
        (lambda: client.change_jobs("discard", all=True, reason=half), "reason"),
        (lambda: client.change_jobs([], all=True), "action"),
        (lambda: client.update(1, priority=object()), "priority"),
        (lambda: client.update(1, priority=float("nan")), "priority"),
        (lambda: client.update(1, priority=1.0), "priority"),
        (lambda: client.update(1, delay_s=float("nan")), "delay_s"),
        (lambda: client.update(1, delay_s=float("inf")), "delay_s"),
        (lambda: client.update(1, run_at=datetime(2030, 1, 1)), "run_at"),
        (lambda: client.update(1, run_at=half), "run_at"),
        (lambda: client.update(1, queue="x"), "queue"),
        (lambda: client.set_limit("q", float("nan")), "max_running"),
        (lambda: client.set_limit("q", object()), "max_running"),
    ]:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.field == field


def test_none_leaves_it_as_it_is(api: Api, connect: Connect) -> None:
    client = connect(api.port, key=ADMIN_KEY)
    run_at = datetime(2030, 1, 1, tzinfo=UTC)
    id = client.enqueue("fate", run_at=run_at).id
    assert client.update(id, priority=5, run_at=None, delay_s=None)["priority"] == 5
    assert client.update(id, priority=None, run_at=run_at + timedelta(1))["priority"] == 5
    assert client.get(id).run_at == run_at + timedelta(1)
    for nothing in ({}, {"priority": None}):
        with pytest.raises(InputError, match="nothing to change"):
            client.update(id, **nothing)
    found = client.change_jobs(
        "cancel", filter={"created_after": run_at - timedelta(9999), "state": {"QUEUED"}}, dry_run=True
    )
    assert found["matched"] == 1
