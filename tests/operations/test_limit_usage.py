"""Names of limits for operators, and their use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import smqrt
from smqrt.operations import limit_usage
from smqrt.operations.all_workers import MERGES
from smqrt.operations.limit_usage import TITLES, client_usage
from smqrt.server.mqtt import take_mqtt
from tests.smq.test_mqtt_clients import PahoClient
from tests.support.device import Site
from tests.support.turns import short_turns


def test_each_limit_has_a_noun_phrase() -> None:
    """Modules that are imported on first use register their limits later, so the sources are searched."""
    sources = Path(smqrt.__file__).parent.rglob("*.py")
    names = {name for path in sources for name in re.findall(r'\bLimit\(\s*"([a-z_]+)"', path.read_text("utf-8"))}
    assert names == set(TITLES)


def usage() -> dict[object, tuple[object, object]]:
    return {one["name"]: (one["used"], one["bound"]) for one in client_usage()}


def test_limits_of_clients_show_the_fullest_client(make_site: Callable[..., Site]) -> None:
    site = make_site(mqtt=True, clientnames=50)
    site.server.take_mqtt = take_mqtt
    assert usage()["client_subscriptions"] == (0, 50)
    few, many = site.device(b"device-few"), site.device(b"device-many")
    few.subscribe(b"a")
    for name in (b"a", b"b", b"cd"):
        many.subscribe(name)
    paho = PahoClient(site, "paho", keeps=True).subscribe("house/#", 1).subscribe("garden", 1)
    paho.client.disconnect()
    found = usage()
    assert found["client_subscriptions"] == (3, 50)
    assert found["client_names"] == (2, 50), "the names that `many` has made, and the hub's own limit"
    assert found["client_name_bytes"] == (3, 4 << 20)
    assert found["client_observes"][0] == 0
    assert found["mqtt_filters"][0] == 2, "also of a session without a connection"
    assert found["handshakes"][0] == 0
    assert set(found) <= set(TITLES)
    paho.client.loop_stop()


def test_of_several_workers_the_fullest_client_counts() -> None:
    rows = {0: [{"name": "a", "used": 1, "bound": 5}], 1: [{"name": "a", "used": 2, "bound": 6}]}
    assert MERGES["client-limits"](rows, {}) == [{"name": "a", "used": 2, "bound": 6}]


def test_a_hundred_thousand_clients_do_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time between two turns of the loop."""
    session = SimpleNamespace(names_made=1, names_made_bytes=1, topics=("a",), observed=None)
    limits = SimpleNamespace(
        client_names=1, client_names_bytes=1, subscriptions=1, observes=1, connections_per_user=None
    )
    sessions: Any = dict.fromkeys(range(100_000), session)
    broker = SimpleNamespace(sessions=sessions, users={}, devices=None, limits=limits)
    monkeypatch.setattr(limit_usage, "all_brokers", lambda: [broker])
    with short_turns():
        assert usage()["connections_per_user"] == (0, "unlimited")
