"""Buffered HTTP responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple, Protocol

from smqrt.http.headers import Headers, date_line, error_page, reason, set_cookie_field
from smqrt.loop.scheduling import Turn
from smqrt.smq.messages import json_bytes

BUFFER_BYTES = 8192  # a response up to this size is sent at once, with its length (spec: bas-api §2.2)
_OK = b"HTTP/1.1 200 OK\r\n"


class ResponseConnection(Protocol):
    """The parts of `smqrt.http.server.HttpConnection` that a response uses."""

    is_https: bool

    def can_keep_alive(self, is_over: bool) -> bool:
        """Return whether the connection can carry another request. `is_over`: whether the response is complete."""

    def send(self, data: bytes) -> None:
        """Send all of `data`; may block the greenlet. Raises ClientGoneError."""


class Draft(NamedTuple):
    """A saved response that has not been sent yet: status, header fields, body and its size in bytes."""

    status: int
    headers: Headers
    parts: tuple[bytes, ...]
    size: int


class Response:
    """A buffered response. A body up to BUFFER_BYTES is sent at once, with its length.

    Attributes:
        status: the status code.
        secure: whether the client uses https, to this server or to a trusted proxy.
        committed: whether the head was sent.
        ended: whether it is complete, or its connection was detached. Later writes are ignored.
        size: bytes of the body so far.
        close: whether to close the connection after the response.
        before_send: called before anything is sent; must not block.
        finishers: each receives the header lines and returns them with its own added. `reset` keeps the finishers.
    """

    __slots__ = (
        "_buffered", "_chunked", "_connection", "_headers", "_is_head", "_missing", "_parts", "_version", "before_send",
        "close", "committed", "ended", "finishers", "secure", "size", "status",
    )  # fmt: skip

    def __init__(self, connection: ResponseConnection, method: str, version: str) -> None:
        self._connection = connection
        self.secure = connection.is_https
        self._is_head = method == "HEAD"  # no reference to the request: the cycle would need garbage collection
        self._version = version
        self._parts: list[bytes] = []
        self._buffered = 0
        self._chunked = False
        self._missing: int | None = None  # missing bytes of the announced Content-Length
        self.status = 200
        self._headers: Headers | None = None  # created with the first field: most static files have none
        self.committed = False
        self.ended = False
        self.close = False
        self.size = 0
        self.before_send: Callable[[], object] | None = None
        self.finishers: tuple[Callable[[bytes], bytes], ...] = ()

    @property
    def headers(self) -> Headers:
        """Header fields. The server adds `Date`, `Connection` and the framing when it sends the head."""
        if self._headers is None:
            self._headers = Headers()
        return self._headers

    def is_untouched(self) -> bool:
        """Return whether no status, header field or body has been set."""
        return self._headers is None and self.status == 200 and not self.size

    def write(self, data: bytes | str) -> None:
        """Append to the body. Sends when the buffer is full, which may block the greenlet.

        Args:
            data: bytes, or text, which is sent as UTF-8 and is HTML unless a Content-Type was set before.

        Raises:
            ClientGoneError: the client has closed the connection.
        """
        if self.ended:
            return
        if isinstance(data, str):
            if not self.committed and not self.size and "content-type" not in self.headers:
                self.headers.set("Content-Type", "text/html; charset=utf-8")
            data = data.encode("utf-8", "surrogateescape")
        self._parts.append(data)
        self.size += len(data)
        self._buffered += len(data)
        if self._buffered > BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the head and the buffered body. Raises as `write`."""
        if self.ended:
            return
        if self.before_send is not None:
            self.before_send()
        head = b""
        if not self.committed:
            self._missing = self._declared_length()
            if self._missing is not None:
                framing = b"Content-Length: %d\r\n" % self._missing
            elif self._version == "1.0":
                self.close, framing = True, b""  # HTTP/1.0 has no chunks: the end of the stream ends the body
            else:
                self._chunked, framing = True, b"Transfer-Encoding: chunked\r\n"
            head = self._head(b"" if self.status in (204, 304) else framing)
            self.committed = True
        self._send(head + self._framed(self._take()))

    def end(self, data: bytes = b"") -> None:
        """Complete the response with a last piece of the body. Raises as `write`."""
        if self.ended:
            return
        if self.before_send is not None:
            self.before_send()
        if self._parts:
            self._parts.append(data)
            body = self._take()
        else:
            body = data
        self.size += len(data)
        self.ended = True
        if not self.committed:
            self.committed = True
            length = len(body)
            if self._is_head and not length:
                length = self._declared_length() or 0  # the length that a GET would have
            # RFC 9110 §8.6: a 1xx or 204 response must not have a length, and 304 needs none.
            has_length = self.status not in (204, 304) and self.status >= 200
            head = self._head(b"Content-Length: %d\r\n" % length if has_length else b"")
            self._connection.send(head + body if has_length and not self._is_head else head)
            return
        has_body = not self._has_no_body
        self._send(self._framed(body) + (b"0\r\n\r\n" if self._chunked and has_body else b""))
        if self._missing and has_body:
            self.close = True  # shorter than announced: only closing the connection shows that to the client

    def detach(self, more: bytes) -> tuple[bytes, bool]:
        """End a response whose head was sent. The new owner of the connection continues the body.

        Args:
            more: further bytes of the body.

        Returns:
            the unsent bytes, framed; and whether further bytes must be sent in chunks, with an empty chunk at the end.
        """
        unsent = self._framed(self._take() + more)
        self.ended = True
        return unsent, self._chunked and not self._has_no_body

    def send_ready(self, head: bytes, body: bytes) -> None:
        """End a response that `is_untouched` with a prepared head. Raises as `write`.

        Args:
            head: status line and header fields including the length, without `Date` and the empty line.
            body: the body.
        """
        if self.before_send is not None:
            self.before_send()
        self.committed = self.ended = True
        self.size = len(body)
        if self._is_head:
            body = b""  # the length in the head is that of a GET
        for finish in self.finishers:
            head = finish(head)
        self._connection.send(b"".join((head, self._connection_line(), date_line(), b"\r\n", body)))

    def reset(self, what: str = "all") -> None:
        """Discard the body ("buffer"), the header fields except cookies ("headers"), or both ("all").

        The status does not change (spec: bas-api §17).

        Raises:
            RuntimeError: the head was already sent.
        """
        if self.committed:
            raise RuntimeError("the response has begun: it cannot be reset")
        if what in ("all", "headers"):
            self.headers.clear()
        if what in ("all", "buffer"):
            self._take()
            self.size = 0

    def draft(self) -> Draft:
        """Return the state of the response, for `restore` after a `reset`."""
        return Draft(self.status, self.headers.copy(), tuple(self._parts), self.size)

    def restore(self, draft: Draft) -> None:
        """Restore the state of a draft, unless the head was sent meanwhile."""
        if not self.committed:
            self.status, self._headers, self.size = draft.status, draft.headers, draft.size
            self._parts = list(draft.parts)
            self._buffered = sum(map(len, draft.parts))

    def error(self, status: int, detail: str = "", headers: dict[str, str] | None = None) -> None:
        """End the response with an error page, replacing the body. Raises as `write` and `reset`."""
        if self.ended:
            return
        self.reset()
        self.status = status
        for name, value in (headers or {}).items():
            self.headers.set(name, value)
        self.headers.set("Content-Type", "text/html; charset=utf-8")
        self.headers.set("Cache-Control", "no-store")
        self.end(error_page(status, detail))

    def show_failure(self, language: str, failure: str, as_json: bool) -> None:
        """Write a failure into the response, see `smqrt.http.message.report_failure`."""
        if self.committed:
            self.write(f"\n<pre>{language} error: {escape(failure)}</pre>\n".encode())
            return
        self.reset()
        if as_json:
            self.headers.set("Content-Type", "application/json")
            self.write(json.dumps({"error": language.lower(), "emsg": failure}).encode())
            return
        self.status = 500
        self.headers.set("Content-Type", "text/plain; charset=utf-8")
        self.headers.set("Cache-Control", "no-store")
        self.write(f"{language} error: {failure}\n".encode("utf-8", "backslashreplace"))

    def json(self, value: object, status: int | None = None) -> None:
        """End the response with a value in JSON, replacing the body. Raises as `write` and `reset`.

        Args:
            value: dict, list, tuple, text, number, bool or None. NaN and infinities become null.
            status: status code; None keeps the current one.

        Raises:
            ArgumentError: the value cannot be represented in JSON.
        """
        if self.ended:
            return
        text = json_bytes(value)
        self.reset("buffer")
        self.status = self.status if status is None else status
        self.headers.set("Content-Type", "application/json")
        if "cache-control" not in self.headers:
            self.headers.set("Cache-Control", "no-store")
        self.end(text)

    def stream(self, pieces: Iterable[bytes | str]) -> None:
        """Send each piece when it is produced, then end the response. Raises as `write`.

        Blocks the greenlet while the client does not read. A generator is closed when the client disconnects.

        Args:
            pieces: pieces of the body.
        """
        turn = Turn()
        try:
            for piece in () if self._is_head else pieces:  # the pieces may be endless
                self.write(piece)
                self.flush()
                turn.yield_if_due()
            self.end()
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()

    def redirect(self, location: str, status: int = 302) -> None:
        """End the response with a redirection to `location`. Raises as `error`."""
        self.error(status, headers={"Location": location})

    def set_cookie(
        self,
        name: str,
        value: str,
        *,
        path: str = "/",
        domain: str | None = None,
        max_age_s: int | None = None,
        secure: bool | None = None,
        httponly: bool = True,
        samesite: str = "Lax",
    ) -> None:
        """Add a cookie (RFC 6265).

        Args:
            name, value: name and value of the cookie.
            path, domain: paths and hosts to which the browser sends it.
            max_age_s: lifetime; 0 deletes the cookie, None keeps it until the browser is closed.
            secure: whether the browser sends it over TLS only. None: if the client uses TLS for this request.
            httponly: whether scripts have no access to it.
            samesite: "Lax", "Strict", or "None", which browsers accept for secure cookies only.

        Raises:
            ValueError: a part has a semicolon or a control character, or the name is not a token.
        """
        wanted: dict[str, str | bool | None] = {
            "Path": path,
            "Domain": domain,
            "Max-Age": None if max_age_s is None else str(max_age_s),
            "SameSite": samesite,
            "Secure": self.secure if secure is None else secure,
            "HttpOnly": httponly,
        }
        attributes = {key: text if isinstance(text, str) else None for key, text in wanted.items() if text}
        self.headers.add("Set-Cookie", set_cookie_field(name, value, attributes))

    def delete_cookie(self, name: str, *, path: str = "/", domain: str | None = None) -> None:
        """Delete a cookie in the browser. `path` and `domain` must be those of the cookie. Raises as `set_cookie`."""
        self.set_cookie(name, "", path=path, domain=domain, max_age_s=0)

    @property
    def _has_no_body(self) -> bool:
        return self._is_head or self.status in (204, 304) or self.status < 200

    def _take(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        return body

    def _send(self, data: bytes) -> None:
        if data:
            self._connection.send(data)

    def _framed(self, data: bytes) -> bytes:
        if not data or self._has_no_body:
            return b""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._missing is not None:
            data = data[: self._missing]  # the client would read more as the next response
            self._missing -= len(data)
        return data

    def _declared_length(self) -> int | None:
        """Return the Content-Length that the handler has set, None without a valid one."""
        declared = self.headers.get("content-length")
        return int(declared) if declared is not None and declared.isascii() and declared.isdigit() else None

    def _head(self, framing: bytes) -> bytes:
        status = _OK if self.status == 200 else f"HTTP/1.1 {self.status} {reason(self.status)}\r\n".encode()
        headers, fields, date = self._headers, b"", b""
        if headers is not None:
            fields = headers.encode()
        for finish in self.finishers:
            fields = finish(fields)
        if headers is None or "date" not in headers:
            date = date_line()
        return b"".join((status, fields, framing, self._connection_line(), date, b"\r\n"))

    def _connection_line(self) -> bytes:
        headers = self._headers
        if not self._connection.can_keep_alive(self.ended) or (
            headers is not None and "connection" in headers and headers.has_token("connection", "close")
        ):
            self.close = True
        if self.close:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self._version == "1.0" else b""
