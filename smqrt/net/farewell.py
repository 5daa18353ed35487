"""The end of a connection that was closed with something left to say: what is queued is sent, then the other side gets
a while to read it. Closing at once would lose the queue, and reset the connection when unread input is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any

from smqrt.errors import StreamError
from smqrt.net.readiness import READ, WRITE, Ready, Wait
from smqrt.net.tls import Buffer

SEND_S = 10.0  # and a second more for each MIN_BYTES_PER_S: whoever reads drop by drop can't keep us
MIN_BYTES_PER_S = 1024
LINGER_S = 2.0  # in all, however much it still sends
_waste = bytearray(65536)
_under_way: set[Farewell] = set()  # nobody else holds them


class Farewell:
    """Takes over a transport, and closes it in the end.

    Args:
        transport: a non-blocking socket or `TlsTransport` without watchers.
        unsent: what still has to go out.
    """

    def __init__(self, transport: Any, unsent: Iterable[Buffer]) -> None:
        self._transport = transport
        self._unsent = memoryview(b"".join(unsent))
        self._wait: Wait | None = None
        self._ready: Ready | None = None
        self._end_s = monotonic() + SEND_S + len(self._unsent) / MIN_BYTES_PER_S
        _under_way.add(self)
        self._send()

    def _send(self) -> None:
        transport = self._transport
        try:
            if self._unsent:
                self._unsent = self._unsent[transport.send(self._unsent) :]
            elif getattr(transport, "wants_write", False):
                transport.flush()
        except BlockingIOError:
            pass  # more when it is writable
        except OSError:
            self._end()
            return
        if self._unsent or getattr(transport, "wants_write", False):
            self._later(WRITE, self._send)
        else:
            self._half_close()

    def _half_close(self) -> None:
        try:
            self._transport.shutdown(1)
        except OSError:
            self._end()
        else:
            self._end_s = monotonic() + LINGER_S
            self._discard()

    def _discard(self) -> None:
        try:
            if not self._transport.recv_into(_waste):
                self._end()
                return
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        self._later(READ, self._discard)

    def _later(self, events: int, step: Any) -> None:
        self._forget()
        left_s = self._end_s - monotonic()
        if left_s <= 0:
            self._end()
            return
        self._ready = Ready(self._transport.fileno(), events)
        self._ready.wait(left_s).then(lambda value, error: step() if error is None else self._end())

    def _forget(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close(StreamError("socketclosed"))

    def _end(self) -> None:
        self._forget()
        self._transport.close()
        _under_way.discard(self)
