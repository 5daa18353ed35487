"""Situations of the MQTT standards (`mqtt_hub.json`), played against a hub over sockets; see README.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.server.mqtt import take_mqtt
from smqrt.wire import websocket
from tests.conformance.mqtt_script import packets_of
from tests.support.device import MASK, RAW, WS, WS_HEADERS, Device, Site, masked, request
from tests.support.waiting import let_others_run, wait_until

CASES = json.loads(Path(__file__).with_name("mqtt_hub.json").read_text())
CUT, WS_CUT = "cut", "ws-cut"
KINDS = (RAW, WS, WS_CUT)
PING, PONG = b"\xc0\0", b"\xd0\0"


class Client:
    """A client that sends and receives bytes of MQTT.

    Args:
        site: the server.
        kind: `raw`; `cut`: each byte in a segment of its own; `ws`: what is sent at once is one frame; `ws-cut`: frames
            of 1 to 3 bytes.
    """

    def __init__(self, site: Site, kind: str, protocol: str) -> None:
        self.kind = kind
        self.is_open = True
        self._received = b""
        self._frames = 0
        self.close_code: int | None = None
        self._device: Device = site.open(RAW if kind in (RAW, CUT) else WS)
        if self._device.on_websocket:
            head = f"{WS_HEADERS}Sec-WebSocket-Protocol: {protocol}\r\n"
            self._device.send_bytes(request(head, target="/mqtt")).read_head()
            assert f"\r\nSec-WebSocket-Protocol: {protocol}".encode() in self._device.head, self._device.head

    def send(self, data: bytes) -> None:
        if self.kind == CUT:
            for at in range(len(data)):
                self._device.send_bytes(data[at : at + 1])
                let_others_run(2)
        elif self.kind == WS_CUT:
            self._device.send_bytes(b"".join(masked(part) for part in self._parts(data)))
        else:
            self._device.send_bytes(masked(data) if self.kind == WS else data)

    def send_frame(self, data: bytes) -> None:
        """Send bytes below the framing of WebSockets."""
        self._device.send_bytes(data)

    def _parts(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(data):
            self._frames += 1
            size = self._frames % 3 + 1
            yield data[at : at + size]
            at += size

    def receive(self) -> bytes | None:
        """The next packet; None at the end of the connection."""
        while (packet := self._packet()) is None:
            if not self._more():
                assert not self._received, self._received
                return None
        return packet

    def _more(self) -> bool:
        if not self._device.more():
            return False
        if not self._device.on_websocket:
            self._received, self._device.stream.data = self._received + self._device.stream.data, b""
            return True
        while (frame := self._frame()) is not None:
            opcode, payload = frame
            if opcode == websocket.CLOSE:
                self.close_code = int.from_bytes(payload[:2], "big")
            elif opcode == websocket.BINARY:
                self._received += payload
        return True

    def _frame(self) -> tuple[int, bytes] | None:
        data = self._device.stream.data
        head = websocket.parse_head(data, 0, is_masked=False)
        if head is None or len(data) < head[2] + head[1]:
            return None
        first, size, start = head
        self._device.stream.data = data[start + size :]
        return first & 15, data[start : start + size]

    def _packet(self) -> bytes | None:
        size = shift = 0
        for at, byte in enumerate(self._received[1:5], 2):
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                packet, rest = self._received[: at + size], self._received[at + size :]
                if len(packet) < at + size:
                    return None
                self._received = rest
                return packet
        return None

    def close(self) -> None:
        self._device.close()
        self.is_open = False


class Player:
    """Plays a case with as many clients as it has."""

    def __init__(self, site: Site, case: dict[str, Any], version: int, kind: str) -> None:
        self.site, self.case, self.version, self.kind = site, case, version, kind
        self.clients: dict[str, Client] = {}
        if "limits" in case:
            devices = site.state.devices
            devices.limits = devices.retained.limits = replace(devices.limits, **case["limits"])

    def run(self) -> None:
        for step in self.case["steps"]:
            try:
                self.play(step)
            except AssertionError as error:
                name = f"{self.case['name']}, MQTT {self.version}, {self.kind}"
                raise AssertionError(f"{name}: {step}: {error}") from None
        for _ in range(2):  # a message may be on its way to a client whose PINGREQ is answered already
            for name, client in self.clients.items():
                if client.is_open and not self.case.get("unfinished"):
                    client.send(PING)
                    assert (got := client.receive()) == PONG, f"{self.case['name']}: {name} got {got!r} at the end"

    def play(self, step: dict[str, Any]) -> None:
        if "wait" in step:
            gevent.sleep(step["wait"])
            return
        client = self.client(step["client"])
        if "send" in step:
            packets = packets_of(step["send"], self.version)
            if packets:
                client.send(b"".join(packets))
        if "frame" in step:
            client.send_frame(masked_frames(step["frame"], self.version))
        for wanted in wanted_packets(step.get("expect", ""), self.version):
            got = client.receive()
            assert got is not None, f"closed instead of {wanted}"
            assert fits(wanted, got), f"{got.hex(' ')} instead of {wanted}"
        if "abort" in step:
            client.close()
            let_others_run()
        if "closed" in step:
            assert (got := client.receive()) is None, f"not closed, but {got.hex(' ')}"
            client.close()
            code = step["closed"]
            assert code is True or client.kind in (RAW, CUT) or client.close_code == code, client.close_code

    def client(self, name: str) -> Client:
        client = self.clients.get(name)
        if client is None or not client.is_open:
            protocol = "mqttv3.1" if self.version == 3 else "mqtt"
            client = self.clients[name] = Client(self.site, self.kind, protocol)
        return client


def masked_frames(script: str, version: int) -> bytes:
    """Frames: their first byte, and their payload."""
    frames = b""
    for one in packets_of(script, version):
        frame = bytearray(websocket.header(one[0] & 15, len(one) - 1))
        frame[0], frame[1] = one[0], frame[1] | 0x80
        frames += bytes(frame) + MASK + websocket.mask(one[1:], MASK)
    return frames


def wanted_packets(script: str, version: int) -> list[tuple[bytes, bool]]:
    """The packets that have to come, and whether each may go on behind what is written."""
    found = []
    for one in script.split(" / ") if script else []:
        found += [(packet, one.endswith(" ..")) for packet in packets_of(one.removesuffix(" .."), version)]
    return found


def fits(wanted: tuple[bytes, bool], got: bytes) -> bool:
    packet, is_open = wanted
    return packet[0] == got[0] and body_of(got).startswith(body_of(packet)) if is_open else packet == got


def body_of(packet: bytes) -> bytes:
    at = 1
    while packet[at] > 127:
        at += 1
    return packet[at + 1 :]


def played() -> list[Any]:
    found = []
    for case in CASES:
        for version in case.get("versions", [4, 5]):
            for kind in case.get("kinds", KINDS):
                found.append(pytest.param(case, version, kind, id=f"{kind}-{version}-{case['name']}"))
    return found


@pytest.fixture
def mqtt_site(make_site: Callable[..., Site]) -> Site:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    return site


@pytest.mark.parametrize(("case", "version", "kind"), played())
def test_situation(mqtt_site: Site, case: dict[str, Any], version: int, kind: str) -> None:
    Player(mqtt_site, case, version, kind).run()
    mqtt_site.close_devices()
    wait_until(lambda: not mqtt_site.state.sessions, "the clients are gone")


def test_names_are_unique_and_statements_named() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case["statements"] for case in CASES)
