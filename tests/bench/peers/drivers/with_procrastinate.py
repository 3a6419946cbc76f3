"""Drives Procrastinate: ``python with_procrastinate.py fill|work|produce SETTINGS``.

``settings`` has ``worker``, the options of ``run_worker_async``. Its connector for psycopg 3.
"""

import asyncio
import json
import sys

import gate
from procrastinate import App, PsycopgConnector
from tally import Producer, Tally

CHUNK = 1000


def make_app(settings):
    pool = settings["worker"]["concurrency"] + 2
    app = App(connector=PsycopgConnector(conninfo=settings["url"], min_size=1, max_size=pool))
    ran = Tally(settings["directory"], settings.get("fifo")).ran

    @app.task(name="noop")
    async def noop(n):
        ran()

    return app, noop


async def fill(settings):
    app, noop = make_app(settings)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for made in range(0, settings["jobs"], CHUNK):
            size = min(CHUNK, settings["jobs"] - made)
            await noop.batch_defer_async(*({"n": made + n} for n in range(size)))


async def work(settings):
    app, _ = make_app(settings)
    async with app.open_async():
        gate.ready(settings["go"])
        await app.run_worker_async(**settings["worker"])  # until SIGTERM


async def produce(settings):
    app, noop = make_app(settings)
    async with app.open_async():
        producer = Producer(settings["fifo"], settings["pause_s"])
        print(json.dumps(await gate.measure(producer, lambda: noop.defer_async(n=1), settings)))


asyncio.run({"fill": fill, "work": work, "produce": produce}[sys.argv[1]](json.loads(sys.argv[2])))
