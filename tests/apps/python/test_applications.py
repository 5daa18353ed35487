"""Python applications: `.preload.py` (issue 2; the same life as Lua's)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.apps.lua.app_server import AppServer
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.support.device import RAW_HEADERS, Device
from tests.support.waiting import wait_until

HELLO = """
from smqrt.http.tree import Directory

count = 0

def hello(request, relpath):
    global count
    count += 1
    if relpath == "pass":
        return False
    request.response.write(f"hello {relpath} {app.count} {app['count']}".encode())

greeter = Directory("hello")
greeter.setfunc(hello)
dir.insert(greeter)
assert app["dir"] is dir and app.io is io
assert io.read(".preload.py")

def onunload():
    import pathlib
    pathlib.Path(io.realpath("gone")).write_text("bye")
"""


def test_a_python_application_answers(server: AppServer):
    application = server.app({".preload.py": HELLO, "index.html": "static", "p.lsp": "<?lsp= type(app) ?>"}, "py")
    assert application.error is None
    assert server.ask("/py/hello/you").text == "hello you 1 1"
    assert server.ask("/py/hello/again").text == "hello again 2 2"
    assert server.ask("/py/hello/pass").status == 302
    assert server.ask("/py/").text == "static"
    assert server.ask("/py/p.lsp").text == "table"
    assert server.ask("/py/.preload.py").status == 404
    application.unload()
    assert (server.folder / "py" / "gone").read_text() == "bye"
    assert server.ask("/py/hello/you.txt").status == 404


def test_its_functions_may_block(server: AppServer):
    code = HELLO.replace("count += 1", "import gevent; gevent.sleep(0.01)")
    server.app({".preload.py": code})
    assert server.ask("/hello/x").text == "hello x 0 0"


DOCUMENTED_MQTT = """
import gevent
from smqrt import mqtt3c, mqttc
from smqrt.http.tree import Directory

log = []
mqtt, err = mqtt3c.connect("127.0.0.1", lambda *message: log.append(message), {"port": PORT})
assert mqtt, err
mqtt.subscribe("app", lambda code: sender.publish("app", "hello"))
sender, _ = mqttc.create("127.0.0.1", lambda *what: True, {"port": PORT})
gevent.spawn(lambda: log.append(mqtt.run()))

def onunload():
    mqtt.disconnect()
    sender.close()

shower = Directory("log")
shower.setfunc(lambda request, relpath: request.response.write(repr(log).encode()))
dir.insert(shower)
"""


@pytest.mark.servers
def test_the_documented_mqtt_modules_in_an_application(server: AppServer, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    application = server.app({".preload.py": DOCUMENTED_MQTT.replace("PORT", str(broker.port))}, "mq")
    assert application.error is None
    wait_until(lambda: server.ask("/mq/log/").text == "[('app', b'hello')]")
    application.unload()
    broker.stop()


def test_a_failing_python_application_names_file_and_line(server: AppServer, caplog):
    bad = server.app({".preload.py": "x = 1\n\ndef f():\n    return 1 / 0\n\nf()"}, "bad")
    assert bad.error is not None
    assert bad.error.startswith("bad/.preload.py:4: ZeroDivisionError: division by zero")
    assert "bad/.preload.py:4" in caplog.text
    syntax = server.app({".preload.py": "x = 1\nif x\n"}, "syntax")
    assert (syntax.error or "").startswith("syntax/.preload.py:2: SyntaxError")
    assert server.app({"index.html": "fine"}, "good").error is None
    assert server.ask("/bad/").status == 503


def test_reload_runs_the_new_code(server: AppServer):
    application = server.app({".preload.py": HELLO})
    server.write("", {".preload.py": HELLO.replace("hello {", "goodbye {")})
    application.reload()
    assert server.ask("/hello/x").text == "goodbye x 1 1"


def test_an_error_in_its_onunload_is_logged(server: AppServer, caplog):
    application = server.app({".preload.py": "def onunload():\n    raise OSError('stuck')"}, "app")
    application.unload()
    assert "app/.preload.py:2: OSError: stuck" in caplog.text


def test_both_kinds_in_one_folder(server: AppServer):
    application = server.app({".preload.py": HELLO, ".preload": "name = 'lua'", "p.lsp": "<?lsp= app.name ?>"})
    assert application.error is None
    assert server.ask("/p.lsp").text == "lua"
    assert server.ask("/hello/x").text == "hello x 1 1"


UNAME = """
from smqrt import hub

smq = hub.create(onconnect=lambda etid, info, peer: smq.publish([info.uname, info.session and info.session.id], etid))


def serve(request, relpath):
    if relpath == "login":
        request.login("ada")
        return True
    if relpath == "smq":
        smq.connect(request)
        return True
    return False


dir.setfunc(serve)
"""


def test_a_hub_has_user_and_session_of_the_page(server: AppServer) -> None:
    assert server.app({".preload.py": UNAME}).error is None
    cookie = server.ask("/login").headers["Set-Cookie"].partition(";")[0]
    session = cookie.partition("=")[2]
    for headers, told in ((f"Cookie: {cookie}\r\n", ["ada", session]), ("", [None, None])):
        device = Device(("127.0.0.1", server.port)).start(target="/smq", headers=RAW_HEADERS + headers)
        assert json.loads(device.connect(b"uid-a1").receive()[13:]) == told
        device.close()
