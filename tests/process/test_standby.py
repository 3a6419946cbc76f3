"""A streaming standby takes over: the daemons find it by themselves, and no job is lost (F54).

What is guaranteed follows from the replication. A synchronous standby has every outcome that was recorded: no completed job
runs again. An asynchronous one may lack the newest: such a job runs again, but it is there.
"""

import json
from collections import Counter
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.fixtures.jobs import Jobs
from tests.fixtures.postgres import free_port
from tests.fixtures.processes import wait_until
from tests.process.support import backends, standby_of

ROOM = {"max_connections": "40", "max_wal_senders": "4", "wal_retrieve_retry_interval": "200ms"}
CONFIG = {
    "database": {"connect_timeout_s": 2.0, "statement_timeout_s": 2.0},
    "daemon": {"lease_s": 8.0, "renew_s": 1.0, "kill_grace_s": 0.5, "poll_ms": 200},
}


class Pair:
    """A primary, its standby, and a URL that names both, the primary first."""

    def __init__(self, private_pg):
        self.primary = private_pg(**ROOM)
        self.name = self.primary.create_database(template=self.primary.template)
        self.standby = standby_of(self.primary, private_pg, **ROOM)
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        self.url = f"postgresql://postgres:{self.primary.password}@{hosts}/{self.name}?target_session_attrs=read-write"

    def on_primary(self, statement):
        return self._on(self.primary, statement)

    def on_standby(self, statement):
        return self._on(self.standby, statement)

    @staticmethod
    def _on(server, statement):
        with server.connect() as conn:
            cursor = conn.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def wait_caught_up(self):
        question = (
            "select coalesce(bool_and(replay_lsn >= pg_current_wal_lsn()), false) from pg_stat_replication"
        )
        with self.primary.connect() as conn:
            wait_until(lambda: conn.execute(question).fetchone()[0], 20, "the standby")

    def make_synchronous(self):
        self.on_primary("alter system set synchronous_standby_names = '*'")
        self.on_primary("select pg_reload_conf()")
        question = "select count(*) = 1 from pg_stat_replication where sync_state = 'sync'"
        wait_until(lambda: self.on_primary(question)[0], 20, "the standby to be synchronous")

    def stop_replication(self):
        self.on_standby("alter system set primary_conninfo = ''")
        self.on_standby("select pg_reload_conf()")
        wait_until(lambda: self.on_primary("select count(*) = 0 from pg_stat_replication")[0], 20)

    def fail_over(self):
        """The primary dies in the middle of whatever it does, the standby takes over."""
        self.primary.kill()
        assert self.on_standby("select pg_promote()") == (True,)


@pytest.fixture
def pair(private_pg):
    return Pair(private_pg)


def test_a_synchronous_standby_is_promoted_under_load(pair, start_daemon, side):
    pair.make_synchronous()
    daemons = [start_daemon(CONFIG, database=pair.url) for _ in range(2)]
    before = Jobs(pair.primary.url(pair.name))
    ids = before.add_many(1500)
    wait_until(lambda: len(side.events("end")) >= 400, 60, "progress")
    before.close()
    pair.fail_over()
    after = Jobs(pair.standby.url(pair.name))
    assert after.wait_all(ids, 60) == {"COMPLETED": 1500}
    assert set(Counter(run.job for run in side.runs()).values()) == {1}
    for daemon in daemons:
        daemon.wait_status(lambda s: s["database"]["up"] and s["database"]["listener_up"])
    after.close()


def test_an_asynchronous_standby_lacks_the_newest(pair, start_daemon, side, tmp_path):
    """What was done, and not copied, is done again; no job is lost."""
    start_daemon(CONFIG, database=pair.url)
    before = Jobs(pair.primary.url(pair.name))
    known = before.add_many(50)
    assert before.wait_all(known) == {"COMPLETED": 50}
    gate = tmp_path / "go"
    lost = before.add_many(2, [{"wait_file": str(gate)}])
    for job in lost:
        side.wait_start(job)
    waiting = before.add_many(50)  # both slots are taken: none of them is done before the last copy
    pair.wait_caught_up()
    pair.stop_replication()
    gate.touch()
    assert before.wait_all(lost + waiting) == {"COMPLETED": 52}
    before.close()
    pair.fail_over()
    after = Jobs(pair.standby.url(pair.name))
    assert after.wait_all(known + lost + waiting, 60) == {"COMPLETED": 102}
    runs = Counter(run.job for run in side.runs())
    assert {runs[job] for job in known} == {1}
    assert {runs[job] for job in lost + waiting} == {2}
    after.close()


def test_the_old_primary_comes_back_read_only(pair, start_daemon, side):
    """Named first and reachable, it is passed over each time."""
    daemon = start_daemon(CONFIG, database=pair.url)
    pair.wait_caught_up()
    pair.fail_over()
    pair.primary.options["default_transaction_read_only"] = "on"
    pair.primary.start()
    after = Jobs(pair.standby.url(pair.name))
    assert after.wait_all(after.add_many(20), 30) == {"COMPLETED": 20}
    for pid in backends(after):
        after.conn.execute("select pg_terminate_backend(%s)", [pid])
    assert after.wait_all(after.add_many(20), 30) == {"COMPLETED": 20}
    daemon.wait_status(lambda s: s["database"]["up"] and s["database"]["listener_up"])
    old = Jobs(pair.primary.url(pair.name))
    wait_until(lambda: backends(old) == [], 30, "the old primary to be left")  # a reconnect may pass it by
    for helper in (old, after):
        helper.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_primary_is_taken_out_of_service(pair, start_daemon, side, tmp_path, busy):
    """Made read-only under open connections, before the standby is promoted: they are left within seconds, and the
    running job's outcome is written where it belongs."""
    daemon = start_daemon(CONFIG, database=pair.url)
    dispatcher = daemon.process_of("dispatcher")
    before = Jobs(pair.primary.url(pair.name))
    assert before.wait_all(before.add_many(10)) == {"COMPLETED": 10}
    gate = tmp_path / "go"
    ids = before.add_many(2, [{"wait_file": str(gate)}]) if busy else []
    for job in ids:
        side.wait_start(job)
    pair.wait_caught_up()
    pair.on_primary("alter system set default_transaction_read_only = on")
    pair.on_primary("select pg_reload_conf()")
    daemon.wait_state("waiting for database", 20)
    # The claimer has nothing to ask for while all slots are busy.
    duties = ["recorder", "keeper"] if busy else [""]
    wait_until(lambda: not any(backends(before, duty) for duty in duties), 20, "its connections to be left")
    gate.touch()
    assert pair.on_standby("select pg_promote()") == (True,)
    after = Jobs(pair.standby.url(pair.name))
    daemon.wait_status(lambda s: s["database"]["up"] and s["database"]["listener_up"], 20)
    if busy:
        assert after.wait_all(ids) == {"COMPLETED": 2}
        assert {len(side.runs(job)) for job in ids} == {1}
    assert after.wait_all(after.add_many(10)) == {"COMPLETED": 10}
    assert backends(before) == []
    before.close()
    assert daemon.process_of("dispatcher") == dispatcher
    assert len(daemon.find("database away")) < 20
    after.close()


def test_the_api_leaves_a_primary_that_is_out_of_service(pair, start_daemon):
    """It could still be read there, and what is read would be old."""
    api = {"port": free_port(), "workers": 1, "threads": 2}
    start_daemon({**CONFIG, "api": api}, database=pair.url, with_api=True)

    def answer(job):
        try:
            with urlopen(f"http://127.0.0.1:{api['port']}/jobs/{job}", timeout=20) as found:
                return json.load(found)["status"]
        except HTTPError as error:
            return error.code

    before = Jobs(pair.primary.url(pair.name))
    known = before.add(delay_s=3600)
    before.close()
    wait_until(lambda: answer(known) == "QUEUED", 20)
    pair.wait_caught_up()
    pair.on_primary("alter system set default_transaction_read_only = on")
    pair.on_primary("select pg_reload_conf()")
    assert pair.on_standby("select pg_promote()") == (True,)
    after = Jobs(pair.standby.url(pair.name))
    job = after.add(delay_s=3600)
    answers = []
    wait_until(lambda: answers.append(answer(job)) or answers[-1] == "QUEUED", 20, "the new primary's answer")
    assert set(answers) <= {404, 503, "QUEUED"}
    after.close()
