"""Heads of requests that are made to cost more than their bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.manual.pages import pages
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.strangers import HEADS, filled

REQUESTS = 50  # at once, in one pipeline


@pytest.mark.parametrize("name", HEADS)
def test_heads_with(besieged: Besieged, name: str) -> None:
    target, field = HEADS[name]
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: 127.0.0.1:%d" % besieged.port, *filter(None, [field])]
    request = b"\r\n".join([*lines, b"", b""])
    last = b"GET /rtl/smq.js HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % besieged.port
    with besieged.attack(f"{REQUESTS} heads with {name}") as attack:
        assert besieged.exchange(request * REQUESTS + last, attack).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("unit", [b"a", b"a.", b":1", b"//", b"-"])
def test_foreign_origins(besieged: Besieged, unit: bytes) -> None:
    line = filled(b"Origin: http://", unit)
    request = b"POST / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%b\r\nContent-Length: 0\r\n\r\n" % (besieged.port, line)
    last = b"GET /rtl/smq.js HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % besieged.port
    with besieged.attack(f"{REQUESTS} foreign origins of {unit.decode()}") as attack:
        answers = besieged.exchange(request * REQUESTS + last, attack)
    assert answers.count(b"HTTP/1.1 403 ") == REQUESTS


@pytest.mark.parametrize("unit", [b"a", b"a.", b"%", b"-"])
def test_foreign_hosts(besieged: Besieged, unit: bytes) -> None:
    request = b"GET / HTTP/1.1\r\n%b\r\n\r\n" % filled(b"Host: ", unit)
    last = b"GET /rtl/smq.js HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % besieged.port
    with besieged.attack(f"{REQUESTS} foreign hosts of {unit.decode()}") as attack:
        answers = besieged.exchange(request * REQUESTS + last, attack)
    assert answers.count(b"HTTP/1.1 403 ") == REQUESTS


def test_the_manual_for_the_first_time(besiege: Callable[..., Besieged]) -> None:
    besieged = besiege(APPS / "lua")
    head = "GET /help/{} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: {}\r\n\r\n"
    names = list(pages())
    requests = [head.format(name, besieged.port, "keep-alive") for name in names]
    requests.append(head.format("", besieged.port, "close"))
    with besieged.attack("every page of the manual, rendered for the first time") as attack:
        answers = besieged.exchange("".join(requests).encode(), attack)
    assert answers.count(b"HTTP/1.1 200 ") == len(names) + 1


def test_a_long_pipeline(besieged: Besieged) -> None:
    request = b"GET /lua/form.lsp?%b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (b"a=%41&" * 50, besieged.port)
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with besieged.attack("2,000 requests in one pipeline") as attack:
        answers = besieged.exchange(request * 2000 + last, attack)
    assert answers.count(b" 200 OK") == 2001


def test_empty_lines_without_end(besieged: Besieged) -> None:
    with besieged.attack("16 MiB of empty lines") as attack:
        assert b" 400 " in besieged.exchange(b"\r\n" * (8 << 20), attack)
