"""NATS client protocol without I/O.

There are encoders for clients, and a decoder for the data from servers. The protocol has lines of text that end with CR
LF; MSG and HMSG lines are followed by a payload of the size that they contain. Names are those of the protocol
reference (docs.nats.io, "Client Protocol").

The decoder reads each byte a constant number of times, however the server splits its data. After a `NatsError` the
stream cannot be decoded any further.
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
"""The default of servers; a server sends its limit in INFO."""
LARGEST_PAYLOAD_BYTES = 64 << 20
"""The largest limit that a server can be configured for."""
MAX_LINE_BYTES = 64 << 10
"""INFO is the longest line: it lists all servers of a cluster."""
MAX_SUBJECT_BYTES = 1024
"""By default servers accept 4096 bytes for a whole line."""
MESSAGES_AT_ONCE, BYTES_AT_ONCE = 8, 64 << 10
"""Messages and bytes that `NatsDecoder.decode` decodes before its caller can check the clock. A message may be a batch
for ten thousand subscribers."""

_TOKEN = r"[^\s.*>\x00-\x20\x7f]+"
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_PATTERN = re.compile(rf"(?:(?:{_TOKEN}|\*)\.)*(?:{_TOKEN}|\*|>)")
_QUEUE = re.compile(r"[^\s\x00-\x20\x7f]+")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_HEADER_VALUE = re.compile(r"[^\r\n\0]*")
_HEADER_LINE = b"NATS/1.0"
_MAX_NUMBER_DIGITS = 10  # larger numbers are invalid, and `int` of many digits is slow


# ---- encoding


@lru_cache(maxsize=8192)
def subject_bytes(subject: str) -> bytes:
    """Encode a subject to publish to.

    Raises:
        ArgumentError: it is not a valid subject.
    """
    return _checked(subject, _SUBJECT, "a subject is words with points between: 'a.b.c', without spaces, * and >")


def pattern_bytes(pattern: str) -> bytes:
    """Encode a subject to subscribe to; `*` matches one word, `>` at the end matches one or more.

    Raises:
        ArgumentError: it is not a valid subject.
    """
    return _checked(pattern, _PATTERN, "it is words with points between, each may be *, the last one may be >")


def queue_bytes(queue: str) -> bytes:
    """Encode the name of a queue group.

    Raises:
        ArgumentError: it is not a valid name.
    """
    return _checked(queue, _QUEUE, "the name of a queue group has no spaces")


def _checked(text: str, rule: re.Pattern[str], expected: str) -> bytes:
    if rule.fullmatch(text) is None:
        raise ArgumentError(f"{text[:80]!r} is not a valid subject or name: {expected}")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{text[:80]!r} can't be sent as UTF-8") from None
    if len(data) > MAX_SUBJECT_BYTES:
        raise ArgumentError(f"a subject or name of {len(data)} bytes; at most {MAX_SUBJECT_BYTES} are allowed")
    return data


def connect(options: Mapping[str, object]) -> bytes:
    """Return a CONNECT line.

    Args:
        options: the options of CONNECT by their names in the protocol reference.
    """
    return b"CONNECT %b\r\n" % json.dumps(options, separators=(",", ":")).encode()


def pub(subject: str, payload: bytes, reply: str | None = None) -> bytes:
    """Return a PUB message.

    Raises:
        ArgumentError: a subject is not valid.
    """
    if reply is None:
        return b"PUB %b %d\r\n%b\r\n" % (subject_bytes(subject), len(payload), payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject_bytes(subject), subject_bytes(reply), len(payload), payload)


def pub_pieces(subject: str, pieces: Sequence[bytes | memoryview]) -> bytes:
    """Return a PUB message whose payload is in pieces; they are copied only once. Raises as `pub`."""
    line = b"PUB %b %d\r\n" % (subject_bytes(subject), sum(map(len, pieces)))
    return b"".join((line, *pieces, b"\r\n"))


def hpub(subject: str, payload: bytes, headers: bytes, reply: str | None = None) -> bytes:
    """Return an HPUB message with headers from `headers_bytes`. Raises as `pub`."""
    answer_to = b"" if reply is None else b"%b " % subject_bytes(reply)
    sizes = len(headers), len(headers) + len(payload)
    return b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject_bytes(subject), answer_to, *sizes, headers, payload)


def sub(pattern: str, sid: int, queue: str | None = None) -> bytes:
    """Return a SUB line: subscribe with the number `sid`.

    Raises:
        ArgumentError: the subject or the name of the queue group is not valid.
    """
    if queue is None:
        return b"SUB %b %d\r\n" % (pattern_bytes(pattern), sid)
    return b"SUB %b %b %d\r\n" % (pattern_bytes(pattern), queue_bytes(queue), sid)


def unsub(sid: int) -> bytes:
    """Return an UNSUB line: end a subscription."""
    return b"UNSUB %d\r\n" % sid


# ---- headers


def headers_bytes(headers: Mapping[str, str]) -> bytes:
    """Encode headers.

    Raises:
        ArgumentError: a name or a value has forbidden characters.
    """
    lines = [_HEADER_LINE]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ArgumentError(f"header {name[:80]!r}: no spaces or colons in names, no line breaks in values")
        lines.append(f"{name}: {value}".encode())
    return b"\r\n".join((*lines, b"", b""))


def parse_headers(block: bytes) -> tuple[int | None, dict[str, str]]:
    """Return the status (503: no responders) and the headers; of several with one name, the last one.

    Raises:
        NatsError: they are malformed.
    """
    first, *lines = block.split(b"\r\n")
    words = first.split(None, 2)
    if not words or words[0] != _HEADER_LINE or lines[-2:] != [b"", b""]:
        raise NatsError(f"malformed headers: {first[:40]!r}")
    status = _number(words[1]) if len(words) > 1 else None
    found = {}
    for line in lines[:-2]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise NatsError(f"header without a colon: {line[:40]!r}")
        found[name.decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return status, found


# ---- decoding


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The fields of INFO that clients need.

    Attributes:
        server_id, server_name, version, cluster: empty when they are missing.
        max_payload_bytes: largest message that the server accepts.
        auth_required, tls_required, tls_available, headers: requirements and features of the server.
        nonce: the text that clients with an nkey sign; empty for none.
        connect_urls: "host:port" of the servers of its cluster.
        is_lame_duck: whether the server shuts down soon; clients should connect to another one.
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
    """Parse the JSON object of INFO.

    Raises:
        NatsError: it is not a JSON object, or a value has the wrong type.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NatsError(f"INFO is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise NatsError("INFO is not a JSON object")
    values: dict[str, Any] = {}
    for name in ServerInfo.__slots__:
        default, key = getattr(_EMPTY_INFO, name), _INFO_FIELDS.get(name, name)
        value = found.get(key)
        if value is None:
            continue
        if name == "connect_urls" and isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = tuple(value)
        elif type(value) is not type(default) or (isinstance(value, int) and not 0 <= value <= LARGEST_PAYLOAD_BYTES):
            raise NatsError(f"INFO: invalid {key}: {str(value)[:40]!r}")
        values[name] = value
    return ServerInfo(**values)


_EMPTY_INFO = ServerInfo()


class NatsEvents(Protocol):
    """Receiver of decoded operations, in the order of their arrival."""

    def on_message(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """MSG or HMSG for the subscription `sid`; `reply` and `headers` are empty when there are none."""

    def on_info(self, info: ServerInfo) -> None:
        """INFO: the first operation, sent again after each change."""

    def on_ping(self) -> None:
        """PING: the server expects a PONG."""

    def on_pong(self) -> None:
        """PONG: the answer to the oldest unanswered PING."""

    def on_error(self, text: str) -> None:
        """-ERR, without the quotes. The server may close the connection after it."""


class NatsDecoder:
    """Decoder for data from a server, in pieces of any size.

    Args:
        events: receives the operations.
        max_payload_bytes: limits the memory; servers may send larger messages than they accept.

    Attributes:
        events: may be replaced between two calls of `decode`.
        messages, payload_bytes: the number of messages, and the bytes of their payload and headers.
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
        self._next = b"", 0  # data that follows `_data`, and the position where it continues
        self._held = bytearray()  # an incomplete line or message
        self._needed_bytes = 0  # size of that message
        self._is_line = True  # whether it is a line
        self.messages = self.payload_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes. Call it when `decode` has returned false.

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
        """Call the events for complete operations, up to `MESSAGES_AT_ONCE` and about `BYTES_AT_ONCE`.

        Returns:
            Whether there is more to decode.

        Raises:
            NatsError: the server violated the protocol.
        """
        data, at = self._data, self._at
        find, on_message = data.find, self.events.on_message
        until, messages, payload_bytes = min(at + BYTES_AT_ONCE, len(data)), 0, 0
        try:
            for _ in range(MESSAGES_AT_ONCE):
                if at >= until:  # the caller checks the clock
                    break
                end = find(b"\n", at, at + MAX_LINE_BYTES)
                if end < 0:
                    at = self._hold(data, at)
                    break
                line = data[at:end]
                words = line.split()  # MSG subject sid [reply-to] size; HMSG has the headers' size before the size
                kind, headers_size = words[0] if words else b"", 0
                if kind == b"HMSG":
                    headers_size = _pop_headers_size(words)
                elif kind != b"MSG":
                    at = end + 1
                    self._control(kind, line)
                    continue
                if not 4 <= len(words) <= 5 or line[-1:] != b"\r":
                    raise NatsError(f"malformed message line: {line[:80]!r}")
                size = _number(words[-1])
                body, stop = end + 1 + headers_size, end + 1 + size
                if not headers_size <= size <= self._max_payload_bytes:
                    raise NatsError(f"invalid size of a message: {size} bytes, of these {headers_size} for headers")
                if stop + 2 > len(data):
                    at = self._hold(data, at, stop + 2 - at)
                    break
                if not data.startswith(b"\r\n", stop):
                    raise NatsError("no CR LF at the end of a message")
                at = stop + 2
                messages += 1
                payload_bytes += size
                reply = words[3] if len(words) == 5 else b""
                on_message(words[2], words[1], reply, data[body:stop], data[end + 1 : body])
        finally:
            self._at = at
            self.messages += messages
            self.payload_bytes += payload_bytes
        if at < len(data):
            return True
        self._data, self._at = self._next
        self._next = b"", 0
        return self._at < len(self._data)

    def _hold(self, data: bytes, at: int, needed_bytes: int = 0) -> int:
        """Keep an incomplete message of `needed_bytes`, or an incomplete line (0); return the end of the data."""
        if not needed_bytes and len(data) - at >= MAX_LINE_BYTES:
            raise _too_long(data[at : at + 40])
        self._held += memoryview(data)[at:]
        self._is_line, self._needed_bytes = not needed_bytes, needed_bytes
        return len(data)

    def _control(self, word: bytes, line: bytes) -> None:
        if line[-1:] != b"\r":
            raise NatsError(f"no CR at the end of a line: {line[:40]!r}")
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
            raise NatsError(f"unknown operation: {line[:40]!r}")


def _pop_headers_size(words: list[bytes]) -> int:
    """Remove the size of the headers from the words of an HMSG line, and return it."""
    size = _number(words[-2]) if len(words) > 4 else 0
    if not size:
        raise NatsError("HMSG without headers")
    del words[-2]
    return size


def _number(word: bytes) -> int:
    if len(word) > _MAX_NUMBER_DIGITS or not word.isdigit():
        raise NatsError(f"not a number: {word[:40]!r}")
    return int(word)


def _too_long(beginning: bytes) -> NatsError:
    return NatsError(f"a line of more than {MAX_LINE_BYTES} bytes: {beginning!r}")
