"""Spark's Python helpers on this machine take the installed pyspark, with its compiled files.

Spark puts pyspark.zip first on the path; there is nothing compiled in it, and every helper would compile it anew: about
one second each. Python imports this file by itself when its folder is on the path.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith(("/python/lib/pyspark.zip", "-src.zip"))]
