"""Address and credentials of an outgoing proxy, and the error words of proxies."""

from __future__ import annotations

from dataclasses import dataclass, field

from smqrt.errors import ArgumentError, StreamError
from smqrt.wire.url import basic_authorization

HTTP_PORT, SOCKS_PORT = 8080, 1080
"""Default ports of proxies."""
_MAX_CREDENTIAL_BYTES = 255  # RFC 1929
_WORDS = {
    2: "prxnotallowed",
    3: "prxnetunreachable",
    4: "prxhostunreachable",
    5: "prxrefused",
    6: "prxttlexpired",
    7: "prxcommand",
    8: "prxaddress",
}
"""Error words by reply code (RFC 1928 §6)."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy.

    Attributes:
        host, port: its address.
        socks: whether it is a SOCKS5 proxy, otherwise HTTP.
        user, password: credentials; None for none.

    Raises:
        ArgumentError: the protocol cannot send the user or the password.
    """

    host: str
    port: int
    socks: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for what, text in (("user", self.user), ("password", self.password)):
            if self.socks and text is not None and not (text.isascii() and 0 < len(text) <= _MAX_CREDENTIAL_BYTES):
                raise ArgumentError(f"the {what} of a SOCKS proxy has 1 to {_MAX_CREDENTIAL_BYTES} ASCII characters")

    @property
    def authorization(self) -> str | None:
        """Value of the Proxy-Authorization field; None without a user."""
        return None if self.user is None else basic_authorization(self.user, self.password)


def proxy_failure(code: int | None, text: str) -> StreamError:
    """Return the error for a failure that python-socks reports for a SOCKS5 proxy.

    Args:
        code: the reply code of the proxy; None when the proxy sent none.
        text: the message of the library.
    """
    if code is not None:
        word = _WORDS.get(code, "prxgeneral")
    else:
        word = "proxyauth" if "authentication" in text else "prxnotcompatible"
    return StreamError(word, text)
