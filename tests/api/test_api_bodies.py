"""Ugly requests: refused with 4xx and a reason, nothing stored, the worker untouched (F60, F61)."""

import gzip
import json
from collections.abc import Iterator

import psycopg
import pytest

from tests.fixtures.api import ADMIN_KEY, Api, read_answer

GOOD = b'{"type":"x"}'
JSON = "application/json"


@pytest.fixture(autouse=True)
def _nothing_happens(shared_api: Api) -> Iterator[None]:
    """No job is stored and no worker dies."""
    workers = shared_api.wait_workers()
    yield
    assert shared_api.workers == workers
    with psycopg.connect(shared_api.database_url) as conn:
        found = conn.execute("delete from aqd.jobs returning payload").fetchall()
    assert found == []


def nested(depth: int, *, closed: bool = True) -> str:
    return '{"type":"x","payload":' + "[" * depth + ("]" * depth + "}" if closed else "")


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        (r'{"type":"x","payload":"a\u0000b"}', "payload", "NUL"),
        (r'{"type":"x","payload":{"a\u0000":1}}', "payload", "NUL"),
        (r'{"type":"x","payload":[[{"k":["\u0000"]}]]}', "payload[0][0].k[0]", "NUL"),
        (r'{"type":"x","queue":"\u0000"}', "queue", "NUL"),
        (r'{"type":"\u0000"}', "type", "NUL"),
        (r'{"type":"x","payload":"\ud800"}', "payload", "surrogate"),
        (r'{"type":"x","payload":{"\udfff":1}}', "payload", "surrogate"),
        ('{"type":"x","payload":"\ud800"}', None, "UTF-8"),
        ('{"type":"x","payload":"\0"}', None, "control character"),
        ('{"type":"x","payload":1e400}', "payload", "too large"),
        ('{"type":"x","payload":1' + "0" * 400 + "}", "payload", "too large"),
        ('{"type":"x","payload":0.' + "3" * 200_000 + "}", "payload", "1100"),
        ('{"type":"x","payload":1e-99999}', "payload", "too small"),
        ('{"type":"x","payload":NaN}', "payload", "NaN"),
        ('{"type":"x","payload":[Infinity]}', "payload[0]", "Infinity"),
        ('{"type":"x","payload":{"a":1,"a":2}}', "payload", "twice"),
        ('{"type":"x","type":"y"}', None, "twice"),
        ('{"type":"x","surprise":1}', "surprise", "unknown"),
        ("{}", "type", "missing"),
        ("null", None, "object"),
        ("42", None, "object"),
        ('"x"', None, "object"),
        ("[]", None, "object"),
        ("", None, "empty"),
        ("{", None, "line 1"),
        ('{"type":"x"}{"type":"x"}', None, "Extra data"),
        (nested(65), None, "64"),
        (nested(1_000), None, "64"),
        (nested(20_000), None, "64"),
        (nested(200_000), None, "64"),
        (nested(200_000, closed=False), None, "64"),
        ('{"a":' * 100_000, None, "64"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_a_bad_value_is_400_and_named(shared_api: Api, body: str, field: str | None, word: str) -> None:
    problem = shared_api.post("/jobs", body).problem(400, word)
    assert problem.get("field") == field
    assert problem["type"] == "urn:aqd:invalid-value"


def test_a_broken_bound_is_told(shared_api: Api) -> None:
    assert shared_api.post("/jobs", nested(99)).problem(400)["bound"] == 64
    assert shared_api.post("/jobs", {"type": "x", "priority": 500}).problem(400)["bound"] == "-100..100"
    assert shared_api.post("/jobs", b" " * (1 << 20) + b"{}").problem(413)["bound"] == 1 << 20


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "application/json; charset=utf-16",
        "application/json; charset=latin-1",
        "application/json; charset=bogus",
        'application/json; charset=""',
        "application/json; charset=utf-8; charset=utf-16",
        "APPLICATION/JSON; CHARSET=UTF-7",
        "é",
    ],
)
def test_other_content_types_are_415(shared_api: Api, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type.encode()}
    problem = shared_api.request("POST", "/jobs", GOOD, headers).problem(415)
    assert problem["field"] == "Content-Type"


def test_encodings_are_415(shared_api: Api) -> None:
    for coding in ("gzip", "br", "deflate, gzip", "x"):
        answer = shared_api.request(
            "POST", "/jobs", gzip.compress(GOOD), {"Content-Type": JSON, "Content-Encoding": coding}
        )
        assert answer.problem(415)["field"] == "Content-Encoding"


@pytest.mark.parametrize(
    "body", [GOOD.decode().encode("utf-16"), '{"type":"é"}'.encode("latin-1"), b"\xef\xbb\xbf{}"]
)
def test_bytes_that_are_not_utf8(shared_api: Api, body: bytes) -> None:
    shared_api.post("/jobs", body).problem(400)


def post(head: str, body: bytes = b"", method: str = "POST") -> bytes:
    return f"{method} /jobs HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n{head}\r\n".encode() + body


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return post("Transfer-Encoding: chunked\r\n", framed + end)


LARGE = b'{"type":"x","payload":"' + b"a" * (1 << 20) + b'"}'


def test_size_is_enforced_by_declaration(shared_api: Api) -> None:
    # Refused by the declared length, before a byte of the body was sent.
    shared_api.raw(post("Content-Length: 1048577\r\n")).problem(413, "1048576")
    shared_api.raw(post("Content-Length: 999999999999999999\r\n")).problem(413)


def test_size_is_enforced_while_reading(shared_api: Api) -> None:
    shared_api.raw(chunked(LARGE)).problem(413)
    shared_api.raw(chunked(*[LARGE[at : at + 1000] for at in range(0, len(LARGE), 1000)])).problem(413)
    # One chunk that claims to be huge: nobody waits for it.
    shared_api.raw(post("Transfer-Encoding: chunked\r\n", b"7fffffff\r\nabc")).problem(413)


def test_framing_faults_are_400(shared_api: Api) -> None:
    for request in (
        post("Content-Length: -1\r\n"),
        post("Content-Length: abc\r\n"),
        post("Content-Length: 5\r\nContent-Length: 6\r\n", b"abcdef"),
        post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        post("Transfer-Encoding: chunked\r\n", b"zz\r\nabc"),
        post("Transfer-Encoding: chunked\r\n", b"5\r\nabcdefgh\r\n0\r\n\r\n"),
        post("Transfer-Encoding: chunked\r\n", b"-5\r\nabc\r\n0\r\n\r\n"),
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /jobs\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
        b"GET /jobs?" + b"a" * 5_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ):
        answer = shared_api.raw(request)
        assert 400 <= answer.status < 500 or answer.status in (501, 505), (request[:80], answer)
        answer.problem(answer.status)


def test_truncated_bodies(shared_api: Api) -> None:
    shared_api.raw(post("Content-Length: 50\r\n", GOOD), half_close=True).problem(400, "12 of 50")
    shared_api.raw(chunked(GOOD, end=b""), half_close=True).problem(400)
    with shared_api.connect() as sock:  # and one that just goes away
        sock.sendall(post("Content-Length: 50\r\n", GOOD))


def test_the_next_request_on_the_connection_is_its_own(shared_api: Api) -> None:
    """What is left of a refused body must not be taken for a request."""
    smuggled = b"DELETE /jobs HTTP/1.1\r\nHost: x\r\n\r\n"
    with shared_api.connect() as sock:
        sock.sendall(post(f"Content-Length: {len(smuggled)}\r\n", smuggled))
        read_answer(sock).problem(400)
        sock.sendall(b"GET /jobs HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(sock).json["jobs"] == []


ROUTES = {
    "/jobs": {"GET", "HEAD", "POST", "OPTIONS"},
    "/jobs/batch": {"POST", "OPTIONS"},
    "/jobs/retry": {"POST", "OPTIONS"},
    "/jobs/1": {"GET", "HEAD", "PATCH", "DELETE", "OPTIONS"},
    "/jobs/1/attempts": {"GET", "HEAD", "OPTIONS"},
    "/jobs/1/retry": {"POST", "OPTIONS"},
    "/jobs/1/cancel": {"POST", "OPTIONS"},
    "/jobs/1/discard": {"POST", "OPTIONS"},
    "/queues": {"GET", "HEAD", "OPTIONS"},
    "/queues/q": {"GET", "HEAD", "PATCH", "OPTIONS"},
    "/queues/q/pause": {"POST", "OPTIONS"},
    "/admin/failed-jobs": {"GET", "HEAD", "OPTIONS"},
    "/health": {"GET", "HEAD", "OPTIONS"},
}


@pytest.mark.parametrize("path", list(ROUTES))
def test_every_method_on_every_route(shared_api: Api, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS"):
        answer = shared_api.request(method, path, None, {"x-admin-key": ADMIN_KEY.encode()})
        if method not in ROUTES[path]:
            assert answer.status == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == ROUTES[path]
        if method == "OPTIONS":
            assert answer.status in (200, 204)
            assert set(answer.headers["allow"].split(", ")) == ROUTES[path] - {"OPTIONS"}
        if method == "HEAD":
            assert answer.body == b""
            assert int(answer.headers["content-length"]) > 0
            assert answer.headers["content-type"].endswith("json")
        assert answer.status < 500


def test_odd_methods_and_routes(shared_api: Api) -> None:
    shared_api.request("BREW", "/jobs").problem(400, "method")
    for path in ("/", "/Jobs", "/jobs/1/retry/x", "/admin", "/jobs/..", "/%00", "/jobs%2F1", "/*"):
        shared_api.get(path).problem(404)
    assert shared_api.get("/jobs/").status == 200


def test_answers_are_not_cached_or_guessed_at(shared_api: Api) -> None:
    for answer in (shared_api.get("/jobs"), shared_api.get("/nowhere")):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_good_ones_beside_them(shared_api: Api) -> None:
    """So that the refusals above are not refusals of everything."""
    for headers in (
        {"Content-Type": 'Application/JSON; Charset="UTF-8"'},
        {"Content-Type": "application/json;charset=utf8"},
    ):
        assert shared_api.request("POST", "/jobs", GOOD, headers).status == 201
    assert shared_api.raw(chunked(b'{"ty', b'pe":"x"}')).status == 201
    assert shared_api.raw(chunked(GOOD, end=b"0\r\nX-Trailer: 1\r\n\r\n")).status == 201
    assert (
        shared_api.raw(
            b"POST /jobs HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + GOOD
        ).status
        == 201
    )
    assert shared_api.post("/jobs", nested(64)).status == 201
    large = LARGE.replace(b"a" * 100, b"", 1)
    assert shared_api.post("/jobs", large).status == 201
    assert shared_api.raw(chunked(large)).status == 201
    with shared_api.connect() as sock:
        sock.sendall(post("Expect: 100-continue\r\nContent-Length: 12\r\n"))
        assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(GOOD)
        assert read_answer(sock).status == 201
    with psycopg.connect(shared_api.database_url) as conn:
        assert len(conn.execute("delete from aqd.jobs returning 1").fetchall()) == 9


def test_values_at_the_edge_come_back(shared_api: Api) -> None:
    for text in (
        '"\\uffff"',
        '"\uffff\U0010ffff"',
        '"\\ud83d\\ude00"',
        "-0",
        "5e-324",
        "1.7976931348623157e308",
        '{"":{"":""}}',
        '"\\u0001\\u001f\x7f"',
    ):
        answer = shared_api.post("/jobs", f'{{"type":"x","payload":{text}}}')
        assert answer.status == 201, (text, answer)
        got = shared_api.get(answer.headers["location"]).json["payload"]
        want = json.loads(text)
        # jsonb writes numbers out without an exponent, so a large one may come back as an integer.
        assert (float(got) if isinstance(want, float) else got) == want, text
    with psycopg.connect(shared_api.database_url) as conn:
        conn.execute("delete from aqd.jobs")
