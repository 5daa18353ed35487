"""The job of test_clusters.py: python cluster_job.py MASTER PACKAGE JOURNAL CHECKPOINT.

Prints one line of JSON: the sum of all seqs read in a batch, the rows of every micro-batch of a stream, and whether the
workers had smqrt only from PACKAGE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from smqrt.pipeline.smq_source import register

QUIET = f"-Dlog4j2.configurationFile={Path(__file__).parent / 'log4j2.properties'}"
CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": f"{QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": f"{QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}
WAIT_S = 80


def main(master: str, package: str, journal: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.submit.pyFiles", package)
    for name, value in CONF.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    frame = spark.read.format("smq").option("rowsPerPartition", "100").load(journal)
    total, tasks = frame.agg(F.sum("seq")).collect()[0][0], frame.rdd.getNumPartitions()
    places = spark.sparkContext.parallelize(range(4), 4).map(where_smqrt_is).collect()
    print(json.dumps({"sum": total, "tasks": tasks, "batches": streamed(spark, journal, checkpoint), "from": places}))
    spark.stop()


def streamed(spark: Any, journal: str, checkpoint: str) -> list[int]:
    options = {"startingOffsets": "earliest", "maxRowsPerTrigger": "400"}
    batches: list[int] = []
    writer = spark.readStream.format("smq").options(**options).load(journal).writeStream
    writer = writer.foreachBatch(lambda batch, number: batches.append(batch.count()))
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S)
    return batches


def where_smqrt_is(number: int) -> str:
    import smqrt

    return str(smqrt.__file__)


if __name__ == "__main__":
    main(*sys.argv[1:])
