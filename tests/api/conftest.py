"""Fixtures of the API's tests."""

from tests.fixtures.api import api, shared_api, start_api
from tests.fixtures.proxy import proxy_to

__all__ = ["api", "proxy_to", "shared_api", "start_api"]
