"""Subscribe, Create and Createsub packets that the broker has not answered yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from smqrt.client.routes import Done


class Request(NamedTuple):
    """What is asked of the broker.

    Attributes:
        kind: packet type; 0 concerns only this client, and is done as soon as there is a connection.
        done: gets the number.
        restores: whether it was answered on an earlier connection already.
    """

    kind: int
    name: bytes
    done: Done | None
    restores: bool = False


class OpenRequests:
    """Requests in their order, found by what they ask for: an answer costs the same however many are open.

    Attributes:
        restoring: how many of them restore what was on an earlier connection.
    """

    def __init__(self) -> None:
        self.restoring = 0
        self._requests: dict[int, Request] = {}
        self._numbers: dict[tuple[int, bytes], deque[int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Put a request at the end."""
        self._last += 1
        self._requests[self._last] = request
        self._numbers.setdefault((request.kind, request.name), deque()).append(self._last)
        self.restoring += request.restores

    def take(self, kind: int, name: bytes) -> Request | None:
        """Take out the oldest of that kind and name, None when there is none."""
        numbers = self._numbers.get((kind, name))
        if numbers is None:
            return None
        request = self._requests.pop(numbers.popleft())
        if not numbers:
            del self._numbers[kind, name]
        self.restoring -= request.restores
        return request
