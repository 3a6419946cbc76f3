"""Drives PgQueuer: ``python with_pgqueuer.py fill|work|produce SETTINGS``.

``settings`` has ``consumers`` (queue managers in this process, each with a connection of its own, as its own
benchmark has them) and ``batch``. uvloop and asyncpg, its fastest combination.
"""

import asyncio
import json
import sys

import asyncpg
import gate
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
from tally import Producer, Tally

CHUNK = 1000


async def fill(settings):
    connection = await asyncpg.connect(settings["url"])
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    for made in range(0, settings["jobs"], CHUNK):
        size = min(CHUNK, settings["jobs"] - made)
        payloads = [json.dumps({"n": made + n}).encode() for n in range(size)]
        await queries.enqueue(["noop"] * size, payloads, [0] * size)
        if made == 0:
            await connection.execute("analyze")
    await connection.close()


async def work(settings):
    ran = Tally(settings["directory"], settings.get("fifo")).ran
    gate.ready(settings["go"])
    managers = []
    for _ in range(settings["consumers"]):
        connection = await asyncpg.connect(settings["url"])
        manager = PgQueuer(AsyncpgDriver(connection))

        @manager.entrypoint("noop")
        async def noop(_job):
            ran()

        managers.append(manager)
    running = asyncio.gather(*(each.qm.run(batch_size=settings["batch"]) for each in managers))
    stop = asyncio.ensure_future(gate.terminated())
    await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
    for each in managers:
        each.shutdown.set()
    await running


async def produce(settings):
    connection = await asyncpg.connect(settings["url"])
    queries = Queries(AsyncpgDriver(connection))
    producer = Producer(settings["fifo"], settings["pause_s"])
    print(json.dumps(await gate.measure(producer, lambda: queries.enqueue("noop", b'{"n": 1}'), settings)))


uvloop.run({"fill": fill, "work": work, "produce": produce}[sys.argv[1]](json.loads(sys.argv[2])))
