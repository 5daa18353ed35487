"""Statistics per minute and alerts of sensors.

`smqrt serve app_preload/telemetry --pipelines` runs this pipeline next to the server. See `smqrt help pipelines`.
"""

from pyspark.sql import functions as F

from smqrt.pipeline import alert, expect, publish, source


@source(topics="telemetry/+", json="device string, temp double", watermark="10 seconds")
@expect("temp between -60 and 150", on_fail="drop")
def readings(messages):
    return messages


@publish(to="stats/{device}", mode="update", trigger="1 second")
def minutes(readings):
    """Average, minimum and maximum of each sensor and minute, published whenever they change."""
    found = readings.groupBy(F.window("ts", "1 minute").alias("window"), "device").agg(
        F.round(F.avg("temp"), 2).alias("avg"),
        F.min("temp").alias("low"),
        F.max("temp").alias("high"),
        F.count("*").alias("readings"),
    )
    return found.select("device", F.col("window.start").alias("minute"), "avg", "low", "high", "readings")


@alert(
    to="alerts/{device}", key="device", when="temp > 80", clear="temp < 75", cooldown="30 seconds", absent="10 seconds"
)
def alarms(readings):
    """Sensors that are too hot, until they are below 75 degrees, and silent ones, until their next reading."""
    return readings
