"""A hub inside a real gevent application: pywsgi and gevent-websocket."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent import pywsgi, socket
from geventwebsocket.handler import WebSocketHandler

from smqrt import hub
from smqrt.broker.outbox import Drop
from smqrt.smq import data_path
from smqrt.wire import smq as wire
from smqrt.wire import websocket
from smqrt.wire.smq import Type
from tests.support.device import WS, WS_HEADERS, Device, connect_packet, masked, publish, request
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until


class Mounted:
    """An application with a page and a hub."""

    def __init__(self, **options: Any) -> None:
        self.smq = hub.create(**options)
        self.returned = 0
        self._server = pywsgi.WSGIServer(("127.0.0.1", 0), self._answer, handler_class=WebSocketHandler, log=None)
        self._server.start()
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
        self._devices: list[Device] = []

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["PATH_INFO"] == "/smq" and hub.isSMQ(environ):
            self.smq.connect(environ, "the argument")
            self.returned += 1
            return []
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"a page"]

    def open(self) -> Device:
        self._devices.append(Device(self._server.address, WS))
        return self._devices[-1]

    def device(self, uid: bytes = b"uid-a1", **more: Any) -> Device:
        return self.open().start().connect(uid, **more)

    @property
    def state(self) -> Any:
        return self.smq._broker

    def close(self) -> None:
        for device in self._devices:
            device.close()
        wait_until(lambda: not (self.state.sessions or data_path._handshakes), "the ends of all clients")
        self._server.stop(1)


@pytest.fixture
def mount() -> Iterator[Callable[..., Mounted]]:
    with Factory(Mounted) as make:
        yield make


def test_a_whole_session(mount: Callable[..., Mounted]) -> None:
    told: list[Any] = []
    site = mount(onconnect=lambda etid, info, peer: told.append((info["arg"], info["request"]["PATH_INFO"], peer.uid)))
    device, other = site.device(b"uid-a1"), site.device(b"other-1")
    assert device.ip == b"127.0.0.1"
    tid, stid = device.subscribe(b"news"), device.createsub(b"sub")
    other.publish(tid, b"hello", stid)
    device.expect(publish(tid, other.etid, b"hello", stid))
    device.send(wire.with_id(Type.OBSERVE, other.etid)).expect_nothing()
    other.close()
    device.expect(wire.change(other.etid, 0)).expect_nothing()
    site.smq.publish({"to": "all"}, "news")
    device.expect(publish(tid, 1, b'{"to":"all"}'))
    assert told == [("the argument", "/smq", "uid-a1"), ("the argument", "/smq", "other-1")]
    wait_until(lambda: site.returned == 1, "connect() returns when the connection ends")


def test_only_own_pages(mount: Callable[..., Mounted], caplog: pytest.LogCaptureFixture) -> None:
    device = mount().open()
    device.send_bytes(request(WS_HEADERS + "Origin: http://evil.example\r\n")).read_head()
    device.expect_end()
    [line] = [message for message in caplog.messages if "evil" in message]
    assert "create the hub with origins=['http://evil.example']" in line
    device = mount(origins="http://evil.example").open()
    device.start(WS_HEADERS + "Origin: http://evil.example\r\n").connect()
    mount().open().start(WS_HEADERS + "Origin: http://test\r\n").connect()


def test_pages_beside_it(mount: Callable[..., Mounted]) -> None:
    device = mount().open()
    device.send_bytes(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n").read_head()
    while device.more():
        pass
    assert device.stream.data == b"a page"


@pytest.mark.parametrize("size", [0, 1, 112, 113, 4096, 65000, 65520])
def test_sizes(mount: Callable[..., Mounted], size: int) -> None:
    device = mount().device()
    packet = publish(device.etid, device.etid, b"x" * size)
    device.send(packet, packet).expect(packet, packet)


ENDINGS: dict[str, tuple[Callable[[Mounted, Device], Any], list[bytes]]] = {
    "forged": (lambda site, device: device.send(publish(5, 5, b"")), [wire.disconnect(b"corrupt frame")]),
    "unknown": (lambda site, device: device.send(b"\xff"), []),
    "short": (lambda site, device: device.send(b"\x08\0"), []),
    "empty": (lambda site, device: device.send(b""), []),
    "second Connect": (lambda site, device: device.send(connect_packet()), []),
    "PubFrag": (lambda site, device: device.send(publish(5, device.etid, b"", kind=Type.PUBFRAG)), []),
    "too large": (lambda site, device: device.send(b"\x04" + b"n" * 65533), []),
    "disconnect": (lambda site, device: device.send(wire.disconnect()), []),
    "shutdown": (lambda site, device: site.smq.shutdown("bye"), [wire.disconnect(b"bye")]),
    "shutdown without a word": (lambda site, device: site.smq.shutdown(), []),
    "take-over": (lambda site, device: site.device(b"uid-a1"), [wire.disconnect(b"reconnect")]),
    "no mask": (lambda site, device: device.send_bytes(b"\x82\x01\x0c"), []),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_endings(mount: Callable[..., Mounted], name: str) -> None:
    end, packets = ENDINGS[name]
    closed: list[Any] = []
    site = mount(onclose=lambda etid, sock, peer, err: closed.append(peer.uid))
    device = site.device()
    end(site, device)
    if name != "no mask":  # gevent-websocket lets it pass
        device.expect_end(*packets)
        assert closed == ["uid-a1"]


def close_in_parts(device: Device) -> None:
    frame = masked(struct.pack(">H", 1001), websocket.CLOSE)
    for at in range(len(frame)):
        device.send_bytes(frame[at : at + 1])
        let_others_run()


CLIENT_ENDS: dict[str, tuple[Callable[[Device], object], list[str]]] = {
    "a close frame": (
        lambda device: device.send_bytes(masked(struct.pack(">H", 1001), websocket.CLOSE)),
        ["socketclosed", "websocket closed"],
    ),
    "a close frame without a code": (
        lambda device: device.send_bytes(masked(b"", websocket.CLOSE)),
        ["socketclosed", "websocket closed"],
    ),
    "a close frame in parts": (close_in_parts, ["socketclosed", "websocket closed"]),
    "a close frame behind a message": (
        lambda device: device.send_bytes(masked(b"\x0c") + masked(struct.pack(">H", 1000), websocket.CLOSE)),
        ["socketclosed", "websocket closed"],
    ),
    "no word": (lambda device: device.close(), ["socketreadfailed", "connection ended"]),
    "half a frame": (
        lambda device: (device.send_bytes(masked(b"abc", websocket.CLOSE)[:4]), device.close()),
        ["socketreadfailed", "connection ended"],
    ),
    "a close frame of one byte": (
        lambda device: device.send_bytes(masked(b"x", websocket.CLOSE)),
        ["", "websocket protocol error"],
    ),
    "an unknown opcode": (lambda device: device.send_bytes(b"\x83\x80mask"), ["", "websocket protocol error"]),
    "a text that is not UTF-8": (
        lambda device: device.send_bytes(masked(b"\xff", websocket.TEXT)),
        ["", "text that is not UTF-8"],
    ),
}


@pytest.mark.parametrize("name", CLIENT_ENDS)
def test_the_words_of_ends(mount: Callable[..., Mounted], name: str) -> None:
    """The same as under smqrt's own server."""
    end, words = CLIENT_ENDS[name]
    closed: list[Any] = []
    site = mount(onclose=lambda etid, sock, peer, err, reason: closed.append([err or "", reason]))
    end(site.device())
    wait_until(lambda: closed, "onclose")
    assert closed == [words]


def test_refusals(mount: Callable[..., Mounted]) -> None:
    site = mount(authenticate=lambda credentials, info: (3, "no"), readtmo=100)
    site.open().start().send(connect_packet()).expect_end(wire.connack(3, 0, b"no"))
    site.open().start().send(b"\x04news").expect_end(wire.connack(1, 0))
    site.open().start().expect_end(wire.connack(2, 0))


def test_version_2_with_a_frame_size(mount: Callable[..., Mounted]) -> None:
    device = mount().device(max_frame=300)
    packet = publish(device.etid, device.etid, b"x" * 5000)
    device.send(packet).expect(packet)


def test_hooks_that_block(mount: Callable[..., Mounted]) -> None:
    def slowly(*arguments: Any) -> bool:
        gevent.sleep(0.02)
        return True

    site = mount(authenticate=lambda *_: 0 if slowly() else 6, permittop=slowly, onpublish=slowly)
    device, got = site.device(), []
    site.smq.subscribe("ask", onmsg=lambda data, *_: (slowly(), got.append(data)))
    device.send(b"\x04news", *(publish(device.etid, device.etid, b"%d" % number) for number in range(3)), b"\x06ask")
    assert device.ack().name == b"news"
    assert [device.receive()[13:] for _ in range(3)] == [b"0", b"1", b"2"]
    ask = device.ack().number
    for number in range(3):
        device.publish(ask, b"%d" % number)
    wait_until(lambda: got == [b"0", b"1", b"2"], "all messages, in order")


def test_pings(mount: Callable[..., Mounted]) -> None:
    device = mount().device()
    device.send_bytes(masked(b"hello", websocket.PING)).expect(b"ws:10:hello").expect_nothing()


def test_the_ledger_of_a_subscriber_that_does_not_read(
    mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_path.limits, "stalled_s", 0.3)
    closed: list[Any] = []
    site = mount(budget=100_000, onclose=lambda etid, sock, peer, err, reason: closed.append((peer.uid, reason)))
    lazy = site.open()
    lazy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    lazy.start().connect(b"lazy-1")
    publisher = site.device(b"publisher")
    tid = lazy.subscribe(b"news")
    for number in range(1000):
        publisher.publish(tid, number.to_bytes(4, "big") + b"x" * 9000)
    publisher.expect_nothing()
    wait_until(lambda: closed, "the end of the stalled client")
    assert closed == [("lazy-1", "slow consumer")]
    got = [int.from_bytes(packet[13:17], "big") for packet in lazy.until_end(torn=True) if packet[0] == Type.PUBLISH]
    drops = site.state.stats.drops
    assert got == sorted(set(got))
    assert len(got) + drops[Drop.OVER_BUDGET] + drops[Drop.CLOSED] == 1000
    publisher.expect_nothing()


def test_a_raw_device_without_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    """gevent-websocket hands no connections over: nothing is answered, so that the application can, and the log names
    what is missing."""
    environ = {"REQUEST_METHOD": "GET", "HTTP_SIMPLEMQ": "1"}
    assert hub.create().connect(environ) is False
    assert "this WSGI server needs the handler of smqrt.wsgi" in caplog.text
    assert hub.create().connect({"REQUEST_METHOD": "GET"}) is False
