"""The codec of NATS: what is encoded has the form of the reference, and any bytes end in events or in one error."""

from __future__ import annotations

import contextlib
import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError, NatsError
from smqrt.wire import nats
from tests.fuzz.decoders import NatsRecorder

HEADERS = b"NATS/1.0\r\na: b\r\n\r\n"
INFO = {
    "server_id": "N1",
    "server_name": "one",
    "version": "2.9.10",
    "max_payload": 4096,
    "headers": True,
    "auth_required": True,
    "nonce": "xyz",
    "connect_urls": ["10.0.0.1:4222", "[::1]:4222"],
    "ldm": True,
    "proto": 1,
    "jetstream": None,
}


def decoded(*pieces: bytes) -> list[tuple[object, ...]]:
    recorder = NatsRecorder()
    decoder = nats.NatsDecoder(recorder)
    for piece in pieces:
        decoder.feed(piece)
        while decoder.decode():
            pass
    return recorder.events


def message(subject: bytes, sid: int, reply: bytes, payload: bytes, headers: bytes = b"") -> bytes:
    """As a server sends it."""
    words = [b"HMSG" if headers else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    words += [b"%d" % len(headers)] if headers else []
    return b"%b %d\r\n%b%b\r\n" % (b" ".join(words), len(headers) + len(payload), headers, payload)


TOKEN = st.text(st.characters(exclude_characters=".*>\x7f", exclude_categories=["Cs", "Cc", "Z"]), min_size=1)
SUBJECT = st.lists(TOKEN, min_size=1, max_size=4).map(".".join).filter(lambda text: len(text.encode()) < 900)
MESSAGE = st.tuples(
    SUBJECT.map(str.encode),
    st.integers(1, 1 << 40),
    st.one_of(st.just(b""), SUBJECT.map(str.encode)),
    st.one_of(st.binary(max_size=200), st.binary(max_size=3).map(lambda data: data * 20_000)),
    st.sampled_from([b"", HEADERS]),
)
CONTROL = st.sampled_from([(b"PING\r\n", "on_ping"), (b"PONG\r\n", "on_pong")])


@settings(max_examples=60)
@given(st.lists(st.one_of(MESSAGE, CONTROL), max_size=60), st.data())
def test_what_servers_send_is_decoded_however_it_is_cut(said: list[tuple[object, ...]], data: st.DataObject) -> None:
    stream, wanted = b"", []
    for one in said:
        if len(one) == 2:
            stream += one[0]  # type: ignore[operator]
            wanted.append((one[1],))
        else:
            subject, sid, reply, payload, headers = one
            stream += message(subject, sid, reply, payload, headers)  # type: ignore[arg-type]
            wanted.append(("on_message", b"%d" % sid, subject, reply, payload, headers))  # type: ignore[str-bytes-safe, arg-type]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[first:last] for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decoded(*pieces) == wanted


def test_every_cut_of_a_conversation() -> None:
    stream = b"INFO %b\r\n+OK\r\nPING\r\n" % json.dumps(INFO).encode()
    stream += message(b"a.b", 7, b"", b"hi\r\nho") + message(b"a", 8, b"r.1", b"", HEADERS) + b"-ERR 'No'\r\nPONG\r\n"
    whole = decoded(stream)
    assert [name for name, *_ in whole] == ["on_info", "on_ping", "on_message", "on_message", "on_error", "on_pong"]
    assert whole[-2] == ("on_error", "No")
    assert all(decoded(stream[:at], stream[at:]) == whole for at in range(len(stream)))
    assert decoded(*(stream[at : at + 1] for at in range(len(stream)))) == whole


def test_spaces_equal_tabs_and_case_is_ignored() -> None:
    assert decoded(b"MSG\ta  7\t2\r\nhi\r\nping\r\n-err 'x'\r\n") == [
        ("on_message", b"7", b"a", b"", b"hi", b""),
        ("on_ping",),
        ("on_error", "x"),
    ]


def test_info_is_read() -> None:
    found = nats.parse_info(json.dumps(INFO).encode())
    assert found == nats.ServerInfo(
        server_id="N1",
        server_name="one",
        version="2.9.10",
        max_payload_bytes=4096,
        headers=True,
        auth_required=True,
        nonce="xyz",
        connect_urls=("10.0.0.1:4222", "[::1]:4222"),
        is_lame_duck=True,
    )


BAD = {
    "unknown": b"HELLO\r\n",
    "an empty line": b"\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no CR": b"PING\n",
    "a message without CR": b"MSG a 1 2\nhi\r\n",
    "no sid": b"MSG a 2\r\nhi\r\n",
    "no size": b"MSG a 1 x\r\nhi\r\n",
    "a sign": b"MSG a 1 +2\r\nhi\r\n",
    "an underscore": b"MSG a 1 1_0\r\n0123456789\r\n",
    "digits of another script": "MSG a 1 ²\r\nhi\r\n".encode(),
    "an endless number": b"MSG a 1 " + b"9" * 5000 + b"\r\n",
    "too large": b"MSG a 1 70000000\r\n",
    "longer than it says": b"MSG a 1 1\r\nhi\r\n",
    "shorter than it says": b"MSG a 1 3\r\nhi\r\nPING\r\n",
    "no end where it says": b"MSG a 1 2\r\nhixxPING\r\n",
    "too many words": b"MSG a 1 r q 2\r\nhi\r\n",
    "no headers": b"HMSG a 1 0 2\r\nhi\r\n",
    "headers that are longer than the message": b"HMSG a 1 20 2\r\nhi\r\n",
    "HMSG without a size": b"HMSG a 1 2\r\nhi\r\n",
    "INFO without JSON": b"INFO\r\n",
    "INFO that is a list": b"INFO []\r\n",
    "INFO that is deep": b"INFO " + b"[" * 60_000 + b"\r\n",
    "a limit that is none": b'INFO {"max_payload":-1}\r\n',
    "a limit that is a text": b'INFO {"max_payload":"1"}\r\n',
    "URLs that are none": b'INFO {"connect_urls":[1]}\r\n',
    "a line without an end": b"INFO " + b"x" * nats.MAX_LINE_BYTES,
}


@pytest.mark.parametrize("what", BAD)
def test_what_breaks_a_rule_is_one_error(what: str) -> None:
    data = BAD[what]
    with pytest.raises(NatsError):
        decoded(data)
    with pytest.raises(NatsError):
        decoded(*(data[at : at + 1000] for at in range(0, len(data), 1000)))


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_bytes_are_decoded_or_refused(pieces: list[bytes]) -> None:
    with contextlib.suppress(NatsError):
        assert all(name.startswith("on_") for name, *_ in decoded(*pieces))


def test_a_large_message_in_single_bytes_costs_no_square() -> None:
    data = message(b"a", 1, b"", bytes(1 << 18))
    began_s = process_time()
    assert len(decoded(*(data[at : at + 1] for at in range(len(data))))) == 1
    assert process_time() - began_s < 2
    line = b"INFO " + b"x" * (nats.MAX_LINE_BYTES - 10)
    began_s = process_time()
    assert decoded(*(line[at : at + 1] for at in range(len(line)))) == []
    assert process_time() - began_s < 1


def test_a_flood_is_decoded_in_portions() -> None:
    recorder = NatsRecorder()
    decoder = nats.NatsDecoder(recorder)
    decoder.feed(b"MSG a 1 0\r\n\r\n" * 5000)
    assert decoder.decode()
    assert decoder.messages == len(recorder.events) == nats.MESSAGES_AT_ONCE
    while decoder.decode():
        pass
    assert decoder.messages == 5000
    decoder.feed(message(b"a", 1, b"", bytes(nats.BYTES_AT_ONCE)) * 2)
    assert decoder.decode()
    assert decoder.messages == 5001
    assert not decoder.decode()
    assert decoder.payload_bytes == 2 * nats.BYTES_AT_ONCE


def test_a_handler_that_raises_leaves_the_stream_whole() -> None:
    class Once(NatsRecorder):
        def on_ping(self) -> None:
            raise ZeroDivisionError

    recorder = Once()
    decoder = nats.NatsDecoder(recorder)
    decoder.feed(b"MSG a 1 2\r\nhi\r\nPING\r\nPONG\r\n")
    with pytest.raises(ZeroDivisionError):
        decoder.decode()
    assert not decoder.decode()
    assert [name for name, *_ in recorder.events] == ["on_message", "on_pong"]


# ---- what we say


def test_what_we_say() -> None:
    assert nats.connect({"verbose": False, "name": "é"}) == b'CONNECT {"verbose":false,"name":"\\u00e9"}\r\n'
    assert nats.pub("a.b", b"hi") == b"PUB a.b 2\r\nhi\r\n"
    assert nats.pub("a.b", b"", "r.1") == b"PUB a.b r.1 0\r\n\r\n"
    assert nats.hpub("a", b"hi", HEADERS) == b"HPUB a 18 20\r\n" + HEADERS + b"hi\r\n"
    assert nats.hpub("a", b"", HEADERS, "r") == b"HPUB a r 18 18\r\n" + HEADERS + b"\r\n"
    assert nats.sub("a.*.>", 7) == b"SUB a.*.> 7\r\n"
    assert nats.sub(">", 7, "workers") == b"SUB > workers 7\r\n"
    assert nats.unsub(7) == b"UNSUB 7\r\n"
    assert (nats.PING, nats.PONG) == (b"PING\r\n", b"PONG\r\n")


@given(st.text(max_size=30))
def test_no_subject_breaks_out_of_its_line(text: str) -> None:
    for encode in (nats.subject_bytes, nats.pattern_bytes, nats.queue_bytes):
        try:
            data = encode(text)
        except ArgumentError:
            continue
        assert data.split() == [text.encode()]


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB b 0", "a\0", "x" * 2000, "\ud800"])
def test_what_is_no_subject(subject: str) -> None:
    for encode in (nats.subject_bytes, nats.pattern_bytes):
        with pytest.raises(ArgumentError):
            encode(subject)


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "a*"])
def test_publish_to_a_pattern_is_refused(subject: str) -> None:
    with pytest.raises(ArgumentError):
        nats.subject_bytes(subject)


@pytest.mark.parametrize("pattern", ["a.>.b", "a*", "*a.b", ">>"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ArgumentError):
        nats.pattern_bytes(pattern)


def test_a_pattern_that_nearly_fits_takes_no_long_look() -> None:
    began_s = process_time()
    with pytest.raises(ArgumentError):
        nats.pattern_bytes("a." * 100_000 + " ")
    assert process_time() - began_s < 0.5


# ---- headers


@settings(max_examples=40)
@given(st.dictionaries(st.from_regex(r"[a-zA-Z-]{1,9}", fullmatch=True), st.from_regex(r"[ -~]{0,20}", fullmatch=True)))
def test_headers_come_back(headers: dict[str, str]) -> None:
    stripped = {name: value.strip() for name, value in headers.items()}
    assert nats.parse_headers(nats.headers_bytes(headers)) == (None, stripped)


def test_a_status_is_read() -> None:
    assert nats.parse_headers(b"NATS/1.0 503 No Responders\r\n\r\n") == (503, {})


@pytest.mark.parametrize(
    "block", [b"", b"x", b"NATS/1.0", b"NATS/1.0\r\n", b"NATS/1.0\r\nab\r\n\r\n", b"NATS/1.0 x\r\n\r\n"]
)
def test_what_are_no_headers(block: bytes) -> None:
    with pytest.raises(NatsError):
        nats.parse_headers(block)


@pytest.mark.parametrize("header", [("a b", "x"), ("", "x"), ("a:", "x"), ("a", "x\r\ny: z"), ("a", "\0")])
def test_headers_that_are_not_sent(header: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError):
        nats.headers_bytes(dict([header]))


# ---- limits


def test_a_subject_has_at_most_1024_bytes() -> None:
    for encode in (nats.subject_bytes, nats.pattern_bytes, nats.queue_bytes):
        assert encode("x" * 1024) == b"x" * 1024
        with pytest.raises(ArgumentError, match="at most 1024"):
            encode("x" * 1025)
        with pytest.raises(ArgumentError, match="at most 1024"):
            encode("ä" * 513)


def test_pieces_of_a_payload_are_joined() -> None:
    assert nats.pub_pieces("a", [b"hi", memoryview(b"ho"), b""]) == b"PUB a 4\r\nhiho\r\n"


def test_fields_that_info_lacks_have_defaults() -> None:
    found = nats.parse_info(b'{"server_id":null,"tls_required":true,"tls_available":true,"cluster":"c"}')
    assert found == nats.ServerInfo(tls_required=True, tls_available=True, cluster="c")
    assert found.max_payload_bytes == 1 << 20
    assert nats.parse_info(b'{"max_payload":67108864}').max_payload_bytes == 64 << 20
    for wrong in (b'{"max_payload":67108865}', b'{"headers":1}', b'{"max_payload":true}', b'{"nonce":5}'):
        with pytest.raises(NatsError, match="invalid"):
            nats.parse_info(wrong)


def test_a_payload_of_exactly_the_limit_passes() -> None:
    for size in (10, 11):
        recorder = NatsRecorder()
        decoder = nats.NatsDecoder(recorder, 10)
        decoder.feed(message(b"a", 1, b"", bytes(size)))
        if size == 10:
            assert not decoder.decode()
            assert len(recorder.events) == 1
        else:
            with pytest.raises(NatsError, match="invalid size"):
                decoder.decode()


def test_a_line_of_exactly_the_limit_passes() -> None:
    line = b"-ERR " + b"x" * (nats.MAX_LINE_BYTES - 7) + b"\r\n"
    assert len(decoded(line)) == len(decoded(line[:100], line[100:])) == 1
    for pieces in ((b"x" + line,), (b"x" + line[:-1],), (b"x" + line[:100], line[100:-1])):
        with pytest.raises(NatsError):
            decoded(*pieces)


def test_a_number_has_at_most_ten_digits() -> None:
    assert decoded(b"MSG a 1 0000000002\r\nhi\r\n") == [("on_message", b"1", b"a", b"", b"hi", b"")]
    with pytest.raises(NatsError, match="not a number"):
        decoded(b"MSG a 1 00000000002\r\nhi\r\n")


def test_headers_are_a_part_of_the_message() -> None:
    recorder = NatsRecorder()
    decoder = nats.NatsDecoder(recorder)
    decoder.feed(message(b"a", 1, b"r", b"", HEADERS) + message(b"a", 1, b"", b"hi", HEADERS))
    assert not decoder.decode()
    assert (decoder.messages, decoder.payload_bytes) == (2, 2 * len(HEADERS) + 2)
    assert [event[3:] for event in recorder.events] == [(b"r", b"", HEADERS), (b"", b"hi", HEADERS)]


def test_the_last_header_of_a_name_counts() -> None:
    block = b"NATS/1.0 100 Idle Heartbeat\r\na: 1\r\na:2 \r\nb:\xff\r\n\r\n"
    assert nats.parse_headers(block) == (100, {"a": "2", "b": "\ufffd"})
    with pytest.raises(NatsError, match="malformed"):
        nats.parse_headers(b"NATS/1.0\r\na: 1\r\n")
