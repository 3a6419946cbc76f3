"""What becomes of an entry: from a worker's message, or from its death, to the work for the recorder.

Run by the dispatcher's main thread. Pure decisions: nothing is sent, written or logged here.
"""

from aqd import messages
from aqd.links import Held, Link
from aqd.page import StopReason
from aqd.process import ExitStatus
from aqd.recorder import Completed, Failed, Released

Work = Completed | Failed | Released


def from_message(link: Link, held: Held, message: messages.Done | messages.Broken) -> Work:
    """The outcome that the worker itself has sent."""
    key = (link.incarnation, message.number)
    ended_ns = message.started_ns + message.wall_ns
    wall_s, cpu_s, peak_kb = message.wall_ns / 1e9, message.cpu_us / 1e6, message.peak_kb
    if isinstance(message, messages.Done):
        result = message.result or None
        return Completed(key, held.id, held.token, held.attempt, result, ended_ns, wall_s, cpu_s, peak_kb)
    if message.kind in ("interrupted", "unstarted"):
        reason = message.error or "the lease was not certain any more"
        return Released(key, held.id, held.token, message.kind == "interrupted", reason, ended_ns)
    return Failed(
        key,
        held.id,
        held.token,
        held.attempt,
        *_known(held),
        message.kind,
        message.error,
        message.traceback or None,
        ended_ns,
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_kb=peak_kb,
        retry_after_s=message.retry_after_s if message.retry_after_s >= 0 else None,
    )


def from_exit(link: Link, held: Held, number: int, exited: messages.Exited, now_ns: int) -> Work | None:
    """The end of the attempt that its worker was on when it died; None if nothing may be written,
    because somebody else may own the job by now."""
    key = (link.incarnation, number)
    how = ExitStatus(exited.signal, exited.code)
    reason = StopReason(exited.reason) if exited.number == number else StopReason.NONE
    match reason:
        case StopReason.FENCE:
            return None
        case StopReason.DRAIN:
            return Released(key, held.id, held.token, True, f"drain: worker killed by {how}", now_ns)
        case StopReason.TIMEOUT:
            limit_s = link.page.entry(number).limit_ns / 1e9
            kind = "timed_out"
            error = f"ran longer than its limit of {limit_s:g} s and did not end when asked: killed by {how}"
        case _:
            kind = "crashed"
            error = f"worker killed by {how}" if exited.signal else f"worker ended with {how} during the job"
    return Failed(
        key,
        held.id,
        held.token,
        held.attempt,
        *_known(held),
        kind,
        error,
        None,
        now_ns,
        wall_s=(now_ns - link.page.started_at_ns) / 1e9,
        signal=exited.signal,
        exit_code=exited.code,
    )


def _known(held: Held) -> tuple[str | None, int | None]:
    """(type, max_attempts), as far as this dispatcher has claimed the job itself."""
    return (held.job.type, held.max_attempts) if held.job is not None else (None, None)
