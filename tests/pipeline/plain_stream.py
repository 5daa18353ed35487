"""A stream of plain Spark, `format("smq")` to `format("smq")`: python -m tests.pipeline.plain_stream STATE JOURNAL."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

JAVA = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For lives of a minute."""


def main(state: Path, journal: str) -> int:
    """Run it until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    from pyspark.sql import functions as F

    from smqrt.pipeline import session

    spark = session.start_spark("local[2]", "plain", state.parent, JAVA)
    options = {"token": token} if (token := os.environ.get("PLAIN_STREAM_TOKEN")) else {}
    rows = spark.readStream.format("smq").options(
        **options, topics="in/#", startingOffsets="earliest", queryName=state.name
    )
    made = rows.load(journal).select(F.lit("out/plain").alias("topic"), "payload")
    writer = made.writeStream.format("smq").options(**options, retry="120s")
    writer = writer.option("checkpointLocation", str(state / "checkpoint")).trigger(processingTime="20 milliseconds")
    query = writer.start(journal)
    while query.isActive and not stopping.wait(0.2):
        pass
    if query.isActive:
        query.stop()
    spark.stop()
    if failed := query.exception():
        print(failed, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
