"""Pages of other origins: which may call the API from a browser."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aqd import config
from tests.fixtures.api import Api


def test_pages_of_other_origins(start_api: Callable[..., Api]) -> None:
    api = start_api(AQD_API_CORS_ORIGINS="https://admin.example.org, http://localhost:3000")
    for origin in ("https://admin.example.org", "http://localhost:3000"):
        answer = api.get("/jobs", origin=origin)
        assert answer.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        before = api.request("OPTIONS", "/jobs", None, asked)
        assert before.status == 200
        assert "POST" in before.headers["access-control-allow-methods"]
        assert {"x-api-key", "content-type", "idempotency-key"} <= set(
            before.headers["access-control-allow-headers"].split(", ")
        )
        refused = api.get("/jobs/x", origin=origin)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (404, origin)
    for origin in ("https://evil.example.org", "https://admin.example.org.evil.org", "null", "*"):
        answer = api.get("/jobs", origin=origin)
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_without_configured_origins_no_page_may(shared_api: Api) -> None:
    asked = {"Origin": "https://x.example", "Access-Control-Request-Method": "POST"}
    for answer in (
        shared_api.get("/jobs", origin="https://x.example"),
        shared_api.request("OPTIONS", "/jobs", None, asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origins", ["*", "https://a.example/", "a.example", "ftp://a.example", "https://A.example", "null"]
)
def test_origins_that_are_none(tmp_path: Path, origins: str) -> None:
    (tmp_path / "empty.toml").touch()
    with pytest.raises(config.ConfigError, match="must be an origin such as"):
        config.load(str(tmp_path / "empty.toml"), {"AQD_API_CORS_ORIGINS": origins})
