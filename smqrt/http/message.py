"""One exchange: the request as handlers see it, and the connection they may take away."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

from smqrt.http.access import Access, Cors
from smqrt.http.body import URLENCODED, Body, BodyMemory, Form, HttpLimits, Posted, Source, media_type
from smqrt.http.forms import as_text, parse_parameters
from smqrt.http.head import Head, parse
from smqrt.http.headers import HttpError
from smqrt.http.logins.registry import Login, Logins
from smqrt.http.response import Response, ResponseConnection
from smqrt.http.sessions import HttpSession
from smqrt.loop.readiness import Watcher
from smqrt.loop.scheduling import Turn
from smqrt.transport.origins import Origins
from smqrt.transport.tls import Address, Transport

log = logging.getLogger("smqrt")

_SUBPROTOCOL, _SHOWN_OFFER = "Sec-WebSocket-Protocol", 100


class RequestServer(Protocol):
    """What a request needs of its server, which is `smqrt.http.server.HttpServer`."""

    access: Access
    limits: HttpLimits
    bodies: BodyMemory
    logins: Logins

    def accepted(self, transport: Transport, peer: Address, secure: bool = False, data: bytes = b"") -> None:
        """Take a connection back."""


class RequestConnection(Source, ResponseConnection, Protocol):
    """What a request and its response need of their connection, which is `smqrt.http.server.HttpConnection`."""

    peer: tuple[str, int]
    secure: bool
    transport: Transport

    @property
    def server(self) -> RequestServer:
        """Where it belongs."""

    def release(self) -> tuple[Transport, Watcher, bytes]:
        """Return transport, stopped READ watcher and unused bytes away."""


@dataclass(slots=True)
class Detached:
    """A connection that left HTTP.

    Attributes:
        transport: the non-blocking socket or `TlsTransport`, now the taker's to close.
        watcher: its READ watcher, stopped; `watcher.start(callback)` begins to read.
        data: what arrived behind the head.
        secure: whether the transport is TLS.
        request: the request that led here; its response is dead.
        server: the `HttpServer` that takes it back with `accepted`.
        unsent: what was written to a response that had begun and is to be sent first.
        is_chunked: whether what follows it has to be sent in chunks, and ended with an empty one.
    """

    transport: Transport
    watcher: Watcher
    data: bytes
    secure: bool
    request: Request
    server: RequestServer
    unsent: bytes = b""
    is_chunked: bool = False


class Request(Head, Posted):
    """A request; see `Head` for what its head says.

    Attributes:
        peer: address and port of the client, also behind a trusted proxy.
        secure: whether the client uses https, with this server or with a trusted proxy in front of it.
        prefix: the path under which such a proxy mounts the server, for URLs that the client is given.
        transport: the socket or `TlsTransport`; to read facts from, not bytes.
        response: the answer under way.
        env: free for the layers above.
        includes, forwards: depth of server-side includes and forwards (see `tree.Root.internal`).
        cors: the rules of the application that is asked, for pages of other hosts; None for those of the server.
        is_fresh: whether authenticators and prologues are asked: for what came from the client, and for what a redirect
            within the server searches; forwards and includes go around them (spec: bas-api §17 A1).
    """

    __slots__ = (
        "_body",
        "_connection",
        "_form",
        "_is_over",
        "_whole",
        "cors",
        "env",
        "forwards",
        "includes",
        "is_fresh",
        "peer",
        "prefix",
        "response",
        "running",
        "secure",
        "transport",
    )

    def __init__(self, head: bytes, connection: RequestConnection) -> None:
        self.adopt(parse(head))
        self._connection = connection
        self._body: Body | None = None
        self._whole: bytes | None = None
        self._form: Form | None = None
        self.peer: tuple[str, int] = connection.peer
        self.secure: bool = connection.is_https
        self.prefix = ""
        self.transport: Transport = connection.transport
        self.env: dict[str, Any] = {}
        self.includes = 0
        self.forwards = 0
        self.is_fresh = True
        self.cors: Cors | None = None
        self._is_over = False
        self.running: tuple[object, ...] = ()
        self.response = Response(connection, self.method, self.version)

    def speaks_for(
        self, client: tuple[str, int] | None, secure: bool | None = None, host: str | None = None, prefix: str = ""
    ) -> None:
        """Take what a trusted proxy says of the client for true.

        Args:
            client: its address and port.
            secure: whether it uses https.
            host: what it has sent as Host.
            prefix: the path under which the proxy mounts the server.

        Raises:
            BadRequest: `host` is none.
        """
        self.peer = client or self.peer
        self.prefix = prefix
        if secure is not None:
            self.secure = self.response.secure = secure
        if host is not None:
            self.be_asked_for(host)

    @property
    def local(self) -> tuple[str, int]:
        """Address and port the client connected to."""
        host, port = self.transport.getsockname()[:2]
        return host, port

    @property
    def authority(self) -> str:
        """Host and port as the client named them, or those it connected to, when it named none (HTTP/1.0)."""
        named = self.get("host")
        if named:
            return named
        host, port = self.local
        host = f"[{host}]" if ":" in host else host
        return host if port == (443 if self.secure else 80) else f"{host}:{port}"

    @property
    def initial(self) -> bool:
        """Whether neither a forward nor an include is under way."""
        return not (self.includes or self.forwards)

    @property
    def has_body(self) -> bool:
        """Whether the client announced a body of at least one byte (or of unknown length)."""
        return self.content_length != 0

    @property
    def body_limit_bytes(self) -> int:
        """The server's limit for a body that is read as a whole."""
        return self._connection.server.limits.body_bytes

    def body(self, limit_bytes: int | None = None) -> bytes:
        """Return the whole body; blocks the greenlet until it is there.

        Args:
            limit_bytes: instead of the server's limit.

        Raises:
            HttpError: 413 over the limit, 408 when it comes too slowly, 400 when it is malformed, 503 when the bodies
                of all requests together are over theirs.
        """
        if self._whole is None:
            self._whole = self.rest(limit_bytes)
        return self._whole

    @property
    def is_read(self) -> bool:
        """Whether the body was read as a whole, and is kept."""
        return self._whole is not None

    def rest(self, limit_bytes: int | None = None) -> bytes:
        """Return what is left of the body, as a whole; nothing when it was read. Args and raises as `body`."""
        return self._reader().whole(self.body_limit_bytes if limit_bytes is None else limit_bytes)

    def _posted(self) -> Form:
        if self._form is None:
            self._form = Form(self)
        return self._form

    def chunks(self, size_bytes: int = 65536) -> Iterator[bytes]:
        """Iterate over the body in pieces of up to `size_bytes`, without a limit to the whole; also when a login form
        was looked for in it before. Raises as `body`."""
        if self._whole is not None:
            return _cut(self._whole, size_bytes)
        return self._reader().pieces(size_bytes)

    def params(self) -> list[tuple[str, str]]:
        """Return the parameters of the query, then those of a urlencoded body, which is read for it. Raises as
        `body`."""
        return [(as_text(name), as_text(value)) for name, value in self.raw_params()]

    def raw_params(self) -> list[tuple[bytes, bytes]]:
        """Return the parameters as `params` does, as bytes. Raises as `body`."""
        pairs = parse_parameters(self.query.encode("ascii"))
        if self.has_body and media_type(self) == URLENCODED:
            pairs += parse_parameters(self.body(), Turn().yield_if_due)
        return pairs

    @property
    def logins(self) -> Logins:
        """The logins of the server."""
        return self._connection.server.logins

    @overload
    def session(self, create: Literal[True]) -> HttpSession: ...
    @overload
    def session(self, create: bool = False) -> HttpSession | None: ...
    def session(self, create: bool = False) -> HttpSession | None:
        """Return the session of the client, in which an application keeps what it likes (spec: bas-api §2.1).

        Args:
            create: make one when there is none, and set its cookie; the response must not have begun.

        Returns:
            None when there is none.

        Raises:
            RuntimeError: the response has begun.
        """
        sessions = self.logins.sessions
        session = sessions.of(self)
        if session is not None or not create:
            return session
        if self.response.committed or self._is_over:
            raise RuntimeError("the response has begun: session(create=True) must come before it")
        return sessions.begin(self)

    def user(self) -> Login | None:
        """Return who is logged in; None when nobody is, also when the session's cookie comes from another address
        (spec: bas-api §2.1)."""
        return self.logins.of(self)

    def login(self, name: str | None = None, maxusers: int = 1, recycle: bool = True) -> bool | str:
        """Log the client in without a password; the response must not have begun (spec: bas-api §2.1).

        Args:
            name: of the user; None for an anonymous login.
            maxusers: sessions that the user may have at the same time.
            recycle: end the oldest of them for this one; otherwise it is refused.

        Returns:
            whether that was done; the user's name when somebody is logged in already.

        Raises:
            RuntimeError: the response has begun.
        """
        present = self.user()
        if present is not None:
            return present.name
        if self.response.committed:
            raise RuntimeError("the response has begun: login() must come before it")
        return self.logins.begin(self, name, maxusers=maxusers, recycle=recycle) is not None

    def logout(self, everywhere: bool = False) -> bool:
        """Log the client out and end its session; return whether somebody was logged in.

        Args:
            everywhere: end all sessions of the user.
        """
        return self.logins.end(self, everywhere)

    @property
    def access(self) -> Access:
        """What the server asks of requests."""
        return self._connection.server.access

    def refuse_foreign(self, more: Origins | None = None) -> bool:
        """Answer 403 to a page of another host, see `Access.check_origin`; return whether that was done. Raises as
        `Response.error`."""
        try:
            self.access.check_origin(self, more)
        except HttpError as error:
            self.response.error(error.status, error.detail)
            return True
        return False

    def upgrade_lines(self, subprotocol: str | None = None) -> bytes:
        """Return the header lines that the application adds to the 101 of a WebSocket: the sub-protocol and cookies.

        Args:
            subprotocol: that is chosen; None for the field Sec-WebSocket-Protocol of the response, if it has one.

        Raises:
            HttpError: 400, the client has not offered it (RFC 6455 §4.2.2): it would close the connection.
        """
        fields = [(name, value) for name, value in self.response.headers if name.lower() == "set-cookie"]
        chosen = subprotocol
        if chosen is None:
            chosen = ", ".join(v for name, v in self.response.headers if name.lower() == _SUBPROTOCOL.lower())
        if chosen:
            offered = [one.strip() for one in (self.get(_SUBPROTOCOL) or "").split(",")]
            if chosen not in offered:
                raise HttpError(400, _not_offered(chosen, ", ".join(filter(None, offered))))
            fields.append((_SUBPROTOCOL, chosen))
        return "".join(f"{name}: {value}\r\n" for name, value in fields).encode("latin-1")

    def report_failure(self, language: str, failure: str) -> None:
        """Log a failure of a page or a directory function under a number, and put it into the response, which is open;
        `Access.shows_errors` decides whether the client sees more than the number (spec: runtime §4; design:
        reliability §5).

        Nothing sent yet: status 500 and plain text, or `{"error": "lua", "emsg": ...}` for a request by script. Already
        under way: a block of HTML behind what was sent.

        Args:
            language: of the code that failed, "Lua" or "Python".
            failure: the message with file and line, and the traceback below it.
        """
        number = self.log_failure(failure)
        if not self.access.shows_errors(self):
            failure = f"number {number} in the server's log"
        by_script = (self.get("X-Requested-With") or "").lower() == "xmlhttprequest"
        self.response.show_failure(language, failure, by_script)

    def log_failure(self, failure: str) -> str:
        """Log a failure of a page or a directory function; return its number in the log."""
        number = secrets.token_hex(4)
        log.error("error %s in %s: %s", number, self.path, failure)
        return number

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was taken away."""
        return self.response.committed or self.response.ended

    def detach(self, within: bool = False, more: bytes = b"") -> Detached:
        """Take the connection away from HTTP: nothing is sent, the response is dead.

        Args:
            within: also when the response has begun; the taker goes on with its body.
            more: belongs to the body of such a response, behind what was written so far.

        Raises:
            RuntimeError: the response has begun, or the connection was taken before.
        """
        if self.response.committed and not within:
            raise RuntimeError("the response has begun: detach() must come before it")
        if self.response.ended:
            raise RuntimeError("the response has ended: there is nothing to detach")
        unsent, is_chunked = self.response.hand_over(more) if self.response.committed else (b"", False)
        self.response.ended = True
        slot = self.env.get("slot")
        if slot is not None:
            slot.close()  # who has the connection from now on runs no request
        transport, watcher, data = self._connection.release()
        secure, server = self._connection.secure, self._connection.server
        return Detached(transport, watcher, data, secure, self, server, unsent, is_chunked)

    def skip_body(self) -> bool:
        """Skip what is left of the body as far as it has arrived; return whether the next request begins behind it.

        Raises:
            BadRequest: what arrived is no chunked body.
        """
        return self.content_length == 0 or self._reader().skip_buffered()

    @property
    def body_is_here(self) -> bool:
        """Whether all of the body has arrived, so that it is known where the next request begins."""
        return self.content_length == 0 or self._reader().is_here

    def hold(self, count: int) -> None:
        """Count `count` bytes of the body as held in memory until the request is over, as `body` does by itself.

        Raises:
            HttpError: 503, the bodies of all requests together are over their limit.
        """
        self._reader().hold(count)

    def tap(self, max_bytes: int) -> None:
        """Keep a copy of the first `max_bytes` of the body that somebody reads, for `tapped`."""
        self._reader().tap(max_bytes)

    def tapped(self) -> bytes:
        """Return what `tap` has kept."""
        return b"" if self._body is None else self._body.tapped

    def forget(self) -> None:
        """Called when the request is over: a body that was read as a whole counts no more, and the layers above are
        told by their `env`, now and not when garbage is collected.
        """
        self._is_over = True
        self.env.clear()
        self._whole = self._form = None
        if self._body is not None:
            self._body.forget()

    def _reader(self) -> Body:
        if self._is_over:
            raise RuntimeError("the request is over: read its body before the function that answers it returns")
        if self._body is None:
            source, server = self._connection, self._connection.server
            self._body = Body(source, self.content_length, self.expects_continue, server.limits, server.bodies)
        return self._body


def _cut(data: bytes, size_bytes: int) -> Iterator[bytes]:
    return (data[at : at + size_bytes] for at in range(0, len(data), size_bytes))


def _not_offered(chosen: str, offer: str) -> str:
    offers = f"offers {offer[:_SHOWN_OFFER]}" if offer else "offers none"
    return f"The application chose the WebSocket sub-protocol {chosen!r}, the client {offers}: offer it."
