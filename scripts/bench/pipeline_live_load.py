"""Publishes to `bench/in` and takes results from `bench/out`: python pipeline_live_load.py URL RATE WARM_UP_S SECONDS.

Prints JSON: for each result after the warm-up, the ms since its newest message was published.
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


def main(url: str, rate: int, warm_up_s: float, seconds: float) -> None:
    client, latencies = SmqClient(url), list[float]()
    begin = time.monotonic() + warm_up_s

    def taken(result: dict[str, Any], *_: object) -> None:
        if time.monotonic() >= begin:
            latencies.append(time.time() * 1000 - result["newest"])

    client.subscribe("bench/out", datatype="json", onmsg=taken)
    client.wait_connected(10)
    send(client, rate, begin + seconds)
    gevent.sleep(0.5)
    client.close()
    print(json.dumps(latencies))


def send(client: SmqClient, rate: int, until: float) -> None:
    started, sent = time.monotonic(), 0
    while (now := time.monotonic()) < until:
        while sent < (now - started) * rate:
            client.publish({"device": f"d{sent % DEVICES}", "at": int(time.time() * 1000)}, "bench/in")
            sent += 1
        gevent.sleep(TICK_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
