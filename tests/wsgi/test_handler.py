"""Hubs behind `smqrt.wsgi.Handler`: browsers and raw devices under gevent.pywsgi, plain and TLS, and beside Flask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask import Flask, request
from gevent import socket
from gevent.pywsgi import WSGIServer

from smqrt import hub, wsgi
from smqrt.broker.outbox import Drop
from smqrt.errors import ArgumentError
from smqrt.smq import data_path
from smqrt.wire import smq as wire
from smqrt.wsgi import Handler
from tests.support.device import (
    KINDS,
    RAW,
    RAW_HEADERS,
    TLS,
    WS_HEADERS,
    WSS,
    Authority,
    Device,
    bounded,
    client_context,
    connect_packet,
    masked,
    publish,
)
from tests.support.device import request as head
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until


class Mounted:
    """A Flask application with a page and a hub, behind `gevent.pywsgi`, plain and TLS."""

    def __init__(self, authority: Authority, **options: Any) -> None:
        self.smq = hub.create(**options)
        self.returned: list[Any] = []
        self.environs: list[dict[str, Any]] = []
        app = Flask(__name__)
        app.add_url_rule("/smq", view_func=self._smq, methods=["GET", "POST"])
        app.add_url_rule("/smq", view_func=self._smq, websocket=True)
        app.add_url_rule("/", view_func=lambda: "a page", methods=["GET", "POST"])
        app.add_url_rule("/body", "body", lambda: str(len(request.get_data())), methods=["POST"])
        cert, key = authority.pair("server")
        tls = {"certfile": str(cert), "keyfile": str(key), "ca_certs": str(authority.path), "cert_reqs": 1}
        common: dict[str, Any] = {"handler_class": Handler, "log": None}
        self.servers = {
            False: WSGIServer(("127.0.0.1", 0), app, **common),
            True: WSGIServer(("127.0.0.1", 0), app, **common, **tls),
        }
        for server in self.servers.values():
            server.start()
        self._devices: list[Device] = []

    def _smq(self) -> str:
        self.environs.append(request.environ)
        self.returned.append(self.smq.connect(request.environ, "the argument"))
        return "what nobody sees"

    def open(self, kind: str, context: Any = None) -> Device:
        secure = kind in (TLS, WSS)
        context = context or (client_context() if secure else None)
        self._devices.append(Device(self.servers[secure].address, kind, context))
        return self._devices[-1]

    def device(self, uid: bytes = b"uid-a1", kind: str = RAW, **more: Any) -> Device:
        return self.open(kind).start().connect(uid, **more)

    def close(self) -> None:
        for device in self._devices:
            device.close()
        sessions = self.smq._broker.sessions
        wait_until(lambda: not (sessions or data_path._handshakes), "the ends of all clients")
        for server in self.servers.values():
            server.stop(1)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Mounted]]:
    with Factory(lambda **options: Mounted(Authority(tmp_path), **options)) as make:
        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_session(mount: Callable[..., Mounted], kind: str) -> None:
    told: list[Any] = []
    site = mount(onconnect=lambda etid, info, peer: told.append((info, peer)))
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1")
    assert device.ip == b"127.0.0.1"
    tid, stid = device.subscribe(b"news"), device.createsub(b"sub")
    other.publish(tid, b"hello", stid)
    device.expect(publish(tid, other.etid, b"hello", stid))
    packet = publish(device.etid, device.etid, b"x" * 65520)
    device.send(packet, packet).expect(packet, packet)
    info, peer = told[0]
    assert (info["arg"], info["url"], info["header"]["Host"], info["uname"]) == ("the argument", "/smq", "test", None)
    assert info["sock"].peername() == device.sock.getsockname()
    assert peer.sock is info["sock"]
    device.close()
    assert site.returned == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_connects_once(mount: Callable[..., Mounted], kind: str) -> None:
    site = mount()
    device = site.device(b"uid-a1", kind)
    with pytest.raises(ArgumentError, match="already answered; call connect once per request"):
        site.smq.connect(site.environs[0])
    tid = device.subscribe(b"news")
    device.publish(tid, b"it goes on").expect(publish(tid, device.etid, b"it goes on"))


def test_pages_beside_it(mount: Callable[..., Mounted]) -> None:
    device = mount().open(RAW)
    device.send_bytes(head("Connection: close\r\n", target="/")).read_head()
    while device.more():
        pass
    assert device.stream.data == b"a page"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", b"404 Not Found"),
        (WS_HEADERS.replace("Version: 13", "Version: 12"), b"404 Not Found"),
        (WS_HEADERS + "Origin: http://elsewhere.example\r\n", b"403 Forbidden"),
    ],
)
def test_other_requests_get_a_status_and_keep_the_connection(
    mount: Callable[..., Mounted], headers: str, status: bytes
) -> None:
    device = mount().open(RAW)
    for _ in range(2):
        device.send_bytes(head(headers)).read_head()
        assert device.head.startswith(b"HTTP/1.1 " + status + b"\r\n"), device.head
        size = int(device.head.lower().partition(b"content-length: ")[2].split()[0])
        while len(device.stream.data) < size:
            assert device.more()
        assert b"what nobody sees" not in device.stream.data
        device.stream.data = device.stream.data[size:]


def test_a_closed_hub_asks_to_come_back(mount: Callable[..., Mounted]) -> None:
    site = mount()
    site.smq.close()
    device = site.open(RAW)
    device.send_bytes(head(RAW_HEADERS)).read_head()
    assert device.head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in device.head


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_come_with_the_request(mount: Callable[..., Mounted], kind: str) -> None:
    """The server has read them already."""
    site = mount()
    device = site.open(kind)
    own = WS_HEADERS if device.on_websocket else RAW_HEADERS
    packet = connect_packet(b"uid-a1")
    frame = masked(packet) if device.on_websocket else wire.frame(packet)
    device.send_bytes(head(own) + frame)
    device.read_head().hello()
    device.accepted()


def test_a_device_without_http_reply(mount: Callable[..., Mounted]) -> None:
    device = mount().open(RAW)
    device.send_bytes(head("SimpleMQ: 1\r\nContent-Length: 0\r\n", method="POST", version="1.0"))
    device.hello().connect(b"uid-a1")


@pytest.mark.parametrize("kind", KINDS)
def test_endings(mount: Callable[..., Mounted], kind: str) -> None:
    closed: list[Any] = []
    site = mount(onclose=lambda etid, sock, peer, err: closed.append(err))
    site.device(b"uid-a1", kind).send(b"\xff").expect_end()
    device = site.device(b"uid-a1", kind)
    site.smq.shutdown("bye", device.etid)
    device.expect_end(wire.disconnect(b"bye"))
    site.device(b"uid-a1", kind).close()
    wait_until(lambda: len(closed) == 3, "three ends")


@pytest.mark.parametrize("kind", [TLS, WSS])
def test_client_certificates(mount: Callable[..., Mounted], tmp_path: Path, kind: str) -> None:
    told: list[Any] = []
    site = mount(onconnect=lambda etid, info, peer: told.append((peer.sock.trusted(), peer.sock.certificate())))
    site.open(kind, client_context(*Authority(tmp_path).pair("alice"))).start().connect(b"uid-a1")
    site.open(kind).start().connect(b"uid-b1")
    wait_until(lambda: len(told) == 2, "onconnect")
    assert told[0][0] is True
    assert told[0][1]["commonname"] == "alice"
    assert told[1] == (False, None)


@pytest.mark.parametrize("kind", [RAW, TLS])
def test_drops_of_a_blocked_subscriber_are_counted(
    mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(data_path.limits, "stalled_s", 0.3)
    closed: list[Any] = []
    site = mount(budget=100_000, onclose=lambda etid, sock, peer, err: closed.append(peer.uid))
    lazy = site.device(b"lazy-1", kind)
    tid = lazy.subscribe(b"news")
    publisher = site.device(b"publisher")
    for _ in range(2000):
        publisher.publish(tid, b"x" * 9000)
    publisher.expect_nothing()
    wait_until(lambda: closed, "the end of the stalled client")
    assert closed == ["lazy-1"]
    drops = site.smq._broker.stats.drops
    assert drops[Drop.OVER_BUDGET] > 0


def test_an_application_that_fails_after_it_connected(mount: Callable[..., Mounted]) -> None:
    site = mount()
    connect = site.smq.connect

    def fails(*arguments: Any) -> bool:
        connect(*arguments)
        raise ValueError("on purpose")

    site.smq.connect = fails  # type: ignore[method-assign]
    device = site.device()
    let_others_run()
    device.send(bytes((wire.Type.PING,))).expect(wire.PONG)
    assert socket.create_connection(site.servers[False].address, 1)


DRIPS = {
    "nothing at all": (b"", b""),
    "a request line": (b"GET / ", b"x"),
    "a head": (b"GET / HTTP/1.1\r\nHost: test\r\n", b"x"),
    "a body": (head("Content-Length: 9000\r\n", method="POST", target="/body"), b"x"),
    "chunks": (head("Transfer-Encoding: chunked\r\n", method="POST", target="/body"), b"1\r\nx\r\n"),
    "a body that nobody reads": (head("Content-Length: 9000\r\n", method="POST", target="/"), b"x"),
}


@pytest.mark.parametrize("kind", [RAW, TLS])
@pytest.mark.parametrize("name", DRIPS)
def test_slow_senders_are_closed(
    mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    for limit in ("KEEP_ALIVE_S", "HEAD_S", "BODY_S", "DISCARD_S"):
        monkeypatch.setattr(wsgi, limit, 0.2)
    device = mount().open(kind)
    first, drop = DRIPS[name]
    device.send_bytes(first)
    with bounded(), suppress(OSError):
        while True:
            device.send_bytes(drop)
            gevent.sleep(0.02)
            with gevent.Timeout(0.001, False):
                if not device.more():
                    return


def test_fast_enough_senders_are_awaited(mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi, "BODY_S", 0.2)
    device = mount().open(RAW)
    device.send_bytes(head("Connection: close\r\nContent-Length: 4000\r\n", method="POST", target="/body"))
    for _ in range(8):
        device.send_bytes(b"x" * 500)
        gevent.sleep(0.05)
    while device.more():
        pass
    assert device.stream.data.endswith(b"\r\n\r\n4000")
