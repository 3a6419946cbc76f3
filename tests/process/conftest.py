"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tests.fixtures.postgres import Postgres
from tests.fixtures.proxy import Proxy, proxy_to

__all__ = ["proxied", "proxy_to"]


class Proxied(NamedTuple):
    """A way to the test's database that a test may disturb."""

    proxy: Proxy
    url: str


@pytest.fixture
def proxied(pg: Postgres, database_url: str, proxy_to: Callable[[str, int], Proxy]) -> Proxied:
    """A proxy before the test's database. Named before ``start_daemon``, it outlives the daemons."""
    url = pg.tcp_url(urlsplit(database_url).path[1:])
    with psycopg.connect(url, connect_timeout=10) as conn:
        host, port = conn.info.hostaddr, conn.info.port
    proxy = proxy_to(host, port)
    parts = urlsplit(url)
    account = parts.netloc.rpartition("@")[0]
    netloc = f"{account}@127.0.0.1:{proxy.port}" if account else f"127.0.0.1:{proxy.port}"
    return Proxied(proxy, urlunsplit(parts._replace(netloc=netloc, query="")))
