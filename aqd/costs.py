"""What one job after the other costs: processor time and peak memory, helpers that were waited for included.

Run by workers. Where one job's account ends the next one's begins, so what the worker itself does between two jobs of
a frame (5 µs) is counted, to either; waiting for a frame and reading it is not.

The kernel's mark of the most memory that the process ever had is set back with each job that may have moved it: until
it has come out the same for two jobs, and after every one that was looked at thoroughly (:mod:`aqd.tidy`). A brief one
that moves it up sets it back for the next one, and down by so little (1 MiB) that nobody would miss it.

A light job (:data:`aqd.tidy.LIGHT_NS`) was too short to wait for anything, so it has used the time that it took, and
nobody asks the kernel (0.9 µs, and twice that around it). The clock runs a little faster than the account, so the kernel
is asked again every :data:`SAMPLE_NS`, lest a longer job in the same frame pay for the difference.

Sources: getrusage(2), proc_pid_clear_refs(5).
"""

import contextlib
import os
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Final

from aqd.process import boottime_ns

SAMPLE_NS: Final = 500_000


class Costs:
    """``cpu_us``: what the process and its helpers have used up to where the last account ended. ``settled``: the mark
    of the most memory stands where it would stand if it were set back now."""

    def __init__(self) -> None:
        self._peak_fd = -1
        with contextlib.suppress(OSError):  # a kernel without it: the peak is then the whole life's
            self._peak_fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        self.settled = False
        self._light_ns = 0  # used by light jobs, less whole microseconds
        self._ended_ns = self._sampled_ns = 0  # of the last account; when the kernel was asked
        self._peak_kb = self._helpers_cpu_us = self._helpers_peak_kb = 0
        self.cpu_us = 0
        self._count_helpers()
        self.begin_frame()

    def begin_frame(self) -> None:
        """What was used since the last job is nobody's."""
        usage = getrusage(RUSAGE_SELF)
        self.cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6) + self._helpers_cpu_us
        self._ended_ns = self._sampled_ns = boottime_ns()

    def reset_peak(self) -> None:
        """Before a job, unless :attr:`settled`."""
        if self._peak_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._peak_fd, b"5")  # 0.6 µs

    def end_light_job(self, ended_ns: int) -> tuple[int, int]:
        """:meth:`end_job` for a light one that ended just now. Only while :attr:`settled`."""
        if ended_ns - self._sampled_ns > SAMPLE_NS:
            return self.end_job(False)
        self._light_ns += ended_ns - self._ended_ns
        self._ended_ns = ended_ns
        cpu_us, self._light_ns = divmod(self._light_ns, 1000)
        self.cpu_us += cpu_us
        return cpu_us, self._peak_kb

    def end_job(self, thorough: bool) -> tuple[int, int]:
        """(cpu_us, peak_kb) since the last account ended. ``thorough``: it may have had helpers."""
        helpers_peak_kb = self._count_helpers() if thorough else 0
        # One call for both (0.8 µs): the process's clock alone takes 0.6.
        usage = getrusage(RUSAGE_SELF)
        peak_kb: int = usage.ru_maxrss
        self.settled = peak_kb == self._peak_kb and not thorough
        self._peak_kb = peak_kb
        before, self.cpu_us = (
            self.cpu_us,
            int((usage.ru_utime + usage.ru_stime) * 1e6) + self._helpers_cpu_us,
        )
        self._ended_ns = self._sampled_ns = boottime_ns()
        return max(0, self.cpu_us - before), max(peak_kb, helpers_peak_kb)

    def _count_helpers(self) -> int:
        """The peak of the largest one that was waited for if that mark has risen, else 0."""
        usage = getrusage(RUSAGE_CHILDREN)
        self._helpers_cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
        risen = usage.ru_maxrss > self._helpers_peak_kb
        self._helpers_peak_kb = usage.ru_maxrss
        return self._helpers_peak_kb if risen else 0
