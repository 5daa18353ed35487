"""Lost connections, refusals, silence and rubbish: what the client tells and when it comes back."""

import logging
import time

import gevent
import pytest
from gevent.queue import Queue

from smqrt.errors import DeliveryError
from smqrt.wire import smq
from tests.conftest import free_port
from tests.support.clock import undisturbed_s
from tests.support.scripted_broker import ScriptedBroker
from tests.support.waiting import wait_until


def collect(queue):
    return lambda *arguments: queue.put(arguments)


@pytest.fixture(params=["raw", "websocket"])
def address(request):
    return lambda broker: broker.url if request.param == "raw" else broker.ws_url


def test_after_a_restart_everything_works_again(start_broker, make_client, address):
    broker = start_broker()
    received, changes, back = Queue(), Queue(), Queue()
    client = make_client(address(broker), onreconnect=collect(back))
    client.subscribe("t", "s", onmsg=collect(received))
    client.observe("room", collect(changes))
    assert client.flush(5)
    old_tid = client.topic2tid("t")
    port = broker.port
    broker.close()
    wait_until(lambda: not client.connected)
    assert client.publish("while away", "t", "s")
    broker = start_broker(port=port)
    etid, _, _ = back.get(timeout=5)
    assert etid == client.gettid()
    assert received.get(timeout=5)[0] == b"while away"
    broker.smq.publish("back again", "t", "s")
    assert received.get(timeout=5)[0] == b"back again"
    assert client.topic2tid("t") != old_tid
    assert [changes.get(timeout=5) for _ in range(2)] == [(0, "room")] * 2


def test_the_first_connection_is_tried_again_too(start_broker, make_client):
    port = free_port()
    ends = Queue()
    client = make_client(f"http://127.0.0.1:{port}/smq.lsp", onclose=collect(ends))
    word, can_reconnect = ends.get(timeout=5)
    assert (word, can_reconnect) == ("cannotconnect", True)
    assert "connection refused" in str(client.end)
    start_broker(port=port)
    assert client.wait_connected(5)


def test_delays_grow_with_failures_and_reset_after_success(make_client):
    ends = Queue()
    drop = ScriptedBroker(lambda c: None, lambda c: None, lambda c: c.accept(), lambda c: None)
    with drop:
        client = make_client(drop.url, reconnect_delay=0.08, onclose=lambda *_: ends.put(client._backoff.ceiling_s))
        ceilings = [ends.get(timeout=5) for _ in range(4)]
    assert ceilings == [0.08, 0.16, 0.08, 0.16]


def test_onclose_decides(make_client):
    with ScriptedBroker(lambda c: c.accept()) as broker:
        answers = iter([True, 0.01, False])
        client = make_client(broker.url, reconnect=False, onclose=lambda err, can_reconnect: next(answers))
        wait_until(lambda: client.closed)
        assert broker.connections == 3
        assert client.end.word == "socketclosed"


def test_no_reconnect_when_disabled(make_client):
    with ScriptedBroker(lambda c: c.accept()) as broker:
        client = make_client(broker.url, reconnect=False)
        client.wait_closed(5)
        assert client.closed
        assert client.wait_connected(1) is False
        assert broker.connections == 1


@pytest.mark.parametrize(("text", "comes_back"), [(b"reconnect", False), (b"go away", False), (b"sysshutdown", True)])
def test_a_disconnect_is_final_unless_the_server_restarts(make_client, address, text, comes_back):
    ends = Queue()

    def script(conversation):
        conversation.accept()
        conversation.send(smq.disconnect(text))
        conversation.wait_closed()

    with ScriptedBroker(script, lambda c: (c.accept(), c.acks())) as broker:
        client = make_client(address(broker), onclose=collect(ends))
        assert ends.get(timeout=5) == (text.decode(), comes_back)
        assert client.wait_connected(5) is comes_back
        assert (client.closed, broker.connections) == (not comes_back, 1 + comes_back)


def test_taking_over_by_uid(broker, make_client):
    ends = Queue()
    first = make_client(broker.url, uid="the-one", onclose=collect(ends))
    assert first.wait_connected(5)
    etid = first.gettid()
    second = make_client(broker.url, uid="the-one")
    assert second.wait_connected(5)
    assert second.gettid() == etid
    assert ends.get(timeout=5) == ("reconnect", False)
    assert first.wait_connected(5) is False
    assert second.flush(5)
    assert (first.closed, second.connected) == (True, True)


@pytest.mark.parametrize(
    ("code", "word", "comes_back"),
    [(3, "incorrect credentials", False), (6, "access denied", False), (2, "server unavailable", True)],
)
def test_refusals(start_broker, make_client, code, word, comes_back):
    ends = Queue()
    broker = start_broker(authenticate=lambda credentials, info: (code, "come in by the back door"))
    client = make_client(broker.url, onclose=collect(ends))
    assert ends.get(timeout=5) == (word, comes_back)
    assert client.end.code == code
    assert "come in by the back door" in str(client.end)
    assert client.wait_connected(0.3) is False
    assert client.closed is not comes_back


@pytest.mark.parametrize("onauth", [lambda rnd, ip: "x" * 256, lambda rnd, ip: 1 / 0])
def test_credentials_that_can_not_be_sent(broker, make_client, onauth):
    client = make_client(broker.url, onauth=onauth)
    assert client.wait_connected(5) is False
    assert (client.end.word, client.end.can_reconnect, client.closed) == ("onauth", False, True)


def test_what_is_no_broker(broker, make_client):
    client = make_client(f"http://127.0.0.1:{broker.port}/nothing-here.lsp")
    assert client.wait_connected(5) is False
    assert client.end.word == "nonsmq"
    assert "answered 404" in str(client.end)


def test_a_name_that_can_not_be_resolved(make_client):
    client = make_client("http://no-such-host.invalid/", reconnect=False)
    assert client.wait_connected(10) is False
    assert client.end.word == "cannotresolve"


@pytest.mark.parametrize("stage", ["silent", "half a head", "no init", "no connack", "byte by byte"])
def test_a_handshake_has_a_deadline(make_client, stage):
    def script(conversation):
        if stage == "silent":
            conversation.wait_closed()
        conversation.read_head()
        if stage == "half a head":
            conversation.raw(b"HTTP/1.1 200 OK\r\nSmq")
        elif stage == "byte by byte":
            for _ in range(100):
                conversation.raw(
                    b"H"
                    if _ == 0
                    else b"TTP/1.1 200 OK\r\nX: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"[_ - 1 :][:1]
                )
                time.sleep(0.05)
        else:
            conversation.raw(b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n")
            if stage == "no connack":
                conversation.send(smq.init(1, "127.0.0.1"))
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        started_s, started_undisturbed_s = time.monotonic(), undisturbed_s()
        client = make_client(broker.url, timeout=0.3, reconnect=False)
        assert client.wait_connected(5) is False
        assert client.end.word == "timeout"
        assert time.monotonic() - started_s > 0.25
        assert undisturbed_s() - started_undisturbed_s < 1


def test_a_silent_connection_is_pinged_and_then_given_up(make_client, address):
    def silent(conversation):
        conversation.accept()
        return conversation.receive(), conversation.wait_closed()

    def answers(conversation):
        conversation.accept()
        while True:
            heard.append(conversation.receive())
            conversation.send(smq.PONG)

    ends, heard = Queue(), []
    with ScriptedBroker(silent, answers) as broker:
        client = make_client(address(broker), ping=0.1, pong=0.1, onclose=collect(ends))
        assert ends.get(timeout=5) == ("pong", True)
        wait_until(lambda: broker.results)
        assert broker.results[0][0] == smq.PING
        wait_until(lambda: len(heard) >= 4)
        assert heard == [smq.PING] * len(heard)
        assert (client.connected, broker.connections) == (True, 2), "an answered ping keeps the connection"


def test_a_connection_with_traffic_is_not_pinged(make_client):
    def script(conversation):
        conversation.accept()
        for _ in range(20):
            conversation.send(smq.publish_frame(1, 2, 0, b"tick")[2:])
            time.sleep(0.02)
        conversation.sock.setblocking(False)
        try:
            return conversation.sock.recv(100)
        except BlockingIOError:
            return b"nothing"

    with ScriptedBroker(script) as broker:
        make_client(broker.url, ping=0.1, pong=0.1)
        wait_until(lambda: broker.results)
        assert broker.results[0] == b"nothing"


def test_invalid_bytes_are_a_protocol_error(make_client, address):
    ends = Queue()

    def script(conversation):
        conversation.accept()
        conversation.raw(b"\0\1\0\0\0\0\0\0\0")
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        make_client(address(broker), onclose=collect(ends))
        assert ends.get(timeout=5) == ("protocolerror", True)


def test_a_broker_that_stops_reading_fills_only_the_queue(make_client):
    def deaf(conversation):
        conversation.accept()
        time.sleep(3)

    with ScriptedBroker(deaf) as broker:
        client = make_client(broker.url, queue_bytes=1 << 20)
        assert client.wait_connected(5)
        accepted = 0
        for n in range(1000):
            accepted += client.publish(bytes(60000), 5)
            if n % 10 == 0:
                gevent.sleep(0)
        assert client.dropped == 1000 - accepted > 0
        assert client._session.waiting_bytes <= 1 << 20
        with pytest.raises(DeliveryError, match="messages"):
            client.close(0.1)


def test_disconnect_while_waiting_to_reconnect_and_while_connecting(make_client):
    ends = Queue()
    waiting = make_client(f"http://127.0.0.1:{free_port()}/", reconnect_delay=60, onclose=collect(ends))
    assert ends.get(timeout=5) == ("cannotconnect", True)
    waiting.close(1)
    assert waiting.closed
    with ScriptedBroker(lambda c: c.wait_closed()) as broker:
        connecting = make_client(broker.url, timeout=60)
        wait_until(lambda: broker.connections)
        connecting.close(1)
        assert connecting.closed


def test_onclose_is_not_called_for_ones_own_disconnect(broker, make_client):
    ends = []
    client = make_client(broker.url, onclose=lambda *end: ends.append(end))
    assert client.wait_connected(5)
    client.close()
    assert client.closed
    assert ends == []


def test_flush_fails_at_once_when_the_connection_is_lost(make_client):
    def script(conversation):
        conversation.accept()
        conversation.receive()

    with ScriptedBroker(script, lambda c: c.wait_closed()) as broker:
        client = make_client(broker.url)
        started_s = undisturbed_s()
        assert client.flush(5) is False
        assert undisturbed_s() - started_s < 2


def test_cleanstart_discards_and_reports(start_broker, make_client):
    broker = start_broker()
    calls = Queue()
    client = make_client(broker.url, cleanstart=True, onconnect=lambda *_: calls.put(client.topic2tid("t")))
    client.create("t")
    assert calls.get(timeout=5) is None
    assert client.flush(5)
    assert client.topic2tid("t")
    port = broker.port
    broker.close()
    start_broker(port=port)
    assert calls.get(timeout=5) is None
    assert client.flush(5)
    assert client.topic2tid("t") is None


def test_every_end_is_logged_with_its_sentence(make_client, caplog):
    caplog.set_level(logging.INFO, "smqrt.client")
    port = free_port()
    client = make_client(f"http://127.0.0.1:{port}/", reconnect=False)
    client.wait_connected(5)
    assert f"http://127.0.0.1:{port}/: connection refused" in caplog.text


@pytest.mark.parametrize("stage", ["refusal", "disconnect", "status"])
def test_what_a_broker_says_does_not_steer_a_terminal(make_client, stage):
    def script(conversation):
        if stage == "status":
            conversation.read_head()
            conversation.raw(b"HTTP/1.1 404 \x1b[2J\r\nLocation: \x1b[2J\r\n\r\n")
        elif stage == "refusal":
            conversation.bootstrap()
            conversation.send(smq.init(1, "127.0.0.1"))
            conversation.receive()
            conversation.send(smq.connack(3, 0, b"\x1b[2J"))
        else:
            conversation.accept()
            conversation.send(smq.disconnect(b"\x1b[2J"))
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        client = make_client(broker.url, reconnect=False)
        assert client.wait_closed(5)
    assert "\x1b" not in str(client.end)
    assert "[2J" in str(client.end)
