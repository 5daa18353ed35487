"""Good inputs for the targets of `services`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

from smqrt.server.restart.control_socket import VERSION
from smqrt.wire.proxy_protocol import SIGNATURE
from smqrt.workers.worker_rpc import _HEAD, Message, _encoded
from tests.fuzz import services


def _proxy_headers() -> list[bytes]:
    ipv4, ipv6 = bytes((192, 0, 2, 1, 10, 0, 0, 1)) + struct.pack(">HH", 5, 80), b"\x20\x01" * 16 + b"\0\5\0P"
    tls = b"\x20" + struct.pack(">H", 5) + b"\1\0\0\0\0"
    v2 = [(0x21, 0x11, ipv4), (0x21, 0x21, ipv6), (0x21, 0x11, ipv4 + tls), (0x20, 0, b""), (0x21, 0x31, bytes(216))]
    return [
        b"PROXY TCP4 192.0.2.1 10.0.0.1 56324 443\r\nGET / HTTP/1.1\r\n\r\n",
        b"PROXY TCP6 2001:db8::1 ::ffff:10.0.0.1 1 65535\r\n",
        b"PROXY UNKNOWN ffff::1 whatever\r\n",
        *(SIGNATURE + struct.pack(">BBH", *kind, len(rest)) + rest + b"next" for *kind, rest in v2),
    ]


def _forwarded() -> list[bytes]:
    fields = [
        b"X-Forwarded-For: 192.0.2.1, 10.0.0.2\nX-Forwarded-Proto: https, http\nX-Forwarded-Host: a.example\n"
        b"X-Forwarded-Port: 8443\nX-Forwarded-Prefix: /base/x",
        b'Forwarded: for="[2001:db8::1]:80";proto=https;host="a.example:1", for=10.0.0.2;by=_x\nForwarded: for=unknown',
        b'X-Forwarded-For: 192.0.2.1\nForwarded: for=192.0.2.1;proto=http;host="a\\".b"\nX-Forwarded-For: fd00::1',
    ]
    return [family + one for family in (b"\0", b"\1", b"\2") for one in fields]


def _access_lists() -> list[bytes]:
    return [
        b"# comment\nallow @ops,ann read,write a/#\ndeny * onetoone $server\n\nallow * * users/%u/+\nallow x create #",
        b"deny ann write a/b\nallow * read,write a/%g/%c\nallow anonymous observe +/b\nallow * * 100%%/x\nallow * * +",
        b"allow * read #\ndeny @dev read a/+\n",
    ]


def _users() -> list[bytes]:
    good = services.HASH.encode()
    return [b"# users\nann:%b\n\nbob:%b:ops,dev\n" % (good, good), "grün:".encode() + good + b":g\n"]


def _settings_files() -> list[bytes]:
    return [
        b'port = 8080\nhosts = ["a.example", "b"]\n[limits]\nconnections = 5000 # all\npublish_rate = 10.5\n[log]\n'
        b'level = "debug"\n[listener.main]\nport = 9000\n',
        b'[proxy]\ntrusted = [\n  "10.0.0.0/8",\n  "::1",\n]\n[drain]\nwindow_s = 5\n[auth]\nusers = """a\nb"""\n',
        b'[topics."a/#"]\nslow = "latest"\n[listener."x y".tls]\ncert = 1\n[[admin]]\nport = 1979-05-27T07:32:00Z\n',
        b"hosts = [\n" + b'"a.example",\n' * 300 + b"]\nport = 1\n",
    ]


def _environments() -> list[bytes]:
    return [
        b"SMQRT_PORT=8080\nSMQRT_LIMITS__CONNECTIONS=5000\nSMQRT_HOSTS=a.example,b\nSMQRT_LOG__LEVEL=debug\nHOME=/x",
        b"SMQRT_LISTENER__main__PORT=9000\nSMQRT_PROXY__TRUSTED=10.0.0.0/8\nSMQRT_RESTART__LOAD_S=30\nSMQRT_DRAIN=1",
        b"SMQRT_ADMIN__PASSWORD_FILE=/nowhere/x\nSMQRT_PROT=1\nSMQRT_PORT=tcp://10.0.0.1:80\nSMQRT_LIMITS__IDLE_S=1.5",
    ]


def _tokens() -> list[bytes]:
    claims = json.dumps(services.CLAIMS).encode()
    head = b'{"alg": "HS256", "kid": "k", "typ": "JWT"}'
    return [b"\0" + services.good_token(), b"\1" + claims, b"\2" + head]


def _message(message: Message, fds: int = 0) -> bytes:
    text, blob = _encoded(message)
    return _HEAD.pack(len(text), len(blob), fds) + text + blob


def _clients() -> Message:
    connection = {"carry": b"\0\5", "queue": [b"frame", b"frame"], "torn": 0, "ws": [b"", None]}
    return {"do": "clients", "clients": [[{"client": {"etid": 7, "uid": b"uid"}, "connection": connection}, "::1"]]}


def _restart_messages() -> list[bytes]:
    parts = [_message({"do": "end"}, 1), _message(_clients(), 1), _message({"do": "late", "frames": [[1, 2, b"x"]]})]
    return [cut + b"".join(parts) for cut in (b"\0", b"\1", b"\x21", b"\x32")]


def _from_new() -> list[bytes]:
    hello, ready = {"do": "hello", "version": VERSION, "pid": 77}, {"do": "ready", "hubs": ["none/1", "none/x"]}
    return [cut + _message(hello) + _message(ready) for cut in (b"\0", b"\x09")] + [
        b"\0" + _message(hello) + _message({"do": "failed", "why": "no journal"})
    ]


def _from_old() -> list[bytes]:
    names = {"server": 1, "topics": [[5, b"a/b"]], "subtopics": []}
    welcome = {"do": "welcome", "version": VERSION, "pid": 77, "hubs": {"none/1": names}, "failed": ["app: why"]}
    listening = {**welcome, "listeners": [["127.0.0.1", 0]]}
    return [
        cut + _message(one, fds)
        for cut in (b"\0", b"\x09")
        for one, fds in (({**welcome, "listeners": []}, 0), (listening, 1), ({"do": "abort", "why": "no"}, 0))
    ]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "proxy-header": _proxy_headers,
    "forwarded": _forwarded,
    "acl": _access_lists,
    "users": _users,
    "settings-file": _settings_files,
    "settings-environment": _environments,
    "token": _tokens,
    "jwks": lambda: [services.JWKS],
    "restart-messages": _restart_messages,
    "restart-old": _from_new,
    "restart-new": _from_old,
}
