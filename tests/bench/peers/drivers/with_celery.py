"""Drives Celery on Redis: ``python with_celery.py fill|produce``; the worker is ``celery -A with_celery worker``.

Results are ignored and messages acknowledged when they are received (its defaults but for the results). Settings come
in the variable PEERS_SETTINGS, because the worker imports this module.
"""

import json
import os
import sys

from celery import Celery
from tally import Producer, Tally

settings = json.loads(os.environ["PEERS_SETTINGS"])
app = Celery("peers", broker=settings["url"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
ran = Tally(settings["directory"], settings.get("fifo")).ran


@app.task(name="noop")
def noop(n):
    ran()


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        for n in range(settings["jobs"]):
            noop.delay(n)
    else:
        producer = Producer(settings["fifo"], settings["pause_s"])
        found = producer.measure(
            lambda: noop.delay(1), settings["jobs"], settings["warm_up"], settings["limit_s"]
        )
        print(json.dumps(found))
