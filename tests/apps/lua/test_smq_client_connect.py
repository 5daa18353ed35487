"""`require"smq.client"`: the way to the broker, through proxies and with TLS objects of Lua."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trustme

from smqrt.apps.lua.api import smq_client
from tests.apps.lua.app_server import AppServer
from tests.support.local_broker import LocalBroker
from tests.support.pki import server_of
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy

CONNECT = """<?lsp
    local store = ba.create.certstore()
    store:addcert(ba.openio"home", "ca.pem")
    local op = {%s}
    local smq = require"smq.client".create("%s", op)
    local outcome
    function smq.onconnect() outcome = "connected" end
    function smq.onclose(err) outcome = outcome or err end
    for _ = 1, 200 do
        if outcome then break end
        ba.sleep(10)
    end
    print(outcome)
    smq:close()
?>"""


@pytest.fixture
def ca(server: AppServer) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(server.folder / "ca.pem")
    smq_client.install_smq_client(server.vm, server.services)
    return authority


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    running = LocalBroker()
    yield running
    running.close()


CONNECT_FUNCTION = """<?lsp
    local seen = {}
    local function connect(self, op, cb)
        seen[#seen + 1] = op.mark
        local http = require"httpc".create()
        local ok, err = http:request{url = "%s", header = {SimpleMQ = "1", SendSmqHttpResponse = "true"}}
        if not ok then return cb(nil, err, "no way") end
        if http:status() ~= 200 then return cb(nil, "nonsmq") end
        cb(ba.socket.http2sock(http))
    end
    local smq = require"smq.client".create(connect, {mark = "m", timeout = 1000})
    function smq.onconnect()
        local function onmsg(data) seen[#seen + 1] = data end
        smq:subscribe("t", {onmsg = onmsg, onack = function() smq:publish("hello", "t") end})
    end
    function smq.onclose(err, canreconnect)
        seen[#seen + 1] = err
        return #seen < 4 and 10
    end
    for _ = 1, 100 do
        if #seen >= 4 then break end
        collectgarbage()
        ba.sleep(10)
    end
    print(table.concat(seen, " "))
    smq:close()
?>"""


@pytest.mark.usefixtures("ca")
def test_a_connection_that_the_application_makes(server: AppServer, broker: LocalBroker) -> None:
    page = (CONNECT_FUNCTION % broker.url).replace("#seen >= 4", "#seen >= 2")
    assert server.page(page).text.split() == ["m", "hello"]


@pytest.mark.usefixtures("ca")
def test_a_connection_that_the_application_can_not_make(server: AppServer, broker: LocalBroker) -> None:
    text = server.page(CONNECT_FUNCTION % "http://127.0.0.1:1/").text
    assert text.split() == ["m", "cannotconnect", "m", "cannotconnect"]
    text = server.page(CONNECT_FUNCTION.replace("seen[#seen + 1] = op.mark", "error'oops'") % "http://a/").text
    assert text.split() == ["failed"] * 4
    text = server.page(CONNECT_FUNCTION.replace("cb(ba.socket.http2sock(http))", "") % broker.url).text
    assert text.split()[:2] == ["m", "timeout"]


def outcome(server: AppServer, url: str, op: str) -> str:
    reply = server.page(CONNECT % (op, url))
    assert reply.status == 200, reply.text
    return reply.text.strip()


@pytest.mark.usefixtures("ca")
@pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])
def test_proxies(server: AppServer, broker: LocalBroker, kind: type[TestProxy]) -> None:
    with kind("me", "secret") as proxy:
        op = f"proxy = '127.0.0.1', proxyport = {proxy.port}, socks = {str(kind is SocksProxy).lower()}"
        assert outcome(server, broker.url, op) == "proxyauth"
        assert outcome(server, broker.url, op + ", proxyuser = 'me', proxypass = 'secret'") == "connected"
        assert outcome(server, broker.ws_url, op + ", proxyuser = 'me', proxypass = 'secret'") == "connected"
        assert proxy.seen == [f"127.0.0.1:{broker.port}"] * 2


def test_tls(server: AppServer, ca: trustme.CA) -> None:
    broker = LocalBroker(context=server_of(ca.issue_cert("127.0.0.1")).context())
    assert outcome(server, broker.url, "") == "sslnottrusted"
    assert outcome(server, broker.url, "trusted = false") == "connected"
    assert outcome(server, broker.url, "shark = ba.create.sharkssl(store)") == "connected"
    assert outcome(server, broker.url, "shark = ba.create.sharkssl()") == "sslnottrusted"
    broker.close()
