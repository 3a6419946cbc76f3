"""shell: runs a program that the operator has allowed, with the arguments of the job.

There is no shell in it: the arguments reach the program as they stand, so nothing in them can start
anything else.

Payload
    ``argv``      list of strings, the program first. Required.
    ``stdin``     string given to the program. Without it, standard input is empty.
    ``cwd``       absolute folder to run in; ``/`` otherwise.
    ``env``       object of strings, added to the program's environment; names must be allowed.
    ``ok_codes``  list of exit codes that count as success; ``[0]`` otherwise.
Result
    ``{"exit_code": number, "stdout": string, "stderr": string}``. Of each stream the last 64 KiB are
    kept; ``stdout_dropped`` and ``stderr_dropped`` say how many bytes came before them, if any did.

Settings, in ``[plugins.settings.shell]``
    ``allow``      list of programs. An absolute path allows exactly this path; a name allows what it
                   means in ``path``. Empty, as it is unless changed, allows nothing.
    ``allow_env``  list of the variable names that jobs may set, empty unless changed. A variable such
                   as LD_PRELOAD turns any allowed program into every program.
    ``path``       where names are looked for, ``/usr/local/bin:/usr/bin:/bin`` unless changed.

Of the daemon's own environment only the locale, the time zone and the user's name and home are passed
on: the rest may hold passwords.

Discarded: a payload that is malformed or not allowed. Failed, to be retried: an exit code other than
``ok_codes``, a program that died of a signal or that could not be started. When the job is stopped, or
once the program has ended, its whole process group is killed: nothing of it is left behind, and what it
left running cannot hold the job by holding a pipe.
"""

import contextlib
import errno
import os
import selectors
import shutil
import signal
import subprocess
import threading
from typing import IO, Any

import aqd
from aqd.process import die_with_parent

KEPT_BYTES = 65536
TAIL_CHARACTERS = 2000
MAX_ARGUMENTS = 1000
CHUNK_BYTES = 65536
MOST_DRAINED_CHUNKS = 32  # a pipe holds at most 1 MiB (pipe(7), pipe-max-size)
PASSED_ON = ("HOME", "LANG", "LANGUAGE", "LOGNAME", "TMPDIR", "TZ", "USER")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

_settings: dict[str, Any] = {}


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    _settings.clear()
    _settings.update(handlers.settings("shell"))
    for name in ("allow", "allow_env"):
        value = _settings.setdefault(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
            raise ValueError(f"plugins.settings.shell.{name} must be a list of strings")
    for program in _settings["allow"]:
        if "/" in program and not os.path.isabs(program):
            raise ValueError(
                f"plugins.settings.shell.allow: {program!r} is neither a name nor an absolute path"
            )
    if not isinstance(_settings.setdefault("path", DEFAULT_PATH), str):
        raise ValueError("plugins.settings.shell.path must be a string of folders joined by ':'")
    handlers.add("shell", shell)


def shell(payload: Any) -> dict[str, Any]:
    command = read_payload(payload)
    exit_code, stdout, stderr = run(command)
    if exit_code not in command.ok_codes:
        tail = (stderr.text().strip() or stdout.text().strip())[-TAIL_CHARACTERS:]
        raise RuntimeError(f"{command.argv[0]} {ending(exit_code)}{': ' if tail else ''}{tail}")
    result: dict[str, Any] = {"exit_code": exit_code, "stdout": stdout.text(), "stderr": stderr.text()}
    for name, kept in (("stdout", stdout), ("stderr", stderr)):
        if kept.dropped:
            result[f"{name}_dropped"] = kept.dropped
    return result


# --- what is allowed --------------------------------------------------------------------------------


class Command:
    """A checked payload."""

    def __init__(self, argv: list[str], program: str, payload: dict[str, Any]) -> None:
        self.argv = argv
        self.program = program
        self.cwd = read_folder(payload)
        self.env = read_environment(payload)
        self.stdin = read_text(payload)
        self.ok_codes = read_codes(payload)


def read_payload(payload: Any) -> Command:
    """:class:`aqd.Discard` names the field that is wrong, or the setting that would allow it."""
    if not isinstance(payload, dict):
        raise aqd.Discard(f"payload: must be an object with the key 'argv', not {type(payload).__name__}")
    unknown = sorted(payload.keys() - {"argv", "stdin", "cwd", "env", "ok_codes"})
    if unknown:
        raise aqd.Discard(f"payload.{unknown[0]}: is not known; known are argv, stdin, cwd, env, ok_codes")
    argv = payload.get("argv")
    if isinstance(argv, str):
        raise aqd.Discard("payload.argv: must be a list of strings: there is no shell to take a line apart")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise aqd.Discard("payload.argv: must be a list of strings, the program first")
    if len(argv) > MAX_ARGUMENTS:
        raise aqd.Discard(f"payload.argv: has {len(argv)} entries, the bound is {MAX_ARGUMENTS}")
    for index, word in enumerate(argv):
        check_text(f"argv[{index}]", word)
    return Command(argv, find_program(argv[0]), payload)


def find_program(name: str) -> str:
    """The file to execute. Names and paths are compared as written: no links and no ``..`` are followed."""
    allowed: list[str] = _settings["allow"]
    if name not in allowed:
        what = f"allowed are: {', '.join(allowed)}" if allowed else "no program is allowed"
        raise aqd.Discard(
            f"payload.argv[0]: {name[:200]!r} is not allowed ({what}); "
            "programs are allowed by plugins.settings.shell.allow"
        )
    if os.path.isabs(name):
        return name
    path = shutil.which(name, path=_settings["path"])
    if path is None:
        raise FileNotFoundError(f"{name} is allowed, but is not in {_settings['path']}")
    return path


def read_folder(payload: dict[str, Any]) -> str:
    cwd = payload.get("cwd", "/")
    if not isinstance(cwd, str) or not os.path.isabs(cwd):
        raise aqd.Discard("payload.cwd: must be an absolute path")
    check_text("cwd", cwd)
    return cwd


def read_environment(payload: dict[str, Any]) -> dict[str, str]:
    given = payload.get("env", {})
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise aqd.Discard("payload.env: must be an object of strings")
    for name, value in given.items():
        if name not in _settings["allow_env"]:
            raise aqd.Discard(
                f"payload.env: {name[:200]!r} is not allowed; names are allowed by plugins.settings.shell.allow_env"
            )
        check_text(f"env.{name}", value)
    kept = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("LC_")}
    return {"PATH": _settings["path"], **kept, **given}


def read_text(payload: dict[str, Any]) -> bytes | None:
    text = payload.get("stdin")
    if text is None:
        return None
    if not isinstance(text, str):
        raise aqd.Discard("payload.stdin: must be a string")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise aqd.Discard("payload.stdin: contains half a surrogate pair, which is no character") from None


def read_codes(payload: dict[str, Any]) -> list[int]:
    codes = payload.get("ok_codes", [0])
    good = isinstance(codes, list) and all(
        isinstance(code, int) and not isinstance(code, bool) and 0 <= code <= 255 for code in codes
    )
    if not good:
        raise aqd.Discard("payload.ok_codes: must be a list of numbers from 0 to 255")
    return list(codes)


def check_text(field: str, text: str) -> None:
    if "\0" in text:
        raise aqd.Discard(f"payload.{field}: contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise aqd.Discard(f"payload.{field}: contains half a surrogate pair, which is no character") from None


def ending(exit_code: int) -> str:
    """A negative code is a signal's number, as in :mod:`subprocess`."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


# --- running it -------------------------------------------------------------------------------------


class Tail:
    """The last :data:`KEPT_BYTES` of a stream, and how many bytes came before."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.dropped = 0

    def add(self, chunk: bytes) -> None:
        self.kept += chunk
        surplus = len(self.kept) - KEPT_BYTES
        if surplus > 0:
            del self.kept[:surplus]
            self.dropped += surplus

    def text(self) -> str:
        """As text that a JSON result can hold: no NUL, no broken characters."""
        return self.kept.decode("utf-8", errors="replace").replace("\0", "\ufffd")


def run(command: Command) -> tuple[int, Tail, Tail]:
    """Run it to its end; (exit code, stdout, stderr). Its process group is gone on every way out."""
    parent = os.getpid()

    def in_child() -> None:
        # Should the worker be killed, the program goes with it.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    stdout, stderr = Tail(), Tail()
    with HeldSignals() as signals:
        try:
            process = subprocess.Popen(
                command.argv,
                executable=command.program,
                cwd=command.cwd,
                env=command.env,
                stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=in_child,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:  # will never fit
                raise aqd.Discard("payload.argv: the arguments and the environment are too long") from None
            raise
        try:
            converse(process, command.stdin or b"", stdout, stderr, signals)
        finally:
            finish(process, stdout, stderr)
    return process.returncode, stdout, stderr


class HeldSignals:
    """Lets signal handlers run at one place only: in :meth:`deliver`, and at the end of the block.

    A job is stopped by a signal whose handler raises, more than once if need be. In the middle of
    starting a program that would leave one that nobody knows of; in the middle of cleaning up, one half
    cleaned up. Handlers are replaced rather than signals blocked: Python runs them in the main thread
    even when the signal went to another one. ``wake`` becomes readable when something has arrived.
    """

    def __enter__(self) -> "HeldSignals":
        self.wake, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._arrived: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere no handler ever runs
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._arrive)
        return self

    def _arrive(self, number: int, _frame: Any) -> None:
        self._arrived.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def deliver(self) -> None:
        """Run the handlers of what has arrived; raises what they raise."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while self._arrived:
            number = self._arrived.pop(0)
            self._handlers[number](number, None)

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            os.close(self.wake)
            os.close(self._writer)
        for number in dict.fromkeys(self._arrived):
            signal.raise_signal(number)

    def _restore(self) -> None:
        try:
            while self._handlers:
                number = next(iter(self._handlers))
                signal.signal(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._handlers:  # one that was put back has raised already
                self._restore()


def finish(process: "subprocess.Popen[bytes]", stdout: Tail, stderr: Tail) -> None:
    """Kill what is left of the group, take the last output, reap the program."""
    # The program is not reaped yet, so the number of its group cannot belong to anybody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream, tail in ((process.stdout, stdout), (process.stderr, stderr)):
        drain(stream, tail)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def converse(
    process: "subprocess.Popen[bytes]", stdin: bytes, stdout: Tail, stderr: Tail, signals: HeldSignals
) -> None:
    """Feed and read the program until it has ended; whoever it left behind with a pipe is not waited for."""
    rest = memoryview(stdin)
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(ended, selectors.EVENT_READ)
            selector.register(signals.wake, selectors.EVENT_READ)
            for stream, tail in ((process.stdout, stdout), (process.stderr, stderr)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, tail)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while True:
                for key, _ in selector.select(timeout=60):
                    if key.fd == ended:
                        return
                    if key.fd == signals.wake:
                        signals.deliver()
                    elif key.fileobj is process.stdin:
                        rest = feed(key.fd, rest)
                        if not rest:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                    elif not read(key.fd, key.data):
                        selector.unregister(key.fileobj)
        finally:
            os.close(ended)


def feed(fd: int, rest: memoryview) -> memoryview:
    """Write what fits now; what is left. A program that does not want its input is no error."""
    try:
        return rest[os.write(fd, rest[:CHUNK_BYTES]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        return rest[:0]


def read(fd: int, tail: Tail) -> bool:
    """Read what is there; False at the end of the stream."""
    try:
        chunk = os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return True
    tail.add(chunk)
    return bool(chunk)


def drain(stream: "IO[bytes] | None", tail: Tail) -> None:
    """What the program wrote before it ended. Bounded: a process that left the group may write on."""
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    for _ in range(MOST_DRAINED_CHUNKS):
        try:
            chunk = os.read(stream.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            return
        tail.add(chunk)
