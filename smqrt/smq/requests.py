"""Requests that block a greenlet."""

from __future__ import annotations

from collections.abc import Callable

from gevent.event import Event

from smqrt.errors import NoAnswer
from smqrt.smq.messages import OpenRequests


class Requests(OpenRequests):
    """The open requests of one client or hub."""

    def ask(self, etid: int, send: Callable[[int], object], timeout_s: float) -> tuple[bytes, int]:
        """Call `send(number)` and wait for the answer of `etid` with that number.

        Returns:
            The answer's payload, and the number.

        Raises:
            NoAnswer: no answer was received in time, or `give_up` was called.
        """
        answer, number = self.open(etid)
        settled = Event()
        answer.then(lambda _value, _error: settled.set())
        try:
            send(number)
            if not settled.wait(timeout_s):
                raise NoAnswer(f"no answer from {etid} in {timeout_s:g} s")
            return answer.result(), number
        finally:
            self.end(etid, number)
