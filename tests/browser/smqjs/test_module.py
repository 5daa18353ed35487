"""/rtl/smq.mjs in a real browser: promises, loops over messages, requests and replies."""

from __future__ import annotations

import shutil

import pytest

from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.browser.smqjs.conftest import APP
from tests.conftest import REPOSITORY
from tests.support.scripted_broker import ScriptedBroker


def test_the_module_and_the_script_have_the_same_names(run_module):
    assert run_module("return [Object.keys(mod).sort(), Object.keys(SMQ).sort(), mod.Client === SMQ.Client];") == [
        *[["Client", "SmqClient", "SmqError", "utf8", "websocket", "wsURL"]] * 2,
        False,
    ]


def test_ready_and_states(run_module):
    assert run_module("""
        const client = new mod.SmqClient("smq.lsp", {onstate: note("onstate"), onconnect: note("connect")});
        const before = [client.state, client instanceof mod.SmqClient, client.gettid() === undefined];
        const stop = client.watchState(note("watched"));
        const etid = await client.ready;
        stop();
        const after = [client.state, etid === client.gettid(), await client.ready === etid, entries("connect").length];
        await client.close();
        return [before, after, client.state, client.closed, entries("onstate"), entries("watched")];
    """) == [
        ["connecting", True, True],
        ["online", True, True, 1],
        "offline",
        True,
        [["online"], ["offline"]],
        [["online"]],
    ]


def test_addresses(run_module, smqjs_server):
    assert run_module(
        """
        const urls = [argument, argument + "/smq.lsp", new URL(argument + "/smq.lsp"), "smq.lsp", "/smq.lsp"];
        return urls.map(url => {
            const client = new mod.SmqClient(url), address = client.getsock().url;
            client.disconnect();
            return address;
        });
    """,
        smqjs_server.url,
    ) == [  # fmt: skip
        smqjs_server.url.replace("http", "ws") + path for path in ("/", *["/smq.lsp"] * 4)
    ]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("{uid: 'short'}", "SMQ: a uid has 6 to 255 bytes: short"),
        ("{reconnectDelay: 0}", "SMQ: reconnectDelay is a number above 0, not 0"),
        ("{queueMessages: 'many'}", "SMQ: queueMessages is a number above 0, not many"),
        ("{ping: -1}", "SMQ: ping is a number of ms, 0 for no pings, not -1"),
        (
            "{queuePolicy: 'latest'}",
            'SMQ: queuePolicy is "newest" or "oldest", the messages that a full queue drops, not latest',
        ),
    ],
)
def test_wrong_options(run_module, option, error):
    assert run_module(
        f"try {{ new mod.SmqClient('smq.lsp', {option}); }} catch (error) {{ return [error.name, error.message]; }}"
    ) == ["RangeError", error]


def test_a_runtime_without_websockets(run_module):
    assert run_module("""
        const given = window.WebSocket;
        delete window.WebSocket;
        try {
            new mod.SmqClient("smq.lsp");
        } catch (error) {
            const client = new mod.SmqClient("smq.lsp", {WebSocket: given});
            return [mod.websocket(), error.message, await client.ready > 0];
        } finally {
            window.WebSocket = given;
        }
    """) == [
        False,
        "SMQ: no WebSocket here: use Node.js 22 or newer, or pass a class as the option WebSocket",
        True,
    ]


def test_the_page_of_the_manual(serve, new_page, tmp_path):
    """It sends a form, and shows what comes in a loop at its top level."""
    manual = (REPOSITORY / "smqrt/help/javascript.md").read_text("utf-8")
    text = manual.partition("<!-- hello/greetings.html -->\n")[2].partition("```")[0]
    (tmp_path / "index.html").write_text(text, "utf-8")
    shutil.copy(APP / ".preload.py", tmp_path)
    page = new_page(f"{serve(tmp_path).url}/")
    page.get_by_text("online").wait_for()
    page.get_by_label("Greeting").fill("<hello>")
    page.get_by_role("button").click()
    assert page.locator("li").first.text_content() == "<hello>"
    assert page.get_by_label("Greeting").input_value() == ""


WORKER = """
import {SmqClient} from "/rtl/smq.mjs";

const smq = new SmqClient("smq.lsp");
const stream = smq.messages("t");
smq.publish("from a worker", "t");
const {text} = (await stream.next()).value;
await smq.close();
postMessage(text);
"""


def test_a_worker_of_a_page_with_a_strict_policy(serve, new_page, tmp_path):
    """A worker has neither a window nor a document; the policy forbids inline scripts and eval."""
    policy = "<!doctype html><meta http-equiv=Content-Security-Policy content=\"default-src 'self'; img-src data:\">"
    (tmp_path / "index.html").write_text(
        f'{policy}<link rel="icon" href="data:,"><p></p><script type="module" src="page.mjs"></script>', "utf-8"
    )
    (tmp_path / "page.mjs").write_text(
        'new Worker("worker.mjs", {type: "module"}).onmessage = event => {'
        ' document.querySelector("p").textContent = event.data; };',
        "utf-8",
    )
    (tmp_path / "worker.mjs").write_text(WORKER, "utf-8")
    shutil.copy(APP / ".preload.py", tmp_path)
    new_page(f"{serve(tmp_path).url}/").get_by_text("from a worker").wait_for()


# ---- promises of names and subscriptions


def test_numbers_as_promises(run_module):
    assert run_module("""
        const client = opened();
        const [tid, created, both, sub] = await Promise.all([client.subscribe("a"), client.create("a"),
            client.create("b", "s"), client.createsub("s")]);
        const denied = await Promise.all([client.subscribe("secret"), client.create("secret"),
            client.createsub("secret"), client.subscribe("a", "secret")]);
        return [tid === client.topic2tid("a"), created === tid, both === client.topic2tid("b"),
                sub === client.subtopic2tid("s"), denied];
    """) == [True, True, True, True, [0, 0, 0, 0]]


def test_numbers_end_with_the_client(run_module):
    assert run_module("""
        const client = opened({timeout: 300}, argument), waiting = [client.subscribe("a"), client.create("b")];
        client.disconnect();
        return Promise.all([...waiting, client.subscribe("c"), client.createsub("d")]);
    """, "ws://127.0.0.1:1/") == [0, 0, 0, 0]  # fmt: skip


def test_topics_are_names_or_numbers(run_module):
    """A message for another topic would wait for its number in front of all others."""
    assert run_module("""
        const client = await online();
        return [undefined, null, {}].map(topic => {
            try { client.publish("x", topic); } catch (error) { return [error.name, error.message, client.backlog]; }
        }).concat([await failure((async () => client.publish("x", "t", {}))())]);
    """) == [
        *[["TypeError", f"SMQ: a topic is a name or a number, not {one}", 0] for one in ("undefined", "null")],
        ["TypeError", "SMQ: a topic is a name or a number, not [object Object]", 0],
        ["TypeError", None, "SMQ: a sub-topic is a name or a number, not [object Object]"],
    ]


# ---- loops over messages


def test_a_loop_has_all_messages_in_order(run_module):
    assert run_module("""
        const client = opened(), got = [];
        const stream = client.messages("n");
        for (let n = 0; n < 500; n++) client.pubjson({n}, "n");
        for await (const message of stream) {
            got.push(message.json.n);
            if (got.length === 500) break;
        }
        return [got.every((n, index) => n === index), stream.dropped];
    """) == [True, 0]


def test_what_a_message_has(run_module):
    assert run_module("""
        const client = await online();
        const stream = client.messages("t");
        client.publish(new Uint8Array([226, 130, 172]), "t", "s");
        client.publish(new Uint8Array([255]).buffer, "t");
        const [one, two] = [(await stream.next()).value, (await stream.next()).value];
        let error;
        try { two.text; } catch (thrown) { error = thrown; }
        return [one.text, show(one.data), one.topic, one.subtopic, one.subtid === client.subtopic2tid("s"),
                one.tid === client.topic2tid("t"), one.etid === client.gettid(), two.subtid, two.subtopic, error.name];
    """) == ["€", [226, 130, 172], "t", "s", True, True, True, 0, None, "TypeError"]


def test_loops_and_handlers_of_one_topic_each_have_all(run_module):
    assert run_module("""
        const client = await online({onmsg: note("general")});
        const [first, second] = [client.messages("t"), client.messages("t")];
        client.publish("1", "t");
        const before = [await take(first, 1), await take(second, 1)];
        client.subscribe("t", {onmsg: note("handler"), datatype: "text"});
        client.publish("2", "t");
        const together = [await take(first, 1), await take(second, 1)];
        await first.return();
        client.publish("3", "t");
        const rest = await take(second, 1);
        await second.return();
        const isHandled = await isSubscribed(client, "t");
        client.unsubscribe("t");
        return [before, together, rest, entries("handler").map(e => e[0]), entries("general"), isHandled,
                await isSubscribed(client, "t")];
    """) == [[["1"], ["1"]], [["2"], ["2"]], ["3"], ["2", "3"], [], True, False]


@pytest.mark.parametrize("end", ["await stream.return()", "client.unsubscribe('t')", "controller.abort()"])
def test_the_subscription_ends_with_the_loop(run_module, end):
    assert run_module(f"""
        const client = await online(), controller = new AbortController();
        const stream = client.messages("t", {{signal: controller.signal}});
        const accepted = await stream.subscribed, before = await isSubscribed(client, "t");
        {end};
        return [accepted, before, await isSubscribed(client, "t"), await client.subscribe("t") > 0];
    """) == [True, True, False, True]


def test_subtopics_and_own_messages(run_module):
    assert run_module("""
        const client = await online();
        const light = client.messages("room", {subtopic: "light"}), all = client.messages("room");
        const own = client.messages("self");
        client.publish("1", "room", "heat");
        client.publish("2", "room", "light");
        client.publish("3", "room");
        client.publish("4", "self");
        return [await take(light, 1), await take(all, 3), await take(own, 1), await own.subscribed,
                (await Promise.race([light.next(), client.createsub("x").then(() => "none")]))];
    """) == [["2"], ["1", "2", "3"], ["4"], True, "none"]


def test_what_waits_for_a_loop_is_bounded(run_module):
    assert run_module("""
        const client = await online(), stream = client.messages("t", {limit: 3});
        const big = client.messages("big", {limit: 1e9}), barrier = client.messages("barrier");
        for (let n = 0; n < 10; n++) client.publish(String(n), "t");
        for (let n = 0; n < 300; n++) {
            client.publish(new Uint8Array(65000), "big");
            if (n % 10 !== 9) continue; // what is on its way fits into the send queue of the hub
            client.publish("all before it have come", "barrier");
            await barrier.next();
        }
        return [await take(stream, 3), stream.dropped, big.dropped];
    """) == [["7", "8", "9"], 7, 300 - (16 << 20) // 65000]
    error = "const client = opened(); try { client.messages('t', {limit: 0}); } catch (error) { return error.message; }"
    assert run_module(error) == "SMQ: the limit of messages() is a number from 1, not 0"


def test_an_abort_ends_a_loop_with_its_reason(run_module):
    assert run_module("""
        const client = await online(), controller = new AbortController();
        const stream = client.messages("t", {signal: controller.signal});
        const reading = failure(stream.next()), second = stream.next();
        controller.abort(new RangeError("enough"));
        const late = client.messages("t", {signal: controller.signal});
        return [await reading, await second, await stream.next(), await failure(late.next()), await late.subscribed];
    """) == [
        ["RangeError", None, "enough"],
        *[{"value": None, "done": True}] * 2,
        ["RangeError", None, "enough"],
        False,
    ]


@pytest.mark.parametrize("stream", ["'secret'", "'open', {subtopic: 'secret'}"])
def test_a_denied_topic_ends_its_loop(run_module, stream):
    assert run_module(f"""
        const client = await online(), stream = client.messages({stream});
        const errors = [await failure(stream.next()), await stream.next()];
        return [errors, await isSubscribed(client, "open")];
    """) == [[["SmqError", "denied", "the broker denied secret"], {"value": None, "done": True}], False]


def test_a_loop_goes_on_after_a_lost_connection(run_module):
    assert run_module("""
        const client = await online({onreconnect: note("reconnect")}), stream = client.messages("t", {subtopic: "s"});
        client.publish("1", "t", "s");
        const first = await take(stream, 1);
        client.pubjson({drop: true}, "control");
        await seen("reconnect");
        client.publish("2", "t", "s");
        return [first, await take(stream, 1)];
    """) == [["1"], ["2"]]


def test_cleanstart_ends_loops(run_module):
    assert run_module("""
        const client = await online({cleanstart: true}), stream = client.messages("t");
        await stream.subscribed;
        client.pubjson({drop: true}, "control");
        const error = await failure(stream.next());
        await client.ready;
        return [error, await isSubscribed(client, "t")];
    """) == [["SmqError", "lost", "the connection was lost (cleanstart)"], False]


def test_the_end_of_the_client_ends_loops(run_module):
    assert run_module("""
        const [own, other] = [await online(), await online()];
        const streams = [own.messages("t"), other.messages("t")];
        await Promise.all(streams.map(stream => stream.subscribed));
        own.publish("last", "t");
        const got = await take(streams[1], 1);
        await own.close();
        other.pubjson({disconnect: "lunch break"}, "control");
        const ends = [await take(streams[0], 1), await streams[0].next(), await failure(streams[1].next())];
        return [got, ends, await streams[1].next(), await failure(own.messages("t").next())];
    """) == [
        ["last"],
        [["last"], {"value": None, "done": True}, ["SmqError", "closed", "the client has ended: lunch break"]],
        {"value": None, "done": True},
        ["SmqError", "closed", "the client has ended: disconnected"],
    ]


# ---- requests


def test_requests_and_replies(run_module):
    assert run_module("""
        const [server, caller] = [await online(), await online({onmsg: note("general")})];
        caller.subscribe("self", {onmsg: note("own"), datatype: "text"});
        const waiting = [];
        (async () => { for await (const message of server.messages("self")) waiting.push(message); })();
        const requests = [caller.request(server.gettid(), [2, 40]), caller.request(server.gettid(), "text"),
                          caller.request(server.gettid(), new Uint8Array([255]))];
        await until(() => waiting.length === 3);
        waiting[2].reply(waiting[2].data);
        waiting[1].reply(waiting[1].text + "!");
        waiting[0].reply({sum: waiting[0].json[0] + waiting[0].json[1]});
        server.publish("no reply", caller.gettid());
        const [sum, text, bytes] = await Promise.all(requests);
        await seen("own");
        return [sum.json, text.text, show(bytes.data), sum.etid === server.gettid(), entries("own").map(e => e[0]),
                entries("general")];
    """) == [{"sum": 42}, "text!", [255], True, ["no reply"], []]


def test_requests_that_fail(run_module):
    assert run_module("""
        const [silent, caller] = [await online(), await online()], controller = new AbortController();
        silent.subscribe("self", {onmsg: note("got")});
        const to = silent.gettid(), aborted = failure(caller.request(to, "x", {signal: controller.signal}));
        await seen("got");
        controller.abort();
        const late = failure(caller.request(to, "x", {timeout: 30}));
        const lost = failure(caller.request(to, "x"));
        await seen("got", 3);
        await late;
        caller.pubjson({drop: true}, "control");
        const results = [await aborted, await failure(caller.request(to, "x", {signal: controller.signal})), await late,
            await lost, await failure(caller.request("topic", "x")),
            await failure(caller.request(to, new Uint8Array(70000)))];
        await caller.ready;
        const open = failure(caller.request(to, "x"));
        await seen("got", 4);
        caller.pubjson({disconnect: "over"}, "control");
        return [...results, await open, await failure(caller.request(to, "x"))].map(
            ([name, code, text]) => [code, text.replace(/from \\d+/, "from N")]);
    """) == [
        [20, "signal is aborted without reason"],
        [20, "signal is aborted without reason"],
        ["timeout", "no reply from N in 30 ms"],
        ["lost", "the connection was lost before the reply"],
        [None, "SMQ: a request goes to an etid, a number, not topic"],
        [None, "SMQ: a message has at most 65520 bytes, not 70000"],
        ["lost", "the connection was lost before the reply"],
        ["closed", "the client has ended: over"],
    ]


def test_late_and_foreign_replies_are_no_replies(run_module):
    """A reply that comes too late is discarded; one from another client is an ordinary message."""

    def script(conversation):
        conversation.accept(etid=5)
        first, second = conversation.receive(), conversation.receive()
        for ptid, packet, text in [(8, second, b"foreign"), (7, first, b"late"), (7, second, b"right")]:
            number = int.from_bytes(packet[9:13], "big")
            conversation.send(smq.publish_frame(5, ptid, number, text)[2:])
        conversation.wait_closed()

    with ScriptedBroker(script) as broker:
        assert run_module("""
            const client = opened({onmsg: note("general")}, argument);
            await client.ready;
            const first = await failure(client.request(7, "1", {timeout: 1}));
            const reply = await client.request(7, "2");
            const general = entries("general").map(([data, ptid]) => [String.fromCharCode(...data), ptid]);
            return [first[1], reply.text, general];
        """, broker.ws_url) == ["timeout", "right", [["foreign", 8]]]  # fmt: skip


def test_a_request_waits_for_the_connection(run_module_in_trouble):
    """One that ends before it was sent leaves the queue."""

    def answers(conversation):
        conversation.accept(etid=5)
        packet = conversation.receive()
        assert packet[0] == Type.PUBLISH
        conversation.send(smq.publish_frame(5, 7, int.from_bytes(packet[9:13], "big"), packet[13:])[2:])
        conversation.wait_closed()

    with ScriptedBroker(lambda c: c.read_head(), answers) as broker:
        assert run_module_in_trouble("""
            const client = opened({reconnectDelay: 200, onclose: note("close")}, argument);
            await seen("close");
            const [gone, stays] = [failure(client.request(7, "gone", {timeout: 5})), client.request(7, "stays")];
            const before = client.backlog;
            await gone;
            return [before, client.backlog, client.backlogBytes, (await stays).text];
        """, broker.ws_url) == [2, 1, 5, "stays"]  # fmt: skip


def test_open_requests_are_bounded(run_module):
    with ScriptedBroker(lambda c: (c.accept(), c.wait_closed())) as broker:
        assert run_module("""
            const controller = new AbortController(), client = opened({signal: controller.signal}, argument);
            const kinds = new Map(), count = kind => kinds.set(kind, (kinds.get(kind) || 0) + 1);
            await client.ready;
            const all = Array.from({length: 10005}, () => client.request(7, "x").catch(error => count(error.code)));
            await new Promise(done => setTimeout(done));
            const full = kinds.get("full");
            controller.abort();
            await Promise.all(all);
            return [full, [...kinds]];
        """, broker.ws_url) == [5, [["full", 5], ["closed", 10000]]]  # fmt: skip
