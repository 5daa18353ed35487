"""A publisher that goes on during a restart."""

from __future__ import annotations

import gevent

from tests.support.device import Device

EVERY_S = 0.002


class Publisher:
    """Publishes numbers to a topic, one after the other, until it is stopped."""

    def __init__(self, device: Device, topic: int) -> None:
        self.sent, self._goes_on = 0, True
        self._greenlet = gevent.spawn(self._run, device, topic)

    def _run(self, device: Device, topic: int) -> None:
        while self._goes_on:
            device.publish(topic, b"%d" % self.sent)
            self.sent += 1
            gevent.sleep(EVERY_S)

    def stop(self) -> None:
        self._goes_on = False
        self._greenlet.join()
