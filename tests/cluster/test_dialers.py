"""Dialers, which look for other nodes at addresses."""

from __future__ import annotations

import time
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt.cluster.engines import mesh as module
from smqrt.cluster.engines.mesh import Mesh
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY
from tests.support.waiting import wait_until


def _echo(sock: Any, address: object) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def test_an_echo_is_not_always_taken_for_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what this node has said, so that it seems to be found at its own address."""
    monkeypatch.setattr(module, "SELF_RETRY_S", 0.1)
    echo = StreamServer(("127.0.0.1", 0), _echo)
    echo.start()
    one, other = Mesh(KEY), Mesh(KEY)
    try:
        dialer = one.dial("127.0.0.1", echo.server_port)
        wait_until(lambda: dialer.is_self)
        assert not one.node.links
        echo.stop()
        other.listen("127.0.0.1", echo.server_port)
        wait_until(lambda: one.node.links, "the node that is there now is linked")
        wait_until(lambda: dialer.up)
        assert not dialer.is_self
    finally:
        echo.stop()
        one.close()
        other.close()


def test_equal_fixed_node_numbers_are_reported() -> None:
    one, other = Mesh(KEY, 7), Mesh(KEY, 7)
    try:
        dialer = one.dial("127.0.0.1", other.listen("127.0.0.1", 0).address[1])
        wait_until(lambda: "fixed number 7" in dialer.why)
        assert not dialer.is_self
    finally:
        one.close()
        other.close()


OUTAGE_S = 6.5
"""Who doubles what it waits would wait 6.4 s then."""
HEALS_S = 5.0


def test_nodes_link_within_five_seconds_after_long_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uniform", lambda least, most: most)
    one, other = Mesh(KEY), Mesh(KEY)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        cable.cut()
        one.dial("127.0.0.1", cable.port)
        gevent.sleep(OUTAGE_S)
        cable.mend()
        began_s = time.monotonic()
        wait_until(lambda: one.node.links, "they are linked")
        assert time.monotonic() - began_s < HEALS_S
    finally:
        cable.close()
        one.close()
        other.close()


def test_a_link_that_breaks_is_made_anew_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKEN_PLACE_S", 60.0)
    one, other = Mesh(KEY), Mesh(KEY)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        one.dial("127.0.0.1", cable.port)
        for _ in range(3):
            wait_until(lambda: one.node.links and other.node.links)
            gevent.sleep(2 * module.LASTED_S)
            (before,) = one.node.links.values()
            cable.mend()  # which ends the connections from before
            wait_until(lambda before=before: before not in one.node.links.values())
    finally:
        cable.close()
        one.close()
        other.close()
