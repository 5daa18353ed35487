"""Steps in the demonstrations, and a device beside them."""

from __future__ import annotations

import contextlib
import socket
import struct
from importlib import resources
from typing import Any

from playwright.sync_api import expect

from smqrt.wire.smq import Type
from tests.support.waiting import wait_until


def join(page: Any, name: str) -> Any:
    page.get_by_label("Your name").fill(name)
    page.get_by_role("button", name="Join").click()
    expect(page.get_by_role("status")).to_have_text("connected")
    return page


def people(page: Any) -> Any:
    return page.get_by_role("list", name="People").get_by_role("listitem")


class Cable:
    """The WebSockets of a page, which a test can cut and mend. Made before the page is opened."""

    def __init__(self, page: Any) -> None:
        self._is_cut = False
        self._sockets: list[Any] = []
        page.route_web_socket("**/*", self._plug)

    def _plug(self, socket: Any) -> None:
        if self._is_cut:
            socket.close()
        else:
            socket.connect_to_server()
            self._sockets.append(socket)

    def cut(self) -> None:
        """Close all WebSockets, and each new one."""
        self._is_cut = True
        while self._sockets:
            self._sockets.pop().close()

    def mend(self) -> None:
        """Connect the next ones."""
        self._is_cut = False


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core finds on a page: rules, and the elements that break them."""
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(AXE)  # not as a script of the page, which its policy forbids
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
WAIT_S = 30


class RawDevice:
    """A device of the field: a socket, an HTTP request, and packets; it comes back when the socket closes."""

    def __init__(self, port: int, target: str, uid: bytes) -> None:
        self._address, self._target, self._uid = ("127.0.0.1", port), target, uid
        self.come()

    def come(self) -> None:
        """Connect, however often that takes."""
        wait_until(self._try, "a broker", WAIT_S)

    def _try(self) -> bool:
        with contextlib.suppress(OSError):
            self._sock = socket.create_connection(self._address, 5)
            head = f"GET {self._target} HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\n\r\n"
            self._sock.sendall(head.encode())
            if self._sock.recv(4, socket.MSG_PEEK) == b"HTTP":  # 503: the application starts anew
                self._sock.close()
                return False
            self.receive(Type.INIT)
            self.send(bytes((Type.CONNECT, 1, len(self._uid))) + self._uid + b"\0")
            self.etid = int.from_bytes(self.receive(Type.CONNACK)[2:6], "big")
            self.send(bytes((Type.SUBSCRIBE,)) + b"hello")
            self.receive(Type.SUBACK)
            return True
        return False

    def close(self) -> None:
        """Cut the power."""
        self._sock.close()

    def send(self, packet: bytes) -> None:
        self._sock.sendall(struct.pack("!H", len(packet) + 2) + packet)

    def receive(self, kind: int) -> bytes:
        """The next packet, which is of this kind."""
        self._sock.settimeout(WAIT_S)
        head = self._sock.recv(2, socket.MSG_WAITALL)
        packet = self._sock.recv(int.from_bytes(head, "big") - 2, socket.MSG_WAITALL)
        assert packet[0] == kind, packet
        return packet

    def hear(self, *names: bytes) -> None:
        """Wait until all of them have said hello."""
        missing = set(names)
        while missing:
            missing.discard(self.receive(Type.PUBLISH)[13:])

    def expect_bare_end(self) -> None:
        """The socket closes; what comes before is not a Disconnect."""
        self._sock.settimeout(WAIT_S)
        while head := self._sock.recv(2, socket.MSG_WAITALL):
            packet = self._sock.recv(int.from_bytes(head, "big") - 2, socket.MSG_WAITALL)
            assert packet[0] != Type.DISCONNECT, packet
        self._sock.close()


INK = """canvas => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, colours = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) colours.add(data.slice(at, at + 3).join());
    return colours.size;
}"""
