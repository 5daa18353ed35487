"""`smqrt retained` and `smqrt sessions`: requests and lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.commands import Command
from tests.cli.test_admin import Listener, listener

__all__ = ["listener"]

HUBS = [{"id": 1, "app": "plain", "made_at": "", "mqtt": None}, {"id": 2, "app": "house", "made_at": "", "mqtt": {}}]
MESSAGE = {
    "topic": "house/temp", "qos": 1, "bytes": 2, "payload": "21", "expires_in_s": 61.5, "properties": {"unit": "C"},
}  # fmt: skip
SESSION = {
    "client_id": "lamp", "user": "ann", "connected": False, "ends_in_s": 61.5, "version": "5", "subscriptions": 2,
    "in_flight": 1, "waiting": 3, "waiting_bytes": 500, "lost": 4, "expiry_s": 3600,
}  # fmt: skip


def test_retained_messages_are_listed(listener: Listener) -> None:
    listener.answers = {"hubs": HUBS, "mqtt-retained": {"items": [MESSAGE], "total": 3}}
    result = Command("retained")("list", "--url", listener.url, "house/#", "--limit", "1", "--after", "a")
    assert result.stdout.splitlines() == ["topic\tqos\tbytes\texpires in\tpayload", "house/temp\t1\t2\t1 m 1 s\t21"]
    assert result.stderr == "1 of 3 shown; see more with --limit or --search.\n"
    assert listener.asked[-1][2] == {"hub": "2", "filter": "house/#", "after": "a", "limit": "1"}
    assert json.loads(Command("retained").done("list", "--url", listener.url, "--json")) == MESSAGE


def test_retained_messages_are_deleted(listener: Listener) -> None:
    listener.answers = {"hubs": HUBS, "hubs/2/mqtt-retained/delete": {"deleted": 7}}
    assert Command("retained").done("delete", "--url", listener.url, "house/#") == "deleted 7 retained messages\n"
    assert listener.asked[-1][0] == "POST"
    assert listener.asked[-1][3] == {"filter": "house/#"}


@pytest.mark.parametrize(
    ("changes", "state"),
    [({}, "ends in 1 m 1 s"), ({"ends_in_s": None}, "offline"), ({"connected": True, "ends_in_s": None}, "connected")],
)
def test_sessions_are_listed(listener: Listener, changes: dict[str, Any], state: str) -> None:
    listener.answers = {"mqtt-sessions": {"items": [SESSION | changes], "total": 1}}
    lines = Command("sessions").done("list", "--url", listener.url, "--hub", "5", "--search", "la").splitlines()
    assert lines[1] == f"lamp\tann\t{state}\t5\t2\t1\t3\t4\t1 h 0 m"
    assert listener.asked[-1][2] == {"hub": "5", "state": "all", "search": "la", "limit": "100"}


def test_sessions_are_disconnected_and_deleted(listener: Listener) -> None:
    listener.answers = {
        "hubs": HUBS,
        "hubs/2/mqtt-sessions/disconnect": {"disconnected": True},
        "hubs/2/mqtt-sessions/delete": {"deleted": True},
    }
    assert Command("sessions").done("disconnect", "--url", listener.url, "lamp") == "disconnected\n"
    assert Command("sessions").done("delete", "--url", listener.url, "lamp") == "the session is deleted\n"
    assert listener.asked[-1][3] == {"client": "lamp"}
    listener.answers["hubs/2/mqtt-sessions/disconnect"] = {"disconnected": False}
    assert Command("sessions").done("disconnect", "--url", listener.url, "lamp") == "the client is not connected\n"


def test_a_hub_is_needed_when_none_or_several_accept_mqtt_clients(listener: Listener) -> None:
    for hubs, listed in ((HUBS[:1], "none"), ([HUBS[1], HUBS[1] | {"id": 3}], "2 (house), 3 (house)")):
        listener.answers = {"hubs": hubs}
        refused = Command("retained").refused("list", "--url", listener.url)
        assert refused == (2, f"select a hub with --hub. Hubs with MQTT clients: {listed}.")
