"""The answer of one exchange: buffered, and sent in one piece with its length when it fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple, Protocol

from smqrt.http.headers import Headers, date_line, error_page, reason, set_cookie_field
from smqrt.loop.scheduling import Turn
from smqrt.smq.messages import json_bytes

BUFFER_BYTES = 8192  # a response up to this size leaves in one send with its length (spec: bas-api §2.2)
_OK = b"HTTP/1.1 200 OK\r\n"


class ResponseConnection(Protocol):
    """What a response needs of its connection, which is `smqrt.http.server.HttpConnection`."""

    is_https: bool

    def can_keep_alive(self, is_over: bool) -> bool:
        """Return whether the connection can take another request behind this one; `is_over`: the response is
        complete."""

    def send(self, data: bytes) -> None:
        """Send all of `data`; may block the greenlet. Raises ClientGoneError."""


class Draft(NamedTuple):
    """A response that was not sent yet: status, header fields, what was written, and its bytes."""

    status: int
    headers: Headers
    parts: tuple[bytes, ...]
    size: int


class Response:
    """The answer: buffered, and sent in one piece with its length when it fits.

    Attributes:
        status: the status code.
        committed: whether the head was sent.
        ended: whether it is complete (or dead, after `detach`); later writes are ignored.
        size: bytes written to the body.
        close: end the connection behind it.
        before_send: called before anything is sent; must not block.
        finishers: called with the header lines, to add those that are in every answer; they stay when it is reset.
    """

    __slots__ = (
        "_buffered",
        "_chunked",
        "_connection",
        "_headers",
        "_left",
        "_parts",
        "_is_head",
        "before_send",
        "close",
        "committed",
        "ended",
        "finishers",
        "_version",
        "secure",
        "size",
        "status",
    )

    def __init__(self, connection: ResponseConnection, method: str, version: str) -> None:
        self._connection = connection
        self.secure = connection.is_https
        self._is_head = method == "HEAD"  # and not the request itself: a cycle would keep both until a collection
        self._version = version
        self._parts: list[bytes] = []
        self._buffered = 0
        self._chunked = False
        self._left: int | None = None  # bytes the announced Content-Length still waits for
        self.status = 200
        self._headers: Headers | None = None  # made when the first field is set: most static answers have none
        self.committed = False
        self.ended = False
        self.close = False
        self.size = 0
        self.before_send: Callable[[], object] | None = None
        self.finishers: tuple[Callable[[bytes], bytes], ...] = ()

    @property
    def headers(self) -> Headers:
        """The header fields; `Date`, `Connection` and the framing are added when the head is sent."""
        if self._headers is None:
            self._headers = Headers()
        return self._headers

    def is_untouched(self) -> bool:
        """Return whether no status, no field and no byte was set yet."""
        return self._headers is None and self.status == 200 and not self.size

    def write(self, data: bytes | str) -> None:
        """Add to the body; sends when the buffer is full, which may block the greenlet.

        Args:
            data: text is sent as UTF-8, and is HTML when no Content-Type was set before.

        Raises:
            ClientGoneError: the client is gone.
        """
        if self.ended:
            return
        if isinstance(data, str):
            data = self._encoded(data)
        self._parts.append(data)
        self.size += len(data)
        self._buffered += len(data)
        if self._buffered > BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the head and what was written so far. Raises as `write`."""
        if self.ended:
            return
        if self.before_send is not None:
            self.before_send()
        head = b"" if self.committed else self._begin_stream()
        self._send(head + self._framed(self._take()))

    def end(self, data: bytes = b"") -> None:
        """Complete the response, with a last piece of the body. Raises as `write`."""
        if self.ended:
            return
        if self.before_send is not None:
            self.before_send()
        self._parts.append(data)
        self.size += len(data)
        body = self._take()
        self.ended = True
        if self.committed:
            self._end_stream(body)
        else:
            self.committed = True
            self._send(self._head(self._length_lines(len(body))) + (b"" if self._bodyless else body))

    def hand_over(self, more: bytes) -> tuple[bytes, bool]:
        """End a response whose head was sent, because its connection gets another owner, who goes on with the body.

        Args:
            more: is written behind what was written so far.

        Returns:
            what was written and is not sent yet, framed; whether what follows has to be sent in chunks, and ended with
            an empty one.
        """
        unsent = self._framed(self._take() + more)
        self.ended = True
        return unsent, self._chunked and not self._bodyless

    def send_ready(self, head: bytes, body: bytes) -> None:
        """End a response that `is_untouched` with a head built beforehand. Raises as `write`.

        Args:
            head: status line and fields with the length, without `Date` and the empty line.
        """
        if self.before_send is not None:
            self.before_send()
        self.committed = self.ended = True
        self.size = len(body)
        if self._is_head:
            body = b""
        for finish in self.finishers:
            head = finish(head)
        self._connection.send(b"".join((head, self._connection_line(), date_line(), b"\r\n", body)))

    def reset(self, what: str = "all") -> None:
        """Drop what was written ("buffer"), the header fields but cookies ("headers"), or both ("all"). The status
        stays (spec: bas-api §17).

        Raises:
            RuntimeError: the head was sent already.
        """
        if self.committed:
            raise RuntimeError("the response has begun: it can't be reset any more")
        if what in ("all", "headers"):
            self.headers.clear()
        if what in ("all", "buffer"):
            self._take()
            self.size = 0

    def draft(self) -> Draft:
        """Return what `restore` needs to undo a `reset`."""
        return Draft(self.status, self.headers.copy(), tuple(self._parts), self.size)

    def restore(self, draft: Draft) -> None:
        """Be again as `draft` says, unless the head was sent meanwhile."""
        if not self.committed:
            self.status, self._headers, self.size = draft.status, draft.headers, draft.size
            self._parts = list(draft.parts)
            self._buffered = sum(map(len, draft.parts))

    def error(self, status: int, detail: str = "", headers: dict[str, str] | None = None) -> None:
        """End the response with a small error page, in place of what was written. Raises as `write`, and as `reset`."""
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
        """Put a failure into the response, see `Request.report_failure`."""
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
        """End the response with a value in JSON, in place of what was written. Raises as `write`, and as `reset`.

        Args:
            value: what JSON knows: dict, list, tuple, text, number, bool, None; NaN and the infinities become null.
            status: the status code; as it was set before when there is none.

        Raises:
            ArgumentError: JSON does not know it.
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
        """Send each piece when it is there, and end the response; blocks the greenlet while the client does not read.
        A generator is closed when the client leaves. Raises as `write`.

        Args:
            pieces: of the body.
        """
        turn = Turn()
        try:
            for piece in () if self._is_head else pieces:  # they may have no end
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
            name, value: of the cookie.
            path, domain: where the browser sends it.
            max_age_s: how long the browser keeps it, 0 makes it forget it; without, until the browser ends.
            secure: whether it goes over TLS only; without, when this request came over TLS.
            httponly: whether scripts don't see it.
            samesite: "Lax", "Strict", or "None", which browsers take from secure cookies only.

        Raises:
            ValueError: a part has a semicolon or a control character, or the name is no token.
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
        """Make the browser forget a cookie; `path` and `domain` are those it was set with. Raises as `set_cookie`."""
        self.set_cookie(name, "", path=path, domain=domain, max_age_s=0)

    def _encoded(self, text: str) -> bytes:
        if not self.committed and not self.size and "content-type" not in self.headers:
            self.headers.set("Content-Type", "text/html; charset=utf-8")
        return text.encode("utf-8", "surrogateescape")

    @property
    def _bodyless(self) -> bool:
        return self._is_head or self.status in (204, 304) or self.status < 200

    def _take(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        return body

    def _send(self, data: bytes) -> None:
        if data:
            self._connection.send(data)

    def _begin_stream(self) -> bytes:
        declared = self.headers.get("content-length")
        if declared is not None and declared.isascii() and declared.isdigit():
            self._left = int(declared)
            framing = f"Content-Length: {self._left}\r\n".encode()
        elif self._version == "1.0":
            self.close, framing = True, b""
        else:
            self._chunked, framing = True, b"Transfer-Encoding: chunked\r\n"
        head = self._head(b"" if self.status in (204, 304) else framing)
        self.committed = True
        return head

    def _framed(self, data: bytes) -> bytes:
        if not data or self._bodyless:
            return b""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data

    def _end_stream(self, body: bytes) -> None:
        end = b"0\r\n\r\n" if self._chunked and not self._bodyless else b""
        self._send(self._framed(body) + end)
        if self._left and not self._bodyless:
            self.close = True  # shorter than announced: only the end of the connection can tell

    def _length_lines(self, length: int) -> bytes:
        if self.status in (204, 304) or self.status < 200:
            return b""
        if self._is_head and not length:
            declared = self.headers.get("content-length")
            length = int(declared) if declared is not None and declared.isascii() and declared.isdigit() else 0
        return b"Content-Length: %d\r\n" % length

    def _head(self, framing: bytes) -> bytes:
        status = _OK if self.status == 200 else f"HTTP/1.1 {self.status} {reason(self.status)}\r\n".encode()
        fields = self._headers.encode() if self._headers else b""
        for finish in self.finishers:
            fields = finish(fields)
        date = b"" if self._headers and "date" in self._headers else date_line()
        return b"".join((status, fields, framing, self._connection_line(), date, b"\r\n"))

    def _connection_line(self) -> bytes:
        if not self._connection.can_keep_alive(self.ended) or (
            self._headers and self._headers.says("connection", "close")
        ):
            self.close = True
        if self.close:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self._version == "1.0" else b""
