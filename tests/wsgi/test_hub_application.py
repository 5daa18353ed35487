"""`hub.wsgi`, the hub as a WSGI application: it answers every request, whatever the server in front can do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from flask import Flask
from gevent import pywsgi
from geventwebsocket.handler import WebSocketHandler
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from smqrt import hub
from smqrt.http.wsgi import WsgiDirectory
from smqrt.wsgi import Handler
from tests.conftest import free_port
from tests.http.http_bench import Bench
from tests.support.device import RAW, RAW_HEADERS, WS, WS_HEADERS, Device, publish, request
from tests.support.factory import Factory
from tests.support.waiting import wait_until
from tests.wsgi.served import WAIT_S, answers

KINDS_OF = {Handler: (RAW, WS), WebSocketHandler: (WS,), pywsgi.WSGIHandler: ()}
"""The clients that connect behind a handler of gevent.pywsgi."""


class Site:
    """A hub behind `gevent.pywsgi`: alone, and under a path of a Flask application in two ways."""

    def __init__(self, handler: Any) -> None:
        self.smq = hub.create()
        app = Flask(__name__)
        for is_websocket in (False, True):
            app.add_url_rule("/view", "view", self._view, websocket=is_websocket)
        below = DispatcherMiddleware(app, {"/smq": self.smq.wsgi})
        self._server = pywsgi.WSGIServer(("127.0.0.1", 0), below, handler_class=handler, log=None)
        self._server.start()
        self._devices: list[Device] = []

    def _view(self) -> Any:
        return self.smq.wsgi

    def open(self, kind: str) -> Device:
        self._devices.append(Device(self._server.address, kind))
        return self._devices[-1]

    def close(self) -> None:
        for device in self._devices:
            device.close()
        wait_until(lambda: not self.smq._broker.sessions, "the ends of all clients")
        self._server.stop(1)


@pytest.fixture
def make_site() -> Iterator[Callable[..., Site]]:
    with Factory(Site) as make:
        yield make


@pytest.mark.parametrize("target", ["/smq", "/view"])
@pytest.mark.parametrize("handler", KINDS_OF)
def test_what_is_no_smq_request_gets_404(make_site: Callable[..., Site], handler: Any, target: str) -> None:
    device = make_site(handler).open(RAW)
    for _ in range(2):  # the connection goes on
        status, body = answer_of(device, request("", target=target))
        assert (status, body) == (404, b"This address speaks SMQ.\n")


@pytest.mark.parametrize("target", ["/smq", "/view"])
@pytest.mark.parametrize(
    ("handler", "kind"), [(handler, kind) for handler, kinds in KINDS_OF.items() for kind in kinds]
)
def test_clients(make_site: Callable[..., Site], handler: Any, kind: str, target: str) -> None:
    device = make_site(handler).open(kind).start(target=target).connect(b"uid-a1")
    device.publish(device.etid, b"me").expect(publish(device.etid, device.etid, b"me"))


@pytest.mark.parametrize("headers", [RAW_HEADERS, WS_HEADERS])
def test_a_server_that_hands_no_connections_over(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, headers: str
) -> None:
    status, body = answer_of(make_site(pywsgi.WSGIHandler).open(RAW), request(headers, target="/smq"))
    assert status == 501
    assert b"smqrt.wsgi" in body
    assert "this WSGI server needs the handler of smqrt.wsgi" in caplog.text


def test_it_keeps_the_rules_of_wsgi() -> None:
    environ: dict[str, Any] = {"QUERY_STRING": ""}
    setup_testing_defaults(environ)
    told: list[Any] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        told.append((status, headers))
        return told.append

    pieces = validator(hub.create().wsgi)(environ, start_response)
    assert b"".join(pieces) == b"This address speaks SMQ.\n"
    pieces.close()  # type: ignore[attr-defined]
    assert told == [
        ("404 Not Found", [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", "25")]),
    ]


def test_mounted_in_a_directory() -> None:
    with Factory(Bench) as start, hub.create() as smq:
        bench = start()
        bench.root.insert(WsgiDirectory(smq.wsgi, "smq"))
        assert bench.connect().ask("/smq/").status == 404
        for kind in (RAW, WS):
            Device(bench.listener.address, kind).start(target="/smq/").connect(b"uid-" + kind.encode()).close()


@pytest.mark.parametrize("worker", ["sync", "gevent", "smqrt.gunicorn.Worker"])
def test_gunicorn(tmp_path: Path, worker: str) -> None:
    (tmp_path / "site_of_test.py").write_text("from smqrt import hub\nsmq = hub.create()\napplication = smq.wsgi\n")
    port = free_port()
    arguments = ["--worker-class", worker, "--bind", f"127.0.0.1:{port}", "site_of_test"]
    process = subprocess.Popen([sys.executable, "-m", "gunicorn", *arguments], cwd=tmp_path)
    try:
        wait_until(lambda: answers(port), "gunicorn", WAIT_S)
        device = Device(("127.0.0.1", port), RAW)
        device.sock.settimeout(WAIT_S)
        assert answer_of(device, request("Connection: close\r\n"))[0] == 404
    finally:
        process.kill()
        process.wait()


def answer_of(device: Device, data: bytes) -> tuple[int, bytes]:
    """Send a request; return the status and the body of the answer."""
    device.send_bytes(data).read_head()
    size = int(device.head.lower().partition(b"content-length: ")[2].split()[0])
    while len(device.stream.data) < size:
        assert device.more()
    body, device.stream.data = device.stream.data[:size], device.stream.data[size:]
    return int(device.head.split()[1]), body
