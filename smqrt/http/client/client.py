"""HTTP client with redirects, cookies and Digest authentication.

Cookies (RFC 6265) are sent only to the host that set them. Digest (RFC 7616) proves a password without sending it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from time import monotonic
from urllib.request import parse_http_list, parse_keqv_list

from gevent import Timeout

import smqrt
from smqrt.errors import StreamError
from smqrt.http.client.exchange import ClientRequest, ClientResponse, check_host, joined, url_of
from smqrt.loop.scheduling import share
from smqrt.transport.outgoing_proxy import Proxy, open_through
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import websocket
from smqrt.wire.url import Url

# ---- A client for one request at a time: connect, send a request and its body, read the response

READ_BYTES = 65536
CHUNKED_BYTES = 16384  # read at once where chunks can come: decoding 64 KiB of one-byte chunks takes up to 70 ms
LARGE_BYTES = 1 << 20  # after reading a larger body as a whole, other greenlets run
TIMEOUT_S = 20.0
FETCH_S = 5.0
MAX_BODY_BYTES = 64 << 20
MIN_BYTES_PER_S = 1024  # average rate of a body that is read as a whole; slower servers cause a timeout
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS"))  # safe to send twice (RFC 9110 §9.2.1)
_CONNECTION_LOST = frozenset(("socketclosed", "socketreadfailed", "socketwritefailed"))


@dataclass(slots=True)
class HttpClientOptions:
    """Options of a client.

    Attributes:
        tls: TLS options for https and wss.
        persistent: whether to reuse a connection for the next request to the same server.
        proxy: proxy, or None.
        tunnel: whether only to connect through the proxy; the caller then uses the connection itself.
        host: Host field and name for TLS, if different from the URL.
        source: local address to connect from.
        ipv6: whether to use IPv6 only.
        timeout_s: for connecting, for the handshake, for the head of a response, and for each wait for its body. A body
            that is read as a whole has one more second for each `MIN_BYTES_PER_S` received.
        max_body_bytes: limit of a body that is read as a whole.

    Raises:
        ArgumentError: the host is not valid in a Host field.
    """

    tls: ClientTls = field(default_factory=ClientTls)
    persistent: bool = True
    proxy: Proxy | None = None
    tunnel: bool = False
    host: str | None = None
    source: str | None = None
    ipv6: bool = False
    timeout_s: float = TIMEOUT_S
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        if self.host is not None:
            check_host(self.host)


@dataclass(frozen=True, slots=True)
class Released:
    """A connection that was detached from HTTP.

    Attributes:
        stream: the connection; bytes already received are read first.
        websocket: whether the server has accepted the upgrade to WebSocket.
        tls: TLS options with the trusted certificates, None without TLS.
        host: name of the server.
    """

    stream: Stream
    websocket: bool
    tls: ClientTls | None
    host: str


class HttpConversation:
    """A client for one request at a time. Its methods block the greenlet; any greenlet may call `close`.

    Every method raises StreamError (spec: bas-api §15): as `Stream` and `open_through`, "invalidresponse",
    "sslnottrusted", and "incorrectuse" without a request.
    """

    def __init__(self, options: HttpClientOptions) -> None:
        self.options = options
        self.request: ClientRequest | None = None
        self._stream: Stream | None = None
        self._origin: tuple[bool, str, int] | None = None
        self._host = ""
        self._response = ClientResponse()
        self._key = ""
        self._unsent: int | None = 0  # announced and unsent bytes of the body, None for chunks
        self._is_repeatable = False  # whether to repeat the request if the server has just closed the reused connection
        self._number = 0  # of the last connection; `close` changes it while another greenlet connects

    # ---- Sending a request

    def send_head(self, request: ClientRequest) -> None:
        """Send the head of a request.

        Raises:
            StreamError: also "prxready", the tunnel is connected and `tunnel` is set; "sslnotenabled", the server must
                be trusted and the URL is without TLS.
        """
        if request.trusted and not request.url.secure:
            self.close()
            raise StreamError("sslnotenabled", f"{request.url}: the server must be trusted, which needs https or wss")
        if request.url.websocket:
            self._key = websocket.new_key()
            request = request.as_websocket(self._key)
        self.request = request
        stream = self._stream
        if stream is not None:
            is_reusable = self._response.persistent and self._origin == request.url.origin
            try:
                is_reusable = is_reusable and stream.try_read() is None  # neither closed nor unexpected bytes
            except StreamError:
                is_reusable = False
            if not is_reusable:
                self.close()
                stream = None
        self._is_repeatable = stream is not None and request.method in _REPEATABLE and request.length == 0
        if stream is None:
            stream = self._connect(request)
        self._begin(stream, request)

    def _begin(self, stream: Stream, request: ClientRequest) -> None:
        self._response = ClientResponse(request.method == "HEAD")
        self._unsent = request.length
        if request.trusted and (trust := self.trust()) is not Trust.TRUSTED:
            self.close()
            raise StreamError("sslnottrusted", trust.value if trust else "")
        agent = f"smqrt/{smqrt.__version__}"
        head = request.head(agent, self.options.persistent, self.options.host, self._proxy_authorization(request.url))
        try:
            stream.write(head, self.options.timeout_s)
        except StreamError as error:
            if not (self._is_repeatable and error.word in _CONNECTION_LOST):
                raise  # otherwise `status` fails with the same error, and repeats the request

    def _connect(self, request: ClientRequest) -> Stream:
        self._number += 1
        number, url = self._number, request.url
        options, proxy = self.options, self.options.proxy
        if proxy is not None and self._proxy_authorization(url) is None:
            stream = open_through(proxy, url.host, url.port, options.timeout_s, options.source, options.ipv6)
        else:
            host, port = (url.host, url.port) if proxy is None else (proxy.host, proxy.port)
            stream = Stream.connect(host, port, options.timeout_s, options.source, options.ipv6)
        if number != self._number:  # `close` was called while this greenlet was connecting
            stream.close()
            raise StreamError("socketclosed")
        self._stream, self._origin, self._host = stream, url.origin, self.options.host or url.host
        if self.options.tunnel:
            raise StreamError("prxready")
        if url.secure:
            stream.starttls(self.options.tls.context(), self._host, timeout_s=self.options.timeout_s)
        return stream

    def _proxy_authorization(self, url: Url) -> str | None:
        """Return the authorization for a proxy that forwards requests, "" if it needs none.

        Return None for a tunnel and without a proxy.
        """
        proxy = self.options.proxy
        if proxy is None or proxy.socks or self.options.tunnel or url.secure or url.websocket:
            return None
        return proxy.authorization or ""

    # ---- The body of the request

    def write(self, data: bytes) -> None:
        """Send a piece of the body.

        Raises:
            StreamError: also "toomuchdata", more than was announced.
        """
        stream = self._http_stream()
        if self._unsent is None:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        elif len(data) > self._unsent:
            raise StreamError("toomuchdata", f"{len(data)} bytes, but only {self._unsent} announced bytes are left")
        else:
            self._unsent -= len(data)
        stream.write(data, self.options.timeout_s)

    # ---- The response

    def status(self) -> int:
        """Wait for the head of the response and return its status code."""
        stream, response = self._http_stream(), self._response
        if response.status is None:
            if self._unsent is None:
                self._unsent = 0
                try:
                    stream.write(b"0\r\n\r\n", self.options.timeout_s)
                except StreamError:
                    if stream.closed:
                        raise  # otherwise the server may have sent a response before it stopped reading
            end_s = monotonic() + self.options.timeout_s
            while response.status is None:
                try:
                    self._receive(response, end_s)
                except StreamError as error:
                    request = self.request
                    is_lost = error.word in _CONNECTION_LOST and not response.started
                    if not (self._is_repeatable and is_lost and request):
                        raise
                    self._is_repeatable = False
                    self.close()
                    self._begin(self._connect(request), request)
                response = self._response
            is_upgrade = response.switches and self.request is not None and self.request.url.websocket
            if is_upgrade and response.get("sec-websocket-accept") != websocket.accept_key(self._key):
                self.close()
                raise StreamError("invalidresponse", "the server answered the WebSocket upgrade with a wrong key")
        return response.status

    def read(self, size_bytes: int = READ_BYTES) -> bytes | None:
        """Return the next bytes of the body, at most `size_bytes`; None at its end."""
        self.status()
        return self._next(size_bytes, monotonic() + self.options.timeout_s)

    def read_whole(self, size_bytes: int | None = None) -> bytes:
        """Return the rest of the body, or its next `size_bytes`.

        Raises:
            StreamError: also "toomuchdata", over `max_body_bytes`; the connection is then closed. After "timeout", the
                next call returns the received bytes.
        """
        self.status()
        body, began_s = bytearray(), monotonic() + self.options.timeout_s
        try:
            while size_bytes is None or len(body) < size_bytes:
                limit, response = self.options.max_body_bytes, self._response
                if max(len(body), 0 if response.complete else response.announced_bytes) > limit:
                    self.close()
                    raise StreamError(
                        "toomuchdata", f"the body is over {limit} bytes; read it in pieces, or set maxsize"
                    )
                wanted = READ_BYTES if size_bytes is None else min(READ_BYTES, size_bytes - len(body))
                data = self._next(wanted, began_s + len(body) / MIN_BYTES_PER_S)
                if data is None:
                    break
                body += data
        except StreamError as error:
            if error.word == "timeout":
                self._response.put_back(bytes(body))
            raise
        whole = bytes(body)
        if len(whole) > LARGE_BYTES:
            share().wait()  # copying 64 MiB blocks the loop for 20 ms, and the caller will copy them again
        return whole

    def skip(self, max_bytes: int | None = None) -> None:
        """Read and discard the rest of the body, so that the connection can be reused.

        If the rest is over `max_bytes` or takes longer than `timeout_s`, close the connection instead.
        """
        left = self.options.max_body_bytes if max_bytes is None else max_bytes
        end_s = monotonic() + self.options.timeout_s
        try:
            while left > 0 and (data := self._next(READ_BYTES, end_s)) is not None:
                left -= len(data)
        except StreamError:
            left = 0
        if left <= 0:
            self.close()

    def _next(self, size_bytes: int, end_s: float) -> bytes | None:
        response = self._response
        while not response.has_data:
            if response.complete:
                return None
            self._receive(response, end_s)
        return response.take(size_bytes)

    def _receive(self, response: ClientResponse, end_s: float) -> None:
        left_s = end_s - monotonic()
        if left_s <= 0:
            raise StreamError("timeout", "the server responds too slowly")
        size = CHUNKED_BYTES if response.may_be_chunked else READ_BYTES
        data = self._open_stream().read(size, min(left_s, self.options.timeout_s))
        if data:
            try:
                response.feed(data)
            except StreamError:
                self.close()
                raise
        else:
            response.end()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Header fields of the response."""
        return self._response.headers

    def get(self, name: str) -> str | None:
        """Return the header field of a name in the response."""
        return self._response.get(name)

    # ---- The connection

    def trust(self) -> Trust | None:
        """Return the result of checking the server's certificate; None without TLS."""
        stream = self._open_stream()
        if stream.tls is None:
            return None
        return self.options.tls.store.judge(stream.tls.peer_chain(), self._host)

    @property
    def stream(self) -> Stream:
        """The connection."""
        return self._open_stream()

    def release(self) -> Released:
        """Detach and return the connection.

        Raises:
            StreamError: "invalidresponse", the server has rejected the upgrade to WebSocket.
        """
        stream, response, request = self._open_stream(), self._response, self.request
        wanted = request is not None and request.url.websocket and not self.options.tunnel
        if wanted and self.status() != 101:
            raise StreamError("invalidresponse", f"the server rejected the upgrade to WebSocket: {self.status()}")
        rest = b"".join(iter(lambda: response.take(READ_BYTES), b""))
        stream.unread(rest + response.tail)
        self._stream = None
        return Released(stream, wanted, self.options.tls if stream.tls else None, self._host)

    def close(self) -> bool:
        """Close the connection; return False if there is none. The next request opens a new one."""
        self._number += 1
        stream, self._stream = self._stream, None
        return stream is not None and stream.close()

    def _http_stream(self) -> Stream:
        stream = self._open_stream()
        if self.options.tunnel:
            raise StreamError("incorrectuse", "the connection is a tunnel, not HTTP")
        return stream

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StreamError("socketclosed" if self.request else "incorrectuse")
        return self._stream


def fetch(url: str, max_bytes: int) -> bytes:
    """Return a small document; blocks for at most `FETCH_S`. Does not follow redirects.

    The server must be trusted if the URL is https.

    Args:
        url: URL of the document.
        max_bytes: limit of its size.

    Raises:
        StreamError: the request failed, the status is not 200, or the document is too large.
    """
    parsed = url_of(url)
    request = ClientRequest("GET", parsed, [("Accept", "application/json")], trusted=parsed.secure)
    conversation = HttpConversation(HttpClientOptions(persistent=False, timeout_s=FETCH_S, max_body_bytes=max_bytes))
    try:
        with Timeout(FETCH_S, StreamError("timeout", f"no answer in {FETCH_S:g} s")):
            conversation.send_head(request)
            if conversation.status() != 200:
                raise StreamError("invalidresponse", f"the server answered {conversation.status()}")
            return conversation.read_whole()
    finally:
        conversation.close()


# ---- Redirects, cookies and challenges

MAX_REDIRECTS = 9
MAX_CHALLENGES = 100  # cached challenges, one per server; a server sends a removed one again
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_SKIPPED_BYTES = 65536  # of the body of a redirect; for a longer one the connection is closed
MAX_COOKIES = 300
MAX_COOKIES_OF_HOST = 50
MAX_COOKIE_BYTES = 4096  # of name and value, and of the path (RFC 6265 §6.1)
_FOREVER_S = 10**9
_HASHES = {"MD5": "md5", "SHA-256": "sha256", "SHA-512-256": "sha512_256"}


class HttpClient(HttpConversation):
    """A client that follows up to nine redirects and responds to one Digest challenge.

    It does neither if the body would have to be sent again. Later requests send its cookies and use its challenges.
    """

    def __init__(self, options: HttpClientOptions) -> None:
        super().__init__(options)
        self._jar = CookieJar()
        self._current: ClientRequest | None = None
        self._redirects = 0
        self._challenges: dict[tuple[bool, str, int], Challenge] = {}
        self._has_authenticated = False

    def send_head(self, request: ClientRequest) -> None:
        """See `HttpConversation.send_head`."""
        self._redirects = 0
        self._has_authenticated = False
        self._send_head(request)

    def _send_head(self, request: ClientRequest) -> None:
        self._current = request
        own = {name.lower() for name, _ in request.headers}
        challenge, (user, password) = self._challenges.get(request.url.origin), request.login
        authorization = ""
        if challenge is not None and user is not None:
            authorization = challenge.answer(request.method, request.url.target, user, password or "")
        more = [("Cookie", self._jar.value(request.url)), ("Authorization", authorization)]
        headers = [(name, value) for name, value in more if value and name.lower() not in own]
        super().send_head(replace(request, headers=[*request.headers, *headers]))

    def status(self) -> int:
        """See `HttpConversation.status`. Returns the status after the last redirect."""
        while True:
            answered = self._response.status is not None
            status = super().status()
            if answered or self._current is None:
                return status
            self._jar.keep(self._current.url, self.headers)
            location = self.get("location")
            following: ClientRequest | None = None
            if status == 401:
                following = self._authenticated_request()
            elif status in _REDIRECTS and location is not None and self._redirects < MAX_REDIRECTS:
                self._redirects += 1
                self._has_authenticated = False  # the other URL may send a challenge too
                url = joined(self._current.url, location.encode("latin-1").decode("utf-8", "replace"))
                following = self._current.redirected(status, url)
            if following is None:
                return status
            self.skip(_MAX_SKIPPED_BYTES)
            self._send_head(following)

    @property
    def url(self) -> Url | None:
        """URL of the last request."""
        return self._current.url if self._current else None

    def _authenticated_request(self) -> ClientRequest | None:
        """Return the request to repeat with credentials, or None."""
        assert self._current is not None
        challenge = find_challenge([value for name, value in self.headers if name.lower() == "www-authenticate"])
        if challenge is None or self._current.login[0] is None:
            return None
        previous = self._challenges.get(self._current.url.origin)
        if len(self._challenges) >= MAX_CHALLENGES:
            self._challenges.clear()
        self._challenges[self._current.url.origin] = challenge
        if self._has_authenticated or (previous is not None and not challenge.stale) or self._current.length != 0:
            return None
        self._has_authenticated = True
        return self._current


@dataclass(frozen=True, slots=True)
class Cookie:
    """A cookie that a server has set. `expires_s` is Unix time, None for one that expires with the client."""

    name: str
    value: str
    path: str = "/"
    secure: bool = False
    expires_s: float | None = None


@dataclass(slots=True)
class CookieJar:
    """The cookies of a client, by host, path and name."""

    _cookies: dict[tuple[str, str, str], Cookie] = field(default_factory=dict)

    def keep(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        """Store or remove the cookies that a response of `url` sets."""
        for cookie in parse_cookies(headers, url):
            key, now_s = (url.host, cookie.path, cookie.name), time.time()
            if cookie.expires_s is not None and cookie.expires_s <= now_s:
                self._cookies.pop(key, None)
                continue
            if cookie.secure and not url.secure:
                continue
            if key not in self._cookies:
                if len(self._cookies) >= MAX_COOKIES:  # remove expired ones
                    self._cookies = {
                        other: one for other, one in self._cookies.items() if (one.expires_s or now_s + 1) > now_s
                    }
                of_host = sum(other[0] == url.host for other in self._cookies)
                if of_host >= MAX_COOKIES_OF_HOST or len(self._cookies) >= MAX_COOKIES:
                    continue
            self._cookies[key] = cookie

    def value(self, url: Url) -> str:
        """Return the Cookie field for a request to `url`, empty without cookies. Longer paths come first."""
        now_s, path = time.time(), url.target.partition("?")[0]
        fitting = [
            cookie
            for (host, _, _), cookie in self._cookies.items()
            if host == url.host
            and (url.secure or not cookie.secure)
            and (cookie.expires_s is None or cookie.expires_s > now_s)
            and (path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/"))
        ]
        fitting.sort(key=lambda cookie: -len(cookie.path))
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in fitting)


def parse_cookies(headers: Iterable[tuple[str, str]], url: Url | None = None) -> list[Cookie]:
    """Return the cookies that the header fields of a response set. `url` is that of the response."""
    default_path = url.target.partition("?")[0].rpartition("/")[0] or "/" if url else "/"
    cookies: list[Cookie] = []
    for text in [value for name, value in headers if name.lower() == "set-cookie"]:
        pair, *attributes = text.split(";")
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or len(pair) > MAX_COOKIE_BYTES:
            continue
        known = {key.strip().lower(): word.strip() for key, _, word in (one.partition("=") for one in attributes)}
        path = known.get("path", "")
        if not path.startswith("/") or len(path) > MAX_COOKIE_BYTES:
            path = default_path
        cookies.append(Cookie(name.strip(), value.strip(), path, "secure" in known, _expiry(known)))
    return cookies


def _expiry(attributes: dict[str, str]) -> float | None:
    if "max-age" in attributes:
        try:
            return time.time() + min(int(attributes["max-age"]), _FOREVER_S)
        except ValueError:
            return None
    try:
        return parsedate_to_datetime(attributes["expires"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


@dataclass(slots=True)
class Challenge:
    """A Digest challenge of a server, valid for many requests.

    Attributes:
        fields: realm, nonce and other parameters.
    """

    fields: dict[str, str]
    _count: int = field(default=0, init=False)

    @property
    def stale(self) -> bool:
        """Whether the credentials were correct, and only the nonce has expired."""
        return self.fields.get("stale", "").lower() == "true"

    def answer(self, method: str, target: str, user: str, password: str, cnonce: str | None = None) -> str:
        """Return the value of the Authorization field for a request."""
        self._count += 1
        fields, count, cnonce = self.fields, f"{self._count:08x}", cnonce or os.urandom(16).hex()
        algorithm = fields.get("algorithm", "MD5")
        name = _HASHES[algorithm.upper().removesuffix("-SESS")]
        ha1 = _hash(name, f"{user}:{fields['realm']}:{password}")
        if algorithm.upper().endswith("-SESS"):
            ha1 = _hash(name, f"{ha1}:{fields['nonce']}:{cnonce}")
        with_qop = f"{count}:{cnonce}:auth:" if "qop" in fields else ""
        proof = _hash(name, f"{ha1}:{fields['nonce']}:{with_qop}{_hash(name, f'{method}:{target}')}")
        parts = {"username": user.encode().decode("latin-1"), "realm": fields["realm"], "nonce": fields["nonce"]}
        parts |= {"uri": target, "response": proof}
        parts |= {key: fields[key] for key in ("opaque",) if key in fields}
        text = ", ".join(f'{key}="{_quoted(value)}"' for key, value in parts.items()) + f", algorithm={algorithm}"
        return f"Digest {text}" + (f', qop=auth, nc={count}, cnonce="{cnonce}"' if with_qop else "")


def find_challenge(values: list[str]) -> Challenge | None:
    """Return the first supported challenge in WWW-Authenticate fields, or None."""
    for value in values:
        scheme, _, rest = value.strip().partition(" ")
        if scheme.lower() != "digest":
            continue
        pairs = [part for part in parse_http_list(rest) if part.partition("=")[2]]
        fields = {key.lower(): value for key, value in parse_keqv_list(pairs).items()}
        is_known = fields.get("algorithm", "MD5").upper().removesuffix("-SESS") in _HASHES
        has_auth = "auth" in fields.get("qop", "auth").replace(",", " ").lower().split()
        if is_known and has_auth and {"realm", "nonce"} <= set(fields):
            return Challenge(fields)
    return None


def _hash(name: str, text: str) -> str:
    return hashlib.new(name, text.encode()).hexdigest()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
