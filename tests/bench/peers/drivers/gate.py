"""What drivers in Python share: all processes of a run begin together, asyncio's end on SIGTERM."""

import asyncio
import os
import signal
import time

LOOK_S = 0.002


def ready(go: str) -> None:
    """Everything is loaded: says so, and waits for the file ``go``, which appears when all processes are so far."""
    print("ready", flush=True)
    while not os.path.exists(go):
        time.sleep(LOOK_S)


async def terminated() -> None:
    """Returns on SIGTERM."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    await event.wait()


async def measure(producer, enqueue, settings) -> list[int]:  # type: ignore[no-untyped-def]
    """:meth:`tally.Producer.measure` for an ``enqueue`` that is a coroutine function."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        asyncio.run_coroutine_threadsafe(enqueue(), loop).result()

    return await asyncio.to_thread(
        producer.measure, call, settings["jobs"], settings["warm_up"], settings["limit_s"]
    )
