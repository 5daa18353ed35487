"""The request object of pages over TLS (spec: bas-api §2.1)."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection

import trustme
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.http.client.client import HttpClientOptions, HttpConversation
from smqrt.http.client.exchange import ClientRequest, url_of
from smqrt.transport.listener import Listener
from smqrt.transport.tls_contexts import self_signed_pair
from tests.apps.lua.app_server import AppServer
from tests.support.pki import client_of, identity_of, server_context, server_of


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


def test_the_certificate_of_a_client(server: AppServer) -> None:
    ca, devices = trustme.CA(), trustme.CA()
    page = """<?lsp local c, same = request:certificate(), request:clientcert()
    print(c and c.subjectaltnames[1])
    assert((c and c.serial) == (same and same.serial)) ?>"""
    server.write("", {"p.lsp": page})
    server.app({})
    context = server_of(ca.issue_cert("127.0.0.1"), devices).context()
    listener = Listener("127.0.0.1", 0, server.server.accepted_secure, context)
    listener.start()
    tls = client_of(ca)
    options = HttpClientOptions(tls=tls, timeout_s=3)
    for shown in ("nil", "device-1.example"):
        client = HttpConversation(options)
        client.send_head(ClientRequest("GET", url_of(f"https://127.0.0.1:{listener.address[1]}/p.lsp"), trusted=True))
        assert client.read() == f"{shown}\n".encode()
        client.close()
        tls.add_identity(identity_of(devices.issue_cert("device-1.example")))
    assert (
        server.page("<?lsp print(request:certificate(), mako.sharkclient() == ba.sharkclient()) ?>").text
        == "nil\ttrue\n"
    )
    listener.close()
