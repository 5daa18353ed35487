"""The connection as a state machine: bytes in, events out."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.clients.smq.protocol import Accepted, Ack, Change, ClientProtocol, ClientState, Ended, Init, Pong, Published
from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from smqrt.wire.url import parse_url

URL = parse_url("http://host/smq")
HEAD = b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n"
PUBLISH = smq.publish_frame(10, 20, 30, b"payload")[2:]


def opened(url="http://host/smq"):
    protocol = ClientProtocol(parse_url(url))
    if protocol._handshake._key:
        protocol.take()
        protocol.receive(websocket.switching_protocols(protocol._handshake._key))
        wire = lambda packet: websocket.encode(websocket.BINARY, packet)  # noqa: E731
    else:
        protocol.receive(HEAD)
        wire = smq.frame
    protocol.receive(wire(smq.init(1, "10.0.0.1")))
    protocol.connect(b"abcdef", b"", b"")
    protocol.receive(wire(smq.connack(0, 99)))
    assert protocol.state is ClientState.OPEN
    protocol.take()
    return protocol, wire


def test_from_the_request_to_open():
    protocol = ClientProtocol(URL)
    assert protocol.take().startswith(b"GET /smq HTTP/1.1\r\n")
    assert protocol.receive(HEAD + smq.frame(smq.init(7, "::ffff:10.0.0.1"))) == [Init(7, "10.0.0.1")]
    protocol.connect(b"abcdef", b"secret", b"info")
    assert smq.parse_connect(protocol.take()[2:]) == (b"abcdef", b"secret", b"info", 0)
    assert protocol.receive(smq.frame(smq.connack(0, 99))) == [Accepted(99)]
    assert protocol.take() == b""


@pytest.mark.parametrize("url", ["http://host/", "ws://host/"])
def test_every_packet_of_a_broker_becomes_an_event(url):
    protocol, wire = opened(url)
    protocol.ping("token")
    stream = b"".join(
        wire(packet)
        for packet in (
            smq.ack(Type.SUBACK, 5, b"name"),
            smq.ack(Type.CREATEACK, 0, b"denied"),
            PUBLISH,
            smq.change(5, 2),
            smq.PONG,
            smq.disconnect(b"bye"),
            PUBLISH,
        )
    )
    *events, last = protocol.receive(stream)
    assert events == [
        Ack(Type.SUBACK, 5, b"name"),
        Ack(Type.CREATEACK, 0, b"denied"),
        Published(b"payload", 20, 10, 30),
        Change(5, 2),
        Pong("token"),
    ]
    assert isinstance(last, Ended)
    assert (last.end.word, last.end.by_broker, last.end.can_reconnect) == ("bye", True, False)
    assert protocol.receive(wire(PUBLISH)) == []


@given(st.lists(st.integers(1, 200), min_size=1), st.booleans())
@settings(max_examples=60)
def test_any_split_of_the_stream_gives_the_same_events(sizes, websocket_url):
    protocol, wire = opened("ws://host/" if websocket_url else "http://host/")
    payloads = [os.urandom(size) for size in (0, 1, 5, 300)]
    stream = b"".join(wire(smq.publish_frame(1, 2, 3, payload)[2:]) for payload in payloads)
    events, at = [], 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        events += protocol.receive(stream[at : at + size])
        at += size
    assert [event.data for event in events] == payloads


def test_a_ping_is_answered():
    protocol, wire = opened()
    assert protocol.receive(wire(smq.PING)) == []
    assert protocol.take() == smq.frame(smq.PONG)


@pytest.mark.parametrize(
    ("code", "text", "word", "can_reconnect"),
    [
        (1, b"", "protocol version not supported", False),
        (2, b"", "server unavailable", True),
        (3, b"try again", "incorrect credentials", False),
        (4, b"", "client certificate required", False),
        (5, b"", "client certificate not accepted", False),
        (6, b"", "access denied", False),
        (99, b"", "refused with code 99", False),
    ],
)
def test_refusals_have_words(code, text, word, can_reconnect):
    protocol = ClientProtocol(URL)
    protocol.receive(HEAD + smq.frame(smq.init(7, "1.2.3.4")))
    protocol.connect(b"abcdef", b"", b"")
    (ended,) = protocol.receive(smq.frame(smq.connack(code, 0, text)))
    assert (ended.end.word, ended.end.code, ended.end.can_reconnect) == (word, code, can_reconnect)
    assert text.decode() in str(ended.end)


@pytest.mark.parametrize(
    "packet", [b"", b"\x63", bytes((Type.CONNECT,)), bytes((Type.SUBACK,)), b"\x08\0\0", b"\x10\0"]
)
@pytest.mark.parametrize("url", ["http://host/", "ws://host/"])
def test_invalid_bytes_close_the_connection_without_raising(packet, url):
    protocol, wire = opened(url)
    *_, ended = protocol.receive(wire(packet))
    assert ended.end.word == "protocolerror"
    assert protocol.state is ClientState.CLOSED


def test_a_packet_before_its_time_is_an_error():
    protocol = ClientProtocol(URL)
    (ended,) = protocol.receive(HEAD + smq.frame(PUBLISH))
    assert ended.end.word == "protocolerror"
    assert "INIT" in str(ended.end)


def test_another_protocol_version():
    protocol = ClientProtocol(URL)
    (ended,) = protocol.receive(HEAD + smq.frame(b"\x01\x02\0\0\0\x011.2.3.4"))
    assert "version 2" in str(ended.end)


def test_a_websocket_close_is_answered_and_ends():
    protocol, _ = opened("ws://host/")
    (ended,) = protocol.receive(websocket.encode(websocket.CLOSE, websocket.close_payload(1001, b"going")))
    assert ended.end.word == "socketclosed"
    frame, _ = websocket.parse_client_frame(protocol.take(), 1000)
    assert (frame.opcode, frame.payload) == (websocket.CLOSE, (1001).to_bytes(2, "big"))


def test_a_websocket_ping_is_answered_with_its_payload():
    protocol, _ = opened("ws://host/")
    assert protocol.receive(websocket.encode(websocket.PING, b"beat")) == []
    frame, _ = websocket.parse_client_frame(protocol.take(), 1000)
    assert (frame.opcode, frame.payload) == (websocket.PONG, b"beat")


def test_a_fragmented_websocket_message_is_joined():
    protocol, _ = opened("ws://host/")
    assert protocol.receive(b"\x02" + bytes((4,)) + PUBLISH[:4]) == []
    assert protocol.receive(b"\x80" + bytes((len(PUBLISH) - 4,)) + PUBLISH[4:]) == [Published(b"payload", 20, 10, 30)]


@pytest.mark.parametrize(
    "frame",
    [b"\x82\x85abcdhello", b"\xc2\x00", b"\x83\x00", b"\x09\x00", b"\x80\x00", b"\x82\x7f" + b"\xff" * 8],
    ids=["masked", "reserved bit", "opcode", "fragmented ping", "lost continuation", "huge"],
)
def test_broken_websocket_frames(frame):
    protocol, _ = opened("ws://host/")
    (ended,) = protocol.receive(frame)
    assert ended.end.word == "protocolerror"


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300)
def test_whatever_arrives_nothing_is_raised(data, websocket_url):
    protocol, _ = opened("ws://host/" if websocket_url else "http://host/")
    protocol.receive(data)
    ClientProtocol(URL).receive(data)


def test_output_is_read_in_countable_pieces():
    protocol, _ = opened()
    frame = smq.publish_frame(1, 99, 0, bytes(60000))
    for _ in range(10):
        protocol.send(frame)
    assert protocol.unsent_bytes == 10 * len(frame)
    assert len(protocol.take()) == 5 * len(frame)
    assert protocol.unsent_publishes() == 5
    assert protocol.take() + protocol.take() == 5 * frame
    assert protocol.unsent_bytes == 0


def test_output_on_a_websocket_is_masked_messages():
    protocol, _ = opened("ws://host/")
    protocol.send_packet(smq.PING)
    frame, _ = websocket.parse_client_frame(protocol.take(), 1000)
    assert frame.payload == smq.PING


@pytest.mark.parametrize("url", ["http://host/", "ws://host/"])
def test_unread_pongs_do_not_accumulate(url):
    """Nothing is taken, as by a broker that only writes."""
    protocol, _ = opened(url)
    ping = smq.frame(smq.PING) if url.startswith("http") else websocket.header(websocket.PING, 0)
    for _ in range(20_000):
        assert protocol.receive(ping) == []
    assert 0 < len(protocol.take()) < 64 * 1024
    protocol.receive(ping)
    assert protocol.take(), "who reads is answered again"


def test_an_etid_of_zero_is_none():
    protocol = ClientProtocol(URL)
    protocol.receive(HEAD + smq.frame(smq.init(1, "10.0.0.1")))
    protocol.connect(b"abcdef", b"", b"")
    (ended,) = protocol.receive(smq.frame(smq.connack(0, 0)))
    assert (ended.end.word, protocol.state) == ("protocolerror", ClientState.CLOSED)
