"""The API under ``aqd run --with-api``: its keys come and go with a reload of the daemon."""

import hashlib
import http.client
import signal
from pathlib import Path

from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until


def table(name: str, key: str) -> str:
    return f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nscopes = ["read"]\n'


def test_a_reload_reads_the_file_of_keys_again(start_daemon, tmp_path: Path) -> None:
    """Also if the configuration itself has not changed; a broken file is refused and the old keys stay."""
    file = tmp_path / "keys.toml"
    file.write_text(table("one", "the first key of all"))
    port = free_port()
    daemon = start_daemon({"api": {"port": port, "workers": 1, "keys_file": str(file)}}, with_api=True)

    def status(key: str) -> int | None:
        conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            conn.request("GET", "/jobs", headers={"x-api-key": key})
            return conn.getresponse().status
        except OSError:
            return None
        finally:
            conn.close()

    wait_until(lambda: status("the first key of all") == 200, 60)
    file.write_text("[keys.one]\nscopes = []\n")
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("generation refused")
    assert status("the first key of all") == 200
    assert status("another key than that") == 401
    file.write_text("")  # cut short: it must not open the service
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("generation refused", 60, count=2)
    assert (status("the first key of all"), status("another key than that")) == (200, 401)
    file.write_text(table("two", "another key than that"))
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: status("another key than that") == 200, 60)
    assert status("the first key of all") == 401
