"""The end of a client: what was published arrives, or the application is told."""

import pytest
from gevent.event import Event
from gevent.queue import Queue

from smqrt.client import SmqClient
from smqrt.errors import ClosedError, DeliveryError
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.conftest import free_port
from tests.support.clock import undisturbed_s
from tests.support.scripted_broker import ScriptedBroker
from tests.support.waiting import wait_until


@pytest.fixture(params=["raw", "websocket"])
def address(request):
    return lambda broker: broker.url if request.param == "raw" else broker.ws_url


@pytest.fixture
def received(broker):
    """The payloads that arrive at the broker's topic "t"."""
    got = []
    broker.smq.subscribe("t", lambda data, *_: got.append(data))
    return got


def test_with_delivers_what_was_published_before_it_connected(broker, address, received):
    with SmqClient(address(broker)) as client:
        assert client.publish("hello", "t")
    assert received == [b"hello"]
    assert client.closed


def test_with_delivers_five_thousand(broker, address, received):
    with SmqClient(address(broker)) as client:
        for n in range(5000):
            assert client.publish(str(n), "t")
    wait_until(lambda: len(received) >= 5000, "the broker, which has them all, has given them to its handler")
    assert received == [str(n).encode() for n in range(5000)]


def test_disconnect_before_the_connection_delivers_too(broker, address, received):
    client = SmqClient(address(broker))
    client.publish("hello", "t")
    client.disconnect("bye")
    client.wait_closed(5)
    assert received == [b"hello"]
    assert client.closed


def test_close_proves_that_the_broker_has_it():
    """The kernel takes it, but the broker never says that it has it."""

    def never_confirms(conversation):
        conversation.accept()
        while conversation.receive()[0] != Type.PING:
            pass

    with ScriptedBroker(never_confirms) as broker:
        client = SmqClient(broker.url, reconnect=False)
        assert client.wait_connected(5)
        client.publish("x", 5)
        with pytest.raises(DeliveryError, match="confirm 1 message: .*connection was closed"):
            client.close(5)
        client.close(5)


def test_close_without_a_broker_says_what_was_lost():
    client = SmqClient(f"http://127.0.0.1:{free_port()}/")
    client.publish("1", "t")
    client.publish("2", "t")
    with pytest.raises(DeliveryError, match=r"2 messages.*connection refused"):
        client.close(0.3)
    assert client.closed
    assert client.dropped == 2


def fail_after_publishing(client):
    client.publish("x", "t")
    raise ZeroDivisionError("mine")


def test_with_raises_alike_and_never_hides_errors():
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(DeliveryError), SmqClient(url, reconnect=False) as client:
        client.publish("x", "t")
    with pytest.raises(ZeroDivisionError, match="mine"), SmqClient(url, reconnect=False) as client:
        fail_after_publishing(client)


def test_a_refused_client_reports_losses(start_broker):
    broker = start_broker(authenticate=lambda credentials, info: 3)
    with pytest.raises(DeliveryError, match="incorrect credentials"), SmqClient(broker.url) as client:
        client.publish("x", "t")


def test_close_reconnects_for_what_waits(start_broker):
    broker = start_broker()
    port, got = broker.port, []
    client = SmqClient(broker.url, reconnect_delay=60)
    assert client.wait_connected(5)
    broker.close()
    wait_until(lambda: not client.connected)
    client.publish("x", "t")
    start_broker(port=port).smq.subscribe("t", lambda data, *_: got.append(data))
    client.close()
    assert got == [b"x"]


def test_a_silent_broker_does_not_hold_the_end_up():
    with ScriptedBroker(lambda c: c.wait_closed()) as broker:
        client = SmqClient(broker.url, timeout=60)
        client.publish("x", "t")
        started_s = undisturbed_s()
        with pytest.raises(DeliveryError):
            client.close(0.2)
        assert undisturbed_s() - started_s < 1
        assert client.closed


def test_disconnect_ends_by_itself_when_its_time_is_over(caplog):
    with ScriptedBroker(lambda c: (c.accept(), c.wait_closed())) as broker:
        client = SmqClient(broker.url, timeout=0.3)
        assert client.wait_connected(5)
        client.publish("x", "t")
        client.disconnect()
        client.wait_closed(3)
        assert client.closed
        assert "the broker did not confirm 1 message: " in caplog.text


def test_nothing_to_deliver_needs_no_broker():
    with SmqClient(f"http://127.0.0.1:{free_port()}/") as client:
        client.subscribe("t")
    assert client.closed


@pytest.mark.parametrize("end", [SmqClient.close, SmqClient.disconnect])
def test_nothing_can_be_sent_after_the_end(broker, end):
    client = SmqClient(broker.url)
    client.wait_connected(5)
    end(client)
    for use in (
        lambda: client.publish("x", "t"),
        lambda: client.pubjson("x", "t"),
        lambda: client.create("t"),
        lambda: client.createsub("t"),
        lambda: client.subscribe("t"),
        lambda: client.observe("t", print),
        lambda: client.request(1, "x"),
    ):
        with pytest.raises(ClosedError, match="ended"):
            use()
    client.unsubscribe("t")
    client.unobserve("t")
    client.disconnect()
    client.close()


def test_a_client_that_ended_by_itself_takes_nothing_either(start_broker):
    client = SmqClient(start_broker(authenticate=lambda credentials, info: 3).url)
    client.wait_connected(5)
    with pytest.raises(ClosedError, match="incorrect credentials"):
        client.publish("x", "t")


def test_unanswered_requests_are_denied_at_close():
    acks = Queue()
    client = SmqClient(f"http://127.0.0.1:{free_port()}/", reconnect=False)
    client.create("t", lambda *ack: acks.put(ack))
    client.subscribe("u", "s", onack=lambda *ack: acks.put(ack))
    assert acks.get(timeout=5) == (False, "t", 0)
    assert acks.get(timeout=5) == (False, "u", 0, "s", 0)


def test_a_callback_may_close_its_client(broker, address, received):
    client = SmqClient(address(broker))
    started_s = undisturbed_s()

    def onmsg(*_):
        client.publish("good bye", "t")
        client.close(None)

    client.subscribe("self", onmsg=onmsg)
    client.publish("go", "self")
    client.wait_closed(5)
    assert received == [b"good bye"]
    assert undisturbed_s() - started_s < 1


def test_a_callback_that_never_returns_does_not_delay_close(broker, received):
    client = SmqClient(broker.url)
    client.subscribe("self", onmsg=lambda *_: Event().wait())
    client.publish("go", "self")
    for n in range(3000):
        client.publish(str(n), "self")
    client.publish("last", "t")
    started_s = undisturbed_s()
    client.close(5)
    assert received == [b"last"]
    assert undisturbed_s() - started_s < 2


def test_a_refused_name_is_not_undelivered(start_broker):
    """The broker has it, and does not want it."""
    with SmqClient(start_broker(permittop=lambda *_: False).url) as client:
        client.publish("x", "secret")
    assert client.dropped == 1


def test_a_broker_that_ends_the_connection_while_it_drains(make_client):
    """The second connection, which the first one's loss brings, delivers what was held back."""

    def ends(conversation):
        conversation.accept()
        conversation.receive()

    def takes(conversation):
        conversation.accept()
        while (packet := conversation.receive())[0] != Type.CREATE:
            pass
        conversation.send(smq.ack(Type.CREATEACK, 9, packet[1:]))
        message = conversation.receive()
        assert conversation.receive() == smq.PING
        conversation.send(smq.PONG)
        return message

    with ScriptedBroker(ends, takes) as broker:
        client = make_client(broker.url)
        client.publish("x", "t")
        client.close()
        wait_until(lambda: len(broker.results) >= 2)
        assert broker.results[1] == smq.publish_frame(9, 4711, 0, b"x")[2:]
