"""Drives aqd: ``python with_aqd.py fill|produce SETTINGS``; the worker is ``aqd run``. With :mod:`aqd.client`."""

import json
import sys

import psycopg
from tally import Producer

from aqd import client, migrate


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    with psycopg.connect(settings["url"], autocommit=True) as conn:
        if role == "fill":
            migrate.migrate(conn)
            jobs = ({"type": "noop", "payload": {"n": n}} for n in range(settings["jobs"]))
            client.enqueue_many(conn, jobs)
        else:
            producer = Producer(settings["fifo"], settings["pause_s"])
            found = producer.measure(
                lambda: client.enqueue(conn, "noop", {"n": 1}),
                settings["jobs"],
                settings["warm_up"],
                settings["limit_s"],
            )
            print(json.dumps(found))


main()
