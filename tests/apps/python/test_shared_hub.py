"""A hub that `.preload.py` makes, used by the Lua pages and the `.preload` of the same folder."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from smqrt import hub
from smqrt.apps.lua.api import smq_hub
from tests.apps.lua.app_server import AppServer
from tests.support.device import RAW, WS, Device, publish
from tests.support.waiting import let_others_run, wait_until

PYTHON = """
import gevent
from smqrt import hub

told = []

def authenticate(credentials, info):
    gevent.sleep(0.001)
    told.append((info.uid, info.arg, info.url))
    return 0

def onclose(etid, sock, peer, err, reason):
    gevent.sleep(0.001)
    told.append((peer.uid, reason))

def onpublish(data, ptid, tid, subtid, peer):
    gevent.sleep(0.001)
    return data != b"secret"

smq = hub.create(authenticate=authenticate, onclose=onclose, onpublish=onpublish)
other, number = hub.create(), 5
smq.onmsg(lambda data, ptid, tid, subtid: (gevent.sleep(0.001), told.append((data, ptid))))
"""
LUA = """
got, missing = {}, number
smq:subscribe("questions", {json = true, onmsg = function(data, ptid, tid, subtid)
  ba.sleep(1)
  got[#got + 1] = smq:tid2topic(tid) .. data.text
  smq:publish({answer = data.text}, ptid, subtid)
end})
smq:observe("lamp", function(subscribers) got[#got + 1] = "lamp " .. subscribers end)
"""
PAGE = "<?lsp app.smq:connect(request, 'door 2') ?>"


class Both:
    """A server with the application."""

    def __init__(self, folder: Path) -> None:
        self.server = AppServer(folder)
        self.half = smq_hub.install(self.server.vm, self.server.services, self.server.applications.exchanges)
        self.application = self.server.app({".preload.py": PYTHON, ".preload": LUA, "smq.lsp": PAGE}, "both")
        assert self.application.error is None, self.application.error
        self.devices: list[Device] = []

    @property
    def names(self) -> Any:
        scope: Any = self.server.services.scopes[self.application.number]
        return scope.names["app"]

    def device(self, uid: bytes, kind: str = RAW) -> Device:
        self.devices.append(Device(("127.0.0.1", self.server.port), kind))
        return self.devices[-1].start(target="/both/smq.lsp").connect(uid)

    def run(self, source: str) -> str:
        self.server.write("both", {"run.lsp": f"<?lsp local smq = app.smq {source} ?>"})
        answer = self.server.ask("/both/run.lsp")
        assert answer.status == 200, answer.text
        return answer.text.strip()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    made = Both(tmp_path)
    yield made
    for device in made.devices:
        device.close()
    made.application.unload()
    made.server.close()


@pytest.mark.parametrize("kind", [RAW, WS])
def test_a_page_connects_clients_to_the_hub_of_python(both: Both, kind: str) -> None:
    device = both.device(b"uid-a1", kind)
    assert both.names.told == [("uid-a1", "door 2", "/both/smq.lsp")]
    assert isinstance(both.names.smq.etid2peer(device.etid), hub.Peer)
    stid = device.createsub(b"text")
    device.publish(device.create(b"questions"), b'{"text":"why"}', stid)
    device.expect(publish(device.etid, 1, b'{"answer":"why"}', stid))
    device.publish(device.create(b"questions"), b"no JSON")
    wait_until(lambda: (b"no JSON", device.etid) in both.names.told, "the global handler of Python")
    device.subscribe(b"lamp")
    wait_until(
        lambda: both.run("response:write(table.concat(app.got, ','))") == "questionswhy,lamp 1", "both callbacks"
    )
    device.close()
    wait_until(lambda: ("uid-a1", "connection ended") in both.names.told or kind == WS, "onclose")


def test_the_methods_of_the_table(both: Both) -> None:
    device = both.device(b"uid-a1")
    tid = device.subscribe(b"news")
    facts = both.run(
        "local found, all = {}, {} "
        "for sock, peer in smq:peers() do found[#found + 1] = peer.uid .. peer.tid end "
        f"local peer = smq:etid2peer({device.etid}) "
        f"for _, fact in ipairs {{table.concat(found, ','), peer.uid, smq:sock2peer(peer.sock) == peer, "
        f"smq:topic2tid 'news', smq:gettid(), peer.topics[{tid}] == peer.sock, (peer.sock:peername()), "
        f"smq:tid2topic({tid}), smq:createsub('s', 9), smq:subtopic2tid 's', smq:tid2subtopic(9), "
        "(smq:queuesize()), smq:drops().unrouted, smq:journal() == nil, app.missing == nil} do "
        "all[#all + 1] = tostring(fact) end "
        "response:write(table.concat(all, ' '))"
    )
    both_peers = f"SMQ server client1,uid-a1{device.etid}"
    assert facts == f"{both_peers} uid-a1 true {tid} 1 true 127.0.0.1 news 9 9 s 200 0 true true"
    both.run("smq:publish('secret', 'news') smq:publish('open', 'news', 's')")
    device.expect(publish(tid, 1, b"open", 9))
    assert both.run(f"response:write(tostring(smq:pubon('you', {device.etid}, 1, 9)))") == "true"
    device.expect(publish(device.etid, 1, b"you", 9))
    assert both.run("local ok, text = pcall(smq.connect, smq, request, {}) response:write(text)").endswith(
        "bad argument #2 to 'connect' (nil, boolean, number or string expected, got table)"
    )
    both.run(f"smq:shutdown('bye', {device.etid})")
    wait_until(lambda: ("uid-a1", "sysshutdown") in both.names.told, "onclose")
    assert [session.uid for session in both.half.clients.sessions.values()] == [b"SMQ server client"], (
        "the client is forgotten"
    )


def test_python_controls_the_lifetime_of_the_hub(both: Both) -> None:
    smq = both.names.smq
    both.run("app.smq = nil app.other = nil collectgarbage() collectgarbage()")
    gc.collect()
    assert not smq.broker.closed
    both.application.reload()
    assert smq.broker.closed
    both.device(b"uid-a2")
    assert both.names.told == [("uid-a2", "door 2", "/both/smq.lsp")]
    both.run("smq:close()")
    assert both.names.smq.broker.closed


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Smq]:
    """A hub of a module outside of all applications, `shared_hub`, which outlives them."""
    module: Any = ModuleType("shared_hub")
    module.smq = hub.create()
    monkeypatch.setitem(sys.modules, "shared_hub", module)
    yield module.smq
    module.smq.close()


def load(server: AppServer, preload: str) -> Any:
    binding = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    application = server.app({".preload.py": "from shared_hub import smq", ".preload": preload}, "outside")
    assert application.error is None, application.error
    return binding, application


def test_hooks_do_not_grow_with_reloads(server: AppServer, shared: hub.Smq) -> None:
    def hooks() -> list[object]:
        mine = shared.broker.hooks
        return [mine.onclose, mine.onmoved, mine.onvanish]

    before = hooks()
    binding, application = load(server, "for sock, peer in smq:peers() do end")
    for _ in range(5):
        application.reload()
        assert application.error is None
    depths = []
    for hook in hooks():
        depth = 0
        while isinstance(hook, smq_hub.ForgettingHook):
            hook, depth = hook.inner, depth + 1
        depths.append(depth)
    assert depths == [1, 1, 1]
    application.unload()
    assert hooks() == before
    assert not binding.clients.sessions


def test_hooks_are_unwrapped_in_any_order(shared: hub.Smq) -> None:
    class Binding:
        def drop(self, number: int) -> None:
            pass

    before = shared.broker.hooks.onclose
    one, two, three = [smq_hub.PythonHub(cast(Any, Binding()), shared, "") for _ in range(3)]
    for made in (two, one, one, three):
        made.unload()
    assert shared.broker.hooks.onclose is before


@pytest.mark.parametrize("is_shared", [True, False])
def test_callbacks_of_lua_end_with_the_application(
    server: AppServer, shared: hub.Smq, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    binding = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    preload = """
        got = {}
        smq:observe("lamp", function(n) got[#got + 1] = n end)
        smq:observe(smq:create("heater"), function(n) got[#got + 1] = n end)
        smq:subscribe("news", {onmsg = function(data) got[#got + 1] = data end})
        smq:onmsg(function(data) got[#got + 1] = data end)
    """
    python = "from shared_hub import smq" if is_shared else "from smqrt import hub\nsmq = hub.create()"
    application = server.app({".preload.py": python, ".preload": preload}, "outside")
    assert application.error is None, application.error
    names: Any = server.services.scopes[application.number].names["app"]
    smq = names.smq
    smq.subscribe("lamp")
    smq.subscribe("heater")
    application.unload()
    if is_shared:
        smq.unsubscribe("lamp")
        smq.unsubscribe("heater")
        smq.publish("text", "news")
        smq.publish("text", smq.gettid())
        let_others_run()
    assert smq.broker.closed is not is_shared
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert binding is not None
