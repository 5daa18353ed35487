"""mqttbroker in an application of a real server, used by paho clients of both versions."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.apps.lua.paho_clients import PahoClient
from tests.conftest import REPOSITORY, Served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

APP = Path(__file__).parent.parent / "examples" / "mqttbroker"
OK, NO_WILDCARDS, NOT_THERE = 0, 0xA2, 0x11
CREDENTIALS, NOT_AUTHORIZED = 0x86, 0x87
TOPIC_ALIAS, TOO_LARGE, QOS, SHUTTING_DOWN = 0x94, 0x95, 0x9B, 0x8B


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The server of the application, one for these tests."""
    server = Served(APP)
    server.port  # noqa: B018  (waits until it is up)
    yield server
    server.stop()


def ports(served: Served, broker: str) -> list[int]:
    return [int(port) for port in served.wait_for(rf"mqtt {broker}: ([\d ]+)")[1].split()]


Join = Callable[..., PahoClient]


@pytest.fixture
def join(served: Served) -> Iterator[Join]:
    """Connects a client: `join("open", 5, name="ada")`."""
    people: list[PahoClient] = []

    def connect(broker: str = "open", version: int = 5, at: int = 0, **settings: Any) -> PahoClient:
        people.append(PahoClient(ports(served, broker)[at], version, **settings))
        return people[-1]

    yield connect
    for person in people:
        person.leave()


def status(served: Served) -> Any:
    return requests.get(served.url + "/status.lsp", timeout=5).json()


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def test_delivery(join: Join, version: int) -> None:
    ada, bob = join(version=version), join(version=9 - version)
    assert ada.subscribe("test/one", "test/+/two", "deep/#") == [0, 0, 0]
    bob.publish("test/one", "1")
    bob.publish("test/x/two", b"\0\xff")
    bob.publish("test/x/three", "no")
    bob.publish("deep", "2")
    bob.publish("deep/er/still", bytes(200_000))
    ada.expect(("test/one", b"1"), ("test/x/two", b"\0\xff"), ("deep", b"2"), ("deep/er/still", bytes(200_000)))


def test_internal_topics(join: Join, version: int) -> None:
    ada, bob = join(version=version), join(version=version)
    ada.subscribe("#", "+/x")
    bob.subscribe("$internal/#")
    ada.publish("$internal/x", "1")
    bob.expect(("$internal/x", b"1"))
    ada.publish("a/x", "2")
    ada.expect(("a/x", b"2"))


def test_unsubscribe(join: Join, version: int) -> None:
    ada = join(version=version)
    ada.subscribe("a", "b")
    ada.client.unsubscribe("a")
    ada.publish("a", "1")
    ada.publish("b", "2")
    ada.expect(("b", b"2"))


@pytest.mark.parametrize(
    ("user", "password", "code"),
    [("ada", "lovelace", OK), ("ada", "wrong", CREDENTIALS), ("", "", NOT_AUTHORIZED)],
)
def test_auth(join: Join, version: int, user: str, password: str, code: int) -> None:
    assert join("rules", version, user=user, password=password).connack == code


def test_policy(join: Join, version: int) -> None:
    ada = join("rules", version, user="ada", password="lovelace")
    ada.subscribe("#")
    ada.publish("secret/plan", "1")
    ada.publish("open/plan", "2")
    ada.expect(("open/plan", b"2"))


def test_no_wildcards(join: Join, version: int) -> None:
    ada = join("strict", version)
    code = NO_WILDCARDS if version == 5 else 0x80
    assert ada.subscribe("a/#", "+/b", "#", "a") == [code, code, code, OK]
    if version == 5:
        assert ada.properties.WildcardSubscriptionAvailable == 0


@pytest.mark.parametrize("publisher", [0, 1], ids=["tls", "plain"])
def test_tls_and_plain_meet(join: Join, version: int, publisher: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    people = [join("tls", version, 0, tls=context), join("tls", version, 1)]
    people[1 - publisher].subscribe("a")
    people[publisher].publish("a", bytes(100_000))
    people[1 - publisher].expect(("a", bytes(100_000)))


def test_unfinished_handshakes_delay_no_others(join: Join, served: Served) -> None:
    stalled = [socket.create_connection(("127.0.0.1", ports(served, "tls")[0])) for _ in range(20)]
    stalled[0].sendall(b"\x16\x03\x01")
    stalled[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    test_tls_and_plain_meet(join, 5, 0)
    for one in stalled:
        one.close()


def test_will(join: Join, version: int) -> None:
    ada, bob = join(version=version), join(version=version, will=("will/bob", "gone", 0, False))
    ada.subscribe("will/+")
    bob.client.loop_stop()
    bob.client.socket().close()
    ada.expect(("will/bob", b"gone"))


def test_take_over(join: Join, version: int) -> None:
    old, new = join(version=version, name="twin"), join(version=version, name="twin")
    wait_until(lambda: old.ended is not None, "the end of the first")
    new.subscribe("a")
    new.publish("a", "1")
    new.expect(("a", b"1"))


def test_properties_of_messages(join: Join) -> None:
    ada, bob = join(), join()
    ada.subscribe("a/+")
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType, properties.ResponseTopic, properties.CorrelationData = "text/plain", "answers", b"\0\1"
    properties.UserProperty = [("k", "v"), ("k", "w")]
    bob.publish("a/b", "hello", properties=properties)
    wait_until(lambda: ada.raw)
    came = ada.raw[0].properties
    assert came.ContentType == "text/plain"
    assert (came.ResponseTopic, came.CorrelationData) == ("answers", b"\0\1")
    assert came.UserProperty == [("k", "v"), ("k", "w")]


def test_subscription_identifiers_and_no_local(join: Join) -> None:
    ada, bob = join(), join()
    properties = Properties(PacketTypes.SUBSCRIBE)
    properties.SubscriptionIdentifier = 300
    ada.subscribe("a", options=SubscribeOptions(noLocal=True), properties=properties)
    ada.publish("a", "own")
    ada.subscribe("z")
    bob.publish("a", "other")
    ada.expect(("a", b"other"))
    assert ada.raw[0].properties.SubscriptionIdentifier == [300]


def test_what_the_broker_has_not(join: Join) -> None:
    told = join("strict").properties
    assert (told.MaximumQoS, told.RetainAvailable, told.SharedSubscriptionAvailable) == (0, 0, 0)
    assert told.MaximumPacketSize == 1000


@pytest.mark.parametrize("qos", [1, 2])
def test_other_qos_ends_the_connection(join: Join, version: int, qos: int) -> None:
    ada = join(version=version)
    ada.publish("a", "1", qos=qos)
    wait_until(lambda: ada.ended is not None, "the end")
    if version == 5:
        assert ada.ended == QOS


def test_topic_alias_ends_the_connection(join: Join) -> None:
    ada = join()
    properties = Properties(PacketTypes.PUBLISH)
    properties.TopicAlias = 1
    ada.publish("a", "1", properties=properties)
    wait_until(lambda: ada.ended is not None, "the end")
    assert ada.ended == TOPIC_ALIAS


def test_too_large_a_packet_ends_the_connection(join: Join, version: int) -> None:
    ada, bob = join("strict", version), join("strict", version)
    bob.subscribe("a")
    ada.publish("a", bytes(2000))
    wait_until(lambda: ada.ended is not None, "the end")
    if version == 5:
        assert ada.ended == TOO_LARGE
    bob.publish("a", bytes(900))
    bob.expect(("a", bytes(900)))


def test_client_inside_the_server_answers(join: Join, version: int) -> None:
    ada = join(version=version)
    ada.subscribe("answer/+")
    ada.publish("ask/ada", "hi")
    ada.expect(("answer/ada", b"you said hi"))


def test_silent_client_is_ended(join: Join, served: Served) -> None:
    ada = join(keepalive=1, name="silent")
    ada.client.loop_stop()
    wait_until(lambda: ["silent", "mqtt", 0x8D] in status(served)["errors"], "the end of the keep-alive")


def test_without_file_descriptors_it_goes_on_later(join: Join, served: Served) -> None:
    ada = join()
    ada.subscribe("a")
    pid, limits = served.process.pid, resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
    late = [socket.create_connection(("127.0.0.1", ports(served, "open")[0])) for _ in range(3)]
    time.sleep(0.3)  # accepting fails meanwhile
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    join().publish("a", "1")
    ada.expect(("a", b"1"))
    assert all("failed" not in error for error in status(served)["errors"]), "accept waits for descriptors"
    for one in late:
        one.close()


def test_status(join: Join, served: Served) -> None:
    before = status(served)["rules"]
    assert before["running"] is True
    assert before["ports"] == ports(served, "rules") == [before["port"]]
    assert before["listeners"] == [{"port": before["port"], "address": "127.0.0.1", "secure": False}]
    assert before["maxPacketSize"] == 262144
    ada = join("rules", user="ada", password="lovelace")
    wait_until(lambda: status(served)["rules"]["clients"] == before["clients"] + 1)
    ada.leave()
    wait_until(lambda: status(served)["rules"]["clients"] == before["clients"])
    assert len(status(served)["tls"]["ports"]) == 2


def test_every_message_reaches_each_of_200_clients(served: Served) -> None:
    command = [sys.executable, "-m", "tests.apps.lua.many_paho_clients", str(ports(served, "open")[0])]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert ran.stdout == "200 clients got all of them in order\n", ran.stderr
    assert status(served)["open"]["dropped"] == 0


def test_clients_are_notified_when_the_server_stops(version: int) -> None:
    served = Served(APP)
    served.port  # noqa: B018
    ada = PahoClient(ports(served, "open")[0], version)
    assert served.stop() == 0
    wait_until(lambda: ada.ended is not None, "the end")
    ada.leave()
    if version == 5:
        assert ada.ended == SHUTTING_DOWN
