"""What becomes of an entry: from a worker's message, or from its death, to the work for the recorder.

Run by the dispatcher's main thread. Pure decisions: nothing is sent, written or logged here.
"""

from typing import Any, Final

from aqd import channel, messages
from aqd.links import Held, Link
from aqd.output import text
from aqd.page import StopReason
from aqd.process import ExitStatus
from aqd.recorder import Completed, Failed, Released, about

Work = Completed | Failed | Released

# Why an attempt did not complete, for machines; the kind says what it counts as, the error says it to people.
REASONS: Final = {
    "exception": "the handler raised",
    "discard": "the handler raised Discard",
    "retry": "the handler raised Retry",
    "result": "what the handler returned cannot be stored",
    "interpreter_exit": "the handler called sys.exit",
    "too_large": "tags and meta are larger than what a worker can be handed",
    "plugin_import": "the handler's plugin could not be imported in the worker",
    "confinement": "the kernel refused what the handler's options ask for",
    "signal": "the worker was killed by a signal that aqd did not send",
    "oom": "the worker was killed while the kernel's OOM killer was at work",
    "exit": "the worker ended in the middle of the job: os._exit, or exit in C code",
    "memory_limit": "aqd killed the worker for its memory_limit_mb",
    "timeout": "timeout_s was over",
    "cancel": "the job was cancelled",
    "drain": "the daemon stopped",
    "lease": "the lease ran out",
}


# Of a message's 128 KiB, with room for what surrounds the entry.
MAX_ENTRY_BYTES: Final = channel.MAX_MESSAGE - 4096


def unsendable(held: Held, now_ns: int) -> Failed | None:
    """The end of a job that no worker can be given. No door lets one in; should one come all the same, it must not be
    claimed again and again and take the dispatcher with it each time."""
    if held.frame_bytes <= MAX_ENTRY_BYTES or held.job is None:
        return None
    return Failed(
        (0, 0),
        held.id,
        held.token,
        held.attempt,
        held.job.type,
        held.max_attempts,
        "discarded",
        f"tags and meta have {held.extra_bytes} bytes, more than a worker can be handed",
        None,
        now_ns,
        crashes=held.job.crashes,
        reason="too_large",
        about=about(held),
    )


def unbegun(held: Held, reason: str, now_ns: int) -> Released:
    """A job that goes back to the database as it came from there."""
    return Released(
        (0, 0), held.id, held.token, False, reason, now_ns, about=about(held), attempt=held.attempt
    )


def from_message(link: Link, held: Held, message: messages.Done | messages.Broken) -> Work:
    """The outcome that the worker itself has sent."""
    key = (link.incarnation, message.number)
    if type(message) is messages.Done:
        return Completed(key, held, message, link.slot)
    assert isinstance(message, messages.Broken)
    ended_ns = message.started_ns + message.wall_ns
    figures: dict[str, Any] = {
        "wall_s": message.wall_ns / 1e9,
        "cpu_s": message.cpu_us / 1e6,
        "peak_kb": message.peak_kb,
        "output": text(message.output) if message.output else None,
    }
    if message.kind in ("interrupted", "unstarted"):
        why = message.error or "the lease was not certain any more"
        begun = message.kind == "interrupted"
        return Released(
            key,
            held.id,
            held.token,
            begun,
            why,
            ended_ns,
            message.reason,
            message.traceback or None,
            about=about(held),
            attempt=held.attempt,
            slot=link.slot,
            **(figures if begun else {}),
        )
    return Failed(
        key,
        held.id,
        held.token,
        held.attempt,
        **_known(held),
        kind=message.kind,
        error=message.error,
        traceback=message.traceback or None,
        ended_ns=ended_ns,
        retry_after_s=message.retry_after_s if message.retry_after_s >= 0 else None,
        reason=message.reason,
        about=about(held),
        slot=link.slot,
        **figures,
    )


def from_exit(
    link: Link, held: Held, number: int, exited: messages.Exited, printed: str, now_ns: int
) -> Failed | Released:
    """The end of the attempt that its worker was on when it died, with what the job had ``printed``."""
    key = (link.incarnation, number)
    how = ExitStatus(exited.signal, exited.code)
    asked = StopReason(exited.reason) if exited.number == number else StopReason.NONE
    match asked:
        case StopReason.FENCE:
            # It began, so it counts. If somebody else owns the job by now, the token matches nothing.
            kind, reason, error = "lost", "lease", f"lease lost: worker killed by {how}"
        case StopReason.DRAIN:
            kind, reason, error = "interrupted", "drain", f"drain: worker killed by {how}"
        case StopReason.TIMEOUT:
            limit_s = link.page.entry(number).limit_ns / 1e9
            kind, reason = "timed_out", "timeout"
            error = f"ran longer than its limit of {limit_s:g} s and did not end when asked: killed by {how}"
        case StopReason.CANCEL:
            kind, reason = "cancelled", "cancel"
            error = f"cancelled, and did not end when asked: killed by {how}"
        case StopReason.MEMORY:
            kind, reason = "crashed", "memory_limit"
            error = f"memory limit: {exited.detail or 'used more than it may'}: killed by {how}"
        case _:
            kind, reason, error = "crashed", *_unasked(exited, how)
    page = link.page
    figures: dict[str, Any] = {
        "wall_s": max(0, now_ns - page.started_at_ns) / 1e9,
        "cpu_s": max(0, exited.cpu_us - page.cpu_at_us) / 1e6 if exited.cpu_us else None,
        "peak_kb": exited.peak_kb or None,
        "output": printed or None,
        "signal": exited.signal,
    }
    if kind == "interrupted":
        figures |= {"attempt": held.attempt, "slot": link.slot}
        return Released(key, held.id, held.token, True, error, now_ns, reason, about=about(held), **figures)
    return Failed(
        key,
        held.id,
        held.token,
        held.attempt,
        **_known(held),
        kind=kind,
        error=error,
        traceback=None,
        ended_ns=now_ns,
        exit_code=exited.code,
        reason=reason,
        about=about(held),
        slot=link.slot,
        **figures,
    )


def _unasked(exited: messages.Exited, how: ExitStatus) -> tuple[str, str]:
    """(reason, error) of a death that was nobody's wish here."""
    if exited.signal is None:
        return "exit", f"worker ended with {how} during the job"
    if exited.oom:
        return "oom", f"worker killed by {how}, while the kernel's OOM killer was at work"
    return "signal", f"worker killed by {how}"


def _known(held: Held) -> dict[str, Any]:
    """What the recorder need not look up, if this dispatcher has claimed the job itself."""
    if held.job is None:
        return {"type": None, "max_attempts": None}
    return {"type": held.job.type, "max_attempts": held.max_attempts, "crashes": held.job.crashes}
