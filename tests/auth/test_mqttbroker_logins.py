"""Clients of the MQTT broker by the server's users and rules: `auth = true`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smqrt.apps.lua import api
from smqrt.apps.lua.vm import Services, Vm
from smqrt.mqtt import MqttClient
from tests.auth.conftest import USERS, Guarded, user_line
from tests.support.sites import patience
from tests.support.waiting import wait_until

__all__ = ["patience"]
RULES = "deny * read a/secret\nallow ann * #\nallow bob read a/+\nallow bob write b/%c"


@pytest.fixture
def port(guard: Callable[..., Guarded]) -> Iterator[tuple[Guarded, int]]:
    guarded = guard(RULES)
    vm = Vm()
    api.install(vm, Services())
    start = """broker = assert(require "mqttbroker".create(0, {address = "127.0.0.1", auth = true}))
    return broker:status().port"""
    yield guarded, int(vm.eval(start)[0])
    vm.eval("broker:close()")
    vm.stop()


class Mqtt:
    """A client, and what it was told."""

    def __init__(self, port: int, name: str, password: str, uid: str) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.client = MqttClient(
            f"mqtt://127.0.0.1:{port}",
            lambda kind, code, status: code == "connect" and not status["reasoncode"],
            username=name,
            password=password,
            clientidentifier=uid,
        )
        self.client.wait_connected()

    def code(self, topic: str) -> int:
        codes: list[int] = []
        self.client.subscribe(
            topic, lambda name, payload, *_: self.got.append((name, payload)), lambda _, code, __: codes.append(code)
        )
        wait_until(lambda: codes, "the answer")
        return codes[0]


def test_users_and_rules_are_those_of_the_server(port: tuple[Guarded, int]) -> None:
    guarded, number = port
    ann = Mqtt(number, "ann", "secret", "ann-one")
    bob = Mqtt(number, "bob", "hunter2", "bob-one")
    wrong = Mqtt(number, "bob", "wrong", "bob-two")
    assert wrong.client.closed
    assert [bob.code(name) for name in ("a/x", "a/#", "#", "b/bob-one", "a/+")] == [0, 0x87, 0x87, 0x87, 0x87]
    assert ann.code("b/#") == 0
    for topic in ("a/x", "b/bob-two", "b/bob-one"):
        bob.client.publish(topic, b"hello")
    wait_until(lambda: ann.got, "the one that bob may publish")
    assert ann.got == [("b/bob-one", b"hello")]
    ann.client.publish("a/x", b"1")
    wait_until(lambda: bob.got, "what bob may read")

    guarded.change(acl="allow ann * #")
    ann.client.publish("a/x", b"2")
    guarded.change(users=USERS.replace(user_line("bob", "hunter2"), ""))
    wait_until(lambda: bob.client.closed, "bob is out")
    assert bob.got == [("a/x", b"1")] or bob.got == [("a/x", b"1"), ("a/x", b"2")]
    assert not ann.client.closed
    ann.client.close()
