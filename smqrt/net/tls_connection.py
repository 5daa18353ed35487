"""SMQ clients over TLS: the same path, with what the TLS layer holds back in both directions."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

from gevent import get_hub

from smqrt.broker.session import Session
from smqrt.errors import CloseReason
from smqrt.net import datapath
from smqrt.net.connection import WRITE, RawConnection
from smqrt.net.ws_connection import WsConnection

if TYPE_CHECKING:
    _Base = RawConnection
else:
    _Base = object


class _Tls(_Base):
    """Mixed into a connection whose `sock` is a `TlsTransport`."""

    __slots__ = ()

    def greet(self, reply: bytes, hello: bytes) -> None:
        """Send the HTTP reply and Init in a record each: the Java client hangs when they share one."""
        if reply:
            self._say(reply)
        if not self.closed:
            self._say(hello)

    def start(self, session: Session, data: bytes) -> None:
        """Begin to read; what was decrypted with the HTTP request will not make the socket readable."""
        super().start(session, data)
        if not self.closed:
            get_hub().loop.run_callback(self._on_pending)

    def on_readable(self) -> None:
        """Receive, unless the turn is over: records of TLS itself take milliseconds too, and end in no message."""
        if time() < datapath.share_ends_s():
            self._receive()
        else:
            self.give_way()

    def _receive(self) -> None:
        """Receive; decrypted bytes that did not fit are looked at in the next turn, since the socket won't call for
        them.
        """
        super().on_readable()
        if not self.closed and not self.paused and self.sock.has_pending:
            get_hub().loop.run_callback(self._on_pending)

    def _on_pending(self) -> None:
        if not self.closed and not self.paused and self.sock.has_pending:
            self.on_readable()

    def go_on(self) -> None:
        """See `RawConnection.go_on`; who gave way receives at once, or others might come first every time."""
        super().go_on()
        if not self.paused and not self.closed:
            self._receive()

    def _advance(self, sent: int) -> None:
        super()._advance(sent)
        self._watch_ciphertext()

    def flush(self) -> None:
        """Send the queue; ciphertext that the socket did not take waits until it is writable."""
        super().flush()
        self._watch_ciphertext()

    def put_view(self, view: memoryview) -> None:
        """See `RawConnection.put_view`."""
        super().put_view(view)
        self._watch_ciphertext()

    def _watch_ciphertext(self) -> None:
        if not self.closed and not self.blocked and self.sock.wants_write:
            if self.writer is None:
                self.writer = get_hub().loop.io(self.watcher.fd, WRITE)
            self.writer.start(self.on_writable)
            datapath.blocked_now(self)

    def on_writable(self) -> None:
        """The socket takes bytes again: ciphertext first, then the queue."""
        if self.sock.wants_write and not self._flush_ciphertext():
            return
        if self.blocked:
            super().on_writable()
        elif self.writer is not None:
            self.writer.stop()
            datapath.unblocked(self)

    def _flush_ciphertext(self) -> bool:
        datapath.progress(self)  # the socket is writable, so it takes some
        try:
            self.sock.flush()
        except BlockingIOError:
            return False
        except OSError:
            self.lost(CloseReason.WRITE_FAILED)
            return False
        return True


class TlsRawConnection(_Tls, RawConnection):
    """A client on a raw socket over TLS."""

    __slots__ = ()


class TlsWsConnection(_Tls, WsConnection):
    """A client on a WebSocket over TLS."""

    __slots__ = ()
