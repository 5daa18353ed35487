"""One connection to a NATS server, as callbacks of the event loop: reading in shares of a turn, and asking whether the
server is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic, time
from typing import Any, NamedTuple, Protocol

import gevent
from gevent import get_hub

from smqrt import __version__
from smqrt.broker.outbox import BLOCKED, backlog
from smqrt.cluster.nats.options import NatsOptions, jwt_fields, nkey_fields
from smqrt.cluster.nats.outbox import NatsOutbox
from smqrt.cluster.nats.servers import NatsAddress
from smqrt.errors import ArgumentError, NatsError, StreamError
from smqrt.loop.readiness import READ
from smqrt.smq import data_path
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Transport
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import nats
from smqrt.wire.nats import NatsDecoder, ServerInfo

# ---- The beginning of a connection to a NATS server: TCP, INFO, TLS, CONNECT, and the PONG that says "accepted".

_AUTHENTICATION = ("authorization", "authentication", "credentials")
_REMEDY = {
    Trust.CERTCN: "it is outside its time",
    Trust.CERT: "it is for another name: give tls_hostname",
    Trust.CN: "it is from an unknown authority: give tls_ca",
    Trust.NONE: "it is from an unknown authority and for another name: give tls_ca",
}


class RefusedError(NatsError):
    """A server that does not let us in, or that must not be trusted: something that time alone does not mend."""


class Greeted(NamedTuple):
    """A connection whose server has accepted us.

    Attributes:
        decoder: may hold the first part of something; its events are to be set.
    """

    transport: Transport
    decoder: NatsDecoder
    info: ServerInfo


def refusal(text: str) -> str | None:
    """What to do about an -ERR that is about who we are; None for another one."""
    if not any(word in text.lower() for word in _AUTHENTICATION):
        return None
    return (
        f"the server does not let this client in ({text}); check the user and password in its address, or user, token, "
        "nkey_file or credentials_file"
    )


def greet(address: NatsAddress, tls: ClientTls, options: NatsOptions) -> Greeted:
    """Connect to a server; blocks the greenlet, for `connect_timeout_s` at most.

    Raises:
        StreamError: there is no connection.
        RefusedError: the server does not let us in, is not to be trusted, or a file with credentials is wrong.
        NatsError: what answers speaks another protocol.
    """
    end_s = monotonic() + options.connect_timeout_s
    stream = Stream.connect(address.host, address.port, options.connect_timeout_s)
    late = StreamError("timeout", f"{address} did not accept within {options.connect_timeout_s:g} s")
    try:
        with gevent.Timeout(max(end_s - monotonic(), 0.001), late):
            return _Greeter(stream, address, tls, options).greet()
    except BaseException:
        stream.close()
        raise


class _Greeter:
    """Takes the events of the decoder meanwhile."""

    def __init__(self, stream: Stream, address: NatsAddress, tls: ClientTls, options: NatsOptions) -> None:
        self._stream, self._address, self._tls, self._options = stream, address, tls, options
        self._decoder = NatsDecoder(self)
        self._info: ServerInfo | None = None
        self._is_accepted = False
        self._error = ""

    def greet(self) -> Greeted:
        if self._options.tls_first:
            self._secure()
        while self._info is None:
            self._read()
        self._go_on_in_tls(self._info)
        self._stream.write(nats.connect(self._connect_fields(self._info)) + nats.PING)
        while not self._is_accepted:
            self._read()
        transport, _ = self._stream.release()
        return Greeted(transport, self._decoder, self._info)

    def _read(self) -> None:
        data = self._stream.read()
        if not data:
            raise StreamError("socketclosed", f"{self._address} closed the connection {self._error}".strip())
        self._decoder.feed(data)
        while self._decoder.decode():
            pass

    # ---- TLS

    def _go_on_in_tls(self, info: ServerInfo) -> None:
        if self._stream.tls is not None:
            return
        wanted = self._address.secure or self._options.wants_tls
        if wanted and not (info.tls_required or info.tls_available):
            raise RefusedError(f"{self._address} speaks no TLS, which is asked for; nothing is sent to it")
        if wanted or info.tls_required:
            self._secure()

    def _secure(self) -> None:
        host, other = self._address.host, self._options.tls_hostname or self._address.tls_hostname
        self._stream.starttls(self._tls.context(), other or host, timeout_s=self._options.connect_timeout_s)
        assert self._stream.tls is not None
        chain = self._stream.tls.peer_chain()
        trusts = [self._tls.store.judge(chain, name) for name in dict.fromkeys((other or host, host))]
        if Trust.TRUSTED not in trusts:
            raise RefusedError(f"the certificate of {self._address} is not to be trusted: {_REMEDY[trusts[0]]}")

    # ---- CONNECT

    def _connect_fields(self, info: ServerInfo) -> dict[str, object]:
        fields: dict[str, object] = {
            "verbose": False,
            "pedantic": False,
            "tls_required": self._stream.tls is not None,
            "name": self._options.name,
            "lang": "python",
            "version": __version__,
            "protocol": 1,
            "echo": self._options.echo,
            "headers": info.headers,
            "no_responders": info.headers,
        }
        return fields | self._credentials(info.nonce)

    def _credentials(self, nonce: str) -> dict[str, object]:
        options, address = self._options, self._address
        if address.user is not None:
            return _user_fields(address.user, address.password)
        if options.user is not None:
            return {"user": options.user, "pass": options.password or ""}
        if options.token is not None:
            return {"auth_token": options.token}
        read, path = (nkey_fields, options.nkey_file) if options.nkey_file else (jwt_fields, options.credentials_file)
        if path is None or not nonce:  # a server that asks nobody
            return {}
        try:
            return get_hub().threadpool.apply(read, (path, nonce))
        except ArgumentError as error:
            raise RefusedError(str(error)) from None

    # ---- events

    def on_message(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        raise NatsError("a message before a subscription")

    def on_info(self, info: ServerInfo) -> None:
        self._info = info

    def on_ping(self) -> None:
        self._stream.push_or_forget(nats.PONG)

    def on_pong(self) -> None:
        self._is_accepted = True

    def on_error(self, text: str) -> None:
        if (sentence := refusal(text)) is not None:
            raise RefusedError(f"{self._address}: {sentence}")
        self._error = f"({text})"


def _user_fields(user: str, password: str | None) -> dict[str, object]:
    return {"auth_token": user} if password is None else {"user": user, "pass": password}


RECEIVE_BYTES = 256 << 10
_MAX_TICK_S = 1.0
_TICKS_PER_WAIT = 4

_buffer = bytearray(RECEIVE_BYTES)  # shared: what is received is copied out before anything else can receive
_view = memoryview(_buffer)


class Owner(Protocol):
    """Whose connection it is. It is called from the event loop and must not block."""

    def deliver(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """A message came."""

    def informed(self, connection: NatsConnection) -> None:
        """The server sent INFO again."""

    def complained(self, connection: NatsConnection, text: str) -> None:
        """The server sent -ERR."""

    def lost(self, connection: NatsConnection, reason: str) -> None:
        """The connection is over, and not because `close` was called."""


class NatsConnection:
    """A connection whose server has accepted.

    Args:
        greeted: the connection.
        outbox: sends over it from now on.
        lines: to be sent before what waits there.

    Attributes:
        info: what the server said last of itself.
        since_s: when it was made, in monotonic seconds.
        is_open: false when it is over.
        lost_messages: how many were lost with it of those that waited.
    """

    def __init__(
        self,
        owner: Owner,
        address: NatsAddress,
        greeted: Greeted,
        outbox: NatsOutbox,
        options: NatsOptions,
        lines: list[bytes],
    ) -> None:
        self.address, self.info = address, greeted.info
        self._owner, self._outbox, self._options = owner, outbox, options
        self._transport: Any = greeted.transport
        self._decoder = greeted.decoder
        self._decoder.events = self
        self.on_message = owner.deliver
        self.since_s = self._heard_s = monotonic()
        self._pinged_s = -inf
        self._pongs: deque[Callable[[bool], object]] = deque()
        self.is_open, self._is_paused, self.lost_messages = True, False, 0
        outbox.attach(greeted.transport, lines, options.queue_bytes, self._broken)
        loop: Any = get_hub().loop
        self._watcher = loop.io(self._transport.fileno(), READ)
        self._watcher.start(self._readable)
        tick_s = min(options.ping_s / _TICKS_PER_WAIT, options.pong_s / _TICKS_PER_WAIT, _MAX_TICK_S)
        self._ticker = loop.timer(tick_s, tick_s)
        self._ticker.start(self._tick)
        if self._has_pending():
            self._give_way()

    @property
    def messages(self) -> int:
        """How many came over it."""
        return self._decoder.messages

    @property
    def payload_bytes(self) -> int:
        """How many bytes of payload and headers."""
        return self._decoder.payload_bytes

    # ---- reading

    def _readable(self) -> None:
        try:
            got = self._transport.recv_into(_view, RECEIVE_BYTES)
        except BlockingIOError:
            self._outbox.wants_write()
            return
        except OSError as error:
            self.lose(f"reading failed: {error.strerror or error}")
            return
        if not got:
            self.lose("the server closed the connection")
            return
        self._heard_s = monotonic()
        try:
            self._decoder.feed(bytes(_view[:got]))
        except NatsError as error:
            self.lose(f"the server broke the protocol: {error}")
            return
        self._work_off()
        if self.is_open and not self._is_paused and self._has_pending():
            self._give_way()  # the socket does not become readable for what TLS has already

    def _work_off(self) -> None:
        """Deliver what has come, for a share of this turn; the rest in a later one."""
        until_s = data_path.share_ends_s()
        try:
            while self._decoder.decode() and self.is_open:
                if backlog or time() >= until_s:
                    self._give_way()
                    return
        except NatsError as error:
            self.lose(f"the server broke the protocol: {error}")

    def _has_pending(self) -> bool:
        return getattr(self._transport, "has_pending", False)

    def _give_way(self) -> None:
        self._is_paused = True
        self._watcher.stop()
        data_path.deferred_reads.append(self)

    def go_on(self) -> None:
        """Go on where it gave way."""
        if not self.is_open:
            return
        self._is_paused = False
        self._watcher.start(self._readable)
        self._work_off()
        if self.is_open and not self._is_paused and self._has_pending():
            self._readable()

    # ---- events

    def on_info(self, info: ServerInfo) -> None:
        """See `NatsEvents`."""
        self.info = info
        self._owner.informed(self)

    def on_ping(self) -> None:
        """See `NatsEvents`."""
        self._outbox.add_pong()

    def on_pong(self) -> None:
        """See `NatsEvents`."""
        if self._pongs:
            self._pongs.popleft()(True)

    def on_error(self, text: str) -> None:
        """See `NatsEvents`."""
        self._owner.complained(self, text)

    # ---- is it there?

    def ping(self, then: Callable[[bool], object]) -> None:
        """Send PING behind what waits; `then` is called with true for the answer, false when none comes any more."""
        self._pongs.append(then)
        self._outbox.add(nats.PING)

    def _tick(self) -> None:
        now_s, outbox, options = monotonic(), self._outbox, self._options
        if outbox.life is BLOCKED and now_s - outbox.progress_s >= options.pong_s:
            self.lose(f"the server took nothing for {options.pong_s:g} s")
        elif now_s - self._heard_s >= options.ping_s and not self._is_paused:  # else what it said waits for us
            self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        if self._pinged_s < self._heard_s:
            self._pinged_s = now_s
            self.ping(_nothing)
        elif now_s - self._pinged_s >= self._options.pong_s:
            heard_s = self._heard_s
            self._readable()  # it may have answered while this process stood still
            if self._heard_s == heard_s:
                self.lose(f"the server did not answer for {self._options.pong_s:g} s")

    # ---- the end

    def _broken(self, error: OSError) -> None:
        self.lose(f"writing failed: {error.strerror or error}")

    def lose(self, reason: str) -> None:
        """It is broken, or given up: tell the owner."""
        if self.is_open:
            self.close()
            self._owner.lost(self, reason)

    def close(self) -> None:
        """End it."""
        if not self.is_open:
            return
        self.is_open = False
        self._ticker.stop()
        self._ticker.close()
        self._watcher.stop()
        self._watcher.close()
        self.lost_messages = self._outbox.detach(self._options.reconnect_queue_bytes)
        self._transport.close()
        pongs, self._pongs = self._pongs, deque()
        for then in pongs:
            then(False)


def _nothing(is_answered: bool) -> None:
    """What is to be done after an answer that was asked for to see whether there is one."""
