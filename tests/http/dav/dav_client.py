"""A client of file servers."""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any
from xml.etree import ElementTree

import gevent
from gevent import socket

from tests.http.http_bench import Bench

D = "{DAV:}"


LOCK = (
    b"<D:lockinfo xmlns:D='DAV:'><D:lockscope><D:%b/></D:lockscope><D:locktype><D:write/></D:locktype>"
    b"<D:owner>me</D:owner></D:lockinfo>"
)


class Answer:
    def __init__(self, response: HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def hrefs(self) -> list[str]:
        return [str(each.text) for each in ElementTree.fromstring(self.body).iter(D + "href")]


class Client:
    """Sends one request a connection."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        address = self.bench.listener.address
        client = HTTPConnection(*address)
        client.sock = socket.create_connection(address, timeout=5)
        try:
            client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            return Answer(client.getresponse())
        finally:
            client.close()

    def locked(self, path: str, scope: bytes = b"exclusive", **headers: str) -> str:
        answer = self("LOCK", path, LOCK % scope, **headers)
        assert answer.status in (200, 201), answer.body
        return str(answer.headers["Lock-Token"])


def longest_turn_s(work: Callable[[], object]) -> float:
    """The longest time that a greenlet had to wait meanwhile, of CPU: the machine has other things to do."""
    ticks: list[float] = []

    def tick() -> None:
        while True:
            ticks.append(thread_time())
            gevent.sleep(0.001)

    ticking = gevent.spawn(tick)
    work()
    ticking.kill()
    return max(later - sooner for sooner, later in pairwise(ticks))
