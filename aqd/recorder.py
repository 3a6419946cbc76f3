"""The recorder: a thread of the dispatcher that writes outcomes down and renews leases, in batches.

The main thread puts work into its queue: outcomes, releases, renewals, reconciliations. What came together is
written together, one statement for each kind; the longer the database takes, the larger the next batch. For
every outcome the main thread is told once it is *settled*: recorded, or found to be lost to another owner.
Only then is it consumed from the worker's channel, so an outcome that could not be written yet survives
both the database's absence and this process.

Fails: while the database is away the same batch is tried again. A row that breaks a constraint is put aside
alone by the store: a result that cannot be stored fails its job with that reason.
"""

import contextlib
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import psycopg

from aqd import log, messages, output, retry, store
from aqd.config import Config
from aqd.database import Connection
from aqd.errors import WorldError
from aqd.figures import OTHER, Attempt, Figures
from aqd.hookspecs import HandlerInfo
from aqd.links import Held
from aqd.process import boottime_ns
from aqd.sessions import PAUSE_MAX_S, Session
from aqd.store import Failure, JobFacts, Lease, Progress, Release
from aqd.store.figures import job_labels

logger = log.get_logger("recorder")

# A batch has at most so many, or a little more. Larger ones cost the others in the queue more than they save.
BATCH_MAX = 1000
# After a batch of many the next one is waited for until it has become as large, but for so long at most: in
# statements of 500 a job (claim and record) takes 17 µs of PostgreSQL's time and 2.8 of ours, in ones of 100 22 and 5.
MANY = 50
LINGER_S = 0.01
# Of results in one statement. PostgreSQL takes no message of 1 GiB.
BATCH_BYTES = 64 << 20
# A row of ours that somebody else has locked (an operator's open transaction) holds up a batch for so long,
# then it is written alone, again and again, and the others without it.
LOCK_WAIT_S = 0.25
# Jobs claimed by this node longer ago than this and not held by it are nobody's. Twice the claimer's STALE_S.
RECONCILE_AGE_S = 10.0

Pair = tuple[int, int]  # (job id, lease token)
Key = tuple[int, int]  # (incarnation, number); incarnation 0: not from a worker


class About(NamedTuple):
    """What an attempt is counted under; ``waited_s``: for how long it was due before it was claimed."""

    queue: str
    type: str
    waited_s: float


def about(held: Held) -> About | None:
    """That of a job which this dispatcher has claimed itself; of a predecessor's it is not known."""
    return None if held.job is None else About(held.job.queue, held.job.type, held.job.waited_s)


class Completed(msgspec.Struct, frozen=True):
    """Entry ``key`` returned: what we held and what its worker says. Of thousands a second, hence by reference."""

    key: Key
    held: Held
    done: messages.Done
    slot: int | None = None

    @property
    def id(self) -> int:
        return self.held.id

    @property
    def about(self) -> About | None:
        return about(self.held)

    @property
    def attempt(self) -> int:
        return self.held.attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that counts, or that was cancelled. ``type``, ``max_attempts``, ``crashes`` (before this attempt)
    are None if the job came from a predecessor and only its id and token are known."""

    key: Key
    id: int
    token: int
    attempt: int
    type: str | None
    max_attempts: int | None
    kind: str
    error: str
    traceback: str | None
    ended_ns: int
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_kb: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    retry_after_s: float | None = None
    crashes: int | None = None
    reason: str = ""
    output: str | None = None
    about: About | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """Given back with its attempt: unstarted, or interrupted by us."""

    key: Key
    id: int
    token: int
    interrupted: bool
    reason: str
    ended_ns: int
    reason_code: str = "drain"
    traceback: str | None = None
    output: str | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_kb: int | None = None
    signal: int | None = None
    about: About | None = None
    attempt: int | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """Extend these leases, and store what jobs say of their progress; the keys are (incarnation, sequence)."""

    pairs: list[Pair]
    notes: list[tuple[Key, Progress]]


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Release what this node has claimed and does not hold.

    ``first``: at a dispatcher's start, before its first claim, whatever the age; it is tried until it was done,
    and answered by :class:`Reconciled`. Later ones catch what a killed predecessor's statement commits
    afterwards, and claims whose answer was lost; they spare what may still be on its way, and what was claimed
    after ``made_ns``, when ``held`` was written down (the recorder may have been held up since).
    """

    held: list[Pair]
    made_ns: int
    first: bool = False


@dataclass(frozen=True, slots=True)
class NodeGone:
    """This node has stopped: the others need not wait until it is missed."""


Work = Completed | Failed | Released | Renewal | Reconciliation | NodeGone
Outcome = TypeVar("Outcome", Completed, Failed, Released)


@dataclass(frozen=True, slots=True)
class Settled:
    """Told to the main thread: these entries are recorded (or lost, which was logged)."""

    keys: list[Key]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Renewed:
    """Told to the main thread: what is extended in ``kept`` has its lease from ``asked_ns``; the others there are
    still ours; the rest of ``asked`` is lost, unless it was recorded meanwhile. ``notes``: the last sequence of
    each incarnation whose progress is stored."""

    asked_ns: int
    asked: set[Pair]
    kept: dict[Pair, Lease]
    notes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Told to the main thread: the first reconciliation is done."""


Told = Settled | Renewed | Reconciled


class Recorder(threading.Thread):
    """``tell`` hands what it has to say to the main thread."""

    def __init__(
        self,
        config: Config,
        node_id: str,
        tell: Callable[[Told], None],
        schema: Callable[[Connection], None],
    ) -> None:
        super().__init__(name="recorder", daemon=True)
        self.config = config
        self.node_id = node_id
        self.handlers: dict[str, HandlerInfo] = {}
        self.figures = Figures()
        # Leases run out meanwhile: no pause may cost more of them than a renewal that failed.
        pause_max_s = min(PAUSE_MAX_S, config.daemon.renew_s / 2)
        self.session = Session(config.database, "recorder", schema, pause_max_s, lock_timeout_s=LOCK_WAIT_S)
        # Of these, one in the queue is enough, however long the database is away.
        self.renewal_waits = self.reconciliation_waits = False
        self._tell = tell
        self._queue: queue.SimpleQueue[Sequence[Work]] = queue.SimpleQueue()
        self._rng = random.Random()
        self._last = 0  # how many were written together
        self._apart: deque[tuple[Sequence[Any], Callable[[Sequence[Any]], None]]] = deque()

    # --- for the main thread

    def put(self, *work: Work) -> None:
        """Many at a time: each call may wake the thread, which then wants the interpreter's lock."""
        self._queue.put(work)

    # --- the thread

    def run(self) -> None:
        while True:
            try:
                self._write(self._take())
                if self._apart:
                    self._persist(*self._apart.popleft())
            except Exception:
                # Each piece of work is guarded by itself; this is for what nobody thought of.
                logger.exception("recorder fails")
                time.sleep(1.0)

    def _take(self) -> list[Work]:
        """What has come together, at least one unless something waits that was put apart; meanwhile the connection is
        kept up."""
        batch: list[Work] = []
        while not batch and not (self._apart and self._queue.empty()):
            if self.session.connection is None:
                with contextlib.suppress(psycopg.Error, WorldError):
                    self.session.run(lambda _: None)
            timeout = None if self.session.connection else self.session.pause_s() or 1.0
            with contextlib.suppress(queue.Empty):
                batch += self._queue.get(timeout=timeout)
        self._gather(batch)
        if self._last >= MANY and 0 < len(batch) < self._last:
            time.sleep(LINGER_S)  # not a wait for the queue, which every put would end
            self._gather(batch)
        self._last = len(batch)
        return batch

    def _gather(self, batch: list[Work]) -> None:
        """What has come meanwhile."""
        while len(batch) < BATCH_MAX:
            try:
                batch += self._queue.get_nowait()
            except queue.Empty:
                break

    def _write(self, batch: list[Work]) -> None:
        # Leases first: outcomes can wait, and may have to.
        for work in batch:
            if isinstance(work, Renewal):
                self.renewal_waits = False
                self._renew(work)
        for completed in _each_once([w for w in batch if isinstance(w, Completed)]):
            for part in _by_size(completed):
                self._persist(part, self._record_completed)
        for failed in _each_once([w for w in batch if isinstance(w, Failed)]):
            self._persist(failed, self._record_failed)
        for released in _each_once([w for w in batch if isinstance(w, Released)]):
            self._persist(released, self._release)
        for work in batch:
            if isinstance(work, Reconciliation):
                self.reconciliation_waits = False
                self._reconcile(work)
            elif isinstance(work, NodeGone):
                with contextlib.suppress(psycopg.Error, WorldError):
                    self.session.run(store.node_gone, self.node_id)
                self._settle([(0, 0)], {})

    def _persist(self, items: Sequence[Outcome], write: Callable[[Sequence[Outcome]], None]) -> None:
        """Write, or put it off: renewals, which may be waiting by now, must not wait behind what is refused. (The store
        itself puts aside a row that breaks a constraint.)

        Without a connection all of it goes back into the queue. What was refused, or waits for a lock that somebody
        has on one of its rows, is put apart in halves, which are never put together again: so it comes down to the rows
        that cannot be written, and what is too much at once for a slow database becomes less.
        """
        if not items:
            return
        pause_s = 0.0
        try:
            write(items)
            return
        except psycopg.errors.LockNotAvailable:
            pass
        except (psycopg.Error, WorldError) as error:
            expected = isinstance(error, psycopg.OperationalError | WorldError) or not self.session.up
            pause_s = self.session.pause_s() or (0.2 if expected else 2.0)
        except Exception:
            logger.exception("outcomes cannot be written", number=len(items))
            pause_s = 2.0
        if not self.session.up:
            for first in range(0, len(items), BATCH_MAX):
                self._queue.put(items[first : first + BATCH_MAX])
        else:
            middle = -(-len(items) // 2)
            self._apart += [(part, write) for part in (items[:middle], items[middle:]) if part]
        time.sleep(pause_s)

    # --- the statements

    def _record_completed(self, items: Sequence[Completed]) -> None:
        now = boottime_ns()
        labels = self._labels([item for item in items if item.held.job is None])
        helds, dones = [item.held for item in items], [item.done for item in items]
        printed = any(done.output for done in dones)
        columns = store.Completions(
            [held.id for held in helds],
            [held.token for held in helds],
            [done.result or None for done in dones],
            [(now - done.started_ns - done.wall_ns) / 1e9 for done in dones],
            [done.wall_ns / 1e9 for done in dones],
            [done.cpu_us / 1e6 for done in dones],
            [done.peak_kb for done in dones],
            [output.text(done.output) if done.output else None for done in dones] if printed else (),
        )
        recorded = self.session.run(store.record_columns, columns)
        self.figures.completed(
            (
                job.queue,
                job.type,
                item.done.wall_ns // 1000,
                max(job.claimed_at_us - max(job.run_at_us, job.created_at_us), 0),
            )
            for item in items
            if (job := item.held.job) is not None and item.held.id in recorded
        )
        if labels:
            adopted = [item for item in items if item.held.job is None]
            self._count(adopted, dict.fromkeys(recorded, "COMPLETED"), labels)
        self._after(items, recorded, "completed", labels)

    def _record_failed(self, items: Sequence[Failed]) -> None:
        unknown = [i for i in items if i.max_attempts is None]
        facts = self.session.run(store.job_facts, [i.id for i in unknown]) if unknown else {}
        now = boottime_ns()
        rows = []
        for item in items:
            wait, final_error = self._decide(item, facts.get(item.id))
            rows.append(
                Failure(
                    id=item.id,
                    token=item.token,
                    # Discarded is failed without a retry; it is no outcome of its own.
                    kind="failed" if item.kind == "discarded" else item.kind,
                    error=item.error,
                    traceback=item.traceback,
                    retry_in_s=wait,
                    age_s=(now - item.ended_ns) / 1e9,
                    wall_s=item.wall_s,
                    cpu_s=item.cpu_s,
                    peak_kb=item.peak_kb,
                    signal=item.signal,
                    exit_code=item.exit_code,
                    reason=item.reason,
                    output=item.output,
                    final_error=final_error,
                )
            )
        labels = self._labels(items)
        done = self.session.run(store.record_failed, rows)
        for item, row in zip(items, rows, strict=True):
            if (state := done.get(item.id)) is not None:
                retried = state == "QUEUED" and row.retry_in_s is not None
                logger.warning(
                    f"attempt {item.kind}",
                    **_named(item, labels),
                    reason=item.reason or None,
                    error=item.error[:300],
                    fate="retried" if retried else state or None,
                    retry_in_s=round(row.retry_in_s, 2) if retried and row.retry_in_s is not None else None,
                )
        fates = {row.id: "QUEUED" if row.retry_in_s is not None else "FAILED" for row in rows}
        self._count(items, {id: state or fates[id] for id, state in done.items()}, labels)
        self._after(items, done, None, labels)

    def _decide(self, item: Failed, facts: JobFacts | None) -> tuple[float | None, str | None]:
        """Seconds until the retry, None for FAILED; and for that case what to say beside the error itself."""
        jobs = self.config.jobs
        type_ = item.type if facts is None else facts.type
        handler = self.handlers.get(type_ or "")
        own_limit = item.max_attempts if facts is None else facts.max_attempts
        decision = retry.decide(
            item.kind,
            item.attempt,
            own_limit or (handler and handler.max_attempts) or jobs.max_attempts,
            (handler and handler.backoff) or retry.Backoff(jobs.backoff_base_s, jobs.backoff_max_s),
            self._rng,
            retry_after_s=item.retry_after_s,
            crashes=(item.crashes if facts is None else facts.crashes) or 0,
            max_crashes=(handler and handler.max_crashes) or jobs.max_crashes,
        )
        return decision.retry_in_s, f"{decision.verdict}: {item.error}" if decision.verdict else None

    def _release(self, items: Sequence[Released]) -> None:
        now = boottime_ns()
        rows = [
            Release(
                i.id,
                i.token,
                i.interrupted,
                i.reason,
                (now - i.ended_ns) / 1e9,
                i.reason_code,
                i.traceback,
                i.output,
                i.wall_s,
                i.cpu_s,
                i.peak_kb,
                i.signal,
            )
            for i in items
        ]
        labels = self._labels(items)
        done = self.session.run(store.release, rows, self.config.jobs.max_interruptions)
        for item in items:
            state = done.get(item.id)
            if state == "CANCELLED":
                logger.info("job cancelled", **_named(item, labels))
            elif item.interrupted and state is not None:
                logger.info("attempt interrupted, given back", **_named(item, labels), reason=item.reason)
        begun = [i for i in items if i.interrupted]
        self._count(begun, done, labels)
        self._after(items, done, None, labels)

    def _renew(self, work: Renewal) -> None:
        # Tried once: the next renewal is on its way, and fencing does not wait for us.
        asked_ns = boottime_ns()
        try:
            kept = self.session.run(store.renew, work.pairs, self.config.daemon.lease_s)
        except (psycopg.Error, WorldError):
            return
        notes: dict[int, int] = {}
        if work.notes:
            with contextlib.suppress(psycopg.Error, WorldError):  # then with the next renewal
                stored = self.session.run(store.store_progress, [note for _, note in work.notes])
                # Somebody had locked the others: again with the next renewal, the handler may say no more.
                notes = dict(key for key, note in work.notes if note.id in stored)
        self._tell(Renewed(asked_ns, set(work.pairs), kept, notes))

    def _reconcile(self, work: Reconciliation) -> None:
        age_s = 0.0 if work.first else RECONCILE_AGE_S + (boottime_ns() - work.made_ns) / 1e9
        try:
            released = self.session.run(store.reconcile, self.node_id, work.held, age_s)
        except (psycopg.Error, WorldError):
            if work.first:
                self.put(work)
                time.sleep(self.session.pause_s() or 0.2)
            return
        if released:
            logger.warning("jobs that nobody held were released", jobs=released)
        if work.first:
            self._tell(Reconciled())

    def _after(
        self,
        items: Sequence[Completed | Failed | Released],
        done: Collection[int],
        kind: str | None,
        labels: dict[int, About],
    ) -> None:
        if kind is not None and len(done) == len(items):
            self._settle([i.key for i in items], {kind: len(items)})
            return
        counts: dict[str, int] = {}
        for item in items:
            if item.id in done:
                name = kind or (item.kind if isinstance(item, Failed) else _release_name(item))
                counts[name] = counts.get(name, 0) + 1
            else:
                # Somebody else owns the job by now (or it is gone): this outcome changes nothing.
                counts["lost"] = counts.get("lost", 0) + 1
                logger.warning("lease lost, outcome dropped", **_named(item, labels))
        self._settle([i.key for i in items], counts)

    def _labels(self, items: Sequence[Completed | Failed | Released]) -> dict[int, About]:
        """What to count jobs under that a predecessor has claimed, and what the log calls them; what cannot be told is
        OTHER."""
        unknown = [item.id for item in items if item.about is None]
        if not unknown:
            return {}
        return {row[0]: About(*row[1:]) for row in self.session.run(job_labels, unknown)}

    def _count(
        self, items: Sequence[Completed | Failed | Released], states: dict[int, str], labels: dict[int, About]
    ) -> None:
        """Count what was recorded; ``states`` are those of the jobs afterwards."""
        attempts = []
        for item in items:
            if (state := states.get(item.id)) is None:
                continue
            label = item.about or labels.get(item.id) or About(OTHER, OTHER, 0.0)
            if isinstance(item, Completed):
                outcome, reason = "completed", ""
                wall_s: float | None = item.done.wall_ns / 1e9
            else:
                reason = item.reason if isinstance(item, Failed) else item.reason_code
                again = "interrupted" if isinstance(item, Released) else "retried"
                outcome, wall_s = (
                    {"FAILED": "failed", "CANCELLED": "cancelled"}.get(state, again),
                    item.wall_s,
                )
            attempts.append(Attempt(label.queue, label.type, outcome, reason, wall_s, label.waited_s))
        self.figures.attempts(attempts)

    def _settle(self, keys: list[Key], counts: dict[str, int]) -> None:
        self._tell(Settled(keys, counts))


def _named(item: Completed | Failed | Released, labels: Mapping[int, About]) -> dict[str, Any]:
    """What the log says of it."""
    known = item.about or labels.get(item.id)
    type_ = None if known is None else known.type
    return {"job_id": str(item.id), "type": type_, "attempt": item.attempt, "slot": item.slot}


def _release_name(item: object) -> str:
    return "interrupted" if isinstance(item, Released) and item.interrupted else "released"


def _each_once(items: list[Outcome]) -> Iterator[list[Outcome]]:
    """In parts in which no job stands twice: what a statement answers is by id, and where a late owner and the real one
    stand in the same batch that would be true of one of them only."""
    if len({item.id for item in items}) == len(items):  # nearly always
        yield items
        return
    parts: list[dict[int, Outcome]] = []
    for item in items:
        free = next((part for part in parts if item.id not in part), None)
        if free is None:
            parts.append(free := {})
        free[item.id] = item
    yield from (list(part.values()) for part in parts)


def _by_size(items: list[Completed]) -> Iterator[list[Completed]]:
    """In parts whose results have some :data:`BATCH_BYTES` together at most."""
    sizes = [len(item.done.result or "") for item in items]
    if sum(sizes) <= BATCH_BYTES:  # nearly always
        yield items
        return
    first = total = 0
    for place, size in enumerate(sizes):
        total += size
        if total > BATCH_BYTES and place > first:
            yield items[first:place]
            first, total = place, size
    yield items[first:]
