"""A WSGI application that is mounted in a directory, and connects clients to a hub."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from smqrt.apps.lua.api import smq_hub
from smqrt.wire import websocket
from tests.apps.lua.app_server import AppServer
from tests.support.device import RAW, WS, Device, masked, publish
from tests.support.waiting import wait_until

CODE = """
from smqrt import hub
from smqrt.app import dir

told = []
smq = hub.create(
    onconnect=lambda etid, info, peer: told.append((info.url, info.arg, info.request["REQUEST_METHOD"])),
    onclose=lambda etid, sock, peer, err: told.append(err),
)

def application(environ, start_response):
    if environ["PATH_INFO"] == "/smq":
        smq.connect(environ, "door")
    start_response("200 OK", [("Content-Type", "text/plain")])(b"")
    return [b"a page"]

dir.mount(application)
"""


@pytest.mark.parametrize("kind", [RAW, WS])
def test_a_mounted_application_connects_clients(server: AppServer, kind: str) -> None:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    application = server.app({".preload.py": CODE}, "shop")
    assert application.error is None
    names: Any = server.services.scopes[application.number].names["app"]
    device = Device(("127.0.0.1", server.port), kind).start(target="/shop/smq").connect(b"uid-a1")
    device.publish(device.etid, b"me").expect(publish(device.etid, device.etid, b"me"))
    assert names.told == [("/shop/smq", "door", "GET")]
    if kind == WS:
        device.send_bytes(masked(struct.pack(">H", 1001), websocket.CLOSE))
    else:
        device.close()
    wait_until(lambda: len(names.told) == 2, "onclose")
    assert names.told[1] == ("socketclosed" if kind == WS else "socketreadfailed")
    assert (server.ask("/shop/smq").status, server.ask("/shop/other").text) == (404, "a page")
    application.unload()
