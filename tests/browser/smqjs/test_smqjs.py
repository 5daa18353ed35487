"""/rtl/smq.js in a real browser: with the real server, and with a scripted broker where faults are the subject."""

from __future__ import annotations

import hashlib
import time

import pytest

from smqrt.wire import smq
from tests.browser.smqjs.conftest import PAGE_FUNCTIONS
from tests.support.scripted_broker import ScriptedBroker


def test_addresses(run, smqjs_server):
    host = smqjs_server.url.removeprefix("http://")
    assert run("history.pushState({}, '', '/a/b/page.lsp?x=1#y'); return ['', 'z.lsp', '/abs', '../up']"
               ".map(path => SMQ.wsURL(path || undefined));") == [
        f"ws://{host}/a/b/page.lsp",
        f"ws://{host}/a/b/z.lsp",
        f"ws://{host}/abs",
        f"ws://{host}/a/b/../up",
    ]  # fmt: skip
    assert run("return SMQ.websocket()") is True


def test_utf8(run):
    text = "a\u00fc\u20ac\U0001f600"
    assert run("return SMQ.utf8.length(argument)", text) == len(text.encode())
    assert run("return Array.from(SMQ.utf8.encode(argument))", text) == list(text.encode())
    assert run("return SMQ.utf8.decode(new Uint8Array(argument))", list(text.encode())) == text
    assert run("try { SMQ.utf8.decode(new Uint8Array([255])); } catch (error) { return 'refused'; }") == "refused"


def test_sha1(run):
    for text in ("", "abc", "gr\u00fc\u00df" * 50, "x" * 55, "x" * 56, "x" * 64, "x" * 119):
        assert run("return sha1(argument)", text) == hashlib.sha1(text.encode()).hexdigest()
    assert run("return sha1(new Uint8Array(argument))", [0, 255, 128]) == hashlib.sha1(b"\0\xff\x80").hexdigest()


def test_connecting_with_and_without_new(run):
    etid, seed, address = run("await connected(); return entries('connect')[0];")
    assert etid > 0
    assert seed > 0
    assert address == "127.0.0.1"
    assert run(
        "const client = new SMQ.Client(SMQ.wsURL('smq.lsp'), {uid: 'abcdef'}); client.onconnect = note('new');"
        "await seen('new'); return client.gettid() === entries('new')[0][0] && client.getsock() instanceof WebSocket;"
    )


def test_one_argument_is_options_and_the_page_is_default(run):
    assert run(
        "history.pushState({}, '', '/smq.lsp'); const client = SMQ.Client({uid: 'abcdef'});"
        "client.onconnect = note('connect');"
        "await seen('connect'); return client.getsock().url;"
    ).endswith("/smq.lsp")


def test_commands_before_connect_wait_for_it(run):
    assert run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"));
        client.subscribe("early", {onmsg: note("message"), onack: note("ack"), datatype: "text"});
        client.publish("bird", "early");
        client.onconnect = note("connect");
        await seen("message");
        return [entries("ack")[0].slice(0, 2), entries("message")[0][0]];
    """) == [[True, "early"], "bird"]


def test_bytes_text_and_json(run):
    log = run("""
        const client = await connected();
        client.subscribe("bytes", {onmsg: note("bytes")});
        client.subscribe("text", {onmsg: note("text"), datatype: "text"});
        client.subscribe("json", {onmsg: note("json"), datatype: "json"});
        client.publish([0, 1, 255], "bytes");
        client.publish(new Uint8Array([7]), "bytes");
        client.publish("gr\u00fc\u00df", "text");
        client.pubjson({a: [1, null]}, "json");
        await seen("json"); await seen("text"); await seen("bytes", 2);
        return {bytes: entries("bytes").map(e => e[0]), text: entries("text")[0][0], json: entries("json")[0][0],
                ptid: entries("json")[0][1] === client.gettid(), tid: client.tid2topic(entries("json")[0][2])};
    """)
    assert log == {
        "bytes": [[0, 1, 255], [7]],
        "text": "gr\u00fc\u00df",
        "json": {"a": [1, None]},
        "ptid": True,
        "tid": "json",
    }


def test_undecodable_messages_reach_the_general_handler(run):
    assert run("""
        const client = await connected();
        client.onmsg = note("general");
        client.subscribe("json", {onmsg: note("json"), datatype: "json"});
        client.subscribe("text", {onmsg: note("text"), datatype: "text"});
        client.publish("{broken", "json");
        client.publish([255], "text");
        await seen("general", 2);
        return [entries("general").map(e => e[0].length), entries("json"), entries("text")];
    """) == [[7, 1], [], []]


def test_handlers_of_subtopics(run):
    assert run("""
        const client = await connected();
        client.onmsg = note("general");
        client.subscribe("room", "light", {onmsg: note("light"), onack: note("ack"), datatype: "text"});
        client.subscribe("room", {onmsg: note("rest"), datatype: "text"});
        client.subscribe("hall", "light", {onmsg: note("hall")});
        client.publish("1", "room", "light");
        client.publish("2", "room", "heat");
        client.publish("3", "room");
        client.publish("4", "hall");
        await seen("general");
        const ack = entries("ack")[0], light = entries("light")[0];
        return [light[0], entries("rest").map(e => e[0]), [ack[0], ack[1], ack[3]], ack[4] === light[3],
                client.subtopic2tid("light") === ack[4], client.tid2subtopic(ack[4])];
    """) == ["1", ["2", "3"], [True, "room", "light"], True, True, "light"]


def test_self_and_replies(run):
    assert run("""
        const server = await connected(), caller = await connected();
        server.subscribe("double", {datatype: "json", onmsg: (n, ptid) => server.pubjson(2 * n, ptid, "reply")});
        caller.subscribe("self", "reply", {datatype: "json", onmsg: note("reply"), onack: note("ack")});
        await seen("ack");
        caller.pubjson(21, "double");
        await seen("reply");
        caller.publish("to myself", "self", "reply-text");
        const [value, ptid, tid] = entries("reply")[0];
        return [value, ptid === server.gettid(), tid === caller.gettid(), entries("ack")[0][2] === caller.gettid()];
    """) == [42, True, True, True]


def test_create_has_both_forms(run):
    assert run("""
        const client = await connected();
        client.create("topic", note("one"));
        client.create("topic", "sub", note("two"));
        client.createsub("sub", note("sub"));
        client.create(4711, note("number"));
        await seen("one"); await seen("two"); await seen("sub"); await seen("number");
        const [one] = entries("one"), [two] = entries("two"), [sub] = entries("sub");
        return [one.slice(0, 2), one[2] === two[2], two.slice(3, 4), two[4] === sub[2], entries("number")[0],
                client.topic2tid("topic") === one[2]];
    """) == [[True, "topic"], True, ["sub"], True, [True, 4711, 4711], True]


def test_names_resolved_earlier_are_still_subscribed_at_the_broker(run):
    assert run("""
        const client = await connected(), other = await connected();
        client.publish("lost", "published");
        client.create("created", note("ack"));
        await seen("ack");
        client.subscribe("published", {onmsg: note("message"), datatype: "text"});
        client.subscribe("created", {onmsg: note("message"), onack: note("ready"), datatype: "text"});
        await seen("ready");
        other.publish("1", "published");
        other.publish("2", "created");
        await seen("message", 2);
        return entries("message").map(e => e[0]);
    """) == ["1", "2"]


def test_refused_names(run):
    assert run("""
        const client = await connected();
        client.create("secret", note("create"));
        client.subscribe("secret", {onack: note("subscribe")});
        client.subscribe("open", "secret", {onack: note("subtopic")});
        client.publish("lost", "secret");
        client.subscribe("open", {onmsg: note("message"), onack: note("ready")});
        await seen("ready");
        client.publish("x", "open");
        await seen("message");
        return [entries("create")[0], entries("subscribe")[0], entries("subtopic")[0]];
    """) == [[False, "secret", 0], [False, "secret", 0], [False, "open", 0, "secret", 0]]


def test_observing_a_topic_and_a_client(run):
    assert run("""
        const watcher = await connected(), other = await connected();
        watcher.observe("lobby", note("lobby"));
        await seen("lobby");
        other.subscribe("lobby");
        await seen("lobby", 2);
        const etid = other.gettid();
        watcher.observe(etid, note("etid"));
        watcher.create("barrier", note("barrier"));
        await seen("barrier");
        other.disconnect();
        await seen("lobby", 3); await seen("etid");
        watcher.unobserve("lobby");
        return [entries("lobby"), entries("etid")[0][0], entries("etid")[0][1] === etid];
    """) == [[[0, "lobby"], [1, "lobby"], [0, "lobby"]], 0, True]


def test_unsubscribe(run):
    assert run("""
        const client = await connected();
        client.subscribe("a", {onmsg: note("message"), onack: note("ack"), datatype: "text"});
        await seen("ack");
        client.unsubscribe("a");
        client.unsubscribe("never heard of");
        client.publish("1", "a");
        client.subscribe("b", {onmsg: note("message"), datatype: "text"});
        client.publish("2", "b");
        await seen("message");
        return entries("message").map(e => e[0]);
    """) == ["2"]


def test_order_and_number_of_many_messages(run):
    assert (
        run("""
        const client = await connected(), got = [];
        client.subscribe("n", {onmsg: n => got.push(n), datatype: "json"});
        for (let n = 0; n < 1000; n++) client.pubjson(n, "n");
        await until(() => got.length === 1000);
        return got.every((n, index) => n === index);
    """)
        is True
    )


def test_messages_leave_in_the_order_of_the_calls(run):
    assert run("""
        const client = await connected(), other = await connected();
        const settings = {onmsg: note("message"), datatype: "text"};
        other.subscribe("known", settings);
        other.subscribe("new", "sub", {...settings, onack: note("ack")});
        await seen("ack");
        await new Promise(done => setTimeout(done, 200));  // with workers: until the other one knows of it
        client.publish("0", "known");
        await seen("message");
        client.publish("1", "new", "sub");
        client.publish("2", "known");
        client.publish("3", other.gettid());
        other.onmsg = note("message");
        await seen("message", 4);
        return entries("message").map(e => show(e[0]));
    """) == ["0", "1", "2", [51]]


def test_what_waits_is_bounded(run):
    assert run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"));
        const accepted = Array.from({length: 10010}, () => client.publish("x", "flood"));
        client.subscribe("flood", {onmsg: note("message"), onack: note("ack")});
        await seen("ack");
        client.publish("y", "flood");
        await seen("message", 10001);
        return [accepted.filter(value => value).length, client.publish("y", "flood")];
    """) == [10000, True]


def test_wrong_uids_are_refused_at_once(run):
    for uid in ("short", "x" * 256):
        assert run("try { SMQ.Client({uid: argument}); } catch (error) { return error.message; }", uid).endswith(uid)


def test_credentials_that_do_not_fit(run):
    assert run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"));
        client.onauth = () => "x".repeat(256);
        client.onclose = note("close");
        await seen("close");
        return entries("close");
    """) == [["credentials over 255 bytes", False]]


def test_the_largest_message(run):
    assert run("""
        const client = await connected();
        client.subscribe("big", {onmsg: note("big")});
        client.publish(new Uint8Array(0xFFF0), "big");
        await seen("big");
        try {
            client.publish(new Uint8Array(0xFFF1), "big");
        } catch (error) {
            return [entries("big")[0][0].length, error.name];
        }
    """) == [0xFFF0, "RangeError"]


def test_onauth_and_a_refusal(run):
    word, can_reconnect, kind, address = run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"));
        client.onauth = (rnd, ip) => { note("auth")(rnd, ip); return "wrong"; };
        client.onclose = note("close");
        await seen("close");
        const [rnd, ip] = entries("auth")[0];
        return [...entries("close")[0], typeof rnd, ip];
    """)
    assert (word, can_reconnect, kind, address) == ("wrong password", False, "number", "127.0.0.1")


def test_a_disconnect_by_the_server_is_final(run):
    assert run("""
        const client = await connected();
        client.pubjson({disconnect: "lunch break"}, "control");
        await seen("close");
        return [entries("close")[0], client.gettid() === undefined];
    """) == [["lunch break", False], True]


def test_after_a_lost_connection_everything_works_again(run):
    assert run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"));
        client.onconnect = note("connect");
        client.onreconnect = note("reconnect");
        client.onclose = (message, canreconnect) => { note("close")(message, canreconnect); return 1; };
        client.subscribe("t", "s", {onmsg: note("message"), onack: note("ack"), datatype: "text"});
        client.subscribe("self", {onmsg: note("self"), datatype: "text"});
        client.observe("lobby-2", note("lobby"));
        client.create("made");
        await seen("lobby"); await seen("ack");
        client.pubjson({drop: true}, "control");
        await seen("close");
        client.publish("while away", "t", "s");
        await seen("reconnect"); await seen("message"); await seen("lobby", 2);
        client.publish("again", "t", "s");
        client.publish("me", client.gettid());
        await seen("message", 2); await seen("self");
        return [entries("close")[0], entries("message").map(e => e[0]),
                entries("ack").length, entries("connect").length, client.topic2tid("made") > 0];
    """) == [["connection closed", True], ["while away", "again"], 1, 1, True]


def test_cleanstart_forgets_everything(run):
    assert run("""
        const client = SMQ.Client(SMQ.wsURL("smq.lsp"), {cleanstart: true});
        client.onconnect = note("connect");
        client.onreconnect = note("reconnect");
        client.onclose = () => 1;
        client.subscribe("t", {onmsg: note("message")});
        client.create("made", note("ack"));
        await seen("ack");
        client.pubjson({drop: true}, "control");
        await seen("reconnect");
        return [client.topic2tid("made"), client.topic2tid("t"), entries("message")];
    """) == [None, None, []]


def test_disconnect_is_quiet_and_after_what_was_published(run):
    assert run("""
        const client = await connected(), other = await connected();
        other.subscribe("last words", {onmsg: note("message"), onack: note("ack"), datatype: "text"});
        await seen("ack");
        client.publish("good bye", "last words");
        client.disconnect();
        await seen("message");
        await until(() => client.gettid() === undefined);
        return [entries("message")[0][0], entries("close")];
    """) == ["good bye", []]


def test_errors_in_callbacks_do_not_stop_the_client(new_page, smqjs_server):
    page = new_page(f"{smqjs_server.url}/")
    page.evaluate(PAGE_FUNCTIONS)
    assert page.evaluate("""async () => {
        const complaints = [];
        console.error = error => complaints.push(error.message);
        const client = await connected();
        client.subscribe("bad", {onmsg: () => { throw new Error("mine"); }});
        client.subscribe("good", {onmsg: note("good")});
        client.publish("x", "bad");
        client.publish("y", "good");
        await seen("good");
        return complaints;
    }""") == ["mine"]


# ---- faults


def open_scripted(run, broker, returns="0"):
    run(
        f"window.client = SMQ.Client(argument);"
        f"client.onconnect = note('connect'); client.onreconnect = note('reconnect');"
        f"client.onclose = (message, canreconnect) => {{ note('close')(message, canreconnect); return {returns}; }};",
        broker.ws_url,
    )


def test_a_ping_is_answered(run):
    def script(conversation):
        conversation.accept()
        conversation.send(smq.PING)
        return conversation.receive()

    with ScriptedBroker(script) as broker:
        open_scripted(run, broker)
        run("await seen('close');")
        assert broker.wait_results(1) == [smq.PONG]


def test_the_connect_packet(run):
    with ScriptedBroker(lambda c: c.accept(seed=0xABCD)) as broker:
        run(
            "window.a = SMQ.Client(argument, {uid: 'u\u00fc1234', info: 'my browser'}); a.onconnect = note('connect');"
            "a.onauth = () => 's\u00f6cret'; window.b = SMQ.Client(argument); b.onconnect = note('connect');"
            "await seen('connect', 2);",
            broker.ws_url,
        )
        first, second = sorted(
            (smq.parse_connect(packet) for packet in broker.wait_results(2)), key=lambda c: c.info, reverse=True
        )
        assert first == ("u\u00fc1234".encode(), "s\u00f6cret".encode(), b"my browser", 0)
        assert second == (b"127.0.0.1-abcd", b"", b"", 0)


@pytest.mark.parametrize(("text", "can_reconnect"), [(b"reconnect", False), (b"sysshutdown", True), (b"", False)])
def test_only_a_restarting_server_is_retried(run, text, can_reconnect):
    def script(conversation):
        conversation.accept()
        conversation.send(smq.disconnect(text))
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        open_scripted(run, broker)
        assert run("await seen('close'); return entries('close');") == [[text.decode(), can_reconnect]]


@pytest.mark.parametrize(
    ("code", "message", "can_reconnect"),
    [(1, "protocol version not supported", False), (2, "server unavailable", True), (6, "access denied", False)],
)
def test_refusals_without_text_have_words(run, code, message, can_reconnect):
    def script(conversation):
        conversation.bootstrap()
        conversation.send(smq.init(1, "127.0.0.1"))
        conversation.receive()
        conversation.send(smq.connack(code, 0))

    with ScriptedBroker(script) as broker:
        open_scripted(run, broker)
        assert run("await seen('close'); return entries('close');") == [[message, can_reconnect]]


def test_no_reconnect_unless_onclose_returns_a_number(run):
    with ScriptedBroker(lambda c: c.accept()) as broker:
        for returns in ("0", "undefined", "true", "'1000'", "-5"):
            open_scripted(run, broker, returns)
        run("await seen('close', 5); await new Promise(done => setTimeout(done, 1400));")
        assert broker.connections == 5


def test_the_first_connection_is_retried_after_a_delay(run_in_trouble):
    run, moments = run_in_trouble, []

    def drop(conversation):
        moments.append(time.monotonic())
        conversation.read_head()
        conversation.raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")

    def accept(conversation):
        moments.append(time.monotonic())
        conversation.accept()
        conversation.wait_closed()

    with ScriptedBroker(drop, drop, accept) as broker:
        open_scripted(run, broker, "1")
        ends = run("await seen('connect'); return [entries('close'), entries('connect').length, entries('reconnect')];")
        assert ends == [[["cannot connect", True]] * 2, 1, []]
    pauses = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
    assert all(0.95 < pause < 2 for pause in pauses)


def test_pauses_are_spread(run_in_trouble):
    pauses = run_in_trouble("""
        const pauses = [];
        const setTimeoutOfTheBrowser = window.setTimeout;
        window.setTimeout = (fn, ms) => { if (ms > 1000) pauses.push(ms); return 0; };
        const clients = Array.from({length: 6}, () => SMQ.Client("ws://127.0.0.1:1/", {timeout: 500}));
        clients.forEach(client => { client.onclose = () => 8000; });
        for (let i = 0; i < 500 && pauses.length < 6; i++) await new Promise(done => setTimeoutOfTheBrowser(done, 10));
        window.setTimeout = setTimeoutOfTheBrowser;
        return pauses;
    """)
    assert len(set(pauses)) == 6
    assert all(6000 <= pause <= 10000 for pause in pauses)


def test_invalid_bytes_close_the_connection(new_page, smqjs_server):
    def script(conversation):
        conversation.accept()
        conversation.send(b"\x63rubbish")
        conversation.wait_closed()

    page = new_page(f"{smqjs_server.url}/")
    page.evaluate(PAGE_FUNCTIONS + "console.error = note('error'); null;")
    with ScriptedBroker(script) as broker:
        result = page.evaluate(
            "async url => { SMQ.Client(url).onclose = note('close'); await seen('close'); return entries('close'); }",
            broker.ws_url,
        )
    assert result == [["protocolerror", True]]
