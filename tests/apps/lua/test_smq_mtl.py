"""`require"smq.mtl"`, `smq.conn` and `smq.cluster` (spec: smq §6): called rightly, wrongly, twice, and after the end.
Two nodes are two sets of links in one process, with real sockets between them.
"""

from __future__ import annotations

import gevent
import pytest
from gevent import socket

from smqrt.cluster.engines.mesh import open_meshes
from smqrt.cluster.engines.process_cluster import cluster
from tests.apps.lua.cluster_site import TWO, Site
from tests.conftest import free_port
from tests.support.waiting import wait_until


@pytest.fixture
def pair(site: Site) -> Site:
    site.run(TWO + " channels()")
    site.up()
    return site


def test_a_channel_between_two_nodes(pair: Site) -> None:
    numbers = [pair.of("status", 2)[0][0], pair.of("status", 1)[0][0]]
    assert pair.value("sides[1]:send('to all')") == "1 nil"
    assert pair.value(f"sides[1]:send({{a = 1}}, {numbers[1]})") == "1 nil"
    assert pair.value("sides[2]:send('')") == "1 nil"
    wait_until(lambda: len(pair.of("data")) == 3, "three messages")
    assert pair.of("data", 2) == [(b"to all", numbers[0]), (b'{"a":1}', numbers[0])]
    assert pair.of("data", 1) == [(b"", numbers[1])]
    assert pair.value("sides[1]:send('nobody', 1024)") == "nil nobody"
    assert pair.run("for node, via in pairs(sides[1]:nodes()) do response:write(node, ' ', via) end").startswith(
        f"{numbers[1]} 127.0.0.1:"
    )
    assert pair.value("sides[1]:counts().sent, sides[1]:counts().received, sides[1]:counts().lost") == "2 1 0"
    assert pair.value("mtls[1]:isopen('chat'), mtls[1]:isopen('game')") == "true false"


def test_a_full_channel_says_so(pair: Site) -> None:
    fill = """local sent, nodes, why = -1, 1
    while nodes do
      sent = sent + 1
      nodes, why = sides[1]:send(("x"):rep(60000))
    end
    response:write(sent, " ", why)"""
    assert pair.run(fill) == "17 full"
    wait_until(lambda: len(pair.of("data", 2)) == 17, "they arrive")
    wait_until(lambda: pair.value("sides[1]:send('more')") == "1 nil", "room")


def test_close_by_the_channel_and_by_its_name(pair: Site) -> None:
    pair.run("sides[1]:send('the last') sides[1]:close('good night') sides[1]:close()")
    wait_until(lambda: not pair.of("status", 2)[-1][1], "the end")
    assert pair.of("status", 2)[-1][1:] == (False, b"good night")
    assert pair.of("data", 2) == [(b"the last", pair.of("status", 2)[0][0])]
    assert pair.value("mtls[1]:isopen('chat')") == "false"
    assert pair.error("sides[1]:send('x')") == "the channel 'chat' is closed; open it again"
    assert pair.value("sides[1]:counts().sent, next(sides[1]:nodes())") == "1 nil"
    pair.run("again(1)")
    pair.up()
    assert (
        pair.value("mtls[1]:close('chat', 'by name'), mtls[1]:close('chat'), mtls[1]:close('none')")
        == "true false false"
    )
    wait_until(lambda: pair.of("status", 2)[-1][2] == b"by name", "the end")


def test_hubs_and_channels_of_the_same_name(pair: Site) -> None:
    pair.run("""for at = 1, 2 do
      app["smq" .. at] = hub.create()
      app["cluster" .. at] = require"smq.cluster".create(app["smq" .. at], mtls[at], {name = "chat"})
    end""")
    wait_until(lambda: pair.value("cluster1:publish('x', 'sub')") == "1", "the hubs are joined")
    assert pair.value("sides[1]:send('channel')") == "1 nil"
    assert pair.value("mtls[1]:close('chat')") == "true"
    wait_until(lambda: not pair.of("status", 2)[-1][1], "the end of the channel")
    assert pair.value("mtls[1]:isopen('chat'), cluster1:publish('x', 'sub')") == "true 1"
    pair.run("sides[1]:close()")
    assert pair.value("cluster1:publish('x', 'sub')") == "1"
    assert pair.value("mtls[1]:close('chat')") == "true"
    assert pair.value("mtls[1]:isopen('chat'), cluster1:publish('x', 'sub')") == "false 0"
    pair.run("cluster1:close() cluster1:close()")
    assert pair.value("next(cluster1:nodes())") == "nil"


def test_blocking_functions_keep_order_and_log_errors(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.run(TWO + """ channels("other")
    for at = 1, 2 do
      app["channel" .. at] = mtls[at]:open("slow", function(node, up) record("status", at, node, up) end, function(data)
        if data == "2" then error "no good" end
        ba.sleep(30)
        record("data", at, data)
      end)
    end""")  # fmt: skip
    wait_until(lambda: len(site.of("status")) == 4, "up")
    site.run("for count = 1, 5 do channel1:send(count) end")
    wait_until(lambda: len(site.of("data", 2)) == 4, "four messages")
    assert site.of("data", 2) == [(b"1",), (b"3",), (b"4",), (b"5",)]
    assert "error in the data function of a channel: " in caplog.text
    assert "no good" in caplog.text
    assert site.value("mtls[1]:hascon('127.0.0.1')") == "true"


def test_a_reload_closes_what_an_application_opened(pair: Site) -> None:
    pair.application.reload()
    assert pair.application.error is None
    gevent.sleep(0.1)
    assert not open_meshes
    pair.calls.clear()
    pair.run(TWO + " channels()")
    pair.up()


def test_a_channel_ends_with_the_application_that_opened_it(pair: Site) -> None:
    """Also over the links of another one."""
    pair.run("rawset(_G, 'links', mtls[1]) again(2, 'guest')")
    guest = pair.server.app({".preload": "links:open('guest', print, print)"}, "guest")
    assert guest.error is None, guest.error
    wait_until(lambda: len(pair.of("status", 2)) == 2, "the guest")
    guest.unload()
    wait_until(lambda: len(pair.of("status", 2)) == 3, "its end")
    assert pair.of("status", 2)[-1][1] is False
    assert pair.value("mtls[1]:isopen('guest'), mtls[1]:isopen('chat')") == "false true"


CREATE_MTL, CREATE_CLUSTER = "require'smq.mtl'.create", "require'smq.cluster'.create"
WRONG = {
    "mtls[1]:open()": "bad argument #1 to 'open' (string expected, got no value)",
    "mtls[1]:open('x')": "bad argument #2 to 'open' (function expected, got no value)",
    "mtls[1]:open('x', print, 'y')": "bad argument #3 to 'open' (function expected, got string)",
    "mtls[1]:open('', print, print)": "name: 0 bytes; the name of a channel has 1 to 1000",
    "mtls[1].open('x', print, print)": "bad argument #1 to 'open' (string expected, got function)",
    "again(1)": "name: the channel 'chat' is open already; close it first, or take another name",
    "sides[1]:send(('x'):rep(65521))": "data: 65521 bytes; a message carries at most 65520, split it",
    "sides[1]:send('x', 'y')": "bad argument #2 to 'send' (number expected, got string)",
    "sides[1].send('x')": "bad self (a channel made by mtl:open is expected; call its methods with ':')",
    "sides[1]:close(('x'):rep(1001))": "msg: 1001 bytes; the text of close has at most 1000",
    "mtls[1]:close()": "bad argument #1 to 'close' (string expected, got no value)",
    "mtls[1]:isopen()": "bad argument #1 to 'isopen' (string expected, got no value)",
    "mtls[1]:hascon()": "bad argument #1 to 'hascon' (string expected, got no value)",
    "mtls[1]:commence('x')": "bad argument #1 to 'commence' (socket expected, got string)",
    "mtls[1].shutdown()": "bad self (links made by create are expected; call their methods with ':')",
    CREATE_MTL + "()": "bad argument #1 to 'create' (string expected, got no value)",
    CREATE_MTL + "('')": "password: it is empty; without one, any client of the port could join",
    CREATE_MTL + "('x', {node = 1024})": "node: 1024; a node's number is 1 to 1023, 0 to draw one",
    CREATE_MTL + "('x', {onstatus = 1})": "bad argument #2.onstatus to 'create' (function expected, got number)",
    CREATE_MTL + "('x', {log = 1})": "bad argument #2.log to 'create' (function expected, got number)",
    CREATE_MTL + "('x', {ping = 1})": "bad argument #2.ping to 'create' (table expected, got number)",
    CREATE_MTL + "('x', {ping = {roundtripCB = 1}})": "bad argument #2.ping.roundtripCB to 'create' "
    "(function expected, got number)",
    "require'smq.conn'.create()": "bad argument #1 to 'create' (mtl or cluster expected, got no value)",
    "require'smq.conn'.create(mtls[1], 'x')": "bad argument #2 to 'create' (number expected, got string)",
    "require'smq.conn'.create(mtls[1], 0, {shark = ba.create.sharkssl()})": "shark, sshark: links over TLS need both",
    "conns[1]:setlist()": "bad argument #1 to 'setlist' (table expected, got no value)",
    "conns[1]:setlist{x = 'y'}": "bad argument #1.x to 'setlist' (number expected, got string)",
    "conns[1]:setlist{x = 70000}": "port: 70000; a port is 1 to 65535",
    "conns[1]:setlist{true}": "bad argument #1.1 to 'setlist' (string expected, got boolean)",
    "conns[1]:add()": "bad argument #1 to 'add' (string expected, got no value)",
    "conns[1]:add('x', -1)": "port: -1; a port is 1 to 65535",
    CREATE_CLUSTER + "()": "bad argument #1 to 'create' (smq expected, got no value)",
    CREATE_CLUSTER + "({}, mtls[1])": "bad argument #1 to 'create' (smq expected, got table)",
    CREATE_CLUSTER + "(hub.create(), true)": "bad argument #2 to 'create' (mtl or password expected, got boolean)",
    CREATE_CLUSTER + "(hub.create(), '')": "password: it is empty; without one, any client of the port could join",
    CREATE_CLUSTER + "(hub.create(), mtls[1], {name = '\\255'})": "name: '\\udcff' is not text; "
    "the name of a cluster is UTF-8",
    CREATE_CLUSTER + "(hub.create(), mtls[1], {name = ('x'):rep(1001)})": "name: 1001 bytes; "
    "the name of a cluster has 1 to 1000",
    CREATE_CLUSTER + "(hub.create(), mtls[1], {name = 'n'}):close(('x'):rep(1001))": "msg: 1001 bytes; "
    "the text of close has at most 1000",
}
PINGS = [
    "timeout = 1.9",
    "timespan = 7.9",
    "timeout = 3, timespan = 11",
    "timeout = 0/0",
    "timespan = 0/0",
    "timespan = 1/0",
]
KEEPS = ["keepintv = 0", "keepalive = 2", "keepalive = 0/0", "keepintv = -1", "keepintv = 30", "keepalive = 1/0"]


def test_wrong_calls(pair: Site) -> None:
    """Each has one error, which names the argument."""
    said = {call: pair.error(call) for call in WRONG}
    assert {call: text for call, text in said.items() if not text.startswith(WRONG[call])} == {}
    for ping in PINGS:
        said[ping] = pair.error(CREATE_MTL + f"('x', {{ping = {{{ping}}}}})")
        assert said[ping] == ("bad argument #2.ping to 'create' (timeout is at least 2 s, timespan at least four times "
                              "as long, both at most 3600 s)"), ping  # fmt: skip
    for keep in KEEPS:
        text = pair.error(CREATE_MTL + f"('x', {{{keep}}})")
        assert text == ("bad argument #2.keepalive to 'create' (keepintv is at least 0.05 s, keepalive more than that "
                        "and at most 3600 s)"), keep  # fmt: skip
    assert pair.value("sides[1]:send('still there')") == "1 nil"


def test_what_is_well_within_the_rules(site: Site) -> None:
    for options in (
        "ping = {}",
        "ping = {timespan = 8, timeout = 2}",
        "keepalive = 20, keepintv = 2",
        "node = 7",
        "log = print",
    ):
        assert site.run(CREATE_MTL + f"('x', {{{options}}}):shutdown()") == ""
    times = {
        "ping = {timespan = 12, timeout = 3}": (12, 15),
        "keepintv = 3": (3, 20),
        "keepalive = 9": (2, 9),
        "": (1, 5),
    }
    for options, (ping_s, silence_s) in times.items():
        site.run(f"made = require'smq.mtl'.create('x', {{{options}}})")
        mesh = open_meshes[-1]
        assert (mesh._ping_s, mesh._silence_s) == (ping_s, silence_s)
        site.run("made:shutdown()")


def test_meaningless_options_are_reported(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "smqrt.trace"):
        site.run(CREATE_MTL + "('x', {nonsense = 1, ping = {silly = 2}}):shutdown()")
    assert "smq.mtl has no option 'nonsense'" in caplog.text
    assert "ping of smq.mtl has no option 'silly'" in caplog.text


def test_after_the_end(pair: Site) -> None:
    pair.run("mtls[1]:shutdown() mtls[1]:shutdown() conns[1]:shutdown() conns[1]:shutdown()")
    wait_until(lambda: not pair.of("status", 2)[-1][1], "the other is told")
    gone = "the links to other nodes were shut down; make new ones"
    assert pair.error("again(1)") == gone
    assert pair.error(CREATE_CLUSTER + "(hub.create(), mtls[1])") == gone
    assert pair.error("require'smq.conn'.create(mtls[1], 0)") == gone
    for call in ("conns[1]:add('127.0.0.1')", "conns[1]:setlist{}"):
        assert pair.error(call) == "conn: it was shut down; make a new one"
    assert (
        pair.value("mtls[1]:isopen('chat'), mtls[1]:hascon('127.0.0.1'), mtls[1]:close('chat')") == "false false false"
    )
    assert pair.value("next(conns[1]:status())") == "nil"
    assert len(pair.of("status", 1)) == 1


def test_objects_that_outlive_their_application(site: Site) -> None:
    keep = "kept = {} function keep(...) kept = {...} end function look() return kept end"
    keeper = site.server.app({".preload": keep, "run.lsp": ""}, "keeper")
    site.run(TWO + " channels() rawset(_G, 'left', {mtl = mtls[1], conn = conns[1], channel = sides[1],"
             " cluster = require'smq.cluster'.create(hub.create(), mtls[1], {name = 'x'})})")  # fmt: skip
    site.application.unload()
    text = "the application that made it has ended; make a new one"
    calls = ["mtl:open('x', print, print)", "mtl:isopen('x')", "mtl:hascon('x')", "mtl:close('x')", "conn:add('x')",
             "conn:setlist{}", "conn:status()", "cluster:publish('x', 'y')", "cluster:nodes()", "cluster:node()",
             "cluster:shutdown()"]  # fmt: skip
    for call in [
        *calls,
        "mtl:shutdown()",
        "conn:shutdown()",
        "cluster:close()",
        "channel:close()",
        "channel:send('x')",
    ]:
        source = f"""<?lsp local ok, text = pcall(function()
          local _ENV = setmetatable(_G.left, {{__index = _G}})
          return {call}
        end)
        response:write(tostring(not ok and text)) ?>"""
        site.server.write("keeper", {"run.lsp": source})
        said = site.server.ask("/keeper/run.lsp").text
        if call in calls:
            assert said.endswith(text), (call, said)
        else:
            assert said == "false" or (call == "channel:send('x')" and "'chat' is closed" in said), (call, said)
    keeper.unload()


# ---- pings


def test_round_trips_are_reported_in_milliseconds(site: Site) -> None:
    # Lua's least is a ping each 8 s; these links have the same functions and other times.
    site.run("node(1) node(2, {ping = {roundtripCB = function(...) record('trip', 2, ...) end},"
             " log = function(...) record('log', 2, ...) end}) join()")  # fmt: skip
    mesh = open_meshes[-1]
    mesh._ping_s, mesh._silence_s = 0.1, 2
    wait_until(lambda: len(site.of("trip")) >= 2, "round trips")
    for address, ms in site.of("trip"):
        assert address == b"127.0.0.1"
        assert 0 < ms < 2000
    (link,) = mesh.node.links.values()
    assert any(ms == link.round_trip_s * 1000 for _, ms in site.of("trip"))
    assert any(b"is up" in text and not urgent for text, urgent in site.of("log"))


def test_nil_when_no_answer_came_in_time(site: Site) -> None:
    """A node that takes the connection and then stands still; the link is lost."""
    site.run("node(1) node(2, {onstatus = function(...) record('link', 2, ...) end,"
             " ping = {roundtripCB = function(...) record('trip', 2, ...) end}}) join()")  # fmt: skip
    one, other = open_meshes[-2:]
    wait_until(lambda: site.of("link"), "the link")
    other._ping_s, other._silence_s = 0.2, 0.8
    for link in one.node.links.values():
        link.transport.pause()  # type: ignore[attr-defined]
    before = len(site.of("trip"))
    wait_until(lambda: (b"127.0.0.1", None) in site.of("trip")[before:], "no answer")
    wait_until(lambda: any(not up for _, up, *_ in site.of("link")), "the end of the link")


# ---- where links come from


def test_commence_makes_a_link_of_a_socket(site: Site) -> None:
    site.run("node(1) node(2)")
    connect = "local sock = assert(ba.socket.connect('127.0.0.1', conns[1].port)) "
    status = "function(...) record('link', 2, ...) end"
    assert site.run(connect + f"response:write(tostring(mtls[2]:commence(sock, {status})))") == "true"
    wait_until(lambda: site.of("link"), "the link")
    address, up, why = site.of("link")[0]
    assert (address.startswith(b"127.0.0.1:"), up, why) == (True, True, None)
    site.calls.clear()
    site.run(
        "local sock = assert(ba.socket.connect('127.0.0.1', conns[2].port)) mtls[2]:commence(sock, " + status + ")"
    )
    wait_until(lambda: site.of("link"), "the refusal of a connection to itself")
    assert site.of("link")[0][1] is False
    assert b"this node itself" in site.of("link")[0][2]
    site.run("mtls[1]:shutdown()")
    wait_until(lambda: len(site.of("link")) == 2, "the end of the link")
    site.run("mtls[2]:shutdown()")
    taken = socket.create_server(("127.0.0.1", 0))
    late = f"local sock = assert(ba.socket.connect('127.0.0.1', {taken.getsockname()[1]})) "
    assert site.run(late + "response:write(tostring(mtls[2]:commence(sock)))") == "false"
    taken.close()


def test_a_port_that_is_taken(site: Site) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    text = site.value(f"require'smq.conn'.create(node(1), {port}, {{intf = '127.0.0.1'}})")
    assert text.startswith("nil ")
    assert str(port) in text
    taken.close()


def test_listening_nodes_are_notified_of_links(site: Site) -> None:
    status = "{onstatus = function(...) record('link', %d, ...) end, log = function(...) record('log', ...) end}"
    site.run(f"node(1, {status % 1}) node(2, {status % 2}) join()")
    wait_until(lambda: site.of("link", 1) and site.of("link", 2), "the link")
    logged = len(site.of("log"))
    assert site.of("link", 1) == site.of("link", 2) == [(b"127.0.0.1", True, None)]
    stranger = socket.create_connection(("127.0.0.1", int(site.value("conns[1].port"))))
    stranger.sendall(b"\0\5abc")
    assert stranger.recv(100) == b""
    assert len(site.of("log")) == logged  # strangers fill no log
    site.run("mtls[2]:shutdown()")
    wait_until(lambda: len(site.of("link", 1)) == 2, "its end")
    assert site.of("link", 1)[1][:2] == (b"127.0.0.1", False)
    assert b"shutting down" in site.of("link", 1)[1][2]


def test_status_of_a_listed_address_comes_from_the_list(site: Site) -> None:
    """Else each of two nodes that list each other would be told twice."""
    site.run("node(1, {onstatus = function(...) record('link', 1, ...) end}) node(2)")
    site.run(f"conns[1]:add('127.0.0.1', {free_port()}) join()")
    wait_until(lambda: site.value("conns[2]:status()['127.0.0.1']") == "true", "the link")
    wait_until(lambda: site.of("link"), "nobody is at the address")
    assert [up for _, up, _ in site.of("link")] == [False] * len(site.of("link"))


def test_nodes_that_list_each_other_are_reported_once(site: Site) -> None:
    status = "{onstatus = function(...) record('link', %d, ...) end}"
    site.run(f"node(1, {status % 1}) node(2, {status % 2}) join() conns[1]:add('127.0.0.1', conns[2].port)")
    wait_until(
        lambda: site.value("conns[1]:status()['127.0.0.1'], conns[2]:status()['127.0.0.1']") == "true true", "up"
    )
    assert [call[:2] for call in site.of("link") if call[1]] == [(b"127.0.0.1", True)] * 2


def test_status_of_a_list(site: Site) -> None:
    port = free_port()
    site.run("node(1) node(2)")
    assert site.value(f"conns[2]:setlist{{['127.0.0.1'] = conns[1].port, ['127.0.0.2'] = {port}}}") == "true"
    wait_until(
        lambda: site.value("conns[2]:status()['127.0.0.1'], conns[2]:status()['127.0.0.2']") == "true false", "a list"
    )
    assert site.error("conns[2]:setlist{['127.0.0.3'] = 70000}").startswith("port: 70000")
    assert site.value("conns[2]:status()['127.0.0.1'], conns[2]:status()['127.0.0.3']") == "true nil"
    site.run("conns[2]:setlist{}")
    wait_until(lambda: site.value("next(conns[2]:status()), mtls[2]:hascon('127.0.0.1')") == "nil false", "nobody")


def test_a_cluster_with_own_links_and_one_with_shared(site: Site) -> None:
    site.run("own = require'smq.cluster'.create(hub.create(), 'its own password', {name = 'own'})")
    assert site.value("assert(require'smq.conn'.create(own, 0, {intf = '127.0.0.1'})).port > 0") == "true"
    site.run("servers = require'smq.cluster'.create(hub.create(), nil, {name = 'servers'})")
    said = site.error("require'smq.conn'.create(servers, 0)")
    assert said.startswith("bad argument #1 to 'create' (this cluster uses the server's links")
    cluster.close()


def test_channels_over_the_links_of_the_server(site: Site) -> None:
    site.run("server = require'smq.mtl'.server()")
    assert site.value("server:isopen('chat'), server:hascon('127.0.0.1')") == "false false"
    site.run("channel = server:open('chat', print, print)")
    assert site.value("channel:send('x')") == "nil nobody"
    assert site.value("require'smq.mtl'.server():close('chat'), server:isopen('chat')") == "false true"
    own = "these are the links of the server, with its settings; make other links with smq.mtl"
    assert site.error("require'smq.conn'.create(server, 0)") == own
    assert site.error("server:commence(ba.socket.udpcon())") == own
    mesh = open_meshes[-1]
    site.run("server:shutdown() server:shutdown()")
    assert site.value("server:isopen('chat')") == "false"
    assert not mesh.node.closed
    site.run("channel = server:open('chat', print, print)")
    site.application.unload()
    assert not mesh.node.channels
    assert not mesh.node.closed
    cluster.close()
