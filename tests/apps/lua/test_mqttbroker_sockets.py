"""mqttbroker on real sockets: clients that stall, flood, break off or send anything; its end; local clients."""

from __future__ import annotations

import random
import socket as plain_socket
import struct
import time
from collections.abc import Callable, Iterator

import gevent
import pytest
from gevent import socket

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from smqrt.smq import data_path, port_broker
from smqrt.wire.connection_state import Life
from tests.apps.lua.mqtt_packets import PINGREQ, PINGRESP, connect, disconnect, packet, publish, split, subscribe, text
from tests.support.waiting import let_others_run, wait_until

START = """
reports = {}
broker = assert(require "mqttbroker".create(0, {
  address = "127.0.0.1",
  onerror = function(client, etype, status) reports[#reports + 1] = etype .. " " .. status end,
}))
return broker:status().port
"""


class Wire:
    """A client that speaks bytes."""

    def __init__(self, port: int, buffer_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if buffer_bytes:
            self.socket.setsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(5)
        self.socket.connect(("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        """Exactly `size` bytes; fewer when the broker has closed."""
        data = b""
        while len(data) < size and (part := self.socket.recv(size - len(data))):
            data += part
        return data

    def rest(self) -> bytes:
        """What comes until the broker closes."""
        data = b""
        try:
            while part := self.socket.recv(65536):
                data += part
        except ConnectionResetError:
            pass
        return data

    def join(self, version: int = 4, name: str = "c") -> Wire:
        self.send(connect(version, name))
        first = self.receive(2)
        assert first[0] == 0x20
        assert self.receive(first[1])[1] == 0
        return self

    def is_alive(self) -> bool:
        self.send(PINGREQ)
        return self.receive(2) == PINGRESP

    def reset(self) -> None:
        self.socket.setsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.fixture
def port(vm: Vm) -> Iterator[int]:
    """A broker `broker` with its `reports`."""
    yield vm.eval(START)[0]
    vm.eval("broker:close()")
    let_others_run()


@pytest.fixture
def wire(port: int) -> Iterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def dial(*args: int) -> Wire:
        wires.append(Wire(port, *args))
        return wires[-1]

    yield dial
    for one in wires:
        one.socket.close()


Dial = Callable[..., Wire]


def clients(vm: Vm) -> int:
    return int(vm.eval("return broker:status().clients")[0])


def test_conversation(wire: Dial) -> None:
    ada = wire().join()
    ada.send(subscribe(4, "a/+") + publish(4, "a/b", b"x"))
    assert ada.receive(5 + 8) == packet(0x90, b"\0\1\0") + publish(4, "a/b", b"x")


@pytest.mark.parametrize(
    ("version", "sent", "answer"),
    [
        (4, publish(4, "t", first=0x32), b""),
        (5, publish(5, "t", first=0x32), b"\xe0"),
        (5, publish(5, "t", properties=b"\x23\0\1"), b"\xe0"),
        (4, packet(0xF0), b""),
        (5, b"\x30\xff\xff\xff\xff\xff", b"\xe0"),
        (4, disconnect(), b""),
    ],
)
def test_broker_closes(vm: Vm, wire: Dial, version: int, sent: bytes, answer: bytes) -> None:
    other, ada = wire().join(name="other"), wire().join(version)
    ada.send(sent)
    assert ada.rest()[:1] == answer
    assert other.is_alive()
    wait_until(lambda: clients(vm) == 1)


@pytest.mark.parametrize("leave", [Wire.reset, lambda wire: wire.socket.close()], ids=["reset", "close"])
def test_client_that_breaks_off(vm: Vm, wire: Dial, leave: Callable[[Wire], None]) -> None:
    ada = wire().join()
    ada.send(subscribe(4, "#")[:-1])
    leave(ada)
    wait_until(lambda: clients(vm) == 0)
    wait_until(lambda: vm.eval("return #reports") == (1,))
    assert vm.eval("return reports[1]:sub(1, 5)") == (b"sock ",)


def test_every_cut_of_a_session(vm: Vm, wire: Dial) -> None:
    session = connect(5, "cut") + subscribe(5, "a/#", "+") + publish(5, "a/b", b"hello") + PINGREQ + disconnect()
    other = wire().join(name="other")
    for cut in range(len(session) + 1):
        one = wire()
        one.send(session[:cut])
        one.socket.close()
    assert other.is_alive()
    wait_until(lambda: clients(vm) == 1)
    wait_until(lambda: vm.eval("return broker:connections()") == (1,))


def test_fuzzed_sessions(vm: Vm, wire: Dial) -> None:
    dice = random.Random(7)
    valid = [subscribe(5, "a/#"), publish(5, "a/b", b"hello"), PINGREQ, disconnect(), connect(5, "x"), packet(0xF0)]
    other = wire().join(name="other")
    other.send(subscribe(4, "alive"))
    other.receive(5)
    for _ in range(300):
        stream = bytearray(connect(dice.choice((4, 5)), "f") + b"".join(dice.choices(valid, k=4)) + dice.randbytes(9))
        for _ in range(dice.randrange(5)):
            stream[dice.randrange(len(stream))] = dice.randrange(256)
        one = wire()
        one.send(stream)
        dice.choice((one.reset, one.socket.close, lambda: None))()
        other.send(publish(4, "alive", b"yes"))
        assert other.receive(12) == publish(4, "alive", b"yes")
    assert vm.eval("return table.concat(reports, ';'):find('callback')") == (None,)
    assert vm.eval("return table.concat(reports, ';'):find('mqtt 128')") == (None,)


def test_a_blocked_subscriber_delays_no_others(vm: Vm, wire: Dial) -> None:
    stalled, healthy, writer = wire(4096).join(name="s"), wire().join(name="h"), wire().join(name="w")
    for one in (stalled, healthy):
        one.send(subscribe(4, "t"))
        one.receive(5)
    message = publish(4, "t", bytes(20_000))
    for _ in range(400):
        writer.send(message)
        assert len(healthy.receive(len(message))) == len(message)
    assert vm.eval("return broker:status().dropped")[0] > 50
    assert vm.eval("return collectgarbage('count')")[0] < 20_000


def test_burst_is_not_lost(vm: Vm, wire: Dial) -> None:
    reader, writer = wire().join(name="r"), wire().join(name="w")
    reader.send(subscribe(4, "t"))
    reader.receive(5)
    burst = b"".join(publish(4, "t", b"%06d" % number) for number in range(20_000))
    sending = gevent.spawn(writer.send, burst)
    assert reader.receive(len(burst)) == burst
    sending.join()
    assert vm.eval("return broker:status().dropped") == (0,)


def test_flood_does_not_hold_the_loop(wire: Dial) -> None:
    writer = wire().join(name="w")
    sending = gevent.spawn(writer.send, publish(4, "t", b"x") * 300_000)
    longest_s, before_s = 0.0, time.thread_time()  # CPU: who else uses the machine does not count
    while not sending.ready():
        gevent.sleep(0.001)
        now_s = time.thread_time()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
    assert longest_s < 0.1


def test_callbacks_may_wait(vm: Vm) -> None:
    vm.eval(
        """
        broker = require "mqttbroker".create(0, {
          auth = function(client, user) ba.sleep(30) return user ~= "eve" end,
          onpublish = function(client, topic) ba.sleep(5) return topic ~= "no" end,
        })
        """
    )
    port = int(vm.eval("return broker:status().port")[0])
    users = [b"\0\3ada", b"\0\3eve", b"\0\3bob"]
    wires = [Wire(port) for _ in users]
    for number, (one, user) in enumerate(zip(wires, users, strict=True)):
        one.send(connect(4, f"c{number}", flags=0x82, rest=user) + subscribe(4, "#") + publish(4, "no") + PINGREQ)
    assert [one.receive(4) for one in wires] == [b"\x20\2\0\0", b"\x20\2\0\4", b"\x20\2\0\0"]
    assert wires[0].receive(7) == packet(0x90, b"\0\1\0") + PINGRESP
    assert wires[1].rest() == b""
    wires[2].send(publish(4, "yes"))
    assert wires[0].receive(7) == publish(4, "yes")
    vm.eval("broker:close()")


def test_client_that_goes_while_a_callback_waits(vm: Vm) -> None:
    vm.eval("broker = require 'mqttbroker'.create(0, {auth = function() ba.sleep(30) return true end})")
    one = Wire(int(vm.eval("return broker:status().port")[0]))
    one.send(connect(4))
    let_others_run()
    one.reset()
    wait_until(lambda: vm.eval("return broker:connections()") == (0,))
    assert clients(vm) == 0
    vm.eval("broker:close()")


def test_a_client_with_killed_activities_is_removed(vm: Vm, wire: Dial, caplog: pytest.LogCaptureFixture) -> None:
    ada = wire()
    ada.send(connect(4, "ada", flags=0x06, rest=text("will") + text("gone")) + subscribe(4, "#"))
    ada.receive(9)
    vm.stop()
    assert ada.rest() == b""
    wait_until(lambda: clients(vm) == 0)
    assert vm.eval("return broker:connections()") == (0,)
    assert not caplog.records


def test_a_silent_client_is_disconnected(vm: Vm, wire: Dial) -> None:
    ada = wire()
    ada.socket.settimeout(15)
    ada.send(connect(5, "ada", keepalive=1))
    assert [first for first, _ in split(ada.rest())] == [0x20, 0xE0]
    wait_until(lambda: vm.eval("return reports[1]") == (b"mqtt 141",))


def test_a_connection_without_connect_is_closed(vm: Vm, wire: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_broker, "CONNECT_S", 0.01)
    assert wire().rest() == b""
    wait_until(lambda: vm.eval("return reports[1]") == (b"mqtt 141",))


def test_a_client_that_reads_nothing_is_disconnected(vm: Vm, wire: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path.limits, "stalled_s", 0.05)
    stalled, writer = wire(4096).join(name="s"), wire().join(name="w")
    stalled.send(subscribe(4, "t"))
    stalled.receive(5)
    while vm.eval("return reports[1]") == (None,):
        writer.send(publish(4, "t", bytes(60_000)))
        gevent.sleep(0.01)
    assert vm.eval("return reports[1]") == (b"sock timeout",)
    assert writer.is_alive()


def test_shutdown_sends_what_is_queued(vm: Vm, services: Services, wire: Dial) -> None:
    reader, writer = wire(4096).join(5, name="r"), wire().join(5, name="w")
    reader.send(subscribe(5, "t"))
    reader.receive(6)
    broker = services.mqtt_brokers.brokers[vm.eval("return broker.number")[0]]
    count = more = 0
    while more < 5:
        more += any(one.outbox.life is Life.BLOCKED for one in broker.connections)
        writer.send(publish(5, "t", bytes(60_000)) + PINGREQ)
        assert writer.receive(2) == PINGRESP
        count += 1
    vm.eval("broker:shutdown()")
    assert [first for first, _ in split(reader.rest())] == [0x30] * count + [0xE0]


def test_large_messages_are_permitted_one_by_one(vm: Vm) -> None:
    vm.eval(
        """
        broker = require "mqttbroker".create(0, {
          address = "127.0.0.1", onpublish = function(client, topic, payload) return #payload ~= 100000 end,
        })
        """
    )
    ada = Wire(int(vm.eval("return broker:status().port")[0])).join(5)
    ada.send(subscribe(5, "t"))
    ada.receive(6)
    kept = publish(5, "t", bytes(100_001))
    ada.send(publish(5, "t", bytes(100_000)) + kept + publish(5, "t", b"small"))
    assert ada.receive(len(kept)) == kept
    vm.eval("broker:close()")


def test_socket_of_a_client(vm: Vm) -> None:
    vm.eval(
        """
        broker = require "mqttbroker".create(0, {address = "127.0.0.1", onpublish = function(client)
          seen = table.concat({client.address, client.sock:peername()}, " ", 1, 2) .. tostring(client.secure)
          known = client.sock
        end})
        """
    )
    ada = Wire(int(vm.eval("return broker:status().port")[0])).join(4)
    ada.send(publish(4, "t") + PINGREQ)
    assert ada.receive(2) == PINGRESP
    assert vm.eval("return seen") == (b"127.0.0.1 127.0.0.1false",)
    ada.socket.close()
    wait_until(lambda: vm.eval("return broker:connections()") == (0,))
    assert vm.eval("return known:peername()") == (None, b"socketclosed")
    vm.eval("broker:close()")


def test_port_that_is_taken(vm: Vm, port: int) -> None:
    answer = vm.eval(f"return require 'mqttbroker'.create({port}, {{address = '127.0.0.1'}})")
    assert answer[0] is None
    assert answer[1] == b"bind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("70000", "port: port number from 0 to 65535 expected, got 70000"),
        ("0, {maxPacketSize = 1}", "maxPacketSize: number of bytes from 128 to 268435460 expected, got 1"),
        ("0, {auth = 5}", "auth: function or true expected, got 5"),
        ("0, {auth = true}", "auth: the server has no users; set auth.users to a file with users"),
        ("0, {allowWildcards = 'no'}", "allowWildcards: boolean expected, got string"),
        ("0, {shark = true}", "shark: TLS object expected, got boolean"),
        ("0, 'plain'", "options: table expected, got string"),
    ],
)
def test_wrong_options(vm: Vm, arguments: str, message: str) -> None:
    with pytest.raises(LuaError) as raised:
        vm.eval(f"require 'mqttbroker'.create({arguments})", "@app.lua")
    assert f"app.lua:1: bad argument #2 to 'create' ({message})" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "listeners"),
    [
        ("", "1883 plain"),
        ("nil, {}", "1883 plain"),
        ("7", "7 plain"),
        ("{port = 8}", "8 plain"),
        ("7, {port = 8}", "7 plain"),
        ("{plainPort = 9}", "1883 plain"),
        ("{shark = ba.sharkclient()}", "8883 tls"),
        ("7, {shark = ba.sharkclient(), plain = true}", "7 tls, 1883 plain"),
        ("{shark = ba.sharkclient(), plain = true, plainPort = 9}", "8883 tls, 9 plain"),
        ("{shark = ba.sharkclient(), plainPort = 9}", "8883 tls"),
    ],
)
def test_ports(vm: Vm, arguments: str, listeners: str) -> None:
    found = vm.eval(
        f"""
        local list = require "mqttbroker.options".parse({arguments}).listeners
        for i, entry in ipairs(list) do list[i] = entry.port .. (entry.shark and " tls" or " plain") end
        return table.concat(list, ", ")
        """
    )
    assert found == (listeners.encode(),)


def test_shutdown_notifies_clients_and_frees_the_port(vm: Vm, port: int, wire: Dial) -> None:
    old, new = wire().join(4, "old"), wire().join(5, "new")
    assert vm.eval("return broker:shutdown()") == (True,)
    assert split(new.rest())[0][1][0] == 0x8B
    assert old.rest() == b""
    assert vm.eval("return broker:status().running, broker:shutdown()") == (False, False)
    wait_until(lambda: vm.eval("return broker:connections()") == (0,))
    vm.eval(f"broker = assert(require 'mqttbroker'.create({port}, {{address = '127.0.0.1'}}))")


def test_close_ends_at_once(vm: Vm, wire: Dial) -> None:
    ada = wire().join(5)
    assert vm.eval("return broker:close(), broker:close()") == (True, False)
    assert ada.rest() == b""


def test_nothing_is_left_of_clients(vm: Vm, wire: Dial) -> None:
    def load() -> None:
        for number in range(200):
            one = Wire(int(vm.eval("return broker:status().port")[0])).join(5, f"c{number}")
            one.send(subscribe(5, f"t/{number}/#"))
            one.socket.close()
        wait_until(lambda: vm.eval("return broker:connections()") == (0,))
        vm.eval("collectgarbage() collectgarbage()")

    load()
    before = vm.memory_bytes()
    load()
    assert vm.memory_bytes() < before + 50_000


# ---- clients inside the process


LOCAL = """
seen = {}
local function see(...) seen[#seen + 1] = table.concat({...}, " ") end
here = broker:createClient(function(kind, code, state)
  see(kind, code, tostring(state.reasoncode))
  return true
end, function(topic, payload, properties, first)
  see(topic, tostring(payload), type(payload), properties.k or "-", tostring(first))
end, {clientidentifier = "here", will = {topic = "bye", payload = "here is gone"}})
here:subscribe("a/#", function(topic, reason) see(topic, tostring(reason)) end)
here:subscribe("b", {onpub = function(topic, payload) see("b only", tostring(payload)) end})
here:publish("a/1", "early", nil, {k = "v", contenttype = "text"})
"""


def seen(vm: Vm) -> list[str]:
    return vm.eval("local s = table.concat(seen, '\\n') seen = {} return s")[0].decode().split("\n")


def test_local_client(vm: Vm, wire: Dial) -> None:
    ada = wire().join(5, "ada")
    ada.send(subscribe(5, "#"))
    ada.receive(6)
    vm.eval(LOCAL)
    wait_until(lambda: vm.eval("return #seen") == (3,))
    assert seen(vm) == ["mqtt connect 0", "a/# 0", "a/1 early userdata v 48"]
    early = publish(5, "a/1", b"early", properties=b"\x03" + text("text") + b"\x26" + text("k") + text("v"))
    assert ada.receive(len(early)) == early
    ada.send(publish(5, "b", b"1") + publish(5, "a", b"2", properties=b"\x26" + text("k") + text("w")))
    wait_until(lambda: vm.eval("return #seen") == (2,))
    assert seen(vm) == ["b only 1", "a 2 userdata w 48"]
    assert vm.eval("return here:status()") == (0, True, False)
    assert vm.eval("return here:disconnect(4), here:disconnect(), here:publish('a', 'x')") == (True, False, False)
    echo = publish(5, "b", b"1") + publish(5, "a", b"2", properties=b"\x26" + text("k") + text("w"))
    last = echo + publish(5, "bye", b"here is gone")
    assert ada.receive(len(last)) == last


def test_callback_of_a_local_client_may_wait(vm: Vm, wire: Dial) -> None:
    vm.eval(
        """
        seen = {}
        slow = broker:createClient(function() return slow:subscribe("t") ~= nil end, function(topic, payload)
          ba.sleep(20)
          seen[#seen + 1] = payload
        end, {recbta = false})
        """
    )
    wait_until(lambda: vm.eval("local _, connected = slow:status() return connected") == (True,))
    ada = wire().join()
    for number in range(5):
        ada.send(publish(4, "t", b"%d" % number))
    assert ada.is_alive()
    wait_until(lambda: vm.eval("return #seen") == (5,))
    assert vm.eval("return table.concat(seen)") == (b"01234",)


def test_a_local_client_that_does_not_keep_up_loses_messages(vm: Vm, wire: Dial) -> None:
    vm.eval(
        """
        slow = broker:createClient(nil, function() ba.sleep(600000) end)
        slow:subscribe("t", function() subscribed = true end)
        """
    )
    wait_until(lambda: vm.eval("return subscribed") == (True,))
    ada = wire().join()
    ada.send(publish(4, "t", bytes(60_000)) * 40 + PINGREQ)
    assert ada.receive(2) == PINGRESP
    wait_until(lambda: vm.eval("return broker:status().dropped")[0] >= 20)
    assert vm.eval("return broker:status().dropped")[0] < 40
    vm.eval("slow:close()")


def test_local_clients_take_over_identifiers(vm: Vm, wire: Dial) -> None:
    vm.eval(
        """
        said = {}
        here = broker:createClient(function(kind, code, state)
          said[#said + 1] = kind .. " " .. code .. " " .. state.reasoncode
        end, nil, {clientidentifier = "same", will = {topic = "w", payload = "gone"}})
        """
    )
    wait_until(lambda: vm.eval("return #said") == (1,))
    other = wire().join(4, "other")
    other.send(subscribe(4, "w"))
    other.receive(5)
    network = wire().join(4, "same")
    wait_until(lambda: vm.eval("return said[2]") == (b"mqtt disconnect 142",))
    assert other.receive(9) == publish(4, "w", b"gone")
    vm.eval("again = broker:createClient(nil, nil, {clientidentifier = 'same'})")
    assert network.rest() == b""
    assert other.is_alive()


def test_what_a_local_client_subscribes_to(vm: Vm, wire: Dial) -> None:
    """Reasons of refusals, the retain flag on request, and the newest `onpub` of a filter."""
    vm.eval(
        """
        seen = {}
        local function see(...) seen[#seen + 1] = table.concat({...}, " ") end
        local function said(topic, reason) see(topic, tostring(reason)) end
        here = broker:createClient(nil, print, {recbta = false})
        here:subscribe("a/#/b", said)
        here:subscribe("$share/g/t", said)
        here:subscribe("ctrl\1", said)
        here:subscribe("t", said, {onpub = function(topic, payload) see("old", payload) end})
        local function new(topic, payload, _, first) see("new", payload, first) end
        here:subscribe("t", said, {retainaspublished = true, onpub = new})
        here:unsubscribe("nothing", said)
        """
    )
    wait_until(lambda: vm.eval("return #seen") == (6,))
    assert sorted(seen(vm)) == sorted(["a/#/b 143", "$share/g/t 158", "ctrl\1 143", "t 0", "t 0", "nothing 17"])
    wire().join().send(publish(4, "t", b"1", first=0x31))
    wait_until(lambda: vm.eval("return #seen") == (1,))
    assert seen(vm) == ["new 1 49"]
    vm.eval("here:unsubscribe('t', function() gone = true end)")
    wait_until(lambda: vm.eval("return gone") == (True,))


def test_local_client_that_says_no_leaves(vm: Vm, port: int) -> None:
    vm.eval("gone = broker:createClient(function() return false end)")
    wait_until(lambda: vm.eval("return select(3, gone:status())") == (True,))
    assert clients(vm) == 0


def test_a_local_client_is_notified_of_close(vm: Vm, port: int) -> None:
    vm.eval(LOCAL)
    wait_until(lambda: vm.eval("return #seen") == (3,))
    vm.eval("broker:shutdown()")
    wait_until(lambda: vm.eval("return seen[4]") == (b"mqtt disconnect 139",))


def test_wrong_arguments_of_a_local_client(vm: Vm, port: int) -> None:
    vm.eval("here = broker:createClient()")
    for call in ("publish('a/#', 'x')", "publish('a', {})", "subscribe(true)", "setwill{topic = '#'}", "setwill(1)"):
        with pytest.raises(LuaError, match=r"app.lua:1: bad argument #[12] to"):
            vm.eval(f"here:{call}", "@app.lua")


def test_payloads_of_a_local_client(vm: Vm, wire: Dial) -> None:
    ada = wire().join()
    ada.send(subscribe(4, "#"))
    ada.receive(5)
    vm.eval("here = broker:createClient()")
    vm.eval("here:publish('a', 'x') here:publish('a', 7) here:publish('a', ba.bytearray.create('\\0\\255'))")
    expected = publish(4, "a", b"x") + publish(4, "a", b"7") + publish(4, "a", b"\0\xff")
    assert ada.receive(len(expected)) == expected


def test_will_of_a_local_client(vm: Vm, wire: Dial) -> None:
    ada = wire().join()
    ada.send(subscribe(4, "#"))
    ada.receive(5)
    vm.eval(
        """
        local one, two = broker:createClient(), broker:createClient(nil, nil, {will = {topic = "no"}})
        one:setwill {topic = "will", message = "gone"}
        two:setwill(nil)
        one:publish("here", "1")
        ba.sleep(20)
        one:disconnect(4)
        two:disconnect(4)
        do local three <close> = broker:createClient() end
        """
    )
    expected = publish(4, "here", b"1") + publish(4, "will", b"gone")
    assert ada.receive(len(expected)) == expected
    assert ada.is_alive()


def test_local_client_of_a_broker_that_has_ended(vm: Vm, port: int) -> None:
    vm.eval("broker:close() broker:createClient(function(...) said = table.concat({...}, ' ') end)")
    wait_until(lambda: vm.eval("return said") == (b"sock cannotconnect",))


def test_local_clients_meet(vm: Vm, port: int) -> None:
    vm.eval(
        """
        got = {}
        here = broker:createClient(nil, function(topic, payload)
          got[#got + 1] = topic .. payload
          if topic == "ping" then here:publish("pong", payload) end
        end, {recbta = false})
        here:subscribe("ping", {nolocal = true})
        here:subscribe("pong")
        there = broker:createClient(nil, print)
        there:publish("ping", "1")
        there:publish("ping", "2")
        """
    )
    wait_until(lambda: vm.eval("return #got") == (4,))
    assert vm.eval("return table.concat(got, ' ')") == (b"ping1 ping2 pong1 pong2",)


def test_the_documented_example(vm: Vm, wire: Dial) -> None:
    """A client inside the server as applications have it: its onstatus only looks on, its name is `clientId`."""
    vm.eval(
        """
        seen = {}
        here = broker:createClient(function(kind, code) seen[#seen + 1] = kind .. " " .. code end,
          function(topic, payload) seen[#seen + 1] = topic .. " " .. tostring(payload) end, {clientId = "inside"})
        here:subscribe("door/#")
        """
    )
    wait_until(lambda: vm.eval("return (select(2, here:status()))") == (True,))
    wire().join(4, "out").send(publish(4, "door/1", b"open"))
    wait_until(lambda: vm.eval("return #seen") == (2,))
    assert seen(vm) == ["mqtt connect", "door/1 open"]
    assert vm.eval("return here.id, #broker:status().listeners, broker:status().listeners[1].port") == (
        b"inside",
        1,
        vm.eval("return broker:status().port")[0],
    )


def test_an_onstatus_that_fails_keeps_its_client(vm: Vm, port: int) -> None:
    vm.eval("here = broker:createClient(function() error 'oh no' end)", "@app.lua")
    wait_until(lambda: vm.eval("return (select(2, here:status()))") == (True,))
    assert vm.eval("return reports[1]") == (b"callback onstatus failed: app.lua:1: oh no",)


def test_connections_are_bounded(vm: Vm) -> None:
    vm.eval(START.replace("address =", "maxClients = 2, address ="))
    port = vm.eval("return broker:status().port")[0]
    first, second = Wire(port).join(4, "a"), Wire(port).join(4, "b")
    assert Wire(port).rest() == b""
    assert vm.eval("return reports[1], broker:status().refused") == (b"mqtt 151", 1)
    first.socket.close()
    wait_until(lambda: clients(vm) == 1)
    third = Wire(port).join(4, "c")
    assert second.is_alive()
    assert third.is_alive()
    vm.eval("broker:close()")
