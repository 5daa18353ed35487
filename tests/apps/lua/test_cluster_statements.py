"""`require"smq.mtl"`, `smq.conn` and `smq.cluster`: documented options and methods (spec: smq §6)."""

from __future__ import annotations

import socket

import pytest
import trustme

from tests.apps.lua.cluster_site import TWO, Site
from tests.conftest import free_port
from tests.support.waiting import wait_until

JOINED = """
app.events, app.got = {}, {}
function pair_up(name, op)
  local pair = {}
  for at = 1, 2 do
    op = op or {}
    op.onnode = function(...) record("node", at, ...) end
    local smq = hub.create(op)
    pair[at] = {smq = smq, cluster = require"smq.cluster".create(smq, mtls[at], {name = name})}
    smq:subscribe("self", {json = true, onmsg = function(data, ptid, tid, subtid)
      record(name, at, data.n, ptid, smq:tid2subtopic(subtid) or "none")
    end})
    smq:subscribe("news", {onmsg = function(data, ptid, tid, subtid)
      record(name .. " news", at, data, ptid, smq:tid2topic(tid), smq:tid2subtopic(subtid))
    end})
  end
  return pair
end
"""


def joined(site: Site, name: str = "chat", op: str = "nil") -> None:
    """Two nodes with a hub each, `pairs_NAME[1]` and `[2]`, that are joined."""
    site.run(f"{JOINED} pairs_{name} = pair_up('{name}', {op})")
    wait_until(lambda: site.value(f"next(pairs_{name}[1].cluster:nodes()) ~= nil") == "true", "the hubs are joined")


def linked(site: Site) -> None:
    site.run(TWO)
    wait_until(lambda: site.value("mtls[1]:hascon('127.0.0.1'), mtls[2]:hascon('127.0.0.1')") == "true true", "a link")


# ---- links


def test_status_of_links(site: Site) -> None:
    """The list's own function is told, and that of the links."""
    site.run("""node(1, {onstatus = function(...) record("mtl", 1, ...) end}) node(2)
    conn = require"smq.conn".create(mtls[1], 0, {intf = "127.0.0.1", onstatus = function(...)
      record("conn", 1, ...)
    end})
    conn:add("127.0.0.1", conns[2].port)""")
    wait_until(lambda: site.of("mtl") and site.of("conn"), "the link")
    site.run("mtls[2]:shutdown()")
    wait_until(lambda: len(site.of("mtl")) > 1 and len(site.of("conn")) > 1, "its end")
    for name in ("mtl", "conn"):
        assert site.of(name)[0] == (b"127.0.0.1", True, None)
        assert site.of(name)[1][:2] == (b"127.0.0.1", False)
        assert site.of(name)[1][2]


def test_missing_nodes_are_dialed_again(site: Site) -> None:
    port = free_port()
    site.run(f"node(1) conns[1]:add('127.0.0.1', {port})")
    assert site.value("conns[1]:status()['127.0.0.1']") == "false"
    site.run("late = require'smq.mtl'.create('the password')")
    assert site.value(f"require'smq.conn'.create(late, {port}, {{intf = '127.0.0.1'}}).port") == str(port)
    wait_until(lambda: site.value("conns[1]:status()['127.0.0.1']") == "true", "the link")


def test_lists_and_more(site: Site) -> None:
    """An array of names means the same port as one's own."""
    port = free_port()
    site.run("node(1)")
    assert site.value("conns[1]:setlist{'127.0.0.1'}") == "true"
    assert site.value(f"conns[1]:add('127.0.0.2', {port})") == "true"
    wait_until(lambda: site.value("conns[1]:status()['127.0.0.1']") == "nil", "it is itself")
    assert site.value("conns[1]:status()['127.0.0.2']") == "false"
    assert site.value("conns[1]:setlist{}") == "true"
    assert site.value("next(conns[1]:status())") == "nil"


def test_the_end_of_a_conn_ends_no_link(site: Site) -> None:
    linked(site)
    port = int(site.value("conns[1].port"))
    site.run("conns[1]:shutdown()")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    assert site.value("mtls[1]:hascon('127.0.0.1'), mtls[2]:hascon('127.0.0.1')") == "true true"


@pytest.mark.parametrize("options", ["intf = '::1'", "ipv6 = true", "ipv6 = true, intf = '::1'"])
def test_ipv6(site: Site, options: str) -> None:
    site.run(f"node(1) node(2) conn = assert(require'smq.conn'.create(mtls[1], 0, {{{options}}}))"
             " conns[2]:add('::1', conn.port)")  # fmt: skip
    wait_until(lambda: site.value("conns[2]:status()['::1']") == "true", "the link")


def test_intf_is_the_address_to_listen_at(site: Site) -> None:
    site.run("node(1) conn = assert(require'smq.conn'.create(mtls[1], 0, {intf = '127.0.0.2'}))")
    port = int(site.value("conn.port"))
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("name", ["127.0.0.1", "elsewhere.example"])
def test_with_tls_the_name_must_be_trusted(site: Site, name: str) -> None:
    ca = trustme.CA()
    cert = ca.issue_cert(name)
    folder = site.server.folder
    ca.cert_pem.write_to_path(folder / "ca.pem")
    cert.private_key_pem.write_to_path(folder / "key.pem")
    cert.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    site.run("""local home, store = ba.openio"home", ba.create.certstore()
    store:addcert(home, "ca.pem")
    local identity = ba.create.sharkcert(home, "cert.pem", "key.pem")
    local function server()
      local shark = ba.create.sharkssl(nil, {server = true})
      shark:addcert(identity)
      return shark
    end
    for at = 1, 2 do
      mtls[at] = require"smq.mtl".create("the password")
      conns[at] = assert(require"smq.conn".create(mtls[at], 0, {
        intf = "127.0.0.1", shark = ba.create.sharkssl(store), sshark = server(),
        onstatus = function(...) record("link", at, ...) end,
      }))
    end
    join()""")
    wait_until(lambda: site.of("link", 2), "a link, or none")
    assert site.of("link", 2)[0][:2] == (b"127.0.0.1", name == "127.0.0.1")


# ---- clusters


def test_publish_to_other_servers(site: Site) -> None:
    """Tables are JSON; the sender is this server, or who is named."""
    linked(site)
    joined(site)
    assert site.value("pairs_chat[1].cluster:publish({n = 1}, 'greeting')") == "1"
    number = int(site.value("pairs_chat[1].cluster:node()"))
    assert site.value(f"pairs_chat[1].cluster:publish({{n = 2}}, {number << 21 | 99}, 'greeting')") == "1"
    wait_until(lambda: len(site.of("chat")) == 2, site.calls)
    assert site.of("chat", 1) == []
    (first, sender, name), second = site.of("chat", 2)
    assert (first, sender >> 21, name) == (1, number, b"greeting")
    assert second == (2, number << 21 | 99, b"greeting")


def test_publish_on_behalf(site: Site) -> None:
    linked(site)
    joined(site)
    assert site.value("pairs_chat[1].cluster:pubon('x', 77, 'news')") == "false"
    assert site.value("pairs_chat[1].cluster:pubon('x', 1, 'news', 'sub')") == "true"
    wait_until(lambda: site.of("chat news", 2), site.calls)
    ((data, sender, topic, subtopic),) = site.of("chat news", 2)
    assert (data, sender >> 21, topic, subtopic) == (
        b"x", int(site.value("pairs_chat[1].cluster:node()")), b"news", b"sub")  # fmt: skip


def test_one_mtl_carries_several_clusters(site: Site) -> None:
    linked(site)
    joined(site, "red")
    joined(site, "blue")
    assert (
        site.value("pairs_red[1].cluster:publish({n = 1}, 's'), pairs_blue[1].cluster:publish({n = 2}, 's')") == "1 1"
    )
    wait_until(lambda: site.of("red") and site.of("blue"), site.calls)
    assert [call[0] for call in site.of("red", 2)] == [1]
    assert [call[0] for call in site.of("blue", 2)] == [2]


def test_leaving(site: Site) -> None:
    linked(site)
    joined(site)
    site.run("pairs_chat[1].cluster:close('for a while')")
    wait_until(lambda: len(site.of("node", 2)) == 2, site.calls)
    assert [call[1:] for call in site.of("node", 2)] == [(b"joined", b""), (b"left", b"for a while")]
    assert site.value("pairs_chat[1].cluster:publish({n = 1}, 's'), next(pairs_chat[2].cluster:nodes())") == "0 nil"


def test_names(site: Site) -> None:
    """Without one it is SMQ- and a number."""
    found = site.run("""local mtl = require"smq.mtl".create "x"
    for _ = 1, 2 do require"smq.cluster".create(hub.create(), mtl) end
    for n = 1, 100000 do if mtl:isopen("SMQ-" .. n) then response:write(n, " ") end end""").split()
    assert len(found) == 2
    assert int(found[1]) == int(found[0]) + 1


@pytest.mark.parametrize(("op", "count"), [("nil", 1), ("{observe = 'cluster'}", 2)], ids=["node", "cluster"])
def test_subscribers_are_counted_per_node_or_over_all(site: Site, op: str, count: int) -> None:
    linked(site)
    joined(site, op=op)
    site.run("""pairs_chat[1].smq:observe("room", function(count) record("count", 1, count) end)
    for at = 1, 2 do pairs_chat[at].smq:subscribe("room", {onmsg = print}) end
    pairs_chat[2].cluster:publish({n = 1}, "behind")""")
    wait_until(lambda: site.of("chat", 1), "what was said behind")
    assert site.of("count", 1)[-1] == (count,)
