"""The shipped plugin http_request: what it sends, what it refuses, and how exchanges end that go wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest

from aqd.config import shown
from aqd.errors import PluginError
from aqd.testing import Outcome, load_plugins

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "http_request.py"
# Of "localhost", valid from 2001 to 2098, made for these tests and good for nothing else.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgTub3hpzz/G2OpLjH
eHiznzVQkteJNRhXuB0ZzLID6C2hRANCAAR/wsqmVCrUzFE0HGotWZQKwbedrJCq
Tn23s//ObsBEbze8JDaSH6J9RGc6BjSkao29iMiTWlfh8KRP/gVFtyYc
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBYTCCAQegAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlhcWQgdGVz
dHMwIBcNMDEwMTAxMDAwMDAwWhgPMjA5OTAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWFxZCB0ZXN0czBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABH/CyqZUKtTMUTQc
ai1ZlArBt52skKpOfbez/85uwERvN7wkNpIfon1EZzoGNKRqjb2IyJNaV+HwpE/+
BUW3JhyjSDBGMBQGA1UdEQQNMAuCCWxvY2FsaG9zdDAPBgNVHRMBAf8EBTADAQH/
MB0GA1UdDgQWBBT5MLDi8930w3lbkP6jXvtUtjKZRzAKBggqhkjOPQQDAgNIADBF
AiEAkHzpm0E+vHQHS0L98p2aRbjOwijZwoUYZ9gDsrrHj1QCIByGbf0ENQNnKgSM
Ay6+vKUTwC2Uj+ORB1Eru+a/MDiD
-----END CERTIFICATE-----
"""


class Server(ThreadingHTTPServer):
    """Answers each request by the function for its path, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def page(self, path: str, status: int = 200, body: bytes = b"", **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = (status, named, body)
        return self.origin + path


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        status, headers, content = self.server.pages.get(self.path.partition("?")[0], (404, {}, b"no page"))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def raw() -> Iterator[Callable[..., str]]:
    """``raw(data, …)``: a server that takes one connection and sends these pieces, then does nothing (None), sends
    a byte now and then (...) or closes; its origin."""
    listeners: list[socket.socket] = []
    over = threading.Event()
    threads: list[threading.Thread] = []

    def make(*pieces: bytes | EllipsisType | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                for piece in pieces:
                    if piece is None:
                        over.wait(60)
                    elif piece is ...:
                        with contextlib.suppress(OSError):
                            while not over.wait(0.02):
                                connection.sendall(b"A")
                    else:
                        connection.sendall(piece)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    over.set()
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def send(payload: Any, job_id: int = 1, **settings: Any) -> Outcome:
    with load_plugins(PLUGIN, settings={"http_request": settings}) as plugins:
        return plugins.run("http_request", payload, job_id=job_id)


def refused(outcome: Outcome) -> str:
    assert (outcome.kind, outcome.reason) == ("discarded", "discard"), outcome
    return outcome.error


def failed(outcome: Outcome) -> str:
    assert outcome.kind == "failed", outcome
    return outcome.error


# --- what is sent and what is kept


def test_get(server: Server) -> None:
    url = server.page("/hello", body="Grüße\0".encode(), Content_Type="text/plain", Set_Cookie="s=1", X_A="1")
    outcome = send({"url": f"{url}?q=a%20b&ü=1"}, allow=[server.origin])
    result = outcome.assert_completed()
    assert (result["status"], result["body"]) == (200, "Grüße\ufffd")
    assert result["url"] == f"{url}?q=a%20b&%C3%BC=1"
    assert result["headers"]["x-a"] == "1"
    assert "set-cookie" not in result["headers"]
    ((method, path, headers, body),) = server.asked
    assert (method, path, body) == ("GET", "/hello?q=a%20b&%C3%BC=1", b"")
    assert headers["Host"] == server.origin.removeprefix("http://")
    assert headers["Accept-Encoding"] == "identity"
    assert "Idempotency-Key" not in headers


def test_post_json(server: Server) -> None:
    url = server.page("/in", 201, b"{}")
    payload = {"url": url, "method": "POST", "json": {"a": ["é", None]}, "headers": {"X-Trace": "t"}}
    assert send(payload, 42, allow=[server.origin]).assert_completed()["status"] == 201
    ((method, _, headers, body),) = server.asked
    assert (method, json.loads(body)) == ("POST", {"a": ["é", None]})
    assert (headers["Content-Type"], headers["X-Trace"]) == ("application/json", "t")
    assert headers["Idempotency-Key"] == "aqd-42"


def test_what_a_job_says_wins_over_defaults_and_settings_over_the_job(server: Server) -> None:
    url = server.page("/in")
    given = {"Idempotency-Key": "mine", "content-type": "text/csv", "authorization": "job's"}
    payload = {"url": url, "method": "PUT", "body": "a;ü", "headers": given}
    settings = {"allow": [server.origin], "headers": {server.origin: {"Authorization": "Bearer s3cret"}}}
    send(payload, **settings).assert_completed()
    ((_, _, headers, body),) = server.asked
    assert body == "a;ü".encode()
    assert (headers["Idempotency-Key"], headers["Content-Type"]) == ("mine", "text/csv")
    assert headers["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("method", ["HEAD", "DELETE", "PATCH"])
def test_other_methods(server: Server, method: str) -> None:
    url = server.page("/x", body=b"content")
    result = send({"url": url, "method": method}, allow=[server.origin]).assert_completed()
    assert result["body"] == ("" if method == "HEAD" else "content")


def test_a_status_may_be_declared_a_success(server: Server) -> None:
    payload = {"url": server.origin + "/gone", "ok": [404]}
    assert send(payload, allow=[server.origin]).assert_completed()["body"] == "no page"


@pytest.mark.parametrize(
    ("charset", "body", "text"),
    [
        ("iso-8859-1", b"\xe9", "é"),
        ("utf-8", b"\xff", "\ufffd"),
        ("base64", b"YQ==", "YQ=="),
        ("nonsense", b"a", "a"),
        ("utf-7", b"+2AA-", "?"),
    ],
)
def test_the_body_is_always_storable_text(server: Server, charset: str, body: bytes, text: str) -> None:
    url = server.page("/t", body=body, Content_Type=f"text/plain; charset={charset}")
    assert send({"url": url}, allow=[server.origin]).assert_completed()["body"] == text


def test_https(tmp_path: Path, server: Server) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(CERTIFICATE)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.page("/s", body=b"safe")
    entry = f"https://localhost:{server.server_port}"
    payload = {"url": f"{entry}/s"}
    assert send(payload, allow=[entry], ca_file=str(file)).assert_completed()["body"] == "safe"
    assert (
        "certificate" in failed(send(payload, allow=[entry])).lower()
    )  # nobody on this machine vouches for it


# --- what is not allowed


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ([], "https://example.com/"),
        (["example.com"], "http://example.com/"),
        (["example.com"], "https://example.com:8443/"),
        (["example.com"], "https://www.example.com/"),
        (["*.example.com"], "https://example.com/"),
        (["*.example.com"], "https://badexample.com/"),
        (["*.example.com"], "https://*.example.com/"),
        (["http://10.0.0.5:8080"], "http://10.0.0.5/"),
        (["http://10.0.0.5:8080"], "http://10.0.0.51:8080/"),
    ],
)
def test_only_allowed_servers_are_asked(allow: list[str], url: str) -> None:
    assert "is not allowed" in refused(send({"url": url}, allow=allow))


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        (["example.com"], "https://EXAMPLE.com:443/x"),
        (["*.example.com"], "https://a.b.example.com/"),
        (["https://*.example.com:8443"], "https://a.example.com:8443/"),
        (["http://[::1]:80"], "http://[::1]/"),
        (["bücher.example"], "https://xn--bcher-kva.example/"),
    ],
)
def test_what_an_entry_allows(allow: list[str], url: str) -> None:
    """Without asking anybody: the time is looked at when the host has been accepted."""
    assert "payload.timeout_s" in refused(send({"url": url, "timeout_s": 0}, allow=allow))


LONG = "https://example.com/" + "a" * 9000


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "payload: must be an object"),
        ({}, "payload.url: is missing"),
        ({"url": 5}, "payload.url: must be a string"),
        ({"url": "https://example.com", "metod": "GET"}, "payload.metod: is not known"),
        ({"url": "ftp://example.com"}, "payload.url: must begin"),
        ({"url": "example.com"}, "payload.url: must begin"),
        ({"url": "https://user:pw@example.com/"}, "payload.url: must not contain a user"),
        ({"url": "https://example.com\\@evil.example/"}, "payload.url: contains"),
        ({"url": "https://example.com/ HTTP/1.1\r\nX: y"}, "payload.url: contains"),
        ({"url": "https://exa\tmple.com/"}, "payload.url: contains"),
        ({"url": "https://example.com:99999/"}, "payload.url"),
        ({"url": "https:///x"}, "payload.url: the host"),
        ({"url": "https://[::1/"}, "payload.url"),
        ({"url": "https://exa%6dple.com/"}, "payload.url: the host"),
        ({"url": LONG}, "the bound is 8192"),
        ({"url": "https://example.com", "method": "TRACE"}, "payload.method"),
        ({"url": "https://example.com", "method": ["GET"]}, "payload.method"),
        ({"url": "https://example.com", "headers": {"A b": "c"}}, "payload.headers: 'A b'"),
        ({"url": "https://example.com", "headers": {"A": "b\r\nC: d"}}, "payload.headers: A"),
        ({"url": "https://example.com", "headers": {"A": "€"}}, "payload.headers: A"),
        ({"url": "https://example.com", "headers": {"Host": "evil"}}, "payload.headers: Host"),
        ({"url": "https://example.com", "headers": {"a": "1", "A": "2"}}, "given twice"),
        ({"url": "https://example.com", "headers": {"transfer-encoding": "chunked"}}, "payload.headers"),
        ({"url": "https://example.com", "headers": {f"a{n}": "" for n in range(65)}}, "the bound is 64"),
        ({"url": "https://example.com", "headers": ["a"]}, "payload.headers: must be an object"),
        (
            {"url": "https://example.com", "method": "POST", "json": 1, "body": ""},
            "payload.body: give either",
        ),
        ({"url": "https://example.com", "json": 1}, "payload.json: a GET"),
        ({"url": "https://example.com", "method": "POST", "body": 1}, "payload.body: must be a string"),
        ({"url": "https://example.com", "ok": [True]}, "payload.ok"),
        ({"url": "https://example.com", "ok": [101]}, "payload.ok"),
        ({"url": "https://example.com", "ok": "200"}, "payload.ok"),
        ({"url": "https://example.com", "timeout_s": 31}, "payload.timeout_s"),
        ({"url": "https://example.com", "timeout_s": "5"}, "payload.timeout_s"),
    ],
)
def test_a_payload_that_can_never_work(payload: Any, message: str) -> None:
    assert message in refused(send(payload, allow=["example.com"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allow": "example.com"}, "allow must be a list"),
        ({"allow": ["https://example.com/x"]}, "names a server"),
        ({"allow": ["*"]}, "the host"),
        ({"allow": ["*.com"]}, "top-level"),
        ({"allow": ["ftp://example.com"]}, "must begin"),
        ({"alow": []}, "alow is not known"),
        ({"headers": {"example.com": {}}}, "is not an entry of allow"),
        ({"allow": ["a.example"], "headers": {"a.example": {"Host": "b"}}}, "Host"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_response_bytes": True}, "max_response_bytes"),
        ({"ca_file": "/nonexistent/ca.pem"}, "No such file"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_plugins(PLUGIN, settings={"http_request": settings})


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key", "x-api-key", "Private-Token", "Proxy-Secret"])
def test_credentials_in_the_settings_are_not_shown(name: str) -> None:
    settings = {"http_request": {"allow": ["a.example"], "headers": {"a.example": {name: "s3cret"}}}}
    assert "s3cret" not in shown("plugins.settings", settings)
    assert "a.example" in shown("plugins.settings", settings)


# --- redirects


def test_a_redirect_on_the_same_server_is_followed(server: Server) -> None:
    first = server.page("/1", 302, Location="2?x=1")
    server.page("/2", 308, Location=f"{server.origin}/3")
    server.page("/3", body=b"there")
    payload = {"url": first, "method": "POST", "json": {}}
    result = send(payload, allow=[server.origin]).assert_completed()
    assert (result["body"], result["url"]) == ("there", f"{server.origin}/3")
    assert [(method, path, body) for method, path, _, body in server.asked] == [
        ("POST", "/1", b"{}"),
        ("GET", "/2?x=1", b""),
        ("GET", "/3", b""),
    ]
    assert "Content-Type" not in server.asked[1][2]


def test_307_repeats_the_request(server: Server) -> None:
    first = server.page("/1", 307, Location="/2")
    server.page("/2")
    send({"url": first, "method": "POST", "json": [1]}, allow=[server.origin]).assert_completed()
    assert [(method, body) for method, _, _, body in server.asked] == [("POST", b"[1]")] * 2
    assert server.asked[1][2]["Idempotency-Key"] == "aqd-1"


@pytest.mark.parametrize(
    "place",
    [
        "https://example.com/",  # allowed, but another server's word
        "http://127.0.0.1:1/",
        "//evil.example/",
        "file:///etc/passwd",
        "http://user@127.0.0.1/",
        "http://[::1/",
    ],
)
def test_a_redirect_to_elsewhere_is_not_followed(server: Server, place: str) -> None:
    url = server.page("/1", 302, Location=place)
    assert "redirects to" in refused(send({"url": url}, allow=[server.origin, "example.com"]))
    assert len(server.asked) == 1


def test_redirects_end(server: Server) -> None:
    url = server.page("/1", 302, Location="/1")
    assert "more than 5 redirects" in refused(send({"url": url}, allow=[server.origin]))
    assert len(server.asked) == 6


# --- answers that are no success


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 304])
def test_what_will_be_the_same_next_time_is_discarded(server: Server, status: int) -> None:
    url = server.page("/x", status, b"the reason" if status != 304 else b"")
    error = refused(send({"url": f"{url}?token=s3cret"}, allow=[server.origin]))
    assert f"status {status}" in error
    assert ("the reason" in error) == (status != 304)
    assert "s3cret" not in error


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_what_may_be_better_next_time_is_retried(server: Server, status: int) -> None:
    outcome = send({"url": server.page("/x", status)}, allow=[server.origin])
    assert f"status {status}" in failed(outcome)
    assert outcome.retry_after_s is None


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("7", 7, 7),
        ("99999", 3600, 3600),
        (timedelta(days=1), 3600, 3600),
        (timedelta(minutes=50), 1, 3000),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(
    server: Server, status: int, value: str | timedelta, least: float, most: float
) -> None:
    if isinstance(value, timedelta):
        value = format_datetime(datetime.now(UTC) + value, usegmt=True)
    outcome = send({"url": server.page("/x", status, Retry_After=value)}, allow=[server.origin])
    assert outcome.reason == "retry"
    assert outcome.retry_after_s is not None
    assert least <= outcome.retry_after_s <= most


@pytest.mark.parametrize("value", ["soon", "-5", "0", "1e9", "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_retry_after_that_says_nothing_is_passed_over(server: Server, value: str) -> None:
    outcome = send({"url": server.page("/x", 503, Retry_After=value)}, allow=[server.origin])
    assert (outcome.kind, outcome.reason) == ("failed", "exception")


def test_an_answer_that_is_too_large_is_discarded(server: Server) -> None:
    url = server.page("/x", body=b"x" * 1001)
    assert "larger than 1000 bytes" in refused(
        send({"url": url}, allow=[server.origin], max_response_bytes=1000)
    )
    send({"url": url}, allow=[server.origin], max_response_bytes=1001).assert_completed()


def test_an_endless_answer_is_discarded(raw: Callable[..., str]) -> None:
    origin = raw(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 5000, None)
    assert "larger than 1000" in refused(send({"url": origin}, allow=[origin], max_response_bytes=1000))


def test_a_compressed_answer_is_discarded(server: Server) -> None:
    url = server.page("/x", body=b"\x1f\x8b", Content_Encoding="gzip")
    assert "gzip" in refused(send({"url": url}, allow=[server.origin]))


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"nonsense\r\n\r\n"],
        [b"HTTP/1.1 200 OK"],
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Ty"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"],
    ],
)
def test_half_an_answer_is_none(raw: Callable[..., str], pieces: list[bytes]) -> None:
    origin = raw(*pieces)
    failed(send({"url": origin}, allow=[origin]))


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\n", None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", None],
        [b"HTTP/1.1 200 OK\r\n\r\nof unknown length", None],
    ],
)
def test_the_time_is_for_the_whole_exchange(raw: Callable[..., str], pieces: list[bytes | None]) -> None:
    origin = raw(*pieces)
    assert "no whole answer within 0.2 s" in failed(send({"url": origin, "timeout_s": 0.2}, allow=[origin]))


def test_a_server_that_drips_does_not_hold_the_job(raw: Callable[..., str]) -> None:
    """Each byte comes well within the time; all of them never do."""
    origin = raw(b"HTTP/1.1 200 OK\r\nA: ", ...)
    assert "no whole answer" in failed(send({"url": origin, "timeout_s": 0.3}, allow=[origin]))


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert "refused" in failed(send({"url": origin}, allow=[origin])).lower()


def test_a_job_that_is_stopped_closes_its_connection(raw: Callable[..., str]) -> None:
    origin = raw(None)
    others = threading.enumerate()  # a connection of an earlier test may have one that is ending
    with load_plugins(PLUGIN, settings={"http_request": {"allow": [origin]}}) as plugins:
        outcome = plugins.run("http_request", {"url": origin}, stop_after_s=0.2)
    assert outcome.kind == "cancelled"
    left = [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and each not in others
    ]
    assert left == []


def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    send({"url": server.page("/x")}, allow=[server.origin]).assert_completed()
