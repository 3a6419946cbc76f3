"""The messages between the processes of a node, as typed structs; :data:`encode` and the ``decode_*``.

Spoken over :mod:`aqd.channel` in four directions, each a tagged union:

=====================  ==========================================================================
master → loader        :class:`Load`, :class:`SpawnWorker` (+ channel, page, output)
loader → master        :class:`Importing`, :class:`Loaded`, :class:`LoadRefused`, :class:`Spawned`
master → dispatcher    :class:`Start`, :class:`Attach` (+ channel, page, output), :class:`AttachedAll`,
                       :class:`Serve`, :class:`Exited`, :class:`Recalled`, :class:`Retire`, :class:`Drain`,
                       :class:`Facts`, :class:`HandOver`
dispatcher → master    :class:`Hello`, :class:`Recall`, :class:`Retired`, :class:`Settled`, :class:`Fence`,
                       :class:`Cancel`, :class:`Recycle`, :class:`Working`, :class:`Watch`, :class:`Report`,
                       :class:`Counted`, :class:`Seen`, :class:`Drained`
dispatcher → worker    :class:`Frame` (+ memfds of large payloads)
worker → dispatcher    :class:`Up`, :class:`Bell`, :class:`Done`, :class:`Broken` (+ memfds of a large result, a
                       long output); the two last ones in the journal (:mod:`aqd.journal`) if they are small
=====================  ==========================================================================

``incarnation`` names one life of one worker, never reused by a master; ``number`` an entry of its page.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from aqd.config import Config
from aqd.figures import Cell
from aqd.hookspecs import HandlerInfo, PluginInfo


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# --- master → loader


class Load(_Message):
    """Load this configuration's plugins. ``skip``: plugin → why it must not be imported;
    ``late``: plugins that start threads, which workers import after the fork."""

    config: Config
    generation: int
    master_pid: int
    skip: dict[str, str]
    late: list[str]


class SpawnWorker(_Message):
    """Fork a worker with the descriptors sent along: its channel end, its page, its output."""

    slot: int
    incarnation: int


# --- loader → master


class Importing(_Message):
    """About to import this plugin: should the loader die, it is to blame."""

    plugin: str


class Loaded(_Message):
    """Ready to fork workers. ``threaded``: plugins to be loaded late (then the loader ends)."""

    version: str
    handlers: list[HandlerInfo]
    plugins: list[PluginInfo]
    threaded: list[str]


class LoadRefused(_Message):
    """The generation cannot serve (strict mode, no plugin folder, …)."""

    errors: list[str]
    plugins: list[PluginInfo]


class Spawned(_Message):
    """Sent by the worker's intermediate parent just before it exits."""

    incarnation: int
    pid: int


# --- master → dispatcher


class Start(_Message):
    config: Config
    node_id: str
    node_name: str
    master_pid: int
    version: str


class Attach(_Message):
    """A worker incarnation, with the descriptors of its channel (dispatcher's end), page and output.

    ``fresh`` ones have never been held by another dispatcher: their pages are empty.
    """

    slot: int
    incarnation: int
    generation: int
    fresh: bool


class AttachedAll(_Message):
    """That was everything a predecessor held: what is not on a page is nobody's."""


class Serve(_Message):
    """The handlers of the serving generation: claim these types, give them to its workers."""

    generation: int
    handlers: list[HandlerInfo]


class Exited(_Message):
    """The worker has ended and was reaped; settle it. ``reason``: why *we* ended it, a
    :class:`aqd.page.StopReason`, for entry ``number`` only (-1: none). ``detail``: what is known beyond that
    ("used 612 MiB"). ``oom``: the kernel's OOM killer was at work at that time. ``cpu_us``, ``peak_kb``: of its
    whole life."""

    incarnation: int
    signal: int | None
    code: int | None
    reason: int
    number: int
    detail: str = ""
    oom: bool = False
    cpu_us: int = 0
    peak_kb: int = 0


class Recalled(_Message):
    """Answer to :class:`Recall`: entries from … to (exclusive) came back and will not be started."""

    incarnation: int
    first: int
    last: int


class Retire(_Message):
    """Give this worker nothing more; answer :class:`Retired` when all of its outcomes are recorded."""

    incarnation: int


class Drain(_Message):
    """Claim nothing more, release what is unstarted, go on renewing; answer :class:`Drained`."""


class Facts(_Message):
    """What only the master knows: the plugins that serve, and how many workers ended before their time since it said
    so last, by cause."""

    plugins: list[PluginInfo]
    restarts: dict[str, int]


class HandOver(_Message):
    """Stop claiming, record what can be recorded at once, and exit: a successor takes over."""


# --- dispatcher → master


class Hello(_Message):
    version: str
    pid: int


class Recall(_Message):
    """Take back what this worker has not begun (answered by :class:`Recalled`)."""

    incarnation: int


class Retired(_Message):
    incarnation: int


class Settled(_Message):
    """All of a dead worker's outcomes are recorded: page and channel may go."""

    incarnation: int


class Fence(_Message):
    """The lease of entry ``number`` is lost: end it, if the worker is still on it."""

    incarnation: int
    number: int


class Cancel(_Message):
    """Somebody has cancelled the job of entry ``number``: end it, if the worker is on it or comes to it."""

    incarnation: int
    number: int


class Recycle(_Message):
    """This worker has been given its last job (or must make room for a fresh one): have its successor ready."""

    incarnation: int


class Working(_Message):
    """Sent before jobs are, every now and then: look at the pages often (:mod:`aqd.pace`)."""


class Watch(_Message):
    """Sent before a job with a memory limit is: look at this worker's page now."""

    incarnation: int


class Report(_Message):
    """What the status shows of the dispatcher. ``held``: incarnation → number of jobs; ``types``: incarnation →
    type it is on; ``silent_s``: for how long the database has owed the recorder an answer; ``registered``: other nodes see this one; ``unfit``: why this aqd can never work
    with the schema (:class:`aqd.errors.SchemaUnfit`)."""

    database_up: bool
    database_error: str
    listener_up: bool
    held: dict[int, int]
    types: dict[int, str]
    counters: dict[str, int]
    silent_s: float = 0.0
    registered: bool = False
    unfit: str = ""


class Counted(_Message):
    """What was counted since the last such message, to be added up."""

    cells: list[Cell]


class Seen(_Message):
    """The present gauges of the queues and the database; all of them are new from ``first`` on."""

    cells: list[Cell]
    first: bool


class Drained(_Message):
    """Nothing is held any more (running jobs included) and all is recorded."""


# --- dispatcher ↔ worker


class JobEntry(msgspec.Struct, array_like=True, frozen=True):
    """A job in a frame. ``payload``: JSON text; None if it comes as the next memfd of the message.
    ``tags`` and ``meta``: JSON text."""

    number: int
    id: int
    type: str
    payload: str | None
    attempt: int
    max_attempts: int
    queue: str
    created_at_us: int
    tags: str | None = None
    meta: str | None = None


class Frame(_Message):
    jobs: list[JobEntry]


class Up(_Message):
    """The worker has reached its loop."""

    pid: int


class Bell(_Message):
    """There is something in the journal."""


class Done(_Message):
    """Entry ``number`` returned. ``result``: JSON text, None if it comes as a memfd, "" for none. ``output``: the
    end of what the job wrote, if its handler keeps it; None if it comes as the next memfd, b"" for none."""

    number: int
    started_ns: int
    wall_ns: int
    cpu_us: int
    peak_kb: int
    result: str | None
    output: bytes | None = b""


class Broken(_Message):
    """Entry ``number`` did not complete. ``kind``: failed, discarded, timed_out, cancelled, interrupted,
    unstarted. ``reason``: see :data:`aqd.outcomes.REASONS`.

    ``retry_after_s``: what a raised ``Retry`` asked for; -1 if nothing. ``output``: as in :class:`Done`.
    """

    number: int
    started_ns: int
    wall_ns: int
    cpu_us: int
    peak_kb: int
    kind: str
    error: str
    traceback: str
    retry_after_s: float
    reason: str = ""
    output: bytes | None = b""


ToLoader = Load | SpawnWorker
FromLoader = Importing | Loaded | LoadRefused | Spawned
ToDispatcher = Start | Attach | AttachedAll | Serve | Exited | Recalled | Retire | Drain | Facts | HandOver
FromDispatcher = (
    Hello
    | Recall
    | Retired
    | Settled
    | Fence
    | Cancel
    | Recycle
    | Working
    | Watch
    | Report
    | Counted
    | Seen
    | Drained
)
FromWorker = Up | Bell | Done | Broken

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_to_loader: Callable[[bytes], ToLoader] = msgspec.msgpack.Decoder(ToLoader).decode
decode_from_loader: Callable[[bytes], FromLoader] = msgspec.msgpack.Decoder(FromLoader).decode
decode_to_dispatcher: Callable[[bytes], ToDispatcher] = msgspec.msgpack.Decoder(ToDispatcher).decode
decode_from_dispatcher: Callable[[bytes], FromDispatcher] = msgspec.msgpack.Decoder(FromDispatcher).decode
decode_frame: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode
decode_outcome: Callable[[bytes], Done | Broken] = msgspec.msgpack.Decoder(Done | Broken).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
BELL: Final = encode(Bell())
