"""Fuzz targets of decoders: whatever comes, they give what the rules allow, or raise the error that they name."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import cache

from smqrt.apps.lua.api.dirs import LspError, to_lua
from smqrt.clients.mqtt import sparkplug
from smqrt.errors import ArgumentError, JournalError, MqttError, NatsError, ProtocolError
from smqrt.http import forms, head, headers
from smqrt.http.body import ChunkedDecoder
from smqrt.http.disk import ZipIo
from smqrt.http.forms import cookies_of
from smqrt.http.headers import HttpError
from smqrt.http.logins import credentials
from smqrt.http.resources import IoError
from smqrt.http.tree import normalize
from smqrt.journal import arrow, recovery
from smqrt.journal.record import Row
from smqrt.settings.limits import MqttSettings
from smqrt.wire import kernels, nats, smq, url, websocket
from smqrt.wire.mqtt import client, packets
from tests.broker.mqtt.memory_devices import DeviceHub

MAX_MESSAGE_BYTES = 1000
MAX_PIECES = 64


def _pieces(data: bytes) -> Iterator[bytes]:
    """The first byte says in pieces of how many bytes the others come, in `MAX_PIECES` at most; 0 is all at once."""
    step = max((data[0] if data else 0) or len(data), len(data) // MAX_PIECES, 1)
    for at in range(1, len(data), step):
        yield data[at : at + step]


# ---- SMQ


def connect(data: bytes) -> None:
    """A Connect packet."""
    with contextlib.suppress(ProtocolError):
        found = smq.parse_connect(b"\x02" + data)
        assert len(found.uid) >= smq.MIN_UID_BYTES


@cache
def _twins() -> tuple[kernels.Kernels, kernels.Kernels]:
    twin = kernels.JitKernels()
    return kernels.PureKernels(), twin


def twin_kernels(data: bytes) -> None:
    """The loops in Python and in LuaJIT find the same."""
    data = data[:4000]
    found = []
    for one in _twins():
        one.view[: len(data)] = data
        runs, used, bad = one.scan(len(data), 0)
        scanned = one.ends[:runs].tolist(), used, bool(bad)
        one.view[: len(data)] = data
        written, unmasked = one.unmask(len(data))
        found.append((scanned, int(written), int(unmasked), one.chars[: int(written)]))
    assert found[0] == found[1], "the kernels differ"
    whole = data[: found[0][0][1]]
    assert kernels.encode_batch(_twins()[0], whole) == kernels.encode_batch(_twins()[1], whole)


def websocket_frames(data: bytes) -> None:
    """A WebSocket's frames: in one piece or in many they give the same messages, of both sides."""
    for is_client in (False, True):
        cut, whole = _messages(_pieces(data), is_client), _messages([data[1:]], is_client)
        assert cut == whole, (cut, whole)


def _messages(pieces: Iterator[bytes] | list[bytes], is_client: bool) -> object:
    codec = websocket.WebSocketCodec(is_client, MAX_MESSAGE_BYTES)
    found = []
    for piece in pieces:
        codec.feed(piece)
        try:
            while (message := codec.next()) is not None or codec.has_more:
                found.append(message)
        except ProtocolError as error:
            return found, error.reason, str(error)
    return found, codec.close_code


# ---- HTTP


def http_head(data: bytes) -> None:
    """The head of a request; what begins one is never refused before its end is there."""
    try:
        found = head.Head(data)
    except HttpError:
        return
    for cut in range(0, len(data), 7):
        head.check_beginning(data[:cut])
    assert found.path.startswith("/") or found.path == "*"
    assert found.content_length is None or found.content_length >= 0
    assert not {"\r", "\n", "\0"}.intersection("".join(value for _, value in found.headers))


def http_chunks(data: bytes) -> None:
    """A chunked body, in one piece or in many."""
    assert _payload(_pieces(data)) == _payload([data[1:]])


def _payload(pieces: Iterator[bytes] | list[bytes]) -> object:
    decoder, found = ChunkedDecoder(), b""
    for piece in pieces:
        try:
            found += decoder.feed(piece)
        except HttpError as error:
            return str(error)
    return found, decoder.complete


def path(data: bytes) -> None:
    """A path: decoded once, it never leads above its beginning."""
    with contextlib.suppress(HttpError, UnicodeError):
        clean = normalize(head.decode_path("/" + data.decode("ascii")))
        assert clean is None or not clean.startswith(("/", "../"))
        assert clean is None or "/../" not in clean


def client_url(data: bytes) -> None:
    """A URL that an application connects to."""
    with contextlib.suppress(ValueError):
        found = url.parse_url(data.decode("utf-8"))
        assert 0 < found.port < 65536
        assert not {"\r", "\n", " "}.intersection(str(found))


def multipart(data: bytes) -> None:
    """A form with files."""
    with contextlib.suppress(forms.MultipartError):
        for event in forms.read_form(_pieces(data), b"x"):
            assert isinstance(event, forms.Field | forms.File | bytes)


class _Request:
    """A request, as far as credentials look at it."""

    method, target, host = "GET", "/a", "h"

    def __init__(self, field: str) -> None:
        self._field = field

    def get(self, name: str) -> str:
        return self._field


def fields(data: bytes) -> None:
    """Cookies, ranges, dates, parameters, and the field Authorization."""
    text = data.decode("latin-1")
    cookies_of(text)
    headers.cookie_of(text, "z9")
    headers.parse_date(text)
    for span in headers.parse_ranges(text, 1000) or ():
        assert len(span) <= 1000
    with contextlib.suppress(HttpError):
        forms.parse_parameters(data)
    credentials.basic_of(_Request("Basic " + text))  # type: ignore[arg-type]
    credentials.digest_of(_Request("Digest " + text), "r")  # type: ignore[arg-type]
    forms.boundary_of(text)


def zip_file(data: bytes) -> None:
    """An application in a ZIP file."""
    with contextlib.suppress(IoError):
        folder = ZipIo("app.zip", data=data)
        for entry in folder.files(""):
            assert "/" not in entry.name
            if not entry.isdir:
                folder.open(entry.name).read(100)


def page(data: bytes) -> None:
    """A Lua Server Page."""
    with contextlib.suppress(LspError):
        to_lua(data)


# ---- MQTT


class _Nobody:
    """Takes what an endpoint tells."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


NOBODY = _Nobody()


def mqtt_4(data: bytes) -> None:
    """Packets of MQTT 3.1.1, of both sides."""
    _mqtt_packets(data, 4)


def mqtt_5(data: bytes) -> None:
    """Packets of MQTT 5, of both sides."""
    _mqtt_packets(data, 5)


def _mqtt_packets(data: bytes, version: int) -> None:
    for is_from_client in (False, True):
        splitter = packets.PacketSplitter(MAX_MESSAGE_BYTES)
        with contextlib.suppress(MqttError):
            for piece in _pieces(data):
                splitter.feed(piece)
                while (found := splitter.next()) is not None:
                    _decoded_again(*found, version, is_from_client)


def _decoded_again(first: int, body: bytes, version: int, is_from_client: bool) -> None:
    packet = packets.decode(first, body, version, is_from_client)
    if isinstance(packet, packets.SubscribeAnswer) and version == 4:
        return  # reserved codes become 0x80 when they are sent on
    again = packets.PacketSplitter()
    again.feed(packets.encode(packet, version))
    second = again.next()
    assert second is not None
    assert _ordered(packets.decode(*second, version, is_from_client)) == _ordered(packet), packet


def _ordered(packet: packets.Packet) -> packets.Packet:
    """Without the order in which properties came, which is nobody's."""
    return packet._replace(property_bytes=b"") if isinstance(packet, packets.PublishPacket) else packet


def mqtt_server(data: bytes) -> None:
    """A client's bytes at a hub."""
    device = DeviceHub(limits=MqttSettings(packet_bytes=MAX_MESSAGE_BYTES)).device()
    for piece in _pieces(data):
        device.feed(piece)
        device.take()
    device.lost()


def mqtt_client(data: bytes) -> None:
    """A server's bytes at the client's side."""
    endpoint = client.MqttClientEndpoint(NOBODY, 4 + (len(data) & 1), "id", limit_bytes=MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    endpoint.connect(True, 60, {})
    for now_s, piece in enumerate(_pieces(data)):
        endpoint.feed(piece, float(now_s))
        try:
            while endpoint.next():
                pass
            endpoint.check_alive(float(now_s))
        except MqttError as error:
            endpoint.fail(error)
        endpoint.take(float(now_s))


def sparkplug_payload(data: bytes) -> None:
    """A payload of Sparkplug B."""
    with contextlib.suppress(ArgumentError):
        sparkplug.decode(data)


# ---- NATS


class NatsRecorder:
    """Keeps what a decoder of NATS tells, in `events`."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append((name, *arguments))


def nats_server(data: bytes) -> None:
    """What a NATS server says: in one piece or in many it is the same."""
    assert _nats_events(_pieces(data)) == _nats_events([data[1:]])


def _nats_events(pieces: Iterator[bytes] | list[bytes]) -> object:
    recorder = NatsRecorder()
    decoder = nats.NatsDecoder(recorder, MAX_MESSAGE_BYTES)
    try:
        for piece in pieces:
            decoder.feed(piece)
            while decoder.decode():
                pass
    except NatsError:
        return recorder.events, "refused"
    for name, *said in recorder.events:
        if name == "on_message" and said[-1]:
            with contextlib.suppress(NatsError):
                nats.parse_headers(said[-1])
    return recorder.events


# ---- journals


def row(number: int, payload: bytes) -> Row:
    """A row of a journal."""
    return Row(number, 1_700_000_000_000_000 + number, "a/b", 100, None, None, 1001, "uid", 0, payload, None)


def arrow_batch(data: bytes) -> None:
    """A batch of a journal: what is decoded is no larger than a few times what came."""
    with contextlib.suppress(JournalError):
        rows = arrow.decode(data)
        held = sum(len(value) for row in rows for value in row if isinstance(value, bytes | str))
        assert held <= 16 * len(data), f"{held} bytes from {len(data)}"
    with contextlib.suppress(ValueError):
        arrow.schema_metadata(data)
    with contextlib.suppress(ValueError):
        arrow.message_size(data)


def arrow_segment(data: bytes) -> None:
    """A segment that has lost its index."""
    file = io.BytesIO(data)
    start = recovery._schema_bytes(file)
    end = start
    for entry in recovery._walk(file, start, 1):
        assert entry.offset == end
        assert entry.length > 0
        end = entry.end
