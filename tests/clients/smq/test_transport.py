"""The client's transports: raw TCP and WebSocket, through the HTTP handshake."""

import pytest

from smqrt.clients.smq.protocol import ConnectionEnd, Handshake
from smqrt.errors import ArgumentError
from smqrt.wire.url import parse_url
from smqrt.wire.websocket import accept_key

RAW = parse_url("http://host:1234/smq.lsp?a=b")
HEAD = b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n"


def fields(handshake):
    lines = handshake.request.decode("latin-1").split("\r\n")
    return lines[0], dict(line.split(": ", 1) for line in lines[1:] if line)


def test_the_raw_request_is_what_devices_send():
    line, headers = fields(Handshake(RAW, [("X-Token", "42")]))
    assert line == "GET /smq.lsp?a=b HTTP/1.1"
    assert headers == {"Host": "host:1234", "SimpleMQ": "1", "SendSmqHttpResponse": "true", "X-Token": "42"}


@pytest.mark.parametrize("cut", range(1, len(HEAD)))
def test_the_head_may_come_in_pieces(cut):
    handshake = Handshake(RAW, [])
    assert handshake.receive(HEAD[:cut]) is None
    assert handshake.receive(HEAD[cut:] + b"behind") == b"behind"


@pytest.mark.parametrize(
    ("answer", "message", "can_reconnect"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answered 404 Not Found", False),
        (b"HTTP/1.1 302 Found\r\nLocation: /x/\r\n\r\n", "answered 302 Found and redirects to /x/", False),
        (b"HTTP/1.1 503 Busy\r\n\r\n", "answered 503 Busy", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "answered like a web page", False),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP", False),
        (b"HTTP/1.1 abc\r\n\r\n", "does not speak HTTP", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20000, "does not speak HTTP", False),
    ],
)
def test_what_is_no_broker(answer, message, can_reconnect):
    with pytest.raises(ConnectionEnd, match=message) as caught:
        Handshake(RAW, []).receive(answer)
    assert caught.value.word == "nonsmq"
    assert caught.value.can_reconnect is can_reconnect


def test_the_websocket_answer_must_fit_the_key():
    handshake = Handshake(parse_url("ws://host/"), [])
    _, headers = fields(handshake)
    assert (headers["Upgrade"], headers["Sec-WebSocket-Version"]) == ("websocket", "13")
    answer = "HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: {}\r\n\r\n"
    good = answer.format(accept_key(headers["Sec-WebSocket-Key"])).encode()
    assert handshake.receive(good) == b""
    with pytest.raises(ConnectionEnd, match="wrong key"):
        Handshake(parse_url("ws://host/"), []).receive(good)


@pytest.mark.parametrize(("name", "value"), [("X", "a\r\nY: b"), ("X Y", "1"), ("", "1"), ("X", "\u20ac")])
def test_headers_that_must_not_be_sent(name, value):
    with pytest.raises(ArgumentError, match="headers"):
        Handshake(RAW, [(name, value)])
