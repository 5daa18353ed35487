"""Exceptions and close reasons of smqrt.

SmqrtError
├── ProtocolError      the remote side violated the protocol; the connection closes with `reason`
├── MqttError          an MQTT packet violates the standard; `code` is the reason code to send
├── NatsError          a NATS server violated its protocol
├── ArgumentError      an argument is invalid; the message names it (also a ValueError)
├── ClosedError        an object was used after its close()
├── DeniedError        the broker denied a name or a subscription
├── EventLoopError     a client for gevent was created in a function of asyncio (also a RuntimeError)
├── NoAnswer           a request was not answered in time (also a TimeoutError)
├── DeliveryError      a client was closed before the broker confirmed its messages
├── DroppedError       a published message was dropped; `reason` is the word or the reason code
├── StoreError         the store of an MQTT client can't be opened, read or written
├── QueueFullError     a send queue reached its limit; the message names the setting
├── StreamError        a connection failed; `word` is the error word
├── CryptoError        a key, certificate, token or ciphertext is invalid; `word` is the error word
├── AcmeError          a certificate could not be ordered; one sentence with the remedy
├── JournalError       a journal can't be opened, read or written; one sentence with the remedy
├── PipelineError      a pipeline can't be read, planned or run; one sentence with the remedy
└── StartError         the server can't start; one sentence for the terminal
"""

from __future__ import annotations

from enum import Enum


class SmqrtError(Exception):
    """Base class of all exceptions of smqrt."""


class CloseReason(Enum):
    """Close reason of a connection. The value appears in the log, and is the last argument of `onclose`."""

    CLIENT_DISCONNECT = "disconnect"
    PEER_CLOSED = "connection ended"
    READ_FAILED = "read failed"
    WRITE_FAILED = "write failed"
    TAKEN_OVER = "reconnect"
    REFUSED = "refused"
    LOGIN_ENDED = "login ended"
    BAD_CONNECT = "bad connect"
    CONNECT_TIMEOUT = "timeout"
    FORGED_PUBLISHER = "corrupt frame"
    SHORT_PACKET = "short packet"
    UNKNOWN_PACKET = "unknown packet"
    SECOND_CONNECT = "second connect"
    FRAGMENT_TOO_LARGE = "fragment too large"
    FRAGMENT_NOT_ALLOWED = "fragment not allowed"
    WEBSOCKET_PROTOCOL = "websocket protocol error"
    WEBSOCKET_CLOSED = "websocket closed"
    INVALID_TEXT = "text that is not UTF-8"
    TOO_MANY_FRAGMENTS = "too many fragments"
    MESSAGE_TOO_LARGE = "message too large"
    SLOW_CONSUMER = "slow consumer"
    PUBLISH_RATE = "publish rate"
    IDLE = "idle"
    MQTT_PROTOCOL = "mqtt protocol error"
    HOOK_FAILED = "hook failed"
    SHUTDOWN = "sysshutdown"
    RESTARTED = "restart"

    # Enum's own is a call of Python, and each connection has several look-ups by reason.
    __hash__ = object.__hash__

    @property
    def word(self) -> str:
        """The error word for `onclose`; empty after a Disconnect and for protocol errors (spec: smq §2.2)."""
        return _WORDS.get(self, "")


# Several reasons have the same word: Lua applications compare the documented words (spec: smq §2.2).
_WORDS = {
    CloseReason.WEBSOCKET_CLOSED: "socketclosed",
    CloseReason.PEER_CLOSED: "socketreadfailed",
    CloseReason.READ_FAILED: "socketreadfailed",
    CloseReason.WRITE_FAILED: "socketwritefailed",
    CloseReason.SLOW_CONSUMER: "socketwritefailed",
    CloseReason.IDLE: "socketreadfailed",
    CloseReason.TAKEN_OVER: "reconnect",
    CloseReason.SHUTDOWN: "sysshutdown",
    CloseReason.RESTARTED: "sysshutdown",
}


class ProtocolError(SmqrtError):
    """The remote side violated the protocol.

    Args:
        reason: the close reason.
        detail: one sentence for the log.
    """

    def __init__(self, reason: CloseReason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class MqttError(SmqrtError):
    """An MQTT packet violates the standard.

    Args:
        code: the reason code of this error (MQTT 5 §2.4).
        detail: one sentence for the log.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class NatsError(SmqrtError):
    """A NATS server violated its protocol; the message names the rule."""


class ArgumentError(SmqrtError, ValueError):
    """An argument is invalid; the message names the argument, the rule and the remedy."""


class ClosedError(SmqrtError):
    """An object was used after its `close()`; the message names it."""


class DeniedError(SmqrtError):
    """The broker denied a name or a subscription; the message names it."""


class EventLoopError(SmqrtError, RuntimeError):
    """A client for gevent was created in a function of an asyncio event loop; the message names the other client."""


class NoAnswer(SmqrtError, TimeoutError):
    """A request was not answered in time, or the receiver or the connection was closed."""


class DeliveryError(SmqrtError):
    """A client was closed before the broker confirmed all published messages."""


class DroppedError(SmqrtError):
    """A published message was dropped, and the broker does not have it.

    Args:
        reason: "dropped" (a newer message replaced it in the full queue), "lost" (QoS 0: the connection ended first),
            "toolarge" (for this client or the broker), or the reason code with which the broker refused it.
        detail: one sentence with the reason.
    """

    def __init__(self, reason: str | int, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class StoreError(SmqrtError):
    """The store of an MQTT client can't be opened, read or written; the message names the file and the remedy."""


class QueueFullError(SmqrtError):
    """A send queue has reached its limit; the message names the setting."""


class StreamError(SmqrtError):
    """A connection failed or could not be established.

    Args:
        word: the error word for applications, such as "timeout" or "socketclosed" (spec: bas-api §15).
        detail: one sentence for the log.
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(f"{word}: {detail}" if detail else word)
        self.word, self.detail = word, detail


class CryptoError(SmqrtError):
    """A key, certificate, token or ciphertext is invalid.

    Args:
        word: the error word of Lua's functions, such as "failed" for modified data or "sslcryptoerr" for a wrong key.
        detail: one sentence with the details.
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(detail or word)
        self.word = word


class StartError(SmqrtError):
    """The server can't start; the message is one sentence with the remedy."""


class AcmeError(SmqrtError):
    """A certificate could not be ordered; the message names the reason and the remedy.

    Attributes:
        retry_after_s: seconds to wait, from the certificate authority; 0 when it sends none.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PipelineError(SmqrtError):
    """A pipeline can't be read, planned or run; the message names the position, the rule and the remedy."""


class JournalError(SmqrtError):
    """A journal can't be opened, read or written; the message names the file, the reason and the remedy."""
