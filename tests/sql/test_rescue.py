"""Rescue and reconciliation: each lost job once, nothing that somebody still (or again) owns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aqd import claims, database, store
from aqd.hookspecs import HandlerInfo
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import HELD, Queue, book, completion, failure, in_threads


def rescue(conn: database.Connection, limit: int = 1000, attempts: int = 5) -> store.RescueResult:
    return store.rescue(conn, limit, 2.0, 60.0, attempts)


def test_expired_lease_goes_back_with_its_attempt_counted(conn: database.Connection, queue: Queue) -> None:
    queue.add(2)
    expired, alive = book(node_id="gone").claim(conn, 2)
    queue.expire(expired.id)
    assert rescue(conn) == ([expired.id], [], [])
    row = queue.row(expired.id)
    assert (row["state"], row["attempt"], row["lease_token"]) == ("QUEUED", 1, None)
    assert "node gone expired" in row["last_error"]
    assert queue.value(
        "select run_at - now() between '1.9 s' and '4 s' from aqd.jobs where id = %s", expired.id
    )
    (attempt,) = store.get_attempts(conn, expired.id)
    assert (attempt.kind, attempt.attempt, attempt.node_id) == ("lost", 1, "gone")
    assert queue.state(alive.id) == "PROCESSING"
    assert rescue(conn) == ([], [], [])


def test_lost_on_the_last_attempt_is_failed(conn: database.Connection, queue: Queue) -> None:
    """F02: a job that kills its node ends after exactly its number of claims."""
    (own,) = queue.add(max_attempts=3)
    (default,) = queue.add()
    claimed: dict[int, int] = {own: 0, default: 0}
    for _ in range(10):
        for job in book().claim(conn, 10):
            claimed[job.id] += 1
            queue.expire(job.id)
        store.rescue(conn, 10, 0.0, 0.0, 5)
    assert claimed == {own: 3, default: 5}
    assert queue.state(own) == queue.state(default) == "FAILED"
    assert {record.kind for record in store.list_failed(conn).records} == {"lost"}
    assert queue.row(own)["attempt"] == 3


def test_the_handlers_own_number_of_attempts_counts(conn: database.Connection, queue: Queue) -> None:
    store.declare_handlers(conn, [HandlerInfo(type="noop", plugin="p", max_attempts=1)])
    (plain,) = queue.add()
    (own,) = queue.add(max_attempts=2)
    for job in book().claim(conn, 10):
        queue.expire(job.id)
    assert rescue(conn) == ([own], [plain], [])


def test_backoff_grows_to_its_bound(conn: database.Connection, queue: Queue) -> None:
    queue.fill(100, attempt="999")
    for job in book().claim(conn, 100):
        queue.expire(job.id)
    store.rescue(conn, 100, 2.0, 60.0, 5000)
    waits = [
        row[0] for row in queue.conn.execute("select extract(epoch from run_at - now())::float from aqd.jobs")
    ]
    assert len(waits) == 100
    assert min(waits) > 1
    assert max(waits) <= 60
    assert max(waits) - min(waits) > 20, "full jitter"


Act = Callable[[database.Connection, Queue, claims.ClaimedJob], None]


def complete(conn: database.Connection, _: Queue, job: claims.ClaimedJob) -> None:
    assert store.record_completed(conn, [completion(job)]) == {job.id}


def fail(conn: database.Connection, _: Queue, job: claims.ClaimedJob) -> None:
    assert store.record_failed(conn, [failure(job)]) == {job.id: "FAILED"}


def claim_afresh(conn: database.Connection, _: Queue, job: claims.ClaimedJob) -> None:
    store.release(conn, [store.Release(job.id, job.token, False, "", 0.0)], 20)
    (again,) = book(node_id="other").claim(conn, 1)
    assert again.id == job.id


def renew(conn: database.Connection, _: Queue, job: claims.ClaimedJob) -> None:
    assert store.renew(conn, [(job.id, job.token)], 30.0) == {(job.id, job.token): HELD}


def delete(conn: database.Connection, _: Queue, job: claims.ClaimedJob) -> None:
    conn.execute("delete from aqd.jobs where id = %s", [job.id])


@pytest.mark.parametrize("act", [complete, fail, claim_afresh, renew, delete], ids=lambda act: act.__name__)
@pytest.mark.parametrize("first", ["owner", "rescue"])
def test_rescue_against_somebody_else(connect: Connect, queue: Queue, act: Act, first: str) -> None:
    """F31 a-e: both want the same expired row; whoever comes second must see what the first one did.

    "owner": the other transaction holds the row's lock while rescue runs, then commits.
    "rescue": rescue holds it, and the other one waits for it.
    """
    owner, keeper = connect(), connect()
    queue.add()
    (job,) = book().claim(owner, 1)
    queue.expire(job.id)
    if first == "owner":
        with owner.transaction():
            act(owner, queue, job)
            assert rescue(keeper) == ([], [], []), "a row in other hands is skipped, not waited for"
        assert rescue(keeper) == ([], [], [])
        assert queue.value("select count(*) from aqd.job_attempts where kind = 'lost'") == 0
        return
    outcome: list[object] = []
    with keeper.transaction():
        assert rescue(keeper) == ([job.id], [], [])
        late = threading.Thread(target=lambda: outcome.append(_late(act, owner, queue, job)), daemon=True)
        late.start()
        pid = owner.info.backend_pid
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        # A renewal does not wait: it passes over rows in other hands.
        wait_until(lambda: queue.value(waits, pid) or (act is renew and not late.is_alive()))
    late.join(10)
    assert not late.is_alive()
    if act is delete:
        assert queue.value("select count(*) from aqd.jobs") == 0
        return
    row = queue.row(job.id)
    assert (row["state"], row["attempt"]) == ("QUEUED", 1), "the late owner changed nothing"
    assert queue.value("select count(*) from aqd.job_attempts") == 1
    assert queue.value("select count(*) from aqd.job_history") == 0


def _late(act: Act, conn: database.Connection, queue: Queue, job: claims.ClaimedJob) -> object:
    try:
        act(conn, queue, job)
    except (AssertionError, ValueError) as error:
        return error  # the act itself notices that it has lost the job
    return None


def test_owner_in_the_middle_of_the_row(connect: Connect, queue: Queue) -> None:
    """A renewal that committed after rescue's snapshot was taken: the condition is evaluated again."""
    owner, keeper = connect(), connect()
    queue.add(2)
    blocker, job = book().claim(owner, 2)
    queue.expire(blocker.id)
    queue.expire(job.id)
    with owner.transaction():
        # Rescue skips both; afterwards only the one that was not renewed may be taken.
        store.renew(owner, [(job.id, job.token)], 30.0)
        assert rescue(keeper) == ([blocker.id], [], [])
    assert rescue(keeper) == ([], [], [])
    assert queue.state(job.id) == "PROCESSING"


def test_four_rescuers_at_once(connect: Connect, queue: Queue) -> None:
    """F31: 1,000 expired leases, each recovered exactly once."""
    conn = connect()
    queue.fill(1000)
    book().claim(conn, 1000)
    queue.conn.execute("update aqd.jobs set lease_expires_at = now() - interval '1 s'")

    def rescuer() -> list[int]:
        mine = connect()
        got: list[int] = []
        while queue_has_expired(mine):
            got += rescue(mine, 70).requeued
        return got

    taken = [id for some in in_threads(*[rescuer] * 4) for id in some]
    assert len(taken) == len(set(taken)) == 1000
    assert queue.value("select count(*) from aqd.job_attempts") == 1000
    assert queue.value("select count(*) from aqd.jobs where state = 'QUEUED' and attempt = 1") == 1000


def queue_has_expired(conn: database.Connection) -> bool:
    found = conn.execute(
        "select exists (select from aqd.jobs where state = 'PROCESSING' and lease_expires_at < now())"
    ).fetchone()
    return bool(found and found[0])


def test_reconcile_returns_what_nobody_holds(conn: database.Connection, queue: Queue) -> None:
    queue.add(4)
    held, orphan = book(node_id="me").claim(conn, 2)
    (foreign,) = book(node_id="other").claim(conn, 1)
    (stale,) = book(node_id="me").claim(conn, 1)
    pairs = [(held.id, held.token), (stale.id, stale.token + 1)]  # the same id under another token
    assert store.reconcile(conn, "me", pairs, 60.0) == 0, "just claimed: their owner may be about to know"
    assert store.reconcile(conn, "me", pairs, 0.0) == 2
    states = {job.id: queue.row(job.id)["state"] for job in (held, orphan, foreign, stale)}
    assert states == {
        held.id: "PROCESSING",
        orphan.id: "QUEUED",
        foreign.id: "PROCESSING",
        stale.id: "QUEUED",
    }
    assert queue.row(orphan.id)["attempt"] == 0
    assert store.get_attempts(conn, orphan.id) == []
    assert store.reconcile(conn, "me", [], 0.0) == 1


def test_a_renewal_passes_over_a_row_in_other_hands(connect: Connect, queue: Queue) -> None:
    """An operator's open transaction on one row must not let the leases of all others run out."""
    owner, operator = connect(), connect()
    queue.add(3)
    pairs = [(job.id, job.token) for job in book().claim(owner, 3)]
    with operator.transaction():
        operator.execute("select from aqd.jobs where id = %s for update", [pairs[1][0]])
        kept = store.renew(owner, [*pairs, (pairs[0][0], 1)], 3600.0)
        assert kept == {pairs[0]: HELD, pairs[1]: store.Lease(False, False), pairs[2]: HELD}
    assert store.renew(owner, pairs, 3600.0) == dict.fromkeys(pairs, HELD)
