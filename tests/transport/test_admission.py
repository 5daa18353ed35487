"""The limit on connections that strangers may open; the count is right again when they are gone."""

from __future__ import annotations

import gc
import resource

import pytest
from gevent import socket

from smqrt.transport import admission
from smqrt.transport.listener import Acceptor
from tests.support.device import KINDS, WS, Site
from tests.support.waiting import wait_until


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> admission.ConnectionLimit:
    """The process's limit, set to five more connections than are open."""
    wait_until(lambda: gc.collect() is not None and admission.open_connections.open == 0, "older connections closed")
    monkeypatch.setattr(admission.open_connections, "limit", 5)
    return admission.open_connections


@pytest.mark.parametrize("kind", KINDS)
def test_so_many_connections_in_all(
    site: Site, strict: admission.ConnectionLimit, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [site.device(b"uid-a%d" % number, kind) for number in range(5)]
    for _ in range(20):
        with socket.create_connection(site.address(), timeout=5) as extra:
            assert extra.recv(1000).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert admission.CONNECTIONS.count == 20
    lines = [record.getMessage() for record in caplog.records if "refused: a connection" in record.getMessage()]
    assert len(lines) == 1
    assert "max_connections" in lines[0]
    for client in clients:
        client.expect_nothing()
    clients[0].close()
    wait_until(lambda: strict.open == 4, "the count falls")
    site.device(b"uid-b1", kind)


def test_every_kind_of_close_is_counted(site: Site, strict: admission.ConnectionLimit) -> None:
    for kind in KINDS:
        site.device(b"uid-a1", kind).disconnect()
        site.device(b"uid-a1", kind).reset()
        site.open(kind).close()
        if kind == WS:
            site.device(b"uid-a1", kind).send_bytes(b"\xff\xff").close()
        wait_until(lambda: strict.open == 0, f"{kind}: the count falls")
    assert not admission.CONNECTIONS.count


def test_so_many_connections_of_one_address(
    site: Site, strict: admission.ConnectionLimit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strict, "per_address", 2)
    [site.device(b"uid-a%d" % number) for number in range(3)]
    monkeypatch.setattr(admission, "_is_local", lambda host: False)
    with socket.create_connection(site.address(), timeout=5) as extra:
        assert b" 503 " in extra.recv(1000)
    assert "connections of 127.0.0.1 are open; see the setting connections_per_address" in caplog.text


def test_ports_of_applications_share_the_count(strict: admission.ConnectionLimit) -> None:
    acceptor = Acceptor(0, "127.0.0.1")
    clients = [socket.create_connection(acceptor.sockname(), timeout=5) for _ in range(7)]
    taken = []

    def take() -> bool:
        if (one := acceptor.try_accept()) is not None:
            taken.append(one)
        return admission.CONNECTIONS.count == 2

    wait_until(take, "two were refused")
    assert len(taken) == strict.open == 5
    for one in taken[:4]:
        one.close()
    taken.clear()
    wait_until(lambda: strict.open == 0, "also what was only dropped")
    acceptor.close()
    for client in clients:
        client.close()


def test_some_descriptors_stay_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    assert admission._max_open() == 1000 - admission.RESERVE
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    assert admission._max_open() == 16
