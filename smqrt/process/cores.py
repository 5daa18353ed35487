"""How many cores this process may use: those that it may run on, and no more than its control group is given."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _QUOTA) -> int:
    """Returns the number of cores, at least 1; of a container with 1.5 cores it is 1.

    Args:
        quota: the file in which Linux says what the control group is given: microseconds of so many.
    """
    usable = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
        usable = min(usable, int(most) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(usable, 1)
