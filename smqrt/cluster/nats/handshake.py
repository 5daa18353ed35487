"""The beginning of a connection to a NATS server: TCP, INFO, TLS, CONNECT, and the PONG that says "accepted"."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

import gevent
from gevent import get_hub

from smqrt import __version__
from smqrt.cluster.nats.credentials import jwt_fields, nkey_fields
from smqrt.cluster.nats.options import NatsOptions
from smqrt.cluster.nats.servers import NatsAddress
from smqrt.errors import ArgumentError, NatsError, StreamError
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Transport
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import nats
from smqrt.wire.nats import NatsDecoder, ServerInfo

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
