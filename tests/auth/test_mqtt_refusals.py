"""Log lines about refused MQTT clients: each names the client id, the address and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gevent import socket, ssl

from smqrt.http import server as http_server
from smqrt.server.mqtt import take_mqtt
from smqrt.settings.limits import LineLimit
from smqrt.smq.close_log import closes
from tests.auth.conftest import Guarded
from tests.support.device import Site
from tests.support.mqtt_reference import packet
from tests.support.sites import make_site
from tests.support.waiting import wait_until

__all__ = ["make_site"]

ACL = "deny bob * secret/#\nallow * * #\n"
PASSWORDS = {b"bob": b"hunter2", b"ann": b"secret"}
CLOSED = "closed: b'mqtt:lamp' 127.0.0.1 mqtt: refused "
DENIED = "denied: the client 'mqtt:lamp' of 127.0.0.1 may not "
OF_BOB = "refused: bob (client id 'mqtt:lamp') from 127.0.0.1: "
RESERVED = "the topic '$SYS/x': names that begin with $SYS or $share are reserved"


def text(value: bytes) -> bytes:
    return len(value).to_bytes(2) + value


def connect(site: Site, user: bytes = b"", client_id: bytes = b"lamp", will: bytes = b"", password: bytes = b"") -> Any:
    """Return a socket with a client of MQTT 3.1.1 that has sent CONNECT."""
    site.server.take_mqtt = take_mqtt
    flags = 2 | (0xC0 if user else 0) | (4 if will else 0)
    body = b"\0\4MQTT" + bytes((4, flags, 0, 0)) + text(client_id)
    if will:
        body += text(will) + text(b"x")
    if user:
        body += text(user) + text(password or PASSWORDS[user])
    sock = socket.create_connection(site.address(), 20)
    sock.sendall(packet(0x10, body))
    return sock


def subscribe(topic: bytes) -> bytes:
    return packet(0x82, b"\0\1" + text(topic) + b"\0")


def publish(topic: bytes) -> bytes:
    return packet(0x32, text(topic) + b"\0\1x")


def line_of(caplog: pytest.LogCaptureFixture, beginning: str) -> str:
    """Return the only line with this beginning."""
    found: list[str] = []

    def has_come() -> bool:
        found[:] = [one for one in (record.getMessage() for record in caplog.records) if one.startswith(beginning)]
        return bool(found)

    wait_until(has_come, beginning)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "more", "beginning", "end"),
    [
        ({"user": b"bob", "password": b"x"}, b"", CLOSED, "(wrong user name or password); see auth.users"),
        ({}, b"", CLOSED, "(no user name and password, and no token); see auth.users"),
        ({"user": b"bob"}, subscribe(b"secret/x"), OF_BOB, "acl.txt:1 denies it; see the setting auth.acl"),
        ({"user": b"bob"}, subscribe(b"secret/#"), OF_BOB, "acl.txt:1 denies it; see the setting auth.acl"),
        ({"user": b"bob"}, publish(b"secret/x"), OF_BOB, "acl.txt:1 denies it; see the setting auth.acl"),
        ({"user": b"bob", "will": b"secret/x"}, b"", CLOSED, "(the topic of the will is denied)"),
        ({"user": b"bob", "will": b"$SYS/x"}, b"", DENIED + "publish its will to ", RESERVED),
        ({"user": b"bob"}, publish(b"$SYS/x"), DENIED + "publish to ", RESERVED),
    ],
)
def test_users_and_rights(
    guard: Callable[..., Guarded],
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    more: bytes,
    beginning: str,
    end: str,
) -> None:
    site = guard(ACL, mqtt=True).site
    with connect(site, **arguments) as sock:
        sock.sendall(more)
        assert line_of(caplog, beginning).endswith(end)


def test_another_users_client_id_and_too_many_connections(
    guard: Callable[..., Guarded], caplog: pytest.LogCaptureFixture
) -> None:
    site = guard(ACL, mqtt=True).site
    with connect(site, b"bob") as first:
        assert first.recv(4) == packet(0x20, b"\0\0")
        with connect(site, b"ann"):
            assert line_of(caplog, CLOSED) == f"{CLOSED}(another user's client has this id)"
        site.state.limits = replace(site.state.limits, connections_per_user=1)
        with connect(site, b"bob", b"lamp2"):
            line = line_of(caplog, "refused: the client 'mqtt:lamp2': the user's limit of connections is reached")
            assert line.endswith("see the setting limits.connections_per_user")
            words = "too many connections of this user"
            wait_until(lambda: next(closes.newest_first()).detail == words, "the second line")
            assert next(closes.newest_first()).address == "127.0.0.1"


def test_the_client_id_and_the_number_of_filters(
    guard: Callable[..., Guarded], caplog: pytest.LogCaptureFixture
) -> None:
    site = guard(ACL, mqtt=True).site
    devices = site.state.devices
    devices.limits = replace(devices.limits, client_id=("sensor-*",), filters=1)
    with connect(site):
        rule = "(the client id 'lamp' does not match mqtt.client_id of this server); see mqtt.client_id"
        assert line_of(caplog, CLOSED) == CLOSED + rule
    with connect(site, b"bob", b"sensor-1") as sock:
        sock.sendall(subscribe(b"a") + subscribe(b"b"))
        line = line_of(caplog, "refused: the MQTT client 'sensor-1' of 127.0.0.1: ")
        assert line.endswith("the client's limit of topic filters is reached; see the setting mqtt.filters")


@pytest.mark.parametrize(
    ("hook", "more", "beginning", "end"),
    [
        ("permittop", subscribe(b"t"), "subscribe to the topic 't': ", "permittop of the hub returned false"),
        (
            "permitfilter",
            subscribe(b"#"),
            "subscribe to the topic filter '#': ",
            "permitfilter of the hub returned false",
        ),
        ("permittop", subscribe(b"#"), "subscribe to the topic filter '#': ", "has permittop without permitfilter"),
        ("permittop", publish(b"t"), "publish to the topic 't': ", "permittop of the hub returned false"),
    ],
)
def test_hooks(
    make_site: Callable[..., Site],
    caplog: pytest.LogCaptureFixture,
    hook: str,
    more: bytes,
    beginning: str,
    end: str,
) -> None:
    with connect(make_site(mqtt=True, **{hook: lambda *_: False})) as sock:
        sock.sendall(more)
        assert line_of(caplog, DENIED + beginning).endswith(end)


def test_other_protocols(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_other_protocols", LineLimit())
    site = make_site()
    with connect(site) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
        line = line_of(caplog, "refused: 127.0.0.1: ")
        remedy = "create one with the option mqtt, or start the server with --mqtt"
        assert line.endswith(f"no hub accepts MQTT clients; {remedy}")
    caplog.clear()
    monkeypatch.setattr(http_server, "_other_protocols", LineLimit())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(site.address(), 20) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    line = line_of(caplog, "refused: 127.0.0.1: ")
    assert "the client sent TLS to a port without TLS" in line
    with socket.create_connection(site.address(secure=True), 20) as sock:
        sock.sendall(packet(0x10, b"\0\4MQTT\4\2\0\0\0\1a"))
        assert line_of(caplog, "refused: TLS with 127.0.0.1: ").endswith("the client did not send TLS")
