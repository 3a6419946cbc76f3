"""Waiting in the API: requests that are answered when their job has ended (``GET /jobs/{id}?wait_s=``).

Runs in the API's workers: one thread a process, with the process's one listening connection, begun with the first
request that waits, so after the fork. A request that waits has its thread, and no database connection.

Promises: at most half of the process's threads wait, so that the others always serve; whoever cannot wait is told
at once. All waiting jobs of the process are looked at together (:class:`aqd.waiting.Rhythm`). A client that hangs
up gives its place back at once, and so do all when the process stops; closing the sending side alone counts as hanging
up, because the two look the same until something is sent. Idle for :data:`IDLE_S`, the connection is
closed.

How it fails: where the role only reads, or the server is a standby, ends are found by the looks alone, which one line
in the log says; while the database is away nobody is woken; when their time is over, requests find out themselves.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import falcon
import msgspec
import psycopg

from aqd import store, waiting
from aqd.api.pool import CONNECT_TIMEOUT_S
from aqd.config import Config
from aqd.database import Connection, for_listening, is_pooled
from aqd.errors import DatabaseUnavailable, WorldError
from aqd.log import get_logger
from aqd.process import boottime
from aqd.sessions import Session
from aqd.store.wait import REFUSED
from aqd.waiting import Ear, Rhythm

IDLE_S: Final = 60.0
# How often a waiting thread looks whether the statement of the common connection has overstayed its deadline.
_CHECK_S: Final = 1.0
_REFUSED_PAUSE_S: Final = 1.0
_JOIN_S: Final = 1.0
_AWAY_PAUSE_S: Final = 0.2

T = TypeVar("T")

log = get_logger("waiters")


class Place:
    """A request that waits for job ``id``; ``client`` is its socket's descriptor, -1 where it is not known."""

    __slots__ = ("_session", "_woken", "client", "gone", "id", "seen")

    def __init__(self, id: int, client: int, session: Session) -> None:
        self.id = id
        self.client = client
        self.gone = False  # the client has hung up
        self.seen = False  # the job was looked at since it is waited for
        self._woken = threading.Event()
        self._session = session

    def wait(self, until: float) -> bool:
        """Until the job has ended, or there is no use in waiting: True. False: that moment (monotonic) is over."""
        while not self._woken.is_set():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._woken.wait(min(left, _CHECK_S))
            self._session.check(boottime())
        return True

    @property
    def woken(self) -> bool:
        return self._woken.is_set()

    def wake(self) -> None:
        """Nothing more to wait for."""
        self._woken.set()


def client_of(req: falcon.Request) -> int:
    """The descriptor of the request's connection, -1 where the server does not tell (gunicorn does)."""
    sock = req.env.get("gunicorn.socket")
    return -1 if sock is None else int(sock.fileno())


class Waiters:
    """The requests of one process that wait. All methods are for any thread."""

    def __init__(self, cfg: Config) -> None:
        database = msgspec.structs.replace(
            for_listening(cfg.database),
            connect_timeout_s=min(cfg.database.connect_timeout_s, CONNECT_TIMEOUT_S),
        )
        self.room = cfg.api.threads // 2
        self.stopping = False
        self._session = Session(database, "api waiters", self._on_connect)
        self._deaf = not cfg.database.notify
        self._said = False  # that we are it although we should not be
        self._ear: Ear | None = None
        self._rhythm = Rhythm(deaf=self._deaf)
        self._lock = threading.Lock()
        self._places: dict[int, set[Place]] = {}
        self._taken = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_fd = -1

    @contextlib.contextmanager
    def place(self, id: int, client: int = -1) -> Iterator[Place | None]:
        """A place to wait for the job, given back at the end; None if all are taken."""
        place = self._take(id, client)
        try:
            yield place
        finally:
            if place is not None:
                self._give_back(place)

    def again(self, place: Place) -> None:
        """The job had ended, and does not any more: somebody has retried it."""
        with self._lock:
            place.seen = False
            if not self.stopping:
                place._woken.clear()
            os.eventfd_write(self._wake_fd, 1)

    def patiently(self, read: Callable[[], T], until: float) -> T:
        """``read()``, tried again until then while the database is away: our connection may be back a little sooner
        than the pool is sure that it is."""
        while True:
            try:
                return read()
            except DatabaseUnavailable:
                if self.stopping or time.monotonic() >= until:
                    raise
                time.sleep(_AWAY_PAUSE_S)

    def drain(self) -> None:
        """The process stops: whoever waits is answered now, and nobody waits any more."""
        with self._lock:
            self.stopping = True
            for place in self._all():
                place.wake()

    def close(self) -> None:
        """End the thread and its connection."""
        self.drain()
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                os.eventfd_write(self._wake_fd, 1)
        if thread is not None:
            self._session.cut()
            thread.join(_JOIN_S)

    # --- inside

    def _take(self, id: int, client: int) -> Place | None:
        with self._lock:
            if self.stopping or self._taken >= self.room:
                return None
            place = Place(id, client, self._session)
            self._taken += 1
            self._places.setdefault(id, set()).add(place)
            self._start()
            return place

    def _give_back(self, place: Place) -> None:
        with self._lock:
            self._taken -= 1
            others = self._places[place.id]
            others.discard(place)
            if not others:
                del self._places[place.id]

    def _start(self) -> None:
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name="aqd-api-waiters", daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake_fd, 1)

    def _all(self) -> list[Place]:
        return [place for places in self._places.values() for place in places]

    # --- the thread

    def _run(self) -> None:
        while not self._closed:
            pause_s = 0.0
            try:
                self._step()
            except (psycopg.Error, WorldError):
                pause_s = self._session.pause_s() or _REFUSED_PAUSE_S
            except Exception:
                log.exception("waiting fails")
                pause_s = _REFUSED_PAUSE_S
            if pause_s:
                self._pause(pause_s)
        self._session.close()

    def _pause(self, seconds: float) -> None:
        """Until the time is over, or the end: another request does not make an error better."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while not self._closed and (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                os.eventfd_read(self._wake_fd)

    def _step(self) -> None:
        with self._lock:
            fresh = [place for place in self._all() if not place.seen]
            ids = list(self._places)
        if not ids:
            if self._session.connection is not None and not self._sleep(IDLE_S):
                self._session.close()
            elif self._session.connection is None:
                self._sleep(None)
            return
        if self._session.connection is None:
            self._session.run(lambda _: None)  # sets the rhythm to its beginning
        now = time.monotonic()
        if now >= self._rhythm.announce_at:
            if self._session.run(store.announce_wait):
                self._rhythm.announced(now)
            else:
                self._refused("announcing that somebody waits is not allowed")
        if now >= self._rhythm.look_at:
            self._wake(self._session.run(store.find_ended, ids))
            self._rhythm.looked(now)
        elif fresh:
            self._wake(self._session.run(store.find_ended, {place.id for place in fresh}))
        for place in fresh:
            place.seen = True
        self._wake_heard()
        self._sleep(max(0.0, self._rhythm.next_at - time.monotonic()))

    def _sleep(self, seconds: float | None) -> bool:
        """Until something happens (True) or the time is over: a request comes or hangs up, a job has ended."""
        with self._lock:
            clients = {each.client: each for each in self._all() if each.client >= 0 and not each.woken}
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        connection = self._session.connection
        if connection is not None:
            poll.register(connection.pgconn.socket, select.POLLIN)
        for client in clients:
            poll.register(client, select.POLLRDHUP)
        happened = poll.poll(None if seconds is None else seconds * 1000)
        for fd, _ in happened:
            if fd in clients:
                clients[fd].gone = True
                clients[fd].wake()
            elif fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                self._session.run(self._listen)
                self._wake_heard()
        return bool(happened)

    def _listen(self, _connection: Connection) -> None:
        if self._ear is not None:
            self._ear.read()

    def _wake_heard(self) -> None:
        if self._ear is not None and self._ear.heard:
            self._wake(self._ear.heard)
            self._ear.heard.clear()

    def _wake(self, ids: list[int] | set[int]) -> None:
        with self._lock:
            for id in ids:
                for place in self._places.get(id, ()):
                    place.wake()

    def _on_connect(self, connection: Connection) -> None:
        """LISTEN first; everything may have happened in the meantime."""
        self._rhythm = Rhythm(deaf=self._deaf)
        self._ear = Ear(connection.pgconn)
        self._ear.attach()
        if is_pooled(connection):
            self._refused("a pooler in front of the database delivers no notifications")
        elif not self._deaf:
            try:
                connection.execute(waiting.LISTEN)
            except REFUSED:
                self._refused("the server is a standby, where nobody can listen")

    def _refused(self, reason: str) -> None:
        """Nobody will tell us, so we look, as long as this connection lasts: the next one may do more."""
        self._rhythm.refused()
        if not self._said:
            self._said = True
            log.warning("waiting by looks only", reason=reason)
