"""Outages of sensors and their durations, computed with custom state and a timer.

See `smqrt help pipeline-state`. `absent=` of an alert detects outages without code, but does not give their durations.
"""

from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from smqrt.pipeline import publish, stateful

SILENT_MS = 15_000


class Outages(StatefulProcessor):
    """Stores the time of each sensor's last reading, and whether its silence was published."""

    def init(self, handle):
        self.handle = handle
        self.last = handle.getValueState("last", "ms bigint, is_silent boolean")

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            last_ms, is_silent = self.last.get() or (row.ms, False)
            if is_silent:
                yield Row(device=key[0], state="back", since_ms=last_ms, seconds=(row.ms - last_ms) / 1000)
            self.last.update((max(row.ms, last_ms), False))
            self.set_timer(row.ms + SILENT_MS, timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        last_ms, _ = self.last.get()
        self.last.update((last_ms, True))
        yield Row(device=key[0], state="silent", since_ms=last_ms, seconds=SILENT_MS / 1000)

    def set_timer(self, due_ms, now_ms):
        """Replace the timer of the key. A late row, whose timer would already be due, does not set one."""
        for earlier_ms in self.handle.listTimers():
            self.handle.deleteTimer(earlier_ms)
        if due_ms > now_ms:
            self.handle.registerTimer(due_ms)


@stateful(Outages, key="device", schema="device string, state string, since_ms bigint, seconds double", time="event")
def silences(readings):
    return readings.select("device", "ts", F.unix_millis("ts").alias("ms"))


@publish(to="outages/{device}", trigger="1 second")
def outages(silences):
    return silences.select("device", "state", F.timestamp_millis("since_ms").alias("since"), "seconds")
