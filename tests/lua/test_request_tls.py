"""What pages learn about a request over TLS (spec: bas-api §2.1)."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection

from app_server import AppServer
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.net.listener import Listener
from smqrt.net.selfsigned import self_signed_pair
from smqrt.net.tls import server_context


def test_a_page_over_tls(server: AppServer, tmp_path):
    server.write("", {"p.lsp": "<?lsp print(request:issecure(), request:url(), request:cipher()) ?>"})
    server.app({})
    tls = server_context(*self_signed_pair("127.0.0.1", tmp_path / "tls"))
    listener = Listener("127.0.0.1", 0, server.server.accepted_secure, tls)
    listener.start()
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = HTTPConnection("h")
    client.sock = context.wrap_socket(socket.create_connection(listener.address, timeout=5))
    client.request("GET", "/p.lsp")
    assert client.getresponse().read().startswith(b"true\thttps://h/p.lsp\tTLS_")
    client.close()
    listener.close()
