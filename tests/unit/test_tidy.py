"""What a worker need not look at, because it cannot have changed."""

import os

import pytest

from aqd.tidy import Tidy


def test_only_who_may_change_its_account_is_asked_for_it_after_every_job() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")

    def fixed() -> bool:
        return Tidy()._fixed

    assert not fixed()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 0)
            half = fixed()  # may become root again
            os.setresuid(65534, 65534, 65534)
            code = 0 if fixed() and not half else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
