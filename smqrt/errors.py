"""Every error of smqrt and every way a connection ends.

    SmqrtError
    ├── ProtocolError      the remote side broke a rule; the connection ends with `reason`
    ├── MqttError          an MQTT packet breaks a rule; `code` is the reason code to part with
    ├── NatsError          what a NATS server sent breaks a rule of its protocol
    ├── ArgumentError      the caller passed a wrong argument; the message names it (also a ValueError)
    ├── ClosedError        something was used after its close()
    ├── NoAnswer           a request got no answer in time (also a TimeoutError)
    ├── DeliveryError      a client ended before the broker had its messages
    ├── QueueFullError     what waits to be sent has reached its limit; the message names the setting
    ├── StreamError        a connection failed; `word` says how
    ├── CryptoError        a key, certificate or ciphertext is not what it should be; `word` says how
    ├── AcmeError          a certificate could not be ordered; one sentence with the remedy
    ├── JournalError       a journal can't be opened, read or written; one sentence with the remedy
    ├── PipelineError      a pipeline can't be read, planned or run; one sentence with the remedy
    └── StartError         the server can't start; one sentence for the person at the terminal

`CloseReason` names the endings, so that an operator reads why a client went away.
"""

from __future__ import annotations

from enum import Enum


class SmqrtError(Exception):
    """Base of all errors raised by smqrt."""


class CloseReason(Enum):
    """Why a connection ended. The value is what the log shows, and the last argument of `onclose`."""

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
    HOOK_FAILED = "hook failed"
    SHUTDOWN = "sysshutdown"
    RESTARTED = "restart"

    @property
    def word(self) -> str:
        """What `onclose` gets as the error: the word of the original, empty for a good-bye and for errors of protocol
        (spec: smq §2.2).
        """
        return _WORDS.get(self, "")


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
    """The remote side broke a rule of the protocol.

    Args:
        reason: the named ending.
        detail: one sentence for the log.
    """

    def __init__(self, reason: CloseReason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class MqttError(SmqrtError):
    """An MQTT packet breaks a rule of the standard.

    Args:
        code: the reason code that says so (MQTT 5 §2.4).
        detail: one sentence for the log.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class NatsError(SmqrtError):
    """What a NATS server sent breaks a rule of its protocol; the message says which."""


class ArgumentError(SmqrtError, ValueError):
    """A caller passed a wrong argument; the message names the argument, the rule and the remedy."""


class ClosedError(SmqrtError):
    """Something was used after its `close()`; the message names it."""


class NoAnswer(SmqrtError, TimeoutError):
    """A request got no answer: in time, or because who was asked, or the connection, is gone."""


class DeliveryError(SmqrtError):
    """A client ended, and messages handed in before did not reach the broker, or nobody knows whether they did."""


class QueueFullError(SmqrtError):
    """What waits to be sent has reached its limit; the message names the setting."""


class StreamError(SmqrtError):
    """A connection failed or could not be made.

    Args:
        word: how, as applications see it, such as "timeout" or "socketclosed" (spec: bas-api §15).
        detail: one sentence for the log.
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(f"{word}: {detail}" if detail else word)
        self.word, self.detail = word, detail


class CryptoError(SmqrtError):
    """A key, a certificate, a token or a ciphertext is not what it should be.

    Attributes:
        word: one of the words that Lua's functions answer.

    Args:
        word: "failed" for what was tampered with, "sslcryptoerr" for a wrong key, and so on.
        detail: what exactly, one sentence.
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(detail or word)
        self.word = word


class StartError(SmqrtError):
    """The server can't start; the message is one clear sentence."""


class AcmeError(SmqrtError):
    """A certificate could not be ordered; the message says why and what to do.

    Attributes:
        retry_after_s: seconds that the certificate authority asks to wait, 0 when it does not say.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PipelineError(SmqrtError):
    """A pipeline can't be read, planned or run; the message says where, which rule and what to do."""


class JournalError(SmqrtError):
    """A journal can't be opened, read or written; the message says which file, why and what to do."""
