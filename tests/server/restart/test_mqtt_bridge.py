"""The demonstration mqtt-bridge over hot restarts: it resumes its session, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import gevent
import pytest

from smqrt.client import SmqClient
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.conftest import REPOSITORY, Served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

FOLDER = REPOSITORY / "app_preload" / "mqtt-bridge"


class Publisher:
    """Publishes numbers with QoS 2 until it is stopped."""

    def __init__(self, broker: Mosquitto) -> None:
        self._client = MqttClient(broker.address)
        assert self._client.wait_connected(20)
        self.count, self._is_stopped = 0, False
        self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        while not self._is_stopped:
            self._client.publish("sensors/a", b"%d" % self.count, 2)
            self.count += 1
            gevent.sleep(0.002)

    def stop(self) -> None:
        self._is_stopped = True
        self._greenlet.join()
        self._client.close(20)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    running = Mosquitto(tmp_path)
    yield running
    running.stop()


def listener(served: Served, got: Counter[bytes]) -> SmqClient:
    """An SMQ client that counts what it gets."""
    client = SmqClient(f"http://127.0.0.1:{served.port}/smq.lsp")
    acknowledged = gevent.event.Event()
    client.subscribe("sensors/a", onmsg=lambda data, *_: got.update([data]), onack=lambda *_: acknowledged.set())
    assert acknowledged.wait(20)
    return client


def get_more(got: Counter[bytes]) -> None:
    """Waits until 100 more messages have come."""
    before = len(got)
    wait_until(lambda: len(got) > before + 100)


def test_new_workers(serve: Callable[..., Served], broker: Mosquitto) -> None:
    served = serve(FOLDER, "--workers", "2", env={"MQTT_BROKER": broker.address, "MQTT_BRIDGE": "hot-workers"})
    got: list[Counter[bytes]] = [Counter() for _ in range(4)]  # clients at both workers
    clients = [listener(served, one) for one in got]
    publisher = Publisher(broker)
    wait_until(lambda: all(len(one) > 100 for one in got))
    os.kill(served.process.pid, signal.SIGUSR2)
    served.wait_for("^restart: 2 new workers serve", 60)
    get_more(got[0])
    publisher.stop()
    for one in got:
        wait_until(lambda one=one: len(one) == publisher.count, "all messages")
        assert sum(one.values()) - len(one) == 0
    for _ in range(6):  # both workers know the newest message
        with urlopen(f"http://127.0.0.1:{served.port}/topics/sensors/a", timeout=20) as answer:
            assert answer.read() == b"%d" % (publisher.count - 1)
    assert "taken over" not in served.output
    for client in clients:
        client.close()
