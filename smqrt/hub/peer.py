"""What applications know of a client: its peer, and what `authenticate` and `onconnect` are told of its request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypedDict
from urllib.parse import parse_qsl

from smqrt.broker.session import Session
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.net.peersocket import PeerSocket
from smqrt.wire.smq import ConnackCode


class Refused(SmqrtError):
    """Raised by `authenticate` instead of returning a code: the client may not come in.

    Args:
        code: 1 to 6 (specification: smq.md §1.2).
        reason: a text for the client.

    Raises:
        ArgumentError: the code is none.
    """

    def __init__(self, code: int = ConnackCode.ACCESS_DENIED, reason: str | bytes = "") -> None:
        if not is_number(code) or not 1 <= code <= 6:
            raise ArgumentError(f"code: a number from 1 to 6 is needed, not {code!r}")
        super().__init__(code, reason)
        self.code, self.reason = int(code), reason


class Header(dict[str, str]):
    """The fields of a request's head; names are found in any case. Fields of one name are joined by commas."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        for name, value in pairs:
            self[name.lower()] = f"{self[name]}, {value}" if name in self else value

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, `default` when there is none."""
        return super().get(name.lower(), default)


class Info(TypedDict):
    """What `authenticate` and `onconnect` are told of a client: the same object for both."""

    arg: Any
    """The second argument of `connect`."""
    seed: int
    """The number that the client was sent, for hashing its password."""
    uid: bytes
    info: str | bytes
    """What the client says about itself."""
    sock: PeerSocket
    request: Any
    """The request, or the WSGI environ."""
    url: str
    """The path of the request."""
    data: dict[str, str]
    """The parameters of the query."""
    header: Header
    session: Any
    """The browser's session (`smqrt.http.sessions.Session`), None without one."""
    uname: str | None
    """The user whom the web server has authenticated: WSGI's `REMOTE_USER`."""


@dataclass(eq=False)
class Peer:
    """A connected client, as callbacks see it; `data` is free for the application. May be a key of dicts.

    Attributes:
        tid: the ETID.
        uid: as the client sent it.
        info: the client's own description.
        sock: its socket; `sock.peername()` tells the address.
        phantom: whether it is connected to another node of a cluster.
    """

    tid: int
    uid: bytes
    info: str | bytes
    sock: PeerSocket
    _session: Any = field(repr=False)
    data: dict[str, Any] = field(default_factory=dict)
    phantom: bool = False

    @property
    def topics(self) -> dict[int, PeerSocket] | None:
        """The topics it subscribes to: id to its socket; None when there are none."""
        return dict.fromkeys(self._session.topics or (), self.sock) or None

    @property
    def dropped(self) -> int:
        """How many messages it missed because it did not read."""
        return int(self._session.outbox.dropped)


def peer_of(session: Any) -> Peer:
    """The peer of a session or of the server's own client: the same one every time."""
    peer = session.extra
    if not isinstance(peer, Peer):
        peer = session.extra = Peer(session.etid, session.uid, text_of(session.info), PeerSocket(session), session)
    peer.tid = session.etid
    return peer


def info_of(session: Session) -> Info:
    """What is known of the request that opened a connection: the same object every time."""
    origin = session.origin
    if origin.info is None:
        request = origin.request
        details = _of_environ(request) if isinstance(request, dict) else _of_request(request)
        origin.info = {
            "arg": origin.arg,
            "seed": session.seed,
            "uid": session.uid,
            "info": text_of(session.info),
            "sock": peer_of(session).sock,
            "request": request,
            **details,
        }
    info: Info = origin.info
    return info


def _of_request(request: Any) -> dict[str, Any]:
    find_session = request.env.get("find_session")
    return {
        "url": request.path,
        "data": _parameters(request.query),
        "header": Header(request.headers),
        "session": find_session(request) if find_session else None,
        "uname": None,
    }


def _of_environ(environ: dict[str, Any]) -> dict[str, Any]:
    fields = [(name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_")]
    return {
        "url": environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""),
        "data": _parameters(environ.get("QUERY_STRING", "")),
        "header": Header(fields),
        "session": None,
        "uname": environ.get("REMOTE_USER"),
    }


def _parameters(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))


def text_of(name: Any) -> Any:
    """A name as applications see it: str, or bytes when it is not UTF-8."""
    try:
        return name.decode() if isinstance(name, bytes) else name
    except UnicodeDecodeError:
        return name


def is_number(value: Any) -> bool:
    """Whether it is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
