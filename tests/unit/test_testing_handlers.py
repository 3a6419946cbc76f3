"""``aqd.testing``: one attempt in this process ends as the daemon would record it, and leaves nothing behind."""

# ruff: noqa: ARG005 (a handler takes a payload)

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aqd
from aqd import Discard, JobCancelled, JobInterrupted, JobTimeout, Retry
from aqd.config import Config, Jobs, Plugins
from aqd.errors import InputError, PluginError
from aqd.page import ENTRIES
from aqd.process import STOP_SIGNAL
from aqd.strays import MARKER
from aqd.testing import Outcome, Progress, load_plugins, run_handler

ROOT = Path(__file__).resolve().parents[2]


def raising(error: BaseException) -> Callable[[Any], None]:
    def handler(payload: Any) -> None:
        raise error

    return handler


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


# --- what goes in and what comes out


def test_payload_and_result_are_what_json_makes_of_them() -> None:
    seen = []

    def handler(payload: Any) -> Any:
        seen.append(payload)
        return {"pair": (1, 2.5), "text": "é"}

    outcome = run_handler(handler, {"items": (1, [True, None])})
    assert seen == [{"items": [1, [True, None]]}]
    assert outcome.completed
    assert outcome.assert_completed() == {"pair": [1, 2.5], "text": "é"}
    assert json.loads(outcome.result_json or "") == outcome.result


def test_a_handler_that_returns_nothing_has_no_result() -> None:
    outcome = run_handler(lambda payload: payload, None)
    assert (outcome.result, outcome.result_json) == (None, None)


def test_without_a_payload_it_is_an_empty_object() -> None:
    assert run_handler(lambda payload: payload).result == {}


@pytest.mark.parametrize("payload", [{1: 2}, {"a": object()}, float("nan"), "\0", "x" * 2_000_000])
def test_a_payload_that_could_not_be_submitted(payload: Any) -> None:
    ran = []
    with pytest.raises(InputError, match="payload"):
        run_handler(ran.append, payload)
    assert ran == []


@pytest.mark.parametrize(
    ("options", "field"), [({"tags": ["a b"]}, "tags"), ({"max_attempts": 0}, "max_attempts")]
)
def test_a_job_that_could_not_be_submitted(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        run_handler(lambda payload: None, **options)


@pytest.mark.parametrize(
    ("handler", "kind", "reason", "text"),
    [
        (raising(ValueError("no")), "failed", "exception", "ValueError: no"),
        (raising(Retry(12, "later")), "failed", "retry", "later"),
        (raising(Discard("never")), "discarded", "discard", "never"),
        (raising(SystemExit(3)), "failed", "interpreter_exit", "sys.exit(3)"),
        (raising(JobTimeout()), "failed", "exception", "JobTimeout"),  # nobody has asked for it
        (lambda payload: object(), "failed", "result", "cannot be stored"),
        (lambda payload: "x" * 2000, "failed", "result", "too large"),
    ],
)
def test_how_attempts_end(handler: Any, kind: str, reason: str, text: str) -> None:
    outcome = run_handler(handler, config=Config(jobs=Jobs(max_result_bytes=1024)))
    assert (outcome.kind, outcome.reason, outcome.result) == (kind, reason, None)
    assert text in outcome.error
    assert outcome.exception is not None
    assert "aqd/testing" not in outcome.traceback
    with pytest.raises(AssertionError, match=reason) as caught:
        outcome.assert_completed()
    assert caught.value.__cause__ is outcome.exception


def test_a_wish_for_a_retry_is_told() -> None:
    assert run_handler(raising(Retry(12))).retry_after_s == 12
    assert run_handler(raising(Retry())).retry_after_s is None


def test_the_job_is_what_the_test_says() -> None:
    def handler(payload: Any, job: Any) -> Any:
        return [job.id, job.type, job.queue, job.attempt, job.max_attempts, job.tags, job.meta]

    outcome = run_handler(handler, job_id=7, queue="mail", attempt=9, tags=["a"], meta={"k": [1]})
    assert outcome.result == ["7", "handler", "mail", 9, 9, ["a"], {"k": [1]}]
    assert run_handler(handler).result == ["1", "handler", "default", 1, 5, [], {}]


def test_progress_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    def handler(payload: Any, job: Any) -> None:
        job.progress(12.5, "begun")
        print("out")
        print("err", file=sys.stderr)
        job.progress(None, "on")

    outcome = run_handler(handler)
    assert outcome.progress == [Progress(12.5, "begun"), Progress(None, "on")]
    assert outcome.output == "out\nerr\n"
    assert capsys.readouterr() == ("out\n", "err\n")


def test_of_much_output_the_end_is_kept() -> None:
    def handler(payload: Any) -> None:
        for number in range(100_000):
            sys.stdout.write(f"{number}\n")

    output = run_handler(handler).output
    assert len(output) == 64 * 1024
    assert output.endswith("\n99999\n")


def test_a_progress_that_is_none_is_the_handlers_mistake() -> None:
    def handler(payload: Any, job: Any) -> None:
        job.progress(101)

    outcome = run_handler(handler)
    assert (outcome.kind, outcome.progress) == ("failed", [])


# --- being stopped


def stubborn(payload: Any) -> None:
    """Swallows what it is sent, twice."""
    for _ in range(2):
        try:
            threading.Event().wait(60)
        except BaseException:
            print("swallowed")
    threading.Event().wait(60)


def test_a_timeout_is_repeated_until_it_is_heeded() -> None:
    outcome = run_handler(stubborn, timeout_s=0.1)
    assert (outcome.kind, outcome.reason, outcome.output) == ("timed_out", "timeout", "swallowed\n" * 2)
    assert isinstance(outcome.exception, JobTimeout)


@pytest.mark.parametrize(
    ("stop", "error", "kind"),
    [
        ("cancel", JobCancelled, "cancelled"),
        ("drain", JobInterrupted, "interrupted"),
        ("timeout", JobTimeout, "timed_out"),
    ],
)
def test_a_job_is_stopped_as_the_test_says(stop: Any, error: type[BaseException], kind: str) -> None:
    def handler(payload: Any, job: Any) -> None:
        try:
            threading.Event().wait(60)
        except error:
            print(job.should_stop)
            raise

    outcome = run_handler(handler, stop_after_s=0.05, stop=stop)
    assert (outcome.kind, outcome.output) == (kind, "True\n")


def test_a_coroutine_is_cancelled_and_may_clean_up() -> None:
    async def handler(payload: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            print("clean")

    outcome = run_handler(handler, stop_after_s=0.05)
    assert (outcome.kind, outcome.output) == ("cancelled", "clean\n")


def test_in_another_thread_a_handler_can_look_for_itself() -> None:
    def handler(payload: Any, job: Any) -> str:
        while not job.should_stop:
            time.sleep(0.01)  # the loop of a handler, not of a test
        return "left early"

    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run_handler(handler, stop_after_s=0.05)))
    thread.start()
    thread.join(60)
    assert outcomes[0].result == "left early"


# --- what is left behind, and what passes through


@pytest.mark.parametrize("marker", [None, "somebody.1"])  # the latter: the tests run as a job of aqd's
def test_nothing_of_the_process_is_changed(marker: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[Any, ...]:
        return signal.getsignal(STOP_SIGNAL), sys.stdout, sys.stderr, dict(os.environ)

    def made() -> set[Any]:
        return {*os.listdir("/proc/self/fd"), *threading.enumerate()}

    run_handler(lambda payload: None)  # whatever is imported late
    monkeypatch.delenv(MARKER, raising=False)
    if marker is not None:
        monkeypatch.setenv(MARKER, marker)
    before, there = state(), made()
    run_handler(lambda payload: None)
    run_handler(raising(ValueError()), timeout_s=30)
    assert state() == before
    assert made() <= there  # what earlier tests have left may go meanwhile


class Meant(BaseException):
    """As pytest's outcomes are."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Meant()])
def test_what_is_meant_for_the_tester_passes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_handler(raising(error))


def test_pytests_own_outcomes_pass_through() -> None:
    with pytest.raises(pytest.fail.Exception, match="not here"):
        run_handler(lambda payload: pytest.fail("not here"))


def test_a_child_that_a_handler_lets_escape_does_not_run_the_tests(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    file.write_text("")

    children: list[int] = []

    def handler(payload: Any) -> None:
        children.append(os.fork())

    run_handler(handler)
    with file.open("a") as stream:
        stream.write("x")
    # This one: other tests' servers are children of this process, too.
    assert os.waitpid(children[0], 0)[1] != 0
    assert file.read_text() == "x"


def test_handlers_cannot_run_jobs() -> None:
    with load_plugins(module("outer", aqd_register=outer_register)) as plugins:
        outcome = plugins.run("outer")
        outer_register.plugins = plugins
        nested = plugins.run("outer")
    assert outcome.completed
    assert "running already" in nested.error


@aqd.hookimpl
def outer_register(handlers: Any) -> None:
    def outer(payload: Any) -> None:
        if plugins := getattr(outer_register, "plugins", None):
            plugins.run("outer")

    handlers.add("outer", outer)


# --- plugins


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "kit_good.py": """
            import aqd
            calls = []

            @aqd.hookimpl
            def aqd_register(handlers):
                calls.append(["register", handlers.settings("kit_good")])
                handlers.add("kit.good", good, queue="mail", max_attempts=2, timeout_s=0.1)
                handlers.add("kit.confined", lambda payload: None, nice=5, no_new_privs=True)

            def good(payload, job):
                if payload == "wait":
                    import threading
                    threading.Event().wait(60)
                return [job.queue, job.max_attempts, job.type]

            @aqd.hookimpl
            def aqd_worker_start(slot, generation):
                calls.append(["start", slot, generation])

            @aqd.hookimpl
            def aqd_worker_stop(slot):
                calls.append(["stop", slot])

            @aqd.hookimpl
            def aqd_job_start(job):
                calls.append(["job", job.id])

            @aqd.hookimpl
            def aqd_job_finish(job, outcome, error):
                calls.append(["finish", outcome])
                raise ValueError("in a hook")
        """,
        "kit_broken.py": "raise RuntimeError('at import')",
        "kit_threaded.py": """
            import threading
            import aqd
            over = threading.Event()
            threading.Thread(target=over.wait, daemon=True).start()

            @aqd.hookimpl
            def aqd_register(handlers):
                handlers.add("kit.threaded", lambda payload: over.set())
        """,
    }
    for name, source in files.items():
        (tmp_path / name).write_text(textwrap.dedent(source))
    return tmp_path


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugins folder stays on the path, and what was imported from it in the process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("kit_good", "kit_threaded"):
        sys.modules.pop(name, None)


def test_a_plugin_is_what_it_registers(folder: Path) -> None:
    file, nice = folder / "kit_good.py", os.nice(0)
    assert run_handler("kit.good", plugin=file).result == ["mail", 2, "kit.good"]
    assert run_handler("kit.good", plugin=file, queue="other", max_attempts=3).result[:2] == ["other", 3]
    assert run_handler("kit.good", "wait", plugin=file).kind == "timed_out"
    assert run_handler("kit.confined", plugin=file).completed
    assert os.nice(0) == nice


def test_hooks_are_called_as_in_a_worker(folder: Path) -> None:
    with load_plugins(folder / "kit_good.py", settings={"kit_good": {"a": 1}}) as plugins:
        assert plugins.types == ["kit.confined", "kit.good"]
        plugins.run("kit.good", job_id=4)
        outcome = plugins.run("kit.good", "wait", job_id=5)
    plugins.close()
    assert sys.modules["kit_good"].calls == [
        ["register", {"a": 1}],
        ["start", 0, 1],
        ["job", "4"],
        ["finish", "completed"],
        ["job", "5"],
        ["finish", "timed_out"],
        ["stop", 0],
    ]
    assert outcome.hook_errors == ["aqd_job_finish of the plugin kit_good: ValueError: in a hook"]


def test_a_broken_plugin_is_refused_if_it_is_asked_for(folder: Path) -> None:
    with pytest.raises(PluginError, match=r"kit_broken.*at import"):
        load_plugins(folder)
    with pytest.raises(PluginError, match="no plugin"):
        load_plugins(folder / "absent.py")
    with load_plugins(folder / "kit_good.py", folder / "kit_threaded.py") as plugins:
        assert plugins.run("kit.threaded").completed
        with pytest.raises(LookupError, match=r"'kit\.bad'.*kit\.good"):
            plugins.run("kit.bad")


def test_a_module_is_used_as_it_is() -> None:
    @aqd.hookimpl
    def aqd_register(handlers: Any) -> None:
        handlers.add("m", lambda payload: handlers.settings("orders"))

    orders = module("orders", aqd_register=aqd_register)
    assert run_handler("m", plugin=orders, settings={"orders": {"k": 1}}).result == {"k": 1}
    with pytest.raises(PluginError, match="two handlers"):
        load_plugins(orders, module("others", aqd_register=aqd_register))


def test_a_hook_that_fails_before_the_first_job_fails_the_test() -> None:
    @aqd.hookimpl
    def aqd_register(handlers: Any) -> None:
        handlers.add("m", lambda payload: None)

    @aqd.hookimpl
    def aqd_worker_start() -> None:
        raise ConnectionError("no server")

    with (
        load_plugins(module("m", aqd_register=aqd_register, aqd_worker_start=aqd_worker_start)) as plugins,
        pytest.raises(ConnectionError),
    ):
        plugins.run("m")


def test_without_sources_the_configuration_says_what_to_load(folder: Path) -> None:
    (folder / "kit_broken.py").unlink()
    with load_plugins(config=Config(plugins=Plugins(dir=str(folder), entry_points=False))) as plugins:
        assert "kit.good" in plugins.types


def test_the_timer_of_somebody_else_goes_on() -> None:
    """That of pytest-timeout, for one; the limit of an import uses the same."""
    rang: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, _frame: rang.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        load_plugins(ROOT / "plugins" / "noop.py").close()
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 3600
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def test_a_type_needs_a_plugin_and_a_plugin_a_type() -> None:
    with pytest.raises(TypeError, match="plugin="):
        run_handler("noop")
    with pytest.raises(TypeError, match="name the job type"):
        run_handler(lambda payload: None, plugin=ROOT / "plugins" / "noop.py")


def test_the_page_holds_more_attempts_than_it_has_lines() -> None:
    with load_plugins(ROOT / "plugins" / "noop.py") as plugins:
        results = {plugins.run("noop", {"return": 1}).result for _ in range(ENTRIES + 2)}
    assert results == {1}
