"""How often the master, and the dispatcher's main thread, look around when nothing wakes them: pure decisions.

Most of what they do follows an event. Some things only a look finds: that a limit has passed, how much memory a job
takes, that a worker has reached its loop. While jobs run, and for :data:`AWAKE_S` after, the looks are close together;
at rest they are rare, and a node with 64 slots cost 1.4 % of a core before they were. The dispatcher says when
a job is about to be given out (:class:`aqd.messages.Working`), or the first ones after a rest would have no limits for
up to :data:`REST_S`.
"""

from typing import Final

# While jobs run: limits are met within this.
TICK_S: Final = 0.2
REST_S: Final = 1.0
# While a worker is on its way to its loop, for so long at most: nothing but its page says that it has arrived, and a start
# or a reload waits for it.
BIRTH_TICK_S: Final = 0.01
BIRTH_S: Final = 1.0
# How long the last sign of work is remembered, and how old it may be before the dispatcher gives another one.
AWAKE_S: Final = 3.0
TELL_S: Final = 1.5


class Pace:
    """Remembers when there was work."""

    def __init__(self) -> None:
        self._awake_until = 0.0
        self._birth_until = 0.0

    def worked(self, now: float) -> None:
        """Something is under way, or will be at once."""
        self._awake_until = now + AWAKE_S

    def born(self, now: float) -> None:
        """A worker was forked."""
        self._birth_until = now + BIRTH_S

    def tick_s(self, now: float, *, newborns: bool) -> float:
        """How long to wait at most; ``newborns``: some worker has not reached its loop."""
        if newborns and now < self._birth_until:
            return BIRTH_TICK_S
        return TICK_S if now < self._awake_until else REST_S
