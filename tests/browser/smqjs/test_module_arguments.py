"""Arguments of /rtl/smq.mjs in a real browser. Wrong ones are errors at once."""

from __future__ import annotations

import pytest

from smqrt.server.javascript_client import client_scripts

NOT_BYTES = "SMQ: text, bytes or an array of bytes is needed, not {}; pubjson sends other values as JSON"
NO_NAME = "SMQ: a {} is a name or a number, not {}"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("client.publish({celsius: 21}, 't')", ["TypeError", NOT_BYTES.format("object")]),
        ("client.publish(21.5, 't')", ["TypeError", NOT_BYTES.format("number")]),
        ("client.publish(null, 't')", ["TypeError", NOT_BYTES.format("null")]),
        ("client.pubjson(undefined, 't')", ["TypeError", "SMQ: undefined cannot be sent as JSON"]),
        ("await client.request(1, () => 0)", ["TypeError", "SMQ: function cannot be sent as JSON"]),
        ("client.messages(undefined)", ["TypeError", NO_NAME.format("topic", "undefined")]),
        ("client.messages('t', {subtopic: {}})", ["TypeError", NO_NAME.format("sub-topic", "[object Object]")]),
        ("client.observe(null, () => 0)", ["TypeError", NO_NAME.format("topic", "null")]),
        ("await client.subscribe(undefined)", ["TypeError", NO_NAME.format("topic", "undefined")]),
        ("await client.subscribe('t', Symbol('x'))", ["TypeError", NO_NAME.format("sub-topic", "Symbol(x)")]),
        ("await client.create(true)", ["TypeError", NO_NAME.format("topic", "true")]),
        (
            "client.messages('\u20ac'.repeat(21843))",
            ["RangeError", "SMQ: a topic has at most 65527 bytes, not 65529"],
        ),
    ],
)
def test_wrong_arguments(run_module, call, error):
    """The client goes on, and has sent nothing."""
    assert run_module(f"""
        const client = opened();
        try {{
            {call};
        }} catch (error) {{
            return [error.name, error.message, client.backlog, await client.ready > 0];
        }}
    """) == [*error, 0, True]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("{uid: 12345678}", ["TypeError", "SMQ: a uid is text, not number: 12345678"]),
        ("{info: 'x'.repeat(65001)}", ["RangeError", "SMQ: info has at most 65000 bytes, not 65001"]),
    ],
)
def test_wrong_names_of_a_client(run_module, options, error):
    assert run_module(f"try {{ opened({options}); }} catch (error) {{ return [error.name, error.message]; }}") == error


def test_the_longest_name_and_the_longest_info(run_module):
    assert run_module("""
        const client = await online({info: "x".repeat(65000), uid: "u".repeat(255), onauth: () => "c".repeat(255)});
        const stream = client.messages("n".repeat(65527));
        return [await stream.subscribed, client.state];
    """) == [True, "online"]


def test_views_are_sent_as_the_bytes_they_have(run_module):
    """Also those of a buffer of another frame, which is no instance of this frame's ArrayBuffer."""
    assert run_module("""
        const client = await online(), stream = client.messages("t"), {buffer} = new Uint8Array([0, 1, 2, 3, 4]);
        const frame = document.body.appendChild(document.createElement("iframe")).contentWindow;
        const foreign = new frame.ArrayBuffer(2);
        const data = [new DataView(buffer, 1, 3), new Uint16Array([0x201]), buffer, foreign, [7, 8]];
        data.forEach(one => client.publish(one, "t"));
        const received = [];
        while (received.length < data.length) received.push(show((await stream.next()).value.data));
        return received;
    """) == [[1, 2, 3], [1, 2], [0, 1, 2, 3, 4], [0, 0], [7, 8]]


@pytest.mark.parametrize(
    ("onauth", "reported"),
    [
        ("() => { throw new Error('no token'); }", "no token"),
        ("() => ({user: 'me'})", NOT_BYTES.format("object")),
        ("async () => ({user: 'me'})", NOT_BYTES.format("object")),
    ],
)
def test_an_onauth_that_fails_ends_the_client(run_module, onauth, reported):
    """It must not connect with empty credentials."""
    assert run_module(f"""
        const reports = [], {{error}} = console;
        console.error = one => reports.push(one.message);
        const reason = await opened({{onauth: {onauth}}}).waitClosed();
        console.error = error;
        return [reason, reports];
    """) == ["onauth failed", [reported]]


def test_waiting_with_an_aborted_signal(run_module):
    """It is an error in every state of the client."""
    assert run_module("""
        const client = await online(), signal = AbortSignal.abort(new RangeError("enough"));
        const connected = await failure(client.waitConnected({signal}));
        await client.close();
        return [connected, await failure(client.waitClosed({signal})), await client.waitClosed()];
    """) == [*[["RangeError", None, "enough"]] * 2, "disconnected"]


def test_a_page_without_a_host_needs_an_address(new_page, tmp_path):
    """A page that is opened as a file, for example."""
    script = client_scripts().read("smq.js").decode()
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><script>{script}</script>", "utf-8")
    page = new_page((tmp_path / "page.html").as_uri())
    assert page.evaluate("() => { try { SMQ.wsURL('smq.lsp'); } catch (error) { return error.message; } }") == (
        "SMQ: a page of file: has no host: give the client a URL"
    )
