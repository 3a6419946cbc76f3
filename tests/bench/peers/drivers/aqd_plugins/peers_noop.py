"""The plugin of aqd in the comparison with its peers: a job that is counted and returns a small result."""

import importlib.util
from typing import Any

import aqd


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    settings = handlers.settings("peers_noop")
    spec = importlib.util.spec_from_file_location("peers_tally", settings["tally"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ran = module.Tally(settings["directory"], settings.get("fifo")).ran

    def noop(payload: Any) -> dict[str, Any]:
        ran()
        return {"n": payload["n"]}

    handlers.add("noop", noop)
