"""HTTP requests, detached connections and uploads."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

from smqrt.http.access import Access, Cors
from smqrt.http.body import URLENCODED, Body, BodyAndCookies, BodyMemory, Form, HttpLimits, Source, media_type
from smqrt.http.forms import Field, File, MultipartError, as_text, boundary_of, parse_parameters, read_form
from smqrt.http.head import Head, parse
from smqrt.http.headers import BadRequest, ClientGoneError, HttpError
from smqrt.http.logins.registry import Login, Logins
from smqrt.http.open_files import NewFile
from smqrt.http.resources import Io, IoError
from smqrt.http.response import Response, ResponseConnection
from smqrt.http.sessions import HttpSession
from smqrt.loop.scheduling import Turn, Watcher
from smqrt.transport.origins import Origins
from smqrt.transport.tls import Address, Transport

log = logging.getLogger("smqrt")

SLOT = "slot"
"""Key in `Request.env` of the `RequestSlots` of which the request has a slot; None after it was returned."""
_SUBPROTOCOL, _MAX_SHOWN_OFFER = "Sec-WebSocket-Protocol", 100  # characters in an error message


class RequestServer(Protocol):
    """The parts of `smqrt.http.server.HttpServer` that a request uses."""

    access: Access
    limits: HttpLimits
    bodies: BodyMemory
    logins: Logins

    def accepted(self, transport: Transport, peer: Address, secure: bool = False, data: bytes = b"") -> None:
        """Serve a connection again."""


class RequestConnection(Source, ResponseConnection, Protocol):
    """The parts of `smqrt.http.server.HttpConnection` that a request and its response use."""

    peer: tuple[str, int]
    secure: bool
    transport: Transport

    @property
    def server(self) -> RequestServer:
        """The server of the connection."""

    def release(self) -> tuple[Transport, Watcher, bytes]:
        """Detach and return the transport, its stopped READ watcher and the unused bytes."""


@dataclass(slots=True)
class Detached:
    """A connection that was detached from HTTP.

    Attributes:
        transport: the non-blocking socket or `TlsTransport`; the new owner closes it.
        watcher: its stopped READ watcher; `watcher.start(callback)` begins to read.
        data: bytes received after the head.
        secure: whether the transport is TLS.
        request: the request; its response has ended.
        server: the `HttpServer`; its `accepted` serves the connection again.
        unsent: bytes written to a response that had begun, to be sent first.
        is_chunked: whether further bytes must be sent in chunks, with an empty chunk at the end.
    """

    transport: Transport
    watcher: Watcher
    data: bytes
    secure: bool
    request: Request
    server: RequestServer
    unsent: bytes = b""
    is_chunked: bool = False


class Request(Head, BodyAndCookies):
    """A request. See `Head` for the attributes of its head.

    Attributes:
        peer: address and port of the client, also behind a trusted proxy.
        secure: whether the client uses https, to this server or to a trusted proxy.
        prefix: path under which a trusted proxy mounts the server, for URLs in responses.
        transport: the socket or `TlsTransport`, for its properties. Do not read from it.
        response: the response.
        env: values that other modules store for the request, by name.
        includes, forwards: depth of server-side includes and forwards (see `tree.Root.internal`).
        cors: CORS rules of the application, None for those of the server.
        running: the directories whose function or page is running for the request, the outermost first.
        is_repeatable: whether nothing but the tree and files has been asked for the response so far.
        sent_file: the file that was sent, if an equal request would get the same response; otherwise None.
        needs_checks: whether authenticators and prologues check the request. True for requests of clients and for
            redirects within the server; false in forwards and includes (spec: bas-api §17 A1).
    """

    __slots__ = (
        "_body", "_connection", "_form", "_is_over", "_whole", "cors", "env", "forwards", "includes", "is_repeatable",
        "needs_checks", "peer", "prefix", "response", "running", "secure", "sent_file", "transport",
    )  # fmt: skip

    def __init__(self, head: bytes, connection: RequestConnection) -> None:
        self.copy_from(parse(head))
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
        self.needs_checks = True
        self.cors: Cors | None = None
        self.is_repeatable = True
        self.sent_file: Any = None
        self._is_over = False
        self.running: tuple[object, ...] = ()
        self.response = Response(connection, self.method, self.version)

    def apply_claim(
        self, client: tuple[str, int] | None, secure: bool | None = None, host: str | None = None, prefix: str = ""
    ) -> None:
        """Apply the values of a trusted proxy.

        Args:
            client: address and port of the client.
            secure: whether the client uses https.
            host: the Host field of the client.
            prefix: path under which the proxy mounts the server.

        Raises:
            BadRequest: `host` is malformed.
        """
        self.peer = client or self.peer
        self.prefix = prefix
        if secure is not None:
            self.secure = self.response.secure = secure
        if host is not None:
            self.replace_host(host)

    @property
    def local(self) -> tuple[str, int]:
        """Local address and port of the connection; "unix" and 0 for a Unix socket."""
        host, port = self.transport.getsockname()[:2]
        return host, port

    @property
    def authority(self) -> str:
        """Host and port in the Host field, or those of the connection without one (HTTP/1.0)."""
        named = self.get("host")
        if named:
            return named
        host, port = self.local
        if not port:  # a Unix socket
            return "localhost"
        host = f"[{host}]" if ":" in host else host
        return host if port == (443 if self.secure else 80) else f"{host}:{port}"

    @property
    def initial(self) -> bool:
        """Whether the request is neither forwarded nor included."""
        return not (self.includes or self.forwards)

    @property
    def has_body(self) -> bool:
        """Whether the client announced a body of at least one byte or of unknown length."""
        return self.content_length != 0

    @property
    def body_limit_bytes(self) -> int:
        """Limit for a body that is read as a whole."""
        return self._connection.server.limits.body_bytes

    def body(self, limit_bytes: int | None = None) -> bytes:
        """Return the whole body; blocks the greenlet until it has arrived.

        Args:
            limit_bytes: limit instead of the server's.

        Raises:
            HttpError: 413, it is over the limit; 408, it arrives too slowly; 400, it is malformed; 503, the memory for
                bodies is full.
        """
        if self._whole is None:
            self._whole = self.reader().whole(self.body_limit_bytes if limit_bytes is None else limit_bytes)
        return self._whole

    @property
    def is_read(self) -> bool:
        """Whether the body was read as a whole and is in memory."""
        return self._whole is not None

    def _body_form(self) -> Form:
        if self._form is None:
            self._form = Form(self)
        return self._form

    def chunks(self, size_bytes: int = 65536) -> Iterator[bytes]:
        """Iterate over the body in pieces of up to `size_bytes`, without a limit for the body. Raises as `body`."""
        if self._whole is not None:
            whole = self._whole  # read before, for example by an authenticator that looked for a login form
            return (whole[at : at + size_bytes] for at in range(0, len(whole), size_bytes))
        return self.reader().pieces(size_bytes)

    def params(self) -> list[tuple[str, str]]:
        """Return the parameters of the query, then those of a urlencoded body. Raises as `body`."""
        return [(as_text(name), as_text(value)) for name, value in self.raw_params()]

    def raw_params(self) -> list[tuple[bytes, bytes]]:
        """Return the parameters like `params`, as bytes. Raises as `body`."""
        pairs = parse_parameters(self.query.encode("ascii"))
        if self.has_body and media_type(self) == URLENCODED:
            pairs += parse_parameters(self.body(), Turn().yield_if_due)  # decoding 4 MiB would block the loop
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
        """Return the session of the client, which stores values of an application (spec: bas-api §2.1).

        Args:
            create: create a session and set its cookie if there is none. The response must not have begun.

        Returns:
            the session, or None.

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
        """Return the login of the client, or None. A session cookie from another address has no login (spec: bas-api
        §2.1)."""
        return self.logins.of(self)

    def login(self, name: str | None = None, maxusers: int = 1, recycle: bool = True) -> bool | str:
        """Log the client in without a password; the response must not have begun (spec: bas-api §2.1).

        Args:
            name: name of the user, None for an anonymous login.
            maxusers: largest number of sessions of the user at the same time.
            recycle: end the oldest session if `maxusers` is reached; otherwise the login is rejected.

        Returns:
            whether the login succeeded; the user's name if the client is logged in already.

        Raises:
            RuntimeError: the response has begun.
        """
        current = self.user()
        if current is not None:
            return current.name
        if self.response.committed:
            raise RuntimeError("the response has begun: login() must come before it")
        return self.logins.begin(self, name, maxusers=maxusers, recycle=recycle) is not None

    def logout(self, everywhere: bool = False) -> bool:
        """Log the client out and end its session; return whether it was logged in.

        Args:
            everywhere: end all sessions of the user.
        """
        return self.logins.end(self, everywhere)

    @property
    def access(self) -> Access:
        """The access rules of the server."""
        return self._connection.server.access

    def reject_denied_origin(self, more: Origins | None = None) -> bool:
        """Respond with 403 if the page that sent the request has a denied origin, see `Access.check_origin`.

        Returns:
            whether the request was rejected.

        Raises:
            ClientGoneError: the client has closed the connection.
        """
        try:
            self.access.check_origin(self, more)
        except HttpError as error:
            self.response.error(error.status, error.detail)
            return True
        return False

    def upgrade_lines(self, subprotocol: str | None = None) -> bytes:
        """Return the application's header lines for the 101 of a WebSocket: sub-protocol and cookies.

        Args:
            subprotocol: the sub-protocol; None for the response's field Sec-WebSocket-Protocol, if set.

        Raises:
            HttpError: 400, the client has not offered the sub-protocol. A client closes such a connection (RFC 6455
                §4.1).
        """
        fields = [(name, value) for name, value in self.response.headers if name.lower() == "set-cookie"]
        chosen = subprotocol
        if chosen is None:  # the application may have set the field of the response instead
            chosen = ", ".join(v for name, v in self.response.headers if name.lower() == _SUBPROTOCOL.lower())
        if chosen:
            offered = [one.strip() for one in (self.get(_SUBPROTOCOL) or "").split(",")]
            if chosen not in offered:
                offer = ", ".join(filter(None, offered))[:_MAX_SHOWN_OFFER] or "none"
                raise HttpError(
                    400, f"WebSocket sub-protocol {chosen!r} is not offered by the client, which offers {offer}."
                )
            fields.append((_SUBPROTOCOL, chosen))
        return "".join(f"{name}: {value}\r\n" for name, value in fields).encode("latin-1")

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was detached."""
        return self.response.committed or self.response.ended

    def detach(self, within: bool = False, more: bytes = b"") -> Detached:
        """Detach the connection from HTTP and end the response without sending anything.

        Args:
            within: allow this also after the response has begun; the new owner continues its body.
            more: further bytes of the body of such a response.

        Raises:
            RuntimeError: the response has begun, or the connection was detached before.
        """
        if self.response.committed and not within:
            raise RuntimeError("the response has begun: detach() must come before it")
        if self.response.ended:
            raise RuntimeError("the response has ended: there is nothing to detach")
        unsent, is_chunked = self.response.detach(more) if self.response.committed else (b"", False)
        self.response.ended = True
        slots = self.env.get(SLOT)
        if slots is not None:
            self.env[SLOT] = None  # a detached connection does not count for the request limit of its application
            slots.release()
        transport, watcher, data = self._connection.release()
        secure, server = self._connection.secure, self._connection.server
        return Detached(transport, watcher, data, secure, self, server, unsent, is_chunked)

    def skip_body(self) -> bool:
        """Discard the bytes of the body that have arrived, without waiting; return whether the body is complete.

        Raises:
            BadRequest: the chunked body is malformed.
        """
        return self.content_length == 0 or self.reader().skip_buffered()

    @property
    def body_has_arrived(self) -> bool:
        """Whether all of the body has arrived, so that the beginning of the next request is known."""
        return self.content_length == 0 or self.reader().has_arrived

    def tapped(self) -> bytes:
        """Return the copied beginning of the body, see `Body.tap`."""
        return b"" if self._body is None else self._body.tapped

    def forget(self) -> None:
        """End the request: release the memory of its body and the values in `env`."""
        self._is_over = True
        self.env.clear()  # values in it may refer to the request; without this they need garbage collection
        self._whole = self._form = None
        if self._body is not None:
            self._body.forget()

    def reader(self) -> Body:
        """Return the reader of the body.

        Raises:
            RuntimeError: the request has ended.
        """
        if self._is_over:
            raise RuntimeError("the request has ended: read its body before the directory function returns")
        if self._body is None:
            source, server = self._connection, self._connection.server
            self._body = Body(source, self.content_length, self.expects_continue, server.limits, server.bodies)
        return self._body


def report_failure(request: Request, language: str, failure: str) -> None:
    """Log a failure of a page or a directory function with a number, and write it into the open response.

    `Access.shows_errors` decides whether the client sees more than the number (spec: runtime §4). Before the head is
    sent, the response is status 500 with plain text. For a request from a script it is `{"error": "lua", "emsg": ...}`.
    After the head, the failure is appended as a block of HTML.

    Args:
        request: the request of the page or function.
        language: language of the code, "Lua" or "Python".
        failure: message with file and line, followed by the traceback.
    """
    number = log_failure(request, failure)
    if not request.access.shows_errors(request):
        failure = f"number {number} in the server's log"
    by_script = (request.get("X-Requested-With") or "").lower() == "xmlhttprequest"
    request.response.show_failure(language, failure, by_script)


def log_failure(request: Request, failure: str) -> str:
    """Log a failure of a page or a directory function; return its number in the log."""
    number = secrets.token_hex(4)
    log.error("error %s in %s: %s", number, request.path, failure)
    return number


# ---- Uploads, written to files in bounded memory

PIECE_BYTES = 256 << 10
"""Bytes per write by a thread. A call in a thread costs 60 us; each upload has up to twice this size in memory."""
_RECEIVED_BYTES = 64 << 10


class UploadError(Exception):
    """An upload failed.

    Attributes:
        word: error word for applications (spec: bas-api §15).
        detail: the cause, as a sentence.
    """

    def __init__(self, word: str, detail: str) -> None:
        super().__init__(f"{word}: {detail}")
        self.word, self.detail = word, detail


class UploadWatcher(Protocol):
    """Callbacks of an upload; they may block."""

    def begin(self, name: str) -> bool:
        """Called before each file with its name; return whether to accept it."""

    def wants_more(self) -> bool:
        """Return whether to continue; called for every piece."""

    def end(self) -> None:
        """Called when all files are complete and closed."""


def is_form(request: Request) -> bool:
    """Return whether the body is a form with files."""
    return boundary_of(request.get("content-type") or "") is not None


def receive(request: Request, io: Io, name: str, watcher: UploadWatcher) -> None:
    """Write the body of a request, or each file of a form in it, to a file; blocks the greenlet.

    Args:
        request: a request whose body was not read.
        io: stores the file. An incomplete file is removed; on a disk, an existing file of that name then remains.
        name: name of the file. The form's file name is appended to a folder ("" or a name with "/" at its end); it must
            not be hidden.
        watcher: receives the events.

    Raises:
        UploadError: the upload failed.
        ClientGoneError: the client has closed the connection.
    """
    boundary = boundary_of(request.get("content-type") or "")
    try:
        if boundary is None:
            if not name or name.endswith("/"):
                raise IoError("invalidname", "the body is not a form, so it has no file name: add one to the path")
            pieces = request.chunks(_RECEIVED_BYTES)
            if not watcher.begin(name):
                return
            with _Target(io, name) as target:
                for piece in pieces:
                    if not watcher.wants_more():
                        return
                    target.write(piece)
                target.finish()
            watcher.end()
        else:
            _receive_form(request, boundary, io, name, watcher)
    except IoError as error:
        raise UploadError(error.word, str(error)) from None
    except OSError as error:
        if isinstance(error, ClientGoneError):  # a ConnectionError, and so an OSError too
            raise
        raise UploadError(IoError.of(error, name).word, str(error)) from None
    except MultipartError as error:
        raise UploadError("failed", str(error)) from None
    except BadRequest as error:
        raise UploadError("socketreadfailed", str(error)) from None
    except HttpError as error:
        raise UploadError("timeout" if error.status == 408 else "mem", str(error)) from None


def _receive_form(request: Request, boundary: bytes, io: Io, name: str, watcher: UploadWatcher) -> None:
    # `hold` counts the values of fields, which are kept in memory; files are written in pieces.
    events = read_form(request.chunks(_RECEIVED_BYTES), boundary, request.reader().hold)
    event = next(events, None)
    found = False
    while event is not None:
        if not isinstance(event, File):
            assert isinstance(event, Field)
            event = next(events, None)
            continue
        found = True
        path = name
        if not name or name.endswith("/"):
            if event.filename.startswith(".") or not event.filename:
                raise IoError("invalidname", f"file name {event.filename!r} in the form is hidden or empty")
            path += event.filename
        if not watcher.begin(path):
            return
        with _Target(io, path) as target:
            event = next(events, None)
            while isinstance(event, bytes):
                if not watcher.wants_more():
                    return
                target.write(event)
                event = next(events, None)
            target.finish()
    if not found:
        raise UploadError("failed", "the form has no file")
    watcher.end()


class _Target:
    """A buffered file for an upload. The context manager removes it if it is incomplete."""

    def __init__(self, io: Io, name: str) -> None:
        self._file = NewFile(io, name)
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        if self._buffered_bytes >= PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces, self._buffered_bytes = self._pieces, [], 0
        if pieces:
            self._file.write(*pieces)

    def finish(self) -> None:
        self._flush()
        self._file.finish()

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(IoError):
            self._file.abort()
