"""Drives awa: ``python with_awa.py fill|work|produce SETTINGS``.

``settings`` has ``workers``, how many jobs its queue may run at the same time. Asynchronous handlers, which run on one
event loop of Python's; the rest is Rust.
"""

import asyncio
import json
import sys
from dataclasses import dataclass

import gate
from awa import AsyncClient
from tally import Producer, Tally

CHUNK = 5000


@dataclass
class Noop:
    n: int


def connect(settings):
    # Its parser wants a host before the slash too; the socket's directory in the query still wins.
    return AsyncClient(settings["url"].replace("@/", "@localhost/"))


async def fill(settings):
    client = connect(settings)
    await client.migrate()
    for made in range(0, settings["jobs"], CHUNK):
        size = min(CHUNK, settings["jobs"] - made)
        await client.insert_many_copy([Noop(made + n) for n in range(size)], queue="noop")
    await client.close()


async def work(settings):
    ran = Tally(settings["directory"], settings.get("fifo")).ran
    client = connect(settings)

    @client.task(Noop, queue="noop")
    async def noop(_job):
        ran()

    gate.ready(settings["go"])
    await client.start([("noop", settings["workers"])])
    await gate.terminated()
    await client.shutdown()
    await client.close()


async def produce(settings):
    client = connect(settings)
    producer = Producer(settings["fifo"], settings["pause_s"])
    print(json.dumps(await gate.measure(producer, lambda: client.insert(Noop(1), queue="noop"), settings)))


asyncio.run({"fill": fill, "work": work, "produce": produce}[sys.argv[1]](json.loads(sys.argv[2])))
