"""Peers of a hub, and conversions of application values."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from urllib.parse import parse_qsl

from smqrt.broker.sessions import Session
from smqrt.broker.state import BrokerClient, BrokerPeer
from smqrt.cluster.remote_node import Phantom
from smqrt.errors import ArgumentError, CloseReason, SmqrtError
from smqrt.http.headers import joined_fields
from smqrt.smq.handshake import page_user
from smqrt.transport import tls_contexts
from smqrt.transport.stream import set_option
from smqrt.transport.tls import TlsTransport
from smqrt.wire.smq import ConnackCode

# ---- Conversions between application and broker values
#
# Each `as_…` function takes the name of the argument, which its error names, and the value.

Text = str | bytes
Name = str | bytes
"""A name as applications see it: `bytes` when it is not UTF-8."""


def is_number(value: object) -> TypeGuard[int]:
    """Return whether it is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_number(what: str, value: object) -> int:
    """Return a whole number; a bool is not accepted."""
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a number is needed, not {type(value).__name__}")


def as_text(what: str, value: object) -> bytes:
    """Return a str or bytes as bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise ArgumentError(f"{what}: a str or bytes is needed, not {type(value).__name__}")


def as_destination(what: str, value: object) -> bytes | int:
    """Return the name of a topic or sub-topic as bytes, or its number."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a name (str or bytes) or an id is needed, not {type(value).__name__}")


def as_function(what: str, value: object) -> Callable[..., object]:
    """Return a callable value."""
    if callable(value):
        return value
    raise ArgumentError(f"{what}: a function is needed, not {type(value).__name__}")


def text_of(name: bytes) -> Name:
    """Return a name as applications see it: str, or bytes when it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


def name_or_none(name: bytes | None) -> Name | None:
    """Return `text_of(name)`; None for None."""
    return None if name is None else text_of(name)


def text_names(names: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Name]]:
    """Return pairs of id and name, with the names as `text_of` returns them."""
    return ((number, text_of(name)) for number, name in names)


class PeerSocket:
    """The socket of a client, for inspection and options. The broker reads from it and writes to it.

    The methods of the server's own client return None.
    """

    __slots__ = ("_session",)

    def __init__(self, session: BrokerPeer) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<PeerSocket {self.peername()}>"

    @property
    def etid(self) -> int:
        """The ETID of the client; 0 before it is connected."""
        return self._session.etid

    def peername(self) -> tuple[str, int] | None:
        """Return the address and port of the remote side; None when the connection is closed."""
        return self._name("getpeername")

    def sockname(self) -> tuple[str, int] | None:
        """Return the address and port of the local side; None when the connection is closed."""
        return self._name("getsockname")

    def _name(self, method: str) -> tuple[str, int] | None:
        try:
            host, port = getattr(self.transport, method)()[:2]
        except (OSError, AttributeError):  # AttributeError: there is no socket
            return None
        return host, port

    @property
    def tls(self) -> TlsTransport | None:
        """The TLS connection; None without TLS."""
        transport = self.transport
        return transport if isinstance(transport, TlsTransport) else None

    def certificate(self) -> dict[str, object] | None:
        """Return the contents of the client certificate; None when the client sent none.

        Keys: subject and issuer (dicts of commonname, country, ...), commonname, subjectaltnames, tzfrom and tzto (ISO
        8601), serial.
        """
        return tls_contexts.describe(self._certificate())

    def trusted(self) -> bool:
        """Return whether the client sent a certificate of an authority of the listener.

        OpenSSL rejects certificates of other authorities during the TLS handshake.
        """
        return self._certificate() is not None

    def _certificate(self) -> bytes | None:
        read = getattr(self.transport, "peer_certificate", None)
        return read() if read else None

    def cipher(self) -> tuple[str, str] | None:
        """Return the name of the cipher and the version of TLS; None without TLS."""
        read = getattr(self.transport, "cipher", None)
        found = read() if read else None
        return found[:2] if found else None

    def isresumed(self) -> bool:
        """Return whether the TLS session was resumed; False without TLS."""
        return self.tls is not None and self.tls.resumed()

    def setoption(self, name: str, on: bool, *values: int) -> bool:
        """Set a socket option by its name in Lua (spec: bas-api §8.2).

            peer.sock.setoption("keepalive", True, 60, 10)

        Args:
            name: "keepalive", "nodelay" (or "tcp-nodelay"), "broadcast", "dontroute".
            on: whether it is switched on.
            values: for "keepalive", the idle time before the first probe and the probe interval, 1 to 32767 seconds.

        Returns:
            False when the connection is closed.

        Raises:
            ArgumentError: unknown option, or invalid value.
            OSError: the operating system rejects it.
        """
        set_option(self, name, on, *values)
        return self.transport is not None and self.transport.fileno() >= 0

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set a socket option. Do nothing when the connection is closed.

        Raises:
            OSError: the operating system rejects it.
        """
        if self.transport is not None and self.transport.fileno() >= 0:
            self.transport.setsockopt(level, option, value)

    def close(self) -> None:
        """Close the connection without a Disconnect packet; clients usually reconnect."""
        if isinstance(self._session, Session):
            self._session.disconnect(CloseReason.PEER_CLOSED)

    @property
    def transport(self) -> socket.socket | TlsTransport | None:
        """The underlying socket or `TlsTransport`; None when there is none."""
        found: socket.socket | TlsTransport | None = getattr(self._session.outbox, "transport", None)
        return found


class Refused(SmqrtError):
    """Raised by `authenticate` to reject a client, instead of returning a code.

    Args:
        code: 1 to 6 (spec: smq §1.2).
        reason: text sent to the client.

    Raises:
        ArgumentError: the code is not a number from 1 to 6.
    """

    def __init__(self, code: int = ConnackCode.ACCESS_DENIED, reason: str | bytes = "") -> None:
        if not is_number(code) or not 1 <= code <= 6:
            raise ArgumentError(f"code: a number from 1 to 6 is needed, not {code!r}")
        super().__init__(code, reason)
        self.code, self.reason = int(code), reason


class HeaderFields(dict[str, str]):
    """The header fields of a request, with case-insensitive names.

    Fields of the same name are joined by ",", cookies by "; ".
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        super().__init__(joined_fields(pairs))

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return the value of a field, or `default`."""
        return super().get(name.lower(), default)


class Info(dict[str, Any]):
    """Data about a client and its request, passed to `authenticate` and `onconnect`: the same object for both.

    `info.uid` and `info["uid"]` are the same value. An application may add entries.
    """

    __slots__ = ()

    arg: Any
    """The second argument of `connect`."""
    seed: int
    """The random number that the client received, for hashing its password."""
    uid: str | bytes
    """As the client sent it: str, or bytes when it is not UTF-8."""
    info: str | bytes
    """The description that the client sent: str, or bytes when it is not UTF-8."""
    sock: PeerSocket
    request: Any
    """The request, or the WSGI environ."""
    url: str
    """The path of the request."""
    data: dict[str, str]
    """The query parameters."""
    header: HeaderFields
    restored: bool
    """Whether the client was connected before this process or application started. Its request is unknown then."""
    session: Any
    """The session of the browser (`smqrt.http.sessions.Session`); None without one."""
    uname: str | None
    """The user of the client (help: identity), or the user logged in at the page; under WSGI `REMOTE_USER`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"info has no {name!r}; it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass(eq=False)
class Peer:
    """A connected client. Peers are hashable, and `data` is free for the application.

    Attributes:
        tid: the ETID.
        uid: as the client sent it: str, or bytes when it is not UTF-8.
        info: the client's own description, likewise.
        sock: its socket; `sock.peername()` returns the address.
        phantom: True for a client of another node of the cluster, which has no socket here; None for others.
        node: the number of that node; 0 for a client of this node.
    """

    tid: int
    uid: str | bytes
    info: str | bytes
    sock: PeerSocket
    _session: BrokerPeer = field(repr=False)
    data: dict[str, Any] = field(default_factory=dict)
    phantom: bool | None = None
    node: int = 0

    @property
    def user(self) -> str | None:
        """The user of the client (help: identity); None for anonymous clients."""
        identity = self._session.identity
        return (identity.user or None) if identity is not None else None

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of the user."""
        identity = self._session.identity
        return identity.groups if identity is not None else ()

    @property
    def topics(self) -> dict[int, PeerSocket] | None:
        """The subscribed topics, as a dict of id to socket; None without subscriptions."""
        return dict.fromkeys(self._session.topic_ids, self.sock) or None

    @property
    def dropped(self) -> int:
        """The number of messages dropped because the client is a slow consumer."""
        return self._session.outbox.dropped


def peer_of(session: BrokerPeer) -> Peer:
    """Return the peer of a session or of the server's own client: the same object for each call."""
    peer = session.extra
    if not isinstance(peer, Peer):  # created at first use: without callbacks a hub needs none
        node = session.node.number if isinstance(session, Phantom) else 0
        uid, info, sock = text_of(session.uid), text_of(session.info), PeerSocket(session)
        peer = session.extra = Peer(session.etid, uid, info, sock, session, node=node)
        peer.phantom = True if node else None
    elif not peer.tid:  # requested before the client sent its uid and info
        peer.uid, peer.info = text_of(session.uid), text_of(session.info)
    peer.tid = session.etid
    return peer


def info_of(session: BrokerClient) -> Info:
    """Return the `Info` of a client: the same object for each call."""
    origin = session.origin
    if origin.info is None:  # the same object for `authenticate` and `onconnect`: applications add entries
        request = origin.request
        origin.info = Info(
            arg=origin.arg,
            seed=session.seed,
            uid=text_of(session.uid),
            info=text_of(session.info),
            sock=peer_of(session).sock,
            request=request,
            restored=request is None,
            **_details(request),
        )
        if (user := peer_of(session).user) is not None:
            origin.info["uname"] = user
    info: Info = origin.info
    return info


def _details(request: Any) -> dict[str, Any]:
    """Return the entries of `Info` that come from a request of smqrt or from a WSGI environ."""
    if request is None:  # the client was connected before this process started
        return {"url": "", "data": {}, "header": HeaderFields(()), "session": None, "uname": None}
    if isinstance(request, dict):
        # The environ of WSGI has header fields as HTTP_ACCEPT_LANGUAGE (PEP 3333).
        fields = [(name[5:].replace("_", "-"), value) for name, value in request.items() if name.startswith("HTTP_")]
        return {
            "url": request.get("SCRIPT_NAME", "") + request.get("PATH_INFO", ""),
            "data": _parameters(request.get("QUERY_STRING", "")),
            "header": HeaderFields(fields),
            "session": None,
            "uname": request.get("REMOTE_USER"),
        }
    find_session = request.env.get("find_session")
    return {
        "url": request.path,
        "data": _parameters(request.query),
        "header": HeaderFields(request.fields()),
        "session": find_session(request) if find_session else None,
        "uname": page_user(request),
    }


def _parameters(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
