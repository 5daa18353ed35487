"""Start-up code of Spark's Python workers on this machine. Python imports it when its folder is on the path.

Spark puts pyspark.zip first on the path. The archive has no compiled files, and every worker would compile its modules
again, which takes about one second. The workers therefore use the installed pyspark.

The worker that inspects the state of an alert prints debug output on the terminal. A worker that reads a stream prints
a stack when the JVM closes the connection first. Both outputs are suppressed.

A service manager sends SIGTERM to all processes of a service. The daemons that fork workers would then end all workers
in the middle of the micro-batch that the driver wants to finish. They ignore SIGTERM, and end when the JVM closes their
stdin.
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


def _ignore(number: int, frame: object) -> None:
    """Do nothing. SIG_IGN would be inherited by programs that a worker starts."""


def _signal(number: int, handler: Any) -> Any:
    spec = sys._getframe(1).f_globals.get("__spec__")
    is_daemon_end = number == signal.SIGTERM and getattr(spec, "name", "") == "pyspark.daemon"
    return _set(number, _ignore if is_daemon_end else handler)


if "pyspark.daemon" in sys.orig_argv:
    _set = signal.signal
    signal.signal = _signal  # type: ignore[assignment]
    # SIGTERM ends the processes that a worker forks. The worker itself, a fork of the daemon, sets its signals later.
    os.register_at_fork(after_in_child=partial(_set, signal.SIGTERM, signal.SIG_DFL))
