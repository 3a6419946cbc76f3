"""For nodes under libfaketime: a ``time.sleep`` that works there.

libfaketime 0.9.10 answers EINVAL to clock_nanosleep(2) with an absolute moment, which is how Python sleeps.
Everything else that waits (poll, epoll, locks with a timeout) is not touched by it.
"""

import select
import time


def sleep(seconds: float, /) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select((), (), (), seconds)


time.sleep = sleep
