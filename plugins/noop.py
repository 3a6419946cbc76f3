"""noop: a job that does nothing; for measuring, for trying things out, and as the smallest plugin.

Payload: anything. An object with the key ``return`` gives that value as the job's result.
"""

from typing import Any

import aqd


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    handlers.add("noop", noop)


def noop(payload: Any) -> Any:
    return payload.get("return") if isinstance(payload, dict) else None
