"""What a plugin may say in ``aqd_register``, and what the job looks like to a handler."""

# ruff: noqa: ARG005 (signatures are what is tested)

import functools
import logging
import math
import re
from datetime import UTC, datetime

import msgspec
import pytest

import aqd
from aqd.hookspecs import (
    HOOK_NAMES,
    UNLIMITED,
    Backoff,
    Confinement,
    HandlerInfo,
    HandlerOptions,
    Handlers,
    JobContext,
)


@pytest.fixture
def handlers():
    return Handlers("demo", {"demo": {"folder": "/tmp", "list": [1]}})


def added(handlers, function, **options):
    handlers.add("a", function, **options)
    return handlers.collected["a"][0]


async def coroutine(payload): ...


class Callable:
    def __call__(self, payload, job): ...

    async def method(self, payload): ...


class AsyncCallable:
    async def __call__(self, payload): ...


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "wants_job", "is_async"),
    [
        (lambda payload: None, False, False),
        (lambda payload, job: None, True, False),
        (lambda payload, context: None, True, False),
        (lambda payload, job=None: None, True, False),
        (lambda payload, tries=3: None, False, False),
        (lambda payload, *, tries=3: None, False, False),
        (lambda payload=None: None, False, False),
        (lambda payload, **more: None, False, False),
        (len, False, False),
        (dict, False, False),
        (coroutine, False, True),
        (Callable(), True, False),
        (Callable().method, False, True),
        (AsyncCallable(), False, True),
        (functools.partial(lambda a, payload, job: None, 1), True, False),
        (functools.partial(coroutine), False, True),
        (decorated(lambda payload, job: None), True, False),
    ],
)
def test_how_a_handler_is_called_is_read_from_its_signature(handlers, function, wants_job, is_async):
    info = added(handlers, function)
    assert (info.wants_job, info.is_async) == (wants_job, is_async)


def generator(payload):
    yield


async def async_generator(payload):
    yield


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda: None, "is called with"),
        (lambda a, b, c: None, "is called with"),
        (lambda *args: None, "functools.wraps"),
        (lambda payload, *, needed: None, "needed"),
        (generator, "generator"),
        (async_generator, "generator"),
        ("not callable", "cannot be called"),
        (None, "cannot be called"),
    ],
)
def test_what_cannot_be_called_with_a_payload_is_refused(handlers, function, word):
    with pytest.raises(TypeError, match=word) as refusal:
        handlers.add("my.type", function)
    assert "my.type" in str(refusal.value)
    assert not handlers.collected


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ä", "a\n", 7, None, "a;b"])
def test_bad_type_and_queue_names_are_refused(handlers, name):
    with pytest.raises(ValueError, match="128"):
        handlers.add(name, len)
    with pytest.raises(ValueError, match="queue"):
        handlers.add("fine", len, queue=name if name is not None else "")


@pytest.mark.parametrize("name", ["a", "x" * 128, "pdf.generate/v2:now_1-B"])
def test_good_names(handlers, name):
    handlers.add(name, len, queue=name)
    assert handlers.collected[name][0].queue == name


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": math.nan},
        {"timeout_s": math.inf},
        {"timeout_s": "5"},
        {"timeout_s": True},
        {"max_attempts": 0},
        {"max_attempts": 1001},
        {"max_attempts": 2.0},
        {"max_attempts": True},
        {"backoff": 5},
        {"backoff": {"base_s": 1}},
    ],
)
def test_bad_options_are_refused_by_name(handlers, options):
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=name):
        handlers.add("a", len, **options)


def test_the_description_travels_between_processes(handlers):
    backoff = Backoff(base_s=1, max_s=60, factor=3)
    info = added(handlers, len, timeout_s=5, max_attempts=2, backoff=backoff, queue="slow")
    assert info == HandlerInfo(
        type="a", plugin="demo", timeout_s=5.0, max_attempts=2, backoff=backoff, queue="slow"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=HandlerInfo) == info


def test_the_decorator_returns_the_function_itself(handlers):
    @handlers.handler("a", timeout_s=2)
    def function(payload):
        return payload

    assert function(7) == 7
    info, kept = handlers.collected["a"]
    assert kept is function
    assert info.timeout_s == 2


def test_the_options_and_what_they_become(handlers):
    info = added(
        handlers,
        len,
        timeout_s=2,
        max_attempts=3,
        max_crashes=1000,
        memory_limit_mb=1,
        detach=True,
        keep_output=True,
        queue="q",
        rlimits={"NOFILE": 0, "CPU": "unlimited"},
        oom_score_adj=-1000,
    )
    assert (info.timeout_s, info.max_attempts, info.max_crashes, info.memory_limit_mb) == (2.0, 3, 1000, 1)
    assert (info.detach, info.keep_output, info.one_shot, info.queue) == (True, True, False, "q")
    assert info.confinement == Confinement(rlimits={"NOFILE": 0, "CPU": UNLIMITED}, oom_score_adj=-1000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=HandlerInfo) == info


@pytest.mark.parametrize(
    "options",
    [
        {"nice": 0},
        {"no_new_privs": True},
        {"user": "nobody"},
        {"group": "nogroup"},
        {"hard_rlimits": {"CORE": 0}},
        {"one_shot": True},
    ],
)
def test_what_cannot_be_taken_back_gets_a_process_of_its_own(handlers, options):
    assert added(handlers, len, **options).one_shot


def test_an_option_that_is_none_or_asks_for_nothing_is_not_there(handlers):
    plain = added(Handlers("demo", {}), len)
    nothing = dict.fromkeys(HandlerOptions.__annotations__)
    assert added(Handlers("demo", {}), len, **nothing) == plain
    assert added(handlers, len, rlimits={}, no_new_privs=False, detach=False, one_shot=False) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_crashes": 0}, "max_crashes must be a whole number from 1 to 1000, not 0"),
        ({"max_crashes": 1001}, "max_crashes"),
        ({"memory_limit_mb": True}, "memory_limit_mb must be a whole number from 1 to 1048576, not True"),
        ({"memory_limit_mb": 1048577}, "memory_limit_mb"),
        ({"oom_score_adj": 1001}, "oom_score_adj must be a whole number from -1000 to 1000"),
        ({"nice": 20}, "nice must be a whole number from -20 to 19"),
        ({"nice": 0.5}, "nice"),
        ({"detach": 1}, "detach must be True or False, not 1"),
        ({"rlimits": {"RLIMIT_CPU": 1}}, "rlimits: there is no 'RLIMIT_CPU'; the names are NOFILE, FSIZE"),
        ({"rlimits": {"CPU": -1}}, "rlimits: CPU must be a whole number of at least 0"),
        ({"hard_rlimits": {"AS": 1.5}}, "hard_rlimits: AS"),
        ({"hard_rlimits": [1]}, "hard_rlimits must be a mapping"),
        ({"user": ""}, "user must be the name"),
        ({"group": 5}, "group must be the name"),
        ({"timeouts": 5}, "there is no option 'timeouts'; did you mean timeout_s?"),
        ({"zzz": 5}, "there is no option 'zzz'; the options are timeout_s, max_attempts"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(handlers, options, message):
    with pytest.raises((TypeError, ValueError), match="handler 'a': " + re.escape(message)):
        handlers.add("a", len, **options)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        handlers.handler("a", **options)(len)
    assert handlers.collected == {}


def test_one_type_once_per_plugin(handlers):
    handlers.add("a", len)
    with pytest.raises(ValueError, match=r"'a'.*twice"):
        handlers.add("a", len)


def test_nothing_is_added_after_the_hook_has_returned(handlers):
    handlers.close()
    with pytest.raises(RuntimeError, match="inside aqd_register"):
        handlers.add("a", len)


def test_settings_are_a_copy(handlers):
    handlers.settings("demo")["list"].append(2)
    assert handlers.settings("demo") == {"folder": "/tmp", "list": [1]}
    assert handlers.settings("other") == {}


def test_the_job_as_a_handler_sees_it(caplog):
    stop = False
    job = JobContext(
        id="42",
        type="t",
        queue="default",
        attempt=2,
        max_attempts=5,
        created_at_us=1_767_225_600_000_001,
        should_stop=lambda: stop,
    )
    assert job.created_at == datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    assert not job.should_stop
    stop = True
    assert job.should_stop
    with caplog.at_level(logging.INFO):
        job.logger.info("half way")
    (record,) = caplog.records
    assert (record.job_id, record.type, record.attempt) == ("42", "t", 2)
    assert repr(job) == "<job 42 t attempt 2/5>"


def test_the_hooks_are_these_and_each_says_where_it_runs():
    from aqd import hookspecs

    assert HOOK_NAMES == (
        "aqd_register",
        "aqd_worker_start",
        "aqd_worker_stop",
        "aqd_job_start",
        "aqd_job_finish",
    )
    for name in HOOK_NAMES:
        assert "Runs in" in getattr(hookspecs.Hooks, name).__doc__
        assert f"``{name}``" in hookspecs.__doc__


def test_what_plugins_import():
    assert {"Backoff", "Discard", "JobInterrupted", "JobTimeout", "Retry", "hookimpl"} <= set(aqd.__all__)
    for name in aqd.__all__:
        assert hasattr(aqd, name)
