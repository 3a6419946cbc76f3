"""What the daemon knows and handlers must not: looked for in the memory of the processes that run them."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable

import pytest

from aqd import config
from tests.fixtures.processes import wait_until

KEY = "0123456789abcdef" * 3


def contains(pid: int, texts: Iterable[str]) -> set[str]:
    """Which of the texts stand in what the process can write to."""
    found: set[str] = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            if (match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)) is None:
                continue
            first, last = (int(each, 16) for each in match.groups())
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(first)
                data = memory.read(last - first)
                found |= {text for text in texts if text.encode() in data}
    return found


@pytest.mark.parametrize("given", ["file", "environment"])
def test_no_secret_reaches_a_worker(start_daemon, jobs, tmp_path, given):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (tmp_path / "keys.toml").write_text(f'[keys.app]\nsha256 = "{digest}"\nscopes = ["submit"]\n')
    secrets = {
        "database.url": jobs.url,
        "database.listen_url": jobs.url + ("&" if "?" in jobs.url else "?") + "application_name=listening",
        "api.admin_api_key": "admin-" + KEY,
        "api.keys": f"named:read:{KEY}",
        "api.keys_file": str(tmp_path / "keys.toml"),
    }
    assert secrets.keys() >= config.SECRETS
    tables: dict[str, dict[str, str]] = {"database": {}, "api": {}}
    for key, value in secrets.items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    if given == "file":
        daemon = start_daemon(tables)
    else:
        # The fixture writes the file of its own accord; it must not win, and its URL is no other.
        env = {config.OPTIONS[key].env[0]: value for key, value in secrets.items()}
        daemon = start_daemon(env=env)
    jobs.wait(jobs.add())
    wait_until(lambda: len(daemon.workers()) == 2)
    dispatcher = daemon.process_of("dispatcher")
    wait_until(lambda: contains(dispatcher, secrets.values()) == set(secrets.values()), what="the control")
    for pid in (daemon.process_of("loader"), *daemon.workers().values()):
        assert contains(pid, secrets.values()) == set()
        with open(f"/proc/{pid}/environ", "rb") as environ:
            assert not [value for value in secrets.values() if value.encode() in environ.read()]
