"""F64: of all requests under one idempotency key one makes a job, whatever happens to the others at that moment."""

from __future__ import annotations

import psycopg
import pytest

from aqd import job, store
from aqd.config import Config, Jobs
from aqd.errors import IdempotencyConflict, InputError
from aqd.job import JobRequest, validate
from aqd.keeper import Keeper
from tests.fixtures.processes import wait_until
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion, failure, in_threads

CALLERS = 20


def keyed(key: str = "k", type: str = "noop", **options: object) -> JobRequest:
    return validate(type, options.pop("payload", {"n": 1}), idempotency_key=key, **options)  # type: ignore[arg-type]


def jobs(queue: Queue) -> int:
    return int(queue.value("select count(*) from aqd.all_jobs"))


def waiting(queue: Queue) -> int:
    """Sessions that wait for another transaction."""
    return int(
        queue.value(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and wait_event_type = 'Lock' and wait_event = 'transactionid'"
        )
    )


# --- one after the other --------------------------------------------------------------------------


def test_the_same_request_gives_the_same_job(queue: Queue) -> None:
    first = store.enqueue(queue.conn, keyed())
    again = store.enqueue(queue.conn, keyed())
    assert (first.outcome, again.outcome) == ("created", "existing")
    assert again == first._replace(outcome="existing")
    assert store.enqueue(queue.conn, keyed("K")).id != first.id, "keys are told apart by case"
    assert store.enqueue(queue.conn, keyed(), scope="other").id != first.id, "and by scope"
    assert store.enqueue(queue.conn, validate("noop", {"n": 1})).id != first.id
    assert jobs(queue) == 4


def test_what_makes_a_request_the_same(queue: Queue) -> None:
    """JSON by its value, the moment by its instant, and a delay by its length, not by when it was asked for."""
    options = {"queue": "q", "priority": 3, "max_attempts": 2, "timeout_s": 1.5, "tags": ["b", "a"]}
    first = store.enqueue(
        queue.conn, keyed(payload={"a": 1, "b": [2]}, delay_s=60, meta={"x": 1, "y": 2}, **options)
    )
    same = validate(
        "noop",
        payload_json='{"b": [2],\n "a": 1}',
        idempotency_key="k",
        delay_s=60.0,
        meta={"y": 2, "x": 1},
        **options,  # type: ignore[arg-type]
    )
    assert store.enqueue(queue.conn, same).id == first.id
    at = store.enqueue(queue.conn, keyed("at", run_at="2030-01-01T00:00:00Z"))
    assert store.enqueue(queue.conn, keyed("at", run_at="2030-01-01T02:00:00.000+02:00")).id == at.id


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("type", {"type": "mail"}),
        ("payload", {"payload": {"n": 2}}),
        ("payload", {"payload": {"n": "1"}}),
        ("queue", {"queue": "q"}),
        ("priority", {"priority": 1}),
        ("run_at", {"run_at": "2030-01-01T00:00:00Z"}),
        ("delay_s", {"delay_s": 0}),
        ("max_attempts", {"max_attempts": 5}),
        ("timeout_s", {"timeout_s": 600.0}),
        ("tags", {"tags": ["a"]}),
        ("meta", {"meta": {"a": 1}}),
    ],
)
def test_another_request_is_refused_and_the_difference_named(
    field: str, other: dict[str, object], queue: Queue
) -> None:
    first = store.enqueue(queue.conn, keyed())
    before = queue.row(first.id)
    with pytest.raises(IdempotencyConflict) as caught:
        store.enqueue(queue.conn, keyed(**other))
    assert (caught.value.id, caught.value.differs) == (first.id, (field,))
    assert field in str(caught.value)
    assert queue.row(first.id) == before
    assert jobs(queue) == 1


def test_several_differences_are_all_named(queue: Queue) -> None:
    store.enqueue(queue.conn, keyed())
    with pytest.raises(IdempotencyConflict, match="payload, priority, tags"):
        store.enqueue(queue.conn, keyed(payload=2, tags=["x"], priority=9))


def test_the_key_outlives_its_job(connect: Connect, queue: Queue) -> None:
    """Finished, failed, cancelled, deleted: the first job is answered, and no new one is made."""
    made = {key: store.enqueue(queue.conn, keyed(key)) for key in ("done", "failed", "cancelled", "pruned")}
    claimer = connect()
    claimed = {each.id: each for each in book().claim(claimer, 10)}
    store.record_completed(claimer, [completion(claimed[made["done"].id])])
    store.record_failed(claimer, [failure(claimed[made["failed"].id])])
    store.cancel_job(queue.conn, made["cancelled"].id)
    queue.conn.execute("delete from aqd.jobs where id = %s", [made["pruned"].id])
    seen = {key: store.enqueue(queue.conn, keyed(key)) for key in made}
    assert {key: each.id for key, each in seen.items()} == {key: each.id for key, each in made.items()}
    assert {each.outcome for each in seen.values()} == {"existing"}
    # The cancelled one runs, so it was asked to end.
    assert [seen[key].state for key in made] == ["COMPLETED", "FAILED", "PROCESSING", None]
    assert seen["pruned"][1:5] == (None, None, None, None)
    assert seen["done"].created_at == made["done"].created_at
    assert jobs(queue) == 3


def test_an_expired_key_is_free_and_a_living_one_is_not_prolonged(queue: Queue) -> None:
    first = store.enqueue(queue.conn, keyed(), ttl_hours=1)
    store.enqueue(queue.conn, keyed(), ttl_hours=100)
    assert queue.value("select expires_at < now() + interval '1 hour' from aqd.idempotency_keys") is True
    queue.conn.execute("update aqd.idempotency_keys set expires_at = now() - interval '1 second'")
    second = store.enqueue(queue.conn, keyed(payload="another"), ttl_hours=1)
    assert second.outcome == "created"
    assert second.id != first.id
    assert store.enqueue(queue.conn, keyed(payload="another")).id == second.id


def test_the_keeper_removes_expired_keys_only(connect: Connect, queue: Queue) -> None:
    store.enqueue(queue.conn, keyed("lives"))
    queue.conn.execute(
        "insert into aqd.idempotency_keys (scope, key, job_id, expires_at, request)"
        " select '', 'old' || n, n, now() - n * interval '1 second', '{}' from generate_series(1, 2500) n"
    )
    holder = connect(dispatcher=False)
    keeper = Keeper(Config(jobs=Jobs(unknown_type_grace_s=0)), "node-1")
    with holder.transaction():  # somebody takes an expired key over at this moment
        made = store.enqueue(holder, keyed("old7"))

        def rest() -> list[str]:
            keeper.step(conn, now[0])
            now[0] += 1.0
            found = queue.conn.execute("select key from aqd.idempotency_keys order by key").fetchall()
            return [row[0] for row in found]

        conn, now = connect(), [0.0]
        wait_until(lambda: rest() == ["lives", "old7"], 60)
    assert store.enqueue(queue.conn, keyed("old7")).id == made.id


# --- on_conflict ----------------------------------------------------------------------------------


def test_replace_changes_the_job_while_it_waits(connect: Connect, queue: Queue) -> None:
    first = store.enqueue(
        queue.conn, keyed(delay_s=3600, priority=1, max_attempts=2, timeout_s=3, tags=["a"], meta={"a": 1})
    )
    second = store.enqueue(
        queue.conn, keyed(type="mail", payload=["new"], queue="q", on_conflict="replace", tags=["b"])
    )
    assert (second.id, second.outcome, second.queue) == (first.id, "replaced", "q")
    assert second.created_at == first.created_at
    row = queue.row(first.id)
    assert (row["type"], row["payload"], row["queue"], row["priority"]) == ("mail", ["new"], "q", 0)
    assert (row["max_attempts"], row["timeout_s"], row["tags"], row["meta"]) == (None, None, ["b"], None)
    claimed = book("mail").claim(connect(), 10)
    assert [each.id for each in claimed] == [first.id], "it is due now"
    # It has begun: what the new request brings it cannot see any more.
    third = store.enqueue(queue.conn, keyed(on_conflict="replace"))
    assert third.outcome == "created"
    assert third.id != first.id
    assert store.enqueue(queue.conn, keyed()).id == third.id, "the key stands for the new one"


def test_replace_debounces(queue: Queue) -> None:
    """The last of a burst is what runs, and only it."""
    ids = {
        store.enqueue(queue.conn, keyed(payload=n, delay_s=60, on_conflict="replace")).id for n in range(10)
    }
    assert len(ids) == jobs(queue) == 1
    assert queue.row(ids.pop())["payload"] == 9


def test_replace_without_a_job_makes_one(queue: Queue) -> None:
    assert store.enqueue(queue.conn, keyed(on_conflict="replace")).outcome == "created"


def test_reject(queue: Queue) -> None:
    first = store.enqueue(queue.conn, keyed(on_conflict="reject"))
    for request in (keyed(on_conflict="reject"), keyed(payload=5, on_conflict="reject")):
        with pytest.raises(IdempotencyConflict) as caught:
            store.enqueue(queue.conn, request)
        assert (caught.value.id, caught.value.differs) == (first.id, ())
    assert jobs(queue) == 1


# --- at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_behind_a_held_transaction(commits: bool, connect: Connect, queue: Queue) -> None:
    """The winner is held open: all others wait, and then there is one job and everybody has its id."""
    winner = connect(dispatcher=False)
    winner.execute("begin")
    first = store.enqueue(winner, keyed())

    def late() -> store.EnqueuedJob:
        with connect(dispatcher=False) as conn:
            return store.enqueue(conn, keyed())

    def end() -> None:
        wait_until(lambda: waiting(queue) == CALLERS, 60)
        assert jobs(queue) == 0
        winner.execute("commit" if commits else "rollback")

    *answers, _ = in_threads(*[late] * CALLERS, end)
    assert len({each.id for each in answers}) == 1
    assert jobs(queue) == 1
    outcomes = sorted(each.outcome for each in answers)
    if commits:
        assert answers[0].id == first.id
        assert outcomes == ["existing"] * CALLERS
    else:
        assert answers[0].id != first.id
        assert outcomes == ["created"] + ["existing"] * (CALLERS - 1)


def test_different_requests_at_once(connect: Connect, queue: Queue) -> None:
    """One of them wins; the others hear which fields differ from it."""

    def call(n: int) -> str:
        with connect(dispatcher=False) as conn:
            try:
                return store.enqueue(conn, keyed(payload=n % 2)).outcome
            except IdempotencyConflict as error:
                return " ".join(error.differs)

    answers = in_threads(*[lambda n=n: call(n) for n in range(CALLERS)])  # type: ignore[misc]
    assert sorted(answers) == sorted(
        ["payload"] * (CALLERS // 2) + ["created"] + ["existing"] * (CALLERS // 2 - 1)
    )
    assert jobs(queue) == 1


def test_an_expired_key_is_taken_over_once(connect: Connect, queue: Queue) -> None:
    store.enqueue(queue.conn, keyed())
    queue.conn.execute("update aqd.idempotency_keys set expires_at = now() - interval '1 second'")

    def call() -> store.EnqueuedJob:
        with connect(dispatcher=False) as conn:
            return store.enqueue(conn, keyed())

    answers = in_threads(*[call] * CALLERS)
    assert len({each.id for each in answers}) == 1
    assert sorted(each.outcome for each in answers) == ["created"] + ["existing"] * (CALLERS - 1)
    assert jobs(queue) == 2


def test_batches_in_opposite_orders_do_not_deadlock(connect: Connect, queue: Queue) -> None:
    rounds, keys = 10, [f"k{n}" for n in range(20)]

    def call(turn: int) -> list[int]:
        ids = []
        with connect(dispatcher=False) as conn:
            for number in range(rounds):
                order = keys if turn % 2 else keys[::-1]
                with conn.transaction():
                    made = store.enqueue_many(conn, [keyed(f"{number}-{key}") for key in order])
                assert all(isinstance(each, store.EnqueuedJob) for each in made)
                ids += sorted(each.id for each in made)
        return ids

    first, *others = in_threads(*[lambda turn=turn: call(turn) for turn in range(6)])  # type: ignore[misc]
    assert all(other == first for other in others)
    assert jobs(queue) == rounds * len(keys)
    assert queue.deadlocks(sessions=1) == 0


def test_repeatable_read_is_told_to_repeat(connect: Connect, queue: Queue) -> None:
    """What the documentation says: not a second job and not a wrong answer, but 40001."""
    late = connect(dispatcher=False)
    late.execute("begin isolation level repeatable read")
    late.execute("select 1 from aqd.jobs")
    store.enqueue(queue.conn, keyed())
    with pytest.raises(psycopg.errors.SerializationFailure):
        store.enqueue(late, keyed())
    late.rollback()
    assert jobs(queue) == 1


# --- by SQL ---------------------------------------------------------------------------------------


def test_the_function_has_the_same_rules(queue: Queue) -> None:
    call = "select aqd.enqueue('noop', '{\"n\": 1}', idempotency_key => 'k')"
    id = queue.value(call)
    assert queue.value(call) == id
    assert store.enqueue(queue.conn, keyed()).id == id, "one scope with the client"
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        queue.conn.execute("select aqd.enqueue('noop', '2', idempotency_key => 'k', priority => 5)")
    assert caught.value.diag.message_detail == "payload, priority"
    assert str(id) in str(caught.value)
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        queue.conn.execute("select aqd.enqueue('noop', idempotency_key => 'k', on_conflict => 'reject')")
    assert caught.value.diag.message_detail in (None, "")
    assert (
        queue.value("select aqd.enqueue('noop', '3', idempotency_key => 'k', on_conflict => 'replace')") == id
    )
    assert queue.value("select aqd.enqueue('noop', idempotency_key => 'k', key_scope => 'other')") != id
    assert queue.row(id)["payload"] == 3
    assert jobs(queue) == 2


KEYS = ["", " ", " k", "k ", "a\nb", "é", "e\u0301", "\x7f", "a\tb", "x" * 256, "x" * 10_000, "\uffff"]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:20])
def test_what_is_no_key(key: str, queue: Queue) -> None:
    """Two forms of one letter would be two keys that look alike: ASCII only, by SQL as by Python."""
    with pytest.raises(InputError) as caught:
        keyed(key)
    assert (caught.value.field, "255" in str(caught.value.bound)) == ("idempotency_key", True)
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        queue.conn.execute("select aqd.enqueue('noop', idempotency_key => %s)", [key])
    assert refused.value.diag.column_name == "idempotency_key"
    assert jobs(queue) == 0


def test_keys_at_the_edge(queue: Queue) -> None:
    for key in ("x", "x" * 255, "a b", '"', "\\", "'", "{,}", "NULL", "%s", "~!"):
        assert store.enqueue(queue.conn, keyed(key)).outcome == "created"
        assert store.enqueue_many(queue.conn, [keyed(key)])[0].outcome == "existing"  # type: ignore[union-attr]


def test_hours_have_bounds(queue: Queue) -> None:
    for hours in (0, -1, float("nan"), float("inf"), 87_601, True, "1", None):
        with pytest.raises(InputError) as caught:
            job.check_key_ttl(hours)
        assert caught.value.field == "idempotency_ttl_hours"
    for text in ("0", "-1", "'NaN'", "'Infinity'", "87601", "null"):
        with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
            queue.conn.execute(
                f"select aqd.enqueue('noop', idempotency_key => 'k', idempotency_ttl_hours => {text})".encode()
            )
        assert refused.value.diag.column_name == "idempotency_ttl_hours"
    assert jobs(queue) == 0
