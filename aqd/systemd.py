"""Talking to systemd: readiness, reloads, status and the watchdog; the sockets that it passes.

Used by the master only (the unit says ``NotifyAccess=main``; what its children send is refused), and by ``aqd api``. Does
nothing, and says so by returning False or None, when there is no systemd above us. Never waits: the manager
may be stopped or re-executing.

Protocol: sd_notify(3), sd_watchdog_enabled(3), systemd.service(5).
"""

import os
import socket
import time
from collections import deque
from collections.abc import Mapping, MutableMapping

_WAITING_MAX = 32
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET",)
_SOCKETS_PREFIX = "LISTEN_"
_NOT_FOR_CHILDREN_PREFIXES = ("WATCHDOG_", _SOCKETS_PREFIX)


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send ``state`` (lines ``READY=1``, ``STATUS=…``, ``STOPPING=1``, ``WATCHDOG=1``,
    ``EXTEND_TIMEOUT_USEC=…``) without waiting; True when the manager's socket took it.

    ``NOTIFY_SOCKET`` is a path, or ``@name`` for the abstract namespace; nothing else is spoken.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return False
    if address[0] == "@":
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect(address)
            sock.send(state.encode(errors="replace"))
    except OSError:  # also: its queue is full, because it is stopped or re-executing
        return False
    return True


class Notifier:
    """What must reach the manager in its order, however busy that is, and never waits for it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._waiting: deque[str] = deque(maxlen=_WAITING_MAX)

    def send(self, state: str) -> None:
        """A milestone (ready, reloading, stopping): kept until it could be sent."""
        if self._environ.get("NOTIFY_SOCKET"):
            self._waiting.append(state)
            self.flush()

    def hint(self, state: str) -> bool:
        """A status or a sign of life: worth nothing later. Whether it was sent."""
        return self.flush() and notify(state, self._environ)

    def flush(self) -> bool:
        """Send what waits, as far as it goes; whether all of it went. To be called now and then."""
        while self._waiting:
            if not notify(self._waiting[0], self._environ):
                return False
            self._waiting.popleft()
        return True


def reloading() -> str:
    """The state to send when a reload begins; ``READY=1`` ends it, also after a refusal.

    The time stamp lets ``Type=notify-reload`` (systemd 253) tell this reload from an earlier one.
    """
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """How often to send ``WATCHDOG=1``: half of what the manager allows; None without a watchdog for us.

    ``WATCHDOG_PID`` must be ours: the variables may have been inherited from a service that started us.
    """
    try:
        limit_us = int(environ["WATCHDOG_USEC"])
        if "WATCHDOG_PID" in environ and int(environ["WATCHDOG_PID"]) != os.getpid():
            return None
    except (KeyError, ValueError):
        return None
    return limit_us / 2_000_000 if limit_us > 0 else None


def listen_fds(environ: Mapping[str, str] = os.environ) -> int:
    """How many sockets the manager has passed to this very process, from descriptor 3 on (sd_listen_fds(3)); 0 if the
    variables are another process's, or make no sense."""
    try:
        count, pid = int(environ["LISTEN_FDS"]), int(environ["LISTEN_PID"])
    except (KeyError, ValueError):
        return 0
    return max(count, 0) if pid == os.getpid() else 0


def forget_sockets(env: MutableMapping[str, str]) -> None:
    """Remove what says that there are sockets: gunicorn would look for them once more, less leniently."""
    for name in [name for name in env if name.startswith(_SOCKETS_PREFIX)]:
        del env[name]


def strip_environment(env: MutableMapping[str, str]) -> None:
    """Remove what must not reach children: gunicorn, for one, would announce READY for the daemon."""
    for name in list(env):
        if name in _NOT_FOR_CHILDREN or name.startswith(_NOT_FOR_CHILDREN_PREFIXES):
            del env[name]
