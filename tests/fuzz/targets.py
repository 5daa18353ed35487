"""Every fuzz target by its name, and good inputs to begin with."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from smqrt.clients.mqtt import sparkplug
from smqrt.journal import arrow
from smqrt.journal.record import Row
from smqrt.wire import smq, websocket
from smqrt.wire.mqtt import packets
from smqrt.wire.mqtt.client import MqttClientEndpoint
from tests.fuzz import connections, decoders, links, services, services_seeds

FINDS = Path(__file__).parent / "finds"
"""A file for each target, with a line for each input that was a fault once, in hexadecimal digits."""

TARGETS: dict[str, Callable[[bytes], None]] = {
    "smq-raw": connections.raw,
    "smq-websocket": connections.ws,
    "link-stranger": links.stranger,
    "link-newcomer": links.newcomer,
    "link-node": links.node,
    "link-member": links.member,
    "link-nats": links.through_nats,
    "smq-connect": decoders.connect,
    "kernels": decoders.twin_kernels,
    "websocket": decoders.websocket_frames,
    "http-head": decoders.http_head,
    "http-chunks": decoders.http_chunks,
    "http-fields": decoders.fields,
    "multipart": decoders.multipart,
    "path": decoders.path,
    "url": decoders.client_url,
    "zip": decoders.zip_file,
    "page": decoders.page,
    "mqtt-4": decoders.mqtt_4,
    "mqtt-5": decoders.mqtt_5,
    "mqtt-server": decoders.mqtt_server,
    "mqtt-client": decoders.mqtt_client,
    "sparkplug": decoders.sparkplug_payload,
    "nats": decoders.nats_server,
    "arrow-batch": decoders.arrow_batch,
    "arrow-segment": decoders.arrow_segment,
    "proxy-header": services.proxy_header,
    "forwarded": services.forwarded,
    "acl": services.access_list,
    "users": services.users_file,
    "settings-file": services.settings_file,
    "settings-environment": services.settings_environment,
    "token": services.token,
    "jwks": services.key_set,
    "restart-messages": services.restart_messages,
    "restart-old": services.restart_old,
    "restart-new": services.restart_new,
}


def finds(name: str) -> list[bytes]:
    """What was a fault of the target once."""
    file = FINDS / f"{name}.hex"
    return [bytes.fromhex(line) for line in file.read_text().split()] if file.exists() else []


def seeds(name: str) -> list[bytes]:
    """Good inputs for a target, and its finds."""
    return [*_SEEDS.get(name, lambda: [b"\x00"])(), *finds(name)]


_ETID = 1001
_SMQ = [
    smq.with_name(smq.Type.SUBSCRIBE, b"news"),
    smq.with_name(smq.Type.CREATE, b"a/b"),
    smq.with_name(smq.Type.CREATESUB, b"sub"),
    smq.with_id(smq.Type.OBSERVE, 100),
    smq.with_id(smq.Type.UNOBSERVE, 100),
    smq.with_id(smq.Type.UNSUBSCRIBE, 100),
    bytes((smq.Type.PING,)),
    smq.publish_frame(100, _ETID, 0, b"hello")[2:],
    smq.publish_frame(_ETID, _ETID, 7, b"x" * 300)[2:],
    bytes((smq.Type.PUBFRAG,)) + smq.publish_frame(100, _ETID, 0, b"part")[3:],
    smq.disconnect(b"bye"),
]


def _smq_raw() -> list[bytes]:
    return [cut + b"".join(map(smq.frame, _SMQ)) for cut in (b"\x80", b"\x81", b"\x8d", b"\x00")]


def _smq_websocket() -> list[bytes]:
    def framed(packet: bytes) -> bytes:
        return websocket.encode_masked(websocket.BINARY, packet)

    parts = [*map(framed, _SMQ[:-2]), websocket.encode_masked(websocket.PING, b"?"), *_fragments(_SMQ[7])]
    return [cut + b"".join(parts) for cut in (b"\x80", b"\x81", b"\x8d", b"\x00")]


def _fragments(message: bytes) -> list[bytes]:
    first = bytearray(websocket.encode_masked(websocket.BINARY, message[:4]))
    first[0] &= 0x7F
    return [bytes(first), websocket.encode_masked(websocket.CONTINUATION, message[4:])]


def _websocket() -> list[bytes]:
    good = [
        websocket.encode(websocket.TEXT, "grüße".encode()),
        websocket.encode_masked(websocket.BINARY, b"x" * 300),
        websocket.encode_masked(websocket.CLOSE, websocket.close_payload(1000, b"bye")),
    ]
    return [b"\x00" + one for one in good] + [b"\x03" + b"".join(_fragments(b"123456789") + good[1:])]


def _heads() -> list[bytes]:
    return [
        b"GET /a%20b?c=d HTTP/1.1\r\nHost: h:80\r\nConnection: keep-alive, Upgrade\r\nCookie: z9=1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /ws HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\n\r\n",
        b"OPTIONS * HTTP/1.0\r\n\r\n",
    ]


def _multipart() -> list[bytes]:
    part = b'--x\r\nContent-Disposition: form-data; name="a"%s\r\n\r\nvalue\r\n'
    file = part % b'; filename="b.txt"\r\nContent-Type: text/plain'
    return [cut + part % b"" + file + b"--x--\r\n" for cut in (b"\x00", b"\x07")]


def _fields() -> list[bytes]:
    digest = (
        b'username="a", realm="r", nonce="n", uri="/a", qop=auth, nc=00000001, cnonce="c", response="'
        + b"0" * 32
        + b'"'
    )
    return [b"z9=abc; b=c", b"bytes=0-9,20-", b"Sun, 06 Nov 1994 08:49:37 GMT", b"YTpi", digest]


def _zip() -> list[bytes]:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.html", "<p>" * 50)
        archive.writestr("a/b.lsp", "<?lsp ?>")
    return [file.getvalue()]


def _mqtt_client_side(version: int) -> list[bytes]:
    endpoint = MqttClientEndpoint(decoders.NOBODY, version, "id")  # type: ignore[arg-type]
    endpoint.username, endpoint.password = "u", b"p"
    properties: dict[str, object] = {"userproperty": [("a", "b")]} if version == 5 else {}
    stream = [
        endpoint.connect_packet(True, 60, {"receivemaximum": 9} if version == 5 else {}),
        packets.encode(packets.PublishPacket("a/b", b"hi", 3, 7, properties), version),
        packets.encode(packets.SubscribePacket(8, [packets.Subscription("a/#", 1)], properties), version),
        packets.encode(packets.UnsubscribePacket(9, ["a/#"], properties), version),
        packets.encode_acknowledgement(4, 7, version),
        packets.encode_acknowledgement(6, 7, version),
        bytes((0xC0, 0, 0xE0, 0)),
    ]
    return [b"\x00" + b"".join(stream), b"\x01" + b"".join(stream), *(b"\x00" + one for one in stream)]


def _mqtt_server_side(version: int) -> list[bytes]:
    connack = b"\x20\x03\x00\x00\x00" if version == 5 else b"\x20\x02\x00\x00"
    suback = b"\x90\x04\x00\x01\x00\x01" if version == 5 else b"\x90\x03\x00\x01\x01"
    publish = packets.encode(packets.PublishPacket("a/b", b"hi", 2, 7), version)
    stream = [connack, suback, publish, packets.encode_acknowledgement(4, 1, version), b"\xd0\x00"]
    return [b"\x00" + b"".join(stream), b"\x03" + b"".join(stream)]


def _mqtt(version: int) -> list[bytes]:
    return _mqtt_client_side(version) + _mqtt_server_side(version)


def _sparkplug() -> list[bytes]:
    metrics = [{"name": "t", "datatype": "Double", "value": 2.5}, {"name": "s", "datatype": "String", "value": "x"}]
    return [sparkplug.encode({"timestamp": 1, "seq": 2, "metrics": metrics})]


def _nats() -> list[bytes]:
    info = (
        b'INFO {"server_id":"N","max_payload":1048576,"headers":true,"nonce":"x","connect_urls":["a:1","[::1]:2"],'
        b'"ldm":true}\r\n'
    )
    headers = b"NATS/1.0 503\r\na: b\r\n\r\n"
    message = b"MSG a.b 17 5\r\nhello\r\nMSG a.b 17 _INBOX.1 0\r\n\r\n"
    with_headers = b"HMSG a.b 9 r %d %d\r\n%bhi\r\n" % (len(headers), len(headers) + 2, headers)
    stream = info + b"+OK\r\nPING\r\n" + message + with_headers + b"PONG\r\n-ERR 'Slow Consumer'\r\n"
    return [b"\x00" + stream, b"\x01" + stream, b"\x07" + message * 3 + with_headers]


def _rows() -> Sequence[Row]:
    return [decoders.row(number, b"payload" * number) for number in range(1, 4)]


def _mqtt_rows() -> Sequence[Row]:
    return [row._replace(qos=1, retain=bool(row.seq % 2), properties='{"a":"b"}') for row in _rows()[1:]] + [_rows()[0]]


def _batches() -> list[bytes]:
    return [
        b"".join(arrow.encode(_rows())),
        b"".join(arrow.encode(_rows()[:1])),
        arrow.schema_message("n1", "hub"),
        b"".join(arrow.encode(_mqtt_rows(), arrow.WITH_MQTT)),
        b"".join(arrow.encode(_rows(), arrow.WITH_MQTT)),
        arrow.schema_message("n1", "hub", 2),
    ]


def _segments() -> list[bytes]:
    schema = arrow.schema_message("n1", "hub")
    mqtt = arrow.schema_message("n1", "hub", 2) + b"".join(arrow.encode(_mqtt_rows(), arrow.WITH_MQTT)) * 2
    return [schema + b"".join(arrow.encode(_rows())) * 2, mqtt]


_SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "smq-raw": _smq_raw,
    "smq-websocket": _smq_websocket,
    "smq-connect": lambda: [smq.connect(b"uid-001", b"secret", b"info")[1:]],
    "kernels": lambda: [*(one[1:] for one in _smq_raw()), *(one[1:] for one in _smq_websocket())],
    "websocket": _websocket,
    "http-head": _heads,
    "http-chunks": lambda: [b"\x00" + b"5\r\nhello\r\n0\r\n\r\n", b"\x01" + b"a\r\n0123456789\r\n00\r\n\r\nGET"],
    "http-fields": _fields,
    "multipart": _multipart,
    "path": lambda: [b"a/../b%20c/./d", b"%2e%2e/x"],
    "url": lambda: [b"https://user:pass@example.com:8443/a?b=c#d", b"ws://[::1]:80/"],
    "zip": _zip,
    "page": lambda: [b"<p><?lsp= 1 ?></p><?lsp if x then ?>y<?lsp end ?>\n]]]=]"],
    "mqtt-4": lambda: _mqtt(4),
    "mqtt-5": lambda: _mqtt(5),
    "mqtt-server": lambda: _mqtt_client_side(4)[:2] + _mqtt_client_side(5)[:2],
    "mqtt-client": lambda: _mqtt_server_side(4) + _mqtt_server_side(5),
    "sparkplug": _sparkplug,
    "nats": _nats,
    "arrow-batch": _batches,
    "arrow-segment": _segments,
    **services_seeds.SEEDS,
    **links.SEEDS,
}
