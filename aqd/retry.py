"""Whether and when a job that did not complete runs again. Pure: no clock, no database, no state.

Used by the dispatcher for the outcomes it records. (The rescue of expired leases applies the same
range in SQL, because it has to decide for many rows in one statement.)

The wait is drawn evenly between ``base_s`` and ``min(max_s, base_s * factor**attempt)``: "full
jitter". Exponential growth alone keeps jobs that failed together in step for ever, and they hit the
thing that failed them together again; an even draw spreads them, and the lower end keeps a job from
coming back within the same second. The exponent is the attempt just made, so already the first retry
is spread (2 to 4 s with the defaults).

Promises: a wait is never negative, never NaN, never above ``max_s`` (or above ten years, when the
handler asked for a moment of its own). Fails: :class:`ValueError` for a kind that is not a failure.
"""

import math
from random import Random
from typing import NamedTuple

from aqd.hookspecs import Backoff

__all__ = ["FAILURES", "MAX_RETRY_AFTER_S", "Backoff", "Decision", "decide"]

# Kinds of attempts that count. `discarded` and `unknown_type` are never repeated.
FINAL = frozenset({"discarded", "unknown_type", "cancelled"})
FAILURES = frozenset({"failed", "crashed", "timed_out", "lost"}) | FINAL

# Retry(after_s) comes from a handler, hence from anywhere: a timestamp passed by mistake, or 1e300,
# must not become a row that the database refuses.
MAX_RETRY_AFTER_S = 10 * 366 * 86400.0


class Decision(NamedTuple):
    """``retry_in_s`` seconds from now the job is due again; None: FAILED, for good. ``verdict`` then says why
    where it is not plain from the number of attempts."""

    retry_in_s: float | None
    verdict: str = ""


def decide(
    kind: str,
    attempt: int,
    max_attempts: int,
    backoff: Backoff,
    rng: Random,
    *,
    retry_after_s: float | None = None,
    crashes: int = 0,
    max_crashes: int = 1_000_000,
) -> Decision:
    """What becomes of a job whose attempt number ``attempt`` (from 1) ended as ``kind``, after ``crashes``
    attempts that had crashed before. A job that kills its process ``max_crashes`` times is poison: FAILED,
    however many attempts it may have.

    ``retry_after_s`` is the handler's own wish (``raise Retry(after_s=…)``) and replaces the backoff;
    it does not buy further attempts. A wish that is no usable number is ignored.
    """
    if kind not in FAILURES:
        raise ValueError(f"{kind!r} is not a failed attempt; those are {', '.join(sorted(FAILURES))}")
    if kind == "crashed" and crashes + 1 >= max_crashes:
        return Decision(None, f"poison job, crashed {_times(crashes + 1)}")
    if kind in FINAL or attempt >= max_attempts:
        return Decision(None)
    if retry_after_s is not None and _usable(retry_after_s):
        # Bounded before the conversion: float(10**400) raises.
        return Decision(float(min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S)))
    return Decision(rng.uniform(backoff.base_s, _ceiling(backoff, attempt)))


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _ceiling(backoff: Backoff, attempt: int) -> float:
    try:
        grown = backoff.base_s * backoff.factor ** max(1, attempt)
    except OverflowError:  # 10.0 ** 400: far above any bound
        return backoff.max_s
    return min(backoff.max_s, grown)


def _usable(wish: object) -> bool:
    if isinstance(wish, bool) or not isinstance(wish, int | float):
        return False
    return isinstance(wish, int) or not math.isnan(wish)
