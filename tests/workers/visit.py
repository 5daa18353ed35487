"""A connection to one worker of a server."""

from __future__ import annotations

import http.client

from tests.conftest import Served
from tests.support.waiting import wait_until


class Visit:
    """A connection to one worker of a server."""

    def __init__(self, served: Served, worker: int) -> None:
        self.port = served.port
        wait_until(lambda: self._is_at(worker), f"a connection to worker {worker}")

    def _is_at(self, worker: int) -> bool:
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        return self.ask("/who.lsp")[1] == str(worker)

    def ask(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        self.http.request("GET", path, headers=headers or {})
        answer = self.http.getresponse()
        return answer.status, answer.read().decode()
