"""A server that is stopped, and an application that starts anew: browsers, Python clients and raw devices are closed
without a Disconnect, which would tell them not to come back, and come back.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from smqrt.wire.smq import Type
from tests.browser.test_chat import join, people
from tests.conftest import REPOSITORY, Served
from tests.support.waiting import wait_until

WAIT_S = 30
WORKERS = int(os.environ.get("SMQRT_WORKERS", "1"))


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


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A window in which connections may fail."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


def anew(served: Served, app: Path) -> None:
    """Change the application's code; wait until it has started anew in every worker."""
    preload, ok = next(app.glob(".preload*")), rf"app {app.name} at .*: ok"
    begun = len(re.findall(ok, served.output))
    preload.write_text(preload.read_text() + "\n\n")
    wait_until(lambda: len(re.findall(ok, served.output)) == begun + WORKERS, served.lines, WAIT_S)


def test_every_client_reconnects(
    serve: Callable[..., Served], page: Any, device: Callable[..., Any], tmp_path: Path
) -> None:
    apps = tmp_path / "apps"
    for name in ("chat", "python"):
        shutil.copytree(REPOSITORY / "app_preload" / name, apps / name)
    served = serve(apps, "--reload")
    page.goto(served.url + "/chat/")
    join(page, "Ada")
    device("chat/device.py", served.url + "/chat/smq.lsp")
    expect(people(page)).to_have_text(["Ada (you)", "Clock"])
    lua, python = (RawDevice(served.port, path, b"raw device") for path in ("/chat/smq.lsp", "/python/smq"))

    anew(served, apps / "chat")
    lua.expect_bare_end()
    lua.come()
    lua.hear(b"Ada", b"Clock")
    anew(served, apps / "python")
    python.expect_bare_end()
    python.come()

    assert served.stop() == 0
    lua.expect_bare_end()
    python.expect_bare_end()
    serve(apps, "--port", str(served.port))
    lua.come()
    python.come()
    lua.hear(b"Ada", b"Clock")
    expect(people(page)).to_have_text(["Ada (you)", "Clock"])
