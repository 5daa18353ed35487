"""Ports for links in Python. What they do is in the tests of `cluster.engines.mtl` and of the documented statements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.errors import ArgumentError, ClosedError
from smqrt.hub import conn, mtl
from smqrt.hub.cluster import Cluster
from smqrt.wire import cluster_packets as wire
from tests.cluster.engines import KEY


def test_links_of_the_server_take_no_ports() -> None:
    internal: Any = SimpleNamespace()
    with pytest.raises(ArgumentError, match="this cluster uses the links of the server; create"):
        conn.create(Cluster(internal, None), 0)


def test_a_port_is_closed_at_the_end_of_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "key_of", lambda password: KEY)
    internal: Any = SimpleNamespace()
    with mtl.create("x") as links, conn.create(Cluster(internal, links), 0, intf="127.0.0.1") as port:
        assert port.setlist({"192.0.2.1": 5})
        assert port.add("192.0.2.2")
        assert port.status() == {"192.0.2.1": False, "192.0.2.2": False}
    with pytest.raises(ClosedError):
        port.add("192.0.2.3")
    port.close()
