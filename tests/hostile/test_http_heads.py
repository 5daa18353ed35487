"""Heads of requests that are made to cost more than their bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.manual.pages import pages
from tests.hostile.conftest import APPS, Besieged

HEAD_BYTES = 16_000  # a little less than the limit
REQUESTS = 50  # at once, in one pipeline


def filled(begin: bytes, unit: bytes) -> bytes:
    return begin + unit * ((HEAD_BYTES - len(begin)) // len(unit))


HEADS = {
    "a path of escapes": (filled(b"/", b"%41"), b""),
    "a path of slashes": (filled(b"/", b"/"), b""),
    "a path of 2,000 folders": (b"/" + b"a/" * 2000, b""),
    "a path of 2,000 folders of an application": (b"/lua/" + b"a/" * 2000, b""),
    "a path that goes to and fro": (filled(b"/lua/", b"a/../"), b""),
    "a query of parameters": (b"/lua/form.lsp?" + b"a=%41&" * 990, b""),
    "a query of too many parameters": (filled(b"/lua/form.lsp?", b"&"), b""),
    "a query of escapes": (filled(b"/lua/form.lsp?a=", b"%41"), b""),
    "cookies": (b"/lua/form.lsp", filled(b"Cookie: ", b"a=b;")),
    "ranges": (b"/rtl/smq.js", filled(b"Range: bytes=", b"0-0,")),
    "ranges of digits": (b"/rtl/smq.js", filled(b"Range: bytes=", b"1")),
    "entity tags": (b"/rtl/smq.js", filled(b"If-None-Match: ", b'"a",')),
    "a date": (b"/rtl/smq.js", filled(b"If-Modified-Since: ", b"1 ")),
    "tokens": (b"/rtl/smq.js", filled(b"Connection: ", b"a,")),
    "fields": (b"/rtl/smq.js", b"\r\n".join(b"X%d: " % n + b"y" * 150 for n in range(95))),
    "short fields": (b"/rtl/smq.js", filled(b"X: y", b"\r\nX: y")),
    "a content type": (b"/lua/upload.lsp", filled(b"Content-Type: multipart/form-data", b'; a="')),
}


HEADS |= {
    "a path of journals": (filled(b"/lua/", b"wal/"), b""),
    "a path of pipelines": (filled(b"/lua/", b"pipelines/") + b".sql", b""),
    "a path of backups": (filled(b"/lua/x.lua", b".1~"), b""),
}


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
