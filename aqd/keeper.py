"""House-keeping of the queue: what no single job's life takes care of.

Runs in the dispatcher's keeper thread on every node; any number of nodes may run it at the same time.
:meth:`Keeper.step` is one round: it does what is due and says when to come back. Duties:

==============  ==============================================================================
rescue          jobs whose lease expired go back to the queue (or become FAILED)
unknown types   due jobs whose type no live node has declared for the grace become FAILED
partitions      history has a partition for every day from yesterday to a week ahead
vacuum          ``aqd.jobs`` stays small; says who holds an old snapshot when it cannot
history         partitions beyond ``history_days`` are detached and dropped
failed          failed jobs beyond ``failed_days`` are deleted with their records and attempts
keys            idempotency keys that have expired are deleted
nodes           nodes that ended without a word are forgotten, their figures kept
stats           what is known of each queue and type, and of vacuum, as a snapshot for readers
==============  ==============================================================================

Promises: every duty is safe to do twice, to do nowhere for a while, and to break off anywhere; each statement
is its own transaction. A duty that fails is logged (not at every try), tried again with growing pauses,
and does not stop the others. Duties whose cost grows under an old snapshot take at most 2 % of the time.

How it fails: only a lost connection leaves :meth:`Keeper.step`, as the :class:`psycopg.Error` it was.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

import psycopg

from aqd import store
from aqd.config import Config
from aqd.database import (
    ADVISORY_CLASS,
    ADVISORY_DUTY,
    Connection,
    define,
    execute,
    is_disconnect,
    is_pooled,
    run,
)
from aqd.log import Suppressor, describe, get_logger
from aqd.store import figures

# Dead rows of aqd.jobs from which on it is vacuumed, and how often it is looked at; by a node that runs no jobs, if the
# last look found little (other nodes have keepers of their own).
VACUUM_DEAD_ROWS: Final = 20_000
VACUUM_S: Final = 2.0
VACUUM_IDLE_S: Final = 60.0
PARTITIONS_S: Final = 3600.0
RETENTION_S: Final = 600.0
FIGURES_S: Final = 60.0
KEYS_S: Final = 60.0
# A node is dead after node_ttl_s; its row is kept this many times longer, to be seen.
FORGET_NODE_FACTOR: Final = 10
BATCH: Final = 1000
# How long a detach may wait for readers of the partition before it is left for the next round.
DETACH_WAIT: Final = "2s"
# And where it cannot be done beside everybody else's work, which stands still meanwhile.
DETACH_AT_ONCE_WAIT: Final = "100ms"
# A duty that costs c seconds is not done again before COST_FACTOR * c have passed.
COST_FACTOR: Final = 50
MAX_PAUSE_S: Final = 300.0
_SOON_S: Final = 0.05
_COMPLAIN_S: Final = 300.0

log = get_logger("keeper")


class _Duty:
    """One duty and when it is due. ``work`` returns whether there is more to do at once."""

    def __init__(
        self, name: str, interval_s: float, work: Callable[[Connection], bool], elected: int | None = None
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.work = work
        self.elected = elected
        self.due_at = float("-inf")  # at once
        self.failures = 0

    def done(self, now: float, cost_s: float, more: bool) -> None:
        """Set the next time after a success."""
        self.failures = 0
        self.due_at = now + (
            _SOON_S if more else max(self.interval_s, min(cost_s * COST_FACTOR, MAX_PAUSE_S))
        )

    def failed(self, now: float) -> None:
        """Set the next time after a failure."""
        self.failures += 1
        self.due_at = now + min(max(self.interval_s, 1.0) * 2 ** min(self.failures, 10), MAX_PAUSE_S)


class Keeper:
    """The duties of one node. Belongs to one thread; the connection may change from step to step."""

    def __init__(self, cfg: Config, node_id: str) -> None:
        self._cfg = cfg
        self._node_id = node_id
        grace_s = cfg.jobs.unknown_type_grace_s
        self._unknown_s = min(max(grace_s / 4, 0.5), 10.0)
        self._duties = [
            _Duty("partitions", PARTITIONS_S, self._create_partitions),
            _Duty("rescue", cfg.keeper.rescue_s, self._rescue),
            _Duty("unknown types", self._unknown_s, self._fail_unknown, elected=1),
            _Duty("vacuum", VACUUM_S, self._vacuum),
            _Duty("nodes", max(cfg.keeper.node_ttl_s, 1.0), self._expire_nodes),
            _Duty("history", RETENTION_S, self._drop_history),
            _Duty("failed", RETENTION_S, self._prune_failed, elected=2),
            _Duty("attempts", RETENTION_S, self._prune_attempts, elected=3),
            _Duty("keys", KEYS_S, self._prune_keys, elected=4),
            _Duty("stats", cfg.keeper.figures_s, self._refresh_stats, elected=5),
            _Duty("figures", FIGURES_S, self._tidy_figures, elected=6),
        ]
        self._complaints = Suppressor(_COMPLAIN_S)
        self._vacuumed_under: str | None = None
        self._little_dead_at = float("-inf")  # the last look at dead rows that found few
        self.idle = False  # the node runs no jobs, nor has for a while

    def step(self, conn: Connection, now: float) -> float:
        """Do what is due at the monotonic moment ``now``; returns the seconds until the next duty.

        Raises :class:`psycopg.Error` if the connection is lost; the duty is then due again at once.
        """
        for duty in self._duties:
            if duty.due_at <= now:
                self._perform(conn, duty, now)
        return max(min(duty.due_at for duty in self._duties) - now, 0.0)

    def _perform(self, conn: Connection, duty: _Duty, now: float) -> None:
        began = time.monotonic()
        try:
            more = self._elected(conn, duty) if duty.elected else duty.work(conn)
        except Exception as error:
            if isinstance(error, psycopg.Error) and is_disconnect(error, conn):
                raise
            duty.failed(now)
            write, suppressed = self._complaints.allow(duty.name)
            if write:
                log.error("duty failed", duty=duty.name, error=describe(error), suppressed=suppressed or None)
        else:
            duty.done(now, time.monotonic() - began, more)

    def _elected(self, conn: Connection, duty: _Duty) -> bool:
        """The duty inside a transaction that holds its lock; nothing if another node has it."""
        with conn.transaction():
            duty_number = ADVISORY_DUTY + (duty.elected or 0)
            if not run(conn, "elect", **{"class": ADVISORY_CLASS, "duty": duty_number})[0][0]:
                return False
            return duty.work(conn)

    # --- duties

    def _rescue(self, conn: Connection) -> bool:
        jobs = self._cfg.jobs
        result = store.rescue(conn, BATCH, jobs.backoff_base_s, jobs.backoff_max_s, jobs.max_attempts)
        number = sum(map(len, result))
        if number:
            log.warning(
                "leases expired",
                requeued=len(result.requeued),
                failed=len(result.failed),
                cancelled=len(result.cancelled),
                jobs=_some(result.requeued + result.failed + result.cancelled),
            )
        return number >= BATCH

    def _fail_unknown(self, conn: Connection) -> bool:
        failed = store.fail_unknown(
            conn,
            self._cfg.jobs.unknown_type_grace_s,
            self._cfg.keeper.node_ttl_s,
            BATCH,
            # Our own turn may be late, and another node's keeper may take the next one.
            stale_s=self._unknown_s * 3 + 5,
        )
        types = sorted({type for _, type in failed})
        for type in types:
            ids = [id for id, its_type in failed if its_type == type]
            log.error("no node knows this type, jobs failed", type=type, failed=len(ids), jobs=_some(ids))
        return len(failed) >= BATCH

    def _create_partitions(self, conn: Connection) -> bool:
        days = store.create_partitions(conn)
        if days:
            log.info("history partitions created", days=_some(days))
        return False

    def _expire_nodes(self, conn: Connection) -> bool:
        for node_id, name in run(
            conn, "expire_nodes", ttl_s=self._cfg.keeper.node_ttl_s * FORGET_NODE_FACTOR
        ):
            log.warning("node forgotten, it ended without saying so", node=name, node_id=node_id)
        return False

    def _vacuum(self, conn: Connection) -> bool:
        now = time.monotonic()
        if self.idle and now < self._little_dead_at + VACUUM_IDLE_S:
            return False
        rows = run(conn, "dead_tuples")
        dead, may_vacuum = rows[0] if rows else (0, True)
        if dead < VACUUM_DEAD_ROWS:
            self._vacuumed_under = None
            self._little_dead_at = now
            return False
        if not may_vacuum:
            self._complain(
                "aqd.jobs wants a vacuum, but this role does not own it: leaving it to autovacuum",
                dead_rows=dead,
            )
            return False
        oldest = run(conn, "oldest_snapshot")
        xmin, age, holder = oldest[0] if oldest else (None, 0, None)
        if xmin is not None and xmin == self._vacuumed_under:
            # The last vacuum ran under this very snapshot: another one could remove nothing more.
            self._complain(
                "dead rows cannot be removed, claims and lookups get slower",
                dead_rows=dead,
                held_by=holder,
                age_transactions=age,
            )
            return False
        define(conn, "vacuum_jobs")
        self._vacuumed_under = xmin
        log.debug("vacuumed", dead_rows=dead)
        return False

    def _drop_history(self, conn: Connection) -> bool:
        expired = run(conn, "expired_partitions", history_days=self._cfg.keeper.history_days, limit=100)
        if not expired:
            return False
        refused: psycopg.Error | None = None
        with self._lock_waits_limited(conn):
            for partition, stage in expired:
                try:
                    with self._dropping(partition):
                        self._drop_partition(conn, partition, stage)
                except psycopg.Error as error:
                    if is_disconnect(error, conn):
                        raise
                    refused = error
        if refused is not None:  # the others are gone
            raise refused
        return False

    @contextlib.contextmanager
    def _lock_waits_limited(self, conn: Connection) -> Iterator[None]:
        if is_pooled(conn):  # a limit for the session would be left in somebody else's
            yield
            return
        run(conn, "set_lock_timeout", value=DETACH_WAIT)
        try:
            yield
        finally:
            if not conn.closed:
                run(conn, "set_lock_timeout", value="0")

    def _drop_partition(self, conn: Connection, partition: str, stage: str) -> None:
        if stage == "foreign":
            days = self._cfg.keeper.history_days
            run(conn, "drop_foreign_partition", partition=partition, history_days=days)
        elif is_pooled(conn):
            self._drop_at_once(conn, partition, stage)
        else:
            if stage == "attached":
                define(conn, "detach_partition", partition=partition)
            elif stage == "pending":
                define(conn, "finish_detach", partition=partition)
            define(conn, "drop_partition", partition=partition)

    def _drop_at_once(self, conn: Connection, partition: str, stage: str) -> None:
        """The same in one transaction."""
        with conn.transaction():
            run(conn, "limit_lock_waits", value=DETACH_AT_ONCE_WAIT)
            if stage == "attached":
                define(conn, "detach_partition_at_once", partition=partition)
            elif stage == "pending":
                define(conn, "finish_detach", partition=partition)
            define(conn, "drop_partition", partition=partition)

    @contextlib.contextmanager
    def _dropping(self, partition: str) -> Iterator[None]:
        """Detach, finish, drop. Another node may do the same at the same time: whoever comes second finds
        the partition detached, gone or locked, and has nothing to do."""
        try:
            yield
        except psycopg.errors.LockNotAvailable:
            log.info("partition is in use, dropped later", partition=partition)
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.ObjectNotInPrerequisiteState,
        ) as error:
            log.debug("partition left to another node", partition=partition, error=describe(error))
        else:
            log.info("history partition dropped", partition=partition)

    def _prune_failed(self, conn: Connection) -> bool:
        count = execute(conn, "prune_failed", failed_days=self._cfg.keeper.failed_days, limit=BATCH)[1]
        if count:
            log.info("old failed jobs deleted", jobs=count)
        return count >= BATCH

    def _prune_attempts(self, conn: Connection) -> bool:
        days = max(self._cfg.keeper.history_days, self._cfg.keeper.failed_days)
        count = execute(conn, "prune_attempts", days=days, limit=BATCH)[1]
        if count:
            log.info("old attempts deleted", attempts=count)
        return count >= BATCH

    def _prune_keys(self, conn: Connection) -> bool:
        # Cleaning only: an expired key is free whether or not its row is still there.
        return execute(conn, "prune_keys", limit=BATCH)[1] >= BATCH

    def _refresh_stats(self, conn: Connection) -> bool:
        # Once for all nodes: the one that did it last says when and at what cost.
        if figures.stats_are_fresh(conn, self._cfg.keeper.figures_s, COST_FACTOR, MAX_PAUSE_S):
            return False
        health = figures.refresh_stats(conn)
        if health.old_transaction:
            self._complain(
                "an old transaction holds back vacuum",
                held_by=health.holder,
                age_s=round(health.oldest_transaction_s or 0.0),
            )
        return False

    def _tidy_figures(self, conn: Connection) -> bool:
        figures.fold_figures(conn)
        figures.prune_minutes(conn)
        return False

    def _complain(self, event: str, **fields: object) -> None:
        write, suppressed = self._complaints.allow(event)
        if write:
            log.warning(event, suppressed=suppressed or None, **fields)


def _some(values: list[int] | list[str]) -> str:
    """The first few of a list, for a log line."""
    shown = ", ".join(str(value) for value in values[:10])
    return shown if len(values) <= 10 else f"{shown}, …"
