"""Drives Dramatiq on Redis: ``python with_dramatiq.py fill|produce``; the worker is ``dramatiq with_dramatiq``.

Its default middleware. Settings come in the variable PEERS_SETTINGS, because the worker imports this module.
"""

import json
import os
import sys

import dramatiq
import gate
from dramatiq.brokers.redis import RedisBroker
from tally import Producer, Tally

settings = json.loads(os.environ["PEERS_SETTINGS"])
dramatiq.set_broker(RedisBroker(url=settings["url"]))
ran = Tally(settings["directory"], settings.get("fifo")).ran


@dramatiq.actor(actor_name="noop")
def noop(n):
    ran()


if __name__ != "__main__":  # in each process of the worker
    gate.ready(settings["go"])
else:
    if sys.argv[1] == "fill":
        for n in range(settings["jobs"]):
            noop.send(n)
    else:
        producer = Producer(settings["fifo"], settings["pause_s"])
        found = producer.measure(
            lambda: noop.send(1), settings["jobs"], settings["warm_up"], settings["limit_s"]
        )
        print(json.dumps(found))
