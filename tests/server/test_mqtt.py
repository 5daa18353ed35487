"""The hub that takes the MQTT clients of a server: `--mqtt`, the option of hubs, and a hub of the server's own."""

from __future__ import annotations

import queue
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.conftest import Served
from tests.support.pki import Authority

TWO_HUBS = """
smq = require "smq.hub"
first = smq.create{name = "first"}
second = smq.create{name = "second"}
for name, hub in pairs{first = first, second = second} do
   hub:subscribe("ask", {onmsg = function() hub:publish(name, "answer") end})
end
"""


def answer(port: int) -> str:
    """Return which hub has answered an MQTT client."""
    sub = ["mosquitto_rr", "-p", str(port), "-t", "ask", "-e", "answer", "-m", "who", "-q", "1", "-W", "5"]
    return subprocess.run(sub, capture_output=True, text=True, timeout=20).stdout.strip()


def is_refused(port: int) -> bool:
    """Return whether an MQTT client can't connect."""
    return subprocess.run(["mosquitto_pub", "-p", str(port), "-t", "a", "-m", "b"], timeout=20).returncode != 0


def application(folder: Path, code: str = TWO_HUBS) -> Path:
    (folder / "house").mkdir(parents=True)
    (folder / "house" / ".preload").write_text(code)
    return folder / "house"


def test_no_hub_takes_mqtt_clients_by_default(tmp_path: Path, serve: Callable[..., Served]) -> None:
    assert is_refused(serve(application(tmp_path)).port)


def test_the_flag_alone_means_the_first_hub(tmp_path: Path, serve: Callable[..., Served]) -> None:
    assert answer(serve("--mqtt", application(tmp_path)).port) == "first"


def test_the_flag_behind_the_applications(tmp_path: Path, serve: Callable[..., Served]) -> None:
    assert answer(serve(application(tmp_path), "--mqtt").port) == "first"


def test_the_flag_names_a_hub(tmp_path: Path, serve: Callable[..., Served]) -> None:
    assert answer(serve("--mqtt", "second", application(tmp_path)).port) == "second"


def test_the_environment_names_a_hub(tmp_path: Path, serve: Callable[..., Served]) -> None:
    assert answer(serve(application(tmp_path), env={"SMQRT_MQTT__HUB": "second"}).port) == "second"


def test_the_option_of_a_hub(tmp_path: Path, serve: Callable[..., Served]) -> None:
    code = TWO_HUBS.replace('{name = "second"}', '{name = "second", mqtt = true}')
    assert answer(serve(application(tmp_path, code)).port) == "second"


def test_a_server_without_applications_is_an_mqtt_broker(tmp_path: Path, serve: Callable[..., Served]) -> None:
    port = str(serve("--mqtt", cwd=tmp_path).port)
    subprocess.run(["mosquitto_pub", "-p", port, "-q", "1", "-r", "-t", "a/b", "-m", "kept"], check=True, timeout=20)
    command = ["mosquitto_sub", "-p", port, "-t", "a/+", "-v", "-C", "1", "-W", "5"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20).stdout == "a/b kept\n"


def test_a_name_that_no_hub_has_makes_a_hub(tmp_path: Path, serve: Callable[..., Served]) -> None:
    port = serve("--mqtt", "devices", application(tmp_path)).port
    assert not is_refused(port)
    assert answer(port) == ""  # the hubs of the application have no MQTT clients


@pytest.mark.parametrize("path", ["/mqtt", "/mqtt/"])
def test_websockets_of_clients_that_know_no_page(tmp_path: Path, serve: Callable[..., Served], path: str) -> None:
    served = serve("--mqtt", application(tmp_path))
    client = paho.Client(CallbackAPIVersion.VERSION2, transport="websockets")
    client.ws_set_options(path)
    answers: queue.Queue[bytes] = queue.Queue()
    client.on_message = lambda client, data, message: answers.put(message.payload)
    client.on_connect = lambda client, *rest: client.subscribe("answer", 1)
    client.on_subscribe = lambda client, *rest: client.publish("ask", "who", 1)
    client.connect("127.0.0.1", served.port)
    client.loop_start()
    assert answers.get(timeout=20) == b"first"
    client.disconnect()
    client.loop_stop()


def test_the_address_for_websockets_without_one(tmp_path: Path, serve: Callable[..., Served]) -> None:
    served = serve("--mqtt", application(tmp_path))
    with pytest.raises(HTTPError, match="400") as caught:
        urlopen(f"{served.url}/mqtt")
    assert b"sub-protocol mqtt" in caught.value.read()
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{serve(application(tmp_path / 'other')).url}/mqtt")


def test_alpn(tmp_path: Path, serve: Callable[..., Served]) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.pair("server")
    served = serve("--mqtt", application(tmp_path), "--tls-port", "0", "--cert", cert, "--key", key)
    words = ["-p", str(served.tls_port), "--cafile", str(authority.path), "--insecure", "--tls-alpn", "mqtt"]
    words += ["-t", "ask", "-e", "answer", "-m", "who", "-q", "1", "-W", "10"]
    found = subprocess.run(["mosquitto_rr", *words], capture_output=True, text=True, timeout=20)
    assert found.stdout.strip() == "first"
