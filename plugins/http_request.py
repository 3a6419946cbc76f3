"""http_request: sends an HTTP request to a server that the operator has allowed, and keeps the answer.

Payload
    ``url``        where to; ``http`` or ``https``, without a user name or password in it. Required.
    ``method``     ``GET`` (unless given), ``HEAD``, ``POST``, ``PUT``, ``PATCH`` or ``DELETE``.
    ``headers``    object of strings. Those that frame the message (Host, Content-Length, …) are not allowed.
    ``json``       any JSON value, sent as ``application/json``; or
    ``body``       a string, sent as UTF-8.
    ``ok``         list of status codes that count as success; 200 to 299 otherwise.
    ``timeout_s``  for the whole exchange, redirects included; at most what the settings say.
Result
    ``{"status": number, "url": string, "headers": object, "body": string}``. The names of headers are in lower
    case, Set-Cookie is left out. Bytes that are no text become U+FFFD.

Settings, in ``[plugins.settings.http_request]``
    ``allow``              list of servers. ``"api.example.com"`` allows https on its usual port,
                           ``"*.example.com"`` each name below it, ``"http://10.0.0.5:8080"`` exactly this scheme,
                           host and port. Empty, as it is unless changed, allows nothing.
    ``headers``            table of tables: headers added to each request to an entry of ``allow``, whatever the job
                           says. The place for credentials: payloads are stored and shown.
    ``timeout_s``          30 unless changed; 0.1 to 3600.
    ``max_response_bytes`` 262144 unless changed; 1 to 16777216.
    ``ca_file``            certificates to trust, in PEM, instead of the system's.

A redirect is followed up to 5 times, within the same scheme, host and port only: an allowed server must not be able
to send requests elsewhere. Proxies of the environment are not used.

Discarded: a payload that is malformed or not allowed, a redirect to elsewhere, an answer that is too large or
compressed, and every status that will be the same next time. Failed, to be retried: no answer, 408, 425, 429 and 5xx;
after 429 and 503 at the moment that ``Retry-After`` names, up to an hour away.

A job may run more than once (its node may die after the request was sent), so POST and PATCH carry the header
``Idempotency-Key: aqd-JOB``, the same for every attempt, unless the job brings its own.
"""

import contextlib
import email.utils
import functools
import http.client
import io
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import aqd

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
FIELDS = ("url", "method", "headers", "json", "body", "ok", "timeout_s")
PORTS = {"http": 80, "https": 443}
MAX_URL = 8192
MAX_HEADERS = 64
MAX_HEADER = 8192
MAX_REDIRECTS = 5
MAX_RETRY_AFTER_S = 3600.0
SHOWN_CHARACTERS = 500  # of an answer, in an error
CHUNK_BYTES = 65536
RETRIED = frozenset({408, 425, 429})
# They say where the message goes and where it ends (RFC 9110, 9112): two opinions on that are an attack.
FRAMING = frozenset(
    (
        *("host", "content-length", "transfer-encoding", "te", "trailer", "expect", "accept-encoding"),
        *("connection", "keep-alive", "upgrade", "proxy-authorization", "proxy-connection"),
    )
)
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
NOT_IN_HEADER = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
NOT_IN_URL = re.compile(r"[\x00-\x20\x7f\\]")
HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")

_settings: dict[str, Any] = {}


class Origin(NamedTuple):
    """Scheme, host and port. ``host`` is in lower case and ASCII; ``*.`` before it means every name below."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        usual = PORTS[self.scheme] == self.port
        return f"{self.scheme}://{self.host}" + ("" if usual else f":{self.port}")

    def allows(self, other: "Origin") -> bool:
        if (self.scheme, self.port) != (other.scheme, other.port):
            return False
        return self.host == other.host or (self.host[:2] == "*." and other.host.endswith(self.host[1:]))


class Request(NamedTuple):
    """A checked payload. ``target``: path and query, as they are sent."""

    method: str
    origin: Origin
    target: str
    headers: dict[str, str]
    body: bytes | None


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


# --- settings -----------------------------------------------------------------------------------------


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    given = handlers.settings("http_request")
    known = ("allow", "headers", "timeout_s", "max_response_bytes", "ca_file")
    for name in given:
        if name not in known:
            raise ValueError(f"{setting(name)} is not known; known are {', '.join(known)}")
    allow = given.get("allow", [])
    if not isinstance(allow, list) or not all(isinstance(entry, str) for entry in allow):
        raise ValueError(f"{setting('allow')} must be a list of strings")
    entries = {entry: read_entry(entry) for entry in allow}
    _settings.clear()
    _settings.update(
        allow=list(entries.values()),
        headers=[(entries[entry], added) for entry, added in read_added(given.get("headers", {}), entries)],
        timeout_s=read_number(given, "timeout_s", 30.0, 0.1, 3600),
        max_response_bytes=int(read_number(given, "max_response_bytes", 1 << 18, 1, 1 << 24)),
        ca_file=given.get("ca_file"),
    )
    if _settings["ca_file"] is not None:
        if not isinstance(_settings["ca_file"], str):
            raise ValueError(f"{setting('ca_file')} must be the path of a file")
        trust.cache_clear()
        trust(_settings["ca_file"])  # a file that cannot be read is refused now
    # The exchange has its own limit, this is for what that does not bound (a name server that is silent).
    handlers.add("http_request", http_request, timeout_s=_settings["timeout_s"] + 30)


def setting(name: str) -> str:
    return f"plugins.settings.http_request.{name}"


def read_entry(entry: str) -> Origin:
    url = entry if "://" in entry else f"https://{entry}"
    try:
        parts = urlsplit(url)
        origin = read_origin(url)
    except ValueError as error:
        raise ValueError(f"{setting('allow')}: {entry!r}: {error}") from None
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{setting('allow')}: {entry!r}: names a server, not a page: no path and no query belong there"
        )
    if origin.host.startswith("*.") and "." not in origin.host[2:]:
        raise ValueError(f"{setting('allow')}: {entry!r}: would allow a whole top-level domain")
    return origin


def read_added(given: Any, entries: dict[str, Origin]) -> Iterator[tuple[str, dict[str, str]]]:
    if not isinstance(given, dict):
        raise ValueError(f"{setting('headers')} must be a table of tables")
    for entry, headers in given.items():
        if entry not in entries:
            raise ValueError(f"{setting('headers')}: {entry!r} is not an entry of allow")
        try:
            yield entry, read_headers(headers)
        except ValueError as error:
            raise ValueError(f"{setting('headers')}: {entry!r}: {error}") from None


def read_number(given: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{setting(name)} must be a number from {low:g} to {high:g}")
    return float(value)


# --- the payload: ValueError says what is wrong, the callers whose mistake it is --------------------------


def read_origin(url: str) -> Origin:
    if len(url) > MAX_URL:
        raise ValueError(f"has {len(url)} characters, the bound is {MAX_URL}")
    if NOT_IN_URL.search(url):
        raise ValueError("contains a space, a backslash or a control character")
    parts = urlsplit(url)
    if parts.scheme not in PORTS:
        raise ValueError("must begin with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user name or a password")
    port = parts.port  # ValueError if it is none
    host = parts.hostname or ""
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            raise ValueError("the host is not a name") from None
    host = f"[{host}]" if ":" in host else host
    if HOST.fullmatch(host) is None or port == 0:
        raise ValueError("the host is not a name or an address")
    return Origin(parts.scheme, host, port or PORTS[parts.scheme])


def read_headers(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError("must be an object of strings")
    if len(given) > MAX_HEADERS:
        raise ValueError(f"has {len(given)} entries, the bound is {MAX_HEADERS}")
    kept: dict[str, str] = {}
    for name, value in given.items():
        if TOKEN.fullmatch(name) is None:
            raise ValueError(f"{name[:100]!r} is not the name of a header")
        if name.lower() in FRAMING:
            raise ValueError(f"{name} is not for jobs to set")
        if name.lower() in kept:
            raise ValueError(f"{name} is given twice")
        if NOT_IN_HEADER.search(value) or len(value) > MAX_HEADER:
            raise ValueError(
                f"{name}: must be at most {MAX_HEADER} characters of Latin-1, none of them a control character"
            )
        kept[name.lower()] = value.strip()
    return kept


def discard(field: str, reason: object) -> aqd.Discard:
    return aqd.Discard(f"payload.{field}: {reason}")


def read_payload(payload: Any, job_id: str) -> Request:
    """:class:`aqd.Discard` names the field that is wrong, or the setting that would allow it."""
    if not isinstance(payload, dict):
        raise aqd.Discard(f"payload: must be an object with the key 'url', not {type(payload).__name__}")
    if unknown := sorted(payload.keys() - set(FIELDS)):
        raise discard(unknown[0], f"is not known; known are {', '.join(FIELDS)}")
    method = payload.get("method", "GET")
    if method not in METHODS:
        raise discard("method", f"must be one of {', '.join(METHODS)}")
    origin, target = read_url(payload.get("url"))
    try:
        headers = read_headers(payload.get("headers", {}))
    except ValueError as error:
        raise discard("headers", error) from None
    body, kind = read_body(payload, method)
    if kind is not None:
        headers.setdefault("content-type", kind)
    if method in ("POST", "PATCH"):
        headers.setdefault("idempotency-key", f"aqd-{job_id}")
    headers.setdefault("user-agent", "aqd")
    for entry, added in _settings["headers"]:
        if entry.allows(origin):
            headers |= added
    return Request(method, origin, target, headers, body)


def read_url(url: Any) -> tuple[Origin, str]:
    if not isinstance(url, str):
        raise discard("url", "must be a string" if url is not None else "is missing")
    try:
        origin = read_origin(url)
    except ValueError as error:
        raise discard("url", error) from None
    if not any(entry.allows(origin) for entry in _settings["allow"]) or "*" in origin.host:
        allowed = ", ".join(map(str, _settings["allow"])) or "none"
        raise discard("url", f"{origin} is not allowed (allowed: {allowed}; see {setting('allow')})")
    parts = urlsplit(url)
    try:
        # What is escaped stays as it is, what must be escaped is.
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._[]")
    except UnicodeEncodeError:
        raise discard("url", "contains half a surrogate pair, which is no character") from None
    return origin, f"{target}?{query}" if query else target


def read_body(payload: dict[str, Any], method: str) -> tuple[bytes | None, str | None]:
    """(what is sent, its content type)."""
    given = [name for name in ("json", "body") if name in payload]
    if not given:
        return (b"" if method in ("POST", "PUT", "PATCH") else None), None
    if len(given) == 2:
        raise discard("body", "give either json or body, not both")
    if method in ("GET", "HEAD"):
        raise discard(given[0], f"a {method} request has no body")
    if given == ["json"]:
        return json.dumps(payload["json"], separators=(",", ":")).encode(), "application/json"
    if not isinstance(payload["body"], str):
        raise discard("body", "must be a string; for other values there is json")
    try:
        return payload["body"].encode(), "text/plain; charset=utf-8"
    except UnicodeEncodeError:
        raise discard("body", "contains half a surrogate pair, which is no character") from None


def read_codes(payload: dict[str, Any]) -> list[int] | range:
    codes = payload.get("ok", range(200, 300))
    good = isinstance(codes, list | range) and all(
        isinstance(code, int) and not isinstance(code, bool) and 200 <= code <= 599 for code in codes
    )
    if not good:
        raise discard("ok", "must be a list of numbers from 200 to 599")
    return codes  # type: ignore[no-any-return]


def read_time(payload: dict[str, Any]) -> float:
    most: float = _settings["timeout_s"]
    value = payload.get("timeout_s", most)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= most:
        raise discard("timeout_s", f"must be a number from 0.1 to {most:g}")
    return float(value)


# --- the handler --------------------------------------------------------------------------------------


def http_request(payload: Any, job: Any) -> dict[str, Any]:
    request = read_payload(payload, job.id)
    codes, timeout_s = read_codes(payload), read_time(payload)
    deadline = time.monotonic() + timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        answer = exchange(request, deadline, timeout_s)
        if answer.status in codes:
            return {
                "status": answer.status,
                "url": f"{request.origin}{request.target}",
                "headers": {name: value for name, value in answer.headers.items() if name != "set-cookie"},
                "body": text_of(answer),
            }
        if answer.status not in (301, 302, 303, 307, 308) or "location" not in answer.headers:
            raise refusal(request, answer)
        request = redirected(request, answer)
    raise aqd.Discard(f"{what(request)}: more than {MAX_REDIRECTS} redirects")


def what(request: Request) -> str:
    """For messages: without the query, in which there may be a token."""
    return f"{request.method} {request.origin}{request.target.partition('?')[0]}"


def redirected(request: Request, answer: Answer) -> Request:
    """The next request (RFC 9110, 15.4): 307 and 308 repeat it, the others make a POST a GET."""
    here = f"{request.origin}{request.target}"
    try:
        url = urljoin(here, answer.headers["location"])
        origin = read_origin(url)
    except ValueError as error:
        raise aqd.Discard(f"{what(request)}: redirects to a place that {error}") from None
    if origin != request.origin:
        raise aqd.Discard(f"{what(request)}: redirects to {origin}; only the same server is followed")
    _, target = read_url(url)
    if answer.status in (307, 308) or request.method in ("GET", "HEAD"):
        return request._replace(target=target)
    about_body = ("content-type", "idempotency-key")
    headers = {name: value for name, value in request.headers.items() if name not in about_body}
    return Request("GET", origin, target, headers, None)


def refusal(request: Request, answer: Answer) -> Exception:
    said = " ".join(text_of(answer).split())[:SHOWN_CHARACTERS]
    reason = f"{what(request)}: status {answer.status}{': ' if said else ''}{said}"
    if answer.status in (429, 503) and (after_s := retry_after_s(answer.headers.get("retry-after"))):
        return aqd.Retry(after_s, reason)
    if answer.status in RETRIED or answer.status >= 500:
        return RuntimeError(reason)
    return aqd.Discard(reason)


def retry_after_s(value: str | None) -> float | None:
    """Seconds, or a date (RFC 9110, 10.2.3); None if it is neither, or over."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", value):
        seconds = float(value)
    else:
        try:
            moment = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return min(seconds, MAX_RETRY_AFTER_S) if seconds > 0 else None


def text_of(answer: Answer) -> str:
    """As text that a JSON result can hold: no NUL, no broken characters."""
    found = re.search(r"charset=\"?([A-Za-z0-9_.:-]{1,40})", answer.headers.get("content-type", ""))
    try:
        text = answer.body.decode(found[1] if found else "utf-8", errors="replace")
    except (LookupError, ValueError):  # no character set, or one that is not for text
        text = answer.body.decode(errors="replace")
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


# --- the exchange -------------------------------------------------------------------------------------


class WholeLines(io.BufferedReader):
    """http.client takes the end of the connection for the end of the headers: half an answer for a whole one."""

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            raise http.client.IncompleteRead(line)
        return line


class Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: io.BufferedReader = WholeLines(self.fp.detach())


def exchange(request: Request, deadline: float, timeout_s: float) -> Answer:
    """One request and its answer. What goes wrong on the way is an :class:`OSError` or HTTPException."""
    late = TimeoutError(f"{what(request)}: no whole answer within {timeout_s:g} s")
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(connect(request.origin, deadline, late))
        over = stack.enter_context(cut_at(plain, deadline))
        try:
            sock = plain
            if request.origin.scheme == "https":
                name = request.origin.host.strip("[]")
                sock = stack.enter_context(
                    trust(_settings["ca_file"]).wrap_socket(plain, server_hostname=name)
                )
            connection = http.client.HTTPConnection(request.origin.host.strip("[]"), request.origin.port)
            stack.callback(connection.close)
            connection.sock = sock
            connection.response_class = Response
            send(connection, request)
            response = stack.enter_context(connection.getresponse())
            answer = receive(request, response)
        except (OSError, http.client.HTTPException, ValueError):
            if over.is_set():
                raise late from None
            raise
        if over.is_set():  # an answer without a length ends with its connection, and we have ended that
            raise late
        return answer


@functools.lru_cache(maxsize=1)
def trust(ca_file: str | None) -> ssl.SSLContext:
    """Made once: reading the system's certificates takes 20 ms."""
    return ssl.create_default_context(cafile=ca_file)


def connect(origin: Origin, deadline: float, late: TimeoutError) -> socket.socket:
    """A connection to the first of the host's addresses that takes one."""
    failure: OSError = late
    for family, kind, protocol, _, address in socket.getaddrinfo(
        origin.host.strip("[]"), origin.port, type=socket.SOCK_STREAM
    ):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise late
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s)
            sock.connect(address)
            sock.settimeout(None)  # from here on the deadline is that of cut_at()
            return sock
        except OSError as error:
            sock.close()
            failure = late if isinstance(error, TimeoutError) else error
        except BaseException:  # the job is being stopped
            sock.close()
            raise
    raise failure


@contextlib.contextmanager
def cut_at(sock: socket.socket, deadline: float) -> Iterator[threading.Event]:
    """Shut the connection down at ``deadline`` (then the event is set), however the time was spent.

    A timeout of the socket is one for each read: a server that sends a byte now and then would never meet it.
    """
    over = threading.Event()
    twin = socket.socket(fileno=os.dup(sock.fileno()))  # the other one may be wrapped, or closed meanwhile

    def cut() -> None:
        over.set()
        with contextlib.suppress(OSError):
            twin.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()
        timer.join()
        twin.close()


def send(connection: http.client.HTTPConnection, request: Request) -> None:
    usual = PORTS[request.origin.scheme] == request.origin.port
    host = request.origin.host if usual else f"{request.origin.host}:{request.origin.port}"
    connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host)
    connection.putheader("Accept-Encoding", "identity")
    connection.putheader("Connection", "close")
    if request.body is not None:
        connection.putheader("Content-Length", str(len(request.body)))
    for name, value in request.headers.items():
        connection.putheader(name.title(), value.encode("latin-1"))
    connection.endheaders(request.body)


def receive(request: Request, response: http.client.HTTPResponse) -> Answer:
    most: int = _settings["max_response_bytes"]
    headers: dict[str, str] = {}
    for name, value in response.getheaders():
        key = name.lower()
        plain = value.encode("latin-1", "replace").decode("latin-1").replace("\0", "\ufffd")[:MAX_HEADER]
        headers[key] = f"{headers[key]}, {plain}" if key in headers else plain
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise aqd.Discard(
            f"{what(request)}: the answer is encoded as {coding[:40]}, which nobody has asked for"
        )
    body = bytearray()
    while chunk := response.read(min(CHUNK_BYTES, most + 1 - len(body))):
        body += chunk
        if len(body) > most:
            raise aqd.Discard(
                f"{what(request)}: the answer is larger than {most} bytes ({setting('max_response_bytes')})"
            )
    if response.length:  # http.client takes an early end for the end when it is read in pieces
        raise http.client.IncompleteRead(bytes(body[-64:]), response.length)
    return Answer(response.status, headers, bytes(body))
