"""A page with /rtl/smq.js from a running server, whose functions tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WAIT_MS, Served, note_errors

APP = Path(__file__).parent / "app"

PAGE_FUNCTIONS = """
window.log = [];
window.note = name => (...args) => { log.push([name, ...args.map(show)]); };
window.show = value => value instanceof Uint8Array ? Array.from(value) : value;
window.until = async condition => {
    for (let i = 0; i < 1000; i++) {
        if (condition()) return true;
        await new Promise(done => setTimeout(done, 5));
    }
    throw new Error("waited in vain for " + condition + "; log: " + JSON.stringify(log));
};
window.entries = name => log.filter(entry => entry[0] === name).map(entry => entry.slice(1));
window.seen = (name, count = 1) => until(() => entries(name).length >= count);
window.connected = async opt => {
    const client = SMQ.Client(SMQ.wsURL("smq.lsp"), opt);
    client.onconnect = note("connect");
    client.onclose = note("close");
    await seen("connect", entries("connect").length + 1);
    return client;
};
null;
"""


@pytest.fixture(scope="session")
def smqjs_server():
    served = Served(APP)
    yield served
    served.stop()


@pytest.fixture(scope="session")
def window(chromium):
    """A window with a list of the errors in it; to load a page in it costs half the CPU time of another window."""
    context = chromium.new_context()
    page, troubles = context.new_page(), []
    page.set_default_timeout(WAIT_MS)
    note_errors(page, troubles)
    yield page, troubles
    context.close()


@pytest.fixture
def page(smqjs_server, window):
    page, troubles = window
    troubles.clear()
    page.goto(f"{smqjs_server.url}/")
    page.evaluate(PAGE_FUNCTIONS)
    yield page
    page.goto("about:blank")  # its connections end
    assert not troubles, f"the browser reported errors: {troubles}"


@pytest.fixture
def run_in_trouble(chromium, smqjs_server):
    """As `run`, in a page whose failed connections, which the browser reports as errors, are the subject."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{smqjs_server.url}/")
    page.evaluate(PAGE_FUNCTIONS)
    yield lambda body, argument=None: page.evaluate("async argument => {" + body + "}", argument)
    context.close()


@pytest.fixture
def run(page):
    """Run the body of an async function in the page; `connected()`, `note`, `seen`, `entries` and `log` are there."""
    return lambda body, argument=None: page.evaluate("async argument => {" + body + "}", argument)


MODULE_FUNCTIONS = """async () => {
    window.mod = await import("/rtl/smq.mjs");
    window.opened = (opt, url) => new mod.SmqClient(url || "smq.lsp", {reconnectDelay: 10, ...opt});
    window.online = async opt => {
        const client = opened(opt);
        await client.ready;
        return client;
    };
    window.failure = promise => promise.then(() => "no error", error => [error.name, error.code, error.message]);
    window.isSubscribed = async (client, topic) => { // as the broker sees it; also the end of earlier requests
        const count = await new Promise(resolve => client.observe(topic, resolve));
        client.unobserve(topic);
        return count > 0;
    };
    window.take = async (stream, count) => {
        const texts = [];
        while (texts.length < count) texts.push((await stream.next()).value.text);
        return texts;
    };
}"""


@pytest.fixture
def run_module(page):
    """As `run`, with the module `/rtl/smq.mjs` as `mod`, and `opened`, `online`, `failure`, `isSubscribed`, `take`."""
    page.evaluate(MODULE_FUNCTIONS)
    return lambda body, argument=None: page.evaluate("async argument => {" + body + "}", argument)


@pytest.fixture
def run_module_in_trouble(run_in_trouble):
    """As `run_module`, in a page whose failed connections are the subject."""
    run_in_trouble(f"await ({MODULE_FUNCTIONS})();")
    return run_in_trouble
