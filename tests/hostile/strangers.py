"""Clients that do their worst: heads, crowds, and devices whose answers are thrown away."""

from __future__ import annotations

import selectors
import socket
import ssl

import gevent

from smqrt.wire import smq
from tests.hostile.conftest import Attack, Besieged
from tests.support.device import RAW, RAW_HEADERS, TLS, WS_HEADERS, Device, request

PATH = "/watch/smq"


class Stranger(Device):
    """A connected client whose answers are thrown away meanwhile, so that it never blocks the server's writing."""

    def __init__(self, besieged: Besieged, uid: bytes, kind: str = RAW) -> None:
        super().__init__(("127.0.0.1", besieged.port), kind)
        head = request(WS_HEADERS if self.on_websocket else RAW_HEADERS, target=PATH)
        self.send_bytes(head.replace(b"Host: test", b"Host: localhost")).read_head().hello().connect(uid)

    def flood(self, data: bytes, attack: Attack) -> None:
        """Send all of it while the answers are thrown away; then the end."""
        swallower = gevent.spawn(self._swallow)
        self.send_bytes(data)
        attack.sent(len(data))
        self.send(smq.disconnect())
        swallower.join()
        self.close()

    def _swallow(self) -> None:
        while self.more():
            self.stream.data = b""


HEAD_BYTES = 16_000  # a little less than the limit


def filled(begin: bytes, unit: bytes) -> bytes:
    return begin + unit * ((HEAD_BYTES - len(begin)) // len(unit))


HEADS = {
    "a path of escapes": (filled(b"/", b"%41"), b""),
    "a path of slashes": (filled(b"/", b"/"), b""),
    "a path of 2,000 folders": (b"/" + b"a/" * 2000, b""),
    "a path of 2,000 folders of an application": (b"/lua/" + b"a/" * 2000, b""),
    "a path that goes to and fro": (filled(b"/lua/", b"a/../"), b""),
    "a query of parameters": (b"/lua/form.lsp?" + b"a=%41&" * 990, b""),
    "a query of too many parameters": (filled(b"/lua/form.lsp?", b"&"), b""),
    "a query of escapes": (filled(b"/lua/form.lsp?a=", b"%41"), b""),
    "cookies": (b"/lua/form.lsp", filled(b"Cookie: ", b"a=b;")),
    "ranges": (b"/rtl/smq.js", filled(b"Range: bytes=", b"0-0,")),
    "ranges of digits": (b"/rtl/smq.js", filled(b"Range: bytes=", b"1")),
    "entity tags": (b"/rtl/smq.js", filled(b"If-None-Match: ", b'"a",')),
    "a date": (b"/rtl/smq.js", filled(b"If-Modified-Since: ", b"1 ")),
    "tokens": (b"/rtl/smq.js", filled(b"Connection: ", b"a,")),
    "fields": (b"/rtl/smq.js", b"\r\n".join(b"X%d: " % n + b"y" * 150 for n in range(95))),
    "short fields": (b"/rtl/smq.js", filled(b"X: y", b"\r\nX: y")),
    "a content type": (b"/lua/upload.lsp", filled(b"Content-Type: multipart/form-data", b'; a="')),
}


HEADS |= {
    "a path of journals": (filled(b"/lua/", b"wal/"), b""),
    "a path of pipelines": (filled(b"/lua/", b"pipelines/") + b".sql", b""),
    "a path of backups": (filled(b"/lua/x.lua", b".1~"), b""),
}


CLIENTS = 150


SILENT_S = 15.0  # longer than the server waits for a head


RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER of 0 s: closing resets


def crowd_sends(sockets: list[socket.socket], data: bytes, attack: Attack) -> int:
    """Sends `data` on all of them at once, and throws away what comes until the server has closed them.

    Returns:
        how many bytes came.
    """
    left = {sock: memoryview(data) for sock in sockets}
    came = 0
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while selector.get_map() and (ready := selector.select(SILENT_S)):
            for key, events in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    if events & selectors.EVENT_WRITE:
                        left[sock] = left[sock][sock.send(left[sock][:16384]) :]
                        if not left[sock]:
                            selector.modify(sock, selectors.EVENT_READ)
                    answer = sock.recv(1 << 18)
                    came += len(answer)
                    if not answer:
                        selector.unregister(sock)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
                except OSError:
                    selector.unregister(sock)
        assert not selector.get_map(), "the server left connections open"
    attack.sent(len(data) * len(sockets) - sum(map(len, left.values())))
    return came


def get(besieged: Besieged, target: bytes, field: bytes = b"") -> bytes:
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: 127.0.0.1:%d" % besieged.port, *filter(None, [field])]
    return b"\r\n".join([*lines, b"", b""])


def last(request: bytes) -> bytes:
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def attack_by_crowd(besieged: Besieged, case: str, data: bytes, clients: int = CLIENTS) -> None:
    sockets = [besieged.open() for _ in range(clients)]
    with besieged.attack(f"{clients} at once: {case}") as attack:
        assert crowd_sends(sockets, data, attack)
    for sock in sockets:
        sock.close()


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class TlsStranger(Stranger):
    """A connected client over TLS."""

    def __init__(self, besieged: Besieged, uid: bytes, kind: str = TLS) -> None:
        Device.__init__(self, ("127.0.0.1", besieged.served.tls_port), kind)
        head = request(WS_HEADERS if self.on_websocket else RAW_HEADERS, target=PATH)
        self.send_bytes(head.replace(b"Host: test", b"Host: localhost")).read_head().hello().connect(uid)


def open_many(besieged: Besieged, count: int) -> list[socket.socket]:
    """Connections that speak TLS."""
    address, context = ("127.0.0.1", besieged.served.tls_port), client_context()
    return [context.wrap_socket(socket.create_connection(address, 20)) for _ in range(count)]
