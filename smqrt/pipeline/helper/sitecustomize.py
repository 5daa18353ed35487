"""Spark's Python helpers on this machine take the installed pyspark, with its compiled files, and keep quiet.

Spark puts pyspark.zip first on the path; there is nothing compiled in it, and every helper would compile it anew: about
one second each. Python imports this file by itself when its folder is on the path.

The helper that asks an alert for its state prints what it does, with the objects it does it with, on the terminal. One
that reads a stream prints a stack when the JVM, which has no more questions, closes the connection first.

A service manager sends SIGTERM to all processes of a service. The daemons that fork helpers would end themselves and
them, in the middle of the micro-batch that the driver wants to finish; they end when the JVM closes their stdin.
"""

import builtins
import os
import signal
import sys
from functools import partial
from typing import Any

sys.path[:] = [path for path in sys.path if not path.endswith(("/python/lib/pyspark.zip", "-src.zip"))]
if "pyspark.sql.streaming.transform_with_state_driver_worker" in sys.orig_argv:
    builtins.print = lambda *_, **__: None


def _quiet_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


if "pyspark.sql.streaming.python_streaming_source_runner" in sys.orig_argv:
    sys.excepthook = _quiet_end


def _go_on(number: int, frame: object) -> None:
    """A handler, and not SIG_IGN, which programs that a helper starts would inherit."""


def _signal(number: int, handler: Any) -> Any:
    spec = sys._getframe(1).f_globals.get("__spec__")
    patient = number == signal.SIGTERM and getattr(spec, "name", "") == "pyspark.daemon"
    return _set(number, _go_on if patient else handler)


if "pyspark.daemon" in sys.orig_argv:
    _set = signal.signal
    signal.signal = _signal  # type: ignore[assignment]
    # What a helper forks can be ended as usual. The helper itself, which the daemon forks, sets its signals afterwards.
    os.register_at_fork(after_in_child=partial(_set, signal.SIGTERM, signal.SIG_DFL))
