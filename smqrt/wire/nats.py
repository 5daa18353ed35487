"""The NATS client protocol without I/O: what a client says as bytes, and a decoder of what a server says.

The protocol is lines of text, each ended by CR LF; behind the lines MSG and HMSG come as many bytes of payload as they
say. The names are those of the client protocol's reference (docs.nats.io, "Client Protocol").

Every byte is looked at a constant number of times, however a server cuts what it sends, and what breaks a rule is a
`NatsError`: a stream of this protocol can't be picked up again behind an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from smqrt.errors import ArgumentError, NatsError

PING, PONG = b"PING\r\n", b"PONG\r\n"
DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20
"""What servers take by default; each says in INFO what it does."""
LARGEST_PAYLOAD_BYTES = 64 << 20
"""No server can be told to take more."""
MAX_LINE_BYTES = 64 << 10
"""The longest line is INFO, which lists all servers of a cluster."""
MAX_SUBJECT_BYTES = 1024
"""Servers take 4096 bytes for a whole line by default."""
MESSAGES_AT_ONCE, BYTES_AT_ONCE = 8, 64 << 10
"""What `NatsDecoder.decode` does before it lets its caller look at the clock: a message may be a batch of many, for ten
thousand subscribers each."""

_TOKEN = r"[^\s.*>\x00-\x20\x7f]+"
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_PATTERN = re.compile(rf"(?:(?:{_TOKEN}|\*)\.)*(?:{_TOKEN}|\*|>)")
_QUEUE = re.compile(r"[^\s\x00-\x20\x7f]+")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_HEADER_VALUE = re.compile(r"[^\r\n\0]*")
_HEADER_LINE = b"NATS/1.0"
_MAX_NUMBER = 10  # digits, so that no number is long work


# ---- what a client says


@lru_cache(maxsize=8192)
def subject_bytes(subject: str) -> bytes:
    """A subject to publish to, as it is sent.

    Raises:
        ArgumentError: it is none.
    """
    return _checked(subject, _SUBJECT, "a subject is words with points between: 'a.b.c', without spaces, * and >")


def pattern_bytes(pattern: str) -> bytes:
    """A subject to subscribe to, as it is sent: `*` stands for one word, `>` at the end for all that follow.

    Raises:
        ArgumentError: it is none.
    """
    return _checked(pattern, _PATTERN, "it is words with points between, each may be *, the last one may be >")


def queue_bytes(queue: str) -> bytes:
    """The name of a queue group, as it is sent.

    Raises:
        ArgumentError: it is none.
    """
    return _checked(queue, _QUEUE, "the name of a queue group has no spaces")


def _checked(text: str, rule: re.Pattern[str], says: str) -> bytes:
    if rule.fullmatch(text) is None:
        raise ArgumentError(f"{text[:80]!r} is no subject or name: {says}")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{text[:80]!r} can't be sent as UTF-8") from None
    if len(data) > MAX_SUBJECT_BYTES:
        raise ArgumentError(f"a subject or name of {len(data)} bytes; at most {MAX_SUBJECT_BYTES} are allowed")
    return data


def connect(options: Mapping[str, object]) -> bytes:
    """CONNECT, with the options of the reference by their names."""
    return b"CONNECT %b\r\n" % json.dumps(options, separators=(",", ":")).encode()


def pub(subject: str, payload: bytes, reply: str | None = None) -> bytes:
    """PUB: a message.

    Raises:
        ArgumentError: a subject is none.
    """
    if reply is None:
        return b"PUB %b %d\r\n%b\r\n" % (subject_bytes(subject), len(payload), payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject_bytes(subject), subject_bytes(reply), len(payload), payload)


def pub_pieces(subject: str, pieces: Sequence[bytes | memoryview]) -> bytes:
    """PUB: a message whose payload is in pieces, which are copied this once only. Raises as `pub`."""
    line = b"PUB %b %d\r\n" % (subject_bytes(subject), sum(map(len, pieces)))
    return b"".join((line, *pieces, b"\r\n"))


def hpub(subject: str, payload: bytes, headers: bytes, reply: str | None = None) -> bytes:
    """HPUB: a message with headers, made by `headers_bytes`. Raises as `pub`."""
    answer_to = b"" if reply is None else b"%b " % subject_bytes(reply)
    sizes = len(headers), len(headers) + len(payload)
    return b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject_bytes(subject), answer_to, *sizes, headers, payload)


def sub(pattern: str, sid: int, queue: str | None = None) -> bytes:
    """SUB: subscribe under the number `sid`.

    Raises:
        ArgumentError: the subject or the name of the queue group is none.
    """
    if queue is None:
        return b"SUB %b %d\r\n" % (pattern_bytes(pattern), sid)
    return b"SUB %b %b %d\r\n" % (pattern_bytes(pattern), queue_bytes(queue), sid)


def unsub(sid: int) -> bytes:
    """UNSUB: end a subscription."""
    return b"UNSUB %d\r\n" % sid


# ---- headers


def headers_bytes(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent.

    Raises:
        ArgumentError: a name or a value has characters that it must not have.
    """
    lines = [_HEADER_LINE]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ArgumentError(f"header {name[:80]!r}: a name has no spaces and colons, a value no line ends")
        lines.append(f"{name}: {value}".encode())
    return b"\r\n".join((*lines, b"", b""))


def parse_headers(block: bytes) -> tuple[int | None, dict[str, str]]:
    """The status (503: nobody answers requests to this subject) and the headers; of several with one name, the last.

    Raises:
        NatsError: it is no block of headers.
    """
    first, *lines = block.split(b"\r\n")
    words = first.split(None, 2)
    if not words or words[0] != _HEADER_LINE or lines[-2:] != [b"", b""]:
        raise NatsError(f"headers that begin with {first[:40]!r}, or have no end")
    status = _number(words[1]) if len(words) > 1 else None
    found = {}
    for line in lines[:-2]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise NatsError(f"a header without a colon: {line[:40]!r}")
        found[name.decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return status, found


# ---- what a server says


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself in INFO, as far as clients need it.

    Attributes:
        server_id, server_name, version, cluster: empty when it doesn't say.
        max_payload_bytes: it takes no larger message.
        auth_required, tls_required, tls_available, headers: what it wants and knows.
        nonce: to be signed by clients with an nkey; empty for none.
        connect_urls: "host:port" of the servers of its cluster.
        is_lame_duck: it will end soon; clients should go to another one.
    """

    server_id: str = ""
    server_name: str = ""
    version: str = ""
    cluster: str = ""
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    auth_required: bool = False
    tls_required: bool = False
    tls_available: bool = False
    headers: bool = False
    nonce: str = ""
    connect_urls: tuple[str, ...] = ()
    is_lame_duck: bool = False


_INFO_FIELDS = {"max_payload_bytes": "max_payload", "is_lame_duck": "ldm"}


def parse_info(text: bytes) -> ServerInfo:
    """Read what stands behind INFO.

    Raises:
        NatsError: it is no JSON object, or a value has another type than it should.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NatsError(f"INFO is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise NatsError("INFO is no JSON object")
    values: dict[str, Any] = {name: _value(found, name) for name in ServerInfo.__slots__}
    return ServerInfo(**values)


def _value(found: dict[str, object], name: str) -> object:
    default: object = getattr(_NOTHING_SAID, name)
    key = _INFO_FIELDS.get(name, name)
    value = found.get(key)
    if value is None:
        return default
    if name == "connect_urls" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value <= LARGEST_PAYLOAD_BYTES):
        raise NatsError(f"INFO has {key} = {str(value)[:40]!r}")
    return value


_NOTHING_SAID = ServerInfo()


class NatsEvents(Protocol):
    """What a decoder tells, in the order in which it came."""

    def on_message(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """MSG or HMSG: a message for the subscription `sid`; `reply` and `headers` are empty when it has none."""

    def on_info(self, info: ServerInfo) -> None:
        """INFO: first of all, and whenever something of it changes."""

    def on_ping(self) -> None:
        """PING: wants a PONG."""

    def on_pong(self) -> None:
        """PONG: the answer to the oldest PING without one."""

    def on_error(self, text: str) -> None:
        """-ERR, without the quotes. The server may close the connection behind it."""


class NatsDecoder:
    """Takes the bytes of a server, in pieces as they come, and tells its events.

    Args:
        events: takes what came.
        max_payload_bytes: a larger message is an error; servers may send more than they take, so this is memory's.

    Attributes:
        events: may be another one from the next `decode` on.
        messages, payload_bytes: how many came, and how many bytes of payload and headers.
    """

    __slots__ = (
        "_at",
        "_data",
        "_held",
        "_is_line",
        "_max_payload_bytes",
        "_needed_bytes",
        "_next",
        "events",
        "messages",
        "payload_bytes",
    )

    def __init__(self, events: NatsEvents, max_payload_bytes: int = LARGEST_PAYLOAD_BYTES) -> None:
        self.events, self._max_payload_bytes = events, max_payload_bytes
        self._data, self._at = b"", 0
        self._next = b"", 0  # what is to be decoded behind that
        self._held = bytearray()  # what is not whole yet
        self._needed_bytes = 0
        self._is_line = True
        self.messages = self.payload_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what was received, when `decode` has nothing left of what came before.

        Raises:
            NatsError: a line is too long.
        """
        held = self._held
        if not held:
            self._data, self._at = data, 0
            return
        missing = len(data) if self._is_line else self._needed_bytes - len(held)
        held += data if len(data) <= missing else memoryview(data)[:missing]
        if self._is_line:
            if b"\n" not in data:
                if len(held) >= MAX_LINE_BYTES:
                    raise _too_long(bytes(held[:40]))
                return
        elif len(data) < missing:
            return
        self._data, self._at = bytes(held), 0
        self._next = data, missing
        held.clear()

    def decode(self) -> bool:
        """Tell the events of what is whole, at most `MESSAGES_AT_ONCE` and, but for the last one, `BYTES_AT_ONCE`.

        Returns:
            Whether there is more.

        Raises:
            NatsError: the server broke a rule; nothing more can be decoded.
        """
        data, at = self._data, self._at
        find, on_message = data.find, self.events.on_message
        until, messages, payload_bytes = min(at + BYTES_AT_ONCE, len(data)), 0, 0
        try:
            for _ in range(MESSAGES_AT_ONCE):
                if at >= until:
                    break
                end = find(b"\n", at, at + MAX_LINE_BYTES)
                if end < 0:
                    self._hold_line(at)
                    at = len(data)
                    break
                line = data[at:end]
                words = line.split()
                kind, headers_size = words[0] if words else b"", 0
                if kind == b"HMSG":
                    headers_size = _headers_size(words)
                    del words[-2]
                elif kind != b"MSG":
                    at = end + 1
                    self._control(kind, line)
                    continue
                if not 4 <= len(words) <= 5 or line[-1:] != b"\r":
                    raise NatsError(f"a message whose line is {line[:80]!r}")
                size = _number(words[-1])
                first, stop = end + 1, end + 1 + size
                if not headers_size <= size <= self._max_payload_bytes:
                    raise NatsError(f"a message of {size} bytes with {headers_size} bytes of headers")
                if stop + 2 > len(data):
                    self._hold(at, stop + 2 - at)
                    at = len(data)
                    break
                if not data.startswith(b"\r\n", stop):
                    raise NatsError("a message that is longer than it says")
                at = stop + 2
                messages += 1
                payload_bytes += size
                body = first + headers_size
                reply = words[3] if len(words) == 5 else b""
                on_message(words[2], words[1], reply, data[body:stop], data[first:body])
        finally:
            self._at = at
            self.messages += messages
            self.payload_bytes += payload_bytes
        if at < len(data):
            return True
        self._data, self._at = self._next
        self._next = b"", 0
        return self._at < len(self._data)

    def _hold_line(self, at: int) -> None:
        if len(self._data) - at >= MAX_LINE_BYTES:
            raise _too_long(self._data[at : at + 40])
        self._held += self._data[at:]
        self._is_line = True

    def _hold(self, at: int, needed_bytes: int) -> None:
        self._held += memoryview(self._data)[at:]
        self._is_line, self._needed_bytes = False, needed_bytes

    def _control(self, word: bytes, line: bytes) -> None:
        if line[-1:] != b"\r":
            raise NatsError(f"a line without CR at its end: {line[:40]!r}")
        rest = line.strip()[len(word) :]
        kind, events = word.upper(), self.events
        if kind == b"PING":
            events.on_ping()
        elif kind == b"PONG":
            events.on_pong()
        elif kind == b"INFO":
            events.on_info(parse_info(rest))
        elif kind == b"-ERR":
            events.on_error(rest.strip().strip(b"'").decode("utf-8", "replace"))
        elif kind != b"+OK":
            raise NatsError(f"an unknown operation: {line[:40]!r}")


def _number(word: bytes) -> int:
    if len(word) > _MAX_NUMBER or not word.isdigit():
        raise NatsError(f"{word[:40]!r} is no number")
    return int(word)


def _headers_size(words: list[bytes]) -> int:
    size = _number(words[-2]) if len(words) > 4 else 0
    if not size:
        raise NatsError("HMSG without headers")
    return size


def _too_long(beginning: bytes) -> NatsError:
    return NatsError(f"a line of more than {MAX_LINE_BYTES} bytes: {beginning!r}")
