"""Callbacks that raise, block or answer nonsense: the client goes on, or ends and tells."""

import gevent
import pytest
from gevent.event import Event
from gevent.queue import Queue

from smqrt.client import SmqClient
from tests.support.scripted_broker import ScriptedBroker
from tests.support.waiting import wait_until


def raising(error):
    def callback(*_):
        raise error

    return callback


def serving(conversation):
    conversation.accept()
    conversation.acks()


@pytest.mark.parametrize(
    "onclose",
    [
        lambda *_: "a word",
        lambda *_: float("nan"),
        lambda *_: [],
        raising(ValueError("x")),
        raising(gevent.Timeout()),
        raising(gevent.GreenletExit()),
        lambda: None,
    ],
    ids=["word", "nan", "list", "raises", "timeout", "exit", "arguments"],
)
def test_nonsense_from_onclose_counts_as_nothing(make_client, onclose):
    with ScriptedBroker(lambda c: c.accept(), serving) as broker:
        client = make_client(broker.url, onclose=onclose)
        wait_until(lambda: broker.connections >= 2)
        assert client.flush(5)


def test_the_log_names_a_function_with_other_arguments(broker, make_client, caplog):
    client = make_client(broker.url)
    client.subscribe("t", onmsg=lambda data: None)
    client.publish("x", "t")
    wait_until(lambda: caplog.messages)
    line = test_the_log_names_a_function_with_other_arguments.__code__.co_firstlineno + 2
    assert caplog.messages == [
        f"a callback failed: test_the_log_names_a_function_with_other_arguments.<locals>.<lambda> ({__file__}:{line})"
    ]
    assert client.flush(5)


@pytest.mark.parametrize(("delay_s", "comes_back"), [(-1, True), (float("inf"), False), (1e300, False)])
def test_any_number_of_seconds_can_be_waited(make_client, delay_s, comes_back):
    asked = Queue()
    with ScriptedBroker(lambda c: c.accept(), serving) as broker:
        client = make_client(broker.url, onclose=lambda *_: asked.put(1) or delay_s)
        asked.get(timeout=5)
        assert client.wait_connected(0.3) is comes_back
        assert not client.closed


@pytest.mark.parametrize("onauth", [lambda *_: 5, lambda *_: {"a": 1}, raising(ValueError("x"))])
def test_nonsense_from_onauth_ends_the_client(broker, make_client, onauth):
    client = make_client(broker.url, onauth=onauth)
    assert client.wait_connected(5) is False
    assert (client.end.word, client.closed) == ("onauth", True)


def test_an_onauth_that_never_answers_has_a_deadline(broker, make_client):
    client = make_client(broker.url, timeout=0.1, reconnect=False, onauth=lambda *_: Event().wait())
    assert client.wait_connected(5) is False
    assert (client.end.word, client.closed) == ("timeout", True)


@pytest.mark.parametrize("connect", [lambda: None, raising(ValueError("x")), lambda: gevent.Timeout(0.05).start()])
def test_a_function_that_makes_no_connection_is_asked_again(make_client, connect):
    ends = Queue()
    client = make_client(connect, onclose=lambda *end: ends.put(end))
    assert ends.get(timeout=5) == ("failed", True)
    assert ends.get(timeout=5) == ("failed", True)
    assert not client.closed


@pytest.mark.parametrize("error", [ValueError("x"), gevent.Timeout(), gevent.GreenletExit()])
def test_the_next_callback_runs_after_one_that_raised(broker, make_client, error):
    received = Queue()
    client = make_client(broker.url)
    client.subscribe("bad", onmsg=raising(error))
    client.subscribe("good", onmsg=lambda *_: received.put(1))
    client.publish("x", "bad")
    client.publish("x", "good")
    assert received.get(timeout=5)


def test_a_leftover_timeout_of_a_callback_hits_no_other(broker, make_client):
    received = Queue()
    client = make_client(broker.url)
    client.subscribe("bad", onmsg=lambda *_: gevent.Timeout(0.02).start())
    client.subscribe("good", onmsg=lambda *_: received.put(1))
    client.publish("x", "bad")
    assert client.flush(5)
    gevent.sleep(0.05)  # the time-out comes
    client.publish("x", "good")
    assert received.get(timeout=5)


def test_onclose_reconnects_while_a_callback_waits_for_the_connection(make_client):
    waited = Queue()

    def drops(conversation):
        conversation.accept()
        conversation.receive()
        conversation.send(b"\x08" + bytes(12))
        conversation.receive()

    with ScriptedBroker(drops, serving) as broker:
        client = make_client(broker.url, onclose=lambda *_: True)

        def onmsg(*_):
            client.publish("x", 5)
            wait_until(lambda: not client.connected)
            waited.put((client.wait_connected(), client.flush()))

        client.onmsg = onmsg
        client.publish("go", 5)
        assert waited.get(timeout=5) == (False, False)
        assert client.wait_connected(5)


def test_a_callback_may_wait_for_the_broker_during_floods(broker, make_client):
    """More arrives than the callbacks may pile up, and the answer that the first one waits for comes behind it."""
    done = Queue()
    client, publisher = make_client(broker.url), make_client(broker.url, queue_bytes=1 << 25)
    begun = Event()

    def onmsg(data, *_):
        if data == b"first":
            begun.set()
            gevent.sleep(0.1)  # the flood comes
            done.put(client.flush(5))

    client.subscribe("flood", onmsg=onmsg)
    assert client.flush(5)
    publisher.publish("first", "flood")
    for _ in range(3000):
        publisher.publish(bytes(100), "flood")
    assert publisher.flush(5)
    assert begun.wait(5)
    assert done.get(timeout=10) is True


def test_flushes_that_gave_up_leave_nothing_behind(make_client):
    with ScriptedBroker(lambda c: c.wait_closed()) as broker:
        client = make_client(broker.url, timeout=60)
        for _ in range(20):
            assert client.flush(0.001) is False
        assert not client._session._when_drained


def test_the_factory_survives_a_kill_before_it_has_begun(broker):
    client = SmqClient(broker.url)
    client.close(0)
    assert client.closed
    assert client.wait_connected() is False
