"""Flask with a hub, under gevent.pywsgi and under gunicorn, with the handler of `smqrt.wsgi`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gevent
import pytest

from smqrt.wire import smq, websocket
from tests.conftest import Served
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.strangers import RESET, Stranger, TlsStranger, attack_by_crowd, crowd_sends, get, last, open_many
from tests.support.device import RAW, TLS, WS, WSS, masked, publish
from tests.support.waiting import wait_until

CHUNKED = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class ServedByWsgi(Served):
    """gevent.pywsgi or gunicorn instead of `smqrt serve`; the last argument says which."""

    program = (str(APPS / "wsgi" / "server.py"),)


@pytest.fixture(scope="module", params=["pywsgi", "gunicorn"])
def flask(request: pytest.FixtureRequest) -> Iterator[Besieged]:
    running = Besieged(request.param, served_by=ServedByWsgi)
    yield running
    running.stop()


@pytest.fixture
def pywsgi() -> Iterator[Besieged]:
    running = Besieged("pywsgi", served_by=ServedByWsgi)
    yield running
    running.stop()


def test_pipelines(flask: Besieged) -> None:
    one = get(flask, b"/")
    attack_by_crowd(flask, "100 requests for a page of Flask", one * 100 + last(one), 20)


def test_a_body_in_chunks_of_one_byte(flask: Besieged) -> None:
    body = CHUNKED % b"/body" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n" + last(get(flask, b"/"))
    with flask.attack("Flask: a body in chunks of one byte") as attack:
        assert b"\r\n100000\n" in flask.exchange(body, attack)


def test_a_body_at_full_speed(flask: Besieged) -> None:
    with flask.attack("Flask: a body of 64 MiB") as attack:
        assert b"67108864" in flask.post("/body", bytes(64 << 20), "text/plain", attack)


def test_reading_of_an_unused_body_is_bounded(flask: Besieged) -> None:
    with flask.attack("Flask: an endless body for a page that does not read it") as attack, flask.open() as sock:
        sock.sendall(CHUNKED % b"/")
        with suppress(ConnectionError):
            while attack.sent_bytes < 200 << 20:
                sock.sendall(b"4000\r\n" + bytes(0x4000) + b"\r\n")
                attack.sent(0x4008)
    assert attack.sent_bytes < 100 << 20


@pytest.mark.parametrize("line", [b"X-More: 1\r\n", b"X: " + b"x" * 60_000 + b"\r\n"], ids=["many", "long"])
def test_an_endless_head(flask: Besieged, line: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + line * (6_000_000 // len(line))
    with flask.attack(f"Flask: a head of 6 MB in lines of {len(line)}") as attack:
        answer = flask.exchange(head, attack)
    assert not answer or answer.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in flask.served.output


def test_heads_that_are_late_together(flask: Besieged) -> None:
    attack_by_crowd(flask, "a head without end, for Flask", b"GET / HTTP/1.1\r\n", 500)


def test_many_clients_connect_and_leave(flask: Besieged) -> None:
    with flask.attack("Flask: 2,500 connections that come and go, half of them within a head") as attack:
        for number in range(10):  # 250 at once: gunicorn and gevent accept as many as there are, in one turn
            sockets = [flask.open() for _ in range(250)]
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                if number % 2:
                    sock.sendall(b"GET / HTTP/1.1\r\nX-")
                    attack.sent(20)
                sock.close()
    assert "Traceback" not in flask.served.output


@pytest.mark.parametrize("kind", [RAW, WS])
def test_floods_of_the_hub(flask: Besieged, kind: str) -> None:
    device = Stranger(flask, b"flood-1", kind)
    data = device.framed(smq.PING) * 40_000 + device.framed(publish(0, device.etid, b"x")) * 10_000
    with flask.attack(f"Flask: 40,000 pings and 10,000 messages to nobody, {kind}") as attack:
        device.flood(data, attack)


@pytest.mark.parametrize("kind", [TLS, WSS])
def test_many_at_full_speed_over_tls(pywsgi: Besieged, kind: str) -> None:
    devices = [TlsStranger(pywsgi, b"flood-%d" % number, kind) for number in range(20)]
    data = devices[0].framed(smq.PING) * 10_000
    if kind == WSS:
        data += masked(b"", websocket.PING) * 10_000
    with pywsgi.attack(f"Flask: 20 clients flood over TLS, {kind}") as attack:
        gevent.joinall([gevent.spawn(device.flood, data, attack) for device in devices], raise_error=True)


def test_subscribers_over_tls_that_do_not_read_leave_nothing(pywsgi: Besieged) -> None:
    files = Path(f"/proc/{pywsgi.served.process.pid}/fd")
    before = len(os.listdir(files))
    deaf = [TlsStranger(pywsgi, b"deaf-%d" % number, TLS) for number in range(20)]
    for device in deaf:
        tid = device.subscribe(b"flood")
    publisher = Stranger(pywsgi, b"publisher")
    data = smq.frame(publish(tid, publisher.etid, bytes(60_000))) * 300
    with pywsgi.attack("Flask: 20 subscribers over TLS do not read", grows_bytes=200 << 20) as attack:
        publisher.flood(data, attack)
        wait_until(lambda: len(os.listdir(files)) <= before + 2, "the ends of those that do not read", 60)
    for device in deaf:
        device.close()


def test_pipelines_over_tls(pywsgi: Besieged) -> None:
    one = get(pywsgi, b"/")
    sockets = open_many(pywsgi, 10)
    with pywsgi.attack("Flask: 10 pipelines of 100 requests over TLS") as attack:
        assert crowd_sends(sockets, one * 100 + last(one), attack)
