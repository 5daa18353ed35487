"""Browsers show every page to every server: a hub takes the connections of its own pages, and of those it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from tests.support.device import KINDS, RAW, RAW_HEADERS, WS, WS_HEADERS, Device, Site, request


def status(site: Site, kind: str, origin: str | None) -> int:
    """What the handshake of a page of `origin` is answered with."""
    device: Device = site.open(kind)
    fields = WS_HEADERS if device.on_websocket else RAW_HEADERS
    device.send_bytes(request(fields + (f"Origin: {origin}\r\n" if origin else ""))).read_head()
    device.close()
    return int(device.head.split()[1])


@pytest.mark.parametrize("kind", KINDS)
def test_only_own_pages(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site()
    taken = 101 if kind in (WS, "wss") else 200
    own = "https://test" if kind in ("tls", "wss") else "http://test"
    assert status(site, kind, None) == taken
    assert status(site, kind, own) == taken
    for foreign in ("http://evil.example", "https://test.evil.example", "null", "http://test:9357"):
        assert status(site, kind, foreign) == 403


def test_a_hub_opens_itself(make_site: Callable[..., Site]) -> None:
    site = make_site(origins=["https://friend.example", "https://*.friends.example"])
    asked = ("https://friend.example", "https://a.friends.example", "https://evil.example")
    assert [status(site, WS, origin) for origin in asked] == [101, 101, 403]
    assert status(make_site(origins="*"), WS, "https://anything.example") == 101


def test_the_line_names_the_setting(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    site = make_site()
    with caplog.at_level(logging.WARNING, "smqrt"):
        assert status(site, RAW, "https://evil.example") == 403
    [line] = [message for message in caplog.messages if "evil" in message]
    assert line.endswith(": to allow it, set origins=https://evil.example; see the setting origins")


def test_what_is_no_origin_is_said_at_once() -> None:
    with pytest.raises(ArgumentError, match="origins: 'example.com' is not an origin"):
        hub.create(origins="example.com")
