"""The end of /rtl/smq.js in a real browser, and brokers that do their worst: nothing is lost silently, nobody waits."""

from __future__ import annotations

import pytest

from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.browser.smqjs.conftest import PAGE_FUNCTIONS
from tests.support.scripted_broker import ScriptedBroker


def keeps_topic(conversation):
    """A broker that keeps what is published, until the client says good-bye."""
    conversation.accept()
    messages = []
    while (packet := conversation.receive())[0] != Type.DISCONNECT:
        if packet[0] == Type.CREATE:
            conversation.send(smq.ack(Type.CREATEACK, 9, packet[1:]))
        elif packet[0] == Type.PUBLISH:
            messages.append(packet[13:])
        elif packet[0] == Type.PING:
            conversation.send(smq.PONG)
    return messages


def test_disconnect_before_the_connection_sends_what_was_published(run):
    with ScriptedBroker(keeps_topic) as broker:
        assert run(
            """
            const client = SMQ.Client(argument);
            client.onconnect = note("connect");
            client.onclose = note("close");
            for (let n = 0; n < 100; n++) client.publish(String(n), "t");
            const has = await client.disconnect();
            return [has, log.length, client.publish("late", "t"), await client.disconnect()];
            """,
            broker.ws_url,
        ) == [True, 0, False, True]
        assert broker.wait_results(1) == [[b"%d" % n for n in range(100)]]


def test_disconnect_waits_for_the_broker_to_confirm(run_in_trouble):
    """The browser takes the message, but the broker ends without a Pong."""

    def ends(conversation):
        conversation.accept()
        while conversation.receive()[0] != Type.PING:
            pass

    with ScriptedBroker(ends) as broker:
        assert (
            run_in_trouble(
                """
            const client = SMQ.Client(argument);
            client.onconnect = note("connect");
            await seen("connect");
            client.publish("x", 5);
            return await client.disconnect();
            """,
                broker.ws_url,
            )
            is False
        )


def test_disconnect_without_a_broker_gives_up_in_time(run_in_trouble):
    broker = ScriptedBroker(lambda c: c.wait_closed())
    with broker:
        assert run_in_trouble(
            """
            const client = SMQ.Client(argument, {timeout: 200});
            client.publish("x", "t");
            const begin = performance.now(), has = await client.disconnect();
            return [has, performance.now() - begin < 2000];
            """,
            broker.ws_url,
        ) == [False, True]


def test_disconnect_connects_again_for_what_waits(run_in_trouble):
    with ScriptedBroker(lambda c: c.accept(), keeps_topic) as broker:
        assert run_in_trouble(
            """
            const client = SMQ.Client(argument);
            client.onclose = (...args) => { note("close")(...args); return 60000; };
            await seen("close");
            client.publish("x", "t");
            return await client.disconnect();
            """,
            broker.ws_url,
        )
        assert broker.wait_results(2)[1:] == [[b"x"]]


def test_a_broker_that_says_nothing_has_a_deadline(run_in_trouble):
    with ScriptedBroker(lambda c: (c.bootstrap(), c.wait_closed())) as broker:
        assert run_in_trouble(
            """
            const client = SMQ.Client(argument, {timeout: 100});
            client.onclose = note("close");
            await seen("close");
            return entries("close");
            """,
            broker.ws_url,
        ) == [["timeout", True]]


@pytest.mark.parametrize(
    ("answer", "comes_back"),
    [("Infinity", False), ("NaN", False), ("'soon'", False), ("{}", False), ("undefined()", False), ("1e300", False)],
)
def test_nonsense_from_onclose(run_in_trouble, answer, comes_back):
    """A timer of the browser that is set too far fires at once."""
    with ScriptedBroker(lambda c: c.accept()) as broker:
        run_in_trouble(
            "const client = SMQ.Client(argument);"
            "client.onclose = () => { note('close')(); return " + answer + "; };"
            "await seen('close');"
            "await new Promise(done => setTimeout(done, 200));",
            broker.ws_url,
        )
        assert (broker.connections > 1) is comes_back


def test_a_lost_handler_gets_nothing_new_and_answers_earlier(run_in_trouble):
    with ScriptedBroker(lambda c: c.accept()) as broker:
        assert run_in_trouble(
            """
            const client = SMQ.Client(argument);
            client.subscribe("t", "s", {onack: note("ack")});
            client.create("u", note("ack"));
            client.onclose = note("close");
            await seen("close");
            client.createsub("v", note("ack"));
            await seen("ack", 3);
            return [entries("ack"), client.publish("x", "t")];
            """,
            broker.ws_url,
        ) == [[[False, "t", 0, "s", 0], [False, "u", 0], [False, "v", 0]], False]


def test_what_waits_is_bounded_in_bytes(run_in_trouble):
    """The broker may be gone before the browser has a connection."""
    with ScriptedBroker(lambda c: c.wait_closed()) as broker:
        assert (
            run_in_trouble(
                """
            const client = SMQ.Client(argument), data = new Uint8Array(65000);
            let taken = 0;
            while (client.publish(data, "t") && taken < 1000) taken++;
            return taken;
            """,
                broker.ws_url,
            )
            == (16 << 20) // 65000
        )


def test_unrequested_answers_are_ignored(run):
    def script(conversation):
        conversation.accept()
        for n in range(300):
            conversation.send(smq.ack(Type.CREATEACK, 1 + n, b"%d" % n))
        conversation.send(smq.publish_frame(1, 2, 0, b"last")[2:])
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        assert run(
            """
            const client = SMQ.Client(argument);
            client.onmsg = note("message");
            await seen("message");
            return client.topic2tid("5") === undefined;
            """,
            broker.ws_url,
        )


def test_a_packet_that_is_too_large_ends_the_connection(new_page, smqjs_server):
    def script(conversation):
        conversation.accept()
        conversation.send(b"\x08" + bytes(70_000))
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        page = new_page(f"{smqjs_server.url}/")
        page.evaluate(PAGE_FUNCTIONS + "console.error = note('error'); null;")
        assert page.evaluate(
            "async url => { SMQ.Client(url).onclose = note('close'); await seen('close'); return entries('close'); }",
            broker.ws_url,
        ) == [["protocolerror", True]]
