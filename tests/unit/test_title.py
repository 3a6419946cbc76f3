"""A worker's title, as other processes see it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOWN = """
import sys
import aqd.title
from setproctitle import setproctitle
from aqd.title import Title

def seen():
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().rstrip(b"\\0").decode("utf-8", "replace")

title = Title("aqd: worker 0 g1")
title.show("starting")
print(bool(title._room), seen())
title.show_job("a_type_with_a_long_name", 123456789)
print(seen())
title.show_job("t", 1)
print(seen())
title.show("idle")
print(seen())
setproctitle("what a job calls itself, and at some length, for it is proud of what it does")
title.show_job("t", 2)
print(seen())
title.show_job("t" * 500, 3)
print(len(seen()) <= 160 or not title._room, seen()[:25])
title.show("idle")
print(seen())
"""


@pytest.mark.parametrize("room", [True, False])
def test_what_ps_shows(room: bool) -> None:
    # What the title may take is what arguments and environment took; little is left of it without one.
    argv = [sys.executable, "-c", SHOWN]
    if not room:
        argv[2] = SHOWN.replace("title = Title", "aqd.title._place = 0, 0\ntitle = Title")
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [
        f"{room} aqd: worker 0 g1 [starting]",
        "aqd: worker 0 g1 [a_type_with_a_long_name 123456789]",
        "aqd: worker 0 g1 [t 1]",
        "aqd: worker 0 g1 [idle]",
        "aqd: worker 0 g1 [t 2]",
        "True aqd: worker 0 g1 [ttttttt",
        "aqd: worker 0 g1 [idle]",
    ]
