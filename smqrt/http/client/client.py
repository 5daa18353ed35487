"""The HTTP client that follows redirects, keeps cookies (RFC 6265: each goes back to the host that set it) and answers
challenges (Digest, RFC 7616: a password is proved without being sent).
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

# ---- A client's conversation with a server: connect, ask, send a body, read the answer, perhaps ask again.

READ_BYTES = 65536
LARGE_BYTES = 1 << 20  # whoever reads more as a whole has a turn of the loop for it
TIMEOUT_S = 20.0
FETCH_S = 5.0
MAX_BODY_BYTES = 64 << 20
MIN_BYTES_PER_S = 1024  # on the average, of a body that is read whole: a server that drips is not waited for
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS"))
_GONE = frozenset(("socketclosed", "socketreadfailed", "socketwritefailed"))


@dataclass(slots=True)
class HttpClientOptions:
    """How a client goes about it.

    Attributes:
        tls: for https and wss.
        persistent: whether a connection is kept for the next request to the same server.
        proxy: to go through, None for none.
        tunnel: only make the connection through the proxy; what is spoken over it is the caller's business.
        host: the Host field and the name for TLS, when they are not what the URL says.
        source: the local address to connect from.
        ipv6: use IPv6 only.
        timeout_s: for connecting, for the handshake, for the head of a response, and for each wait for its body. For a
            body that is read whole it is as long, and a second more for each `MIN_BYTES_PER_S` that came.
        max_body_bytes: the largest body that is read whole.

    Raises:
        ArgumentError: a host that can't be sent.
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
    """A connection that is not HTTP's any more.

    Attributes:
        stream: bytes that were received already are read first.
        websocket: whether the server agreed to speak WebSocket.
        tls: whom to ask about the server, None without TLS.
        host: whom the connection is to.
    """

    stream: Stream
    websocket: bool
    tls: ClientTls | None
    host: str


class HttpConversation:
    """A client for one request at a time. All calls that wait block the greenlet; `close` may come from any.

    Every call raises StreamError (words: spec bas-api §15): what `Stream` raises, "invalidresponse", "sslnottrusted",
    "incorrectuse" (nothing was asked), and what `open_through` raises.
    """

    def __init__(self, options: HttpClientOptions) -> None:
        self.options = options
        self.request: ClientRequest | None = None
        self._stream: Stream | None = None
        self._origin: tuple[bool, str, int] | None = None
        self._host = ""
        self._response = ClientResponse()
        self._key = ""
        self._left: int | None = 0  # of the body, None when it is sent in chunks
        self._repeatable = False
        self._number = 0  # of the last connection

    # ---- asking

    def ask(self, request: ClientRequest) -> None:
        """Send the head of a request.

        Raises:
            StreamError: also "prxready", when only the tunnel was wanted, which is there now; "sslnotenabled", when the
                server has to be trusted and the address is not one of TLS.
        """
        if request.trusted and not request.url.secure:
            self.close()
            raise StreamError("sslnotenabled", f"{request.url} without TLS, where the server has to be trusted")
        if request.url.websocket:
            self._key = websocket.new_key()
            request = request.as_websocket(self._key)
        self.request = request
        stream = self._kept_for(request.url)
        self._repeatable = stream is not None and request.method in _REPEATABLE and request.length == 0
        if stream is None:
            stream = self._connected(request)
        self._begin(stream, request)

    def _begin(self, stream: Stream, request: ClientRequest) -> None:
        self._response = ClientResponse(request.method == "HEAD")
        self._left = request.length
        self._check_trust(request)
        agent = f"smqrt/{smqrt.__version__}"
        head = request.head(agent, self.options.persistent, self.options.host, self._forwarding(request.url))
        try:
            stream.write(head, self.options.timeout_s)
        except StreamError as error:
            if not (self._repeatable and error.word in _GONE):
                raise  # otherwise the wait for the answer notices, and repeats

    def _kept_for(self, url: Url) -> Stream | None:
        """The open connection, when another request can be sent over it."""
        stream = self._stream
        if stream is None:
            return None
        usable = self._response.persistent and self._origin == url.origin
        if usable and _is_silent(stream):
            return stream
        self.close()
        return None

    def _connected(self, request: ClientRequest) -> Stream:
        self._number += 1
        number, url = self._number, request.url
        stream = self._opened(url)
        if number != self._number:
            stream.close()
            raise StreamError("socketclosed")
        self._stream, self._origin, self._host = stream, url.origin, self.options.host or url.host
        if self.options.tunnel:
            raise StreamError("prxready")
        if url.secure:
            stream.starttls(self.options.tls.context(), self._host, timeout_s=self.options.timeout_s)
        return stream

    def _opened(self, url: Url) -> Stream:
        options, proxy = self.options, self.options.proxy
        if proxy is None:
            return Stream.connect(url.host, url.port, options.timeout_s, options.source, options.ipv6)
        if self._forwarding(url) is not None:
            return Stream.connect(proxy.host, proxy.port, options.timeout_s, options.source, options.ipv6)
        return open_through(proxy, url.host, url.port, options.timeout_s, options.source, options.ipv6)

    def _forwarding(self, url: Url) -> str | None:
        """What a proxy wants to know that forwards requests, "" when it asks nobody; None when it makes a tunnel."""
        proxy = self.options.proxy
        if proxy is None or proxy.socks or self.options.tunnel or url.secure or url.websocket:
            return None
        return proxy.authorization or ""

    def _check_trust(self, request: ClientRequest) -> None:
        if not request.trusted:
            return
        trust = self.trust()
        if trust is not Trust.TRUSTED:
            self.close()
            raise StreamError("sslnottrusted", trust.value if trust else "")

    # ---- the body of the request

    def write(self, data: bytes) -> None:
        """Send a piece of the body.

        Raises:
            StreamError: also "toomuchdata": more than was announced.
        """
        stream = self._talking()
        if self._left is None:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        elif len(data) > self._left:
            raise StreamError("toomuchdata", f"{len(data)} bytes, where {self._left} are still announced")
        else:
            self._left -= len(data)
        stream.write(data, self.options.timeout_s)

    def _end_body(self) -> None:
        if self._left is None:
            self._left = 0
            self._live().write(b"0\r\n\r\n", self.options.timeout_s)

    # ---- the answer

    def status(self) -> int:
        """Wait for the head of the response and give its code."""
        stream, response = self._talking(), self._response
        if response.status is None:
            self._send_end(stream)
            end_s = monotonic() + self.options.timeout_s
            while response.status is None:
                response = self._receive_head(response, end_s)
            self._check_upgrade(response)
        return response.status

    def _send_end(self, stream: Stream) -> None:
        try:
            self._end_body()
        except StreamError:
            if stream.closed:
                raise  # otherwise the server may have answered before it stopped to read

    def _receive_head(self, response: ClientResponse, end_s: float) -> ClientResponse:
        try:
            self._receive(response, end_s)
        except StreamError as error:
            request = self.request
            if not (self._repeatable and error.word in _GONE and request and not response.started):
                raise
            self._repeatable = False
            self.close()
            self._begin(self._connected(request), request)
        return self._response

    def _check_upgrade(self, response: ClientResponse) -> None:
        if not (response.switches and self.request and self.request.url.websocket):
            return
        if response.get("sec-websocket-accept") != websocket.accept_key(self._key):
            self.close()
            raise StreamError("invalidresponse", "the server answered the WebSocket upgrade with a wrong key")

    def read(self, size_bytes: int = READ_BYTES) -> bytes | None:
        """The next bytes of the body, at most `size_bytes`; None at its end."""
        self.status()
        return self._next(size_bytes, monotonic() + self.options.timeout_s)

    def read_whole(self, size_bytes: int | None = None) -> bytes:
        """The rest of the body, or its next `size_bytes`.

        Raises:
            StreamError: also "toomuchdata", over `max_body_bytes`: the connection is closed. At "timeout" nothing is
                lost: what has come is read next.
        """
        self.status()
        body, began_s = bytearray(), monotonic() + self.options.timeout_s
        try:
            while size_bytes is None or len(body) < size_bytes:
                self._check_size(len(body))
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
            share().wait()  # 64 MiB are copied in 20 ms, and whoever gets them copies them again
        return whole

    def _check_size(self, read_bytes: int) -> None:
        max_bytes, response = self.options.max_body_bytes, self._response
        if max(read_bytes, 0 if response.complete else response.announced_bytes) > max_bytes:
            self.close()
            raise StreamError("toomuchdata", f"the body is over {max_bytes} bytes; read it in pieces, or set maxsize")

    def skip(self, max_bytes: int | None = None) -> None:
        """Read the rest of the body and drop it, so that the connection can be used again. When it is over
        `max_bytes` or takes longer than a wait may, the connection is closed instead.
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
            raise StreamError("timeout", "the server answers too slowly")
        data = self._live().read(READ_BYTES, min(left_s, self.options.timeout_s))
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
        """The fields of the response."""
        return self._response.headers

    def get(self, name: str) -> str | None:
        """The first field of this name in the response."""
        return self._response.get(name)

    # ---- the connection

    def trust(self) -> Trust | None:
        """What is to be thought of the server; None without TLS."""
        stream = self._live()
        if stream.tls is None:
            return None
        return self.options.tls.store.judge(stream.tls.peer_chain(), self._host)

    @property
    def stream(self) -> Stream:
        """The connection."""
        return self._live()

    def release(self) -> Released:
        """Return the connection away.

        Raises:
            StreamError: "invalidresponse", when WebSocket was wanted and refused.
        """
        stream, response, request = self._live(), self._response, self.request
        wanted = request is not None and request.url.websocket and not self.options.tunnel
        if wanted and self.status() != 101:
            raise StreamError("invalidresponse", f"the server answered {self.status()} instead of WebSocket")
        rest = b"".join(iter(lambda: response.take(READ_BYTES), b""))
        stream.unread(rest + response.tail)
        self._stream = None
        return Released(stream, wanted, self.options.tls if stream.tls else None, self._host)

    def close(self) -> bool:
        """Close the connection; false when there is none. The next request makes a new one."""
        self._number += 1
        stream, self._stream = self._stream, None
        return stream is not None and stream.close()

    def _talking(self) -> Stream:
        stream = self._live()
        if self.options.tunnel:
            raise StreamError("incorrectuse", "the tunnel is not for HTTP")
        return stream

    def _live(self) -> Stream:
        if self._stream is None:
            raise StreamError("socketclosed" if self.request else "incorrectuse")
        return self._stream


def fetched(url: str, max_bytes: int) -> bytes:
    """Get a small document from a server that has to be trusted, unless it is one of this machine without TLS; blocks
    for `FETCH_S` at most. Redirects are not followed.

    Raises:
        StreamError: it can't be had, another status than 200, or more than `max_bytes`.
    """
    place = url_of(url)
    request = ClientRequest("GET", place, [("Accept", "application/json")], trusted=place.secure)
    conversation = HttpConversation(HttpClientOptions(persistent=False, timeout_s=FETCH_S, max_body_bytes=max_bytes))
    try:
        with Timeout(FETCH_S, StreamError("timeout", f"no answer in {FETCH_S:g} s")):
            conversation.ask(request)
            if conversation.status() != 200:
                raise StreamError("invalidresponse", f"the server answered {conversation.status()}")
            return conversation.read_whole()
    finally:
        conversation.close()


def _is_silent(stream: Stream) -> bool:
    try:
        return stream.try_read() is None
    except StreamError:
        return False


MAX_REDIRECTS = 9
MAX_CHALLENGES = 100  # of as many servers; they ask again when they were forgotten
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DRAIN_BYTES = 65536  # a longer body of a redirect is not waited for
MAX_COOKIES = 300
MAX_COOKIES_OF_HOST = 50
MAX_COOKIE_BYTES = 4096  # name and value, and the path (RFC 6265 §6.1)
_FOREVER_S = 10**9
_HASHES = {"MD5": "md5", "SHA-256": "sha256", "SHA-512-256": "sha512_256"}


class HttpClient(HttpConversation):
    """A conversation that follows up to nine redirects, and answers one challenge (Digest), as far as it need not send
    a body again. What it learned is used for the requests that follow.
    """

    def __init__(self, options: HttpClientOptions) -> None:
        super().__init__(options)
        self._jar = CookieJar()
        self._asked: ClientRequest | None = None
        self._redirects = 0
        self._challenges: dict[tuple[bool, str, int], Challenge] = {}
        self._proved = False

    def ask(self, request: ClientRequest) -> None:
        """See `HttpConversation.ask`."""
        self._redirects = 0
        self._proved = False
        self._ask(request)

    def _ask(self, request: ClientRequest) -> None:
        self._asked = request
        own = {name.lower() for name, _ in request.headers}
        more = [("Cookie", self._jar.value(request.url)), ("Authorization", self._proof(request))]
        headers = [(name, value) for name, value in more if value and name.lower() not in own]
        super().ask(replace(request, headers=[*request.headers, *headers]))

    def _proof(self, request: ClientRequest) -> str:
        challenge = self._challenges.get(request.url.origin)
        user, password = request.login
        if challenge is None or user is None:
            return ""
        return challenge.answer(request.method, request.url.target, user, password or "")

    def status(self) -> int:
        """See `HttpConversation.status`; the one behind the last redirect."""
        while True:
            answered = self._response.status is not None
            status = super().status()
            if answered or self._asked is None:
                return status
            self._jar.keep(self._asked.url, self.headers)
            following = self._challenged() if status == 401 else self._following(status)
            if following is None:
                return status
            self.skip(_DRAIN_BYTES)
            self._ask(following)

    @property
    def url(self) -> Url | None:
        """Where the last request went."""
        return self._asked.url if self._asked else None

    def _following(self, status: int) -> ClientRequest | None:
        location = self.get("location")
        if status not in _REDIRECTS or location is None or self._redirects >= MAX_REDIRECTS:
            return None
        assert self._asked is not None
        self._redirects += 1
        self._proved = False
        url = joined(self._asked.url, location.encode("latin-1").decode("utf-8", "replace"))
        return self._asked.redirected(status, url)

    def _challenged(self) -> ClientRequest | None:
        """The same request again, when the server asked for a proof that can be given and was not."""
        assert self._asked is not None
        challenge = find_challenge([value for name, value in self.headers if name.lower() == "www-authenticate"])
        if challenge is None or self._asked.login[0] is None:
            return None
        had = self._challenges.get(self._asked.url.origin)
        self._remember(challenge)
        if self._proved or (had is not None and not challenge.stale) or self._asked.length != 0:
            return None
        self._proved = True
        return self._asked

    def _remember(self, challenge: Challenge) -> None:
        assert self._asked is not None
        if len(self._challenges) >= MAX_CHALLENGES:
            self._challenges.clear()
        self._challenges[self._asked.url.origin] = challenge


@dataclass(frozen=True, slots=True)
class Cookie:
    """A cookie as a server set it. `expires_s` is Unix time, None for one that lasts as long as the client."""

    name: str
    value: str
    path: str = "/"
    secure: bool = False
    expires_s: float | None = None


@dataclass(slots=True)
class CookieJar:
    """What a client keeps, by host, path and name."""

    _cookies: dict[tuple[str, str, str], Cookie] = field(default_factory=dict)

    def keep(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        """Keep (or forget) what a response of `url` sets."""
        for cookie in parse_cookies(headers, url):
            key = (url.host, cookie.path, cookie.name)
            if cookie.expires_s is not None and cookie.expires_s <= time.time():
                self._cookies.pop(key, None)
            elif not (cookie.secure and not url.secure) and (key in self._cookies or self._has_room(url.host)):
                self._cookies[key] = cookie

    def _has_room(self, host: str) -> bool:
        if len(self._cookies) >= MAX_COOKIES:
            now_s = time.time()
            self._cookies = {key: one for key, one in self._cookies.items() if (one.expires_s or now_s + 1) > now_s}
        of_host = sum(key[0] == host for key in self._cookies)
        return of_host < MAX_COOKIES_OF_HOST and len(self._cookies) < MAX_COOKIES

    def value(self, url: Url) -> str:
        """The Cookie field for a request to `url`, empty when there is none; longer paths come first."""
        fitting = [cookie for (host, _, _), cookie in self._cookies.items() if host == url.host and _fits(cookie, url)]
        fitting.sort(key=lambda cookie: -len(cookie.path))
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in fitting)


def parse_cookies(headers: Iterable[tuple[str, str]], url: Url | None = None) -> list[Cookie]:
    """The cookies that the fields of a response set. `url`: where it came from."""
    path = url.target.partition("?")[0].rpartition("/")[0] or "/" if url else "/"
    found = (_cookie(value, path) for name, value in headers if name.lower() == "set-cookie")
    return [cookie for cookie in found if cookie]


def _cookie(text: str, default_path: str) -> Cookie | None:
    pair, *attributes = text.split(";")
    name, equals, value = pair.partition("=")
    if not equals or not name.strip() or len(pair) > MAX_COOKIE_BYTES:
        return None
    known = {key.strip().lower(): word.strip() for key, _, word in (one.partition("=") for one in attributes)}
    path = known.get("path", "")
    if not path.startswith("/") or len(path) > MAX_COOKIE_BYTES:
        path = default_path
    return Cookie(name.strip(), value.strip(), path, "secure" in known, _expiry(known))


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


def _fits(cookie: Cookie, url: Url) -> bool:
    if cookie.secure and not url.secure or (cookie.expires_s is not None and cookie.expires_s <= time.time()):
        return False
    path = url.target.partition("?")[0]
    return path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/")


@dataclass(slots=True)
class Challenge:
    """What a server asked. Good for many requests to it.

    Attributes:
        fields: realm, nonce, and what else it said.
    """

    fields: dict[str, str]
    _count: int = field(default=0, init=False)

    @property
    def stale(self) -> bool:
        """Whether the credentials were right, and only the nonce was too old."""
        return self.fields.get("stale", "").lower() == "true"

    def answer(self, method: str, target: str, user: str, password: str, cnonce: str | None = None) -> str:
        """The value of the Authorization field for a request."""
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
    """The first challenge among the WWW-Authenticate fields that can be met, None when there is none."""
    for value in values:
        scheme, _, rest = value.strip().partition(" ")
        if scheme.lower() == "digest" and (challenge := _challenge_of(rest)):
            return challenge
    return None


def _challenge_of(text: str) -> Challenge | None:
    pairs = [part for part in parse_http_list(text) if part.partition("=")[2]]
    fields = {key.lower(): value for key, value in parse_keqv_list(pairs).items()}
    known = fields.get("algorithm", "MD5").upper().removesuffix("-SESS") in _HASHES
    protects = "auth" in fields.get("qop", "auth").replace(",", " ").lower().split()
    return Challenge(fields) if known and protects and {"realm", "nonce"} <= set(fields) else None


def _hash(name: str, text: str) -> str:
    return hashlib.new(name, text.encode()).hexdigest()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
