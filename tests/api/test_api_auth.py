"""The admin key: an empty one closes the routes, a wrong one is told so, none is taken from a URL (F69)."""

import http.client
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.api import ADMIN_KEY, Api

KEY = ADMIN_KEY.encode()
ROUTES = [
    ("GET", "/admin/failed-jobs"),
    ("HEAD", "/admin/failed-jobs"),
    ("POST", "/jobs/1/retry"),
    ("POST", "/jobs/1/cancel"),
]


@pytest.mark.parametrize(("key", "in_file"), [("", False), (" \t ", False), ("\n", True)])
def test_without_a_key_the_routes_are_closed(
    start_api: Callable[..., Api], key: str, in_file: bool, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    api = start_api(ADMIN_API_KEY="" if in_file else key, ADMIN_API_KEY_FILE=str(file) if in_file else "")
    for headers in ({}, {"x-admin-key": ""}, {"x-admin-key": KEY}, {"Authorization": "Bearer "}):
        for method, path in ROUTES:
            answer = api.request(method, path, b"" if method == "POST" else None, headers)
            assert answer.status == 403
            if method != "HEAD":
                assert answer.problem(403, "no admin key")["type"] == "urn:aqd:admin-key-not-configured"
    assert api.get("/health").status == 200


def test_a_key_from_a_file_with_a_newline(start_api: Callable[..., Api], tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    api = start_api(ADMIN_API_KEY="", ADMIN_API_KEY_FILE=str(file))
    assert api.admin("GET", "/admin/failed-jobs").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x-admin-key": KEY},
        {"X-ADMIN-KEY": b"  " + KEY + b"  "},
        {"Authorization": b"Bearer " + KEY},
        {"Authorization": b"bEARER   " + KEY},
    ],
)
def test_the_right_key(shared_api: Api, headers: dict[str, bytes]) -> None:
    assert shared_api.request("GET", "/admin/failed-jobs", None, headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-admin-key": b""},
        {"x-admin-key": b"wrong"},
        {"x-admin-key": KEY + b"x"},
        {"x-admin-key": KEY[:-1]},
        {"x-admin-key": ADMIN_KEY.encode("latin-1")},  # the same letters in other bytes
        {"x-admin-key": b"\xff\xfe"},
        {"x-admin-key": b"None"},
        {"x_admin_key": KEY},
        {"Authorization": KEY},
        {"Authorization": b"Bearer"},
        {"Authorization": b"Bearer "},
        {"Authorization": b"Basic " + KEY},
        {"Cookie": b"x-admin-key=" + KEY},
    ],
)
def test_a_wrong_or_missing_key(shared_api: Api, headers: dict[str, bytes]) -> None:
    for method, path in ROUTES:
        answer = shared_api.request(method, path, b"" if method == "POST" else None, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        if method != "HEAD":
            assert KEY not in answer.body


def test_two_keys(shared_api: Api) -> None:
    both = {"x-admin-key": KEY, "Authorization": b"Bearer " + KEY}
    shared_api.request("GET", "/admin/failed-jobs", None, both).problem(400, "once")
    for first, second in ((KEY, KEY), (KEY, b"x"), (b"x", KEY), (b"", KEY), (KEY, b"")):
        conn = http.client.HTTPConnection("127.0.0.1", shared_api.port, timeout=10)
        conn.putrequest("GET", "/admin/failed-jobs")
        conn.putheader("x-admin-key", first)
        conn.putheader("x-admin-key", second)
        conn.endheaders()
        assert conn.getresponse().status == 401
        conn.close()


@pytest.mark.parametrize("name", ["x-admin-key", "admin_key", "key", "ADMIN_API_KEY"])
def test_a_key_in_the_query_is_no_key(shared_api: Api, name: str) -> None:
    answer = shared_api.get(f"/admin/failed-jobs?{name}=s3cret-k%C3%A9y")
    assert answer.status == 401
    answer = shared_api.request("GET", f"/admin/failed-jobs?{name}=s3cret", None, {"x-admin-key": KEY})
    assert answer.problem(400)["field"] == name
    assert b"s3cret" not in answer.body


def test_the_key_is_never_logged(api: Api) -> None:
    api.admin("GET", "/admin/failed-jobs")
    api.get("/admin/failed-jobs?key=s3cret-k", x_admin_key="wr0ng-one")
    api.stop()
    assert not [line for line in api.log if "s3cret" in line or "wr0ng" in line]


def test_other_routes_need_no_key(shared_api: Api) -> None:
    for path in ("/jobs", "/health"):
        assert shared_api.get(path).status == 200
