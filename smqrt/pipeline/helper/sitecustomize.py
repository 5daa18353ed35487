"""Spark's Python helpers on this machine take the installed pyspark, with its compiled files, and keep quiet.

Spark puts pyspark.zip first on the path; there is nothing compiled in it, and every helper would compile it anew: about
one second each. Python imports this file by itself when its folder is on the path.

The helper that asks an alert for its state prints what it does, with the objects it does it with, on the terminal.
"""

import builtins
import sys

sys.path[:] = [path for path in sys.path if not path.endswith(("/python/lib/pyspark.zip", "-src.zip"))]
if "pyspark.sql.streaming.transform_with_state_driver_worker" in sys.orig_argv:
    builtins.print = lambda *_, **__: None
