"""Floods over TLS: WebSockets, raw devices and HTTP, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gevent
import pytest

from smqrt.wire import smq, websocket
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.floods import flood
from tests.hostile.strangers import TlsStranger, crowd_sends, get, last, open_many
from tests.support.device import TLS, WSS, Device, masked, publish

CROWD = 20


@pytest.fixture(scope="module")
def over_tls() -> Iterator[Besieged]:
    running = Besieged(APPS / "lua", "--tls-port", "0")
    yield running
    running.stop()


FLOODS: dict[str, tuple[str, Callable[[Device], bytes]]] = {
    "pings": (TLS, lambda device: smq.frame(smq.PING) * 20_000),
    "WebSocket pings": (WSS, lambda device: masked(b"", websocket.PING) * 10_000),
    "pings of 125 bytes": (WSS, lambda device: masked(bytes(125), websocket.PING) * 5_000),
    "texts": (WSS, lambda device: masked(b"\x06n", websocket.TEXT) * 5_000),
    "fragments": (
        WSS,
        lambda device: (
            masked(smq.PING, fin=False) + masked(b"", websocket.CONTINUATION, fin=False) * 3000
            + masked(b"", websocket.CONTINUATION)
        ),
    ),
    "names": (
        WSS,
        lambda device: b"".join(masked(smq.with_name(smq.Type.CREATE, b"wss/%d" % n)) for n in range(3_000)),
    ),
    "messages to itself": (WSS, lambda device: masked(publish(device.etid, device.etid, b"x" * 10)) * 8_000),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_many_clients_flood(over_tls: Besieged, name: str) -> None:
    kind, data_of = FLOODS[name]
    devices = [TlsStranger(over_tls, b"flood-%d" % number, kind) for number in range(CROWD)]
    floods = [(device, data_of(device)) for device in devices]
    with over_tls.attack(f"{kind}: {CROWD} clients send {name}") as attack:
        jobs = [gevent.spawn(device.flood, data, attack) for device, data in floods]
        gevent.joinall(jobs, raise_error=True)


@pytest.mark.parametrize("payload_bytes", [10, 4000])
@pytest.mark.parametrize("kind", [TLS, WSS])
def test_subscribers_that_do_not_read(over_tls: Besieged, kind: str, payload_bytes: int) -> None:
    subscribers = [TlsStranger(over_tls, b"deaf-%d" % number, kind) for number in range(100)]
    for device in subscribers:
        device.subscribe(b"flood")
    publishers = [TlsStranger(over_tls, b"loud-%d" % number) for number in range(10)]
    tid = [device.create(b"flood") for device in publishers][0]
    case = f"SMQ: 10 flood 100 {kind} subscribers that do not read, {payload_bytes} bytes each"
    with over_tls.attack(case, grows_bytes=100 << 20) as attack:
        jobs = [gevent.spawn(flood, device, tid, payload_bytes, attack) for device in publishers]
        gevent.joinall(jobs, raise_error=True)
        for device in subscribers + publishers:
            device.close()


@pytest.mark.parametrize("target", [b"/lua/form.lsp", b"/help/security", b"/watch/held", b"/nothing"])
def test_keep_alive(over_tls: Besieged, target: bytes) -> None:
    one = get(over_tls, target)
    sockets = open_many(over_tls, 100)
    with over_tls.attack(f"TLS: 100 connections ask 20 times for {target.decode()}") as attack:
        assert crowd_sends(sockets, one * 20 + last(one), attack)


def test_bodies_in_chunks_of_one_byte(over_tls: Besieged) -> None:
    head = get(over_tls, b"/lua/body.lsp").replace(b"GET ", b"POST ")
    head = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    sockets = open_many(over_tls, 20)
    with over_tls.attack("TLS: 20 bodies in chunks of one byte") as attack:
        assert crowd_sends(sockets, head + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n", attack)
