"""ba.socket: connections, listeners, the three modes, and what each allows (spec: bas-api §8)."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt.apps.lua import socket_handles
from smqrt.apps.lua.vm import Services, Vm
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture
def server() -> Iterator[Any]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(50)
    yield sock
    sock.close()


def port_of(server: Any) -> int:
    port: int = server.getsockname()[1]
    return port


def test_a_blocking_connection(vm: Vm, server: Any) -> None:
    def serve() -> None:
        peer, _ = server.accept()
        assert peer.recv(100) == b"hello5"
        peer.sendall(b"world")
        gevent.sleep(0.03)
        peer.sendall(b"late")
        peer.close()

    serving = gevent.spawn(serve)
    result = vm.eval(
        """
        local s <close> = assert(ba.socket.connect("127.0.0.1", ...))
        assert(type(s) == "userdata")
        assert(s:write("hello") and s:write(5))
        local a = s:read()
        local b, timeout = s:read(5)
        local c = s:read(1000)
        local d, gone = s:read()
        return a, b, timeout, c, d, gone
        """,
        "=t",
        port_of(server),
    )
    assert result == (b"world", None, b"timeout", b"late", None, b"socketclosed")
    serving.get(timeout=2)


def test_connect_failures_are_words(vm: Vm, server: Any) -> None:
    port = port_of(server)
    server.close()
    assert vm.eval("return ba.socket.connect('127.0.0.1', ...)", "=t", port)[:2] == (None, b"cannotconnect")
    assert vm.eval("return ba.socket.connect('nowhere.invalid', 1)")[:2] == (None, b"cannotresolve")
    assert vm.eval("return pcall(ba.socket.connect, 1)")[0] is False


def test_write_returns_one_value(vm: Vm, server: Any) -> None:
    """Whether the data was sent at once or waited for room."""

    def read_all() -> None:
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass

    reading = gevent.spawn(read_all)
    counts = vm.eval(
        """
        local s <close> = ba.socket.connect("127.0.0.1", ...)
        return select("#", s:write("short")), select("#", s:write(("x"):rep(16 << 20)))
        """,
        "=t",
        port_of(server),
    )
    assert counts == (1, 1)
    reading.get(timeout=5)


def test_write_takes_ranges_and_byte_arrays(vm: Vm, server: Any) -> None:
    vm.eval(
        """
        local s <close> = ba.socket.connect("127.0.0.1", ...)
        s:write("0123456789", 3, 5)
        s:write("abcdef", -2)
        s:write(ba.bytearray.create("xyz"))
        s:write(ba.bytearray.create("xyz"), 2)
        """,
        "=t",
        port_of(server),
    )
    peer, _ = server.accept()
    assert peer.recv(100) == b"234efxyzyz"


def test_a_cosocket_server(vm: Vm, recorder: Recorder) -> None:
    port = vm.eval(
        """
        local function client(sock, greeting)
          sock:write(greeting)
          while true do
            local data = sock:read()
            if not data then break end
            sock:write(data:upper())
          end
          test.record("client ended")
        end
        listener = assert(ba.socket.bind(0, {intf = "127.0.0.1"}))
        local ok = listener:event(function(l, word)
          assert(l == listener and l:owner() and ba.socket.getsock() == l)
          while true do
            local sock, why = l:accept()
            if not sock then test.record(why) break end
            sock:event(client, "s", word)
          end
        end, "r", "hi ")
        assert(ok == true and not listener:owner())
        return select(2, listener:sockname())
        """
    )[0]
    ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for number, end in enumerate(ends):
        end.sendall(b"abc%d" % number)
    for number, end in enumerate(ends):
        got = b""
        while len(got) < 7:
            got += end.recv(100)
        assert got[:7] == (b"hi ABC%d" % number)[:7]
        end.close()
    wait_until(lambda: recorder.seen.count(b"client ended") == 20)
    assert vm.activities.blocked == 1
    assert vm.eval("return listener:close(), listener:close()") == (True, False)
    wait_until(lambda: recorder.seen[-1] == b"socketclosed")
    assert vm.activities.blocked == 0


def test_event_starts_at_once_and_closes_at_the_end(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        local s = ba.socket.connect("127.0.0.1", ...)
        assert(s:event(function(me, a, b) test.record(a, b) test.sock = me end, "s", 1, 2))
        test.record("behind event")
        test.record(s:state())
        test.record(s:event(print))
        """,
        "=t",
        port_of(server),
    )
    assert recorder.seen == [(1, 2), b"behind event", (b"closed", False), (None, b"failed")]
    peer, _ = server.accept()
    assert peer.recv(10) == b""


def test_cosocket_errors_are_logged_and_close_it(
    vm: Vm, server: Any, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    local s = ba.socket.connect("127.0.0.1", ...)
    s:event(function(me)
      me:read(1)
      error("a fault in it")
    end, "s")
    """
    vm.eval(source, "@app/x.lua", port_of(server))
    peer, _ = server.accept()
    assert peer.recv(10) == b""
    assert "Cosocket failed: app/x.lua:5: a fault in it\nstack traceback" in caplog.text


def test_a_bare_cosocket_sleeps_and_becomes_a_connection(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        local port = ...
        bare = ba.socket.event(function(me)
          test.record(me:state())
          test.record(me:read(5))
          test.record(me:read())
          local s = ba.socket.connect("127.0.0.1", port)
          test.record(s == me, ba.socket.getsock() == me)
          test.record(ba.socket.connect("127.0.0.1", port))
          test.record(me:read())
          me:close()
          test.record(ba.socket.connect("127.0.0.1", port) == me)
        end)
        test.record(ba.socket.event(function() end))
        """,
        "=t",
        port_of(server),
    )
    peer, _ = server.accept()
    peer.sendall(b"data")
    second, _ = server.accept()
    assert second.recv(1) == b""
    assert recorder.seen == [
        (b"notconnected", False),
        None,
        (None, b"timeout"),
        (None, b"invalidsocketcon"),
        (True, True),
        (None, b"incorrectuse"),
        b"data",
        True,
    ]


def test_only_the_owner_reads_all_write(vm: Vm, server: Any, recorder: Recorder) -> None:
    source = """
    s = ba.socket.connect("127.0.0.1", ...)
    s:event(function(me)
      test.record(pcall(coroutine.wrap(function() return me:read() end)))
      test.record(me:read())
    end, "s")
    test.record(pcall(s.read, s))
    test.record(s:write("from outside"))
    """
    vm.eval(source, "@a.lua", port_of(server))
    peer, _ = server.accept()
    assert peer.recv(100) == b"from outside"
    peer.sendall(b"x")
    wait_until(lambda: len(recorder.seen) == 4)
    refused = b"the socket belongs to a cosocket; only that cosocket may read it"
    assert [seen[1].endswith(refused) for seen in recorder.seen[:2]] == [True, True]
    assert recorder.seen[2:] == [True, b"x"]


def test_a_full_queue_refuses_outsiders_and_suspends_cosockets(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        s = ba.socket.connect("127.0.0.1", ...)
        s:event(function(me) test.record(me:disable()) end, "s")
        local big = ("x"):rep(8000000)
        test.record(s:write(big))
        local ok, queued = s:write("no")
        test.record(ok, queued > 16384)
        other = ba.socket.event(function() test.record("waiting") s:write("y") test.record("there is room") end)
        """,
        "=t",
        port_of(server),
    )
    assert recorder.seen == [True, (None, True), b"waiting"]
    peer, _ = server.accept()
    got = 0
    while got < 8000001:
        got += len(peer.recv(1 << 20))
    wait_until(lambda: recorder.seen[-1] == b"there is room")
    vm.eval("s:enable(1, nil, 'three')")
    wait_until(lambda: recorder.seen[-1] == (1, None, b"three"))
    assert peer.recv(10) == b""


def test_a_peer_that_never_reads_is_not_waited_for(vm: Vm, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_handles, "STALLED_S", 0.1)
    code = """
        local s <close> = ba.socket.connect("127.0.0.1", ...)
        local big = ("x"):rep(8000000)
        local done, word = s:write(big)
        local queued = s:queuelen()
        local again, why = s:write(big)
        return done, word, again, why, s:queuelen() == queued and queued > 16384
    """
    with gevent.Timeout(10):
        assert vm.eval(code, "=t", port_of(server)) == (None, b"timeout", None, b"timeout", True)


def test_a_peer_that_reads_slowly_is_waited_for(vm: Vm, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_handles, "STALLED_S", 0.2)

    def slow_reader() -> None:
        peer, _ = server.accept()
        while peer.recv(200_000):
            gevent.sleep(0.02)

    reader = gevent.spawn(slow_reader)
    code = 'local s <close> = ba.socket.connect("127.0.0.1", ...) return s:write(("x"):rep(8000000))'
    with gevent.Timeout(20):
        assert vm.eval(code, "=t", port_of(server)) == (True,)
    reader.join(5)


def test_blocking_write_waits(vm: Vm, server: Any) -> None:
    def slow_reader() -> int:
        peer, _ = server.accept()
        gevent.sleep(0.05)
        got = 0
        while data := peer.recv(1 << 20):
            got += len(data)
        return got

    reading = gevent.spawn(slow_reader)
    elapsed = vm.eval(
        """
        local s <close> = ba.socket.connect("127.0.0.1", ...)
        local began = ba.clock()
        assert(s:write(("z"):rep(10000000)) and s:write("end"))
        return ba.clock() - began
        """,
        "=t",
        port_of(server),
    )[0]
    assert elapsed >= 40
    assert reading.get(timeout=5) == 10000003


def test_disable_and_enable(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        s = ba.socket.connect("127.0.0.1", ...)
        test.record(s:disable())
        s:event(function(me)
          test.record(me:read())
          test.record(me:disable())
          test.record(me:disable())
        end, "s")
        test.record(s:disable())
        test.record(s:disable())
        """,
        "=t",
        port_of(server),
    )
    peer, _ = server.accept()
    peer.sendall(b"held back")
    let_others_run()
    assert recorder.seen == [(None, b"incorrectuse"), True, (None, b"incorrectuse")]
    assert vm.eval("return s:enable()") == (True,)
    wait_until(lambda: recorder.seen[-1] == b"held back")
    assert vm.eval("return s:enable(7), s:enable(8)") == (True, False)
    wait_until(lambda: recorder.seen[-1] == 7)
    vm.eval("s:close()")
    wait_until(lambda: recorder.seen[-1] == (None, b"socketclosed"))


def test_close_from_outside_ends_what_waits(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        local port = ...
        for _, wait in ipairs{function(s) return s:read() end, function(s) return s:disable() end,
                              function(s) return s:write(("x"):rep(9000000)) end} do
          local s = ba.socket.connect("127.0.0.1", port)
          s:event(function(me) test.record(wait(me)) test.record(me:read()) test.record(me:write("x")) end, "s")
          test.sleep(0.01)
          assert(s:close() and not s:close())
        end
        bare = ba.socket.event(function(me) test.record(me:read(10000)) end)
        bare:close()
        """,
        "=t",
        port_of(server),
    )
    wait_until(lambda: len(recorder.seen) == 10)
    assert set(recorder.seen) == {(None, b"socketclosed")}


def test_sockets_are_keys_and_close_by_themselves(vm: Vm, server: Any) -> None:
    vm.eval(
        """
        local port, clients = ..., {}
        local a, b = ba.socket.connect("127.0.0.1", port), ba.socket.connect("127.0.0.1", port)
        clients[a], clients[b] = "a", "b"
        assert(clients[a] == "a" and clients[b] == "b" and a ~= b)
        do local c <close> = a end
        assert(a:state() == "closed" and ba.socket.stat() == 1)
        clients, b = nil, nil
        collectgarbage() collectgarbage()
        assert(ba.socket.stat() == 0)
        """,
        "=t",
        port_of(server),
    )
    for _ in range(2):
        peer, _ = server.accept()
        assert peer.recv(1) == b""


def test_a_cosocket_is_anchored(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        'ba.socket.connect("127.0.0.1", ...):event(function(me) test.record(me:read()) end, "s") '
        "collectgarbage() collectgarbage()",
        "=t",
        port_of(server),
    )
    peer, _ = server.accept()
    gc.collect()
    vm.eval("collectgarbage() collectgarbage()")
    peer.sendall(b"still here")
    wait_until(lambda: recorder.seen == [b"still here"])


def test_names_options_and_state(vm: Vm, server: Any) -> None:
    vm.eval(
        """
        local port = ...
        local s <close> = ba.socket.connect("127.0.0.1", port)
        local ip, p, is6 = s:peername()
        assert(ip == "127.0.0.1" and p == port and is6 == false)
        local _, own = s:sockname()
        assert(own ~= port)
        assert(s:setoption("keepalive", true, 60, 10) and s:setoption("tcp-nodelay", false))
        assert(s:setoption("dontroute", false))
        assert(not pcall(s.setoption, s, "keepalive", true, {}) and not pcall(s.setoption, s, "keepalive", true, "x"))
        assert(not pcall(s.setoption, s, "colour", true) and not pcall(s.setoption, s, "keepalive", 1))
        local word, connected = s:state()
        assert(word == "connected" and connected == true)
        assert(s:websocket() == false and s:owner() == false)
        assert(s:queuelen() == 0 and s:queuelen(1000) == 0)
        for _, name in ipairs{"trusted", "certificate", "cipher", "isresumed", "alpn"} do
          local value, word = s[name](s)
          assert(value == nil and word == "sslnotenabled", name)
        end
        assert(select(2, s:ping()) == "incorrectuse" and select(2, s:accept()) == "incorrectuse")
        assert(not pcall(s.read, s, "x") and not pcall(s.write, s, {}) and not pcall(s.read, {}))
        """,
        "=t",
        port_of(server),
    )


def test_two_readers_of_a_blocking_socket(vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        s = ba.socket.connect("127.0.0.1", ...)
        ba.thread.run(function() test.record(s:read()) end)
        ba.thread.run(function() test.record(s:read()) s:close() end)
        """,
        "=t",
        port_of(server),
    )
    wait_until(lambda: len(recorder.seen) == 2)
    assert recorder.seen == [(None, b"incorrectuse"), (None, b"socketclosed")]


def test_a_cosocket_that_never_waits_leaves_turns_to_others(vm: Vm) -> None:
    vm.eval(
        """
        local u <const> = ba.socket.udpcon(0, {intf = "127.0.0.1"})
        local _, port = u:sockname()
        count = 0
        u:event(function(me)
          local out = ba.socket.udpcon("127.0.0.1", port)
          repeat out:write("x") me:read() count = count + 1 until count < 0
        end, "s")
        """
    )
    worst = 0.0
    for _ in range(100):
        began = time.process_time()
        gevent.sleep(1e-6)
        worst = max(worst, time.process_time() - began)
    assert vm.eval("local n = count count = -2 return n")[0] > 1000
    assert worst < 0.05


def test_udp(vm: Vm) -> None:
    vm.eval(
        """
        local a <close> = ba.socket.udpcon(0, {intf = "127.0.0.1"})
        local _, port = a:sockname()
        local b <close> = ba.socket.udpcon("127.0.0.1", port)
        assert(select(2, b:peername()) == port)
        assert(b:write("question") == true)
        local data, ip, from, is6 = a:read(1000, true)
        assert(data == "question" and ip == "127.0.0.1" and is6 == false and from == select(2, b:sockname()))
        assert(a:sendto("answer", ip, from) == true)
        local answer, more = b:read(1000)
        assert(answer == "answer" and more == nil)
        b:write("again")
        assert(select("#", a:read()) == 1)
        assert(select(2, a:read(5)) == "timeout" and select(2, a:read(5, true)) == "timeout")
        assert(not pcall(a.sendto, a, "x", "some.name", 5))
        local c <close> = ba.socket.udpcon()
        assert(c:setoption("broadcast", true) and c:setoption("ip-membership", true, "239.1.2.3", "127.0.0.1"))
        assert(not pcall(c.setoption, c, "ip-membership", true, "nonsense"))
        assert(select(2, ba.socket.udpcon("127.0.0.1", 5, {port = port})) == "bind")
        """
    )


def test_udp_in_a_cosocket(vm: Vm, recorder: Recorder) -> None:
    vm.eval(
        """
        local u = ba.socket.udpcon(0, {intf = "127.0.0.1"})
        _, port = u:sockname()
        u:event(function(me)
          while true do
            local data, ip, from = me:read(true)
            if data == "stop" then break end
            me:sendto(data .. "!", ip, from)
          end
          test.record("stopped")
        end, "s")
        local c <close> = ba.socket.udpcon("127.0.0.1", port)
        for i = 1, 5 do c:write("n" .. i) test.record(c:read(1000)) end
        c:write("stop")
        """
    )
    wait_until(lambda: recorder.seen == [b"n1!", b"n2!", b"n3!", b"n4!", b"n5!", b"stopped"])


def test_udpcon_makes_the_cosocket_its_socket(vm: Vm, recorder: Recorder) -> None:
    vm.eval(
        """
        me = ba.socket.event(function(me)
          local u = ba.socket.udpcon(0, {intf = "127.0.0.1"})
          local other = ba.socket.udpcon(0)
          test.record(u == me, other ~= me, other:close())
          _, port = me:sockname()
          test.record(me:read(true))
          test.record(me:read())
        end)
        """
    )
    wait_until(lambda: recorder.seen)
    vm.eval('local c <close> = ba.socket.udpcon("127.0.0.1", port) c:write"x"')
    wait_until(lambda: len(recorder.seen) == 2)
    assert recorder.seen[0] == (True, True, True)
    assert recorder.seen[1][:2] == (b"x", b"127.0.0.1")
    assert vm.eval("return me:close(), ba.socket.stat()") == (True, 0, 0)
    wait_until(lambda: len(recorder.seen) == 3)
    assert recorder.seen[2] == (None, b"socketclosed")
    assert vm.eval("local u <close> = ba.socket.udpcon(port, {intf = '127.0.0.1'}) return u ~= nil") == (True,)


def test_toip(vm: Vm) -> None:
    assert vm.eval("return ba.socket.toip('localhost')") == (b"127.0.0.1",)
    assert vm.eval("return ba.socket.toip('nowhere.invalid')")[:2] == (None, b"cannotresolve")


def test_bind_failures(vm: Vm, server: Any) -> None:
    assert vm.eval("return ba.socket.bind(...)", "=t", port_of(server))[:2] == (None, b"bind")
    assert vm.eval("return ba.socket.bind(70000)")[:2] == (None, b"bind")


def test_cosockets_inside_each_other_have_a_limit(vm: Vm, recorder: Recorder) -> None:
    vm.eval(
        """
        local function deeper(me, depth)
          local inner = ba.socket.event(deeper, depth + 1)
          test.record(depth)
          me:read(10000)
        end
        outermost = ba.socket.event(deeper, 1)
        """
    )
    assert 40 < max(recorder.seen) < 100
    assert vm.activities.blocked == len(recorder.seen)


def test_a_killed_reader_leaves_the_socket_to_others(vm: Vm, server: Any) -> None:
    vm.eval("s = ba.socket.connect('127.0.0.1', ...)", "=t", port_of(server))
    reader = gevent.spawn(vm.eval, "s:read()")
    wait_until(lambda: vm.activities.blocked)
    reader.kill()
    peer, _ = server.accept()
    peer.sendall(b"for the next")
    assert vm.eval("return s:read(1000)") == (b"for the next",)


def test_waiting_calls_end_at_shutdown(services: Services, vm: Vm, server: Any, recorder: Recorder) -> None:
    vm.eval(
        """
        local port = ...
        ba.socket.connect("127.0.0.1", port):event(function(me) test.record(me:read()) end, "s")
        ba.socket.event(function(me) test.record(me:disable()) end)
        ba.socket.bind(0, {intf = "127.0.0.1"}):event(function(me) test.record(me:accept()) end)
        """,
        "=t",
        port_of(server),
    )
    services.sockets.shutdown()
    wait_until(lambda: len(recorder.seen) == 3)
    assert recorder.seen == [(None, b"sysshutdown")] * 3
    assert vm.activities.blocked == 0


def test_killing_closes_the_socket(vm: Vm, server: Any) -> None:
    vm.eval(
        """
        local port = ...
        ba.socket.connect("127.0.0.1", port):event(function(me) pcall(me.read, me) while true do me:read() end end, "s")
        ba.thread.run(function() local s <close> = ba.socket.connect("127.0.0.1", port) s:read() end)
        ba.thread.run(function() ba.sleep(100000) end)
        """,
        "=t",
        port_of(server),
    )
    wait_until(lambda: vm.activities.blocked == 3)
    vm.stop()
    wait_until(lambda: vm.activities.blocked == 0)
    for _ in range(2):
        peer, _ = server.accept()
        assert peer.recv(1) == b""
    assert vm.eval("return ba.socket.stat()") == (0, 0)
