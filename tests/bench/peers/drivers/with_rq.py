"""Drives RQ: ``python with_rq.py fill|produce``; the workers are ``rq worker``.

Settings come in the variable PEERS_SETTINGS, because the workers import this module for the job.
"""

import json
import os
import sys

import gate
from redis import Redis
from rq import Queue, SimpleWorker, Worker
from tally import Producer, Tally

CHUNK = 500
settings = json.loads(os.environ["PEERS_SETTINGS"])
ran = Tally(settings["directory"], settings.get("fifo")).ran


def noop(n):
    ran()


class Begun:
    """A worker that begins together with the others; a mixin."""

    def work(self, *args, **kwargs):
        gate.ready(settings["go"])
        return super().work(*args, **kwargs)


class Forking(Begun, Worker):
    """RQ's default."""


class Simple(Begun, SimpleWorker):
    """Runs jobs in its own process."""


if __name__ == "__main__":
    queue = Queue(connection=Redis.from_url(settings["url"]))
    if sys.argv[1] == "fill":
        for made in range(0, settings["jobs"], CHUNK):
            numbers = range(made, min(made + CHUNK, settings["jobs"]))
            queue.enqueue_many([Queue.prepare_data("with_rq.noop", args=(n,)) for n in numbers])
    else:
        producer = Producer(settings["fifo"], settings["pause_s"])
        found = producer.measure(
            lambda: queue.enqueue("with_rq.noop", 1),
            settings["jobs"],
            settings["warm_up"],
            settings["limit_s"],
        )
        print(json.dumps(found))
