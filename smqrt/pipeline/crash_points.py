"""Points at which tests let a pipeline die, to see that nothing is lost and nothing is doubled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "SMQRT_FAULT"
"""POINT or POINT:NUMBER, such as "after_commit:3"; without a number any will do."""


def crash_at(name: str, number: int, of_worker: bool = False) -> None:
    """Kills the pipeline's process and its helpers at once when the environment asks for it here.

    Args:
        name: "before_commit" or "after_commit": the hub has not or has the results, Spark doesn't know it yet;
            "before_part": it has those parts of them that come before.
        number: of the micro-batch; of the part.
        of_worker: this is a helper of Spark, whose group isn't the pipeline's.
    """
    wanted, _, of = os.environ.get(VARIABLE, "").partition(":")
    if wanted == name and of in ("", str(number)):
        group = os.getpgrp()
        if of_worker:
            os.killpg(os.getpgid(_parent(group)), signal.SIGKILL)
        os.killpg(group, signal.SIGKILL)


def _parent(process: int) -> int:
    """Returns the parent: of the first process of the helpers' group, the JVM."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
