"""The connection breaks at every byte offset of a session with QoS 0, 1 and 2 both ways; the ledgers tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.mqtt import MqttClient
from tests.clients.mqtt.scripted import ScriptedBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers  # no process of its own, but some seconds

EACH = 5
WAIT_S = 20


def messages(side: str) -> list[tuple[int, bytes]]:
    """Five of each quality, mixed."""
    return [(qos, f"{side}-{qos}-{number}".encode()) for number in range(EACH) for qos in (0, 1, 2)]


def of_qos(ledger: list[tuple[int, bytes]], qos: int) -> list[bytes]:
    return [payload for quality, payload in ledger if quality == qos]


def check(ledger: list[tuple[int, bytes]], sent: list[tuple[int, bytes]], where: str) -> None:
    """QoS 0 at most once, QoS 1 at least once, QoS 2 exactly once; each in order."""
    zero, one, two = (of_qos(ledger, qos) for qos in range(3))
    rest = iter(of_qos(sent, 0))
    assert all(payload in rest for payload in zero), f"{where}: QoS 0 {zero}"
    assert list(dict.fromkeys(one)) == of_qos(sent, 1), f"{where}: QoS 1 {one}"
    assert two == of_qos(sent, 2), f"{where}: QoS 2 {two}"


def session(version: int, cut_after: int | None) -> int:
    """Runs one session to its end, over a second connection if need be; returns the bytes of the last connection."""
    up, down = messages("up"), messages("down")
    broker = ScriptedBroker(version, cut_after, push=[("in", *message) for message in down])
    got: list[tuple[int, bytes]] = []
    keeps = {"properties": {"sessionexpiryinterval": 60}} if version == 5 else {"cleanstart": False}
    client = MqttClient(
        broker.address,
        lambda kind, code, status: True if status.get("reasoncode") == 0 else 0.001,
        lambda topic, payload, properties, cpt: got.append((cpt >> 1 & 3, payload)),
        version=version,
        clientidentifier="ledger",
        **keeps,  # type: ignore[arg-type]
    )
    try:
        client.subscribe("in", qos=2)
        for qos, payload in up:
            client.publish("out", payload, qos)
        complete(client, broker, got, f"version {version}, cut after {cut_after}")
        check(broker.received, up, f"to the broker, version {version}, cut after {cut_after}")
        check(got, down, f"from the broker, version {version}, cut after {cut_after}")
        assert broker.connections == (1 if cut_after is None else 2)
        return int(broker.wire.used)
    finally:
        client.disconnect()
        client.close()
        broker.close()


def complete(client: MqttClient, broker: ScriptedBroker, got: list[tuple[int, bytes]], where: str) -> None:
    expected = {payload for qos, payload in messages("down") if qos}
    is_complete = lambda: client.flush(WAIT_S) and broker.is_quiet and expected <= {payload for _, payload in got}  # noqa: E731
    wait_until(is_complete, (where, got, broker.received))


@pytest.mark.parametrize("version", [4, 5])
def test_cut_at_every_byte(version: int) -> None:
    total = session(version, None)
    assert 550 < total < 900
    for offset in range(total):
        session(version, offset)


def test_a_wrong_ledger_is_detected() -> None:
    sent = messages("up")
    faults: list[Callable[[list[tuple[int, bytes]]], object]] = [
        lambda ledger: ledger.remove((2, b"up-2-1")),
        lambda ledger: ledger.append((2, b"up-2-1")),
        lambda ledger: ledger.remove((1, b"up-1-1")),
        lambda ledger: ledger.append((0, b"up-0-1")),
        lambda ledger: ledger.reverse(),
    ]
    for fault in faults:
        ledger = list(sent)
        fault(ledger)
        with pytest.raises(AssertionError):
            check(ledger, sent, "here")
