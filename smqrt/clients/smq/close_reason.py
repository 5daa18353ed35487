"""The end of a client's connection: one object with a word for programs and a sentence for people."""

from __future__ import annotations

from smqrt.errors import CloseReason, ProtocolError, SmqrtError, StreamError
from smqrt.printable import printable
from smqrt.wire.smq import ConnackCode

REFUSALS = {
    ConnackCode.PROTOCOL_VERSION: "protocol version not supported",
    ConnackCode.SERVER_UNAVAILABLE: "server unavailable",
    ConnackCode.BAD_CREDENTIALS: "incorrect credentials",
    ConnackCode.CERTIFICATE_REQUIRED: "client certificate required",
    ConnackCode.CERTIFICATE_REJECTED: "client certificate not accepted",
    ConnackCode.ACCESS_DENIED: "access denied",
}
"""What each Connack code says in words (spec: smq §1.2)."""
_SENTENCES = {
    "sslnottrusted": "certificate not trusted",
    "sslhandshake": "TLS handshake failed",
    "cannotresolve": "host name not found",
    "cannotconnect": "no connection",
    "timeout": "no answer in time",
    "proxyauth": "the proxy wants other credentials",
}
_FINAL = frozenset(("sslnottrusted", "proxyauth"))


class ConnectionEnd(SmqrtError):
    """A connection ended, or could not be made.

    Attributes:
        word: what `onclose` receives: an error word (spec: bas-api §15), `nonsmq`, `protocolerror`, `pong`, `onauth`,
            `failed` (a function of the application), the words of a refusal, the text of the broker's Disconnect, or
            None for a Disconnect without text.
        code: the Connack code of a refusal, else 0.
        can_reconnect: whether trying again may help.
        by_broker: whether the broker asked for it with a Disconnect packet.
    """

    def __init__(
        self, word: str | None, message: str, *, code: int = 0, can_reconnect: bool = True, by_broker: bool = False
    ) -> None:
        super().__init__(printable(message))  # what the broker says may be in it
        self.word = word
        self.code = code
        self.can_reconnect = can_reconnect
        self.by_broker = by_broker


def refused(code: int, text: str) -> ConnectionEnd:
    """The end of a connection whose Connect the broker refused with `code` and `text`."""
    words = REFUSALS.get(ConnackCode(code), "") if code in REFUSALS else f"refused with code {code}"
    message = f"the broker refused the connection: {words}" + (f" ({text})" if text else "")
    return ConnectionEnd(words, message, code=code, can_reconnect=code == ConnackCode.SERVER_UNAVAILABLE)


def disconnected(text: str) -> ConnectionEnd:
    """The end that a Disconnect packet asks for. Only a server that goes down for a restart is worth coming back to."""
    message = "the broker ended the connection" + (f": {text}" if text else "")
    restart = text == CloseReason.SHUTDOWN.value
    return ConnectionEnd(text or None, message, can_reconnect=restart, by_broker=True)


def not_smq(detail: str, can_reconnect: bool = False) -> ConnectionEnd:
    """The end of a connection to something that is not an SMQ broker."""
    return ConnectionEnd("nonsmq", detail, can_reconnect=can_reconnect)


def protocol_error(error: ProtocolError) -> ConnectionEnd:
    """The end of a connection whose broker broke the protocol."""
    return ConnectionEnd("protocolerror", f"the broker broke the protocol: {error}")


def from_stream_error(error: StreamError, what: str) -> ConnectionEnd:
    """The end that a socket error means; `what` is the address it was about."""
    word = error.word
    if word == "cannotconnect" and "refused" in error.detail:
        message = "connection refused; is the server running there?"
    elif word in ("cannotresolve", "timeout"):
        message = _SENTENCES[word]
    else:
        message = _SENTENCES.get(word, word if word.startswith("prx") else "connection lost")
        message += f": {error.detail}" if error.detail else ""
    return ConnectionEnd(word, f"{what}: {message}", can_reconnect=word not in _FINAL)
