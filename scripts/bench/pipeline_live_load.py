"""Publishes to `bench/in` and takes results from `bench/out`: python pipeline_live_load.py URL RATE WARM_UP_S SECONDS.

Prints "measuring" when that begins, and JSON in the end: for each result from then on, the ms since its newest message
was published.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gevent

from smqrt.client import SmqClient

TICK_S = 0.01
DEVICES = 100
COLD_S = 240
"""So long the first result may take: Spark loads its classes."""


class Load:
    """What is sent and what comes back.

    Args:
        client: connected to the hub.
        warm_up_s, seconds: how long results are only awaited, and how long they are measured.
    """

    def __init__(self, client: SmqClient, warm_up_s: float, seconds: float) -> None:
        self.client, self.warm_up_s, self.seconds = client, warm_up_s, seconds
        self.latencies: list[float] = []
        self.begin = self.end = time.monotonic() + COLD_S
        self.came = False
        client.subscribe("bench/out", datatype="json", onmsg=self._taken)

    def _taken(self, result: dict[str, Any], *_: object) -> None:
        now = time.monotonic()
        if not self.came:
            self.came, self.begin = True, now + self.warm_up_s
            self.end = self.begin + self.seconds
        if now >= self.begin:
            self.latencies.append(time.time() * 1000 - result["newest"])

    def send(self, rate: int) -> None:
        """Sends until the end, evenly."""
        started, sent, told = time.monotonic(), 0, False
        while (now := time.monotonic()) < self.end:
            while sent < (now - started) * rate:
                self.client.publish({"device": f"d{sent % DEVICES}", "at": int(time.time() * 1000)}, "bench/in")
                sent += 1
            if self.came and now >= self.begin and not told:
                told = True
                print("measuring", flush=True)
            gevent.sleep(TICK_S)


def main(url: str, rate: int, warm_up_s: float, seconds: float) -> None:
    client = SmqClient(url)
    client.wait_connected(10)
    load = Load(client, warm_up_s, seconds)
    load.send(rate)
    gevent.sleep(0.5)
    client.close()
    print(json.dumps(load.latencies))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
