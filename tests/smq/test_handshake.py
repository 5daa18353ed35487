"""From an HTTP request to a connected client: the shapes that clients in the field use (spec: smq §1.1, §12)."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.wire import smq, websocket
from tests.apps.lua.hub_site import both, lua_site
from tests.support.device import (
    KINDS,
    RAW,
    RAW_HEADERS,
    TLS,
    WS,
    WS_HEADERS,
    WS_KEY,
    WS_UPGRADE,
    WSS,
    Device,
    Site,
    bounded,
    client_context,
    connect_packet,
    expect_clean,
    leftovers,
    request,
)  # fmt: skip
from tests.support.waiting import wait_until

__all__ = ["both", "lua_site"]

CONNECT = connect_packet(b"uid-a1")


def head_fields(device: Device) -> dict[str, str]:
    lines = device.head.decode().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


# ---- the three shapes


@pytest.mark.parametrize("kind", [RAW, TLS])
def test_device_with_http_reply(both: Site, kind: str) -> None:
    device = both.open(kind).start()
    assert device.head.startswith(b"HTTP/1.1 200 ")
    fields = head_fields(device)
    assert fields["smqbroker"] == "true"
    assert not {"content-length", "transfer-encoding"} & set(fields)
    assert device.ip == b"127.0.0.1"
    device.connect(b"uid-a1").expect_nothing()


@pytest.mark.parametrize("kind", [RAW, TLS])
def test_device_without_http_reply(both: Site, kind: str) -> None:
    """Init is the first thing on the socket."""
    device = both.open(kind).send_bytes(request("SimpleMQ: 1\r\n"))
    device.hello().connect(b"uid-a1").expect_nothing()


@pytest.mark.parametrize("value", ["false", "True", "1", ""])
def test_only_true_asks_for_the_reply(both: Site, value: str) -> None:
    device = both.open().send_bytes(request(f"SimpleMQ: 1\r\nSendSmqHttpResponse: {value}\r\n"))
    device.hello().connect(b"uid-a1")


@pytest.mark.parametrize("kind", [WS, WSS])
def test_browser(both: Site, kind: str) -> None:
    offers = "Sec-WebSocket-Protocol: smq\r\nSec-WebSocket-Extensions: permessage-deflate\r\n"
    offers += f"Origin: {'https' if kind == WSS else 'http'}://test\r\n"
    device = both.open(kind).start(WS_HEADERS + offers)
    assert device.head.startswith(b"HTTP/1.1 101 ")
    fields = head_fields(device)
    assert fields["sec-websocket-accept"] == websocket.accept_key(WS_KEY) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert fields["upgrade"] == "websocket"
    assert fields["connection"] == "Upgrade"
    assert fields["smqbroker"] == "true"
    assert not {"sec-websocket-protocol", "sec-websocket-extensions", "content-length"} & set(fields)
    device.connect(b"uid-a1").expect_nothing()


ODD_REQUESTS = {
    "HTTP/1.0": request(RAW_HEADERS, version="1.0"),
    "HTTP/1.0 without Host": b"GET / HTTP/1.0\r\nSimpleMQ: 1\r\nSendSmqHttpResponse: true\r\n\r\n",
    "POST without a body": request(RAW_HEADERS + "Content-Length: 0\r\n", method="POST"),
    "query string": request(RAW_HEADERS, target="/smq.lsp?a=1&b=%20"),
    "another value": request(RAW_HEADERS.replace("SimpleMQ: 1", "SimpleMQ: whatever")),
    "no value": request(RAW_HEADERS.replace("SimpleMQ: 1", "SimpleMQ:")),
    "lower case": request(RAW_HEADERS.replace("SimpleMQ", "simplemq")),
    "upper case": request(RAW_HEADERS.replace("SimpleMQ", "SIMPLEMQ")),
    "keep-alive": request(RAW_HEADERS + "Connection: keep-alive\r\n"),
    "close": request(RAW_HEADERS + "Connection: close\r\n"),
}


@pytest.mark.parametrize("name", ODD_REQUESTS)
def test_odd_requests_are_taken(both: Site, name: str) -> None:
    both.open().send_bytes(ODD_REQUESTS[name]).read_head().hello().connect(b"uid-a1").expect_nothing()


@pytest.mark.parametrize("kind", KINDS)
def test_byte_by_byte(both: Site, kind: str) -> None:
    device = both.open(kind)
    for byte in request(WS_HEADERS if device.on_websocket else RAW_HEADERS):
        device.send_bytes(bytes((byte,)))
        gevent.sleep(0)
    device.read_head().hello()
    for byte in device.framed(CONNECT):
        device.send_bytes(bytes((byte,)))
        gevent.sleep(0)
    device.accepted().expect_nothing()


NOT_SMQ = {
    "plain": "",
    "no version": WS_UPGRADE + f"Sec-WebSocket-Key: {WS_KEY}\r\n",
    "old version": WS_HEADERS.replace("13", "8"),
    "short key": WS_HEADERS.replace(WS_KEY, "c2hvcnQ="),
    "key that is not a base64": WS_HEADERS.replace(WS_KEY, "!!!"),
    "no Upgrade": WS_HEADERS.replace("Upgrade: websocket\r\n", ""),
    "another Upgrade": WS_HEADERS.replace("websocket\r\n", "h2c\r\n", 1),
    "no Connection": WS_HEADERS.replace("Connection: Upgrade\r\n", ""),
}


@pytest.mark.parametrize("name", NOT_SMQ)
def test_everything_else_is_404(both: Site, name: str) -> None:
    device = both.open().send_bytes(request(NOT_SMQ[name])).read_head()
    assert device.head.startswith(b"HTTP/1.1 404 ")
    assert "smqbroker" not in head_fields(device)


def test_a_websocket_is_asked_for_by_get(both: Site) -> None:
    device = both.open().send_bytes(request(WS_HEADERS + "Content-Length: 0\r\n", method="POST")).read_head()
    assert device.head.startswith(b"HTTP/1.1 404 ")


def test_after_404_the_connection_still_speaks_http(both: Site) -> None:
    device = both.open().send_bytes(request("")).read_head()
    size = int(head_fields(device)["content-length"])
    while len(device.stream.data) < size:
        device.more()
    device.stream.data = b""
    device.start(RAW_HEADERS).connect(b"uid-a1")


# ---- weak spot: bytes that arrive with or before Connect


@pytest.mark.parametrize("kind", KINDS)
def test_connect_together_with_the_request(both: Site, kind: str) -> None:
    device = both.open(kind)
    headers = WS_HEADERS if device.on_websocket else RAW_HEADERS
    device.send_bytes(request(headers) + device.framed(CONNECT) + device.framed(smq.PING))
    device.read_head().hello().accepted().expect(smq.PONG)


@pytest.mark.parametrize("kind", [TLS, WSS])
def test_connect_in_the_next_tls_record_of_one_segment(both: Site, authority: Any, kind: str) -> None:
    """The server's TLS layer has decrypted nothing of Connect yet, and its socket will not become readable for it."""
    records = _TlsByHand(both.address(secure=True))
    framed = both.open(WS).framed if kind == WSS else smq.frame
    headers = WS_HEADERS if kind == WSS else RAW_HEADERS
    records.send(request(headers), framed(CONNECT), framed(smq.PING))
    records.read_until(b"\x0d", 4)


@pytest.mark.parametrize("kind", [RAW, WS])
def test_half_a_connect_together_with_the_request(both: Site, kind: str) -> None:
    device = both.open(kind)
    headers = WS_HEADERS if device.on_websocket else RAW_HEADERS
    packet = device.framed(CONNECT)
    device.send_bytes(request(headers) + packet[:5]).read_head().hello()
    device.send_bytes(packet[5:]).accepted().expect_nothing()


def test_bad_bytes_together_with_the_request(both: Site) -> None:
    device = both.open().send_bytes(request(RAW_HEADERS) + smq.frame(b"\x04news")).read_head().hello()
    device.expect_end(smq.connack(1, 0))
    expect_clean(both)


# ---- Java: two TLS records


class _TlsByHand:
    """A TLS client that sees the records one by one."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._sock = gevent.socket.create_connection(address, timeout=4)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._tls = context.wrap_bio(self._in, self._out)
        self.texts: list[bytes] = []
        self._data = b""
        self._handshake()

    def _handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._sock.sendall(self._out.read())
                self._in.write(self._sock.recv(65536))
            else:
                break
        self._sock.sendall(self._out.read())

    def send(self, *texts: bytes) -> None:
        """A record for each text, all in one segment."""
        for text in texts:
            self._tls.write(text)
        self._sock.sendall(self._out.read())

    def _record(self) -> bytes:
        while len(self._data) < 5 or len(self._data) < 5 + int.from_bytes(self._data[3:5], "big"):
            more = self._sock.recv(65536)
            assert more, self.texts
            self._data += more
        size = 5 + int.from_bytes(self._data[3:5], "big")
        record, self._data = self._data[:size], self._data[size:]
        return record

    def read_until(self, wanted: bytes, most: int) -> list[bytes]:
        """The texts of the next records, until one ends with `wanted`."""
        for _ in range(most + 4):  # session tickets come as records, too
            self._in.write(self._record())
            try:
                self.texts.append(self._tls.read(65536))
            except ssl.SSLWantReadError:
                continue
            if self.texts[-1].endswith(wanted):
                return self.texts
        raise AssertionError(self.texts)


def test_java_http_reply_and_init_are_two_tls_records(both: Site) -> None:
    records = _TlsByHand(both.address(secure=True))
    records.send(request(RAW_HEADERS))
    reply, hello = records.read_until(b"127.0.0.1", 2)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.endswith(b"\r\n\r\n")
    assert hello[:4] == b"\x00\x11\x01\x01"


@pytest.mark.parametrize("most", [257, 8192])
def test_a_version_2_client_sets_its_largest_frame(both: Site, most: int) -> None:
    """Each TLS record carries no more; the message arrives whole."""
    records = _TlsByHand(both.address(secure=True))
    records.send(request("SimpleMQ: 1\r\n"), smq.frame(connect_packet(b"uid-a1", max_frame=most)), smq.frame(smq.PING))
    connack = b"".join(records.read_until(smq.frame(smq.PONG), 3))
    etid = int.from_bytes(connack[-7:-3], "big")
    frame = smq.publish_frame(etid, etid, 0, b"x" * 20_000)
    records.texts.clear()
    records.send(frame, smq.frame(smq.PING))
    texts = records.read_until(smq.frame(smq.PONG), 100)
    assert b"".join(texts) == frame + smq.frame(smq.PONG)
    assert max(map(len, texts)) <= most < 20_000


# ---- Connack: who is let in


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6])
def test_authenticate_refuses(make_site: Callable[..., Site], kind: str, code: int) -> None:
    site = make_site(authenticate=lambda credentials, info: (code, f"because {code}"))
    site.open(kind).start().send(CONNECT).expect_end(smq.connack(code, 0, b"because %d" % code))
    expect_clean(site)


ANSWERS: dict[str, tuple[Any, bytes | None]] = {
    "0": (0, None),
    "0 and a reason": ((0, "welcome"), None),
    "None": (None, smq.connack(6, 0)),
    "7": (7, smq.connack(6, 0)),
    "-1": (-1, smq.connack(6, 0)),
    "False": (False, smq.connack(6, 0)),
    "True": (True, smq.connack(6, 0)),
    "text": ("yes", smq.connack(6, 0)),
    "only a code": (3, smq.connack(3, 0)),
    "bytes": ((3, b"\xff"), smq.connack(3, 0, b"\xff")),
    "no reason": ((3, None), smq.connack(3, 0)),
    "a long reason": ((3, "x" * 70000), smq.connack(3, 0, b"x" * 65527)),
    "a reason of another type": ((3, 5), smq.connack(6, 0)),
    "three values": ((3, "a", "b"), smq.connack(6, 0)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_authenticate(make_site: Callable[..., Site], name: str) -> None:
    answer, expected = ANSWERS[name]
    device = make_site(authenticate=lambda credentials, info: answer).open().start().send(CONNECT)
    device.expect_end(expected) if expected else device.accepted()


@pytest.mark.parametrize("kind", KINDS)
def test_weak_spot_authenticate_errors_are_refused_and_closed(make_site: Callable[..., Site], kind: str) -> None:
    def authenticate(credentials: bytes, info: dict[str, Any]) -> int:
        raise ValueError("on purpose")

    site = make_site(authenticate=authenticate)
    site.open(kind).start().send(CONNECT).expect_end(smq.connack(6, 0))
    expect_clean(site)


def _asks_for_a_certificate(credentials: bytes, info: dict[str, Any]) -> Any:
    """4 without a certificate, 5 for one that is not alice's."""
    certificate = info["sock"].certificate()
    assert info["sock"].trusted() == (certificate is not None)
    if certificate is None:
        return 4, "a certificate, please"
    return (0, "") if certificate["commonname"] == "alice" else (5, "not you")


@pytest.mark.parametrize("kind", [TLS, WSS])
@pytest.mark.parametrize(
    ("who", "expected"),
    [("alice", None), ("mallory", smq.connack(5, 0, b"not you")), (None, smq.connack(4, 0, b"a certificate, please"))],
)
def test_client_certificates(
    make_site: Callable[..., Site], authority: Any, kind: str, who: str | None, expected: bytes | None
) -> None:
    site = make_site(authenticate=_asks_for_a_certificate)
    context = client_context(*authority.pair(who)) if who else client_context()
    device = site.open(kind, context).start().send(CONNECT)
    device.expect_end(expected) if expected else device.accepted()


@pytest.mark.parametrize("kind", KINDS)
def test_no_connect_in_time(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(readtmo=100)
    device = site.open(kind).start()
    device.send_bytes(device.framed(CONNECT)[:5])
    device.expect_end(smq.connack(2, 0))
    expect_clean(site)


def test_clients_in_authentication_are_not_late(make_site: Callable[..., Site]) -> None:
    def authenticate(credentials: bytes, info: dict[str, Any]) -> int:
        gevent.sleep(0.5)
        return 0

    site = make_site(readtmo=100, authenticate=authenticate)
    site.open().start().connect(b"uid-a1").expect_nothing()


def test_a_client_that_leaves_while_it_is_asked_about(make_site: Callable[..., Site]) -> None:
    """Nothing is read meanwhile, so it may be accepted yet; then it is told apart at once."""
    events: list[str] = []

    def authenticate(credentials: bytes, info: dict[str, Any]) -> int:
        gevent.sleep(0.1)
        events.append("authenticate")
        return 0

    site = make_site(
        authenticate=authenticate,
        onconnect=lambda *_: events.append("onconnect"),
        onclose=lambda *_: events.append("onclose"),
    )
    site.open().start().send(CONNECT).close()
    wait_until(lambda: "onclose" in events, "the end of the client")
    assert events == ["authenticate", "onconnect", "onclose"]
    expect_clean(site)


def test_weak_spot_an_unfinished_handshake_costs_others_nothing(both: Site) -> None:
    """200 connections in every unfinished state; others connect and talk as if they were not there."""
    for number in range(200):
        device = both.open()
        device.send_bytes((b"", b"GET / HT", request(RAW_HEADERS), request(RAW_HEADERS) + b"\0\x20\x02")[number % 4])
    with bounded(2):
        for number in range(50):
            both.device(b"uid-%03d" % number).expect_nothing()
    assert "handshakes" in leftovers(both.state)


def test_seeds_differ(both: Site) -> None:
    assert len({both.open().start().seed for _ in range(20)}) == 20


def test_arguments_of_authenticate_and_onconnect(make_site: Callable[..., Site]) -> None:
    told: list[Any] = []

    def authenticate(credentials: bytes, info: dict[str, Any]) -> int:
        told.append((credentials, dict(info)))
        return 0

    site = make_site(authenticate=authenticate, onconnect=lambda etid, info, peer: told.append((etid, info, peer)))
    site.arg = {"any": "thing"}
    device = site.open().start().connect(b"uid-a1", credentials=b"\xffsecret", info=b"a device")
    device.expect_nothing()
    (credentials, before), (etid, after, peer) = told
    assert credentials == b"\xffsecret"
    assert before["arg"] is after["arg"] is site.arg
    assert before["seed"] == device.seed
    assert (before["uid"], before["info"]) == ("uid-a1", "a device") == (peer.uid, peer.info)
    assert before["request"].path == "/smq"
    assert before["sock"] is after["sock"] is peer.sock
    assert etid == device.etid == peer.tid
    assert b"secret" not in repr(before).encode()
