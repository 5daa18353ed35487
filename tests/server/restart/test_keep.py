"""Hubs with `keep`: an application starts again, and its clients stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.server.restart.hot import HotServed, application, heard
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]
LUA = """
local version = %d
smq = require "smq.hub".create {keep = true, onconnect = function(etid, info)
   if info.restored then smq:publish("restored " .. version, etid) end
end}
smq:subscribe("echo", {onmsg = function(data, etid) smq:publish(version .. data, etid) end})
smq:create("topic of version " .. version)
"""
PYTHON = """
from smqrt import hub
from smqrt.app import dir
version = b"%d"

def onconnect(etid, info, peer):
    if info["restored"]:
        smq.publish(b"restored " + version, etid)

smq = hub.create(keep=True, name="python", onconnect=onconnect)

@smq.on("echo")
def echo(message):
    message.reply(version + message.data)


def serve(request, path):
    if path == "python":
        smq.connect(request)
        return True
    return False

dir.setfunc(serve)
"""


def test_clients_stay_while_an_application_is_edited(serve_hot: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", LUA % 1)
    (app / ".preload.py").write_text(PYTHON % 1)
    served = serve_hot(app, "--reload", "--tls-port", "0")
    clients = [
        served.device(f"{kind}-{page}".encode(), kind, page)
        for page in ("/smq.lsp", "/python")
        for kind in ("raw", "ws", "tls", "wss")
    ]
    topics = {}
    for number, client in enumerate(clients):
        topics[client] = client.create(b"echo"), client.subscribe(b"news"), client.createsub(b"sub-%d" % number)
    half = wire.frame(bytes(12))
    clients[0].send_bytes(half[:3])
    (app / ".preload").write_text(LUA % 2 + "-- edited")
    (app / ".preload.py").write_text(PYTHON % 2 + "# edited")
    for client in clients:
        assert heard(client) == (client.etid, b"restored 2")
    for number, client in enumerate(clients[1:], 1):
        echo, news, sub = topics[client]
        client.publish(echo, b"x")
        assert heard(client) == (client.etid, b"2x")
        assert client.ask(Type.SUBSCRIBE, b"news").number == news
        assert client.ask(Type.CREATESUB, b"sub-%d" % number).number == sub
    clients[1].publish(topics[clients[1]][1], b"all")
    assert [heard(one)[1] for one in clients[:4]] == [b"all"] * 4

    (app / ".preload").write_text("this is no Lua")  # the file is looked at first: nothing stops
    served.wait_for("not restarted")
    (app / ".preload").write_text("error('at run time')")
    served.wait_for("failed: ")
    assert clients[0].until_end() == []  # its time is over
    seen = served.output.count("app app at /: ok")
    application(app, LUA % 3)
    wait_until(lambda: served.output.count("app app at /: ok") > seen, served.lines)
    again = served.device(b"again-1")
    assert again.subscribe(b"news")


def test_a_stopping_server_closes_all_clients(serve_hot: Serve, tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app", LUA % 1))
    client = served.device()
    served.end()
    assert client.until_end() == []
