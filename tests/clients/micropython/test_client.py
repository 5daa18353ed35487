"""The client for MicroPython, run by MicroPython, with a real broker."""

from __future__ import annotations

import random
import struct

import pytest
import trustme

from smqrt.wire import smq
from tests.support import pki
from tests.support.micropython import CLIENT
from tests.support.scripted_broker import Conversation, ScriptedBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

START = """
from smq import SmqClient
def client(url, **options):
    smq = SmqClient(url, reconnect_delay=0.05, reconnect_delay_max=0.2, **options)
    smq.onconnect = lambda etid, rnd, ip: show(["connected", etid])
    smq.onreconnect = lambda etid, rnd, ip: show(["reconnected", etid])
    smq.onclose = lambda reason, again: show(["lost", reason, again])
    smq.onmsg = lambda data, ptid, tid, subtid: show(["message", str(data, "utf-8"), ptid])
    return smq
"""
RUN = """
while smq.poll(1000):
    pass
show(["closed"])
"""


def until_connected(device, word="connected"):
    """The ETID of the next connection; what comes before it is left out."""
    while True:
        value = device.next()
        if value[0] == word:
            return value[1]


def test_the_file_is_small():
    text = (CLIENT / "smq.py").read_text("utf-8")
    assert len(text.splitlines()) < 250
    assert len((CLIENT / "smq_full.py").read_text("utf-8").splitlines()) < 150
    assert not (CLIENT / "__init__.py").exists(), "it is a file for devices, not a module of smqrt"


def test_a_server_that_is_killed_and_comes_again(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r})
smq.subscribe("t", onmsg=lambda data, ptid, tid, subtid: show(["t", str(data, "utf-8")]))
smq.subscribe("t", "s", onmsg=lambda data, ptid, tid, subtid: show(["s", str(data, "utf-8")]))
"""
    device = run(START + program + RUN)
    etid = until_connected(device)
    uid = broker.smq.etid2peer(etid).uid
    broker.close()
    assert device.next()[0] == "lost"
    received = []
    again = start_broker(port=broker.port, onmsg=lambda data, ptid, tid, subtid: received.append(data))
    new = until_connected(device, "reconnected")
    assert again.smq.etid2peer(new).uid == uid, "a random uid is kept"
    wait_until(lambda: again.smq.topic2tid("t"))
    again.smq.publish("1", "t")
    again.smq.publish("2", "t", "s")
    again.smq.publish("3", new)
    assert [device.next()[:2] for _ in range(3)] == [["t", "1"], ["s", "2"], ["message", "3"]]


def test_messages_without_a_connection_are_queued_up_to_a_limit(start_broker, run):
    received = []
    broker = start_broker(onmsg=lambda data, ptid, tid, subtid: received.append(data))
    program = f"""
smq = client({broker.url!r}, queue_bytes=1000)
accepted = [smq.publish("%d" % number + 68 * "x", 1) for number in range(20)]
show(accepted.count(True))
show(accepted[:10].count(True))
show(smq.close(15))
show(smq.publish("x", 1))
"""
    device = run(START + program)
    assert [device.next(), device.next()] == [10, 10], "100 bytes each with what belongs to a message"
    until_connected(device)
    assert device.next() is True
    assert device.next() is False
    wait_until(lambda: len(received) == 10)
    assert [data[:1] for data in received] == [b"%d" % number for number in range(10)]


def test_close_without_a_broker_says_so(run):
    with ScriptedBroker(lambda conversation: None) as broker:
        url = broker.url
    device = run(START + f"smq = client({url!r})\nsmq.publish('x', 't')\nshow(smq.close(0.3))\nshow(smq.closed)")
    while (value := device.next()) is not False:
        assert value[0] == "lost"
    assert device.next() is True


def test_a_large_message(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r}, max_message=65520)
smq.subscribe("t", onmsg=lambda data, ptid, tid, subtid: show([len(data), data == 8190 * b"01234567"]))
smq.publish(8190 * b"01234567", "t")
"""
    device = run(START + program + RUN)
    until_connected(device)
    assert device.next() == [65520, True]


def test_a_message_that_is_too_large_is_counted(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r}, max_message=100)
smq.onmsg = lambda data, ptid, tid, subtid: show([len(data), smq.dropped])
"""
    device = run(START + program + RUN)
    etid = until_connected(device)
    for size in (100, 101, 65520, 0):
        broker.smq.publish(b"x" * size, etid)
    assert [device.next(), device.next()] == [[100, 0], [0, 2]]


def test_a_busy_hub_and_one_that_denies_access(start_broker, run):
    codes = [2, 2, 0]
    broker = start_broker(authenticate=lambda credentials, info: codes.pop(0))
    device = run(START + f"smq = client({broker.url!r})" + RUN)
    assert [device.next(), device.next()] == 2 * [["lost", "refused with code 2", True]]
    until_connected(device)
    denying = start_broker(authenticate=lambda credentials, info: 0 if credentials == b"secret" else 3)
    device = run(START + f"smq = client({denying.url!r}, onauth=lambda seed, ip: 'wrong')" + RUN)
    assert [device.next(), device.next()] == [["lost", "refused with code 3", False], ["closed"]]
    device = run(START + f"smq = client({denying.url!r}, onauth=lambda seed, ip: 'secret')" + RUN)
    until_connected(device)


def test_a_callback_that_fails_does_not_end_the_client(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r})
smq.subscribe("t", onmsg=lambda data, ptid, tid, subtid: [][1], onack=lambda *values: show(["ack"]))
"""
    device = run(START + program + RUN)
    etid = until_connected(device)
    assert device.next() == ["ack"]
    broker.smq.publish("x", "t")
    broker.smq.publish("y", etid)
    assert device.next() == ["message", "y", 1]
    assert "IndexError: list index out of range\n" in device.other


def test_options_are_checked(run):
    program = """
for url, options in (("ftp://x", {}), ("https://x", {}), ("http://x", {"usr": 1})):
    try:
        SmqClient(url, **options)
    except (ValueError, AttributeError) as error:
        show(type(error).__name__)
"""
    device = run(START + program)
    assert [device.next() for _ in range(3)] == ["ValueError", "ValueError", "AttributeError"]


def test_tls(start_broker, run, tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    broker = start_broker(host="localhost", context=pki.gevent_context(authority.issue_cert("localhost")))
    for name, one in (("ca.pem", authority), ("other.pem", other)):
        one.cert_pem.write_to_path(str(tmp_path / name))
    program = f"""
import tls
context = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
context.verify_mode = tls.CERT_REQUIRED
context.load_verify_locations(open(ask(), "rb").read())
smq = client({broker.url!r}, tls=context, max_message=65520)
smq.subscribe("t", onmsg=lambda data, ptid, tid, subtid: show([len(data), data == 8190 * b"01234567"]))
for number in range(2):
    while not smq.publish(8190 * b"01234567", "t"):
        smq.poll(100)
"""
    device = run(START + program + RUN)
    device.tell(str(tmp_path / "ca.pem"))
    until_connected(device)
    assert [device.next(), device.next()] == 2 * [[65520, True]]
    device = run(START + program + RUN)
    device.tell(str(tmp_path / "other.pem"))
    assert "not correctly signed by the trusted CA" in device.next()[1]


# ---- a broker that breaks the protocol


def accept(conversation: Conversation) -> None:
    """The broker's part of the handshake; the client asks for no HTTP response."""
    conversation.read_head()
    conversation.send(smq.init(77, "127.0.0.1"))
    conversation.receive()
    conversation.send(smq.connack(0, 4711))


def published(data: bytes) -> bytes:
    """A message of the server to the client that `accept` has accepted."""
    return struct.pack(">BIII", smq.Type.PUBLISH, 4711, 1, 0) + data


def sends(data: bytes):
    def script(conversation: Conversation) -> None:
        accept(conversation)
        conversation.raw(data)
        conversation.wait_closed()

    return script


def sends_first(data: bytes):
    def script(conversation: Conversation) -> None:
        conversation.read_head()
        conversation.raw(data)
        conversation.wait_closed()

    return script


def stays_silent(conversation: Conversation) -> None:
    accept(conversation)
    conversation.wait_closed()


@pytest.mark.parametrize(
    "data",
    [b"\0\2\10", b"\0\3\10", b"\0\16\10" + bytes(11), b"\0\3\143", b"\0\5\7\0\0", b"\xff\xff\11" + bytes(70000)],
)
def test_malformed_packets_end_the_connection(run, data):
    with ScriptedBroker(sends(data), stays_silent) as broker:
        device = run(START + f"smq = client({broker.url!r}, pong=0.5)" + RUN)
        until_connected(device)
        assert device.next() == ["lost", "protocolerror", True]
        until_connected(device, "reconnected")


@pytest.mark.parametrize("data", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"\0\4\3\1", 5000 * b"\xff"])
def test_servers_that_are_no_brokers(run, data):
    with ScriptedBroker(sends_first(data), stays_silent) as broker:
        device = run(START + f"smq = client({broker.url!r})" + RUN)
        assert device.next() == ["lost", "nonsmq", True]
        until_connected(device)


def test_what_was_not_asked_for_is_ignored(run):
    packets = [smq.ack(kind, 5, b"name-%d" % kind) for kind in (5, 7, 18)] + [smq.PONG, smq.init(1, "x")]
    packets += [smq.connack(6, 0), published(b"last")]
    with ScriptedBroker(sends(b"".join(smq.frame(packet) for packet in packets))) as broker:
        program = """
smq.onmsg = lambda data, ptid, tid, subtid: show([smq._topics.get(5), len(smq._topics), len(smq._subtopics)])
"""
        device = run(START + f"smq = client({broker.url!r})" + program + RUN)
        until_connected(device)
        assert device.next() == [None, 2, 0], "only its own name and number"


def test_pings_of_a_broker_that_does_not_read_fill_no_queue(run):
    with ScriptedBroker(sends(1000 * smq.frame(smq.PING) + smq.frame(published(b"end")))) as broker:
        program = """
smq._flush = lambda: None if smq.connected else SmqClient._flush(smq)  # a socket that takes nothing more
smq.onmsg = lambda *values: show(len(smq._out))
"""
        device = run(START + f"smq = client({broker.url!r})" + program + RUN)
        until_connected(device)
        assert device.next() == 9


def test_random_bytes_do_not_end_the_client(run):
    rnd = random.Random(41)
    kinds = [3, 5, 7, 8, 11, 12, 13, 16, 18]
    scripts = []
    for _ in range(40):
        packets = [bytes([rnd.choice(kinds)]) + rnd.randbytes(rnd.randrange(30)) for _ in range(20)]
        scripts.append(rnd.choice([sends, sends_first])(b"".join(map(smq.frame, packets)) + rnd.randbytes(50)))
    with ScriptedBroker(*scripts, stays_silent) as broker:
        program = f"""
smq = client({broker.url!r}, timeout=0.5, ping=0.1, pong=0.1)
smq.reconnect_delay = 0.001
smq.onclose = lambda reason, again: True
smq.onmsg = lambda *values: None
"""
        device = run(START + program + RUN)
        wait_until(lambda: broker.connections > 45, lambda: device.other)
        assert not device.other, "callbacks do not fail, and nothing is raised"


def test_close_waits_for_the_pong_of_its_own_ping(run):
    def script(conversation: Conversation) -> None:
        accept(conversation)
        assert conversation.receive()[0] == smq.Type.PING  # after its time
        conversation.send(published(b"close now"))
        assert conversation.receive()[0] == smq.Type.PUBLISH
        conversation.send(smq.PONG)
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        program = f"""
smq = client({broker.url!r}, ping=0.1)
smq.onmsg = lambda *values: received.append(values)
received = []
while not received:
    smq.poll(1000)
smq.publish("x", 1)
show(smq.close(0.5))
"""
        device = run(START + program)
        until_connected(device)
        assert device.next() is False, "the Pong was that of the earlier Ping"


def test_a_broker_that_does_not_answer(run):
    with ScriptedBroker(sends_first(b"")) as broker:
        device = run(START + f"smq = client({broker.url!r}, timeout=0.2)" + RUN)
        assert device.next() == ["lost", "timeout", True]
    with ScriptedBroker(stays_silent) as broker:
        device = run(START + f"smq = client({broker.url!r}, ping=0.1, pong=0.1)" + RUN)
        until_connected(device)
        assert device.next() == ["lost", "pong", True]


def test_delays_grow_and_are_random(run):
    with ScriptedBroker(lambda conversation: None) as broker:
        program = f"""
import time
smq = SmqClient({broker.url!r}, reconnect_delay=10, reconnect_delay_max=40)
def on_close(reason, again):
    show(time.ticks_diff(smq._at, time.ticks_ms()))
    smq._at = time.ticks_ms()  # try again at once
smq.onclose = on_close
"""
        device = run(START + program + RUN)
        delays = [device.next() / 1000 for _ in range(8)]
    for delay_s, longest_s in zip(delays, [10, 20, *6 * [40]], strict=True):
        assert longest_s / 2 - 2 <= delay_s <= longest_s
    assert max(delays[2:]) - min(delays[2:]) > 0.1


def test_onclose_decides(run):
    with ScriptedBroker(lambda conversation: None) as broker:
        device = run(START + f"smq = client({broker.url!r})\nsmq.onclose = lambda reason, again: False" + RUN)
        assert device.next() == ["closed"]
        device = run(START + f"smq = client({broker.url!r}, reconnect=False)" + RUN)
        assert device.next()[0] == "lost"
        assert device.next() == ["closed"]


def test_a_callback_may_close_but_not_poll(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r})
smq.subscribe("t", onmsg=lambda *values: smq.poll(), onack=lambda *values: show(["ack"]))
smq.onmsg = lambda *values: smq.close(0)
"""
    device = run(START + program + RUN)
    etid = until_connected(device)
    assert device.next() == ["ack"]
    broker.smq.publish("x", "t")
    broker.smq.publish("y", etid)
    assert device.next() == ["closed"]
    assert any("already executing" in line for line in device.other)


# ---- smq_full.py


FULL = START.replace("from smq import", "from smq_full import")


def test_observations_and_numbers_of_subtopics_after_a_reconnect(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r})
smq.observe("t", lambda subscribers, topic: show(["change", subscribers, topic]))
smq.createsub("s", lambda accepted, subtopic, subtid: show(["created", accepted, subtopic, subtid]))
smq.onmsg = lambda data, ptid, tid, subtid: smq.unobserve(str(data, "utf-8"))
"""
    device = run(FULL + program + RUN)
    until_connected(device)
    assert sorted([device.next(), device.next()]) == [
        ["change", 0, "t"],
        ["created", True, "s", broker.smq.subtopic2tid("s")],
    ]
    broker.close()
    assert device.next()[0] == "lost"
    again = start_broker(port=broker.port)
    etid = until_connected(device, "reconnected")
    assert device.next() == ["change", 0, "t"], "once"
    again.smq.subscribe("t", onmsg=print)
    assert device.next() == ["change", 1, "t"]
    again.smq.publish("t", etid)  # the device ends the observation
    again.smq.publish("x", etid)
    again.smq.unsubscribe("t")
    again.smq.shutdown("the end")
    assert device.next()[0] == "lost"


def test_the_observation_of_an_etid_ends_with_its_client(start_broker, run):
    broker = start_broker()
    program = f"""
smq = client({broker.url!r})
smq.onmsg = lambda data, ptid, tid, subtid: smq.observe(int(data), lambda *values: show(["gone", values]))
"""
    device, other = run(FULL + program + RUN), run(FULL + f"smq = client({broker.url!r})" + RUN)
    etid, observed = until_connected(device), until_connected(other)
    broker.smq.publish(str(observed), etid)
    broker.smq.publish(str(0x7FFFFFF1), etid)
    assert device.next() == ["gone", [0, 0x7FFFFFF1]], "an unknown number, after the answer to the first one"
    other.close()
    assert device.next() == ["gone", [0, observed]]


def test_requests_end_with_an_answer_their_time_or_the_client(start_broker, run):
    requests = []
    broker = start_broker(onmsg=lambda data, ptid, tid, subtid: requests.append((data, ptid, subtid)))
    program = f"""
smq = client({broker.url!r}, queue_bytes=4000)
def answered(name):
    return lambda data: show([name, data and str(data, "utf-8")])
smq.onconnect = lambda etid, rnd, ip: show(["connected", smq.request(1, "a", answered("a"), 60)])
while not smq.connected:
    smq.poll(100)
while smq._requests:
    smq.poll(1000)
smq.request(1, "b", answered("b"), 0.05)
while smq._requests:
    smq.poll(60000)
show([smq.request(1, "x", answered("x"), 60) for _ in range(17)])
smq.close(15)
"""
    device = run(FULL + program)
    assert device.next() == ["connected", True]
    data, etid, subtid = wait_until(lambda: requests)[0]
    broker.smq.publish("to nobody", etid, subtid ^ 1)
    broker.smq.publish("re:" + data.decode(), etid, subtid)
    assert device.next() == ["message", "to nobody", 1]
    assert device.next() == ["a", "re:a"]
    assert device.next() == ["b", None], "after 50 ms, although the poll may wait for a minute"
    assert device.next() == 16 * [True] + [False]
    assert [device.next() for _ in range(16)] == 16 * [["x", None]]
