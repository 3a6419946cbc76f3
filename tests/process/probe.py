"""A plugin whose jobs run the Python text that they bring along: for what a list of steps cannot say.

``daemon(plugins={"probe.py": probe.source(…)})`` gives the handlers :data:`HANDLERS`, each with one attempt.
"""

from __future__ import annotations

from typing import Any

from tests.fixtures.jobs import Jobs

_TEXT = """
import ctypes, os, signal, subprocess, sys, threading, time
import aqd

{hooks}

def probe(payload, job):
    names = {{**globals(), "job": job, "result": None}}
    exec(compile(payload["code"], "<probe>", "exec"), names)
    return names["result"]


@aqd.hookimpl
def aqd_register(handlers):
    for type, options in {handlers!r}.items():
        handlers.add(type, probe, max_attempts=1, **options)
"""


def source(handlers: dict[str, dict[str, Any]] | None = None, hooks: str = "") -> dict[str, str]:
    """``plugins=`` of a daemon: handlers by type with their options; ``probe`` (without any) is always there."""
    return {"probe.py": _TEXT.format(handlers={"probe": {}, **(handlers or {})}, hooks=hooks)}


def result(jobs: Jobs, code: str, type: str = "probe") -> Any:
    """Runs ``code`` as a job and returns what it assigned to ``result``."""
    row = jobs.wait(job := jobs.add({"code": code}, type=type))
    assert row["state"] == "COMPLETED", jobs.attempts(job)
    return row["result"]


def failure(jobs: Jobs, code: str, type: str = "probe") -> dict[str, Any]:
    """Runs ``code``, which must not complete, and returns its only attempt."""
    row = jobs.wait(job := jobs.add({"code": code}, type=type))
    assert row["state"] == "FAILED", row
    (attempt,) = jobs.attempts(job)
    return attempt
