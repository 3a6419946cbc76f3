"""The wake-up protocol over two sequences, raced by several nodes (DATA 14 and 15)."""

from __future__ import annotations

import threading
import time

from aqd import claims, store
from aqd.job import validate
from tests.sql.conftest import Connect
from tests.sql.support import Queue, book, completion

NODES = 3
JOBS = 150


def test_pending_writers(connect: Connect, queue: Queue) -> None:
    conn, writer = connect(), connect(dispatcher=False)
    sleeper = claims.Sleeper()
    assert sleeper.pending_writers(conn) == set()
    with writer.transaction():
        writer.execute("select count(*) from aqd.jobs")
        assert sleeper.pending_writers(conn) == set(), "a reader is no writer"
        store.enqueue(writer, validate("noop"))
        (found,) = sleeper.pending_writers(conn)
        assert sleeper.pending_writers(conn) == {found}
        assert book().claim(conn, 1) == []
    assert sleeper.pending_writers(conn) == set()
    assert len(book().claim(conn, 1)) == 1


def test_writer_in_another_database_is_nobody(connect: Connect, queue: Queue, pg) -> None:
    name = pg.create_database(template=pg.template)
    try:
        with pg.connect(name) as other, other.transaction():
            other.execute("select aqd.enqueue('noop')")
            assert claims.Sleeper().pending_writers(connect()) == set()
    finally:
        pg.drop_database(name)


def test_woken_strikes_off_all_in_whichever_order(connect: Connect, queue: Queue) -> None:
    """Also those that are gone, and by one that has announced nothing."""
    conn, announced = connect(), "select s.last_value - w.last_value from aqd.sleeps s, aqd.wakes w"
    first, second, gone = claims.Sleeper(), claims.Sleeper(), claims.Sleeper()
    for sleeper in (first, second, gone):
        sleeper.announce(conn)
    assert queue.value(announced) == 3
    second.woken(conn, "second")
    assert queue.value(announced) == 0
    first.woken(conn, "first")
    assert queue.value(announced) == 0, "the older number sets wakes back"
    gone.announce(conn)
    assert queue.value(announced) == 1
    claims.Sleeper().woken(conn, "third")
    assert queue.value(announced) == 0


def test_no_wakeup_is_lost_among_several_nodes(connect: Connect, queue: Queue) -> None:
    """Nodes that only ever wake by NOTIFY (their poll is far away) and enqueuers at random moments.

    A node sleeps as ``Sleeper`` says: announce; writers, then look, until they are gone; wait. The
    protocol may notify too often. Too rarely would show as a job that waits for the poll.
    """
    poll_s = 20.0
    waits: list[float] = []
    wakes: list[int] = []
    finished = threading.Event()
    lock = threading.Lock()

    def node(number: int) -> None:
        conn = connect()
        conn.execute(f"listen {claims.CHANNEL}")
        mine = book(node_id=f"node-{number}")
        sleeper = claims.Sleeper()
        notified = 0
        fresh = False

        def look() -> bool:
            jobs = mine.claim(conn, 2)
            store.record_completed(conn, [completion(job) for job in jobs])
            with lock:
                waits.extend(time.time() - job.created_at_us / 1e6 for job in jobs)
                if len(waits) == JOBS:
                    finished.set()
            return bool(jobs)

        while not finished.is_set():
            if look():
                continue
            sleeper.announce(conn)
            writers = sleeper.pending_writers(conn)
            while not (found := look()) and writers and not finished.is_set():
                writers &= sleeper.pending_writers(conn)
            if found:
                continue
            # After a notification, a look that was rationed is made up for once; a lost one costs a poll.
            pause_s = mine.blind_s() if fresh else None
            fresh = bool(list(conn.notifies(timeout=poll_s if pause_s is None else pause_s, stop_after=1)))
            if fresh:
                notified += 1
                sleeper.woken(conn, str(number))
        with lock:
            wakes.append(notified)

    nodes = [threading.Thread(target=node, args=(number,), daemon=True) for number in range(NODES)]
    for thread in nodes:
        thread.start()

    def enqueuer(number: int) -> None:
        conn = connect(dispatcher=False)
        for step in range(JOBS // 3):
            if step % 10 == 9:
                with conn.transaction():
                    store.enqueue(conn, validate("noop"))
                    time.sleep(0.02)  # an application's own work inside its transaction
            else:
                store.enqueue(conn, validate("noop"))
            time.sleep(0.001 * ((step * 7 + number) % 13))

    enqueuers = [threading.Thread(target=enqueuer, args=(number,), daemon=True) for number in range(3)]
    for thread in enqueuers:
        thread.start()
    assert finished.wait(60), f"{len(waits)} of {JOBS} jobs were taken"
    queue.conn.execute(f"notify {claims.CHANNEL}")  # ends the last sleeps
    for thread in [*nodes, *enqueuers]:
        thread.join(poll_s + 10)
        assert not thread.is_alive()
    assert max(waits) < poll_s / 2, "a job had to wait for the poll"
    assert sum(wakes) > 0
    assert queue.value("select count(*) from aqd.job_history") == JOBS
