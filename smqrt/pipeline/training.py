"""Lets Spark do a little of everything, so that Java knows which classes pipelines use: the child process of `warm`.

    python -m smqrt.pipeline.training "JVM OPTIONS" [everything]

It prints the seconds until a first job was done as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

_STREAM_S = 4.0
_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def main(jvm: str, everything: bool) -> None:
    """Starts Spark and does one job or everything. Java writes the archive after this process has ended.

    Args:
        jvm: options for Java.
        everything: whether to run what pipelines run, too.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        session = _session(jvm, folder)
        session.range(10).groupBy("id").count().collect()
        seconds = time.perf_counter() - began
        if everything:
            _files(session, folder)
            _stream(session, folder)
        session.stop()
    print(json.dumps({"seconds": round(seconds, 2)}))


def _session(jvm: str, folder: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("smqrt warm").config("spark.local.dir", folder)
    for name, value in _CONF.items():
        builder = builder.config(name, value)
    session = builder.config("spark.driver.extraJavaOptions", jvm).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def _files(session: Any, folder: str) -> None:
    rows = session.range(100).selectExpr("id", "cast(id as string) as text", "current_date() as day")
    rows.write.partitionBy("day").parquet(f"{folder}/parquet")
    session.read.parquet(f"{folder}/parquet").createOrReplaceTempView("numbers")
    session.sql("select day, avg(id), max(text) from numbers where id > 3 group by day").toArrow()


def _stream(session: Any, folder: str) -> None:
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    parsed = rows.withWatermark("timestamp", "1 second").selectExpr(
        "timestamp", "from_json(concat('{\"n\": ', value, '}'), 'n int').n as n"
    )
    windows = parsed.selectExpr("window(timestamp, '1 second') as window", "n").groupBy("window").count()
    writer = windows.writeStream.outputMode("update").foreachBatch(lambda batch, _: batch.toArrow())
    query = (
        writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(processingTime="100 milliseconds").start()
    )
    query.awaitTermination(_STREAM_S)
    query.stop()


if __name__ == "__main__":
    main(sys.argv[1], "everything" in sys.argv[2:])
