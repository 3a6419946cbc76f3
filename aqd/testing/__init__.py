"""For people who write handlers: run one in the test's own process, or run a real queue to its end.

Runs in test processes. Three sizes, each built on the one before::

    outcome = run_handler(send_mail, {"to": "a@example.com"}, attempt=3)     # one attempt, no database
    with load_plugins("plugins") as plugins:                                # the plugin files as the daemon loads them
        plugins.run("send_mail", {"to": "a@example.com"}).assert_completed()
    aqd_queue.enqueue("send_mail", {"to": "a@example.com"})                 # a fixture with a real database
    aqd_queue.drain().assert_completed()

The fixtures are those of :mod:`aqd.testing.fixtures`. Nothing here is a model of aqd: an attempt is made by the
worker's own code, jobs are claimed and recorded by the daemon's own statements, in PostgreSQL.

Promises: a payload and a result pass the same checks as in production, and reach the handler and the test as
the JSON that they would be stored as; ``timeout_s`` is enforced by the same exception, ``Retry``, ``Discard`` and
whatever else a handler raises ends in the same record; nothing of the process is changed for good (signals,
streams, environment).

What it cannot show, because the handler shares the test's process: memory limits, ``rlimits``, another user, the
hard kill of a handler that swallows its stop, and a crash, which is the test's own.

Fails with :class:`aqd.errors.InputError` for a job that could not be submitted, :class:`aqd.errors.PluginError` for a
plugin that would be refused, :class:`AssertionError` for what a test asserts and did not get.
"""

from aqd.testing.attempts import AttemptOptions, Outcome, Progress
from aqd.testing.databases import Server, open_server
from aqd.testing.handlers import LoadedPlugins, load_plugins, run_handler
from aqd.testing.queue import EnqueueOptions, Job, Queue, Ran, Report

__all__ = [
    "AttemptOptions",
    "EnqueueOptions",
    "Job",
    "LoadedPlugins",
    "Outcome",
    "Progress",
    "Queue",
    "Ran",
    "Report",
    "Server",
    "load_plugins",
    "open_server",
    "run_handler",
]
