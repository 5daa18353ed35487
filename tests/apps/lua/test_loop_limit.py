"""`smqrt serve --lua-loop-s`: a real server ends the loops of one application and serves the others."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests

from tests.conftest import Served

Serve = Callable[..., Served]

PATIENCE_S = 60  # it is half a second of CPU time

PAGES = {
    "page": "<?lsp local n = 0\nwhile true do n = n + 1 end ?>",
    "timer": "<?lsp app.timer = ba.timer(function()\nwhile true do pcall(function() while true do end end) end end) "
    "app.timer:set(1) ?>set",
    "coroutine": "<?lsp local endless = function() ::a:: goto a end\n"
    "coroutine.wrap(function() while true do pcall(coroutine.wrap(endless)) end end)() ?>",
}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / (".preload" if name == "preload" else f"{name}.lsp")).write_text(text)
    return folder


def test_every_other_application_goes_on(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path / "apps" / "bad", **PAGES)
    write(tmp_path / "apps" / "well", index="<h1>well</h1>")
    served = serve(tmp_path / "apps", "--lua-loop-s", "0.5")
    session = requests.Session()
    for name in PAGES:
        answer = requests.get(f"{served.url}/bad/{name}.lsp", timeout=PATIENCE_S)
        assert answer.status_code == (200 if name == "timer" else 500)
        assert session.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
        assert served.wait_for(rf"\b{name}\.lsp:[12]: this ran for 0\.5 s without yielding", PATIENCE_S)
    assert session.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
    assert served.stop() == 0


GIVE_WAY = {
    "read": """<?lsp local sock, bytes = assert(ba.socket.connect("127.0.0.1", tonumber(request:data().port))), 0
        local clock = os.clock()
        repeat bytes = bytes + #assert(sock:read()) until os.clock() - clock > 1.2
        sock:close() print(bytes) ?>""",
    "write": """<?lsp local sock, bytes = assert(ba.socket.connect("127.0.0.1", tonumber(request:data().port))), 0
        local clock = os.clock()
        repeat assert(sock:write(("x"):rep(9000))) bytes = bytes + 9000 until os.clock() - clock > 1.2
        sock:close() print(bytes) ?>""",
    "publish": """<?lsp local smq, messages, clock = require "smq.hub".create(), 0, os.clock()
        repeat smq:publish("x", "topic") messages = messages + 1 until os.clock() - clock > 60
        print(messages) ?>""",
}


@contextmanager
def firehose() -> Iterator[int]:
    """A server on loopback that gives and takes as fast as it can; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_gush, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)


def _gush(listener: socket.socket) -> None:
    client, _ = listener.accept()
    client.setblocking(False)
    drop = bytes(65536)
    with client, suppress(OSError), selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            for _, ready in selector.select():
                if ready & selectors.EVENT_READ and not client.recv(1 << 20):
                    return
                if ready & selectors.EVENT_WRITE:
                    client.send(drop)


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_yielding_loop_continues_beside_others(serve: Serve, tmp_path: Path, how: str) -> None:
    """The socket always has something, or takes everything, and the loop computes for longer than the limit."""
    write(tmp_path / "apps" / "busy", **GIVE_WAY)
    write(tmp_path / "apps" / "well", index="<h1>well</h1>")
    served = serve(tmp_path / "apps", "--lua-loop-s", "0.5")
    answers: list[requests.Response] = []
    with firehose() as port:
        url = f"{served.url}/busy/{how}.lsp?port={port}"
        asks = threading.Thread(target=lambda: answers.append(requests.get(url, timeout=PATIENCE_S)))
        asks.start()
        beside = 0
        while asks.is_alive():
            assert requests.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
            beside += 1
        asks.join()
    assert answers[0].status_code == 200, answers[0].text
    assert int(answers[0].text) > 1_000_000
    assert beside > 5
    assert "without yielding" not in served.output


def test_a_loop_of_calls_without_yield_is_ended(serve: Serve, tmp_path: Path) -> None:
    served = serve(write(tmp_path / "busy", **GIVE_WAY), "--lua-loop-s", "0.5")
    assert requests.get(f"{served.url}/publish.lsp", timeout=PATIENCE_S).status_code == 500
    served.wait_for(r"\bpublish\.lsp:2: this ran for 0\.5 s without yielding", PATIENCE_S)


def test_an_application_that_loads_forever_fails_alone(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path / "apps" / "bad", preload="local n = 0\nwhile true do n = n + 1 end")
    write(tmp_path / "apps" / "well", index="<h1>well</h1>")
    served = serve(tmp_path / "apps", "--lua-loop-s", "0.5")
    assert requests.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
    served.wait_for(r"^app bad at /bad/: failed: bad/\.preload:2: this ran for 0\.5 s without yielding", PATIENCE_S)


def test_a_limit_that_is_none_is_refused(serve: Serve, tmp_path: Path) -> None:
    served = serve(tmp_path, "--lua-loop-s", "-1")
    served.wait_for("^Error: ", PATIENCE_S)
    assert served.wait() == 1
    assert served.output == "Error: --lua-loop-s: lua_loop_s must be a number of at least 0, not -1.0."
