"""/rtl/smq.mjs in a real browser: its queue, its reconnects, and its end."""

from __future__ import annotations

import pytest

from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.scripted_broker import ScriptedBroker

NOWHERE = "ws://127.0.0.1:1/"
WAKES = ["window.dispatchEvent(new Event('online'))", "document.dispatchEvent(new Event('visibilitychange'))"]


def refuses(conversation):
    conversation.read_head()
    conversation.raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")


def accepts(conversation):
    conversation.accept()
    conversation.acks()


def is_silent(conversation):
    """A broker that answers no ping; the next that the client sends is its end of the WebSocket."""
    conversation.accept()
    return [conversation.receive(), conversation.receive()]


# ---- the queue


def test_the_queue_is_bounded_in_messages(run_module_in_trouble):
    assert run_module_in_trouble(
        """
        const client = opened({queueMessages: 3, timeout: 100}, argument);
        const sent = ["1", "2", "3", "4", "5"].map(text => client.publish(text, "t"));
        const before = [sent, client.backlog, client.backlogBytes, client.dropped];
        await client.disconnect();
        return [before, client.publish("6", "t"), client.backlog, client.dropped];
        """,
        NOWHERE,
    ) == [[[True, True, True, False, False], 3, 3, 2], False, 0, 6]


def test_the_queue_is_bounded_in_bytes(run_module_in_trouble):
    assert run_module_in_trouble(
        """
        const client = opened({queueBytes: 100}, argument);
        const oldest = opened({queueBytes: 100, queuePolicy: "oldest"}, argument);
        const publish = one => [60, 30, 20, 10, 101].map(size => one.publish(new Uint8Array(size), "t"));
        return [client, oldest].map(one => [publish(one), one.backlog, one.backlogBytes, one.dropped]);
        """,
        NOWHERE,
    ) == [[[True, True, False, True, False], 3, 100, 2], [[True, True, True, True, False], 3, 60, 2]]


def test_a_full_queue_can_drop_the_oldest(run_module_in_trouble):
    def receives(conversation):
        conversation.accept()
        conversation.send(smq.ack(Type.CREATEACK, 9, conversation.receive()[1:]))
        return [conversation.receive()[13:] for _ in range(3)]

    with ScriptedBroker(refuses, receives) as broker:
        assert run_module_in_trouble(
            """
            const client = opened({queueMessages: 3, queuePolicy: "oldest", onclose: note("close")}, argument);
            await seen("close");
            const request = failure(client.request(7, "dropped"));
            const sent = ["1", "2", "3", "4", "5"].map(text => client.publish(text, "t"));
            return [sent, client.backlog, client.dropped, await request];
            """,
            broker.ws_url,
        ) == [
            [True] * 5,
            3,
            3,
            ["SmqError", "full", "the queue is full: the oldest messages were dropped"],
        ]
        assert broker.wait_results(2)[1:] == [[b"3", b"4", b"5"]]


def test_names_without_a_number_are_bounded(run_module_in_trouble):
    assert run_module_in_trouble(
        """
        const client = opened({}, argument), denied = [];
        for (let n = 0; n < 100003; n++) client.create("t" + n).then(tid => tid || denied.push(n));
        await until(() => denied.length > 2);
        const error = await failure(client.messages("t").next());
        return [denied, error[1], client.publish("x", "t"), client.backlog];
        """,
        NOWHERE,
    ) == [[100000, 100001, 100002], "denied", False, 0]


# ---- reconnects


def test_delays_double_and_are_spread(run_module_in_trouble):
    """Each is between half and all of a ceiling, which doubles up to the longest delay."""
    pauses = run_module_in_trouble(
        """
        class Failing { // Chromium itself delays attempts to reach an address that has failed
            constructor() { setTimeout(() => this.onclose()); }
            close() {}
        }
        const pauses = [], setTimeoutOfTheBrowser = window.setTimeout;
        window.setTimeout = (fn, ms) => {
            if (!(ms >= 1000000)) return setTimeoutOfTheBrowser(fn, ms);
            pauses[pauses.length - 1].push(ms);
            return setTimeoutOfTheBrowser(fn, 0);
        };
        for (let n = 0; n < 4; n++) {
            pauses.push([]);
            const client = opened({reconnectDelay: 2000000, reconnectDelayMax: 10000000, WebSocket: Failing});
            await until(() => pauses[n].length === 5);
            client.disconnect();
        }
        window.setTimeout = setTimeoutOfTheBrowser;
        return pauses.map(five => five.slice(0, 5));
        """
    )
    for one in pauses:
        for pause, ceiling in zip(one, (2e6, 4e6, 8e6, 10e6, 10e6), strict=True):
            assert ceiling / 2 <= pause <= ceiling
    assert len({pause for one in pauses for pause in one}) == 20


@pytest.mark.parametrize(
    ("answer", "attempts"), [("undefined", 2), ("true", 2), ("null", 2), ("1", 2), ("false", 1), ("0", 1)]
)
def test_onclose_may_decide(run_module_in_trouble, answer, attempts):
    with ScriptedBroker(refuses, accepts) as broker:
        closed = run_module_in_trouble(
            f"const client = opened({{onclose: () => {answer}}}, argument);"
            "await failure(client.ready); return client.closed;",
            broker.ws_url,
        )
        assert closed is (attempts == 1)
        assert broker.connections == attempts


def test_client_of_the_module_does_not_reconnect_by_itself(run_module_in_trouble):
    with ScriptedBroker(refuses, accepts) as broker:
        assert run_module_in_trouble(
            "const client = mod.Client(argument);"
            "return [await failure(client.ready), client instanceof mod.SmqClient];",
            broker.ws_url,
        ) == [["SmqError", "closed", "the client has ended: cannot connect"], True]
        assert broker.connections == 1


def test_options_that_are_undefined_have_their_defaults(run_module_in_trouble):
    """As TypeScript allows it."""
    with ScriptedBroker(refuses, refuses, accepts) as broker:
        assert run_module_in_trouble(
            """
            const names = ["uid", "reconnect", "ping", "queueMessages", "signal"];
            const undefined_ = Object.fromEntries(names.map(name => [name]));
            const ends = await failure(mod.Client(argument, undefined_).ready);
            return [ends[1], await new mod.SmqClient(argument, {...undefined_, reconnectDelay: 10}).ready];
            """,
            broker.ws_url,
        ) == ["closed", 4711]


@pytest.mark.parametrize("event", WAKES)
def test_the_client_comes_back_at_once(run_module_in_trouble, event):
    """When the network is there again, or the page is visible: not after its delay of a minute."""
    with ScriptedBroker(refuses, accepts) as broker:
        assert run_module_in_trouble(
            f"""
            const minute = {{reconnectDelay: 60000, reconnectDelayMax: 60000}};
            const client = opened({{...minute, onclose: note("close")}}, argument);
            await seen("close");
            for (let n = 0; n < 5; n++) {event};
            return await client.waitConnected({{timeout: 15000}}) > 0;
            """,
            broker.ws_url,
        )
        assert broker.connections == 2


@pytest.mark.parametrize("event", WAKES)
def test_a_connection_is_tried_after_sleep(run_module_in_trouble, event):
    """With one ping, however often the page wakes."""

    def script(conversation):
        conversation.accept()
        first = conversation.receive()
        conversation.send(smq.PONG)
        packets = [first, conversation.receive()]
        conversation.send(smq.publish_frame(4711, 2, 0, b"seen")[2:])
        return packets

    with ScriptedBroker(script) as broker:
        run_module_in_trouble(
            f"""
            const client = opened({{onmsg: note("message"), onclose: () => false}}, argument);
            await client.ready;
            for (let n = 0; n < 5; n++) {event};
            client.publish("x", 7);
            await seen("message");
            """,
            broker.ws_url,
        )
        [packets] = broker.wait_results(1)
        assert [packet[0] for packet in packets] == [Type.PING, Type.PUBLISH]


def test_a_dead_connection_is_found(run_module_in_trouble):
    """The broker answers nothing any more; then one that does, to which the client keeps its connection."""

    def pings(conversation):
        conversation.accept()
        for _ in range(5):
            assert conversation.receive() == smq.PING
            conversation.send(smq.PONG)
        conversation.send(smq.publish_frame(4711, 2, 0, b"fine")[2:])
        conversation.acks()

    with ScriptedBroker(is_silent, pings) as broker:
        assert run_module_in_trouble(
            """
            const client = opened({ping: 50, pong: 1500, onclose: note("close"), onmsg: note("message")}, argument);
            await seen("message");
            return entries("close")[0];
            """,
            broker.ws_url,
        ) == ["pong", True]
        assert broker.wait_results(1)[0] == [smq.PING, b""]


def test_messages_are_a_sign_of_life(run_module):
    """Also when the broker has no time for a Pong."""

    def talks(conversation):
        conversation.accept()
        assert conversation.receive() == smq.PING
        conversation.send(smq.publish_frame(4711, 2, 0, b"busy")[2:])
        assert conversation.receive() == smq.PING
        conversation.send(smq.publish_frame(4711, 2, 0, b"busy")[2:])
        conversation.acks()

    with ScriptedBroker(talks) as broker:
        assert run_module(
            """
            const client = opened({ping: 50, pong: 1500, onclose: note("close"), onmsg: note("message")}, argument);
            await seen("message", 2);
            return [entries("close"), client.state];
            """,
            broker.ws_url,
        ) == [[], "online"]


# ---- the end


def test_a_refused_client_has_ended(run_module):
    assert run_module("""
        const client = opened({onauth: () => "wrong"}), closed = client.waitClosed();
        const ends = [await failure(client.ready), client.closed, client.closeReason, await closed];
        return [...ends, await client.waitClosed(), await failure(client.waitConnected())];
    """) == [
        ["SmqError", "closed", "the client has ended: wrong password"],
        True,
        *["wrong password"] * 3,
        ["SmqError", "closed", "the client has ended: wrong password"],
    ]


def test_credentials_may_come_later(run_module_in_trouble):
    """A promise of them; one that fails ends the client."""

    def greets(conversation):
        conversation.bootstrap()
        conversation.send(smq.init(77, "127.0.0.1"))
        conversation.wait_closed()

    with ScriptedBroker(lambda c: smq.parse_connect(c.accept()).credentials, greets) as broker:
        assert run_module_in_trouble(
            """
            const wait = new Promise(done => setTimeout(done, 20));
            const onauth = async seed => { await wait; return "secret " + seed; };
            const client = opened({onclose: () => false, onauth}, argument);
            await client.ready;
            const failing = opened({onauth: async () => { throw new Error("no token"); }}, argument);
            return await failing.waitClosed();
            """,
            broker.ws_url,
        ) == "onauth failed"  # fmt: skip
        assert b"secret 77" in broker.wait_results(1)


def test_waiting_has_a_deadline_and_a_signal(run_module_in_trouble):
    assert run_module_in_trouble(
        """
        const client = opened({reconnectDelay: 60000, reconnectDelayMax: 60000}, argument);
        const {signal} = new AbortController();
        const aborted = AbortSignal.abort(new RangeError("enough")), waiting = client.ready;
        const ends = await Promise.all([client.waitConnected({timeout: 30}), client.waitClosed({timeout: 30, signal}),
            client.waitConnected({signal: aborted})].map(failure));
        client.disconnect();
        return [...ends, await failure(waiting)];
        """,
        NOWHERE,
    ) == [
        ["SmqError", "timeout", "not connected in 30 ms"],
        ["SmqError", "timeout", "not closed in 30 ms"],
        ["RangeError", None, "enough"],
        ["SmqError", "closed", "the client has ended: disconnected"],
    ]


def test_a_signal_ends_the_client_at_once(run_module):
    assert run_module("""
        const controller = new AbortController(), client = opened({signal: controller.signal, onclose: note("close")});
        await client.ready;
        const [request, next] = [failure(client.request(client.gettid(), "x")), failure(client.messages("t").next())];
        controller.abort();
        const late = opened({signal: controller.signal});
        return [client.closeReason, client.state, await request, await next, late.closed, late.getsock(),
                entries("close"), await client.disconnect()];
    """) == [
        "aborted",
        "offline",
        *[["SmqError", "closed", "the client has ended: aborted"]] * 2,
        True,
        None,
        [],
        False,  # the broker has not confirmed the request
    ]


def test_close_reports_undelivered_messages(run_module_in_trouble):
    assert run_module_in_trouble(
        """
        const client = opened({timeout: 100}, argument);
        client.publish("x", "t");
        return await failure(client.close());
        """,
        NOWHERE,
    ) == ["SmqError", "undelivered", "the broker has not confirmed all messages"]


def test_close_reports_messages_that_were_lost_before(run_module_in_trouble):
    """The client ended by itself, before close() was called."""
    assert run_module_in_trouble(
        """
        const client = opened({reconnect: false}, argument);
        client.publish("x", "t");
        return [await client.waitClosed(), client.dropped, await failure(client.close()), await client.disconnect()];
        """,
        NOWHERE,
    ) == ["cannot connect", 1, ["SmqError", "undelivered", "the broker has not confirmed all messages"], False]


@pytest.mark.parametrize("answers", [True, False])
def test_a_pong_confirms_earlier_messages(run_module, answers):
    """When the broker ends the client later, these messages have arrived."""

    def script(conversation):
        conversation.accept()
        while conversation.receive() != smq.PING:
            pass
        if answers:
            conversation.send(smq.PONG)
        conversation.send(smq.disconnect(b"enough"))
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        assert run_module(
            """
            const client = opened({ping: 300}, argument);
            await client.ready;
            client.publish("x", client.gettid());
            return [await client.waitClosed(), await client.disconnect()];
            """,
            broker.ws_url,
        ) == ["enough", answers]


def test_loops_that_end_before_the_connection_leave_nothing(run_module):
    """A page that opens and closes loops while it is offline must not fill the list of pending names."""

    def script(conversation):
        conversation.accept()
        packets = [conversation.receive()]
        while packets[-1][0] != Type.PING:
            packets.append(conversation.receive())
        conversation.send(smq.PONG)
        return packets

    with ScriptedBroker(script) as broker:
        run_module(
            """
            const client = opened({}, argument), {signal} = new AbortController();
            for (let i = 0; i < 3; i++) client.messages("t", {signal}).return();
            client.messages("t").next();
            await client.waitConnected();
            client.unsubscribe("t");
            client.disconnect();
            await client.waitClosed();
            """,
            broker.ws_url,
        )
        assert broker.wait_results(1)[0] == [bytes([Type.SUBSCRIBE]) + b"t", smq.PING]


def test_a_topic_is_unsubscribed_once(run_module):
    def script(conversation):
        conversation.accept()
        name = conversation.receive()[1:]
        conversation.send(smq.ack(Type.SUBACK, 100, name))
        packets = [conversation.receive()]
        while packets[-1][0] != Type.PING:
            packets.append(conversation.receive())
        conversation.send(smq.PONG)
        return [packet[0] for packet in packets]

    with ScriptedBroker(script) as broker:
        run_module(
            """
            const client = opened({}, argument), stream = client.messages("t");
            await stream.subscribed;
            client.subscribe(100);
            client.unsubscribe("t");
            await client.disconnect();
            """,
            broker.ws_url,
        )
        assert broker.wait_results(1)[0] == [Type.UNSUBSCRIBE, Type.PING]


def test_nothing_is_left_after_the_end(run_module):
    """No listeners at the page or at a signal, and no timers."""
    assert run_module("""
        const open = new Map(), timers = new Set(), {setTimeout: set, clearTimeout: clear} = window;
        window.setTimeout = (...args) => { const timer = set(...args); timers.add(timer); return timer; };
        window.clearTimeout = timer => { timers.delete(timer); clear(timer); };
        const controller = new AbortController(), {signal} = controller;
        const targets = new Map([[window, "window"], [document, "document"], [signal, "signal"]]);
        for (const [target, name] of targets) {
            const count = (type, by) => open.set(name + " " + type, (open.get(name + " " + type) || 0) + by);
            const [add, remove] = [target.addEventListener.bind(target), target.removeEventListener.bind(target)];
            target.addEventListener = (type, ...rest) => { count(type, 1); add(type, ...rest); };
            target.removeEventListener = (type, ...rest) => { count(type, -1); remove(type, ...rest); };
        }
        const client = opened({signal});
        await client.ready;
        const stream = client.messages("t", {signal});
        const request = failure(client.request(client.gettid(), "x", {signal}));
        const during = [...open].sort();
        await client.close();
        await request;
        [window.setTimeout, window.clearTimeout] = [set, clear];
        return [during, [...open.values()], timers.size];
    """) == [
        [["document visibilitychange", 1], ["signal abort", 3], ["window offline", 1], ["window online", 1]],
        [0, 0, 0, 0],
        0,
    ]
