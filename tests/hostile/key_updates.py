"""A TLS client that changes its keys again and again, which Python's own TLS can't: `python key_updates.py PORT COUNT
ASKS`, with what it says before on standard input. ASKS is 1 to ask for changes of the server's keys too."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
import sys

_TLS = ctypes.CDLL(ctypes.util.find_library("ssl") or "libssl.so.3")
_POINTER = ctypes.c_void_p
for _name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
    getattr(_TLS, _name).restype = _POINTER


def main() -> None:
    """Send `COUNT` changes, or as many as the server takes."""
    port, count, asks = map(int, sys.argv[1:])
    sock = socket.create_connection(("127.0.0.1", port), 20)
    sock.settimeout(None)
    tls = _POINTER(_TLS.SSL_new(_POINTER(_TLS.SSL_CTX_new(_POINTER(_TLS.TLS_client_method())))))
    _TLS.SSL_set_fd(tls, sock.fileno())
    assert _TLS.SSL_connect(tls) == 1
    first = sys.stdin.buffer.read()
    if first:
        assert _TLS.SSL_write(tls, first, len(first)) == len(first)
    sent = 0
    while sent < count and _TLS.SSL_key_update(tls, asks) == 1 and _TLS.SSL_do_handshake(tls) == 1:
        sent += 1
    print(sent)


if __name__ == "__main__":
    main()
