"""How often the master looks around."""

from __future__ import annotations

from aqd.pace import AWAKE_S, BIRTH_S, BIRTH_TICK_S, REST_S, TICK_S, Pace


def test_often_while_there_is_work_and_a_while_after() -> None:
    pace = Pace()
    assert pace.tick_s(100.0, newborns=False) == REST_S
    pace.worked(100.0)
    assert pace.tick_s(100.0 + AWAKE_S - 0.1, newborns=False) == TICK_S
    assert pace.tick_s(100.0 + AWAKE_S, newborns=False) == REST_S


def test_very_often_while_a_worker_is_on_its_way_but_not_for_long() -> None:
    pace = Pace()
    pace.born(100.0)
    pace.worked(100.0)
    assert pace.tick_s(100.5, newborns=True) == BIRTH_TICK_S
    assert pace.tick_s(100.5, newborns=False) == TICK_S
    assert pace.tick_s(100.0 + BIRTH_S, newborns=True) == TICK_S, "a hook may take minutes"
