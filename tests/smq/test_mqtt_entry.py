"""MQTT clients over TLS, and behind PROXY headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smqrt.server.mqtt import take_mqtt
from smqrt.transport.admission import TrustedNetworks, open_connections
from tests.conformance.mqtt_script import data_of, packets_of
from tests.support.device import RAW, TLS, Device, Site
from tests.support.waiting import wait_until
from tests.wire.proxy_headers import version_2

LINE = b"PROXY TCP4 192.0.2.7 127.0.0.1 4711 443\r\n"


@pytest.fixture
def mqtt_site(make_site: Callable[..., Site]) -> Site:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    return site


@pytest.fixture
def proxied(mqtt_site: Site) -> Iterator[Site]:
    """A site whose ports expect PROXY headers of this machine."""
    open_connections.proxies = TrustedNetworks(["127.0.0.0/8"])
    mqtt_site.address(secure=True)
    for listener in mqtt_site._listeners:
        listener.expect_proxy_headers(lambda: open_connections.proxies, 0.6)
    yield mqtt_site
    open_connections.proxies = TrustedNetworks()


def expect(device: Device, script: str) -> None:
    for packet in packets_of(script, 5):
        data = b""
        while len(data) < len(packet):
            data += device.sock.recv(len(packet) - len(data))
        assert data == packet


def test_a_large_message_over_tls(mqtt_site: Site) -> None:
    device = mqtt_site.open(TLS)
    device.send_bytes(data_of("C a / 82: 00 01 P 't' 01 / 32: 't' 00 01 P 78*400000", 5))
    expect(device, "A / 90: 00 01 P 01 / 40: 00 01 / 32: 't' 00 01 P 78*400000")


@pytest.mark.parametrize("kind", [RAW, TLS])
@pytest.mark.parametrize("header", [LINE, version_2()], ids=["version 1", "version 2"])
def test_the_client_is_the_one_that_the_proxy_header_names(proxied: Site, header: bytes, kind: str) -> None:
    device = proxied.open(kind, first=header)
    device.send_bytes(data_of("C a", 5))
    expect(device, "A")
    (session,) = proxied.state.sessions.values()
    assert session.outbox.transport.peer_host == "192.0.2.7"
    assert open_connections._by_address.get("192.0.2.7") == 1
    device.close()
    wait_until(lambda: "192.0.2.7" not in open_connections._by_address)


def test_the_proxy_header_and_connect_in_one_write(proxied: Site) -> None:
    device = proxied.open(RAW, first=LINE + data_of("C a / C0:", 5))
    expect(device, "A / D0:")


def test_a_client_without_the_header_is_refused(proxied: Site) -> None:
    device = proxied.open(RAW)
    device.send_bytes(data_of("C a", 5))
    assert not proxied.state.sessions
    assert b" 403 " in device.sock.recv(1000)
