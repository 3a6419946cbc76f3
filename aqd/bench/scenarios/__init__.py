"""The scenarios, by name; each is imported when it is asked for.

Adding one: a module with a class of :class:`aqd.bench.bench.Scenario`, and its line in :data:`NAMES`.
"""

from importlib import import_module
from typing import Final

from aqd.bench.bench import Scenario

DEFAULT: Final = ("drain", "latency")
# In the order in which "all" runs them: the long ones last.
NAMES: Final = (
    "drain",
    "latency",
    "steady",
    "scale",
    "crash",
    "idle",
    "memory",
    "start",
    "enqueue",
    "pinned",
    "heap",
    "backlog",
    "history",
)


def find(name: str) -> type[Scenario]:
    """The class of a scenario."""
    module = import_module(f"aqd.bench.scenarios.{name}")
    found: type[Scenario] = getattr(module, name.capitalize())
    return found
